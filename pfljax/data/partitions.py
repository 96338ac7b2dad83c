"""Partitions of examples among clients.

Most partitions divide the examples into pools (label groups, classes) and define the share of each pool that goes to
each client. A common dealer then gives each example to one client; with replacement, the shares instead define the
clients' label distributions, and each client draws from its own independently.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

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
    members_of,
    set_apart,
    too_many,
)
from pfljax.data.sources.source import Source, dirichlet_draws, generator
from pfljax.data.splits import Splits
from pfljax.settings.fields import NumClients, Seed, check, checked, hyperparameter, settings

DEFAULT_CLIENTS = 16
ALPHA = "Dirichlet concentration; smaller: clients differ more"
PACHINKO_BETA = 10  # concentration of fine labels within a coarse label


class Partition:
    """A partition of examples among clients. To define your own, subclass it with a `name` and `pools`.

    Attributes:
        name: Name in titles, messages and the command line.
        needs_classes: Whether every example must have exactly one class.
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
        """
        raise NotImplementedError

    def assign(
        self, source: Source, num_clients: int | None, splits: Splits, seed: int
    ) -> Assignment:
        """Deals each example in the pools to one client, or lets clients draw with replacement."""
        num_clients = _given(num_clients)
        is_test = source.is_test if splits.official_test else None
        possible = len(source.y) // MIN_EXAMPLES
        if is_test is not None:  # a client needs one example of each part
            possible = int(min(is_test.sum(), (~is_test).sum()))
        if num_clients > possible and not splits.replacement:
            raise too_many(num_clients, self.name, possible)
        rng = generator(seed, "partition")
        pools = self.pools(source, num_clients, rng, seed)
        if splits.replacement:
            fraction = splits.test_fraction
            if is_test is None:
                is_test = set_apart(rng, pools.pool, fraction)
            tests = max(1, round(splits.train_examples * fraction / (1 - fraction)))
            parts = (
                draw(rng, pools, ~is_test, splits.train_examples),
                draw(rng, pools, is_test, tests),
            )
            indices = [np.concatenate(both) for both in zip(*parts, strict=True)]
        else:
            classes = source.y if source.task == "classification" and source.y.ndim == 1 else None
            indices = deal(rng, pools, self.name, is_test, classes)
        return Assignment(indices, _as_int32(pools.group), is_test)


@settings
class IID(Partition):
    """Every client gets an equal share of all examples."""

    name = "iid"
    needs_classes = False

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        everyone = np.zeros(num_clients, int)
        return Pools(
            np.zeros(len(source.y), int), np.full((num_clients, 1), 1 / num_clients), everyone
        )


@settings
class LabelGroups(Partition):
    """Disjoint label groups; each client has examples from one group (FedeRiCo, Section 4.1).

    Attributes:
        balanced: Whether the numbers of clients per group differ by at most one. Otherwise each client's group is drawn
            at random, as in the paper, and a group may have no clients.
    """

    name = "label_groups"
    groups: int = hyperparameter(2, at_least=1, help="number of label groups")
    balanced: bool = True

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        if self.balanced:
            _at_most("groups", self.groups, num_clients)
            return _one_pool_a_client(
                rng, num_clients, self.groups, _label_groups(rng, source.y, self.groups)
            )
        pool = _label_groups(rng, source.y, self.groups)
        group = rng.integers(self.groups, size=num_clients)
        return Pools(pool, _evenly(np.eye(self.groups)[group]), group)


@settings
class LabelDirichlet(Partition):
    """Label groups; a Dirichlet draw spreads each group over all clients (FedeRiCo, Table 4; FedEM)."""

    name = "label_dirichlet"
    groups: int = hyperparameter(2, at_least=1, help="number of label groups")
    alpha: float = hyperparameter(0.4, above=0, help=ALPHA)

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        pool = _label_groups(rng, source.y, self.groups)
        return Pools(pool, dirichlet_draws(rng, self.groups, num_clients, self.alpha).T)


@settings
class Dirichlet(Partition):
    """A symmetric Dirichlet draw per class spreads it over all clients (Hsu et al., 2019; FedEM)."""

    name = "dirichlet"
    alpha: float = hyperparameter(0.4, above=0, help=ALPHA)

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        return Pools(source.y, dirichlet_draws(rng, source.y.max() + 1, num_clients, self.alpha).T)


@settings
class Pathological(Partition):
    """Each client has a few classes, each split evenly among its clients (after McMahan et al., 2017).

    If a class has fewer examples than clients, some of its clients get none. Clients with the same classes are of
    the same group.
    """

    name = "pathological"
    classes: int = hyperparameter(2, at_least=1, help="number of classes per client")

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        held = _class_sets(rng, source.y, num_clients, self.classes)
        return Pools(source.y, _evenly(held), np.unique(held, axis=0, return_inverse=True)[1])


@settings
class Pairs(Partition):
    """Clients 2i and 2i + 1 have the same classes (pFedMB, Section 4)."""

    name = "pairs"
    classes: int = hyperparameter(2, at_least=1, help="number of classes per client")

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        if num_clients % 2:
            raise ArgumentError(
                "num_clients", "accepted with partition=pairs: even numbers", num_clients
            )
        held = np.repeat(_class_sets(rng, source.y, num_clients // 2, self.classes), 2, axis=0)
        return Pools(source.y, _evenly(held), np.arange(num_clients) // 2)


@settings
class Latent(Partition):
    """Clusters of similar examples; each client has examples from one cluster (FedFomo, Appendix A.5).

    Attributes:
        embedding: Embedding of examples before clustering: a function of the source that returns (n, F), such as an
            `Embedding`; None: pixels.
        cache: Folder for embeddings and clusterings; None: `host.cache_folder`.
    """

    name = "latent"
    groups: int = hyperparameter(2, at_least=1, help="number of clusters of similar examples")
    embedding: latent.Embed | None = hyperparameter(
        None, accepted="None, or a function of the source that returns (n, F), such as an Embedding"
    )
    cache: str | None = None

    def pools(self, source: Source, num_clients: int, rng: np.random.Generator, seed: int) -> Pools:
        _at_most("groups", self.groups, num_clients)
        pool = latent.clusters(source, self.embedding, self.groups, seed, self.cache)
        return _one_pool_a_client(rng, num_clients, self.groups, pool)


@settings
class Pachinko(Partition):
    """Two-level Pachinko allocation (Reddi et al., 2021): clients draw equally many examples, one by one.

    Each client has its own Dirichlet shares of coarse labels and of fine labels within each. It draws a coarse label,
    then a fine label, then one of its examples not yet taken. Labels with no examples left drop out.
    """

    name = "pachinko"
    alpha: float = hyperparameter(0.4, above=0, help=ALPHA)

    def assign(
        self, source: Source, num_clients: int | None, splits: Splits, seed: int
    ) -> Assignment:
        _refuse_replacement(splits)
        if source.coarse is None:
            raise ArgumentError("partition", f"{source.name} has no coarse labels", self.name)
        num_clients = _given(num_clients)
        is_test = source.is_test if splits.official_test else None
        possible = len(source.y) // MIN_EXAMPLES
        if is_test is not None:  # a client needs one example of each part
            possible = int(min(is_test.sum(), (~is_test).sum()))
        if num_clients > possible:
            text = f"too many for two examples per client with partition=pachinko; accepted: up to {possible}"
            raise ArgumentError("num_clients", text, num_clients)
        coarse = np.unique(source.coarse, return_inverse=True)[1]
        fine, pool = np.unique(coarse * source.num_classes + source.y, return_inverse=True)
        parent = fine // source.num_classes  # the coarse label of each fine label
        rng = generator(seed, "partition")
        train = np.arange(len(pool)) if is_test is None else np.flatnonzero(~is_test)
        drawn = _pachinko(rng, pool[train], parent, num_clients, self.alpha)
        indices = [train[own] for own in drawn]
        if is_test is not None:
            counts = np.array([np.bincount(pool[own], minlength=len(fine)) for own in indices])
            even = Pools(pool, np.full(counts.shape, 1 / num_clients))
            tests = deal_tests(rng, even, counts, self.name, is_test)
            indices = [np.concatenate(both) for both in zip(indices, tests, strict=True)]
        return Assignment(indices, None, is_test)


@settings
class Natural(Partition):
    """The source's own clients with at least two examples, or `num_clients` of them, in their original order."""

    name = "natural"
    needs_classes = False

    def assign(
        self, source: Source, num_clients: int | None, splits: Splits, seed: int
    ) -> Assignment:
        _refuse_replacement(splits)
        if source.client is None:
            raise ArgumentError(
                "partition", f"{source.name} has no client ids; accepted: all others", self.name
            )
        order = np.argsort(source.client, kind="stable")
        ids, start, size = np.unique(source.client[order], return_index=True, return_counts=True)
        able = np.flatnonzero(size >= MIN_EXAMPLES)
        if not len(able):
            raise ArgumentError(
                "partition", f"no client in {source.name} has two examples", self.name
            )
        if len(able) < len(ids):
            text = f"{len(ids) - len(able)} of {len(ids)} clients have a single example and are left out"
            warn("client", f"{text}; a client needs one example to train on and one to test on")
        if num_clients is not None and not 1 <= num_clients <= len(able):
            text = f"{source.name} has {len(able)} clients with at least two examples; accepted: 1 to {len(able)}"
            raise ArgumentError("num_clients", text, num_clients)
        rng = generator(seed, "partition")
        chosen = (
            able if num_clients is None else np.sort(rng.choice(able, num_clients, replace=False))
        )
        indices = [order[start[k] : start[k] + size[k]] for k in chosen]
        group = None if source.group is None else source.group[ids[chosen]]
        names = None if source.client_names is None else source.client_names[ids[chosen]]
        is_test = source.is_test if splits.official_test else None
        return Assignment(indices, _as_int32(group), is_test, names)


PARTITIONS: dict[str, type[Partition]] = {
    cls.name: cls
    for cls in (
        IID,
        LabelGroups,
        LabelDirichlet,
        Dirichlet,
        Pathological,
        Pairs,
        Latent,
        Pachinko,
        Natural,
    )
}


OBJECTS = f"an object of pfl.partitions ({', '.join(cls.__name__ for cls in PARTITIONS.values())})"
Choice = Annotated[Partition, hyperparameter(accepted=OBJECTS)]


def default(source: Source) -> Partition:
    """Natural if the examples have clients, otherwise two label groups; random for regression and sequences."""
    if source.client is not None:
        return Natural()
    return LabelGroups() if source.task == "classification" and source.y.ndim == 1 else IID()


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
    if partition.needs_classes and source.task != "classification":
        text = f"needs classes; accepted for {source.task}: iid, natural"
        raise ArgumentError("partition", text, partition.name)
    if partition.needs_classes and source.y.ndim > 1:
        text = "needs one class per example; accepted for sequences: iid, natural"
        raise ArgumentError("partition", text, partition.name)
    return partition.assign(source, num_clients, splits, seed)


def _given(num_clients: int | None) -> int:
    """K for a partition that is not natural."""
    return DEFAULT_CLIENTS if num_clients is None else num_clients


def _as_int32(group: np.ndarray | None) -> np.ndarray | None:
    return None if group is None else group.astype(np.int32)


def _refuse_replacement(splits: Splits) -> None:
    if splits.replacement:
        raise ArgumentError(
            "replacement", "accepted with all partitions except natural and pachinko"
        )


def _at_most(argument: str, number: int, num_clients: int) -> None:
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
    held = np.zeros((num_sets, present[-1] + 1))
    holders = np.zeros(len(present))
    for row in held:
        rarest = np.lexsort((rng.random(len(present)), holders))[:size]  # ties in random order
        row[present[rarest]] = 1
        holders[rarest] += 1
    return held


def _evenly(held: np.ndarray) -> np.ndarray:
    """(K, P) shares that split each pool evenly among its clients."""
    return held / np.maximum(held.sum(axis=0), 1)


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
    left = np.bincount(pool, minlength=num_fine)
    members = [rng.permutation(own) for own in members_of(pool, num_fine)]
    num_coarse = int(parent.max()) + 1
    indices = []
    for _ in range(num_clients):
        # With a small alpha, all shares but one can underflow; their logarithms cannot.
        log_share = (
            np.log(rng.standard_gamma(alpha + 1, num_coarse))
            - rng.standard_exponential(num_coarse) / alpha
        )
        beta = rng.standard_gamma(PACHINKO_BETA, num_fine)
        own = []
        need = len(pool) // num_clients
        while need:
            fines = rng.choice(
                num_fine, need, p=_pachinko_shares(log_share, beta, parent, left > 0)
            )
            # These draws are valid until one uses up a label; the remaining examples are then drawn again.
            used_up = np.flatnonzero((np.bincount(fines, minlength=num_fine) >= left) & (left > 0))
            drawn = min(
                (np.flatnonzero(fines == f)[left[f] - 1] + 1 for f in used_up), default=need
            )
            count = np.bincount(fines[:drawn], minlength=num_fine)
            left -= count
            own += [members[f][left[f] : left[f] + count[f]] for f in np.flatnonzero(count)]
            need -= drawn
        indices.append(np.concatenate(own))
    return indices


def _pachinko_shares(
    log_share: np.ndarray, beta: np.ndarray, parent: np.ndarray, there: np.ndarray
) -> np.ndarray:
    """(F,) probability of each fine label: its coarse label's among those `there` (F,), times its own within it."""
    beta = beta * there
    total = np.bincount(parent, beta)  # 0 for used-up coarse labels
    log_share = np.where(total > 0, log_share, -np.inf)
    share = np.exp(log_share - log_share.max())
    return (share / share.sum() / np.where(total > 0, total, 1))[parent] * beta
