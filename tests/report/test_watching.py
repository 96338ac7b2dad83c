"""The page of running studies: states of runs by what is in their folders, and estimates worked out by hand."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from pfljax.folder import locks, planned
from pfljax.report import watching


def put(folder, *, rounds=None, scores=None, pace=2.0, lock=None, summary=None, score="accuracy"):
    """A run's folder: `scores` by round, which took `pace` seconds each."""
    folder.mkdir(parents=True, exist_ok=True)
    if rounds is not None:
        (folder / "config.json").write_text(json.dumps({"rounds": rounds}))
    if scores is not None:
        rows = [{"round": at, "seconds": pace * at, score: value} for at, value in scores.items()]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if lock is not None:
        (folder / ".lock").write_text(lock)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def states(folder):
    return {f"{run.title}/{run.name}": (run.state, run.note) for run in watching.watched([folder])}


@pytest.fixture(scope="module")
def ended():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_state_is_what_the_folder_says(tmp_path, ended):
    own = os.getpid()
    done = {"last": {"round": 9}, "stopped": None}
    begun = {"rounds": 9, "scores": {0: 0.1}}
    put(tmp_path / "a" / "seed-0", **begun, lock=f"{own} {locks.HERE}")
    put(tmp_path / "a" / "seed-1", **begun, lock=str(own))  # as earlier versions wrote it
    put(tmp_path / "a" / "seed-2", **begun, lock=f"{ended} {locks.HERE}")
    put(tmp_path / "a" / "seed-3", **begun, lock="17 another-machine.org")
    put(tmp_path / "a" / "seed-4", **begun)
    put(tmp_path / "b" / "seed-0", **begun, summary=done)
    # goes on, but was interrupted
    put(tmp_path / "b" / "seed-1", rounds=12, scores={0: 0.1, 9: 0.2}, summary=done)
    put(tmp_path / "b" / "seed-2", rounds=12, summary=done | {"stopped": "after round 9: no gain"})
    put(tmp_path / "b" / "seed-3", lock=f"{own} {locks.HERE}")
    put(tmp_path / "c" / "tuning" / "seed-0", **begun)  # is no run of the table
    planned.write(tmp_path, [tmp_path / "b" / "seed-3", tmp_path / "b" / "split-1-seed-4"], 9)
    assert states(tmp_path) == {
        "a/seed-0": ("running", f"process {own}"),
        "a/seed-1": ("running", f"process {own}"),
        "a/seed-2": ("stopped", f"process {ended} has ended"),
        "a/seed-3": ("running", "process 17 on another-machine.org"),
        "a/seed-4": ("stopped", "no process trains it"),
        "b/seed-0": ("finished", ""),
        "b/seed-1": ("stopped", "no process trains it"),
        "b/seed-2": ("finished", "stopped after round 9: no gain"),
        "b/seed-3": ("running", f"process {own}"),
        "b/split-1-seed-4": ("waiting", ""),
    }


@pytest.mark.parametrize(
    "content", ["{", "[1]", "7", "\0", '{"round": 1e400}', '{"round": "one"}', "[" * 9999]
)
@pytest.mark.parametrize("name", ["config.json", "summary.json", "metrics.jsonl"])
def test_a_damaged_file_is_a_row(tmp_path, name, content):
    put(tmp_path / "a" / "seed-0", rounds=9, scores={0: 0.1})
    put(tmp_path / "a" / "seed-1", rounds=9, scores={0: 0.1})
    (tmp_path / "a" / "seed-1" / name).write_text(content)
    if name == "config.json" and content.startswith('{"'):
        # of an earlier version: it has no rounds
        assert watching.watched([tmp_path])[1].state == "stopped"
        return
    assert states(tmp_path)["a/seed-1"] == ("damaged", f"{name} cannot be read")
    assert f"{name} cannot be read" in watching.page([tmp_path], 5)


def test_what_is_planned_is_below_the_study(tmp_path):
    for content in (
        "[]",
        "{",
        '{"rounds": 3}',
        '{"rounds": 3, "runs": ["/etc", "../other", "a/../../b"]}',
    ):
        (tmp_path / planned.NAME).write_text(content)
        assert watching.watched([tmp_path]) == []
    (tmp_path / planned.NAME).write_text('{"rounds": -3, "runs": ["a"]}')
    assert states(tmp_path)["a/"][0] == "damaged"


def test_watching_neither_takes_nor_changes_a_lock(tmp_path):
    folder = put(tmp_path / "a", rounds=3)
    with locks.locked([folder], print):
        before = (folder / ".lock").stat()
        assert watching.watched([tmp_path])[0].state == "running"
        after = (folder / ".lock").stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    for kind in (os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/hostname", path)):
        kind(folder / ".lock")  # no lock of pfljax, and a pipe would be waited for
        assert locks.holder(folder) is None
        (folder / ".lock").rmdir() if (folder / ".lock").is_dir() else (folder / ".lock").unlink()


def test_time_left_by_hand(tmp_path):
    """Two workers: 6 rounds of 2 s and 15 of 4 s are left, and 20 rounds of 4 s have not begun."""
    one = f"{os.getpid()} {locks.HERE}"
    two = "1 elsewhere"
    put(tmp_path / "a" / "seed-0", rounds=10, scores={0: 0.1, 2: 0.2, 4: 0.3}, pace=2.0, lock=one)
    put(tmp_path / "b" / "seed-0", rounds=20, scores={0: 0.1, 5: 0.2}, pace=4.0, lock=two)
    put(
        tmp_path / "b" / "seed-1",
        rounds=20,
        scores={20: 0.5},
        pace=4.0,
        summary={"last": {"round": 20}},
    )
    planned.write(tmp_path, [tmp_path / "b" / f"seed-{seed}" for seed in (0, 1, 2)], 20)
    runs = watching.watched([tmp_path])
    found = {
        f"{run.title}/{run.name}": (run.done, run.rounds, run.pace, run.seconds_left)
        for run in runs
    }
    assert found["a/seed-0"] == (4, 10, 2.0, 12.0) and found["b/seed-0"] == (5, 20, 4.0, 60.0)
    assert found["b/seed-2"][:2] == (0, 20) and math.isnan(found["b/seed-2"][3])
    assert watching.seconds_left(runs) == (12 + 60 + 80) / 2
    # of which no run has a pace: (2 + 4 + 4) / 3 per round
    planned.write(tmp_path, [tmp_path / "c" / "seed-0"], 30)
    runs = watching.watched([tmp_path])
    assert watching.seconds_left(runs) == pytest.approx((12 + 60 + 30 * 10 / 3) / 2)
    assert "2 running, 1 waiting, 1 finished; about 1 min 26 s left" in watching.page([tmp_path], 5)
    idle = [run for run in runs if run.state != "running"]
    assert math.isnan(watching.seconds_left(idle))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (3661, "1 h 1 min"),
        (7200, "2 h"),
        (90000, "1 d 1 h"),
        (1e9, "11574 d 1 h"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert watching.duration(seconds) == text and watching.duration(math.nan) == "-"


def test_curves_are_means_over_the_runs_that_have_come_so_far(tmp_path):
    put(tmp_path / "a" / "seed-0", rounds=9, scores={0: 0.2, 3: 0.4, 6: 0.9})
    put(tmp_path / "a" / "seed-1", rounds=9, scores={0: 0.4, 3: 0.8})
    put(tmp_path / "b" / "seed-0", rounds=9, scores={0: 1.5, 3: None}, score="loss")
    runs = watching.watched([tmp_path])
    ((title, (rounds, mean, spread)),) = watching.curves(runs, "accuracy").items()
    assert title == "a" and rounds.tolist() == [0, 3, 6]
    np.testing.assert_allclose(mean, [0.3, 0.6, 0.9])
    np.testing.assert_allclose(spread, [0.2 / math.sqrt(2), 0.4 / math.sqrt(2), math.nan])
    assert watching.curves(runs, "loss")["b"][1][0] == 1.5
    page = watching.page([tmp_path], 7)
    assert 'id="accuracy"' in page and 'id="loss"' in page and "every 7 s" in page
    assert "default-src 'none'" in page and "accuracy 90.0 %" in page and "a/seed-1" in page


def test_a_folder_without_runs_or_that_is_a_run(tmp_path):
    assert "no runs yet" in watching.page([tmp_path], 5)
    folder = put(tmp_path / "first", rounds=4, scores={0: 0.5, 2: 0.5})
    (run,) = watching.watched([folder])
    assert (run.title, run.name, run.done, run.rounds) == ("first", "", 2, 4)
