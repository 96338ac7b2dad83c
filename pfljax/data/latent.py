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
    """The cluster of each example: all examples, also those for testing, are embedded and clustered.

    Args:
        source: The examples.
        embed: Embedding of examples before clustering; None: pixels. One without a `key` is recomputed every time.
        number: Number of clusters.
        seed: Random seed.
        cache: Folder for embeddings and clusterings; None: `cache_folder`.

    Returns:
        (n,) clusters, from 0.

    Raises:
        ArgumentError: for more clusters than examples, or a tree of arrays without an embedding of the user's.
    """
    is_builtin = embed is None or hasattr(embed, "key")
    if not isinstance(source.x, np.ndarray) and is_builtin:
        text = "latent needs x to be one array"
        accepted = "accepted for several: another partition, or embedding=function"
        raise ArgumentError("partition", f"{text}; {accepted}")
    num_examples = len(source.y)
    if not 1 <= number <= num_examples:
        text = f"accepted: 1 to {num_examples}, the number of examples"
        raise ArgumentError("groups", text, number)
    source = prepared(source)

    def embedding() -> np.ndarray:
        x = embed(source) if embed else source.x.reshape(num_examples, -1)
        return _reduce(x, seed)

    key = getattr(embed, "key", None) if embed else "pixels"
    folder = Path(expanded(cache, "cache")) if cache else cache_folder()
    if key is None or folder is None:
        return _cluster(embedding(), number, seed)
    name = _fingerprint(source, key, seed)

    def clustering() -> np.ndarray:
        cached = _cached(folder / f"embedding-{name}.npz", num_examples, embedding)
        return _cluster(cached, number, seed)

    return _cached(folder / f"latent-{name}-{number}.npz", num_examples, clustering)


def _fingerprint(source: Source, key: str, seed: int) -> str:
    """The name under which an embedding of a source's examples is cached."""
    digest = hashlib.sha256(f"{key} {seed}".encode())
    is_test = np.zeros(0, bool) if source.is_test is None else source.is_test
    for array in (source.x, source.y, is_test):
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:24]


def _cached(path: Path, num_rows: int, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Reads the array (num_rows, ...) from the file, or computes it if the file is missing or unreadable."""
    with contextlib.suppress(ArgumentError):
        cached = read_npz(str(path), ["array"])["array"]
        if cached.shape[:1] == (num_rows,):
            return cached
    array = compute()
    # Continue if the cache cannot be written.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.npz")
        with open(temporary, "xb") as file:
            np.savez(file, array=array)
        os.replace(temporary, path)
    return array


def _reduce(x: np.ndarray, seed: int) -> np.ndarray:
    """At most 256 principal components of embeddings (n, F)."""
    # scikit-learn is slow to import, and other partitions do not need it.
    from sklearn.decomposition import PCA

    state = generator(seed, "latent").integers(2**31, size=2)[0]
    pca = PCA(min(COMPONENTS, *x.shape), random_state=int(state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # if all examples are equal
        return pca.fit_transform(x.astype(np.float32))


def _cluster(x: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """(n,) cluster of each of the examples (n, F)."""
    from sklearn.cluster import KMeans

    state = generator(seed, "latent").integers(2**31, size=2)[1]
    kmeans = KMeans(num_clusters, n_init=5, random_state=int(state))  # pyright: ignore[reportArgumentType]
    return kmeans.fit_predict(x).astype(np.int64)
