"""Metrics of one client's predictions: by hand, under every store, and when a run goes on with others."""

import dataclasses

import numpy as np
import optax
import pytest
import sklearn.metrics
from scipy import special

import pfljax as pfl
from pfljax.contract.errors import ArgumentError
from pfljax.evaluation import measures
from pfljax.folder import files
from pfljax.stores import device_store

# Two examples of class 0 (one of them taken for 1), one of class 1, one of class 2 that is taken for 0.
PROBABILITIES = np.array([[0.6, 0.3, 0.1], [0.3, 0.5, 0.2], [0.1, 0.8, 0.1], [0.5, 0.2, 0.3]])
LOGITS = np.log(PROBABILITIES).astype(np.float32)
Y = np.array([0, 0, 1, 2])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # class 0: precision 1/2, recall 1/2; class 1: 1/2 and 1, F1 2/3; class 2: 0
        ("f1", (1 / 2 + 2 / 3 + 0) / 3),
        ("balanced_accuracy", (1 / 2 + 1 + 0) / 3),
        # class 0: of 4 pairs (0.6, 0.3) x (0.1, 0.5), 3 are in order; class 1: all 3; class 2: all 3
        ("auroc", (3 / 4 + 1 + 1) / 3),
        # confidences 0.6 (right), 0.5 and 0.5 (wrong, one bin), 0.8 (right)
        ("calibration_error", (0.4 + 1.0 + 0.2) / 4),
        # probabilities of the four classes
        ("perplexity", (0.6 * 0.3 * 0.8 * 0.3) ** (-1 / 4)),
    ],
)
def test_metrics_by_hand(name, value):
    metric = measures.METRICS[name]
    assert metric(LOGITS, Y) == pytest.approx(value, abs=1e-6)
    # the same places in a sequence, with one that has no class to predict
    outputs = np.stack([LOGITS, LOGITS[::-1]])
    y = np.stack([Y, np.array([255, 255, -1, 0])])
    assert metric(outputs, y) == pytest.approx(
        metric(np.concatenate([LOGITS, LOGITS[:1]]), np.append(Y, 0))
    )
    assert np.isnan(metric(LOGITS[:0], Y[:0]))


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (13, 3)])
def test_metrics_of_regressions_are_those_of_scikit_learn(shape):
    rng = np.random.default_rng(shape[0])
    y = rng.normal(5, 3, shape).astype(np.float32)
    values = (y + rng.normal(size=shape)).astype(np.float32)
    expected = {
        "mae": sklearn.metrics.mean_absolute_error(y, values),
        "rmse": sklearn.metrics.mean_squared_error(y, values) ** 0.5,
        "r2": sklearn.metrics.r2_score(y, values) if shape[0] > 1 else np.nan,
    }
    for name, value in expected.items():
        metric = measures.METRICS[name]
        assert metric(values, y) == pytest.approx(value, rel=1e-5, nan_ok=True), name
        assert np.isnan(metric(values[:0], y[:0]))
    assert np.isnan(measures.METRICS["r2"](values, np.ones_like(y)))


@pytest.mark.parametrize(
    ("name", "task", "message"),
    [
        ("mae", "classification", "^metrics=mae: needs values; accepted for .*: f1, .*perplexity,"),
        ("f1", "regression", "^metrics=f1: needs classes; accepted for regression: mae, rmse, r2,"),
    ],
)
def test_metrics_of_another_task_are_refused(name, task, message):
    with pytest.raises(ArgumentError, match=message):
        measures.named([name], set(), task)


def test_one_class_has_no_roc_curve():
    assert np.isnan(measures.METRICS["auroc"](LOGITS, 0 * Y))


def test_the_f1_of_labels_is_the_mean_over_those_that_occur_or_are_predicted():
    y = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 1]])
    outputs = special.logit([[0.9, 0.1, 0.2], [0.2, 0.1, 0.1], [0.7, 0.3, 0.4]])
    # one hit, one miss, one too many
    assert measures.f1_of_labels(outputs[:, :1], y[:, :1]) == pytest.approx(1 / 2)
    # nothing is said of the second label
    assert measures.f1_of_labels(outputs, y) == pytest.approx((1 / 2 + 0) / 2)
    assert measures.f1_of_labels(y - 0.5, y) == 1
    assert np.isnan(measures.f1_of_labels(outputs[:, 1:2], y[:, 1:2]))


def uneven(unseen=0):
    """Clients of 6 to 60 examples, one of them without test examples."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(5), [6, 20, 60, 31, 12])
    x = rng.normal(size=(len(client), 4))
    y = rng.integers(3, size=len(client))
    clients = pfl.Federation.from_arrays(x, y, client, validation_fraction=0.2)
    size = clients.test.size.copy()
    size[3] = 0
    return dataclasses.replace(clients, test=clients.test._replace(size=size))


def right(outputs, y):
    return (outputs.argmax(axis=-1) == y).mean()


def number(outputs, y):
    assert outputs.shape == (len(y), 3)
    return len(y)


@pytest.mark.parametrize(
    ("method", "store"),
    [
        pytest.param(pfl.FedAvg(), "device", marks=pytest.mark.slow),
        pytest.param(pfl.Local(), "disk", marks=pytest.mark.long),
        pytest.param(pfl.FedeRiCo(neighbors=2), "host", marks=pytest.mark.long),
    ],
)
def test_a_metric_gets_a_client_s_real_examples(method, store, monkeypatch):
    """Accuracy as a metric of one's own is the accuracy, in blocks of one client, too."""
    monkeypatch.setattr(device_store, "BLOCK_BYTES", 100)
    clients = uneven()
    execution = pfl.Execution(client_store=store)
    metrics = {"right": right, "n": number}
    run = pfl.Run(method, clients, pfl.models.MLP(hidden=()), metrics=metrics, execution=execution)
    result = run.train(1, progress=False)
    for part in ("train", "validation", "test"):
        sizes = getattr(clients, part).size
        np.testing.assert_allclose(
            result.results[f"right_{part}"], result.results[f"accuracy_{part}"], rtol=1e-6
        )
        np.testing.assert_array_equal(
            result.results[f"n_{part}"][-1], np.where(sizes, sizes, np.nan)
        )
    last = result.history[-1]
    assert last["right"] == pytest.approx(last["accuracy_mean"])
    assert last["right_bottom_decile"] == pytest.approx(last["accuracy_bottom_decile"])
    assert last["validation_n"] == pytest.approx(clients.validation.size.mean())
    assert result.summary["per_client"][0]["n"] == clients.test.size[0]


@pytest.mark.slow
def test_replicates_and_samples_of_clients_have_metrics():
    clients = pfl.data.digits(num_clients=6, train_examples=8)

    def make(seed):
        return pfl.Run(
            pfl.FedeRiCo(neighbors=2),
            clients,
            pfl.models.MLP(hidden=()),
            seed=seed,
            eval_clients=3,
            metrics={"own": right},
        )

    for result in pfl.train_replicates([make(0), make(1)], 1):
        np.testing.assert_allclose(
            result.results["own_test"], result.results["accuracy_test"], rtol=1e-6
        )


@pytest.mark.slow
def test_newcomers_have_metrics():
    clients, unseen = pfl.data.split_unseen(uneven(), 0.4, seed=0)
    run = pfl.Run(
        pfl.FedAvg(), clients, pfl.models.MLP(hidden=()), unseen=unseen, metrics={"own": right}
    )
    scores = run.train(1, progress=False).summary["unseen"]
    assert scores["own"] == pytest.approx(scores["accuracy_mean"]) and "train_own" in scores


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["f2"], "metrics=f2: is no function, and unknown; accepted: f1, "),
        (
            {"accuracy": right},
            "metrics=accuracy: accepted: names such as my_metric, other than accuracy",
        ),
        ({"validation_own": right}, "metrics=validation_own: accepted: names"),
        ({"a b": right}, "metrics=a b: accepted: names"),
        ({"own": 3}, "metrics=own: accepted: functions"),
        (right, "metrics=function: accepted: functions"),
    ],
)
def test_metrics_that_are_refused(metrics, message):
    with pytest.raises(pfl.ArgumentError, match=message):
        pfl.Run(pfl.FedAvg(), uneven(), pfl.models.MLP(hidden=()), metrics=metrics)


def test_each_metric_is_of_a_client_s_real_examples():
    found = {"outputs": np.stack([LOGITS, LOGITS, LOGITS[::-1]]), "y": np.stack([Y, Y, Y[::-1]])}
    own = measures.named({"right": right, "n": number}, set(), "classification")
    values = measures.measured(own, found | {"size": np.array([3, 0, 2])}, "classification")
    np.testing.assert_allclose(values["right"], [2 / 3, np.nan, 1 / 2], rtol=1e-6)
    np.testing.assert_array_equal(values["n"], [3, np.nan, 2])


class Silent(Exception):
    """An error without a text."""

    def __str__(self):
        return ""


def fails_silently(outputs, y):
    raise Silent


def fails_in_two_lines(outputs, y):
    raise ValueError("one\nother")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            lambda outputs, y: outputs,
            r"for outputs \(4, 3\) and y \(4,\), raised ValueError: .*a number",
        ),
        (fails_in_two_lines, ".*raised ValueError: one; accepted: "),
        (fails_silently, ".*raised Silent: ; accepted: "),
    ],
)
def test_a_metric_that_fails_is_one_line(metric, message):
    found = {"outputs": LOGITS[None], "y": Y[None], "size": np.array([4])}
    with pytest.raises(pfl.ArgumentError, match=f"^metrics=own: {message}") as caught:
        measures.measured({"own": pfl.metrics.metric(metric)}, found, "classification")
    assert "\n" not in str(caught.value)


def test_a_metric_that_fails_ends_the_run():
    run = pfl.Run(
        pfl.FedAvg(),
        uneven(),
        pfl.models.MLP(hidden=()),
        metrics={"own": lambda outputs, y: 1 // 0},
    )
    with pytest.raises(pfl.ArgumentError, match=r"^metrics=own: .*raised ZeroDivisionError"):
        run.train(1, progress=False)


@pytest.mark.slow
def test_a_run_goes_on_with_other_metrics(tmp_path):
    """Rounds before a metric was asked for have NaN; the models of the last checkpoint are scored by it."""
    clients = uneven()

    def start(**options):
        return pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP(hidden=()), **options)

    start(metrics={"old": right}).train(2, out=tmp_path / "run", eval_every=1, progress=False)
    result = start(metrics={"own": right}).train(
        3, out=tmp_path / "run", eval_every=1, resume=True, progress=False
    )
    own, old, accuracy = (result.results[f"{name}_test"] for name in ("own", "old", "accuracy"))
    assert np.isnan(own[:2]).all() and np.isnan(old[3]).all()
    np.testing.assert_allclose(own[2:], accuracy[2:], rtol=1e-6)
    np.testing.assert_allclose(old[:2], accuracy[:2], rtol=1e-6)
    assert [row.get("own") is None for row in result.history] == [True, True, False, False]


@pytest.mark.slow
def test_a_cell_without_a_metric_is_scored_again(tmp_path, said):
    """A finished cell of a comparison gets a new metric without training; tables have the mean over seeds."""
    clients = uneven()
    model = pfl.models.MLP(hidden=())
    local = pfl.LocalTraining(optax.sgd(0.1))
    options = {"seeds": (0, 1), "rounds": 2, "out": tmp_path}
    before = pfl.compare([pfl.FedAvg()], clients, model, local, **options)
    table = pfl.compare([pfl.FedAvg()], clients, model, local, metrics={"own": right}, **options)
    assert any("it lacks the metrics own" in line for line in said)
    cells = [
        files.read_json(tmp_path / "fedavg" / f"seed-{seed}" / "summary.json")["last"]
        for seed in (0, 1)
    ]
    scores = [cell["own"] for cell in cells]
    assert scores == pytest.approx([cell["accuracy_mean"] for cell in cells])
    mean = np.mean(scores)
    std = np.std(scores, ddof=1)
    assert table.rows[0]["metrics"]["own"] == pytest.approx({"mean": mean, "std": std, "runs": 2})
    # nothing was trained
    assert table.rows[0]["seconds_per_round"] == before.rows[0]["seconds_per_round"]
    text = f"{mean:.3f} ± {std:.3f} (2)"
    for name in ("table.md", "table.csv"):
        assert text in (tmp_path / name).read_text()
    assert files.read_json(tmp_path / "table.json")[0]["metrics"]["own"]["mean"] == pytest.approx(
        np.mean(scores)
    )
    assert "own" in (tmp_path / "report.html").read_text()
    again = pfl.compare([pfl.FedAvg()], clients, model, local, metrics={"own": right}, **options)
    assert str(again) == str(table) and "already finished" in said[-2] + said[-3]


def test_one_s_own_metric_gets_probabilities_and_says_which_values_are_good():
    seen = []

    @pfl.metrics.metric(higher_is_better=False)
    def worst(outputs, y):
        seen.append(outputs)
        return outputs.max()

    found = {"outputs": LOGITS[None], "y": Y[None], "size": np.array([3])}
    measures.measured({"worst": worst}, found, "classification")
    np.testing.assert_allclose(seen[0], PROBABILITIES[:3], rtol=1e-6)
    measures.measured({"worst": worst}, found, "multilabel")
    np.testing.assert_allclose(seen[1], special.expit(np.float64(LOGITS[:3])), rtol=1e-6)
    measures.measured({"worst": worst}, found, "regression")
    np.testing.assert_array_equal(seen[2], LOGITS[:3])
    directions = {name: each.higher_is_better for name, each in measures.METRICS.items()}
    assert directions == {
        "f1": True,
        "balanced_accuracy": True,
        "auroc": True,
        "calibration_error": False,
        "perplexity": False,
        "mae": False,
        "rmse": False,
        "r2": True,
    }
    assert not measures.named({"own": worst}, set(), "regression")["own"].higher_is_better
    assert measures.named({"own": right}, set(), "regression")["own"].higher_is_better


def test_the_roc_curve_of_confident_predictions_has_their_order():
    """AUROC was 0.50 where the order is perfect, since all probabilities were 1."""
    logits = np.stack([np.zeros(6), np.array([20.0, 30, 40, 50, 60, 70])], axis=1).astype(
        np.float32
    )
    y = np.array([0, 0, 0, 1, 1, 1])
    assert measures.METRICS["auroc"](logits, y) == 1
    labels = measures.named(["auroc"], set(), "multilabel")["auroc"]
    assert labels(logits[:, 1:], y[:, None]) == 1


def test_names_of_metrics_may_be_in_any_case():
    found = measures.named(["F1", "AUROC"], set(), "classification")
    assert found == measures.named(["f1", "auroc"], set(), "classification")
    assert [*found] == ["f1", "auroc"]
