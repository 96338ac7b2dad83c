"""FedRoD: rounds by hand, its limit, batch statistics, dropout and private gradients, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from networks import BODY, HEAD, examples, features, gradient, logits, mean, row, softmax, step

from pfljax.contract.types import Ledger
from pfljax.evaluation import metrics
from pfljax.local.privacy import Privacy

SIZES, RATE, EPOCHS = (2, 5, 1, 3), 0.3, 3
FEDERATION = toys.make_federation(SIZES)


def play(name="fedrod", rounds=3, knobs=None, federation=FEDERATION, **options):
    """(problem, algorithm, states, records)."""
    return toys.play(name, federation, rounds, optax.sgd(RATE), knobs, **{"hidden": (3,)} | options)[1:]


def train_head(generic, own, x, y):
    """A step of a personal head on top of a fixed generic model."""
    slopes = gradient({BODY: generic[BODY], HEAD: own}, x, y, logits(generic, x))
    return step({HEAD: own}, slopes, RATE, [HEAD])[HEAD]


def predict(generic, own, x):
    return softmax(logits(generic, x) + logits({BODY: generic[BODY], HEAD: own}, x))


@pytest.mark.slow
@pytest.mark.parametrize("balance", [1.0, 0.4])
def test_rounds_by_hand(balance):
    problem, algorithm, states, records = play(knobs={"balance": balance}, epochs=EPOCHS)
    theta = row(states[0].models, 0)
    heads = [row(states[0].clients.own.model[HEAD], k) for k in range(4)]
    for state, record in zip(states[1:], records, strict=True):
        trained, losses = [], []
        for k in range(4):
            x, y = examples(FEDERATION, k)
            count, generic, of_steps = np.bincount(y, minlength=3), theta, []
            shift = balance * np.log(np.maximum(count, np.finfo(np.float32).tiny))
            for _ in range(EPOCHS):
                of_steps.append(-np.log(predict(generic, heads[k], x)[range(len(y)), y]).mean())
                heads[k], generic = (
                    train_head(generic, heads[k], x, y),
                    step(generic, gradient(generic, x, y, shift), RATE),
                )
            trained.append(generic)
            losses.append(np.mean(of_steps))
            toys.assert_trees_close(row(state.clients.own.model[HEAD], k), heads[k], rtol=1e-4, atol=1e-5)
        theta = mean(trained, SIZES)
        toys.assert_trees_close(row(state.models, 0), theta, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(record.train_loss, np.average(losses, weights=SIZES), rtol=1e-4)
    x = FEDERATION.test.x[0]
    use = lambda prediction, _: metrics.predict(problem, algorithm, prediction, x)
    found = toys.serve(algorithm, problem, use, jax.random.key(0), states[-1], FEDERATION.client_data).found
    for k in range(4):
        np.testing.assert_allclose(found[k], predict(theta, heads[k], x), rtol=1e-4, atol=1e-5)
    assert (features(theta, np.float64(x)) > 0).any() and np.ptp(found, axis=0).max() > 0.1


@pytest.mark.slow
def test_newcomers_train_a_head_beside_the_global_model():
    """For R = 2 rounds."""
    newcomers, key = toys.make_federation((3, 4), seed=5), jax.random.key(0)
    problem, algorithm, states, _ = play(epochs=EPOCHS)
    found = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data)
    theta = row(states[-1].models, 0)
    for k in range(2):
        toys.assert_trees_close(row(row(found.models, k), 0), theta)
        start = problem.model.init(jax.random.split(jax.random.fold_in(key, k))[0])
        own = jax.tree.map(np.float64, start[HEAD])
        for _ in range(2 * EPOCHS):
            own = train_head(theta, own, *examples(newcomers, k))
        toys.assert_trees_close(row(found.inputs[HEAD], k), own, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [toys.Dropped, toys.Normalized])
def test_without_balance_the_generic_model_is_fedavg_s(model):
    """With mini-batches, dropout and batch statistics."""
    options = {"model": model, "batch_size": 2, "epochs": 2}
    found, wanted = play(knobs={"balance": 0.0}, **options), play("fedavg", **options)
    toys.assert_trees_close(found[2][-1].models, wanted[2][-1].models, rtol=1e-5, atol=1e-6)


def test_only_the_generic_model_travels():
    _, _, states, records = play(batch_size=2)
    assert set(jax.tree.leaves(states[-1].clients.own.model[BODY])) == set()
    model = 4 * (3 * 3 + 3 + 3 * 3 + 3)
    for record in records:
        assert record.down == 4 * model and record.up == 4 * (model + 4)  # and n_k


def test_private_gradients_are_clipped_part_by_part():
    """One example, a small norm, no noise: the generic model and the head each move by the rate times the norm."""
    federation = toys.make_federation((1, 1))
    norm = 0.01
    # Without balancing: the balanced loss of a client with a single class is 0.
    _, algorithm, states, _ = play(
        rounds=1, knobs={"balance": 0.0}, privacy=Privacy(clip_norm=norm), federation=federation
    )
    assert algorithm.ledger == Ledger(2, 1, "a client's class counts, which balance its loss")
    moved = jax.tree.map(jnp.subtract, states[1].clients.own.model, states[0].clients.own.model)
    for k in range(2):
        size = np.sqrt(sum(np.square(leaf[k]).sum() for leaf in jax.tree.leaves(moved)))
        assert size == pytest.approx(RATE * norm, rel=1e-3)
    moved = jax.tree.leaves(jax.tree.map(jnp.subtract, states[1].models, states[0].models))
    assert 0 < np.sqrt(sum(np.square(leaf).sum() for leaf in moved)) <= RATE * norm * 1.001
