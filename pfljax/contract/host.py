"""The host machine's cores, free memory and cache folder, and human-readable sizes."""

from __future__ import annotations

import os
from pathlib import Path

from pfljax.contract.paths import expanded


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int:
    """Free memory in bytes."""
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # It counts the file cache as free.
    _, kibibytes, _ = line.split()
    return int(kibibytes) * 1024


def cache_folder() -> Path | None:
    """Cache folder for expensive results: PFLJAX_CACHE, or ~/.cache/pfljax.

    Returns:
        The folder; None if PFLJAX_CACHE is empty, which turns caches off, or if there is no home folder.
    """
    folder = os.environ.get("PFLJAX_CACHE")
    if folder == "":
        return None
    if folder:
        return Path(expanded(folder, "PFLJAX_CACHE"))
    # "~" if HOME is not set and the user has no entry in the system's list
    home = os.path.expanduser("~")
    return None if home == "~" else Path(home) / ".cache" / "pfljax"


def readable(num_bytes: float) -> str:
    """Formats a number of bytes for people."""
    value = float(num_bytes)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value = value / 1024
        units = units[1:]
    unit = units[0]
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
