"""Small problems that the tests share."""

import dataclasses
import functools
import importlib.util
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pfljax import models
from pfljax.algorithms import METHODS
from pfljax.contract.types import Algorithm, Split
from pfljax.data import Federation
from pfljax.evaluation import metrics
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_plan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import make_round
from pfljax.local.problem import Problem
from pfljax.local.training import LocalTraining
from pfljax.run.compiled import state_shardings
from pfljax.run.experiment import Experiment
from pfljax.settings.fields import value_type
from pfljax.training.loop import EVERY, Trainer

# Of each kind one: what stays, what is shared, what travels, and what a client or the server keeps.
KINDS = ("local", "fedavg_plus", "scaffold", "fedem", "dfedem", "federico", "fedfomo")
# Together they use all of the engine; tests of the engine play the other methods only in the long suite.
VARIED = (
    *KINDS,
    "clustered",
    "mocha",
    "fedpac",
    "pfedhn",
    "apple",
    "knn_per",
    "fedavg_data",
    "fedbuff",
    "ditto",
)


class Normalized(nn.Module):
    """Logistic regression of normalized inputs, with batch statistics that move fast.

    Before a normalization parameters may have gradients of zero but for rounding, which Adam would magnify.
    """

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = x.reshape(x.shape[0], -1)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7, epsilon=0.1, use_bias=False)(
            x
        )
        return nn.Dense(self.num_classes)(x)


class Dropped(nn.Module):
    """A linear model behind dropout."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(self.num_classes)(nn.Dropout(0.5, deterministic=not train)(x))


class Attentive(nn.Module):
    """Attention over the features, and a dense layer.

    There are no biases: those of keys have gradients of zero but for rounding, which Adam would magnify.
    """

    num_classes: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1, 1)
        x = nn.Dense(4)(x) + self.param("positions", nn.initializers.normal(1.0), (x.shape[1], 4))
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False)(x)
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


@functools.cache
def adapted(features=3, hidden=6):
    """An MLP whose hidden layer is frozen: LoRA and a head are trained."""
    mlp = models.MLP(hidden=(hidden,))
    variables = models.MLP(hidden=(hidden,), outputs=3).init(
        jax.random.key(3), jnp.zeros((1, features))
    )
    lora = models.adapters.lora(rank=2, where="Dense_0")
    return models.Model(
        mlp, frozen={"Dense_0": variables["params"]["Dense_0"]}, trainable=[lora, "Dense_1"]
    )


ADAPTERS = ("fedit", "ffa_lora", "fedsa_lora", "flexlora", "feddpa", "hilora")
# What a method is tested with where a linear model would not do.
HIDDEN = ("fedper", "fedrep", "fedbabu", "fedrod", "fedpac", "fedsim", "fedalt", "fedkd", "fedas")
HIDDEN += ("feddbe", "fedgh", "ccvr", "gpfl", "fedah", "pfedfda", "flute", "fedcp", "perada")
NETWORKS = {name: {"hidden": (3,)} for name in HIDDEN} | {
    "fedbn": {"model": Normalized},
    "moon": {"hidden": (4,)},  # of a single layer the features would be the inputs
    "fedproto": {"hidden": (8,)},
}


def required(name, *adapter_sizes):
    """The network of methods that refuse an MLP, as an argument of `make_problem`; {} for others."""
    if name in ADAPTERS:
        return {"model": adapted(*adapter_sizes)}
    return {"model": Attentive} if name == "fedtp" else {}


def network(name):
    """The arguments of `make_problem` by which a method gets a network that it can train."""
    return required(name) or NETWORKS.get(name, {})


def each_method(among=METHODS, *, fast=KINDS, slow=METHODS, grouped=False):
    """Parametrizes a test by the methods' names; the default suite plays `fast`, the slow one those of `slow`.

    Args:
        among: Names of methods.
        fast: Those of the default suite.
        slow: Those of the slow suite; the others are marked long.
        grouped: Whether one worker plays all tests of a method, for tests that share what they compile.
    """

    def marks(name):
        suite = [] if name in fast else [pytest.mark.slow if name in slow else pytest.mark.long]
        return suite + [pytest.mark.xdist_group(name)] * grouped

    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks(name)) for name in among]
    )


def make_split(rng, sizes, task="classification", features=3, classes=3, n_max=None):
    """Random examples (K, n_max, features), zeros beyond each client's size."""
    num = len(sizes)
    n_max = n_max or max(sizes)
    x = rng.normal(size=(num, n_max, features)).astype(np.float32)
    if task == "regression":
        y = (x[..., 0] - 0.5 * x[..., 1] + 0.3 * rng.normal(size=(num, n_max))).astype(np.float32)
    else:
        y = rng.integers(classes, size=(num, n_max)).astype(np.int32)
    real = np.arange(n_max) < np.asarray(sizes)[:, None]
    return Split(np.where(real[..., None], x, 0), np.where(real, y, 0), np.asarray(sizes, np.int32))


def make_federation(
    sizes, task="classification", features=3, classes=3, seed=0, test_size=4, validation_size=3
):
    """K = len(sizes) clients with random data."""
    rng = np.random.default_rng(seed)
    options = {"task": task, "features": features, "classes": classes}
    return Federation(
        train=make_split(rng, sizes, **options),
        test=make_split(rng, [test_size] * len(sizes), **options),
        validation=make_split(rng, [validation_size] * len(sizes), **options),
        group=(np.arange(len(sizes)) % 2).astype(np.int32),
        task=task,
        num_classes=1 if task == "regression" else classes,
        name="toy",
    )


SGD = optax.sgd(0.1)


def once(function):
    """The function, which is not called again for arguments that it has had; those that have no hash are not kept."""
    remembered = functools.cache(function)

    @functools.wraps(function)
    def call(*args):
        return remembered(*args) if hashable(args) else function(*args)

    return call


@once
def built_once(model, shape, task, num_classes, target_shape):
    return models.build(model, shape, task, num_classes, target_shape=target_shape)


@once
def bound_once(training, model):
    return training.bind(model)


def make_problem(
    federation,
    optimizer=None,
    *,
    plan=None,
    cohort=0,
    hidden=(),
    rounds=2,
    loss=None,
    model=None,
    **training,
):
    """A linear model (or an MLP, or `model`) and its local training, one client at a time on one device by default.

    Clients' own models start from different parameters, so that mistaking one for another shows.

    Args:
        federation: The clients.
        optimizer: SGD at rate 0.1 by default.
        plan: How clients are mapped.
        cohort: S; 0: everyone.
        hidden: Widths of the MLP.
        rounds: R.
        loss: In place of the model's.
        model: Whatever `models.build` takes.
        **training: Further arguments of LocalTraining.
    """
    shape = federation.train.x.shape[2:]
    several = federation.task == "regression" and federation.train.y.ndim > 2
    targets = federation.train.y.shape[2:] if several else None
    model = model or models.MLP(hidden=tuple(hidden))
    model = built_once(model, shape, federation.task, federation.num_classes, targets)
    solver = bound_once(LocalTraining(optimizer or SGD, **training), model)
    solver = solver.with_loss(loss) if loss else solver
    num, n_max = federation.train.y.shape[:2]
    plan = plan or make_plan("map", devices=1)
    return Problem(
        model, solver, plan, num, cohort or num, n_max, rounds, common_init=False, learning_rate=0.1
    )


def make_algorithm(name, problem, **hyperparameters):
    """A registered method with its defaults but for `hyperparameters`."""
    return METHODS[name](**hyperparameters).build(problem)


def make_experiment(name, problem, federation, *, hyperparameters=None, plan=None, **fields):
    """A run of a registered method, on two devices unless `plan` says otherwise."""
    plan = plan or make_plan("map", devices=2)
    method = METHODS[name](**hyperparameters or {})
    fields = {"config": {"settings": {}}} | fields
    return Experiment(method, problem._replace(plan=plan), federation, **fields)


def run(experiment, rounds, *, out=None, schedule=EVERY, **options):
    """Trains one experiment; its outcome."""
    trainer = Trainer([experiment], outs=out and [out], **options)
    return trainer.train(rounds, schedule)[0]


def init(algorithm, problem, key, clients):
    """The initial state of all clients and the server."""
    return lifting.init(algorithm, problem.plan, key, clients)


def predict(algorithm, problem, key, state, clients):
    """What every client predicts with, leaves (K, ...): its models (K, J, ...), weights (K, J) and inputs."""
    return serve(algorithm, problem, lambda prediction, _: prediction, key, state, clients).outputs


def serve(algorithm, problem, use, key, state, clients, inputs=()):
    """What clients make of their predictions, and whom they use; compiled."""
    ids = np.arange(problem.num_clients, dtype=np.int32)
    run = jax.jit(functools.partial(lifting.serve, algorithm, problem.plan, use))
    return run(key, state, ids, clients, inputs)


def adapt(algorithm, problem, key, state, clients):
    """What clients unseen in training predict with, as `predict`."""

    def use(prediction, _):
        return prediction

    run = jax.jit(functools.partial(lifting.serve_newcomers, algorithm, problem.plan, use))
    return run(key, state, clients, ())


def used(algorithm, problem, key, state, clients):
    """What a run records of whom clients use: "index" and "weights" (K, J), and others."""
    return serve(algorithm, problem, lambda prediction, _: (), key, state, clients).used


def evaluate(algorithm, problem, key, state, clients, split):
    """Every client's scores on its part of a split."""

    def use(prediction, own):
        return metrics.evaluate(problem, algorithm, prediction, own)

    return serve(algorithm, problem, use, key, state, clients, split).outputs


def shardings(algorithm, problem, clients):
    """Where a run keeps the state."""
    shape = jax.eval_shape(functools.partial(init, algorithm, problem), jax.random.key(0), clients)
    return state_shardings(problem.plan, shape)


def zeros(algorithm, problem, clients):
    """A state of zeros, for functions that read a part of it; nothing is compiled."""
    shape = jax.eval_shape(functools.partial(init, algorithm, problem), jax.random.key(0), clients)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shape)


def start(algorithm, problem, clients, seed=0):
    """The initial state, placed as a run places it."""
    first, _ = programs(algorithm, problem, clients)
    return first(jax.random.key(seed), place(problem.plan, clients, problem.num_clients))


def trainer(algorithm, problem, clients, rounds, seed=0):
    """(clients, state=None) -> all states, the initial one first, and the rounds' records; compiles a round once."""
    first, one_round = programs(algorithm, problem, clients)

    def play(clients, state=None):
        clients = place(problem.plan, clients, problem.num_clients)
        states = [first(jax.random.key(seed), clients) if state is None else state]
        records = []
        for number in range(rounds):
            state, record = one_round(jax.random.key(seed), np.int32(number), states[-1], clients)
            states.append(state)
            records.append(record)
        return states, records

    return play


PROGRAMS: dict[Any, Any] = {}  # those of the algorithms that were played last
MOST_PROGRAMS = 40


def programs(algorithm, problem, clients):
    """The programs that begin and that play a round: one pair for each algorithm, however often it is played."""
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(clients))
    form = (id(algorithm), id(problem), shapes)
    if form not in PROGRAMS:
        if len(PROGRAMS) == MOST_PROGRAMS:
            del PROGRAMS[next(iter(PROGRAMS))]
        shape = shardings(algorithm, problem, clients)
        first = jax.jit(functools.partial(init, algorithm, problem), out_shardings=shape)
        one_round = jax.jit(
            make_round(algorithm, problem.plan, problem.cohort_size), out_shardings=(shape, None)
        )
        # which holds what the identifiers belong to
        PROGRAMS[form] = (algorithm, problem, first, one_round)
    return PROGRAMS[form][2:]


def train(algorithm, problem, clients, rounds, *, seed=0, state=None):
    """Plays rounds; returns all states, the initial one first, and the rounds' records."""
    return trainer(algorithm, problem, clients, rounds, seed)(clients, state)


class Played(NamedTuple):
    """Rounds of a registered method.

    Attributes:
        federation: The clients.
        problem: What the method is built for.
        algorithm: The method.
        states: All states, the initial one first.
        records: The rounds' records.
    """

    federation: Federation
    problem: Problem
    algorithm: Algorithm
    states: list
    records: list


class Compiled(NamedTuple):
    """A method's programs. The first argument of each are the hyperparameters that are numbers."""

    init: Callable[..., Any]
    one_round: Callable[..., Any]
    predict: Callable[..., Any]


COMPILED: dict[Any, Compiled] = {}  # what this process has compiled


def play(name, federation, rounds, optimizer=None, hyperparameters=None, script=None, **options):
    """Plays rounds of a registered method; the arguments are those of `play_and_predict`."""
    return play_and_predict(
        name, federation, rounds, optimizer, hyperparameters, script, **options
    )[0]


def play_and_predict(
    name,
    federation,
    rounds,
    optimizer=None,
    hyperparameters=None,
    script=None,
    state=None,
    run_rounds=2,
    **options,
):
    """Plays rounds of a registered method; (the rounds, () -> what every client predicts with after the last round).

    Plays that differ only in numbers, data and the number of rounds share what they compile: hyperparameters that are
    numbers are traced, as they are where a grid of hyperparameters is tuned.

    Args:
        name: The method.
        federation: The clients.
        rounds: Number of rounds.
        optimizer: As of `make_problem`. To share programs, pass the same object.
        hyperparameters: The method's hyperparameters.
        script: The clients' downloads, as of `scripted`.
        state: The state to start from, in place of the method's.
        run_rounds: R, the number of rounds of the whole run, which some methods read.
        **options: As of `make_problem`.
    """
    hyperparameters = hyperparameters or {}
    problem = make_problem(federation, optimizer, rounds=run_rounds, **options)
    algorithm = make_algorithm(name, problem, **hyperparameters)  # which checks the hyperparameters
    numbers = {
        hyperparameter: value
        for hyperparameter, value in hyperparameters.items()
        if hyperparameter in numbers_of(name) and value is not None
    }
    words = {
        hyperparameter: value
        for hyperparameter, value in hyperparameters.items()
        if hyperparameter not in numbers
    }

    def build(traced):
        algorithm = make_algorithm(name, problem, **words, **traced)
        return algorithm if script is None else scripted(algorithm, script)

    if script is not None:
        algorithm = scripted(algorithm, script)
    clients = federation.client_data
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(clients))
    drawn = None if script is None else np.asarray(script).tobytes()
    form = (
        name,
        optimizer,
        drawn,
        *items(words),
        *sorted(numbers),
        *items(options),
        run_rounds,
        federation.task,
        *shapes,
    )
    known = COMPILED.get(form) if hashable(form) else None
    if known is None:
        known = compile_rounds(build, algorithm, problem, clients)
        if hashable(form):
            COMPILED[form] = known

    traced = {hyperparameter: np.float32(value) for hyperparameter, value in numbers.items()}
    key = jax.random.key(0)
    placed = place(problem.plan, clients, problem.num_clients)
    first = known.init(traced, key, placed)
    if state is not None:
        first = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), state, first)
    states = [first]
    records = []
    for number in range(rounds):
        state, record = known.one_round(traced, key, np.int32(number), states[-1], placed)
        states.append(state)
        records.append(record)
    predictions = functools.partial(known.predict, traced, key, states[-1], placed)
    return Played(federation, problem, algorithm, states, records), predictions


def compile_rounds(build, algorithm, problem, clients):
    """The programs of `play`; build: numbers -> algorithm."""
    shape = shardings(algorithm, problem, clients)
    ids = np.arange(problem.num_clients, dtype=np.int32)

    def first(numbers, key, clients):
        return lifting.init(build(numbers), problem.plan, key, clients)

    def one_round(numbers, key, number, state, clients):
        return make_round(build(numbers), problem.plan, problem.cohort_size)(
            key, number, state, clients
        )

    def predict(numbers, key, state, clients):
        def use(prediction, _):
            return prediction

        return lifting.serve(
            build(numbers), problem.plan, use, key, state, ids, clients, ()
        ).outputs

    return Compiled(
        jax.jit(first, out_shardings=shape),
        jax.jit(one_round, out_shardings=(shape, None)),
        jax.jit(predict),
    )


def numbers_of(name):
    """The hyperparameters of a method that may be traced."""
    hints = typing.get_type_hints(METHODS[name])
    fields = [field for field in dataclasses.fields(METHODS[name]) if not field.metadata["static"]]
    return {field.name for field in fields if value_type(hints[field.name]) is float}


def items(options):
    """The entries of a dict, sorted, for a key."""
    return tuple(sorted(options.items(), key=lambda item: item[0]))


def hashable(value):
    """Whether a value can be a key."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def scripted(algorithm, script):
    """The algorithm with its downloads given: script (R, K, J), client ids."""
    script = jnp.asarray(script, jnp.int32)

    def download(context, row, cohort):
        return script[context.round, context.client]

    return dataclasses.replace(algorithm, download=download)


def load_example(name):
    """The module of a file in examples/."""
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[1] / "examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks its types up
    spec.loader.exec_module(module)
    return module


def watched(algorithm, note):
    """The algorithm, which tells `note` of every download: (round, client, ids)."""

    def download(context, row, cohort):
        index = algorithm.download(context, row, cohort)
        jax.debug.callback(
            lambda *found: note(*map(np.asarray, found)), context.round, context.client, index
        )
        return index

    return dataclasses.replace(algorithm, download=download)


def assert_trees_close(a, b, rtol=0.0, atol=0.0):
    """Leaf by leaf; exactly by default. Functions in the trees need only have the same name."""

    def structure(tree):
        return re.sub(r" at 0x\w+", "", str(jax.tree.structure(tree)))

    assert structure(a) == structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(x), np.asarray(y), rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path)
        )


def same_trees(a, b):
    """Whether all leaves are equal, bit for bit."""
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
