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
from pfljax.data.sources.examples import parse_example
from pfljax.data.sources.files import damaged
from pfljax.data.sources.hdf5 import ClientArrays

STEPS = 10_000_000  # of SQLite's machine that any file may take
STEPS_BETWEEN = 100_000  # two checks of how many there were
LONGEST_QUERY = 2**20  # bytes
STEPS_PER_BYTE = 100  # that a file may take, too; a row takes about 30
# TFF's table with a row per example, FedJAX's with one per client
EXAMPLES = "examples"
CLIENTS = "federated_data"
OBJECTS = 4  # FedJAX's number of msgpack extension for arrays of bytes


def clients(file: str) -> ClientArrays:
    """The clients in a file, in sorted order."""
    with _connected(file) as base:
        query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        tables = [name for (name,) in base.execute(query)]
        if CLIENTS in tables:
            return _clients_of_fedjax(base, file)
        if EXAMPLES in tables:
            return _clients_of_tff(base, file)
        text = f"has tables {few(tables) or '(none)'}"
        accepted = f"accepted: {EXAMPLES} (TFF) or {CLIENTS} (FedJAX)"
        raise ArgumentError("file", f"{text}; {accepted}", file)


def _clients_of_fedjax(base: sqlite3.Connection, file: str) -> ClientArrays:
    """The clients in FedJAX's table, which has a row for each."""
    _check_size(base, CLIENTS, "data", file)
    rows = base.execute(f"SELECT client_id, data FROM {CLIENTS} ORDER BY client_id")
    return [(None, _text(client), _unpacked(data)) for client, data in rows]


def _clients_of_tff(base: sqlite3.Connection, file: str) -> ClientArrays:
    """The clients in TensorFlow Federated's table, which has a row for each example."""
    _check_size(base, EXAMPLES, "serialized_example_proto", file)
    columns = "split_name, client_id, serialized_example_proto"
    order = "split_name, client_id, rowid"
    rows = base.execute(f"SELECT {columns} FROM {EXAMPLES} ORDER BY {order}")
    clients = []
    for (split, client), client_rows in itertools.groupby(rows, key=lambda row: row[:2]):
        messages = [message for _, _, message in client_rows]
        clients.append((split, _text(client), _stacked(messages)))
    return clients


def has_test_split(file: str) -> bool:
    """Whether a file itself contains test examples."""
    query = f"SELECT 1 FROM {EXAMPLES} WHERE split_name = 'test' LIMIT 1"
    try:
        with _connected(file) as base:
            return bool(base.execute(query).fetchall())
    except ArgumentError:
        # No such table, or no SQLite file; `clients` then raises the error.
        return False


@contextlib.contextmanager
def _connected(file: str) -> Iterator[sqlite3.Connection]:
    """A connection that only reads, and that ends queries of views that repeat themselves."""
    uri = f"{pathlib.Path(file).absolute().as_uri()}?mode=ro&immutable=1"
    # SQLite would wait for a pipe, and says less of a file that does not exist.
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
            text = "takes more steps than a file of its size needs; is a view endless?"
            raise ArgumentError("file", text, file) from error


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
    parsed = list(map(parse_example, examples))
    return {
        name: np.array([_values(features[name]) for features in parsed])
        for name in sorted(parsed[0])
    }


def _values(feature: Any) -> Any:
    """A feature's numbers (m,) or texts; a single one by itself."""
    if feature.HasField("bytes_list"):
        texts = list(feature.bytes_list.value)
        return texts[0] if len(texts) == 1 else texts
    if feature.HasField("float_list"):
        numbers = np.array(feature.float_list.value, np.float32)
    elif feature.HasField("int64_list"):
        numbers = np.array(feature.int64_list.value, np.int64)
    else:
        raise ValueError("a feature has no list")
    return numbers[0] if len(numbers) == 1 else numbers
