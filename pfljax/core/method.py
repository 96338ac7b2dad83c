"""Declaring a method: one frozen dataclass of knobs, registered by a decorator.

@method(keeps="its model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Ditto:
    \"\"\"Ditto (Li et al., 2021): a global model and personal models regularized toward it.\"\"\"

    strength: float = knob(0.1, at_least=0, help="lambda, pull of the personal model toward the global one")

    def build(self, problem): ...
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.core import Tracer

from pfljax.core.errors import ArgumentError

T = TypeVar("T", bound=type)
METHODS: dict[str, Any] = {}  # the registry: name -> class, in the order of registration


@dataclasses.dataclass(frozen=True)
class MethodInfo:
    """Information about a registered method besides its knobs; the `info` attribute of its class.

    Attributes:
        name: Registered name.
        title: Name and paper: the first line of the class docstring, up to the colon or period.
        keeps: What each client keeps.
        travels: What travels in a round.
        validates: Whether the method needs validation examples.
    """

    name: str
    title: str
    keeps: str
    travels: str
    validates: bool = False


def knob(
    default: Any,
    *,
    help: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    grid: Sequence[Any] = (),
    static: bool = False,
    read_with: tuple[str, str] | None = None,
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
        grid: Values that tuning tries, the paper's own values first.
        static: Whether the number determines shapes or host computations. Otherwise `build` may get a traced value for
            a float knob, since tuning tries several values in one kernel.
        read_with: Another knob and the value it must have for this knob to be read; otherwise this knob must keep its
            default.
    """
    metadata = {"help": help, "at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata |= {"infinite": infinite, "grid": tuple(grid), "static": static, "read_with": read_with}
    return dataclasses.field(default=default, metadata=metadata)


def method(*, keeps: str, travels: str, name: str | None = None, validates: bool = False) -> Callable[[T], T]:
    """Registers a frozen dataclass of knobs with a `build(problem) -> Algorithm` as a method.

    Creating an instance checks its knobs: their ranges, and that a `Literal` has one of its values.

    Args:
        keeps: What each client keeps, in words.
        travels: What travels in a round, in words.
        name: Registered name; by default the class name in lower case.
        validates: Whether the method needs validation examples.

    Raises:
        ArgumentError: if a class of another file, or another class of the file, has the name.
    """

    def register(cls: Any) -> Any:
        registered = name or cls.__name__.lower()
        other, doc = METHODS.get(registered), inspect.getdoc(cls)
        if other is not None and _origin(other) != _origin(cls):
            taken = f"is the name of {other.__module__}.{other.__qualname__}"
            text = f'{taken}; accepted: another name, by renaming the class or by @pfl.method(name="...")'
            raise ArgumentError("name", text, registered)
        declared = hasattr(cls, "__dataclass_fields__") and callable(getattr(cls, "build", None))
        if not declared or not doc:
            raise TypeError(f"{cls.__name__}: a method is a dataclass with a docstring and build(problem)")
        title = doc.split("\n\n")[0].replace("\n", " ").split(": ")[0].rstrip(".")
        cls.info = MethodInfo(registered, title, keeps, travels, validates)
        made, built = cls.__init__, cls.build

        @functools.wraps(made)
        def init(self, *args, **kwargs):
            made(self, *args, **kwargs)
            check_knobs(self)

        @functools.wraps(built)
        def build(self, problem):
            try:
                return built(self, problem)
            except ArgumentError as error:
                raise error.of(registered) if error.argument in knobs else error from error.__cause__

        knobs = {field.name for field in dataclasses.fields(cls)}
        cls.__init__, cls.build = init, build
        METHODS[registered] = cls
        return cls

    return register


def _origin(cls: type) -> tuple[str, str]:
    """Where a class is defined: file (or module, in a notebook) and name. Running that again may replace the class."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__, cls.__qualname__


def check_knobs(made: Any) -> None:
    """Raises `ArgumentError` if a field of a method or another dataclass is out of range."""
    info = getattr(type(made), "info", None)
    owner = info.name if info else ""
    hints = typing.get_type_hints(type(made))
    for field in dataclasses.fields(made):
        value, hint = getattr(made, field.name), value_type(hints[field.name])
        # The value is not given, or it is traced and was checked before tracing.
        if isinstance(value, Tracer) or (hint is not hints[field.name] and isinstance(value, types.NoneType)):
            continue
        error = functools.partial(ArgumentError, field.name, value=value, owner=owner)
        if typing.get_origin(hint) is typing.Literal:
            if value not in typing.get_args(hint):
                raise error(f"accepted: {', '.join(map(str, typing.get_args(hint)))}")
        elif not of_type(value, hint):
            raise error(f"accepted: {TYPES[hint]}")
        elif hint in (int, float) and out_of_range(value, field.metadata) is not None:
            raise error(f"accepted: {out_of_range(value, field.metadata)}")
        other, needed = field.metadata.get("read_with") or ("", None)
        if other and getattr(made, other) != needed and value != field.default:
            raise error(f"applies only with {other}={needed}")


TYPES = {int: "whole numbers", float: "numbers", bool: "True or False", str: "text"}


def value_type(hint: Any) -> Any:
    """The type of a knob's values: T if the annotation is `T | None`."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union) and len(kinds) == 1
    return kinds[0] if optional else hint


def of_type(value: Any, hint: Any) -> bool:
    """Whether a knob's value has its annotated type, if that is a plain type."""
    if hint in (int, float) and isinstance(value, bool):
        return False
    kinds: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real, bool: bool, str: str}
    return isinstance(value, kinds.get(hint, object))


def out_of_range(value: float, limits: typing.Mapping[str, Any]) -> str | None:
    """What is accepted, in words, if `value` is out of range; otherwise None."""
    low, above, high, below = (limits.get(name) for name in ("at_least", "above", "at_most", "below"))
    fits = (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
        and not math.isnan(value)
        and (limits.get("infinite") or not math.isinf(value))
    )
    if fits:
        return None
    if math.isinf(value) and not limits.get("infinite"):
        return "finite numbers"
    if low is not None:
        upper = (
            f"{low:g} to {high:g}" if high is not None else f"{low:g} to below {below:g}" if below is not None else ""
        )
        return upper or f"{low:g} or more"
    if above is not None:
        upper = f", at most {high:g}" if high is not None else f", below {below:g}" if below is not None else ""
        return f"above {above:g}{upper}"
    if high is not None or below is not None:
        return f"at most {high:g}" if high is not None else f"below {below:g}"
    return "a number"


def get(name: str) -> Any:
    """Returns the class registered as `name`.

    Raises:
        ArgumentError: if there is none; suggests similar names.
    """
    if name not in METHODS:
        if name.endswith(".py"):
            raise ArgumentError("algorithm", f"names only a file; accepted: {name}:NAME, a class in it", name)
        near = difflib.get_close_matches(name, METHODS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"accepted: {', '.join(METHODS)}"
        raise ArgumentError("algorithm", f"unknown algorithm; {hint}", name)
    return METHODS[name]
