"""Checkpoints of a run's `State`, saved with Orbax.

Clients' rows in host memory are saved in files of their own, if rounds track which of them change; see `saved_rows`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from pfljax.contract import optional, processes, tree
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.contract.types import First, Start, State
from pfljax.folder import files, former, history
from pfljax.stores import saved_rows
from pfljax.stores.saved_rows import RowsWriter

KEEP = 2  # the newest, and one in case the newest is truncated
PARTIAL = "rows.partial"  # rows of a checkpoint that is being saved


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
    """Saves the state after `round_number` rounds, with all rows."""
    if processes.is_first():
        files.delete(rows_with(directory, round_number))
    _save(directory, round_number, state)


def _save(directory: Path, round_number: int, state: State) -> None:
    """Saves a state as Orbax does."""
    path = _path(directory, round_number)
    with optional.quiet(logging.CRITICAL):  # Orbax logs an error's trace in each of its threads
        ocp.save(path, _as_dict(state), overwrite=True)


def can_wait(state: State) -> bool:
    """Whether `begin` can save the state while rounds go on."""
    return saved_rows.table_of(state.clients) is not None


def num_bytes(state: State) -> int:
    """Returns the size of a checkpoint of the state."""
    if not can_wait(state):
        return tree.num_bytes(state)
    return tree.num_bytes(without_rows(state)) + saved_rows.num_bytes(state.clients)


def writer_of(directory: Path, state: State) -> RowsWriter:
    """Returns what writes the rows of a state whose rows are in memory."""
    table = saved_rows.table_of(state.clients)
    assert table is not None
    return RowsWriter(directory / PARTIAL, state.clients, table)


def begin(
    directory: Path, round_number: int, state: State, writer: RowsWriter
) -> Callable[[], dict[str, str]]:
    """Begins to save a state whose rows are in memory, as it is now; rounds may go on.

    Args:
        directory: Folder of the checkpoints.
        round_number: Number of rounds done.
        state: The state.
        writer: Writes its rows, of which some may be written already.

    Returns:
        Saves it: () -> SHA-256 of the files of rows, by name. It may be called in a thread.
    """
    writer.freeze()
    rest = jax.tree.map(np.array, without_rows(state))  # a copy: rounds reuse the memory

    def finish() -> dict[str, str]:
        try:
            digests = writer.finish()
        finally:
            writer.close()
        rows = rows_with(directory, round_number)
        files.delete(rows)
        writer.folder.rename(rows)
        _save(directory, round_number, rest)
        return {f"{directory.name}/{rows.name}/{name}": sum_ for name, sum_ in digests.items()}

    return finish


def without_rows(state: State) -> State:
    """Returns the state without clients' rows."""
    return state._replace(clients=First())


def rows_with(directory: Path, round_number: int) -> Path:
    """Returns the path of the rows that belong to a checkpoint."""
    return directory / f"{round_number}.rows"


def keep(directory: Path, rounds: Sequence[int]) -> None:
    """Deletes all checkpoints except those after `rounds`."""
    if processes.is_first() and directory.exists():
        names = set()
        for number in rounds:
            names |= {str(number), history.kept_with(directory, number).name}
            names.add(rows_with(directory, number).name)
        for path in directory.iterdir():
            is_checkpoint = re.match(r"[1-9]|history-", path.name)
            if path.name in names or not is_checkpoint:
                continue
            try:
                files.delete(path, follow=False)
            except OSError as error:  # training goes on: the manifest does not list it
                logging.warning("cannot delete %s: %s", error.filename, error.strerror)
    processes.wait()


def agreed(rounds: Sequence[int]) -> list[int]:
    """Returns the first process's numbers of rounds on all processes."""
    sent = np.full(16, -1, np.int32)
    sent[: len(rounds)] = rounds[: len(sent)]
    received = processes.from_first(sent)
    return [step for step in received.tolist() if step >= 0]


def restore(directory: Path, round_number: int, like: State) -> Any:
    """Restores the state after `round_number` rounds. Returns None on all processes if any cannot read its part.

    `like` is the expected `State`: ShapeDtypeStructs with shardings for arrays on devices, NumPy arrays for arrays on
    the host. Rows that were saved in files are returned in memory, and initial ones are missing; see
    `initial_rows.completed`.

    Raises:
        ArgumentError: if an earlier version saved the state in another layout.
    """
    if is_former(directory, round_number):
        raise ArgumentError("resume", f"{directory.parent}: {former.STATE}")
    restored: Any = None
    try:
        path = _path(directory, round_number)
        rows = rows_with(directory, round_number)
        if rows.exists():
            expected = without_rows(like)
            rest = _filled(expected, ocp.load(path, _as_dict(expected)))
            restored = rest._replace(clients=saved_rows.load(rows, like.clients))
        else:
            restored = _filled(like, ocp.load(path, _as_dict(like)))
    except Exception as error:  # a truncated file can make Orbax raise anything
        path = directory / str(round_number)
        logging.warning("checkpoint %s is damaged and is skipped: %s", path, _first_line(error))
    return restored if processes.least(restored is not None) else None


def is_former(directory: Path, round_number: int) -> bool:
    """Whether an earlier version saved this checkpoint, in whose states the models were no part of server or clients.

    False for a checkpoint that cannot be read.
    """
    try:
        with optional.quiet(logging.CRITICAL):
            names = ocp.metadata(_path(directory, round_number)).metadata
    except Exception:  # a truncated file can make Orbax raise anything
        return False
    return not names.keys() <= set(State._fields)


def read(directory: Path, round_number: int, like: State) -> Any:
    """Reads a checkpoint as NumPy arrays, but only the arrays of `like`, which has their shapes and dtypes.

    Rows that were saved in files are as `restore` returns them.

    Raises `ArgumentError` if the checkpoint has other shapes, and `RunError` if an earlier version saved the state in
    another layout.
    """
    if is_former(directory, round_number):
        raise RunError(f"{directory.parent}: {former.STATE}")
    rows = rows_with(directory, round_number)
    if not rows.exists():
        return _read_whole(directory, round_number, like)
    rest = _read_whole(directory, round_number, without_rows(like))
    return rest._replace(clients=saved_rows.load(rows, like.clients))


def _read_whole(directory: Path, round_number: int, like: State) -> Any:
    """Reads what Orbax saved."""
    path = _path(directory, round_number)
    skipped = cast(Any, ocp.PLACEHOLDER)
    expected = _as_dict(like)
    expected_leaves = saved_rows.by_name(expected)

    def pick(place: tuple, leaf: Any) -> Any:
        """An array of this shape to read; a placeholder for one that is not needed."""
        if saved_rows.name_of(place) not in expected_leaves:
            return skipped
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    with optional.quiet(logging.CRITICAL):
        shapes = jax.tree.map_with_path(pick, ocp.metadata(path).metadata)
        leaves = saved_rows.by_name(ocp.load(path, shapes))
    for name, leaf in expected_leaves.items():
        if name not in leaves or leaves[name].shape != leaf.shape:
            shape = f"shape {leaves[name].shape}" if name in leaves else "none"
            needed = f"{name} needs an array of shape {leaf.shape}"
            text = f"is not the run's: {needed}; the checkpoint has {shape}"
            raise ArgumentError("model", text)
    parts = jax.tree.map_with_path(lambda place, _: leaves[saved_rows.name_of(place)], expected)
    return _filled(like, parts)


def _path(directory: Path, round_number: int) -> str:
    """Returns the path of a checkpoint, as Orbax takes it."""
    return str((directory / str(round_number)).absolute())


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
