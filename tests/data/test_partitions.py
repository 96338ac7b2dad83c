"""Partitions: exact properties of the assignment of examples."""

import dataclasses
import itertools

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import Splits, partitions
from pfljax.data.partitions import (
    IID,
    PARTITIONS,
    Dirichlet,
    LabelDirichlet,
    LabelGroups,
    Latent,
    Natural,
    Pachinko,
    Pairs,
    Partition,
    Pathological,
    assign,
)
from pfljax.data.sources import Source
from pfljax.data.sources.source import generator

POOLED = [IID, LabelGroups, LabelDirichlet, Dirichlet, Pathological, Pairs]
LABELS = [*POOLED[1:], Latent, Pachinko]


def make_source(n=1200, classes=10, seed=0, **fields) -> Source:
    """n examples with x = their id, classes of very different sizes, and seven natural clients."""
    rng = np.random.default_rng(seed)
    share = np.arange(1, classes + 1) / np.arange(1, classes + 1).sum()
    y = rng.choice(classes, n, p=share).astype(np.int32)
    values = {
        "x": np.arange(n, dtype=np.float32)[:, None],
        "y": y,
        "client": rng.integers(0, 7, n),
        "is_test": np.arange(n) % 5 == 0,
        "num_classes": classes,
        "task": "classification",
        "name": "toy",
    }
    return Source(**(values | fields))


SOURCE = make_source()


def counts(assignment, source=SOURCE):
    """(K, C) number of examples of each class per client."""
    return np.array(
        [np.bincount(source.y[ids], minlength=source.num_classes) for ids in assignment.indices]
    )


def make(cls, **hyperparameters):
    """A partition with the hyperparameters that apply to it."""
    return cls(
        **{
            field.name: hyperparameters[field.name]
            for field in dataclasses.fields(cls)
            if field.name in hyperparameters
        }
    )


@pytest.mark.parametrize("num_clients", [1, 2, 14, 38])
@pytest.mark.parametrize("cls", POOLED)
def test_every_example_goes_to_one_client(cls, num_clients):
    if cls in (Pairs, LabelGroups) and num_clients == 1:
        num_clients = 2
    assignment = assign(SOURCE, make(cls, classes=5), num_clients=num_clients)
    assert len(assignment.indices) == num_clients and assignment.is_test is None
    # each client has a distribution of its own: there are no groups
    if cls in (LabelDirichlet, Dirichlet):
        assert assignment.group is None
    else:
        assert assignment.group.dtype == np.int32 and len(assignment.group) == num_clients
    ids = np.concatenate(assignment.indices)
    assert len(ids) == len(np.unique(ids))
    # Few clients with few classes leave classes that nobody has; otherwise everything is dealt.
    held = set(np.unique(SOURCE.y[ids])) if cls in (Pathological, Pairs) else set(range(10))
    np.testing.assert_array_equal(np.sort(ids), np.flatnonzero(np.isin(SOURCE.y, list(held))))
    assert min(map(len, assignment.indices)) >= 2


@pytest.mark.parametrize("splits", [Splits(), Splits(replacement=True, train_examples=9)])
@pytest.mark.parametrize("cls", POOLED)
def test_the_seed_decides_everything(cls, splits):
    first, again, other = (
        assign(SOURCE, cls(), num_clients=8, splits=splits, seed=seed) for seed in (1, 1, 2)
    )
    for a, b in zip(first.indices, again.indices, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(first.group, again.group)
    assert any(not np.array_equal(a, b) for a, b in zip(first.indices, other.indices, strict=True))


@pytest.mark.parametrize("cls", POOLED)
@pytest.mark.parametrize("alpha", [1e-3, 0.01])
def test_it_ends_for_many_clients_and_extreme_shares(cls, alpha):
    source = make_source(n=1100)
    num_clients = 500 if cls in (IID, LabelDirichlet, Dirichlet) else 200
    assignment = assign(source, make(cls, alpha=alpha, groups=3), num_clients=num_clients)
    assert min(map(len, assignment.indices)) >= 2
    assert len(np.unique(np.concatenate(assignment.indices))) == 1100


def test_iid_is_even():
    sizes = [len(ids) for ids in assign(SOURCE, IID(), num_clients=7).indices]
    assert sum(sizes) == 1200 and max(sizes) - min(sizes) <= 1


def test_label_groups_are_pure_disjoint_and_even():
    assignment = assign(SOURCE, LabelGroups(groups=4), num_clients=11)
    held = counts(assignment)
    groups = [np.flatnonzero(held[assignment.group == d].sum(axis=0)) for d in range(4)]
    assert sorted(map(len, groups)) == [2, 2, 3, 3]
    assert sorted(np.concatenate(groups)) == list(range(10))
    for k, d in enumerate(assignment.group):
        assert set(np.flatnonzero(held[k])) <= set(groups[d])
    assert sorted(np.bincount(assignment.group)) == [2, 3, 3, 3]
    for d in range(4):
        sizes = held[assignment.group == d].sum(axis=1)
        assert sizes.max() - sizes.min() <= 1
    orders = {tuple(assign(SOURCE, LabelGroups(), num_clients=11, seed=s).group) for s in range(5)}
    assert len(orders) > 1


def test_label_groups_draw_the_classes_then_the_clients():
    # The order of the draws is part of what a seed means: the same federation, in this version and the next.
    rng = np.random.default_rng([3, *b"partition"])
    order = rng.permutation(10)
    group = rng.permutation(np.arange(11) % 4)
    chunks = [set(chunk) for chunk in np.split(order, [3, 6, 8])]  # of 10 classes 3, 3, 2 and 2
    assignment = assign(SOURCE, LabelGroups(groups=4), num_clients=11, seed=3)
    np.testing.assert_array_equal(assignment.group, group)
    for ids, d in zip(assignment.indices, group, strict=True):
        assert set(SOURCE.y[ids]) == chunks[d]


def test_label_dirichlet_spreads_clusters():
    partition = LabelDirichlet(groups=3, alpha=0.4)
    assignment = assign(SOURCE, partition, num_clients=12)
    pools = partition.pools(SOURCE, 12, generator(0, "partition"), 0)
    clusters = np.array([np.bincount(pools.pool[ids], minlength=3) for ids in assignment.indices])
    assert ((clusters > 0).sum(axis=1) > 1).any()  # a mixture, unlike label_groups
    np.testing.assert_allclose(clusters / clusters.sum(axis=0), pools.share, atol=0.05)
    np.testing.assert_array_equal([len(set(pools.pool[SOURCE.y == c])) for c in range(10)], 1)


def test_dirichlet_deals_by_one_draw_a_class():
    assignment = assign(SOURCE, Dirichlet(alpha=0.7), num_clients=12, seed=5)
    # (K, C)
    shares = np.random.default_rng([5, *b"partition"]).dirichlet(np.full(12, 0.7), size=10).T
    dealt = shares * np.bincount(SOURCE.y)
    assert np.abs(counts(assignment) - dealt).max() <= 3  # rounding, and two examples for everyone


@pytest.mark.parametrize("num_clients", [5, 12, 40])
def test_pathological_clients_have_exactly_their_classes(num_clients):
    assignment = assign(SOURCE, Pathological(classes=2), num_clients=num_clients)
    held = counts(assignment) > 0
    np.testing.assert_array_equal(held.sum(axis=1), 2)
    holders = held.sum(axis=0)
    assert holders.min() >= 1 and holders.max() - holders.min() <= 1
    for k in range(num_clients):
        same = (held == held[k]).all(axis=1)
        np.testing.assert_array_equal(assignment.group == assignment.group[k], same)


def test_pairs_share_their_classes():
    assignment = assign(SOURCE, Pairs(classes=2), num_clients=10)
    held = counts(assignment) > 0
    np.testing.assert_array_equal(held[::2], held[1::2])
    np.testing.assert_array_equal(held.sum(axis=1), 2)
    np.testing.assert_array_equal(assignment.group, np.arange(10) // 2)
    assert not set(assignment.indices[0]) & set(assignment.indices[1])


@pytest.mark.parametrize("cls", POOLED)
def test_classes_that_do_not_occur_are_no_classes(cls):
    source = make_source(y=np.array([2, 7], np.int32)[np.arange(1200) % 2])
    assert sum(map(len, assign(source, make(cls, classes=1), num_clients=4).indices)) == 1200


def test_natural_clients_keep_their_examples():
    assignment = assign(SOURCE, Natural())
    assert len(assignment.indices) == 7
    for k, ids in enumerate(assignment.indices):
        np.testing.assert_array_equal(ids, np.flatnonzero(SOURCE.client == k))
    assert assignment.group is None  # the most frequent class is no group
    known = assign(make_source(group=np.arange(7) * 10), Natural())
    np.testing.assert_array_equal(known.group, np.arange(7) * 10)


def test_natural_takes_fewer_clients_at_random():
    first, other = (assign(SOURCE, Natural(), num_clients=3, seed=seed) for seed in (0, 1))
    chosen, different = ([SOURCE.client[ids[0]] for ids in a.indices] for a in (first, other))
    assert chosen == sorted(chosen) and len(set(chosen)) == 3 and chosen != different


def test_natural_leaves_out_clients_with_one_example():
    client = np.minimum(np.arange(1200), 3)  # clients 0, 1 and 2 have one example each
    client[3:8] = 2
    told = pytest.warns(
        UserWarning,
        match="^client: 2 of 4 clients have a single example and are left out; a client ne",
    )
    with told:
        assignment = assign(make_source(client=client, group=np.arange(4)), Natural())
    np.testing.assert_array_equal(assignment.group, [2, 3])
    with (
        told,
        pytest.raises(
            ArgumentError, match="num_clients=3: toy has 2 clients with at least two examples"
        ),
    ):
        assign(make_source(client=client), Natural(), num_clients=3)
    with pytest.raises(ArgumentError, match="partition=natural: no client in toy has two examples"):
        assign(make_source(client=np.arange(1200)), Natural())


@pytest.mark.parametrize("cls", POOLED)
def test_with_replacement_clients_share_examples_but_no_test_example_is_trained_on(cls):
    splits = Splits(replacement=True, train_examples=8)
    assignment = assign(SOURCE, make(cls, classes=2, groups=3), num_clients=600, splits=splits)
    for ids in assignment.indices:
        assert len(ids) == len(np.unique(ids))
    test = np.array([assignment.is_test[ids].sum() for ids in assignment.indices])
    train = np.array([len(ids) for ids in assignment.indices]) - test
    assert train.min() >= 1 and test.min() >= 1 and train.max() == 8 and test.max() == 2
    assert np.mean(train == 8) > 0.9
    ids = np.concatenate(assignment.indices)
    assert len(ids) > 3 * len(np.unique(ids))
    # set apart for everybody, a fifth of every pool
    assert abs(assignment.is_test.mean() - 0.2) < 0.01


def test_with_replacement_label_distributions_are_kept():
    splits = Splits(replacement=True, train_examples=20)
    groups = assign(SOURCE, LabelGroups(groups=3), num_clients=30, splits=splits)
    held = counts(groups)
    sets = [set(np.flatnonzero(held[groups.group == d].sum(axis=0))) for d in range(3)]
    assert sum(map(len, sets)) == 10 and set.union(*sets) == set(range(10))
    everyone = counts(assign(SOURCE, IID(), num_clients=300, splits=splits)).sum(axis=0)
    np.testing.assert_allclose(everyone / everyone.sum(), np.bincount(SOURCE.y) / 1200, atol=0.02)


def test_with_replacement_a_small_pool_is_taken_whole():
    source = make_source(n=20, classes=2)
    assignment = assign(
        source, IID(), num_clients=3, splits=Splits(replacement=True, train_examples=1000)
    )
    for ids in assignment.indices:
        np.testing.assert_array_equal(np.sort(ids), np.arange(20))


def test_ten_thousand_clients_may_share_examples():
    splits = Splits(replacement=True, train_examples=5)
    assert len(assign(SOURCE, Dirichlet(), num_clients=10_000, splits=splits).indices) == 10_000


@pytest.mark.parametrize(
    "splits", [Splits(official_test=True), Splits(0.3, 0, 5, official_test=True, replacement=True)]
)
def test_the_official_test_examples_can_be_kept(splits):
    assignment = assign(SOURCE, IID(), num_clients=4, splits=splits)
    np.testing.assert_array_equal(assignment.is_test, SOURCE.is_test)


FEW = make_source(n=100)
REGRESSION = make_source(task="regression", num_classes=1)
COARSE = make_source(
    y=(np.arange(1200) % 40).astype(np.int32), num_classes=40, coarse=np.arange(1200) % 40 // 5 * 7
)
SEQUENCES = make_source(y=np.zeros((1200, 3), np.uint8), group=np.arange(7))


DRAW = Splits(replacement=True, train_examples=5)
OFFICIAL = Splits(official_test=True)


@pytest.mark.parametrize(
    ("partition", "source", "arguments", "message"),
    [
        *[
            (
                cls(),
                FEW,
                {"num_clients": 52},
                rf"num_clients=52: too many .* with partition={cls.name}; .*\d+, or any",
            )
            for cls in POOLED
        ],
        (IID(), FEW, {"num_clients": 51}, "num_clients=51: .*up to about 50,"),
        (IID(), SOURCE, {"num_clients": 0}, "num_clients=0: accepted: 1 or more"),
        (
            LabelDirichlet(groups=11),
            SOURCE,
            {},
            "groups=11: accepted: 1 to 10, the number of classes",
        ),
        (LabelGroups(groups=9), SOURCE, {}, "groups=9: accepted: at most num_clients=8"),
        (Latent(groups=9), SOURCE, {}, "groups=9: accepted: at most num_clients=8"),
        (
            Pathological(classes=11),
            SOURCE,
            {},
            "classes=11: accepted: 1 to 10, the number of classes",
        ),
        (Pairs(classes=11), SOURCE, {}, "classes=11: accepted: 1 to 10, the number of classes"),
        (
            Pairs(),
            SOURCE,
            {"num_clients": 7},
            "num_clients=7: accepted with partition=pairs: even numbers",
        ),
        (Natural(), make_source(client=None), {}, "partition=natural: toy has no client ids"),
        (Natural(), SOURCE, {"num_clients": 8}, "num_clients=8: toy has 7 clients"),
        (Natural(), SOURCE, {"num_clients": 0}, "num_clients=0: accepted: 1 or more"),
        (Natural(), SOURCE, {"splits": DRAW}, "replacement: accepted with .*natural"),
        (Pachinko(), COARSE, {"splits": DRAW}, "replacement: accepted with .*pachinko"),
        (Pachinko(), SOURCE, {}, "partition=pachinko: toy has no coarse labels"),
        (Pachinko(), COARSE, {"num_clients": 601}, "num_clients=601: .*up to 600"),
        (Pachinko(), COARSE, {"num_clients": 0}, "num_clients=0: accepted: 1 or more"),
        (
            IID(),
            make_source(is_test=None),
            {"splits": OFFICIAL},
            "official_test: toy has no official",
        ),
        *[
            (
                cls(),
                SEQUENCES,
                {},
                f"partition={cls.name}: .*accepted for sequences: iid, sizes, time, natural, grouped$",
            )
            for cls in LABELS
        ],
        *[
            (
                cls(),
                REGRESSION,
                {},
                f"partition={cls.name}: needs classes; accepted for regression: iid, sizes, quantiles, "
                "quantile_dirichlet, time, natural, grouped$",
            )
            for cls in LABELS
        ],
        (
            "iid",
            SOURCE,
            {},
            "partition=iid: accepted: an object of pfl.partitions .IID, LabelGroups",
        ),
        (IID, SOURCE, {}, "partition=<class .*IID'>: accepted: an object"),
    ],
)
def test_what_does_not_fit_the_source_is_refused_by_name(partition, source, arguments, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        assign(source, partition, **({"num_clients": 8} | arguments))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Latent(embedding="vgg11"), "embedding=vgg11: accepted: None, or a function"),
        (lambda: Splits(replacement=True), "replacement: needs train_examples"),
    ],
)
def test_hyperparameters_out_of_range_are_refused_by_name(make, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        make()


def test_a_partition_of_ones_own_says_its_pools():
    class Halves(Partition):
        name = "halves"

        def pools(self, source, num_clients, rng, seed):
            lower = (source.x[:, 0] < 300).astype(int)
            return partitions.Pools(lower, np.array([[0.75, 0], [0.25, 1.0]]))

    assignment = assign(SOURCE, Halves(), num_clients=2)
    sizes = [np.bincount(ids < 300, minlength=2).tolist() for ids in assignment.indices]
    assert sizes == [[675, 0], [225, 300]]


def test_label_groups_stay_pure_when_one_is_small():
    source = make_source(n=100, y=(np.arange(100) >= 10).astype(np.int32), num_classes=2)
    held = counts(assign(source, LabelGroups(), num_clients=10), source) > 0
    np.testing.assert_array_equal(held.sum(axis=1), 1)
    with pytest.raises(ArgumentError, match=r"num_clients=12: .*up to about 10,"):
        assign(source, LabelGroups(), num_clients=12)


def test_a_replacement_pool_without_test_examples_is_refused():
    # class 0 has one example
    source = make_source(y=np.minimum(np.arange(1200), 1).astype(np.int32))
    with pytest.raises(ArgumentError, match="replacement: a client's classes have no examples"):
        assign(source, Pathological(classes=1), num_clients=2, splits=DRAW)


def test_regressions_can_be_divided_at_random_and_by_client():
    source = make_source(
        task="regression", num_classes=1, y=np.linspace(0, 1, 1200, dtype=np.float32)
    )
    assert assign(source, IID(), num_clients=4).group.tolist() == [0, 0, 0, 0]
    assert assign(source, Natural()).group is None


def test_sequences_can_be_divided_at_random_and_by_client():
    assert len(assign(SEQUENCES, IID(), num_clients=4).indices) == 4
    np.testing.assert_array_equal(assign(SEQUENCES, Natural()).group, np.arange(7))


@pytest.mark.parametrize("alpha", [1e-8, 0.1, 1e6])
@pytest.mark.parametrize("num_clients", [1, 7, 40, 600])
def test_pachinko_gives_everyone_as_many_until_all_are_gone(num_clients, alpha):
    assignment = assign(COARSE, Pachinko(alpha=alpha), num_clients=num_clients)
    assert {len(ids) for ids in assignment.indices} == {1200 // num_clients}
    ids = np.concatenate(assignment.indices)
    assert len(np.unique(ids)) == len(ids) == 1200 // num_clients * num_clients
    assert assignment.group is None


def test_pachinko_clients_have_few_coarse_labels_and_all_of_their_fine_ones():
    first = assign(COARSE, Pachinko(alpha=0.01), num_clients=4)
    held = [np.bincount(COARSE.coarse[ids] // 7, minlength=8) for ids in first.indices]
    # 300 examples of coarse labels with 150 each: two where a draw is concentrated, and three after others' draws.
    assert np.mean([(row > 0).sum() for row in held]) <= 3
    few = [assign(COARSE, Pachinko(alpha=0.01), num_clients=60, seed=seed) for seed in range(4)]
    coarse = [len(np.unique(COARSE.coarse[ids])) for a in few for ids in a.indices[:30]]
    fine = [len(np.unique(COARSE.y[ids])) for a in few for ids in a.indices[:10]]
    assert np.mean(coarse) < 1.6 and np.mean(fine) > 4
    wide = assign(COARSE, Pachinko(alpha=1e3), num_clients=60)
    assert np.mean([len(np.unique(COARSE.coarse[ids])) for ids in wide.indices[:30]]) > 6


def test_pachinko_draws_follow_the_shares_of_both_levels():
    # The first of many clients, who find plenty of everything. Dirichlet(5) shares of 2 coarse labels have a standard
    # deviation of sqrt(1/2 * 1/2 / 11), Dirichlet(10) shares of 4 fine ones sqrt(1/4 * 3/4 / 41) = 0.068.
    n = 400_000
    y = (np.arange(n) % 8).astype(np.int32)
    source = make_source(n=n, y=y, num_classes=8, coarse=y // 4)
    assignment = assign(source, Pachinko(alpha=5), num_clients=400)
    held = np.array([np.bincount(y[ids], minlength=8) for ids in assignment.indices[:100]]).reshape(
        100, 2, 4
    )
    top = held.sum(axis=2)[:, 0] / 1000
    assert abs(top.mean() - 0.5) < 0.05 and abs(top.std() - np.sqrt(0.25 / 11)) < 0.03
    within = held / np.maximum(held.sum(axis=2, keepdims=True), 1)
    assert abs(within.std() - 0.068) < 0.015 and np.abs(within.mean(axis=0) - 0.25).max() < 0.03


def test_pachinko_is_decided_by_the_seed_and_keeps_the_official_test():
    first, again, other = (
        assign(COARSE, Pachinko(), num_clients=8, splits=OFFICIAL, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(np.concatenate(first.indices), np.concatenate(again.indices))
    assert not np.array_equal(np.concatenate(first.indices), np.concatenate(other.indices))
    np.testing.assert_array_equal(first.is_test, COARSE.is_test)


def test_all_partitions_are_listed_under_their_names():
    assert {*PARTITIONS.values()} == {
        cls for cls in vars(partitions).values() if isinstance(cls, type) and hasattr(cls, "name")
    }
    assert all(PARTITIONS[cls.name] is cls for cls in PARTITIONS.values())


def test_groups_that_are_drawn_have_different_numbers_of_clients():
    sizes = []
    for seed in range(20):
        made = data.digits(
            num_clients=8, partition=partitions.LabelGroups(groups=4, balanced=False), seed=seed
        )
        sizes.append(tuple(np.bincount(made.group, minlength=4)))
        real = np.arange(made.train.y.shape[1]) < made.train.size[:, None]
        classes = [set(y[has].tolist()) for y, has in zip(made.train.y, real, strict=True)]
        for i, j in itertools.combinations(range(8), 2):
            assert bool(classes[i] & classes[j]) == (made.group[i] == made.group[j])
    assert (
        len(set(sizes)) > 5 and any(min(size) == 0 for size in sizes) and max(map(max, sizes)) >= 4
    )
    assert (
        data.digits(
            num_clients=2, partition=partitions.LabelGroups(groups=5, balanced=False)
        ).num_clients
        == 2
    )
