"""Clients of a federated data set in an SQLite file, as TensorFlow Federated or FedJAX wrote them."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Any

import flax.serialization
import msgpack
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.host import free_memory
from pfljax.contract.reading import opened
from pfljax.data.sources.examples import features_of
from pfljax.data.sources.files import damaged
from pfljax.data.sources.hdf5 import Found

EXAMPLES, CLIENTS = "examples", "federated_data"  # TFF's table with a row per example, FedJAX's with one per client
OBJECTS = 4  # FedJAX's number of msgpack extension for arrays of bytes


def clients(file: str) -> Found:
    """The clients in a file, in sorted order."""
    with _connected(file) as base:
        tables = [name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        if CLIENTS in tables:
            rows = base.execute(f"SELECT client_id, data FROM {CLIENTS} ORDER BY client_id")
            return [(None, _text(client), _unpacked(data)) for client, data in rows]
        if EXAMPLES not in tables:
            text = f"has tables {', '.join(tables) or '(none)'}; accepted: {EXAMPLES} (TFF) or {CLIENTS} (FedJAX)"
            raise ArgumentError("file", text, file)
        columns = "split_name, client_id, serialized_example_proto"
        rows = base.execute(f"SELECT {columns} FROM {EXAMPLES} ORDER BY split_name, client_id, rowid")
        groups = itertools.groupby(rows, key=lambda row: row[:2])
        return [(part, _text(client), _stacked([row[2] for row in own])) for (part, client), own in groups]


def has_test_part(file: str) -> bool:
    """Whether a file itself contains test examples."""
    try:
        with _connected(file) as base:
            return bool(base.execute(f"SELECT 1 FROM {EXAMPLES} WHERE split_name = 'test' LIMIT 1").fetchall())
    except ArgumentError:  # no such table, or no SQLite file; `clients` then raises the error
        return False


@contextlib.contextmanager
def _connected(file: str) -> Iterator[sqlite3.Connection]:
    """A connection that only reads."""
    uri = f"{pathlib.Path(file).absolute().as_uri()}?mode=ro&immutable=1"
    with opened(file):  # SQLite would wait for a pipe, and says less of a file that is not there
        pass
    text = "is not a federated data set in SQLite ({kind}: {error})"
    with damaged(file, text), contextlib.closing(sqlite3.connect(uri, uri=True)) as base:
        yield base


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
    return {name: np.array([_values(features[name]) for features in parsed]) for name in sorted(parsed[0])}


def _values(feature: Any) -> Any:
    """A feature's numbers or texts; the only one by itself."""
    kind = next(kind for kind in ("float_list", "int64_list", "bytes_list") if feature.HasField(kind))
    values = list(getattr(feature, kind).value)
    one = values if len(values) != 1 else values[0]
    return one if kind == "bytes_list" else np.array(one, np.float32 if kind == "float_list" else np.int64)
