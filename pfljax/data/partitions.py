"""Partitions of examples among clients.

Most partitions divide the examples into pools (label groups, classes) and define the share of each pool that goes to
each client. A common dealer then gives each example to one client; with replacement, the shares instead define the
clients' label distributions, and each client draws from its own independently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np

from pfljax.contract.errors import ArgumentError, warn
from pfljax.data import latent
from pfljax.data.dealing import (
    MIN_EXAMPLES,
    Assignment,
    Pools,
    deal,
    deal_tests,
    draw,
    draw_tests,
    pool_members,
    too_many,
)
from pfljax.data.sources.source import Source, dirichlet_draws, generator
from pfljax.data.splits import Splits
from pfljax.settings.fields import (
    NumClients,
    Seed,
    check,
    checked,
    hyperparameter,
    listed,
    settings,
)

__all__ = [
    "IID",
    "Dirichlet",
    "Grouped",
    "InnerDirichlet",
    "LabelDirichlet",
    "LabelGroups",
    "Latent",
    "Natural",
    "Pachinko",
    "Pairs",
    "Partition",
    "Pathological",
    "Pools",
    "QuantileDirichlet",
    "Quantiles",
    "Shards",
    "Sizes",
    "Time",
]

DEFAULT_CLIENTS = 16
ALPHA = "Dirichlet concentration; smaller: clients differ more"
PACHINKO_BETA = 10  # concentration of fine labels within a coarse label


class Partition:
    """A partition of examples among clients. To define your own, subclass it with a `name` and `pools`.

    Attributes:
        name: Name in titles, messages and the command line.
        needs_classes: Whether every example must have exactly one class.

    Examples:
        Odd classes go to the first half of the clients, even ones to the second half:

        >>> import numpy as np
        >>> from pfljax import data, partitions
        >>> class OddAndEven(partitions.Partition):
        ...     name = "odd and even"
        ...
        ...     def pools(self, source, num_clients, rng, seed):
        ...         group = np.arange(num_clients) * 2 // num_clients
        ...         members = np.eye(2)[group]
        ...         return partitions.Pools(1 - source.y % 2, members / members.sum(axis=0), group)
        >>> clients = data.digits(num_clients=4, partition=OddAndEven())
        >>> (clients.class_counts()[0] > 0).tolist()
        [False, True, False, True, False, True, False, True, False, True]
    """

    name: ClassVar[str]
    needs_classes: ClassVar[bool] = True

    def __post_init__(self):
        check(self)

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        """Divides the examples into pools and defines the clients' shares in each.

        Args:
            source: The examples.
            num_clients: K.
            rng: Random generator.
            seed: The seed of `rng`, for separate random streams.

        Returns:
            The pool of each example (n,), the shares (K, P) of the clients, and their groups (K,).
        """
        raise NotImplementedError

    def assign(
        self, source: Source, num_clients: int | None, splits: Splits, seed: int
    ) -> Assignment:
        """Deals each example in the pools to one client, or lets clients draw with replacement."""
        num_clients = num_clients or DEFAULT_CLIENTS
        is_test = source.is_test if splits.official_test else None
        possible = _most_clients(source, is_test)
        if num_clients > possible and not splits.replacement:
            raise too_many(num_clients, self.name, possible)
        rng = generator(seed, "partition")
        pools = self.pools(source, num_clients, rng, seed)

        if not splits.replacement:
            classes = source.y if _has_one_class(source) else None
            indices = deal(rng, pools, self.name, is_test, classes)
            return Assignment(indices, _as_int32(pools.group), is_test)

        # With replacement, clients draw test examples from a share of every pool.
        fraction = splits.test_fraction
        if is_test is None:
            is_test = draw_tests(rng, pools.pool, fraction)
        num_tests = max(1, round(splits.train_examples * fraction / (1 - fraction)))
        train = draw(rng, pools, ~is_test, splits.train_examples)
        tests = draw(rng, pools, is_test, num_tests)
        indices = [np.concatenate(ids) for ids in zip(train, tests, strict=True)]
        return Assignment(indices, _as_int32(pools.group), is_test)


@settings
class IID(Partition):
    """Every client gets an equal share of all examples.

    Examples:
        >>> from pfljax import data, partitions
        >>> data.digits(num_clients=100, partition=partitions.IID())
        <digits, iid: 100 clients, 10 classes, x (8, 8, 1); 1,400 train, 397 test>
    """

    name = "iid"
    needs_classes = False

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        pool = np.zeros(len(source.y), int)
        share = np.full((num_clients, 1), 1 / num_clients)
        group = np.zeros(num_clients, int)
        return Pools(pool, share, group)


@settings
class LabelGroups(Partition):
    """Disjoint label groups; each client has examples from one group (FedeRiCo, Section 4.1).

    Attributes:
        balanced: Whether the numbers of clients per group differ by at most one. Otherwise each client's group is drawn
            at random, as in the paper, and a group may have no clients.

    Examples:
        >>> from pfljax import data, partitions
        >>> clients = data.digits(num_clients=6, partition=partitions.LabelGroups(groups=2))
        >>> sorted(clients.group.tolist())
        [0, 0, 0, 1, 1, 1]
        >>> (clients.class_counts() > 0).sum(axis=1).tolist()
        [5, 5, 5, 5, 5, 5]
    """

    name = "label_groups"
    groups: int = hyperparameter(2, at_least=1, help="number of label groups")
    balanced: bool = True

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        if self.balanced:
            _check_at_most("groups", self.groups, num_clients)
            pool = _label_groups(rng, source.y, self.groups)
            return _one_pool_a_client(rng, num_clients, self.groups, pool)
        pool = _label_groups(rng, source.y, self.groups)
        group = rng.integers(self.groups, size=num_clients)
        return Pools(pool, _evenly(np.eye(self.groups)[group]), group)


@settings
class LabelDirichlet(Partition):
    """Label groups; a Dirichlet draw spreads each group over all clients (FedeRiCo, Table 4; FedEM).

    Examples:
        >>> from pfljax import data, partitions
        >>> partition = partitions.LabelDirichlet(groups=3, alpha=0.4)
        >>> bool(data.digits(num_clients=10, partition=partition).train.size.all())
        True
    """

    name = "label_dirichlet"
    groups: int = hyperparameter(2, at_least=1, help="number of label groups")
    alpha: float = hyperparameter(0.4, above=0, help=ALPHA)

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        pool = _label_groups(rng, source.y, self.groups)
        share = dirichlet_draws(rng, self.groups, num_clients, self.alpha).T
        return Pools(pool, share)


@settings
class Dirichlet(Partition):
    """A symmetric Dirichlet draw per class spreads it over all clients (Hsu et al., 2019; FedEM).

    Attributes:
        alpha: Concentration of the draws.
        capped: Whether a client gets nothing of the remaining classes once it has its even share of all examples, as in
            PFLlib and as with `self_balancing` of flwr-datasets. Otherwise some clients have many more than others.

    Examples:
        >>> from pfljax import data, partitions
        >>> even = data.digits(num_clients=10, partition=partitions.Dirichlet(alpha=100.0))
        >>> uneven = data.digits(num_clients=10, partition=partitions.Dirichlet(alpha=0.1))
        >>> data.heterogeneity(even) < data.heterogeneity(uneven)
        True
    """

    name = "dirichlet"
    alpha: float = hyperparameter(0.4, above=0, help=ALPHA)
    capped: bool = False

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        num_classes = source.y.max() + 1
        share = dirichlet_draws(rng, num_classes, num_clients, self.alpha).T
        if self.capped:
            share = _capped(share, np.bincount(source.y))
        return Pools(source.y, share)


@settings
class Pathological(Partition):
    """Each client has a few classes, each split evenly among its clients (after McMahan et al., 2017).

    If a class has fewer examples than clients, some of its clients get none. Clients with the same classes are of
    the same group.

    Examples:
        >>> from pfljax import data, partitions
        >>> clients = data.digits(num_clients=10, partition=partitions.Pathological(classes=2))
        >>> (clients.class_counts() > 0).sum(axis=1).tolist()
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    name = "pathological"
    classes: int = hyperparameter(2, at_least=1, help="number of classes per client")

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        class_sets = _class_sets(rng, source.y, num_clients, self.classes)
        _, group = np.unique(class_sets, axis=0, return_inverse=True)
        return Pools(source.y, _evenly(class_sets), group)


@settings
class Pairs(Partition):
    """Clients 2i and 2i + 1 have the same classes (pFedMB, Section 4).

    Examples:
        >>> from pfljax import data, partitions
        >>> clients = data.digits(num_clients=10, partition=partitions.Pairs(classes=2))
        >>> clients.group.tolist()
        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """

    name = "pairs"
    classes: int = hyperparameter(2, at_least=1, help="number of classes per client")

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        if num_clients % 2:
            raise ArgumentError(
                "num_clients", "accepted with partition=pairs: even numbers", num_clients
            )
        pair_sets = _class_sets(rng, source.y, num_clients // 2, self.classes)
        class_sets = np.repeat(pair_sets, 2, axis=0)
        return Pools(source.y, _evenly(class_sets), np.arange(num_clients) // 2)


@settings
class Latent(Partition):
    """Clusters of similar examples; each client has examples from one cluster (FedFomo, Appendix A.5).

    Attributes:
        embedding: Embedding of examples before clustering: a function of the source that returns (n, F), such as an
            `Embedding`; None: pixels.
        cache: Folder for embeddings and clusterings; None: `host.cache_folder`.

    Examples:
        >>> from pfljax import data, partitions
        >>> partition = partitions.Latent(groups=3, cache="clusters")
        >>> clients = data.digits(num_clients=6, partition=partition, fraction=0.2)
        >>> sorted(clients.group.tolist())
        [0, 0, 1, 1, 2, 2]
    """

    name = "latent"
    groups: int = hyperparameter(2, at_least=1, help="number of clusters of similar examples")
    embedding: latent.Embed | None = hyperparameter(
        None, accepted="None, or a function of the source that returns (n, F), such as an Embedding"
    )
    cache: str | None = None

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        _check_at_most("groups", self.groups, num_clients)
        pool = latent.clusters(source, self.embedding, self.groups, seed, self.cache)
        return _one_pool_a_client(rng, num_clients, self.groups, pool)


@settings
class Shards(Partition):
    """Examples in the order of their classes are cut into shards; each client draws some (McMahan et al., 2017).

    Examples:
        >>> from pfljax import data, partitions
        >>> clients = data.digits(num_clients=10, partition=partitions.Shards(shards=2))
        >>> bool(((clients.class_counts() > 0).sum(axis=1) <= 4).all())
        True
    """

    name = "shards"
    shards: int = hyperparameter(2, at_least=1, help="number of shards per client")

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        num_shards = self.shards * num_clients
        shard = _ranges(source.y, num_shards, rng)
        owner = rng.permutation(np.arange(num_shards) % num_clients)
        return Pools(shard, np.eye(num_clients)[owner].T)


@settings
class InnerDirichlet(Partition):
    """Each client draws its examples from class shares of its own, a symmetric Dirichlet draw (Acar et al., 2021).

    All clients get equally many examples. They draw a class in turns, and one of its examples that no client has. A
    class without examples left drops out of all clients' shares.

    Examples:
        >>> from pfljax import data, partitions
        >>> clients = data.digits(num_clients=10, partition=partitions.InnerDirichlet(alpha=0.1))
        >>> sorted(set((clients.train.size + clients.test.size).tolist()))
        [179, 180]
    """

    name = "inner_dirichlet"
    alpha: float = hyperparameter(0.4, above=0, help=ALPHA)

    def assign(
        self, source: Source, num_clients: int | None, splits: Splits, seed: int
    ) -> Assignment:
        _refuse_replacement(splits)
        num_clients = num_clients or DEFAULT_CLIENTS

        def drawn(rng: np.random.Generator, classes: np.ndarray) -> list[np.ndarray]:
            return _in_turns(rng, classes, num_clients, self.alpha)

        return _assign_drawn(source, source.y, drawn, num_clients, splits, seed, self.name)


@settings
class Sizes(Partition):
    """Clients differ in the number of their examples, which are otherwise drawn alike.

    Attributes:
        growth: How the number grows with the client's number k = 1, ..., K: as k (linear), k^2 (square) or e^k
            (exponential).
        sizes: (K,) the clients' numbers of examples, up to a common factor; empty: as `growth` says.

    Examples:
        >>> from pfljax import data, partitions
        >>> clients = data.digits(num_clients=3, partition=partitions.Sizes(sizes=(1, 1, 2)))
        >>> (clients.train.size + clients.test.size).tolist()
        [449, 449, 899]
    """

    name = "sizes"
    needs_classes = False
    growth: Literal["linear", "square", "exponential"] = "linear"
    sizes: Sequence[float] = hyperparameter((), above=0, empty=True)

    def assign(
        self, source: Source, num_clients: int | None, splits: Splits, seed: int
    ) -> Assignment:
        # With replacement, all clients draw equally many.
        _refuse_replacement(splits)
        return Partition.assign(self, source, num_clients, splits, seed)

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        number = np.arange(1, num_clients + 1)
        if len(self.sizes) not in (0, num_clients):
            text = f"has {len(self.sizes)} numbers; accepted: num_clients={num_clients} numbers"
            raise ArgumentError("sizes", text, ",".join(map(str, self.sizes)))
        if len(self.sizes):
            size = np.array(self.sizes, float)
        elif self.growth == "exponential":
            # e^k up to the factor e^K, which float64 may not have
            size = np.exp(number - num_clients)
        else:
            size = number ** {"linear": 1.0, "square": 2.0}[self.growth]
        return Pools(np.zeros(len(source.y), int), (size / size.sum())[:, None])


@settings
class Quantiles(Partition):
    """Each client has the examples in a range of the target, such as the cheapest houses. For regression.

    Attributes:
        strictness: Weight of the standardized target in the order of the examples; the rest is Gaussian noise, as in
            `ContinuousPartitioner` of flwr-datasets. 1: ranges do not overlap; 0: clients are alike.

    Examples:
        >>> from pfljax import data, partitions
        >>> clients = data.sine(num_clients=4, partition=partitions.Quantiles())
        >>> targets = [clients.examples(k, "train")[1] for k in range(4)]
        >>> all(low.max() <= high.min() for low, high in zip(targets, targets[1:]))
        True
    """

    name = "quantiles"
    needs_classes = False
    strictness: float = hyperparameter(
        1.0, at_least=0, at_most=1, help="0 makes clients alike, 1 gives them ranges of the target"
    )

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        target = _numbers(source, self.name)
        noise = rng.standard_normal(len(target))
        scale = target.std() or 1.0
        score = self.strictness * (target - target.mean()) / scale + (1 - self.strictness) * noise
        return Pools(_ranges(score, num_clients, rng), np.eye(num_clients))


@settings
class QuantileDirichlet(Partition):
    """Bins of the target with equally many examples; a Dirichlet draw spreads each over all clients. For regression.

    Examples:
        >>> from pfljax import data, partitions
        >>> partition = partitions.QuantileDirichlet(bins=5, alpha=0.1)
        >>> data.sine(num_clients=4, partition=partition).num_clients
        4
    """

    name = "quantile_dirichlet"
    needs_classes = False
    bins: int = hyperparameter(10, at_least=1, help="number of bins of the target")
    alpha: float = hyperparameter(0.4, above=0, help=ALPHA)

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        pool = _ranges(_numbers(source, self.name), self.bins, rng)
        return Pools(pool, dirichlet_draws(rng, self.bins, num_clients, self.alpha).T)


@settings
class Time(Partition):
    """Each client has the examples of a period; periods have equally many. Client 0 has the first ones.

    Time is the source's, or the order of its examples if it has none. To split each client's examples by time, see
    `Splits.by_time`.

    Examples:
        >>> import numpy as np
        >>> import pfljax as pfl
        >>> day = np.array(["2024-05-02", "2024-05-01", "2024-05-04", "2024-05-03"])
        >>> x = [[2.0], [1.0], [4.0], [3.0]]
        >>> clients = pfl.Federation.from_arrays(
        ...     x, [0, 1, 0, 1], time=day, num_clients=2, partition=pfl.partitions.Time(), by_time=True
        ... )
        >>> clients.examples(0, "train")[0].tolist(), clients.examples(0, "test")[0].tolist()
        ([[1.0]], [[2.0]])
    """

    name = "time"
    needs_classes = False

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        position = np.arange(len(source.y))
        time = position if source.time is None else source.time
        order = np.lexsort((position, time))
        return Pools(_equal_runs(order, num_clients), np.eye(num_clients))


@settings
class Pachinko(Partition):
    """Two-level Pachinko allocation (Reddi et al., 2021): clients draw equally many examples, one by one.

    Each client has its own Dirichlet shares of coarse labels and of fine labels within each. It draws a coarse label,
    then a fine label, then one of its examples not yet taken. Labels with no examples left drop out.

    Examples:
        >>> import numpy as np
        >>> from pfljax import data, partitions
        >>> rng = np.random.default_rng(0)
        >>> fine = rng.integers(6, size=120)
        >>> x = rng.normal(size=(120, 3))
        >>> np.savez("animals.npz", x=x, y=fine, coarse=fine // 2)
        >>> clients = data.npz("animals.npz", num_clients=5, partition=partitions.Pachinko(alpha=0.1))
        >>> (clients.train.size + clients.test.size).tolist()
        [24, 24, 24, 24, 24]
    """

    name = "pachinko"
    alpha: float = hyperparameter(0.4, above=0, help=ALPHA)

    def assign(
        self, source: Source, num_clients: int | None, splits: Splits, seed: int
    ) -> Assignment:
        _refuse_replacement(splits)
        if source.coarse is None:
            raise ArgumentError("partition", f"{source.name} has no coarse labels", self.name)
        num_clients = num_clients or DEFAULT_CLIENTS

        # The pools are pairs of a coarse and a fine label.
        coarse = np.unique(source.coarse, return_inverse=True)[1]
        fine, pool = np.unique(coarse * source.num_classes + source.y, return_inverse=True)
        parent = fine // source.num_classes

        def drawn(rng: np.random.Generator, pool: np.ndarray) -> list[np.ndarray]:
            return _pachinko(rng, pool, parent, num_clients, self.alpha)

        return _assign_drawn(source, pool, drawn, num_clients, splits, seed, self.name)


@settings
class Natural(Partition):
    """The source's own clients with at least two examples, or `num_clients` of them, in their original order.

    Examples:
        >>> import pfljax as pfl
        >>> x = [[0.0], [1.0], [2.0], [3.0]]
        >>> partition = pfl.partitions.Natural()
        >>> sites = ["east", "west", "west", "east"]
        >>> clients = pfl.Federation.from_arrays(x, [0, 1, 1, 0], sites, partition=partition)
        >>> clients.client_names.tolist()
        ['east', 'west']
    """

    name = "natural"
    needs_classes = False

    def assign(
        self, source: Source, num_clients: int | None, splits: Splits, seed: int
    ) -> Assignment:
        _refuse_replacement(splits)
        if source.client is None:
            text = f"{source.name} has no client ids; accepted: all others"
            raise ArgumentError("partition", text, self.name)

        # Clients need one example to train on and one to test on.
        order = np.argsort(source.client, kind="stable")
        ids, start, size = np.unique(source.client[order], return_index=True, return_counts=True)
        able = np.flatnonzero(size >= MIN_EXAMPLES)
        if not len(able):
            text = f"no client in {source.name} has two examples"
            raise ArgumentError("partition", text, self.name)
        if len(able) < len(ids):
            text = f"{len(ids) - len(able)} of {len(ids)} clients have a single example and are left out"
            warn("client", f"{text}; a client needs one example to train on and one to test on")

        if num_clients is None:
            chosen = able
        elif 1 <= num_clients <= len(able):
            rng = generator(seed, "partition")
            chosen = np.sort(rng.choice(able, num_clients, replace=False))
        else:
            text = f"{source.name} has {len(able)} clients with at least two examples"
            raise ArgumentError("num_clients", f"{text}; accepted: 1 to {len(able)}", num_clients)

        group = None if source.group is None else source.group[ids[chosen]]
        return Assignment(
            indices=[order[start[k] : start[k] + size[k]] for k in chosen],
            group=_as_int32(group),
            is_test=source.is_test if splits.official_test else None,
            names=None if source.client_names is None else source.client_names[ids[chosen]],
        )


@settings
class Grouped(Partition):
    """Successive clients of the source together are a client, as users of an organization.

    Attributes:
        members: Number of the source's clients in each; the last one may have fewer.

    Examples:
        >>> import pfljax as pfl
        >>> x = [[0.0], [1.0], [2.0], [3.0]]
        >>> partition = pfl.partitions.Grouped(members=2)
        >>> clients = pfl.Federation.from_arrays(x, [0, 1, 1, 0], ["a", "b", "c", "d"], partition=partition)
        >>> clients.client_names.tolist()
        ['a + b', 'c + d']
    """

    name = "grouped"
    needs_classes = False
    members: int = hyperparameter(2, at_least=1, help="number of the data's clients in a client")

    def assign(
        self, source: Source, num_clients: int | None, splits: Splits, seed: int
    ) -> Assignment:
        if source.client is None:
            text = f"{source.name} has no client ids; accepted: all others"
            raise ArgumentError("partition", text, self.name)
        ids, number = np.unique(source.client, return_inverse=True)
        names = ids if source.client_names is None else source.client_names[ids]
        joined = [
            " + ".join(map(str, names[start : start + self.members]))
            for start in range(0, len(ids), self.members)
        ]
        grouped = dataclasses.replace(
            source, client=number // self.members, client_names=np.array(joined), group=None
        )
        return Natural().assign(grouped, num_clients, splits, seed)


PARTITIONS: dict[str, type[Partition]] = {
    cls.name: cls
    for cls in (
        IID,
        LabelGroups,
        LabelDirichlet,
        Dirichlet,
        Pathological,
        Pairs,
        Shards,
        InnerDirichlet,
        Latent,
        Pachinko,
        Sizes,
        Quantiles,
        QuantileDirichlet,
        Time,
        Natural,
        Grouped,
    )
}
OF_NUMBERS = (Quantiles.name, QuantileDirichlet.name)  # need one number per example
# Words for partitions of other fields -> why they are none here
REFUSED = {
    "vertical": "splits the features of the same examples, not the examples; pfljax simulates horizontal federations. "
    "Its columns can be split with VerticalSizePartitioner of flwr-datasets, for a library of vertical federated "
    "learning"
}


OBJECTS = f"an object of pfl.partitions ({', '.join(cls.__name__ for cls in PARTITIONS.values())})"
Choice = Annotated[Partition, hyperparameter(accepted=OBJECTS)]


def default(source: Source) -> Partition:
    """Natural if the examples have clients, otherwise two label groups; random for regression and sequences."""
    if source.client is not None:
        return Natural()
    return LabelGroups() if _has_one_class(source) else IID()


def __dir__() -> list[str]:
    return sorted(__all__)


@checked()
def assign(
    source: Source,
    partition: Choice,
    *,
    num_clients: NumClients | None = None,
    splits: Splits | None = None,
    seed: Seed = 0,
) -> Assignment:
    """Assigns the examples of a source to clients.

    Args:
        source: The examples.
        partition: The partition.
        num_clients: K; None: all clients of a natural partition, otherwise 16. If a natural partition has more clients,
            K of them are drawn uniformly.
        splits: Whether test examples are given, and whether clients share examples.
        seed: Random seed.

    Raises:
        ArgumentError: if the partition does not fit the source, or there are too few examples.
    """
    splits = splits or Splits()
    if splits.official_test and source.is_test is None:
        raise ArgumentError("official_test", f"{source.name} has no official test examples")
    others = [name for name, cls in PARTITIONS.items() if not cls.needs_classes]
    if partition.needs_classes and source.task != "classification":
        text = f"needs classes; accepted for {source.task}: {', '.join(others)}"
        raise ArgumentError("partition", text, partition.name)
    if partition.needs_classes and source.y.ndim > 1:
        others = [name for name in others if name not in OF_NUMBERS]
        text = f"needs one class per example; accepted for sequences: {', '.join(others)}"
        raise ArgumentError("partition", text, partition.name)
    return partition.assign(source, num_clients, splits, seed)


def _has_one_class(source: Source) -> bool:
    """Whether every example has exactly one class."""
    return source.task == "classification" and source.y.ndim == 1


def _most_clients(source: Source, is_test: np.ndarray | None) -> int:
    """The largest number of clients with an example to train on and one to test on."""
    if is_test is None:
        return len(source.y) // MIN_EXAMPLES
    return int(min(is_test.sum(), (~is_test).sum()))


def _as_int32(group: np.ndarray | None) -> np.ndarray | None:
    return None if group is None else group.astype(np.int32)


def _refuse_replacement(splits: Splits) -> None:
    if splits.replacement:
        names = [name for name, cls in PARTITIONS.items() if cls.assign is not Partition.assign]
        raise ArgumentError("replacement", f"accepted with all partitions except {listed(names)}")


def _numbers(source: Source, name: str) -> np.ndarray:
    """(n,) the target of each example. Raises `ArgumentError` if it is not one number."""
    if source.y.ndim > 1:
        text = f"needs one number per example; {source.name} has y {source.y.shape}"
        raise ArgumentError("partition", text, name)
    return source.y.astype(np.float64)


def _ranges(values: np.ndarray, num_ranges: int, rng: np.random.Generator) -> np.ndarray:
    """(n,) the range of each value, if ranges have equally many values; draws which of equal values is first."""
    return _equal_runs(np.lexsort((rng.random(len(values)), values)), num_ranges)


def _equal_runs(order: np.ndarray, num_runs: int) -> np.ndarray:
    """(n,) the run of each example, if an order (n,) is cut into runs whose lengths differ by at most one."""
    run = np.empty(len(order), int)
    run[order] = np.arange(len(order)) * num_runs // len(order)
    return run


def _capped(share: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Shares (K, C) in which a client gets nothing of a class once it has an even share of all examples.

    Args:
        share: (K, C) the clients' shares of the classes.
        sizes: (C,) numbers of examples of the classes.
    """
    num_clients = len(share)
    has_fewer = np.ones(num_clients, bool)
    capped = np.zeros_like(share)
    total = np.zeros(num_clients)
    for label, size in enumerate(sizes):
        if has_fewer.any():
            capped[:, label] = share[:, label] * has_fewer
        else:
            # Rounding can let all clients have their share before the last class.
            capped[:, label] = share[:, label]
        capped[:, label] /= capped[:, label].sum()
        total += capped[:, label] * size
        has_fewer = total < sizes.sum() / num_clients
    return capped


def _assign_drawn(
    source: Source,
    pool: np.ndarray,
    drawn: Callable[[np.random.Generator, np.ndarray], list[np.ndarray]],
    num_clients: int,
    splits: Splits,
    seed: int,
    name: str,
) -> Assignment:
    """An assignment in which clients draw examples from pools, and get official test examples in proportion.

    Args:
        source: The examples.
        pool: (n,) the pool of each example.
        drawn: Random generator and the pools of the examples to draw -> their positions, for each client.
        num_clients: K.
        splits: Whether the official test examples are the clients'.
        seed: Random seed.
        name: Name of the partition, for messages.
    """
    is_test = source.is_test if splits.official_test else None
    possible = _most_clients(source, is_test)
    if num_clients > possible:
        text = f"too many for two examples per client with partition={name}"
        raise ArgumentError("num_clients", f"{text}; accepted: up to {possible}", num_clients)
    rng = generator(seed, "partition")
    train = np.arange(len(pool)) if is_test is None else np.flatnonzero(~is_test)
    indices = [train[positions] for positions in drawn(rng, pool[train])]
    if is_test is not None:
        num_pools = int(pool.max()) + 1
        counts = np.array([np.bincount(pool[ids], minlength=num_pools) for ids in indices])
        even = Pools(pool, np.full(counts.shape, 1 / num_clients))
        tests = deal_tests(rng, even, counts, name, is_test)
        indices = [np.concatenate(ids) for ids in zip(indices, tests, strict=True)]
    return Assignment(indices, None, is_test)


def _in_turns(
    rng: np.random.Generator, classes: np.ndarray, num_clients: int, alpha: float
) -> list[np.ndarray]:
    """The examples that each of K clients draws from shares of its own; see `InnerDirichlet`.

    Args:
        rng: Random generator.
        classes: (n,) the class of each example.
        num_clients: K.
        alpha: Dirichlet concentration of a client's shares.
    """
    num_classes = int(classes.max()) + 1
    members = [rng.permutation(ids) for ids in pool_members(classes, num_classes)]
    left = np.bincount(classes, minlength=num_classes)
    # With a small alpha, all shares but one can underflow; their logarithms cannot.
    log_share = np.log(rng.standard_gamma(alpha + 1, (num_clients, num_classes)))
    log_share -= rng.standard_exponential((num_clients, num_classes)) / alpha
    need = np.diff(np.arange(num_clients + 1) * len(classes) // num_clients)
    indices: list[list[int]] = [[] for _ in range(num_clients)]
    while need.any():
        # A class with the largest of log share + Gumbel noise is a draw from the shares of those left.
        turns = rng.permutation(np.flatnonzero(need))
        score = log_share[turns] + rng.gumbel(size=(len(turns), num_classes))
        label_drawn = np.argmax(np.where(left > 0, score, -np.inf), axis=1)
        for client, label in zip(turns.tolist(), label_drawn.tolist(), strict=True):
            # Whose class has been used up in this turn draws again in the next one.
            if left[label]:
                left[label] -= 1
                need[client] -= 1
                indices[client].append(members[label][left[label]])
    return [np.array(ids) for ids in indices]


def _check_at_most(argument: str, number: int, num_clients: int) -> None:
    if number > num_clients:
        raise ArgumentError(argument, f"accepted: at most num_clients={num_clients}", number)


def _one_pool_a_client(
    rng: np.random.Generator, num_clients: int, num_pools: int, pool: np.ndarray
) -> Pools:
    """Every client has examples from one pool; the pools' numbers of clients differ by at most one."""
    group = rng.permutation(np.arange(num_clients) % num_pools)
    return Pools(pool, _evenly(np.eye(num_pools)[group]), group)


def _label_groups(rng: np.random.Generator, y: np.ndarray, num_groups: int) -> np.ndarray:
    """(n,) group of each example; classes are divided at random into groups of nearly equal size."""
    present = np.unique(y)
    if num_groups > len(present):
        raise ArgumentError(
            "groups", f"accepted: 1 to {len(present)}, the number of classes", num_groups
        )
    group = np.zeros(present[-1] + 1, int)
    group[rng.permutation(present)] = np.sort(np.arange(len(present)) % num_groups)
    return group[y]


def _class_sets(rng: np.random.Generator, y: np.ndarray, num_sets: int, size: int) -> np.ndarray:
    """(num_sets, C) bool, sets of `size` classes; the classes' numbers of sets differ by at most one."""
    present = np.unique(y)
    if size > len(present):
        raise ArgumentError(
            "classes", f"accepted: 1 to {len(present)}, the number of classes", size
        )
    members = np.zeros((num_sets, present[-1] + 1))
    count = np.zeros(len(present))
    for row in members:
        # The classes of the fewest sets so far, ties in random order
        rarest = np.lexsort((rng.random(len(present)), count))[:size]
        row[present[rarest]] = 1
        count[rarest] += 1
    return members


def _evenly(members: np.ndarray) -> np.ndarray:
    """(K, P) shares that split each pool evenly among its clients, which `members` (K, P) marks with 1."""
    return members / np.maximum(members.sum(axis=0), 1)


def _pachinko(
    rng: np.random.Generator, pool: np.ndarray, parent: np.ndarray, num_clients: int, alpha: float
) -> list[np.ndarray]:
    """The examples of each client.

    Args:
        rng: Random generator.
        pool: (n,) the fine label of each example.
        parent: (F,) the coarse label of each fine label.
        num_clients: K.
        alpha: Dirichlet concentration of the coarse labels.
    """
    num_fine = len(parent)
    num_coarse = int(parent.max()) + 1
    members = [rng.permutation(positions) for positions in pool_members(pool, num_fine)]
    left = np.bincount(pool, minlength=num_fine)
    indices = []
    for _ in range(num_clients):
        # With a small alpha, all shares but one can underflow; their logarithms cannot.
        log_share = np.log(rng.standard_gamma(alpha + 1, num_coarse))
        log_share = log_share - rng.standard_exponential(num_coarse) / alpha
        beta = rng.standard_gamma(PACHINKO_BETA, num_fine)
        drawn = []
        need = len(pool) // num_clients
        while need:
            shares = _pachinko_shares(log_share, beta, parent, left > 0)
            labels = rng.choice(num_fine, need, p=shares)
            # These draws are valid until one uses up a label; the remaining examples are then drawn again.
            used_up = (np.bincount(labels, minlength=num_fine) >= left) & (left > 0)
            num_valid = need
            for label in np.flatnonzero(used_up):
                last = np.flatnonzero(labels == label)[left[label] - 1]
                num_valid = min(num_valid, last + 1)
            count = np.bincount(labels[:num_valid], minlength=num_fine)
            left -= count
            for label in np.flatnonzero(count):
                start = left[label]
                drawn.append(members[label][start : start + count[label]])
            need -= num_valid
        indices.append(np.concatenate(drawn))
    return indices


def _pachinko_shares(
    log_share: np.ndarray, beta: np.ndarray, parent: np.ndarray, is_left: np.ndarray
) -> np.ndarray:
    """Probability of each fine label: that of its coarse label times its own within it.

    Args:
        log_share: (C,) logarithms of the coarse labels' shares, up to a constant.
        beta: (F,) the fine labels' shares within their coarse label, up to a factor.
        parent: (F,) the coarse label of each fine label.
        is_left: (F,) bool, the fine labels with examples left.

    Returns:
        (F,) probabilities, 0 for labels without examples.
    """
    beta = beta * is_left
    # The sum is 0 for coarse labels that are used up.
    total = np.bincount(parent, beta)
    log_share = np.where(total > 0, log_share, -np.inf)
    share = np.exp(log_share - log_share.max())
    share = share / share.sum() / np.where(total > 0, total, 1)
    return share[parent] * beta
