"""Clients in host memory: the same figures as on the devices, at a cost of S and not of K."""

import gc

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.algorithms import METHODS
from pfljax.contract import tree
from pfljax.run.replicates import ONE
from pfljax.stages import latecomers
from pfljax.stores import host_store, serving, stacks
from pfljax.stores.registry import STORES
from pfljax.training.loop import Schedule

SIZES = (5, 1, 3, 4, 2, 4, 0, 3)
ROUNDS = 3
COHORT = 4


def compile_segment(experiment):
    plan = experiment.problem.plan
    clients = experiment.federation.client_data
    return STORES["host"].compile_segment(experiment, clients, plan, ROUNDS, ONE)


def make_experiment(name, sizes=SIZES, client_store="host", **hyperparameters):
    federation = toys.make_federation(sizes)
    network = toys.network(name)
    problem = toys.make_problem(
        federation, optax.adam(0.05), batch_size=2, cohort=COHORT, **network
    )
    return toys.make_experiment(
        name, problem, federation, hyperparameters=hyperparameters, client_store=client_store
    )


def played(name, store):
    """(all rows but their seconds, all scores and whom clients use, the state in memory) of a run."""
    found = toys.run(make_experiment(name, client_store=store), ROUNDS, schedule=Schedule(1, 2))
    rows = [
        {name: value for name, value in row.items() if name != "seconds"}
        for row in found.history.rows
    ]
    return (
        rows,
        (found.history.results, found.history.collaboration),
        jax.device_get(stacks.in_memory(found.state)),
    )


# On disk rows are kept apart, else it is the host's store.
SETTINGS = [
    ("local", "host"),
    ("scaffold", "host"),
    ("fedfomo", "host"),
    *((name, "disk") for name in METHODS),
]
FAST = [
    *SETTINGS[:3],
    ("federico", "disk"),
    ("fedem", "disk"),
    ("mocha", "disk"),
    ("clustered", "disk"),
]


def suite(name, store):
    if (name, store) in FAST:
        return []
    return [pytest.mark.slow if name in toys.VARIED else pytest.mark.long]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "store"), [pytest.param(*each, marks=suite(*each)) for each in SETTINGS]
)
def test_runs_are_those_of_the_devices(name, store, monkeypatch):
    """Their figures, whom clients use, and their states; clients are evaluated in several blocks."""
    monkeypatch.setattr(host_store, "BLOCK_BYTES", 0)
    (rows, scores, state), (wanted, *others) = (played(name, each) for each in (store, "device"))
    assert rows == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in wanted]
    toys.assert_trees_close((scores, state), tuple(others), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_devices_need_nothing_of_the_size_of_k(monkeypatch):
    """Neither what is compiled nor what a run or an evaluation leaves or places on them."""
    monkeypatch.setattr(host_store, "BLOCK_BYTES", 0)
    put = serving.place
    needs = []

    def noting(plan, stacked, num, axis=0):
        placed.append(tree.num_bytes(stacked))
        return put(plan, stacked, num, axis)

    for module in (host_store, serving):
        monkeypatch.setattr(module, "place", noting)
    for num_clients in (20, 80):
        gc.collect()  # what other tests left in cycles
        placed = []
        before = sum(leaf.nbytes for leaf in jax.live_arrays())
        experiment = make_experiment("federico", (3,) * num_clients, candidates=6)
        shards = experiment.federation.client_data
        found = compile_segment(experiment)
        state, _, _ = found.segment(
            jax.random.key(0), 0, 3, found.init(jax.random.key(0), shards), shards
        )
        evaluate = STORES["host"].make_evaluation([experiment], found, ONE)
        trained = np.ones(num_clients, bool)
        evaluate(jax.random.key(0), state, shards, {"test": experiment.federation.test}, trained)
        gc.collect()
        left = sum(leaf.nbytes for leaf in jax.live_arrays()) - before
        del state
        needs.append((found.memory.total, max(placed)))
        # a few scalars, and the clients that were in most cohorts
        assert left < 64 + 8 * latecomers.MET
    assert needs[0] == needs[1] and min(needs[0]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "federico"])
def test_arrays_that_no_result_depends_on_are_placed_with_the_first_block_only(name, monkeypatch):
    """Adam's two moments of every parameter, and the training examples."""
    monkeypatch.setattr(host_store, "BLOCK_BYTES", 0)
    experiment = make_experiment(name, (3,) * 12)
    shards = experiment.federation.client_data
    found = compile_segment(experiment)
    state = found.init(jax.random.key(0), shards)
    evaluate = STORES["host"].make_evaluation([experiment], found, ONE)
    splits = {"test": experiment.federation.test}

    num_placed = []
    put = serving.place

    def noting(plan, stacked, num, axis=0):
        if isinstance(stacked, dict) and all(isinstance(position, int) for position in stacked):
            num_placed.append(len(stacked))
        return put(plan, stacked, num, axis)

    monkeypatch.setattr(serving, "place", noting)
    for _ in range(2):
        evaluate(jax.random.key(0), state, shards, splits, np.ones(12, bool))
    in_one_evaluation = len(num_placed) // 2
    first, *others = num_placed[:in_one_evaluation]
    num_parameters = len(jax.tree.leaves(experiment.problem.model.network.shapes))
    assert len(set(others)) == 1 and first - others[0] >= 2 * num_parameters
    assert num_placed[in_one_evaluation:] == [first, *others]


@toys.each_method(["scaffold", "federico"], fast=[], slow=["scaffold"])
def test_a_run_goes_on_in_the_other_store(name, tmp_path):
    """Stopped on the devices, resumed on the host, and the other way round, as never stopped."""
    experiments = {store: make_experiment(name, client_store=store) for store in ("device", "host")}
    whole = toys.run(experiments["device"], ROUNDS, out=tmp_path / "whole").state
    for store, other in (("device", "host"), ("host", "device")):
        out = tmp_path / store
        toys.run(experiments[store], 2, out=out, schedule=Schedule(1, 1))
        resumed = toys.run(experiments[other], ROUNDS, out=out, resume=True).state
        toys.assert_trees_close(stacks.in_memory(resumed), whole, rtol=1e-5, atol=1e-6)
