"""Processes that share the folder of a comparison: local ones, or jobs of a cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from pfljax.cli.flag_help import HELP
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings
from pfljax.contract import cores, host, optional

MINUTES = 24 * 60  # longest time of a cluster's job, which is then requeued


def define(registry: flags.FlagValues) -> None:
    add = Group(RUNS, registry)
    add.add("workers", int, 1, HELP["workers"], at_least=1, at_most=1000)
    add.add("cells", str, "", HELP["cells"])
    add.add("cluster", str, "none", HELP["cluster"], choices=["none", "slurm", "local"])


def several(settings: Settings) -> bool:
    """Whether the command runs in other processes. Raises `FlagError` for flags that do not go together with that."""
    is_split = settings.workers > 1 or settings.cluster != "none"
    for flag in ("coordinator", "profile", "cells") if is_split else ():
        if settings.present(flag):
            raise FlagError.at(flag, "accepted with --workers=1")
    return is_split


def run(settings: Settings) -> None:
    """Runs the command in several processes and waits for them. Each writes OUT/workers/N.log."""
    logs = Path(settings.out) / "workers"
    logs.mkdir(parents=True, exist_ok=True)
    commands = commands_of(settings)
    if settings.cluster == "none":
        failed = start(commands, logs)
    else:
        failed = submit(commands, logs, settings.cluster)
    for number in failed:
        print(f"worker {number} failed; see {logs / f'{number}.log'}", file=sys.stderr)


def commands_of(settings: Settings) -> list[list[str]]:
    """The workers' command lines. On a CPU, local workers share the cores."""
    words = [sys.executable, "-m", "pfljax.cli", "compare", *settings.words]
    words += ["--workers=1", "--cluster=none", "--json="]
    if settings.cluster == "none" and cores.on_cpu() and not settings.present("devices"):
        cores_of_worker = max(1, host.num_cores() // settings.workers)
        words.append(f"--devices={cores_of_worker}")
    return [words] * settings.workers


def start(commands: Sequence[Sequence[str]], logs: Path) -> list[int]:
    """Runs commands side by side on this machine. Returns the numbers of those that failed."""
    running: list[subprocess.Popen] = []
    try:
        for number, command in enumerate(commands):
            with open(logs / f"{number}.log", "w") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        return [number for number, process in enumerate(running) if process.wait()]
    finally:
        for process in running:
            process.terminate()


class Job:
    """A command as a job. An interrupted job is requeued, and goes on from the runs' checkpoints."""

    def __init__(self, command: Sequence[str], log: Path):
        self.command = command
        self.log = log

    def __call__(self) -> int:
        """Runs the command; returns its exit code."""
        with open(self.log, "a") as log:
            return subprocess.call(self.command, stdout=log, stderr=subprocess.STDOUT)

    def checkpoint(self) -> Any:
        """What a requeued job runs: the same."""
        return optional.load("submitit", "cluster").helpers.DelayedSubmission(self)


def submit(commands: Sequence[Sequence[str]], logs: Path, cluster: str) -> list[int]:
    """Like `start`, as jobs of a cluster."""
    executor = optional.load("submitit", "cluster").AutoExecutor(folder=logs, cluster=cluster)
    executor.update_parameters(timeout_min=MINUTES, name="pfljax")
    with executor.batch():
        jobs = [
            executor.submit(Job(command, logs / f"{number}.log"))
            for number, command in enumerate(commands)
        ]
    print(f"{len(jobs)} jobs submitted: {', '.join(job.job_id for job in jobs)}", flush=True)
    return [number for number, job in enumerate(jobs) if job.result()]
