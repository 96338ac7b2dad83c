"""Partitions: exact properties of who gets what, for every plan."""

import time

import numpy as np
import pytest

from pfljax.core.types import UsageError
from pfljax.data import partitions
from pfljax.data.partitions import NAMES, PARTITIONS, partition
from pfljax.data.sources import Source

LABELS = [name for name in PARTITIONS if name != "iid"]


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
    """(K, C) how many examples of each class each client has."""
    return np.array([np.bincount(source.y[ids], minlength=source.num_classes) for ids in assignment.indices])


@pytest.mark.parametrize("num_clients", [1, 2, 14, 38])
@pytest.mark.parametrize("name", PARTITIONS)
def test_every_example_goes_to_one_client(name, num_clients):
    if name == "pairs" and num_clients == 1:
        num_clients = 2
    if name == "label_groups" and num_clients == 1:
        num_clients = 2
    assignment = partition(name, SOURCE, num_clients=num_clients, classes_per_client=5)
    assert len(assignment.indices) == len(assignment.distribution) == num_clients
    assert assignment.distribution.dtype == np.int32 and assignment.is_test is None
    ids = np.concatenate(assignment.indices)
    assert len(ids) == len(np.unique(ids))
    # Few clients of few classes leave classes that nobody holds; otherwise everything is given out.
    held = set(np.unique(SOURCE.y[ids])) if name in ("pathological", "pairs") else set(range(10))
    np.testing.assert_array_equal(np.sort(ids), np.flatnonzero(np.isin(SOURCE.y, list(held))))
    assert min(map(len, assignment.indices)) >= 2


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("name", PARTITIONS)
def test_the_seed_decides_everything(name, replacement):
    def draw(seed):
        return partition(name, SOURCE, num_clients=8, replacement=replacement, train_examples=9, seed=seed)

    first, again, other = draw(1), draw(1), draw(2)
    for a, b in zip(first.indices, again.indices, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(first.distribution, again.distribution)
    assert any(not np.array_equal(a, b) for a, b in zip(first.indices, other.indices, strict=True))


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("alpha", [1e-3, 0.01])
def test_it_ends_for_many_clients_and_extreme_shares(name, alpha):
    source = make_source(n=1100)
    start = time.monotonic()
    num_clients = 500 if name in ("iid", "label_dirichlet", "dirichlet") else 200
    assignment = partition(name, source, num_clients=num_clients, dirichlet_alpha=alpha, num_distributions=3)
    assert time.monotonic() - start < 20
    assert min(map(len, assignment.indices)) >= 2
    assert len(np.unique(np.concatenate(assignment.indices))) == 1100


def test_dirichlet_uses_up_the_last_example():
    source = make_source(n=1000)
    assignment = partition("dirichlet", source, num_clients=500, dirichlet_alpha=0.01)
    assert {len(ids) for ids in assignment.indices} == {2}


def test_iid_is_even():
    sizes = [len(ids) for ids in partition("iid", SOURCE, num_clients=7).indices]
    assert sum(sizes) == 1200 and max(sizes) - min(sizes) <= 1


def test_label_groups_are_pure_disjoint_and_even():
    assignment = partition("label_groups", SOURCE, num_clients=11, num_distributions=4)
    held = counts(assignment)
    groups = [np.flatnonzero(held[assignment.distribution == d].sum(axis=0)) for d in range(4)]
    assert sorted(map(len, groups)) == [2, 2, 3, 3]
    assert sorted(np.concatenate(groups)) == list(range(10))
    for k, d in enumerate(assignment.distribution):
        assert set(np.flatnonzero(held[k])) <= set(groups[d])
    assert sorted(np.bincount(assignment.distribution)) == [2, 3, 3, 3]
    for d in range(4):
        sizes = held[assignment.distribution == d].sum(axis=1)
        assert sizes.max() - sizes.min() <= 1
    orders = {tuple(partition("label_groups", SOURCE, num_clients=11, seed=s).distribution) for s in range(5)}
    assert len(orders) > 1


def test_label_dirichlet_spreads_clusters_and_names_the_largest():
    assignment = partition("label_dirichlet", SOURCE, num_clients=12, num_distributions=3, dirichlet_alpha=0.4)
    plan = PARTITIONS["label_dirichlet"](
        partitions.generator(0, "partition"), SOURCE.y, 12, num_distributions=3, dirichlet_alpha=0.4
    )
    clusters = np.array([np.bincount(plan.pool[ids], minlength=3) for ids in assignment.indices])
    np.testing.assert_array_equal(assignment.distribution, clusters.argmax(axis=1))
    assert ((clusters > 0).sum(axis=1) > 1).any()  # a mixture, unlike label_groups
    np.testing.assert_allclose(clusters / clusters.sum(axis=0), plan.share, atol=0.05)
    np.testing.assert_array_equal([len(set(plan.pool[SOURCE.y == c])) for c in range(10)], 1)


def test_alpha_decides_how_uneven_a_dirichlet_partition_is():
    def unevenness(name, alpha):
        held = counts(partition(name, SOURCE, num_clients=10, dirichlet_alpha=alpha))
        return np.abs(held / held.sum(axis=0) - 0.1).mean()

    for name in ("dirichlet", "label_dirichlet"):
        assert unevenness(name, 1000) < 0.03 < 0.06 < unevenness(name, 0.1)


def test_dirichlet_names_the_most_frequent_class():
    assignment = partition("dirichlet", SOURCE, num_clients=12)
    np.testing.assert_array_equal(assignment.distribution, counts(assignment).argmax(axis=1))


@pytest.mark.parametrize("num_clients", [5, 12, 40])
def test_pathological_clients_have_exactly_their_classes(num_clients):
    assignment = partition("pathological", SOURCE, num_clients=num_clients, classes_per_client=2)
    held = counts(assignment) > 0
    np.testing.assert_array_equal(held.sum(axis=1), 2)
    holders = held.sum(axis=0)
    assert holders.min() >= 1 and holders.max() - holders.min() <= 1
    for k in range(num_clients):
        same = (held == held[k]).all(axis=1)
        np.testing.assert_array_equal(assignment.distribution == assignment.distribution[k], same)


def test_pairs_share_their_classes():
    assignment = partition("pairs", SOURCE, num_clients=10, classes_per_client=2)
    held = counts(assignment) > 0
    np.testing.assert_array_equal(held[::2], held[1::2])
    np.testing.assert_array_equal(held.sum(axis=1), 2)
    np.testing.assert_array_equal(assignment.distribution, np.arange(10) // 2)
    assert not set(assignment.indices[0]) & set(assignment.indices[1])


def test_classes_that_do_not_occur_are_no_classes():
    source = make_source(y=np.array([2, 7], np.int32)[np.arange(1200) % 2])
    for name in LABELS:
        assignment = partition(name, source, num_clients=4, num_distributions=2, classes_per_client=1)
        assert sum(map(len, assignment.indices)) == 1200
    with pytest.raises(UsageError, match="--num_distributions=3: accepted are 1 to 2"):
        partition("label_groups", source, num_clients=4, num_distributions=3)


def test_natural_clients_keep_their_examples():
    assignment = partition("natural", SOURCE)
    assert len(assignment.indices) == 7
    for k, ids in enumerate(assignment.indices):
        np.testing.assert_array_equal(ids, np.flatnonzero(SOURCE.client == k))
    np.testing.assert_array_equal(assignment.distribution, counts(assignment).argmax(axis=1))
    known = partition("natural", make_source(distribution=np.arange(7) * 10))
    np.testing.assert_array_equal(known.distribution, np.arange(7) * 10)


def test_natural_takes_fewer_clients_at_random():
    first, other = (partition("natural", SOURCE, num_clients=3, seed=seed) for seed in (0, 1))
    chosen, different = ([SOURCE.client[ids[0]] for ids in a.indices] for a in (first, other))
    assert chosen == sorted(chosen) and len(set(chosen)) == 3 and chosen != different


def test_natural_leaves_out_clients_with_one_example():
    client = np.minimum(np.arange(1200), 3)  # clients 0, 1 and 2 have one example each
    client[3:8] = 2
    assignment = partition("natural", make_source(client=client, distribution=np.arange(4)))
    np.testing.assert_array_equal(assignment.distribution, [2, 3])
    with pytest.raises(UsageError, match="--num_clients=3: toy has 2 clients with two examples or more"):
        partition("natural", make_source(client=client), num_clients=3)


@pytest.mark.parametrize("name", PARTITIONS)
def test_with_replacement_clients_share_examples_but_no_test_example_is_trained_on(name):
    assignment = partition(
        name,
        SOURCE,
        num_clients=600,
        replacement=True,
        train_examples=8,
        classes_per_client=2,
        num_distributions=3,
    )
    for ids in assignment.indices:
        assert len(ids) == len(np.unique(ids))
    test = np.array([assignment.is_test[ids].sum() for ids in assignment.indices])
    train = np.array([len(ids) for ids in assignment.indices]) - test
    assert train.min() >= 1 and test.min() >= 1 and train.max() == 8 and test.max() == 2
    assert np.mean(train == 8) > 0.9
    ids = np.concatenate(assignment.indices)
    assert len(ids) > 3 * len(np.unique(ids))
    assert abs(assignment.is_test.mean() - 0.2) < 0.01  # set apart for everybody, a fifth of every pool


def test_with_replacement_label_distributions_are_kept():
    groups = partition("label_groups", SOURCE, num_clients=30, replacement=True, train_examples=20, num_distributions=3)
    held = counts(groups)
    sets = [set(np.flatnonzero(held[groups.distribution == d].sum(axis=0))) for d in range(3)]
    assert sum(map(len, sets)) == 10 and set.union(*sets) == set(range(10))
    everyone = counts(partition("iid", SOURCE, num_clients=300, replacement=True, train_examples=20)).sum(axis=0)
    np.testing.assert_allclose(everyone / everyone.sum(), np.bincount(SOURCE.y) / 1200, atol=0.02)


def test_with_replacement_a_small_pool_is_taken_whole():
    source = make_source(n=20, classes=2)
    assignment = partition("iid", source, num_clients=3, replacement=True, train_examples=1000)
    for ids in assignment.indices:
        np.testing.assert_array_equal(np.sort(ids), np.arange(20))


def test_ten_thousand_clients_take_seconds():
    start = time.monotonic()
    for name in ("label_groups", "dirichlet"):
        partition(name, SOURCE, num_clients=10_000, replacement=True, train_examples=5)
    assert time.monotonic() - start < 20


def test_the_official_test_examples_can_be_kept():
    for arguments in ({}, {"replacement": True, "train_examples": 5}):
        assignment = partition("iid", SOURCE, num_clients=4, official_test=True, **arguments)
        np.testing.assert_array_equal(assignment.is_test, SOURCE.is_test)


FEW = make_source(n=100)
REGRESSION = make_source(task="regression", num_classes=1)
COARSE = make_source(y=(np.arange(1200) % 40).astype(np.int32), num_classes=40, coarse=np.arange(1200) % 40 // 5 * 7)
SEQUENCES = make_source(y=np.zeros((1200, 3), np.uint8), distribution=np.arange(7))


@pytest.mark.parametrize(
    ("name", "source", "arguments", "message"),
    [
        (
            "label_group",
            SOURCE,
            {},
            "--partition=label_group: unknown; nearest: label_groups.*accepted: iid, .*natural",
        ),
        *[
            (
                name,
                FEW,
                {"num_clients": 52},
                rf"--num_clients=52: too many .*--partition={name}; .*\d+.*--replacement",
            )
            for name in PARTITIONS
        ],
        ("iid", FEW, {"num_clients": 51}, "up to about 50,"),
        ("iid", SOURCE, {"num_clients": 0}, "--num_clients=0"),
        ("label_groups", SOURCE, {"num_distributions": 0}, "--num_distributions=0: accepted are 1 to 10"),
        (
            "label_dirichlet",
            SOURCE,
            {"num_distributions": 11},
            "--num_distributions=11: accepted are 1 to 10",
        ),
        ("label_groups", SOURCE, {"num_distributions": 9}, "--num_distributions=9: .*--num_clients=8"),
        ("pathological", SOURCE, {"classes_per_client": 0}, "--classes_per_client=0: accepted are 1 to 10"),
        ("pairs", SOURCE, {"classes_per_client": 11}, "--classes_per_client=11: accepted are 1 to 10"),
        ("dirichlet", SOURCE, {"dirichlet_alpha": 0}, "--dirichlet_alpha=0"),
        ("label_dirichlet", SOURCE, {"dirichlet_alpha": np.nan}, "--dirichlet_alpha=nan"),
        ("pairs", SOURCE, {"num_clients": 7}, "--num_clients=7: --partition=pairs needs an even number"),
        ("natural", make_source(client=None), {}, "--partition=natural: toy has no client ids"),
        ("natural", SOURCE, {"num_clients": 8}, "--num_clients=8: toy has 7 clients"),
        ("natural", SOURCE, {"replacement": True}, "--replacement: .*natural"),
        ("iid", SOURCE, {"replacement": True}, "--replacement: needs --train_examples"),
        ("pachinko", COARSE, {"replacement": True}, "--replacement: .*pachinko"),
        ("pachinko", SOURCE, {}, "--partition=pachinko: toy has no coarse labels; accepted"),
        ("pachinko", COARSE, {"num_clients": 601}, "--num_clients=601: .*up to 600"),
        ("pachinko", COARSE, {"num_clients": 0}, "--num_clients=0"),
        ("pachinko", COARSE, {"dirichlet_alpha": 0}, "--dirichlet_alpha=0"),
        ("pachinko", REGRESSION, {}, "--partition=pachinko: needs classes"),
        *[
            (name, SEQUENCES, {}, f"--partition={name}: .*accepted for sequences are iid and natural")
            for name in (*LABELS, "pachinko")
        ],
        ("iid", SOURCE, {"test_fraction": 1}, "--test_fraction=1"),
        ("iid", make_source(is_test=None), {"official_test": True}, "--official_test: toy has no"),
        *[(name, REGRESSION, {}, f"--partition={name}: needs classes") for name in LABELS],
    ],
)
def test_wrong_arguments_are_refused_by_name(name, source, arguments, message):
    with pytest.raises(UsageError, match=message):
        partition(name, source, **({"num_clients": 8} | arguments))


def test_label_groups_stay_pure_when_one_is_small():
    source = make_source(n=100, y=(np.arange(100) >= 10).astype(np.int32), num_classes=2)
    held = counts(partition("label_groups", source, num_clients=10), source) > 0
    np.testing.assert_array_equal(held.sum(axis=1), 1)
    with pytest.raises(UsageError, match=r"--num_clients=12: .*up to about 10,"):
        partition("label_groups", source, num_clients=12)


def test_a_replacement_pool_without_test_examples_is_refused():
    source = make_source(y=np.minimum(np.arange(1200), 1).astype(np.int32))  # class 0 has one example
    with pytest.raises(UsageError, match="--replacement"):
        partition("pathological", source, num_clients=2, classes_per_client=1, replacement=True, train_examples=3)


def test_regressions_can_be_divided_at_random_and_by_client():
    source = make_source(task="regression", num_classes=1, y=np.linspace(0, 1, 1200, dtype=np.float32))
    assert partition("iid", source, num_clients=4).distribution.tolist() == [0, 0, 0, 0]
    assert partition("natural", source).distribution.tolist() == list(range(7))


def test_sequences_can_be_divided_at_random_and_by_client():
    assert len(partition("iid", SEQUENCES, num_clients=4).indices) == 4
    np.testing.assert_array_equal(partition("natural", SEQUENCES).distribution, np.arange(7))


@pytest.mark.parametrize("alpha", [1e-8, 0.1, 1e6])
@pytest.mark.parametrize("num_clients", [1, 7, 40, 600])
def test_pachinko_gives_everyone_as_many_until_all_are_gone(num_clients, alpha):
    assignment = partition("pachinko", COARSE, num_clients=num_clients, dirichlet_alpha=alpha)
    assert {len(ids) for ids in assignment.indices} == {1200 // num_clients}
    ids = np.concatenate(assignment.indices)
    assert len(np.unique(ids)) == len(ids) == 1200 // num_clients * num_clients
    assert assignment.distribution.dtype == np.int32
    for own, most in zip(assignment.indices, assignment.distribution, strict=True):
        held = np.bincount(COARSE.coarse[own])
        assert held[most] == held.max()


def test_pachinko_clients_have_few_coarse_labels_and_all_of_their_fine_ones():
    first = partition("pachinko", COARSE, num_clients=4, dirichlet_alpha=0.01)
    held = [np.bincount(COARSE.coarse[ids] // 7, minlength=8) for ids in first.indices]
    # 300 examples of coarse labels with 150 each: two where a draw is concentrated, and three after others' draws.
    assert np.mean([(row > 0).sum() for row in held]) <= 3
    few = [partition("pachinko", COARSE, num_clients=60, dirichlet_alpha=0.01, seed=seed) for seed in range(4)]
    coarse = [len(np.unique(COARSE.coarse[ids])) for a in few for ids in a.indices[:30]]
    fine = [len(np.unique(COARSE.y[ids])) for a in few for ids in a.indices[:10]]
    assert np.mean(coarse) < 1.6 and np.mean(fine) > 4
    wide = partition("pachinko", COARSE, num_clients=60, dirichlet_alpha=1e3)
    assert np.mean([len(np.unique(COARSE.coarse[ids])) for ids in wide.indices[:30]]) > 6


def test_pachinko_draws_follow_the_shares_of_both_levels():
    # The first of many clients, who find plenty of everything. Dirichlet(5) shares of 2 coarse labels have a standard
    # deviation of sqrt(1/2 * 1/2 / 11), Dirichlet(10) shares of 4 fine ones sqrt(1/4 * 3/4 / 41) = 0.068.
    n = 400_000
    y = (np.arange(n) % 8).astype(np.int32)
    source = make_source(n=n, y=y, num_classes=8, coarse=y // 4)
    assignment = partition("pachinko", source, num_clients=400, dirichlet_alpha=5)
    held = np.array([np.bincount(y[ids], minlength=8) for ids in assignment.indices[:100]]).reshape(100, 2, 4)
    top = held.sum(axis=2)[:, 0] / 1000
    assert abs(top.mean() - 0.5) < 0.05 and abs(top.std() - np.sqrt(0.25 / 11)) < 0.03
    within = held / np.maximum(held.sum(axis=2, keepdims=True), 1)
    assert abs(within.std() - 0.068) < 0.015 and np.abs(within.mean(axis=0) - 0.25).max() < 0.03


def test_pachinko_is_decided_by_the_seed_and_keeps_the_official_test():
    first, again, other = (
        partition("pachinko", COARSE, num_clients=8, official_test=True, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(np.concatenate(first.indices), np.concatenate(again.indices))
    assert not np.array_equal(np.concatenate(first.indices), np.concatenate(other.indices))
    np.testing.assert_array_equal(first.is_test, COARSE.is_test)


def test_names_are_the_plans_latent_pachinko_and_natural():
    assert set(NAMES) == {*PARTITIONS, "latent", "pachinko", "natural"}
