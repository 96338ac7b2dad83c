"""A sample of the clients is scored: with the figures that these clients have when all are scored."""

import numpy as np
import optax
import pytest
import toys

import pfljax as pfl
from pfljax.api import Run
from pfljax.contract.errors import ArgumentError
from pfljax.exchange.plan import make_plan
from pfljax.folder import files
from pfljax.training.loop import Schedule, Trainer

SIZES = (5, 1, 3, 4, 2, 4, 0, 3)
COHORT = 4


def outcome(name, eval_clients, store="device", devices=1, rounds=3, **options):
    federation = toys.make_federation(SIZES)
    network = toys.network(name)
    problem = toys.make_problem(federation, optax.sgd(0.1), batch_size=2, cohort=COHORT, **network)
    plan = make_plan("map", devices=devices)
    fields = {"client_store": store, "eval_clients": eval_clients, "plan": plan}
    return toys.run(toys.make_experiment(name, problem, federation, **fields), rounds, **options)


SLOW = [("fedavg", "device"), ("fedem", "host"), ("federico", "disk")]
LONG = [
    ("ditto", "disk"),
    ("fedfomo", "host"),
    ("clustered", "device"),
    ("federico", "device"),
    ("mocha", "disk"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "store"),
    [*SLOW, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
)
def test_scores_are_those_of_the_whole(name, store):
    whole = outcome(name, 0).history
    found = outcome(name, 5, store, devices=2)
    ids = found.experiment.scored
    assert len(ids) == 5 and (np.diff(ids) > 0).all()
    for key, values in whole.results.items():
        np.testing.assert_allclose(
            found.history.results[key][-1], values[-1][ids], rtol=1e-4, atol=1e-5
        )
    for key in ("index", "weights"):
        np.testing.assert_allclose(
            found.history.collaboration[key][-1], whole.collaboration[key][-1][ids], rtol=1e-5
        )
    assert [row["client"] for row in found.summary["per_client"]] == ids.tolist()
    sizes = np.array([4] * 5)
    accuracy = found.history.results["accuracy_test"][-1]
    assert found.summary["last"]["accuracy"] == pytest.approx(np.average(accuracy, weights=sizes))


@pytest.mark.slow
def test_files_say_which_clients_were_scored_and_a_resumed_run_scores_them(tmp_path):
    options = {"out": tmp_path, "schedule": Schedule(1, 1)}
    first = outcome("local", 3, **options)
    results = files.read_npz(tmp_path / "results.npz")
    used = files.read_npz(tmp_path / "collaboration.npz")
    assert results["accuracy_test"].shape == (4, 3)
    for file in (results, used):
        np.testing.assert_array_equal(file["clients"], first.experiment.scored)
    assert used["group"].tolist() == (first.experiment.scored % 2).tolist()
    again = outcome("local", 3, rounds=5, resume=True, **options)
    np.testing.assert_array_equal(again.experiment.scored, first.experiment.scored)
    np.testing.assert_array_equal(
        again.history.results["accuracy_test"][:4], first.history.results["accuracy_test"]
    )
    assert len(again.history.results["accuracy_test"]) == 6


@pytest.mark.slow
def test_replicates_score_clients_of_their_own():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, batch_size=2)
    runs = [
        toys.make_experiment("local", problem, federation, seed=seed, eval_clients=4)
        for seed in range(3)
    ]
    together = Trainer(runs).train(2)
    assert len({tuple(found.experiment.scored) for found in together}) > 1
    for run, found in zip(runs, together, strict=True):
        alone = Trainer([run]).train(2)[0]
        np.testing.assert_array_equal(found.experiment.scored, alone.experiment.scored)
        for key, values in alone.history.results.items():
            np.testing.assert_allclose(found.history.results[key][-1], values[-1], rtol=1e-5)


def test_what_is_not_accepted_says_so():
    federation = toys.make_federation(SIZES)
    with pytest.raises(ArgumentError, match=r"^eval_clients=9: accepted: 0 to 8"):
        Run(pfl.FedAvg(), federation, pfl.models.MLP((3,)), eval_clients=9)
