"""Edits of studies of several files between two runs: what changes results is noticed, and nothing else is.

Each study is trained for a round, edited, and checked as a resumed run is; a search over hyperparameters is run
again. See `studies` for the studies, `test_mutations` for edits of a study of one file.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from samples import check, params, sample
from studies import STUDIES, loaded

import pfljax as pfl
from pfljax.contract import speech
from pfljax.folder import folders

pytestmark = pytest.mark.xdist_group("edits")


# Edits that change no result and are noticed: one too many is better than one too few.
ALARMS = {
    ("metrics", "an unused function of a helper"): "helper modules count as a whole",
    ("metrics", "an unused import of a helper"): "an import runs a module",
    ("metrics", "a partial's keywords in another order"): "a function may see their order",
    ("training", "a loop as a comprehension"): "the same operations are in another order",
}


class Edit(NamedTuple):
    """An edit of a file of a study.

    Attributes:
        file: The file.
        old: Text in it; "" appends the new text, also to a file that is not there yet.
        new: What stands there after the edit.
        named: What the message names.
    """

    file: str
    old: str
    new: str
    named: str = ""


SCORE = "score.py"
RULES = "rules.py"
CONFIG = "config.py"
LEVELS = "kit/deep/levels.py"
MARGINS = "kit/margins.py"
TABLES = "kit/tables.py"


def metric(name, old, new, file=SCORE):
    """An edit that the message names with its metric and its file."""
    return Edit(file, old, new, f"metric {name}: {file} changed")


def rule(old, new, file=RULES):
    """An edit of the stop rule."""
    return Edit(file, old, new, f"stop rule: {file} changed")


OF_METRICS = {
    "a constant two modules away": metric("two_away", "STEP = 0.25", "STEP = 0.5", LEVELS),
    "a function two modules away": metric("two_away", "math.floor", "math.ceil", LEVELS),
    "a constant of a module inside a package": metric(
        "two_away", "SMALL = 1e-3", "SMALL = 1e-2", MARGINS
    ),
    "an index in a package": metric("two_away", "ordered[:, -2]", "ordered[:, -3]", MARGINS),
    "a sorted axis": metric("two_away", "axis=1)\n    gap", "axis=0)\n    gap", MARGINS),
    "what a package re-exports": Edit(
        "kit/__init__.py",
        "import margin\n",
        "import spread as margin\n",
        "metric two_away: kit/__init__.py changed",
    ),
    "a scale in a module of constants": metric("constants", "CUT = 0.5", "CUT = 0.4", CONFIG),
    "a dict in a module of constants": metric("constants", '"high": 0.3', '"high": 0.4', CONFIG),
    "a tuple in a module of constants": metric(
        "constants", "CLASSES = (0, 1)", "CLASSES = (0, 2)", CONFIG
    ),
    "a frozen set": metric("constants", "frozenset({1, 2})", "frozenset({1})", CONFIG),
    "which entry of a dict": metric("constants", 'SHIFTS["high"]', 'SHIFTS["low"]'),
    "one more term": metric("constants", "+ hard +", "+ 2 * hard +"),
    "a default of a helper": metric("renamed_imports", "high=1.0", "high=0.2", LEVELS),
    "an argument of a helper": metric(
        "renamed_imports", "spread_of(outputs).mean())", "spread_of(outputs).mean(), -0.5)"
    ),
    "a helper under another name": metric(
        "renamed_imports", "margins import spread as", "margins import margin as"
    ),
    "an array of a helper": metric("renamed_imports", "[3.0, 4.0, 5.0]", "[3.0, 4.0, 6.0]", TABLES),
    "a row that is looked up": metric("renamed_imports", "table_of(1)", "table_of(0)"),
    "the shape of an array": metric(
        "arrays", "np.arange(9.0).reshape(3, 3)", "np.arange(9.0).reshape(3, 3).T"
    ),
    "a number of NumPy": metric("arrays", "np.float32(0.5)", "np.float32(0.25)"),
    "the precision of a number": metric("arrays", "np.float32(0.5)", "np.float64(0.5)"),
    "a mask": metric("arrays", "mask=[False, True, False]", "mask=[False, False, False]"),
    "a value under a mask": metric("arrays", "masked_array([1.0,", "masked_array([1.5,"),
    "a record": metric("arrays", "[(1, 2.0)]", "[(1, 3.0)]"),
    "a field of a record": metric("arrays", 'RECORD["size"]', 'RECORD["place"]'),
    "a pair": metric("containers", "(1, 2.0)]\nBINS", "(1, 2.5)]\nBINS"),
    "the step of a range": metric("containers", "range(0, 10, 2)", "range(0, 10, 3)"),
    "a slice": metric("containers", "slice(0, 2)", "slice(0, 1)"),
    "a counter": metric("containers", 'Counter("aab")', 'Counter("aaab")'),
    "a queue": metric("containers", "deque([1.0, 2.0]", "deque([2.0, 2.0]"),
    "a default factory": metric("containers", "lambda: 0.5", "lambda: 0.75"),
    "a named tuple": metric("containers", "Limits(0.1, 0.9)", "Limits(0.1, 0.8)"),
    "the order of a named tuple's fields": metric("containers", '"low high"', '"high low"'),
    "a lambda in a dict": metric("by_name", "values.max() * 2", "values.max() * 3"),
    "the name of a lambda": metric("by_name", 'RULES["peak"]', 'RULES["sum"]'),
    "an argument of a decorator": metric("decorated", "least=0.25", "least=0.5"),
    "what a decorator does": metric("decorated", "max(found, least)", "min(found, least)"),
    "what is suppressed": metric("decorated", "suppress(ZeroDivisionError)", "suppress(KeyError)"),
    "a decorator less": metric("decorated", "@checked(least=0.25)\ndef decorated", "def decorated"),
    "an argument of a factory": metric("made", "powered(3)", "powered(2)"),
    "a default of a factory": metric("made", "base=2.0", "base=3.0"),
    "what a factory computes": metric("made", "base**power", "base * power"),
    "a cached helper": metric("cached", "1.0 / (1 + label)", "1.0 / (2 + label)"),
    "what a cached helper is given": metric(
        "cached", "weight_of(int(label))", "weight_of(int(label) + 1)"
    ),
    "a function for a type": metric("dispatched", "value.size * 2.0", "value.size * 3.0"),
    "another type": metric("dispatched", "(value: np.ndarray)", "(value: dict)"),
    "a metric inside an object": metric(
        "bound", 'Weighted(hits, "square")', 'Weighted(ranked, "square")'
    ),
    "a text of an object": metric("bound", '(hits, "square")', '(hits, "cube")'),
    "a special method": metric("bound", '{"square": 2, "cube": 3}', '{"square": 1, "cube": 3}'),
    "an attribute of a class's base": metric("bound", "unit = 100.0", "unit = 10.0"),
    "a method that calls its base's": metric(
        "bound", ".percent(outputs, y) / 2", ".percent(outputs, y) / 3"
    ),
    "another base": metric("bound", "class Weighted(Scaled):", "class Weighted(Scaled, dict):"),
    "a class less": metric("bound", "Weighted(hits,", "Scaled(hits,"),
    "a metric behind an object": metric(
        "bound", "(outputs.argmax(axis=1) == y)", "(outputs.argmin(axis=1) == y)"
    ),
    "a default factory of a field": metric("windowed", "lambda: [1.0, 0.5]", "lambda: [1.0, 0.6]"),
    "a width": metric("windowed", "width: int = 2", "width: int = 1"),
    "a value that is passed": metric("windowed", "Windowed(),", "Windowed(width=3),"),
    "an entry of a list": metric("windowed", "self.steps[1]", "self.steps[0]"),
    "a descriptor": metric("described", "return 4.0", "return 5.0"),
    "a keyword's default": metric("ranked", "top=2,", "top=1,"),
    "a tuple as a default": metric("ranked", "weights=(1.0, 0.5)", "weights=(1.0, 0.25)"),
    "a sign": metric("ranked", "np.argsort(-outputs", "np.argsort(outputs"),
    "an operator of a partial": metric("part", "combine=operator.add", "combine=operator.sub"),
    "a start of a partial": metric("part", "start=0.0", "start=1.0"),
    "a partial's function": metric("part", "outputs.ravel()", "np.abs(outputs).ravel()"),
    "a case": metric("matched", "case 1 | 2:", "case 1:"),
    "a case's value": metric("matched", "len(y) % 3", "len(y) % 2"),
    "a case's constant": metric("matched", "PENALTY = 0.2", "PENALTY = 0.3"),
    "an operator": metric("walked", "operator.add)", "operator.mul)"),
    "a condition": metric("walked", "value > 0.1", "value > 0.2"),
    "a slice of a list": metric("walked", "[-1:]", "[:1]"),
    "a partial that a library maps": metric(
        "of_libraries", "partial(times, 2.0)", "partial(times, 2.5)"
    ),
    "a schedule of a library": metric("of_libraries", "{2: 0.5}", "{2: 0.6}"),
    "one of joined schedules": metric(
        "of_libraries", "constant_schedule(3.0)", "constant_schedule(3.5)"
    ),
    "what is mapped over entries": metric(
        "of_libraries", "partial(times, 0.5)", "partial(times, 0.25)"
    ),
    "what a library hides": metric("hidden", "value + 1.5", "value + 2.5", "hidden.py"),
    "a view of memory": metric("of_libraries", 'b"abc"', 'b"bbc"'),
    "a queue's length": metric("containers", "maxlen=5", "maxlen=2"),
    "a dict for a counter": metric("containers", 'Counter("aab")', 'OrderedDict({"a": 2, "b": 1})'),
    "the direction": metric("error", "higher_is_better=False", "higher_is_better=True"),
    "an inner function": metric("error", "label != output.argmax()", "label != output.argmin()"),
    "another metric under a name": Edit(
        SCORE, '"error": error,', '"error": hits,', "metric error: "
    ),
    "another method of the object": Edit(
        SCORE,
        '"bound": Weighted(hits, "square").percent',
        '"bound": Scaled(hits, "square").percent',
        "metric bound: ",
    ),
    "another metric at the same place": Edit(
        SCORE, '"cached": cached,', '"cached": dispatched,', "metric cached: "
    ),
    "a threshold of a stop rule": rule("Flat(0.01)", "Flat(0.02)"),
    "the length of a stop rule": rule("length = 3", "length = 4"),
    "the key that a stop rule reads": rule('key = "validation_loss"', 'key = "accuracy"'),
    "the key if the first is missing": rule('row["loss"])', 'row["round"])'),
    "an entry of a stop rule's dict": rule('{"skip": 1}', '{"skip": 0}'),
    "a helper of a stop rule": rule("max(latest) - min(latest)", "latest[0] - latest[-1]"),
    "a constant of a stop rule": rule("LEAST = 1e-4", "LEAST = 1e-3"),
    "a constant that a stop rule imports": rule("CUT = 0.5", "CUT = 0.6", CONFIG),
    "a rule in a closure": rule('["loss"] > 50.0', '["loss"] > 40.0'),
    "how rules are joined": rule("any(each(rows)", "all(each(rows)"),
    "a rule less": rule(
        'either(Flat(0.01), lambda rows: rows[-1]["loss"] > 50.0)', "either(Flat(0.01))"
    ),
    "why a rule stops": rule('and "flat"', "and False"),
    "which rows count": rule("[-self.length :]", "[: self.length]"),
}

PACING = "parts/pacing.py"
HOSTS = "parts/hosts.py"
KERNELS = "parts/kernels.py"
DERIVED = "parts/rules.py"
SHAPED = "shaped.py"
OF_METHOD = {
    "below a number of rounds": Edit(PACING, "rounds < 50", "rounds < 40", "start of Shaped"),
    "a factor below a number of rounds": Edit(
        PACING, "return 1.0 if", "return 0.9 if", "start of Shaped"
    ),
    "a share of the rounds": Edit(PACING, "rounds * 0.3", "rounds * 0.4", "sample of Shaped"),
    "whether a share is rounded up": Edit(
        PACING, "round(rounds * 0.3)", "math.ceil(rounds * 0.31)", "sample of Shaped"
    ),
    "the comparison with a round": Edit(
        SHAPED, "state.round >=", "state.round >", "sample of Shaped"
    ),
    "a cohort": Edit(
        SHAPED, "order, jnp.arange(3))[:2]", "order, jnp.arange(3))[1:]", "sample of Shaped"
    ),
    "the end of a table over rounds": Edit(
        PACING, "(1.0, 0.5, rounds", "(1.0, 0.4, rounds", "captured arrays"
    ),
    "a table that is longer than the rounds": Edit(
        PACING, "(1.0, 0.5, rounds,", "(1.0, 0.5, rounds + 1,", "client_update of Shaped"
    ),
    "a clipped round": Edit(PACING, "rounds - 1)]", "rounds - 2)]", "client_update of Shaped"),
    "the least of rounds and a number": Edit(
        PACING, "min(rounds, 25)", "min(rounds, 30)", "server_update of Shaped"
    ),
    "the largest of rounds and a number": Edit(
        PACING, "max(rounds, 60)", "max(rounds, 70)", "server_update of Shaped"
    ),
    "a quotient of rounds": Edit(
        SHAPED, "problem.rounds // 4", "problem.rounds // 5", "server_update of Shaped"
    ),
    "a remainder": Edit(SHAPED, "state.round %", "2 * state.round %", "server_update of Shaped"),
    "a loop over rounds": Edit(
        PACING, "range(0, rounds, 8)", "range(0, rounds, 10)", "predict of Shaped"
    ),
    "a term of a loop over rounds": Edit(
        PACING, "0.1 / (1 + number)", "0.2 / (1 + number)", "predict of Shaped"
    ),
    "a function of rounds": Edit(
        PACING, "math.sqrt(rounds)", "math.log(rounds)", "predict of Shaped"
    ),
    "newcomers after these rounds": Edit(PACING, "return 0.75", "return 0.8", "adapt of Shaped"),
    "from which round on newcomers change": Edit(
        PACING, "30 <= rounds", "41 <= rounds", "adapt of Shaped"
    ),
    "newcomers after other rounds": Edit(
        PACING, "1.0 / math.log2", "0.5 / math.log2", "adapt of Shaped"
    ),
    "the name of an entry of a row": Edit(SHAPED, '"seen"', '"visits"', "first_row of Shaped"),
    "swapped entries of a row": Edit(
        SHAPED,
        '{"seen": row["seen"] + 1, "times": row["times"] + context.round}',
        '{"times": row["seen"] + 1, "seen": row["times"] + context.round}',
        "rounds and evaluation",
    ),
    "a hyperparameter's default": Edit(
        SHAPED,
        "pfl.author.hyperparameter(0.5, at_least",
        "pfl.author.hyperparameter(0.6, at_least",
        "strength",
    ),
    "an array in a dict of a callback": Edit(
        HOSTS, "np.array(0.01,", "np.array(0.02,", "client_update of Shaped"
    ),
    "a partial's keyword in a callback": Edit(
        HOSTS, "power=2), shape", "power=3), shape", "client_update of Shaped"
    ),
    "a callback": Edit(HOSTS, "(x + SHIFT", "(x - SHIFT", "client_update of Shaped"),
    "an attribute of a callback's object": Edit(
        HOSTS, "[0.5, 0.25]", "[0.5, 0.3]", "server_update of Shaped"
    ),
    "a class's attribute behind a callback": Edit(
        KERNELS, "decimals = 5", "decimals = 4", "server_update of Shaped"
    ),
    "a bound method as a callback": Edit(
        KERNELS, "[0] + self.taps[1]", "[0] - self.taps[1]", "server_update of Shaped"
    ),
    "how a callback's object is made": Edit(
        KERNELS, "tuple(taps)", "tuple(reversed(taps)) * 2", "server_update of Shaped"
    ),
    "a callback's closure": Edit(HOSTS, "factor = 1.5", "factor = 1.6", "predict of Shaped"),
    "a callback with effects": Edit(
        HOSTS, "* np.float32(factor)", "/ np.float32(factor)", "predict of Shaped"
    ),
    "a module behind a callback": Edit(KERNELS, "np.tanh(", "np.sin(", "predict of Shaped"),
    "a constant of a module behind a callback": Edit(
        KERNELS, "EDGE = 3.0", "EDGE = 4.0", "predict of Shaped"
    ),
    "a callback more": Edit(
        SHAPED,
        "scaled(hosts.shifted(leaf))",
        "scaled(hosts.shifted(hosts.shifted(leaf)))",
        "client_update",
    ),
    "a callback less": Edit(
        SHAPED, "factor * hosts.logged(leaf)", "factor * leaf", "predict of Shaped"
    ),
    "a custom derivative": Edit(
        DERIVED, "jnp.tanh(4.0 * x) * t", "jnp.tanh(5.0 * x) * t", "client_update of Shaped"
    ),
    "the value of a function with a derivative of its own": Edit(
        DERIVED, "return jnp.abs(x)", "return jnp.abs(x) + 1.0", "client_update of Shaped"
    ),
    "a custom pullback": Edit(
        DERIVED, "jnp.maximum(x, SOFT)", "jnp.minimum(x, SOFT)", "client_update of Shaped"
    ),
    "a constant of a custom pullback": Edit(
        DERIVED, "SOFT = 0.1", "SOFT = 0.2", "client_update of Shaped"
    ),
    "an argument that is not differentiated": Edit(
        DERIVED, "power(x, 2.0)", "power(x, 3.0)", "client_update of Shaped"
    ),
    "a function whose pullback is not used": Edit(
        DERIVED, "clip(x, -5.0", "clip(x, -4.0", "server_update of Shaped"
    ),
    "a rule for rows": Edit(
        DERIVED, "x * 0.9, batched[0]", "x * 0.8, batched[0]", "client_update of Shaped"
    ),
    "a function with a rule for rows": Edit(
        DERIVED, "return x * 1.0", "return x * 1.1", "client_update of Shaped"
    ),
}

HOW = "how.py"
LABELS = "labels.py"
OPTIONS = "settings.py"
STUDY = "study.py"
OF_TRAINING = {
    "random numbers": Edit(
        STUDY,
        '_partitionable", True',
        '_partitionable", False',
        "jax_threefry_partitionable: was True, is False",
    ),
    "the precision of products": Edit(
        STUDY,
        'matmul_precision", None',
        'matmul_precision", "bfloat16"',
        "jax_default_matmul_precision: was None",
    ),
    "an offset of seeds": Edit(
        STUDY, 'offset", 0', 'offset", 7', "jax_random_seed_offset: was 0, is 7"
    ),
    "the run's own precision": Edit(
        STUDY, "matmul_precision=None", 'matmul_precision="high"', "matmul_precision"
    ),
    "the type in which networks compute": Edit(
        STUDY, 'dtype="float32"', 'dtype="bfloat16"', "dtype"
    ),
    "what an optimizer keeps": Edit(
        STUDY, "keep_optimizer=False", "keep_optimizer=True", "keep_optimizer"
    ),
    "common initial models": Edit(STUDY, "common_init=None", "common_init=False", "common_init"),
    "the number of steps": Edit(STUDY, "steps=3", "steps=4", "steps"),
    "fine-tuning": Edit(STUDY, "fine_tune_epochs=0", "fine_tune_epochs=1", "fine_tune_epochs"),
    "the aggregator": Edit(STUDY, 'aggregator="mean"', 'aggregator="median"', "aggregator"),
    "compression": Edit(STUDY, 'upload="none"', 'upload="topk:0.5"', "upload"),
    "clients that drop out": Edit(STUDY, "dropout=0.0", "dropout=0.3", "dropout"),
    "private clients": Edit(
        STUDY, "client_privacy=None", "client_privacy=pfl.ClientPrivacy(1.0, 1.0)", "client_privacy"
    ),
    "another method": Edit(STUDY, "pfl.Ditto()", "pfl.FedAvg()", ""),
    "a method's hyperparameter": Edit(STUDY, "pfl.Ditto()", "pfl.Ditto(mu=0.3)", "mu"),
    "the validation examples": Edit(
        STUDY, "validation_fraction=0.2", "validation_fraction=0.3", ""
    ),
    "a layer more": Edit(STUDY, "hidden=(4,)", "hidden=(4, 4)", "model"),
    "the warm-up of a schedule": Edit(OPTIONS, "WARMUP = 4", "WARMUP = 5", "optimizer"),
    "a milestone": Edit(OPTIONS, "[10, 20]", "[10, 25]", "optimizer"),
    "a milestone more": Edit(OPTIONS, "[10, 20]", "[10, 20, 30]", "optimizer"),
    "a schedule's dict": Edit(HOW, '"later": 0.5', '"later": 0.6', "optimizer"),
    "a schedule's comparison": Edit(HOW, "number >= milestone", "number > milestone", "optimizer"),
    "what is decayed": Edit(HOW, "leaf.ndim > 1", "leaf.ndim > 0", "optimizer"),
    "how much is decayed": Edit(
        HOW, "add_decayed_weights(1e-3)", "add_decayed_weights(1e-2)", "optimizer"
    ),
    "the decay of momentum": Edit(HOW, "trace(decay=0.8)", "trace(decay=0.7)", "optimizer"),
    "an attribute of a transformation": Edit(HOW, "by = 0.9", "by = 0.8", "optimizer"),
    "the order of transformations": Edit(
        HOW,
        "        optax.masked(optax.add_decayed_weights(1e-3), is_matrix),\n        optax.trace(decay=0.8),\n",
        "        optax.trace(decay=0.8),\n        optax.masked(optax.add_decayed_weights(1e-3), is_matrix),\n",
        "optimizer",
    ),
    "the steps of an inner schedule": Edit(
        HOW, "transition_steps=20", "transition_steps=30", "optimizer"
    ),
    "the end of an inner schedule": Edit(
        HOW, "linear_schedule(1.0, 0.1", "linear_schedule(1.0, 0.2", "optimizer"
    ),
    "the form of an inner schedule": Edit(
        HOW,
        "optax.linear_schedule(1.0, 0.1, transition_steps=20)",
        "optax.cosine_decay_schedule(1.0, 20)",
        "optimizer",
    ),
    "the temperature of a loss": Edit(LABELS, "TEMPERATURE = 1.5", "TEMPERATURE = 2.0", "loss"),
    "the counts of labels": Edit(LABELS, "[3.0, 2.0, 1.0]", "[3.0, 2.0, 2.0]", "loss"),
    "how counts become weights": Edit(LABELS, "* len(COUNTS)", "* 1", "loss"),
    "a default of a jitted helper": Edit(HOW, "gamma=2.0", "gamma=1.0", "loss"),
    "smoothed targets": Edit(HOW, "* 0.9 + 0.1 / classes", "* 0.8 + 0.2 / classes", "loss"),
    "a sum to a mean": Edit(
        HOW, "log_likelihood).sum(axis=-1)", "log_likelihood).mean(axis=-1)", "loss"
    ),
}

NET = "nets/net.py"
BLOCKS = "nets/blocks.py"
MIXES = "nets/tables.py"
OF_LINEN = {
    "a width in a tuple": Edit(NET, "(5, 4)", "(5, 3)", "model"),
    "a block more": Edit(NET, "(5, 4)", "(5, 4, 4)", "model"),
    "an activation as a field": Edit(NET, "nn.gelu", "nn.silu", "model"),
    "an argument of an activation": Edit(
        NET, "self.activation)", "lambda x: nn.gelu(x, approximate=False))", "model"
    ),
    "a head's initializer": Edit(NET, "he_normal()", "he_uniform()", "model"),
    "a shortcut's constant": Edit(BLOCKS, "RESIDUAL = 0.5", "RESIDUAL = 0.4", "model"),
    "a shortcut's mean": Edit(BLOCKS, ".mean(axis=1, keepdims", ".max(axis=1, keepdims", "model"),
    "an initializer of the author's": Edit(
        BLOCKS, "jnp.full(shape, 0.05", "jnp.full(shape, 0.06", "model"
    ),
    "a bias's initializer": Edit(BLOCKS, "initializers.zeros)", "initializers.ones)", "model"),
    "another norm": Edit(BLOCKS, "nn.RMSNorm(epsilon=1e-6)", "nn.LayerNorm(epsilon=1e-6)", "model"),
    "a keyword of a gate": Edit(NET, "sharpness=2.0", "sharpness=3.0", "model"),
    "a gate": Edit(BLOCKS, "jax.nn.sigmoid(", "jnp.tanh(", "model"),
    "a captured matrix": Edit(MIXES, "+ 0.1)", "+ 0.2)", "model: captured arrays"),
    "a cached table": Edit(MIXES, "linspace(0, 0.3", "linspace(0, 0.4", "model"),
    "the type of a head": Edit(
        NET, "dtype: Any = jnp.float32", "dtype: Any = jnp.bfloat16", "model"
    ),
    "the order of layers": Edit(
        BLOCKS,
        "nn.RMSNorm(epsilon=1e-6)(self.activation(y))",
        "self.activation(nn.RMSNorm(epsilon=1e-6)(y))",
        "model",
    ),
    "a parameter's name": Edit(BLOCKS, 'self.param("bias"', 'self.param("shift"', "model"),
}

SIZES = "shapes.py"
OF_NNX = {
    "a hidden size in another module": Edit(SIZES, "2 * 3", "2 * 4", "model"),
    "a constant parameter": Edit("net.py", "(size,), 0.7", "(size,), 0.8", "model"),
    "a captured basis": Edit("net.py", "0.25, 0.125]", "0.25, 0.1]", "model: captured arrays"),
    "a bias": Edit("net.py", "use_bias=False, ", "use_bias=True, ", "model"),
    "an initializer": Edit("net.py", "xavier_uniform()", "xavier_normal()", "model"),
    "a norm's epsilon": Edit("net.py", "epsilon=1e-5", "epsilon=1e-3", "model"),
    "an activation": Edit("net.py", "nnx.silu", "nnx.relu", "model"),
    "a shortcut": Edit("net.py", "self.mixer(x) + x", "self.mixer(x)", "model"),
    "a norm less": Edit("net.py", "self.norm(self.body(x))", "self.body(x)", "model"),
    "the order of random streams": Edit(
        "net.py",
        "        self.mixer = Mixer(4, rngs=rngs)\n",
        "        rngs.params()\n        self.mixer = Mixer(4, rngs=rngs)\n",
        "model",
    ),
}

PEOPLE = "clients.py"
NOISE = "transforms/noise.py"
TRANSFORMS = "transforms/__init__.py"
OF_CLIENTS = {
    "the skew of a partition": Edit(PEOPLE, "(0.7, 0.2, 0.1)", "(0.6, 0.3, 0.1)", "other"),
    "who has which label": Edit(
        PEOPLE, "np.roll(SKEW, int(label))", "np.roll(SKEW, -int(label))", "train examples"
    ),
    "a partition's seed": Edit(PEOPLE, "owners(y, seed=2)", "owners(y, seed=3)", "other"),
    "a filter of examples": Edit(PEOPLE, "axis=1) < 9.0", "axis=1) < 2.5", "other"),
    "the classes' means": Edit(PEOPLE, "y[:, None] * 0.5", "y[:, None] * 0.6", "other data"),
    "a base of a transform": Edit(TRANSFORMS, "base=2.0", "base=3.0", "other data"),
    "a default of a transform that is not used": Edit(
        TRANSFORMS, "partial(logged, base=2.0)", "partial(logged)", "other"
    ),
    "the order of features": Edit(TRANSFORMS, "[0, 2, 1, 3]", "[0, 1, 2, 3]", "other data"),
    "a transform less": Edit(TRANSFORMS, "compose(ordered, ", "compose(", "other data"),
    "noise": Edit(NOISE, "LEVEL = 1e-3", "LEVEL = 2e-3", "other data"),
    "the seed of noise": Edit(NOISE, "seed + 100", "seed + 101", "other data"),
    "the share of test examples": Edit(PEOPLE, "test_fraction=0.25", "test_fraction=0.3", "other"),
    "the seed of a split": Edit(PEOPLE, "seed=0, standardize", "seed=1, standardize", "other"),
    "scaled features": Edit(
        PEOPLE, "seed=0, standardize=False", "seed=0, standardize=True", "other"
    ),
    "unseen clients' examples": Edit(
        PEOPLE, "examples(30, seed=6)", "examples(30, seed=7)", "other unseen clients"
    ),
    "who unseen clients are": Edit(
        PEOPLE, "np.arange(30) % 2", "np.arange(30) // 15", "other unseen clients"
    ),
}

VARIANTS = "variants.py"
BRANCHED = "branched.py"
OF_TUNING = {
    "code of another kind": Edit(VARIANTS, "GAIN = 1.1", "GAIN = 1.2", "server_update of Branched"),
    "a callback of another kind": Edit(
        VARIANTS, "np.clip(x, -2.0", "np.clip(x, -1.0", "server_update of Branched"
    ),
    "which code a kind runs": Edit(
        VARIANTS, '"scaled": scaled', '"scaled": plain', "server_update of Branched"
    ),
    "code of a larger depth": Edit(
        BRANCHED, "0.1 * number", "0.2 * number", "server_update of Branched"
    ),
    "code that only one switch runs": Edit(
        VARIANTS, "0.5, 1.0)", "0.6, 1.0)", "server_update of Branched"
    ),
    "code of a switch over rounds": Edit(
        VARIANTS, "rounds // 2", "rounds // 3", "server_update of Branched"
    ),
    "the order of a kind's steps": Edit(
        VARIANTS,
        "    return GAIN * leaf",
        "    return GAIN * leaf + 0.01",
        "server_update of Branched",
    ),
    "a value of a grid": Edit(STUDY, '"depth": [1, 2]', '"depth": [1, 3]', "grid"),
    "the rounds of a search": Edit(STUDY, "rounds=2", "rounds=3", "rounds"),
    "the seeds of a search": Edit(STUDY, "seeds=[5]", "seeds=[6]", "trials"),
    "the examples of a search": Edit(
        STUDY, "validation_fraction=0.25", "validation_fraction=0.3", "data"
    ),
    "the rate of a search": Edit(STUDY, "optax.sgd, 0.1", "optax.sgd, 0.2", "settings"),
    "the optimizer of a search": Edit(
        STUDY, "LocalTraining(optax.sgd", "LocalTraining(optax.adam", "optimizer"
    ),
    "the network of a search": Edit(STUDY, "hidden=()", "hidden=(3,)", "settings"),
}

NOTICED = {
    "metrics": OF_METRICS,
    "method": OF_METHOD,
    "training": OF_TRAINING,
    "linen": OF_LINEN,
    "nnx": OF_NNX,
    "clients": OF_CLIENTS,
    "tuning": OF_TUNING,
}

UNNOTICED = {
    "metrics": {
        "a comment in a metric": [Edit(SCORE, "PENALTY = 0.2", "PENALTY = 0.2  # as in the paper")],
        "a comment between lines": [
            Edit(SCORE, "    cost = COSTS", "    # by class\n    cost = COSTS")
        ],
        "a comment two modules away": [
            Edit(LEVELS, "STEP = 0.25", "# Found by hand.\nSTEP = 0.25")
        ],
        "a comment in a module of constants": [Edit(CONFIG, "CUT = 0.5", "CUT = 0.5  # in logits")],
        "a comment in a stop rule": [Edit(RULES, "length = 3", "length = 3  # evaluations")],
        "a module's docstring": [Edit(CONFIG, "Constants of the study.", "What the study sets.")],
        "a new module's docstring": [
            Edit(LEVELS, "\nimport math", '\n"""Levels."""\n\nimport math')
        ],
        "a helper's docstring": [
            Edit(MARGINS, "The distance of the largest outputs.", "The margin.")
        ],
        "a method's docstring": [
            Edit(
                RULES,
                "def figures(self, rows):",
                'def figures(self, rows):\n        """Figures."""',
            )
        ],
        "a class's docstring": [
            Edit(SCORE, "class Windowed:", 'class Windowed:\n    """A window."""\n')
        ],
        "a docstring less": [
            Edit(SCORE, '    """Through a package to a module inside it."""\n', "")
        ],
        "lines of a call": [
            Edit(
                SCORE,
                "functools.partial(general, combine=operator.add, start=0.0)",
                "functools.partial(\n        general,\n        combine=operator.add,\n        start=0.0,\n    )",
            )
        ],
        "lines of a helper's call": [
            Edit(
                LEVELS,
                "min(max(value, low), high)",
                "min(\n        max(value, low),\n        high,\n    )",
            )
        ],
        "quotes in a helper": [
            Edit(CONFIG, '{"low": 0.1, "high": 0.3}', "{'low': 0.1, 'high': 0.3}")
        ],
        "a trailing comma": [Edit(CONFIG, "(0, 1)", "(0, 1,)")],
        "parentheses in a helper": [
            Edit(LEVELS, "math.floor(value / STEP) * STEP", "(math.floor((value / STEP)) * STEP)")
        ],
        "empty lines in a helper": [Edit(TABLES, "    return ROWS[row]", "\n    return ROWS[row]")],
        "tabs": [Edit(LEVELS, "    return math", "\treturn math")],
        "digits in groups": [Edit(SCORE, "unit = 100.0", "unit = 1_00.0")],
        "a set in another order": [Edit(CONFIG, "frozenset({1, 2})", "frozenset({2, 1})")],
        "a local variable of a metric": [
            Edit(SCORE, "    cost = COSTS[", "    price = COSTS["),
            Edit(SCORE, "return cost + OFFSET", "return price + OFFSET"),
        ],
        "a local variable of a helper": [
            Edit(MARGINS, "    gap = ordered", "    distance = ordered"),
            Edit(MARGINS, "level(gap.mean()", "level(distance.mean()"),
        ],
        "arguments of a stop rule's helper": [
            Edit(RULES, "def worse(latest, tolerance):", "def worse(figures, least):"),
            Edit(
                RULES,
                "max(latest) - min(latest) < max(tolerance, LEAST)",
                "max(figures) - min(figures) < max(least, LEAST)",
            ),
        ],
        "an inner function's name": [
            Edit(SCORE, "def miss(label", "def wrong(label"),
            Edit(SCORE, "map(miss,", "map(wrong,"),
        ],
        "a constant's name": [
            Edit(SCORE, "PENALTY = 0.2", "PRICE = 0.2"),
            Edit(SCORE, "return PENALTY", "return PRICE"),
        ],
        "a private function's name": [
            Edit(RULES, "def worse(", "def is_flat("),
            Edit(RULES, "return worse(", "return is_flat("),
        ],
        "a class's name": [
            Edit(SCORE, "class Descending", "class Falling"),
            Edit(SCORE, "Descending()", "Falling()"),
        ],
        "a metric function's name": [
            Edit(SCORE, "def matched(", "def of_cases("),
            Edit(SCORE, '"matched": matched', '"matched": of_cases'),
        ],
        "annotations of a metric": [
            Edit(
                SCORE,
                "def matched(outputs, y):",
                "def matched(outputs: np.ndarray, y: np.ndarray) -> float:",
            )
        ],
        "annotations of a helper": [
            Edit(LEVELS, "def level(value):", "def level(value: float) -> float:")
        ],
        "annotations of a stop rule": [
            Edit(RULES, "self.past = {", "self.past: dict[str, int] = {")
        ],
        "an unused function beside metrics": [
            Edit(SCORE, "", "\n\ndef unused(outputs, y):\n    return 0.0\n")
        ],
        "an unused constant beside a stop rule": [
            Edit(RULES, "LEAST = 1e-4", "LEAST = 1e-4\nMOST = 1e4")
        ],
        "an unused function of a helper": [
            Edit(LEVELS, "", "\n\ndef unused(value):\n    return value\n")
        ],
        "an unused import of a metric": [
            Edit(SCORE, "import operator\n", "import operator\nimport math\n")
        ],
        "an unused import of a helper": [
            Edit(MARGINS, "import numpy as np\n", "import math\n\nimport numpy as np\n")
        ],
        "the order of imports": [
            Edit(
                SCORE,
                "import collections\nimport contextlib\n",
                "import contextlib\nimport collections\n",
            )
        ],
        "the order of functions": [
            Edit(SCORE, "made = powered(3)\n", ""),
            Edit(SCORE, "class Scaled:", "made = powered(3)\n\n\nclass Scaled:"),
        ],
        "the order of metrics": [
            Edit(SCORE, '    "two_away": two_away,\n', ""),
            Edit(
                SCORE, '    "error": error,\n', '    "error": error,\n    "two_away": two_away,\n'
            ),
        ],
        "a metric more": [
            Edit(SCORE, '    "error": error,\n', '    "error": error,\n    "hits": hits,\n')
        ],
        "a partial's keywords in another order": [
            Edit(SCORE, "combine=operator.add, start=0.0", "start=0.0, combine=operator.add")
        ],
    },
    "method": {
        "a comment beside rounds": [
            Edit(PACING, "    warm = min(", "    # At most 25.\n    warm = min(")
        ],
        "a comment in a callback": [
            Edit(HOSTS, "        SEEN.append", "        # For tests.\n        SEEN.append")
        ],
        "a callback's docstring": [Edit(HOSTS, "power=1):", 'power=1):\n    """Adds."""')],
        "lines of a callback's helper": [
            Edit(
                KERNELS,
                "np.tanh(x / np.float32(EDGE))",
                "np.tanh(\n        x / np.float32(EDGE)\n    )",
            )
        ],
        "a rule's comment": [Edit(DERIVED, "SOFT = 0.1", "SOFT = 0.1  # avoids poles")],
        "the name of a rule": [
            Edit(DERIVED, "def absolute_jvp(", "def slope("),
            Edit(DERIVED, "power_bwd", "pulled"),
        ],
        "a variable of a rule": [
            Edit(DERIVED, "(t,) = tangents", "(dx,) = tangents"),
            Edit(DERIVED, "* x) * t", "* x) * dx"),
        ],
        "a print": [
            Edit(
                SHAPED,
                "            params = jax",
                '            jax.debug.print("{}", context.round)\n            params = jax',
            )
        ],
        "a print while tracing": [
            Edit(SHAPED, "        period =", '        print("building")\n        period =')
        ],
        "a function of rounds under another name": [
            Edit(PACING, "def switch(", "def turn("),
            Edit(SHAPED, "pacing.switch(", "pacing.turn("),
        ],
        "a quotient in another form": [
            Edit(SHAPED, "problem.rounds // 4", "int(problem.rounds / 4)")
        ],
        "a function moved to another module": [
            Edit(PACING, "def first(rounds):\n    return 1.0 if rounds < 50 else 0.5\n", ""),
            Edit(
                "parts/begin.py", "", "def first(rounds):\n    return 1.0 if rounds < 50 else 0.5\n"
            ),
            Edit(
                SHAPED,
                "from parts import hosts, pacing\n",
                "from parts import begin, hosts, pacing\n",
            ),
            Edit(SHAPED, "pacing.first(", "begin.first("),
        ],
        "an import in another form": [
            Edit(
                SHAPED,
                "from parts import hosts, pacing\n",
                "import parts.pacing as pacing\nfrom parts import hosts\n",
            )
        ],
        "the order of methods' functions": [
            Edit(
                SHAPED,
                "            sample=sample,\n            client_update=client_update,\n",
                "            client_update=client_update,\n            sample=sample,\n",
            )
        ],
        "an error that is not raised": [
            Edit(
                SHAPED,
                "        period =",
                '        if problem.rounds < 1:\n            raise ValueError("rounds")\n        period =',
            )
        ],
    },
    "training": {
        "a schedule's docstring": [Edit(HOW, "The factor of a round.", "A factor.")],
        "a loop as a comprehension": [
            Edit(
                HOW,
                "sum(jnp.where(number >= milestone, 1, 0) for milestone in MILESTONES)",
                "sum([jnp.where(number >= first, 1, 0) for first in MILESTONES])",
            )
        ],
        "a constant under another name": [
            Edit(LABELS, "TEMPERATURE", "TAU"),
            Edit(HOW, "labels.TEMPERATURE", "labels.TAU"),
        ],
        "an equal type": [Edit(LABELS, "1.0], np.float32)", '1.0], dtype="float32")')],
        "a tuple for a list": [Edit(OPTIONS, "[10, 20]", "(10, 20)")],
        "a number in another form": [
            Edit(HOW, "add_decayed_weights(1e-3)", "add_decayed_weights(0.001)")
        ],
        "a lambda for a function": [Edit(HOW, "is_matrix),", "lambda params: is_matrix(params)),")],
        "an import from a module": [
            Edit(HOW, "import labels\n", "import labels\nfrom labels import weights\n"),
            Edit(HOW, "labels.weights()", "weights()"),
        ],
        "annotations of a loss": [
            Edit(
                HOW,
                "def loss(outputs, y):",
                "def loss(outputs: jax.Array, y: jax.Array) -> jax.Array:",
            )
        ],
    },
    "linen": {
        "a comment in a network": [Edit(BLOCKS, "RESIDUAL = 0.5", "RESIDUAL = 0.5  # a half")],
        "a field's default that is passed": [
            Edit(STUDY, "Net(classes=3)", "Net(3, widths=(5, 4))")
        ],
        "an absolute import": [Edit(NET, "from .blocks import", "from nets.blocks import")],
        "a relative import": [Edit("nets/__init__.py", "from nets.net", "from .net")],
        "a block's name": [
            Edit(BLOCKS, "class Bias", "class Shift"),
            Edit(NET, "Bias,", "Shift as Bias,"),
        ],
        "NumPy for JAX": [
            Edit(
                MIXES,
                "jnp.asarray(np.eye(4, dtype=np.float32) + 0.1)",
                "np.eye(4, dtype=np.float32) + np.float32(0.1)",
            )
        ],
        "a type of JAX": [Edit(MIXES, "4, dtype=np.float32)\n", "4, dtype=jnp.float32)\n")],
    },
    "nnx": {
        "a network's docstring": [Edit("net.py", "Mixes features.", "Mixes.")],
        "a lambda": [Edit(STUDY, "net.make,", "lambda rngs: net.Net(rngs=rngs),")],
        "a computed constant": [Edit(SIZES, "2 * 3", "6")],
        "an unused layer's import": [
            Edit("net.py", "import functools\n", "import functools\nimport math\n")
        ],
    },
    "clients": {
        "a comment beside clients": [Edit(PEOPLE, "SKEW = (", "# Of labels.\nSKEW = (")],
        "a loop for a comprehension": [
            Edit(
                PEOPLE,
                "shares = [np.roll(SKEW, int(label)) for label in y]",
                "shares = []\n    for label in y:\n        shares.append(np.roll(SKEW, int(label)))",
            )
        ],
        "a transform under another name": [Edit(TRANSFORMS, "ordered", "permuted")],
    },
    "tuning": {
        "a comment in code of another kind": [Edit(VARIANTS, "GAIN = 1.1", "GAIN = 1.1  # small")],
        "a kind's function under another name": [Edit(VARIANTS, "on_host", "clipped")],
        "kinds in another order": [
            Edit(
                VARIANTS, '{"plain": plain, "scaled": scaled,', '{"scaled": scaled, "plain": plain,'
            )
        ],
    },
}


CASES = [(study, what) for study in STUDIES for what in NOTICED[study]]
NEUTRAL = [(study, what) for study in STUDIES for what in UNNOTICED[study]]
FEW = [
    ("metrics", "a constant two modules away"),
    ("metrics", "a mask"),
    ("metrics", "a default factory"),
    ("metrics", "a partial that a library maps"),
    ("metrics", "a rule in a closure"),
    ("clients", "a base of a transform"),
    ("clients", "who unseen clients are"),
    ("metrics", "a comment two modules away"),
    ("metrics", "a local variable of a helper"),
    ("metrics", "a constant's name"),
    ("metrics", "an unused function of a helper"),
    ("clients", "a comment beside clients"),
]


def study_of(case):
    return case[0]


SOME = sample(CASES, study_of) + sample(NEUTRAL, study_of)
Train = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Train:
    """Study -> the folder of its run of a round, or of its search."""

    @functools.cache
    def train(study: str) -> Path:
        folder = tmp_path_factory.mktemp(study)
        out = folder / "out"
        with loaded(STUDIES[study], folder / "study") as module:
            if study == "tuning":
                module.tune(out)
            else:
                module.run().train(1, out=out)
        return out

    return train


def edited(study: str, edits: Sequence[Edit]) -> dict[str, str]:
    """The files of a study after some edits."""
    files = dict(STUDIES[study])
    for edit in edits:
        text = files.get(edit.file, "")
        assert edit.old in text, edit
        files[edit.file] = text.replace(edit.old, edit.new) if edit.old else text + edit.new
    assert files != STUDIES[study]
    return files


def resume(study: str, files: dict[str, str], folder: Path, out: Path) -> list[str]:
    """Checks an edited run as one that is resumed, or searches again. Returns the lines that a search says."""
    said: list[str] = []
    with loaded(files, folder / "study") as module:
        if study == "tuning":
            with speech.lines_to(said.append):
                module.tune(out)
        else:
            folders.check(out, module.run().experiment, True)
    return said


@pytest.mark.parametrize(("study", "what"), params(CASES, FEW, SOME))
def test_an_edit_that_changes_what_is_computed_is_noticed(study, what, trained, tmp_path):
    edit = NOTICED[study][what]
    files = edited(study, [edit])
    out = trained(study)
    error = pfl.ArgumentError if study == "tuning" else folders.Changed
    with pytest.raises(error) as caught:
        resume(study, files, tmp_path, out)
    assert edit.named in str(caught.value)


@pytest.mark.parametrize(("study", "what"), params(NEUTRAL, FEW, SOME))
def test_an_edit_that_changes_nothing_is_not_noticed(study, what, trained, tmp_path):
    files = edited(study, UNNOTICED[study][what])
    out = trained(study)
    if (study, what) in ALARMS:
        with pytest.raises(folders.Changed, match="by another program"):
            resume(study, files, tmp_path, out)
        return
    said = resume(study, files, tmp_path, out)
    searches = [line for line in said if line.endswith("already tuned")]
    assert len(searches) == (3 if study == "tuning" else 0)


def test_the_sample_has_edits_of_every_study():
    check(CASES + NEUTRAL, SOME, study_of)


def test_the_campaign_is_large_enough():
    assert len(CASES) >= 200 and len(NEUTRAL) >= 80
    assert len(ALARMS) <= 4 and {*ALARMS} <= {*NEUTRAL}
