"""Federations made of others, or of nothing but noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.core.types import Split
from pfljax.data.federation import PARTS, Federation
from pfljax.data.sources.source import generator


def split_unseen(federation: Federation, share: float, seed: int) -> tuple[Federation, Federation]:
    """Keeps a share of the clients out of training: the Federations of the seen and of the unseen ones.

    Raises:
        ArgumentError: if the share leaves no client on one of the sides.
    """
    num_clients = federation.num_clients
    count = round(share * num_clients)
    if not 0 < count < num_clients:
        text = (
            f"of {num_clients} clients this keeps {count} out; accepted: a share that leaves one or more on each side"
        )
        raise ArgumentError("share", text, share)
    order = generator(seed, "unseen").permutation(num_clients)

    def take(clients: np.ndarray) -> Federation:
        parts = {part: Split(*(leaf[clients] for leaf in getattr(federation, part))) for part in PARTS}
        target = None if federation.target is None else federation.target[clients]
        return dataclasses.replace(
            dataclasses.replace(federation, **parts), distribution=federation.distribution[clients], target=target
        )

    return take(np.sort(order[count:])), take(np.sort(order[:count]))


def pad_alike(federations: Sequence[Federation]) -> list[Federation]:
    """The federations, their parts padded to the same number of examples.

    Raises:
        ArgumentError: if they have different numbers of clients.
    """
    if len({federation.num_clients for federation in federations}) > 1:
        numbers = ", ".join(str(federation.num_clients) for federation in federations)
        text = f"have different numbers of clients ({numbers}); accepted: the same number, or train them one by one"
        raise ArgumentError("federations", text)
    parts = {}
    for part in PARTS:
        splits = [getattr(federation, part) for federation in federations]
        most = max(split.y.shape[1] for split in splits)
        wider = lambda leaf, most=most: np.pad(leaf, [(0, 0), (0, most - leaf.shape[1]), *[(0, 0)] * (leaf.ndim - 2)])
        parts[part] = [Split(wider(split.x), wider(split.y), split.size) for split in splits]
    return [
        dataclasses.replace(federation, **{part: splits[number] for part, splits in parts.items()})
        for number, federation in enumerate(federations)
    ]


def random_pixels(num_clients: int, examples: int, shape: tuple[int, ...], num_classes: int, seed: int) -> Federation:
    """Random images of a given shape, `examples` a client to train on: work to be timed, not learned."""
    rng = generator(seed, "pixels")

    def split(size: int) -> Split:
        x = rng.random((num_clients, size, *shape), dtype=np.float32)
        y = rng.integers(num_classes, size=(num_clients, size), dtype=np.int32)
        return Split(x, y, np.full(num_clients, size, np.int32))

    return Federation(
        train=split(examples),
        validation=split(0),
        test=split(max(1, examples // 4)),
        distribution=np.zeros(num_clients, np.int32),
        task="classification",
        num_classes=num_classes,
        name="random pixels",
    )
