"""The score of a run: any metric, and what follows it. Hospitals of 30 to 2,000 patients, of whom 15 % are ill."""

import functools
import json
import math

import numpy as np
import optax
import pytest
from sklearn.metrics import roc_auc_score

import pfljax as pfl
from pfljax.api.by_client import ClientTable
from pfljax.api.comparison import titled
from pfljax.api.study import Cell
from pfljax.api.table import table_of
from pfljax.contract.errors import ArgumentError
from pfljax.evaluation.metrics import rests_on_few
from pfljax.evaluation.statistics import Trial
from pfljax.folder import files
from pfljax.report import comparisons
from pfljax.training.scoring import best_row

NAMES = ["site 1", "site 2", "site 9", "site 10", "site 11", "site 12"]
SIZES = (2000, 700, 300, 120, 60, 30)
POSITIVES = (300, 105, 45, 18, 3, 0)
SEEDS = range(5)
TRIALS = [Trial(seed) for seed in SEEDS]
METRICS = ("accuracy", "auroc", "loss")


def labels_of(site):
    return np.arange(SIZES[site]) < POSITIVES[site]


@functools.cache
def scores_of(method, seed):
    """Accuracy, AUROC and loss of each site for predictions that are noisier for "worse"."""
    rng = np.random.default_rng([seed, method == "worse"])
    found = {name: [] for name in METRICS}
    for site in range(len(SIZES)):
        labels = labels_of(site)
        outputs = labels + rng.normal(scale=2.0 if method == "worse" else 0.7, size=len(labels))
        found["accuracy"].append(((outputs > 0.5) == labels).mean())
        found["loss"].append(((outputs - labels) ** 2).mean())
        both = 0 < POSITIVES[site] < SIZES[site]
        found["auroc"].append(roc_auc_score(labels, outputs) if both else math.nan)
    return {name: np.array(values) for name, values in found.items()}


def cell_of(method, seed, score, lower_is_better=(), counted=True):
    """The cell of a run with two evaluations, as `Cell.read` returns it: NaN is None."""
    scores = scores_of(method, seed)
    last = {"round": 2, "bytes_down": 0.0, "bytes_up": 0.0, "seconds": 1.0, "train_loss": 1.0}
    last |= {name: float(np.average(scores[name], weights=SIZES)) for name in ("accuracy", "loss")}
    known = scores["auroc"][:-1]
    last |= {"auroc": float(known.mean()), "auroc_bottom_decile": float(np.percentile(known, 10))}
    last["accuracy_bottom_decile"] = float(np.percentile(scores["accuracy"], 10))
    per_client = []
    for site, name in enumerate(NAMES):
        row = {"client": site, "name": name, "n_train": 9, "n_test": SIZES[site]}
        if counted:
            classes = {"well": SIZES[site] - POSITIVES[site], "ill": POSITIVES[site]}
            row["classes"] = {label: count for label, count in classes.items() if count}
        per_client.append(row | {metric: scores[metric][site] for metric in METRICS})
    rows = [{**last, "round": number} for number in (0, 2)]
    summary = {"method": method, "dataset": "hospitals", "task": "classification", "seed": seed}
    summary |= {"score": score, "lower_is_better": list(lower_is_better), "metrics": ["auroc"]}
    summary |= {"num_clients": 6, "rounds": 2, "scored_clients": None, "last": last, "knows": ""}
    summary |= {"best": last | {"selected_by": "train_loss"}, "privacy": None, "unseen": None}
    summary |= {"gradients_per_round": 1.0, "seconds_per_round": 1.0, "per_client": per_client}
    return Cell(files.plain(summary), files.plain(rows))


@functools.cache
def table(score, reference="worse", lower_is_better=(), counted=True):
    cells = {
        method: [cell_of(method, seed, score, lower_is_better, counted) for seed in SEEDS]
        for method in ("worse", "better")
    }
    return table_of(cells, cells["worse"][0].summary, reference, TRIALS)


def gains_of(metric):
    """What each client gains with "better", by run."""
    return np.stack(
        [scores_of("better", seed)[metric] - scores_of("worse", seed)[metric] for seed in SEEDS]
    )


def test_a_table_follows_the_auroc():
    found = table("auroc")
    worse, better = found.rows
    expected = [np.nanmean(scores_of("better", seed)["auroc"]) for seed in SEEDS]
    assert found.score == "auroc" and better["score_mean"] == pytest.approx(np.mean(expected))
    gains = gains_of("auroc")
    assert better["difference"] == pytest.approx(np.nanmean(gains))
    known = gains[~np.isnan(gains)]
    assert better["clients_compared"] == 25
    assert better["clients_helped"] == pytest.approx((known > 0).mean())
    assert better["clients_worst"] == pytest.approx(known.min())
    decile = [np.nanpercentile(scores_of("better", seed)["auroc"], 10) for seed in SEEDS]
    assert better["bottom_decile_mean"] == pytest.approx(np.mean(decile))
    assert (worse["rank"], better["rank"]) == (2, 1)
    assert better["metrics"].keys() == {"accuracy"}
    heads, body = found.columns()
    assert heads[1] == "test auroc" and "accuracy, %" in heads and "auroc" not in heads
    assert body[1][1].startswith(f"{np.mean(expected):.4f} ± ")
    assert any("undefined for 1 of 6 clients" in note for note in found.notes)
    assert any("plain means over clients" in note for note in found.notes)


def test_methods_that_lack_the_scores_of_different_clients_are_told_apart():
    cells = {
        method: [cell_of(method, seed, "auroc") for seed in SEEDS] for method in ("worse", "better")
    }
    assert not any("different numbers" in note for note in table("auroc").notes)
    for cell in cells["better"]:
        for row in cell.summary["per_client"][:2]:
            row["auroc"] = None
    found = table_of(cells, cells["worse"][0].summary, "worse", TRIALS)
    (note,) = (note for note in found.notes if "different numbers" in note)
    assert "(worse 1, better 3)" in note


def test_figures_follow_the_score():
    panels = comparisons.panels_of_rows(table("auroc").rows)
    assert panels["scores"].x.label == "test auroc, last round" and not panels["scores"].x.percent
    assert panels["rounds"].y.label == "test auroc"
    assert panels["differences"].x.label == "test auroc minus worse's, mean over clients"
    percent = comparisons.panels_of_rows(table("accuracy").rows)
    unit = "percentage points, weighted by examples"
    assert percent["differences"].x.label == f"test accuracy minus worse's, {unit}"


def test_low_scores_are_good_where_the_run_says_so():
    """As if the AUROC were an error."""
    found = table("auroc", lower_is_better=("auroc",))
    worse, better = found.rows
    gains = -gains_of("auroc")
    known = gains[~np.isnan(gains)]
    assert not better["higher_is_better"] and (worse["rank"], better["rank"]) == (1, 2)
    assert better["clients_helped"] == pytest.approx((known > 0).mean())
    assert better["wins"] == 0 and better["losses"] == 5


def test_by_accuracy_the_table_says_that_means_are_weighted():
    found = table("accuracy")
    gains = gains_of("accuracy")
    assert found.rows[1]["difference"] == pytest.approx(np.average(gains.mean(0), weights=SIZES))
    assert any("weighted by numbers of test examples" in note for note in found.notes)
    assert found.columns()[0][1] == "test accuracy, %"


def test_a_row_of_each_client_has_its_classes_scores_and_differences():
    rows = table("auroc").by_client().rows
    assert [row["client"] for row in rows] == NAMES
    of_runs = np.stack([scores_of("better", seed)["auroc"] for seed in SEEDS])
    for site, row in enumerate(rows):
        assert row["num_examples"] == SIZES[site]
        assert row["classes"] == {"ill": POSITIVES[site], "well": SIZES[site] - POSITIVES[site]}
        mean, std, runs = row["scores"]["better"]
        assert runs == (0 if site == 5 else 5)
        np.testing.assert_allclose(mean, of_runs[:, site].mean())
        np.testing.assert_allclose(std, of_runs[:, site].std(ddof=1))
        np.testing.assert_allclose(row["differences"]["better"], gains_of("auroc")[:, site].mean())


def test_clients_with_few_examples_of_a_class_are_marked():
    found = table("auroc").by_client()
    lines = str(found).splitlines()
    marked = [name for name in NAMES if any(line.startswith(f"{name} *") for line in lines)]
    assert marked == ["site 11", "site 12"]
    assert found.notes[-1] == (
        "* The scores of 2 of 6 clients rest on fewer than 10 test examples, or of a class."
    )
    words = " ".join(lines[1].split())
    assert words == "client test examples class ill class well worse better better minus worse"


def test_files_without_class_counts_have_no_marks():
    """Earlier versions did not record them."""
    found = table("auroc", counted=False).by_client()
    assert found.classes == [] and "*" not in str(found)
    assert found.columns()[0] == [
        "client",
        "test examples",
        "worse",
        "better",
        "better minus worse",
    ]


def test_a_table_of_clients_is_converted(tmp_path):
    found = table("auroc").by_client()
    frame = found.to_pandas()
    assert list(frame.columns[:4]) == ["client", "num_examples", "class_ill", "class_well"]
    means = np.mean([scores_of("worse", seed)["auroc"] for seed in SEEDS], axis=0)
    np.testing.assert_allclose(frame.worse_mean, means)
    np.testing.assert_allclose(frame.better_difference, gains_of("auroc").mean(axis=0))
    lines = found.to_csv().splitlines()
    assert lines[0] == ",".join(frame.columns) and len(lines) == 7
    assert lines[6] == "site 12,30,0,30,,,0,,,0,"
    assert found.to_markdown().count("\n") == 7 and r"\toprule" in found.to_latex()
    found.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "by_client.csv",
        "by_client.json",
        "by_client.tex",
    }
    assert json.loads((tmp_path / "by_client.json").read_text())[0]["client"] == "site 1"


def test_of_many_clients_the_first_and_last_are_printed():
    rows = [
        {
            "client": k,
            "num_examples": 50,
            "classes": {},
            "scores": {"a": [0.5, 0.0, 2]},
            "differences": {},
        }
        for k in range(5000)
    ]
    lines = str(ClientTable("many", rows, ["a"], "accuracy")).splitlines()
    assert len(lines) == 2 + 41 + 1
    assert lines[2].startswith("0 ") and "4,960 clients" in lines[22]
    assert lines[42].startswith("4999 ")


@pytest.mark.parametrize(
    ("score", "num_examples", "classes", "few"),
    [
        ("auroc", 100, {}, False),
        ("auroc", 9, {}, True),
        ("auroc", 100, {"0": 10, "1": 90}, False),
        ("auroc", 99, {"0": 9, "1": 90}, True),
        ("auroc", 90, {"0": 90, "1": 0}, True),
        ("f1", 100, {"0": 90, "1": 0, "2": 10}, False),
        ("f1", 99, {"0": 90, "1": 0, "2": 9}, True),
        # All examples count, whatever their classes.
        ("accuracy", 12, {"0": 6, "1": 6}, False),
        ("loss", 9, {"0": 9, "1": 0}, True),
    ],
)
def test_scores_rest_on_few_examples(score, num_examples, classes, few):
    assert rests_on_few(score, num_examples, classes) is few


def test_differences_of_low_scores_are_explained():
    found = table("loss").by_client()
    assert any("lower is better" in note for note in found.notes)
    assert not any("lower is better" in note for note in table("auroc").by_client().notes)


def rows_by_auroc(values, **more):
    """Rows whose accuracy is best in the last round."""
    return [
        {"round": number, "train_loss": 1.0, "validation_accuracy": number / 10}
        | {"validation_auroc": value, **more}
        for number, value in enumerate(values)
    ]


def test_the_best_round_is_that_of_the_score():
    rows = rows_by_auroc([0.99, 0.6, 0.8, None, 0.7])
    best = best_row(rows, "auroc")
    assert best["round"] == 2 and best["selected_by"] == "validation_auroc"
    assert best_row(rows, "auroc", higher_is_better=False)["round"] == 1
    assert best_row(rows)["round"] == 4


def test_rounds_without_the_score_do_not_choose_the_best():
    """The run went on with the metric after round 1."""
    rows = rows_by_auroc([0.5, 0.6, 0.8])
    for row in rows[:2]:
        del row["validation_auroc"]
    assert best_row(rows, "auroc")["selected_by"] == "train_loss"


def test_patience_follows_the_score():
    rows = rows_by_auroc([0.5, 0.9, 0.8, 0.7])
    rule = pfl.patience(2).with_score("auroc", True)
    assert rule(rows[:3]) == "" and rule(rows) == "no better validation auroc than in round 1"
    assert pfl.patience(2)(rows) == ""


def test_methods_may_be_named():
    found = titled(["local", "FedAvg", ("Mine", "FEDPROX")])
    assert list(found) == ["local", "fedavg", "Mine"] and found["Mine"] == pfl.FedProx()
    with pytest.raises(ArgumentError, match="did you mean fedavg"):
        titled(["fedavgg"])


# Runs

# The clients of a federation are in the order of their names as text.
NAMES_IN_ORDER = sorted(NAMES)


def hospitals(seed=0):
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(size=(size, 4)) for size in SIZES]).astype(np.float32)
    y = np.concatenate([labels_of(site) for site in range(6)]).astype(int)
    x[:, 0] += y
    names = np.repeat(NAMES, SIZES)
    return pfl.Federation.from_arrays(x, y, names, validation_fraction=0.2, seed=seed)


MODEL = pfl.models.MLP(hidden=())


@functools.cache
def hospitals_of_one_split():
    return hospitals()


def run(**options):
    return pfl.Run(pfl.Local(), hospitals_of_one_split(), MODEL, **options)


def test_a_run_s_score_is_chosen_by_name_or_function():
    def mae(outputs, y):
        return np.abs(outputs[:, 1] - y).mean()

    chosen = run(score="AUROC").experiment
    assert (chosen.score_name, chosen.measures, chosen.lower_is_better) == ("auroc", ["auroc"], [])
    with pytest.warns(UserWarning, match="^score: high values of mae count as good; .* says which"):
        assert run(score=mae).experiment.score == "mae"
    chosen = run(score=pfl.metrics.metric(mae, higher_is_better=False)).experiment
    assert (chosen.score_name, chosen.lower_is_better) == ("mae", ["mae"])
    chosen = run(metrics={"Error": pfl.metrics.metric(mae, higher_is_better=False)}, score="error")
    assert chosen.experiment.score_name == "Error"
    assert run(score="Loss").experiment.score_name == "loss"
    assert run().experiment.score_name == "accuracy" and run().experiment.measures == []
    assert run(metrics=["AUROC"]).experiment.measures == ["auroc"]


@pytest.mark.parametrize("score", ["auc", "validation_auroc", "", lambda outputs, y: 0.0, 3])
def test_no_score_of_these(score):
    with pytest.raises(ArgumentError, match="score"):
        run(score=score)


@pytest.mark.slow
def test_runs_have_the_score_of_scikit_learn_and_a_reference_of_any_case(tmp_path):
    result = run(score="auroc").train(4, eval_every=2, progress=False, out=tmp_path / "run")
    clients = hospitals()
    for site, name in enumerate(NAMES_IN_ORDER):
        x, y = clients.examples(site, "test")
        expected = math.nan
        if len(np.unique(y)) > 1:
            expected = roc_auc_score(y, result.predict(x, site)[:, 1])
        assert result.per_client_score[site] == pytest.approx(expected, abs=1e-5, nan_ok=True), name
    summary = result.summary
    assert result.score == summary["score"] == "auroc" and summary["higher_is_better"]
    rounds = [row for row in result.history if row["round"]]
    best = max(rounds, key=lambda row: row["validation_auroc"])
    assert summary["best"]["round"] == best["round"]
    assert summary["best"]["selected_by"] == "validation_auroc"
    assert pfl.load(tmp_path / "run", clients=clients).score == "auroc"
    classes = {row["name"]: row["classes"] for row in summary["per_client"]}
    for site, name in enumerate(NAMES_IN_ORDER):
        labels, counts = np.unique(clients.examples(site, "test")[1], return_counts=True)
        assert classes[name] == dict(zip(map(str, labels), counts.tolist(), strict=True))


def compared(out, **options):
    return pfl.compare(
        ["local", "fedavg"],
        hospitals,
        MODEL,
        rounds=4,
        seeds=[0, 1],
        eval_every=2,
        reference="LOCAL",
        out=out,
        **options,
    )


@pytest.mark.slow
def test_another_score_of_a_finished_study_trains_nothing(tmp_path, said):
    by_accuracy = compared(tmp_path, metrics=["auroc"])
    checkpoints = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/checkpoints/*")}
    by_auroc = compared(tmp_path, metrics=["auroc"], score="auroc")
    assert "\n".join(said).count("already finished; its score is now auroc") == 4
    assert checkpoints == {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*/checkpoints/*")}
    assert by_auroc.rows[1]["score"] == "auroc" and by_auroc.rows[1]["reference"] == "local"
    assert by_auroc.rows[1]["score_mean"] == by_accuracy.rows[1]["metrics"]["auroc"]["mean"]
    fresh = compared(tmp_path / "fresh", score="auroc")
    assert fresh.rows[1]["best_mean"] == by_auroc.rows[1]["best_mean"]
    said.clear()
    again = compared(tmp_path, metrics=["auroc"], score="auroc")
    assert "now auroc" not in "\n".join(said)
    assert again.rows[1]["best_mean"] == fresh.rows[1]["best_mean"]
    assert "test auroc" in (tmp_path / "table.md").read_text()
    rows = files.read_json(tmp_path / "by_client.json")
    assert [row["client"] for row in rows] == NAMES
    summary = files.read_json(tmp_path / "fedavg" / "seed-0" / "summary.json")
    trained = [row["auroc"] for row in summary["per_client"] if row["auroc"] is not None]
    never_trained = summary["never_trained"]
    assert never_trained["metric"] == "auroc" and never_trained["score"] is None
    assert never_trained["others"] == pytest.approx(np.mean(trained))


@pytest.mark.slow
def test_a_metric_that_earlier_rounds_lack_leaves_the_best_round_unknown(tmp_path, said):
    compared(tmp_path)
    found = compared(tmp_path, score="auroc")
    assert "it lacks the metrics auroc" in "\n".join(said)
    assert math.isnan(found.rows[0]["best_mean"])
    assert any("best round by validation is unknown" in note for note in found.notes)


@pytest.mark.slow
def test_a_stop_rule_that_follows_the_score_belongs_to_the_program(tmp_path):
    compared(tmp_path, metrics=["auroc"], stop=pfl.patience(3))
    with pytest.raises(ArgumentError, match="stop"):
        compared(tmp_path, metrics=["auroc"], stop=pfl.patience(3), score="auroc")


@pytest.mark.slow
def test_tuning_follows_the_score(tmp_path):
    """A rate of nearly 0 leaves the initial models, which predict the frequent class no worse by accuracy."""
    options = {
        "rounds": 3,
        "learning_rates": [1e-6, 0.3],
        "seeds": [7],
        "widen": 0,
        "out": tmp_path,
    }
    local = pfl.LocalTraining(optax.sgd)
    found = pfl.tune(pfl.FedAvg(), hospitals(), MODEL, local, score="auroc", **options)
    values = []
    for point in found.points:
        rate = pfl.LocalTraining(optax.sgd, point.learning_rate)
        alone = pfl.Run(pfl.FedAvg(), hospitals(), MODEL, rate, seed=7, score="auroc")
        values.append(alone.train(3, progress=False).history[-1]["validation_auroc"])
    np.testing.assert_allclose(found.scores, values, atol=1e-4)
    assert found.best == found.points[int(np.argmax(values))]
    with pytest.raises(ArgumentError, match="score changed"):
        pfl.tune(pfl.FedAvg(), hospitals(), MODEL, local, **options)
