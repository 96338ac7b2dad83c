"""What users read when devices or processes fail, and profiles from commands."""

import pytest

from experiments import common, supervision


def test_a_full_device_is_told_with_what_may_help():
    text = common.device_failure("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nmore")
    assert text.startswith("out of memory on a device") and "--client_store=host" in text and "17179869184" in text
    assert "\n" not in text


def test_a_lost_device_is_told_with_the_way_back():
    text = common.device_failure("INTERNAL: CUDA error: device lost\n  at somewhere")
    assert text == "a device failed; --resume goes on from the last checkpoint: INTERNAL: CUDA error: device lost"


@pytest.mark.parametrize(
    ("fatal", "code", "told"),
    [
        (b"The following tasks are unhealthy (stopped sending heartbeats)", -6, "another process has ended"),
        (b"Terminating because the JAX distributed service: DEADLINE_EXCEEDED", -6, "did not come together within"),
        (b"Check failed: rendezvous stuck", -6, "Check failed: rendezvous stuck"),
        (b"", -9, "the process was ended by SIGKILL"),
    ],
)
def test_the_last_words_of_a_process_are_one_line(fatal, code, told):
    words = supervision.last_words(fatal, code)
    assert told in words and "\n" not in words


def test_a_profile_says_where_the_time_goes(experiment, tmp_path):
    flags = ("--rounds=2", "--hidden=8", "--devices=2", f"--profile={tmp_path / 'trace'}")
    said = experiment("train", *flags, f"--out={tmp_path / 'run'}")
    line = next(line for line in said.splitlines() if "profile: " in line)
    assert all(f"{part} " in line for part in ("compute", "exchange", "host")) and "%" in line
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    said = experiment("compare", *flags, "--algorithms=local", "--seeds=0", f"--out={tmp_path / 'compare'}")
    assert "profile: " in said
    path = tmp_path / "file"
    path.write_text("")
    said = experiment("train", f"--profile={path}", code=2)
    assert f"--profile={path}" in said and len(said.splitlines()) == 1
