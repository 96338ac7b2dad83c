"""Data sets by name, divided among clients.

Every function takes the fields of `Splits` as further keyword arguments, such as `train_examples=15`.
"""

from __future__ import annotations

from typing import Any

from pfljax.data import sources
from pfljax.data.federation import Federation, load
from pfljax.data.partitions import Partition
from pfljax.data.sources.builtin import SyntheticLabels
from pfljax.data.splits import Splits, make_splits


def digits(
    num_clients: int = 16,
    partition: Partition | None = None,
    *,
    fraction: float = 1.0,
    seed: int = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """The 1,797 images of 8 x 8 pixels that scikit-learn carries, scaled to [0, 1].

    Args:
        num_clients: K.
        partition: Who gets which images; None: two label groups.
        fraction: The share of the images to use.
        seed: Decides everything.
        splits: How each client's examples are split.
        **options: Fields of `Splits`, in place of those of `splits`.
    """
    splits = make_splits(splits, options)
    return load(sources.digits(seed=seed, fraction=fraction), partition, splits, num_clients=num_clients, seed=seed)


def sine(
    num_clients: int = 16,
    partition: Partition | None = None,
    *,
    fraction: float = 1.0,
    seed: int = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """Noisy points of one period of the sine, each client on its own interval (FedeRiCo, Figure 1): a regression.

    Args:
        num_clients: K.
        partition: Who gets which points; None: each client those of its interval.
        fraction: The share of the points to use.
        seed: Decides everything.
        splits: How each client's examples are split.
        **options: Fields of `Splits`, in place of those of `splits`.
    """
    splits = make_splits(splits, options)
    source = sources.sine(num_clients, seed=seed, fraction=fraction)
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


def synthetic(
    num_clients: int = 300,
    partition: Partition | None = None,
    *,
    components: int = 3,
    alpha: float = 0.4,
    labels: SyntheticLabels = "mixture",
    fraction: float = 1.0,
    seed: int = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """Two classes by linear rules, of which each client has a mixture of its own (FedEM, Appendix I.1).

    Args:
        num_clients: K.
        partition: Who gets which examples; None: each client those that were drawn for it.
        components: M, how many rules there are.
        alpha: Concentration of the clients' shares in them.
        labels: "published" is the data that the paper's authors published (see `sources.synthetic`).
        fraction: The share of the examples to use.
        seed: Decides everything.
        splits: How each client's examples are split; None: the test examples are those that were drawn as such,
            `test_examples` for each client (5,000 unless it is given).
        **options: Fields of `Splits`, in place of those of `splits`.
    """
    splits = make_splits(splits, options, official_test=True)
    source = sources.synthetic(
        num_clients,
        components=components,
        alpha=alpha,
        labels=labels,
        test_examples=splits.test_examples,
        seed=seed,
        fraction=fraction,
    )
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


def npz(
    file: str,
    num_clients: int | None = None,
    partition: Partition | None = None,
    *,
    fraction: float = 1.0,
    standardize: bool = True,
    task: str = "auto",
    seed: int = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """The examples of an npz file: x, y and, optionally, client or writer, coarse and is_test (see `sources.npz`).

    Examples for which is_test holds are the clients' test examples, unless `official_test=False` or a `test_fraction`
    is given.

    Args:
        file: Its path.
        num_clients: K; None: all clients in the file, 16 if it names none.
        partition: Who gets which examples; None: natural where the file names clients, else two label groups (at
            random for a regression).
        fraction: The share of the examples to use.
        standardize: Whether each feature (each channel of images) gets mean 0 and standard deviation 1.
        task: "classification", "regression", or "auto": float targets make a regression.
        seed: Decides everything.
        splits: How each client's examples are split.
        **options: Fields of `Splits`, in place of those of `splits`.
    """
    source = sources.npz(file, seed=seed, fraction=fraction, standardize=standardize, task=task)
    official = source.is_test is not None and "test_fraction" not in options
    splits = make_splits(splits, options, official_test=official)
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


def text(
    file: str,
    num_clients: int | None = None,
    partition: Partition | None = None,
    *,
    stride: int = 1,
    fraction: float = 1.0,
    seed: int = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """The roles of a play, each a client that speaks character by character (see `sources.text`).

    Args:
        file: A text of blocks "NAME:" and lines.
        num_clients: K; None: all roles.
        partition: Who gets which windows of text; None: each role its own.
        stride: How many characters the windows are apart.
        fraction: The share of the windows to use.
        seed: Decides everything.
        splits: How each client's examples are split; None: the last fifth of each role's lines are for testing.
        **options: Fields of `Splits`, in place of those of `splits`.
    """
    splits = make_splits(splits, options, official_test=True)
    source = sources.text(file, stride=stride, seed=seed, fraction=fraction)
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


def tfds(
    name: str,
    num_clients: int | None = None,
    partition: Partition | None = None,
    *,
    data_dir: str | None = None,
    fraction: float = 1.0,
    standardize: bool = True,
    task: str = "auto",
    seed: int = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """A prepared data set of TFDS, such as "mnist" (see `sources.tfds`).

    Args:
        name: Its name in TFDS.
        num_clients: K; None: all clients that the data set names, 16 if it names none.
        partition: Who gets which examples; None: natural where the data set names clients, else two label groups.
        data_dir: Where TFDS keeps its prepared data sets; None: its own default.
        fraction: The share of the examples to use.
        standardize: Whether each feature (each channel of images) gets mean 0 and standard deviation 1.
        task: "classification", "regression", or "auto": float targets make a regression.
        seed: Decides everything.
        splits: How each client's examples are split.
        **options: Fields of `Splits`, in place of those of `splits`.
    """
    splits = make_splits(splits, options)
    source = sources.tfds(name, data_dir=data_dir, seed=seed, fraction=fraction, standardize=standardize, task=task)
    return load(source, partition, splits, num_clients=num_clients, seed=seed)
