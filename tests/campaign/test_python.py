"""Wrong calls from Python: each is refused with an `ArgumentError` of one line that names the argument, before anything
is trained or written.

Most cases are made from the declarations, so that a new setting is in the campaign by being declared.
"""

import math
import typing
import zlib
from pathlib import Path
from unittest import mock

import flax.linen as nn
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.api import run as api_run
from pfljax.contract.fields import REQUIRED, choices_of, fields_of, is_union, item_type, plain
from pfljax.contract.method import METHODS
from pfljax.data import sources
from pfljax.local.embedding import Embedding

MODEL = pfl.models.MLP(hidden=())
CLIENTS = pfl.data.digits(num_clients=4, train_examples=6)
X, Y = np.zeros((12, 3)), np.arange(12) % 3
RUN = lambda **options: pfl.Run(**{"method": pfl.FedAvg(), "clients": CLIENTS, "model": MODEL} | options)
TRAIN = lambda **options: RUN().train(**{"rounds": 1} | options)
GIVEN = {"clients": CLIENTS, "model": MODEL, "rounds": 1}
COMPARE = lambda **options: pfl.compare(**{"methods": [pfl.FedAvg()], **GIVEN} | options)
TUNE = lambda **options: pfl.tune(**{"method": pfl.FedAvg(), **GIVEN} | options)
ARRAYS = lambda **options: pfl.Federation.from_arrays(**{"x": X, "y": Y} | options)
REPLICATES = lambda **options: pfl.train_replicates(**{"runs": [RUN(), RUN()], "rounds": 1} | options)
UNSEEN = lambda **options: pfl.data.split_unseen(**{"federation": CLIENTS, "share": 0.5, "seed": 0} | options)
ATTACKERS = lambda **options: CLIENTS.with_attackers(**{"share": 0.5} | options)
LOAD = lambda **options: pfl.data.load(**{"source": sources.digits()} | options)
# What is called, what declares its arguments, and arguments with which it is called.
DECLARED = {
    **{each.__name__: (each, each) for each in (pfl.Execution, pfl.LocalTraining, pfl.Privacy, pfl.Server, pfl.Attack)},
    **{f"partitions.{each.__name__}": (each, each) for each in pfl.partitions.PARTITIONS.values()},
    **{
        f"data.{name}": (getattr(pfl.data, name),) * 2
        for name in ("digits", "sine", "synthetic", "npz", "read", "text", "tfds")
    },
    **{f"sources.{name}": (source, source) for name, source in sources.SOURCES.items()},
    **{name: (method, method) for name, method in METHODS.items()},
    "Embedding": (Embedding, Embedding),
    "Splits": (pfl.data.Splits, pfl.data.Splits),
    "Run": (RUN, pfl.Run),
    "Run.train": (TRAIN, pfl.Run.train),
    "compare": (COMPARE, pfl.compare),
    "tune": (TUNE, pfl.tune),
    "train_replicates": (REPLICATES, pfl.train_replicates),
    "from_arrays": (ARRAYS, pfl.Federation.from_arrays),
    "split_unseen": (UNSEEN, pfl.data.split_unseen),
    "with_attackers": (ATTACKERS, pfl.Federation.with_attackers),
    "load": (LOAD, pfl.data.load),
    "TensorBoard": (pfl.TensorBoard, pfl.TensorBoard),
}
OF_NUMBERS = {
    int: [1.5, math.nan, math.inf, "3", True, [], 2**40, -(2**40), np.float32(2.5), 10**400, 1j],
    float: [math.nan, "0.1", True, [], 1j, np.float64("nan"), [0.1]],
}


def wrong_values(field):
    """Values that a field does not accept, by its type and limits."""
    hint, limits = field.hint, field.limits
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] if is_union(hint) else [hint]
    none = [] if hint is typing.Any or type(None) in typing.get_args(hint) else [None]
    if len(kinds) > 1:  # such as a path
        return none + ([3, math.nan, []] if {*kinds} <= {str, Path} else [])
    (kind,), origin = kinds, typing.get_origin(kinds[0])
    if kind in (int, float):
        low, above, high, below = (limits.get(name) for name in ("at_least", "above", "at_most", "below"))
        beyond = [*([low - 1] if low is not None else []), *([high + 1] if high is not None else [])]
        beyond += [limit for limit in (above, below) if limit is not None]
        endless = [-math.inf] + [math.inf] * (not limits.get("infinite")) if limits and kind is float else []
        found = none + OF_NUMBERS[kind] + beyond + endless
        return found if limits else [value for value in found if value is None or isinstance(value, str | list | bool)]
    if kind is bool:
        return [*none, "no", 3, 0.0, math.nan, []]
    if origin is typing.Literal or limits.get("choices"):
        return [*none, "zzz", 3.5, [], True, str(choices_of(kind, limits)[0])[:-1]]
    if kind is str:
        return [*none, 3, [], True]
    if item_type(kind) is not None:
        inner, own = plain(item_type(kind))
        found = [*none, 3, math.nan, "0,1"] + [[]] * (not limits.get("empty", True))
        found += [[1, 1]] * bool(limits.get("distinct"))
        return found + ([["a"], [math.nan], [None], [1, "a"]] if inner in (int, float) and (own or limits) else [])
    if kind is typing.Any or not isinstance(origin or kind, type):
        return []
    return [*none, 3, "a", [1]]


def with_others(known, field):
    """Other arguments, under which a field is read."""
    for other, values in field.conditions.items():
        if other in known:
            return {other: values[0]} if values else {other: 1.0, "clip_norm": 1.0}
    return {}


def of_declarations():
    """(name of what is called, arguments, name that the line has): every declared argument with wrong values."""
    for name, (_, declaring) in DECLARED.items():
        known = fields_of(declaring)
        required = {"file": "nowhere", "name": "mlp", "folder": "runs"}
        given = {other: required[other] for other, f in known.items() if f.default is REQUIRED and other in required}
        for field in known.values():
            for value in wrong_values(field):
                yield name, given | with_others(known, field) | {field.name: value}, field.name
        if known:
            first = next(iter(known))
            yield name, given | {f"{first}x": 1}, f"{first}x"
        yield name, given | {"zzz": 1}, "zzz"


class Own(nn.Module):
    """Returns one output, for any number of classes."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x.reshape(len(x), -1))


TITLES = ["", " ", ".", "..", "../x", "a/b", "a\\b", "a\nb", "/tmp/x", 3, None]
BY_HAND = [
    ("Ditto(lam=)", lambda: pfl.Ditto(lam=0.1), "ditto.lam"),
    ("Ditto(strengh=)", lambda: pfl.Ditto(strengh=0.1), "did you mean strength?"),
    ("too many knobs", lambda: pfl.Ditto(0.1, 0.2), "arguments"),
    ("a typo of a plan", lambda: pfl.Execution(plan="vmpa"), "did you mean vmap?"),
    ("a typo of an aggregator", lambda: pfl.Server(aggregator="medain"), "did you mean median?"),
    ("unread chunk", lambda: pfl.Execution(chunk=4), "chunk=4: applies only with plan=chunk"),
    ("unread strength", lambda: pfl.Attack("label_flip", strength=2.0), "strength=2.0: applies only with kind="),
    ("unread trim", lambda: pfl.Server(trim=0.1), "trim=0.1: applies only with aggregator="),
    ("unread candidates", lambda: pfl.Server("weighted", candidates=3), "candidates=3: applies only with sampler="),
    ("unread delta", lambda: pfl.Privacy(delta=1e-3), "delta=0.001: applies only with noise_multiplier above 0"),
    ("too many devices", lambda: RUN(execution=pfl.Execution(devices=99)), "devices=99"),
    ("a class for a method", lambda: RUN(method=pfl.FedAvg), "method"),
    ("a name for a method", lambda: RUN(method="fedavg"), "method"),
    ("a number for a model", lambda: RUN(model=5), "model"),
    ("a name for a model", lambda: RUN(model="mlp"), "model"),
    ("None for a model", lambda: RUN(model=None), "model"),
    ("a model of one output", lambda: RUN(model=Own()), "model"),
    ("no model", lambda: pfl.Run(pfl.FedAvg(), CLIENTS), "model"),
    ("arrays for clients", lambda: RUN(clients=X), "clients"),
    ("a learning rate for the run", lambda: RUN(lr=0.1), "lr"),
    ("a name for the server", lambda: RUN(server="median"), "server"),
    ("a name for the attack", lambda: RUN(attack="noise"), "attack"),
    ("more neighbors than others", lambda: RUN(method=pfl.FedeRiCo(4)), "federico.neighbors=4: accepted: 0 to 3"),
    ("more to score than there are", lambda: RUN(eval_clients=5), "eval_clients=5: accepted: 0 to 4"),
    ("lr of local training", lambda: pfl.LocalTraining(lr=0.1), "lr"),
    ("a typo of the rate", lambda: pfl.LocalTraining(learning_rte=0.1), "did you mean learning_rate"),
    ("a rate of a made optimizer", lambda: pfl.LocalTraining(optax.sgd(0.1), 0.1), "learning_rate"),
    ("noise without clipping", lambda: pfl.Privacy(noise_multiplier=1.0), "noise_multiplier"),
    ("no rounds", lambda: RUN().train(), "rounds"),
    *((f"resume={r!r}", lambda r=r: TRAIN(resume=r, out="x"), "resume") for r in ("maybe", 1, None, [])),
    (
        "weights that are no numbers",
        lambda: RUN(local=pfl.LocalTraining(class_weights=[math.nan] * 10)),
        "class_weights",
    ),
    ("too few weights", lambda: RUN(local=pfl.LocalTraining(class_weights=[1.0])), "class_weights"),
    ("resume without a folder", lambda: TRAIN(resume=True), "resume"),
    ("a folder in /proc", lambda: TRAIN(out="/proc/x"), "out"),
    ("a folder in a file", lambda: TRAIN(out="/dev/null/x"), "out"),
    ("a long folder", lambda: TRAIN(out="x" * 300), "out"),
    ("a folder with a null", lambda: TRAIN(out="x\0"), "out"),
    ("a profile in a file", lambda: TRAIN(profile="/dev/null/x"), "profile"),
    ("a board in a file", lambda: pfl.TensorBoard("/dev/null/x"), "folder"),
    ("a project that is a number", lambda: pfl.WandB("x", project=3), "project"),
    ("an experiment that is a number", lambda: pfl.MLflow("x", experiment=3), "experiment"),
    ("a table in /proc", lambda: COMPARE(out="/proc/x"), "out"),
    ("replicates in /proc", lambda: REPLICATES(outs=["/proc/x", "/proc/y"]), "out"),
    ("one folder for two", lambda: REPLICATES(outs=["x"]), "outs"),
    ("one tracker for two", lambda: REPLICATES(trackers=[print]), "trackers"),
    ("no methods", lambda: COMPARE(methods=[]), "methods"),
    ("one method", lambda: COMPARE(methods=pfl.FedAvg()), "methods"),
    ("names of methods", lambda: COMPARE(methods=["fedavg"]), "methods"),
    ("classes of methods", lambda: COMPARE(methods=[pfl.FedAvg]), "methods"),
    ("twice the same", lambda: COMPARE(methods=[pfl.FedAvg(), pfl.FedAvg()]), "methods"),
    *((f"title {title!r}", lambda title=title: COMPARE(methods=[(title, "a")]), "methods") for title in TITLES),
    *((f"title {title!r}", lambda t=title: COMPARE(methods=[(t, pfl.FedAvg())]), "methods") for title in TITLES[:-1]),
    *(
        (f"seeds {s!r}", lambda s=s: COMPARE(seeds=s), "seeds")
        for s in (3, [], [0, 0], [-1], [2**40], [0.5], "01", {0})
    ),
    *((f"seeds {s!r}", lambda s=s: TUNE(seeds=s, rates=[0.1]), "seeds") for s in (3, [], [0, 0], [-1], [2**40], ["0"])),
    ("clients of a seed", lambda: COMPARE(clients=lambda seed: X), "clients"),
    ("an option of neither", lambda: COMPARE(eval_evry=3), "did you mean eval_every"),
    ("one seed", lambda: COMPARE(seed=3), "seed=3: unknown argument; did you mean seeds"),
    ("one seed of tuning", lambda: TUNE(seed=3), "seed=3: unknown argument; did you mean seeds"),
    ("one method's argument", lambda: COMPARE(method=pfl.FedAvg()), "method"),
    ("a wrong option", lambda: COMPARE(participation=2), "participation"),
    ("a wrong schedule", lambda: COMPARE(eval_every=0), "eval_every"),
    ("a wrong option of tuning", lambda: TUNE(participation=math.nan), "participation"),
    ("a knob that is not there", lambda: TUNE(knobs={"mu": [1]}), "knobs"),
    ("a knob without values", lambda: TUNE(method=pfl.FedProx(), knobs={"mu": []}), "knobs"),
    ("a knob with one value", lambda: TUNE(method=pfl.FedProx(), knobs={"mu": 1}), "knobs"),
    ("a knob out of range", lambda: TUNE(method=pfl.FedProx(), knobs={"mu": [-1.0]}), "fedprox.mu"),
    ("rates below 0", lambda: TUNE(rates=[-1]), "rates"),
    ("x of words", lambda: ARRAYS(x=[["a"]] * 12), "x"),
    ("x of one axis", lambda: ARRAYS(x=Y), "x"),
    ("x that is not finite", lambda: ARRAYS(x=np.full((12, 3), np.nan)), "x"),
    ("no x", lambda: ARRAYS(x=None), "x"),
    ("no y", lambda: ARRAYS(y=None), "y"),
    ("y of another length", lambda: ARRAYS(y=Y[:5]), "y"),
    ("clients of another length", lambda: ARRAYS(client=Y[:5]), "client"),
    ("clients that are floats", lambda: ARRAYS(client=X[:, 0]), "client"),
    ("too few classes", lambda: ARRAYS(num_classes=2), "num_classes"),
    ("is_test of numbers", lambda: ARRAYS(is_test=Y), "is_test"),
    ("too many clients", lambda: ARRAYS(num_clients=99), "num_clients"),
    ("a name for a partition", lambda: ARRAYS(partition="iid"), "partition"),
    ("a class for a partition", lambda: ARRAYS(partition=pfl.partitions.IID), "partition"),
    ("a split out of range", lambda: ARRAYS(test_fraction=1.0), "test_fraction"),
    ("a typo of a split", lambda: ARRAYS(test_fracton=0.1), "did you mean test_fraction"),
    ("sharing without a number", lambda: ARRAYS(replacement=True), "replacement"),
    ("too many groups", lambda: pfl.data.digits(4, pfl.partitions.LabelGroups(5)), "groups"),
    ("a file that is not there", lambda: pfl.data.npz("nowhere.npz"), "file"),
    ("a play that is not there", lambda: pfl.data.text("nowhere.txt"), "file"),
    ("a folder for a file", lambda: pfl.data.npz("/"), "file"),
    ("an empty path", lambda: pfl.data.npz(""), "file"),
    (
        "augmented numbers",
        lambda: RUN(clients=ARRAYS(client=Y), local=pfl.LocalTraining(augment="crop_flip")),
        "augment",
    ),
]
CASES = [
    *(
        (f"{name} {given}"[:120], lambda n=name, g=given: DECLARED[n][0](**g), f"{said}")
        for name, given, said in of_declarations()
    ),
    *BY_HAND,
]
SAMPLE = 40  # of so many cases one is played by default


def in_sample(number, case):
    return (number >= len(CASES) - len(BY_HAND) and zlib.crc32(case[0].encode()) % 4 == 0) or number % SAMPLE == 0


class Trains(Exception):
    """The call would train."""


def check(cases):
    """Each case is refused in a line that names the argument, and nothing is written."""
    with mock.patch.object(api_run.Trainer, "train", side_effect=Trains):
        for what, call, said in cases:
            with pytest.raises(pfl.ArgumentError) as caught:
                call()
                pytest.fail(f"accepted: {what}")
            line = str(caught.value)
            assert said == caught.value.argument if said.isidentifier() else said in line, what
            assert "\n" not in line and len(line) < 1500, what
    assert not list(Path().iterdir())


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)


def test_some_wrong_calls_are_refused_in_a_line(nowhere):
    check([case for number, case in enumerate(CASES) if in_sample(number, case)])


@pytest.mark.campaign
@pytest.mark.parametrize("name", [*DECLARED, None])
def test_wrong_calls_are_refused_in_a_line(name, nowhere):
    check([case for case in CASES[: -len(BY_HAND)] if case[0].split(" ")[0] == name] if name else BY_HAND)


def test_the_campaign_is_large():
    assert len(CASES) >= 1000 and len(BY_HAND) >= 80
    assert 40 <= sum(in_sample(*each) for each in enumerate(CASES)) <= 200


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64])
def test_numbers_of_numpy_are_plain_numbers(kind):
    found = pfl.LocalTraining(optax.sgd, np.float32(0.5), batch_size=kind(3))
    assert type(found.batch_size) is int and found.batch_size == 3 and type(found.learning_rate) is float
    assert ARRAYS(num_clients=kind(2), seed=kind(1), client=Y).num_clients == 2
    assert repr(pfl.Server(aggregator="krum", trim=np.float64(0.25))) == repr(pfl.Server(aggregator="krum", trim=0.25))
