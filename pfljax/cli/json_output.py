"""--json: the result of a command as one JSON object on standard output, and everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from absl import flags

from pfljax.cli.flag_help import HELP
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings, expand, values_of
from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError
from pfljax.folder import files

OUTPUT = "-"  # the value of a --json without one: standard output


def define(registry: flags.FlagValues) -> None:
    Group(RUNS, registry).add("json", Path, "", HELP["json"])


def check(settings: Settings) -> None:
    """Raises `ArgumentError` if the file of --json cannot be written."""
    file = settings.values.get("json")
    if not file or file == OUTPUT:
        return
    path = Path(file)
    files.check_writable(path.parent, "json")
    if path.exists() and not path.is_file():  # a device would be replaced
        raise ArgumentError("json", "is no file; accepted: a new or existing file", file)


def is_requested(words: Sequence[str]) -> bool:
    """Whether a command line, or a flag file that it names, has --json without a file."""
    expanded_words, _ = expand(words)
    return values_of("json", expanded_words)[-1:] == [OUTPUT]


@contextlib.contextmanager
def reserved(is_reserved: bool) -> Iterator[TextIO]:
    """Yields standard output. If it is reserved, what the block prints goes to standard error instead.

    That holds for what libraries write to the file descriptor, too.
    """
    output = sys.stdout
    if not is_reserved:
        yield output
        return
    descriptor = None
    # In a notebook or under a test, standard output is an object that has no descriptor of its own.
    if output is sys.__stdout__:
        output.flush()
        descriptor = os.dup(1)
        os.dup2(2, 1)
        output = open(descriptor, "w", closefd=False)  # noqa: SIM115
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield output
    finally:
        if descriptor is not None:
            os.dup2(descriptor, 1)
            os.close(descriptor)


def write(content: Mapping[str, Any], settings: Settings, output: TextIO) -> None:
    """Writes the result of a command where --json says, if it is there. Of several processes, the first one writes."""
    file = settings.values.get("json")
    if not file or not processes.is_first():
        return
    if file == OUTPUT:
        print(json.dumps(files.plain(content), allow_nan=False), file=output, flush=True)
    else:
        files.write_json(Path(file), content)
