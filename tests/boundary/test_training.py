"""Optimizers, networks and losses that users have: what a round computes, by a plain loop of optax and Flax."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from samples import check, params, sample

import pfljax as pfl
from pfljax.models import build

SIZES = (5, 1, 3)  # uneven, one example, a prime
ROUNDS = 3
RNG = np.random.default_rng(0)
CLIENT = np.repeat(np.arange(len(SIZES)), np.array(SIZES) + 1)
TEST = np.concatenate([np.arange(size + 1) == 0 for size in SIZES])
X = RNG.normal(1.0, 2.0, size=(len(CLIENT), 4)).astype(np.float32)
TARGETS = (X[:, 0] - 0.5 * X[:, 1]).astype(np.float32)
CLASSES = np.arange(len(CLIENT)) % 2
RATE = optax.exponential_decay(0.1, transition_steps=1, decay_rate=0.5)
WARM = optax.warmup_cosine_decay_schedule(0.0, 0.2, 3, 10)
PIECES = optax.piecewise_constant_schedule(0.2, {1: 0.5, 3: 0.1})


class Case(NamedTuple):
    """What a user trains with.

    Attributes:
        kind: What it is: an optimizer of a method, a network or a loss.
        name: Its name in a table below.
        method: Name of the method.
    """

    kind: str
    name: str
    method: str = "Local"


def clients_of(x: Any, y: np.ndarray, task: str) -> pfl.Federation:
    return pfl.Federation.from_arrays(
        x, y, client=CLIENT, is_test=TEST, standardize=False, task=task
    )


def own_examples(number: int, x: Any, y: np.ndarray) -> tuple[Any, np.ndarray]:
    """A client's training examples, in the order in which it has them."""
    rows = (number == CLIENT) & ~TEST
    return jax.tree.map(lambda leaf: leaf[rows], x), y[rows]


class Linear(nn.Module):
    """w x, with another initial w than zeros."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", lambda key, shape: jnp.linspace(-1, 1, shape[0]), (x.shape[-1],))


def clipped(rate):
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(rate))


def decayed(rate):
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate, 0.9, nesterov=True))


# Learning rate, which may be a schedule -> optimizer.
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, 0.9),
    "adam": optax.adam,
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.1),
    "nadam": optax.nadam,
    "adabelief": optax.adabelief,
    "adagrad": optax.adagrad,
    "adamax": optax.adamax,
    "amsgrad": optax.amsgrad,
    "lamb": optax.lamb,
    "lion": optax.lion,
    "rmsprop": optax.rmsprop,
    "yogi": optax.yogi,
    "radam": optax.radam,
    "adan": optax.adan,
    "novograd": optax.novograd,
    "sign_sgd": optax.sign_sgd,
    "clipped": clipped,
    "decayed": decayed,
    "masked": lambda rate: optax.masked(optax.adam(rate), {"w": True}),
    "partition": lambda rate: optax.partition({"a": optax.adam(rate)}, {"w": "a"}),
    "named_chain": lambda rate: optax.named_chain(
        ("one", optax.scale_by_adam()), ("two", optax.sgd(rate))
    ),
    "apply_if_finite": lambda rate: optax.apply_if_finite(optax.adam(rate), 2),
    "flatten": lambda rate: optax.flatten(optax.adam(rate)),
}
SCHEDULES = {"exponential decay": RATE, "warm-up": WARM, "pieces": PIECES}


def schedule_of(name: str) -> Callable[[Any], Any]:
    """A schedule for each optimizer, in turn."""
    return list(SCHEDULES.values())[list(OPTIMIZERS).index(name) % len(SCHEDULES)]


def descended(
    optimizer: Any, w: jax.Array, state: Any, x: np.ndarray, y: np.ndarray
) -> tuple[jax.Array, Any]:
    """A step on all of a client's examples."""
    gradient = jax.grad(lambda p: jnp.square(x @ p["w"] - y).mean())({"w": w})
    updates, state = optimizer.update(gradient, state, {"w": w})
    return w + updates["w"], state


def by_optax(name: str, method: str) -> np.ndarray:
    """The clients' models (K, F) of Local, or the global model (1, F) of FedAvg."""
    make = OPTIMIZERS[name]
    schedule = schedule_of(name)
    examples = [own_examples(k, X, TARGETS) for k in range(len(SIZES))]
    start = jnp.linspace(-1, 1, X.shape[1])
    if method == "Local":
        optimizer = make(schedule)
        found = []
        for x, y in examples:
            w = start
            state = optimizer.init({"w": start})
            for _ in range(ROUNDS):
                w, state = descended(optimizer, w, state, x, y)
            found.append(w)
        return np.stack(found)
    w = start
    # moments start anew; the schedule has counted one step for each round
    for done in range(ROUNDS):
        optimizer = make(lambda count, done=done: schedule(count + done))
        models = [descended(optimizer, w, optimizer.init({"w": w}), x, y)[0] for x, y in examples]
        w = jnp.average(jnp.stack(models), axis=0, weights=jnp.array(SIZES))
    return np.asarray(w)[None]


def check_optimizer(name: str, method: str) -> None:
    local = pfl.LocalTraining(OPTIMIZERS[name](schedule_of(name)))
    clients = clients_of(X, TARGETS, "regression")
    sim = pfl.Simulation(getattr(pfl, method)(), clients, Linear(), local)
    state = sim.init(jax.random.key(0))
    for _ in range(ROUNDS):
        state, _ = sim.step(jax.random.key(0), state)
    np.testing.assert_allclose(state.models["w"], by_optax(name, method), rtol=2e-4, atol=2e-5)


class BatchNormed(nn.Module):
    num_classes: int
    options: Any = ()

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7, **dict(self.options))(
            nn.Dense(5)(x)
        )
        return nn.Dense(self.num_classes)(nn.relu(x))


class Deterministic(nn.Module):
    """Two normalizations, and the argument `deterministic` in place of `train`."""

    num_classes: int

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        for _ in range(2):
            x = nn.tanh(
                nn.BatchNorm(use_running_average=deterministic, momentum=0.9)(nn.Dense(4)(x))
            )
        return nn.Dense(self.num_classes)(x)


class Images(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(3, (2, 2))(x.reshape(-1, 2, 2, 1))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7)(x)
        return nn.Dense(self.num_classes)(nn.avg_pool(nn.relu(x), (2, 2)).reshape(x.shape[0], -1))


class Merged(nn.Module):
    """Positions of all examples along one axis."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        y = nn.BatchNorm(use_running_average=not train, momentum=0.7)(x.reshape(-1, 2))
        return nn.Dense(self.num_classes)(y.reshape(x.shape[0], -1))


class Block(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=not self.train, momentum=0.7)(nn.Dense(4)(x))


class Wrapped(nn.Module):
    """Blocks inside of jit and remat."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(self.num_classes)(nn.remat(Block)(train)(nn.jit(Block)(train)(x)))


class Grouped(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.GroupNorm(2)(nn.LayerNorm()(nn.Dense(6)(x))))


class Recurrent(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.RNN(nn.GRUCell(3))(x.reshape(x.shape[0], 2, 2))[:, -1])


class NNXNormed(nnx.Module):
    def __init__(self, num_classes: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, momentum=0.7, rngs=rngs)
        self.head = nnx.Linear(5, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.first(x))))


class NNXRemat(NNXNormed):
    def __call__(self, x):
        run = nnx.remat(lambda norm, x: norm(x))
        return self.head(nnx.relu(run(self.norm, self.first(x))))


@nnx.jit
def jitted(norm, x):
    return norm(x)


class NNXJit(NNXNormed):
    def __call__(self, x):
        return self.head(nnx.relu(jitted(self.norm, self.first(x))))


class NNXGrouped(nnx.Module):
    def __init__(self, num_classes: int, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(4, 2, rngs=rngs)
        self.head = nnx.Linear(4, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x))


NETWORKS: dict[str, Any] = {
    "BatchNorm": BatchNormed(2),
    "BatchNorm without scale": BatchNormed(2, (("use_scale", False), ("use_bias", False))),
    "BatchNorm, slow variance": BatchNormed(2, (("use_fast_variance", False),)),
    "BatchNorm, large epsilon": BatchNormed(2, (("epsilon", 0.5),)),
    "deterministic": Deterministic(2),
    "images": Images(2),
    "merged positions": Merged(2),
    "jit and remat": Wrapped(2),
    "GroupNorm and LayerNorm": Grouped(2),
    "RNN": Recurrent(2),
    "NNX BatchNorm": NNXNormed,
    "NNX in remat": NNXRemat,
    "NNX in jit": NNXJit,
    "NNX GroupNorm": NNXGrouped,
}


def by_flax(model: Any, start: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """A client's model after SGD on all of its examples, in a loop that knows neither padding nor other clients."""

    def loss(params):
        outputs, written = forward(model, params, x)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean(), written

    for _ in range(ROUNDS):
        gradient, written = jax.grad(loss, has_aux=True)(start)
        marks = model.statistics(start) or jax.tree.map(lambda leaf: False, start)
        start = jax.tree.map(
            lambda s, p, g, w: w if s else p - 0.1 * g, marks, start, gradient, written
        )
    return start


def forward(model: Any, params: Any, x: np.ndarray) -> tuple[jax.Array, Any]:
    """Outputs in training mode, and the parameters with the statistics that Flax itself writes."""
    module = model.module
    if isinstance(module, nn.Module):
        names = set(model.network.collections)
        variables = {"params": {k: v for k, v in params.items() if k not in names}} | {
            k: params[k] for k in names
        }
        flags = (
            {"deterministic": False}
            if isinstance(module, Deterministic)
            else {"train": True}
            if names
            else {}
        )
        outputs, written = module.apply(variables, x, **flags, mutable=list(names))
        return outputs, params | dict(written)
    module, _ = model.network.exported(params)
    module.train()
    outputs = module(jnp.asarray(x))
    state = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState)))
    return outputs, state


def check_network(name: str) -> None:
    clients = clients_of(X, CLASSES, "classification")
    sim = pfl.Simulation(pfl.Local(), clients, NETWORKS[name], pfl.LocalTraining(optax.sgd(0.1)))
    state = first = sim.init(jax.random.key(0))
    for _ in range(ROUNDS):
        state, _ = sim.step(jax.random.key(0), state)
    model = build(NETWORKS[name], X.shape[1:], "classification", 2)
    for k in range(len(SIZES)):
        start = jax.tree.map(lambda leaf, k=k: leaf[k], first.models)
        expected = by_flax(model, start, *own_examples(k, X, CLASSES))
        found = jax.tree.map(lambda leaf, k=k: np.asarray(leaf[k]), state.models)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), found, expected
        )


# Losses per example, and their gradients in the outputs.
LOSSES: dict[str, tuple[Callable, Callable]] = {
    "squared": (lambda out, y: (out - y) ** 2, lambda out, y: 2 * (out - y)),
    "absolute": (lambda out, y: jnp.abs(out - y), lambda out, y: np.sign(out - y)),
    "log cosh": (optax.log_cosh, lambda out, y: np.tanh(out - y)),
    "huber": (
        lambda out, y: optax.huber_loss(out, y, delta=0.5),
        lambda out, y: np.clip(out - y, -0.5, 0.5),
    ),
    "linear": (lambda out, y: -out, lambda out, y: -np.ones_like(out)),
    "quantile": (
        lambda out, y: jnp.maximum(0.9 * (y - out), 0.1 * (out - y)),
        lambda out, y: np.where(y > out, -0.9, 0.1),
    ),
}


def check_loss(name: str) -> None:
    """SGD on a linear model, by the gradient of the loss."""
    loss, slope = LOSSES[name]
    clients = clients_of(X, TARGETS, "regression")
    sim = pfl.Simulation(
        pfl.Local(), clients, Linear(), pfl.LocalTraining(optax.sgd(0.1), loss=loss)
    )
    state = sim.init(jax.random.key(0))
    for _ in range(ROUNDS):
        state, _ = sim.step(jax.random.key(0), state)
    for k in range(len(SIZES)):
        x, y = own_examples(k, np.float64(X), np.float64(TARGETS))
        w = np.linspace(-1, 1, X.shape[1])
        for _ in range(ROUNDS):
            w = w - 0.1 * x.T @ slope(x @ w, y) / len(y)
        np.testing.assert_allclose(state.models["w"][k], w, rtol=1e-4, atol=1e-5)


class Nan(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Linear()(jnp.log(x))


class Reversed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Linear()(x)[::-1]


class Maximum(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Linear()(x / x.max())


class Neighbor(nnx.Module):
    def __init__(self, num_classes: int, rngs: nnx.Rngs):
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(x + jnp.roll(x, 1, axis=0))


MIXED = "model=.*: a prediction depends on the other examples"
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "outputs in reverse": (Reversed(), {}, MIXED),
    "divided by the largest": (Maximum(), {}, MIXED),
    "the neighbor added, NNX": (Neighbor, {}, MIXED),
    "NaN from the start": (
        Nan(),
        {},
        "the initial models: the loss of client . is not finite .* no learning rate",
    ),
    "NaN rate": (
        Linear(),
        {"optimizer": optax.sgd(float("nan"))},
        "the loss of client . is not finite.*; a smaller learning rate",
    ),
    "a loss of shape ()": (
        Linear(),
        {"loss": lambda out, y: jnp.mean(out - y)},
        "loss=.*: returns shape",
    ),
    "a loss that fails": (
        Linear(),
        {"loss": lambda out, y: out @ jnp.ones(99)},
        "loss=.*: for outputs .* raised",
    ),
    "BatchNorm and private gradients": (
        BatchNormed(1),
        {"privacy": pfl.Privacy(1.0, 1.0)},
        "privacy: batch statistics reveal all examples",
    ),
}


def check_refused(name: str) -> None:
    model, options, text = REFUSED[name]
    clients = clients_of(X, TARGETS, "regression")
    with pytest.raises((pfl.ArgumentError, pfl.RunError), match=text):
        pfl.Run(
            pfl.FedAvg(),
            clients,
            model,
            pfl.LocalTraining(**{"optimizer": optax.sgd(0.1)} | options),
        ).train(1)


CASES = [
    *(Case("optimizer", name, method) for name in OPTIMIZERS for method in ("Local", "FedAvg")),
    *(Case("network", name) for name in NETWORKS),
    *(Case("loss", name) for name in LOSSES),
    *(Case("refused", name) for name in REFUSED),
]
SAMPLE = sample(CASES, lambda case: case.kind)


@pytest.mark.parametrize(Case._fields, params(CASES, [], SAMPLE))
def test_what_users_train_with_is_what_is_computed(kind, name, method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kind == "optimizer":
            check_optimizer(name, method)
        else:
            {"network": check_network, "loss": check_loss, "refused": check_refused}[kind](name)


def test_the_sample_has_every_kind():
    check(CASES, SAMPLE, lambda case: case.kind)
    assert len(CASES) >= 70
