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
from pfljax.data.federation import PARTS, Federation
from pfljax.data.sources.source import generator
from pfljax.data.statistics import codes_of, input_codes
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
    """
    num_clients = federation.num_clients
    count = round(unseen * num_clients)
    if not 0 < count < num_clients:
        text = f"{count} of {num_clients} clients would be unseen; accepted: a share that leaves at least one unseen "
        text = f"{text}client and one training client"
        raise ArgumentError("unseen", text, unseen)
    order = generator(seed, "unseen").permutation(num_clients)

    def take(clients: np.ndarray, side: int) -> Federation:
        parts = {
            part: tree.map_rows(lambda leaf: leaf[clients], getattr(federation, part))
            for part in PARTS
        }
        rows: dict[str, Any] = {
            name: getattr(federation, name) for name in ("group", "target", "client_names")
        }
        rows = {name: None if row is None else row[clients] for name, row in rows.items()}
        origin: dict[str, dict[str, Any]] | None = None
        if federation.origin is not None:
            origin = {SIDE: {"of": federation.origin, "unseen": unseen, "seed": seed, "side": side}}
        return dataclasses.replace(federation, **parts, **rows, origin=origin)

    return take(np.sort(order[count:]), 0), take(np.sort(order[:count]), 1)


def return_validation(clients: Federation) -> Federation:
    """Moves each client's validation examples to its training examples, in front of them.

    The clients are those that `validation_fraction=0` would have given, except for what a table's holes are filled
    with: models scale x by the statistics of all these examples. Clients that have no validation examples are returned
    as they are.
    """
    num_validation = np.asarray(clients.validation.size)
    if not num_validation.sum():
        return clients
    size = (num_validation + np.asarray(clients.train.size)).astype(np.int32)
    own = clients.own or slice(0, clients.num_clients)

    def join(validation: Examples, train: Examples) -> Examples:
        return _joined(validation, train, num_validation[own], size[own])

    def none_of(examples: Examples) -> Examples:
        return tree.map_rows(lambda leaf: leaf[:, :0], examples)

    x = jax.tree.map(join, clients.validation.x, clients.train.x, is_leaf=is_pooled)
    y = join(clients.validation.y, clients.train.y)
    empty = Split(none_of(clients.validation.x), none_of(clients.validation.y), np.zeros_like(size))
    scaling = clients.scaling if clients.whole_scaling is None else clients.whole_scaling()
    return dataclasses.replace(
        clients,
        train=Split(x, y, size),
        validation=empty,
        scaling=scaling,
        whole_scaling=None,
        returned=True,
    )


def _joined(first: Examples, second: Examples, num_first: np.ndarray, size: np.ndarray) -> Examples:
    """Stacked examples (K, n_max, ...): of client k the `num_first[k]` of `first`, then those of `second`."""
    if is_pooled(first) and is_pooled(second) and first.pool is second.pool:
        # padding, which is -1, becomes 0
        index = _joined(first.index + 1, second.index + 1, num_first, size) - 1
        return dataclasses.replace(first, index=index)
    found = np.zeros((len(size), size.max(), *first.shape[2:]), second.dtype)
    for client, (num, total) in enumerate(zip(num_first, size, strict=True)):
        found[client, :num] = first[client, :num]
        found[client, num:total] = second[client, : total - num]
    return found


def without_tested(clients: Sequence[Federation], tested: Sequence[Federation]) -> list[Federation]:
    """Leaves out validation examples whose x is also that of a test example of any of the `tested` clients.

    So no test example chooses a rate or hyperparameter, even if `clients` were divided otherwise, or an example
    occurs twice. Where no validation example would be left, as in a table with few different rows, all stay, and a
    warning says so.
    """
    known = np.append(codes_of(tested, "test"), np.uint64(0))  # 0 is padding
    keeps = [np.isin(input_codes(each, "validation"), known, invert=True) for each in clients]
    left = [each.of_all(keep.sum(axis=1)).sum() for each, keep in zip(clients, keeps, strict=True)]
    if not all(left):
        text = "all validation examples also occur among the test examples, which so take part in tuning"
        warn("clients", f"{text}; pass is_test, or fewer splits")
        return list(clients)
    return [_with_validation(each, keep) for each, keep in zip(clients, keeps, strict=True)]


def _with_validation(clients: Federation, keep: np.ndarray) -> Federation:
    """The clients with only those validation examples that `keep` (K, n_max) marks, none of them padding."""
    split = clients.validation
    order = np.argsort(~keep, axis=1, kind="stable")  # those that are kept come first
    kept = keep.sum(axis=1)
    padding = np.arange(keep.shape[1]) >= kept[:, None]

    def compact(examples: Examples) -> Examples:
        if is_pooled(examples):
            index = np.where(padding, -1, np.take_along_axis(examples.index, order, axis=1))
            return dataclasses.replace(examples, index=index.astype(np.int32))
        moved = np.asarray(examples)[np.arange(len(order))[:, None], order]
        moved[padding] = 0
        return moved

    x = jax.tree.map(compact, split.x, is_leaf=is_pooled)
    size = clients.of_all(kept.astype(np.int32))
    return dataclasses.replace(clients, validation=Split(x, compact(split.y), size))


def match_classes(unseen: Federation | None, clients: Federation) -> Federation | None:
    """The unseen clients with the training clients' scaling and classes, matched by name if the classes have names.

    Raises `ArgumentError` if they have other data, or a class unknown to training.
    """
    if unseen is None:
        return None
    if not isinstance(unseen, Federation):
        raise ArgumentError(
            "unseen", "accepted: a Federation, such as Federation.from_arrays(x, y, client=ids)"
        )

    def shapes(each):
        return jax.tree.map(lambda leaf: leaf.shape, each.inputs)

    def kind(each):
        return (each.task, shapes(each), each.train.y.shape[2:], bool(each.class_names))

    if kind(unseen) != kind(clients):

        def told(each):
            return f"{each!r}, classes with {'names' if each.class_names else 'numbers'}"

        raise ArgumentError(
            "unseen", f"is {told(unseen)}; accepted: data like that of {told(clients)}"
        )
    if unseen.scaling is not clients.scaling:  # the model scales them as its training examples
        unseen = dataclasses.replace(unseen, scaling=clients.scaling)
    names = unseen.class_names or range(unseen.num_classes)
    known = clients.class_names or range(clients.num_classes)
    strange = [str(name) for name in names if name not in known]
    if strange:
        text = f"has classes that training does not know: {', '.join(strange)}; accepted: {', '.join(map(str, known))}"
        raise ArgumentError("unseen", text)
    if names == known or not clients.class_names:
        return unseen
    number = np.array([clients.class_names.index(name) for name in unseen.class_names], np.int32)
    parts = {part: getattr(unseen, part) for part in PARTS}
    parts = {part: split._replace(y=number[np.asarray(split.y)]) for part, split in parts.items()}
    return dataclasses.replace(
        unseen, **parts, num_classes=clients.num_classes, class_names=clients.class_names
    )


def pad_alike(federations: Sequence[Federation]) -> list[Federation]:
    """Pads the parts of federations to the same number of examples.

    Raises `ArgumentError` if numbers of clients differ, only some are standardized, or networks scale their pixels
    differently.
    """
    if len({federation.num_clients for federation in federations}) > 1:
        numbers = ", ".join(str(federation.num_clients) for federation in federations)
        text = f"have different numbers of clients ({numbers}); accepted: equal numbers, or train them one by one"
        raise ArgumentError("federations", text)
    if len({jax.tree.structure(federation.train.x) for federation in federations}) > 1:
        text = "have x in different forms, such as standardized and as it is; accepted: train them one by one"
        raise ArgumentError("federations", text)
    if len({str(federation.late_scaling) for federation in federations}) > 1:
        text = "have pixels in files that networks scale with different statistics; accepted: train them one by one"
        raise ArgumentError("federations", text)
    parts = {}
    for part in PARTS:
        splits = [getattr(federation, part) for federation in federations]

        def pad(split, all=splits):
            return jax.tree.map(_padded, split[:2], *(s[:2] for s in all), is_leaf=is_pooled)

        parts[part] = [Split._make((*pad(split), split.size)) for split in splits]
    return [
        dataclasses.replace(federation, **{part: splits[number] for part, splits in parts.items()})
        for number, federation in enumerate(federations)
    ]


def _padded(stack: Examples, *stacks: Examples) -> Examples:
    """Pads the stacked examples of one of several federations to the largest shapes of all."""
    wide = max(stack.shape[1] for stack in stacks)
    if not all(is_pooled(stack) for stack in stacks):
        return _widen(np.asarray(stack), wide, 1, 0)
    rows = max(len(stack.pool) for stack in stacks)
    pool = _widen(np.asarray(stack.pool), rows, 0, 0)
    return dataclasses.replace(stack, pool=pool, index=_widen(stack.index, wide, 1, -1))


def _widen(array: np.ndarray, size: int, axis: int, value: int) -> np.ndarray:
    """Pads an array with `value` along an axis up to `size`; returns the array itself if it has that size."""
    if array.shape[axis] == size:
        return array
    width = [
        (0, size - length if number == axis else 0) for number, length in enumerate(array.shape)
    ]
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
        distinct: Number of different images in a part, which clients share at random; 0: all are different.
    """
    rng = generator(seed, "pixels")

    def split(size: int) -> Split:
        y = rng.integers(num_classes, size=(num_clients, size), dtype=np.int32)
        if distinct and size:
            x = Pooled(
                rng.random((distinct, *shape), dtype=np.float32),
                rng.integers(distinct, size=(num_clients, size), dtype=np.int32),
            )
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
