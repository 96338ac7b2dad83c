"""Clients that fail, and results that are not finite: what the others make of the round."""

import itertools

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.contract.errors import ArgumentError
from pfljax.stages.faults import Faults
from pfljax.stores.registry import STORES

SIZES = (3, 5, 2, 4, 6)
KNOBS = {name: {"neighbors": 2} for name in ("federico", "fedfomo", "fedfomo_average")}


def played(faults, name="fedavg", rounds=1, clients=None, **options):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(0.1), **toys.network(name))
    algorithm = faults.on(problem, toys.make_algorithm(name, problem, **KNOBS.get(name, {})))
    return toys.train(algorithm, problem, clients or federation.client_data, rounds, **options)


def without(clients, left_out):
    """The clients' data, with no examples for those left out."""
    parts = {}
    for part in ("train", "validation"):
        split = getattr(clients, part)
        parts[part] = split._replace(size=np.where(np.isin(np.arange(len(SIZES)), left_out), 0, split.size))
    return clients._replace(**parts)


@pytest.mark.parametrize("faults", [Faults(dropout=0.5), Faults(lost=0.5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_server_averages_those_that_arrive(faults, seed):
    """The round's model is the one of exactly one set of clients, of as many as did not fail."""
    federation = toys.make_federation(SIZES)
    states, records = played(faults, seed=seed)
    failed, problem = int(records[0].metrics["failed_clients"]), toys.make_problem(federation, optax.sgd(0.1))
    play = toys.trainer(toys.make_algorithm("fedavg", problem), problem, federation.client_data, 1, seed)
    sets = itertools.combinations(range(len(SIZES)), failed)
    each = [play(without(federation.client_data, list(some)))[0][1].models for some in sets]
    close = lambda a, b: all(np.allclose(x, y, atol=1e-6) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
    assert sum(close(states[1].models, models) for models in each) == 1


def test_clients_that_fail_before_training_keep_what_they_have():
    """Of Local, whose clients have nothing to do with each other; an upload that is lost is none of them."""
    states, records = played(Faults(dropout=0.5), "local", rounds=4)
    plain = played(Faults(), "local", rounds=1)[0][1].models["Dense_0"]["kernel"]
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        kernels = [np.asarray(state.models["Dense_0"]["kernel"]) for state in (before, after)]
        same = (kernels[0] == kernels[1]).all(axis=(1, 2))
        assert same.sum() == records[number].metrics["failed_clients"]
        if number == 0:
            np.testing.assert_allclose(kernels[1][~same], np.asarray(plain)[~same], rtol=1e-6)
    assert 0 < sum(int(record.metrics["failed_clients"]) for record in records) < 20


def test_about_the_share_fails():
    records = played(Faults(dropout=0.2, lost=0.25), rounds=80)[1]
    failed = np.mean([record.metrics["failed_clients"] for record in records]) / len(SIZES)
    assert abs(failed - (0.2 + 0.8 * 0.25)) < 4 * np.sqrt(0.4 * 0.6 / 400)
    assert all(np.isfinite(record.train_loss) for record in records)


@toys.each_method(fast=("fedavg",))
def test_a_client_whose_results_are_not_finite_is_left_out(name):
    """Its examples are NaN: the others' models are those of a federation in which it has no examples."""
    clients = toys.make_federation(SIZES).client_data
    x = np.array(clients.train.x)
    x[3] = np.nan
    spoiled = clients._replace(train=clients.train._replace(x=x))
    faults = Faults(on_divergence="drop")
    try:
        states, records = played(faults, name, rounds=2, clients=spoiled)
    except ArgumentError as error:
        assert str(error).startswith("faults: accepted for this method: none")
        return
    assert [int(record.metrics["dropped_clients"]) for record in records] == [1, 1]
    assert [int(record.metrics["last_dropped_client"]) for record in records] == [3, 3]
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(states[-1]) if leaf.dtype == np.float32)
    assert all(np.isfinite(record.train_loss) and record.diverged == -1 for record in records)
    # Some servers know from the start how many examples each client has.
    expected = played(Faults(), name, rounds=2, clients=without(clients, [3]), state=states[0])[0][-1]
    toys.assert_trees_close(states[-1].models, expected.models, rtol=1e-4, atol=1e-5)


def test_what_is_not_finite_stops_a_run_by_default():
    _, records = played(Faults(broken=0.5), rounds=3)
    assert records[-1].diverged >= 0
    states, records = played(Faults(broken=0.5, on_divergence="drop"), rounds=3)
    assert sum(int(record.metrics["dropped_clients"]) for record in records) > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[-1].models))


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_faults_are_the_same_under_every_store(store):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, cohort=3)
    options = {"faults": Faults(0.2, 0.2, 0.2, "drop")}
    run = lambda store: toys.run(toys.make_experiment("ditto", problem, federation, client_store=store, **options), 3)
    found, expected = run(store).whole_state(), run("device").whole_state()
    toys.assert_trees_close(found.models, expected.models, rtol=1e-5, atol=1e-6)
    toys.assert_trees_close(found.clients, expected.clients, rtol=1e-5, atol=1e-6)


def test_faults_that_mean_nothing_are_refused():
    problem = toys.make_problem(toys.make_federation(SIZES))
    method = toys.make_algorithm("local", problem)
    assert not Faults().active and Faults().on(problem, method) is method
    with pytest.raises(ArgumentError, match=r"^lost=0.2: accepted for this method: 0; no client sends"):
        Faults(lost=0.2).on(problem, method)
    with pytest.raises(ArgumentError, match=r"^faults: accepted for this method: none; clients mix"):
        Faults(dropout=0.2).on(problem, toys.make_algorithm("dfedem", problem))
    with pytest.raises(ArgumentError, match=r"^dropout=1"):
        Faults(dropout=1.0)
