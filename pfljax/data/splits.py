"""Splits of each client's examples into training, validation and test examples."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.data.dealing import Assignment
from pfljax.data.sources.source import generator, mixed_bits
from pfljax.settings.fields import hyperparameter, settings


@settings
class Splits:
    """Splits of each client's examples into training, validation and test examples.

    Attributes:
        test_fraction: Share of a client's examples for testing, if test examples are not given. With replacement, this
            share of every pool is set aside for testing for all clients; otherwise most of one client's test examples
            would be another's training examples.
        validation_fraction: Share of a client's training examples for validation; a client with a single one has no
            validation examples. On the command line, 0.2 if a method needs them, otherwise 0.25 while tuning.
        train_examples: Cap on a client's training and validation examples; 0: no cap.
        test_examples: Cap on a client's test examples; 0: no cap (synthetic: 5,000).
        official_test: Whether the source's own test examples are the clients' test examples. True for a file that
            has some, unless test_fraction is given.
        replacement: Whether clients share examples: each client draws `train_examples` training examples, and test
            examples in proportion, from its own label distribution; fewer if its pools have fewer, and none twice.
        targets: "own", or "shuffled", which permutes (validation, test) pairs among clients.
        by_time: Whether to split each client's examples by time instead of at random: the latest are for testing, those
            before for validation, and the earliest for training. A cap keeps the latest. Without times, the order of
            the examples counts. Official test examples stay such.

    Raises:
        ArgumentError: for a value that is not accepted, or replacement without train_examples.

    Examples:
        >>> from pfljax import data
        >>> splits = data.Splits(test_fraction=0.25, validation_fraction=0.2)
        >>> data.digits(num_clients=10, splits=splits)
        <digits, label_groups: 10 clients, 10 classes, x (8, 8, 1); 1,080 train, 270 validation, 447 test>
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
    by_time: bool = False

    def __post_init__(self):
        if self.replacement and self.by_time:
            raise ArgumentError("by_time", "accepted without replacement")
        if self.replacement and not self.train_examples:
            text = "needs train_examples of at least 1, the number each client draws"
            raise ArgumentError("replacement", text)


class SplitIds(NamedTuple):
    """The examples of one split.

    Attributes:
        ids: (n,) ids of the examples.
        owner: (n,) the client that has each, ascending.
    """

    ids: np.ndarray
    owner: np.ndarray


def make_splits(splits: Splits | None, options: dict[str, Any], **defaults: Any) -> Splits:
    """`splits` with some fields replaced by `options`; without `splits`, `defaults` set the remaining fields."""
    if splits is None:
        return Splits(**defaults | options)
    return dataclasses.replace(splits, **options)


def split_within_clients(
    assignment: Assignment, splits: Splits, seed: int, time: np.ndarray | None = None
) -> dict[str, SplitIds]:
    """Splits each client's examples at random or by time, or as the assignment marks them for testing.

    Args:
        assignment: The examples of each client.
        splits: How to split them.
        seed: Random seed.
        time: (n,) int64, the order of all examples in time; None: that of their ids.

    Returns:
        "train", "validation" and "test". Every client has at least one training and one test example.

    Raises:
        ArgumentError: if a client lacks official training or test examples.
    """
    num_clients = len(assignment.indices)
    ids = np.concatenate(assignment.indices)
    owner = np.repeat(np.arange(num_clients), [len(index) for index in assignment.indices])

    # Shuffle each client's examples, or begin with the latest.
    if splits.by_time:
        latest_first = np.lexsort((ids, ids if time is None else time[ids]))[::-1]
        lots = np.empty(len(ids), int)
        lots[latest_first] = np.arange(len(ids))
    elif assignment.is_test is None:
        lots = generator(seed, "split").random(len(ids))
    else:
        lots = _lots_by_split(seed, assignment.is_test[ids], owner, num_clients)
    ids = ids[np.lexsort((lots, owner))]

    # The test split is the first test_fraction of each client's examples, or the official one.
    if assignment.is_test is None:
        rank, size = _rank(owner, num_clients)
        num_tests = np.clip(np.rint(splits.test_fraction * size), 1, size - 1)
        is_test = rank < num_tests[owner]
    else:
        is_test = assignment.is_test[ids]
    test = SplitIds(ids[is_test], owner[is_test])
    rest = SplitIds(ids[~is_test], owner[~is_test])
    rank, size = _rank(rest.owner, num_clients)
    test_rank, test_size = _rank(test.owner, num_clients)
    incomplete = int(((size == 0) | (test_size == 0)).sum())
    if incomplete:
        text = f"{incomplete} of {num_clients} clients have no official training or test examples"
        advice = "turn it off to split each client's examples at random"
        raise ArgumentError("official_test", f"{text}; {advice}")

    # Validation examples come first among the other examples, then training examples.
    if splits.train_examples:
        size = np.minimum(size, splits.train_examples)
    least = int(splits.validation_fraction > 0)
    num_validation = np.clip(np.rint(splits.validation_fraction * size), least, size - 1)
    is_validation = rank < num_validation[rest.owner]
    is_train = ~is_validation & (rank < size[rest.owner])
    is_scored = test_rank < (splits.test_examples or len(ids))
    return {
        "train": SplitIds(rest.ids[is_train], rest.owner[is_train]),
        "validation": SplitIds(rest.ids[is_validation], rest.owner[is_validation]),
        "test": SplitIds(test.ids[is_scored], test.owner[is_scored]),
    }


def _lots_by_split(
    seed: int, is_test: np.ndarray, owner: np.ndarray, num_clients: int
) -> np.ndarray:
    """Random numbers (n,) uint64 that order examples.

    The order of one split depends neither on the other split nor on other clients.
    """
    lots = np.empty(len(owner), np.uint64)
    for purpose, rows in {"split": ~is_test, "split of the test part": is_test}.items():
        rank, _ = _rank(owner[rows], num_clients)
        lots[rows] = _lots(seed, purpose, owner[rows], rank)
    return lots


def _lots(seed: int, purpose: str, owner: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Random numbers (n,) uint64 of examples, each a function of the seed, the client and the example's rank there."""
    start = generator(seed, purpose).integers(2**64, dtype=np.uint64)
    by_client = mixed_bits(start + owner.astype(np.uint64))
    return mixed_bits(by_client + rank.astype(np.uint64))


def _rank(owner: np.ndarray, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Position (n,) of each example among its owner's, and number (K,) of examples per owner; `owner` (n,) ascends."""
    size = np.bincount(owner, minlength=num_clients)
    first = np.cumsum(size) - size
    return np.arange(len(owner)) - first[owner], size
