"""Figures of tables, and the text of tables from templates."""

import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from pfljax import report
from pfljax.api.table import Table
from pfljax.contract.errors import ArgumentError
from pfljax.report import comparisons, draw, rendering, table_plots


def row(method, **entries):
    """A row of a table of two runs, whose score is AUROC."""
    return {
        "method": method,
        "score": "auroc",
        "higher_is_better": True,
        "seeds": [{"seed": 0, "auroc": 0.6}, {"seed": 1, "auroc": 0.8}],
        "rounds": [0, 10],
        "curve_mean": [0.5, 0.7],
        "curve_std": [0.0, 0.1],
        **entries,
    }


LOCAL = row("local", reference="local", difference=None, difference_low=None)
FEDAVG = row(
    "fedavg",
    reference="local",
    difference=0.2,
    difference_low=0.1,
    difference_high=0.3,
    megabytes_curve=[0.0, 3.0],
    client_gains=[0.4, -0.1],
)


def labels(figure):
    """The labels of the horizontal and the vertical axis."""
    (axes,) = figure.axes
    return axes.get_xlabel(), axes.get_ylabel()


@pytest.mark.parametrize("width", [3.3, 6.4])
def test_long_labels_stay_within_the_figure(width):
    score = "balanced_accuracy_of_the_wards"
    seeds = [{"seed": 0, score: 0.6}, {"seed": 1, score: 0.8}]
    rows = [each | {"score": score, "seeds": seeds} for each in (LOCAL, FEDAVG)]
    for panel in comparisons.panels_of_rows(rows).values():
        figure = draw.draw([panel], size=(width, 0.75 * width))
        FigureCanvasAgg(figure).draw()
        (axes,) = figure.axes
        right, top = figure.bbox.max
        for label in (axes.xaxis.label, axes.yaxis.label):
            box = label.get_window_extent()
            is_inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= right and box.y1 <= top
            assert is_inside or not label.get_text(), label


def test_a_table_has_a_figure_of_each_of_its_pictures():
    table = Table("title", [LOCAL, FEDAVG], "classification")
    score = "test auroc"
    assert labels(table.plot_scores()) == (f"{score}, last round", "")
    assert labels(table.plot_rounds()) == ("round", score)
    difference = f"{score} minus local's, mean over clients"
    assert labels(table.plot_differences()) == (difference, "")
    gain = f"gain over local, {score}"
    assert labels(table.plot_clients("fedavg")) == ("share of the clients of all runs", gain)
    (axes,) = table.plot_differences().axes
    _, interval, mean = axes.lines
    np.testing.assert_allclose(interval.get_xdata(), [0.1, 0.3])
    np.testing.assert_allclose(mean.get_xdata(), [0.2])


@pytest.mark.parametrize(
    ("plot", "text"),
    [
        ("plot_traffic", "table: has no method that sends models"),
        ("plot_duration", "table: has no simulated times"),
        ("plot_differences", "table: has no intervals of differences; they need reference="),
    ],
)
def test_a_picture_that_a_table_lacks_is_named(plot, text):
    table = Table("title", [row("local")], "classification")
    with pytest.raises(ArgumentError, match=f"^{text}"):
        getattr(table, plot)()
    with pytest.raises(ArgumentError, match=r"^method=local: gains of clients need reference=$"):
        table.plot_clients("local")


def test_former_names_of_figures_say_the_new_ones(tmp_path):
    table = Table("title", [LOCAL], "classification")
    with pytest.warns(FutureWarning, match=r"^Table\.plot is now Table\.plot_comparison$"):
        assert len(table.plot().axes) == 2
    with pytest.warns(FutureWarning, match=r"^Table\.figures is now Table\.save_figures$"):
        paths = table.figures(tmp_path)
    assert {path.name for path in paths} == {
        f"{name}.{suffix}" for name in ("scores", "rounds") for suffix in ("pdf", "png")
    }
    with pytest.warns(FutureWarning, match=r"is now pfljax\.report\.save_figures$"):
        assert report.paper_figures is table_plots.save_figures


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        ([0.5] * 5, [0, 1, -1, 2, -2]),
        ([0.1, 0.5, 0.9], [0, 0, 0]),
        ([0.52, 0.5, 0.6], [1, 0, 0]),
        ([np.nan, 0.5, 0.5], [0, 0, 1]),
    ],
)
def test_points_that_would_hide_each_other_are_stacked(values, levels):
    offsets = comparisons.stacked(np.array(values), 0.03)
    np.testing.assert_allclose(offsets, comparisons.LEVEL * np.array(levels))


def test_more_points_than_levels_stay_in_their_row():
    offsets = comparisons.stacked(np.linspace(0, 1e-3, 40), 0.03)
    assert np.abs(offsets).max() < 0.5 and len(set(offsets.tolist())) == 5


def test_tables_as_text_are_escaped_by_hand():
    heads = ["method", "a_b, %"]
    body = [["x|<b>", "-1.5"]]
    lines = rendering.markdown_table(heads, body).split("\n")
    assert lines == ["| method | a_b, % |", "| --- | ---: |", r"| x\|&lt;b&gt; | -1.5 |"]
    text = rendering.latex_table("50 %\nof {all}", heads, body)
    assert text.split("\n") == [
        "% 50 % of {all}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"method & a\_b, \% \\",
        r"\midrule",
        r"x\textbar{}\textless{}b\textgreater{} & $-1.5$ \\",
        r"\bottomrule",
        r"\end{tabular}",
        "",
    ]


def test_values_of_elements_are_text():
    values = {"a<": 1, "b": [None, math.nan, "c"]}
    assert rendering.displayed(values) == "a&lt; 1, b -, -, c"


def test_curves_mark_the_rounds_in_which_clients_data_change():
    drift = [{"round": 4, "change": "labels"}, {"round": 7, "change": "leave"}]
    panels = comparisons.panels_of_rows([LOCAL | {"drift": drift}, FEDAVG | {"drift": drift}])
    plain = comparisons.panels_of_rows([LOCAL, FEDAVG])
    lines = panels["rounds"].series[len(plain["rounds"].series) :]
    assert [list(line.x) for line in lines] == [[4, 4], [7, 7]]
    assert all(line.y[0] < line.y[1] for line in lines)
