"""How a command runs: its flags, its devices and processes, and one line for whatever ends it early."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax

from pfljax.cli import help, supervision
from pfljax.cli.flags import FLAG_OF
from pfljax.cli.settings import Define, FlagError, Settings, parse
from pfljax.core.errors import ArgumentError, RunError
from pfljax.core.method import METHODS
from pfljax.data import latent
from pfljax.engine import processes
from pfljax.training import endings, profiling

OPEN_PORT = (
    "the coordinator listens on all of this machine's addresses, and whoever reaches its port can join or end the run; "
    "with --coordinator=localhost:PORT it listens on this machine alone"
)
LOCAL_FLAGS = ("process_id", "data_file", "data_dir")  # in which processes may differ: places differ between hosts


class Command(NamedTuple):
    """A command.

    Attributes:
        doc: What it does and how it is called, for --help.
        define: Registers its flags.
        run: Does it.
        keep_compiled: Whether JAX keeps what it compiles for the next run; not where compiling is timed.
        devices: Settings -> the number of devices that they ask for; 0 for all. None: the command computes nothing.
        listed: The flag that takes words without a name, each as one of its values; "": none are accepted.
    """

    doc: str | None
    define: Define
    run: Callable[[Settings], None]
    keep_compiled: bool = True
    devices: Callable[[Settings], int] | None = lambda settings: settings.devices
    listed: str = ""


def main(command: Command, words: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the process; a mistake is one line and exit code 2, a failure one line and 1.

    Args:
        command: The command.
        words: Its flags; None: those of this process.
    """
    words, settings = sys.argv[1:] if words is None else words, None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a file or a pipe shows how far the command is
    try:
        given = [word for word in words if word not in help.WORDS]
        settings = parse(command.define, named(given, command.listed) if command.listed else given)
        if help.is_asked(words):
            print(help_of(command, settings))
            sys.exit(0)
        if command.devices:
            if settings.coordinator:
                if not supervision.is_watched():
                    supervision.watch()
                supervision.end_with_the_watcher()
            set_up_devices(settings, command.devices(settings), command.keep_compiled)
        command.run(settings)
    except KeyboardInterrupt as error:
        end_interrupted(error, settings)
    except Exception as error:
        line, code = told(error, settings)
        stop(line, code)
    sys.exit(0)


def named(words: Sequence[str], flag: str) -> list[str]:
    """The words, with a flag before those that stand alone: neither flags nor the values of such without an =."""
    takes = lambda before: before.startswith("-") and "=" not in before
    alone = [not word.startswith("-") and not takes(before) for before, word in itertools.pairwise(["", *words])]
    return [f"--{flag}={word}" if is_alone else word for word, is_alone in zip(words, alone, strict=True)]


def end_interrupted(error: KeyboardInterrupt, settings: Settings | None) -> NoReturn:
    """Ends the process that a signal has stopped, with the exit code that shells give for it."""
    number = error.number if isinstance(error, endings.Interrupted) else signal.SIGINT
    hint = "; --resume goes on from the last checkpoint" if settings and "resume" in settings else ""
    print(f"error: {error if str(error) else 'interrupted'}{hint}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if jax.distributed.is_initialized() and jax.process_index() == 0:
        time.sleep(1)  # the others end for the same reason, and need the first until then
    os._exit(128 + number)  # taking Python down can crash in what XLA was interrupted in


def help_of(command: Command, settings: Settings) -> str:
    """The command's --help, for the methods and the data set that are named beside it."""
    named = settings.values.get("algorithms", [settings.values.get("algorithm")])
    methods = [name for name in named if name in METHODS]
    return help.text(command.doc or "", settings.with_defaults(methods) if "dataset" in settings else settings, methods)


def told(error: Exception, settings: Settings | None) -> tuple[str, int]:
    """What the user reads of an error, and the exit code; what is nobody's mistake is raised again."""
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
    traceback.print_exc()
    return f"unexpected: {error}", 1  # at once: an orderly end would wait for the others


def line_of(error: ArgumentError, settings: Settings | None) -> str:
    """The library's message, with the flag's name in place of the argument's where there is such a flag."""
    name = f"{error.owner}.{error.argument}" if error.owner else error.argument
    flags = settings.values if settings else (name, *FLAG_OF.values())
    flag = next((flag for flag in (FLAG_OF.get(name), name) if flag in flags), None)
    return error.line(f"--{flag}" if flag else name)


def device_failure(text: str) -> str:
    """What a user should know of an error of the devices or of the connection between processes."""
    first = text.strip().split("\n")[0][:300]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        advice = "fewer clients at a time (--plan=chunk --chunk), a smaller --participation, or --client_store=host"
        return f"out of memory on a device: {advice} may help: {first}"
    if jax.process_count() > 1:
        return supervision.LOST_TEXT
    return f"a device failed; --resume goes on from the last checkpoint: {first}"


def stop(message: str, code: int) -> NoReturn:
    """Ends the process with one line."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():  # whose orderly end would wait for the others
        sys.stdout.flush()
        if jax.process_index() == 0:
            time.sleep(1)  # the others, who may be ending for the same reason, need the first to say so
        os._exit(code)
    sys.exit(code)


def set_up_devices(settings: Settings, devices: int, keep_compiled: bool) -> None:
    """One XLA device per core of a CPU, and all processes together; before anything else touches JAX.

    Args:
        settings: The command's.
        devices: Most devices that are used; 0 is all.
        keep_compiled: Whether JAX keeps what it compiles, so that another seed or a second try need not.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", devices or cores)
    # Devices of one CPU process share a thread pool: with several dispatches in flight their collectives can starve.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if keep_compiled:
        folder = latent.cache_folder() / "compiled"
        with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to stop
            folder.mkdir(parents=True, exist_ok=True)
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if settings.coordinator:
        join_processes(settings)
    for name in ("num_processes", "process_id"):
        if settings[name] is not None and not settings.coordinator:
            raise FlagError.of(name, "needs --coordinator=HOST:PORT")
    found = len(jax.local_devices())
    if devices > found:
        raise FlagError.of("devices", f"accepted: 0 to {found}, the devices found", devices)
    if settings.profile:
        profiling.check(Path(settings.profile))


def join_processes(settings: Settings) -> None:
    """Brings all processes together and sees to it that they have the same flags; only the first one prints."""
    port = check_coordinator(settings)
    # Libraries that connect processes write on standard output; what the command itself says goes by another way.
    nowhere, own = os.open(os.devnull, os.O_WRONLY), os.dup(1)
    os.dup2(nowhere, 1)
    if settings.process_id == 0 and port:
        with socket.socket() as taken:
            if taken.connect_ex(("localhost", port)) == 0:
                raise settings.error("coordinator", "the port is taken; name a free one")
    processes.start(settings.coordinator, settings.num_processes, settings.process_id)
    if processes.is_first() and not processes.on_loopback(settings.coordinator):
        print(f"warning: {OPEN_PORT}", file=sys.stderr, flush=True)
    sys.stdout = open(own if processes.is_first() else nowhere, "w", buffering=1)  # noqa: SIM115
    processes.agree({name: value for name, value in settings.values.items() if name not in LOCAL_FLAGS})


def check_coordinator(settings: Settings) -> int:
    """The port of process 0, or 0 where it is found out; complains of flags that do not fit together."""
    if settings.coordinator == "auto":
        return 0
    port = settings.coordinator.rpartition(":")[2]
    if ":" not in settings.coordinator or not port.isdigit() or not 0 < int(port) < 2**16:
        raise settings.error("coordinator", "accepted: HOST:PORT, or auto")
    if settings.num_processes is None or settings.process_id is None:
        raise FlagError.of("coordinator", "needs --num_processes and --process_id, or auto")
    if settings.process_id >= settings.num_processes:
        raise settings.error("process_id", f"accepted: 0 to {settings.num_processes - 1}")
    return int(port)
