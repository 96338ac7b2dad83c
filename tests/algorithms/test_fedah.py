"""FedAH by hand on networks with one hidden layer: aggregated heads and phases."""

import jax
import numpy as np
import pytest
import toys
from by_hand import as_numpy, assert_close, by_hand, play, stack
from networks import BODY, HEAD, RATE, descend, gradient, row

HEAD_EPOCHS = 2
BODY_EPOCHS = 3
OPTIONS = {"sizes": (2, 5, 0, 3, 4), "hidden": (6,), "cohort": 3}


def mixture(weights, head, global_head):
    """own + (global - own) * W."""
    return jax.tree.map(lambda w, own, other: own + (other - own) * w, weights, head, global_head)


def aggregated(shared, head, weights, data, rate):
    """The model with the mixed head, and the weights of the mixture after their steps."""

    def moved(weight, slope, own, other):
        return np.clip(weight - rate * slope * (other - own), 0, 1)

    steps = HEAD_EPOCHS if len(data[1]) else 0
    for _ in range(steps):
        mixed = shared | {HEAD: mixture(weights, head, shared[HEAD])}
        weights = jax.tree.map(moved, weights, gradient(mixed, *data)[HEAD], head, shared[HEAD])
    return shared | {HEAD: mixture(weights, head, shared[HEAD])}, weights


def fedah(rate):
    """Clients learn W, then train the head, then the body; all of the model is averaged, and heads are kept."""

    def reference(rounds):
        shared = row(rounds.start("models"), 0)
        heads = [shared[HEAD] for _ in rounds.clients]
        weights = [jax.tree.map(np.ones_like, head) for head in heads]

        for number in rounds:
            trained = {}
            for k in rounds.cohort(number):
                data = rounds.examples(k)
                model, weights[k] = aggregated(shared, heads[k], weights[k], data, rate)
                if rounds.sizes[k]:
                    model = descend(model, *data, RATE, HEAD_EPOCHS, layers=(HEAD,))
                    model = descend(model, *data, RATE, BODY_EPOCHS, layers=(BODY,))
                    trained[k] = model
                heads[k] = model[HEAD]
            shared = rounds.mean(list(trained.values()), rounds.sizes[list(trained)])

            mixed = []
            for k in rounds.clients:
                model, _ = aggregated(shared, heads[k], weights[k], rounds.examples(k), rate)
                mixed.append(model)
            yield {
                "models": stack([shared]),
                f"rows.head.{HEAD}": heads,
                f"rows.weights.{HEAD}": weights,
                "predictions": [[model] for model in mixed],
            }

    return reference


@pytest.mark.parametrize("rate", [1.0, 40.0, 0.0])
def test_fedah_by_hand(rate):
    """At the highest rate, weights reach 0, the end of [0, 1]."""
    hyperparameters = {
        "weights_learning_rate": rate,
        "head_epochs": HEAD_EPOCHS,
        "body_epochs": BODY_EPOCHS,
    }
    rounds = by_hand("fedah", fedah(rate), hyperparameters=hyperparameters, rtol=1e-5, **OPTIONS)
    weights = jax.tree.leaves(rounds.states[-1].rows.weights)
    values = np.concatenate([np.ravel(leaf) for leaf in weights])
    assert (values.min() < 0.9999) == (rate > 0)
    assert (values.min() == 0) == (rate > 1)


def test_clients_may_predict_with_their_own_heads():
    hyperparameters = {
        "weights_learning_rate": 1.0,
        "head_epochs": HEAD_EPOCHS,
        "body_epochs": BODY_EPOCHS,
    }
    rounds = play("fedah", hyperparameters=hyperparameters, **OPTIONS)
    algorithm = toys.make_algorithm("fedah", rounds.problem, predict="own")
    state = rounds.states[-1]
    kept = jax.tree.map(lambda leaf: leaf[1], state.rows)
    found = row(algorithm.predict(None, state.models, kept, None).models, 0)
    expected = row(state.models, 0) | {HEAD: as_numpy(kept.head[HEAD])}
    assert_close(found, expected, "own head", 1e-6, 1e-6)
