"""Clients that fail, and results that are not finite: what the others make of the round."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
import toys
from quadratics import OPTIMIZER, descend, vectors
from staged import rows, staged

from pfljax.algorithms import METHODS
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.exchange.plan import make_plan
from pfljax.folder.folders import is_checked
from pfljax.stages.faults import Faults, spoiled
from pfljax.stages.pipeline import Pipeline
from pfljax.stores.registry import STORES
from pfljax.training.loop import Schedule, Trainer

SIZES = (3, 5, 2, 4, 6)
FEDERATION = toys.make_federation(SIZES, "regression")
PROBLEM = toys.make_problem(FEDERATION, OPTIMIZER)
OPTIONS = ("drop", "stop")


@functools.cache
def failing(faults, name="fedavg", checked=False):
    """A method whose clients fail."""
    method = toys.make_algorithm(name, PROBLEM)
    return staged(PROBLEM, method, FEDERATION, faults=faults, checked=checked)


def average(theta, clients):
    """The mean by n_k of what some clients make of a model."""
    trained = [descend(FEDERATION, k, theta, 1) for k in clients]
    return np.average(trained, axis=0, weights=np.array(SIZES)[list(clients)])


def telling(algorithm):
    """The algorithm, whose metrics have numbers that each client draws from its key for the round."""

    def client_update(context, models, row, data):
        out = algorithm.client_update(context, models, row, data)
        drawn = {"drawn": jax.random.uniform(context.key, (3,))}
        return out._replace(report=out.report._replace(entries=out.report.entries | drawn))

    def server_update(key, state, aggregate):
        entries = dict(aggregate.report.entries)
        drawn = entries.pop("drawn")
        aggregate = aggregate._replace(report=aggregate.report._replace(entries=entries))
        state, metrics = algorithm.server_update(key, state, aggregate)
        return state, metrics | {"drawn": drawn}

    return dataclasses.replace(algorithm, client_update=client_update, server_update=server_update)


@pytest.fixture(scope="module")
def rounds():
    """Forty rounds of Ditto whose clients fail before or after they train: (states, records)."""
    faults = Faults(dropout=0.3, lost=0.3)
    method = telling(toys.make_algorithm("ditto", PROBLEM))
    algorithm = staged(PROBLEM, method, FEDERATION, faults=faults)
    states, records = toys.train(algorithm, PROBLEM, FEDERATION.client_data, 40)
    return jax.device_get(states), jax.device_get(records)


def those_that_trained(before, after):
    """The clients whose own models have changed."""
    models = [vectors(rows(state).params) for state in (before, after)]
    return np.flatnonzero((models[0] != models[1]).any(axis=1)).tolist()


def test_the_server_averages_those_that_arrive(rounds):
    """Of the clients that have trained, exactly one set, of as many as did not fail, has the round's model as mean."""
    states, records = rounds
    lost = 0
    for number, (before, after) in enumerate(itertools.pairwise(states[:6])):
        trained = those_that_trained(before, after)
        arrived = len(SIZES) - int(records[number].metrics["failed_clients"])
        theta, found = (vectors(state.models)[0] for state in (before, after))
        sets = [some for some in itertools.combinations(trained, arrived) if some]
        close = [np.allclose(average(theta, some), found, rtol=1e-5, atol=1e-6) for some in sets]
        assert sum(close) == 1
        lost += len(trained) - arrived
    assert lost > 0


def test_clients_that_fail_before_training_keep_what_they_have_and_others_what_they_learned(rounds):
    states, _ = rounds
    theta = vectors(states[0].models)[0]
    before, after = (vectors(rows(state).params) for state in states[:2])
    trained = those_that_trained(*states[:2])
    assert 0 < len(trained) < len(SIZES)
    strength = METHODS["ditto"]().mu
    for k in trained:
        expected = descend(FEDERATION, k, before[k], 1, lambda v: strength * (v - theta))
        np.testing.assert_allclose(after[k], expected, rtol=1e-4, atol=1e-6)


def test_about_the_share_fails(rounds):
    states, records = rounds
    clients = len(SIZES) * len(records)
    failed = sum(int(record.metrics["failed_clients"]) for record in records) / clients
    assert abs(failed - (0.3 + 0.7 * 0.3)) < 4 * np.sqrt(0.25 / clients)
    trained = sum(len(those_that_trained(*pair)) for pair in itertools.pairwise(states)) / clients
    assert abs(trained - 0.7) < 4 * np.sqrt(0.3 * 0.7 / clients)
    assert all(
        np.isfinite(record.train_loss)
        for record in records
        if record.metrics["failed_clients"] < len(SIZES)
    )


def test_who_fails_does_not_depend_on_what_clients_draw(rounds):
    """Else, Poisson cohorts or mini-batches would tell who fails."""
    _, records = rounds
    small = [(record.metrics["drawn"][:, :2] < 0.3).any(axis=1).sum() for record in records]
    failed = [record.metrics["failed_clients"] for record in records]
    assert (np.array(small) != np.array(failed)).mean() > 0.25


def test_broken_uploads_are_dropped_by_default():
    clients = FEDERATION.client_data
    _, records = toys.train(failing(Faults(broken=0.5, on_divergence="stop")), PROBLEM, clients, 3)
    assert records[-1].diverged >= 0 and records[0].dropped is None

    states, records = toys.train(failing(Faults(broken=0.3)), PROBLEM, clients, 3)
    for number, record in enumerate(records):
        left = np.flatnonzero(np.array(record.dropped) < 0)
        assert len(left) == len(SIZES) - int(record.metrics["dropped_clients"])
        assert record.diverged == -1
        theta = vectors(states[number].models)[0]
        expected = average(theta, left) if len(left) else theta
        np.testing.assert_allclose(
            vectors(states[number + 1].models)[0], expected, rtol=1e-4, atol=1e-6
        )
    assert any(0 < (record.dropped >= 0).sum() < len(SIZES) for record in records)


def spoiled_problem(left_out, spoiled):
    """A federation of which some clients have no examples, and some examples that are NaN."""
    sizes = np.where(np.isin(np.arange(len(SIZES)), left_out), 0, SIZES)
    federation = toys.make_federation(sizes, "regression")
    x = np.array(federation.train.x)
    x[list(spoiled)] = np.nan
    return dataclasses.replace(federation, train=federation.train._replace(x=x))


@pytest.mark.parametrize(("spoiled", "named"), [((3,), -1), ((0, 2, 3), 0), ((2, 3), -1)])
def test_a_round_diverges_if_nobody_is_left(spoiled, named):
    """Client 1 has no examples, and client 4 fails in the second case, in which it has none either."""
    federation = spoiled_problem((1, 4) if named == 0 else (1,), spoiled)
    records = toys.train(failing(Faults(), checked=True), PROBLEM, federation.client_data, 1)[1]
    assert int(records[0].diverged) == named and set(np.array(records[0].dropped)) == {-1, *spoiled}


class Spoiling(METHODS["fedavg"]):
    """FedAvg in which client 3 sends NaNs in rounds 1 and 2, though its loss is finite."""

    def build(self, problem):
        algorithm = super().build(problem)

        def client_update(context, models, row, data):
            out = algorithm.client_update(context, models, row, data)
            broken = (context.client == 3) & (context.round >= 1) & (context.round <= 2)
            return spoiled(out, broken)

        return dataclasses.replace(algorithm, client_update=client_update)


def spoiling(seed=0, bad=(), method=None, **fields):
    """An experiment whose clients send NaNs; those in `bad` have them among their examples."""
    federation = spoiled_problem((), bad)
    problem = toys.make_problem(federation, OPTIMIZER)
    made = toys.make_experiment(
        "fedavg", problem, federation, plan=make_plan("map", devices=1), seed=seed, **fields
    )
    return dataclasses.replace(made, method=method or Spoiling())


def test_a_run_starts_over_without_what_is_not_finite_and_names_its_client(tmp_path, said):
    """All losses are NaN after client 3 has sent NaNs, that of client 0 first; the model is that of the others."""
    found = toys.run(spoiling(), 4, out=tmp_path / "run")
    assert "round 3: the loss of client 0 is not finite; the run starts over" in "".join(said)
    assert "round 2: the results of client 3 are not finite and are dropped" in "".join(said)
    assert any(line.endswith("not finite: client 3 (2 times)") for line in said) and found.summary[
        "dropped"
    ] == {"3": 2}

    start = toys.init(
        failing(Faults()), PROBLEM, jax.random.fold_in(jax.random.key(0), 0), FEDERATION.client_data
    )
    theta = vectors(start.models)[0]
    for number in range(4):
        theta = average(theta, [0, 1, 2, 4] if number in (1, 2) else range(len(SIZES)))
    np.testing.assert_allclose(vectors(found.whole_state().models)[0], theta, rtol=1e-4, atol=1e-6)
    assert [row["round"] for row in found.history.rows] == [0, 4]


def test_a_run_stops_if_asked_to():
    with pytest.raises(
        RunError, match=r"^round 3: the loss of client 0 is not finite; a smaller learning rate"
    ):
        toys.run(spoiling(faults=Faults(on_divergence="stop")), 4)


@pytest.mark.long
def test_a_checked_run_is_one_that_has_started_over():
    found = toys.run(spoiling(), 4)
    checked = toys.run(spoiling(checked=True), 4)
    assert toys.same_trees(found.whole_state(), checked.whole_state())
    assert [row["round"] for row in found.history.rows] == [
        row["round"] for row in checked.history.rows
    ]


@pytest.mark.slow
def test_a_run_whose_results_are_finite_is_not_checked():
    plain = [
        toys.run(spoiling(method=METHODS["fedavg"](), faults=Faults(on_divergence=rule)), 3)
        for rule in OPTIONS
    ]
    assert (
        toys.same_trees(*(each.whole_state() for each in plain))
        and plain[0].summary["dropped"] == {}
    )
    assert "dropped_clients" not in plain[0].history.last


@pytest.mark.slow
def test_a_run_that_started_over_goes_on_with_checks(tmp_path, said):
    whole = toys.run(spoiling(bad=(1,)), 5)
    out = tmp_path / "run"
    schedule = Schedule(1, 1)
    toys.run(spoiling(bad=(1,)), 2, out=out, schedule=schedule)
    said.clear()
    resumed = toys.run(spoiling(bad=(1,)), 5, out=out, schedule=schedule, resume=True)
    assert "starts over" not in "".join(said) and "resumed after round 2" in "".join(said)
    assert toys.same_trees(whole.whole_state(), resumed.whole_state())
    assert whole.summary["dropped"] == resumed.summary["dropped"] == {"1": 5, "3": 2}
    toys.run(spoiling(), 1, out=out, resume="from_scratch")
    assert not is_checked(out)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        pytest.param("fedavg", range(5), marks=pytest.mark.slow, id="nobody is left"),
        pytest.param("dfedem", (2,), marks=pytest.mark.long, id="clients mix what all send"),
    ],
)
def test_a_run_stops_where_nothing_can_be_dropped(name, bad):
    with pytest.raises(RunError, match=r"^round 1: the loss of client . is not finite; "):
        toys.run(spoiling(bad=tuple(bad), method=METHODS[name]()), 2)


@pytest.mark.long
def test_replicates_start_over_together():
    """One has clients whose results are not finite; the other is as it would be alone, but for rounding."""
    pair = [spoiling(0, (1, 2), METHODS["fedavg"]()), spoiling(1, (), METHODS["fedavg"]())]
    found = Trainer(pair).train(3)
    assert [each.summary["dropped"] for each in found] == [{"1": 3, "2": 3}, {}]
    toys.assert_trees_close(
        found[1].whole_state(), toys.run(pair[1], 3).whole_state(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "store",
    [
        pytest.param(store, marks=pytest.mark.slow if store == "disk" else pytest.mark.long)
        for store in STORES
    ],
)
def test_runs_start_over_under_every_store(store, tmp_path):
    found = toys.run(spoiling(client_store=store, bad=(1,)), 4, out=tmp_path / "run")
    expected = toys.run(spoiling(checked=True, bad=(1,)), 4).whole_state()
    toys.assert_trees_close(found.whole_state(), expected, rtol=1e-5, atol=1e-6)
    assert found.summary["dropped"] == {"1": 4, "3": 2}


def test_faults_that_mean_nothing_are_refused():
    method = toys.make_algorithm("local", PROBLEM)
    for rule in OPTIONS:
        faults = Faults(on_divergence=rule)
        assert not faults.active and faults.stage(PROBLEM, Pipeline(method)) is None
    with pytest.raises(
        ArgumentError, match=r"^lost=0.2: accepted for this method: 0; no client sends"
    ):
        failing(Faults(lost=0.2), "local")
    with pytest.raises(
        ArgumentError, match=r"^faults: accepted for this method: none; clients mix"
    ):
        failing(Faults(dropout=0.2), "dfedem")
    with pytest.raises(ArgumentError, match=r"^dropout=1"):
        Faults(dropout=1.0)
