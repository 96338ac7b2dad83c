"""The experiments of pFedMB's paper, and what compare does with all methods, small."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import pfedmb
from pfljax.algorithms import METHODS
from pfljax.training import files

SMALL = ["--rounds=2", "--train_examples=10", "--hidden=4", "--devices=1"]


@pytest.fixture
def call(experiment):
    """Runs a command, small."""
    return lambda name, *flags, code=0: experiment(name, *SMALL, *flags, code=code)


def rows_of(folder):
    return json.loads((folder / "table.json").read_text())


def flags_of(folder, seed=0):
    return files.read_json(folder / f"seed-{seed}" / "config.json")["flags"]


@pytest.mark.slow
def test_table1_has_both_averages_and_tunes_everybody(call, tmp_path):
    printed = call("pfedmb_table1", "--algorithms=local,pfedmb", "--seeds=0", f"--out={tmp_path}")
    assert "paper, CIFAR-10" in printed and "89.5" in printed and "87.3" in printed
    assert [row["algorithm"] for row in rows_of(tmp_path)] == ["local", pfedmb.WITHOUT, "pfedmb"]
    plain, own = (flags_of(tmp_path / "pairs" / name) for name in ("pfedmb-plain-average", "pfedmb"))
    assert (plain["pfedmb.averaging"], own["pfedmb.averaging"]) == ("plain", "alpha")
    assert own["pfedmb.per_layer"] is False and own["fine_tune_epochs"] == 5 and own["num_clients"] == 10
    scored = files.read_json(tmp_path / "pairs" / "local" / "seed-0" / "summary.json")["scored"]
    assert scored == "each client's own model, tuned by each client on its training data"


@pytest.mark.slow
def test_table2_has_two_partitions_and_two_sizes(call, tmp_path):
    printed = call("pfedmb_table2", "--algorithms=fedavg", "--clients=5,20", f"--out={tmp_path}")
    assert "Dirichlet" in printed and "two classes" in printed
    (row,) = rows_of(tmp_path)
    assert row.keys() == {"algorithm", "pathological-5", "pathological-20", "dirichlet-5", "dirichlet-20"}
    few, many = (flags_of(tmp_path / f"dirichlet-{n}" / "fedavg") for n in (5, 20))
    assert (few["participation"], many["participation"], many["dirichlet_alpha"]) == (1.0, 0.2, 0.5)


def test_pairs_find_each_other(experiment, tmp_path):
    """Two clients of a pair have nearly the same alpha, and pairs different branches, at the command's own size."""
    experiment("pfedmb_figure3", "--seeds=0", f"--out={tmp_path}")
    rows = rows_of(tmp_path)
    assert [(row["averaging"], row["seed"]) for row in rows] == [("alpha", 0), ("plain", 0)]
    assert sum(cosine > 0.95 for cosine in rows[0]["cosines"]) >= 4 and len(set(rows[0]["branches"])) >= 4
    assert (tmp_path / "figure3.png").stat().st_size > 5000


def test_pairs_by_hand():
    alpha = np.array([[1.0, 0, 0], [0, 0, 1], [0.6, 0.8, 0], [0, 0, 1]])
    cosines, branches = pfedmb.pairs_of(alpha, np.array([0, 1, 0, 1]))
    np.testing.assert_allclose(cosines, [0.6, 1.0])
    assert branches == [0, 2]


@pytest.mark.parametrize(
    ("name", "flag", "word"),
    [
        ("pfedmb_figure3", "--algorithms=fedavg", "accepted: pfedmb"),
        ("pfedmb_figure3", "--pfedmb.averaging=plain", "both are compared"),
        ("pfedmb_table2", "--partition=iid", "columns have their own"),
        ("pfedmb_table2", "--num_clients=5", "--clients gives it its values"),
        ("pfedmb_table1", "--preset=mnist", "cifar10"),
        ("pfedmb_table1", "--fine_tune_epochs=-1", "fine_tune_epochs"),
        ("compare", "--replicate=all", "vmap"),
    ],
)
def test_mistakes_are_one_line(call, tmp_path, name, flag, word):
    error = call(name, flag, f"--out={tmp_path / 'out'}", code=2)
    (line,) = error.strip().splitlines()
    assert line.startswith("error: ") and flag.split("=")[0].strip("-") in line and word in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_all_methods_go_into_one_table(experiment, tmp_path):
    """On the command's own data and settings, but for few rounds, and with two seeds in one kernel."""
    flags = ["--seeds=0,1", "--rounds=2", "--replicate=vmap", "--devices=1"]
    some = ["local", "fedavg", "fedfomo"]
    experiment("compare", f"--algorithms={','.join(some)}", *flags, f"--out={tmp_path}")
    assert [row["algorithm"] for row in rows_of(tmp_path)] == some
    config = flags_of(tmp_path / "fedavg", seed=1)
    assert (config["num_distributions"], config["train_examples"], config["validation_fraction"]) == (5, 25, 0.2)
    plan = files.read_json(tmp_path / "fedavg" / "seed-0" / "summary.json")["plan"]
    assert any("replicates" in name for name, _ in plan)
    # Another method and another seed: what is finished is kept, also one by one.
    more = [*some, "fedper"]
    flags = ["--seeds=0,1", "--rounds=2", "--devices=1"]
    printed = experiment("compare", f"--algorithms={','.join(more)}", *flags, f"--out={tmp_path}")
    assert printed.count("finished before, kept") == 6 and "4 of 4 methods done" in printed
    assert set(METHODS) > set(more)


def test_a_method_that_diverges_leaves_the_others_their_table(experiment, tmp_path):
    flags = ["--dataset=sine", "--num_clients=3", "--rounds=10", "--eval_every=5", "--seeds=0", "--devices=1"]
    names = "--algorithms=fedavg,fedavgm,local"
    error = experiment("compare", names, "--fedavgm.rate=1e30", *flags, f"--out={tmp_path}", code=1)
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert "fedavgm: " in line and "is not finite" in line and "local" not in line
    assert [row["algorithm"] for row in rows_of(tmp_path)] == ["fedavg", "local"]


def test_a_method_of_one_s_own_is_compared_without_touching_the_package(tmp_path):
    """README's guide, as it is written there."""
    root = Path(__file__).parents[2]
    command = "examples/own_method.py --algorithms=fedavg,fedclip --seeds=0,1 --fedclip.norm=0.3"
    assert f"python {command}\n" in (root / "README.md").read_text()
    assert len((root / "examples" / "own_method.py").read_text().splitlines()) <= 80
    flags = ["--rounds=3", "--devices=1", f"--out={tmp_path}"]
    run = [sys.executable, *command.split(), *flags]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fedavg, own = rows_of(tmp_path)
    assert own["algorithm"] == "fedclip" and own["accuracy_mean"] != fedavg["accuracy_mean"]
    assert own["megabytes_per_round"] == pytest.approx(fedavg["megabytes_per_round"])
    assert files.read_jsonl(tmp_path / "fedclip" / "seed-0" / "metrics.jsonl")[0]["clients_cut"] > 0
    assert flags_of(tmp_path / "fedclip")["fedclip.norm"] == 0.3
