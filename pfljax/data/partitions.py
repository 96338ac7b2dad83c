"""Who gets which examples.

A partition is a plan: it divides the examples into pools (label groups, classes) and says which share of each
pool goes to which client. One dealer realizes all plans, giving each example to one client; with replacement
the shares make up the clients' label distributions instead, from which each draws on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pfljax.core.types import UsageError
from pfljax.data.sources import Source, check_concentration, dirichlet_draws, generator, unknown

MIN_EXAMPLES = 2  # one to train on and one to test on
PACHINKO_BETA = 10  # concentration of the fine labels within a coarse one


class Assignment(NamedTuple):
    """Which examples each of K clients has."""

    indices: list[np.ndarray]  # K arrays of example ids, without repetition
    distribution: np.ndarray  # (K,) int32, the true distribution of each client
    is_test: np.ndarray | None = None  # (n,) bool, test examples of whoever has them; None: split within each client


class Plan(NamedTuple):
    """Pools of examples, and who shares in them."""

    pool: np.ndarray  # (n,) int: the pool of each example, 0..P-1
    share: np.ndarray  # (K, P): the share of pool p that goes to client k; a column sums to 1, or is 0 (unused)
    distribution: np.ndarray | None = None  # (K,) int32; None: the pool that a client has most examples of


def partition(
    name: str,
    source: Source,
    *,
    num_clients: int = 0,
    num_distributions: int = 2,
    dirichlet_alpha: float = 0.4,
    classes_per_client: int = 2,
    replacement: bool = False,
    train_examples: int = 0,
    test_fraction: float = 0.2,
    official_test: bool = False,
    clusters: Callable[[], np.ndarray] | None = None,
    seed: int = 0,
) -> Assignment:
    """Assigns the examples of a source to clients.

    Args:
        name: One of NAMES.
        source: The examples.
        num_clients: K; for "natural" 0 means all that have two examples, and fewer are drawn uniformly.
        num_distributions: Label groups D of label_groups and label_dirichlet.
        dirichlet_alpha: Concentration of label_dirichlet, dirichlet and pachinko.
        classes_per_client: Classes that a client holds, of pathological and pairs.
        replacement: Whether clients share examples: each draws `train_examples` to train on, and examples to
            test on in proportion, from its own label distribution; fewer where its pools hold fewer, none twice.
        train_examples: The size of the training part that is drawn with replacement.
        test_fraction: The share of a client's examples that will be for testing. With replacement this share
            of every pool is set apart for the tests of all clients, or else most of one client's test
            examples would be training examples of another.
        official_test: Whether the source's own test examples are the clients' test examples.
        clusters: For "latent": gives the cluster (n,) of each example.
        seed: Decides everything.

    Raises:
        UsageError: If the name is unknown, a knob is out of range or the examples are too few.
    """
    if name not in NAMES:
        raise unknown("--partition", name, NAMES)
    if official_test and source.is_test is None:
        raise UsageError(f"--official_test: {source.name} has no official test examples")
    if not 0 < test_fraction < 1:
        raise UsageError(f"--test_fraction={test_fraction}: accepted is a share in (0, 1)")
    rng = generator(seed, "partition")
    is_test = source.is_test if official_test else None
    if replacement and name in ("natural", "pachinko"):
        raise UsageError("--replacement: accepted are all partitions but natural and pachinko")
    if name == "natural":
        return _natural(rng, source, num_clients)._replace(is_test=is_test)
    if source.task == "regression" and name != "iid":
        raise UsageError(f"--partition={name}: needs classes; accepted for a regression are iid and natural")
    if source.y.ndim > 1 and name != "iid":
        raise UsageError(f"--partition={name}: needs one class an example; accepted for sequences are iid and natural")
    if num_clients < 1:
        raise UsageError(f"--num_clients={num_clients}: --partition={name} needs at least 1")
    if name == "pachinko":
        return _pachinko(rng, source, num_clients, dirichlet_alpha)._replace(is_test=is_test)
    knobs = {
        "num_distributions": num_distributions,
        "dirichlet_alpha": dirichlet_alpha,
        "classes_per_client": classes_per_client,
    }
    if name == "latent":
        plan = _one_pool_a_client(rng, num_clients, num_distributions, clusters)
    else:
        plan = PARTITIONS[name](rng, source.y, num_clients, **knobs)
    if replacement:
        if train_examples < 1:
            raise UsageError("--replacement: needs --train_examples, at least 1, for each client to draw")
        if is_test is None:
            is_test = _set_apart(rng, plan.pool, test_fraction)
        tests = max(1, round(train_examples * test_fraction / (1 - test_fraction)))
        parts = [_draw(rng, plan, ~is_test, train_examples), _draw(rng, plan, is_test, tests)]
        indices = [np.concatenate(both) for both in zip(*parts, strict=True)]
    else:
        indices = _deal(rng, plan, name)
    distribution = _largest_pool(indices, plan.pool) if plan.distribution is None else plan.distribution
    return Assignment(indices, distribution.astype(np.int32), is_test)


def iid(rng: np.random.Generator, y: np.ndarray, num_clients: int, **_) -> Plan:
    """Everyone has an equal part of everything."""
    return Plan(np.zeros(len(y), int), np.full((num_clients, 1), 1 / num_clients))


def label_groups(rng: np.random.Generator, y: np.ndarray, num_clients: int, *, num_distributions: int, **_) -> Plan:
    """Disjoint label groups; each client has examples of one (FedeRiCo, Section 4.1)."""
    return _one_pool_a_client(rng, num_clients, num_distributions, lambda: _label_groups(rng, y, num_distributions))


def label_dirichlet(
    rng: np.random.Generator,
    y: np.ndarray,
    num_clients: int,
    *,
    num_distributions: int,
    dirichlet_alpha: float,
    **_,
) -> Plan:
    """Label groups, each spread over all clients by one Dirichlet draw (FedeRiCo, Table 4; FedEM)."""
    pool = _label_groups(rng, y, num_distributions)
    return Plan(pool, _dirichlet_shares(rng, num_clients, num_distributions, dirichlet_alpha))


def dirichlet(rng: np.random.Generator, y: np.ndarray, num_clients: int, *, dirichlet_alpha: float, **_) -> Plan:
    """Each class is spread over all clients by its own symmetric Dirichlet draw (Hsu et al., 2019; FedEM)."""
    return Plan(y, _dirichlet_shares(rng, num_clients, y.max() + 1, dirichlet_alpha))


def pathological(rng: np.random.Generator, y: np.ndarray, num_clients: int, *, classes_per_client: int, **_) -> Plan:
    """Each client has a few classes, each split evenly among its holders (after McMahan et al., 2017).

    A class with fewer examples than holders leaves some of them without it. Clients with the same
    classes have the same distribution.
    """
    held = _class_sets(rng, y, num_clients, classes_per_client)
    return Plan(y, _evenly(held), np.unique(held, axis=0, return_inverse=True)[1])


def pairs(rng: np.random.Generator, y: np.ndarray, num_clients: int, *, classes_per_client: int, **_) -> Plan:
    """Clients 2i and 2i + 1 have the same classes (pFedMB, Section 4)."""
    if num_clients % 2:
        raise UsageError(f"--num_clients={num_clients}: --partition=pairs needs an even number")
    held = np.repeat(_class_sets(rng, y, num_clients // 2, classes_per_client), 2, axis=0)
    return Plan(y, _evenly(held), np.arange(num_clients) // 2)


PARTITIONS: dict[str, Callable[..., Plan]] = {
    "iid": iid,
    "label_groups": label_groups,
    "label_dirichlet": label_dirichlet,
    "dirichlet": dirichlet,
    "pathological": pathological,
    "pairs": pairs,
}
# latent needs more than the labels; the last two have no plan: one draws in turn, one goes by client ids.
NAMES = (*PARTITIONS, "latent", "pachinko", "natural")


def _one_pool_a_client(
    rng: np.random.Generator, num_clients: int, num_pools: int, pools: Callable[[], np.ndarray]
) -> Plan:
    """Every client has examples of one pool, and every pool as many clients, or one more."""
    if num_pools > num_clients:
        raise UsageError(f"--num_distributions={num_pools}: accepted is at most --num_clients={num_clients}")
    pool = pools()
    group = rng.permutation(np.arange(num_clients) % num_pools)
    return Plan(pool, _evenly(np.eye(num_pools)[group]), group)


def _label_groups(rng: np.random.Generator, y: np.ndarray, num_groups: int) -> np.ndarray:
    """(n,) the group of each example: the classes divided at random into groups of nearly equal numbers."""
    present = np.unique(y)
    if not 1 <= num_groups <= len(present):
        raise UsageError(f"--num_distributions={num_groups}: accepted are 1 to {len(present)}, the classes there are")
    group = np.zeros(present[-1] + 1, int)
    group[rng.permutation(present)] = np.sort(np.arange(len(present)) % num_groups)
    return group[y]


def _class_sets(rng: np.random.Generator, y: np.ndarray, num_sets: int, size: int) -> np.ndarray:
    """(num_sets, C) whether a set has a class, `size` in each; no class is in two sets more than another."""
    present = np.unique(y)
    if not 1 <= size <= len(present):
        raise UsageError(f"--classes_per_client={size}: accepted are 1 to {len(present)}, the classes there are")
    held, holders = np.zeros((num_sets, present[-1] + 1)), np.zeros(len(present))
    for row in held:
        rarest = np.lexsort((rng.random(len(present)), holders))[:size]  # ties in random order
        row[present[rarest]] = 1
        holders[rarest] += 1
    return held


def _evenly(held: np.ndarray) -> np.ndarray:
    """(K, P) shares where each pool is split evenly among its holders."""
    return held / np.maximum(held.sum(axis=0), 1)


def _dirichlet_shares(rng: np.random.Generator, num_clients: int, num_pools: int, alpha: float) -> np.ndarray:
    """(K, P) shares, each column one symmetric Dirichlet draw: anyone may get some of every pool."""
    return dirichlet_draws(rng, num_pools, num_clients, alpha).T


def _deal(rng: np.random.Generator, plan: Plan, name: str) -> list[np.ndarray]:
    """Gives every example of a pool to one client, as many as its share says, and everyone at least two."""
    members = [rng.permutation(np.flatnonzero(plan.pool == p)) for p in range(plan.share.shape[1])]
    sizes = np.array([len(ids) for ids in members])
    num_clients = len(plan.share)
    edges = np.rint(np.cumsum(plan.share, axis=0) * sizes).astype(int)
    counts = np.diff(edges, axis=0, prepend=0)  # (K, P), within 1 of share x size
    if not _feed(counts, plan.share):
        held = plan.share > 0
        room = (held * (sizes / np.maximum(held.sum(axis=0), 1))).sum(axis=1).min()
        possible = int(num_clients * room / MIN_EXAMPLES)
        raise UsageError(
            f"--num_clients={num_clients}: too many for two examples a client by --partition={name}; accepted "
            f"are up to about {possible}, and any number with --replacement, where clients share examples"
        )
    ids = np.concatenate([ids[: counts[:, p].sum()] for p, ids in enumerate(members)])
    owner = np.concatenate([np.repeat(np.arange(num_clients), column) for column in counts.T])
    return np.split(ids[np.argsort(owner, kind="stable")], np.cumsum(counts.sum(axis=1))[:-1])


def _feed(counts: np.ndarray, share: np.ndarray) -> bool:
    """Moves examples, in place, to clients with fewer than two; False if there are too few to move.

    A client takes from the pools that it has a share in, its largest share first, and there from the client
    with most. Nobody is served twice, so that this ends (drawing anew until all have enough may not).
    """
    total = counts.sum(axis=1)
    for k in np.flatnonzero(total < MIN_EXAMPLES):
        for p in np.argsort(-share[k], kind="stable"):
            while total[k] < MIN_EXAMPLES and share[k, p] > 0:
                spare = np.where(total > MIN_EXAMPLES, counts[:, p], 0)
                donor = np.argmax(spare)
                if not spare[donor]:
                    break
                counts[[donor, k], p] += (-1, 1)
                total[[donor, k]] += (-1, 1)
        if total[k] < MIN_EXAMPLES:
            return False
    return True


def _set_apart(rng: np.random.Generator, pool: np.ndarray, fraction: float) -> np.ndarray:
    """(n,) a random mask of `fraction` of every pool; of two examples or more one is in and one out."""
    mask = np.zeros(len(pool), bool)
    for p in np.unique(pool):
        ids = np.flatnonzero(pool == p)
        size = np.clip(round(fraction * len(ids)), 1, len(ids) - 1) if len(ids) > 1 else 0
        mask[rng.choice(ids, size, replace=False)] = True
    return mask


def _draw(rng: np.random.Generator, plan: Plan, among: np.ndarray, size: int) -> list[np.ndarray]:
    """Draws `size` examples for each client on its own, from those `among` (n,), none twice for a client."""
    members = [np.flatnonzero((plan.pool == p) & among) for p in range(plan.share.shape[1])]
    sizes = np.array([len(ids) for ids in members])
    weights = plan.share * sizes  # each client's distribution over pools, up to a factor
    if not weights.any(axis=1).all():
        raise UsageError("--replacement: there is a client whose classes have no example to train or to test on")
    counts = np.minimum(rng.multinomial(size, weights / weights.sum(axis=1, keepdims=True)), sizes)
    return [
        np.concatenate([rng.choice(members[p], row[p], replace=False) for p in np.flatnonzero(row)]) for row in counts
    ]


def _largest_pool(indices: list[np.ndarray], pool: np.ndarray) -> np.ndarray:
    """(K,) the pool that each client has most examples of."""
    num_pools = int(pool.max()) + 1
    owner = np.repeat(np.arange(len(indices)), [len(ids) for ids in indices])
    cells = owner * num_pools + pool[np.concatenate(indices)]
    return np.bincount(cells, minlength=len(indices) * num_pools).reshape(-1, num_pools).argmax(axis=1)


def _pachinko(rng: np.random.Generator, source: Source, num_clients: int, alpha: float) -> Assignment:
    """Two-level Pachinko allocation (Reddi et al., 2021): everyone draws as many examples, one after another.

    Each client has its own Dirichlet shares of the coarse labels and of the fine ones within each, and draws the
    coarse label, then the fine one, then one of its examples that nobody has. Labels without examples drop out.
    """
    if source.coarse is None:
        raise UsageError(f"--partition=pachinko: {source.name} has no coarse labels; accepted are data that have them")
    check_concentration(alpha)
    size = len(source.y) // num_clients
    if size < MIN_EXAMPLES:
        raise UsageError(
            f"--num_clients={num_clients}: too many for two examples a client by --partition=pachinko; accepted "
            f"are up to {len(source.y) // MIN_EXAMPLES}"
        )
    values, coarse = np.unique(source.coarse, return_inverse=True)
    fine, pool = np.unique(coarse * source.num_classes + source.y, return_inverse=True)
    parent = fine // source.num_classes  # the coarse label of each fine one
    left = np.bincount(pool)
    members = [rng.permutation(np.flatnonzero(pool == f)) for f in range(len(fine))]
    indices = []
    for _ in range(num_clients):
        # Of a small alpha's shares all but one can vanish in floating point, of their logarithms none.
        log_share = np.log(rng.standard_gamma(alpha + 1, len(values))) - rng.standard_exponential(len(values)) / alpha
        beta = rng.standard_gamma(PACHINKO_BETA, len(fine))
        own, need = [], size
        while need:
            fines = rng.choice(len(fine), need, p=_pachinko_shares(log_share, beta, parent, left > 0))
            # These draws hold up to the first that uses up a label; what is left is then drawn from anew.
            used_up = np.flatnonzero((np.bincount(fines, minlength=len(fine)) >= left) & (left > 0))
            drawn = min((np.flatnonzero(fines == f)[left[f] - 1] + 1 for f in used_up), default=need)
            count = np.bincount(fines[:drawn], minlength=len(fine))
            left -= count
            own += [members[f][left[f] : left[f] + count[f]] for f in np.flatnonzero(count)]
            need -= drawn
        indices.append(np.concatenate(own))
    return Assignment(indices, values[_largest_pool(indices, coarse)].astype(np.int32))


def _pachinko_shares(log_share: np.ndarray, beta: np.ndarray, parent: np.ndarray, there: np.ndarray) -> np.ndarray:
    """(F,) the chance of each fine label: its coarse label's among those there (F,), times its own within that."""
    beta = beta * there
    total = np.bincount(parent, beta)  # 0 for a coarse label that is used up
    log_share = np.where(total > 0, log_share, -np.inf)
    share = np.exp(log_share - log_share.max())
    return (share / share.sum() / np.where(total > 0, total, 1))[parent] * beta


def _natural(rng: np.random.Generator, source: Source, num_clients: int) -> Assignment:
    """The source's own clients that have two examples or more, or `num_clients` of them, in their order."""
    if source.client is None:
        raise UsageError(f"--partition=natural: {source.name} has no client ids; accepted: {', '.join(PARTITIONS)}")
    order = np.argsort(source.client, kind="stable")
    ids, start, size = np.unique(source.client[order], return_index=True, return_counts=True)
    able = np.flatnonzero(size >= MIN_EXAMPLES)
    if not len(able) or not 0 <= num_clients <= len(able):
        raise UsageError(
            f"--num_clients={num_clients}: {source.name} has {len(able)} clients with two examples or more; "
            "accepted are 1 to that many, and 0 for all"
        )
    chosen = np.sort(rng.choice(able, num_clients, replace=False)) if num_clients else able
    indices = [order[start[k] : start[k] + size[k]] for k in chosen]
    if source.distribution is not None:
        distribution = source.distribution[ids[chosen]]
    elif source.task == "classification":
        distribution = _largest_pool(indices, source.y)
    else:
        distribution = np.arange(len(chosen))  # nothing known: each its own
    return Assignment(indices, distribution.astype(np.int32))
