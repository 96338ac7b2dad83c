"""Federations derived from others or made of noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.pooled import Pooled, is_pooled
from pfljax.contract.types import Examples, Split
from pfljax.data import columns
from pfljax.data.federation import SPLITS, Federation
from pfljax.data.sources.source import generator
from pfljax.data.statistics import distinct_codes, input_codes
from pfljax.settings.fields import NumClients, Seed, checked, hyperparameter

# names the origin of clients that `split_unseen` has made, 0, and of the others, 1
SIDE = "split_unseen"
Count = Annotated[int, hyperparameter(at_least=1)]


@checked()
def split_unseen(
    federation: Federation,
    unseen: Annotated[float, hyperparameter(at_least=0, below=1)],
    seed: Seed,
) -> tuple[Federation, Federation]:
    """Holds a share of the clients out of training; returns the federations of seen and unseen clients.

    Args:
        federation: All clients.
        unseen: Share of the clients held out of training; they adapt and are scored afterwards.
        seed: Seed that draws them.

    Raises:
        ArgumentError: if either side would have no clients.

    Examples:
        >>> from pfljax import data
        >>> clients, unseen = data.split_unseen(data.digits(num_clients=10), unseen=0.2, seed=0)
        >>> clients.num_clients, unseen.num_clients
        (8, 2)
    """
    num_clients = federation.num_clients
    num_unseen = round(unseen * num_clients)
    if not 0 < num_unseen < num_clients:
        text = f"{num_unseen} of {num_clients} clients would be unseen"
        accepted = (
            "accepted: a share that leaves at least one unseen client and one training client"
        )
        raise ArgumentError("unseen", f"{text}; {accepted}", unseen)
    order = generator(seed, "unseen").permutation(num_clients)

    def take(clients: np.ndarray, side: int) -> Federation:
        def rows(leaf: Any) -> Any:
            return None if leaf is None else leaf[clients]

        origin = None
        if federation.origin is not None:
            call = {"of": federation.origin, "unseen": unseen, "seed": seed, "side": side}
            origin = {SIDE: call}
        return dataclasses.replace(
            federation,
            train=tree.map_rows(rows, federation.train),
            validation=tree.map_rows(rows, federation.validation),
            test=tree.map_rows(rows, federation.test),
            group=rows(federation.group),
            target=rows(federation.target),
            client_names=rows(federation.client_names),
            origin=origin,
        )

    seen_clients = take(np.sort(order[num_unseen:]), 0)
    unseen_clients = take(np.sort(order[:num_unseen]), 1)
    return seen_clients, unseen_clients


def return_validation(clients: Federation) -> Federation:
    """Moves each client's validation examples to its training examples, in front of them.

    The clients are those that `validation_fraction=0` would have given, except for what fills a table's missing
    numbers: models scale x by the statistics of all these examples. Clients that have no validation examples are
    returned as they are.

    Examples:
        >>> from pfljax import data
        >>> clients = data.digits(num_clients=10, validation_fraction=0.2)
        >>> data.return_validation(clients)
        <digits, label_groups: 10 clients, 10 classes, x (8, 8, 1); 1,437 train, 360 test>
    """
    num_validation = np.asarray(clients.validation.size)
    if not num_validation.sum():
        return clients
    size = (num_validation + np.asarray(clients.train.size)).astype(np.int32)
    local = clients.local_rows

    def join(validation: Examples, train: Examples) -> Examples:
        return _joined(validation, train, num_validation[local], size[local])

    def empty(examples: Examples) -> Examples:
        return tree.map_rows(lambda leaf: leaf[:, :0], examples)

    validation = clients.validation
    x = jax.tree.map(join, validation.x, clients.train.x, is_leaf=is_pooled)
    y = join(validation.y, clients.train.y)
    scaling = clients.scaling if clients.whole_scaling is None else clients.whole_scaling()
    return dataclasses.replace(
        clients,
        train=Split(x, y, size),
        validation=Split(empty(validation.x), empty(validation.y), np.zeros_like(size)),
        scaling=scaling,
        whole_scaling=None,
        validation_returned=True,
    )


def _joined(first: Examples, second: Examples, num_first: np.ndarray, size: np.ndarray) -> Examples:
    """Stacked examples (K, n_max, ...): of client k the `num_first[k]` of `first`, then those of `second`."""
    if is_pooled(first) and is_pooled(second) and first.pool is second.pool:
        # Padding, which is -1, becomes 0 for a moment.
        index = _joined(first.index + 1, second.index + 1, num_first, size) - 1
        return dataclasses.replace(first, index=index)
    joined = np.zeros((len(size), size.max(), *first.shape[2:]), second.dtype)
    for client, (num, total) in enumerate(zip(num_first, size, strict=True)):
        joined[client, :num] = first[client, :num]
        joined[client, num:total] = second[client, : total - num]
    return joined


def without_tested(clients: Sequence[Federation], tested: Sequence[Federation]) -> list[Federation]:
    """Leaves out validation examples whose x is also that of a test example of any of the `tested` clients.

    So no test example chooses a rate or a hyperparameter, even if `clients` were divided otherwise, or an example
    occurs twice. Where no validation example would be left, as in a table with few different rows, all stay, and a
    warning says so.

    Examples:
        >>> from pfljax import data
        >>> clients = data.digits(num_clients=4, validation_fraction=0.3)
        >>> others = data.digits(num_clients=4, seed=1)
        >>> (chosen_on,) = data.without_tested([clients], [others])
        >>> bool(chosen_on.validation.size.sum() < clients.validation.size.sum())
        True
    """
    padding = np.uint64(0)
    tested_codes = np.append(distinct_codes(tested, "test"), padding)
    masks = []
    totals = []
    for federation in clients:
        codes = input_codes(federation, "validation")
        is_untested = np.isin(codes, tested_codes, invert=True)
        masks.append(is_untested)
        totals.append(federation.gather_rows(is_untested.sum(axis=1)).sum())
    if not all(totals):
        text = "all validation examples also occur among the test examples, which therefore take part in tuning"
        warn("clients", f"{text}; pass is_test, or fewer splits")
        return list(clients)
    return [
        _with_validation(federation, mask) for federation, mask in zip(clients, masks, strict=True)
    ]


def _with_validation(clients: Federation, mask: np.ndarray) -> Federation:
    """The clients with only those validation examples that `mask` (K, n_max) marks, none of them padding."""
    marked = with_marked(clients.validation, mask)
    return dataclasses.replace(
        clients, validation=marked._replace(size=clients.gather_rows(np.asarray(marked.size)))
    )


def with_marked(split: Split, mask: np.ndarray) -> Split:
    """A split with only those examples that `mask` (K, n_max) marks, none of them padding, for this process's clients.

    Examples:
        >>> import numpy as np
        >>> from pfljax import data
        >>> train = data.digits(num_clients=4, train_examples=6).train
        >>> is_early = np.arange(train.y.shape[1]) < 2
        >>> data.variants.with_marked(train, np.tile(is_early, (4, 1))).size.tolist()
        [2, 2, 2, 2]
    """
    # Marked examples come first.
    order = np.argsort(~mask, axis=1, kind="stable")
    size = mask.sum(axis=1)
    is_padding = np.arange(mask.shape[1]) >= size[:, None]

    def compact(examples: Examples) -> Examples:
        if is_pooled(examples):
            index = np.take_along_axis(examples.index, order, axis=1)
            index = np.where(is_padding, -1, index).astype(np.int32)
            return dataclasses.replace(examples, index=index)
        rows = np.arange(len(order))[:, None]
        moved = np.asarray(examples)[rows, order]
        moved[is_padding] = 0
        return moved

    x = jax.tree.map(compact, split.x, is_leaf=is_pooled)
    return Split(x, compact(split.y), size.astype(np.int32))


def match_classes(
    unseen: Federation | None, clients: Federation, argument: str = "unseen"
) -> Federation | None:
    """The unseen clients with the training clients' scaling, columns and classes, matched by name if they have names.

    Args:
        unseen: Clients held out of training; None: there are none.
        clients: The training clients.
        argument: What the unseen clients are called in messages.

    Raises:
        ArgumentError: if the unseen clients have other data, lack a column, or have a class unknown to training.

    Examples:
        >>> import pfljax as pfl
        >>> x = [[0.0], [1.0], [2.0], [3.0]]
        >>> clients = pfl.Federation.from_arrays(x, ["a", "b", "c", "b"], [0, 0, 1, 1])
        >>> unseen = pfl.Federation.from_arrays(x, ["b", "c", "b", "c"], [0, 0, 1, 1])
        >>> unseen.class_names
        ('b', 'c')
        >>> pfl.data.match_classes(unseen, clients).class_names
        ('a', 'b', 'c')
    """
    if unseen is None:
        return None
    if not isinstance(unseen, Federation):
        text = "accepted: a Federation, such as Federation.from_arrays(x, y, client=ids)"
        raise ArgumentError(argument, text)
    unseen = match_columns(unseen, clients, argument)
    if _signature(unseen) != _signature(clients):
        text = f"is {_description(unseen)}; accepted: data like that of {_description(clients)}"
        raise ArgumentError(argument, text)

    # The model scales their x as its training examples.
    if unseen.scaling is not clients.scaling:
        unseen = dataclasses.replace(unseen, scaling=clients.scaling)

    names = unseen.class_names or range(unseen.num_classes)
    known = clients.class_names or range(clients.num_classes)
    unknown = [str(name) for name in names if name not in known]
    if unknown:
        text = f"has classes that training does not know: {', '.join(unknown)}"
        raise ArgumentError(argument, f"{text}; accepted: {', '.join(map(str, known))}")
    if names == known or not clients.class_names:
        return unseen

    number = np.array([clients.class_names.index(name) for name in unseen.class_names], np.int32)

    def renumbered(split: Split) -> Split:
        return split._replace(y=number[np.asarray(split.y)])

    return dataclasses.replace(
        unseen,
        train=renumbered(unseen.train),
        validation=renumbered(unseen.validation),
        test=renumbered(unseen.test),
        num_classes=clients.num_classes,
        class_names=clients.class_names,
    )


def match_columns(unseen: Federation, clients: Federation, argument: str) -> Federation:
    """The unseen clients' columns in the order of the training clients', if both are tables.

    Raises:
        ArgumentError: if a column is missing.
    """
    names = unseen.feature_names
    known = clients.feature_names
    if not names or not known or names == known:
        return unseen
    positions = columns.positions(names, known, argument)

    def matched(split: Split) -> Split:
        return split._replace(x=columns.take_pooled(split.x, positions))

    return dataclasses.replace(
        unseen,
        train=matched(unseen.train),
        validation=matched(unseen.validation),
        test=matched(unseen.test),
        feature_names=known,
        scaling=columns.take_scaling(unseen.scaling, positions),
    )


def _signature(clients: Federation) -> tuple[Any, ...]:
    """What clients must have in common to use one model."""
    shapes = jax.tree.map(lambda leaf: leaf.shape, clients.inputs)
    return (clients.task, shapes, clients.train.y.shape[2:], bool(clients.class_names))


def _description(clients: Federation) -> str:
    labels = "names" if clients.class_names else "numbers"
    return f"{clients!r}, classes with {labels}"


def pad_alike(federations: Sequence[Federation]) -> list[Federation]:
    """Pads the splits of federations to the same number of examples.

    Raises:
        ArgumentError: if numbers of clients differ, only some are standardized, or networks scale their pixels
            differently.

    Examples:
        >>> from pfljax import data
        >>> federations = [data.digits(num_clients=4, seed=seed) for seed in (0, 1)]
        >>> first, second = data.pad_alike(federations)
        >>> first.train.y.shape == second.train.y.shape
        True
    """
    num_clients = [federation.num_clients for federation in federations]
    if len({*num_clients}) > 1:
        text = f"have different numbers of clients ({', '.join(map(str, num_clients))})"
        raise ArgumentError(
            "federations", f"{text}; accepted: equal numbers, or train them one by one"
        )
    if len({jax.tree.structure(federation.train.x) for federation in federations}) > 1:
        text = "have x in different forms, such as standardized and as it is"
        raise ArgumentError("federations", f"{text}; accepted: train them one by one")
    if len({str(federation.late_scaling) for federation in federations}) > 1:
        text = "have pixels in files that networks scale with different statistics"
        raise ArgumentError("federations", f"{text}; accepted: train them one by one")
    padded: list[dict[str, Split]] = [{} for _ in federations]
    for name in SPLITS:
        splits: list[Split] = [getattr(federation, name) for federation in federations]
        examples = [(split.x, split.y) for split in splits]
        for number, split in enumerate(splits):
            x, y = jax.tree.map(_padded, examples[number], *examples, is_leaf=is_pooled)
            padded[number][name] = Split(x, y, split.size)
    return [
        dataclasses.replace(federation, **splits)
        for federation, splits in zip(federations, padded, strict=True)
    ]


def _padded(stack: Examples, *stacks: Examples) -> Examples:
    """Pads the stacked examples of one of several federations to the largest shapes of all."""
    n_max = max(stack.shape[1] for stack in stacks)
    if not all(is_pooled(stack) for stack in stacks):
        return _widen(np.asarray(stack), n_max, axis=1, value=0)
    num_rows = max(len(stack.pool) for stack in stacks)
    pool = _widen(np.asarray(stack.pool), num_rows, axis=0, value=0)
    index = _widen(stack.index, n_max, axis=1, value=-1)
    return dataclasses.replace(stack, pool=pool, index=index)


def _widen(array: np.ndarray, size: int, axis: int, value: int) -> np.ndarray:
    """Pads an array with `value` along an axis up to `size`; returns the array itself if it has that size."""
    if array.shape[axis] == size:
        return array
    width = [(0, 0)] * array.ndim
    width[axis] = (0, size - array.shape[axis])
    return np.pad(array, width, constant_values=value)


@checked()
def random_pixels(
    num_clients: NumClients,
    examples: Count,
    shape: tuple[int, ...],
    num_classes: Count,
    seed: Seed,
    *,
    distinct: int = 0,
) -> Federation:
    """Random images of a given shape, with `examples` training images per client, for timing instead of learning.

    Args:
        num_clients: K.
        examples: n_k.
        shape: Shape of an image.
        num_classes: C.
        seed: Random seed.
        distinct: Number of different images in a split, which clients share at random; 0: all are different.

    Examples:
        >>> from pfljax import data
        >>> data.random_pixels(num_clients=3, examples=8, shape=(4, 4, 1), num_classes=5, seed=0)
        <random pixels: 3 clients, 5 classes, x (4, 4, 1); 24 train, 6 test>
    """
    rng = generator(seed, "pixels")

    def split(size: int) -> Split:
        y = rng.integers(num_classes, size=(num_clients, size), dtype=np.int32)
        if distinct and size:
            pool = rng.random((distinct, *shape), dtype=np.float32)
            index = rng.integers(distinct, size=(num_clients, size), dtype=np.int32)
            x = Pooled(pool, index)
        else:
            x = rng.random((num_clients, size, *shape), dtype=np.float32)
        return Split(x, y, np.full(num_clients, size, np.int32))

    return Federation(
        train=split(examples),
        validation=split(0),
        test=split(max(1, examples // 4)),
        group=np.zeros(num_clients, np.int32),
        task="classification",
        num_classes=num_classes,
        name="random pixels",
    )
