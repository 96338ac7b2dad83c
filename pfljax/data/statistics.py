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
from pfljax.data.federation import SPLITS, Federation
from pfljax.data.former import renamed_arguments
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

    Examples:
        >>> from pfljax import data
        >>> first = data.digits(num_clients=4)
        >>> data.digest(first) == data.digest(data.digits(num_clients=4))
        True
        >>> data.digest(first) == data.digest(data.digits(num_clients=4, seed=1))
        False
    """
    if federation.recorded_digest is not None:
        return federation.recorded_digest
    if federation not in _digests:
        _digests[federation] = _digest(federation)
    return _digests[federation]


def _digest(federation: Federation) -> str:
    columns = []
    pool_codes: dict[int, np.ndarray] = {}
    federation = federation.standardized
    for name in SPLITS:
        split: Split = getattr(federation, name)
        size = np.asarray(split.size[federation.local_rows], np.uint64)
        arrays = jax.tree.leaves((split.x, split.y), is_leaf=is_pooled)

        # A client's code chains those of its examples; padding does not count.
        code = np.zeros(len(split.y), np.uint64)
        for position in range(split.y.shape[1]):
            is_example = position < size
            for examples in arrays:
                example_codes = _codes(examples, is_example, position, pool_codes)
                code[is_example] = mixed_bits(code[is_example] ^ example_codes)
        columns += [size, code]
    rows = np.stack(columns, axis=1).view(np.uint8)
    return hashlib.sha256(federation.gather_rows(rows).tobytes()).hexdigest()[:12]


def client_codes(federation: Federation) -> ClientCodes:
    """The codes of all clients. They are cached with the federation, whose arrays must not change.

    Examples:
        >>> from pfljax import data
        >>> codes = data.client_codes(data.digits(num_clients=4))
        >>> codes.x.shape
        (4,)
    """
    if federation in _client_codes:
        return _client_codes[federation]
    x = np.zeros(len(federation.train.y), np.uint64)
    y = np.zeros_like(x)
    pool_codes: dict[int, np.ndarray] = {}
    for name in SPLITS:
        split: Split = getattr(federation, name)
        size = np.asarray(split.size)[federation.local_rows]
        for position in range(split.y.shape[1]):
            is_example = position < size
            for leaf in jax.tree.leaves(split.x, is_leaf=is_pooled):
                leaf_codes = _codes(leaf, is_example, position, pool_codes)
                x[is_example] = mixed_bits(x[is_example] ^ leaf_codes)
            target_codes = _codes(split.y, is_example, position, pool_codes)
            y[is_example] = mixed_bits(y[is_example] ^ target_codes)
    as_bytes = np.stack([x, y], axis=1).view(np.uint8)  # JAX may not send 64-bit integers
    codes = federation.gather_rows(as_bytes).view(np.uint64)
    _client_codes[federation] = ClientCodes(codes[:, 0], codes[:, 1])
    return _client_codes[federation]


def input_codes(federation: Federation, split: str) -> np.ndarray:
    """A code of each example's x, before it is scaled.

    Examples have the same code if, and up to chance only if, their x are equal.

    Args:
        federation: The clients.
        split: "train", "validation" or "test".

    Returns:
        (K, n_max) uint64 for the clients in this process; 0: padding.
    """
    stacked: Split = getattr(federation, split)
    size = np.asarray(stacked.size[federation.local_rows])
    arrays = jax.tree.leaves(stacked.x, is_leaf=is_pooled)
    pool_codes: dict[int, np.ndarray] = {}
    codes = np.zeros(stacked.y.shape[:2], np.uint64)
    for position in range(stacked.y.shape[1]):
        is_example = position < size
        for examples in arrays:
            example_codes = _codes(examples, is_example, position, pool_codes)
            codes[is_example, position] = mixed_bits(codes[is_example, position] ^ example_codes)
    return codes


@renamed_arguments(part="split")
def distinct_codes(federations: Iterable[Federation], split: str) -> np.ndarray:
    """Codes of the x of several federations' examples, which tell whether two splits have an example in common.

    Args:
        federations: Clients in all processes.
        split: "train", "validation" or "test".

    Returns:
        (n,) uint64, the different codes, sorted; see `input_codes`.

    Examples:
        >>> import numpy as np
        >>> from pfljax import data
        >>> clients = data.sine(num_clients=4)
        >>> tests = data.distinct_codes([clients], "test")
        >>> np.intersect1d(tests, data.distinct_codes([clients], "train")).size
        0
    """
    codes = []
    for federation in federations:
        all_codes = federation.gather_rows(input_codes(federation, split))
        codes.append(all_codes.ravel())
    padding = np.zeros(1, np.uint64)
    return np.setdiff1d(np.concatenate(codes), padding)


def _codes(
    examples: Examples, is_example: np.ndarray, position: int, pool_codes: dict[int, np.ndarray]
) -> np.ndarray:
    """Codes (m,) uint64 of the clients' examples at one position.

    Args:
        examples: Stacked examples (K, n_max, ...).
        is_example: (K,) bool, the m clients that have an example there.
        position: The position.
        pool_codes: Caches the codes of each pool.
    """
    if is_pooled(examples):
        key = id(examples.pool)
        if key not in pool_codes:
            pool_codes[key] = _row_codes(examples)
        return pool_codes[key][examples.index[is_example, position]]
    rows = examples[is_example, position]
    # One number per example
    if examples.ndim == 2:
        return mixed_bits(rows.astype(np.float64).view(np.uint64))
    return np.array([_code(row) for row in rows], np.uint64)


def _row_codes(examples: Pooled) -> np.ndarray:
    """(P,) uint64 codes of the pool's rows as they are read, block by block."""
    num_rows = len(examples.pool)
    codes = np.empty(num_rows, np.uint64)
    for start in range(0, num_rows, BLOCK):
        positions = np.arange(start, min(start + BLOCK, num_rows))
        codes[positions] = [_code(row) for row in examples.rows(positions)]
    return codes


def _code(row: np.ndarray) -> int:
    content = np.ascontiguousarray(row).data
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def inverse_frequency_weights(federation: Federation) -> tuple[float, ...]:
    """Class weights (C,) by the inverse of the shares p_c of all training labels.

    w_c ~ min(1, 1 / (C p_c)): classes rarer than average all get the same weight, so that weights are bounded. They are
    scaled to mean 1 over all training labels. For sequences, labels are characters. The weights that FedEM's authors
    use for Shakespeare follow the same rule with another limit and scale.

    Raises:
        ArgumentError: for a regression.

    Examples:
        >>> import pfljax as pfl
        >>> x = [[0.0], [1.0], [2.0], [3.0], [4.0]]
        >>> is_test = [False, False, False, False, True]
        >>> clients = pfl.Federation.from_arrays(x, [0, 0, 0, 1, 1], [0, 0, 0, 0, 0], is_test=is_test)
        >>> [round(weight, 3) for weight in pfl.data.inverse_frequency_weights(clients)]
        [0.889, 1.333]
    """
    if federation.task != "classification":
        raise ArgumentError("class_weights", "accepted only for classification")
    num_classes = federation.num_classes
    split = federation.train
    sizes = split.size[federation.local_rows]
    counts = np.zeros((len(sizes), num_classes), np.int32)
    for client, size in enumerate(sizes):
        labels = np.ravel(split.y[client][:size])
        # Ignored positions are no class.
        labels = labels[(labels >= 0) & (labels < num_classes)]
        counts[client] = np.bincount(labels, minlength=num_classes)
    share = federation.gather_rows(counts).sum(axis=0)
    share = share / max(share.sum(), 1)
    weights = 1 / np.maximum(num_classes * share, 1)
    return tuple((weights / (share @ weights)).tolist())


def heterogeneity(federation: Federation) -> float | None:
    """The clients' mean distance from the global label distribution: the mean over clients of sum_c |p_k(c) - p(c)|.

    p_k are the label shares in client k's training examples, p those in all clients'. Zhao et al. (2018) call it the
    earth mover's distance; it ranges from 0 to 2. None if there are no classes.

    Examples:
        >>> from pfljax import data
        >>> alike = data.digits(num_clients=8, partition=data.partitions.IID())
        >>> groups = data.digits(num_clients=8, partition=data.partitions.LabelGroups(groups=5))
        >>> data.heterogeneity(alike) < data.heterogeneity(groups)
        True
    """
    counts = federation.class_counts()
    if counts is None:
        return None
    size = counts.sum(axis=1)
    has_examples = size > 0
    client_shares = counts[has_examples] / size[has_examples, None]
    global_share = counts.sum(axis=0) / max(counts.sum(), 1)
    distances = np.abs(client_shares - global_share).sum(axis=1)
    return float(distances.mean())


def describe(federation: Federation, unseen: Federation | None = None) -> dict:
    """Data entries for reports: clients, examples per client and in total, classes per client, digests.

    "returned" says that validation examples were moved to the training split.

    Args:
        federation: The training clients.
        unseen: Clients held out of training.

    Examples:
        >>> from pfljax import data
        >>> summary = data.describe(data.digits(num_clients=10))
        >>> summary["clients"], summary["train"]["total"], summary["test"]["total"]
        (10, 1437, 360)
    """
    summary: dict[str, Any] = {}
    for name in SPLITS:
        size = np.asarray(getattr(federation, name).size)
        summary[name] = {"total": int(size.sum()), **_spread(size)}
    summary["clients"] = federation.num_clients
    summary["digest"] = digest(federation)
    if federation.validation_returned:
        summary["returned"] = True
    if unseen is not None:
        summary["unseen"] = digest(unseen)
    if federation.class_names:
        summary["class_names"] = list(federation.class_names)
    counts = federation.class_counts()
    if counts is not None:
        summary["classes_per_client"] = _spread((counts > 0).sum(axis=1))
    return summary


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "min": int(values.min()),
        "median": float(np.median(values)),
        "max": int(values.max()),
    }
