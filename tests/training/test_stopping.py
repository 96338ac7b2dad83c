"""Runs that stop before their last round: when, what they say, and that they stay finished."""

import optax
import pytest

import pfljax as pfl
from pfljax.folder import files

MODEL = pfl.models.MLP(hidden=())
LOCAL = pfl.LocalTraining(optax.sgd(0.1))


def rows(name, values, every=5):
    return [
        {"round": every * n, "train_loss": 1.0, "loss": 9.0, name: value}
        for n, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("name", "values", "rounds", "why"),
    [
        ("train_loss", [3, 2, 1, 1.5, 1.2], 10, "no better train loss than in round 10"),
        ("train_loss", [3, 2, 1, 1.5, 1.2], 11, ""),
        ("train_loss", [3, 2, 1, 1.5, 0.9], 10, ""),
        # equal is no better
        ("validation_loss", [3, 2, 1, 1, 1], 10, "no better validation loss than in round 10"),
        (
            "validation_accuracy",
            [0.1, 0.5, 0.3, 0.4],
            10,
            "no better validation accuracy than in round 5",
        ),
        ("validation_accuracy", [0.1, 0.5, 0.3, 0.6], 10, ""),
    ],
)
def test_patience(name, values, rounds, why):
    found = rows(name, values)
    if name == "validation_accuracy":
        found = [row | {"validation_loss": 1.0} for row in found]
    assert pfl.patience(rounds)(found) == why


@pytest.fixture(scope="module")
def clients():
    return pfl.data.digits(num_clients=4, train_examples=8)


def after_three(history):
    """Stops at the first evaluation from round 3 on."""
    return history[-1]["round"] >= 3


@pytest.mark.slow
def test_a_stopped_run_is_finished(clients, tmp_path, said):
    def run(stop=after_three):
        return pfl.Run(pfl.FedAvg(), clients, MODEL, LOCAL, stop=stop)

    options = {"out": tmp_path / "run", "eval_every": 2, "progress": False}
    result = run().train(9, **options)
    assert [row["round"] for row in result.history] == [0, 2, 4]
    assert (
        result.summary["stopped"] == "after round 4: its stop rule holds"
        and result.summary["rounds"] == 9
    )
    assert (
        files.read_json(tmp_path / "run" / "summary.json")["stopped"] == result.summary["stopped"]
    )
    again = run().train(20, resume=True, **options)
    assert again.history == result.history and again.summary["stopped"]
    assert any("stopped after round 4: its stop rule holds" in line for line in said)
    assert pfl.load(tmp_path / "run", clients=clients).history == result.history
    with pytest.raises(
        pfl.ArgumentError, match=r"with other settings: stop was 'a function' and is None"
    ):
        run(None).train(20, resume=True, **options)
    assert (
        run(lambda history: len(history) == 2 and "enough")
        .train(9, eval_every=2, progress=False)
        .summary["stopped"]
        == "after round 2: enough"
    )


@pytest.mark.long
def test_cells_stop_by_themselves_and_are_finished(clients, tmp_path, said):
    options = {"seeds": (0, 1), "rounds": 9, "eval_every": 2, "out": tmp_path, "stop": after_three}
    table = pfl.compare([pfl.FedAvg()], clients, MODEL, LOCAL, **options)
    assert [cell["round"] for cell in table.rows[0]["seeds"]] == [4, 4]
    pfl.compare([pfl.FedAvg()], clients, MODEL, LOCAL, **options)
    assert sum("already finished" in line for line in said) == 2


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda c: pfl.patience(0), "patience=0: accepted: 1 or more"),
        (
            lambda c: pfl.Run(pfl.FedAvg(), c, MODEL, stop=5),
            r"stop=5: accepted: a function .* pfljax.patience\(20\)",
        ),
        (
            lambda c: pfl.Run(pfl.FedAvg(), c, MODEL, stop=lambda rows: rows[0]["f1"]).train(
                1, progress=False
            ),
            "stop: raised KeyError: 'f1'",
        ),
        (
            lambda c: pfl.train_replicates(
                [pfl.Run(pfl.FedAvg(), c, MODEL, seed=s, stop=after_three) for s in (0, 1)], 1
            ),
            "runs: accepted in one kernel: runs without a stop rule",
        ),
    ],
)
def test_rules_that_are_refused(mistake, message, clients):
    with pytest.raises(pfl.ArgumentError, match=message):
        mistake(clients)
