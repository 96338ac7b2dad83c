"""Clients in host memory: the same figures as on the devices, at a cost of S and not of K."""

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.contract import tree
from pfljax.folder import checkpoints
from pfljax.stores import host_store, serving
from pfljax.stores.compiled import Compiled
from pfljax.stores.registry import STORES
from pfljax.stores.replicates import ONE
from pfljax.training.loop import Schedule

SIZES, ROUNDS, COHORT = (5, 1, 3, 4, 2, 4, 0, 3), 3, 4
FAST = ("local", "scaffold")


def compile_segment(experiment):
    plan, clients = experiment.problem.plan, experiment.federation.client_data
    return STORES["host"].compile_segment(experiment, clients, plan, ROUNDS, ONE)


def make_experiment(name, sizes=SIZES, client_store="host", **knobs):
    federation = toys.make_federation(sizes)
    network = toys.NETWORKS.get(name, {})
    problem = toys.make_problem(federation, optax.adam(0.05), batch_size=2, cohort=COHORT, **network)
    return toys.make_experiment(name, problem, federation, knobs=knobs, client_store=client_store)


@toys.each_method(fast=FAST, grouped=True)
def test_rounds_are_those_of_the_devices(name):
    experiment = make_experiment(name)
    shards, key, plan = experiment.federation.client_data, jax.random.key(0), experiment.problem.plan
    found = compile_segment(experiment)
    state = found.init(key, shards)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state.clients))
    state, records, count = found.segment(key, 0, 2, state, shards)
    state, more, last = found.segment(key, 2, ROUNDS, state, shards)  # a segment goes on from another
    assert (count, last) == (2, 1)

    problem = experiment.problem
    algorithm = experiment.algorithm(plan)
    states, expected = toys.train(algorithm, problem, shards, ROUNDS)
    toys.assert_trees_close(state, jax.device_get(states[-1]), rtol=1e-4, atol=1e-5)
    records = jax.tree.map(lambda a, b: np.concatenate([a, b]), records, more)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(expected))
    toys.assert_trees_close(records, expected, rtol=1e-4, atol=1e-5)


@toys.each_method(fast=("scaffold", "fedfomo", "clustered"), grouped=True)
def test_evaluation_in_blocks_is_that_of_all_at_once(name, monkeypatch):
    monkeypatch.setattr(host_store, "BLOCK_BYTES", 0)  # so that there are several
    experiment = make_experiment(name)
    federation, key, plan = experiment.federation, jax.random.key(5), experiment.problem.plan
    algorithm = experiment.algorithm(plan)
    state = toys.train(algorithm, experiment.problem, federation.client_data, ROUNDS)[0][-1]
    splits, compiled = {"test": federation.test}, Compiled(algorithm, plan, *[None] * 4, 0.0)
    at_once = STORES["device"].make_evaluation([experiment], compiled, ONE)
    metrics, collaboration = jax.device_get(at_once(key, state, federation.client_data, splits))
    in_blocks = STORES["host"].make_evaluation([experiment], compiled, ONE)
    found, whom = in_blocks(key, jax.tree.map(np.asarray, state), federation.client_data, splits)
    toys.assert_trees_close(found, metrics, rtol=1e-4, atol=1e-6)
    toys.assert_trees_close(whom, collaboration, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_devices_need_nothing_of_the_size_of_k(monkeypatch):
    """Neither what is compiled nor what a run or an evaluation leaves or places on them."""
    monkeypatch.setattr(host_store, "BLOCK_BYTES", 0)
    put, needs = serving.place, []

    def noting(plan, stacked, num, axis=0):
        placed.append(tree.num_bytes(stacked))
        return put(plan, stacked, num, axis)

    for module in (host_store, serving):
        monkeypatch.setattr(module, "place", noting)
    for num_clients in (8, 80):
        placed, before = [], sum(leaf.nbytes for leaf in jax.live_arrays())
        experiment = make_experiment("federico", (3,) * num_clients, candidates=6)
        shards = experiment.federation.client_data
        found = compile_segment(experiment)
        state, _, _ = found.segment(jax.random.key(0), 0, 3, found.init(jax.random.key(0), shards), shards)
        evaluate = STORES["host"].make_evaluation([experiment], found, ONE)
        evaluate(jax.random.key(0), state, shards, {"test": experiment.federation.test})
        left = sum(leaf.nbytes for leaf in jax.live_arrays()) - before
        del state
        needs.append((found.memory.total, max(placed)))
        assert left < 64  # a few scalars
    assert needs[0] == needs[1] and min(needs[0]) > 0


@toys.each_method(["scaffold", "federico"], fast=[])
def test_a_run_goes_on_in_the_other_store(name, tmp_path):
    """Stopped on the devices, resumed on the host, and the other way round, as never stopped."""
    experiments = {store: make_experiment(name, client_store=store) for store in ("device", "host")}
    for store, experiment in experiments.items():
        toys.run(experiment, ROUNDS, out=tmp_path / store / "whole")
        toys.run(experiment, 2, out=tmp_path / store / "part", schedule=Schedule(1, 1))
    like = compile_segment(experiments["host"]).state
    whole = checkpoints.restore(tmp_path / "host" / "whole" / "checkpoints", ROUNDS, like)
    for store, other in (("device", "host"), ("host", "device")):
        toys.run(experiments[other], ROUNDS, out=tmp_path / store / "part", resume=True)
        state = checkpoints.restore(tmp_path / store / "part" / "checkpoints", ROUNDS, like)
        toys.assert_trees_close(state, whole, rtol=1e-5, atol=1e-6)
