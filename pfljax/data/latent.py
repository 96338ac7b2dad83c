"""Latent distributions: clusters of examples that look alike (FedFomo, Appendix A.5)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pfljax.data.sources import Source, generator
from pfljax.types import UsageError

Embed = Callable[[Source], np.ndarray]  # the examples as (n, F); its `key` tells what decides it
COMPONENTS = 256


def clusters(source: Source, embed: Embed | None, num_distributions: int, seed: int, cache: str | None) -> np.ndarray:
    """Embeds all examples, those for testing too, and divides them into D clusters by PCA and K-means.

    Args:
        source: The examples.
        embed: How they are embedded; None: by their pixels.
        num_distributions: D.
        seed: Of PCA and K-means.
        cache: Folder in which clusterings are kept; None: `cache_folder`.

    Returns:
        (n,) the cluster of each example, 0 to D - 1.

    Raises:
        UsageError: for more clusters than examples.
    """
    if not 1 <= num_distributions <= len(source.y):
        raise UsageError(f"--num_distributions={num_distributions}: accepted are 1 to {len(source.y)}, the examples")
    content = hashlib.sha256(f"{getattr(embed, 'key', 'pixels')} {num_distributions} {seed}".encode())
    tests = np.zeros(0, bool) if source.is_test is None else source.is_test
    for array in (source.x, source.y, tests):
        content.update(f"{array.dtype}{array.shape}".encode())
        content.update(np.ascontiguousarray(array).data)
    folder = Path(cache) if cache else cache_folder()
    path = folder / f"latent-{content.hexdigest()[:24]}.npz"
    with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        with path.open("rb") as file, np.load(file) as arrays:
            found = arrays["cluster"]
        if found.shape == source.y.shape:
            return found
    found = _divide(embed(source) if embed else source.x.reshape(len(source.y), -1), num_distributions, seed)
    # A cache that cannot be written is no reason to stop.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.npz")
        np.savez(temporary, cluster=found)
        os.replace(temporary, path)
    return found


def cache_folder() -> Path:
    """Where what was costly to make is kept: PFLJAX_CACHE, or ~/.cache/pfljax."""
    return Path(os.environ.get("PFLJAX_CACHE") or "~/.cache/pfljax").expanduser()


def _divide(x: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """(n,) clusters of embeddings (n, F)."""
    from sklearn.cluster import KMeans  # costs a second of import that other partitions need not pay
    from sklearn.decomposition import PCA

    states = generator(seed, "latent").integers(2**31, size=2)
    size = min(COMPONENTS, *x.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of PCA where all examples are alike
        reduced = PCA(size, random_state=int(states[0])).fit_transform(x.astype(np.float32))
    return KMeans(num_clusters, n_init=5, random_state=int(states[1])).fit_predict(reduced).astype(np.int64)
