"""Clients that fail, and results that are not finite: what the others make of the round."""

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.algorithms import METHODS
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.exchange.plan import make_plan
from pfljax.folder.folders import is_checked
from pfljax.stages.faults import Faults, spoiled
from pfljax.stores.registry import STORES
from pfljax.training.loop import Schedule, Trainer

SIZES = (3, 5, 2, 4, 6)
OPTIONS = ("drop", "stop")


def played(faults, name="fedavg", rounds=1, clients=None, checked=False, **options):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(0.1), **toys.network(name))
    algorithm = faults.on(problem, toys.make_algorithm(name, problem), checked)
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


def test_broken_uploads_are_dropped_by_default():
    _, records = played(Faults(broken=0.5, on_divergence="stop"), rounds=3)
    assert records[-1].diverged >= 0 and records[0].dropped is None
    states, records = played(Faults(broken=0.5), rounds=3)
    for record in records:
        assert record.diverged == -1 and int(record.metrics["dropped_clients"]) == (record.dropped >= 0).sum()
    assert sum((record.dropped >= 0).sum() for record in records) > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[-1].models))


def spoiled_problem(left_out, spoiled):
    """A federation of which some clients have no examples, and some examples that are NaN."""
    federation = toys.make_federation(np.where(np.isin(np.arange(len(SIZES)), left_out), 0, SIZES))
    x = np.array(federation.train.x)
    x[list(spoiled)] = np.nan
    return dataclasses.replace(federation, train=federation.train._replace(x=x))


@pytest.mark.parametrize(("spoiled", "named"), [((3,), -1), ((0, 2, 3), 0), ((2, 3), -1)])
def test_a_round_diverges_if_nobody_is_left(spoiled, named):
    """Client 1 has no examples, and client 4 fails in the second case, in which it has none either."""
    federation = spoiled_problem((1, 4) if named == 0 else (1,), spoiled)
    records = played(Faults(), rounds=1, clients=federation.client_data, checked=True)[1]
    assert int(records[0].diverged) == named and set(np.array(records[0].dropped)) == {-1, *spoiled}


class Spoiling(METHODS["fedavg"]):
    """FedAvg in which client 3 sends NaNs in rounds 1 and 2, though its loss is finite."""

    def build(self, problem):
        algorithm = super().build(problem)

        def client_update(context, models, row, data):
            out = algorithm.client_update(context, models, row, data)
            broken = (context.client == 3) & (context.round >= 1) & (context.round <= 2)
            return out._replace(upload=spoiled(out.upload, broken))

        return dataclasses.replace(algorithm, client_update=client_update)


def spoiling(seed=0, bad=(), method=None, **fields):
    """An experiment whose clients send NaNs; those in `bad` have them among their examples."""
    federation = spoiled_problem((), bad)
    problem = toys.make_problem(federation, optax.sgd(0.1))
    made = toys.make_experiment("fedavg", problem, federation, plan=make_plan("map", devices=1), seed=seed, **fields)
    return dataclasses.replace(made, method=method or Spoiling())


def test_a_run_starts_over_without_what_is_not_finite_and_names_its_client(tmp_path):
    """All losses are NaN after client 3 has sent NaNs, that of client 0 first; the model is that of a checked run."""
    lines = []
    found = toys.run(spoiling(), 4, out=tmp_path / "run", say=lines.append)
    assert "round 3: the loss of client 0 is not finite; the run starts over" in "".join(lines)
    assert "round 2: the results of client 3 are not finite and are dropped" in "".join(lines)
    assert lines[-1].endswith("not finite: client 3 (2 times)") and found.summary["dropped"] == {"3": 2}
    checked = toys.run(spoiling(checked=True), 4)
    assert toys.same_trees(found.whole_state(), checked.whole_state())
    assert [row["round"] for row in found.history.rows] == [row["round"] for row in checked.history.rows]


def test_a_run_stops_if_asked_to():
    with pytest.raises(RunError, match=r"^round 3: the loss of client 0 is not finite; a smaller learning rate"):
        toys.run(spoiling(faults=Faults(on_divergence="stop")), 4)


def test_a_run_whose_results_are_finite_is_not_checked():
    plain = [toys.run(spoiling(method=METHODS["fedavg"](), faults=Faults(on_divergence=rule)), 3) for rule in OPTIONS]
    assert toys.same_trees(*(each.whole_state() for each in plain)) and plain[0].summary["dropped"] == {}
    assert "dropped_clients" not in plain[0].history.last


@pytest.mark.slow
def test_a_run_that_started_over_goes_on_with_checks(tmp_path):
    whole = toys.run(spoiling(bad=(1,)), 5)
    out, schedule = tmp_path / "run", Schedule(1, 1)
    toys.run(spoiling(bad=(1,)), 2, out=out, schedule=schedule)
    lines = []
    resumed = toys.run(spoiling(bad=(1,)), 5, out=out, schedule=schedule, resume=True, say=lines.append)
    assert "starts over" not in "".join(lines) and "resumed after round 2" in "".join(lines)
    assert toys.same_trees(whole.whole_state(), resumed.whole_state())
    assert whole.summary["dropped"] == resumed.summary["dropped"] == {"1": 5, "3": 2}
    toys.run(spoiling(), 1, out=out, resume="from_scratch")
    assert not is_checked(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bad"), [("fedavg", range(5)), ("dfedem", (2,))], ids=["nobody is left", "clients mix what all send"]
)
def test_a_run_stops_where_nothing_can_be_dropped(name, bad):
    with pytest.raises(RunError, match=r"^round 1: the loss of client . is not finite; a smaller learning rate may"):
        toys.run(spoiling(bad=tuple(bad), method=METHODS[name]()), 2)


@pytest.mark.slow
def test_replicates_start_over_together():
    """One has clients whose results are not finite; the other is as it would be alone, but for rounding."""
    pair = [spoiling(0, (1, 2), METHODS["fedavg"]()), spoiling(1, (), METHODS["fedavg"]())]
    found = Trainer(pair).train(3)
    assert [each.summary["dropped"] for each in found] == [{"1": 3, "2": 3}, {}]
    toys.assert_trees_close(found[1].whole_state(), toys.run(pair[1], 3).whole_state(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_runs_start_over_under_every_store(store, tmp_path):
    found = toys.run(spoiling(client_store=store, bad=(1,)), 4, out=tmp_path / "run")
    expected = toys.run(spoiling(checked=True, bad=(1,)), 4).whole_state()
    toys.assert_trees_close(found.whole_state(), expected, rtol=1e-5, atol=1e-6)
    assert found.summary["dropped"] == {"1": 4, "3": 2}


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
