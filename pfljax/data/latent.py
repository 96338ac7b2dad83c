"""Latent distributions: clusters of similar examples (FedFomo, Appendix A.5)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.host import cache_folder
from pfljax.contract.paths import expanded
from pfljax.contract.reading import read_npz
from pfljax.data.preparation import prepared
from pfljax.data.sources.source import Source, generator

# returns (n, F); its optional `key` identifies the embedding in caches
Embed = Callable[[Source], np.ndarray]
COMPONENTS = 256


def clusters(
    source: Source, embed: Embed | None, number: int, seed: int, cache: str | None
) -> np.ndarray:
    """(n,) the cluster of each example, from 0: all examples, also those for testing, are embedded and clustered.

    Embeddings and clusterings are kept in the folder `cache`, or in `cache_folder`; an `embed` without a `key` is
    recomputed every time. Raises `ArgumentError` for more clusters than examples, or a tree of arrays without an own
    `embed`; without any, pixels are clustered.
    """
    if not isinstance(source.x, np.ndarray) and (embed is None or hasattr(embed, "key")):
        text = "latent needs x to be one array; accepted for several: another partition, or embedding=function"
        raise ArgumentError("partition", text)
    if not 1 <= number <= len(source.y):
        raise ArgumentError(
            "groups", f"accepted: 1 to {len(source.y)}, the number of examples", number
        )
    source = prepared(source)

    def reduced() -> np.ndarray:
        return _reduce(embed(source) if embed else source.x.reshape(len(source.y), -1), seed)

    key = getattr(embed, "key", None) if embed else "pixels"
    folder = Path(expanded(cache, "cache")) if cache else cache_folder()
    if key is None or folder is None:
        return _divide(reduced(), number, seed)
    data = hashlib.sha256(f"{key} {seed}".encode())
    tests = np.zeros(0, bool) if source.is_test is None else source.is_test
    for array in (source.x, source.y, tests):
        data.update(f"{array.dtype}{array.shape}".encode())
        data.update(np.ascontiguousarray(array).data)
    name = data.hexdigest()[:24]

    def divided() -> np.ndarray:
        return _divide(
            _cached(folder / f"embedding-{name}.npz", len(source.y), reduced), number, seed
        )

    return _cached(folder / f"latent-{name}-{number}.npz", len(source.y), divided)


def _cached(path: Path, rows: int, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Reads the array (rows, ...) from the file, or computes it if the file is missing or unreadable."""
    with contextlib.suppress(ArgumentError):
        found = read_npz(str(path), ["array"])["array"]
        if found.shape[:1] == (rows,):
            return found
    made = make()
    # Continue if the cache cannot be written.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.npz")
        with open(temporary, "xb") as file:
            np.savez(file, array=made)
        os.replace(temporary, path)
    return made


def _reduce(x: np.ndarray, seed: int) -> np.ndarray:
    """At most 256 principal components of embeddings (n, F)."""
    from sklearn.decomposition import PCA  # slow to import, and other partitions do not need it

    state = generator(seed, "latent").integers(2**31, size=2)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # if all examples are equal
        return PCA(min(COMPONENTS, *x.shape), random_state=int(state)).fit_transform(
            x.astype(np.float32)
        )


def _divide(x: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """(n,) cluster of each of the examples (n, F)."""
    from sklearn.cluster import KMeans

    state = generator(seed, "latent").integers(2**31, size=2)[1]
    kmeans = KMeans(num_clusters, n_init=5, random_state=int(state))  # pyright: ignore[reportArgumentType]
    return kmeans.fit_predict(x).astype(np.int64)
