"""Checkpoints of a run's `State`, saved with Orbax."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from pfljax.contract import optional, processes
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.contract.types import First, Start, State
from pfljax.folder import files, former, history

KEEP = 2  # the newest, and one in case the newest is truncated


def _as_dict(part: Any) -> Any:
    """Returns a state as nested dicts without its empty parts, since Orbax does not store empty containers."""
    if not isinstance(part, (State, Start, First)):
        return part
    parts = {name: _as_dict(value) for name, value in part._asdict().items()}
    return {name: value for name, value in parts.items() if jax.tree.leaves(value)}


def _filled(like: Any, parts: Any) -> Any:
    """Undoes `_as_dict`. Takes empty parts from `like`."""
    if not isinstance(like, (State, Start, First)):
        return parts
    filled = {}
    for name, part in like._asdict().items():
        if isinstance(part, (State, Start, First)):
            filled[name] = _filled(part, parts.get(name, {}))
        else:
            filled[name] = parts.get(name, part)
    return type(like)(**filled)


def newest(directory: Path, round_number: int) -> list[int]:
    """Returns the rounds of the checkpoints to keep once that of `round_number` is complete; later ones are not."""
    return [step for step in history.checkpoints(directory) if step <= round_number][:KEEP]


def save(directory: Path, round_number: int, state: State) -> None:
    """Saves the state after `round_number` rounds."""
    with optional.quiet(logging.CRITICAL):  # Orbax logs an error's trace in each of its threads
        ocp.save(str((directory / str(round_number)).absolute()), _as_dict(state), overwrite=True)


def keep(directory: Path, rounds: Sequence[int]) -> None:
    """Deletes all checkpoints except those after `rounds`."""
    if processes.is_first() and directory.exists():
        named = {
            *map(str, rounds),
            *(history.kept_with(directory, number).name for number in rounds),
        }
        for path in directory.iterdir():
            if path.name in named or not re.match(r"[1-9]|history-", path.name):
                continue
            try:
                files.delete(path, follow=False)
            except OSError as error:  # training goes on: the manifest does not list it
                logging.warning("cannot delete %s: %s", error.filename, error.strerror)
    processes.wait()


def agreed(rounds: Sequence[int]) -> list[int]:
    """Returns the first process's numbers of rounds on all processes."""
    told = np.full(16, -1, np.int32)
    told[: len(rounds)] = rounds[: len(told)]
    return [step for step in processes.from_first(told).tolist() if step >= 0]


def restore(directory: Path, round_number: int, like: State) -> Any:
    """Restores the state after `round_number` rounds. Returns None on all processes if any cannot read its part.

    `like` is the expected `State`: ShapeDtypeStructs with shardings for arrays on devices, NumPy arrays for arrays on
    the host.

    Raises:
        ArgumentError: if an earlier version saved the state in another layout.
    """
    if is_former(directory, round_number):
        raise ArgumentError("resume", f"{directory.parent}: {former.STATE}")
    parts: Any = None
    try:
        parts = ocp.load(str((directory / str(round_number)).absolute()), _as_dict(like))
    except Exception as error:  # a truncated file can make Orbax raise anything
        path = directory / str(round_number)
        logging.warning("checkpoint %s is damaged and is skipped: %s", path, _first_line(error))
    return _filled(like, parts) if processes.least(parts is not None) else None


def is_former(directory: Path, round_number: int) -> bool:
    """Whether an earlier version saved this checkpoint, in whose states the models were no part of server or clients.

    False for a checkpoint that cannot be read.
    """
    try:
        with optional.quiet(logging.CRITICAL):
            names = ocp.metadata(str((directory / str(round_number)).absolute())).metadata
    except Exception:  # a truncated file can make Orbax raise anything
        return False
    return not names.keys() <= set(State._fields)


def read(directory: Path, round_number: int, like: State) -> Any:
    """Reads a checkpoint as NumPy arrays, but only the arrays of `like`, which has their shapes and dtypes.

    Raises `ArgumentError` if the checkpoint has other shapes, and `RunError` if an earlier version saved the state in
    another layout.
    """
    if is_former(directory, round_number):
        raise RunError(f"{directory.parent}: {former.STATE}")
    path = str((directory / str(round_number)).absolute())
    skipped = cast(Any, ocp.PLACEHOLDER)
    wanted = {_name(place): leaf for place, leaf in jax.tree.leaves_with_path(_as_dict(like))}

    def pick(place, leaf):
        return (
            np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
            if _name(place) in wanted
            else skipped
        )

    with optional.quiet(logging.CRITICAL):
        kept = ocp.load(path, jax.tree.map_with_path(pick, ocp.metadata(path).metadata))
    found = {_name(place): leaf for place, leaf in jax.tree.leaves_with_path(kept)}
    for name, leaf in wanted.items():
        if name not in found or found[name].shape != leaf.shape:
            there = f"shape {found[name].shape}" if name in found else "none"
            text = f"is not the run's: {name} needs an array of shape {leaf.shape}; the checkpoint has {there}"
            raise ArgumentError("model", text)
    return _filled(
        like, jax.tree.map_with_path(lambda place, _: found[_name(place)], _as_dict(like))
    )


def _name(place: tuple) -> str:
    """Returns the path of a leaf, which is the same for all types of containers."""
    return jax.tree_util.keystr(place, simple=True, separator="/")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
