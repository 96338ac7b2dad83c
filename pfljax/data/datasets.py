"""Data sets by name, divided among clients.

Every function also accepts the fields of `Splits` as keyword arguments, such as `train_examples=15`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec

from pfljax.data import sources
from pfljax.data.federation import Federation, load
from pfljax.data.former import renamed_arguments
from pfljax.data.partitions import Choice
from pfljax.data.sources.arrays import TaskName
from pfljax.data.sources.builtin import SyntheticLabels
from pfljax.data.sources.formats import FORMATS
from pfljax.data.sources.source import Fraction
from pfljax.data.sources.torch_data import is_torch_data
from pfljax.data.splits import Splits, make_splits
from pfljax.data.variants import SIDE, split_unseen
from pfljax.settings import recorded
from pfljax.settings.fields import NumClients, Seed, checked, fields_of, hyperparameter

P = ParamSpec("P")
FORMER = {"kind": "format"}  # former name of an argument in records of runs -> its present name


def data_set(
    make: Callable[P, Federation], further: Sequence[Callable] = ()
) -> Callable[P, Federation]:
    """Checks a function's arguments, also those of `further`; its federations remember the call, if they can."""
    make = checked(options=[*further, Splits])(make)

    @functools.wraps(make)
    def call(*args: P.args, **options: P.kwargs) -> Federation:
        federation = make(*args, **options)
        arguments = inspect.signature(make).bind(*args, **options).arguments
        arguments |= arguments.pop("options", {})
        records = recorded.recordable(arguments)
        if records.keys() != arguments.keys():
            return federation
        return dataclasses.replace(federation, origin={make.__name__: records})

    return call


def made_again(origin: dict[str, dict[str, Any]]) -> Federation:
    """Repeats the call that a federation remembers."""
    ((name, records),) = origin.items()
    if name == SIDE:
        clients = made_again(records["of"])
        return split_unseen(clients, records["unseen"], records["seed"])[records["side"]]
    arguments = {}
    for argument, record in records.items():
        value = recorded.restored(record, "clients")
        arguments[FORMER.get(argument, argument)] = value
    return MAKERS[name](**arguments)


@data_set
def digits(
    num_clients: NumClients = 16,
    partition: Choice | None = None,
    *,
    fraction: Fraction = 1.0,
    seed: Seed = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """scikit-learn's 1,797 images of 8 x 8 pixels, scaled to [0, 1].

    Args:
        num_clients: K.
        partition: Partition of the images among clients; None: two label groups.
        fraction: Share of the images to use.
        seed: Random seed.
        splits: Splits of each client's examples.
        **options: Fields of `Splits` that override those of `splits`.

    Examples:
        >>> from pfljax import data
        >>> data.digits(num_clients=20, partition=data.partitions.Dirichlet(alpha=0.3))
        <digits, dirichlet: 20 clients, 10 classes, x (8, 8, 1); 1,437 train, 360 test>
    """
    splits = make_splits(splits, options)
    return load(
        sources.digits(seed=seed, fraction=fraction),
        partition,
        splits,
        num_clients=num_clients,
        seed=seed,
    )


@data_set
def sine(
    num_clients: NumClients = 16,
    partition: Choice | None = None,
    *,
    fraction: Fraction = 1.0,
    seed: Seed = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """Regression on noisy points of one sine period, each client on its own interval (FedeRiCo, Figure 1).

    Args:
        num_clients: K.
        partition: Partition of the points among clients; None: each client gets the points in its interval.
        fraction: Share of the points to use.
        seed: Random seed.
        splits: Splits of each client's examples.
        **options: Fields of `Splits` that override those of `splits`.

    Examples:
        >>> from pfljax import data
        >>> data.sine(num_clients=5)
        <sine, natural: 5 clients, regression, x (1,); 80 train, 20 test>
    """
    splits = make_splits(splits, options)
    source = sources.sine(num_clients, seed=seed, fraction=fraction)
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


@data_set
def synthetic(
    num_clients: NumClients = 300,
    partition: Choice | None = None,
    *,
    groups: Annotated[int, hyperparameter(at_least=1)] = 3,
    alpha: Annotated[float, hyperparameter(above=0)] = 0.4,
    labels: SyntheticLabels = "mixture",
    fraction: Fraction = 1.0,
    seed: Seed = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """Two classes from linear rules, with each client's own mixture of rules (FedEM, Appendix I.1).

    Args:
        num_clients: K.
        partition: Partition of the examples among clients; None: each client gets the examples drawn for it.
        groups: M, number of components, each a linear rule.
        alpha: Concentration of the clients' shares in the rules.
        labels: "published" is the data that the paper's authors published (see `sources.synthetic`).
        fraction: Share of the examples to use.
        seed: Random seed.
        splits: Splits of each client's examples; None: the test examples are the ones drawn as such, `test_examples`
            per client (5,000 by default).
        **options: Fields of `Splits` that override those of `splits`.

    Examples:
        >>> from pfljax import data
        >>> data.synthetic(num_clients=3, test_examples=40).test.size.tolist()
        [40, 40, 40]
    """
    splits = make_splits(splits, options, official_test=True)
    source = sources.synthetic(
        num_clients,
        groups=groups,
        alpha=alpha,
        labels=labels,
        test_examples=splits.test_examples,
        seed=seed,
        fraction=fraction,
    )
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


@data_set
def npz(
    file: str | Path,
    num_clients: NumClients | None = None,
    partition: Choice | None = None,
    *,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
    ignored_index: int | None = None,
    seed: Seed = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """Examples from an npz file: x, y and, optionally, client or writer, coarse and is_test (see `sources.npz`).

    Examples for which is_test holds are the clients' test examples, unless `official_test=False` or a `test_fraction`
    is given.

    Args:
        file: Path of the file.
        num_clients: K; None: all clients in the file, or 16 if it names none.
        partition: Partition of the examples among clients; None: natural if the file names clients, otherwise two label
            groups (random for regression).
        fraction: Share of the examples to use.
        standardize: Whether to scale each feature (each channel of images) to mean 0 and standard deviation 1.
        task: See `Federation.from_arrays`.
        ignored_index: See `Federation.from_arrays`.
        seed: Random seed.
        splits: Splits of each client's examples.
        **options: Fields of `Splits` that override those of `splits`.

    Examples:
        >>> import numpy as np
        >>> from pfljax import data
        >>> rng = np.random.default_rng(0)
        >>> np.savez("sensors.npz", x=rng.normal(size=(40, 3)), y=np.arange(40) % 2, client=np.arange(40) // 10)
        >>> data.npz("sensors.npz")
        <sensors, natural: 4 clients, 2 classes, x (3,); 32 train, 8 test>
    """
    source = sources.npz(
        file,
        seed=seed,
        fraction=fraction,
        standardize=standardize,
        task=task,
        ignored_index=ignored_index,
    )
    official_test = _has_official_test(source, options)
    splits = make_splits(splits, options, official_test=official_test)
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


def or_torch_data(read: Callable[..., Federation]) -> Callable[..., Federation]:
    """A function that reads files, and takes PyTorch's data sets in place of a file, too."""

    @functools.wraps(read)
    def call(*args: Any, **options: Any) -> Federation:
        arguments = dict(zip(("file", "num_clients", "partition"), args, strict=False)) | options
        file = arguments.get("file")
        if not is_torch_data(file):
            return read(*args, **options)
        del arguments["file"]
        return Federation.from_arrays(file, **arguments)

    return call


@or_torch_data
@renamed_arguments(kind="format")
@functools.partial(data_set, further=[file_format.read for file_format in FORMATS.values()])
def read(
    file: str | Path,
    num_clients: NumClients | None = None,
    partition: Choice | None = None,
    *,
    format: Annotated[str, hyperparameter(choices=("file", *FORMATS))] = "file",
    seed: Seed = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """Examples from a file or folder of any format that pfljax reads: a table, images, LEAF and others.

    Examples that the file marks as official test examples are the clients' test examples, unless `official_test=False`
    or a `test_fraction` is given.

    Args:
        file: Path of the file or folder. Or a Dataset or DataLoader of PyTorch, which `Federation.from_arrays` reads,
            with its arguments.
        num_clients: K; None: all clients in the file, or 16 if it names none.
        partition: Partition of the examples among clients; None: natural if the file names clients, otherwise two label
            groups (random for regression).
        format: A format, such as "csv"; "file": the one that the path looks like.
        seed: Random seed.
        splits: Splits of each client's examples.
        **options: Arguments of the format's function in `pfljax.data.sources`, such as `label` and `client` for tables,
            and fields of `Splits` that override those of `splits`.

    Raises:
        ArgumentError: for a path of no format, an argument that the format does not have, or a file that is not
            accepted.

    Examples:
        >>> import pandas as pd
        >>> from pfljax import data
        >>> columns = {"heat": [1.5, 2.5, 0.5, 3.0], "label": [0, 1, 0, 1], "site": ["a", "a", "b", "b"]}
        >>> pd.DataFrame(columns).to_csv("heat.csv", index=False)
        >>> data.read("heat.csv", client="site")
        <heat, natural: 2 clients, 2 classes, x (1,); 2 train, 2 test>
    """
    names = options.keys() - fields_of(Splits).keys()
    source_options = {name: options.pop(name) for name in names}
    source = sources.read(file, format, seed=seed, **source_options)
    official_test = _has_official_test(source, options)
    splits = make_splits(splits, options, official_test=official_test)
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


def _has_official_test(source: sources.Source, options: dict[str, Any]) -> bool:
    """Whether clients are tested on the official test examples by default."""
    return source.is_test is not None and "test_fraction" not in options


@data_set
def text(
    file: str | Path,
    num_clients: NumClients | None = None,
    partition: Choice | None = None,
    *,
    stride: Annotated[int, hyperparameter(at_least=1)] = 1,
    fraction: Fraction = 1.0,
    seed: Seed = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """Next-character prediction on a play, with each role as a client (see `sources.text`).

    Args:
        file: A text file with blocks of "NAME:" followed by lines.
        num_clients: K; None: all roles.
        partition: Partition of the windows of text among clients; None: each role gets its own.
        stride: Number of characters between the starts of windows.
        fraction: Share of the windows to use.
        seed: Random seed.
        splits: Splits of each client's examples; None: the last fifth of each role's lines are for testing.
        **options: Fields of `Splits` that override those of `splits`.

    Examples:
        >>> import pathlib
        >>> from pfljax import data
        >>> lines = ["ROMEO:", "But, soft! what light", "through yonder window breaks?"]
        >>> lines += ["", "JULIET:", "O Romeo, Romeo!", "wherefore art thou Romeo?"]
        >>> _ = pathlib.Path("play.txt").write_text(chr(10).join(lines))
        >>> data.text("play.txt").client_names.tolist()
        ['ROMEO', 'JULIET']
    """
    splits = make_splits(splits, options, official_test=True)
    source = sources.text(file, stride=stride, seed=seed, fraction=fraction)
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


@data_set
def tfds(
    name: str,
    num_clients: NumClients | None = None,
    partition: Choice | None = None,
    *,
    data_dir: str | Path | None = None,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
    seed: Seed = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """A prepared TFDS data set, such as "mnist" (see `sources.tfds`).

    Args:
        name: Its name in TFDS.
        num_clients: K; None: all clients that the data set names, or 16 if it names none.
        partition: Partition of the examples among clients; None: natural if the data set names clients, otherwise two
            label groups.
        data_dir: Directory where TFDS keeps its prepared data sets; None: the TFDS default.
        fraction: Share of the examples to use.
        standardize: Whether to scale each feature (each channel of images) to mean 0 and standard deviation 1.
        task: "classification", "regression", or "auto", which treats float targets as regression.
        seed: Random seed.
        splits: Splits of each client's examples.
        **options: Fields of `Splits` that override those of `splits`.

    Examples:
        >>> from pfljax import data
        >>> data.tfds("mnist", num_clients=100)  # doctest: +SKIP
        <mnist, label_groups: 100 clients, 10 classes, x (28, 28, 1); ...>
    """
    splits = make_splits(splits, options)
    source = sources.tfds(
        name, data_dir=data_dir, seed=seed, fraction=fraction, standardize=standardize, task=task
    )
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


@functools.partial(data_set, further=[sources.hub])
def huggingface(
    name: str,
    num_clients: NumClients | None = None,
    partition: Choice | None = None,
    *,
    seed: Seed = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """A data set of Hugging Face's `datasets`, such as "uoft-cs/cifar10", which is downloaded once.

    Official test examples count as all others, as with `tfds`, unless `official_test=True`.

    Args:
        name: Its name on the Hub, or the path of a folder or file; see `sources.hub`.
        num_clients: K; None: all clients in the column `client`, or 16 without it.
        partition: Partition of the examples among clients; None: natural if `client` is set, otherwise two label groups
            (random for regression).
        seed: Random seed.
        splits: Splits of each client's examples.
        **options: Arguments of `sources.hub`, such as `label`, `text` and `client` for columns, and fields of `Splits`
            that override those of `splits`.

    Raises:
        ArgumentError: if the data set is neither in the cache nor can be downloaded, or a column is missing or not
            accepted.

    Examples:
        >>> from pfljax import data
        >>> data.huggingface("uoft-cs/cifar10", num_clients=100)  # doctest: +SKIP
        <cifar10, label_groups: 100 clients, 10 classes, x (32, 32, 3); ...>
    """
    names = options.keys() - fields_of(Splits).keys()
    source_options = {name: options.pop(name) for name in names}
    source = sources.hub(name, seed=seed, **source_options)
    splits = make_splits(splits, options)
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


MAKERS = {
    make.__name__: make for make in (digits, sine, synthetic, npz, read, text, tfds, huggingface)
}
