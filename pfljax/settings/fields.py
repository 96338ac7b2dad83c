"""Settings, declared once: the fields of a dataclass or the arguments of a function, with ranges, choices and help.

    @settings
    class Server:
        trim: float = knob(0.2, at_least=0, below=0.5, help="share of attackers")

    @checked()
    def train(rounds: Annotated[int, knob(at_least=1, help="number of rounds")]): ...

Python calls are checked against the declarations; the command line is made from the same ones.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pfljax.contract.errors import ArgumentError, few
from pfljax.contract.paths import expanded

C = TypeVar("C", bound=Callable)
T = TypeVar("T", bound=type)
MOST = 2**31 - 1  # integers become 32-bit on the devices
MOST_NAMES = 200  # in a message
MOST_LETTERS = 100  # of a name that is compared with others
REQUIRED: Any = dataclasses.MISSING
NOTHING: Mapping[str, Any] = types.MappingProxyType({})
# types whose values are shown in messages
SIMPLE = (numbers.Number, str, bytes, Path, type, list, tuple, dict)
SEQUENCES = (collections.abc.Sequence, tuple, list)
WORDS = {int: "whole numbers", float: "numbers", bool: "True or False", str: "text", Path: "a path"}
WORDS |= {collections.abc.Callable: "a function", collections.abc.Mapping: "a dict"}
# other field -> its values; (): any but 0, None and False; GIVEN: any text
Conditions = Mapping[str, Sequence[Any]]
GIVEN = ("...",)


def knob(
    default: Any = REQUIRED,
    *,
    help: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    choices: Sequence[str] = (),
    distinct: bool = False,
    empty: bool = False,
    grid: Sequence[Any] = (),
    groups: bool = False,
    static: bool = False,
    read_with: tuple[str, Any] | Conditions = NOTHING,
    accepted: str = "",
) -> Any:
    """A field of a method's dataclass, with a range that is checked when the method is created.

    Args:
        default: Default value.
        help: One line for the command line's help: what it is and what its limits mean.
        at_least: Inclusive lower bound.
        above: Exclusive lower bound.
        at_most: Inclusive upper bound.
        below: Exclusive upper bound.
        infinite: Whether infinity is accepted.
        choices: The accepted words, if the annotation is not a `Literal`.
        distinct: Whether all values of a list must differ.
        empty: Whether a list may be empty.
        grid: Values that tuning tries, in ascending order. Tuning continues a grid of numbers if its edge wins.
        groups: Whether it is a number of groups of clients, which `Run(tell_groups=True)` sets to the true one.
        static: Whether the number determines shapes or host computations. Otherwise `build` may get a traced value for
            a float knob, since tuning tries several values in one kernel.
        read_with: Another knob and the value it must have for this knob to be read; otherwise this knob must keep its
            default. Or a mapping from other knobs to their values, one of which is enough.
        accepted: What is accepted, in words; by default, derived from the annotation and the bounds.
    """
    found = {"help": help, "at_least": at_least, "above": above, "at_most": at_most, "below": below}
    found |= {
        "infinite": infinite,
        "choices": tuple(choices),
        "distinct": distinct,
        "empty": empty,
        "static": static,
    }
    conditions = (
        {read_with[0]: (read_with[1],)}
        if isinstance(read_with, tuple) and read_with
        else dict(read_with)
    )
    found |= {"grid": tuple(grid), "groups": groups, "read_with": conditions, "accepted": accepted}
    return dataclasses.field(default=default, metadata=found)


NumClients = Annotated[int, knob(at_least=1)]
Seed = Annotated[int, knob(at_least=0)]
Seeds = Annotated[Sequence[Seed], knob(distinct=True, empty=False)]


class Field(NamedTuple):
    """One declared field or argument.

    Attributes:
        name: Its name.
        hint: Its type, without `Annotated`.
        default: Its default; `REQUIRED` if it has none.
        limits: The metadata made by `knob`; empty without `knob`.
        text: What it is: `help`, or its entry in the docstring.
    """

    name: str
    hint: Any
    default: Any
    limits: Mapping[str, Any]
    text: str = ""

    @property
    def conditions(self) -> Conditions:
        """Conditions under which it is read; empty: always."""
        return self.limits.get("read_with", {})

    def check(self, value: Any, owner: str = "") -> Any:
        """Returns the value as plain Python if it is a NumPy scalar. Raises `ArgumentError` if it is not accepted."""
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.ndim == 0:
            is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            value = value if is_key else value.item()
        if isinstance(value, np.generic):
            value = value.item()
        # such as jnp.float32
        if "float32" in self.limits.get("choices", ()) and not isinstance(value, str | None):
            with contextlib.suppress(TypeError):
                value = np.dtype(value).name
        if (
            type(value) in (np.ndarray, list, tuple)
            and typing.get_origin(value_type(self.hint)) in SEQUENCES
        ):
            value = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value
            items = (each.item() if isinstance(each, np.generic) else each for each in value)
            value = (
                list(items)
                if isinstance(value, list)
                else tuple(items)
                if isinstance(value, tuple)
                else value
            )
        text = "" if isinstance(value, Tracer) else refusal(value, self.hint, self.limits)
        if text:
            told = isinstance(value, SIMPLE) or value is None
            raise ArgumentError(
                self.name, f"accepted: {text}", value if told else type(value).__name__, owner=owner
            )
        if callable(value) and not isinstance(value, Tracer):
            self._check_call(value, owner)
        return self._expanded(value)

    def _check_call(self, function: Callable, owner: str) -> None:
        """Raises `ArgumentError` for a function that does not take as many arguments as it will be given."""
        kinds = [
            kind
            for kind in types_in(self.hint)
            if typing.get_origin(kind) is collections.abc.Callable
        ]
        given = typing.get_args(kinds[0])[0] if kinds else ...
        if given is ...:
            return
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some functions in C have none
            return
        try:
            signature.bind(*given)
        except TypeError as error:
            number = f"{len(given)} argument{'s' * (len(given) != 1)}"
            text = f"cannot be called with {number} ({error}); accepted: {accepted(self.hint, self.limits)}"
            raise ArgumentError(self.name, text, owner=owner) from error

    def _expanded(self, value: Any) -> Any:
        """A path, or a list of paths, with ~ replaced by the home folder; other values as they are."""
        kind = value_type(self.hint)
        each = item_type(kind)
        if Path not in types_in(kind if each is None else each):
            return value
        if each is None:
            return expanded(value, self.name) if isinstance(value, str | os.PathLike) else value
        return [expanded(path, self.name) for path in value]


@functools.cache
def fields_of(declaring: Any) -> dict[str, Field]:
    """The fields of a dataclass or named tuple, or the arguments of a function, by name."""
    metadata = {}
    called = declaring
    if dataclasses.is_dataclass(declaring):
        metadata = {field.name: field.metadata for field in dataclasses.fields(declaring)}
    elif isinstance(declaring, type) and not hasattr(declaring, "_fields"):
        called = declaring.__init__
    hints = typing.get_type_hints(called, include_extras=True)
    texts = documented(called)
    found = {}
    for name, parameter in inspect.signature(called).parameters.items():
        if name in ("self", "cls") or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        hint, limits = plain(hints.get(name, Any))
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        limits = metadata.get(name) or limits
        found[name] = Field(name, hint, default, limits, limits.get("help") or texts.get(name, ""))
    return found


def documented(declaring: Any) -> dict[str, str]:
    """The entries of a docstring's list of arguments or attributes, by name."""
    doc = inspect.getdoc(declaring) or ""
    heading = "Attributes:\n" if "Attributes:\n" in doc else "Args:\n"
    _, _, following = doc.partition(heading)
    section, _, _ = following.partition("\n\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)

    def in_one_line(text: str) -> str:
        text = " ".join(text.split()).removesuffix(".").replace("`", "")
        return text[0].lower() + text[1:] if text[1:2].islower() else text

    return {name: in_one_line(text) for name, text in entries}


def plain(hint: Any) -> tuple[Any, Mapping[str, Any]]:
    """A type without `Annotated`, which may be around it or within `T | None`, and the metadata that was in it."""
    kind = value_type(hint)
    if typing.get_origin(kind) is not Annotated:
        return hint, {}
    own = kind.__metadata__[0]
    inner = kind.__origin__
    limits = own.metadata if isinstance(own, dataclasses.Field) else {}
    return (inner if kind is hint else inner | None), limits


def checked(
    *,
    options: Sequence[Callable] = (),
    without: Sequence[str] = (),
    owner: str = "",
    of: Any = None,
) -> Callable[[C], C]:
    """Checks a function's arguments against their annotations before it is called; raises `ArgumentError`.

    Args:
        options: What declares the function's further keyword arguments.
        without: Those of them that are not accepted.
        owner: See `ArgumentError`.
        of: The class whose fields are the arguments, if the function is its `__init__`.
    """

    def wrap(function: Any) -> Any:
        signature = inspect.signature(function)
        rest = None  # the parameter of further keyword arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                rest = parameter.name

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            known = fields_of(of or function)
            further = {}
            for declaring in options:
                further |= fields_of(declaring)
            for name in without:
                further.pop(name, None)
            check_known(kwargs, {**known, **further}, owner)
            bound = bound_arguments(signature, args, kwargs, known, owner)

            values = bound.arguments
            for name in values.keys() & known.keys():
                values[name] = known[name].check(values[name], owner)
            if rest and further:
                options_of_call = {}
                for name, value in values.get(rest, {}).items():
                    options_of_call[name] = further[name].check(value, owner)
                values[rest] = options_of_call
            check_read(known, values, owner)
            return function(*bound.args, **bound.kwargs)

        return call

    return wrap


def check_known(values: Mapping[str, Any], known: Mapping[str, Field], owner: str = "") -> None:
    """Raises `ArgumentError` for a value without a field."""
    for name, value in values.items():
        if name not in known:
            text = f"unknown argument; {nearest(name, known)}"
            raise ArgumentError(name, text, value, owner=owner)


def bound_arguments(
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Mapping[str, Field],
    owner: str = "",
) -> inspect.BoundArguments:
    """A call's arguments by parameter. Raises `ArgumentError` if they do not fit the signature."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        missing = re.match(r"missing a required \S*\s?argument: '(\w+)'", str(error))
        if missing:
            raise ArgumentError(missing[1], "required", owner=owner) from error
        text = f"{error}; accepted: {', '.join(known) or 'none'}"
        raise ArgumentError("arguments", text, owner=owner) from error


def check_read(known: Mapping[str, Field], given: Mapping[str, Any], owner: str = "") -> None:
    """Raises `ArgumentError` for a value that is not read with the other values."""
    for name in given.keys() & known.keys():
        value = given[name]
        conditions = known[name].conditions
        if not conditions or isinstance(value, Tracer) or value == known[name].default:
            continue
        others = [other for other in conditions if other in known]
        fulfilled = [
            holds(given.get(other, known[other].default), conditions[other]) for other in others
        ]
        if others and not any(fulfilled):
            text = f"applies only {with_words(conditions)}"
            raise ArgumentError(name, text, value, owner=owner)


def holds(value: Any, needed: Sequence[Any]) -> bool:
    """Whether a value, or one of a list (of values, or of names with commas), is `needed`; see `Conditions`."""
    listed = (
        value
        if isinstance(value, list | tuple)
        else value.split(",")
        if isinstance(value, str)
        else [value]
    )
    named = needed and needed != GIVEN
    return any(
        str(each).partition(":")[0] in map(str, needed) if named else bool(each) for each in listed
    )


def with_words(conditions: Conditions, prefix: str = "") -> str:
    """Conditions in words, such as "with plan=chunk"."""

    def in_words(values: Sequence[Any]) -> str:
        if values == GIVEN:
            return ""
        return f"={' or '.join(map(str, values))}" if values else " above 0"

    texts = [f"with {prefix}{other}{in_words(values)}" for other, values in conditions.items()]
    return ", or ".join(texts)


def check(instance: Any) -> None:
    """Raises `ArgumentError` if a field of a dataclass instance is not accepted."""
    known = fields_of(type(instance))
    values = {name: field.check(getattr(instance, name)) for name, field in known.items()}
    check_read(known, values)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: T) -> T:
    """Makes a frozen dataclass whose fields are checked when an instance is created."""
    dataclass: Any = dataclasses.dataclass(frozen=True)(cls)
    dataclass.__init__ = checked(of=dataclass)(dataclass.__init__)
    return dataclass


def nearest(name: Any, accepted: Iterable[str]) -> str:
    """A hint for a name that is none of the accepted ones: similar ones, or all, if these are not too many."""
    accepted = list(accepted)
    near = difflib.get_close_matches(str(name)[:MOST_LETTERS], accepted)
    return (
        f"did you mean {' or '.join(near)}?" if near else f"accepted: {few(accepted, MOST_NAMES)}"
    )


def value_type(hint: Any) -> Any:
    """The type of a field's values: T if the annotation is `T | None`."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return kinds[0] if is_union(hint) and len(kinds) == 1 else hint


def item_type(hint: Any) -> Any:
    """The type of the items if it is a list of one type, or another sequence; otherwise None."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not Ellipsis]
    return kinds[0] if typing.get_origin(hint) in SEQUENCES and len(kinds) == 1 else None


def types_in(hint: Any) -> tuple[Any, ...]:
    """The types of a union; of another type, the type itself."""
    hint = plain(hint)[0]
    return typing.get_args(hint) if is_union(hint) else (hint,)


def is_union(hint: Any) -> bool:
    """Whether a type is a union."""
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def choices_of(hint: Any, limits: Mapping[str, Any]) -> tuple[Any, ...]:
    """The words that a field accepts; () if it accepts others, too."""
    kind = value_type(hint)
    if item_type(kind) is not None:
        return ()
    return (
        typing.get_args(kind) if typing.get_origin(kind) is Literal else limits.get("choices", ())
    )


def refusal(value: Any, hint: Any, limits: Mapping[str, Any]) -> str:
    """What is accepted instead of a value, in words; "" if the value is accepted."""
    kind = value_type(hint)
    if fits(value, hint, limits):
        return ""
    if kind in (int, float) and fits(value, kind, {}):
        return str(
            out_of_range(value, bounds(limits) if kind is int and abs(value) > MOST else limits)
        )
    near = (
        difflib.get_close_matches(value, choices_of(hint, limits), n=1, cutoff=0.7)
        if isinstance(value, str)
        else []
    )
    return accepted(hint, limits) + (f"; did you mean {near[0]}?" if near else "")


def bounds(limits: Mapping[str, Any]) -> dict[str, Any]:
    """The limits of whole numbers."""
    return {"at_most": MOST} | {name: limit for name, limit in limits.items() if limit is not None}


def fits(value: Any, hint: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a value has a type and is within the limits."""
    hint, own = plain(hint)
    limits = own or limits
    kinds = typing.get_args(hint)
    if value is None and hint is not Any:
        return type(None) in (hint, *kinds)
    if is_union(hint):
        return any(fits(value, kind, limits) for kind in kinds)
    if choices := choices_of(hint, limits):
        return any(isinstance(value, type(choice)) and value == choice for choice in choices)
    if hint in (int, float):
        kind: Any = numbers.Integral if hint is int else numbers.Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return False
        return not limits or out_of_range(value, bounds(limits) if hint is int else limits) is None
    if hint is Path:
        return isinstance(value, os.PathLike)
    if (each := item_type(hint)) is not None:
        return fits_all(value, each, limits)
    kind = typing.get_origin(hint) or hint
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True  # Any, and types that cannot be checked
    return isinstance(value, kind)


def fits_all(values: Any, hint: Any, limits: Mapping[str, Any]) -> bool:
    """Whether it is a list or another sequence of values that fit."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        return False
    if not values and not limits.get("empty", True):
        return False
    if limits.get("distinct") and len({*map(str, values)}) < len(values):
        return False
    return all(fits(value, hint, limits) for value in values)


def accepted(hint: Any, limits: Mapping[str, Any] = NOTHING) -> str:
    """What a field accepts, in words."""
    hint, own = plain(hint)
    limits = own or limits
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if limits.get("accepted"):
        return limits["accepted"]
    if choices := choices_of(hint, limits):
        return ", ".join(map(str, choices))
    if is_union(hint):
        return " or ".join(dict.fromkeys(accepted(kind, limits) for kind in kinds))
    if (each := item_type(hint)) is not None:
        count = "one or more " * (not limits.get("empty", True)) + "different " * bool(
            limits.get("distinct")
        )
        return f"a list of {count}{accepted(each)}"
    kind = typing.get_origin(hint) or hint
    return WORDS.get(kind, f"a {getattr(kind, '__name__', 'value')}")


def out_of_range(value: Any, limits: Mapping[str, Any]) -> str | None:
    """What is accepted, in words, if `value` is out of range; otherwise None."""
    low, above, high, below = (
        limits.get(name) for name in ("at_least", "above", "at_most", "below")
    )
    endless = value in (math.inf, -math.inf) and not limits.get("infinite")
    inside = (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
        and value == value
        and not endless
    )
    if inside:
        return None
    if endless:
        return "finite numbers"
    if low is not None:
        upper = f"{low:g} to below {below:g}" if below is not None else f"{low:g} or more"
        return upper if high is None else f"{low:g} to {high:.10g}"
    if above is not None:
        upper = (
            f", at most {high:g}"
            if high is not None
            else f", below {below:g}"
            if below is not None
            else ""
        )
        return f"above {above:g}{upper}"
    if high is not None or below is not None:
        return f"at most {high:.10g}" if high is not None else f"below {below:g}"
    return "a number"
