"""Runs that are killed at random instants end with the figures of an uninterrupted run, under every store."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kills.py")
MODES = ("device", "host", "disk", "replicates", "processes")
KILLS = 20  # of each mode
SAMPLE = ("disk", 5)  # the mode that CI plays, whose checkpoints have most parts, and how often


def play(*words):
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


CASES = [pytest.param(*SAMPLE, marks=pytest.mark.campaign)]
CASES += [pytest.param(mode, KILLS, marks=pytest.mark.long) for mode in MODES]


def test_the_sample_is_large_enough():
    assert SAMPLE[0] in MODES and 20 * SAMPLE[1] >= len(MODES) * KILLS


@pytest.mark.parametrize(("mode", "kills"), CASES)
def test_killed_runs_go_on_as_if_nothing_had_happened(mode, kills, tmp_path):
    found = play(mode, kills, 0, tmp_path)
    assert not found["wrong"] and found["kills"] >= kills
    assert len(set(found["rounds evaluated when killed"])) > 1  # not all at the same place
