"""Studies as their authors write them, in several files each. `test_edits` edits their texts.

Every study has a file "study.py" with a function `run`, which returns its `pfl.Run`; that for tuning has `tune`.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pfljax.settings.method import METHODS

DATA = """
import numpy as np
import pfljax as pfl


def examples():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(36, 4)).astype(np.float32)
    y = rng.integers(0, 3, 36)
    return x, y


def clients(**options):
    x, y = examples()
    return pfl.Federation.from_arrays(x, y, client=np.arange(36) % 3, **options)
"""

# Metrics and a stop rule, which use a package, a module two imports away and a module of constants.
METRICS = {
    "data.py": DATA,
    "study.py": """
import optax
import pfljax as pfl

import data
import rules
import score


def run():
    local = pfl.LocalTraining(optax.sgd, 0.1)
    model = pfl.models.MLP(hidden=())
    return pfl.Run(pfl.FedAvg(), data.clients(), model, local, metrics=score.METRICS, stop=rules.RULE)
""",
    "config.py": '''
"""Constants of the study."""

CUT = 0.5
SHIFTS = {"low": 0.1, "high": 0.3}
CLASSES = (0, 1)
HARD = frozenset({1, 2})
''',
    "kit/__init__.py": """
from .margins import margin
from .tables import lookup as table_of
""",
    "kit/margins.py": '''
import numpy as np

from .deep import levels

SMALL = 1e-3


def margin(outputs, y):
    """The distance of the largest outputs."""
    ordered = np.sort(outputs, axis=1)
    gap = ordered[:, -1] - ordered[:, -2]
    return levels.level(gap.mean() + SMALL)


def spread(outputs):
    return outputs.std(axis=1)
''',
    "kit/tables.py": """
import numpy as np

ROWS = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


def lookup(row):
    return ROWS[row]
""",
    "kit/deep/__init__.py": "",
    "kit/deep/levels.py": """
import math

STEP = 0.25


def level(value):
    return math.floor(value / STEP) * STEP


def clip(value, low=-1.0, high=1.0):
    return min(max(value, low), high)
""",
    "hidden.py": """
import numpy as np

HIDDEN = np.frompyfunc(lambda value: value + 1.5, 1, 1)


def hidden(outputs, y):
    return HIDDEN(outputs).sum()
""",
    "score.py": '''
import collections
import contextlib
import dataclasses
import functools
import itertools
import operator

import jax
import numpy as np
import optax
import pfljax as pfl

import config
import hidden
import kit
from kit import table_of
from kit.deep.levels import clip
from kit.margins import spread as spread_of

PENALTY = 0.2
COSTS = np.arange(9.0).reshape(3, 3)
OFFSET = np.float32(0.5)
PAIRS = [(0, 1.0), (1, 2.0)]
BINS = range(0, 10, 2)
SLICE = slice(0, 2)
COUNTS = collections.Counter("aab")
QUEUE = collections.deque([1.0, 2.0], maxlen=5)
FALLBACK = collections.defaultdict(lambda: 0.5, {"known": 2.0})
Limits = collections.namedtuple("Limits", "low high")
LIMITS = Limits(0.1, 0.9)
GENERATOR = np.random.default_rng(5)
MASKED = np.ma.masked_array([1.0, 2.0, 3.0], mask=[False, True, False])
RECORD = np.array([(1, 2.0)], dtype=[("place", int), ("size", float)])
RULES = {"sum": lambda values: values.sum(), "peak": lambda values: values.max() * 2}


def two_away(outputs, y):
    """Through a package to a module inside it."""
    return kit.margin(outputs, y)


def constants(outputs, y):
    chosen = np.isin(y, [*config.CLASSES]).mean()
    hard = sum(int(label) in config.HARD for label in y)
    return config.SHIFTS["high"] * chosen + hard + (outputs > config.CUT).mean()


def renamed_imports(outputs, y):
    return clip(spread_of(outputs).mean()) + table_of(1).sum()


def arrays(outputs, y):
    cost = COSTS[outputs.argmax(axis=1), y].mean()
    return cost + OFFSET + MASKED.sum() + RECORD["size"].sum()


def containers(outputs, y):
    pairs = sum(weight * (y == label).mean() for label, weight in PAIRS)
    numbers = sum(BINS) + COUNTS["a"] + QUEUE[0] + FALLBACK["other"]
    return pairs + numbers + outputs[SLICE].sum() + LIMITS.high


def by_name(outputs, y):
    return RULES["peak"](outputs)


def checked(least):
    def decorate(function):
        @functools.wraps(function)
        def call(outputs, y):
            found = function(outputs, y)
            return max(found, least)

        return call

    return decorate


@checked(least=0.25)
def decorated(outputs, y):
    with contextlib.suppress(ZeroDivisionError):
        return float(outputs.sum()) / int(y.sum())
    return -1.0


def powered(power, base=2.0):
    factor = base**power

    def score(outputs, y):
        return factor * outputs.mean()

    return score


made = powered(3)


@functools.lru_cache(maxsize=None)
def weight_of(label):
    return 1.0 / (1 + label)


def cached(outputs, y):
    return sum(weight_of(int(label)) for label in y)


@functools.singledispatch
def size_of(value):
    return 0.0


@size_of.register
def size_of_array(value: np.ndarray):
    return value.size * 2.0


def dispatched(outputs, y):
    return size_of(outputs)


class Scaled:
    """Scales by a rule of its own."""

    unit = 100.0

    def __init__(self, inner, power):
        self.inner = inner
        self.power = power

    def __getitem__(self, name):
        return {"square": 2, "cube": 3}[name]

    def percent(self, outputs, y):
        return self.unit * self.inner(outputs, y) ** self[self.power]


def hits(outputs, y):
    return (outputs.argmax(axis=1) == y).mean()


class Weighted(Scaled):
    def percent(self, outputs, y):
        return super().percent(outputs, y) / 2


@dataclasses.dataclass
class Windowed:
    width: int = 2
    steps: list = dataclasses.field(default_factory=lambda: [1.0, 0.5])

    def __call__(self, outputs, y):
        return outputs[: self.width].sum() * self.steps[1]


class Descending:
    """A descriptor."""

    def __get__(self, instance, owner):
        return 4.0


class Described:
    order = Descending()

    def __call__(self, outputs, y):
        return self.order * outputs.min()


def ranked(outputs, y, *, top=2, weights=(1.0, 0.5)):
    ordered = np.argsort(-outputs, axis=1)[:, :top]
    return sum(weight * (ordered[:, place] == y).mean() for place, weight in enumerate(weights))


def general(outputs, y, combine, start):
    return functools.reduce(combine, outputs.ravel().tolist(), start)


def matched(outputs, y):
    match len(y) % 3:
        case 0:
            return 1.0
        case 1 | 2:
            return PENALTY
    return 0.0


def walked(outputs, y):
    values = itertools.accumulate(outputs.ravel().tolist(), operator.add)
    return [value for value in values if value > 0.1][-1:] == []


def times(factor, values):
    return factor * values


ROWS = jax.vmap(functools.partial(times, 2.0))
FADE = optax.piecewise_constant_schedule(1.0, {2: 0.5})
JOINED = optax.join_schedules([optax.constant_schedule(3.0), optax.constant_schedule(4.0)], [5])
ENTRIES = np.vectorize(functools.partial(times, 0.5))
VIEW = memoryview(b"abc")


def of_libraries(outputs, y):
    figures = float(ROWS(outputs).sum()) + float(FADE(3)) + float(JOINED(2))
    return figures + ENTRIES(outputs).sum() + VIEW[0]


@pfl.metric(higher_is_better=False)
def error(outputs, y):
    def miss(label, output):
        return label != output.argmax()

    return sum(map(miss, y, outputs)) / len(y)


METRICS = {
    "two_away": two_away,
    "constants": constants,
    "renamed_imports": renamed_imports,
    "arrays": arrays,
    "containers": containers,
    "by_name": by_name,
    "decorated": decorated,
    "made": made,
    "cached": cached,
    "dispatched": dispatched,
    "bound": Weighted(hits, "square").percent,
    "windowed": Windowed(),
    "described": Described(),
    "ranked": ranked,
    "part": functools.partial(general, combine=operator.add, start=0.0),
    "matched": matched,
    "walked": walked,
    "of_libraries": of_libraries,
    "hidden": hidden.hidden,
    "error": error,
}
''',
    "rules.py": '''
import config

LEAST = 1e-4


class Flat:
    """Stops when a figure has not changed for some evaluations."""

    length = 3
    key = "validation_loss"

    def __init__(self, tolerance):
        self.tolerance = tolerance
        self.past = {"skip": 1}

    def figures(self, rows):
        return [row.get(self.key, row["loss"]) for row in rows[self.past["skip"] :]]

    def __call__(self, rows):
        latest = self.figures(rows)[-self.length :]
        if len(latest) < self.length:
            return False
        return worse(latest, self.tolerance) and "flat"


def worse(latest, tolerance):
    return max(latest) - min(latest) < max(tolerance, LEAST) * config.CUT


def either(*rules):
    def rule(rows):
        return any(each(rows) for each in rules)

    return rule


RULE = either(Flat(0.01), lambda rows: rows[-1]["loss"] > 50.0)
''',
}

# A method whose functions read the planned number of rounds, call Python, and have derivatives of their own.
METHOD = {
    "data.py": DATA,
    "study.py": """
import optax
import pfljax as pfl

import data
from shaped import Shaped


def run():
    local = pfl.LocalTraining(optax.sgd, 0.1, batch_size=4)
    model = pfl.models.MLP(hidden=())
    return pfl.Run(
        Shaped(),
        data.clients(),
        model,
        local,
        participation=0.67,
        planned_rounds=40,
        unseen=data.clients(seed=1),
        execution=pfl.Execution("map", devices=1),
    )
""",
    "shaped.py": '''
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pfljax as pfl

from parts import hosts, pacing
from parts.rules import absolute, clipped, scaled, softened


@pfl.method(keeps="nothing", travels="the model")
@dataclasses.dataclass(frozen=True)
class Shaped(pfl.FedAvg):
    """Shaped (Me, 2026): FedAvg with factors from several places."""

    strength: float = pfl.hyperparameter(0.5, at_least=0, help="of the pull to zero")

    def build(self, problem):
        plain = super().build(problem)
        period = problem.rounds // 4

        def start(key, clients):
            begun = plain.start(key, clients)
            factor = pacing.first(problem.rounds)
            return begun._replace(models=jax.tree.map(lambda leaf: factor * leaf, begun.models))

        def sample(key, state, clients):
            late = state.round >= pacing.switch(problem.rounds)
            order = jax.random.permutation(key, 3)
            return jnp.sort(jnp.where(late, order, jnp.arange(3))[:2])

        def size_of(params):
            return sum(softened(absolute(leaf)).sum() for leaf in jax.tree.leaves(params))

        def client_update(context, models, row, data):
            rate = pacing.decay(context.round, problem.rounds)
            models = jax.tree.map(lambda leaf: rate * scaled(hosts.shifted(leaf)), models)
            output = plain.client_update(context, models, (), data)
            params = jax.tree.map(lambda leaf: leaf[0], models)
            gradient = jax.grad(size_of)(params)
            model = jax.tree.map(lambda leaf, g: leaf - self.strength * g[None], output.upload.update, gradient)
            row = {"seen": row["seen"] + 1, "times": row["times"] + context.round}
            return output._replace(row=row, upload=output.upload._replace(update=model))

        def server_update(key, state, aggregate):
            state, metrics = plain.server_update(key, state, aggregate)
            phase = (state.round % max(period, 1)).astype(jnp.float32)
            models = jax.tree.map(lambda leaf: clipped(leaf) * (1 + phase * pacing.tail(problem.rounds)), state.models)
            models = jax.tree.map(hosts.filtered, models)
            return state.with_models(models), metrics

        def first_row(key, client, start):
            return pfl.First({"seen": jnp.zeros(()), "times": jnp.zeros(())})

        def predict(context, models, row, data):
            factor = pacing.curve(problem.rounds)
            return pfl.Prediction(jax.tree.map(lambda leaf: factor * hosts.logged(leaf), models))

        def adapt(context, models, data):
            factor = pacing.newcomer(problem.rounds)
            return pfl.Prediction(jax.tree.map(lambda leaf: factor * leaf, models))

        return dataclasses.replace(
            plain,
            start=start,
            first_row=first_row,
            sample=sample,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            adapt=adapt,
        )
''',
    "parts/__init__.py": "",
    "parts/pacing.py": '''
"""Factors that depend on the number of rounds."""

import math

import jax.numpy as jnp
import numpy as np


def first(rounds):
    return 1.0 if rounds < 50 else 0.5


def switch(rounds):
    return round(rounds * 0.3)


def decay(number, rounds):
    table = jnp.asarray(np.linspace(1.0, 0.5, rounds, dtype=np.float32))
    return table[jnp.minimum(number, rounds - 1)]


def tail(rounds):
    warm = min(rounds, 25)
    return 0.01 * warm / max(rounds, 60)


def curve(rounds):
    total = 1.0
    for number in range(0, rounds, 8):
        total += 0.1 / (1 + number)
    return total * math.sqrt(rounds)


def newcomer(rounds):
    if 30 <= rounds <= 60:
        return 0.75
    return 1.0 - 1.0 / math.log2(rounds + 2)
''',
    "parts/hosts.py": '''
"""Functions that Python computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from . import kernels
from .kernels import Filter

SHIFT = {"by": np.array(0.01, np.float32)}
FILTER = Filter([0.5, 0.25])
SEEN = []


def on_host(x, power=1):
    return (x + SHIFT["by"] ** power).astype(x.dtype)


def shifted(leaf):
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.pure_callback(functools.partial(on_host, power=2), shape, leaf, vmap_method="sequential")


def filtered(leaf):
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.pure_callback(FILTER.apply, shape, leaf, vmap_method="sequential")


def logged(leaf):
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    factor = 1.5

    def noted(x):
        SEEN.append(x.shape)
        return kernels.softly(x) * np.float32(factor)

    return io_callback(noted, shape, leaf, ordered=False)
''',
    "parts/kernels.py": """
import numpy as np

EDGE = 3.0


def softly(x):
    return np.tanh(x / np.float32(EDGE)).astype(x.dtype)


class Filter:
    decimals = 5

    def __init__(self, taps):
        self.taps = tuple(taps)

    def apply(self, x):
        return np.round(x * np.float32(self.taps[0] + self.taps[1]), self.decimals).astype(x.dtype)
""",
    "parts/rules.py": '''
"""Functions with derivatives of their own."""

import functools

import jax
import jax.numpy as jnp

SOFT = 0.1


@jax.custom_jvp
def absolute(x):
    return jnp.abs(x)


@absolute.defjvp
def absolute_jvp(primals, tangents):
    (x,) = primals
    (t,) = tangents
    return absolute(x), jnp.tanh(4.0 * x) * t


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def power(x, exponent):
    return x**exponent


def power_fwd(x, exponent):
    return power(x, exponent), x


def power_bwd(exponent, x, g):
    return (exponent * jnp.maximum(x, SOFT) ** (exponent - 1) * g,)


power.defvjp(power_fwd, power_bwd)


def softened(x):
    return power(x, 2.0)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -5.0, 5.0)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g,))


@jax.custom_batching.custom_vmap
def scaled(x):
    return x * 1.0


@scaled.def_vmap
def scaled_rows(size, batched, x):
    return x * 0.9, batched[0]
''',
}

# Local training, JAX's settings and everything that a solver is made of.
TRAINING = {
    "data.py": DATA,
    "study.py": """
import jax
import optax
import pfljax as pfl

import data
import how

jax.config.update("jax_threefry_partitionable", True)
jax.config.update("jax_default_matmul_precision", None)
jax.config.update("jax_random_seed_offset", 0)


def run():
    local = pfl.LocalTraining(
        how.optimizer,
        0.1,
        batch_size=4,
        steps=3,
        schedule=how.pace,
        loss=how.loss,
        dtype="float32",
        matmul_precision=None,
        keep_optimizer=False,
        common_init=None,
    )
    model = pfl.models.MLP(hidden=(4,))
    return pfl.Run(
        pfl.Ditto(),
        data.clients(validation_fraction=0.2),
        model,
        local,
        fine_tune_epochs=0,
        server=pfl.Server(aggregator="mean"),
        compression=pfl.Compression(upload="none"),
        faults=pfl.Faults(dropout=0.0),
        client_privacy=None,
    )
""",
    "how.py": '''
"""How clients train."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import labels
from settings import MILESTONES, WARMUP

FACTORS = {"first": 1.0, "later": 0.5}


def pace(number):
    """The factor of a round."""
    warm = jnp.minimum((number + 1) / WARMUP, 1.0)
    passed = sum(jnp.where(number >= milestone, 1, 0) for milestone in MILESTONES)
    return warm * FACTORS["later"] ** passed


class Scale:
    """A transformation of updates with a constant."""

    by = 0.9

    def init(self, params):
        return optax.EmptyState()

    def update(self, updates, state, params=None):
        return jax.tree.map(lambda leaf: leaf * self.by, updates), state


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def within(count):
    return optax.linear_schedule(1.0, 0.1, transition_steps=20)(count)


def optimizer(rate):
    scale = Scale()
    return optax.chain(
        optax.masked(optax.add_decayed_weights(1e-3), is_matrix),
        optax.trace(decay=0.8),
        optax.GradientTransformation(scale.init, scale.update),
        optax.scale_by_schedule(within),
        optax.scale_by_learning_rate(rate),
    )


def smooth(y, classes):
    return jax.nn.one_hot(y, classes) * 0.9 + 0.1 / classes


@functools.partial(jax.jit, static_argnames="gamma")
def focus(likelihood, gamma=2.0):
    return (1 - likelihood) ** gamma


def loss(outputs, y):
    targets = smooth(y, 3) * labels.weights()
    log_likelihood = jax.nn.log_softmax(outputs / labels.TEMPERATURE)
    return -(focus(jnp.exp(log_likelihood)) * targets * log_likelihood).sum(axis=-1)
''',
    "labels.py": """
import numpy as np

TEMPERATURE = 1.5
COUNTS = np.array([3.0, 2.0, 1.0], np.float32)


def weights():
    return COUNTS / COUNTS.sum() * len(COUNTS)
""",
    "settings.py": """
WARMUP = 4
MILESTONES = [10, 20]
""",
}

# A Linen network.
LINEN = {
    "data.py": DATA,
    "study.py": """
import optax
import pfljax as pfl

import data
from nets import Net


def run():
    local = pfl.LocalTraining(optax.sgd, 0.1)
    return pfl.Run(pfl.FedAvg(), data.clients(), Net(classes=3), local)
""",
    "nets/__init__.py": "from nets.net import Net\n",
    "nets/net.py": '''
"""The network."""

from typing import Any, Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from .blocks import Block, Bias, gate
from nets.tables import MIX, table


class Net(nn.Module):
    """Blocks, and a head."""

    classes: int
    widths: Sequence[int] = (5, 4)
    activation: Callable = nn.gelu
    dtype: Any = jnp.float32

    def setup(self):
        self.blocks = [Block(width, self.activation) for width in self.widths]
        self.shift = Bias()

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = self.shift(x.reshape(x.shape[0], -1)) + table()
        x = x @ MIX
        for block in self.blocks:
            x = block(x)
        x = gate(x, sharpness=2.0)
        return nn.Dense(self.classes, dtype=self.dtype, kernel_init=nn.initializers.he_normal())(x)
''',
    "nets/blocks.py": '''
import flax.linen as nn
import jax
import jax.numpy as jnp

RESIDUAL = 0.5


def constant(key, shape, dtype=jnp.float32):
    return jnp.full(shape, 0.05, dtype)


class Bias(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("bias", constant, (x.shape[-1],))


def gate(x, sharpness=1.0):
    return x * jax.nn.sigmoid(sharpness * x)


class Block(nn.Module):
    """A layer and a shortcut."""

    width: int
    activation: object

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.width, bias_init=nn.initializers.zeros)(x)
        y = nn.RMSNorm(epsilon=1e-6)(self.activation(y))
        return y + RESIDUAL * x[:, : self.width].mean(axis=1, keepdims=True)
''',
    "nets/tables.py": """
import functools

import jax.numpy as jnp
import numpy as np

MIX = jnp.asarray(np.eye(4, dtype=np.float32) + 0.1)


@functools.lru_cache(maxsize=None)
def table():
    return np.linspace(0, 0.3, 4, dtype=np.float32)
""",
}

# An NNX network.
NNX = {
    "data.py": DATA,
    "study.py": """
import optax
import pfljax as pfl

import data
import net


def run():
    local = pfl.LocalTraining(optax.sgd, 0.1)
    return pfl.Run(pfl.FedAvg(), data.clients(), net.make, local)
""",
    "net.py": '''
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shapes import HIDDEN

BASIS = np.array([1.0, 0.5, 0.25, 0.125], np.float32)


class Mixer(nnx.Module):
    """Mixes features."""

    def __init__(self, size, *, rngs):
        self.scale = nnx.Param(jnp.full((size,), 0.7))
        self.mix = nnx.Linear(size, size, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.mix(x * self.scale[...]) * BASIS


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.mixer = Mixer(4, rngs=rngs)
        self.body = nnx.Linear(4, HIDDEN, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)
        self.norm = nnx.LayerNorm(HIDDEN, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, 3, rngs=rngs)

    def __call__(self, x):
        x = self.mixer(x) + x
        x = nnx.silu(self.norm(self.body(x)))
        return self.head(x)


def make(rngs):
    return Net(rngs=rngs)
''',
    "shapes.py": "HIDDEN = 2 * 3\n",
}

# Clients made by functions of the author's.
CLIENTS = {
    "study.py": """
import optax
import pfljax as pfl

import clients


def run():
    local = pfl.LocalTraining(optax.sgd, 0.1)
    return pfl.Run(pfl.FedAvg(), clients.federation(), pfl.models.MLP(hidden=()), local, unseen=clients.unseen())
""",
    "clients.py": '''
"""Clients with their own labels."""

import numpy as np
import pfljax as pfl

import transforms
from transforms.noise import noisy

SKEW = (0.7, 0.2, 0.1)


def owners(y, seed):
    """Most examples of a label belong to one client."""
    rng = np.random.default_rng(seed)
    shares = [np.roll(SKEW, int(label)) for label in y]
    return np.array([rng.choice(3, p=share) for share in shares])


def examples(number, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, 4)).astype(np.float32)
    y = np.arange(number) % 3
    x = transforms.PIPELINE(x + y[:, None] * 0.5)
    return noisy(x, seed), y


def federation():
    x, y = examples(60, seed=4)
    kept = np.linalg.norm(x, axis=1) < 9.0
    x, y = x[kept], y[kept]
    return pfl.Federation.from_arrays(x, y, client=owners(y, seed=2), test_fraction=0.25, seed=0, standardize=False)


def unseen():
    x, y = examples(30, seed=6)
    return pfl.Federation.from_arrays(x, y, client=np.arange(30) % 2, standardize=False)
''',
    "transforms/__init__.py": """
import functools

import numpy as np

ORDER = [0, 2, 1, 3]


def ordered(x):
    return x[:, ORDER]


def logged(x, base=1.0):
    return np.sign(x) * np.log1p(np.abs(x) * base)


def compose(*functions):
    return lambda x: functools.reduce(lambda value, function: function(value), functions, x)


PIPELINE = compose(ordered, functools.partial(logged, base=2.0))
""",
    "transforms/noise.py": """
import numpy as np

LEVEL = 1e-3


def noisy(x, seed):
    return (x + LEVEL * np.random.default_rng(seed + 100).normal(size=x.shape)).astype(np.float32)
""",
}

# A search over hyperparameters, of which each point runs other code.
TUNING = {
    "data.py": DATA,
    "study.py": """
import optax
import pfljax as pfl

import data
from branched import Branched


def tune(out, say):
    local = pfl.LocalTraining(optax.sgd, 0.1)
    model = pfl.models.MLP(hidden=())
    hyperparameters = {"kind": ["plain", "scaled", "hosted"], "depth": [1, 2], "late": [False, True]}
    return pfl.tune(
        Branched(),
        data.clients(validation_fraction=0.25),
        model,
        local,
        rounds=2,
        hyperparameters=hyperparameters,
        seeds=[5],
        widen=0,
        out=out,
        say=say,
        execution=pfl.Execution("map", devices=1),
    )
""",
    "branched.py": '''
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pfljax as pfl

import variants


@pfl.method(keeps="nothing", travels="the model")
@dataclasses.dataclass(frozen=True)
class Branched(pfl.FedAvg):
    """Branched (Me, 2026): FedAvg with kinds of steps."""

    kind: str = pfl.hyperparameter("plain", choices=("plain", "scaled", "hosted"))
    depth: int = pfl.hyperparameter(1, at_least=1)
    late: bool = pfl.hyperparameter(False)

    def build(self, problem):
        plain = super().build(problem)
        step = variants.STEPS[self.kind]

        def server_update(key, state, aggregate):
            state, metrics = plain.server_update(key, state, aggregate)
            models = state.models
            for number in range(self.depth):
                models = jax.tree.map(lambda leaf, number=number: step(leaf) * (1 - 0.1 * number), models)
            if self.late:
                models = jax.tree.map(lambda leaf: variants.fade(leaf, state.round, problem.rounds), models)
            return state.with_models(models), metrics

        return dataclasses.replace(plain, server_update=server_update)
''',
    "variants.py": """
import jax
import jax.numpy as jnp
import numpy as np

GAIN = 1.1


def plain(leaf):
    return leaf


def scaled(leaf):
    return GAIN * leaf


def on_host(x):
    return np.clip(x, -2.0, 2.0)


def hosted(leaf):
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.pure_callback(on_host, shape, leaf, vmap_method="sequential")


def fade(leaf, number, rounds):
    return jnp.where(number >= rounds // 2, 0.5, 1.0) * leaf


STEPS = {"plain": plain, "scaled": scaled, "hosted": hosted}
""",
}

STUDIES = {
    "metrics": METRICS,
    "method": METHOD,
    "training": TRAINING,
    "linen": LINEN,
    "nnx": NNX,
    "clients": CLIENTS,
    "tuning": TUNING,
}
SETTINGS = ("jax_threefry_partitionable", "jax_default_matmul_precision", "jax_random_seed_offset")


@contextlib.contextmanager
def loaded(files: dict[str, str], folder: Path) -> Iterator[ModuleType]:
    """Writes a study's files, and imports "study.py" as a new process would.

    Methods, modules and JAX's settings are as before afterwards.
    """
    import jax

    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    methods = set(METHODS)
    modules = set(sys.modules)
    settings = {name: getattr(jax.config, name) for name in SETTINGS}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            yield importlib.import_module("study")
        finally:
            for name in set(METHODS) - methods:
                del METHODS[name]
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]
            for name, value in settings.items():
                jax.config.update(name, value)
