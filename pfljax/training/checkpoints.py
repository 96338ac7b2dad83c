"""Checkpoints of a run's State, by Orbax."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from pfljax.core.types import State
from pfljax.engine import processes
from pfljax.training import history

KEEP = 2  # the newest, and one in case it is torn


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


def newest(directory: Path, round_number: int) -> list[int]:
    """Rounds of the checkpoints that are kept once that of `round_number` rounds is whole; one of a later is torn."""
    return [step for step in history.checkpoints(directory) if step <= round_number][:KEEP]


def save(directory: Path, round_number: int, state: State | dict) -> None:
    """Saves the state after `round_number` rounds, which may be a dict that holds a State."""
    with quiet():
        ocp.save(str((directory / str(round_number)).absolute()), _as_dict(state), overwrite=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Orbax from logging an error's trace once for each of its threads; the error is raised anyway."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def keep(directory: Path, rounds: Sequence[int]) -> None:
    """Drops all checkpoints but those of some numbers of rounds."""
    if processes.is_first() and directory.exists():
        named = {*map(str, rounds), *(history.kept_with(directory, number).name for number in rounds)}
        for path in directory.iterdir():
            if path.name in named or not re.match(r"[1-9]|history-", path.name):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    processes.wait()


def agreed(rounds: Sequence[int]) -> list[int]:
    """The first process's numbers of rounds, by which all go."""
    told = np.full(16, -1, np.int32)
    told[: len(rounds)] = rounds[: len(told)]
    return [step for step in processes.from_first(told).tolist() if step >= 0]


def restore(directory: Path, round_number: int, like: State | dict) -> Any:
    """The state after `round_number` rounds; None, on all processes, if any of them cannot read its part.

    Args:
        directory: Where `save` put it.
        round_number: Number of rounds.
        like: A State of ShapeDtypeStructs with shardings: what is expected, and where it shall live; of NumPy arrays
            where that is the host.
    """
    parts: Any = None
    try:
        parts = ocp.load(str((directory / str(round_number)).absolute()), _as_dict(like))
    except Exception as error:  # whatever a torn file makes Orbax raise
        path = directory / str(round_number)
        logging.warning("checkpoint %s is not whole and is skipped: %s", path, _first_line(error))
    return _filled(like, parts) if processes.least(parts is not None) else None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
