"""Clients' rows in checkpoints of runs that hold them in host memory.

A folder has one file per leaf with the rows that rounds have changed, in the order in which they were written, the
numbers of their clients, what the server began with, and an index with names, types and checksums. Of several rows of a
client, the last one counts. Initial rows are not saved: they follow from what the server began with. Rows are written
while rounds go on; a round first saves the rows that it is about to change.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import PyTree
from pfljax.stores.stacks import ChangeTable, MemoryRows

INDEX = "index.json"
IDS = "ids"  # the name of the clients' numbers in the index
FORMAT = 1  # format of a folder of rows; increase it if earlier versions could misread a new one
BLOCK_BYTES = 4 << 20  # bytes of rows that are written, or read, at a time
SYNC_BYTES = 64 << 20  # bytes after which a writer waits for the disk


class Damaged(Exception):
    """A folder of rows that is not what was written."""


def by_name(value: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, which are the same for all types of containers."""
    return {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(value)}


def name_of(path: tuple) -> str:
    """Returns the name of a leaf in `by_name`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def table_of(stack: PyTree) -> ChangeTable | None:
    """Returns the table of a stack of rows in memory; None: the stack is none, or rounds do not track changes."""
    for leaf in jax.tree.leaves(stack):
        if isinstance(leaf, MemoryRows):
            return leaf.table
    return None


def num_bytes(stack: PyTree) -> int:
    """Returns the bytes of the rows of a stack that rounds have changed."""
    table = table_of(stack)
    if table is None:
        return 0
    num_changed = int(table.changed.sum())
    return num_changed * sum(leaf.row_bytes for leaf in jax.tree.leaves(stack))


class _File:
    """A file that is written from its begin to its end, and its checksum."""

    def __init__(self, folder: Path, number: int, name: str, dtype: np.dtype, shape: Sequence[int]):
        self.entry: dict[str, Any] = {
            "name": name,
            "file": f"{number}.bin",
            "dtype": dtype.name,
            "shape": list(shape),
        }
        self._digest = hashlib.sha256()
        self._file = io.BufferedWriter(io.FileIO(folder / self.entry["file"], "x"))

    def append(self, rows: np.ndarray) -> None:
        content = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        self._file.write(content)
        self._digest.update(content)

    def sync(self) -> None:
        """Waits until the disk has everything."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.entry["sha256"] = self._digest.hexdigest()
        self._file.close()


class RowsWriter:
    """Writes the changed rows of a stack to a folder, as they are when `freeze` is called.

    Before that, `add` names rows that will not change, which may be written ahead; one that does change is written
    again. `write_added` and `finish` may be called in a thread, one after the other, while rounds go on.
    """

    def __init__(self, folder: Path, stack: PyTree, table: ChangeTable):
        """Begins a new folder, in place of what is there, and has the table call `before_change`."""
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        leaves = by_name(stack)
        self.folder = folder
        self.table = table
        self.error: OSError | None = None
        self.num_bytes = 0  # of rows that are written
        self._is_frozen = False
        self._added = np.zeros(len(table.changed), bool)
        self._written = np.zeros(len(table.changed), bool)
        self._lock = threading.Lock()
        self._arrays = [leaf.array for leaf in leaves.values()]
        self._files: list[_File] = []
        for number, (name, leaf) in enumerate(leaves.items()):
            self._files.append(_File(folder, number, name, leaf.dtype, leaf.shape[1:]))
        self._ids: list[np.ndarray] = []
        self._row_bytes = sum(leaf.row_bytes for leaf in leaves.values())
        self._block = max(BLOCK_BYTES // max(self._row_bytes, 1), 1)
        table.writer = self

    def add(self, ids: np.ndarray) -> None:
        """Adds those of some clients' rows that have changed to what `write_added` writes."""
        with self._lock:
            self._added[ids] |= self.table.changed[ids] & ~self._written[ids]

    def freeze(self) -> None:
        """Adds all rows that have changed. From now on, rows are written before they change."""
        with self._lock:
            self._added = self.table.changed & ~self._written
            self._is_frozen = True

    def before_change(self, ids: np.ndarray) -> None:
        """Writes rows that are added and not yet written; or, before `freeze`, notes that those written are old."""
        if self._is_frozen:
            self._write(ids)
            return
        with self._lock:
            self._added[ids] = False
            self._written[ids] = False

    def _write(self, ids: np.ndarray) -> None:
        """Writes those of some clients' rows that are added. An error is raised by `finish`."""
        with self._lock:
            ids = np.unique(ids[self._added[ids]])
            self._added[ids] = False
            if not len(ids) or self.error is not None:
                return
            try:
                for array, file in zip(self._arrays, self._files, strict=True):
                    file.append(np.take(array, ids, axis=0))
            except OSError as error:
                self.error = error
            self._written[ids] = True
            self._ids.append(ids)
            self.num_bytes += len(ids) * self._row_bytes

    def write_added(self) -> None:
        """Writes all rows that are added, block by block."""
        added = np.flatnonzero(self._added)
        sync_every = max(SYNC_BYTES // BLOCK_BYTES, 1)
        for number, start in enumerate(range(0, len(added), self._block), 1):
            self._write(added[start : start + self._block])
            if self.error is None and number % sync_every == 0:
                self._sync()

    def finish(self) -> dict[str, str]:
        """Writes all rows, and waits until they are on disk. Returns the files' SHA-256 by name.

        Raises:
            OSError: if the disk is full, or cannot be written to.
        """
        self.write_added()
        if self.error is not None:
            raise self.error
        return self._finish()

    def close(self) -> None:
        """Closes all files, and deletes the folder unless it is complete."""
        with self._lock:
            self._is_frozen = True
            self._added[:] = False
        for file in self._files:
            file.close()
        if not (self.folder / INDEX).exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _sync(self) -> None:
        for file in self._files:
            file.sync()

    def _finish(self) -> dict[str, str]:
        """Writes the clients' numbers, what the server began with, and the index."""
        num_clients = len(self.table.changed)
        ids = np.concatenate([np.zeros(0, np.int32), *self._ids]).astype(np.int32)
        ids_file = _File(self.folder, len(self._files), IDS, ids.dtype, ())
        self._files.append(ids_file)
        ids_file.append(ids)

        num_row_files = len(self._files)
        for name, leaf in (self.table.start or {}).items():
            file = _File(self.folder, len(self._files), name, leaf.dtype, leaf.shape)
            self._files.append(file)
            file.append(leaf)
        self._sync()
        for file in self._files:
            file.close()

        entries = [file.entry for file in self._files]
        body = {"format": FORMAT, "clients": num_clients, "stored": len(ids)}
        body |= {"rows": entries[:num_row_files]}
        body |= {"start": None if self.table.start is None else entries[num_row_files:]}
        content = json.dumps({"index": body, "sha256": _digest_of(body)}).encode()
        with open(self.folder / INDEX, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        digests = {entry["file"]: entry["sha256"] for entry in entries}
        return digests | {INDEX: hashlib.sha256(content).hexdigest()}


def load(folder: Path, like: PyTree) -> PyTree:
    """Reads rows from a folder: a stack like `like`, leaves (K, ...), whose initial rows are still zero.

    Raises:
        Damaged: if the folder is not what was written.
        OSError: if a file cannot be read.
        ArgumentError: if the rows have other shapes.
    """
    index = _read_index(folder)
    num_clients = index["clients"]
    entries = {entry["name"]: entry for entry in index["rows"]}
    ids = _read_array(folder, entries[IDS], (index["stored"],))
    changed = np.zeros(num_clients, bool)
    changed[ids] = True
    table = ChangeTable(changed, _read_start(folder, index["start"]))

    def rows_of(path: tuple, leaf: Any) -> MemoryRows:
        name = name_of(path)
        _check_shape(name, leaf, num_clients, entries.get(name))
        entry = entries[name]
        array = np.zeros(leaf.shape, _dtype(entry))
        _read_rows(folder, entry, array, ids)
        return MemoryRows(table, array)

    return jax.tree.map_with_path(rows_of, like)


def _check_shape(name: str, leaf: Any, num_clients: int, entry: Mapping[str, Any] | None) -> None:
    """Raises `ArgumentError` if a leaf has another shape than in a checkpoint, or is missing there."""
    shape = None if entry is None else (num_clients, *entry["shape"])
    if shape != leaf.shape:
        needed = f"{name} needs an array of shape {leaf.shape}"
        there = "none" if shape is None else f"shape {shape}"
        raise ArgumentError("model", f"is not the run's: {needed}; the checkpoint has {there}")


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / INDEX).read_bytes())
        index = content["index"]
        is_whole = content["sha256"] == _digest_of(index) and index["format"] == FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{INDEX} cannot be read") from error
    if not is_whole:
        raise Damaged(f"{INDEX} is not what the run wrote")
    return index


def _read_start(folder: Path, entries: Sequence[Mapping] | None) -> dict[str, np.ndarray] | None:
    if entries is None:
        return None
    return {entry["name"]: _read_array(folder, entry, entry["shape"]) for entry in entries}


def _read_array(folder: Path, entry: Mapping[str, Any], shape: Sequence[int]) -> np.ndarray:
    array = np.empty(tuple(shape), _dtype(entry))
    content = array.reshape(-1).view(np.uint8)

    def read(file: BinaryIO, update: Callable) -> None:
        _fill(file, content, entry)
        update(content.data)

    _read_whole(folder, entry, read)
    return array


def _read_rows(folder: Path, entry: Mapping[str, Any], array: np.ndarray, ids: np.ndarray) -> None:
    """Reads the rows (n, ...) of clients `ids` (n,) into those of all clients (K, ...), block by block."""
    row_shape = array.shape[1:]
    row_bytes = math.prod(row_shape) * array.dtype.itemsize
    block = max(BLOCK_BYTES // max(row_bytes, 1), 1)
    buffer = np.empty((block, *row_shape), array.dtype)

    def read(file: BinaryIO, update: Callable) -> None:
        for start in range(0, len(ids), block):
            block_ids = ids[start : start + block]
            rows = buffer[: len(block_ids)]
            content = rows.reshape(-1).view(np.uint8)
            _fill(file, content, entry)
            update(content.data)
            array[block_ids] = rows

    _read_whole(folder, entry, read)


def _read_whole(folder: Path, entry: Mapping[str, Any], read: Callable) -> None:
    """Calls read(file, update of a checksum), and compares the checksum with the index."""
    digest = hashlib.sha256()
    with open(folder / entry["file"], "rb") as file:
        read(file, digest.update)
        is_whole = not file.read(1) and digest.hexdigest() == entry["sha256"]
    if not is_whole:
        raise Damaged(f"{entry['file']} is not what the run wrote")


def _fill(file: BinaryIO, content: np.ndarray, entry: Mapping[str, Any]) -> None:
    if content.size and file.readinto(content.data) != content.size:  # type: ignore[attr-defined]
        raise Damaged(f"{entry['file']} is truncated")


def _dtype(entry: Mapping[str, Any]) -> np.dtype:
    return np.dtype(jax.numpy.dtype(entry["dtype"]))


def _digest_of(body: Any) -> str:
    text = json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
