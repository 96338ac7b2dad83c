"""Two processes of two CPU devices each, over loopback, as a user starts them on two hosts."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import call

from pfljax.cli import train
from pfljax.folder import files

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num_clients=16",
    "--participation=0.5",
    "--hidden=16",
    "--eval_every=5",
    "--checkpoint_every=5",
)


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts `train` on both, or with flags of their own, and ends what is left of them."""
    environment = os.environ | {"PFLJAX_CACHE": str(tmp_path_factory.mktemp("cache"))}
    started = []

    def run(out, *flags, own=((), ())):
        port = free_port()
        pair = [
            subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "pfljax.cli",
                        "train",
                        f"--out={out}",
                        "--devices=2",
                        *FLAGS,
                        *flags,
                    ),
                    *(
                        f"--coordinator=localhost:{port}",
                        "--num_processes=2",
                        f"--process_id={number}",
                        *own[number],
                    ),
                ],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        started.extend(pair)
        return pair

    yield run
    for each in started:
        each.kill()
        each.communicate()


def dense(arrays):
    """With weights (T, K, N) of all models in place of the J highest, whose order turns where weights are equal."""
    if "weights" in arrays:
        index = arrays.pop("index")
        weights = arrays.pop("weights")
        rounds, clients, _ = np.indices(index.shape)
        arrays["dense"] = np.zeros((*index.shape[:2], index.max() + 1))
        np.add.at(arrays["dense"], (rounds, clients, index), weights)
    return arrays


SCAFFOLD = ("--client_store=host", "--method=scaffold", "--unseen=0.25", "--eval_clients=5")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--exchange=ring",), marks=pytest.mark.long),
        pytest.param(("--client_store=disk",), marks=pytest.mark.long),
        pytest.param(SCAFFOLD, marks=pytest.mark.slow),
    ],
)
def test_two_processes_give_the_figures_of_one(start, tmp_path, flags):
    pair = start(tmp_path / "two", "--rounds=10", *flags)
    said = [process.communicate(timeout=240) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    assert "report" in said[0][0] and said[1][0] == ""  # the first alone speaks
    # every store has the same figures
    alone = [flag for flag in flags if not flag.startswith("--client_store")]
    call(train.COMMAND, f"--out={tmp_path / 'one'}", "--devices=1", "--rounds=10", *FLAGS, *alone)
    for name in ("results.npz", "collaboration.npz"):
        one, two = (dense(files.read_npz(tmp_path / run / name)) for run in ("one", "two"))
        assert one.keys() == two.keys()
        for key in one:
            if one[key].dtype.kind == "f":
                np.testing.assert_allclose(two[key], one[key], rtol=1e-5, atol=1e-5)
            else:
                np.testing.assert_array_equal(two[key], one[key])
    one, two = (files.read_json(tmp_path / run / "summary.json") for run in ("one", "two"))
    assert one["last"]["bytes_down"] == two["last"]["bytes_down"]
    assert one["earth_movers_distance"] == pytest.approx(two["earth_movers_distance"])
    assert (one["unseen"] or {}).get("loss") == pytest.approx(
        (two["unseen"] or {}).get("loss"), abs=1e-5
    )
    digests = [
        files.read_json(tmp_path / run / "config.json")["data"]["digest"] for run in ("one", "two")
    ]
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "store"), [(0, "device"), pytest.param(1, "disk", marks=pytest.mark.long)]
)
def test_when_one_is_killed_the_other_says_so_and_one_process_goes_on(
    start, tmp_path, victim, store
):
    out = tmp_path / "run"
    store = f"--client_store={store}"
    pair = start(out, "--rounds=100000", store)
    deadline = time.monotonic() + 200
    while not list(out.glob("checkpoints/[0-9]*[0-9]")):
        assert time.monotonic() < deadline and all(process.poll() is None for process in pair)
        time.sleep(0.2)
    pair[victim].send_signal(signal.SIGKILL)
    said = pair[1 - victim].communicate(timeout=60)[1]
    assert pair[1 - victim].returncode == 1
    assert (
        len(said.splitlines()) == 1 and "another process has ended" in said and "--resume" in said
    )
    rounds = 5 + max(int(path.name) for path in out.glob("checkpoints/*") if path.name.isdigit())
    done = call(
        train.COMMAND,
        f"--out={out}",
        "--devices=1",
        f"--rounds={rounds}",
        "--resume",
        store,
        *FLAGS,
    )
    assert f"resumed after round {rounds - 5}" in done
    call(
        train.COMMAND,
        f"--out={tmp_path / 'whole'}",
        "--devices=1",
        f"--rounds={rounds}",
        store,
        *FLAGS,
    )
    resumed, whole = (
        files.read_npz(folder / "results.npz") for folder in (out, tmp_path / "whole")
    )
    np.testing.assert_allclose(resumed["loss_test"], whole["loss_test"], rtol=1e-5, atol=1e-5)


SOON = "from pfljax import cli; from pfljax.contract import processes; processes.START_SECONDS = 3; cli.main()"


@pytest.mark.slow
def test_a_process_that_waits_for_nobody_says_so_in_one_line(tmp_path):
    words = [
        f"--out={tmp_path}/run",
        f"--coordinator=localhost:{free_port()}",
        "--num_processes=2",
        "--process_id=0",
    ]
    command = [sys.executable, "-c", SOON, "train", "--devices=2", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "error: --coordinator: the processes did not connect within 3 s\n"


@pytest.mark.slow
def test_processes_that_disagree_end_with_one_line_each(start, tmp_path):
    pair = start(
        tmp_path / "run",
        own=(("--rounds=3",), ("--rounds=4", "--learning_rate=0.02", "--method=local")),
    )
    for number, process in enumerate(pair):
        said = process.communicate(timeout=100)[1]
        assert process.returncode == 2 and len(said.splitlines()) == 1
        assert said.startswith(
            f"error: --learning_rate=0.0{1 + number}: process {number} of 2 disagrees with another"
        )
        name = ("federico_friends", "local")[number]
        assert (
            f'also on method (here "{name}")' in said
            and f"also on rounds (here {3 + number})" in said
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_data_that_differ_are_found_before_anything_is_trained(start, tmp_path):
    rng = np.random.default_rng(0)
    for number in range(2):
        y = rng.integers(4, size=400)
        np.savez(tmp_path / f"{number}.npz", x=rng.normal(size=(400, 5)).astype(np.float32), y=y)
    own = [(f"--data_file={tmp_path / f'{number}.npz'}",) for number in range(2)]
    for number, process in enumerate(start(tmp_path / "run", "--dataset=npz", own=own)):
        said = process.communicate(timeout=100)[1]
        assert process.returncode == 2 and len(said.splitlines()) == 1
        assert (
            f"process {number} of 2 disagrees" in said and "error: who has which examples=" in said
        )
