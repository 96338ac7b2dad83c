"""Clients' rows between rounds, in host memory or in files. Each round reads its cohort's rows and writes them back.

A stack of rows is a tree of NumPy arrays (K, ...), of `Shared` arrays of several processes, or of `RowFile`s that share
one `SlotTable`.
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

import jax
import numpy as np

from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError, OutOfMemory, RunError
from pfljax.contract.pooled import is_pooled
from pfljax.contract.types import PyTree
from pfljax.run import memory

BLOCK = 4096  # number of rows fetched from other processes at a time
PAGE = 4096  # bytes per page of a file system


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
        kept = self.saved[ids]
        self.slots[ids] = np.where(
            self.slots[ids] != kept, self.slots[ids], np.where(kept == 1, 2, 1)
        )
        self.sums[ids] = 0
        self.unread[ids] = False
        return self.slots[ids]

    def check(self, ids: np.ndarray, sums: np.ndarray) -> None:
        """Compares the checksums (n,) of rows read for the first time with those of the checkpoint.

        Raises:
            RunError: if a client's row is damaged; the message names the client.
        """
        wrong = ids[self.unread[ids] & (self.sums[ids] != sums)]
        if len(wrong):
            text = f"the rows of client {wrong[0]} on disk are not what the run wrote"
            raise RunError(f"{text}; resume from scratch to start over")
        self.unread[ids] = False

    def everyones(self) -> np.ndarray:
        """Exchanges the checksums (K,) of all processes' rows and returns them."""
        if jax.process_count() > 1:
            fresh = self.slots != self.saved
            self.sums = np.where(fresh, processes.total(np.where(fresh, self.sums, 0)), self.sums)
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
        self._row = math.prod(like.shape[1:]) * self.dtype.itemsize
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        size = 2 * like.shape[0] * self._row
        if writable:
            os.truncate(self._file, size)
        elif os.path.getsize(path) != size:
            raise ArgumentError(
                "model", f"is not the run's: its clients' rows need {size} bytes in {path}"
            )

    def read(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Reads copies of rows in slots 1 and 2."""
        rows = np.empty((len(ids), *self.shape[1:]), self.dtype)
        for row, at in zip(
            rows.reshape(len(ids), -1).view(np.uint8), self._places(ids, slots), strict=True
        ):
            os.preadv(self._file, [row.data], at)
        return rows

    def write(self, ids: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
        """Replaces rows in slots 1 and 2.

        Raises:
            RunError: if the disk is full.
        """
        rows = np.ascontiguousarray(rows).reshape(len(ids), -1).view(np.uint8)
        self.table.sums[ids] ^= self.sums_of(rows)
        try:
            written = [
                os.pwrite(self._file, row, at)
                for row, at in zip(rows, self._places(ids, slots), strict=True)
            ]
        except OSError as error:
            raise RunError(f"{self._path}: {error.strerror}") from error
        if any(size < self._row for size in written):
            raise RunError(f"{self._path}: {os.strerror(errno.ENOSPC)}")

    def sums_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns this file's part (n,) of the checksums of rows (n, ...). The parts are combined by XOR."""
        found = [
            zlib.crc32(row.data, self.number) for row in rows.reshape(len(rows), -1).view(np.uint8)
        ]
        return np.array(found, np.uint32)

    def flush(self) -> None:
        """Waits until all writes are on disk."""
        os.fsync(self._file)

    def _places(self, ids: np.ndarray, slots: np.ndarray) -> list[int]:
        """Returns the byte offsets of the rows."""
        return ((np.int64(self.shape[0]) * (slots.astype(np.int64) - 1) + ids) * self._row).tolist()


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
        self._each = -(-len(rows) // jax.process_count())
        self._first = jax.process_index() * self._each
        self._own = rows[self._first : self._first + self._each].copy()

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Returns rows (n, ...). All processes must ask for the same ones."""
        parts = [self._fetch(ids[start : start + BLOCK]) for start in range(0, len(ids), BLOCK)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _fetch(self, ids: np.ndarray) -> np.ndarray:
        owner = ids // self._each
        return processes.fetch_rows(
            self._own[ids[owner == jax.process_index()] - self._first], owner
        )

    def write(self, ids: np.ndarray, rows: jax.Array) -> None:
        """Replaces rows by arrays that are spread over all processes' devices."""
        mine = ids // self._each == jax.process_index()
        self._own[ids[mine] - self._first] = processes.whole(rows)[mine]


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
        raise ArgumentError(
            "model", f"is not the run's: its clients' rows need {len(paths)} files in {directory}"
        )
    files = [
        RowFile(path, table, number, leaf, writable)
        for number, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
    ]
    return jax.tree.unflatten(treedef, files)


def read(stack: PyTree, ids: np.ndarray) -> PyTree:
    """Returns rows (n, ...), which must not be written to; for pooled examples, the examples of these clients.

    The first read of a row in a checkpoint must be of all its files, whose checksums are compared; see `verify`.
    """
    files = _files(stack)
    slots = files[0].table.slots[ids] if files else ids
    fresh = slots == 0 if files else np.zeros(len(ids), bool)
    unread = bool(files) and bool(files[0].table.unread[ids].any())
    sums = np.zeros(int((~fresh).sum()), np.uint32)
    initial = files[0].table.initial(ids[fresh]) if fresh.any() else []

    def one(leaf):
        if is_pooled(leaf):
            return leaf.examples(leaf.index[ids])
        if isinstance(leaf, Shared):
            return leaf.read(ids)
        if not isinstance(leaf, RowFile):
            return np.take(leaf, ids, axis=0)
        if fresh.all():
            return initial[leaf.number]
        rows = np.empty((len(ids), *leaf.shape[1:]), leaf.dtype)
        kept = leaf.read(ids[~fresh], slots[~fresh])
        if unread:
            np.bitwise_xor(sums, leaf.sums_of(kept), out=sums)
        rows[~fresh] = kept
        if fresh.any():
            rows[fresh] = initial[leaf.number]
        return rows

    found = jax.tree.map(one, stack, is_leaf=is_pooled)
    if unread:
        files[0].table.check(ids[~fresh], sums)
    return found


def verify(stack: PyTree, ids: np.ndarray) -> None:
    """Compares the checksums of rows that were not read before, so that a part of them can be read.

    Raises:
        RunError: if a client's row is damaged.
    """
    files = _files(stack)
    unread = np.unique(ids[files[0].table.unread[ids]]) if files else ids[:0]
    for start in range(0, len(unread), BLOCK):
        read(files, unread[start : start + BLOCK])


def write(stack: PyTree, ids: np.ndarray, rows: PyTree) -> None:
    """Replaces rows `ids` in place by arrays on the devices; shard by shard, unless they travel to other processes."""
    files = _files(stack)
    slots = files[0].table.move(ids) if files else ids

    def one(leaf, new):
        if isinstance(leaf, Shared):
            leaf.write(ids, new)
            return
        for shard in new.addressable_shards:
            part = shard.index[0]
            if shard.replica_id:
                continue
            if isinstance(leaf, RowFile):
                leaf.write(ids[part], slots[part], np.asarray(shard.data))
            else:
                leaf[ids[part]] = np.asarray(shard.data)

    jax.tree.map(one, stack, rows)


def flush(stack: PyTree, num_clients: int) -> dict[str, np.ndarray]:
    """Flushes the files of a stack to disk. Returns copies of its table's slots and sums (K,)."""
    files = _files(stack)
    for file in files:
        file.flush()
    processes.wait()
    if not files:
        return no_rows(num_clients)
    return {"slots": files[0].table.slots.copy(), "sums": files[0].table.everyones()}


def no_rows(num_clients: int) -> dict[str, np.ndarray]:
    """Returns the slots and sums (K,) of a `SlotTable` before any client has taken part."""
    return {"slots": np.zeros(num_clients, np.uint8), "sums": np.zeros(num_clients, np.uint32)}


def keep(stack: PyTree) -> None:
    """Records that a checkpoint of what `flush` returned is complete."""
    for file in _files(stack)[:1]:
        file.table.saved = file.table.slots.copy()


def in_memory(stack: PyTree) -> PyTree:
    """Returns the stack with all clients' rows, read from files or fetched from other processes.

    Raises:
        OutOfMemory: if they do not fit in host memory.
    """
    files = _files(stack)
    if not files:

        def whole(leaf):
            return leaf.read(np.arange(leaf.shape[0])) if isinstance(leaf, Shared) else leaf

        return jax.tree.map(whole, stack)
    memory.check_host(sum(math.prod(file.shape) * file.dtype.itemsize for file in files))
    rows = iter(read(files, np.arange(files[0].shape[0])))
    return jax.tree.map(lambda leaf: next(rows) if isinstance(leaf, RowFile) else leaf, stack)


def copied(state: PyTree) -> PyTree:
    """Returns a copy in host memory; arrays that are spread over several processes stay on the devices.

    Raises:
        OutOfMemory: if it does not fit.
    """

    def here(leaf):
        return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable

    memory.check_host(sum(leaf.nbytes for leaf in jax.tree.leaves(state) if here(leaf)))
    return jax.tree.map(lambda leaf: np.array(leaf) if here(leaf) else leaf.copy(), state)


def check_disk(directories: Sequence[Path | None], shapes: PyTree, played: int) -> int:
    """Returns the disk space in bytes that the rows of some runs may need.

    Args:
        directories: Folder of each run's files; None: the folder for temporary files.
        shapes: Shapes of a stack, leaves (K, ...).
        played: Maximum number of clients that take part in a run.

    Raises:
        OutOfMemory: if less disk space is free.
    """
    need = 0
    for leaf in jax.tree.leaves(shapes):
        row = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
        pages = row + (0 if row % PAGE == 0 else PAGE)  # counts pages shared with other rows, too
        need += 2 * min(played * pages, -(-leaf.shape[0] * row // PAGE) * PAGE)
    need = need * len(directories)
    place = directories[0] or Path(tempfile.gettempdir())
    there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    files = [path for directory in directories if directory for path in directory.glob("*.bin")]
    taken = sum(path.stat().st_blocks * 512 for path in files)
    free = int(processes.least(shutil.disk_usage(there).free + taken))
    if need > memory.SHARE * free:
        raise OutOfMemory(
            f"out of disk space: clients' rows may need {memory.readable(need)} in {place}, but only "
            f"{memory.readable(free)} is free; use fewer rounds, a smaller cohort or model, or another folder"
        )
    return need


def _files(stack: PyTree) -> list[RowFile]:
    return [leaf for leaf in jax.tree.leaves(stack, is_leaf=is_pooled) if isinstance(leaf, RowFile)]
