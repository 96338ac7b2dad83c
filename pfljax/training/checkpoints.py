"""Checkpoints of a run's State, by Orbax; the newest whole one is the one to resume from."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from pfljax.core.types import State
from pfljax.engine import processes
from pfljax.training import history

NUMBER = re.compile("[1-9][0-9]{0,8}")
KEEP = 2  # the newest, and one in case it is torn


def _steps(directory: Path) -> list[int]:
    """Rounds of the checkpoints there, newest first; Orbax's temporary folders have other names."""
    if not directory.exists():
        return []
    names = [path.name for path in directory.iterdir() if NUMBER.fullmatch(path.name)]
    return sorted(map(int, names), reverse=True)


def _as_dict(state: State | dict) -> dict:
    """The parts that hold anything: Orbax does not store empty containers."""
    parts = state if isinstance(state, dict) else state._asdict()
    parts = {name: _as_dict(part) if isinstance(part, State) else part for name, part in parts.items()}
    return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


def _filled(like: State | dict, parts: dict) -> Any:
    """Undoes `_as_dict`: the parts, and what holds nothing as it is in `like`."""
    found = {}
    for name, part in (like if isinstance(like, dict) else like._asdict()).items():
        found[name] = _filled(part, parts.get(name, {})) if isinstance(part, State) else parts.get(name, part)
    return found if isinstance(like, dict) else State(**found)


def save(directory: Path, round_number: int, state: State | dict) -> None:
    """Saves the state after `round_number` rounds and drops all others but the `KEEP` - 1 before it.

    A state may be a dict that holds a State.
    """
    ocp.save(str((directory / str(round_number)).absolute()), _as_dict(state), overwrite=True)
    keep(directory, [step for step in _steps(directory) if step <= round_number][:KEEP])  # one of a later is torn


def keep(directory: Path, rounds: Sequence[int]) -> None:
    """Drops all checkpoints but those of some numbers of rounds."""
    if processes.is_first():
        for step in [step for step in _steps(directory) if step not in rounds]:
            shutil.rmtree(directory / str(step), ignore_errors=True)
        for path in directory.glob("history-*.npz"):
            if path not in [history.kept_with(directory, number) for number in rounds]:
                path.unlink(missing_ok=True)
    processes.wait()


def restore(directory: Path, like: State | dict, at_most: int | None = None) -> tuple[int, Any] | None:
    """The newest whole checkpoint that has its history.

    Args:
        directory: Where `save` put them.
        like: A State of ShapeDtypeStructs with shardings: what is expected, and where it shall live; of NumPy arrays
            where that is the host.
        at_most: A number of rounds; checkpoints of later ones do not count.

    Returns:
        The number of rounds done and the state, or None if there is no whole checkpoint.
    """
    steps = np.full(16, -1, np.int32)  # of several processes all go by what the first sees
    found = [step for step in _steps(directory) if at_most is None or step <= at_most]
    found = [step for step in found if history.is_whole(directory, step)][: len(steps)]
    steps[: len(found)] = found
    for step in processes.from_first(steps).tolist():
        parts: Any = None
        if step < 0:
            break
        try:
            parts = ocp.load(str((directory / str(step)).absolute()), _as_dict(like))
        except Exception as error:  # whatever a torn file makes Orbax raise
            logging.warning("checkpoint %s is not whole and is skipped: %s", directory / str(step), _first_line(error))
        if processes.least(parts is not None):  # of several processes each reads its own part
            return step, _filled(like, parts)
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
