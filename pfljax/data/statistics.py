"""What is said of a federation: sizes, classes, how much its clients differ, and a fingerprint."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.core.pooled import is_pooled
from pfljax.core.types import Examples
from pfljax.data.federation import Federation
from pfljax.engine import processes

_digests: weakref.WeakKeyDictionary[Federation, str] = weakref.WeakKeyDictionary()


def digest(federation: Federation) -> str:
    """A short fingerprint of all examples and who has them, for runs to state which split they had.

    It takes seconds for a gigabyte, and is kept for as long as the federation, whose arrays must not be changed.
    """
    if federation not in _digests:
        _digests[federation] = _digest(federation)
    return _digests[federation]


def _digest(federation: Federation) -> str:
    here, rows, tables = federation.own or slice(None), [], {}
    for split in (federation.train, federation.validation, federation.test):
        size, code = np.asarray(split.size[here], np.uint64), np.zeros(len(split.y), np.uint64)
        for place in range(split.y.shape[1]):  # padding is no part of it
            real = place < size
            for examples in (split.x, split.y):
                code[real] = _mixed(code[real] ^ _codes(examples, real, place, tables))
        rows += [size, code]
    found = np.stack(rows, axis=1).view(np.uint8)
    return hashlib.sha256(_of_all(federation, found).tobytes()).hexdigest()[:12]


def _codes(examples: Examples, real: np.ndarray, place: int, tables: dict[int, np.ndarray]) -> np.ndarray:
    """A uint64 for the example at one place of each client where `real` (K,) holds.

    Args:
        examples: Of all clients.
        real: Which clients have an example there.
        place: The place.
        tables: Takes the codes of each pool, which are worked out once.
    """
    if is_pooled(examples):
        pool = examples.pool
        if id(pool) not in tables:
            tables[id(pool)] = np.array([_code(row) for row in pool], np.uint64)
        return tables[id(pool)][examples.index[real, place]]
    if examples.ndim == 2:  # a number each
        return _mixed(examples[real, place].astype(np.float64).view(np.uint64))
    return np.array([_code(row) for row in examples[real, place]], np.uint64)


def _code(row: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=8).digest(), "little")


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: every bit of a uint64 comes to depend on all others."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (values ^ values >> np.uint64(31)) + np.uint64(0x9E3779B97F4A7C15)


def class_counts(federation: Federation) -> np.ndarray | None:
    """(K, C) int32 training examples of each class; None for a regression and for sequences, which have no class."""
    y, size = federation.train.y, federation.train.size[federation.own or slice(None)]
    if federation.task != "classification" or y.ndim > 2:
        return None
    client, position = np.nonzero(np.arange(y.shape[1]) < size[:, None])
    cells = client * federation.num_classes + y[client, position]
    counts = np.bincount(cells, minlength=len(y) * federation.num_classes).reshape(len(y), -1)
    return _of_all(federation, counts.astype(np.int32))


def inverse_frequency_weights(federation: Federation) -> tuple[float, ...]:
    """Weights of the classes (C,) by the inverse of their shares p_c of all training labels.

    w_c ~ min(1, 1 / (C p_c)): classes rarer than all are on average weigh alike, so that none weighs without bound.
    Scaled so that the mean over all training labels is 1. Labels are characters where examples are sequences. The
    weights of FedEM's authors for Shakespeare follow the same rule, with a limit of their own and another scale.

    Raises:
        ArgumentError: for a regression.
    """
    if federation.task != "classification":
        raise ArgumentError("class_weights", "accepted for classification")
    classes, split = federation.num_classes, federation.train
    sizes = split.size[federation.own or slice(None)]
    labels = [np.ravel(y[:size]) for y, size in zip(split.y, sizes, strict=True)]
    counts = [np.bincount(own[own < classes], minlength=classes) for own in labels]  # padding is no class
    share = _of_all(federation, np.array(counts, np.int32)).sum(axis=0)
    share = share / max(share.sum(), 1)
    weights = 1 / np.maximum(classes * share, 1)
    return tuple((weights / (share @ weights)).tolist())


def heterogeneity(federation: Federation) -> float | None:
    """The clients' mean distance from the whole: the mean over clients of sum_c |p_k(c) - p(c)|.

    p_k are the label shares among client k's training examples, p those among all clients'. Zhao et al. (2018) call it
    the earth mover's distance; it is 0 to 2. None where there are no classes to count.
    """
    counts = class_counts(federation)
    if counts is None:
        return None
    size = counts.sum(axis=1)
    shares = counts[size > 0] / size[size > 0, None]
    return float(np.abs(shares - counts.sum(axis=0) / max(counts.sum(), 1)).sum(axis=1).mean())


def describe(federation: Federation) -> dict:
    """What a report says of the data: clients, examples a client and in all, classes a client, the digest."""

    def spread(values: np.ndarray) -> dict[str, float]:
        return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}

    parts = {"train": federation.train, "validation": federation.validation, "test": federation.test}
    summary: dict[str, Any] = {
        part: {"total": int(split.size.sum()), **spread(np.asarray(split.size))} for part, split in parts.items()
    }
    summary |= {"clients": federation.num_clients, "digest": digest(federation)}
    if federation.class_names:
        summary["class_names"] = list(federation.class_names)
    counts = class_counts(federation)
    if counts is not None:
        summary["classes_per_client"] = spread((counts > 0).sum(axis=1))
    return summary


def _of_all(federation: Federation, rows: np.ndarray) -> np.ndarray:
    """All clients' rows, from those of the clients that are here."""
    return rows if len(rows) == federation.num_clients else processes.gather_rows(rows)
