"""Arrays that stay in their files, such as memory maps, whose pages a process gives back after it has read them."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


def mapping(array: np.ndarray) -> mmap.mmap | None:
    """The read-only memory map that an array is a view of, such as one of `numpy.load(file, mmap_mode="r")`, if any."""
    base = array
    while isinstance(base, np.ndarray) and not base.flags.owndata:
        base = base.base
    return base if isinstance(base, mmap.mmap) and not array.flags.writeable else None


def in_file(array: Any) -> bool:
    """Whether the numbers stay in a file, of a memory map or of what is only used like an array."""
    return not isinstance(array, np.ndarray) or mapping(array) is not None


def release(array: np.ndarray) -> None:
    """Gives back the pages of a memory map that were read, which otherwise count as the process's memory."""
    memory_map = mapping(array)
    if memory_map is not None and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        memory_map.madvise(mmap.MADV_DONTNEED)
