"""Clients that never trained: who they are, what they predict with, and what is told of them."""

import dataclasses

import jax
import numpy as np
import pytest
import toys

from pfljax.exchange.rounds import cohort_of
from pfljax.run.experiment import Execution
from pfljax.stages.faults import Faults
from pfljax.training import loop, never_trained
from pfljax.training.loop import Schedule
from pfljax.training.outcome import make_key

SIZES = (4, 3, 5, 2, 4, 3)
K = len(SIZES)
ROUNDS = 2
ONCE = Schedule(eval_every=ROUNDS)


def experiment_of(name, plan="map", **fields):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, cohort=2, batch_size=2)
    execution = Execution(plan, devices=1 if plan == "python" else 2)
    return toys.make_experiment(name, problem, federation, plan=execution.make_plan(), **fields)


def predictions(outcome):
    return outcome.serve(lambda algorithm: lambda made, _: made.models, range(K))


@pytest.fixture(scope="module")
def trained():
    """Outcomes of runs with the same cohorts, by method and choice."""
    known = {}

    def get(name, **fields):
        key = (name, *sorted(fields.items()))
        if key not in known:
            known[key] = toys.run(experiment_of(name, **fields), ROUNDS, schedule=ONCE)
        return known[key]

    return get


def never_of(outcome):
    """Who is in no cohort, by the cohorts of uniform sampling."""
    key = make_key(outcome.experiment, jax.random.key(outcome.experiment.seed), outcome.key, 1, 0)
    cohorts = [cohort_of(key, number, K, 2).ids for number in range(ROUNDS)]
    return np.setdiff1d(np.arange(K), np.concatenate(cohorts))


@pytest.mark.parametrize(
    ("plan", "client_store"),
    [
        ("map", "device"),
        pytest.param("vmap", "device", marks=pytest.mark.slow),
        pytest.param("python", "device", marks=pytest.mark.slow),
        pytest.param("map", "host", marks=pytest.mark.slow),
        pytest.param("map", "disk", marks=pytest.mark.slow),
    ],
)
def test_they_predict_with_the_global_model_and_the_others_with_their_own(
    trained, plan, client_store
):
    outcome = trained("ditto", plan=plan, client_store=client_store)
    never = never_of(outcome)
    assert 0 < len(never) < K
    state = outcome.whole_state()
    served = predictions(outcome)
    for client in range(K):
        own = jax.tree.map(lambda leaf, client=client: leaf[client], state.rows.state.params)
        shared = jax.tree.map(lambda leaf: leaf[0], state.models)
        expected = shared if client in never else own
        found = jax.tree.map(lambda leaf, client=client: leaf[client, 0], served)
        toys.assert_trees_close(found, expected)


def test_training_is_the_same_and_only_their_predictions_differ(trained):
    outcome = trained("ditto")
    initial = trained("ditto", never_trained="initial")
    never = never_of(outcome)
    jax.tree.map(np.testing.assert_array_equal, outcome.whole_state(), initial.whole_state())
    losses = [run.history.results["loss_test"][-1] for run in (outcome, initial)]
    differ = losses[0] != losses[1]
    np.testing.assert_array_equal(np.flatnonzero(differ), never)
    # FedAvg trains the same global model, on the same cohorts.
    averaged = trained("fedavg").history.results["loss_test"][-1]
    np.testing.assert_allclose(losses[0][never], averaged[never], rtol=1e-5)
    # Before anyone has trained, all predict with what they begin with.
    first = [run.history.results["loss_test"][0] for run in (outcome, initial)]
    np.testing.assert_array_equal(*first)


def test_the_summary_tells_of_them(trained):
    outcome = trained("ditto")
    never = never_of(outcome)
    summary = outcome.summary["never_trained"]
    accuracy = outcome.history.results["accuracy_test"][-1]
    sizes = outcome.experiment.federation.test.size
    others = np.setdiff1d(np.arange(K), never)
    assert summary["count"] == len(never) and summary["served"] == "the global model"
    assert summary["score"] == pytest.approx(np.average(accuracy[never], weights=sizes[never]))
    assert summary["others"] == pytest.approx(np.average(accuracy[others], weights=sizes[others]))
    rounds = [row["rounds_trained"] for row in outcome.summary["per_client"]]
    assert [client for client, count in enumerate(rounds) if not count] == never.tolist()
    assert sum(rounds) == 2 * ROUNDS


def test_they_are_scored_by_the_score_of_the_run(trained):
    """The mean of another metric than accuracy and loss is plain, and leaves out clients without a value."""
    outcome = trained("ditto")
    rows = outcome.summary["per_client"]
    never = never_of(outcome)
    values = [0.5, 0.75, None, 1.0, 0.25, 0.0]
    rows = [row | {"auroc": value} for row, value in zip(rows, values, strict=True)]
    theirs = [values[client] for client in never if values[client] is not None]
    others = [values[client] for client in range(K) if client not in never and client != 2]
    scores = never_trained.scores(rows, "auroc")
    assert scores["metric"] == "auroc"
    assert scores["score"] == pytest.approx(np.mean(theirs))
    assert scores["others"] == pytest.approx(np.mean(others))

    by_loss = trained("ditto", score="loss").summary["never_trained"]
    losses = outcome.history.results["loss_test"][-1]
    sizes = outcome.experiment.federation.test.size
    assert by_loss["metric"] == "loss"
    assert by_loss["score"] == pytest.approx(np.average(losses[never], weights=sizes[never]))


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("fedavg", never_trained.AS_OTHERS),
        # Clients keep control variates, which no prediction reads.
        ("scaffold", never_trained.AS_OTHERS),
        pytest.param("feddyn", never_trained.AS_OTHERS, marks=pytest.mark.slow),
        # weights of the server's models
        ("fedem", never_trained.PARTLY_INITIAL),
        # The network has one layer, which is the clients' own.
        pytest.param("fedper", never_trained.INITIAL, marks=pytest.mark.slow),
    ],
)
def test_methods_without_personal_models_beside_a_global_one(trained, name, served):
    assert trained(name).summary["never_trained"]["served"] == served


def test_failed_clients_and_those_without_examples_have_not_trained(said):
    experiment = experiment_of("ditto", faults=Faults(dropout=0.999))
    outcome = toys.run(experiment, ROUNDS, schedule=ONCE)
    assert outcome.summary["never_trained"]["count"] == K

    federation = toys.make_federation((0, *SIZES[1:]))
    problem = toys.make_problem(federation, batch_size=2)
    everyone = toys.make_experiment("ditto", problem, federation)
    outcome = toys.run(everyone, ROUNDS, schedule=ONCE)
    assert [row["rounds_trained"] for row in outcome.summary["per_client"]] == [0] + [ROUNDS] * 5
    assert any(
        line.startswith("  1 of 6 clients never trained and predict with the global model: ")
        for line in said
    )


def test_the_plan_foresees_them_and_the_count_is_kept(tmp_path, said):
    """(1 - 2/6)^2 of 6 clients are 2.7; a resumed run counts on."""
    experiment = experiment_of("ditto", config={"settings": {}})
    toys.run(experiment, ROUNDS, out=tmp_path, schedule=ONCE)
    assert any("about 3 of 6 clients never train" in line for line in said)
    once = dataclasses.replace(experiment)
    resumed = toys.run(once, ROUNDS + 2, out=tmp_path, schedule=ONCE, resume=True)
    assert sum(row["rounds_trained"] for row in resumed.summary["per_client"]) == 2 * (ROUNDS + 2)


def test_replicates_have_their_own(trained):
    first = experiment_of("ditto")
    other = dataclasses.replace(first, seed=first.seed + 1)
    together = loop.Trainer([first, other]).train(ROUNDS, ONCE)
    alone = [toys.run(one, ROUNDS, schedule=ONCE) for one in (first, other)]
    for one, same in zip(together, alone, strict=True):
        assert one.summary["never_trained"]["count"] == same.summary["never_trained"]["count"]
        np.testing.assert_array_equal(one.history.trained, same.history.trained)
