"""Statistics of a federation: sizes, classes, heterogeneity and a fingerprint."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.pooled import Pooled, is_pooled
from pfljax.contract.types import Examples, Split
from pfljax.data.federation import Federation
from pfljax.data.sources.source import mixed_bits

BLOCK = 1024  # rows that are read at a time
_digests: weakref.WeakKeyDictionary[Federation, str] = weakref.WeakKeyDictionary()
_client_codes: weakref.WeakKeyDictionary[Federation, ClientCodes] = weakref.WeakKeyDictionary()


class ClientCodes(NamedTuple):
    """A code of each client's examples, which is the same if, and up to chance only if, these are equal.

    Attributes:
        x: (K,) uint64, of the inputs of all splits, before they are scaled.
        y: (K,) uint64, of the targets of all splits.
    """

    x: np.ndarray
    y: np.ndarray


def digest(federation: Federation) -> str:
    """A short fingerprint of all examples and their assignment, which identifies the split of a run.

    It takes seconds per gigabyte and is cached with the federation, whose arrays must not change.
    """
    if federation.recorded_digest is not None:
        return federation.recorded_digest
    if federation not in _digests:
        _digests[federation] = _digest(federation)
    return _digests[federation]


def _digest(federation: Federation) -> str:
    rows = []
    tables: dict[int, np.ndarray] = {}
    here = federation.own or slice(None)
    federation = federation.standardized
    for split in (federation.train, federation.validation, federation.test):
        size = np.asarray(split.size[here], np.uint64)
        code = np.zeros(len(split.y), np.uint64)
        for place in range(split.y.shape[1]):  # excludes padding
            real = place < size
            for examples in jax.tree.leaves((split.x, split.y), is_leaf=is_pooled):
                code[real] = mixed_bits(code[real] ^ _codes(examples, real, place, tables))
        rows += [size, code]
    found = np.stack(rows, axis=1).view(np.uint8)
    return hashlib.sha256(federation.of_all(found).tobytes()).hexdigest()[:12]


def client_codes(federation: Federation) -> ClientCodes:
    """The codes of all clients. They are cached with the federation, whose arrays must not change."""
    if federation not in _client_codes:
        splits = (federation.train, federation.validation, federation.test)
        x = np.zeros(len(federation.train.y), np.uint64)
        y = np.zeros_like(x)
        tables: dict[int, np.ndarray] = {}
        for split in splits:
            size = np.asarray(split.size)[federation.own or slice(None)]
            for position in range(split.y.shape[1]):
                real = position < size
                for leaf in jax.tree.leaves(split.x, is_leaf=is_pooled):
                    x[real] = mixed_bits(x[real] ^ _codes(leaf, real, position, tables))
                y[real] = mixed_bits(y[real] ^ _codes(split.y, real, position, tables))
        as_bytes = np.stack([x, y], axis=1).view(np.uint8)  # JAX may not send 64-bit integers
        codes = federation.of_all(as_bytes).view(np.uint64)
        _client_codes[federation] = ClientCodes(codes[:, 0], codes[:, 1])
    return _client_codes[federation]


def input_codes(federation: Federation, part: str) -> np.ndarray:
    """A code of each example's x, before it is scaled, (K, n_max) uint64 for the clients in this process; 0: padding.

    Examples have the same code if, and up to chance only if, their x are equal.
    """
    split: Split = getattr(federation, part)
    size = np.asarray(split.size[federation.own or slice(None)])
    found = np.zeros(split.y.shape[:2], np.uint64)
    tables: dict[int, np.ndarray] = {}
    for place in range(split.y.shape[1]):
        real = place < size
        for examples in jax.tree.leaves(split.x, is_leaf=is_pooled):
            found[real, place] = mixed_bits(
                found[real, place] ^ _codes(examples, real, place, tables)
            )
    return found


def codes_of(federations: Iterable[Federation], part: str) -> np.ndarray:
    """The different `input_codes` of the examples of a part of several federations (n,), sorted."""
    codes = [each.of_all(input_codes(each, part)).ravel() for each in federations]
    return np.setdiff1d(np.concatenate(codes), np.zeros(1, np.uint64))


def _codes(
    examples: Examples, real: np.ndarray, place: int, tables: dict[int, np.ndarray]
) -> np.ndarray:
    """A uint64 code for each client's example at one position, for clients where `real` (K,) is True.

    `tables` caches the codes of each pool.
    """
    if is_pooled(examples):
        pool = examples.pool
        if id(pool) not in tables:
            tables[id(pool)] = _codes_of_rows(examples)
        return tables[id(pool)][examples.index[real, place]]
    if examples.ndim == 2:  # one number per example
        return mixed_bits(examples[real, place].astype(np.float64).view(np.uint64))
    return np.array([_code(row) for row in examples[real, place]], np.uint64)


def _codes_of_rows(examples: Pooled) -> np.ndarray:
    """(P,) uint64 codes of the pool's rows as they are read, block by block."""
    num = len(examples.pool)
    found = np.empty(num, np.uint64)
    for start in range(0, num, BLOCK):
        places = np.arange(start, min(start + BLOCK, num))
        found[places] = [_code(row) for row in examples.rows(places)]
    return found


def _code(row: np.ndarray) -> int:
    return int.from_bytes(
        hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=8).digest(), "little"
    )


def inverse_frequency_weights(federation: Federation) -> tuple[float, ...]:
    """Class weights (C,) by the inverse of the shares p_c of all training labels.

    w_c ~ min(1, 1 / (C p_c)): classes rarer than average all get the same weight, so that weights are bounded. They are
    scaled to mean 1 over all training labels. For sequences, labels are characters. The weights that FedEM's authors
    use for Shakespeare follow the same rule with another limit and scale.

    Raises:
        ArgumentError: for a regression.
    """
    if federation.task != "classification":
        raise ArgumentError("class_weights", "accepted only for classification")
    classes = federation.num_classes
    split = federation.train
    sizes = split.size[federation.own or slice(None)]
    labels = [np.ravel(y[:size]) for y, size in zip(split.y, sizes, strict=True)]
    labels = [own[(own >= 0) & (own < classes)] for own in labels]  # padding is not a class
    counts = [np.bincount(own, minlength=classes) for own in labels]
    share = federation.of_all(np.array(counts, np.int32)).sum(axis=0)
    share = share / max(share.sum(), 1)
    weights = 1 / np.maximum(classes * share, 1)
    return tuple((weights / (share @ weights)).tolist())


def heterogeneity(federation: Federation) -> float | None:
    """The clients' mean distance from the global label distribution: the mean over clients of sum_c |p_k(c) - p(c)|.

    p_k are the label shares in client k's training examples, p those in all clients'. Zhao et al. (2018) call it the
    earth mover's distance; it ranges from 0 to 2. None if there are no classes.
    """
    counts = federation.class_counts()
    if counts is None:
        return None
    size = counts.sum(axis=1)
    shares = counts[size > 0] / size[size > 0, None]
    return float(np.abs(shares - counts.sum(axis=0) / max(counts.sum(), 1)).sum(axis=1).mean())


def describe(federation: Federation, unseen: Federation | None = None) -> dict:
    """Data entries for reports: clients, examples per client and in total, classes per client, digests.

    "returned" says that validation examples were returned to the training part.
    """

    def spread(values: np.ndarray) -> dict[str, float]:
        return {
            "min": int(values.min()),
            "median": float(np.median(values)),
            "max": int(values.max()),
        }

    parts = {
        "train": federation.train,
        "validation": federation.validation,
        "test": federation.test,
    }
    summary: dict[str, Any] = {
        part: {"total": int(split.size.sum()), **spread(np.asarray(split.size))}
        for part, split in parts.items()
    }
    summary |= {"clients": federation.num_clients, "digest": digest(federation)}
    if federation.returned:
        summary["returned"] = True
    if unseen is not None:
        summary["unseen"] = digest(unseen)
    if federation.class_names:
        summary["class_names"] = list(federation.class_names)
    counts = federation.class_counts()
    if counts is not None:
        summary["classes_per_client"] = spread((counts > 0).sum(axis=1))
    return summary
