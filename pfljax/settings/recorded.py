"""Objects as JSON, by the names of their classes, so that a later process can recreate them. Nothing is pickled.

A class or function is recorded as its module and name, with the module's file unless it is in a package. A dataclass,
such as a method or a Flax module, is recorded as its class and fields. Closures and arrays cannot be recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.settings import own_files
from pfljax.settings.fields import fields_of, present_names

NOT_FIELDS = ("parent", "name")  # of a Flax module, which its parent sets


class CannotRecord(ValueError):
    """An object that cannot be recreated from names and numbers."""


def recorded(value: Any) -> Any:
    """Returns a value as JSON.

    Raises:
        CannotRecord: if `restored` could not recreate it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, type) and (
        dataclasses.is_dataclass(value) or hasattr(value, "_fields")
    ):
        return {"class": recorded(type(value)), "fields": recorded_fields(value)}
    if isinstance(value, list | tuple):
        items = [recorded(item) for item in value]
        return items if isinstance(value, tuple) else {"list": items}
    name = getattr(value, "__qualname__", "")
    full = str(getattr(value, "__module__", ""))
    packages = full.split(".")
    # the most public name
    for end in range(1, len(packages) + 1):
        module = ".".join(packages[:end])
        if _attribute(module, name) is value:
            file = file_of(module) if module == full and len(packages) == 1 else None
            return {"module": module, "name": name, "file": file}
    raise CannotRecord(value)


def recorded_fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass or named tuple as JSON. Defaults that cannot be recorded are left out."""
    values = fields(value)
    records = recordable(values)
    for name in values.keys() - records.keys():
        if values[name] is not getattr(type(value), name, None):
            raise CannotRecord(value)
    return records


def recordable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as JSON, without those that cannot be recorded."""
    records = {}
    for name, value in values.items():
        with contextlib.suppress(CannotRecord):
            records[name] = recorded(value)
    return records


def fields(value: Any) -> dict[str, Any]:
    """Returns the arguments that recreate a dataclass or named tuple, by name."""
    if hasattr(value, "_asdict"):
        return value._asdict()
    names = [
        field.name
        for field in dataclasses.fields(value)
        if field.init and field.name not in NOT_FIELDS
    ]
    return {name: getattr(value, name) for name in names}


def restored(record: Any, argument: str) -> Any:
    """Returns the object that was recorded. Imports the modules and files that the record names.

    Args:
        record: What `recorded` returned.
        argument: Name of the argument that can be passed instead, for messages.

    Raises:
        ArgumentError: if code is missing or was changed so that it does not fit.
    """
    if isinstance(record, list):
        return tuple(restored(item, argument) for item in record)
    if not isinstance(record, Mapping):
        return record
    if "list" in record:
        return [restored(item, argument) for item in record["list"]]
    if "float" in record:
        return float(record["float"])
    if "fields" not in record:
        return _named(record["module"], record["name"], record["file"], argument)
    cls = restored(record["class"], argument)
    if not isinstance(cls, type) or not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
        raise ArgumentError(
            argument, f"{record['class']['name']} is no dataclass; {hand_over(argument)}"
        )
    present = present_names(fields_of(cls))
    values = {}
    for name, value in record["fields"].items():
        values[present.get(name, name)] = restored(value, argument)
    try:
        return cls(**values)
    except (TypeError, ArgumentError) as error:
        raise ArgumentError(
            argument, f"{cls.__name__} has changed ({error}); {hand_over(argument)}"
        ) from error


def hand_over(argument: str) -> str:
    """Returns the advice for an argument, or for an attribute of one, that cannot be found."""
    name = argument.partition(".")[0]
    return f"pass {name}: pfljax.load(path, {name}=...)"


def file_of(module: str) -> str | None:
    """Returns the absolute path of a module's file, if it has one."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return os.path.abspath(file) if file else None


def _attribute(module: str, name: str) -> Any:
    """Returns what a loaded module has by this name, or None; a former name in a file gives no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return getattr(sys.modules.get(module), name, None)


def _named(module: str, name: str, file: str | None, argument: str) -> Any:
    """Returns a module's class or function: from the recorded file, or from the module if the file is gone."""
    exists = file is not None and os.path.isfile(file)
    if module != "__main__" and module not in sys.modules:
        with contextlib.suppress(Exception):  # `own_files.load` tells what is wrong
            importlib.import_module(module)
    is_recorded = module in sys.modules and (
        file_of(module) == file or (module != "__main__" and not exists)
    )
    value = _attribute(module, name) if is_recorded else None
    if value is not None:
        return value
    if not exists or module == "__main__":  # a script is not run again
        where = "a script or notebook" if module == "__main__" else file or module
        text = f"{name} is defined in {where}, which cannot be imported"
        raise ArgumentError(argument, f"{text}; {hand_over(argument)}")
    return own_files.load(argument, f"{file}:{name}")
