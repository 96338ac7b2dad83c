"""Commands in the process of the tests, which saves their start: what they print and how they end."""

import contextlib
import io
from unittest import mock

from pfljax.cli import launch
from pfljax.folder import files


def call(command, *words, code=0):
    """Runs a command with these flags; what it printed, or its errors where another exit code is expected."""
    out = io.StringIO()
    err = io.StringIO()
    found = None
    own_devices = mock.patch.object(launch, "set_up_devices", lambda *_: None)
    with own_devices, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            launch.main(command, [str(word) for word in words])
        except SystemExit as end:
            found = end.code or 0
    assert found == code, err.getvalue()
    return out.getvalue() if code == 0 else err.getvalue()


def one_line(error):
    """The text of a single error line."""
    (line,) = error.strip().splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def refused(command, out, *words):
    """The one line with which a command refuses its flags; it names the last of them, and nothing is begun in `out`."""
    line = one_line(call(command, *words, f"--out={out}", code=2))
    assert words[-1].split("=")[0].strip("-") in line and not out.exists()
    return line


def rows_of(folder):
    """The rows of a command's table."""
    return files.read_json(folder / "table.json")


def flags_of(folder, seed=0):
    """The flags of a cell's run."""
    return files.read_json(folder / f"seed-{seed}" / "config.json")["flags"]
