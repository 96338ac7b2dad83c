"""A client's training depends on its own examples, and not on the size of another client.

The other client's size determines how far all clients' data are padded, and how many examples a full batch holds.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

from pfljax import models
from pfljax.algorithms import METHODS
from pfljax.contract.types import Split
from pfljax.exchange.in_python import PythonPlan
from pfljax.exchange.plan import make_plan

SIZES = (5, 1, 3, 4)
WIDE = 13  # the size of a larger client, to which all others are padded
# These draw from the examples of all clients, so that their draws depend on all sizes.
DRAWN = ("fedavg_data", "perada")
OPTIMIZER = optax.sgd(optax.exponential_decay(0.3, 1, 0.7), momentum=0.5)


class Normalized(nn.Module):
    """Normalized inputs, and a hidden layer, which some methods need."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = x.reshape(x.shape[0], -1)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7, epsilon=0.1, use_bias=False)(
            x
        )
        return nn.Dense(self.num_classes)(nn.tanh(nn.Dense(6)(x)))


class NormalizedAttention(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7, epsilon=0.1, use_bias=False)(
            x
        )
        return toys.Attentive(self.num_classes)(x)


class OfNNX(nnx.Module):
    def __init__(self, num_classes: int, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(3, momentum=0.7, rngs=rngs)
        self.head = nnx.Linear(3, num_classes, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(self.norm(x)))


class Positions(nn.Module):
    """Two positions of each example, merged with the mini-batch for a normalization inside of remat."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool = False):
        y = jnp.stack([x, x**2], axis=1).reshape(-1, x.shape[-1])
        y = nn.remat(nn.BatchNorm)(use_running_average=not train, momentum=0.7)(y)
        return nn.Dense(self.num_classes)(y.reshape(x.shape[0], -1))


class Ratios(nn.Module):
    """Inputs divided by their norms, which is NaN for zeros."""

    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x / jnp.linalg.norm(x, axis=-1, keepdims=True))


def adapted():
    """`Normalized`, with LoRA beside a frozen layer."""
    network = Normalized(3)
    frozen = network.init(jax.random.key(3), jnp.zeros((1, 3)))["params"]
    del frozen["Dense_1"]
    lora = models.adapters.lora(rank=2, where="Dense_0")
    return models.Model(network, frozen=frozen, trainable=[lora, "Dense_1"])


def normalized(name):
    """The network with batch statistics that a method trains."""
    return (
        adapted()
        if name in toys.ADAPTERS
        else NormalizedAttention
        if name == "fedtp"
        else Normalized
    )


def padded(federation, num):
    """The same clients, padded with junk to `num` examples."""

    def one(leaf):
        junk = np.full((leaf.shape[0], num - leaf.shape[1], *leaf.shape[2:]), 2, leaf.dtype)
        return np.concatenate([leaf, junk], axis=1)

    x, y, size = federation.train
    return dataclasses.replace(federation, train=Split(one(x), one(y), size))


def results(name, federation, *, rounds=2, **options):
    problem = toys.make_problem(federation, OPTIMIZER, **options)
    algorithm = toys.make_algorithm(name, problem)
    return toys.train(algorithm, problem, federation.client_data, rounds)[0][-1]


PLANS = {
    "map": lambda: make_plan("map", devices=1),
    "vmap": lambda: make_plan("vmap", devices=1),
    "chunk": lambda: make_plan("chunk", 2, devices=1),
    "python": lambda: PythonPlan(make_plan("map", devices=1).mesh, 1),
}


def every_combination():
    """Methods, with batch statistics and without, in each plan; CI plays a plan of each kind of method."""
    for number, name in enumerate(name for name in METHODS if name not in DRAWN):
        plan_in_ci = list(PLANS)[number % len(PLANS)]
        for statistics in (True, False):
            for plan in PLANS:
                in_ci = statistics and plan == plan_in_ci and name in toys.KINDS
                marks = pytest.mark.slow if in_ci else pytest.mark.long
                yield pytest.param(name, statistics, plan, marks=marks)


@pytest.mark.parametrize(("name", "statistics", "plan"), list(every_combination()))
def test_a_larger_client_changes_no_other_s_training(name, statistics, plan):
    federation = toys.make_federation(SIZES)
    options = {"model": normalized(name)} if statistics else toys.network(name)
    found = [
        results(name, each, plan=PLANS[plan](), **options)
        for each in (federation, padded(federation, WIDE))
    ]
    toys.assert_trees_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "plan", "batch_size"),
    [
        pytest.param(
            model, plan, batch_size, marks=pytest.mark.slow if number % 5 == 0 else pytest.mark.long
        )
        for number, (model, plan, batch_size) in enumerate(
            (model, plan, batch_size)
            for model in (Normalized, OfNNX, Positions, Ratios)
            for plan in ("vmap", "chunk", "map")
            for batch_size in (0, 2)
        )
    ],
)
def test_neither_the_plan_nor_the_batch_size_nor_the_network_matters(model, plan, batch_size):
    federation = toys.make_federation(SIZES)
    options = {"model": model, "plan": PLANS[plan](), "batch_size": batch_size}
    found = [results("local", each, **options) for each in (federation, padded(federation, WIDE))]
    toys.assert_trees_close(*found, rtol=1e-4, atol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found[0].models))


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=[] if size == 3 else pytest.mark.slow) for size in SIZES]
)
def test_a_client_among_larger_ones_trains_as_if_alone(size):
    """Also in a plain loop in Python."""
    federation = toys.make_federation(SIZES)
    number = SIZES.index(size)
    problem = toys.make_problem(padded(federation, WIDE), OPTIMIZER, model=Normalized)
    params = jax.jit(problem.model.init)(jax.random.key(0))
    data = padded(federation, WIDE).train
    alone = Split(data.x[number, :size], data.y[number, :size], data.size[number])
    among = Split(data.x[number], data.y[number], data.size[number])

    def fit(split):
        solver = problem.solver
        start = solver.begin(params)
        return solver.fit(jax.random.key(1), start, split, round_number=0)[0].whole

    toys.assert_trees_close(jax.jit(fit)(alone), jax.jit(fit)(among), rtol=1e-4, atol=1e-6)
