"""The experiments of FedEM's paper, small."""

import json

import commands
import numpy as np
import pytest

from experiments.fedem import appendix_j1, appendix_j6, figure1, paper, table2, table3, table7
from experiments.fedem.paper import PAPER
from pfljax.cli import train
from pfljax.cli.settings import parse
from pfljax.core.method import METHODS

PRESETS = sorted(PAPER.presets.glob("*.flags"))
SMALL = ["--num_clients=10", "--test_examples=40", "--rounds=3", "--devices=1"]


def call(module, *flags, code=0):
    """Runs a command, small; what it printed."""
    return commands.call(module.COMMAND, *SMALL, *flags, code=code)


@pytest.mark.slow
def test_table2_tunes_and_stands_beside_the_paper(tmp_path):
    flags = ["--algorithms=fedavg,fedem", "--tune=0.01,0.3", "--seeds=0", f"--out={tmp_path}"]
    printed = call(table2, *flags)
    assert "68.2 / 58.9" in printed and "74.7 / 66.7" in printed  # the paper's Table 2
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["algorithm"] for row in rows] == ["fedavg", "fedem"]
    for row in rows:
        scores = {}
        for rate in (0.01, 0.3):
            folder = tmp_path / row["algorithm"] / "tuning" / f"rate-{rate:g}"
            scores[rate] = json.loads((folder / "summary.json").read_text())["last"]["validation_accuracy"]
        assert row["learning_rate"] == max(scores, key=scores.get)
        last = json.loads((tmp_path / row["algorithm"] / "seed-0" / "summary.json").read_text())["last"]
        assert "validation_accuracy" not in last  # the final run trains on all of the training part
        assert row["accuracy_mean"] == pytest.approx(last["accuracy"])
        assert f"{100 * last['accuracy']:.1f} / {100 * last['accuracy_bottom_decile']:.1f}" in printed
    assert (tmp_path / "curves.png").stat().st_size > 5000
    again = call(table2, *flags)
    assert again.count("finished before, kept") == again.count("seed-0:") + again.count("rate-0.01:") + again.count(
        "rate-0.3:"
    )


def test_published_labels_come_with_the_authors_model_of_one_logit(tmp_path):
    published = "--synthetic.labels=published"
    model_of = lambda *words: PAPER.settings_of(paper.start(parse(table2.define, words)).settings, "fedem").model
    assert (model_of(), model_of(published), model_of(published, "--model=mlp")) == ("linear", "logistic", "mlp")
    for labels, size in (("published", 151), ("mixture", 302)):
        call(table2, "--algorithms=local", "--seeds=0", f"--synthetic.labels={labels}", f"--out={tmp_path / labels}")
        title = (tmp_path / labels / "table.md").read_text().splitlines()[-1]
        assert title.startswith(f"synthetic, {labels} labels, {size} parameters per model, test accuracy")


def test_table2_has_a_row_for_every_column_of_the_paper_s():
    methods = parse(table2.define, []).algorithms
    assert all(list(columns) == methods for columns in paper.TABLE2.values()) and METHODS.keys() >= set(methods)


@pytest.mark.slow
def test_table7_has_fedem_in_a_share_of_the_rounds_too(tmp_path):
    call(table7, "--algorithms=fedavg,fedem", "--fedem.components=2", "--rounds=5", "--seeds=0", f"--out={tmp_path}")
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["algorithm"] for row in rows] == ["fedavg", "fedem", "fedem, 2 rounds"]
    assert [row["rounds"][-1] for row in rows] == [5, 5, 2] and [row["paper"] is None for row in rows] == [0, 0, 1]
    config = json.loads((tmp_path / "fedem-2-rounds" / "seed-0" / "config.json").read_text())["flags"]
    assert (config["rounds"], config["lr_schedule"]) == (2, "multistep")  # so the rate falls after round 1


@pytest.mark.slow
def test_appendix_j1_runs_d_fedem_with_fedem_s_settings(tmp_path):
    call(appendix_j1, "--dfedem.graph=complete", "--seeds=0", f"--out={tmp_path}")
    rows = {row["algorithm"]: row for row in json.loads((tmp_path / "table.json").read_text())}
    assert list(rows) == ["fedavg", "fedem", "dfedem"] and rows["dfedem"]["paper"] is None
    assert rows["dfedem"]["learning_rate"] == rows["fedem"]["learning_rate"] != rows["fedavg"]["learning_rate"]
    config = json.loads((tmp_path / "dfedem" / "seed-0" / "config.json").read_text())["flags"]
    assert config["dfedem.graph"] == "complete" and config["keep_optimizer"]


@pytest.mark.slow
def test_appendix_j6_samples_clients_of_apfl_too(tmp_path):
    call(appendix_j6, "--participations=0.5,1", "--seeds=0", f"--out={tmp_path}")
    points = json.loads((tmp_path / "table.json").read_text())
    found = [(point["algorithm"], point["value"], point["paper"] and round(point["paper"], 3)) for point in points]
    own = {"fedem": 0.747, "fedavg_plus": 0.689, "apfl": None}
    assert found == [(name, value, own[name] if value == 1 else None) for name in own for value in (0.5, 1)]
    rate = lambda name: paper.settings_of(paper.start(parse(appendix_j6.define, [])), name).learning_rate
    assert rate("apfl") == rate("fedavg")
    assert (tmp_path / "sampling.png").stat().st_size > 5000


@pytest.mark.slow
def test_table3_scores_clients_that_were_kept_out(tmp_path):
    printed = call(table3, "--algorithms=fedem", "--seeds=0", "--tune=0.1", f"--out={tmp_path}")
    assert "73.0 (74.1)" in printed  # the paper's Table 3
    (row,) = json.loads((tmp_path / "table.json").read_text())
    unseen = json.loads((tmp_path / "fedem" / "seed-0" / "summary.json").read_text())["unseen"]
    assert len(unseen["per_client"]) == 2
    tuned = json.loads((tmp_path / "fedem" / "tuning" / "rate-0.1" / "summary.json").read_text())
    assert tuned["num_clients"] == 8  # nobody unseen has a say in the rate
    sizes = [client["n_test"] for client in unseen["per_client"]]
    mean = np.average([client["accuracy"] for client in unseen["per_client"]], weights=sizes)
    assert row["unseen_test"] == pytest.approx(mean) and 0 <= row["unseen_train"] <= 1


@pytest.mark.slow
def test_figure1_sweeps_sampling_and_components(tmp_path):
    flags = ["--algorithms=fedem", "--participations=0.5,1", "--components=1,2", "--seeds=0", f"--out={tmp_path}"]
    call(figure1, *flags)
    points = json.loads((tmp_path / "table.json").read_text())
    found = [(point["panel"], point["value"], point["paper"]) for point in points]
    assert found == [
        ("participation", 0.5, None),
        ("participation", 1.0, 0.747),
        ("components", 1, None),
        ("components", 2, None),
    ]
    config = json.loads((tmp_path / "fedem-components-2" / "seed-0" / "config.json").read_text())["flags"]
    assert config["fedem.components"] == 2 and config["participation"] == 1.0
    assert (tmp_path / "figure1.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("module", "flag", "word"),
    [
        (table2, "--preset=mnist", "cifar100"),
        (table2, "--tune=-1", "positive numbers"),
        (table3, "--unseen_clients=0", "above 0"),
        (figure1, "--components=x", "positive"),
        (table7, "--algorithms=fedavg", "fedem"),
        (appendix_j6, "--participations=", "nothing to draw"),
    ],
)
def test_mistakes_are_one_line(tmp_path, module, flag, word):
    error = call(module, flag, f"--out={tmp_path / 'out'}", code=2)
    (line,) = error.strip().splitlines()
    assert line.startswith(f"error: {flag}") and word in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_are_flags_of_a_method_and_begin_with_the_result(path):
    dataset, method = path.stem.split("-")
    assert dataset in PAPER.names and method in METHODS
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ") and "in the paper" in lines[0] and dataset in lines[1]
    values = parse(train.define, [f"--flagfile={path}"])
    assert values.learning_rate > 0 and values.optimizer == "sgd" and values.momentum == 0.9


def test_the_preset_of_a_data_set_and_a_method_is_found():
    settings = parse(table2.define, ["--learning_rate=0.5"])
    own = PAPER.settings_of(settings, "fedem")
    assert (own.dataset, own.batch_size, own["fedem.components"], own.learning_rate) == ("synthetic", 128, 3, 0.5)
    other = PAPER.settings_of(settings.replace(preset="cifar10"), "fedavg")
    assert (other.model, other.num_clients, other.learning_rate) == ("mobilenet_v2", 80, 0.5)
    assert PAPER.settings_of(settings.replace(dataset="npz"), "fedem").values == settings.replace(dataset="npz").values
