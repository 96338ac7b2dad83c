"""The experiments of pFedMB's paper, small."""

import commands
import numpy as np
import pytest
from commands import flags_of, refused, rows_of

from experiments.pfedmb import figure3, paper, table1, table2
from pfljax.cli import compare
from pfljax.folder import files

SMALL = ["--rounds=2", "--train_examples=10", "--hidden=4", "--devices=1"]


def call(module, *flags, code=0):
    """Runs a command, small; what it printed."""
    return commands.call(module.COMMAND, *SMALL, *flags, code=code)


@pytest.mark.long
def test_table1_has_both_averages_and_tunes_everybody(tmp_path):
    printed = call(table1, "--methods=local,pfedmb", "--seeds=0", f"--out={tmp_path}")
    assert "paper, CIFAR-10" in printed and "89.5" in printed and "87.3" in printed
    assert [row["method"] for row in rows_of(tmp_path)] == ["local", paper.WITHOUT, "pfedmb"]
    plain, own = (
        flags_of(tmp_path / "pairs" / name) for name in ("pfedmb-plain-average", "pfedmb")
    )
    assert (plain["pfedmb.averaging"], own["pfedmb.averaging"]) == ("plain", "alpha")
    assert (
        own["pfedmb.per_layer"] is False
        and own["fine_tune_epochs"] == 5
        and own["num_clients"] == 10
    )
    scored = files.read_json(tmp_path / "pairs" / "local" / "seed-0" / "summary.json")["scored"]
    assert scored == "each client's own model, fine-tuned by each client on its training data"


@pytest.mark.long
def test_table2_has_two_partitions_and_two_sizes(tmp_path):
    printed = call(table2, "--methods=fedavg", "--clients=5,20", f"--out={tmp_path}")
    assert "Dirichlet" in printed and "two classes" in printed
    (row,) = rows_of(tmp_path)
    assert row.keys() == {
        "method",
        "pathological-5",
        "pathological-20",
        "dirichlet-5",
        "dirichlet-20",
    }
    few, many = (flags_of(tmp_path / f"dirichlet-{n}" / "fedavg") for n in (5, 20))
    assert (few["participation"], many["participation"], many["partition_alpha"]) == (1.0, 0.2, 0.5)


@pytest.mark.slow
def test_pairs_find_each_other(tmp_path):
    """Two clients of a pair have nearly the same alpha, and pairs different branches, at the command's own size."""
    commands.call(figure3.COMMAND, "--seeds=0", f"--out={tmp_path}")
    rows = rows_of(tmp_path)
    assert [(row["averaging"], row["seed"]) for row in rows] == [("alpha", 0), ("plain", 0)]
    assert (
        sum(cosine > 0.95 for cosine in rows[0]["cosines"]) >= 4
        and len(set(rows[0]["branches"])) >= 4
    )
    assert (tmp_path / "figure3.png").stat().st_size > 5000


def test_pairs_by_hand():
    alpha = np.array([[1.0, 0, 0], [0, 0, 1], [0.6, 0.8, 0], [0, 0, 1]])
    cosines, branches = paper.pairs_of(alpha, np.array([0, 1, 0, 1]))
    np.testing.assert_allclose(cosines, [0.6, 1.0])
    assert branches == [0, 2]


@pytest.mark.parametrize(
    ("module", "flag", "word"),
    [
        (figure3, "--methods=fedavg", "accepted: pfedmb"),
        (figure3, "--pfedmb.averaging=plain", "both are compared"),
        (table2, "--partition=iid", "columns set it"),
        (table2, "--num_clients=5", "--clients sets its values"),
        (table1, "--preset=mnist", "cifar10"),
        (table1, "--fine_tune_epochs=-1", "fine_tune_epochs"),
        (compare, "--replicate=all", "vmap"),
    ],
)
def test_mistakes_are_one_line(tmp_path, module, flag, word):
    assert word in refused(module.COMMAND, tmp_path / "out", *SMALL, flag)
