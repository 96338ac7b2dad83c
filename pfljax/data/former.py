"""Former names of functions, arguments and attributes. They work for one release, with a warning."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from pfljax.contract.errors import warn_former

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**present: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function accept former names of arguments.

    Args:
        **present: Former name of an argument -> its present name.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() & present.keys():
                warn_former(f"{function.__name__}({name}=)", f"{present[name]}=")
                kwargs[present[name]] = kwargs.pop(name)
            return function(*args, **kwargs)

        return call

    return wrap


def module_attributes(module: str, present: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module whose public functions have former names.

    Args:
        module: Name of the module.
        present: Former name of a function -> its present name.
    """

    def get(name: str) -> Any:
        if name not in present:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_former(f"{module}.{name}", present[name])
        return getattr(sys.modules[module], present[name])

    return get
