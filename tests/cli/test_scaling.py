"""The scaling study: one row a cell, nothing measured twice, and nothing allocated that does not fit."""

import csv
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import commands
import jax
import numpy as np
import pytest

from pfljax.cli import scaling
from pfljax.folder import locks

ROOT = Path(__file__).parents[2]
SMALL = ["--hidden=4", "--shape=4,4,1", "--train_examples=6", "--rounds=2"]
OPTIONAL = {
    "reason",
    "seconds_again",
    "peak_device_bytes",
    "peak_resident_bytes",
    "projected_hours",
}  # null: nothing to say


def call(out, *flags, code=0):
    """Runs the command, small; what it printed."""
    return commands.call(scaling.COMMAND, *SMALL, *flags, f"--out={out}", code=code)


def read(out):
    """scaling.json, after seeing that scaling.csv says the same."""
    study = json.loads((out / "scaling.json").read_text())
    with open(out / "scaling.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {k: "" if v is None else str(v) for k, v in row.items()} for row in study["cells"]
    ]
    return study


def check_row(row):
    """What a measured row of FedAvg must say: everyone downloads the one model, and sends it and its weight."""
    parameters = 16 * 4 + 4 + 4 * 10 + 10  # 16 inputs, 4 hidden units, 10 classes
    clients = row["num_clients"]
    assert row["status"] == "measured"
    assert row["parameters"] == parameters and row["clients_per_round"] == clients
    assert (row["bytes_down"], row["bytes_up"]) == (
        4 * parameters * clients,
        4 * (parameters + 1) * clients,
    )
    assert row["fastest_round"] <= row["seconds_per_round"] <= row["slowest_round"]
    assert row["client_updates_per_second"] == pytest.approx(clients / row["seconds_per_round"])


def test_a_cell_is_measured_once(tmp_path, monkeypatch):
    # other tests need what they have compiled
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    flags = ("--methods=fedavg", "--num_clients=4", "--devices=1", "--plan=map")
    assert "already finished" not in call(tmp_path, *flags)
    (row,) = read(tmp_path)["cells"]
    assert (row["plan"], row["rounds"]) == ("map", 2)
    check_row(row)
    assert "already finished, read from" in call(tmp_path, *flags)
    assert read(tmp_path)["cells"] == [row]
    (path,) = tmp_path.glob("cells/*/cell.json")
    # as earlier versions named it
    path.write_text(path.read_text().replace('"method"', '"algorithm"'))
    assert "already finished, read from" in call(tmp_path, *flags)
    assert read(tmp_path)["cells"] == [row]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of two sizes on two devices."""
    out = tmp_path_factory.mktemp("scaling")
    call(out, "--methods=fedavg", "--num_clients=4,6", "--devices=2", "--plan=chunk", "--chunk=2")
    return out


@pytest.mark.slow
def test_each_cell_has_a_row_of_finite_figures(finished):
    study = read(finished)
    rows = study["cells"]
    assert [(row["num_clients"], row["devices"]) for row in rows] == [(4, 2), (6, 2)]
    for row in rows:
        assert row["plan"] == "chunk-2" and row["chunk"] == 2
        values = [
            value
            for name, value in row.items()
            if name not in OPTIONAL and not isinstance(value, str)
        ]
        assert all(math.isfinite(value) for value in values)
        check_row(row)
    assert list(study["slopes"]) == ["fedavg"]
    assert study["data"] == "random pixels 4x4x1" and study["settings"]["--train_examples"] == 6
    assert (finished / "scaling.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_second_run_measures_only_what_is_missing(finished, tmp_path):
    out = tmp_path / "more"
    shutil.copytree(finished, out)
    before = read(out)["cells"]
    flags = ["--methods=fedavg", "--num_clients=4", "--devices=2", "--plan=chunk", "--chunk=2"]
    printed = call(out, *flags, "--cohort=0,2,5", "--total_rounds=7")
    assert printed.count("already finished, read from") == 1
    assert "K=4, S=5: skipped, the cohort is larger than K" in printed
    assert "K=4: 7 rounds, 28 client updates, would take" in printed
    rows = read(out)["cells"]
    assert rows[0] == before[0] | {"projected_hours": before[0]["seconds_per_round"] * 7 / 3600}
    assert [(row["num_clients"], row["clients_per_round"]) for row in rows] == [
        (4, 4),
        (4, 2),
        (6, 6),
    ]


@pytest.mark.long
def test_other_settings_are_refused_and_named(finished):
    before = (finished / "scaling.json").read_text()
    for flag, change in (
        ("--train_examples=7", "--train_examples was 6 and is 7"),
        ("--epochs=2", "was 1"),
    ):
        error = call(finished, "--num_clients=4", flag, code=2)
        (line,) = error.strip().splitlines()
        assert line.startswith("error: --rerun: ") and "accepted: changed" in line
        assert change in line and flag.split("=")[0] in line and str(finished) in line
    assert (finished / "scaling.json").read_text() == before


METHOD = """
import dataclasses
import pfljax as pfl

@pfl.author.method(keeps="its model", travels="nothing")
@dataclasses.dataclass(frozen=True)
class Alone:
    \"\"\"Alone: clients train by themselves.\"\"\"

    def build(self, problem):
        built = pfl.Local().build(problem)

        def client_update(context, models, row, data):
            output = built.client_update(context, models, row, data)
            return output._replace(told=output.told._replace(loss=SCALE * output.told.loss))

        return dataclasses.replace(built, client_update=client_update)
"""


@pytest.mark.long
def test_an_edited_method_is_not_taken_for_the_measured_one(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(METHOD + "SCALE = 1.0")
    out = tmp_path / "out"
    flags = [f"--methods={path}:Alone", "--num_clients=4", "--devices=1"]
    call(out, *flags)
    path.write_text(METHOD + "SCALE = 1.0  # as before")
    assert "already finished, read from" in call(out, *flags)
    path.write_text(METHOD + "SCALE = 2.0")
    (line,) = call(out, *flags, code=2).strip().splitlines()
    assert (
        line.startswith("error: --rerun: ")
        and "client_update of Alone" in line
        and str(out) in line
    )
    assert "already finished" not in call(out, *flags, "--rerun=changed")


@pytest.mark.slow
def test_a_cell_that_another_process_measures_is_skipped(tmp_path):
    flags = ["--methods=local", "--num_clients=4,5", "--devices=1"]
    with locks.locked([tmp_path / "cells" / "local-5-0-auto-1"], print):
        found = []
        owner = threading.Thread(target=lambda: found.append(call(tmp_path, *flags)))
        owner.start()
        owner.join()
    assert "local, K=5, S=5, auto, 1 device(s): another process is measuring it" in found[0]
    assert [row["num_clients"] for row in read(tmp_path)["cells"]] == [4]
    call(tmp_path, *flags)
    assert [row["num_clients"] for row in read(tmp_path)["cells"]] == [4, 5]


@pytest.mark.long
def test_a_damaged_cell_is_measured_again(tmp_path):
    flags = ["--methods=local", "--num_clients=4", "--devices=1"]
    call(tmp_path, *flags)
    cell = tmp_path / "cells" / "local-4-0-auto-1"
    assert scaling.read(cell)
    for torn in ("", "[1", "3", '{"row": {}}', '{"row": 3, "settings": {}}'):
        (cell / "cell.json").write_text(torn)
        assert scaling.read(cell) == {}
    assert "already finished" not in call(tmp_path, *flags)
    assert "already finished" in call(tmp_path, *flags)


@pytest.mark.long
def test_what_is_finished_outlives_an_interruption(tmp_path):
    flags = ["--methods=fedavg", "--num_clients=4,5,6,7,8", "--devices=1"]
    # a background job ignores it
    accept = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"import runpy, signal; {accept}; runpy.run_module('pfljax.cli', run_name='__main__')"
    command = [sys.executable, "-c", start, "scaling", *SMALL, *flags, f"--out={tmp_path}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "scaling.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, error = process.communicate(timeout=120)
    # Before it, Python may tell of a callback of a weak reference in which the signal arrived.
    assert (process.returncode, error.splitlines()[-1]) == (130, "error: interrupted"), printed
    assert "the same command continues" in printed
    rows = read(tmp_path)["cells"]
    assert 1 <= len(rows) < 5 and all(row["status"] == "measured" for row in rows)
    printed = call(tmp_path, *flags)
    assert printed.count("already finished, read from") == len(rows)
    after = read(tmp_path)["cells"]
    assert after[: len(rows)] == rows and [row["num_clients"] for row in after] == [4, 5, 6, 7, 8]


@pytest.mark.slow
def test_what_does_not_fit_is_skipped_before_it_is_made(tmp_path):
    huge = 10**10  # whose data alone are terabytes
    flags = ["--methods=local", "--devices=1"]
    printed = call(tmp_path, *flags, f"--num_clients=4,{huge}")
    assert "skipped: out of memory: data on the host: " in printed and "TiB, but only " in printed
    measured, skipped = read(tmp_path)["cells"]
    assert (measured["status"], skipped["status"]) == ("measured", "skipped")
    assert skipped["reason"] in printed and skipped["seconds_per_round"] is None
    error = call(tmp_path / "none", *flags, f"--num_clients={huge}", code=2)
    (line,) = error.strip().splitlines()
    assert line.startswith("error: --num_clients: no cell can be measured")
    assert [row["status"] for row in read(tmp_path / "none")["cells"]] == ["skipped"]
    # Small data, but of each pair of clients something is remembered.
    call(
        tmp_path / "pairs",
        "--federico.candidates=0",
        "--methods=federico",
        "--num_clients=3000000",
        "--train_examples=1",
        code=2,
    )
    (skipped,) = read(tmp_path / "pairs")["cells"]
    assert "state and data on a device: needs " in skipped["reason"]


@pytest.mark.long
def test_methods_that_validate_and_files_of_one_s_own(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "images.npz"
    is_test = np.arange(65) >= 35
    np.savez(path, x=rng.random((65, 5, 4, 1)), y=rng.integers(3, size=65), is_test=is_test)
    out = tmp_path / "out"

    def on_file(*flags, code=0):
        own = [
            "--train_examples=5",
            "--rounds=2",
            "--hidden=2",
            "--devices=1",
            f"--data_file={path}",
            f"--out={out}",
        ]
        return commands.call(scaling.COMMAND, *own, *flags, code=code)

    # 35 are for training: five of each client, and one to validate.
    printed = on_file("--methods=fedfomo", "--num_clients=5,6")
    assert (
        "K=6, S=6, auto, 1 device(s): skipped: the file has 35 training examples, but 6 x 6 are needed"
        in printed
    )
    assert [row["status"] for row in read(out)["cells"]] == ["measured", "skipped"]
    assert read(out)["data"] == "images.npz, examples of 5x4x1"
    error = on_file("--shape=3,3,1", code=2)
    assert error.strip() == "error: --shape: does not apply here: --data_file determines it"


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--plan=vmap,loop", "accepted: auto, vmap, map, chunk"),
        ("--devices=1,x", "whole numbers of 0 to 1024"),
        ("--cohort=2000", "accepted: at most --num_clients"),
        ("--methods=fedsgd9", "unknown method"),
    ],
)
def test_mistakes_are_one_line(tmp_path, flag, word):
    assert word in commands.refused(scaling.COMMAND, tmp_path / "out", *SMALL, flag)


def test_another_s_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "contains something other than a scaling study" in call(tmp_path, code=2)
    assert not list(tmp_path.glob("scaling.*"))


@pytest.mark.long
def test_pfl_research_s_workload_is_that_of_its_benchmark(tmp_path):
    """1,000 clients of 50 images, 50 a round, batches of 10, 75,000 updates; here fewer clients, which wins."""
    flags = [
        "--preset=pfl_research_cifar10",
        "--num_clients=20",
        "--cohort=1",
        "--rounds=1",
        "--devices=1",
    ]
    printed = commands.call(scaling.COMMAND, *flags, f"--out={tmp_path}")
    assert "on random pixels 32x32x3: time and memory are realistic, accuracy is not" in printed
    study = read(tmp_path)
    (row,) = study["cells"]
    assert (row["method"], row["num_clients"], row["clients_per_round"]) == ("fedavg", 20, 1)
    assert row["parameters"] == 1_626_442 and row["bytes_down"] == 4 * 1_626_442
    assert row["projected_hours"] == pytest.approx(row["seconds_per_round"] * 1500 / 3600)
    used = study["config"]["flags"]
    assert [used[name] for name in ("train_examples", "batch_size", "epochs", "rounds")] == [
        50,
        10,
        1,
        1,
    ]
    assert [used[name] for name in ("optimizer", "learning_rate", "shape")] == [
        "sgd",
        0.1,
        ["32", "32", "3"],
    ]
    preset = (scaling.WORKLOADS / "pfl_research_cifar10.flags").read_text().splitlines()
    assert {"--num_clients=1000", "--cohort=50", "--total_rounds=1500"} <= set(
        preset
    ) and 50 * 1500 == 75_000


@pytest.mark.long
def test_rounds_are_measured_under_other_stores(tmp_path):
    call(tmp_path, "--methods=local", "--num_clients=12", "--cohort=4", "--client_store=disk")
    (row,) = read(tmp_path)["cells"]
    assert row["seconds_per_round"] > 0 and row["disk_bytes"] > 0
