"""Declaring a method: one frozen dataclass of hyperparameters, registered by a decorator.

@method(keeps="its model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Ditto:
    \"\"\"Ditto (Li et al., 2021): a global model and personal models regularized toward it.\"\"\"

    mu: float = hyperparameter(0.1, at_least=0, help="lambda, pull of the personal model toward the global one")

    def build(self, problem): ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike

from pfljax.contract.errors import ArgumentError
from pfljax.settings import fields
from pfljax.settings.fields import hyperparameter as hyperparameter

T = TypeVar("T", bound=type)
METHODS: dict[str, Any] = {}  # the registry: name -> class, in the order of registration


@dataclasses.dataclass(frozen=True)
class MethodInfo:
    """Information about a registered method besides its hyperparameters; the `info` attribute of its class.

    Attributes:
        name: Registered name.
        title: Name and paper: the first line of the class docstring, up to the colon or period.
        keeps: What each client keeps.
        travels: What travels in a round.
        validates: Whether the method needs validation examples.
        knows: What it is always told that others are not, in words.
    """

    name: str
    title: str
    keeps: str
    travels: str
    validates: bool = False
    knows: str = ""


@overload
def method(cls: T, /) -> T: ...
@overload
def method(
    *,
    keeps: str = "",
    travels: str = "",
    name: str | None = None,
    validates: bool = False,
    knows: str = "",
) -> Callable[[T], T]: ...
def method(
    cls: Any = None,
    /,
    *,
    keeps: str = "",
    travels: str = "",
    name: str | None = None,
    validates: bool = False,
    knows: str = "",
) -> Any:
    """Registers a frozen dataclass of hyperparameters with a `build(problem) -> Algorithm` as a method.

    Creating an instance checks its hyperparameters: their ranges, and that a `Literal` has one of its values.

    Args:
        cls: The class, in `@method` without parentheses; otherwise a decorator is returned.
        keeps: What each client keeps, in words, for the list of methods.
        travels: What travels in a round, in words, for the list of methods.
        name: Registered name; by default the class name in lower case.
        validates: Whether the method needs validation examples.
        knows: What it is always told that others are not, in words, for tables; "": nothing. Hyperparameters declare
            what it may be told: `hyperparameter(groups=True)`.

    Raises:
        ArgumentError: if a class of another file, or another class of the file, has the name.
        TypeError: if the class is no dataclass, or has no docstring or no `build`.

    Examples:
        >>> import dataclasses
        >>> from pfljax.author import hyperparameter, method
        >>> @method(keeps="its model", travels="the global model, both ways")
        ... @dataclasses.dataclass(frozen=True)
        ... class MyDitto:
        ...     "MyDitto: personal models near a global model."
        ...     mu: float = hyperparameter(0.1, at_least=0)
        ...     def build(self, problem): ...
        >>> MyDitto.info.name
        'myditto'
        >>> MyDitto(mu=1.0)
        MyDitto(mu=1.0)
    """

    def register(cls: Any) -> Any:
        if not isinstance(cls, type):
            text = f"stands above {type(cls).__name__}; accepted: a class, which is a dataclass"
            raise ArgumentError("method", text)
        registered = name or cls.__name__.lower()
        _check_class(cls, registered)
        title = _title(inspect.getdoc(cls) or "")
        cls.info = MethodInfo(registered, title, keeps, travels, validates, knows)
        cls.__init__ = fields.checked(cls=cls, owner=registered)(cls.__init__)
        cls.build = _naming_hyperparameters(cls, registered)
        METHODS[registered] = cls
        return cls

    return register if cls is None else register(cls)


def _check_class(cls: type, registered: str) -> None:
    """Raises an error if a class is no method, or another class has its name; see `method`."""
    other = METHODS.get(registered)
    if other is not None and _origin(other) != _origin(cls):
        taken = f"is the name of {other.__module__}.{other.__qualname__}"
        text = f'{taken}; accepted: another name, by renaming the class or by @pfl.author.method(name="...")'
        raise ArgumentError("name", text, registered)
    is_dataclass = hasattr(cls, "__dataclass_fields__")
    if not is_dataclass or not callable(getattr(cls, "build", None)) or not inspect.getdoc(cls):
        text = "a method is a dataclass with a docstring and build(problem); @pfl.author.method stands above @dataclass"
        raise TypeError(f"{cls.__name__}: {text}")


def _title(doc: str) -> str:
    """What stands before the first colon of a docstring."""
    summary, _, _ = doc.partition("\n\n")
    title, _, _ = summary.replace("\n", " ").partition(": ")
    return title.rstrip(".")


def _naming_hyperparameters(cls: Any, registered: str) -> Callable[..., Any]:
    """The `build` of a method; an error about one of its hyperparameters names the method."""
    build_method = cls.build
    hyperparameters = {field.name for field in dataclasses.fields(cls)}

    @functools.wraps(build_method)
    def build(self: Any, problem: Any) -> Any:
        try:
            return build_method(self, problem)
        except ArgumentError as error:
            if error.argument in hyperparameters:
                raise error.with_owner(registered) from error.__cause__
            raise error from error.__cause__

    return build


def _origin(cls: type) -> tuple[str, str]:
    """Where a class is defined: file (or module, in a notebook) and name. Running that again may replace the class."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file or cls.__module__, cls.__qualname__


def numbers_of_groups(method: Any) -> list[str]:
    """The hyperparameters of a method, or of its class, that `tell` sets."""
    return [field.name for field in dataclasses.fields(method) if field.metadata.get("groups")]


def tell(method: Any, tell_groups: bool, group: ArrayLike | None) -> tuple[Any, str]:
    """Tells a method what a run lets it know of the truth.

    Args:
        method: The method.
        tell_groups: Whether that is the number of groups.
        group: The true group of each client, (K,); None: unknown.

    Returns:
        The method, whose numbers of groups that have their default are the true one if it is told, and what it knows
        that others do not, in words.

    Raises:
        ArgumentError: if the groups are unknown, or have less than two clients on average.
    """
    if not tell_groups:
        return method, method.info.knows
    groups = np.asarray([] if group is None else group)
    num = len(np.unique(groups))
    if not 0 < 2 * num <= len(groups):
        text = "accepted for clients in known groups of two or more; otherwise False"
        raise ArgumentError("tell_groups", text, True)
    names = []
    for name in numbers_of_groups(method):
        if getattr(method, name) == getattr(type(method), name):
            names.append(name)
    known = []
    if method.info.knows:
        known.append(method.info.knows)
    if names:
        known.append(f"the number of groups ({num})")
    numbers = dict.fromkeys(names, num)
    return dataclasses.replace(method, **numbers), "; ".join(known)


def registered_name(name: str) -> str:
    """The name of a method in any case as it is registered; the name itself if there is no such method."""
    return fields.in_their_case(name, METHODS)


def get(name: str) -> Any:
    """Returns the class registered as `name`, in any case.

    Raises:
        ArgumentError: if there is none; suggests similar names.
    """
    registered = registered_name(name)
    if registered not in METHODS:
        if name.endswith(".py"):
            text = f"names only a file; accepted: {name}:NAME, a class in it"
            raise ArgumentError("method", text, name)
        raise ArgumentError("method", f"unknown method; {fields.nearest(name, METHODS)}", name)
    return METHODS[registered]


def former_names() -> dict[str, str]:
    """Former names of methods' hyperparameters and their present ones, METHOD.HYPERPARAMETER."""
    names = {}
    for name, cls in METHODS.items():
        for former, present in fields.present_names(fields.fields_of(cls)).items():
            names[f"{name}.{former}"] = f"{name}.{present}"
    return names
