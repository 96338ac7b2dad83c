"""Running a command: reads its flags, sets up devices and processes, and prints one line for any error."""

from __future__ import annotations

import gc
import io
import itertools
import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from pfljax.cli import end_unread, help, json_output, supervision
from pfljax.cli.flags import IMPLIED
from pfljax.cli.names import FORMER
from pfljax.cli.settings import Define, FlagError, Settings, parse
from pfljax.contract import cores, processes, speech
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.folder import endings, files
from pfljax.settings.method import METHODS

OPEN_PORT = (
    "the coordinator listens on all network addresses of this machine, and anyone who reaches its port can join or "
    "end the run; --coordinator=localhost:PORT restricts it to this machine"
)
# may differ between processes and their hosts
LOCAL_FLAGS = ("process_id", "data_file", "data_dir")


class Command(NamedTuple):
    doc: str | None  # description and usage, for --help
    define: Define  # registers the command's flags
    # trains, prints, and returns what --json writes; None: the command has no such flag
    run: Callable[[Settings], Mapping[str, Any] | None]
    # Whether JAX caches compiled functions for later runs. False if compile time is measured.
    keep_compiled: bool = True
    # Settings -> requested number of devices; 0: all. None: the command computes nothing.
    devices: Callable[[Settings], int] | None = lambda settings: settings.devices
    # the flag that takes positional arguments as its values; "": none are accepted
    listed: str = ""


def main(command: Command, words: Sequence[str] | None = None) -> NoReturn:
    """Runs a command with these flags, or those of `sys.argv`, and ends the process.

    Prints one line for an error: exit code 2 for a usage error, else 1.
    """
    words = sys.argv[1:] if words is None else words
    settings = None
    warnings.showwarning = lambda message, *_: print(
        f"warning: {message}", file=sys.stderr, flush=True
    )
    gc.freeze()  # modules stay; visiting them in every collection took a tenth of a short run
    gc.set_threshold(50_000)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # show progress in files and pipes, too
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # what a terminal or log cannot show must not end a training
            stream.reconfigure(errors="replace")
    try:
        with endings.interruptible():
            arguments = [word for word in words if word not in help.WORDS]
            is_help = len(arguments) < len(words)
            if command.listed:
                arguments = named(arguments, command.listed)
            # a method's own file, which `parse` loads, may print, too
            is_json = not is_help and json_output.is_requested(arguments)
            with json_output.reserved(is_json) as output:
                settings = parse(command.define, arguments)
                if is_help:
                    print(help_of(command, settings))
                    sys.exit(0)
                if command.devices:
                    if settings.coordinator:
                        if supervision.WATCHED not in os.environ:
                            supervision.watch(output)
                        supervision.end_with_the_watcher()
                    set_up_devices(settings, command.devices(settings), command.keep_compiled)
                json_output.check(settings)
                level = logging.DEBUG if settings.values.get("verbose") else logging.INFO
                with speech.lines_to(print, level):
                    result = command.run(settings)
                if result is not None:
                    json_output.write(result, settings, output)
    except KeyboardInterrupt as error:
        end_interrupted(error, settings)
    except BrokenPipeError:
        end_unread()
    except Exception as error:
        line, code = line_and_code(error, settings)
        print(f"error: {line}", file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():  # a normal exit would wait for the other processes
            end(code)
        sys.exit(code)
    sys.exit(0)


def named(words: Sequence[str], flag: str) -> list[str]:
    """Prefixes positional arguments with a flag; leaves flags and their values alone."""

    named_words = []
    for before, word in itertools.pairwise(["", *words]):
        needs_value = before.lstrip("-") not in IMPLIED
        is_value = before.startswith("-") and "=" not in before and needs_value
        is_positional = not word.startswith("-") and not is_value
        named_words.append(f"--{flag}={word}" if is_positional else word)
    return named_words


def end_interrupted(error: KeyboardInterrupt, settings: Settings | None) -> NoReturn:
    """Ends a process that a signal interrupted, with the exit code that shells use for that signal."""
    number = error.number if isinstance(error, endings.Interrupted) else signal.SIGINT
    hint = ""
    if settings and "resume" in settings:
        hint = "; --resume continues from the last checkpoint"
    text = str(error) or "interrupted"
    print(f"error: {text}{hint}", file=sys.stderr, flush=True)
    end(128 + number)  # a normal exit can crash inside the interrupted XLA call


def help_of(command: Command, settings: Settings) -> str:
    """Returns the command's --help, for the methods and data set named on the command line."""
    names = settings.values.get("methods") or [settings.values.get("method")]
    methods = [name for name in names if name in METHODS]
    # The data sets' defaults are for commands that train on them.
    if "dataset" in settings and "learning_rates" in settings:
        settings = settings.with_defaults(methods)
    return help.text(command.doc or "", settings, methods)


def line_and_code(error: Exception, settings: Settings | None) -> tuple[str, int]:
    """Returns the error line for the user and the exit code. Raises unexpected errors again."""
    if isinstance(error, ArgumentError):
        return line_of(error, settings), 2
    if isinstance(error, FlagError):
        return str(error), 2
    if isinstance(error, RunError):
        return str(error), 1
    if isinstance(error, MemoryError):
        return f"out of memory on the host: {str(error) or 'fewer clients or examples may help'}", 1
    if isinstance(error, OSError):
        if jax.distributed.is_initialized() and isinstance(error, TimeoutError):
            return device_failure(str(error)), 1
        return f"{error.filename or 'a file'}: {error.strerror or error}", 1
    if isinstance(error, jax.errors.JaxRuntimeError):
        return device_failure(str(error)), 1
    if not jax.distributed.is_initialized():
        raise error
    if supervision.is_lost(error):
        return supervision.LOST_TEXT, 1
    traceback.print_exc()
    return f"unexpected: {error}", 1  # a normal exit would wait for the other processes


def line_of(error: ArgumentError, settings: Settings | None) -> str:
    """Returns the library's message, with the argument's name, and those in backticks, replaced by their flags."""

    def flag_of(name: str) -> str:
        if settings is None:
            return ""
        names = [name, settings.flag_of.get(name, ""), f"{name}s"]
        # of arguments that are still called as their flags were
        names += [FORMER.get(other, "") for other in names]
        return next((f"--{flag}" for flag in names if flag in settings), "")

    def flagged(match: re.Match) -> str:
        flag = flag_of(match[1])
        return f"{flag}{match[2]}" if flag else match[0]

    name = f"{error.owner}.{error.argument}" if error.owner else error.argument
    return re.sub(r"`(\w+)(=?\w*)`", flagged, error.line(flag_of(name) or name))


def device_failure(text: str) -> str:
    """Returns the error line for a failure of a device or of the connection between processes."""
    first = text.strip().split("\n")[0][:300]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        advice = "try fewer clients at a time (--plan=chunk --chunk), a smaller --participation, or --client_store=host"
        return f"out of memory on a device; {advice}: {first}"
    if jax.process_count() > 1:
        return supervision.LOST_TEXT
    return f"a device failed; --resume continues from the last checkpoint: {first}"


def end(code: int) -> NoReturn:
    sys.stdout.flush()
    if jax.distributed.is_initialized() and jax.process_index() == 0:
        # the other processes may be ending for the same reason, and need this one to say so
        time.sleep(1)
    os._exit(code)


def set_up_devices(settings: Settings, devices: int, keep_compiled: bool) -> None:
    """Sets up at most `devices` CPU devices (0: all) and connects the processes.

    Must run before anything else uses JAX. With `keep_compiled`, JAX caches compiled functions for later runs.
    """
    cores.start(devices, keep_compiled)
    if settings.coordinator:
        join_processes(settings)
    for name in ("num_processes", "process_id"):
        if settings[name] is not None and not settings.coordinator:
            raise FlagError.at(name, "needs --coordinator=HOST:PORT")
    cores.check_settings()
    cores.check(devices)
    if settings.profile:
        files.check_writable(Path(settings.profile), "profile")


def join_processes(settings: Settings) -> None:
    """Connects all processes and checks that they have the same flags. Only the first process prints."""
    port = check_coordinator(settings)
    # The libraries that connect processes write to standard output, so the command's own output uses a copy of it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    standard_output = os.dup(1)
    os.dup2(nowhere, 1)
    if settings.process_id == 0 and port:
        with socket.socket() as taken:
            if taken.connect_ex(("localhost", port)) == 0:
                raise settings.error("coordinator", "the port is in use; choose a free one")
    processes.start(settings.coordinator, settings.num_processes, settings.process_id)
    if processes.is_first() and not processes.on_loopback(settings.coordinator):
        print(f"warning: {OPEN_PORT}", file=sys.stderr, flush=True)
    target = standard_output if processes.is_first() else nowhere
    sys.stdout = open(target, "w", buffering=1, errors="replace")  # noqa: SIM115
    processes.agree(
        {name: value for name, value in settings.values.items() if name not in LOCAL_FLAGS}
    )


def check_coordinator(settings: Settings) -> int:
    """Returns the port of process 0, or 0 with --coordinator=auto. Checks the related flags."""
    if settings.coordinator == "auto":
        return 0
    port = settings.coordinator.rpartition(":")[2]
    if ":" not in settings.coordinator or not port.isdigit() or not 0 < int(port) < 2**16:
        raise settings.error("coordinator", "accepted: HOST:PORT, or auto")
    if settings.num_processes is None or settings.process_id is None:
        raise FlagError.at("coordinator", "needs --num_processes and --process_id, or auto")
    if settings.process_id >= settings.num_processes:
        raise settings.error("process_id", f"accepted: 0 to {settings.num_processes - 1}")
    return int(port)
