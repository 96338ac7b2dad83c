"""FedRoD: rounds by hand, its limit with batch statistics and dropout, and private gradients."""

import jax
import numpy as np
import pytest
import toys
from by_hand import by_hand
from networks import BODY, HEAD, OPTIMIZER, RATE, gradient, logits, row, softmax, step

from pfljax.contract.types import Ledger
from pfljax.local.privacy import Privacy

EPOCHS = 3
FEDERATION = toys.make_federation((2, 5, 1, 3))


def play(name="fedrod", rounds=3, hyperparameters=None, federation=FEDERATION, **options):
    """(problem, algorithm, states, records)."""
    return toys.play(
        name, federation, rounds, OPTIMIZER, hyperparameters, **{"hidden": (3,)} | options
    )[1:]


def train_head(generic, own, x, y):
    """A step of a personal head on top of a fixed generic model."""
    slopes = gradient({BODY: generic[BODY], HEAD: own}, x, y, logits(generic, x))
    return step({HEAD: own}, slopes, RATE, [HEAD])[HEAD]


def predict(generic, own, x):
    return softmax(logits(generic, x) + logits({BODY: generic[BODY], HEAD: own}, x))


def fedrod(balance):
    """The generic model trains on the balanced loss, and each head beside it on its own."""

    def reference(rounds):
        theta = row(rounds.states[0].models, 0)
        heads = [row(rounds.states[0].rows.params[HEAD], k) for k in rounds.clients]
        for _ in rounds:
            trained = []
            losses = []
            for k in rounds.clients:
                x, y = rounds.examples(k)
                count = np.bincount(y, minlength=3)
                shift = balance * np.log(np.maximum(count, np.finfo(np.float32).tiny))
                generic = theta
                values = []
                for _ in range(rounds.epochs):
                    values.append(-np.log(predict(generic, heads[k], x)[range(len(y)), y]).mean())
                    heads[k] = train_head(generic, heads[k], x, y)
                    generic = step(generic, gradient(generic, x, y, shift), RATE)
                trained.append(generic)
                losses.append(np.mean(values))
            theta = rounds.mean(trained)
            x = np.float64(rounds.federation.test.x[0])
            yield {
                "models": [theta],
                f"rows.params.{HEAD}": heads,
                "record.train_loss": np.average(losses, weights=rounds.sizes),
                "probabilities": [predict(theta, head, x) for head in heads],
            }

    return reference


@pytest.mark.parametrize("balance", [1.0, 0.4])
def test_rounds_by_hand(balance):
    rounds = by_hand(
        "fedrod", fedrod(balance), hyperparameters={"balance": balance}, hidden=(3,), epochs=EPOCHS
    )
    assert set(jax.tree.leaves(rounds.states[-1].rows.params[BODY])) == set()
    assert np.ptp(rounds.probabilities(), axis=0).max() > 0.1


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(toys.Dropped, marks=pytest.mark.long),
        pytest.param(toys.Normalized, marks=pytest.mark.slow),
    ],
)
def test_without_balance_the_generic_model_is_fedavg_s(model):
    """With mini-batches, dropout and batch statistics."""
    options = {"model": model, "batch_size": 2, "epochs": 2}
    found = play(hyperparameters={"balance": 0.0}, **options)
    wanted = play("fedavg", **options)
    toys.assert_trees_close(found[2][-1].models, wanted[2][-1].models, rtol=1e-5, atol=1e-6)


def test_private_gradients_are_clipped_part_by_part():
    """One example, a small norm, no noise: the generic model and the head each move by the rate times the norm."""
    federation = toys.make_federation((1, 1))
    norm = 0.01
    # Without balancing: the balanced loss of a client with a single class is 0.
    _, algorithm, states, _ = play(
        rounds=1,
        hyperparameters={"balance": 0.0},
        privacy=Privacy(clip_norm=norm),
        federation=federation,
    )
    assert algorithm.ledger == Ledger(2, 1, "a client's class counts, which balance its loss")
    moved = jax.tree.map(np.subtract, states[1].rows.params, states[0].rows.params)
    for k in range(2):
        size = np.sqrt(sum(np.square(leaf[k]).sum() for leaf in jax.tree.leaves(moved)))
        assert size == pytest.approx(RATE * norm, rel=1e-3)
    moved = jax.tree.leaves(jax.tree.map(np.subtract, states[1].models, states[0].models))
    assert 0 < np.sqrt(sum(np.square(leaf).sum() for leaf in moved)) <= RATE * norm * 1.001
