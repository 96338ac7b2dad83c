"""The study engine: cells that are shared by processes, kernels that are shared by seeds, changed cells."""

import subprocess
import sys

import numpy as np
import optax
import pytest
from commands import call, one_line

import pfljax as pfl
from pfljax.api import run as runs
from pfljax.api import study
from pfljax.cli import compare
from pfljax.contract.errors import ArgumentError, OutOfMemory
from pfljax.folder import planned

MODEL = pfl.models.MLP(hidden=())
LOCAL = pfl.LocalTraining(optax.sgd, 0.1)
FLAGS = [
    "--dataset=sine",
    "--num_clients=3",
    "--eval_every=2",
    "--rounds=4",
    "--methods=local,fedavg",
]
HOLD = """
import pathlib, sys
from pfljax.folder import locks
with locks.locked([pathlib.Path(sys.argv[1])], print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def clients():
    return pfl.data.digits(
        num_clients=4, partition=pfl.partitions.LabelGroups(groups=2), train_examples=8
    )


@pytest.fixture
def trained(monkeypatch):
    """The numbers of runs in each kernel that is trained."""
    found = []
    start = runs.start
    monkeypatch.setattr(
        runs,
        "start",
        lambda made, *args, **options: (found.append(len(made)), start(made, *args, **options))[1],
    )
    return found


def run_of(clients, seed=0, method=None, **options):
    return pfl.Run(method or pfl.FedAvg(), clients, MODEL, LOCAL, seed=seed, **options)


def accuracies(table):
    return [cell["accuracy"] for row in table.rows for cell in row["seeds"]]


@pytest.mark.slow
def test_seeds_share_a_kernel_by_default_and_score_as_they_do_alone(clients, trained):
    options = {"rounds": 2, "seeds": (0, 1, 2)}
    together = pfl.compare([pfl.FedAvg()], clients, MODEL, LOCAL, **options)
    assert trained == [3]
    alone = pfl.compare([pfl.FedAvg()], clients, MODEL, LOCAL, replicate="no", **options)
    assert trained == [3, 1, 1, 1]
    np.testing.assert_allclose(accuracies(together), accuracies(alone))


@pytest.mark.slow
@pytest.mark.parametrize("pooled", [False, True])
def test_different_numbers_of_test_examples_do_not_keep_seeds_apart(trained, pooled):
    def clients_of(seed):
        drawn = pfl.data.Splits(
            train_examples=6, test_examples=3 + 4 * seed, replacement=pooled, test_fraction=0.4
        )
        return pfl.data.digits(num_clients=4, seed=seed, splits=drawn)

    options = {"rounds": 2, "seeds": (0, 1)}
    together = pfl.compare([pfl.FedAvg()], clients_of, MODEL, LOCAL, **options)
    assert trained == [2]
    alone = pfl.compare([pfl.FedAvg()], clients_of, MODEL, LOCAL, replicate="no", **options)
    np.testing.assert_allclose(accuracies(together), accuracies(alone))


@pytest.mark.long
def test_clients_of_other_shapes_get_a_kernel_of_their_own(clients, trained):
    fewer = pfl.data.digits(
        num_clients=4, partition=pfl.partitions.LabelGroups(groups=2), train_examples=6
    )
    of_seed = {0: clients, 1: fewer, 2: clients}
    common = {"rounds": 1, "seeds": (0, 1, 2)}
    pfl.compare([pfl.FedAvg()], of_seed.__getitem__, MODEL, LOCAL, **common)
    pfl.compare([pfl.FedAvg()], of_seed.__getitem__, MODEL, LOCAL, replicate="vmap", **common)
    pfl.compare(
        [pfl.FedAvg()],
        clients,
        MODEL,
        LOCAL,
        execution=pfl.Execution(client_store="host"),
        **common,
    )
    assert trained == [2, 1, 3, 1, 1, 1]


@pytest.mark.long
def test_what_does_not_fit_together_is_trained_in_parts(clients, trained, monkeypatch):
    counted = runs.start  # counts

    def limited(made, *args, **options):
        trainer = counted(made, *args, **options)
        if len(made) > 2:
            raise OutOfMemory("too large")
        return trainer

    monkeypatch.setattr(runs, "start", limited)
    table = pfl.compare([pfl.FedAvg()], clients, MODEL, LOCAL, rounds=1, seeds=(0, 1, 2))
    assert trained == [3, 1, 2] and len(table.rows[0]["seeds"]) == 3


@pytest.mark.slow
def test_finished_cells_are_only_read(clients, trained, tmp_path):
    options = {"rounds": 2, "seeds": (0, 1), "out": tmp_path}
    first = pfl.compare([pfl.FedAvg()], clients, MODEL, LOCAL, **options)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "fedavg").rglob("*")}
    again = pfl.compare([pfl.FedAvg()], clients, MODEL, LOCAL, **options)
    assert trained == [2] and accuracies(again) == accuracies(first)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "fedavg").rglob("*")} == before
    names = {path.name for path in tmp_path.iterdir()}
    assert planned.read(tmp_path) == {tmp_path / "fedavg" / f"seed-{seed}": 2 for seed in (0, 1)}
    assert names == {
        "fedavg",
        "planned.json",
        "report.html",
        *(f"table.{kind}" for kind in ("md", "csv", "json", "tex", "png")),
        *(f"by_client.{kind}" for kind in ("csv", "json", "tex")),
    }


@pytest.mark.slow
def test_a_changed_cell_is_refused_or_trained_again(clients, trained, tmp_path):
    def compare_with(optimizer, **options):
        return pfl.compare(
            [pfl.FedAvg()],
            clients,
            MODEL,
            pfl.LocalTraining(optimizer),
            rounds=2,
            seeds=(0, 1),
            out=tmp_path,
            **options,
        )

    slow = compare_with(optax.sgd(1e-6))
    with pytest.raises(
        ArgumentError,
        match=r"rerun: .*fedavg/seed-0 was run by another program; what differs: optim",
    ):
        compare_with(optax.sgd(0.5))
    fast = compare_with(optax.sgd(0.5), rerun="changed")
    assert trained == [2, 2] and accuracies(fast) != accuracies(slow)
    assert accuracies(compare_with(optax.sgd(0.5))) == accuracies(fast) and trained == [2, 2]


@pytest.mark.slow
def test_a_cell_that_another_process_trains_is_skipped(clients, tmp_path):
    made = [run_of(clients, seed) for seed in (0, 1)]
    outs = [tmp_path / str(seed) for seed in (0, 1)]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, outs[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "held\n"
        skipped, trained = study.Study(rounds=1).train(made, outs, wait=False)
        assert skipped is None and trained.summary["last"]["round"] == 1
        other.communicate()
    first, second = study.Study(rounds=1).train([run_of(clients, seed) for seed in (0, 1)], outs)
    assert first.summary["seed"] == 0 and second.summary["last"] == trained.summary["last"]


@pytest.mark.long
def test_workers_train_a_comparison(tmp_path):
    out = tmp_path / "out"
    words = [
        sys.executable,
        "-m",
        "pfljax.cli",
        "compare",
        *FLAGS,
        "--seeds=0",
        "--workers=2",
        f"--out={out}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.count("already finished") == 2
    assert sorted(path.name for path in (out / "workers").iterdir()) == ["0.log", "1.log"]


@pytest.mark.long
def test_shares_of_a_comparison_make_the_whole(tmp_path):
    def share(part):
        return call(
            compare.COMMAND, *FLAGS, "--seeds=0", f"--out={tmp_path / 'out'}", f"--cells={part}"
        )

    assert "unfinished runs of other processes: 1" in share("1/2")
    assert (
        not (tmp_path / "out" / "fedavg").exists() and not (tmp_path / "out" / "table.md").exists()
    )
    assert "table: " in share("2/2")
    table = (tmp_path / "out" / "table.tex").read_text()
    assert r"\toprule" in table and "local & " in table and "fedavg & " in table


@pytest.mark.parametrize(
    "flag", ["--cells=3/2", "--cells=0/2", "--cells=half", "--workers=0", "--rerun=all"]
)
def test_mistakes_are_one_line(flag, tmp_path):
    line = one_line(call(compare.COMMAND, *FLAGS, flag, f"--out={tmp_path / 'out'}", code=2))
    assert line.startswith(flag) and "accepted: " in line and not (tmp_path / "out").exists()


def test_a_folder_without_a_finished_cell_is_not_damaged(tmp_path):
    assert study.damage(tmp_path) == "" == study.damage(tmp_path / "none")
