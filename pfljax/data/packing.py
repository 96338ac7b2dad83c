"""From assigned examples to a Federation: splits within clients, and padding to one shape."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from pfljax.core.types import Split, UsageError
from pfljax.data.federation import Federation
from pfljax.data.partitions import Assignment
from pfljax.data.sources import Source, generator
from pfljax.engine import processes


def build(
    source: Source,
    assignment: Assignment,
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    train_examples: int = 0,
    test_examples: int = 0,
    seed: int = 0,
    name: str = "",
    own: Callable[[int], slice] | None = None,
) -> Federation:
    """Splits each client's examples into parts and stacks them, padded with zeros.

    Every client has a training and a test example at least. Where the assignment says which examples are for
    testing, that holds; else `test_fraction` of each client's are, at random.

    Args:
        source: The examples.
        assignment: Who has which, two each at least.
        test_fraction: The share of a client's examples for testing.
        validation_fraction: The share of a client's training part for validation, in [0, 1); a client
            with a single training example has none.
        train_examples: Cap on a client's training part, validation included; 0 for none.
        test_examples: Cap on a client's test part; 0 for none.
        seed: Decides the splits.
        name: For titles; the source's by default.
        own: K -> the clients whose examples are packed, the others' being on other processes; None: all.

    Raises:
        UsageError: If a share or cap is out of range, or a client lacks official training or test examples.
    """
    if not 0 <= validation_fraction < 1:
        raise UsageError(f"--validation_fraction={validation_fraction}: accepted is a share in [0, 1)")
    for flag, cap in (("--train_examples", train_examples), ("--test_examples", test_examples)):
        if cap < 0:
            raise UsageError(f"{flag}={cap}: accepted are 0 (no cap) and positive numbers")
    num_clients = len(assignment.indices)
    ids = np.concatenate(assignment.indices)
    owner = np.repeat(np.arange(num_clients), [len(own) for own in assignment.indices])
    ids = ids[np.lexsort((generator(seed, "split").random(len(ids)), owner))]  # shuffled within each client
    if assignment.is_test is None:
        rank, size = _rank(owner, num_clients)
        test = rank < np.clip(np.rint(test_fraction * size), 1, size - 1)[owner]
    else:
        test = assignment.is_test[ids]
    rank, size = _rank(owner[~test], num_clients)
    without = int(((size == 0) | (np.bincount(owner[test], minlength=num_clients) == 0)).sum())
    if without:
        raise UsageError(
            f"--official_test: {without} of {num_clients} clients have no training or no test examples "
            "by it; without the flag each client's examples are split at random"
        )
    if train_examples:
        size = np.minimum(size, train_examples)
    held_out = np.clip(np.rint(validation_fraction * size), int(validation_fraction > 0), size - 1)[owner[~test]]
    validation = rank < held_out
    train = (rank >= held_out) & (rank < size[owner[~test]])

    tested = _rank(owner[test], num_clients)[0] < (test_examples or len(ids))

    here = own(num_clients) if own else slice(0, num_clients)
    index = hashlib.sha256()

    def pack(rows: np.ndarray, of: np.ndarray) -> Split:
        count = np.bincount(of, minlength=num_clients)
        for part in (rows.astype(np.int64), count, source.y[rows]):
            index.update(np.ascontiguousarray(part).data)
        parts = np.split(rows, np.cumsum(count)[:-1])[here]
        x = np.zeros((len(parts), count.max(), *source.x.shape[1:]), source.x.dtype)
        y = np.zeros((len(parts), count.max(), *source.y.shape[1:]), source.y.dtype)
        for k, part in enumerate(parts):  # indexing copies: only a client's at a time
            x[k, : len(part)], y[k, : len(part)] = source.x[part], source.y[part]
        return Split(x, y, count.astype(np.int32))

    splits = {
        "train": pack(ids[~test][train], owner[~test][train]),
        "validation": pack(ids[~test][validation], owner[~test][validation]),
        "test": pack(ids[test][tested], owner[test][tested]),
    }
    return Federation(
        **splits,
        distribution=assignment.distribution,
        task=source.task,
        num_classes=source.num_classes,
        name=name or source.name,
        own=here if own else None,
        index_digest=index.hexdigest()[:12],
    )


def keep_own(federation: Federation, own: slice) -> Federation:
    """The federation with the examples of some clients only, the others' being on other processes."""
    parts = {
        part: split._replace(x=split.x[own].copy(), y=split.y[own].copy())
        for part, split in ((name, getattr(federation, name)) for name in ("train", "validation", "test"))
    }
    return dataclasses.replace(federation, own=own, **parts)


def _rank(owner: np.ndarray, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    """The place (n,) of each example among its owner's, and how many (K,) each has; `owner` (n,) ascends."""
    size = np.bincount(owner, minlength=num_clients)
    return np.arange(len(owner)) - (np.cumsum(size) - size)[owner], size


def split_unseen(federation: Federation, share: float, seed: int) -> tuple[Federation, Federation]:
    """Keeps a share of the clients out of training: the Federations of the seen and of the unseen ones.

    Raises:
        UsageError: If the share leaves no client on one of the sides.
    """
    num_clients = federation.num_clients
    count = round(share * num_clients)
    if not 0 < count < num_clients:
        raise UsageError(
            f"--unseen_clients={share}: of {num_clients} clients this keeps {count} out; accepted is a "
            f"share that leaves one or more on each side"
        )
    order = generator(seed, "unseen").permutation(num_clients)

    def take(clients: np.ndarray) -> Federation:
        parts = {
            part: Split(*(leaf[clients] for leaf in getattr(federation, part)))
            for part in ("train", "validation", "test")
        }
        parts["target"] = None if federation.target is None else federation.target[clients]
        return dataclasses.replace(federation, distribution=federation.distribution[clients], **parts)

    return take(np.sort(order[count:])), take(np.sort(order[:count]))


def shuffle_targets(federation: Federation, seed: int) -> Federation:
    """Deals the (validation, test) pairs among the clients: targets out of the local distribution (FedFomo, Section 4).

    Chance may leave a client its own pair, or give it one of its own distribution.
    """
    order = generator(seed, "targets").permutation(federation.num_clients)
    dealt = {part: Split(*(leaf[order] for leaf in getattr(federation, part))) for part in ("validation", "test")}
    return dataclasses.replace(federation, target=federation.distribution[order], **dealt)


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


def _of_all(federation: Federation, rows: np.ndarray) -> np.ndarray:
    """All clients' rows, from those of the clients that are here."""
    return rows if len(rows) == federation.num_clients else processes.gather_rows(rows)


def digest(federation: Federation) -> str:
    """A short fingerprint of all examples and who has them, for runs to state which split they had."""
    splits, here = (federation.train, federation.validation, federation.test), federation.own or slice(None)
    sizes = np.stack([split.size[here] for split in splits], axis=1)
    clients = []
    for k, counts in enumerate(sizes):
        content = hashlib.sha256(counts.tobytes())
        for split, count in zip(splits, counts, strict=True):  # padding is no part of it
            content.update(np.ascontiguousarray(split.y[k, :count]).data)
            content.update(np.ascontiguousarray(split.x[k, :count]).data)
        clients.append(list(content.digest()))
    return hashlib.sha256(_of_all(federation, np.array(clients, np.uint8)).tobytes()).hexdigest()[:12]


def pad_alike(federations: Sequence[Federation]) -> list[Federation]:
    """The federations, their parts padded to the same number of examples.

    Raises:
        UsageError: if they have different numbers of clients.
    """
    if len({federation.num_clients for federation in federations}) > 1:
        numbers = ", ".join(str(federation.num_clients) for federation in federations)
        raise UsageError(
            f"--replicate=vmap: the seeds give different numbers of clients ({numbers}); use --replicate=no"
        )
    parts = {}
    for part in ("train", "validation", "test"):
        splits = [getattr(federation, part) for federation in federations]
        most = max(split.y.shape[1] for split in splits)
        wider = lambda leaf, most=most: np.pad(leaf, [(0, 0), (0, most - leaf.shape[1]), *[(0, 0)] * (leaf.ndim - 2)])
        parts[part] = [Split(wider(split.x), wider(split.y), split.size) for split in splits]
    return [
        dataclasses.replace(federation, **{part: splits[number] for part, splits in parts.items()})
        for number, federation in enumerate(federations)
    ]


def class_counts(federation: Federation) -> np.ndarray | None:
    """(K, C) int32 training examples of each class; None for a regression and for sequences, which have no class."""
    y, size = federation.train.y, federation.train.size[federation.own or slice(None)]
    if federation.task != "classification" or y.ndim > 2:
        return None
    client, position = np.nonzero(np.arange(y.shape[1]) < size[:, None])
    cells = client * federation.num_classes + y[client, position]
    counts = np.bincount(cells, minlength=len(y) * federation.num_classes).reshape(len(y), -1)
    return _of_all(federation, counts.astype(np.int32))


def heterogeneity(federation: Federation) -> float | None:
    """The clients' mean distance from the whole: the mean over clients of sum_c |p_k(c) - p(c)|.

    p_k are the label shares among client k's training examples, p those among all clients'. Zhao et al. (2018) call it
    the earth mover's distance; it is 0 to 2. None where there are no classes to count.
    """
    counts = class_counts(federation)
    if counts is None:
        return None
    size = counts.sum(axis=1)
    shares = counts[size > 0] / size[size > 0, None]
    return float(np.abs(shares - counts.sum(axis=0) / max(counts.sum(), 1)).sum(axis=1).mean())


def describe(federation: Federation) -> dict:
    """What a report says of the data: clients, examples a client and in all, classes a client, the digest."""

    def spread(values: np.ndarray) -> dict[str, float]:
        return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}

    parts = {"train": federation.train, "validation": federation.validation, "test": federation.test}
    summary = {part: {"total": int(split.size.sum()), **spread(split.size)} for part, split in parts.items()}
    summary |= {"clients": federation.num_clients, "digest": digest(federation)}
    counts = class_counts(federation)
    if counts is not None:
        summary["classes_per_client"] = spread((counts > 0).sum(axis=1))
    return summary
