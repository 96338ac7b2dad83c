"""Tables of which a part fails, is refused, or is left to other processes."""

import json

import html_pages
import optax
import pytest
from commands import call, one_line, rows_of

import pfljax as pfl
from pfljax.cli import compare, train
from pfljax.folder import planned

MODEL = pfl.models.MLP(hidden=())
HIDDEN = pfl.models.MLP(hidden=(4,))
SGD = pfl.LocalTraining(optax.sgd, 0.1)
FAST = pfl.LocalTraining(optax.sgd, 1.0)


def digits(split):
    options = {"train_examples": 12, "test_examples": 10, "validation_fraction": 0.25}
    return pfl.data.digits(num_clients=4, seed=split, **options)


def diverging():
    return pfl.methods.FedAvgM(server_learning_rate=1e38)


def test_the_page_says_which_method_failed_and_why(tmp_path):
    table = pfl.compare(
        [pfl.Local(), diverging()], digits, HIDDEN, FAST, rounds=3, seeds=[0], out=tmp_path
    )
    (reason,) = table.failures.values()
    page = html_pages.read(tmp_path / "report.html")
    assert "is not finite" in reason and f"fedavgm failed: {reason}" in page.text
    assert [row["method"] for row in rows_of(tmp_path)] == ["local", "fedavgm"]


def test_a_table_of_failures_alone_is_a_table(tmp_path):
    options = {"rounds": 3, "seeds": [0, 1], "reference": "fedavgm"}
    table = pfl.compare([diverging()], digits, HIDDEN, FAST, out=tmp_path, **options)
    heads, ((title, score, *others),) = table.columns()
    assert (title, score, set(others)) == ("fedavgm", "failed", {"-"}) and len(heads) == len(
        others
    ) + 2
    assert "seed 0, round " in table.failures["fedavgm"]
    assert (tmp_path / "table.csv").exists() and "fedavgm failed" in (
        tmp_path / "table.md"
    ).read_text()
    assert str(table).endswith(table.failures["fedavgm"] + ".")


@pytest.mark.slow
def test_processes_that_share_a_table_tell_each_other_of_failures(tmp_path):
    """With an even number of cells, the second process has none of the method that fails in the first."""
    flags = [
        "--methods=fedavgm,local",
        "--fedavgm.server_learning_rate=1e38",
        "--seeds=0",
        "--rounds=2",
        "--hidden=4",
        "--num_clients=4",
    ]
    line = one_line(call(compare.COMMAND, *flags, f"--out={tmp_path}", "--cells=1/2", code=1))
    assert line.startswith("fedavgm failed: ") and "unfinished runs of other processes: 1" in line
    line = one_line(call(compare.COMMAND, *flags, f"--out={tmp_path}", "--cells=2/2", code=1))
    assert line.startswith("fedavgm failed: ") and "unfinished" not in line
    assert ["failed" in row for row in rows_of(tmp_path)] == [True, False]


def test_a_tuned_study_with_other_seeds_is_refused_before_anything_is_written(tmp_path, said):
    options = {"rounds": 1, "tune": [0.1, 0.3], "tune_widen": 0, "out": tmp_path}
    pfl.compare([pfl.Local()], digits, MODEL, SGD, seeds=[0], **options)
    before = planned.read(tmp_path)
    with pytest.raises(
        pfl.ArgumentError, match=r"^rerun: .*tuning.json has scores of something else \(.*trials"
    ):
        pfl.compare([pfl.Local()], digits, MODEL, SGD, seeds=[0, 1], **options)
    assert planned.read(tmp_path) == before
    pfl.compare([pfl.Local()], digits, MODEL, SGD, seeds=[0], **options)
    assert any("already tuned" in line for line in said) and any(
        "already finished" in line for line in said
    )


@pytest.mark.slow
def test_seeds_in_another_order_are_the_same_study(tmp_path):
    options = {"rounds": 1, "tune": [0.1, 0.3], "tune_widen": 0, "out": tmp_path}
    first = pfl.compare([pfl.Local()], digits, MODEL, SGD, seeds=[3, 4], **options)
    again = pfl.compare([pfl.Local()], digits, MODEL, SGD, seeds=[4, 3], **options)
    by_seed = [
        {run["seed"]: run["accuracy"] for run in table.rows[0]["seeds"]} for table in (first, again)
    ]
    assert by_seed[0] == by_seed[1]


def test_a_value_that_does_not_fit_is_found_before_anything_is_trained(tmp_path):
    hyperparameters = {"fedper": {"personal_layers": [1, 99]}}
    methods = [pfl.Local(), pfl.FedPer()]
    with pytest.raises(pfl.ArgumentError, match=r"^fedper.personal_layers=99"):
        pfl.compare(
            methods,
            digits,
            MODEL,
            SGD,
            rounds=1,
            tune=[0.1, 0.3],
            tune_hyperparameters=hyperparameters,
            out=tmp_path / "new",
        )
    assert not (tmp_path / "new").exists()


def test_mistakes_name_the_argument_of_compare():
    given = {"rounds": 1, "tune": [0.1, 0.3]}
    with pytest.raises(
        pfl.ArgumentError, match=r"^tune_hyperparameters=lam: the method has no hyperparameters"
    ):
        pfl.compare(
            [pfl.Local()], digits, MODEL, SGD, tune_hyperparameters={"local": {"lam": [1]}}, **given
        )
    with pytest.raises(
        pfl.ArgumentError,
        match=r"^tune: accepted if `optimizer` is a function of the learning rate",
    ):
        pfl.compare([pfl.Local()], digits, MODEL, pfl.LocalTraining(optax.sgd(0.1)), **given)
    with pytest.raises(pfl.ArgumentError, match=r"^target=0.5: accepted with a clock"):
        pfl.compare([pfl.Local()], digits, MODEL, SGD, rounds=1, target=0.5)
    with pytest.raises(pfl.ArgumentError, match=r"^target=30: accepted: 0 to 1"):
        pfl.compare([pfl.Local()], digits, MODEL, SGD, rounds=1, target=30, clock=pfl.Clock())
    with pytest.raises(pfl.ArgumentError, match=r"^cells=3/2: accepted: i/n"):
        pfl.compare([pfl.Local()], digits, MODEL, SGD, rounds=1, cells="3/2")


def test_a_method_that_does_not_fit_by_its_hyperparameters_is_left_out_of_all(said):
    """Two clients have at most one neighbor."""
    clients = pfl.data.digits(num_clients=2, train_examples=5)
    table = pfl.compare(
        [pfl.Local(), pfl.FedeRiCo(neighbors=5)],
        clients,
        MODEL,
        SGD,
        rounds=1,
        seeds=[0],
        leave_out=True,
    )
    assert [row["method"] for row in table.rows] == ["local"]
    assert said[0].startswith("  left out: federico: neighbors: ")


def test_a_folder_with_something_else_is_refused(tmp_path):
    pfl.Run(pfl.Local(), digits(0), MODEL, SGD).train(1, out=tmp_path / "run")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "table.csv").write_text("mine")
    for name in ("run", "table"):
        with pytest.raises(
            pfl.ArgumentError, match=r"^out=.*: contains (config.json|table.csv) of something else"
        ):
            pfl.compare([pfl.Local()], digits, MODEL, SGD, rounds=1, out=tmp_path / name)
    assert (tmp_path / "table" / "table.csv").read_text() == "mine"


def test_a_cell_with_unseen_clients_is_loaded_again(tmp_path):
    """From what `pfl.data` functions remember, and with clients as they are handed over."""
    table = pfl.compare(
        [pfl.Local()], digits, MODEL, SGD, rounds=1, seeds=[0], unseen=0.25, out=tmp_path
    )
    again = pfl.load(tmp_path / "local" / "seed-0")
    assert (
        again.accuracy == table.rows[0]["seeds"][0]["accuracy"]
        and again.experiment.federation.num_clients == 3
    )


@pytest.mark.slow
def test_a_schedule_in_steps_is_planned_for_the_planned_rounds(tmp_path):
    flags = [
        "--method=fedavg",
        "--hidden=4",
        "--num_clients=4",
        "--lr_schedule=multistep",
        "--planned_rounds=6",
    ]
    call(train.COMMAND, *flags, "--rounds=2", f"--out={tmp_path / 'parts'}")
    call(train.COMMAND, *flags, "--rounds=6", f"--out={tmp_path / 'parts'}", "--resume")
    call(train.COMMAND, *flags, "--rounds=6", f"--out={tmp_path / 'whole'}")
    rows = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        for name in ("parts", "whole")
    ]
    assert rows[0]["accuracy"] == rows[1]["accuracy"] and rows[0]["loss"] == rows[1]["loss"]
