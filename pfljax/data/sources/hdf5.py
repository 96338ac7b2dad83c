"""Clients of a federated data set in an HDF5 file, as TensorFlow Federated wrote them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.contract.host import readable
from pfljax.contract.reading import DENSEST, check_memory, opened
from pfljax.data.sources.files import damaged

# (part, if the file says it; client; its arrays)
Found = list[tuple[str | None, str, dict[str, np.ndarray]]]
GROUP = "examples"
SMALL = 2**20  # bytes of an array that may be left at its fill value


def clients(file: str) -> Found:
    """The clients in a file's group `examples`, in sorted order."""
    h5py = optional.load("h5py", "file", file)
    with (
        opened(file) as stream,
        damaged(file, "is a damaged HDF5 file ({error})"),
        h5py.File(stream, "r") as whole,
    ):
        if GROUP not in whole:
            text = f"has no group {GROUP}; accepted: {GROUP} with a group of each client, found {', '.join(whole)}"
            raise ArgumentError("file", text, file)
        group = _inside(h5py, whole, GROUP, file)
        clients = {name: _inside(h5py, group, name, file) for name in sorted(group)}
        arrays = {
            name: {key: _inside(h5py, client, key, file) for key in client}
            for name, client in clients.items()
        }
        every = [values for own in arrays.values() for values in own.values()]
        for values in every:
            _check(values, file)
        check_memory(sum(values.nbytes for values in every), file)
        return [
            (None, name, {key: values[()] for key, values in own.items()})
            for name, own in arrays.items()
        ]


def _inside(h5py: Any, group: Any, name: str, file: str) -> Any:
    """What a group has by a name. Raises `ArgumentError` for a link to another file, which may be any file."""
    if isinstance(group.get(name, getlink=True), h5py.ExternalLink):
        raise ArgumentError(
            "file", f"{name} is a link to another file; accepted: data in the file itself", file
        )
    return group[name]


def _check(values: Any, file: str) -> None:
    """Raises `ArgumentError` for an array that is kept in other files, or claims more than the file can hold."""
    if values.external or values.is_virtual:
        raise ArgumentError(
            "file", f"{values.name} is kept in other files; accepted: data in the file itself", file
        )
    if values.nbytes > max(DENSEST * values.id.get_storage_size(), SMALL):
        text = f"{values.name} claims {readable(values.nbytes)}, which cannot fit in the file"
        raise ArgumentError("file", f"{text}; accepted: a file that holds its arrays", file)
