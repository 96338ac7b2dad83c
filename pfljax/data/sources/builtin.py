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
    subsample_parts,
)
from pfljax.settings.fields import NumClients, Seed, checked, hyperparameter

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
    """
    images, labels = read_digits()
    rows = subsample(generator(seed, "load"), len(labels), fraction)
    x = (images[rows] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return Source(x, labels[rows].astype(np.int32), None, None, 10, "classification", "digits")


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
    """
    rng = generator(seed, "load")
    client = np.repeat(np.arange(num_clients), SINE_EXAMPLES)
    x = 2 * (client + rng.random(client.shape)) / num_clients - 1
    y = np.sin(np.pi * (x + 1)) + SINE_NOISE * rng.standard_normal(client.shape)
    rows = subsample(rng, len(y), fraction)
    x = x[rows, None].astype(np.float32)
    y = y[rows].astype(np.float32)
    return Source(x, y, client[rows], None, 1, "regression", "sine", np.arange(num_clients))


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
    training and test examples come from separate random streams, so the size of one part does not change the other.

    Args:
        num_clients: K.
        groups: M, number of components, each a linear rule.
        alpha: Dirichlet concentration of the clients' shares.
        labels: "published" is the data that the paper's authors published, whose generator has a bug that makes a
            quarter of the labels constant.
        test_examples: Number of test examples per client; 0: 5,000.
        seed: Seed for all draws; with published data, only for the subsample.
        fraction: The share of the examples to keep, drawn uniformly.
    """
    if labels == "published":
        return published_synthetic(
            num_clients, groups, alpha, test_examples or SYNTHETIC_TEST, seed, fraction
        )
    rng = generator(seed, "load")
    (least, most) = SYNTHETIC_TRAIN
    theta = rng.uniform(-1, 1, (groups, SYNTHETIC_FEATURES)).astype(np.float32)
    share = dirichlet_draws(rng, num_clients, groups, alpha)
    train = np.minimum(least + rng.lognormal(4, 2, num_clients).astype(int), most)
    sizes = np.stack([train, np.full_like(train, test_examples or SYNTHETIC_TEST)], axis=1)
    x = np.empty((sizes.sum(), SYNTHETIC_FEATURES), np.float32)
    y = np.empty(len(x), np.int32)
    ends = np.cumsum(sizes)
    streams = generator(seed, "examples").spawn(len(ends))
    for part, (start, end, rng) in enumerate(zip(ends - sizes.ravel(), ends, streams, strict=True)):
        count = rng.multinomial(end - start, share[part // 2])
        component = rng.permutation(np.repeat(np.arange(groups), count))
        block = x[start:end]  # drawn in place: at full size, the examples take a gigabyte
        rng.random(out=block, dtype=np.float32)
        block *= 2
        block -= 1
        score = np.take_along_axis(block @ theta.T, component[:, None], axis=1)[:, 0]
        y[start:end] = score + SYNTHETIC_NOISE * rng.standard_normal(len(score)) > 0
    client = np.repeat(np.arange(num_clients), sizes.sum(axis=1))
    is_test = np.repeat(np.arange(sizes.size) % 2 == 1, sizes.ravel())
    rows = subsample_parts(seed, is_test, fraction)
    return Source(
        x[rows],
        y[rows],
        client[rows],
        is_test[rows],
        2,
        "classification",
        "synthetic",
        share.argmax(axis=1),
    )


def published_synthetic(
    num_clients: int, groups: int, alpha: float, test_examples: int, seed: int, fraction: float
) -> Source:
    """Generates the synthetic data that FedEM's authors published, with the same draws as their code; see `synthetic`.

    Their generator has a bug: component m labels the client's first count[m] examples, not those after the examples of
    component m - 1. So components overwrite each other's labels, and examples that no component reaches have class 0.
    With other than 5,000 test examples, the later clients' data differ. The seed is that of the subsample.
    """
    if not 0.01 <= alpha < np.inf:  # for smaller values, all of a client's shares may underflow
        raise ArgumentError("alpha", "accepted for the published data: 0.01 or more", alpha)
    rng = np.random.RandomState(PUBLISHED_SEED)
    (least, most) = SYNTHETIC_TRAIN
    train = np.minimum(least + rng.lognormal(4, 2, num_clients).astype(int), most)
    share = rng.dirichlet(np.full(groups, alpha), num_clients)
    theta = rng.uniform(-1, 1, (groups, SYNTHETIC_FEATURES))
    sizes = np.stack([train, np.full_like(train, test_examples)], axis=1)
    x = np.empty((sizes.sum(), SYNTHETIC_FEATURES), np.float32)
    y = np.zeros(len(x), np.int32)
    ends = np.cumsum(sizes)
    for part, (start, end) in enumerate(zip(ends - sizes.ravel(), ends, strict=True)):
        count = rng.multinomial(end - start, share[part // 2])
        block = rng.uniform(-1, 1, (end - start, SYNTHETIC_FEATURES))
        label = y[start:end]
        # the bug: always starts at the first example
        for number, own in zip(count, theta, strict=True):
            label[:number] = (
                block[:number] @ own + rng.normal(scale=SYNTHETIC_NOISE, size=number) > 0
            )
        order = rng.permutation(end - start)
        x[start:end] = block[order]
        y[start:end] = label[order]
    client = np.repeat(np.arange(num_clients), sizes.sum(axis=1))
    is_test = np.repeat(np.arange(sizes.size) % 2 == 1, sizes.ravel())
    rows = subsample_parts(seed, is_test, fraction)
    name = "synthetic, published labels"
    return Source(
        x[rows],
        y[rows],
        client[rows],
        is_test[rows],
        2,
        "classification",
        name,
        share.argmax(axis=1),
    )
