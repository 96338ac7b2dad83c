"""A data set as plain arrays, before it is divided among clients."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.core.types import Task

PAD_TOKEN = 255  # target where a sequence has no character to predict: never trained on, left out of means


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A data set of n examples.

    Attributes:
        x: (n, *features) float32, images (n, height, width, channels); or (n, T) uint8 tokens of a sequence.
        y: (n,) int32 classes, or float32 targets of a regression; (n, T) uint8 classes for sequences, PAD_TOKEN
            where there is nothing to predict.
        client: (n,) int64, the client of each example, 0..K-1; None where the data set has no natural clients.
        is_test: (n,) bool, the official test examples; None where there are none.
        num_classes: Classes C; 1 for a regression.
        task: "classification" or "regression".
        name: For titles.
        distribution: (K,) the true distribution of each natural client, where it is known.
        coarse: (n,) int32, the coarse label of each example (the superclass of its class), where there is one.
        class_names: The names of the classes, where the data set's labels are strings.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None
    is_test: np.ndarray | None
    num_classes: int
    task: Task
    name: str
    distribution: np.ndarray | None = None
    coarse: np.ndarray | None = None
    class_names: tuple[str, ...] = ()


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A random generator of its own for every purpose, so that no two choices share their draws.

    Raises:
        ArgumentError: if the seed is negative.
    """
    if seed < 0:
        raise ArgumentError("seed", "accepted: integers from 0", seed)
    return np.random.default_rng([seed, *purpose.encode()])


def subsample(rng: np.random.Generator, n: int, fraction: float) -> np.ndarray | slice:
    """Which of n examples to keep: a uniform subsample, ascending; a slice of all, which copies nothing, for 1.

    Raises:
        ArgumentError: if the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ArgumentError("fraction", "accepted: a share in (0, 1]", fraction)
    size = max(1, round(fraction * n))
    return np.sort(rng.choice(n, size, replace=False)) if size < n else slice(None)


def subsample_parts(seed: int, is_test: np.ndarray, fraction: float) -> np.ndarray | slice:
    """As `subsample`, of the training and of the test part, each by a random stream of its own."""
    kept = np.zeros(len(is_test), bool)
    for purpose, part in {"subsample": ~is_test, "subsample of the test part": is_test}.items():
        kept[np.flatnonzero(part)[subsample(generator(seed, purpose), part.sum(), fraction)]] = True
    return slice(None) if kept.all() else kept


def dirichlet_draws(rng: np.random.Generator, draws: int, size: int, alpha: float) -> np.ndarray:
    """(draws, size) shares, each row a symmetric Dirichlet draw of which no share is exactly 0.

    Raises:
        ArgumentError: if the concentration is not positive and finite.
    """
    if not 0 < alpha < np.inf:
        raise ArgumentError("alpha", "accepted: positive numbers", alpha)
    return rng.dirichlet(np.full(size, alpha), size=draws) * (1 - 1e-12) + 1e-12 / size


def unknown(argument: str, name: str, accepted: Iterable[str]) -> ArgumentError:
    """The error for a name that is not one of `accepted`, with the nearest names."""
    accepted = list(accepted)
    near = difflib.get_close_matches(name, accepted)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return ArgumentError(argument, f"unknown{hint}; accepted: {', '.join(accepted)}", name)
