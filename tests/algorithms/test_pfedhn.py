"""pFedHN: rounds with gradients by hand, batch statistics, newcomers, and FedAvg as a hypernetwork of biases."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from by_hand import by_hand, entry, newcomers_by_hand
from by_hand import play as play_rounds
from quadratics import OPTIMIZER, RATE, gradient, play, vectors

from pfljax.algorithms.common import hypernetwork
from pfljax.contract import tree

HYPERPARAMETERS = {
    "server_optimizer": "sgd",
    "server_learning_rate": 0.3,
    "server_momentum": 0.0,
    "hidden": 5,
    "layers": 1,
    "embedding": 2,
    "spread": 0.5,
}
CLIPPED = HYPERPARAMETERS | {"clip": np.inf}  # the hyperparameters of plays that share a program

# What the server learns: embeddings, two layers of the trunk, and the heads' kernel (H, d) and bias (d,).
LEARNED = (
    "server.state.embeddings",
    "server.state.network.trunk.0.kernel",
    "server.state.network.trunk.0.bias",
    "server.state.network.trunk.1.kernel",
    "server.state.network.trunk.1.bias",
    "server.state.network.kernel",
    "server.state.network.bias",
)


def learned(state):
    """The server's numbers in float64."""
    return [entry(state, name) for name in LEARNED]


def forward(numbers):
    """(models (K, d), features (K, H), the first layer's outputs (K, H))."""
    v, w1, b1, w2, b2, kernel, bias = numbers
    inner = v @ w1 + b1
    features = np.maximum(inner, 0) @ w2 + b2
    return features @ kernel + bias, features, inner


def slopes(numbers, cotangent):
    """The vector-Jacobian products of the models with a cotangent (K, d), by the chain rule."""
    v, w1, _, w2, _, kernel, _ = numbers
    _, features, inner = forward(numbers)
    of_features = cotangent @ kernel.T
    of_inner = of_features @ w2.T * (inner > 0)
    of_trunk = (
        v.T @ of_inner,
        of_inner.sum(axis=0),
        np.maximum(inner, 0).T @ of_features,
        of_features.sum(axis=0),
    )
    return [of_inner @ w1.T, *of_trunk, features.T @ cotangent, cotangent.sum(axis=0)]


def trained(federation, k, theta, steps):
    for _ in range(steps):
        theta = theta - RATE * gradient(federation, k, theta)
    return theta


def pfedhn(momentum, clip):
    """A step of the server's SGD along the vector-Jacobian products of all models with - delta_k."""

    def reference(rounds):
        numbers = learned(rounds.states[0])
        way = [0.0] * 7
        for _ in rounds:
            theta = forward(numbers)[0]
            delta = np.stack([rounds.descend(k, theta[k]) - theta[k] for k in rounds.clients])
            products = slopes(numbers, -delta / len(delta))
            norm = np.sqrt(sum((slope**2).sum() for slope in products))
            assert (norm > clip) == (clip < np.inf)
            scale = min(1, clip / norm)
            way = [
                momentum * before + scale * slope
                for before, slope in zip(way, products, strict=True)
            ]
            numbers = [old - 0.3 * step for old, step in zip(numbers, way, strict=True)]

            models = forward(numbers)[0]
            yield dict(zip(LEARNED, numbers, strict=True)) | {
                "models": models,
                "predictions": models[:, None],
            }

    return reference


@pytest.mark.parametrize("clip", [np.inf, 0.1])
def test_rounds_by_hand(clip):
    rounds = by_hand(
        "pfedhn",
        pfedhn(0.5, clip),
        hyperparameters=CLIPPED | {"server_momentum": 0.5, "clip": clip},
    )
    moved = entry(rounds.states[-1], LEARNED[0]) - entry(rounds.states[0], LEARNED[0])
    assert np.abs(moved).max() > 1e-3  # embeddings move


@pytest.mark.slow
def test_under_sampling_the_mean_is_over_the_cohort_by_hand():
    federation = toys.make_federation((3, 0, 2, 4), "regression")
    *_, states, records = toys.play("pfedhn", federation, 6, OPTIMIZER, HYPERPARAMETERS, cohort=2)
    alone = 0
    for (before, after), record in zip(itertools.pairwise(states), records, strict=True):
        numbers = learned(before)
        theta = forward(numbers)[0]
        found = []
        delta = np.stack(
            [
                trained(federation, k, theta[k], 1) - theta[k] if k != 1 else 0 * theta[k]
                for k in range(4)
            ]
        )
        sent = int(record.up) // 16
        alone += sent == 1
        for pair in itertools.combinations(range(4), 2):
            cotangent = np.where(np.isin(np.arange(4), pair)[:, None], -delta / sent, 0)
            new = [
                old - 0.3 * slope
                for old, slope in zip(numbers, slopes(numbers, cotangent), strict=True)
            ]
            found.append(np.allclose(forward(new)[0], vectors(after.models), rtol=1e-4, atol=1e-5))
        assert sum(found) == 1
    assert 0 < alone < 6


@pytest.mark.long
def test_first_models_are_near_one_initial_model():
    spread = {}
    for hyperparameter in (0.0, 0.1, 1.0):
        models = play(
            "pfedhn",
            hidden=(16,),
            rounds=0,
            hyperparameters=HYPERPARAMETERS | {"hidden": 100, "spread": hyperparameter},
        )[2][0].models
        kernel = np.asarray(models["Dense_0"]["kernel"])
        spread[hyperparameter] = (kernel - kernel.mean(axis=0)).std() / kernel.mean(axis=0).std()
        np.testing.assert_allclose(
            models["Dense_0"]["bias"], 0, atol=1e-6
        )  # as the model's own biases
    assert spread[0.0] < 1e-6 and 0.02 < spread[0.1] < 0.3 and 5 < spread[1.0] / spread[0.1] < 11


def test_torch_trunks_are_as_small_as_pytorch_makes_them():
    """The squares of a layer's outputs add up to H (1 + the sum of its inputs' squares) / (3 inputs) on average."""
    problem = toys.make_problem(toys.make_federation([3] * 4, "regression"))
    wide = 400

    @jax.jit
    def make(key):
        bias = tree.first(problem.init_models(key, 1))
        return hypernetwork.init(key, problem, bias, (8, wide, wide), 0.5, torch=True)

    network = make(jax.random.key(0))
    for layer, inputs in zip(network.trunk, (8, wide), strict=True):
        for values in map(np.float64, layer.values()):
            assert 0.95 < np.abs(values).max() * inputs**0.5 <= 1
            np.testing.assert_allclose(np.square(values).mean(), 1 / (3 * inputs), rtol=0.2)
    v = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    features = hypernetwork.generate(
        network._replace(kernel=jnp.eye(wide), bias=jnp.zeros(wide)), v
    )
    inner = wide * (1 + 8) / (3 * 8)  # of which half are cut by the rectifier
    wanted = wide * (1 + inner / 2) / (3 * wide)
    np.testing.assert_allclose(np.square(features).sum(axis=1).mean(), wanted, rtol=0.2)


@pytest.mark.long
def test_the_protocol_of_the_paper_is_stable():
    """One client a round, 50 steps at rate 0.01 with momentum 0.9; He's trunk without clipping diverges."""
    federation = toys.make_federation([6] * 4)
    size = {}
    for name, hyperparameters in {
        "default": {},
        "before": {"initialization": "he", "clip": np.inf},
    }.items():
        options = {"cohort": 1, "steps": 50, "batch_size": 3}
        played = toys.play(
            "pfedhn", federation, 300, optax.sgd(0.01, momentum=0.9), hyperparameters, **options
        )
        size[name] = max(np.abs(state.models["Dense_0"]["kernel"]).max() for state in played.states)
    assert size["default"] < 100 and not size["before"] < 1e6


@pytest.mark.slow
@pytest.mark.parametrize(("cohort", "named"), [(1, "torch"), (2, "he")])
def test_the_initialization_follows_the_protocol(cohort, named):
    federation = toys.make_federation([3] * 4, "regression")

    def start(**hyperparameters):
        return (
            toys.play("pfedhn", federation, 0, None, hyperparameters, cohort=cohort)
            .states[0]
            .models
        )

    same = [toys.same_trees(start(), start(initialization=name)) for name in ("torch", "he")]
    assert same == [named == "torch", named == "he"]


def test_without_a_rate_the_models_stay():
    states = play_rounds(
        "pfedhn", hyperparameters=CLIPPED | {"server_learning_rate": 0.0}, rounds=2
    ).states
    np.testing.assert_array_equal(vectors(states[0].models), vectors(states[2].models))


def newcomer(optimizer):
    """Trains an embedding from the mean embedding, for a fixed network."""

    def reference(rounds, newcomers, k):
        embeddings, *network = learned(rounds.states[-1])
        own = embeddings.mean(axis=0)
        first = second = 0.0
        for number in range(1, rounds.problem.rounds + 1):
            theta = forward([own[None], *network])[0]
            change = newcomers.descend(k, theta[0]) - theta[0]
            slope = slopes([own[None], *network], -change[None])[0][0]
            if optimizer == "sgd":
                step = slope
            else:
                first = 0.9 * first + 0.1 * slope
                second = 0.999 * second + 0.001 * slope**2
                step = first / (1 - 0.9**number) / (np.sqrt(second / (1 - 0.999**number)) + 1e-8)
            own = own - 0.3 * step
        return forward([own[None], *network])[0]

    return reference


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_newcomers_learn_an_embedding_by_hand(optimizer):
    options = {"hyperparameters": CLIPPED | {"server_optimizer": optimizer}, "rounds": 0}
    newcomers_by_hand("pfedhn", newcomer(optimizer), rtol=1e-3, atol=1e-4, **options)


@pytest.mark.slow
def test_batch_statistics_are_the_mean_of_those_that_came_back():
    """After one full batch each: 0.7 of the old and 0.3 of the batch's statistics, whatever the server's rate."""
    federation = toys.make_federation((4, 4, 4))
    states = toys.play(
        "pfedhn", federation, 2, OPTIMIZER, HYPERPARAMETERS, model=toys.Normalized
    ).states
    mean = np.zeros(3)
    variance = np.ones(3)
    for state in states[1:]:
        x = [np.float64(federation.train.x[k]) for k in range(3)]
        mean = 0.7 * mean + 0.3 * np.mean([own.mean(axis=0) for own in x], axis=0)
        variance = 0.7 * variance + 0.3 * np.mean([own.var(axis=0) for own in x], axis=0)
        found = state.models["batch_stats"]["BatchNorm_0"]
        for k in range(3):
            np.testing.assert_allclose(found["mean"][k], mean, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found["var"][k], variance, rtol=1e-4, atol=1e-5)
    kernels = states[-1].models["Dense_0"]["kernel"]
    assert np.ptp(kernels, axis=0).max() > 1e-3
