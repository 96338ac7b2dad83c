"""Partitions by size, target, time and shards: equations and invariants."""

import itertools

import numpy as np
import outcomes
import pytest

import pfljax as pfl
from pfljax import data
from pfljax.cli import train
from pfljax.contract.errors import ArgumentError
from pfljax.data import Splits, sources
from pfljax.data.partitions import (
    Dirichlet,
    Grouped,
    InnerDirichlet,
    QuantileDirichlet,
    Quantiles,
    Shards,
    Sizes,
    Time,
    assign,
)

N = 601  # a prime
RNG = np.random.default_rng(0)
TARGET = RNG.lognormal(size=N)
LABEL = RNG.choice(7, N, p=np.arange(1, 8) / 28)


def make_source(y, **arrays):
    x = np.arange(N, dtype=np.float32)[:, None]
    return sources.make_source({"x": x, "y": y, **arrays}, name="toy")


CLASSES = make_source(LABEL, client=np.arange(N) % 11, is_test=np.arange(N) % 5 == 0)
NUMBERS = make_source(TARGET)
OFFICIAL = Splits(official_test=True)
ALL = [Shards(), InnerDirichlet(), Sizes(), Quantiles(), QuantileDirichlet(), Time(), Grouped()]


def sizes(assignment):
    return np.array([len(ids) for ids in assignment.indices])


@pytest.mark.parametrize("num_clients", [1, 2, 5, 13])
@pytest.mark.parametrize("partition", ALL, ids=lambda partition: partition.name)
@pytest.mark.parametrize("splits", [Splits(), OFFICIAL], ids=["random tests", "official tests"])
def test_every_example_goes_to_one_client(partition, num_clients, splits):
    if partition.name == "grouped":
        num_clients = None
    assignment = assign(CLASSES, partition, num_clients=num_clients, splits=splits)
    np.testing.assert_array_equal(np.sort(np.concatenate(assignment.indices)), np.arange(N))
    assert sizes(assignment).min() >= 2
    if splits.official_test:
        tests = [CLASSES.is_test[ids].sum() for ids in assignment.indices]
        assert min(tests) >= 1 and (sizes(assignment) - tests).min() >= 1


@pytest.mark.parametrize("partition", ALL[:-1], ids=lambda partition: partition.name)
def test_the_seed_decides(partition):
    first, again, other = (
        np.concatenate(assign(CLASSES, partition, num_clients=6, seed=seed).indices)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("partition", [*ALL[:-1], Dirichlet(capped=True)])
def test_too_many_clients_are_refused(partition):
    with pytest.raises(ArgumentError, match=rf"^num_clients=301: too many .*={partition.name}; "):
        assign(CLASSES, partition, num_clients=301)
    if partition.name not in ("quantile_dirichlet", "shards", "dirichlet"):
        assert sizes(assign(CLASSES, partition, num_clients=300)).min() >= 2


@pytest.mark.parametrize(
    ("partition", "units"),
    [
        (Sizes(), [1, 2, 3, 4, 5]),
        (Sizes(growth="square"), [1, 4, 9, 16, 25]),
        (Sizes(growth="exponential"), np.exp([1, 2, 3, 4, 5])),
        (Sizes(sizes=(3, 1, 1, 0.5, 2)), [3, 1, 1, 0.5, 2]),
    ],
)
def test_sizes_are_in_proportion(partition, units):
    assignment = assign(NUMBERS, partition, num_clients=5)
    expected = np.array(units) / np.sum(units) * N
    assert np.abs(sizes(assignment) - expected).max() <= 1


def test_exponential_sizes_of_many_clients_are_finite_and_leave_everyone_two():
    assignment = assign(NUMBERS, Sizes(growth="exponential"), num_clients=250)
    assert sizes(assignment).min() == 2 and sizes(assignment).sum() == N


def test_clients_of_other_sizes_have_the_same_distribution():
    assignment = assign(CLASSES, Sizes(growth="square"), num_clients=4)
    largest = np.bincount(LABEL[assignment.indices[-1]], minlength=7) / len(assignment.indices[-1])
    np.testing.assert_allclose(largest, np.bincount(LABEL) / N, atol=0.05)


def test_shards_are_runs_of_the_sorted_labels():
    assignment = assign(CLASSES, Shards(shards=3), num_clients=4)
    # Of 12 shards in the order of the labels, a client has 3, whose sizes differ by at most one.
    assert set(sizes(assignment)) <= {150, 151}
    shard_of_sorted = np.arange(N) * 12 // N
    labels_of = [set(np.sort(LABEL)[shard_of_sorted == shard]) for shard in range(12)]
    triples = [set.union(*chosen) for chosen in itertools.combinations(labels_of, 3)]
    for ids in assignment.indices:
        assert set(LABEL[ids]) in triples


def test_inner_dirichlet_clients_have_equal_sizes_and_shares_of_their_own():
    y = np.tile(np.arange(5), 8000)
    source = sources.make_source({"x": y[:, None] * 1.0, "y": y}, name="toy")
    # Few clients of many draw without a class running out: Dirichlet(a) shares of 5 classes have the standard
    # deviation sqrt(1/5 * 4/5 / (5 a + 1)).
    some = [
        assign(source, InnerDirichlet(alpha=20.0), num_clients=40, seed=seed) for seed in range(4)
    ]
    share = np.array(
        [np.bincount(y[ids], minlength=5) / len(ids) for one in some for ids in one.indices]
    )
    assert {len(ids) for one in some for ids in one.indices} == {1000}
    assert abs(share.mean() - 0.2) < 1e-9
    assert abs(share.std() / np.sqrt(0.16 / 101) - 1) < 0.15
    skewed = assign(source, InnerDirichlet(alpha=1e-6), num_clients=5)
    assert np.mean([len(set(y[ids].tolist())) for ids in skewed.indices]) <= 3


def test_a_capped_client_gets_no_further_classes():
    source = sources.make_source(
        {"x": np.ones((10_000, 1)), "y": np.arange(10_000) % 50}, name="toy"
    )
    plain = sizes(assign(source, Dirichlet(alpha=0.1), num_clients=10))
    capped = sizes(assign(source, Dirichlet(alpha=0.1, capped=True), num_clients=10))
    # A client has less than 1,000 before the class of 200 in which it exceeds them.
    assert capped.max() <= 1200 < plain.max() and capped.sum() == 10_000
    one = assign(source, Dirichlet(capped=True), num_clients=1)
    assert sizes(one).tolist() == [10_000]


def test_quantile_clients_have_ranges_of_the_target():
    assignment = assign(NUMBERS, Quantiles(), num_clients=7)
    assert set(sizes(assignment)) <= {N // 7, N // 7 + 1}
    edges = [(TARGET[ids].min(), TARGET[ids].max()) for ids in assignment.indices]
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(edges))


def test_strictness_moves_clients_from_alike_to_ranges():
    correlations = []
    for strictness in (0.0, 0.5, 1.0):
        assignment = assign(NUMBERS, Quantiles(strictness=strictness), num_clients=5)
        means = [TARGET[ids].mean() for ids in assignment.indices]
        correlations.append(np.std(means) / TARGET.std())
    assert correlations[0] < 0.15 < correlations[1] < correlations[2]


def test_equal_targets_are_dealt_at_random():
    same = make_source(np.full(N, 2.5))
    first, other = (assign(same, Quantiles(), num_clients=3, seed=seed) for seed in (0, 1))
    assert not np.array_equal(np.sort(first.indices[0]), np.sort(other.indices[0]))
    assert set(sizes(first)) <= {200, 201}


def test_quantile_dirichlet_spreads_each_bin():
    bins = np.empty(N, int)
    bins[np.argsort(TARGET, kind="stable")] = np.arange(N) * 4 // N
    even = assign(NUMBERS, QuantileDirichlet(bins=4, alpha=1e6), num_clients=5)
    for ids in even.indices:
        np.testing.assert_allclose(np.bincount(bins[ids], minlength=4), 30, atol=1)
    uneven = assign(NUMBERS, QuantileDirichlet(bins=4, alpha=0.05), num_clients=5)
    held = np.array([np.bincount(bins[ids], minlength=4) for ids in uneven.indices])
    assert (held.max(axis=0) / held.sum(axis=0)).mean() > 0.6


DAYS = np.datetime64("2024-02-27") + RNG.permutation(N)


@pytest.mark.parametrize("time", [DAYS, DAYS.astype(str), DAYS.astype(int), DAYS.astype(int) / 3])
def test_periods_follow_each_other(time):
    source = make_source(LABEL, time=time)
    assignment = assign(source, Time(), num_clients=6)
    periods = [DAYS[ids] for ids in assignment.indices]
    assert all(first.max() < then.min() for first, then in itertools.pairwise(periods))
    assert set(sizes(assignment)) <= {100, 101}


def test_without_times_the_order_of_the_examples_counts():
    assignment = assign(make_source(LABEL), Time(), num_clients=4)
    np.testing.assert_array_equal(
        np.concatenate([np.sort(ids) for ids in assignment.indices]), np.arange(N)
    )


def test_splits_by_time_train_before_they_test():
    x = np.arange(N)[:, None] * 1.0
    clients = pfl.Federation.from_arrays(
        x,
        LABEL,
        client=np.arange(N) % 3,
        time=DAYS,
        by_time=True,
        test_fraction=0.25,
        validation_fraction=0.2,
        standardize=False,
    )
    for client in range(3):
        rows = {
            split: clients.examples(client, split)[0][:, 0].astype(int)
            for split in ("train", "validation", "test")
        }
        days = {split: DAYS[ids] for split, ids in rows.items()}
        assert days["train"].max() < days["validation"].min()
        assert days["validation"].max() < days["test"].min()
        num = sum(map(len, rows.values()))
        assert len(rows["test"]) == round(0.25 * num) and num in (200, 201)


def test_a_cap_keeps_the_latest():
    x = np.arange(20)[:, None] * 1.0
    clients = pfl.Federation.from_arrays(
        x,
        np.arange(20) % 2,
        client=np.zeros(20, int),
        by_time=True,
        train_examples=3,
        test_examples=2,
        standardize=False,
    )
    assert sorted(clients.examples(0, "train")[0][:, 0]) == [13, 14, 15]
    assert sorted(clients.examples(0, "test")[0][:, 0]) == [18, 19]


def test_official_tests_stay_and_validation_is_the_latest_of_the_rest():
    is_test = np.arange(20) % 4 == 0
    clients = pfl.Federation.from_arrays(
        np.arange(20)[:, None] * 1.0,
        np.arange(20) % 2,
        client=np.zeros(20, int),
        is_test=is_test,
        by_time=True,
        validation_fraction=0.2,
        standardize=False,
    )
    assert sorted(clients.examples(0, "test")[0][:, 0]) == np.flatnonzero(is_test).tolist()
    assert sorted(clients.examples(0, "validation")[0][:, 0]) == [17, 18, 19]


def test_times_are_read_from_files(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"heat": TARGET, "label": LABEL, "day": DAYS})
    frame.to_csv(tmp_path / "days.csv", index=False)
    frame.to_parquet(tmp_path / "days.parquet")
    np.savez(tmp_path / "days.npz", x=TARGET[:, None], y=LABEL, time=DAYS)
    sources_read = [
        sources.read(tmp_path / "days.csv", time="day"),
        sources.read(tmp_path / "days.parquet", time="day"),
        sources.read(tmp_path / "days.npz"),
    ]
    for source in sources_read:
        np.testing.assert_array_equal(source.time, np.argsort(np.argsort(DAYS)))
        assert source.x.shape == (N, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time": ["yesterday"] * N}, r"^time: .*yesterday.*; accepted: numbers, dates, or texts"),
        ({"time": np.full(N, np.nan)}, r"^time: is missing or infinite in row 0"),
        ({"time": np.full(N, "NaT", "M8[s]")}, r"^time: is missing or infinite in row 0"),
        ({"time": np.zeros(N, bool)}, r"^time: is bool; accepted"),
        ({"time": DAYS[:-1]}, r"^time: has shape \(600,\), but x has \(601, 1\)"),
        ({"partition": Sizes(sizes=(1, 2))}, r"^sizes=1,2: has 2 numbers; accepted: num_clients=4"),
        ({"partition": Grouped()}, r"^partition=grouped: arrays has no client ids"),
        (
            {"partition": Sizes(), "replacement": True, "train_examples": 5},
            r"^replacement: accepted with all partitions except .*inner_dirichlet.*sizes",
        ),
        (
            {"by_time": True, "replacement": True, "train_examples": 5},
            r"^by_time: accepted without replacement",
        ),
        (
            {"y": np.stack([TARGET, -TARGET], axis=1), "partition": Quantiles()},
            r"^partition=quantiles: needs one number per example; arrays has y \(601, 2\)",
        ),
        (
            {"y": TARGET, "partition": Shards()},
            r"^partition=shards: needs classes; accepted for regression: iid, sizes, quantiles",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(arguments, message):
    arguments = {"y": LABEL, **arguments}
    with pytest.raises(ArgumentError, match=message):
        pfl.Federation.from_arrays(np.ones((N, 1)), num_clients=4, **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sizes(sizes=(1, 0)), "sizes"),
        (lambda: Sizes(growth="cubic"), "growth=cubic: accepted: linear, square, exponential"),
        (lambda: Quantiles(strictness=1.5), "strictness=1.5: accepted: 0 to 1"),
        (lambda: QuantileDirichlet(bins=0), "bins=0: accepted: 1 or more"),
        (lambda: Shards(shards=0), "shards=0: accepted: 1 or more"),
        (lambda: Grouped(members=0), "members=0: accepted: 1 or more"),
        (lambda: InnerDirichlet(alpha=0.0), "alpha=0.0: accepted: above 0"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(make, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        make()


@pytest.mark.parametrize("members", [1, 2, 3, 11, 12])
def test_groups_join_successive_clients(members):
    source = sources.make_source(
        {
            "x": np.ones((N, 1)),
            "y": LABEL,
            "client": np.array(list("abcdefghijk"))[np.arange(N) % 11],
        },
        name="toy",
    )
    assignment = assign(source, Grouped(members=members))
    names = list("abcdefghijk")
    expected = [" + ".join(names[start : start + members]) for start in range(0, 11, members)]
    assert assignment.names.tolist() == expected
    for ids, name in zip(assignment.indices, assignment.names, strict=True):
        assert set(np.array(names)[ids % 11]) == set(name.split(" + "))


def test_a_vertical_partition_is_refused_in_a_line():
    line = outcomes.refused(train.COMMAND, ["--partition=vertical"])
    assert line.startswith("--partition=vertical: splits the features of the same examples")
    assert "VerticalSizePartitioner" in line


def test_partitions_of_digits_reach_the_library_by_name():
    clients = data.digits(num_clients=5, partition=Shards())
    assert clients.name == "digits, shards"
