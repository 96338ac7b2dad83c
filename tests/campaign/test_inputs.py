"""Bad values of every flag of `pfljax train`: refused in one line with exit code 2 before anything is compiled.

The cases are made of the flags' types, so that a new flag is in the campaign by being registered.
"""

import contextlib
import io
import resource
import zlib
from pathlib import Path
from unittest import mock

import pytest
from absl import flags

from pfljax import api
from pfljax.cli import launch, train
from pfljax.core.method import METHODS

HUGE = "99999999999999999999999"
NUMBERS = {"nan", "abc", "", "0x", "1,2", "1e", "--5"}
# A kind of flag -> values that it never accepts, and values that it may or may not accept.
VALUES = {
    "float": (NUMBERS | {"inf", "-inf", "1e400"}, {"-1", "-0.5", "1e-400", HUGE, "2.5", "0", "1e-30"}),
    "int": (NUMBERS | {"inf", "2.5", HUGE, f"-{HUGE}"}, {"-1", "0", "2147483647"}),
    "bool": ({"maybe", "2", "nan"}, set()),
    "string enum": ({"foo", "²", "nan"}, {""}),
    "comma separated list of strings": (set(), {"", "0", "-1", "nan", "abc", "1,,2", HUGE, ",", "²"}),
    "string": (set(), {"", "foo", "²", "nan", "/", "/dev/null", ".", "a/b/c"}),
}
INFINITE = {"dp_clip_norm", "federico.effective_examples"}  # which may be infinite
WITH = {  # flags under which another is read
    "lr_decay": "--lr_schedule=exponential",
    "momentum": "--optimizer=sgd",
    "channels": "--model=cnn",
    "embedding": "--partition=latent",
    "embedding_epochs": "--partition=latent",
    "classes_per_client": "--partition=pathological",
    "dirichlet_alpha": "--partition=dirichlet",
    "aggregator_trim": "--aggregator=krum",
    "sampler_candidates": "--sampler=power_of_choice",
    "attackers": "--attack=noise",
    "attack_strength": "--attack=noise",
    "chunk": "--plan=chunk",
}
# absl's own, and those that start other processes or say where files go.
LEFT_OUT = {"coordinator", "num_processes", "process_id", "out", "profile", "help", "helpfull", "helpshort", "helpxml"}


def cases():
    """(words, whether they must be refused)."""
    registry = flags.FlagValues()
    train.COMMAND.define(registry)
    for group, found in registry.flags_by_module_dict().items():
        if group.startswith("absl"):
            continue
        for flag in found:
            never, perhaps = VALUES[flag.flag_type()]
            method = [f"--algorithm={group}"] if group in METHODS else []
            others = [*method, *[WITH[name] for name in (flag.name,) if name in WITH]]
            for value in sorted(never | perhaps) if flag.name not in LEFT_OUT else ():
                infinite = flag.name in INFINITE and value in ("inf", "1e400")
                yield [f"--{flag.name}={value}", *others], value in never and not infinite


CASES = list(cases())
SAMPLE = 25  # of so many cases one is played by default


ROOM = 8 << 30  # bytes that a case may ask for


@pytest.fixture(autouse=True)
def little_memory():
    """Whoever asks for all of the memory gets an error, and does not end the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Accepted(Exception):
    """The run would be trained."""


def outcome(words, out):
    """(exit code, or None where the run would be trained; what was printed as errors)."""
    err, quiet = io.StringIO(), mock.patch.object(launch, "set_up_devices", lambda *_: None)
    trained = mock.patch.object(api.Run, "train", mock.Mock(side_effect=Accepted))
    with quiet, trained, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            launch.main(train.COMMAND, [*words, f"--out={out}"])
        except SystemExit as end:
            return end.code, err.getvalue()
        except Accepted:
            return None, ""
    raise AssertionError("the command returned")


def in_sample(words):
    return zlib.crc32(" ".join(words).encode()) % SAMPLE == 0


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        pytest.param(words, refused, id=" ".join(words), marks=[pytest.mark.campaign] * (not in_sample(words)))
        for words, refused in CASES
    ],
)
def test_bad_values_are_refused_in_one_line(words, refused, tmp_path):
    code, printed = outcome(words, tmp_path / "run")
    assert code in ((2,) if refused else (2, None)), printed
    if code == 2:
        (line,) = printed.strip().splitlines()
        assert line.startswith("error: ") and len(line) < 600
    assert not (tmp_path / "run").exists()


def test_the_campaign_is_large():
    assert len(CASES) >= 1000 and sum(refused for _, refused in CASES) >= 500
    assert 20 <= sum(in_sample(words) for words, _ in CASES) <= 200
