"""All clients' data on the host."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pfljax.core.errors import ArgumentError
from pfljax.core.pooled import Pooled
from pfljax.core.types import ClientData, Split, Task
from pfljax.data import partitions
from pfljax.data.dealing import Assignment
from pfljax.data.sources.arrays import make_source
from pfljax.data.sources.source import Source, generator
from pfljax.data.splits import Splits, make_splits, split_within_clients

PARTS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """All clients' data on the host, and what is known about it.

    Attributes:
        train: Stacked training splits, K clients.
        validation: Stacked validation splits (n_max may be 0).
        test: Stacked test splits; only evaluation reads them.
        distribution: (K,) int32, the true distribution of each client: for colors and reports, never for training.
        task: "classification" or "regression".
        num_classes: Classes C; 1 for a regression.
        name: Data set and partition, for titles.
        target: (K,) int32, the distribution of each client's validation and test data; None: as `distribution`.
        own: The clients whose x and y are on this process; None: all. Everything else is of all clients.
        index_digest: A fingerprint of who has which examples, known without their content.
        attacker: (K,) bool, which clients attack; None: none of them.
        class_names: The names of classes 0..C-1, where the labels were strings; else empty.
        official_test: Whether the clients' test examples are the data set's own; None: it has none of its own.
    """

    train: Split
    validation: Split
    test: Split
    distribution: np.ndarray
    task: Task
    num_classes: int
    name: str
    target: np.ndarray | None = None
    own: slice | None = None
    index_digest: str = ""
    attacker: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    official_test: bool | None = None

    @property
    def num_clients(self) -> int:
        return int(self.train.size.shape[0])

    @property
    def client_data(self) -> ClientData:
        """What methods may see: everything but the test data."""
        return ClientData(self.train, self.validation, self.attacker)

    def with_attackers(self, share: float, seed: int = 0) -> Federation:
        """The federation with a share of its clients as attackers, drawn uniformly.

        Attackers have no validation and test examples, so that scores are those of the honest clients.
        """
        attacker = draw_attackers(self.num_clients, share, seed)
        unscored = lambda split: split._replace(size=np.where(attacker, 0, split.size).astype(np.int32))
        honest = {part: unscored(getattr(self, part)) for part in ("validation", "test")}
        return dataclasses.replace(self, attacker=attacker, **honest)

    def __repr__(self) -> str:
        kind = "regression" if self.task == "regression" else f"{self.num_classes} classes"
        counts = ((int(getattr(self, part).size.sum()), part) for part in PARTS)
        told = ", ".join(f"{count:,} {part}" for count, part in counts if count)
        tests = {None: "", True: " (the data set's own)", False: " (drawn; the data set's own are not used)"}
        told += tests[self.official_test]
        return f"<{self.name}: {self.num_clients:,} clients, {kind}, x {self.train.x.shape[2:]}; {told}>"

    @classmethod
    def from_arrays(
        cls,
        x: ArrayLike,
        y: ArrayLike,
        client: ArrayLike | None = None,
        *,
        num_clients: int | None = None,
        partition: partitions.Partition | None = None,
        seed: int = 0,
        is_test: ArrayLike | None = None,
        num_classes: int | None = None,
        standardize: bool = False,
        name: str = "arrays",
        splits: Splits | None = None,
        **options: Any,
    ) -> Federation:
        """A federation of one's own examples, in NumPy or JAX arrays.

        x is taken as it is, as float32; a model that embeds integer tokens casts them back.

        Args:
            x: (n, *features) numbers.
            y: (n,) targets: integers are classes 0..C-1, strings are classes in sorted order, whose names
                `class_names` keeps (predictions stay numbers), floats are a regression (unless `num_classes` is given).
            client: (n,) the client of each example, integers or strings. Clients are numbered in sorted order.
            num_clients: K; None: all in `client`, else 16. Of those in `client` fewer are drawn uniformly.
            partition: Who gets which examples; None: those of `client` where it is given, else two label groups (at
                random for a regression).
            seed: Decides partition and splits.
            is_test: (n,) bool, the examples for testing, unless `official_test=False`; None: `test_fraction` of each
                client's.
            num_classes: Classes C, where y need not show them all.
            standardize: Whether each feature (each channel of images) gets mean 0 and standard deviation 1, measured
                on the examples that are not for testing.
            name: For titles.
            splits: How each client's examples are split.
            **options: Fields of `Splits`, in place of those of `splits`.

        Raises:
            ArgumentError: naming the argument.
        """
        if is_test is not None and "test_fraction" in options and not {"official_test", "replacement"} & options.keys():
            raise ArgumentError("test_fraction", "is_test says which examples are for testing; name one of the two")
        splits = make_splits(splits, options, official_test=is_test is not None)
        given = {"x": x, "y": y, "client": client, "is_test": is_test}
        source = make_source(
            {key: np.asarray(array) for key, array in given.items() if array is not None},
            task="auto" if num_classes is None else "classification",
            num_classes=num_classes,
            images=False,
            standardize=standardize,
            name=name,
        )
        return load(source, partition, splits, num_clients=num_clients, seed=seed)


def draw_attackers(num_clients: int, share: float, seed: int) -> np.ndarray:
    """(K,) bool: a share of the clients, drawn uniformly."""
    attacker = np.zeros(num_clients, bool)
    attacker[generator(seed, "attackers").choice(num_clients, round(share * num_clients), replace=False)] = True
    return attacker


def load(
    source: Source,
    partition: partitions.Partition | None = None,
    splits: Splits | None = None,
    *,
    num_clients: int | None = None,
    seed: int = 0,
    own: Callable[[int], slice] | None = None,
) -> Federation:
    """Divides the examples of a source among clients, splits those of each client and stacks them.

    Args:
        source: The examples.
        partition: Who gets which; None: natural where the examples have clients, else two label groups (at random for
            a regression).
        splits: How each client's examples are split; None: a fifth of them for testing.
        num_clients: K; None: all clients of a natural partition, else 16.
        seed: Decides partition and splits.
        own: K -> the clients whose examples are wanted here, the others' being on other processes; None: all.

    Raises:
        ArgumentError: naming the argument.
    """
    splits = splits or Splits()
    partition = partition or partitions.default(source)
    assignment = partitions.assign(source, partition, num_clients=num_clients, splits=splits, seed=seed)
    federation = pack(source, assignment, splits, seed=seed, own=own if splits.targets == "own" else None)
    official = None if source.is_test is None else splits.official_test
    federation = dataclasses.replace(
        federation, name=f"{source.name}, {partition.name}", official_test=official, class_names=source.class_names
    )
    if splits.targets == "own":
        return federation
    federation = shuffle_targets(federation, seed)  # which needs all of them
    return keep_own(federation, own(federation.num_clients)) if own else federation


def pack(
    source: Source,
    assignment: Assignment,
    splits: Splits | None = None,
    *,
    seed: int = 0,
    own: Callable[[int], slice] | None = None,
) -> Federation:
    """Splits each client's examples into parts and says by an index who has which; see `Pooled`.

    Examples that take no more memory than an index, such as classes, are copied for each client and padded with zeros.

    Args:
        source: The examples.
        assignment: Who has which, two each at least.
        splits: How each client's examples are split.
        seed: Decides the splits.
        own: K -> the clients whose examples are packed, the others' being on other processes; None: all.

    Raises:
        ArgumentError: if a client lacks official training or test examples.
    """
    num_clients = len(assignment.indices)
    here = own(num_clients) if own else slice(0, num_clients)
    index = hashlib.sha256()

    parts = split_within_clients(assignment, splits or Splits(), seed)
    is_here = lambda owner: (owner >= here.start) & (owner < here.stop)
    pools, place_of = _pools(source, np.concatenate([ids[is_here(owner)] for ids, owner in parts.values()]))

    def stack(ids: np.ndarray, owner: np.ndarray) -> Split:
        count = np.bincount(owner, minlength=num_clients)
        for part in (ids.astype(np.int64), count, source.y[ids]):
            index.update(np.ascontiguousarray(part).data)
        rank = np.arange(len(ids)) - (np.cumsum(count) - count)[owner]
        places = np.full((num_clients, count.max()), -1, np.int32)
        places[owner, rank] = place_of[ids]
        x, y = (_stacked(pool, places[here]) for pool in pools)
        return Split(x, y, count.astype(np.int32))

    return Federation(
        train=stack(*parts["train"]),
        validation=stack(*parts["validation"]),
        test=stack(*parts["test"]),
        distribution=assignment.distribution,
        task=source.task,
        num_classes=source.num_classes,
        name=source.name,
        own=here if own else None,
        index_digest=index.hexdigest()[:12],
    )


def _pools(source: Source, ids: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The pools of x and y from which examples `ids` are read, and the place of each example in them.

    They are the source's own arrays, unless less than half of the source is used.
    """
    used = np.bincount(ids, minlength=len(source.y)) > 0
    if 2 * used.sum() >= len(used):
        return (source.x, source.y), np.arange(len(used))
    return (source.x[used], source.y[used]), np.cumsum(used) - 1


def _stacked(pool: np.ndarray, index: np.ndarray) -> Pooled | np.ndarray:
    """Pooled examples, or copies where an example takes no more memory than its place in an index."""
    examples = Pooled(pool, index)
    return examples if pool.itemsize * math.prod(pool.shape[1:]) > index.itemsize else examples[...]


def keep_own(federation: Federation, own: slice) -> Federation:
    """The federation with the examples of some clients only, the others' being on other processes."""
    splits = {part: getattr(federation, part) for part in PARTS}
    kept = {part: split._replace(x=split.x[own], y=split.y[own]) for part, split in splits.items()}
    return dataclasses.replace(federation, own=own, **kept)


def shuffle_targets(federation: Federation, seed: int) -> Federation:
    """Deals the (validation, test) pairs among the clients: targets out of the local distribution (FedFomo, Section 4).

    Chance may leave a client its own pair, or give it one of its own distribution.
    """
    order = generator(seed, "targets").permutation(federation.num_clients)
    dealt = {part: Split(*(leaf[order] for leaf in getattr(federation, part))) for part in ("validation", "test")}
    target, name = federation.distribution[order], f"{federation.name}, shuffled targets"
    return dataclasses.replace(dataclasses.replace(federation, **dealt), target=target, name=name)
