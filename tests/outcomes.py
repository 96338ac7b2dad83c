"""How a command ends that is given bad input: played in the process of the tests, up to where it would train."""

import contextlib
import io
import signal
from unittest import mock

from pfljax import api
from pfljax.api import measuring, study, tuning
from pfljax.cli import launch
from pfljax.cli import train as cli_train

SECONDS = 120  # after which a command hangs; input is refused within some, on whatever machine


class Accepted(Exception):
    """The command would train."""


class Hangs(BaseException):
    """The command has not come to an end."""


def _hangs(*_):
    raise Hangs


@contextlib.contextmanager
def never_training():
    """Where a command would train, or measure a round, it raises `Accepted`."""
    stop = mock.Mock(side_effect=Accepted)
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(launch, "set_up_devices", lambda *_: None))
        for owner, name in (
            *(
                (api.Run, "train"),
                (study, "train_replicates"),
                (tuning, "search"),
                (measuring, "check_state"),
            ),
        ):
            patched.enter_context(mock.patch.object(owner, name, stop))
        yield


def outcome(command, words):
    """(exit code, or None where the command would train; what it printed as errors)."""
    err = io.StringIO()
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(SECONDS)
    with (
        never_training(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(err),
    ):
        try:
            launch.main(command, [str(word) for word in words])
        except SystemExit as end:
            return end.code, err.getvalue()
        except Accepted:
            return None, ""
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    raise AssertionError("the command returned")


def trained(words):
    """The run that `pfljax train` makes with these flags, up to where it would train, and what it printed."""
    out = io.StringIO()
    made = []

    def train(run, *_, **__):
        made.append(run)
        raise Accepted

    with contextlib.ExitStack() as patched:
        patched.enter_context(contextlib.redirect_stdout(out))
        patched.enter_context(mock.patch.object(launch, "set_up_devices", lambda *_: None))
        patched.enter_context(mock.patch.object(api.Run, "train", train))
        patched.enter_context(contextlib.suppress(Accepted))
        launch.main(cli_train.COMMAND, [str(word) for word in words])
    (run,) = made
    return run, out.getvalue()


def refused(command, words):
    """The one line with which a command refuses its flags; None where it would train."""
    code, printed = outcome(command, words)
    if code is None:
        return None
    assert code == 2, printed
    (line,) = printed.strip().split("\n")
    assert line.startswith("error: ") and len(line) < 800, line
    return line.removeprefix("error: ")
