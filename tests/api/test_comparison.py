"""Tables of comparisons: columns, figures, and what a clock adds to them."""

import numpy as np
import optax
import pytest

from pfljax import Clock, FedAvg, Local, LocalTraining, Run, compare, data
from pfljax.api.comparison import latex, times_text, times_to
from pfljax.contract.errors import ArgumentError
from pfljax.folder import files
from pfljax.models import MLP

LISTED = "clients helped / hurt, %"


def test_times_to_a_target_by_hand():
    """The time of each run's first evaluation at the target or beyond."""
    curves, clock = np.array([[0.1, 0.7, 0.6], [0.2, 0.3, 0.4]]), np.array([[0.0, 3.0, 8.0], [0.0, 4.0, 9.0]])
    assert times_to(0.6, curves, clock, 1) == [3.0, None]
    assert times_to(0.15, curves, clock, -1) == [0.0, None]
    assert times_text([3.0, None]) == "3, never in 1"
    assert times_text([2.0, 4.0]) == "3 ± 1.414 (2)"
    assert times_text([None, None]) == "-, never in 2"


def test_a_clock_adds_columns():
    clients = data.digits(num_clients=4, train_examples=10, test_examples=4)
    heads = []
    for clock in (Clock(), None):
        table = compare([FedAvg()], clients, MLP(hidden=()), clock=clock, target=0.0, rounds=4, eval_every=2)
        found, body = table.columns()
        assert [len(line) for line in body] == [len(found)]
        heads.append({head for head in found if "simulated" in head})
    assert heads == [{"simulated s", "simulated s to 0.0 %"}, set()]


def test_a_reference_says_which_clients_are_helped_and_a_table_makes_figures_for_a_paper(tmp_path):
    """Accuracies by client and run, paired by hand; the files are those of the table's contents."""
    clients = data.digits(num_clients=4, train_examples=10, test_examples=10)
    options = {"rounds": 4, "eval_every": 1, "seeds": (0, 1), "out": tmp_path / "runs"}
    table = compare([Local(), FedAvg()], clients, MLP(hidden=()), reference="local", **options)
    last = lambda name: np.stack([read_accuracies(tmp_path / "runs" / name / f"seed-{seed}") for seed in (0, 1)])
    gains = last("fedavg") - last("local")
    reference, row = table.rows
    assert "clients_helped" not in reference and row["clients_compared"] == 8
    assert (row["clients_helped"], row["clients_hurt"]) == ((gains > 1e-9).mean(), (gains < -1e-9).mean())
    np.testing.assert_allclose(row["client_gains"], np.sort(gains.ravel())[::-1])
    heads, (_, cells) = table.columns()
    shares = f"{100 * row['clients_helped']:.0f} / {100 * row['clients_hurt']:.0f}"
    assert cells[heads.index("clients helped / hurt, %")] == shares and "best round by validation, %" not in heads
    names = {"scores", "rounds", "megabytes", "differences", "clients-fedavg"}
    paths = table.figures(tmp_path / "paper")
    assert {path.name for path in paths} == {f"{name}.{kind}" for name in names for kind in ("pdf", "png")}
    assert all(path.read_bytes().startswith((b"%PDF", b"\x89PNG")) for path in paths)
    assert table.to_latex() == (tmp_path / "runs" / "table.tex").read_text()
    lines = table.to_latex(columns=["method", "rank", "test accuracy, %"]).splitlines()
    assert lines[1] == r"\begin{tabular}{lrr}" and lines[3] == r"method & rank & test accuracy, \% \\"
    assert lines[6] == " & ".join(["fedavg", cells[heads.index("rank")], cells[1].replace("±", r"$\pm$")]) + r" \\"
    for columns, kept in (
        (None, [0, 1, *map(heads.index, ["95 % interval", "over local", LISTED])]),
        (heads, range(len(heads))),
    ):
        found = [cell.strip(" \\") for cell in table.to_latex(columns).splitlines()[3].split(" & ")]
        assert found == [heads[place].replace("%", r"\%") for place in kept]
    with pytest.raises(ArgumentError, match=r"columns=ranks: unknown; did you mean rank\?"):
        table.to_latex(columns=["ranks"])
    with pytest.raises(ArgumentError, match="width=0"):
        table.figures(tmp_path, width=0)


def test_negative_numbers_have_a_minus_in_latex_and_names_keep_their_hyphens():
    """Only a sign of a number is one; "-" alone says that there is none."""
    body = [["fed-2-x", "-5.6 [-7, +2.0]", "-", "-3 ± 1"]]
    line = latex("title", ["method", "over x", "tuned to", "accuracy"], body).splitlines()[5]
    assert line == r"fed-2-x & $-5.6$ [$-7$, +2.0] & - & $-3$ $\pm$ 1 \\"


def read_accuracies(folder):
    """The accuracies of clients in a run's last round."""
    return files.read_npz(folder / "results.npz")["accuracy_test"][-1]


def test_the_best_round_is_shown_if_validation_chose_it_and_is_never_the_first():
    """Nothing is learned at rate 0: all rounds have the score of the initial models, and round 1 is the best."""
    clients = data.digits(num_clients=4, train_examples=10, test_examples=4, validation_fraction=0.2)
    local = LocalTraining(optax.sgd(0.0))
    (row,) = (table := compare([FedAvg()], clients, MLP(hidden=()), local, rounds=2, eval_every=1)).rows
    assert "best round by validation, %" in table.columns()[0] and row["best_mean"] == row["accuracy_mean"]
    result = Run(FedAvg(), clients, MLP(hidden=()), local).train(rounds=2, eval_every=1)
    assert result.summary["best"]["round"] == 1 and result.summary["best"]["selected_by"] == "validation_accuracy"
