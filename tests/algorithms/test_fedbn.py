"""FedBN: rounds by hand with batch and group normalization, FedAvg without any, and what travels."""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
import toys
from networks import examples, mean, row, softmax

from pfljax.contract import tree

SIZES, RATE, MOMENTUM, EPSILON, EPOCHS = (2, 5, 1, 3), 0.3, 0.7, 0.1, 3
FEDERATION = toys.make_federation(SIZES)
SHARED = 4 * (3 * 3 + 3)  # bytes of the dense layer


class Scaled(nn.Module):
    """A linear model of normalized inputs."""

    kind: str

    @nn.compact
    def __call__(self, x, train: bool):
        if self.kind == "batch":
            norm = nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM, epsilon=EPSILON, name="norm")
        else:
            norm = nn.GroupNorm(num_groups=1, epsilon=EPSILON, name="norm")
        return nn.Dense(3, name="dense")(norm(x))


@functools.cache
def play(name, kind, rounds=3):
    """(problem, algorithm, states, records, the models that clients predict with)."""
    options = {"model": Scaled(kind)} if kind else {"batch_size": 2}
    played = toys.play(name, FEDERATION, rounds, optax.sgd(RATE), epochs=EPOCHS, **options)
    _, problem, algorithm, states, records = played
    found = toys.predict(algorithm, problem, jax.random.key(0), states[-1], FEDERATION.client_data)
    return problem, algorithm, states, records, jax.tree.map(lambda leaf: leaf[:, 0], found.models)


def train(kind, dense, norm, statistics, x, y):
    """A client's round with full batches; its first examples are repeated to fill a batch."""
    axis, seen = (0, x[np.arange(max(SIZES)) % len(x)]) if kind == "batch" else (1, x)
    center, spread = seen.mean(axis=axis, keepdims=True), seen.var(axis=axis, keepdims=True)
    standard = (x - center) / np.sqrt(spread + EPSILON)
    for _ in range(EPOCHS):
        received = standard * norm["scale"] + norm["bias"]
        slope = (softmax(received @ dense["kernel"] + dense["bias"]) - np.eye(3)[y]) / len(x)
        below = slope @ dense["kernel"].T
        dense = {
            "kernel": dense["kernel"] - RATE * received.T @ slope,
            "bias": dense["bias"] - RATE * slope.sum(axis=0),
        }
        norm = {
            "scale": norm["scale"] - RATE * (below * standard).sum(axis=0),
            "bias": norm["bias"] - RATE * below.sum(axis=0),
        }
        if kind == "batch":
            new = {"mean": center[0], "var": spread[0]}
            statistics = {name: MOMENTUM * old + (1 - MOMENTUM) * new[name] for name, old in statistics.items()}
    return dense, norm, statistics


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_rounds_by_hand(kind):
    _, _, states, _, predicting = play("fedbn", kind)
    dense = row(states[0].models["dense"], 0)
    norms = [{"scale": np.ones(3), "bias": np.zeros(3)}] * 4
    statistics = [{"mean": np.zeros(3), "var": np.ones(3)} if kind == "batch" else {}] * 4
    for state in states[1:]:
        trained = [train(kind, dense, norms[k], statistics[k], *examples(FEDERATION, k)) for k in range(4)]
        denses, norms, statistics = zip(*trained, strict=True)
        dense = mean(denses, SIZES)
        toys.assert_trees_close(row(state.models["dense"], 0), dense, rtol=1e-4, atol=1e-5)
    for k in range(4):
        expected = {"dense": dense, "norm": norms[k]}
        expected |= {"batch_stats": {"norm": statistics[k]}} if kind == "batch" else {}
        toys.assert_trees_close(row(predicting, k), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_normalization_does_not_travel_as_it_does_in_fedavg(kind):
    _, algorithm, _, records, predicting = play("fedbn", kind)
    count, whole = (4, 4 * 4 * 3) if kind == "batch" else (2, 2 * 4 * 3)
    assert algorithm.report.facts == (("arrays of normalization layers kept by clients", count),)
    for record in records:
        assert record.down == 4 * SHARED and record.up == 4 * (SHARED + 4)  # and n_k
    _, _, _, others, averaged = play("fedavg", kind)
    assert others[0].down == 4 * (SHARED + whole)
    np.testing.assert_array_equal(averaged["norm"]["scale"], np.repeat(averaged["norm"]["scale"][:1], 4, axis=0))
    assert (np.ptp(predicting["norm"]["scale"], axis=0) > 1e-2).all()
    assert np.abs(predicting["dense"]["kernel"] - averaged["dense"]["kernel"]).max() > 1e-3


@pytest.mark.slow
def test_without_normalization_it_is_fedavg_and_says_so():
    (_, algorithm, states, records, found), (_, _, others, wanted, _) = play("fedbn", ""), play("fedavg", "")
    toys.assert_trees_close(states[-1].models, others[-1].models, rtol=1e-6)
    assert tree.num_rows(found) == 4 and records == wanted
    assert "no normalization" in algorithm.report.scored
    assert algorithm.report.facts == (("normalization", "none in this model, so training is FedAvg"),)


def test_newcomers_train_a_normalization_of_their_own():
    problem, algorithm, states, _, _ = play("fedbn", "batch")
    newcomers = toys.make_federation((3, 4), seed=5)
    found = toys.adapt(algorithm, problem, jax.random.key(0), states[-1], newcomers.client_data).models
    found = jax.tree.map(lambda leaf: leaf[:, 0], found)
    for k in range(2):
        toys.assert_trees_close(row(found["dense"], k), row(states[-1].models["dense"], 0))
        x, _ = examples(newcomers, k)
        weight = MOMENTUM ** (2 * EPOCHS)  # of the first statistics after R = 2 rounds
        filled = x[np.arange(4) % len(x)]
        np.testing.assert_allclose(
            found["batch_stats"]["norm"]["mean"][k], (1 - weight) * filled.mean(axis=0), rtol=1e-4, atol=1e-6
        )
    assert np.abs(found["norm"]["scale"] - 1).min() > 1e-4
