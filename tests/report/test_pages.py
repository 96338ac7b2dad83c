"""Figures and the page, from small made-up runs."""

import json
import subprocess
import sys

import jaxtyping
import matplotlib.image
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

from pfljax import report
from pfljax.evaluation import collaboration
from pfljax.report import canvas, captions, figures

K, T = 6, 3


def make_run(
    directory, *, task="classification", topology="peers", num_models=K, optional=True, affinity=None, privacy=None
):
    """A run's files, with scores that are easy to recognize."""
    rng = np.random.default_rng(0)
    score = "accuracy" if task == "classification" else "loss"
    results = {"rounds": np.array([10, 20, 30]), "scored": "own models", "loss_test": rng.random((T, K))}
    results |= {f"{score}_{split}": rng.random((T, K)) for split in ("train", "test")}
    np.savez(directory / "results.npz", **results)
    row = {"round": 30, "seconds": 1.0, "train_loss": 0.25, "loss": 0.4321, "bytes_down": 2e6, "bytes_up": 1e6}
    if task == "classification":
        names = ("accuracy", "accuracy_mean", "accuracy_std", "accuracy_bottom_decile", "accuracy_min")
        row |= dict.fromkeys(names, 0.88)
    rows = [row | {"round": r} for r in (10, 20, 30)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    distribution = [1, 0, 1, 0, 1, 0]
    clients = [
        {"client": k, "n_train": 9, "n_test": 3, "distribution": distribution[k], "accuracy": 0.5, "loss": 0.1}
        for k in range(K)
    ]
    summary = {
        "algorithm": "federico",
        "dataset": "x<&>y",
        "task": task,
        "num_clients": K,
        "rounds": 30,
        "seed": 0,
        "scored": "own models",
        "last": row,
        "best": row | {"selected_by": "train_loss"},
        "per_client": clients,
        "seconds_per_round": 0.01,
        "compile_seconds": 1.0,
        "peak_memory_bytes": None,
        "plan": [["models", 123456], ["plan", "map"]],
        "unseen": None,
        "privacy": privacy,
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    config = {"flags": {"rounds": 30}, "versions": {"jax": "0"}, "device": "cpu", "git_commit": None, "command": "c"}
    (directory / "config.json").write_text(json.dumps(config))
    if optional:
        index = rng.integers(num_models, size=(T, K, 2))
        weights = np.full((T, K, 2), 0.5)
        np.savez(
            directory / "collaboration.npz",
            round=results["rounds"],
            index=index,
            weights=weights,
            topology=topology,
            distribution=np.array(distribution),
            **(
                {}
                if affinity is None
                else {"affinity": np.stack([affinity] * T), "target": np.array(distribution)[::-1]}
            ),
        )
    if task == "regression":
        grid = np.linspace(0, 1, 5)
        arrays = {"x": grid, "y": grid, "client": np.array([0, 1, 2, 3, 4]), "grid": grid, "truth": grid}
        prediction = np.where(np.eye(K, 5) > 0, 1.0, np.nan)
        np.savez(directory / "curve.npz", prediction=prediction, reference=grid, reference_name="FedAvg", **arrays)


@pytest.fixture
def undrawn(monkeypatch):
    """Spares tests of a page's text the drawing."""
    monkeypatch.setattr(canvas, "to_png", lambda figure: b"PNG")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({}, {"accuracy_over_rounds", "per_client_accuracy", "collaboration_matrix", "weights_over_rounds"}),
        ({"task": "regression"}, {"curve", "loss_over_rounds", "collaboration_matrix"}),
        ({"topology": "shared", "num_models": 3}, {"accuracy_over_rounds", "collaboration_matrix"}),
        ({"optional": False}, {"accuracy_over_rounds", "per_client_accuracy"}),
    ],
)
def test_a_run_gets_its_figures_and_a_page_of_its_own(tmp_path, kind, expected):
    make_run(tmp_path, **kind)
    text = report.write(tmp_path).read_text()
    pictures = {path.stem: path for path in (tmp_path / "figures").iterdir()}
    assert expected <= pictures.keys()
    if kind.get("optional") is False:
        assert "collaboration_matrix" not in pictures
    for path in pictures.values():
        assert min(matplotlib.image.imread(path).shape[:2]) > 100
    assert "x&lt;&amp;&gt;y" in text and "x<&>y" not in text
    assert "http://" not in text and "https://" not in text and 'src="figures' not in text
    assert text.count("data:image/png;base64,") == len(pictures)
    assert "0.4321" in text and ("88.0 %" in text) == (kind.get("task") != "regression")
    assert not list(tmp_path.rglob("*.tmp"))


def test_affinities_are_drawn_and_counted(tmp_path):
    # Clients 1, 3 and 5 want distribution 1 - 0, that is the even ones, and the even ones want the odd ones.
    affinity = np.zeros((K, K))
    affinity[:, ::2] = 1.0  # right for the odd clients only
    make_run(tmp_path, affinity=affinity)
    text = report.write(tmp_path).read_text()
    assert (tmp_path / "figures" / "affinity_over_rounds.png").stat().st_size > 5000
    assert "in the wanted distribution for 50% of the clients" in text


def test_top_affinities_by_hand():
    affinity = np.array([[9.0, 2, 1, 0], [0, 9, 3, 4], [5, 1, 9, 2], [1, 2, 3, 9]])
    distribution = np.array([0, 0, 0, 1])
    # Client 0's two highest are 1 and 2 (right), client 1's 3 and 2, client 2's 0 and 3; client 3 is alone in its own.
    assert captions.top_affinities(affinity, distribution, distribution) == pytest.approx(1 / 3)
    # Where client 3 wants distribution 0, its two highest, 2 and 1, are right.
    assert captions.top_affinities(affinity, distribution, np.array([0, 0, 0, 0])) == pytest.approx(2 / 4)
    assert np.isnan(captions.top_affinities(affinity[:2, :2], distribution[:2], distribution[:2]))


def test_where_nobody_has_two_to_find_nothing_is_counted(undrawn, tmp_path):
    affinity = np.eye(K)
    make_run(tmp_path, affinity=affinity)
    summary = json.loads((tmp_path / "summary.json").read_text())
    collaboration = dict(np.load(tmp_path / "collaboration.npz"))
    collaboration["distribution"] = collaboration["target"] = np.arange(K)
    np.savez(tmp_path / "collaboration.npz", **collaboration)
    assert summary["privacy"] is None
    text = report.write(tmp_path).read_text()
    assert "nan" not in text and "two highest affinities" not in text and "Privacy" not in text


def test_where_nobody_has_used_anything_no_share_is_told(undrawn, tmp_path):
    make_run(tmp_path)
    collaboration = dict(np.load(tmp_path / "collaboration.npz"))
    collaboration["weights"] = np.zeros_like(collaboration["weights"])
    np.savez(tmp_path / "collaboration.npz", **collaboration)
    text = report.write(tmp_path).read_text()
    assert "nan" not in text


def test_sharing_is_the_cosine_of_rows_within_and_across_distributions():
    index, weights = np.array([[0, 1], [1, 0], [2, 0]]), np.array([[0.6, 0.8], [1.0, 0.0], [0.6, 0.8]])
    alike = [[1, 0.8, 0.48], [0.8, 1, 0], [0.48, 0, 1]]
    np.testing.assert_allclose(collaboration.cosines(index, weights), alike, atol=1e-12)
    found = collaboration.sharing(index, weights, np.array([0, 0, 1]))
    assert found == pytest.approx((0.8, 0.24))
    assert captions.alike(index, weights, np.array([0, 0, 1])) == (
        "The mean cosine is 0.80 between clients of one distribution and 0.24 between clients of different ones."
    )
    assert captions.alike(index, weights, np.array([0, 0, 0])).endswith("0.43 between clients of one distribution.")
    repeated = np.array([[0, 0], [0, 1]]), np.array([[0.3, 0.5], [1.0, 0.0]])  # a repeated index adds
    assert collaboration.sharing(*repeated, np.array([0, 0])).within == pytest.approx(1)
    rng = np.random.default_rng(0)
    index, many = rng.integers(30, size=(40, 5)), rng.random((40, 5))
    group = rng.integers(3, size=40)
    pairs, same = collaboration.cosines(index, many), group[:, None] == group
    off = ~np.eye(40, dtype=bool)
    assert collaboration.sharing(index, many, group) == pytest.approx((pairs[same & off].mean(), pairs[~same].mean()))
    everyone = np.arange(
        200_000
    )  # in memory that all pairs of clients, or of distributions and models, do not fit into
    assert collaboration.sharing(everyone[:, None], np.ones((200_000, 1)), everyone % 4) == (0, 0)
    assert collaboration.sharing(everyone[:, None] // 2, np.ones((200_000, 1)), everyone // 2) == (1, 0)
    index = np.array([[0, 1], [1, 0], [2, 0]])
    figure = figures.sharing_matrix(index, weights, np.array([1, 0, 1]))
    shown = np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_allclose(shown, np.array(alike)[np.ix_([1, 0, 2], [1, 0, 2])], atol=1e-12)


@pytest.mark.parametrize(("epsilon", "shown"), [(2.345, "2.345"), (None, "no bound")])
def test_the_privacy_ledger_is_on_the_page(undrawn, tmp_path, epsilon, shown):
    ledger = {"noise_multiplier": 1.25, "clip_norm": 2.0, "delta": 1e-5, "epsilon": epsilon, "unaccounted": "secrets"}
    make_run(tmp_path, privacy=ledger | {"epsilon_per_client": [epsilon] * K})
    text = report.write(tmp_path).read_text()
    section = text.split("<h2>Privacy</h2>")[1].split("<h2>")[0]
    assert "1.25" in section and "1e-05" in section and shown in section and "Not counted: secrets." in section


def test_weights_are_put_where_they_belong_and_add_up():
    index = np.array([[2, 0], [1, 1]])
    weights = np.array([[0.7, 0.3], [0.6, 0.4]])
    expected = [[0.3, 0.0, 0.7], [0.0, 1.0, 0.0]]
    np.testing.assert_allclose(collaboration.dense(index, weights, 3), expected)


def test_the_matrix_is_ordered_by_true_distribution():
    index, weights = np.array([[0], [1], [2]]), np.array([[1.0], [0.6], [0.2]])
    figure = figures.collaboration_matrix(index, weights, np.array([1, 0, 1]), topology="peers")
    shown = figure.axes[0].images[0].get_array()
    np.testing.assert_allclose(shown, np.diag([0.6, 1.0, 0.2]))  # client 1 first


@pytest.mark.parametrize("exponent", [-0.5, 0, 1, 2.25])
def test_slopes_of_powers_are_their_exponents(exponent):
    x = np.array([3, 10, 50, 2000])
    assert report.slope(x, 7.5 * x**exponent) == pytest.approx(exponent, abs=1e-12)
    # Symmetric about the line: log y off by +1, -2, +1 at equal steps of log x.
    assert report.slope([1, 10, 100], np.array([1, 10, 100]) * np.exp([1, -2, 1])) == pytest.approx(1)
    assert report.slope([5], [3.0]) is None and report.slope([5, 5], [3.0, 4.0]) is None


def test_comparison_scaling_and_benchmark_are_drawn(tmp_path):
    row = {"algorithm": "a", "accuracy_mean": 0.9, "accuracy_std": 0.1, "bottom_decile_mean": 0.8}
    row |= {"rounds": [1, 2], "curve_mean": [0.5, 0.9], "curve_std": [0.1, 0.1]}
    cells = [{"num_clients": k, "seconds_per_round": k**2, "memory_bytes": 3 * k} for k in (10, 100)]
    scaling = report.scaling_figure({"a": cells, "b": cells[:1]})
    texts = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in scaling.axes]
    assert texts == [["a, slope 2.00", "b"], ["a, slope 1.00", "b"]]
    bars = report.benchmark_figure([{"workload": "w", "ratio": 5.0}])
    for number, figure in enumerate((report.comparison_figure([row, row | {"algorithm": "b"}]), scaling, bars)):
        path = tmp_path / f"{number}.png"
        report.save(figure, path)
        assert min(matplotlib.image.imread(path).shape[:2]) > 100


def test_many_clients_share_the_rows_of_a_matrix(monkeypatch):
    """Five clients in rows of two: the mean over a row's clients of their weights for each column's models."""
    monkeypatch.setattr(figures, "MAX_ROWS", 3)
    index = np.array([[0, 1], [1, 4], [2, 0], [3, 2], [4, 0]])
    weights = np.array([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]])
    figure = figures.collaboration_matrix(index, weights, np.zeros(5, int), topology="peers")
    shown = figure.axes[0].images[0].get_array()
    np.testing.assert_allclose(shown, [[0.625, 0, 0.375], [0, 1, 0], [0.5, 0, 0.5]])
    assert "rows of 2" in figure.axes[0].get_ylabel()


def test_figures_show_inline_in_a_notebook(tmp_path):
    make_run(tmp_path)
    plots = report.Plots.read(tmp_path)
    shown, metadata = DisplayFormatter().format(plots.collaboration(), include={"image/png"})
    assert shown["image/png"].startswith(b"\x89PNG") and not metadata
    drawn = [plots.accuracy(), plots.per_client(), plots.weights(), plots.traffic()]
    assert [figure.axes[0].get_xlabel() for figure in drawn[:2]] == ["round", "client (id), sorted"]
    assert len(drawn[2].axes) == K
    bytes_sent = drawn[3].axes[0].lines[0].get_xdata()
    np.testing.assert_allclose(bytes_sent, [3e6 / 2**20] * T)


def test_what_a_run_has_not_kept_is_named(tmp_path):
    make_run(tmp_path, optional=False)
    plots = report.Plots.read(tmp_path)
    with pytest.raises(ValueError, match="has kept no index"):
        plots.collaboration()
    with pytest.raises(ValueError, match="measures nothing of itself"):
        plots.measures()


def test_matplotlib_is_imported_with_the_first_figure():
    code = "import sys; from pfljax import report; assert 'matplotlib' not in sys.modules; report.slope"
    subprocess.run([sys.executable, "-c", code + "; assert 'matplotlib' in sys.modules"], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = report.nothing
    assert all(hasattr(report, name) for name in report.__all__)


def test_shapes_in_signatures_are_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError, match="weights"):
        collaboration.dense(np.zeros((2, 1), int), np.zeros((2, 3)), 4)
