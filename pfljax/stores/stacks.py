"""Clients' rows between rounds, in host memory or in files. Each round reads its cohort's rows and writes them back.

A stack of rows is a tree of NumPy arrays (K, ...), of `MemoryRows` that share one `ChangeTable`, of `Shared` arrays of
several processes, or of `RowFile`s that share one `SlotTable`.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError, OutOfMemory, RunError
from pfljax.contract.pooled import is_pooled
from pfljax.contract.types import Array, Examples, PyTree
from pfljax.run import memory

BLOCK = 4096  # number of rows fetched from other processes at a time
PAGE = 4096  # bytes per page of a file system

Leaf = Any  # of a stack: an array (K, ...), `MemoryRows`, `Shared`, a `RowFile`, or pooled examples


class Writer(Protocol):
    """Saves the rows of a checkpoint while rounds go on."""

    def before_change(self, ids: np.ndarray) -> None:
        """Called before these clients' rows change."""
        ...


class ChangeTable:
    """Tracks which rows in memory rounds have changed. The others are initial, and checkpoints do not save them.

    Attributes:
        changed: Whether a client's row has changed, bool (K,).
        start: What the server began with, by name, from which initial rows are computed; None: unknown, and all rows
            count as changed.
        writer: What saves the rows of the newest checkpoint; None: there is none yet.
    """

    def __init__(self, changed: np.ndarray, start: dict[str, np.ndarray] | None):
        self.changed = changed
        self.start = start
        self.writer: Writer | None = None

    def change(self, ids: np.ndarray) -> None:
        """Notes that these clients' rows are about to change."""
        if self.writer is not None:
            self.writer.before_change(ids)
        self.changed[ids] = True


class MemoryRows:
    """One leaf of a stack of rows in this process's memory.

    Attributes:
        table: Table of the rows that changed, which all leaves share.
        array: All clients' rows (K, ...).
    """

    def __init__(self, table: ChangeTable, array: np.ndarray):
        self.table = table
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a client's row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class SlotTable:
    """Tracks which rows of some files are in use. Every client has two slots; none is used until it first takes part.

    A checkpoint records one slot per client. Until the next checkpoint is complete, rows are written only to the other
    slot. So nothing needs to be copied, and the process may be killed at any time.

    Attributes:
        slots: Slot of each client's row, uint8 (K,): 1 or 2, or 0 for the initial row, which is not stored.
        saved: `slots` at the last checkpoint. Shape (K,).
        sums: Checksum of each client's row over all files, uint32 (K,): of rows that this process wrote, and of rows
            in a checkpoint.
        unread: Whether a row in a checkpoint was neither read nor written since. Shape (K,).
        initial: ids (n,) -> initial rows of these clients, a list of arrays (n, ...), one per file.
    """

    def __init__(
        self, slots: np.ndarray, sums: np.ndarray, initial: Callable[[np.ndarray], list[np.ndarray]]
    ):
        self.slots = slots
        self.saved = slots.copy()
        self.initial = initial
        self.sums = sums
        self.unread = slots > 0

    def move(self, ids: np.ndarray) -> np.ndarray:
        """Moves these clients to the slots (n,) that their rows must be written to. Returns the slots."""
        saved = self.saved[ids]
        slots = self.slots[ids]
        # A row that was written since the checkpoint stays where it is.
        is_written = slots != saved
        other_slot = np.where(saved == 1, 2, 1)
        self.slots[ids] = np.where(is_written, slots, other_slot)
        self.sums[ids] = 0
        self.unread[ids] = False
        return self.slots[ids]

    def check(self, ids: np.ndarray, sums: np.ndarray) -> None:
        """Compares the checksums (n,) of rows read for the first time with those of the checkpoint.

        Raises:
            RunError: if a client's row is damaged; the message names the client.
        """
        differs = self.sums[ids] != sums
        damaged = ids[self.unread[ids] & differs]
        if len(damaged):
            text = f"the rows of client {damaged[0]} on disk are not what the run wrote"
            raise RunError(f"{text}; resume from scratch to start over")
        self.unread[ids] = False

    def everyones(self) -> np.ndarray:
        """Exchanges the checksums (K,) of all processes' rows and returns them."""
        if jax.process_count() > 1:
            # Each process knows the checksums of the rows that it wrote; the others' are 0 here.
            is_written = self.slots != self.saved
            written = processes.total(np.where(is_written, self.sums, 0))
            self.sums = np.where(is_written, written, self.sums)
        return self.sums.copy()


class RowFile:
    """One leaf of a stack of rows, in a sparse file that takes only the space of written rows.

    Rows are read and written one by one. A memory-mapped file was slower, and a full disk would kill the process.

    Attributes:
        table: Table of the rows' slots.
        number: The leaf's number in the table.
        shape: (K, ...).
        dtype: The rows' dtype.
    """

    def __init__(
        self,
        path: Path,
        table: SlotTable,
        number: int,
        like: jax.ShapeDtypeStruct,
        writable: bool = True,
    ):
        self.table = table
        self.number = number
        self.shape = like.shape
        self.dtype = np.dtype(like.dtype)
        self._row_bytes = math.prod(like.shape[1:]) * self.dtype.itemsize
        self._path = path
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        self._file = os.open(path, flags)
        weakref.finalize(self, os.close, self._file)

        size = 2 * like.shape[0] * self._row_bytes
        if writable:
            os.truncate(self._file, size)
        elif os.path.getsize(path) != size:
            text = f"is not the run's: its clients' rows need {size} bytes in {path}"
            raise ArgumentError("model", text)

    def read(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Reads copies of rows in slots 1 and 2."""
        rows = np.empty((len(ids), *self.shape[1:]), self.dtype)
        offsets = self._offsets(ids, slots)
        for row, offset in zip(_bytes_of(rows), offsets, strict=True):
            os.preadv(self._file, [row.data], offset)
        return rows

    def write(self, ids: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
        """Replaces rows in slots 1 and 2.

        Raises:
            RunError: if the disk is full.
        """
        rows = _bytes_of(np.ascontiguousarray(rows))
        self.table.sums[ids] ^= self.sums_of(rows)
        offsets = self._offsets(ids, slots)
        sizes: list[int] = []
        try:
            for row, offset in zip(rows, offsets, strict=True):
                sizes.append(os.pwrite(self._file, row, offset))
        except OSError as error:
            raise RunError(f"{self._path}: {error.strerror}") from error
        if any(size < self._row_bytes for size in sizes):
            raise RunError(f"{self._path}: {os.strerror(errno.ENOSPC)}")

    def sums_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns this file's part (n,) of the checksums of rows (n, ...). The parts are combined by XOR."""
        sums = [zlib.crc32(row.data, self.number) for row in _bytes_of(rows)]
        return np.array(sums, np.uint32)

    def flush(self) -> None:
        """Waits until all writes are on disk."""
        os.fsync(self._file)

    def _offsets(self, ids: np.ndarray, slots: np.ndarray) -> list[int]:
        """Returns the byte offsets of the rows: all clients' rows in slot 1, then those in slot 2."""
        num_clients = np.int64(self.shape[0])
        rows = num_clients * (slots.astype(np.int64) - 1) + ids
        return (rows * self._row_bytes).tolist()


class Shared:
    """One leaf of a stack of rows in the memory of several processes. Each process stores its own clients' rows.

    Attributes:
        shape: (K, ...).
        dtype: The rows' dtype.
    """

    def __init__(self, rows: np.ndarray):
        """Copies this process's share of all clients' rows (K, ...)."""
        self.shape = rows.shape
        self.dtype = rows.dtype
        self._per_process = -(-len(rows) // jax.process_count())
        self._first = jax.process_index() * self._per_process
        self._rows = rows[self._first : self._first + self._per_process].copy()

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Returns rows (n, ...). All processes must ask for the same ones."""
        blocks: list[np.ndarray] = []
        for start in range(0, len(ids), BLOCK):
            blocks.append(self._fetch(ids[start : start + BLOCK]))
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def _fetch(self, ids: np.ndarray) -> np.ndarray:
        owners = ids // self._per_process
        local_ids = ids[owners == jax.process_index()]
        return processes.fetch_rows(self._rows[local_ids - self._first], owners)

    def write(self, ids: np.ndarray, rows: jax.Array) -> None:
        """Replaces rows by arrays that are spread over all processes' devices."""
        is_local = ids // self._per_process == jax.process_index()
        self._rows[ids[is_local] - self._first] = processes.whole(rows)[is_local]


def open_files(directory: Path, shapes: PyTree, table: SlotTable, writable: bool = True) -> PyTree:
    """Opens a stack of rows in a directory, one file per leaf. Returns a tree of `RowFile`s.

    Args:
        directory: Folder of the files; created if missing.
        shapes: Shapes of the stack, leaves (K, ...).
        table: Table of the rows' slots.
        writable: Whether rows may be written; otherwise the files must be there.

    Raises:
        ArgumentError: if the files to read are those of other shapes.
    """
    leaves, treedef = jax.tree.flatten(shapes)
    paths = [directory / f"{number}.bin" for number in range(len(leaves))]
    if writable:
        directory.mkdir(parents=True, exist_ok=True)
    elif sorted(paths) != sorted(directory.glob("*.bin")):
        text = f"is not the run's: its clients' rows need {len(paths)} files in {directory}"
        raise ArgumentError("model", text)
    files: list[RowFile] = []
    for number, leaf in enumerate(leaves):
        files.append(RowFile(paths[number], table, number, leaf, writable))
    return jax.tree.unflatten(treedef, files)


def read(stack: PyTree, ids: np.ndarray) -> PyTree:
    """Returns rows (n, ...), which must not be written to; for pooled examples, the examples of these clients.

    The first read of a row in a checkpoint must be of all its files, whose checksums are compared; see `verify`.
    """
    files = _files(stack)
    rows_of_file = _rows_of_files(files, ids) if files else {}

    def rows_of(leaf: Leaf) -> Examples:
        if isinstance(leaf, RowFile):
            return rows_of_file[leaf.number]
        if is_pooled(leaf):
            return leaf.examples(leaf.index[ids])
        if isinstance(leaf, Shared):
            return leaf.read(ids)
        return np.take(_array_of(leaf), ids, axis=0)

    return jax.tree.map(rows_of, stack, is_leaf=is_pooled)


def _rows_of_files(files: Sequence[RowFile], ids: np.ndarray) -> dict[int, np.ndarray]:
    """Reads rows (n, ...) of files that share a table, by the file's number.

    Raises:
        RunError: if a client's row is read for the first time and damaged.
    """
    table = files[0].table
    slots = table.slots[ids]
    is_initial = slots == 0
    initial = table.initial(ids[is_initial]) if is_initial.any() else []
    if is_initial.all():
        return {file.number: initial[file.number] for file in files}

    stored_ids = ids[~is_initial]
    stored_slots = slots[~is_initial]
    is_checked = bool(table.unread[ids].any())
    sums = np.zeros(len(stored_ids), np.uint32)
    rows_of_file: dict[int, np.ndarray] = {}
    for file in files:
        stored = file.read(stored_ids, stored_slots)
        if is_checked:
            sums ^= file.sums_of(stored)
        rows = np.empty((len(ids), *file.shape[1:]), file.dtype)
        rows[~is_initial] = stored
        if is_initial.any():
            rows[is_initial] = initial[file.number]
        rows_of_file[file.number] = rows
    if is_checked:
        table.check(stored_ids, sums)
    return rows_of_file


def verify(stack: PyTree, ids: np.ndarray) -> None:
    """Compares the checksums of rows that were not read before, so that a part of them can be read.

    Raises:
        RunError: if a client's row is damaged.
    """
    files = _files(stack)
    if not files:
        return
    is_unread = files[0].table.unread[ids]
    unread = np.unique(ids[is_unread])
    for start in range(0, len(unread), BLOCK):
        read(files, unread[start : start + BLOCK])


def write(stack: PyTree, ids: np.ndarray, rows: PyTree) -> None:
    """Replaces rows `ids` in place by arrays on the devices; shard by shard, unless they travel to other processes."""
    files = _files(stack)
    slots = files[0].table.move(ids) if files else ids
    tracked = [leaf for leaf in jax.tree.leaves(stack) if isinstance(leaf, MemoryRows)]
    if tracked:
        tracked[0].table.change(ids)

    def replace_rows(leaf: Leaf, new_rows: jax.Array) -> None:
        if isinstance(leaf, Shared):
            leaf.write(ids, new_rows)
            return
        for shard in new_rows.addressable_shards:
            if shard.replica_id:  # a copy of a shard that is written
                continue
            position = shard.index[0]
            shard_rows = np.asarray(shard.data)
            if isinstance(leaf, RowFile):
                leaf.write(ids[position], slots[position], shard_rows)
            else:
                _array_of(leaf)[ids[position]] = shard_rows

    jax.tree.map(replace_rows, stack, rows)


def flush(stack: PyTree, num_clients: int) -> dict[str, np.ndarray]:
    """Flushes the files of a stack to disk. Returns copies of its table's slots and sums (K,)."""
    files = _files(stack)
    for file in files:
        file.flush()
    processes.wait()
    if not files:
        return no_rows(num_clients)
    table = files[0].table
    return {"slots": table.slots.copy(), "sums": table.everyones()}


def no_rows(num_clients: int) -> dict[str, np.ndarray]:
    """Returns the slots and sums (K,) of a `SlotTable` before any client has taken part."""
    return {"slots": np.zeros(num_clients, np.uint8), "sums": np.zeros(num_clients, np.uint32)}


def keep(stack: PyTree) -> None:
    """Records that a checkpoint of what `flush` returned is complete."""
    files = _files(stack)
    if files:
        table = files[0].table
        table.saved = table.slots.copy()


def in_memory(stack: PyTree) -> PyTree:
    """Returns the stack with all clients' rows, read from files or fetched from other processes.

    Raises:
        OutOfMemory: if they do not fit in host memory.
    """
    files = _files(stack)
    rows_of_file: dict[int, np.ndarray] = {}
    if files:
        sizes = [math.prod(file.shape) * file.dtype.itemsize for file in files]
        memory.check_host(sum(sizes))
        everyone = np.arange(files[0].shape[0])
        rows_of_file = _rows_of_files(files, everyone)

    def all_rows(leaf: Leaf) -> Examples:
        if isinstance(leaf, RowFile):
            return rows_of_file[leaf.number]
        if isinstance(leaf, Shared):
            return leaf.read(np.arange(leaf.shape[0]))
        return _array_of(leaf)

    return jax.tree.map(all_rows, stack)


def copied(state: PyTree) -> PyTree:
    """Returns a copy in host memory; arrays that are spread over several processes stay on the devices.

    Raises:
        OutOfMemory: if it does not fit.
    """

    def is_local(leaf: Array) -> bool:
        return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable

    def copy(leaf: Array) -> Array:
        return np.array(leaf) if is_local(leaf) else leaf.copy()

    sizes = [leaf.nbytes for leaf in jax.tree.leaves(state) if is_local(leaf)]
    memory.check_host(sum(sizes))
    return jax.tree.map(copy, state)


def check_disk(directories: Sequence[Path | None], shapes: PyTree, played: int) -> int:
    """Returns the disk space in bytes that the rows of some runs may need.

    Args:
        directories: Folder of each run's files; None: the folder for temporary files.
        shapes: Shapes of a stack, leaves (K, ...).
        played: Maximum number of clients that take part in a run.

    Raises:
        OutOfMemory: if less disk space is free.
    """
    need = len(directories) * sum(_file_bytes(leaf, played) for leaf in jax.tree.leaves(shapes))

    # Space that is free, or taken by files that are replaced; the folder itself may not exist yet.
    folder = directories[0] or Path(tempfile.gettempdir())
    existing = folder
    if not existing.exists():
        existing = next(parent for parent in folder.absolute().parents if parent.exists())
    taken = 0
    for directory in directories:
        if directory is not None:
            taken += sum(path.stat().st_blocks * 512 for path in directory.glob("*.bin"))
    free = int(processes.least(shutil.disk_usage(existing).free + taken))

    if need > memory.SHARE * free:
        raise OutOfMemory(
            f"out of disk space: clients' rows may need {memory.readable(need)} in {folder}, "
            f"but only {memory.readable(free)} is free; use fewer rounds, a smaller cohort or "
            "model, or another folder"
        )
    return need


def _file_bytes(leaf: jax.ShapeDtypeStruct, played: int) -> int:
    """Returns the disk space that a leaf's two slots for each of `played` clients may take."""
    row_bytes = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
    # A row that fills no whole pages may share two of them with other rows, which are counted, too.
    paged_row_bytes = row_bytes if row_bytes % PAGE == 0 else row_bytes + PAGE
    whole_file_bytes = -(-leaf.shape[0] * row_bytes // PAGE) * PAGE
    return 2 * min(played * paged_row_bytes, whole_file_bytes)


def _bytes_of(rows: np.ndarray) -> np.ndarray:
    """Views contiguous rows (n, ...) as bytes (n, bytes of a row)."""
    return rows.reshape(len(rows), -1).view(np.uint8)


def tracked(stack: PyTree, changed: np.ndarray, start: dict[str, np.ndarray] | None) -> PyTree:
    """Returns arrays (K, ...) as `MemoryRows` of one table; see `ChangeTable` for the arguments."""
    table = ChangeTable(changed, start)
    return jax.tree.map(lambda leaf: MemoryRows(table, leaf), stack)


def _array_of(leaf: Leaf) -> Array:
    """Returns the array of `MemoryRows`; other leaves as they are."""
    return leaf.array if isinstance(leaf, MemoryRows) else leaf


def _files(stack: PyTree) -> list[RowFile]:
    """Returns the files of a stack of rows."""
    leaves = jax.tree.leaves(stack, is_leaf=is_pooled)
    return [leaf for leaf in leaves if isinstance(leaf, RowFile)]
