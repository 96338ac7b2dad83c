"""Methods and models of one's own, named on the command line as FILE.py:NAME."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from pfljax.core.errors import ArgumentError
from pfljax.core.method import METHODS


def is_file_and_name(text: str) -> bool:
    """Whether a text names an object in a Python file."""
    return ".py:" in text


def load(argument: str, text: str) -> Any:
    """The object that FILE.py:NAME names; its module is executed anew.

    Args:
        argument: Where the text comes from, for messages.
        text: FILE.py:NAME.

    Raises:
        ArgumentError: if the file or the object in it is missing, or the file fails.
    """
    file, _, name = text.rpartition(":")
    if not os.path.isfile(file):
        raise ArgumentError(argument, "no such file; accepted: FILE.py:NAME", text)
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where type hints of its classes are looked up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the file may import its neighbors
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        first = str(error).split("\n")[0]
        raise ArgumentError(argument, f"the file fails: {type(error).__name__}: {first}", text) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1, cutoff=0.6)
        raise ArgumentError(argument, f"{file} has no {name}" + (f"; did you mean {near[0]}?" if near else ""), text)
    return getattr(module, name)


def load_method(text: str) -> str:
    """Loads a file that registers a method; the method's registered name.

    Raises:
        ArgumentError: as `load`, or if the object is not a registered method.
    """
    found = load("algorithm", text)
    info = getattr(found, "info", None)
    if info is None or METHODS.get(info.name) is not found:
        raise ArgumentError("algorithm", "not a method; accepted: a class under @pfl.method(...)", text)
    return info.name
