"""Splits of each client's examples into training, validation and test parts."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.data.dealing import Assignment
from pfljax.data.sources.source import generator, mixed_bits
from pfljax.settings.fields import hyperparameter, settings


@settings
class Splits:
    """Splits of each client's examples into training, validation and test parts.

    Attributes:
        test_fraction: Share of a client's examples for testing, if test examples are not given. With replacement, this
            share of every pool is set aside for testing for all clients; otherwise most of one client's test examples
            would be another's training examples.
        validation_fraction: Share of a client's training part for validation; a client with a single training example
            has no validation examples. On the command line, 0.2 if a method needs them, otherwise 0.25 while tuning.
        train_examples: Cap on a client's training part, validation included; 0: no cap.
        test_examples: Cap on a client's test part; 0: no cap (synthetic: 5,000).
        official_test: Whether the source's own test examples are the clients' test examples. True for a file that
            has some, unless test_fraction is given.
        replacement: Whether clients share examples: each client draws `train_examples` training examples, and test
            examples in proportion, from its own label distribution; fewer if its pools have fewer, and none twice.
        targets: "own", or "shuffled", which permutes (validation, test) pairs among clients.
    """

    test_fraction: float = hyperparameter(
        0.2, above=0, below=1, read_with={"official_test": (False,), "replacement": (True,)}
    )
    validation_fraction: float = hyperparameter(0.0, at_least=0, below=1)
    train_examples: int = hyperparameter(0, at_least=0)
    test_examples: int = hyperparameter(0, at_least=0)
    official_test: bool = False
    replacement: bool = False
    targets: Literal["own", "shuffled"] = "own"

    def __post_init__(self):
        if self.replacement and not self.train_examples:
            raise ArgumentError(
                "replacement", "needs train_examples of at least 1, the number each client draws"
            )


def make_splits(splits: Splits | None, options: dict[str, Any], **defaults: Any) -> Splits:
    """`splits` with some fields replaced by `options`; without `splits`, `defaults` set the remaining fields."""
    return (
        Splits(**defaults | options) if splits is None else dataclasses.replace(splits, **options)
    )


def split_within_clients(
    assignment: Assignment, splits: Splits, seed: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Splits each client's examples into parts at random, or as the assignment marks them for testing.

    Every client has at least one training and one test example; otherwise raises `ArgumentError`. Returns "train",
    "validation" and "test": ids (n,) of their examples, and the clients (n,) that have them, ascending.
    """
    num_clients = len(assignment.indices)
    ids = np.concatenate(assignment.indices)
    owner = np.repeat(np.arange(num_clients), [len(own) for own in assignment.indices])
    given = assignment.is_test
    if given is None:
        lots = generator(seed, "split").random(len(ids))
    else:  # the order of one part depends neither on the other nor on other clients
        lots = np.empty(len(ids), np.uint64)
        for purpose, part in {"split": ~given[ids], "split of the test part": given[ids]}.items():
            lots[part] = _lots(seed, purpose, owner[part], _rank(owner[part], num_clients)[0])
    ids = ids[np.lexsort((lots, owner))]  # shuffled within each client
    if given is None:
        rank, size = _rank(owner, num_clients)
        test = rank < np.clip(np.rint(splits.test_fraction * size), 1, size - 1)[owner]
    else:
        test = given[ids]
    rank, size = _rank(owner[~test], num_clients)
    without = int(((size == 0) | (np.bincount(owner[test], minlength=num_clients) == 0)).sum())
    if without:
        raise ArgumentError(
            "official_test",
            f"{without} of {num_clients} clients have no official training or test examples; "
            "turn it off to split each client's examples at random",
        )
    if splits.train_examples:
        size = np.minimum(size, splits.train_examples)
    least = int(splits.validation_fraction > 0)
    held_out = np.clip(np.rint(splits.validation_fraction * size), least, size - 1)[owner[~test]]
    validation = rank < held_out
    train = (rank >= held_out) & (rank < size[owner[~test]])
    tested = _rank(owner[test], num_clients)[0] < (splits.test_examples or len(ids))
    return {
        "train": (ids[~test][train], owner[~test][train]),
        "validation": (ids[~test][validation], owner[~test][validation]),
        "test": (ids[test][tested], owner[test][tested]),
    }


def _lots(seed: int, purpose: str, owner: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Random numbers (n,) uint64 of examples, each a function of the seed, the client and the example's rank there."""
    start = generator(seed, purpose).integers(2**64, dtype=np.uint64)
    return mixed_bits(mixed_bits(start + owner.astype(np.uint64)) + rank.astype(np.uint64))


def _rank(owner: np.ndarray, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Position (n,) of each example among its owner's, and number (K,) of examples per owner; `owner` (n,) ascends."""
    size = np.bincount(owner, minlength=num_clients)
    return np.arange(len(owner)) - (np.cumsum(size) - size)[owner], size
