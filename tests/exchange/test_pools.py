"""Pooled examples: the same results as stacks of copies, with memory only for distinct examples."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax import models
from pfljax.contract import tree
from pfljax.contract.pooled import Pooled, is_pooled
from pfljax.contract.types import Split
from pfljax.data.federation import SPLITS, Federation
from pfljax.exchange.plan import make_plan
from pfljax.exchange.pools import GAIN, place
from pfljax.training.loop import Trainer

SIZES = (5, 1, 9, 4, 2, 4, 0, 3)
K = len(SIZES)


def pooled(federation, seed=0):
    """The federation by reference: its examples in a pool, in random order, among examples that no client has."""

    def one(split):
        real = np.arange(split.x.shape[1]) < split.size[:, None]
        places = np.random.default_rng(seed).permutation(real.sum() + 3)[: real.sum()]
        pool = np.full((real.sum() + 3, *split.x.shape[2:]), np.nan, np.float32)
        pool[places] = split.x[real]
        index = np.full(real.shape, -1, np.int32)
        index[real] = places
        return split._replace(x=Pooled(pool, index))

    return dataclasses.replace(
        federation, **{part: one(getattr(federation, part)) for part in SPLITS}
    )


@pytest.fixture
def always_pooled(monkeypatch):
    monkeypatch.setattr("pfljax.exchange.pools.GAIN", 0.0)


def test_pooled_examples_are_read_as_an_array_is():
    stacked = toys.make_federation(SIZES).train.x
    examples = pooled(toys.make_federation(SIZES)).train.x
    assert (examples.shape, examples.ndim, examples.dtype) == (stacked.shape, 3, stacked.dtype)
    assert len(examples) == K
    keys = (
        ...,
        2,
        (0, slice(3)),
        (slice(None), 1),
        (2, 1, 2),
        ([0, 3], [1, 2]),
        (slice(2), slice(2), 0),
    )
    for key in (*keys, (..., 0), (0, ..., 1), (1, 2, ...), (slice(3), ..., slice(2)), (...,)):
        np.testing.assert_array_equal(examples[key], stacked[key])
    for key in (slice(2, 5), np.array([3, 0, 3])):  # of clients: by reference
        assert examples[key].pool is examples.pool
        np.testing.assert_array_equal(np.asarray(examples[key]), stacked[key])


@pytest.mark.parametrize(
    ("devices", "num", "spread"), [(1, 8, False), (2, 8, True), (4, 8, True), (2, 7, False)]
)
def test_a_device_holds_what_its_clients_need(devices, num, spread, always_pooled):
    """Rows 10 k to 10 k + 3 of the pool are client k's, and row 0 everybody's."""
    pool = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    index = np.concatenate(
        [10 * np.arange(num)[:, None] + np.arange(4), np.tile([0, -1], (num, 1))], axis=1
    )
    examples = Pooled(pool, index.astype(np.int32))
    plan = make_plan("map", devices=devices)
    found = place(plan, examples, num)
    assert is_pooled(found) and found.spread == spread
    np.testing.assert_array_equal(np.asarray(found[...]), np.asarray(examples))
    parts = [np.asarray(shard.data) for shard in found.pool.addressable_shards]
    assert len(parts) == devices
    for part, clients in zip(
        parts, np.split(np.arange(num), devices) if spread else [np.arange(num)] * 2, strict=False
    ):
        needed = np.unique(np.append(0, index[clients][:, :4]))
        assert not part[-1].any() and len(part) <= 1 + 4 * len(clients) + 1
        assert {row.tobytes() for row in pool[needed]} <= {row.tobytes() for row in part}


def test_copies_are_made_where_they_cost_little():
    """Eight clients with five examples: 40 examples of 12 bytes, a row of zeros, and 40 index entries of 4 bytes."""
    plan = make_plan("map", devices=1)
    rows = np.arange(40, dtype=np.int32).reshape(8, 5)
    pool = np.ones((40, 3), np.float32)
    assert isinstance(place(plan, Pooled(pool, rows), 8), jax.Array)
    half = np.where(rows % 5 < 2, rows, -1)
    copies = 40 * 12
    by_index = 17 * 12 + 40 * 4
    assert copies > GAIN * by_index and is_pooled(place(plan, Pooled(pool, half), 8))


@pytest.mark.parametrize("devices", [1, 2])
def test_rows_of_pooled_examples_are_taken_wherever_they_live(devices, always_pooled):
    federation = toys.make_federation(SIZES)
    plan = make_plan("map", devices=devices)
    split = place(plan, pooled(federation).train, K)
    ids = np.array([1, 2, 6])
    found = jax.jit(plan.take_rows)(split, ids)
    for leaf, expected in zip(found, federation.train, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf[...]), expected[ids])
    assert is_pooled(found.x) == (devices == 1)  # which holds all that there is


RUNS = [  # K - 1 clients do not divide by the devices
    pytest.param("fedavg", "map", 2, 4, K - 1, marks=pytest.mark.slow),
    pytest.param("fedavg_data", "vmap", 2, K, K, marks=pytest.mark.slow),
    pytest.param("fedavg", "map", 1, K, K, marks=pytest.mark.long),
    pytest.param("federico", "map", 4, K, K, marks=pytest.mark.long),
    pytest.param("fedfomo", "chunk", 2, K, K - 1, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "kind", "devices", "cohort", "num"), RUNS)
def test_a_run_gives_the_same_figures_to_the_bit(name, kind, devices, cohort, num, always_pooled):
    federation = toys.make_federation(SIZES[:num])
    problem = toys.make_problem(federation, optax.adam(0.05), batch_size=2, cohort=min(cohort, num))
    plan = make_plan(kind, 3, devices=devices)
    summaries = []
    for each in (federation, pooled(federation)):
        outcome = toys.run(toys.make_experiment(name, problem, each, plan=plan), 3)
        summaries.append(
            (outcome.summary["last"], outcome.summary["per_client"], jax.device_get(outcome.state))
        )
    for summary in summaries:
        summary[0].pop("seconds")
    assert summaries[0][:2] == summaries[1][:2] and toys.same_trees(
        summaries[0][2], summaries[1][2]
    )


@pytest.mark.slow
def test_replicates_have_pools_of_their_own(always_pooled):
    federations = [toys.make_federation(SIZES, seed=seed) for seed in range(2)]
    problem = toys.make_problem(federations[0], batch_size=2, hidden=(3,))
    plan = make_plan("map", devices=2)
    last = []
    for each in (
        federations,
        [pooled(federation, seed) for seed, federation in enumerate(federations)],
    ):
        runs = [
            toys.make_experiment("fedavg", problem, one, plan=plan, seed=n)
            for n, one in enumerate(each)
        ]
        last.append([outcome.summary["last"] for outcome in Trainer(runs).train(2)])
    for row in (*last[0], *last[1]):
        row.pop("seconds")
    assert last[0] == last[1] and last[0][0] != last[0][1]


@pytest.mark.slow
def test_on_the_host_a_cohort_s_examples_are_copied_and_no_others():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, batch_size=2, cohort=3)
    found = []
    for each in (federation, pooled(federation)):
        outcome = toys.run(toys.make_experiment("scaffold", problem, each, client_store="host"), 3)
        found.append(jax.device_get(outcome.state))
    assert toys.same_trees(*found)


def sequences(num=4, length=6):
    """Uneven clients with sequence targets, which take more memory than an index."""
    rng = np.random.default_rng(0)
    sizes = np.array([9, 1, 2, 1][:num], np.int32)

    def split(sizes):
        real = np.arange(sizes.max()) < sizes[:, None]
        index = np.full(real.shape, -1, np.int32)
        index[real] = np.arange(real.sum())
        tokens = rng.integers(5, size=(real.sum(), length + 1), dtype=np.uint8)
        return Split(
            Pooled(tokens[:, :-1], index), Pooled(tokens[:, 1:], index), sizes.astype(np.int32)
        )

    parts = split(sizes), split(np.zeros(num, np.int32) + np.array([1, 1, 1, 1])), split(sizes)
    return Federation(*parts, np.zeros(num, np.int32), "classification", 5, "sequences")


@pytest.mark.slow
def test_sequences_whose_targets_are_pooled_too_are_trained_on():
    pooled_sequences = sequences()

    def dense(split):
        return Split(np.asarray(split.x), np.asarray(split.y), split.size)

    stacked = {part: dense(getattr(pooled_sequences, part)) for part in SPLITS}
    problem = toys.make_problem(
        pooled_sequences,
        model=models.CharacterLSTM(embedding=3, hidden=(4,)),
        batch_size=2,
        cohort=2,
    )
    found = []
    for each in (pooled_sequences, dataclasses.replace(pooled_sequences, **stacked)):
        outcome = toys.run(toys.make_experiment("fedavg", problem, each, client_store="host"), 2)
        outcome.summary["last"].pop("seconds")
        found.append(outcome.summary["last"])
    assert found[0] == found[1] and np.isfinite(found[0]["loss"])


def test_shapes_and_bytes_of_rows_are_those_of_copies():
    split = pooled(toys.make_federation(SIZES)).train
    assert tree.num_rows(split) == K
    assert tree.row_bytes(split) == 9 * (3 * 4 + 4) + 4
    assert tree.shapes_of_rows(split, 3) == Split(
        jax.ShapeDtypeStruct((3, 9, 3), np.float32),
        jax.ShapeDtypeStruct((3, 9), np.int32),
        jax.ShapeDtypeStruct((3,), np.int32),
    )
