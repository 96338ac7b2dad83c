"""FedBN: rounds by hand with batch and group normalization, and FedAvg without any."""

import flax.linen as nn
import jax
import networks
import numpy as np
import pytest
import toys
from by_hand import by_hand, play
from networks import softmax
from quadratics import SIZES

from pfljax.contract import tree

MOMENTUM = 0.7
EPSILON = 0.1


class Scaled(nn.Module):
    """A linear model of normalized inputs."""

    kind: str

    @nn.compact
    def __call__(self, x, train: bool):
        if self.kind == "batch":
            norm = nn.BatchNorm(
                use_running_average=not train, momentum=MOMENTUM, epsilon=EPSILON, name="norm"
            )
        else:
            norm = nn.GroupNorm(num_groups=1, epsilon=EPSILON, name="norm")
        return nn.Dense(3, name="dense")(norm(x))


MODELS = {kind: Scaled(kind) for kind in ("batch", "group")}
NUM_ARRAYS = {"batch": 4, "group": 2}  # of a normalization layer


def normalized(kind, x):
    """The normalized inputs, and the mean and variance of the client's examples, or of each example."""
    axis = 0 if kind == "batch" else 1
    center = x.mean(axis=axis, keepdims=True)
    spread = x.var(axis=axis, keepdims=True)
    return (x - center) / np.sqrt(spread + EPSILON), center[0], spread[0]


def train(rounds, kind, k, params, steps, layers=("dense", "norm")):
    """Client k's steps on some layers, with full batches."""
    x, y = rounds.examples(k)
    standard, center, spread = normalized(kind, x)
    for _ in range(steps):
        dense = params["dense"]
        norm = params["norm"]
        received = standard * norm["scale"] + norm["bias"]
        slope = (softmax(received @ dense["kernel"] + dense["bias"]) - np.eye(3)[y]) / len(x)
        below = slope @ dense["kernel"].T
        slopes = {
            "dense": {"kernel": received.T @ slope, "bias": slope.sum(axis=0)},
            "norm": {"scale": (below * standard).sum(axis=0), "bias": below.sum(axis=0)},
        }
        moved = {
            layer: networks.step(params, slopes, rounds.rate, layers)[layer] for layer in slopes
        }
        if kind == "batch":
            old = params["batch_stats"]["norm"]
            new = {
                "mean": MOMENTUM * old["mean"] + (1 - MOMENTUM) * center,
                "var": MOMENTUM * old["var"] + (1 - MOMENTUM) * spread,
            }
            moved["batch_stats"] = {"norm": new}
        params = moved
    return params


def beginning(kind, dense):
    """A client's first model."""
    params = {"dense": dense, "norm": {"scale": np.ones(3), "bias": np.zeros(3)}}
    if kind == "batch":
        params["batch_stats"] = {"norm": {"mean": np.zeros(3), "var": np.ones(3)}}
    return params


def fedbn(kind):
    """Algorithm 1: the mean is over all layers but normalization, which stays with each client."""

    def reference(rounds):
        dense = networks.row(rounds.start("models.dense"), 0)
        own = [beginning(kind, dense) for _ in rounds.clients]
        for _ in rounds:
            own = [
                train(rounds, kind, k, own[k] | {"dense": dense}, rounds.epochs)
                for k in rounds.clients
            ]
            dense = rounds.mean([params["dense"] for params in own])
            predictions = [[params | {"dense": dense}] for params in own]
            yield {"models.dense": [dense], "predictions": predictions}

    return reference


@pytest.mark.parametrize("kind", ["batch", pytest.param("group", marks=pytest.mark.slow)])
def test_rounds_by_hand(kind):
    by_hand("fedbn", fedbn(kind), model=MODELS[kind], hidden=())


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_normalization_stays_with_clients(kind):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, model=MODELS[kind])
    algorithm = toys.make_algorithm("fedbn", problem)
    facts = (("arrays of normalization layers kept by clients", NUM_ARRAYS[kind]),)
    assert algorithm.report.facts == facts
    state = jax.eval_shape(
        lambda: toys.init(algorithm, problem, jax.random.key(0), federation.client_data)
    )
    assert len(jax.tree.leaves(state.models)) == 2
    assert state.models["norm"] == {"scale": None, "bias": None}


def test_newcomers_train_a_normalization_of_their_own():
    """For as many rounds as the run has; the dense layer stays."""
    rounds = play("fedbn", rounds=1, model=MODELS["batch"], hidden=())
    newcomers = toys.make_federation(SIZES, seed=5)
    found = rounds.newcomers(newcomers).models
    dense = networks.row(rounds.states[-1].models["dense"], 0)
    rounds.federation = newcomers
    for k in rounds.clients:
        steps = rounds.problem.rounds * rounds.epochs
        expected = train(rounds, "batch", k, beginning("batch", dense), steps, ["norm"])
        own = jax.tree.map(lambda leaf, k=k: leaf[k], found)
        networks.assert_row_close(own, expected)


@pytest.mark.slow
def test_without_normalization_it_is_fedavg_and_says_so():
    options = {"rounds": 3, "sizes": SIZES, "batch_size": 2}
    found, fedavg = (networks.play(name, hidden=(), **options) for name in ("fedbn", "fedavg"))
    toys.assert_trees_close(found.states[-1].models, fedavg.states[-1].models, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, found.records, fedavg.records)
    clients = found.federation.client_data
    models = toys.predict(
        found.algorithm, found.problem, jax.random.key(0), found.states[-1], clients
    ).models
    assert tree.num_rows(models) == 4
    assert "no normalization" in found.algorithm.report.scored
    assert found.algorithm.report.facts == (
        ("normalization", "none in this model, so training is FedAvg"),
    )
