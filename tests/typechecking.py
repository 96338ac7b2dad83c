"""Checks of the package's signatures at run time, which tests alone make; see conftest.py."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float


def check(function: Callable) -> Callable:
    """Checks calls of a function or class, unless it is defined inside another function.

    A function inside another one is made anew in every call, and beartype would compile a checker for it each time.
    """
    if "<locals>" in function.__qualname__:
        return function
    return checked(function)
