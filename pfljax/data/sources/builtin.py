"""Data sets that need no file: scikit-learn's digits, and what is drawn here."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.data.sources.source import Source, dirichlet_draws, generator, subsample, subsample_parts, unknown

SINE_EXAMPLES = 20  # a client's examples of the sine curve, training and test part together
SINE_NOISE = 0.1  # standard deviation of the noise on the sine curve
SYNTHETIC_FEATURES = 150
SYNTHETIC_TRAIN = (50, 1000)  # the least and the most training examples of a client
SYNTHETIC_TEST = 5000  # a client's test examples, unless test_examples says otherwise
SYNTHETIC_NOISE = 0.1  # standard deviation of the noise on the linear score that decides the class
PUBLISHED_SEED = 12345  # of the synthetic data that FedEM's authors published

SyntheticLabels = Literal["mixture", "published"]


def digits(*, seed: int = 0, fraction: float = 1.0) -> Source:
    """The 1,797 images of 8 x 8 pixels that scikit-learn carries, scaled to [0, 1].

    Args:
        seed: Decides the subsample.
        fraction: The share of the examples to keep, drawn uniformly.
    """
    images, labels = read_digits()
    rows = subsample(generator(seed, "load"), len(labels), fraction)
    x = (images[rows] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return Source(x, labels[rows].astype(np.int32), None, None, 10, "classification", "digits")


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 64) from 0 to 16, and classes."""
    # Importing scikit-learn takes longer than training on its digits.
    installed = importlib.metadata.distribution("scikit-learn")
    file = Path(str(installed.locate_file("sklearn/datasets/data/digits.csv.gz")))
    if file.exists():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.asarray(images), np.asarray(labels)


def sine(num_clients: int = 16, *, seed: int = 0, fraction: float = 1.0) -> Source:
    """Noisy points of one period of the sine, each client on its own interval (FedeRiCo, Figure 1).

    x is the angle mapped to [-1, 1], so that the linear models of all intervals train at one rate.

    Args:
        num_clients: K, into how many successive intervals the period is divided.
        seed: Decides the points and the subsample.
        fraction: The share of the examples to keep, drawn uniformly.
    """
    if num_clients < 1:
        raise ArgumentError("num_clients", "accepted: 1 or more", num_clients)
    rng = generator(seed, "load")
    client = np.repeat(np.arange(num_clients), SINE_EXAMPLES)
    x = 2 * (client + rng.random(client.shape)) / num_clients - 1
    y = np.sin(np.pi * (x + 1)) + SINE_NOISE * rng.standard_normal(client.shape)
    rows = subsample(rng, len(y), fraction)
    x, y = x[rows, None].astype(np.float32), y[rows].astype(np.float32)
    return Source(x, y, client[rows], None, 1, "regression", "sine", np.arange(num_clients))


def synthetic(
    num_clients: int = 300,
    *,
    components: int = 3,
    alpha: float = 0.4,
    labels: SyntheticLabels = "mixture",
    test_examples: int = 0,
    seed: int = 0,
    fraction: float = 1.0,
) -> Source:
    """Two classes by the sign of a linear score, of which there are M: a mixture of M tasks (FedEM, Appendix I.1).

    Each client has its own shares in the M components, and every example the class that its component gives it. Each
    client's training and test examples come from random streams of their own, so that the size of one part leaves the
    other as it is.

    Args:
        num_clients: K.
        components: M.
        alpha: Concentration of the clients' shares in the components.
        labels: "published" is the data that the paper's authors published (see `published_synthetic`).
        test_examples: How many test examples are drawn for each client; 0 for 5,000.
        seed: Decides everything; of the published data only the subsample.
        fraction: The share of the examples to keep, drawn uniformly.
    """
    counts = {"num_clients": (num_clients, 1), "components": (components, 1), "test_examples": (test_examples, 0)}
    for argument, (value, low) in counts.items():
        if value < low:
            raise ArgumentError(argument, f"accepted: {low} or more", value)
    if labels not in get_args(SyntheticLabels):
        raise unknown("labels", labels, get_args(SyntheticLabels))
    if labels == "published":
        return published_synthetic(num_clients, components, alpha, test_examples or SYNTHETIC_TEST, seed, fraction)
    rng, (least, most) = generator(seed, "load"), SYNTHETIC_TRAIN
    theta = rng.uniform(-1, 1, (components, SYNTHETIC_FEATURES)).astype(np.float32)
    share = dirichlet_draws(rng, num_clients, components, alpha)
    train = np.minimum(least + rng.lognormal(4, 2, num_clients).astype(int), most)
    sizes = np.stack([train, np.full_like(train, test_examples or SYNTHETIC_TEST)], axis=1)
    x = np.empty((sizes.sum(), SYNTHETIC_FEATURES), np.float32)
    y = np.empty(len(x), np.int32)
    ends = np.cumsum(sizes)
    streams = generator(seed, "examples").spawn(len(ends))
    for part, (start, end, rng) in enumerate(zip(ends - sizes.ravel(), ends, streams, strict=True)):
        count = rng.multinomial(end - start, share[part // 2])
        component = rng.permutation(np.repeat(np.arange(components), count))
        block = x[start:end]  # drawn where it stays: at full size there is a gigabyte of examples
        rng.random(out=block, dtype=np.float32)
        block *= 2
        block -= 1
        score = np.take_along_axis(block @ theta.T, component[:, None], axis=1)[:, 0]
        y[start:end] = score + SYNTHETIC_NOISE * rng.standard_normal(len(score)) > 0
    client = np.repeat(np.arange(num_clients), sizes.sum(axis=1))
    is_test = np.repeat(np.arange(sizes.size) % 2 == 1, sizes.ravel())
    rows = subsample_parts(seed, is_test, fraction)
    return Source(x[rows], y[rows], client[rows], is_test[rows], 2, "classification", "synthetic", share.argmax(axis=1))


def published_synthetic(
    num_clients: int, components: int, alpha: float, test_examples: int, seed: int, fraction: float
) -> Source:
    """The synthetic data that FedEM's authors published, draw for draw as their code makes them.

    Their generator has a slip: component m labels the client's first count[m] examples, and not those after the ones
    of component m - 1. So components overwrite each other's labels, and the examples that none reaches are of class 0.

    Args:
        num_clients: K.
        components: M.
        alpha: Concentration of the clients' shares in the components.
        test_examples: A client's test examples; with others than 5,000 the later clients have other data.
        seed: Decides the subsample; the data have a seed of their own.
        fraction: The share of the examples to keep, drawn uniformly.
    """
    if not 0.01 <= alpha < np.inf:  # below, all of a client's shares may underflow
        raise ArgumentError("alpha", "accepted for the published data: 0.01 or more", alpha)
    rng, (least, most) = np.random.RandomState(PUBLISHED_SEED), SYNTHETIC_TRAIN
    train = np.minimum(least + rng.lognormal(4, 2, num_clients).astype(int), most)
    share = rng.dirichlet(np.full(components, alpha), num_clients)
    theta = rng.uniform(-1, 1, (components, SYNTHETIC_FEATURES))
    sizes = np.stack([train, np.full_like(train, test_examples)], axis=1)
    x = np.empty((sizes.sum(), SYNTHETIC_FEATURES), np.float32)
    y = np.zeros(len(x), np.int32)
    ends = np.cumsum(sizes)
    for part, (start, end) in enumerate(zip(ends - sizes.ravel(), ends, strict=True)):
        count = rng.multinomial(end - start, share[part // 2])
        block = rng.uniform(-1, 1, (end - start, SYNTHETIC_FEATURES))
        label = y[start:end]
        for number, own in zip(count, theta, strict=True):  # the slip: always from the first example on
            label[:number] = block[:number] @ own + rng.normal(scale=SYNTHETIC_NOISE, size=number) > 0
        order = rng.permutation(end - start)
        x[start:end], y[start:end] = block[order], label[order]
    client = np.repeat(np.arange(num_clients), sizes.sum(axis=1))
    is_test = np.repeat(np.arange(sizes.size) % 2 == 1, sizes.ravel())
    rows = subsample_parts(seed, is_test, fraction)
    name = "synthetic, published labels"
    return Source(x[rows], y[rows], client[rows], is_test[rows], 2, "classification", name, share.argmax(axis=1))
