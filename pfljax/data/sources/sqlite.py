"""Clients of a federated data set in an SQLite file, as TensorFlow Federated or FedJAX wrote them."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Any

import flax.serialization
import msgpack
import numpy as np

from pfljax.contract.errors import ArgumentError, few
from pfljax.contract.host import free_memory
from pfljax.contract.reading import check_memory, opened
from pfljax.data.sources.examples import features_of
from pfljax.data.sources.files import damaged
from pfljax.data.sources.hdf5 import Found

STEPS = 10_000_000  # of SQLite's machine that any file may take
STEPS_BETWEEN = 100_000  # two checks of how many there were
LONGEST_QUERY = 2**20  # bytes
STEPS_PER_BYTE = 100  # that a file may take, too; a row takes about 30
# TFF's table with a row per example, FedJAX's with one per client
EXAMPLES = "examples"
CLIENTS = "federated_data"
OBJECTS = 4  # FedJAX's number of msgpack extension for arrays of bytes


def clients(file: str) -> Found:
    """The clients in a file, in sorted order."""
    with _connected(file) as base:
        tables = [
            name
            for (name,) in base.execute(
                "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
            )
        ]
        if CLIENTS in tables:
            _check_size(base, CLIENTS, "data", file)
            rows = base.execute(f"SELECT client_id, data FROM {CLIENTS} ORDER BY client_id")
            return [(None, _text(client), _unpacked(data)) for client, data in rows]
        if EXAMPLES not in tables:
            text = f"has tables {few(tables) or '(none)'}; accepted: {EXAMPLES} (TFF) or {CLIENTS} (FedJAX)"
            raise ArgumentError("file", text, file)
        _check_size(base, EXAMPLES, "serialized_example_proto", file)
        columns = "split_name, client_id, serialized_example_proto"
        rows = base.execute(
            f"SELECT {columns} FROM {EXAMPLES} ORDER BY split_name, client_id, rowid"
        )
        groups = itertools.groupby(rows, key=lambda row: row[:2])
        return [
            (part, _text(client), _stacked([row[2] for row in own]))
            for (part, client), own in groups
        ]


def has_test_part(file: str) -> bool:
    """Whether a file itself contains test examples."""
    try:
        with _connected(file) as base:
            return bool(
                base.execute(
                    f"SELECT 1 FROM {EXAMPLES} WHERE split_name = 'test' LIMIT 1"
                ).fetchall()
            )
    except ArgumentError:  # no such table, or no SQLite file; `clients` then raises the error
        return False


@contextlib.contextmanager
def _connected(file: str) -> Iterator[sqlite3.Connection]:
    """A connection that only reads, and that ends queries of views that repeat themselves."""
    uri = f"{pathlib.Path(file).absolute().as_uri()}?mode=ro&immutable=1"
    # SQLite would wait for a pipe, and says less of a file that is not there
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
    text = "is not a federated data set in SQLite ({kind}: {error})"
    with damaged(file, text), contextlib.closing(sqlite3.connect(uri, uri=True)) as base:
        calls = itertools.count(1)
        most = STEPS + STEPS_PER_BYTE * size

        def is_too_long() -> bool:
            return next(calls) * STEPS_BETWEEN > most

        base.set_progress_handler(is_too_long, STEPS_BETWEEN)
        # no value is larger than its file
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, size + LONGEST_QUERY)
        try:
            yield base
        except sqlite3.OperationalError as error:
            if next(calls) * STEPS_BETWEEN <= most:
                raise
            raise ArgumentError(
                "file", "takes more steps than a file of its size needs; is a view endless?", file
            ) from error


def _check_size(base: sqlite3.Connection, table: str, column: str, file: str) -> None:
    """Raises `ArgumentError` if a table's values need more memory than is free, before any is sorted or read."""
    ((size,),) = base.execute(f"SELECT sum(length({column})) FROM {table}")
    check_memory(size or 0, file)


def _text(client: Any) -> str:
    return client.decode("utf-8", "replace") if isinstance(client, bytes) else str(client)


def _unpacked(data: bytes) -> dict[str, np.ndarray]:
    """A client's arrays by name, from FedJAX's compressed msgpack."""
    stream = zlib.decompressobj()
    content = stream.decompress(data, free_memory())
    if not stream.eof:
        raise ValueError("a client's data end early, or are larger than memory")
    arrays: Any = flax.serialization.msgpack_restore(content)
    for name, values in arrays.items():
        if isinstance(values, msgpack.ExtType) and values.code == OBJECTS:
            shape, flat = msgpack.unpackb(values.data, raw=True)
            arrays[name] = np.array(flat, object).reshape(shape)
    return arrays


def _stacked(examples: list[bytes]) -> dict[str, np.ndarray]:
    """A client's arrays by name, from serialized tf.train.Example messages."""
    parsed = list(map(features_of, examples))
    return {
        name: np.array([_values(features[name]) for features in parsed])
        for name in sorted(parsed[0])
    }


def _values(feature: Any) -> Any:
    """A feature's numbers or texts; the only one by itself."""
    kind = next(
        kind for kind in ("float_list", "int64_list", "bytes_list") if feature.HasField(kind)
    )
    values = list(getattr(feature, kind).value)
    one = values if len(values) != 1 else values[0]
    return (
        one
        if kind == "bytes_list"
        else np.array(one, np.float32 if kind == "float_list" else np.int64)
    )
