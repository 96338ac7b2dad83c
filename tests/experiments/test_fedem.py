"""The experiments of FedEM's paper, small."""

import json

import commands
import numpy as np
import pytest
from commands import refused, rows_of

from experiments.fedem import appendix_j1, appendix_j6, figure1, paper, table2, table3, table7
from experiments.fedem.paper import PAPER
from pfljax.cli.settings import parse
from pfljax.settings.method import METHODS

SMALL = ["--num_clients=10", "--test_examples=40", "--rounds=3", "--devices=1"]


def call(module, *flags, code=0):
    """Runs a command, small; what it printed."""
    return commands.call(module.COMMAND, *SMALL, *flags, code=code)


@pytest.mark.slow
def test_table2_tunes_and_stands_beside_the_paper(tmp_path):
    flags = [
        "--methods=fedavg,fedem",
        "--tune=0.01,0.3",
        "--tune_widen=0",
        "--seeds=0",
        f"--out={tmp_path}",
    ]
    printed = call(table2, *flags)
    assert "68.2 / 58.9" in printed and "74.7 / 66.7" in printed  # the paper's Table 2
    rows = rows_of(tmp_path)
    assert [row["method"] for row in rows] == ["fedavg", "fedem"]
    for row in rows:
        tuning = json.loads((tmp_path / row["method"] / "tuning.json").read_text())
        assert row["learning_rate"] == (0.01, 0.3)[int(np.argmax(tuning["scores"]))]
        last = json.loads((tmp_path / row["method"] / "seed-0" / "summary.json").read_text())[
            "last"
        ]
        assert "validation_accuracy" not in last  # the final run trains on all of the training part
        assert row["accuracy_mean"] == pytest.approx(last["accuracy"])
        assert (
            f"{100 * last['accuracy']:.1f} / {100 * last['accuracy_bottom_decile']:.1f}" in printed
        )
    assert (tmp_path / "curves.png").stat().st_size > 5000
    again = call(table2, *flags)
    assert (
        again.count("already finished") == again.count("seed-0:")
        and again.count("already tuned") == 2
    )


@pytest.mark.long
def test_published_labels_come_with_the_authors_model_of_one_logit(tmp_path):
    published = "--synthetic_labels=published"

    def model_of(*words):
        return PAPER.settings_of(paper.start(parse(table2.define, words)).settings, "fedem").model

    assert (model_of(), model_of(published), model_of(published, "--model=mlp")) == (
        "linear",
        "logistic",
        "mlp",
    )
    for labels, size in (("published", 151), ("mixture", 302)):
        call(
            table2,
            "--methods=local",
            "--seeds=0",
            f"--synthetic_labels={labels}",
            f"--out={tmp_path / labels}",
        )
        title = (tmp_path / labels / "table.md").read_text().splitlines()[-1]
        assert title.startswith(
            f"synthetic, {labels} labels, {size} parameters per model, test accuracy"
        )


def test_table2_has_a_row_for_every_column_of_the_paper_s():
    methods = parse(table2.define, []).methods
    assert all(
        list(columns) == methods for columns in paper.TABLE2.values()
    ) and METHODS.keys() >= set(methods)


@pytest.mark.long
def test_table7_has_fedem_in_a_share_of_the_rounds_too(tmp_path):
    call(
        table7,
        "--methods=fedavg,fedem",
        "--fedem.components=2",
        "--rounds=5",
        "--seeds=0",
        f"--out={tmp_path}",
    )
    rows = rows_of(tmp_path)
    assert [row["method"] for row in rows] == ["fedavg", "fedem", "fedem, 2 rounds"]
    assert [row["rounds"][-1] for row in rows] == [5, 5, 2] and [
        row["paper"] is None for row in rows
    ] == [0, 0, 1]
    config = json.loads((tmp_path / "fedem-2-rounds" / "seed-0" / "config.json").read_text())[
        "flags"
    ]
    # so the rate falls after round 1
    assert (config["rounds"], config["lr_schedule"]) == (2, "multistep")


@pytest.mark.long
def test_appendix_j1_runs_d_fedem_with_fedem_s_settings(tmp_path):
    call(appendix_j1, "--dfedem.graph=complete", "--seeds=0", f"--out={tmp_path}")
    rows = {row["method"]: row for row in rows_of(tmp_path)}
    assert list(rows) == ["fedavg", "fedem", "dfedem"] and rows["dfedem"]["paper"] is None
    assert (
        rows["dfedem"]["learning_rate"]
        == rows["fedem"]["learning_rate"]
        != rows["fedavg"]["learning_rate"]
    )
    config = json.loads((tmp_path / "dfedem" / "seed-0" / "config.json").read_text())["flags"]
    assert config["dfedem.graph"] == "complete" and config["keep_optimizer"]


@pytest.mark.long
def test_appendix_j6_samples_clients_of_apfl_too(tmp_path):
    call(appendix_j6, "--participations=0.5,1", "--seeds=0", f"--out={tmp_path}")
    points = rows_of(tmp_path)
    found = [
        (point["method"], point["value"], point["paper"] and round(point["paper"], 3))
        for point in points
    ]
    own = {"fedem": 0.747, "fedavg_plus": 0.689, "apfl": None}
    assert found == [
        (name, value, own[name] if value == 1 else None) for name in own for value in (0.5, 1)
    ]
    settings = paper.start(parse(appendix_j6.define, [])).settings

    def rate(name):
        return PAPER.settings_of(settings, name).for_method(name).learning_rate

    assert rate("apfl") == rate("fedavg")
    assert (tmp_path / "sampling.png").stat().st_size > 5000


@pytest.mark.long
def test_table3_scores_clients_that_were_kept_out(tmp_path):
    printed = call(
        table3,
        "--methods=fedem",
        "--seeds=0",
        "--tune=0.1,0.2",
        "--tune_widen=0",
        f"--out={tmp_path}",
    )
    assert "73.0 (74.1)" in printed  # the paper's Table 3
    (row,) = rows_of(tmp_path)
    unseen = json.loads((tmp_path / "fedem" / "seed-0" / "summary.json").read_text())["unseen"]
    assert len(unseen["per_client"]) == 2
    assert len(json.loads((tmp_path / "fedem" / "tuning.json").read_text())["scores"]) == 2
    sizes = [client["n_test"] for client in unseen["per_client"]]
    mean = np.average([client["accuracy"] for client in unseen["per_client"]], weights=sizes)
    assert row["unseen_test"] == pytest.approx(mean) and 0 <= row["unseen_train"] <= 1


@pytest.mark.long
def test_figure1_sweeps_sampling_and_components(tmp_path):
    flags = [
        "--methods=fedem",
        "--participations=0.5,1",
        "--components=1,2",
        "--seeds=0",
        f"--out={tmp_path}",
    ]
    call(figure1, *flags)
    points = rows_of(tmp_path)
    found = [(point["panel"], point["value"], point["paper"]) for point in points]
    assert found == [
        ("participation", 0.5, None),
        ("participation", 1.0, 0.747),
        ("components", 1, None),
        ("components", 2, None),
    ]
    config = json.loads((tmp_path / "fedem-components-2" / "seed-0" / "config.json").read_text())[
        "flags"
    ]
    assert config["fedem.components"] == 2 and config["participation"] == 1.0
    assert (tmp_path / "figure1.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("module", "flag", "word"),
    [
        (table2, "--preset=mnist", "cifar100"),
        (table2, "--tune=-1", "numbers above 0"),
        (table2, "--dataset=sine", "has no classes"),
        (table3, "--unseen=0", "above 0"),
        (figure1, "--components=x", "whole numbers of 1 or more"),
        (table7, "--methods=fedavg", "fedem"),
        (appendix_j6, "--participations=", "numbers above 0, at most 1"),
    ],
)
def test_mistakes_are_one_line(tmp_path, module, flag, word):
    line = refused(module.COMMAND, tmp_path / "out", *SMALL, flag)
    assert line.startswith(flag) and word in line


# Those of the tables, and the other one without momentum.
OF_TABLES = (*parse(table2.define, []).methods, "pfedme")


@pytest.mark.parametrize(
    "methods", [OF_TABLES, pytest.param(METHODS, marks=pytest.mark.slow)], ids=["tables", "all"]
)
@pytest.mark.parametrize("name", PAPER.names)
def test_every_data_set_has_its_settings(name, methods):
    """So that no method of a table is run with other data or another model than the rest."""
    lines = (PAPER.presets / f"{name}.flags").read_text().splitlines()
    assert lines[0].startswith("# ") and name in lines[0]
    settings = parse(table2.define, [f"--preset={name}"])
    all_of = {method: PAPER.settings_of(settings, method).for_method(method) for method in methods}
    assert all(0 < own.learning_rate <= 0.1 and own.optimizer == "sgd" for own in all_of.values())
    assert {method for method, own in all_of.items() if own.momentum == 0} == {"fedprox", "pfedme"}
    for flag in ("dataset", "partition", "num_clients", "model", "batch_size", "rounds"):
        assert len({own[flag] for own in all_of.values()}) == 1


# The rates and the pulls that FedEM's authors tuned.
RATES = {
    "cifar10": {
        "fedavg": 0.01,
        "fedavg_plus": 0.001,
        "local": 0.03,
        "clustered": 0.003,
        "fedem": 0.03,
        "ditto": 0.01,
    },
    "femnist": {"fedavg": 0.03, "local": 0.01, "fedprox": 0.05, "pfedme": 0.03, "dfedem": 0.03},
    "shakespeare": {"fedavg": 0.01, "fedprox": 0.01, "fedem": 0.05},
}


@pytest.mark.parametrize("name", RATES)
def test_a_method_has_the_rate_of_its_authors(name):
    settings = parse(table2.define, [f"--preset={name}"])
    for method, rate in RATES[name].items():
        assert PAPER.settings_of(settings, method).for_method(method).learning_rate == rate
    pulls = {"cifar10": (1.0, 1.0), "femnist": (0.05, 10.0), "shakespeare": (0.1, 1.0)}[name]
    hyperparameters = ("fedprox.mu", "pfedme.mu")
    assert (
        tuple(
            PAPER.settings_of(settings, hyperparameter.split(".")[0])[hyperparameter]
            for hyperparameter in hyperparameters
        )
        == pulls
    )


def test_the_preset_of_a_data_set_and_a_method_is_found():
    settings = parse(table2.define, ["--learning_rate=0.5"])
    own = PAPER.settings_of(settings, "fedem")
    assert (own.dataset, own.batch_size, own["fedem.components"], own.learning_rate) == (
        "synthetic",
        128,
        3,
        0.5,
    )
    other = PAPER.settings_of(settings.replace(preset="cifar10"), "fedavg")
    assert (other.model, other.num_clients, other.learning_rate) == ("mobilenet_v2", 80, 0.5)
    assert (
        PAPER.settings_of(settings.replace(dataset="npz"), "fedem").values
        == settings.replace(dataset="npz").values
    )
