"""Runs that are killed at random instants end with the figures of an uninterrupted run, under every store."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
MODES = ("device", "host", "disk", "replicates", "processes")


def play(script, *words):
    command = [sys.executable, str(FOLDER / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.campaign
@pytest.mark.parametrize("mode", MODES)
def test_killed_runs_go_on_as_if_nothing_had_happened(mode, tmp_path):
    found = play("kills.py", mode, 20, 0, tmp_path)
    assert not found["wrong"] and found["kills"] >= 20
    assert len(set(found["rounds evaluated when killed"])) > 1  # not all at the same place


@pytest.mark.slow
def test_a_sample_of_kills(tmp_path):
    found = play("kills.py", "disk", 1, 1, tmp_path)
    assert not found["wrong"] and found["kills"] == 1


@pytest.mark.campaign
def test_an_interruption_ends_the_work_whenever_it_comes():
    found = play("interruptions.py", 100, 1)
    assert found["interruptions"] == 100 and found["repeated"] < 50  # most end it at once
