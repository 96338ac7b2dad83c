"""Tables of comparisons: columns, figures, and what a clock adds to them."""

import dataclasses

import numpy as np
import pytest

from pfljax.api.study import Cell
from pfljax.api.table import latex, method_row, times_text, times_to
from pfljax.contract.errors import ArgumentError
from pfljax.folder import files
from pfljax.report import table_plots
from pfljax.training.scoring import best_row

pytestmark = pytest.mark.xdist_group("runs")

LISTED = "clients helped / hurt, %"


def test_times_to_a_target_by_hand():
    """The time of each run's first evaluation at the target or beyond."""
    curves = np.array([[0.1, 0.7, 0.6], [0.2, 0.3, 0.4]])
    clock = np.array([[0.0, 3.0, 8.0], [0.0, 4.0, 9.0]])
    assert times_to(0.6, curves, clock, 1) == [3.0, None]
    assert times_to(0.15, curves, clock, -1) == [0.0, None]
    assert times_text([3.0, None]) == "3, never in 1"
    assert times_text([2.0, 4.0]) == "3 ± 1.414 (2)"
    assert times_text([None, None]) == "-, never in 2"


def without(table, **entries):
    """The table as if its rows had these entries."""
    return dataclasses.replace(table, rows=[row | entries for row in table.rows])


def test_a_clock_adds_columns(finished_comparison):
    timed = finished_comparison.table
    untimed = without(timed, simulated_mean=np.nan, seconds_to_target=None)
    for table, columns in ((timed, ["simulated s", "simulated s to 0.0 %"]), (untimed, [])):
        heads, body = table.columns()
        assert [head for head in heads if "simulated" in head] == columns
        assert {len(line) for line in body} == {len(heads)}

    heads, body = timed.columns()
    seconds = [f"{row['simulated_mean']:.4g}" for row in timed.rows]
    assert [line[heads.index("simulated s")] for line in body] == seconds
    assert [line[heads.index("simulated s to 0.0 %")] for line in body] == ["0 ± 0 (2)"] * 2


def test_rows_without_a_clock_have_no_times(finished_comparison):
    """Runs without a clock have no "simulated_seconds" in their histories."""
    folders = [finished_comparison.out / "fedavg" / f"seed-{seed}" for seed in (0, 1)]
    cells = [Cell.read(folder) for folder in folders]
    row = method_row("fedavg", cells, [(0, None), (1, None)], target=0.0)
    curves = [[each["accuracy"] for each in cell.rows] for cell in cells]
    np.testing.assert_allclose(row["curve_mean"], np.mean(curves, axis=0))
    simulated = [cell.rows[-1]["simulated_seconds"] for cell in cells]
    assert row["simulated_mean"] == pytest.approx(np.mean(simulated)) and row[
        "seconds_to_target"
    ] == [0, 0]

    for cell in cells:
        for entries in (*cell.rows, cell.summary["last"], cell.summary["best"]):
            entries.pop("simulated_seconds", None)
    row = method_row("fedavg", cells, [(0, None), (1, None)], target=0.0)
    assert np.isnan(row["simulated_mean"]) and row["seconds_to_target"] is row["clock_mean"] is None


def test_a_reference_says_which_clients_are_helped(finished_comparison):
    """Accuracies by client and run, paired by hand."""
    table, out = finished_comparison

    def last(name):
        return np.stack([read_accuracies(out / name / f"seed-{seed}") for seed in (0, 1)])

    gains = last("fedavg") - last("local")
    reference, row = table.rows
    assert "clients_helped" not in reference and row["clients_compared"] == 8
    assert (row["clients_helped"], row["clients_hurt"]) == (
        (gains > 1e-9).mean(),
        (gains < -1e-9).mean(),
    )
    np.testing.assert_allclose(row["client_gains"], np.sort(gains.ravel())[::-1])

    heads, (_, cells) = table.columns()
    shares = f"{100 * row['clients_helped']:.0f} / {100 * row['clients_hurt']:.0f}"
    assert cells[heads.index(LISTED)] == shares


def test_a_table_makes_figures_for_a_paper(finished_comparison, tmp_path, monkeypatch):
    sizes = {}
    monkeypatch.setattr(
        table_plots, "save", lambda figure, path: sizes.update({path: figure.get_figwidth()})
    )
    table = finished_comparison.table
    names = {"scores", "rounds", "megabytes", "simulated_seconds", "differences", "clients-fedavg"}
    paths = table.save_figures(tmp_path / "paper", width=5.0)
    assert {path.name for path in paths} == {
        f"{name}.{kind}" for name in names for kind in ("pdf", "png")
    }
    assert sizes == dict.fromkeys(paths, 5.0) and {path.parent for path in paths} == {
        tmp_path / "paper"
    }
    with pytest.raises(ArgumentError, match="width=0"):
        table.save_figures(tmp_path, width=0)


def test_a_table_in_latex_is_that_of_its_contents(finished_comparison):
    table, out = finished_comparison
    heads, (_, cells) = table.columns()
    assert table.to_latex() == (out / "table.tex").read_text()
    lines = table.to_latex(columns=["method", "rank", "test accuracy, %"]).splitlines()
    assert (
        lines[1] == r"\begin{tabular}{lrr}" and lines[3] == r"method & rank & test accuracy, \% \\"
    )
    assert (
        lines[6]
        == " & ".join(["fedavg", cells[heads.index("rank")], cells[1].replace("±", r"$\pm$")])
        + r" \\"
    )
    for columns, kept in (
        (None, [0, 1, *map(heads.index, ["95 % interval", "over local", LISTED])]),
        (heads, range(len(heads))),
    ):
        found = [cell.strip(" \\") for cell in table.to_latex(columns).splitlines()[3].split(" & ")]
        assert found == [heads[place].replace("%", r"\%") for place in kept]
    with pytest.raises(ArgumentError, match=r"columns=ranks: unknown; did you mean rank\?"):
        table.to_latex(columns=["ranks"])


def test_negative_numbers_have_a_minus_in_latex_and_names_keep_their_hyphens():
    """Only a sign of a number is one; "-" alone says that there is none."""
    body = [["fed-2-x", "-5.6 [-7, +2.0]", "-", "-3 ± 1"]]
    line = latex("title", ["method", "over x", "tuned to", "accuracy"], body).splitlines()[5]
    assert line == r"fed-2-x & $-5.6$ [$-7$, +2.0] & - & $-3$ $\pm$ 1 \\"


def test_a_table_of_accuracies_says_that_high_ones_are_better(finished_comparison):
    table, out = finished_comparison
    assert (table.score, table.higher_is_better) == ("accuracy", True)
    assert (
        "lower is better"
        not in str(table) + (out / "table.md").read_text() + (out / "report.html").read_text()
    )
    for row in files.read_json(out / "table.json"):
        assert (row["score"], row["higher_is_better"]) == ("accuracy", True)
        summary = files.read_json(out / row["method"] / "seed-0" / "summary.json")
        assert (summary["score"], summary["higher_is_better"]) == ("accuracy", True)


def read_accuracies(folder):
    """The accuracies of clients in a run's last round."""
    return files.read_npz(folder / "results.npz")["accuracy_test"][-1]


def test_the_best_round_is_shown_if_validation_chose_it(finished_comparison):
    validated = finished_comparison.table
    unvalidated = without(validated, best_mean=np.nan)
    heads, body = validated.columns()
    column = heads.index("best round by validation, %")
    assert [line[column] for line in body] == [
        f"{100 * row['best_mean']:.1f}" for row in validated.rows
    ]
    assert "best round by validation, %" not in unvalidated.columns()[0]

    for row in validated.rows:
        cells = [
            Cell.read(finished_comparison.out / row["method"] / f"seed-{seed}") for seed in (0, 1)
        ]
        assert {cell.summary["best"]["selected_by"] for cell in cells} == {"validation_accuracy"}
        assert row["best_mean"] == pytest.approx(
            np.mean([cell.summary["best"]["accuracy"] for cell in cells])
        )
        last = [entry["validation_accuracy"] for entry in cells[0].rows[1:]]
        assert cells[0].summary["best"]["round"] == 1 + np.argmax(last)


def scored(number, train_loss, **scores):
    """A row of the history."""
    return {"round": number, "train_loss": train_loss, **scores}


def test_the_best_round_is_never_that_of_the_initial_models():
    rows = [scored(0, 0.1), scored(1, 0.5), scored(2, 0.4), scored(3, 0.4), scored(4, np.nan)]
    assert best_row(rows) == scored(2, 0.4) | {"selected_by": "train_loss"}
    losses = [scored(each["round"], 0.3, validation_loss=each["train_loss"]) for each in rows]
    assert best_row(losses)["round"] == 2 and best_row(losses)["selected_by"] == "validation_loss"
    validated = [each | {"validation_accuracy": 1 - each["validation_loss"]} for each in losses[:4]]
    validated[3]["validation_loss"] = 0.0
    assert (
        best_row(validated)["round"] == 2
        and best_row(validated)["selected_by"] == "validation_accuracy"
    )
    assert best_row(rows[:1])["round"] == 0
