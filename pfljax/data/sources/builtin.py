"""Data sets that need no file: scikit-learn's digits, and synthetic data."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.data.sources.source import (
    Fraction,
    Source,
    dirichlet_draws,
    generator,
    subsample,
    subsample_splits,
)
from pfljax.settings.fields import NumClients, Seed, checked, hyperparameter

WHITE_DIGIT = 16  # largest value of a digit's pixel
SINE_EXAMPLES = 20  # a client's examples of the sine curve, training and test together
SINE_NOISE = 0.1  # standard deviation of the noise on the sine curve
SYNTHETIC_FEATURES = 150
SYNTHETIC_TRAIN = (50, 1000)  # minimum and maximum number of training examples of a client
SYNTHETIC_TEST = 5000  # a client's test examples, unless test_examples is given
# standard deviation of the noise on the linear score that determines the class
SYNTHETIC_NOISE = 0.1
PUBLISHED_SEED = 12345  # seed of the synthetic data that FedEM's authors published

SyntheticLabels = Literal["mixture", "published"]


@checked()
def digits(*, seed: Seed = 0, fraction: Fraction = 1.0) -> Source:
    """Returns scikit-learn's 1,797 digit images of 8 x 8 pixels, scaled to [0, 1].

    Args:
        seed: Seed for the subsample.
        fraction: Fraction of the examples to keep, sampled uniformly.

    Examples:
        >>> from pfljax.data import sources
        >>> sources.digits(fraction=0.5).x.shape
        (898, 8, 8, 1)
    """
    images, labels = read_digits()
    rows = subsample(generator(seed, "load"), len(labels), fraction)
    x = (images[rows] / WHITE_DIGIT).astype(np.float32)
    return Source(
        x=x.reshape(-1, 8, 8, 1),
        y=labels[rows].astype(np.int32),
        client=None,
        is_test=None,
        num_classes=10,
        task="classification",
        name="digits",
    )


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels (1797, 64) from 0 to 16, and classes."""
    # Importing scikit-learn takes longer than training on its digits.
    installed = importlib.metadata.distribution("scikit-learn")
    file = Path(str(installed.locate_file("sklearn/datasets/data/digits.csv.gz")))
    if file.exists():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.asarray(images), np.asarray(labels)


@checked()
def sine(num_clients: NumClients = 16, *, seed: Seed = 0, fraction: Fraction = 1.0) -> Source:
    """Generates noisy points of one period of the sine, each client on its own interval (FedeRiCo, Figure 1).

    x is the angle mapped to [-1, 1], so that one learning rate suits the linear models of all intervals.

    Args:
        num_clients: K, the number of successive intervals of the period.
        seed: Seed for the points and the subsample.
        fraction: The share of the examples to keep, drawn uniformly.

    Examples:
        >>> from pfljax.data import sources
        >>> source = sources.sine(num_clients=4)
        >>> source.x.shape, source.task
        ((80, 1), 'regression')
    """
    rng = generator(seed, "load")
    client = np.repeat(np.arange(num_clients), SINE_EXAMPLES)
    x = 2 * (client + rng.random(client.shape)) / num_clients - 1
    y = np.sin(np.pi * (x + 1)) + SINE_NOISE * rng.standard_normal(client.shape)
    rows = subsample(rng, len(y), fraction)
    return Source(
        x=x[rows, None].astype(np.float32),
        y=y[rows].astype(np.float32),
        client=client[rows],
        is_test=None,
        num_classes=1,
        task="regression",
        name="sine",
        group=np.arange(num_clients),
    )


@checked()
def synthetic(
    num_clients: NumClients = 300,
    *,
    groups: Annotated[
        int, hyperparameter(at_least=1, help="number of components of the mixture")
    ] = 3,
    alpha: Annotated[float, hyperparameter(above=0)] = 0.4,
    labels: SyntheticLabels = "mixture",
    test_examples: Annotated[int, hyperparameter(at_least=0)] = 0,
    seed: Seed = 0,
    fraction: Fraction = 1.0,
) -> Source:
    """Generates a mixture of M tasks (FedEM, Appendix I.1): the class is the sign of one of M linear scores.

    Each client has its own shares of the M components, and an example's component determines its class. Each client's
    training and test examples come from separate random streams, so the number of one does not change the other.

    Args:
        num_clients: K.
        groups: M, number of components, each a linear rule.
        alpha: Dirichlet concentration of the clients' shares.
        labels: "published" is the data that the paper's authors published, whose generator has a bug that makes a
            quarter of the labels constant.
        test_examples: Number of test examples per client; 0: 5,000.
        seed: Seed for all draws; with published data, only for the subsample.
        fraction: The share of the examples to keep, drawn uniformly.

    Examples:
        >>> from pfljax.data import sources
        >>> source = sources.synthetic(num_clients=3, groups=2, test_examples=10)
        >>> source.x.shape[1], int(source.is_test.sum()), source.group.shape
        (150, 30, (3,))
    """
    num_tests = test_examples or SYNTHETIC_TEST
    if labels == "published":
        return published_synthetic(num_clients, groups, alpha, num_tests, seed, fraction)
    rng = generator(seed, "load")
    least, most = SYNTHETIC_TRAIN
    theta = rng.uniform(-1, 1, (groups, SYNTHETIC_FEATURES)).astype(np.float32)
    share = dirichlet_draws(rng, num_clients, groups, alpha)
    num_train = np.minimum(least + rng.lognormal(4, 2, num_clients).astype(int), most)
    sizes = np.stack([num_train, np.full_like(num_train, num_tests)], axis=1)
    x = np.empty((sizes.sum(), SYNTHETIC_FEATURES), np.float32)
    y = np.empty(len(x), np.int32)
    ends = np.cumsum(sizes)
    streams = generator(seed, "examples").spawn(len(ends))
    starts = ends - sizes.ravel()
    # Blocks alternate: a client's training examples, then its test examples.
    for number, (start, end, rng) in enumerate(zip(starts, ends, streams, strict=True)):
        count = rng.multinomial(end - start, share[number // 2])
        component = rng.permutation(np.repeat(np.arange(groups), count))

        # x ~ U(-1, 1), drawn in place: at full size, the examples take a gigabyte
        block = x[start:end]
        rng.random(out=block, dtype=np.float32)
        block *= 2
        block -= 1

        # y = [<x, theta_m> + noise > 0]
        score = np.take_along_axis(block @ theta.T, component[:, None], axis=1)[:, 0]
        noise = SYNTHETIC_NOISE * rng.standard_normal(len(score))
        y[start:end] = score + noise > 0
    return _synthetic_source(x, y, sizes, share, "synthetic", seed, fraction)


def _synthetic_source(
    x: np.ndarray,
    y: np.ndarray,
    sizes: np.ndarray,
    share: np.ndarray,
    name: str,
    seed: int,
    fraction: float,
) -> Source:
    """A source of examples that are in order of clients.

    Args:
        x: (n, F) examples.
        y: (n,) classes.
        sizes: (K, 2) numbers of training and test examples, which follow each other.
        share: (K, M) the clients' shares of the components.
        name: Name for titles.
        seed: Seed of the subsample.
        fraction: Share of the examples to keep.
    """
    client = np.repeat(np.arange(len(sizes)), sizes.sum(axis=1))
    is_test = np.repeat(np.arange(sizes.size) % 2 == 1, sizes.ravel())
    rows = subsample_splits(seed, is_test, fraction)
    return Source(
        x=x[rows],
        y=y[rows],
        client=client[rows],
        is_test=is_test[rows],
        num_classes=2,
        task="classification",
        name=name,
        group=share.argmax(axis=1),
    )


def published_synthetic(
    num_clients: int, groups: int, alpha: float, test_examples: int, seed: int, fraction: float
) -> Source:
    """Generates the synthetic data that FedEM's authors published, with the same draws as their code; see `synthetic`.

    Their generator has a bug: component m labels the client's first count[m] examples, not those after the examples of
    component m - 1. So components overwrite each other's labels, and examples that no component reaches have class 0.
    With other than 5,000 test examples, the later clients' data differ. The seed is that of the subsample.
    """
    # For smaller values, all of a client's shares may underflow.
    if not 0.01 <= alpha < np.inf:
        raise ArgumentError("alpha", "accepted for the published data: 0.01 or more", alpha)
    rng = np.random.RandomState(PUBLISHED_SEED)
    least, most = SYNTHETIC_TRAIN
    num_train = np.minimum(least + rng.lognormal(4, 2, num_clients).astype(int), most)
    share = rng.dirichlet(np.full(groups, alpha), num_clients)
    theta = rng.uniform(-1, 1, (groups, SYNTHETIC_FEATURES))
    sizes = np.stack([num_train, np.full_like(num_train, test_examples)], axis=1)
    x = np.empty((sizes.sum(), SYNTHETIC_FEATURES), np.float32)
    y = np.zeros(len(x), np.int32)
    ends = np.cumsum(sizes)
    starts = ends - sizes.ravel()
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        count = rng.multinomial(end - start, share[number // 2])
        block = rng.uniform(-1, 1, (end - start, SYNTHETIC_FEATURES))
        label = y[start:end]
        # The bug: a component always starts at the first example.
        for size, component in zip(count, theta, strict=True):
            score = block[:size] @ component
            label[:size] = score + rng.normal(scale=SYNTHETIC_NOISE, size=size) > 0
        order = rng.permutation(end - start)
        x[start:end] = block[order]
        y[start:end] = label[order]
    name = "synthetic, published labels"
    return _synthetic_source(x, y, sizes, share, name, seed, fraction)
