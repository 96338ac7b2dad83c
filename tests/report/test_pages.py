"""Figures and the page, from small made-up runs."""

import base64
import gzip
import html
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.parse

import html_pages
import jaxtyping
import matplotlib.image
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from run_folders import K, T, make_run

from pfljax import report
from pfljax.contract.errors import ArgumentError
from pfljax.evaluation import collaboration
from pfljax.folder import files
from pfljax.report import (
    comparisons,
    content,
    draw,
    picture,
    pictures,
    plots,
    rendering,
    sections,
)
from pfljax.report.run_data import RunData, Score


def readable(page):
    """A page without its scripts, in whose packed data any letters may follow each other."""
    return page.read_text().split("<script")[0]


def packed(page):
    """The data that a page holds for its plots."""
    letters = re.search(r'id="data">([^<]*)<', page.read_text())[1]
    return json.loads(gzip.decompress(base64.b64decode(letters)))


def run_of(index, weights, group, topology="peers"):
    """A run in which clients used these models in all of its rounds, and scored 1."""
    used = {
        "round": np.arange(len(index)),
        "index": index,
        "weights": weights,
        "topology": topology,
    }
    scores = {"rounds": np.arange(len(index)), "accuracy_test": np.ones(index.shape[:2])}
    return RunData({}, [], scores, used | {"group": np.array(group)})


@pytest.fixture
def undrawn(monkeypatch):
    """Spares tests of a page's text the drawing."""
    monkeypatch.setattr(draw, "to_png", lambda figure: b"PNG")


def test_a_run_gets_its_figures_and_a_page_of_its_own(tmp_path):
    make_run(tmp_path)
    expected = {
        "accuracy_over_rounds",
        "per_client_accuracy",
        "collaboration_matrix",
        "weights_over_rounds",
    }
    path = report.write(tmp_path)
    pictures = {path.stem: path for path in (tmp_path / "figures").iterdir()}
    assert expected <= pictures.keys()
    for drawn in pictures.values():
        assert min(matplotlib.image.imread(drawn).shape[:2]) > 100

    page = html_pages.read(path)
    text = readable(path)
    assert "x<&>y" in page.text and "x<&>y" not in text
    assert "http://" not in text and "https://" not in text and 'src="figures' not in text
    assert "0.4321" in page.text and "88.0 %" in page.text and not page.images
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("kind", "expected", "missing"),
    [
        (
            {"task": "regression"},
            {"curve", "loss_over_rounds", "collaboration_matrix"},
            {"accuracy_over_rounds"},
        ),
        (
            {"topology": "shared", "num_models": 3},
            {"accuracy_over_rounds", "collaboration_matrix"},
            set(),
        ),
        (
            {"optional": False},
            {"accuracy_over_rounds", "per_client_accuracy"},
            {"collaboration_matrix"},
        ),
    ],
)
def test_a_run_has_the_figures_of_what_it_has_kept(undrawn, tmp_path, kind, expected, missing):
    make_run(tmp_path, **kind)
    page = html_pages.read(report.write(tmp_path))
    pictures = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert expected <= pictures and not missing & pictures
    regression = kind.get("task") == "regression"
    assert ("88.0 %" in page.text) != regression
    # the curve
    assert [source.split(",")[0] for source in page.images] == [
        "data:image/png;base64"
    ] * regression


@pytest.mark.slow
def test_affinities_are_drawn_and_counted(tmp_path):
    # Clients 1, 3 and 5 want group 1 - 0, that is the even ones, and the even ones want the odd ones.
    affinity = np.zeros((K, K))
    affinity[:, ::2] = 1.0  # right for the odd clients only
    make_run(tmp_path, affinity=affinity)
    text = report.write(tmp_path).read_text()
    assert (tmp_path / "figures" / "affinity_over_rounds.png").stat().st_size > 5000
    assert "For 50% of the clients with two others in their target group" in text


def test_top_affinities_by_hand():
    affinity = np.array([[9.0, 2, 1, 0], [0, 9, 3, 4], [5, 1, 9, 2], [1, 2, 3, 9]])
    group = np.array([0, 0, 0, 1])
    # Client 0's two highest are 1 and 2 (right), client 1's 3 and 2, client 2's 0 and 3; client 3 is alone in its own.
    assert collaboration.top_affinities(affinity, group, group) == pytest.approx(1 / 3)
    # Where client 3 wants group 0, its two highest, 2 and 1, are right.
    assert collaboration.top_affinities(affinity, group, np.array([0, 0, 0, 0])) == pytest.approx(
        2 / 4
    )
    assert np.isnan(collaboration.top_affinities(affinity[:2, :2], group[:2], group[:2]))


def test_where_nobody_has_two_to_find_nothing_is_counted(tmp_path):
    affinity = np.eye(K)
    make_run(tmp_path, affinity=affinity)
    summary = json.loads((tmp_path / "summary.json").read_text())
    collaboration = files.read_npz(tmp_path / "collaboration.npz")
    collaboration["group"] = collaboration["target"] = np.arange(K)
    np.savez(tmp_path / "collaboration.npz", **collaboration)
    assert summary["privacy"] is None
    page = html_pages.read(report.write_page(tmp_path))
    assert (
        "nan" not in page.text
        and "two highest affinities" not in page.text
        and "Privacy" not in page.sections
    )


def test_where_nobody_has_used_anything_no_share_is_told(tmp_path):
    make_run(tmp_path)
    collaboration = files.read_npz(tmp_path / "collaboration.npz")
    collaboration["weights"] = np.zeros_like(collaboration["weights"])
    np.savez(tmp_path / "collaboration.npz", **collaboration)
    assert "nan" not in readable(report.write_page(tmp_path))


def test_sharing_is_the_cosine_of_rows_within_and_across_distributions():
    index = np.array([[0, 1], [1, 0], [2, 0]])
    weights = np.array([[0.6, 0.8], [1.0, 0.0], [0.6, 0.8]])
    alike = [[1, 0.8, 0.48], [0.8, 1, 0], [0.48, 0, 1]]
    np.testing.assert_allclose(collaboration.cosines(index, weights), alike, atol=1e-12)
    found = collaboration.sharing(index, weights, np.array([0, 0, 1]))
    assert found == pytest.approx((0.8, 0.24))
    # a repeated index adds
    repeated = np.array([[0, 0], [0, 1]]), np.array([[0.3, 0.5], [1.0, 0.0]])
    assert collaboration.sharing(*repeated, np.array([0, 0])).within == pytest.approx(1)
    rng = np.random.default_rng(0)
    index = rng.integers(30, size=(40, 5))
    many = rng.random((40, 5))
    group = rng.integers(3, size=40)
    pairs = collaboration.cosines(index, many)
    same = group[:, None] == group
    off = ~np.eye(40, dtype=bool)
    assert collaboration.sharing(index, many, group) == pytest.approx(
        (pairs[same & off].mean(), pairs[~same].mean())
    )
    everyone = np.arange(
        200_000
    )  # in memory that all pairs of clients, or of distributions and models, do not fit into
    assert collaboration.sharing(everyone[:, None], np.ones((200_000, 1)), everyone % 4) == (0, 0)
    assert collaboration.sharing(everyone[:, None] // 2, np.ones((200_000, 1)), everyone // 2) == (
        1,
        0,
    )
    index = np.array([[0, 1], [1, 0], [2, 0]])
    heat = pictures.sharing_matrix(run_of(index[None], weights[None], [1, 0, 1]), 0).heat
    np.testing.assert_allclose(
        heat.values, np.array(alike)[np.ix_([1, 0, 2], [1, 0, 2])], atol=1e-12
    )
    assert heat.rows == ["1", "0", "2"] and not heat.columns


@pytest.mark.parametrize(("epsilon", "shown"), [(2.345, "2.345"), (None, "no bound")])
def test_the_privacy_ledger_is_on_the_page(tmp_path, epsilon, shown):
    ledger = {
        "noise_multiplier": 1.25,
        "clip_norm": 2.0,
        "delta": 1e-5,
        "epsilon": epsilon,
        "unaccounted": "secrets",
    }
    make_run(tmp_path, privacy=ledger | {"epsilon_per_client": [epsilon] * K})
    section = html_pages.read(report.write_page(tmp_path)).sections["Privacy"]
    assert (
        "1.25" in section
        and "1e-05" in section
        and shown in section
        and "Not included: secrets." in section
    )
    assert "whole clients" not in section


def test_epsilons_of_clients_stand_beside_those_of_examples(tmp_path):
    part = {
        "noise_multiplier": 1.25,
        "clip_norm": 2.0,
        "delta": 1e-5,
        "epsilon": 3.21,
        "unaccounted": None,
    }
    part |= {"epsilon_per_client": [3.21] * K}
    other = part | {"epsilon": 7.65, "epsilon_per_client": [7.65] * K, "unaccounted": "logs"}
    make_run(tmp_path, privacy=part | {"of_clients": other})
    page = html_pages.read(report.write_page(tmp_path))
    assert {tuple(row[-2:]) for row in page.rows if "3.21" in row} == {
        ("3.21", "7.65")
    } and "Not included: logs." in page.sections["Privacy"]
    only = rendering.render(sections.privacy({"of_clients": other}))
    assert "of whole clients" in only and "of examples" not in only


def test_weights_are_put_where_they_belong_and_add_up():
    index = np.array([[2, 0], [1, 1]])
    weights = np.array([[0.7, 0.3], [0.6, 0.4]])
    expected = [[0.3, 0.0, 0.7], [0.0, 1.0, 0.0]]
    np.testing.assert_allclose(collaboration.dense(index, weights, 3), expected)


def test_the_matrix_is_ordered_by_true_distribution():
    index = np.array([[0], [1], [2]])
    weights = np.array([[1.0], [0.6], [0.2]])
    run = run_of(index[None], weights[None], [1, 0, 1])
    heat = pictures.weight_matrix(run, 0).heat
    np.testing.assert_allclose(heat.values, np.diag([0.6, 1.0, 0.2]))  # client 1 first
    assert heat.rows == ["1", "0", "2"] and not heat.columns and heat.edges == [0.5]
    assert [(start, stop) for start, stop, _ in heat.strip] == [(0, 1), (1, 3)]
    axes = plots.plot_collaboration(run).axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), heat.values)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == heat.rows
    shared = pictures.weight_matrix(run_of(index[None], weights[None], [1, 0, 1], "shared"), 0)
    np.testing.assert_allclose(shared.heat.values, [[0, 0.6, 0], [1, 0, 0], [0, 0, 0.2]])
    assert shared.heat.columns == list("012") and shared.x.label == "model"


@pytest.mark.parametrize("exponent", [-0.5, 0, 1, 2.25])
def test_slopes_of_powers_are_their_exponents(exponent):
    x = np.array([3, 10, 50, 2000])
    assert report.slope(x, 7.5 * x**exponent) == pytest.approx(exponent, abs=1e-12)
    # Symmetric about the line: log y off by +1, -2, +1 at equal steps of log x.
    assert report.slope([1, 10, 100], np.array([1, 10, 100]) * np.exp([1, -2, 1])) == pytest.approx(
        1
    )
    assert report.slope([5], [3.0]) is None and report.slope([5, 5], [3.0, 4.0]) is None


def test_comparison_and_scaling_are_drawn(tmp_path):
    row = {"method": "a", "accuracy_mean": 0.9, "accuracy_std": 0.1, "bottom_decile_mean": 0.8}
    row |= {"seeds": [{"accuracy": 0.8}, {"accuracy": 1.0}]}
    row |= {"rounds": [1, 2], "curve_mean": [0.5, 0.9], "curve_std": [0.1, 0.1]}
    cells = [
        {"num_clients": k, "seconds_per_round": k**2, "memory_bytes": 3 * k} for k in (10, 100)
    ]
    scaling = report.scaling_figure({"a": cells, "b": cells[:1]})
    texts = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in scaling.axes]
    assert texts == [["a, slope 2.00", "b"], ["a, slope 1.00", "b"]]
    row |= {"reference": "b", "difference": 0.1, "difference_low": -0.1, "difference_high": 0.3}
    compared = report.plot_comparison([row, row | {"method": "b", "difference_low": None}])
    zero, span, mean = compared.axes[2].lines
    assert span.get_marker() == "|"  # caps
    drawn = np.concatenate([line.get_xdata() for line in (zero, span, mean)])
    np.testing.assert_allclose(drawn, [0, 0, -10, 30, 10])
    for number, figure in enumerate((compared, scaling)):
        path = tmp_path / f"{number}.png"
        report.save(figure, path)
        assert min(matplotlib.image.imread(path).shape[:2]) > 100


def test_measures_of_a_method_are_missing_for_the_initial_models(tmp_path):
    make_run(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows[1:] = [row | {"drift": 0.5} for row in rows[1:]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = packed(report.write_page(tmp_path))["panels"]["measure-0"][""]
    assert drawn["y"]["label"] == "drift" and drawn["series"][0]["y"] == [None, 0.5, 0.5]
    figures = plots.all_figures(RunData.read(tmp_path))
    (line,) = figures["measures"].axes[0].lines
    np.testing.assert_array_equal(line.get_ydata(), [np.nan, 0.5, 0.5])


def test_every_score_of_clients_is_drawn(undrawn, tmp_path):
    """A score of one's own, which results.npz and metrics.jsonl hold, has a figure, and the page offers it."""
    make_run(tmp_path)
    results = files.read_npz(tmp_path / "results.npz")
    own = np.linspace(0, 1, T * K).reshape(T, K)
    np.savez(tmp_path / "results.npz", **results, own_error_test=own)
    rows = [
        json.loads(line) | {"own_error": 0.25}
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads((tmp_path / "summary.json").read_text()) | {
        "lower_is_better": ["own_error"]
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = report.write(tmp_path)
    drawn = packed(page)["panels"]
    assert list(drawn["spread"]) == ["accuracy", "loss", "own_error"] and "measure-0" not in drawn
    assert html_pages.read(page).options["own_error"] == "test own error"
    series = {each["name"]: each["y"] for each in drawn["spread"]["own_error"]["series"]}
    assert series["mean over clients"] == [0.25] * T
    np.testing.assert_allclose(
        series["edge of the worst tenth"], np.percentile(own, 90, axis=1), rtol=5e-5
    )
    assert (tmp_path / "figures" / "own_error_over_rounds.png").exists()
    with pytest.raises(
        ValueError, match="metric: the run has no f1; accepted: accuracy, loss, own_error"
    ):
        plots.plot_scores(RunData.read(tmp_path), "f1")


def test_a_mean_and_a_band_are_drawn_only_over_several_seeds():
    row = {"method": "a", "seeds": [{"accuracy": 0.9}], "rounds": [1, 2]}
    row |= {"curve_mean": [0.5, 0.9], "curve_std": [0.0, 0.0]}
    points, curves = report.plot_comparison([row]).axes
    assert [line.get_xdata().tolist() for line in points.lines] == [
        [0.9]
    ] and not curves.collections
    several = {
        "method": "b",
        "seeds": [{"accuracy": 0.8}, {"accuracy": 1.0}],
        "curve_std": [0.1, 0.1],
    }
    points, curves = report.plot_comparison([row, row | several]).axes
    drawn = [line.get_xydata().tolist() for line in points.lines]
    np.testing.assert_allclose(drawn[1], [[0.8, 1], [1, 1]])
    np.testing.assert_allclose(drawn[2], [[0.9, 0.55], [0.9, 1.45]])  # the mean
    band = curves.collections[0].get_paths()[0].vertices
    assert len(curves.collections) == 1 and (band[:, 1].min(), band[:, 1].max()) == pytest.approx(
        (0.4, 1.0)
    )


def test_many_clients_share_the_rows_of_a_matrix(monkeypatch):
    """Five clients in rows of two: the mean over a row's clients of their weights for each column's models."""
    monkeypatch.setattr(pictures, "MAX_ROWS", 3)
    index = np.array([[0, 1], [1, 4], [2, 0], [3, 2], [4, 0]])
    weights = np.array([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]])
    panel = pictures.weight_matrix(run_of(index[None], weights[None], [0] * 5), 0)
    np.testing.assert_allclose(panel.heat.values, [[0.625, 0, 0.375], [0, 1, 0], [0.5, 0, 0.5]])
    assert "rows of 2" in panel.y.label


def test_figures_show_inline_in_a_notebook(tmp_path):
    make_run(tmp_path)
    run = RunData.read(tmp_path)
    figure = plots.plot_collaboration(run)
    shown, metadata = DisplayFormatter().format(figure, include={"image/png"})
    assert shown["image/png"].startswith(b"\x89PNG") and not metadata
    functions = (plots.plot_scores, plots.plot_per_client, plots.plot_weights, plots.plot_traffic)
    drawn = [plot(run) for plot in functions]
    assert [figure.axes[0].get_xlabel() for figure in drawn[:2]] == ["round", "client, worst first"]
    assert len(drawn[2].axes) == K
    bytes_sent = drawn[3].axes[0].lines[0].get_xdata()
    np.testing.assert_allclose(bytes_sent, [3.0] * T)


def test_what_a_run_has_not_kept_is_named(tmp_path):
    make_run(tmp_path, optional=False)
    run = RunData.read(tmp_path)
    with pytest.raises(ArgumentError, match=r"^run: collaboration\.npz has no index$"):
        plots.plot_collaboration(run)
    with pytest.raises(ArgumentError, match="has no metrics of its own"):
        plots.plot_measures(run)


@pytest.mark.slow
def test_matplotlib_is_imported_with_the_first_figure():
    code = "import sys; from pfljax import report; assert 'matplotlib' not in sys.modules; report.slope"
    subprocess.run(
        [sys.executable, "-c", code + "; assert 'matplotlib' in sys.modules"], check=True
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = report.nothing
    assert all(hasattr(report, name) for name in report.__all__)


def test_shapes_in_signatures_are_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError, match="weights"):
        collaboration.dense(np.zeros((2, 1), int), np.zeros((2, 3)), 4)


def test_a_page_shows_the_runs_own_settings_and_a_command_that_a_shell_takes_back(
    undrawn, tmp_path
):
    make_run(tmp_path)
    flags = {"rounds": 30, "federico.beta": 0.6, "fedem.components": 3, "data_file": None}
    command = shlex.join(["pfljax", "train", "--out=my runs/<b>"])
    (tmp_path / "config.json").write_text(json.dumps({"flags": flags, "command": command}))
    text = readable(report.write_page(tmp_path))
    shown = html.unescape(re.search(r"<pre>(.*?)</pre>", text)[1])
    assert shlex.split(shown) == ["pfljax", "train", "--out=my runs/<b>"] and "<b>" not in text
    assert "federico.beta" in text and "fedem.components" not in text and "data_file" not in text


def test_what_a_run_says_cannot_leave_its_place_on_the_page(undrawn, tmp_path):
    make_run(tmp_path)
    bad = "</script><script>alert(1)</script>"
    summary = json.loads((tmp_path / "summary.json").read_text()) | {"dataset": bad, "scored": bad}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    rows = (
        (tmp_path / "metrics.jsonl")
        .read_text()
        .replace('"seconds"', json.dumps(bad) + ': 1.0, "seconds"')
    )
    (tmp_path / "metrics.jsonl").write_text(rows)
    page = report.write_page(tmp_path)
    text = page.read_text()
    assert (
        "alert(1)" in text
        and bad not in text
        and text.count("<script") == text.count("</script") == 3
    )
    assert bad.replace("_", " ") in packed(page)["panels"]["measure-0"][""]["y"]["label"]


def test_weights_on_the_page_are_those_of_the_run(undrawn, tmp_path):
    make_run(tmp_path)
    index = np.array([[[2, 0]] * K, [[1, 1]] * K])
    weights = np.array([[[0.12345, 0.87655]] * K, [[0.25, 0.5]] * K])
    kept = files.read_npz(tmp_path / "collaboration.npz") | {
        "round": np.array([10, 30]),
        "index": index,
    }
    np.savez(
        tmp_path / "collaboration.npz",
        **kept | {"weights": weights, "labels": np.arange(2 * K).reshape(K, 2)},
    )
    found = packed(report.write_page(tmp_path))
    assert (
        found["sharing"]["rounds"] == [10, 30]
        and found["sharing"]["rows"][0] == [[0, 0.877, 2, 0.123]] * K
    )
    assert found["sharing"]["rows"][1] == [[1, 0.75]] * K  # a repeated index adds
    np.testing.assert_allclose(
        found["sharing"]["lengths"], [[np.hypot(0.877, 0.123)] * K, [0.75] * K], rtol=1e-4
    )
    assert found["labels"][2] == [4, 5] and found["orders"]["group"] == [1, 3, 5, 0, 2, 4]
    scores = files.read_npz(tmp_path / "results.npz")["accuracy_test"]
    np.testing.assert_allclose(found["test"], scores.T, rtol=5e-4)
    np.testing.assert_allclose(found["median"], np.median(scores, axis=1), rtol=5e-4)
    bands = {series["name"]: series for series in found["panels"]["spread"]["accuracy"]["series"]}
    np.testing.assert_allclose(
        bands["10 to 90 %"]["low"], np.percentile(scores, 10, axis=1), rtol=5e-5
    )
    np.testing.assert_allclose(
        bands["10 to 90 %"]["y"], np.percentile(scores, 90, axis=1), rtol=5e-5
    )
    assert bands["mean over clients"]["y"] == [0.88] * T


@pytest.mark.parametrize("known", [True, False])
def test_groups_are_told_only_if_they_are_known(undrawn, tmp_path, known):
    make_run(tmp_path, affinity=np.eye(K))
    kept = files.read_npz(tmp_path / "collaboration.npz")
    summary = json.loads((tmp_path / "summary.json").read_text())
    if not known:
        del kept["group"], kept["target"]
        summary["per_client"] = [
            {k: v for k, v in row.items() if k != "group"} for row in summary["per_client"]
        ]
    np.savez(tmp_path / "collaboration.npz", **kept)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = report.write_page(tmp_path)
    text = readable(page)
    told = [
        "adjusted Rand index",
        "shows the true groups",
        "in the same group?",
        "ordered by group",
    ]
    assert [phrase in text for phrase in told] == [known] * 4
    parsed = html_pages.read(page)
    assert (
        ("true group" in parsed.options.values())
        == any("group" in row for row in parsed.rows)
        == known
    )
    assert ("their true groups are unknown" in text) != known
    assert (packed(page)["sharing"]["agreement"] is None) != known


@pytest.mark.parametrize("low", [0.1, 0.9, 0.96, 0.995])
def test_percentages_side_by_side_do_not_overlap_in_a_column(low):
    points = picture.Series(np.array([low, 1.0]), np.arange(2.0), kind="points")
    rows = picture.Axis(ticks=[(0.0, "fedavg_plus"), (1.0, "local")])
    figure = draw.draw([picture.Panel(picture.Axis(percent=True), rows, [points])], (3.3, 1.5))
    figure.draw_without_rendering()
    boxes = [
        label.get_window_extent() for label in figure.axes[0].get_xticklabels() if label.get_text()
    ]
    assert len(boxes) > 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_figures_do_not_name_a_single_group():
    for group in ([0, 0, 0], [0, 1, 1]):
        run = run_of(np.zeros((2, 3, 1), int), np.ones((2, 3, 1)), group)
        several = group[1] > 0
        named = any(series.name for series in pictures.ranking(run, np.arange(3)).series)
        assert ("group" in pictures.weights(run)[0].title) == several == named


def test_of_many_clients_the_page_shows_some_and_says_so(undrawn, tmp_path, monkeypatch):
    monkeypatch.setattr(content, "MAX_CLIENTS", 3)
    monkeypatch.setattr(content, "MAX_POINTS", 6)
    make_run(tmp_path)
    scores = files.read_npz(tmp_path / "results.npz")["accuracy_test"][-1]
    page = report.write_page(tmp_path)
    found = packed(page)
    order = np.argsort(scores)
    assert {order[0], order[-1]} < set(found["clients"]) and len(found["clients"]) == 3
    assert "The page shows 3 of 6 clients" in readable(
        page
    ) and "2 of 3 evaluated rounds" in readable(page)
    assert found["rounds"] == [10, 30]
    assert found["panels"]["spread"]["accuracy"]["series"][0]["x"] == [10, 20, 30]
    assert len(found["sharing"]["rows"][0]) == len(found["test"]) == len(found["sentences"]) == 3


def test_found_groups_are_blocks_of_clients_who_share_models():
    index = np.array([[0, 1], [4, 5], [1, 0], [5, 4], [0, 1], [4, 5]])
    weights = np.array([[0.5, 0.5], [0.6, 0.4], [0.4, 0.6], [0.5, 0.5], [0.6, 0.4], [0.5, 0.5]])
    order, found = content.found_groups(index, weights)
    assert (found == found[[0, 1, 0, 1, 0, 1]]).all() and found[0] != found[1]
    assert sorted(order) == list(range(6)) and (np.diff(found[order]) >= 0).all()
    alone = content.found_groups(np.arange(5)[:, None], np.ones((5, 1)))[1]
    assert sorted(alone) == list(range(5))
    everyone = content.found_groups(np.zeros((5, 1), int), np.ones((5, 1)))[1]
    assert set(everyone) == {0}


def test_rounded_numbers_keep_their_first_digits():
    shown = picture.rounded(np.array([0.0012345, -98765.4, 0, np.nan, 1]), 3)
    np.testing.assert_allclose(shown, [0.00123, -98800, 0, np.nan, 1], rtol=1e-12)


def test_a_comparison_has_a_line_for_each_method_and_leads_to_its_runs(tmp_path):
    for name, seed, level in (
        ("a<b", 0, 0.5),
        ("a<b", 1, 0.7),
        ("best", 0, 0.9),
        ("c", 0, 0.4),
        ("c", 1, 0.4),
    ):
        make_run(tmp_path / "out" / name / f"seed-{seed}", level=level, optional=False)
    page = report.write_comparison(tmp_path / "out" / "report.html", [tmp_path / "out"], "t<i>tle")
    parsed = html_pages.read(page)
    rows = parsed.rows[1:]
    # Means 60 % with a sample deviation of 10 sqrt(2) %, and 90 % of a single run; (2 + 1) MB in 30 rounds. With two
    # runs, Student's interval reaches 12.706 deviations / sqrt(2).
    assert [row[:8] for row in rows[:3]] == [
        ["best", "90.0", "-", "-", "-", "90.0", "0.1", "0.01"],
        [
            "a<b",
            "60.0 ± 14.1 (2)",
            "[-67.1, 187.1]",
            "1",
            "no trend",
            "60.0 ± 14.1 (2)",
            "0.1",
            "0.01",
        ],
        ["c", "40.0 ± 0.0 (2)", "[40.0, 40.0]", "1", "no trend", "40.0 ± 0.0 (2)", "0.1", "0.01"],
    ]
    assert [row[8:10] for row in rows[:3]] == [["12.5", "a lot"]] * 3
    links = [urllib.parse.unquote(link) for link in parsed.links if "/" in link]
    assert links[:3] == [
        "best/seed-0/report.html",
        "a<b/seed-0/report.html",
        "a<b/seed-1/report.html",
    ]
    assert all((tmp_path / "out" / link).exists() for link in links) and "<i>" not in readable(page)
    drawn = packed(page)
    # after the line of the method of one run
    band, mean = drawn["panels"]["over"]["rounds"]["series"][1:3]
    assert mean["x"] == [10, 20, 30] and mean["name"] == "a<b" and band["color"] == mean["color"]
    edges = [[0.6 - np.sqrt(0.02)] * 3, [0.6] * 3, [0.6 + np.sqrt(0.02)] * 3]
    np.testing.assert_allclose([band["low"], mean["y"], band["y"]], edges, rtol=1e-4)
    assert drawn["csv"]["curves"][4:6] == [["a<b", "seed-0", 10, 0.5], ["a<b", "seed-0", 20, 0.5]]


@pytest.mark.parametrize("named", ["method", "algorithm"])  # the present and the former name
def test_colors_of_a_page_follow_the_table_and_its_rows_the_mean(named, tmp_path):
    """The table has the user's order, as the figures for a paper have it."""
    for name, level in (("a", 0.5), ("b", 0.9), ("c", 0.7)):
        make_run(tmp_path / name / "seed-0", level=level, optional=False)
    files.write_json(tmp_path / "table.json", [{named: name} for name in "cab"])
    page = report.write_comparison(tmp_path / "report.html", [tmp_path])
    curves = packed(page)["panels"]["over"]["rounds"]["series"]
    assert [(each["name"], each["color"]) for each in curves] == list(
        zip("cab", picture.PALETTE[:3], strict=True)
    )
    assert [row[0] for row in html_pages.read(page).rows[1:4]] == ["b", "c", "a"]


@pytest.mark.parametrize("unit", [0.01, 1, 300])
def test_costs_of_different_sizes_are_on_a_logarithmic_axis_that_has_a_zero(unit):
    """Zero stands at a third of the smallest positive value, here 0.1; at unit 1, the decades are 0.1, 1 and 10."""
    spent = [unit * np.array(each) for each in ([0, 0, 0], [0, 0.1, 0.5], [0, 4.0, 16.0])]
    axis = comparisons.spent_axis("MB", spent)
    decades = {0.01: [0.001, 0.01, 0.1], 1: [0.1, 1, 10], 300: [100, 1000]}[unit]
    assert axis.log and axis.ticks[0] == (pytest.approx(unit * 0.1 / 3), "0")
    assert [place for place, _ in axis.ticks[1:]] == pytest.approx(decades)
    curves = {str(place): (at, np.ones(3), np.zeros(3)) for place, at in enumerate(spent)}
    drawn = [series.x for series in comparisons.method_curves(curves, axis, picture.Axis()).series]
    np.testing.assert_allclose(drawn[0], [unit * 0.1 / 3] * 3)
    np.testing.assert_allclose(drawn[2], unit * np.array([0.1 / 3, 4, 16]))
    for alike in ([spent[1], 10 * spent[1]], [spent[0], spent[2]], [spent[0]]):
        assert comparisons.spent_axis("MB", alike) == picture.Axis("MB")


def test_a_page_shows_paired_differences_with_intervals_within_each_group(tmp_path):
    """Of two groups of methods, on two splits with two seeds each; the differences by split are 20 and 40 points."""
    levels = {"local": [0.1, 0.3, 0.2, 0.2], "fedavg": [0.4, 0.4, 0.6, 0.6]}
    for group, name in itertools.product(("one", "two"), levels):
        for (split, seed), level in zip(
            itertools.product((0, 1), (5, 6)), levels[name], strict=True
        ):
            folder = tmp_path / group / name / f"split-{split}-seed-{seed}"
            make_run(folder, level=level + (0.1 if group == "two" else 0), optional=False)
    page = report.write_comparison(tmp_path / "report.html", [tmp_path], reference="local")
    parsed = html_pages.read(page)
    panels = packed(page)["panels"]["differences"]
    # 30 points, and 12.706 times a deviation of 20 / sqrt(2), over sqrt(2).
    told = ["+30.0 [-97.1, +157.1]", "0.5", "2/0/0"]
    assert [["one/fedavg", *told], ["two/fedavg", *told]] == sorted(
        row for row in parsed.rows if told[0] in row
    )
    assert (
        any("over local, weighted by examples" in row for row in parsed.rows)
        and "over 2 splits" in parsed.text
    )
    assert list(panels)[:2] == ["two/local", "one/local"] and len(panels) == 4
    _, line, point = panels["one/local"]["series"]
    np.testing.assert_allclose([*line["x"], *point["x"]], [30 - 127.06, 30 + 127.06, 30], rtol=1e-3)
    unit = "percentage points, weighted by examples"
    assert panels["one/local"]["x"]["label"] == f"test accuracy minus one/local's, {unit}"
    assert line["kind"] == "interval"
    np.testing.assert_allclose(panels["one/fedavg"]["series"][2]["x"], [-30])


def test_a_page_says_which_clients_are_helped_and_which_are_hurt(tmp_path):
    """In each of two runs, the method's four clients gain 0.3, 0.1, 0 and -0.2 over local's 0.5."""
    for name, gained in (("local", [0, 0, 0, 0]), ("fedavg", [0.1, -0.2, 0.3, 0])):
        for seed in (0, 1):
            folder = tmp_path / name / f"seed-{seed}"
            folder.mkdir(parents=True)
            make_run(folder, level=0.5, optional=False)
            files.write_json(folder / "config.json", {"data": {"digest": "of both seeds"}})
            results = files.read_npz(folder / "results.npz")
            results["accuracy_test"] = np.tile(0.5 + np.array(gained), (3, 1))
            files.write_npz(folder / "results.npz", results)
            if name == "local":  # which sends nothing, and so is the reference
                summary = json.loads((folder / "summary.json").read_text())
                summary["last"] |= {"bytes_down": 0, "bytes_up": 0}
                (folder / "summary.json").write_text(json.dumps(summary))
    page = report.write_comparison(tmp_path / "report.html", [tmp_path])
    rows = html_pages.read(page).rows
    # Both runs have the same clients: the mean of four gains, and 3.1824 times their deviation 20.82 over sqrt(4).
    assert [
        "fedavg",
        "+5.0 [-28.1, +38.1]",
        "50 %",
        "25 %",
        "25 %",
        "+5.0",
        "-20.0",
        "-",
        "-",
    ] in rows
    assert not any("tuned" in row for row in rows)
    files.write_json(tmp_path / "table.json", [{"method": "fedavg", "tuned": "rate 0.3 (edge)"}])
    tuned = html_pages.read(report.write_comparison(page, [tmp_path]))
    cells = {cell for row in tuned.rows for cell in row}
    assert {"tuned", "rate\N{NO-BREAK SPACE}0.3\N{NO-BREAK SPACE}(edge)"} <= cells
    assert "others beyond it may do better" in tuned.text
    panels = packed(page)["panels"]
    assert [list(panels[name]) for name in ("gains", "pairs")] == [["fedavg"]] * 2
    line = panels["gains"]["fedavg"]["series"][2]
    points = panels["pairs"]["fedavg"]["series"][1]
    np.testing.assert_allclose(line["y"][::2], [0.3, 0.3, 0.1, 0.1, 0, 0, -0.2, -0.2], atol=1e-9)
    np.testing.assert_allclose(line["x"], np.repeat(np.arange(9) / 8, 2)[1:-1])
    np.testing.assert_allclose(
        [points["x"], points["y"]], [[0.5] * 8, 0.5 + np.array(line["y"][::2])], rtol=1e-4
    )
    assert 'data-plot="gains pairs"' in page.read_text()


def test_a_comparison_writes_pages_of_runs_that_lack_one_and_says_where_runs_differ(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / name, optional=False)
    summary = json.loads((tmp_path / "two" / "summary.json").read_text()) | {"num_clients": 7}
    (tmp_path / "two" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "one" / "report.html").write_text("newer")
    (tmp_path / "two" / "report.html").write_text("older")
    os.utime(tmp_path / "two" / "report.html", (0, 0))
    text = readable(
        report.write_comparison(tmp_path / "report.html", [tmp_path / "one", tmp_path / "two"])
    )
    assert (tmp_path / "one" / "report.html").read_text() == "newer"
    assert "federico on" in (tmp_path / "two" / "report.html").read_text()
    assert "The runs differ in the number of clients: 6, 7." in text
    assert report.write_comparison(tmp_path / "none.html", [tmp_path / "figures"]) is None


def test_runs_are_looked_for_three_levels_deep(tmp_path):
    for name in ("1", "1/2/3", "a/b/c/4", "a/tuning/r"):
        make_run(tmp_path / name, optional=False)
    found = [path.relative_to(tmp_path).as_posix() for path in report.runs_below(tmp_path)]
    assert found == ["1", "1/2/3"] and report.runs_below(tmp_path / "1") == [tmp_path / "1"]


def with_summary(folder, **entries):
    """Adds entries to a run's summary."""
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_page_says_who_never_trained_and_where_the_time_went(undrawn, tmp_path):
    make_run(tmp_path)
    entry = {"count": 1234, "score": 0.25, "others": 0.75, "served": "the global model"}
    with_summary(tmp_path, never_trained=entry, seconds={"first_batch": 12.345, "rounds": 0.5})
    page = html_pages.read(report.write_page(tmp_path))
    assert (
        "1,234 clients have never trained and predict with the global model. Their mean test "
        "accuracy is 25.0 %, that of the others 75.0 %."
    ) in page.sections["Result"]
    assert ["time, first batch", "12.3 s"] in page.rows and ["time, rounds", "0.5 s"] in page.rows
    score = Score("accuracy", "test accuracy", True, 1)
    nobody = {"count": 0, "score": None, "others": 0.75, "served": "the global model"}
    assert sections.never_trained({"never_trained": nobody}, score) == []
    assert sections.never_trained({}, score) == []
    (other,) = sections.never_trained({"never_trained": entry | {"metric": "loss"}}, score)
    assert other.text == "1,234 clients have never trained and predict with the global model."


def use_auroc(folder, values):
    """Makes AUROC the score of a run; the values are the clients' in the last round."""
    results = files.read_npz(folder / "results.npz")
    results["auroc_test"] = np.tile(values, (T, 1))
    files.write_npz(folder / "results.npz", results)
    summary = json.loads((folder / "summary.json").read_text())
    mean = float(np.mean(values))
    rows = [
        row | {"auroc": value, "classes": {"no": 2, "yes": 1}}
        for row, value in zip(summary["per_client"], values.tolist(), strict=True)
    ]
    with_summary(
        folder,
        score="auroc",
        metrics=["auroc"],
        per_client=rows,
        last=summary["last"] | {"auroc": mean},
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines = [json.dumps(json.loads(line) | {"auroc": mean}) + "\n" for line in lines]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_pages_follow_the_score(undrawn, tmp_path):
    """By AUROC, the worst client is 2, and fedavg gains 0.1 over local."""
    values = np.array([0.8, 0.7, 0.4, 0.9, 0.6, 0.5])
    for name, gain in (("local", 0.0), ("fedavg", 0.1)):
        for seed in (0, 1):
            folder = make_run(tmp_path / name / f"seed-{seed}", optional=False)
            use_auroc(folder, values + gain)
    page = report.write_comparison(tmp_path / "report.html", [tmp_path], reference="local")
    parsed = html_pages.read(page)
    for heading in ("Differences", "Clients", "Runs", "Curves"):
        assert "accuracy" not in parsed.sections[heading], heading
    panels = packed(page)["panels"]
    assert panels["dots"]["score"]["x"]["label"] == "test auroc"
    unit = "mean over clients"
    assert panels["differences"]["local"]["x"]["label"] == f"test auroc minus local's, {unit}"
    assert f"over local, {unit}" in {cell for row in parsed.rows for cell in row}

    run = html_pages.read(tmp_path / "local" / "seed-0" / "report.html")
    assert "Clients are ranked by test auroc; high values are good." in run.text
    clients = run.rows[next(n for n, row in enumerate(run.rows) if row[:1] == ["client"]) + 1 :]
    assert [row[0] for row in clients[:K]] == list("254103")
    assert clients[0] == ["2", "1", "0.4000", "50.0 %", "0.1000", "9", "3", "no: 2, yes: 1"]
    result = run.rows[:2]
    assert result[0] == ["", "round", "auroc", "accuracy", "loss", "train loss"]
    assert result[1] == ["last", "30", "0.6500", "88.0 %", "0.4321", "0.2500"]
    heads, first, *_ = packed(tmp_path / "local" / "seed-0" / "report.html")["csv"]["clients"]
    assert (heads[-2:], first[-2:]) == (["classes_no", "classes_yes"], [2, 1])
    ranking = packed(tmp_path / "local" / "seed-0" / "report.html")["panels"]["ranking"][""]
    assert ranking["y"]["label"] == "test auroc" and not ranking["y"]["percent"]


def client_row(name, score, **classes):
    """A row of by_client.json."""
    return {
        "client": name,
        "num_examples": sum(classes.values()),
        "classes": classes,
        "scores": {"local": [score, 0.02, 5], "fedavg": [None, None, 0]},
        "differences": {"fedavg": 0.05},
    }


def test_a_page_lists_clients_by_name_and_marks_scores_that_rest_on_few_examples(tmp_path):
    make_run(tmp_path / "local" / "seed-0", optional=False)
    rows = [client_row("Lugo <b>", 0.5, no=6, yes=3), client_row("Vigo", 0.75, no=40, yes=10)]
    files.write_json(tmp_path / "by_client.json", rows)
    page = html_pages.read(report.write_comparison(tmp_path / "report.html", [tmp_path]))
    assert ["Lugo <b>*", "9", "no: 6, yes: 3", "50.0 ± 2.0 (5)", "-", "+5.0"] in page.rows
    assert ["Vigo", "50", "no: 40, yes: 10", "75.0 ± 2.0 (5)", "-", "+5.0"] in page.rows
    text = page.sections["By client"]
    assert "The scores of 1 of 2 clients rest on fewer than 10 test examples." in text
    assert "All clients:" not in text


def test_of_many_clients_a_page_lists_the_worst(tmp_path):
    make_run(tmp_path / "local" / "seed-0", optional=False)
    rows = [client_row(f"site {k}", 1 - k / 1000, no=20, yes=20) for k in range(201)]
    files.write_json(tmp_path / "by_client.json", rows)
    (tmp_path / "by_client.csv").write_text("client\n")
    page = html_pages.read(report.write_comparison(tmp_path / "report.html", [tmp_path]))
    names = [row[0] for row in page.rows if row and row[0].startswith("site ")]
    assert names == [f"site {k}" for k in range(200, 150, -1)]
    assert "by_client.csv" in page.links
    text = page.sections["By client"]
    assert "Of 201 clients, these are the 50 with the lowest mean over methods." in text


@pytest.mark.parametrize("content", ["{", "[1]", "7", '[{"client": "a"}]', '{"rows": {"a": 1}}'])
def test_a_damaged_file_of_clients_leaves_its_section_out(tmp_path, content):
    make_run(tmp_path / "local" / "seed-0", optional=False)
    (tmp_path / "by_client.json").write_text(content)
    page = html_pages.read(report.write_comparison(tmp_path / "report.html", [tmp_path]))
    assert "By client" not in page.sections and "Methods" in page.sections


def test_the_library_of_plots_comes_with_its_license_and_version(tmp_path):
    make_run(tmp_path, optional=False)
    text = report.write_page(tmp_path).read_text()
    letters = re.search(r'id="library">([^<]*)<', text)[1]
    library = gzip.decompress(base64.b64decode(letters)).decode()
    assert re.search(r"plotly\.js \(cartesian - minified\) v\d+\.\d+\.\d+", library[:200])
    assert "MIT License" in (rendering.ASSETS / "plotly-LICENSE.txt").read_text()
