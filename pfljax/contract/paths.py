"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar, overload

from pfljax.contract.errors import ArgumentError

P = TypeVar("P", bound=os.PathLike)


@overload
def expanded(path: str, argument: str = "file") -> str: ...
@overload
def expanded(path: P, argument: str = "file") -> P: ...
@overload
def expanded(path: str | Path, argument: str = "file") -> str | Path: ...
def expanded(path: Any, argument: str = "file") -> Any:
    """A path with its leading ~ or ~USER replaced by that home folder, as a shell replaces it.

    A shell leaves NAME=~/runs as it is, and Python never replaces it, so every path that a user writes comes here.

    Args:
        path: The path.
        argument: Name of the argument, for error messages.

    Raises:
        ArgumentError: if there is no such home folder.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text.startswith("~"):
        return path
    full_path = os.path.expanduser(text)
    if full_path == text:
        name = text.partition("/")[0]
        reason = "HOME is not set" if name == "~" else "no such user"
        accepted = "accepted: a path without ~, or ./~"
        raise ArgumentError(argument, f"{name} is no home folder ({reason}); {accepted}", text)
    return full_path if isinstance(path, str) else type(path)(full_path)
