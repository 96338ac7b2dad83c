"""Users' own methods and models, named as FILE.py:NAME."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from pfljax.contract.errors import ArgumentError, raised
from pfljax.contract.paths import expanded
from pfljax.settings.method import METHODS


def is_file_and_name(text: str) -> bool:
    """Whether a text has the form FILE.py:NAME."""
    return ".py:" in text


FOLDERS: set[str] = set()  # that `load` has put on the path


def _reach_neighbors(folder: Path) -> None:
    """Lets a file import modules from its own folder, not those of the same name from another loaded file's folder."""
    for file in folder.glob("*.py"):
        module = sys.modules.get(file.stem)
        folder_of_module = os.path.dirname(getattr(module, "__file__", None) or "")
        if folder_of_module in FOLDERS - {str(folder)}:
            del sys.modules[file.stem]
    sys.path[:] = [entry for entry in sys.path if entry not in FOLDERS]
    if str(folder) not in sys.path:
        FOLDERS.add(str(folder))
        sys.path.append(str(folder))


def load(argument: str, text: str) -> Any:
    """Returns the object that FILE.py:NAME names. Executes the file every time.

    Args:
        argument: Name of the argument, for error messages.
        text: FILE.py:NAME.

    Raises:
        ArgumentError: if the file or the object is missing, or the file raises an error.
    """
    file, _, name = text.rpartition(":")
    file = expanded(file, argument)
    if not os.path.isfile(file):
        raise ArgumentError(argument, "no such file; accepted: FILE.py:NAME", text)
    path = Path(file).resolve()
    # files of one name may be in several folders
    folder = hashlib.sha256(os.fsencode(path.parent)).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}_{folder}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # type hints of its classes are looked up there
    _reach_neighbors(path.parent)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ArgumentError(argument, raised(error, str(path)), text) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ArgumentError(argument, f"{file} has no {name}{hint}", text)
    return getattr(module, name)


def load_method(text: str) -> str:
    """Loads a file that registers a method. Returns the method's registered name.

    Raises:
        ArgumentError: see `load`; also if the object is not a registered method.
    """
    cls = load("method", text)
    info = getattr(cls, "info", None)
    if info is None or METHODS.get(info.name) is not cls:
        expected = "not a method; accepted: a class decorated with @pfl.author.method(...)"
        raise ArgumentError("method", expected, text)
    return info.name
