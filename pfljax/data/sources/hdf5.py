"""Clients of a federated data set in an HDF5 file, as TensorFlow Federated wrote them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.contract.host import readable
from pfljax.contract.reading import DENSEST, check_memory, opened
from pfljax.data.sources.files import damaged

# (split, if the file says it; client; its arrays)
ClientArrays = list[tuple[str | None, str, dict[str, np.ndarray]]]
GROUP = "examples"
SMALL = 2**20  # bytes of an array that may be left at its fill value


def clients(file: str) -> ClientArrays:
    """The clients in a file's group `examples`, in sorted order."""
    h5py = optional.load("h5py", "file", file)
    with (
        opened(file) as stream,
        damaged(file, "is a damaged HDF5 file ({error})"),
        h5py.File(stream, "r") as whole,
    ):
        if GROUP not in whole:
            text = f"has no group {GROUP}; accepted: {GROUP} with a group of each client"
            raise ArgumentError("file", f"{text}, found {', '.join(whole)}", file)

        # Check what all arrays need before any is read.
        group = _member(h5py, whole, GROUP, file)
        by_client = {}
        num_bytes = 0
        for name in sorted(group):
            client = _member(h5py, group, name, file)
            arrays = {key: _member(h5py, client, key, file) for key in client}
            by_client[name] = arrays
            for values in arrays.values():
                _check(values, file)
                num_bytes += values.nbytes
        check_memory(num_bytes, file)

        clients = []
        for name, arrays in by_client.items():
            clients.append((None, name, {key: values[()] for key, values in arrays.items()}))
        return clients


def _member(h5py: Any, group: Any, name: str, file: str) -> Any:
    """What a group has by a name. Raises `ArgumentError` for a link to another file, which may be any file."""
    if isinstance(group.get(name, getlink=True), h5py.ExternalLink):
        text = f"{name} is a link to another file; accepted: data in the file itself"
        raise ArgumentError("file", text, file)
    return group[name]


def _check(values: Any, file: str) -> None:
    """Raises `ArgumentError` for an array that is stored in other files, or claims more than the file can hold."""
    if values.external or values.is_virtual:
        text = f"{values.name} is stored in other files; accepted: data in the file itself"
        raise ArgumentError("file", text, file)
    if values.nbytes > max(DENSEST * values.id.get_storage_size(), SMALL):
        text = f"{values.name} claims {readable(values.nbytes)}, which cannot fit in the file"
        raise ArgumentError("file", f"{text}; accepted: a file that holds its arrays", file)
