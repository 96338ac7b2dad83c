"""Clients in host memory: the same figures as on the devices, at a cost of S and not of K."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.algorithms import METHODS
from pfljax.core import tree
from pfljax.core.types import UsageError
from pfljax.training import host_store, loop

SIZES, ROUNDS, COHORT = (5, 1, 3, 4, 2, 4, 0, 3), 3, 4
# Of each kind one in the default suite: what stays, what is shared, what travels, and what keeps what.
KINDS = ("local", "fedavg_plus", "scaffold", "fedem", "federico", "fedfomo")
every_method = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *([] if name in KINDS else [pytest.mark.slow])])
        for name in METHODS
    ],
)


def make_setup(name, sizes=SIZES, client_store="host", **knobs):
    federation = toys.make_federation(sizes)
    hidden = (3,) if name == "fedper" else ()
    problem = toys.make_problem(federation, optax.adam(0.05), batch_size=2, cohort=COHORT, hidden=hidden)
    options = {"rounds": ROUNDS, "eval_every": ROUNDS, "client_store": client_store}
    return toys.make_setup(name, problem, federation, knobs=knobs, **options)


@every_method
def test_rounds_are_those_of_the_devices(name):
    setup = make_setup(name)
    shards, key = setup.federation.client_data, jax.random.key(0)
    found = host_store.compile_segment(setup, shards, setup.plan)
    state = found.init(key, shards)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state.clients))
    state, records, count = found.segment(key, 0, 2, state, shards)
    state, more, last = found.segment(key, 2, ROUNDS, state, shards)  # a segment goes on from another
    assert (count, last) == (2, 1)

    algorithm = setup.make(setup.plan)
    problem = toys.make_problem(setup.federation, plan=setup.plan, cohort=COHORT)
    states, expected = toys.train(algorithm, problem, shards, ROUNDS)
    toys.assert_trees_close(state, jax.device_get(states[-1]), rtol=1e-4, atol=1e-5)
    records = jax.tree.map(lambda a, b: np.concatenate([a, b]), records, more)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(expected))
    toys.assert_trees_close(records, expected, rtol=1e-4, atol=1e-5)


@every_method
def test_evaluation_in_blocks_is_that_of_all_at_once(name, monkeypatch):
    monkeypatch.setattr(host_store, "BLOCK_BYTES", 0)  # so that there are several
    setup = make_setup(name)
    federation, key = setup.federation, jax.random.key(5)
    algorithm = setup.make(setup.plan)
    if not algorithm.by_rows:
        with pytest.raises(UsageError, match=r"--client_store=host: .* accepted: device"):
            host_store.make_evaluation(setup, algorithm, setup.plan)
        return
    problem = toys.make_problem(federation, plan=setup.plan, cohort=COHORT)
    state = toys.train(algorithm, problem, federation.client_data, ROUNDS)[0][-1]
    splits = {"test": federation.test}
    at_once = loop.make_evaluation(setup, algorithm, setup.plan)
    metrics, collaboration = jax.device_get(at_once(key, state, federation.client_data, splits))
    by_chance = jax.device_get(at_once(jax.random.key(6), state, federation.client_data, splits))[0]
    found, whom = host_store.make_evaluation(setup, algorithm, setup.plan)(
        key, jax.tree.map(np.asarray, state), federation.client_data, splits
    )
    first = slice(0, 2 if not toys.same_trees(metrics, by_chance) else None)  # others draw other mini-batches
    cut = lambda parts: jax.tree.map(lambda leaf: np.asarray(leaf)[first], parts)
    toys.assert_trees_close(cut(found), cut(metrics), rtol=1e-4, atol=1e-6)
    toys.assert_trees_close(whom, collaboration, rtol=1e-4, atol=1e-5)


def test_the_devices_need_nothing_of_the_size_of_k(monkeypatch):
    """Neither what is compiled nor what a run or an evaluation leaves or places on them."""
    monkeypatch.setattr(host_store, "BLOCK_BYTES", 0)
    put, needs = host_store.place, []

    def noting(plan, stacked, num, axis=0):
        placed.append(tree.num_bytes(stacked))
        return put(plan, stacked, num, axis)

    monkeypatch.setattr(host_store, "place", noting)
    for num_clients in (8, 80):
        placed, before = [], sum(leaf.nbytes for leaf in jax.live_arrays())
        setup = make_setup("federico", (3,) * num_clients, candidates=6)
        shards = setup.federation.client_data
        found = host_store.compile_segment(setup, shards, setup.plan)
        state, _, _ = found.segment(jax.random.key(0), 0, 3, found.init(jax.random.key(0), shards), shards)
        evaluate = host_store.make_evaluation(setup, found.algorithm, found.plan)
        evaluate(jax.random.key(0), state, shards, {"test": setup.federation.test})
        left = sum(leaf.nbytes for leaf in jax.live_arrays()) - before
        needs.append((found.memory.total, max(placed), left))
    assert needs[0] == needs[1] and min(needs[0]) > 0


def test_a_run_goes_on_in_the_other_store(tmp_path):
    """Stopped on the devices, resumed on the host, and the other way round, as never stopped."""
    quiet = lambda line: None
    setups = {store: make_setup("federico", client_store=store) for store in ("device", "host")}
    for store, setup in setups.items():
        loop.run(setup, tmp_path / store / "whole", say=quiet)
        part = dataclasses.replace(setup, rounds=2, eval_every=1, checkpoint_every=1)
        loop.run(part, tmp_path / store / "part", say=quiet)
    whole = loop.checkpoints.restore(tmp_path / "host" / "whole" / "checkpoints", _like(setups["host"]))
    for store, other in (("device", "host"), ("host", "device")):
        loop.run(setups[other], tmp_path / store / "part", resume=True, say=quiet)
        done, state = loop.checkpoints.restore(tmp_path / store / "part" / "checkpoints", _like(setups["host"]))
        assert done == whole[0] == ROUNDS
        toys.assert_trees_close(state, whole[1], rtol=1e-5, atol=1e-6)


def _like(setup):
    return host_store.compile_segment(setup, setup.federation.client_data, setup.plan).state
