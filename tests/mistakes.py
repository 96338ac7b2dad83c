"""Wrong values of every setting, made from its declaration, with what the refusal has to say.

A field of a settings dataclass, a hyperparameter of a method, an argument of a checked function and a flag are in the
campaigns by being declared. `wrong_calls` makes calls from Python, `wrong_commands` makes command lines.
"""

import collections.abc
import functools
import math
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
from absl import flags

import pfljax as pfl
from experiments import accelerator, benchmark, robustness
from experiments.fedem import figure1 as fedem_figure1
from experiments.fedem import table2 as fedem_table2
from experiments.fedem import table3 as fedem_table3
from experiments.federico import figure1 as federico_figure1
from experiments.federico import table1 as federico_table1
from experiments.fedfomo import figure3 as fedfomo_figure3
from experiments.fedfomo import table1 as fedfomo_table1
from experiments.fedfomo import table4 as fedfomo_table4
from experiments.pfedmb import table1 as pfedmb_table1
from pfljax import api, data
from pfljax.cli import compare, names, scaling, train
from pfljax.cli import flags as fl
from pfljax.cli.parsing import Several, Value
from pfljax.data import federation, partitions, sources, variants
from pfljax.data.embedding import Embedding
from pfljax.flower.apps import Options
from pfljax.models import adapters
from pfljax.settings.fields import (
    MOST,
    REQUIRED,
    Field,
    choices_of,
    fields_of,
    is_union,
    item_type,
    plain,
)
from pfljax.settings.method import METHODS
from pfljax.training.loop import Schedule


class Wrong(NamedTuple):
    """A wrong value of a setting.

    Attributes:
        kind: What is wrong with it: its type, its range and so on.
        value: The value; of a flag, its text.
        words: Text that the refusal contains.
    """

    kind: str
    value: Any
    words: str


# What declarations say


def type_words(hint: Any, limits: Mapping[str, Any]) -> str:
    """What a refusal says of a type: the declaration's own words, its choices, or the name of the type."""
    hint, own = plain(hint)
    limits = own or limits
    if limits.get("accepted"):
        return limits["accepted"]
    if choices := choices_of(hint, limits):
        return ", ".join(map(str, choices))
    if item_type(hint) is not None:
        return "a list of "
    words = {int: "whole numbers", float: "numbers", bool: "True or False", str: "text"}
    words |= {collections.abc.Callable: "a function", collections.abc.Mapping: "a dict"}
    kind = typing.get_origin(hint) or hint
    return words.get(kind, f"a {kind.__name__}" if isinstance(kind, type) else "")


def range_words(limits: Mapping[str, Any]) -> str:
    """What a refusal says of a range, such as "0 to below 1", or its own words; "" without limits."""
    if limits.get("accepted"):
        return limits["accepted"]
    low, above, high, below = bounds(limits)
    end = (
        ""
        if high is None and below is None
        else f"{high:.10g}"
        if below is None
        else f"below {below:g}"
    )
    if low is not None:
        return f"{low:g} to {end}" if end else f"{low:g} or more"
    if above is not None:
        comma = ", at most " if high is not None else ", "
        return f"above {above:g}{comma}{end}" if end else f"above {above:g}"
    return f"at most {end}" if high is not None else end


def bounds(limits: Mapping[str, Any]) -> tuple:
    """Least value, exclusive lower bound, greatest value and exclusive upper bound; None where there is none."""
    return tuple(limits.get(name) for name in ("at_least", "above", "at_most", "below"))


def beyond(limits: Mapping[str, Any]) -> list[float]:
    """The nearest wrong values beyond each bound."""
    low, above, high, below = bounds(limits)
    least = [] if low is None else [low - 1]
    greatest = [] if high is None else [high + 1]
    return [*least, *greatest, *(bound for bound in (above, below) if bound is not None)]


def is_inside(value: float, limits: Mapping[str, Any]) -> bool:
    """Whether a number is within the bounds."""
    low, above, high, below = bounds(limits)
    return (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
    )


def alternatives(hint: Any) -> list[Any]:
    """The types of which a value may have any one; a single type without None."""
    kinds = typing.get_args(hint) if is_union(hint) else (hint,)
    return [kind for kind in kinds if kind is not type(None)]


def right_value(field: Field) -> Any:
    """A value that the declaration accepts and that is not the default; None if we know none."""
    (kind, *others) = alternatives(field.hint)
    limits = field.limits
    choices = choices_of(field.hint, limits)
    if choices:
        return next((choice for choice in choices if choice != field.default), None)
    if others or kind not in (bool, int, float, str):
        return None
    if kind is bool:
        return not field.default
    if kind is str:
        return "a"
    numbers = (1, 2, 3, 4, 5, 8) if kind is int else (0.5, 0.25, 0.1, 1.0, 2.0, 0.001, 3.0)
    return next((n for n in numbers if n != field.default and is_inside(n, limits)), None)


def holds(value: Any, needed: Sequence[Any]) -> bool:
    """Whether the value of another setting is one of those `needed`; (): any but 0, None and False."""
    return str(value) in map(str, needed) if needed and needed != ("...",) else bool(value)


# Wrong values from Python

ANY_TYPE = {"text": "zzz", "a number": 3.5, "a list": [], "a complex number": 1j, "an object": ...}
NO_NUMBERS = {
    int: [1.5, math.nan, math.inf, "3", True, [], np.float32(2.5), 1j],
    float: ["0.1", True, [], 1j, [0.1]],
}


def wrong_values(field: Field) -> Iterator[Wrong]:
    """Values that a field does not accept, by its type and limits."""
    kinds = alternatives(field.hint)
    limits = field.limits
    if Any in kinds:
        return
    words = type_words(kinds[0], limits)
    if type(None) not in typing.get_args(field.hint):
        yield Wrong("None", None, words)
    yield from (Wrong("another type", value, words) for value in wrong_types(kinds, limits))
    if len(kinds) > 1:
        return
    (kind,) = kinds
    if kind in (int, float):
        yield from wrong_numbers(kind, limits)
    if choices := choices_of(kind, limits):
        yield Wrong("no such word", "zzz", words)
        for word in [choice for choice in choices if len(str(choice)) > 3][:1]:
            yield Wrong("a typo", f"{word}x", f"{words}; did you mean {word}?")
    if item_type(kind) is not None:
        yield from wrong_lists(kind, limits)


def wrong_types(kinds: Sequence[Any], limits: Mapping[str, Any]) -> list[Any]:
    """Values of none of these types."""
    if [*kinds] in ([int], [float]):
        return NO_NUMBERS[kinds[0]]
    if [*kinds] == [bool]:
        return ["no", 3, 0.0, math.nan, []]
    taken: set[str] = set().union(*(types_taken(kind, limits) for kind in kinds))
    return [value for name, value in ANY_TYPE.items() if name not in taken]


def types_taken(kind: Any, limits: Mapping[str, Any]) -> set[str]:
    """Which of `ANY_TYPE` a type may accept."""
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal or choices_of(kind, limits):
        # types of NumPy count as words
        return {"an object"} if "float32" in choices_of(kind, limits) else set()
    if not isinstance(origin, type) or typing.Protocol in origin.__mro__:
        return {*ANY_TYPE}  # as arrays, which what is called checks itself
    if item_type(kind) is not None:
        return {"a list"}
    return {str: {"text"}, int: {"a number"}, float: {"a number"}}.get(origin, set())


def wrong_numbers(kind: type, limits: Mapping[str, Any]) -> Iterator[Wrong]:
    """Numbers that are out of range; a declaration without limits has none."""
    if not limits:
        return
    words = range_words(limits)
    yield from (Wrong("beyond a bound", value, words) for value in beyond(limits))
    if kind is int:
        most = limits if limits.get("at_most") is not None else {**limits, "at_most": MOST}
        # a number that stays on the host, such as a sentinel of 64 bits
        is_wide = most["at_most"] > MOST
        for value in (10**400,) if is_wide else (2**40, -(2**40), 10**400):
            yield Wrong("beyond 32 bits", value, range_words(most))
        return
    yield from (Wrong("no number", value, words) for value in (math.nan, np.float64("nan")))
    yield Wrong("infinite", -math.inf, words if limits.get("infinite") else "finite numbers")
    if not limits.get("infinite"):
        yield Wrong("infinite", math.inf, "finite numbers")


def wrong_lists(kind: Any, limits: Mapping[str, Any]) -> Iterator[Wrong]:
    """No lists, lists with a wrong item, and lists that are empty or have an item twice where that is wrong."""
    words = type_words(kind, limits)
    item, own = plain(item_type(kind))
    yield from (Wrong("no list", value, words) for value in (3, math.nan, "0,1", {0}))
    if not limits.get("empty", True):
        yield Wrong("an empty list", [], words)
    if limits.get("distinct"):
        yield Wrong("an item twice", [1, 1], words)
    if item in (int, float) and (own or limits):
        yield from (Wrong("a wrong item", [value], words) for value in ("a", math.nan, None))
        yield Wrong("a wrong item", [1, "a"], words)
        beyond_32_bits = [2**40] if item is int else []
        outside = [*beyond(own or limits), *beyond_32_bits]
        yield from (Wrong("an item beyond a bound", [value], words) for value in outside)
    if item is int and (own or limits):
        yield Wrong("a wrong item", [0.5], words)


# Calls from Python


class Called(NamedTuple):
    """What is called.

    Attributes:
        call: The class or function.
        given: Arguments that it requires.
        further: What declares its further keyword arguments.
        without: Those of them that it does not accept.
    """

    call: Callable
    given: Mapping[str, Any] = {}
    further: Sequence[Callable] = ()
    without: Sequence[str] = ()

    @property
    def fields(self) -> dict[str, Field]:
        """Its arguments, by name."""
        known = {name: field for each in self.further for name, field in fields_of(each).items()}
        accepted = {name: field for name, field in known.items() if name not in self.without}
        return accepted | fields_of(self.call)


class WrongCall(NamedTuple):
    """A call that is refused.

    Attributes:
        name: Name of what is called.
        kind: See `Wrong`.
        call: The class or function.
        given: Its right arguments.
        changed: Its other arguments; one of them is wrong, or none if one is left out.
        argument: Name of the argument that the refusal names.
        words: Text that the refusal contains.
    """

    name: str
    kind: str
    call: Callable
    given: Mapping[str, Any]
    changed: Mapping[str, Any]
    argument: str
    words: str

    def __str__(self) -> str:
        values = (f"{name}={value!r}"[:60] for name, value in self.changed.items())
        return f"{self.name}({', '.join(values)}): {self.kind} of {self.argument}"


SETTINGS = (
    *(pfl.Attack, pfl.ClientPrivacy, pfl.Clock, pfl.Compression, pfl.Execution, pfl.Faults),
    *(pfl.LocalTraining, pfl.Privacy, pfl.Server, data.Splits, api.Patience),
)


@functools.cache
def calls() -> dict[str, Called]:
    """Everything that checks its arguments by declarations, by name, but for commands."""
    clients = data.digits(num_clients=4, train_examples=6)
    parts = {"method": pfl.FedAvg(), "clients": clients, "model": pfl.models.MLP(hidden=())}
    run = pfl.Run(**parts)
    again = pfl.Run(**parts)
    arrays = {"x": np.zeros((12, 3)), "y": np.arange(12) % 3}
    several = {"methods": [pfl.FedAvg()], "clients": clients, "model": parts["model"], "rounds": 1}
    source = sources.digits()
    file = {"file": "nowhere"}
    folder = {"folder": "runs"}

    def given(name: str) -> dict[str, str]:
        """What a source requires."""
        if name in sources.NAMED:
            return {"name": "mlp"}
        return file if requires(sources.SOURCES[name]) else {}

    of_sources = {
        f"sources.{name}": Called(source, given(name)) for name, source in sources.SOURCES.items()
    }
    assigned = partitions.assign(source, partitions.IID(), num_clients=4)
    pixels = {"num_clients": 2, "examples": 2, "shape": (2,), "num_classes": 2, "seed": 0}
    simulated = (
        "seed",
        "unseen",
        "fine_tune_epochs",
        "eval_clients",
        "never_trained",
        "metrics",
        "score",
        "stop",
        "drift",
        "planned_rounds",
        "config",
    )
    return {
        **{each.__name__: Called(each) for each in SETTINGS},
        **{f"partitions.{name}": Called(each) for name, each in partitions.PARTITIONS.items()},
        **{f"data.{name}": Called(getattr(data, name)) for name in ("digits", "sine", "synthetic")},
        **{f"data.{name}": Called(getattr(data, name), file) for name in ("npz", "read", "text")},
        "data.tfds": Called(data.tfds, {"name": "mlp"}),
        "data.load": Called(data.load, {"source": source}),
        "data.pack": Called(federation.pack, {"source": source, "assignment": assigned}),
        "data.random_pixels": Called(variants.random_pixels, pixels),
        "data.split_unseen": Called(
            data.split_unseen, {"federation": clients, "unseen": 0.5, "seed": 0}
        ),
        "data.Drift": Called(data.Drift, {"round": 1}),
        "data.drifted": Called(
            data.drifted, {"clients": clients, "drift": data.Drift(round=1), "round": 1}
        ),
        **of_sources,
        **{name: Called(method) for name, method in METHODS.items()},
        "partitions.assign": Called(
            partitions.assign, {"source": source, "partition": partitions.IID()}
        ),
        "Embedding": Called(Embedding, {"name": "mlp"}),
        "Run": Called(pfl.Run, parts),
        "Run.train": Called(run.train, {"rounds": 1}),
        "Simulation": Called(pfl.Simulation, parts, [pfl.Run], simulated),
        "compare": Called(pfl.compare, several, [pfl.Run, Schedule], ["method", "seed"]),
        "tune": Called(pfl.tune, parts | {"rounds": 1}, [pfl.Run], ["seed"]),
        "estimate": Called(pfl.estimate, {"run": run}),
        "load": Called(pfl.load, {"path": "runs"}),
        "train_replicates": Called(pfl.train_replicates, {"runs": [run, again], "rounds": 1}),
        "Federation.examples": Called(clients.examples, {"client": 0}),
        "metric": Called(pfl.metrics.metric),
        **{
            f"adapters.{name}": Called(getattr(adapters, name))
            for name in ("bias", "head", "ia3", "lora", "prompt")
        },
        "adapters.Selected": Called(adapters.Selected, {"where": "kernel"}),
        "from_arrays": Called(pfl.Federation.from_arrays, arrays, [data.Splits]),
        "with_attackers": Called(clients.with_attackers, {"share": 0.5}),
        "Result.recovery": Called(MethodType(pfl.Result.recovery, "a result")),
        "Result.save_model": Called(
            MethodType(pfl.Result.save_model, "a result"), {"path": "x", "client": 0}
        ),
        "Result.export_device": Called(
            MethodType(pfl.Result.export_device, "a result"), {"path": "x", "client": 0}
        ),
        "Table.save_figures": Called(MethodType(pfl.Table.save_figures, "a table"), folder),
        "Table.to_latex": Called(MethodType(pfl.Table.to_latex, "a table")),
        "Table.to_pandas": Called(MethodType(pfl.Table.to_pandas, "a table")),
        "TensorBoard": Called(pfl.trackers.TensorBoard, folder),
        "WandB": Called(pfl.trackers.WandB, folder),
        "MLflow": Called(pfl.trackers.MLflow, folder),
        "flower.server_app": Called(pfl.flower.server_app, {"run": run, "rounds": 1}),
        "flower.Patience": Called(pfl.flower.Patience),
        "flower.apps.Options": Called(Options, {"rounds": 1}),
    }


def requires(called: Callable) -> list[str]:
    """The arguments without a default."""
    return [name for name, field in fields_of(called).items() if field.default is REQUIRED]


@functools.cache
def wrong_calls() -> list[WrongCall]:
    """Every declared argument with wrong values, unread, misspelt or left out."""
    return [call for name, called in calls().items() for call in wrong_calls_of(name, called)]


def wrong_calls_of(name: str, called: Called) -> Iterator[WrongCall]:
    """The wrong calls of one class or function."""
    known = called.fields

    def wrong_call(kind: str, changed: Mapping[str, Any], argument: str, words: str) -> WrongCall:
        return WrongCall(name, kind, called.call, called.given, changed, argument, words)

    for field in known.values():
        for wrong in wrong_values(field):
            yield wrong_call(wrong.kind, {field.name: wrong.value}, field.name, wrong.words)
        others = unread_with(field, known)
        value = right_value(field)
        if others is not None and value is not None:
            words = f"{field.name}={value}: applies only with"
            yield wrong_call("unread", {**others, field.name: value}, field.name, words)
        words = f"{field.name}x=1: unknown argument; did you mean {field.name}"
        yield wrong_call("misspelt", {f"{field.name}x": 1}, f"{field.name}x", words)
    yield wrong_call("unknown", {"zzz": 1}, "zzz", "zzz=1: unknown argument; accepted: ")
    for required in requires(called.call):
        rest = {other: value for other, value in called.given.items() if other != required}
        yield WrongCall(name, "left out", called.call, rest, {}, required, f"{required}: required")


def unread_with(field: Field, known: Mapping[str, Field]) -> dict[str, Any] | None:
    """Other arguments with which a field is not read; None if we know none."""
    others = {}
    for other, needed in field.conditions.items():
        if other not in known:
            return None
        if holds(known[other].default, needed):
            words = choices_of(known[other].hint, known[other].limits)
            unread = [word for word in words if not holds(word, needed)]
            if not unread:
                return None
            others[other] = unread[0]
    return others if field.conditions else None


# Command lines


class Command(NamedTuple):
    """A command.

    Attributes:
        module: Its module, which has `define` and `COMMAND`.
        cheap: Flags under which it costs little to read the others.
    """

    module: Any
    cheap: Sequence[str] = ()


FULL = "train"  # the command that gets all texts of all its flags
FEW = ("compare", "scaling")  # those that get texts that may be accepted, too
COMMANDS = {
    "train": Command(train),
    "compare": Command(compare, ("--methods=local,fedavg", "--seeds=0")),
    "scaling": Command(scaling, ("--methods=fedavg", "--num_clients=10", "--devices=1")),
    "fedem.table2": Command(fedem_table2),
    "fedem.table3": Command(fedem_table3),
    "fedem.figure1": Command(fedem_figure1),
    "federico.table1": Command(federico_table1),
    "federico.figure1": Command(federico_figure1),
    "fedfomo.table1": Command(fedfomo_table1),
    "fedfomo.table4": Command(fedfomo_table4),
    "fedfomo.figure3": Command(fedfomo_figure3),
    "pfedmb.table1": Command(pfedmb_table1),
    "robustness": Command(robustness),
    "benchmark": Command(benchmark),
    "accelerator": Command(accelerator),
}

HUGE = "99999999999999999999999"
NO_NUMBER = ("nan", "abc", "", "0x", "1,2", "1e", "--5")
EDGES = {  # texts of the right type
    int: ("-1", "0", "2147483647"),
    float: ("-1", "-0.5", "1e-400", HUGE, "2.5", "0", "1e-30"),
    str: ("", "foo", "²", "nan", "/", "/dev/null", ".", "a/b/c"),
}
# Flags that start other processes or say where files go: no text of theirs that may be accepted is played.
STARTING = ("coordinator", "num_processes", "process_id", "out", "profile")
NEEDED = {"sampler": ["--participation=0.5"], "privacy_noise_multiplier": ["--privacy_clip_norm=1"]}


class WrongCommand(NamedTuple):
    """A command line that is refused, or may be.

    Attributes:
        name: Name of the command.
        kind: See `Wrong`; "an edge" for a text that may be accepted.
        flags: The flags.
        flag: The flag that the refusal names.
        words: Text that the refusal contains; None if the text may be accepted.
    """

    name: str
    kind: str
    flags: tuple[str, ...]
    flag: str
    words: str | None

    def __str__(self) -> str:
        return f"{self.name} {' '.join(self.flags)}"[:120]


class Texts(NamedTuple):
    """Texts of a flag.

    Attributes:
        wrong: Those that it never accepts.
        edges: Those that may be accepted, depending on the other flags.
    """

    wrong: list[Wrong]
    edges: list[str]


def texts_of(flag: flags.Flag, field: Field) -> Texts:
    """Wrong texts of a flag, and texts at the edge, by what its declaration says."""
    kinds = alternatives(field.hint)
    limits = field.limits
    kind = kinds[0]
    choices = choices_of(field.hint, limits)
    if isinstance(flag.parser, Several):
        item, own = plain(item_type(kind)) if item_type(kind) is not None else (kind, {})
        return list_texts(item, own or limits, flag.parser.distinct, flag.parser.empty)
    if bool in kinds:
        return Texts([Wrong("no switch", text, "true") for text in ("maybe", "2", "nan")], [])
    if choices:
        words = ", ".join(map(str, choices))
        wrong = ("foo", "²", "nan", f"{choices[0]}x")
        return Texts([Wrong("no such word", text, words) for text in wrong], [])
    if kind in (int, float):
        return number_texts(kind, limits)
    if flag.default == "":
        return Texts([], [*EDGES[str]])
    wrong = [Wrong("no text", text, "non-empty text") for text in ("", " ")]
    return Texts(wrong, [text for text in EDGES[str] if text])


def number_texts(kind: type, limits: Mapping[str, Any]) -> Texts:
    """Texts of the flag of a number."""
    words = range_words(limits) or type_words(kind, {})
    broken = [*NO_NUMBER]
    if kind is int:
        broken += ["2.5", "inf", HUGE, f"-{HUGE}"]
    elif not limits.get("infinite"):
        broken += ["inf", "-inf", "1e400"]
    inside = [text for text in EDGES[kind] if is_inside(float(text), limits)]
    outside = [f"{value:.12g}" for value in beyond(limits)]
    outside += [text for text in EDGES[kind] if text not in inside]
    wrong = [Wrong("no number", text, words) for text in broken]
    wrong += [Wrong("beyond a bound", text, words) for text in dict.fromkeys(outside)]
    return Texts(wrong, inside)


def list_texts(kind: Any, limits: Mapping[str, Any], distinct: bool, empty: bool) -> Texts:
    """Texts of the flag of a list whose items have a type and limits."""
    choices = choices_of(kind, limits)
    words = ", ".join(map(str, choices))
    wrong = [",", "1,,2"]
    edges = [""] if empty else []
    if choices:
        wrong += ["abc", "²", "0", "-1", f"{choices[0]},abc"]
        wrong += [f"{choices[0]},{choices[0]}"] if distinct else []
    elif kind in (int, float):
        words = range_words(limits) or type_words(kind, {})
        items = number_texts(kind, limits)
        wrong += [item.value for item in items.wrong if item.value not in ("", "1,2")]
        wrong += [f"{text},x" for text in items.edges[:1]]
        wrong += [f"{text},{text}" for text in items.edges[:1] if distinct]
        edges += items.edges
    else:
        wrong += ["a,a"] if distinct else []
        edges += ["0", "-1", "nan", "abc", HUGE, "²"]
    wrong += [] if empty else [""]
    return Texts([Wrong("a wrong list", text, words) for text in wrong], edges)


@functools.cache
def declared() -> dict[str, Field]:
    """The fields that have flags, by the flag's name; those of methods with the method's name."""
    around = (api.Run, api.Run.train, api.Patience, api.Clock, api.compare)
    around += (data.split_unseen, data.Drift)
    of_commands = (fl.Data, fl.Network, fl.Adapting, fl.Optimizer, fl.Processes, fl.Sweep)
    of_data = (*partitions.PARTITIONS.values(), *sources.SOURCES.values())
    known: dict[str, Field] = {}
    for declaring in (*SETTINGS, *around, *of_commands, *of_data):
        fields = fields_of(declaring)
        for field, flag in names.flags_of(declaring).items():
            known.setdefault(flag, fields[field])
    for name, method in METHODS.items():
        known |= {f"{name}.{field.name}": field for field in fields_of(method).values()}
    return known


def field_of(flag: flags.Flag) -> Field | None:
    """What declares a flag; of one that only commands have, what its parser says; None if that is nothing."""
    parser = flag.parser
    if getattr(flag, "arguments", ()):
        return declared()[flag.name]
    if isinstance(parser, Several):
        return Field(flag.name, Sequence[parser.item.kind], flag.default, parser.item.limits)
    if isinstance(parser, Value):
        return Field(flag.name, parser.kind, flag.default, parser.limits)
    return Field(flag.name, bool, flag.default, {}) if flag.boolean else None


@functools.cache
def registry_of(name: str) -> flags.FlagValues:
    """The flags of a command."""
    registry = flags.FlagValues()
    COMMANDS[name].module.COMMAND.define(registry)
    return registry


@functools.cache
def wrong_commands() -> list[WrongCommand]:
    """Every command's flags with wrong texts, and some with texts at the edge, unread, misspelt or of other methods."""
    return [wrong for name in COMMANDS for wrong in wrong_commands_of(name)]


def wrong_commands_of(name: str) -> Iterator[WrongCommand]:
    """The wrong command lines of a command; hyperparameters of methods are played with `FULL` alone."""
    registry = registry_of(name)
    for group, listed in registry.flags_by_module_dict().items():
        if group.startswith("absl") or (group in METHODS and name != FULL):
            continue
        for flag in listed:
            wrong, edges = texts_played(name, flag)
            for each in wrong:
                text = f"--{flag.name}={each.value}"
                yield WrongCommand(name, each.kind, (text,), flag.name, each.words)
            others = read_with(flag, group, registry)
            for edge in edges:
                text = f"--{flag.name}={edge}"
                yield WrongCommand(name, "an edge", (text, *others), flag.name, None)
            if name == FULL:
                yield from unread_commands(flag, group, registry)
        for flag in listed[:1]:
            words = "unknown flag; did you mean"
            yield WrongCommand(name, "misspelt", (f"--{flag.name}x=1",), f"{flag.name}x", words)


def texts_played(name: str, flag: flags.Flag) -> Texts:
    """The texts that a command's flag gets.

    These are all of its texts with `FULL`, and with a command whose flag is not that of `FULL`. A flag that is the same
    gets one of each kind, which differs by command and flag.
    """
    field = field_of(flag)
    of_full = registry_of(FULL)
    if field is None:
        return Texts([], [])
    wrong, edges = texts_of(flag, field)
    has_edges = name in (FULL, *FEW) and flag.name not in STARTING
    edges = [text for text in edges if has_edges]
    is_same = flag.name in of_full and type(flag.parser) is type(of_full[flag.name].parser)
    if name == FULL or not is_same:
        return Texts(wrong, edges)
    turn = zlib.crc32(f"{name} {flag.name}".encode())
    return Texts(*([texts[turn % len(texts)]] if texts else [] for texts in (wrong, edges)))


def read_with(flag: flags.Flag, group: str, registry: flags.FlagValues) -> list[str]:
    """Flags under which another one is read."""
    method = [f"--method={group}"] if group in METHODS else []
    for other, needed in conditions_of(flag, group).items():
        if other not in registry or needed == ("...",):
            continue
        if holds(registry[other].default, needed):
            return method
        value = needed[0] if needed else "true" if registry[other].boolean else "1"
        further = read_with(registry[other], group, registry) if other != flag.name else []
        return [*method, f"--{other}={value}", *NEEDED.get(other, []), *further]
    return [*method, *NEEDED.get(flag.name, [])]


def conditions_of(flag: flags.Flag, group: str) -> dict[str, Sequence[Any]]:
    """Other flags, and the values with which a flag is read; {}: it is read with all."""
    if group in METHODS:
        return {
            f"{group}.{other}": needed for other, needed in declared()[flag.name].conditions.items()
        }
    return getattr(flag, "read_with", {})


def unread_commands(
    flag: flags.Flag, group: str, registry: flags.FlagValues
) -> Iterator[WrongCommand]:
    """Command lines with a flag that is not read, or that is the hyperparameter of another method."""
    field = field_of(flag)
    value = right_value(field._replace(default=flag.default)) if field else None
    if value is None:
        return
    text = f"--{flag.name}={value}"
    if group in METHODS:
        other = "local" if group != "local" else "fedavg"
        words = "not a hyperparameter of this run's methods"
        yield WrongCommand(FULL, "of another method", (f"--method={other}", text), flag.name, words)
    others = [f"--method={group}"] if group in METHODS else []
    conditions = conditions_of(flag, group)
    for name, needed in conditions.items():
        if name not in registry:
            return
        words = getattr(registry[name].parser, "words", ())
        unread = [word for word in words if not holds(word, needed)]
        if holds(registry[name].default, needed) and not unread:
            return
        if not conditions_of(registry[name], group):  # a data set's preset may change a default
            others += [f"--{name}={word}" for word in unread[:1]]
    if conditions:
        words = "applies only with" if group in METHODS else "accepted with --"
        yield WrongCommand(FULL, "unread", (*others, text), flag.name, words)
