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
from pfljax.data.partitions import Choice
from pfljax.data.sources.arrays import TaskName
from pfljax.data.sources.builtin import SyntheticLabels
from pfljax.data.sources.kinds import KINDS
from pfljax.data.sources.source import Fraction
from pfljax.data.splits import Splits, make_splits
from pfljax.data.variants import SIDE, split_unseen
from pfljax.settings import recorded
from pfljax.settings.fields import NumClients, Seed, checked, fields_of, hyperparameter

P = ParamSpec("P")


def data_set(
    make: Callable[P, Federation], further: Sequence[Callable] = ()
) -> Callable[P, Federation]:
    """Checks a function's arguments, also those of `further`; its federations remember the call, if they can."""
    make = checked(options=[*further, Splits])(make)

    @functools.wraps(make)
    def called(*args: P.args, **options: P.kwargs) -> Federation:
        found = make(*args, **options)
        given = inspect.signature(make).bind(*args, **options).arguments
        given |= given.pop("options", {})
        kept = recorded.recordable(given)
        return (
            dataclasses.replace(found, origin={make.__name__: kept})
            if kept.keys() == given.keys()
            else found
        )

    return called


def made_again(origin: dict[str, dict[str, Any]]) -> Federation:
    """Repeats the call that a federation remembers."""
    ((name, kept),) = origin.items()
    if name == SIDE:
        return split_unseen(made_again(kept["of"]), kept["unseen"], kept["seed"])[kept["side"]]
    return MAKERS[name](
        **{argument: recorded.restored(value, "clients") for argument, value in kept.items()}
    )


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
    """
    tasks: Any = {"task": task, "ignored_index": ignored_index}
    source = sources.npz(file, seed=seed, fraction=fraction, standardize=standardize, **tasks)
    splits = make_splits(splits, options, official_test=_tested(source, options))
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


@functools.partial(data_set, further=[kind.read for kind in KINDS.values()])
def read(
    file: str | Path,
    num_clients: NumClients | None = None,
    partition: Choice | None = None,
    *,
    kind: Annotated[str, hyperparameter(choices=("file", *KINDS))] = "file",
    seed: Seed = 0,
    splits: Splits | None = None,
    **options: Any,
) -> Federation:
    """Examples from a file or folder of any kind that pfljax reads: a table, images, LEAF and others.

    Examples that the file marks as official test examples are the clients' test examples, unless `official_test=False`
    or a `test_fraction` is given.

    Args:
        file: Path of the file or folder.
        num_clients: K; None: all clients in the file, or 16 if it names none.
        partition: Partition of the examples among clients; None: natural if the file names clients, otherwise two label
            groups (random for regression).
        kind: What it is; "file": what the path looks like.
        seed: Random seed.
        splits: Splits of each client's examples.
        **options: Arguments of the kind's function in `pfljax.data.sources`, such as `label` and `client` for tables,
            and fields of `Splits` that override those of `splits`.
    """
    own = {name: options.pop(name) for name in options.keys() - fields_of(Splits).keys()}
    source = sources.read(file, kind, seed=seed, **own)
    splits = make_splits(splits, options, official_test=_tested(source, options))
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


def _tested(source: sources.Source, options: dict[str, Any]) -> bool:
    """Whether clients are tested on the official test examples, unless told otherwise."""
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
    """
    splits = make_splits(splits, options)
    source = sources.tfds(
        name, data_dir=data_dir, seed=seed, fraction=fraction, standardize=standardize, task=task
    )
    return load(source, partition, splits, num_clients=num_clients, seed=seed)


MAKERS = {make.__name__: make for make in (digits, sine, synthetic, npz, read, text, tfds)}
