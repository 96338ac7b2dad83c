"""Compiled programs on disk, so that a script's second start compiles nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import jax

from pfljax.contract.host import cache_folder

MAX_BYTES = 2 << 30


def use() -> None:
    """Lets JAX store compiled programs in `cache_folder` and read them from there.

    Does nothing if the user has set `jax_compilation_cache_dir`, or if the folder cannot be written.
    """
    cache = cache_folder()
    config: Any = jax.config
    if config.jax_compilation_cache_dir is not None or cache is None:
        return
    folder = cache / "compiled" / processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    trim(folder, MAX_BYTES)

    # Small programs, too: a run has hundreds, and each takes longer to compile than to read.
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    config.update("jax_compilation_cache_dir", str(folder))

    # A full disk or a damaged file costs a compilation. JAX would warn of it for every program.
    warnings.filterwarnings(
        "ignore", message="Error (reading|writing) persistent compilation cache"
    )


def processor() -> str:
    """Name of the folder for programs that run on processors like this one.

    Machines that share a home folder may differ in instructions, and a program runs where it was compiled for.
    """
    description = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described = ("model name", "flags", "Features")
        description += "".join(sorted({line for line in lines if line.startswith(described)}))
    return hashlib.sha256(description.encode()).hexdigest()[:12]


def trim(folder: Path, max_bytes: int) -> None:
    """Deletes the files that were used least recently until the others take at most half of `max_bytes`.

    Does nothing while all files together take no more than `max_bytes`.
    """
    files = []
    with contextlib.suppress(OSError):  # another process may delete files, too
        for entry in os.scandir(folder):
            status = entry.stat()
            last_used = max(status.st_atime, status.st_mtime)
            files.append((last_used, status.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    if total <= max_bytes:
        return
    for _, size, path in sorted(files):
        if total <= max_bytes // 2:
            return
        with contextlib.suppress(OSError):
            os.remove(path)
        total -= size
