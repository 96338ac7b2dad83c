"""Wrong calls from Python: each raises an `ArgumentError` of one line that names the argument, before anything is
trained or written.

Most calls are made from the declarations; see `tests/mistakes.py`. `BY_HAND` has those that no declaration gives.
"""

import inspect
import math
import re
import sys
from pathlib import Path
from unittest import mock

import flax.linen as nn
import numpy as np
import optax
import pytest
from mistakes import calls, wrong_calls, wrong_values

import pfljax as pfl
from pfljax.api import run as api_run
from pfljax.settings import fields
from pfljax.settings.fields import REQUIRED, Field, hyperparameter
from pfljax.settings.method import METHODS

MODEL = pfl.models.MLP(hidden=())
CLIENTS = pfl.data.digits(num_clients=4, train_examples=6)
X = np.zeros((12, 3))
Y = np.arange(12) % 3
PARTS = {"clients": CLIENTS, "model": MODEL}
CROPPED = pfl.LocalTraining(augment="crop_flip")
TITLES = ("", " ", ".", "..", "../x", "a/b", "a\\b", "a\nb", "/tmp/x", 3)


class Own(nn.Module):
    """Returns one output, for any number of classes."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x.reshape(len(x), -1))


def run(**options):
    return pfl.Run(**{"method": pfl.FedAvg(), **PARTS} | options)


def train(**options):
    return run().train(**{"rounds": 1} | options)


def compare(**options):
    return pfl.compare(**{"methods": [pfl.FedAvg()], **PARTS, "rounds": 1} | options)


def tune(**options):
    return pfl.tune(**{"method": pfl.FedAvg(), **PARTS, "rounds": 1} | options)


def from_arrays(**options):
    return pfl.Federation.from_arrays(**{"x": X, "y": Y} | options)


def replicates(**options):
    return pfl.train_replicates(**{"runs": [run(), run()], "rounds": 1} | options)


def with_local(**options):
    return run(local=pfl.LocalTraining(**options))


# Function, its arguments, and the argument that the line names, or words that it has.
BY_HAND = [
    (pfl.Ditto, {"mu": 0.1, "lam": 0.1}, "lam"),
    (lambda: pfl.Ditto(0.1, 0.2), {}, "arguments"),
    (lambda: pfl.LocalTraining(optax.sgd(0.1), 0.1), {}, "learning_rate"),
    (pfl.Privacy, {"noise_multiplier": 1.0}, "noise_multiplier"),
    (pfl.data.npz, {"file": "nowhere.npz"}, "file"),
    (pfl.data.npz, {"file": "/"}, "file"),
    (pfl.data.npz, {"file": ""}, "file"),
    (pfl.data.text, {"file": "nowhere.txt"}, "file"),
    (pfl.data.digits, {"num_clients": 4, "partition": pfl.partitions.LabelGroups(5)}, "groups"),
    (pfl.trackers.TensorBoard, {"folder": "/dev/null/x"}, "folder"),
    (run, {"execution": pfl.Execution(devices=99)}, "devices=99"),
    (run, {"method": pfl.FedAvg}, "method"),
    (run, {"method": "fedavgg"}, "method"),
    (run, {"model": 5}, "model"),
    (run, {"model": "mlp"}, "model"),
    (run, {"model": None}, "model"),
    (run, {"model": Own()}, "model"),
    (run, {"clients": X}, "clients"),
    (run, {"method": pfl.FedeRiCo(4)}, "federico.neighbors=4: accepted: 0 to 3"),
    (run, {"eval_clients": 5}, "eval_clients=5: accepted: 0 to 4"),
    (with_local, {"class_weights": [math.nan] * 10}, "class_weights"),
    (with_local, {"class_weights": [1.0]}, "class_weights"),
    (train, {"resume": 1, "out": "x"}, "resume"),
    (train, {"resume": True}, "resume"),
    (train, {"out": "/proc/x"}, "out"),
    (train, {"out": "/dev/null/x"}, "out"),
    (train, {"out": "x" * 300}, "out"),
    (train, {"out": "x\0"}, "out"),
    (train, {"profile": "/dev/null/x"}, "profile"),
    (replicates, {"outs": ["/proc/x", "/proc/y"]}, "out"),
    (replicates, {"outs": ["x"]}, "outs"),
    (replicates, {"trackers": [print]}, "trackers"),
    (compare, {"out": "/proc/x"}, "out"),
    (compare, {"methods": ["fedavgg"]}, "methods"),
    (compare, {"methods": [pfl.FedAvg]}, "methods"),
    (compare, {"methods": [pfl.FedAvg(), pfl.FedAvg()]}, "methods"),
    (compare, {"methods": [("", "a")]}, "methods"),
    *((compare, {"methods": [(title, pfl.FedAvg())]}, "methods") for title in TITLES),
    (compare, {"clients": lambda seed: X}, "clients"),
    (compare, {"seed": 3}, "seed=3: unknown argument; did you mean seeds"),
    (compare, {"method": pfl.FedAvg()}, "method"),
    (tune, {"seed": 3}, "seed=3: unknown argument; did you mean seeds"),
    (tune, {"hyperparameters": {"mu": [1]}}, "hyperparameters"),
    (tune, {"method": pfl.FedProx(), "hyperparameters": {"mu": []}}, "hyperparameters"),
    (tune, {"method": pfl.FedProx(), "hyperparameters": {"mu": 1}}, "hyperparameters"),
    (tune, {"method": pfl.FedProx(), "hyperparameters": {"mu": [-1.0]}}, "fedprox.mu"),
    (from_arrays, {"x": [["a"]] * 12}, "x"),
    (from_arrays, {"x": Y}, "x"),
    (from_arrays, {"x": np.full((12, 3), np.nan)}, "x"),
    (from_arrays, {"x": None}, "x"),
    (from_arrays, {"y": Y[:5]}, "y"),
    (from_arrays, {"client": Y[:5]}, "client"),
    (from_arrays, {"client": X[:, 0]}, "client"),
    (from_arrays, {"num_classes": 2}, "num_classes"),
    (from_arrays, {"is_test": Y}, "is_test"),
    (from_arrays, {"num_clients": 99}, "num_clients"),
    (from_arrays, {"partition": pfl.partitions.IID}, "partition"),
    (from_arrays, {"replacement": True}, "replacement"),
    (lambda: run(clients=from_arrays(client=Y), local=CROPPED), {}, "augment"),
]


def refusal(function, arguments):
    """The error of a wrong call, or None if the call is accepted."""
    try:
        function(**arguments)
    except pfl.ArgumentError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500
        return error
    return None


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """An empty working directory, in which nothing must be written; and nothing is trained."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(api_run.Trainer, "train", side_effect=AssertionError("trains")):
        yield
    assert not list(Path().iterdir())


def test_every_declared_argument_refuses_wrong_values(nowhere):
    for wrong in wrong_calls():
        error = refusal(wrong.call, {**wrong.given, **wrong.changed})
        assert error is not None, f"accepted: {wrong}"
        owner = f"{wrong.name}." if wrong.name in METHODS else ""
        assert error.argument == wrong.argument, wrong
        assert str(error).startswith(f"{owner}{wrong.argument}"), wrong
        assert wrong.words in str(error), f"{wrong}: {error}"


# What a `Ledger`, which checks its fields itself, accepts.
LEDGER = (
    Field("gradients", int, REQUIRED, hyperparameter(at_least=0).metadata),
    Field("passes", float, 1, hyperparameter(1, at_least=0).metadata),
    Field("unaccounted", str, "", {}),
)


@pytest.mark.parametrize("field", LEDGER, ids=lambda field: field.name)
def test_a_ledger_refuses_what_its_declaration_would(field):
    for wrong in wrong_values(field):
        error = refusal(pfl.author.Ledger, {"gradients": 1, field.name: wrong.value})
        assert error is not None, f"accepted: {wrong}"
        assert error.argument == field.name and str(error).startswith(field.name), wrong
        assert wrong.words in str(error), f"{wrong}: {error}"


@pytest.mark.parametrize(("function", "arguments", "said"), BY_HAND)
def test_mistakes_that_no_declaration_gives_are_refused(function, arguments, said, nowhere):
    error = refusal(function, arguments)
    assert error is not None
    assert said == error.argument if said.isidentifier() else said in str(error)


def test_everything_that_checks_its_arguments_is_in_the_campaign():
    """The functions and classes with `checked`, but for the settings of commands, whose flags are played."""
    modules = [
        vars(sys.modules[name]) for name in sys.modules if re.match(r"pfljax\.(?!cli)", name)
    ]
    found = set()
    for value in [value for module in modules for value in module.values()]:
        functions = vars(value).values() if inspect.isclass(value) else [value]
        found |= {name_of(function) for function in functions if is_checked(function)}
    assert len(found) > 100
    called = [
        each.call.__init__ if inspect.isclass(each.call) else each.call for each in calls().values()
    ]
    assert found - {*map(name_of, called)} == set()


def is_checked(function):
    """Whether a function is one that `checked` has made."""
    function = getattr(function, "__func__", function)
    wrapped = hasattr(function, "__wrapped__") and inspect.isfunction(function)
    return wrapped and function.__code__.co_filename == fields.__file__


def name_of(function):
    """The module and name of a function."""
    return function.__module__, function.__qualname__


def test_the_campaign_is_large():
    assert len(wrong_calls()) == len({*map(str, wrong_calls())}) >= 6000


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64])
def test_numbers_of_numpy_are_plain_numbers(kind):
    local = pfl.LocalTraining(optax.sgd, np.float32(0.5), batch_size=kind(3))
    assert type(local.batch_size) is int and local.batch_size == 3
    assert type(local.learning_rate) is float
    assert from_arrays(num_clients=kind(2), seed=kind(1), client=Y).num_clients == 2
    krum = pfl.Server(aggregator="krum", trim=np.float64(0.25))
    assert repr(krum) == repr(pfl.Server(aggregator="krum", trim=0.25))
