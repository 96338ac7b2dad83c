"""Clients of a federated data set in an HDF5 file, as TensorFlow Federated wrote them."""

from __future__ import annotations

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import check_memory, opened
from pfljax.data.sources.files import damaged

Found = list[tuple[str | None, str, dict[str, np.ndarray]]]  # (part, if the file says it; client; its arrays)
GROUP = "examples"


def clients(file: str) -> Found:
    """The clients in a file's group `examples`, in sorted order."""
    h5py = optional.load("h5py", "file", file)
    with opened(file) as stream, damaged(file, "is a damaged HDF5 file ({error})"), h5py.File(stream, "r") as whole:
        if GROUP not in whole:
            text = f"has no group {GROUP}; accepted: {GROUP} with a group of each client, found {', '.join(whole)}"
            raise ArgumentError("file", text, file)
        group = whole[GROUP]
        check_memory(sum(values.nbytes for client in group.values() for values in client.values()), file)
        return [(None, name, {key: group[name][key][()] for key in group[name]}) for name in sorted(group)]
