"""Settings, declared once: the fields of a dataclass or the arguments of a function, with ranges, choices and help.

    @settings
    class Server:
        trim: float = hyperparameter(0.2, at_least=0, below=0.5, help="share of attackers")

    @checked()
    def train(rounds: Annotated[int, hyperparameter(at_least=1, help="number of rounds")]): ...

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

from pfljax.contract.errors import ArgumentError, few, warn_former
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
# other field -> its values; (): any but 0, None and False; ANY_TEXT: any text but ""
Conditions = Mapping[str, Sequence[Any]]
ANY_TEXT = ("...",)


def hyperparameter(
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
    pattern: str = "",
    former: str = "",
    refused: Mapping[str, str] = NOTHING,
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
            a float hyperparameter, since tuning tries several values in one kernel.
        read_with: Another hyperparameter and the value it must have for this hyperparameter to be read; otherwise
            this hyperparameter must keep its default. Or a mapping from other hyperparameters to their values, one of
            which is enough.
        accepted: What is accepted, in words; by default, derived from the annotation and the bounds.
        pattern: Regular expression that a string must match as a whole.
        former: Its name in the previous release, which is still accepted, with a warning.
        refused: Words that people expect among the choices, and what to tell them instead of all choices.

    Examples:
        >>> import dataclasses
        >>> from pfljax.author import hyperparameter, method
        >>> @method
        ... @dataclasses.dataclass(frozen=True)
        ... class Shrinking:
        ...     "Shrinking: parameters decay after each round."
        ...     rate: float = hyperparameter(0.1, at_least=0, below=1, grid=(0.01, 0.1))
        ...     def build(self, problem): ...
        >>> Shrinking(rate=2.0)
        Traceback (most recent call last):
            ...
        pfljax.contract.errors.ArgumentError: shrinking.rate=2.0: accepted: 0 to below 1
    """
    if isinstance(read_with, tuple):
        other, value = read_with
        conditions = {other: (value,)}
    else:
        conditions = dict(read_with)
    metadata = {
        "help": help,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
        "infinite": infinite,
        "choices": tuple(choices),
        "distinct": distinct,
        "empty": empty,
        "static": static,
        "grid": tuple(grid),
        "groups": groups,
        "read_with": conditions,
        "accepted": accepted,
        "pattern": pattern,
        "former": former,
        "refused": dict(refused),
    }
    return dataclasses.field(default=default, metadata=metadata)


NumClients = Annotated[int, hyperparameter(at_least=1)]
Seed = Annotated[int, hyperparameter(at_least=0)]
Seeds = Annotated[Sequence[Seed], hyperparameter(distinct=True, empty=False)]


class Field(NamedTuple):
    """One declared field or argument.

    Attributes:
        name: Its name.
        hint: Its type, without `Annotated`.
        default: Its default; `REQUIRED` if it has none.
        limits: The metadata made by `hyperparameter`; empty without `hyperparameter`.
    """

    name: str
    hint: Any
    default: Any
    limits: Mapping[str, Any]

    @property
    def conditions(self) -> Conditions:
        """Conditions under which it is read; empty: always."""
        return self.limits.get("read_with", {})

    def check(self, value: Any, owner: str = "") -> Any:
        """Returns the value as plain Python if it is a NumPy scalar. Raises `ArgumentError` if it is not accepted."""
        value = as_python(value)

        # Data types by object, such as jnp.float32, and words in another case.
        choices = self.limits.get("choices", ())
        if "float32" in choices and not isinstance(value, str | None):
            with contextlib.suppress(TypeError):
                value = np.dtype(value).name
        if isinstance(value, str):
            value = in_their_case(value, words_of(self.hint, self.limits))

        if typing.get_origin(value_type(self.hint)) in SEQUENCES:
            value = items_as_python(value)
        text = "" if isinstance(value, Tracer) else refusal(value, self.hint, self.limits)
        if text:
            is_shown = isinstance(value, SIMPLE) or value is None
            shown = value if is_shown else type(value).__name__
            raise ArgumentError(self.name, f"accepted: {text}", shown, owner=owner)
        if callable(value) and not isinstance(value, Tracer):
            self._check_call(value, owner)
        return self._expanded(value)

    def _check_call(self, function: Callable, owner: str) -> None:
        """Raises `ArgumentError` for a function that does not take as many arguments as it is called with."""
        types = types_in(self.hint)
        callables = [t for t in types if typing.get_origin(t) is collections.abc.Callable]
        arguments = typing.get_args(callables[0])[0] if callables else ...
        if arguments is ...:
            return
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some functions in C have none
            return
        try:
            signature.bind(*arguments)
        except TypeError as error:
            number = f"{len(arguments)} argument{'s' * (len(arguments) != 1)}"
            expected = accepted(self.hint, self.limits)
            text = f"cannot be called with {number} ({error}); accepted: {expected}"
            raise ArgumentError(self.name, text, owner=owner) from error

    def _expanded(self, value: Any) -> Any:
        """A path, or a list of paths, with ~ replaced by the home folder; other values as they are."""
        hint = value_type(self.hint)
        item = item_type(hint)
        if Path not in types_in(hint if item is None else item):
            return value
        if item is None:
            return expanded(value, self.name) if isinstance(value, str | os.PathLike) else value
        return [expanded(path, self.name) for path in value]


def as_python(value: Any) -> Any:
    """A scalar of NumPy or JAX as plain Python; other values, tracers and random keys as they are."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.ndim:
        return value
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value if is_key else value.item()


def items_as_python(values: Any) -> Any:
    """A list, tuple or 1-D array with its items as plain Python; other values as they are."""
    if isinstance(values, np.ndarray):
        return values.tolist() if values.ndim == 1 else values
    if type(values) not in (list, tuple):
        return values
    items = [as_python(item) for item in values]
    return items if isinstance(values, list) else tuple(items)


def words_of(hint: Any, limits: Mapping[str, Any]) -> list[str]:
    """The words that a field accepts, besides other values."""
    words = [*limits.get("choices", ())]
    for kind in types_in(hint):
        if typing.get_origin(kind) is Literal:
            words += [word for word in typing.get_args(kind) if isinstance(word, str)]
    return words


def in_their_case(name: str, accepted: Iterable[str]) -> str:
    """The accepted name that a name equals but for upper and lower case; the name itself if there is none."""
    accepted = list(accepted)
    if name in accepted:
        return name
    same = [other for other in accepted if other.lower() == name.lower()]
    return same[0] if same else name


@functools.cache
def fields_of(declaring: Any) -> dict[str, Field]:
    """The fields of a dataclass or named tuple, or the arguments of a function, by name."""
    metadata = {}
    function = declaring
    if dataclasses.is_dataclass(declaring):
        metadata = {field.name: field.metadata for field in dataclasses.fields(declaring)}
    elif isinstance(declaring, type) and not hasattr(declaring, "_fields"):
        function = declaring.__init__
    hints = typing.get_type_hints(function, include_extras=True)
    fields = {}
    for name, parameter in inspect.signature(function).parameters.items():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name in ("self", "cls") or is_variadic:
            continue
        hint, limits = plain(hints.get(name, Any))
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        limits = metadata.get(name) or limits
        fields[name] = Field(name, hint, default, limits)
    return fields


def plain(hint: Any) -> tuple[Any, Mapping[str, Any]]:
    """A type without `Annotated`, which may be around it or within `T | None`, and the metadata that was in it."""
    kind = value_type(hint)
    if typing.get_origin(kind) is not Annotated:
        return hint, {}
    declared = kind.__metadata__[0]
    inner = kind.__origin__
    limits = declared.metadata if isinstance(declared, dataclasses.Field) else {}
    return (inner if kind is hint else inner | None), limits


def checked(
    *,
    options: Sequence[Callable] = (),
    without: Sequence[str] = (),
    owner: str = "",
    cls: Any = None,
) -> Callable[[C], C]:
    """Checks a function's arguments against their annotations before it is called; raises `ArgumentError`.

    Args:
        options: What declares the function's further keyword arguments.
        without: Those of them that are not accepted.
        owner: See `ArgumentError`.
        cls: The class whose fields are the arguments, if the function is its `__init__`.
    """

    def wrap(function: Any) -> Any:
        signature = inspect.signature(function)
        rest = None  # the parameter of further keyword arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                rest = parameter.name

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            known = fields_of(cls or function)
            kwargs = with_present_names(kwargs, known, owner)
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


def present_names(known: Mapping[str, Field]) -> dict[str, str]:
    """The names of fields by their former names."""
    names = {}
    for name, field in known.items():
        former = field.limits.get("former")
        if former:
            names[former] = name
    return names


def with_present_names(
    values: Mapping[str, Any], known: Mapping[str, Field], owner: str = ""
) -> dict[str, Any]:
    """Returns a call's arguments under their present names, and warns about those with a former one.

    Raises `ArgumentError` if an argument has both.
    """
    present = present_names(known)
    prefix = f"{owner}." if owner else ""
    renamed = {}
    for name, value in values.items():
        if name in known or name not in present:
            renamed[name] = value
            continue
        new = present[name]
        if new in values:
            text = f"is now {prefix}{new}"
            raise ArgumentError(name, f"{text}; accepted: only one of them", value, owner=owner)
        warn_former(f"{prefix}{name}", f"{prefix}{new}")
        renamed[new] = value
    return renamed


# Hyperparameters that a method no longer has, by METHOD.NAME, and what has become of them.
FEDERICO = "federico is now Algorithm 1 of its paper; the former default, rule=friends, is federico_friends"
GONE = {
    "federico.rule": FEDERICO,
    "federico.effective_examples": f"all examples of a client count, as in the paper; {FEDERICO}",
}


def check_known(values: Mapping[str, Any], known: Mapping[str, Field], owner: str = "") -> None:
    """Raises `ArgumentError` for a value without a field."""
    for name, value in values.items():
        if name not in known:
            text = GONE.get(f"{owner}.{name}", f"unknown argument; {nearest(name, known)}")
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


def check_read(known: Mapping[str, Field], values: Mapping[str, Any], owner: str = "") -> None:
    """Raises `ArgumentError` for a value that is not read with the other values."""
    for name in values.keys() & known.keys():
        value = values[name]
        conditions = known[name].conditions
        if not conditions or isinstance(value, Tracer) or value == known[name].default:
            continue
        others = [other for other in conditions if other in known]
        fulfilled = [
            holds(values.get(other, known[other].default), conditions[other]) for other in others
        ]
        if others and not any(fulfilled):
            text = f"applies only {with_words(conditions)}"
            raise ArgumentError(name, text, value, owner=owner)


def holds(value: Any, needed: Sequence[Any]) -> bool:
    """Whether a value, or one of a list (of values, or of names with commas), is `needed`; see `Conditions`."""
    if isinstance(value, str):
        items = value.split(",")
    else:
        items = value if isinstance(value, list | tuple) else [value]
    if not needed or needed == ANY_TEXT:
        return any(items)
    names = [str(item).partition(":")[0] for item in items]
    return any(name in map(str, needed) for name in names)


def with_words(conditions: Conditions, prefix: str = "") -> str:
    """Conditions in words, such as "with plan=chunk"."""

    def in_words(values: Sequence[Any]) -> str:
        if values in (ANY_TEXT, (True,)):
            return ""
        if not values:
            return " above 0"
        return f"={listed([in_text(value) for value in values])}"

    def in_text(value: Any) -> str:
        # as on a command line, where there is a prefix
        return str(value).lower() if prefix and isinstance(value, bool) else str(value)

    texts = [f"with {prefix}{other}{in_words(values)}" for other, values in conditions.items()]
    return ", or ".join(texts)


def listed(words: Sequence[str]) -> str:
    """Alternatives in words, such as "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def check(instance: Any) -> None:
    """Raises `ArgumentError` if a field of a dataclass instance is not accepted."""
    known = fields_of(type(instance))
    values = {name: field.check(getattr(instance, name)) for name, field in known.items()}
    check_read(known, values)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: T) -> T:
    """Makes a frozen dataclass whose fields are checked when an instance is created."""
    dataclass: Any = dataclasses.dataclass(frozen=True)(cls)
    dataclass.__init__ = checked(cls=dataclass)(dataclass.__init__)
    return dataclass


def nearest(name: Any, accepted: Iterable[str]) -> str:
    """A hint for an unknown name: similar ones, whatever their case, or all, if these are not too many."""
    by_lower = {other.lower(): other for other in accepted}
    close = difflib.get_close_matches(str(name)[:MOST_LETTERS].lower(), by_lower)
    if close:
        return f"did you mean {listed([by_lower[other] for other in close])}?"
    return f"accepted: {few(by_lower.values(), MOST_NAMES)}"


def value_type(hint: Any) -> Any:
    """The type of a field's values: T if the annotation is `T | None`."""
    types = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return types[0] if is_union(hint) and len(types) == 1 else hint


def item_type(hint: Any) -> Any:
    """The type of the items if it is a list of one type, or another sequence; otherwise None."""
    types = [kind for kind in typing.get_args(hint) if kind is not Ellipsis]
    return types[0] if typing.get_origin(hint) in SEQUENCES and len(types) == 1 else None


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
    if fits(value, hint, limits):
        return ""
    kind = value_type(hint)
    if kind in (int, float) and fits(value, kind, {}) and not limits.get("accepted"):
        is_long = kind is int and abs(value) > MOST
        return str(out_of_range(value, bounds(limits) if is_long else limits))
    words = choices_of(hint, limits)
    near = []
    if isinstance(value, str):
        near = difflib.get_close_matches(value, words, n=1, cutoff=0.7)
    hint_at_name = f"; did you mean {near[0]}?" if near else ""
    return f"{accepted(hint, limits)}{hint_at_name}"


def bounds(limits: Mapping[str, Any]) -> dict[str, Any]:
    """The limits of whole numbers."""
    return {"at_most": MOST} | {name: limit for name, limit in limits.items() if limit is not None}


def fits(value: Any, hint: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a value has a type and is within the limits."""
    hint, declared = plain(hint)
    limits = declared or limits
    types = typing.get_args(hint)
    if value is None and hint is not Any:
        return type(None) in (hint, *types)
    if is_union(hint):
        return any(fits(value, kind, limits) for kind in types)
    if choices := choices_of(hint, limits):
        return any(isinstance(value, type(choice)) and value == choice for choice in choices)
    if hint in (int, float):
        kind: Any = numbers.Integral if hint is int else numbers.Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return False
        return not limits or out_of_range(value, bounds(limits) if hint is int else limits) is None
    if hint is Path:
        return isinstance(value, os.PathLike)
    item = item_type(hint)
    if item is not None:
        return fits_all(value, item, limits)
    kind = typing.get_origin(hint) or hint
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True  # Any, and types that cannot be checked
    if kind is str and limits.get("pattern"):
        return isinstance(value, str) and re.fullmatch(limits["pattern"], value) is not None
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
    hint, declared = plain(hint)
    limits = declared or limits
    types = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if limits.get("accepted"):
        return limits["accepted"]
    choices = choices_of(hint, limits)
    if choices:
        return ", ".join(map(str, choices))
    if is_union(hint):
        return " or ".join(dict.fromkeys(accepted(kind, limits) for kind in types))
    item = item_type(hint)
    if item is not None:
        one_or_more = "" if limits.get("empty", True) else "one or more "
        different = "different " if limits.get("distinct") else ""
        return f"a list of {one_or_more}{different}{accepted(item)}"
    kind = typing.get_origin(hint) or hint
    return WORDS.get(kind, f"a {getattr(kind, '__name__', 'value')}")


def out_of_range(value: Any, limits: Mapping[str, Any]) -> str | None:
    """What is accepted, in words, if `value` is out of range; otherwise None."""
    low = limits.get("at_least")
    above = limits.get("above")
    high = limits.get("at_most")
    below = limits.get("below")
    is_endless = value in (math.inf, -math.inf) and not limits.get("infinite")
    is_inside = (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
        and value == value  # no NaN
    )
    if is_endless:
        return "finite numbers"
    if is_inside:
        return None

    if low is not None:
        if high is not None:
            return f"{low:g} to {high:.10g}"
        return f"{low:g} or more" if below is None else f"{low:g} to below {below:g}"
    if above is not None:
        if high is not None:
            return f"above {above:g}, at most {high:g}"
        return f"above {above:g}" if below is None else f"above {above:g}, below {below:g}"
    if high is not None:
        return f"at most {high:.10g}"
    return "a number" if below is None else f"below {below:g}"
