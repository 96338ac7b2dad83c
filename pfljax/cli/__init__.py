"""The command line: `pfljax COMMAND [flags]`. This package alone turns flags into objects of the Python API."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {
    "train": "train one method on one data set",
    "compare": "compare methods on the same splits and seeds",
    "scaling": "measure time, memory and traffic against the number of clients",
    "methods": "list the methods, with their hyperparameters",
    "estimate": "estimate memory and time on TPUs and GPUs that you do not have",
    "flower": "write a run as a Flower app, for clients on nodes of their own",
    "report": "write the report page of a run, or of several runs",
    "watch": "serve a page that follows runs while they are trained",
}
EXIT_CODES = {
    0: "success; with --json, standard output has one JSON object",
    1: "a failure, such as a run that diverged or a full disk",
    2: "a mistake on the command line or in a file that it names",
    130: "interrupted by Ctrl-C; the current rounds are saved, and --resume continues",
    143: "ended by SIGTERM, in the same way",
    141: "nobody reads the output any more, as with head",
}
FORMER = {"plan": "estimate"}  # former name of a command -> its name


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the process: exit code 2 for a mistake on the command line, 1 for a failure.

    Args:
        argv: The command and its flags; None: `sys.argv`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    name, *words = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        try:
            print(usage(), flush=True)
        except BrokenPipeError:
            end_unread()
        sys.exit(0)
    if name in FORMER:
        print(f"note: pfljax {name} is now pfljax {FORMER[name]}", file=sys.stderr)
        name = FORMER[name]
    if name not in COMMANDS:
        print(f"error: {name}: unknown command; accepted: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    from pfljax.cli import launch  # imported late because it imports JAX

    launch.main(importlib.import_module(f"pfljax.cli.{name}").COMMAND, words)


def usage() -> str:
    """Returns the list of the commands."""
    commands = [f"  {command:10} {text}" for command, text in COMMANDS.items()]
    lines = ["pfljax COMMAND [--flag=value ...]", "", *commands, ""]
    lines.append("pfljax COMMAND --help shows all flags of a command.")
    lines += ["", *exit_code_lines()]
    return "\n".join(lines)


def exit_code_lines() -> list[str]:
    """Returns the part of --help on exit codes."""
    codes = [f"  {code:<4} {text}." for code, text in EXIT_CODES.items()]
    return ["Exit codes, with an error in one line on standard error:", "", *codes]


def end_unread() -> NoReturn:
    """Ends a process whose output is no longer read, as by `head`, with the exit code that shells use for it."""
    os._exit(128 + signal.SIGPIPE)  # a normal exit would write the rest, and complain
