"""What users read when devices or processes fail, and profiles from commands."""

import os
import sys
from unittest import mock

import jax
import pytest
from commands import call

from pfljax import cli
from pfljax.cli import compare, launch, supervision, train
from pfljax.cli.settings import parse
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.training.loop import Diverged


def test_a_full_device_is_told_with_what_may_help():
    text = launch.device_failure(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nmore"
    )
    assert (
        text.startswith("out of memory on a device")
        and "--client_store=host" in text
        and "17179869184" in text
    )
    assert "\n" not in text


def test_a_lost_device_is_told_with_the_way_back():
    text = launch.device_failure("INTERNAL: CUDA error: device lost\n  at somewhere")
    assert (
        text
        == "a device failed; --resume continues from the last checkpoint: INTERNAL: CUDA error: device lost"
    )


@pytest.mark.parametrize(
    ("fatal", "code", "told"),
    [
        (
            b"The following tasks are unhealthy (stopped sending heartbeats)",
            -6,
            "another process has ended",
        ),
        (
            b"Terminating because the JAX distributed service: DEADLINE_EXCEEDED",
            -6,
            "did not connect within",
        ),
        (b"Check failed: rendezvous stuck", -6, "Check failed: rendezvous stuck"),
        (b"", -9, "the process was ended by SIGKILL"),
    ],
)
def test_the_last_words_of_a_process_are_one_line(fatal, code, told):
    words = supervision.last_words(fatal, code)
    assert told in words and "\n" not in words


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, jax.errors.JaxRuntimeError])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_lost_process_is_told_by_the_text_of_the_error_whatever_its_type(
    kind, wrapped, monkeypatch, capsys
):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    error = kind(
        "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error\n more"
    )
    if wrapped:
        cause = error
        error = KeyError("rows")
        error.__cause__ = cause
    assert launch.line_and_code(error, None) == (supervision.LOST_TEXT, 1)
    assert capsys.readouterr().err == ""
    own = kind("heartbeats.npz: a barrier to understanding")  # the user's own words
    if kind is not jax.errors.JaxRuntimeError:
        assert launch.line_and_code(own, None) == (f"unexpected: {own}", 1)


def test_arguments_are_told_by_their_flags():
    def line(error, define):
        return launch.line_of(error, parse(define, []))

    for error, text in (
        (ArgumentError("groups", "accepted: 1", 3), "--partition_groups=3: accepted: 1"),
        (
            ArgumentError("epsilon", "accepted: 0 to 1", 2, owner="federico"),
            "--federico.epsilon=2: accepted: 0 to 1",
        ),
        (
            ArgumentError("components", "accepted: 1", owner="fedem"),
            "--fedem.components: accepted: 1",
        ),
        (ArgumentError("num_clients", "accepted: 1", 0), "--num_clients=0: accepted: 1"),
        (ArgumentError("predict", "accepted: one"), "predict: accepted: one"),
        (
            ArgumentError("out", "new, or `resume=from_scratch`, `other`"),
            "--out: new, or --resume=from_scratch, `other`",
        ),
    ):
        assert line(error, train.define) == text
    unknown = ArgumentError("method", "unknown", "x")
    assert line(unknown, train.define).startswith("--method=x")
    assert line(unknown, compare.define).startswith("--methods=x")


def test_processes_are_checked_before_they_meet():
    for flags, text in (
        (["--coordinator=localhost"], "--coordinator=localhost: accepted: HOST:PORT, or auto"),
        (["--coordinator=localhost:1"], "--coordinator: needs --num_processes and --process_id"),
        (
            ["--coordinator=localhost:1", "--num_processes=2", "--process_id=2"],
            "--process_id=2: accepted: 0 to 1",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            launch.check_coordinator(parse(train.define, flags))
        assert str(caught.value).startswith(text)
    assert launch.check_coordinator(parse(train.define, ["--coordinator=auto"])) == 0


def test_a_command_whose_output_is_not_read_ends_in_silence(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", mock.Mock(**{"write.side_effect": BrokenPipeError}))
    ended = mock.Mock(side_effect=SystemExit)
    monkeypatch.setattr(os, "_exit", ended)
    ways = [
        lambda: launch.main(train.COMMAND, ["--help"]),
        lambda: launch.main(
            train.COMMAND._replace(run=lambda _: print("1 of 2"), devices=None), []
        ),
        lambda: cli.main(["--help"]),
    ]
    for way in ways:
        with pytest.raises(SystemExit):
            way()
    assert ended.mock_calls == [mock.call(141)] * 3 and capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_profile_says_where_the_time_goes(tmp_path):
    flags = (
        "--rounds=2",
        "--method=fedavg",
        "--hidden=8",
        "--devices=2",
        f"--profile={tmp_path / 'trace'}",
    )
    said = call(train.COMMAND, *flags, f"--out={tmp_path / 'run'}")
    line = next(line for line in said.splitlines() if "profile: " in line)
    assert all(f"{part} " in line for part in ("compute", "exchange", "host")) and "%" in line
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


def test_a_profile_needs_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.cores, "start", lambda *args: None)
    path = tmp_path / "file"
    path.write_text("")
    settings = parse(train.define, [f"--profile={path}"])
    with pytest.raises(ArgumentError, match=rf"^profile={path}: "):
        launch.set_up_devices(settings, 0, keep_compiled=False)


def test_a_run_that_fails_is_a_line_and_exit_code_1():
    line = "round 3: the loss of client 2 is not finite. Earlier evaluations are saved in runs/a"
    for kind in (RunError, Diverged):
        assert launch.line_and_code(kind(line), None) == (line, 1)
