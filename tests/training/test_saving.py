"""When checkpoints are saved."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from runs import assert_same_runs

from pfljax.contract.errors import ArgumentError
from pfljax.folder import history
from pfljax.training import saving


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (50, saving.Interval(rounds=50)),
        ("50", saving.Interval(rounds=50)),
        ("1.5s", saving.Interval(seconds=1.5)),
        ("auto", saving.Interval(seconds=60.0, share=0.1)),
    ],
)
def test_an_interval_is_rounds_or_seconds(every, expected):
    assert saving.interval(every) == expected


@pytest.mark.parametrize("every", ["0", "-3", "1m", "", "s", "1e3", "one"])
def test_other_intervals_are_refused_in_a_line(every):
    with pytest.raises(ArgumentError, match=r"^checkpoint_every=.*accepted: a number of rounds"):
        saving.interval(every)


@pytest.fixture
def clock(monkeypatch):
    """Sets the time that a saver sees."""
    now = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def test_by_default_a_minute_passes_and_saving_takes_a_tenth_of_the_time(clock):
    saver = saving.Saver(saving.interval("auto"), 0)
    clock(59)
    assert not saver.is_due(1)
    clock(1)
    assert saver.is_due(1) and not saver.is_due(0)
    saver.saved(1, duration=9)
    clock(89)
    assert not saver.is_due(2)
    clock(1)
    assert saver.is_due(2)


def test_rounds_are_counted_from_the_last_checkpoint(clock):
    saver = saving.Saver(saving.interval(3), 4)
    assert saver.next_round() == 7
    assert [saver.is_due(done) for done in (5, 6, 7)] == [False, False, True]
    saver.saved(7, duration=1)
    assert saver.next_round() == 10


RUN = """
    import sys
    import time
    import pfljax as pfl

    out, resume, pause = sys.argv[1], sys.argv[2] == "resume", float(sys.argv[3])

    def wait(evaluation):
        # each evaluation takes its time, as those of many clients do
        time.sleep(pause)

    clients = pfl.data.digits(num_clients=6, train_examples=8)
    local = pfl.LocalTraining(learning_rate=0.05, batch_size=4)
    model = pfl.models.MLP(hidden=())
    execution = pfl.Execution("map", devices=1)
    run = pfl.Run(pfl.Ditto(), clients, model, local, participation=0.5, execution=execution)
    often = {"eval_every": 7, "checkpoint_every": "0.1s"}
    run.train(30, out=out, resume=resume, tracker=wait, progress=False, **often)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_from_a_checkpoint_between_evaluations(tmp_path):
    """After SIGKILL, the last checkpoint is not the first round, and the result is bit for bit the same."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))
    killed = tmp_path / "killed"
    whole = tmp_path / "whole"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def command(out, how, pause):
        return [sys.executable, script, out, how, str(pause)]

    process = subprocess.Popen(command(killed, "new", 0.5), env=environment)
    until = time.monotonic() + 300
    while not history.checkpoints(killed / "checkpoints") and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    saved = history.checkpoints(killed / "checkpoints")
    assert saved and saved[0] < 30 and not (killed / "summary.json").exists()

    subprocess.run(command(killed, "resume", 0), env=environment, check=True)
    subprocess.run(command(whole, "new", 0), env=environment, check=True)
    assert_same_runs(killed, whole)
