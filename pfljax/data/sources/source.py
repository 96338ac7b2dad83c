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


def _is_none(leaf: Any) -> bool:
    return leaf is None


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
            if mean is None or std is None:
                return x
            return standardized(np.asarray(x), mean, std)

        return jax.tree.map(scaled, self.mean, self.std, x, is_leaf=_is_none)


class Features(NamedTuple):
    """The columns of an x (n, F) that was a table.

    Attributes:
        names: Name of each column; COLUMN=CATEGORY for one of a categorical column.
        one_hot: (F,) bool, whether a column says if an example has a category. It is never scaled, and it is left out
            if no training example has the category.
        complete: Whether all columns stay, since they are those of another table.
    """

    names: tuple[str, ...]
    one_hot: np.ndarray
    complete: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A data set of n examples, before it is divided among K clients.

    Attributes:
        x: Features (n, *features) as the data set has them, not scaled, for images (n, height, width, channels); or
            tokens of sequences, int32 or uint8 (n, T); or a tree of such arrays.
        y: Classes, int32 (n,); regression targets, float32 (n,); or for sequences, classes, uint8 (n, T), with
            `PAD_TOKEN` at positions without a character to predict.
        client: (n,) int64, the client of each example, 0..K-1; None: the data set has no natural clients.
        is_test: (n,) bool, whether each example is an official test example; None: there are none.
        num_classes: C; 1 for regression.
        task: "classification", "regression" or "multilabel".
        name: Name for titles.
        group: (K,) true group of each natural client; None: unknown.
        coarse: (n,) int32, coarse label of each example (the superclass of its class); None: there are none.
        class_names: Names of the classes, if the data set's labels are strings.
        client_names: (K,) the data set's own ids of clients 0..K-1, strings or integers; None: they are the numbers.
        tokens: Whether uint8 in x are tokens; otherwise they are numbers, such as pixels.
        standardize: For each array in x, whether models standardize it, by what is measured once the training examples
            are known (see `preparation`); (): no array is standardized.
        fill: Whether NaN in x are replaced by the mean of the training examples, once these are known.
        features: The columns of x, if the data set is a table.
        time: (n,) int64, the order of the examples in time, equal for those of one time; None: unknown.
        channels_first: Whether images in x are (n, channels, height, width), as PyTorch's; likewise other arrays with
            more than two axes.

    Examples:
        >>> import numpy as np
        >>> from pfljax import data
        >>> source = data.sources.Source(
        ...     x=np.ones((4, 3), np.float32),
        ...     y=np.array([0, 1, 0, 1], np.int32),
        ...     client=np.array([0, 0, 1, 1]),
        ...     is_test=None,
        ...     num_classes=2,
        ...     task="classification",
        ...     name="ones",
        ... )
        >>> data.load(source)
        <ones, natural: 2 clients, 2 classes, x (3,); 2 train, 2 test>
    """

    x: Any
    y: np.ndarray
    client: np.ndarray | None
    is_test: np.ndarray | None
    num_classes: int
    task: Task
    name: str
    group: np.ndarray | None = None
    coarse: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    client_names: np.ndarray | None = None
    tokens: bool = False
    standardize: tuple[bool, ...] = ()
    fill: bool = False
    features: Features | None = None
    time: np.ndarray | None = None
    channels_first: bool = False


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
    if size >= n:
        return slice(None)
    return np.sort(rng.choice(n, size, replace=False))


def subsample_splits(seed: int, is_test: np.ndarray, fraction: float) -> np.ndarray | slice:
    """Like `subsample`, but samples training and test examples with separate random streams."""
    is_sampled = np.zeros(len(is_test), bool)
    for purpose, mask in {"subsample": ~is_test, "subsample of the test part": is_test}.items():
        rows = np.flatnonzero(mask)
        sampled = subsample(generator(seed, purpose), len(rows), fraction)
        is_sampled[rows[sampled]] = True
    return slice(None) if is_sampled.all() else is_sampled


def dirichlet_draws(rng: np.random.Generator, draws: int, size: int, alpha: float) -> np.ndarray:
    """Draws shares (draws, size). Each row is a symmetric Dirichlet sample in which no share is exactly 0."""
    shares = rng.dirichlet(np.full(size, alpha), size=draws)
    return shares * (1 - 1e-12) + 1e-12 / size
