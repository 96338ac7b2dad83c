"""FedRep: rounds by hand, and its limits."""

import jax
import numpy as np
import pytest
import toys
from by_hand import by_hand, play
from networks import BODY, HEAD, descend, row

from pfljax.contract.types import Ledger


def fedrep(head_epochs, body_epochs):
    """Algorithm 1: the head's epochs on the body as it was received, then the body's; the body is averaged."""

    def reference(rounds):
        theta = row(rounds.states[0].models[BODY], 0)
        heads = [row(rounds.states[0].rows[HEAD], k) for k in rounds.clients]
        for _ in rounds:
            trained = []
            for k in rounds.clients:
                x, y = rounds.examples(k)
                params = descend(
                    {BODY: theta, HEAD: heads[k]}, x, y, rounds.rate, head_epochs, [HEAD]
                )
                trained.append(descend(params, x, y, rounds.rate, body_epochs, [BODY]))
            heads = [params[HEAD] for params in trained]
            theta = rounds.mean([params[BODY] for params in trained])
            yield {
                f"models.{BODY}": jax.tree.map(lambda leaf: leaf[None], theta),
                f"rows.{HEAD}": heads,
                "predictions": [[{BODY: theta, HEAD: head}] for head in heads],
            }

    return reference


@pytest.mark.parametrize(
    ("head_epochs", "body_epochs"), [(3, 2), pytest.param(1, 4, marks=pytest.mark.long)]
)
def test_rounds_by_hand(head_epochs, body_epochs):
    hyperparameters = {"head_epochs": head_epochs, "body_epochs": body_epochs}
    rounds = by_hand(
        "fedrep", fedrep(head_epochs, body_epochs), hyperparameters=hyperparameters, hidden=(3,)
    )
    assert rounds.algorithm.ledger == Ledger(
        gradients=1, passes=(head_epochs + body_epochs) / rounds.epochs
    )
    assert jax.tree.leaves(rounds.states[-1].models[HEAD]) == []
    assert np.ptp(rounds.states[0].rows[HEAD]["kernel"], axis=0).max() > 0.1  # heads start apart


@pytest.mark.slow
def test_by_default_the_body_is_trained_as_long_as_other_methods_train():
    options = {"rounds": 2, "hidden": (3,)}
    rounds = play("fedrep", epochs=3, **options)
    assert rounds.algorithm.ledger == Ledger(gradients=1, passes=10 / 3 + 1)
    models = rounds.states[-1].models
    named = play("fedrep", hyperparameters={"body_epochs": 3}, **options).states[-1].models
    toys.assert_trees_close(named, models, rtol=1e-6)
    steps = (
        play("fedrep", epochs=1, steps=3, **options).states[-1].models
    )  # full batches: an epoch is a step
    toys.assert_trees_close(steps, models, rtol=1e-6)


@pytest.mark.parametrize(
    ("personal_layers", "other", "hyperparameters"),
    [
        pytest.param(0, "fedavg", {"head_epochs": 4, "body_epochs": 2}, marks=pytest.mark.slow),
        pytest.param(2, "local", {"head_epochs": 2, "body_epochs": 3}, marks=pytest.mark.long),
    ],
)
def test_of_one_part_only_it_is_another_method(personal_layers, other, hyperparameters):
    options = {"rounds": 2, "hidden": (3,)}
    wanted = play(other, **options).predict().models
    found = (
        play(
            "fedrep",
            hyperparameters=hyperparameters | {"personal_layers": personal_layers},
            **options,
        )
        .predict()
        .models
    )
    toys.assert_trees_close(found, wanted, rtol=1e-6, atol=1e-6)
