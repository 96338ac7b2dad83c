"""A data set as plain arrays, before it is divided among clients."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.pooled import standardized
from pfljax.contract.types import PyTree, Task
from pfljax.settings.fields import hyperparameter

Fraction = Annotated[float, hyperparameter(above=0, at_most=1)]
WHITE = 255.0  # value of a white pixel
# target of positions without a character to predict: ignored in training and in means
PAD_TOKEN = 255


class Scaling(NamedTuple):
    """Statistics with which models standardize features, one per channel of images or per feature.

    Attributes:
        mean: Mean of the training examples, float64. If x is a tree, a tree with None for arrays that are not scaled.
        std: Their standard deviation; 1 for a constant feature.
    """

    mean: PyTree
    std: PyTree

    def __call__(self, x: PyTree) -> PyTree:
        """Standardizes examples (n, *features), or a tree of them: float32; arrays that are not scaled stay."""

        def scaled(mean: np.ndarray | None, std: np.ndarray | None, x: Any) -> Any:
            return x if mean is None or std is None else standardized(np.asarray(x), mean, std)

        return jax.tree.map(scaled, self.mean, self.std, x, is_leaf=lambda leaf: leaf is None)


class Features(NamedTuple):
    """The columns of an x (n, F) that was a table.

    Attributes:
        names: Name of each column; COLUMN=CATEGORY for one of a categorical column.
        one_hot: (F,) bool, whether a column says if an example has a category. It is never scaled, and it is left out
            if no training example has the category.
    """

    names: tuple[str, ...]
    one_hot: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A data set of n examples."""

    # Features (n, *features) as the data set has them, not scaled, for images (n, height, width, channels); or tokens
    # of sequences, int32 or uint8 (n, T); or a tree of such arrays
    x: Any
    # Classes, int32 (n,); regression targets, float32 (n,); or for sequences, classes, uint8 (n, T), with PAD_TOKEN at
    # positions without a character to predict
    y: np.ndarray
    # client of each example, 0..K-1, int64 (n,); None if the data set has no natural clients
    client: np.ndarray | None
    # whether each example is an official test example, bool (n,); None if there are none
    is_test: np.ndarray | None
    num_classes: int  # number of classes C; 1 for regression
    task: Task  # "classification" or "regression"
    name: str  # name for titles
    group: np.ndarray | None = None  # true group of each natural client (K,), if known
    # Coarse label of each example (the superclass of its class), int32 (n,), if available
    coarse: np.ndarray | None = None
    class_names: tuple[str, ...] = ()  # names of the classes, if the data set's labels are strings
    # The data set's own ids of clients 0..K-1, strings or integers (K,); None if they are the numbers
    client_names: np.ndarray | None = None
    # whether uint8 in x are tokens; otherwise they are numbers, such as pixels
    tokens: bool = False
    # For each array in x, whether models standardize it, by what is measured once the training examples are known (see
    # `preparation`); (): no array is standardized
    standardize: tuple[bool, ...] = ()
    # whether NaN in x are replaced by the mean of the training examples, once these are known
    fill: bool = False
    features: Features | None = None  # the columns of x, if the data set is a table


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Returns a separate random generator for every purpose, so that no two choices share their draws."""
    return np.random.default_rng([seed, *purpose.encode()])


def mixed_bits(values: np.ndarray) -> np.ndarray:
    """Makes every bit of a uint64 depend on all others.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (values ^ values >> np.uint64(31)) + np.uint64(0x9E3779B97F4A7C15)


def subsample(rng: np.random.Generator, n: int, fraction: float) -> np.ndarray | slice:
    """Samples which of n examples to keep: sorted indices; for fraction 1, a slice of all, which copies nothing."""
    size = max(1, round(fraction * n))
    return np.sort(rng.choice(n, size, replace=False)) if size < n else slice(None)


def subsample_parts(seed: int, is_test: np.ndarray, fraction: float) -> np.ndarray | slice:
    """Like `subsample`, but samples the training and test part with separate random streams."""
    kept = np.zeros(len(is_test), bool)
    for purpose, part in {"subsample": ~is_test, "subsample of the test part": is_test}.items():
        kept[np.flatnonzero(part)[subsample(generator(seed, purpose), part.sum(), fraction)]] = True
    return slice(None) if kept.all() else kept


def dirichlet_draws(rng: np.random.Generator, draws: int, size: int, alpha: float) -> np.ndarray:
    """Draws shares (draws, size). Each row is a symmetric Dirichlet sample in which no share is exactly 0."""
    return rng.dirichlet(np.full(size, alpha), size=draws) * (1 - 1e-12) + 1e-12 / size
