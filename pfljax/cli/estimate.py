"""Estimates a run's memory and time on TPUs and GPUs that you do not have, for every plan and exchange.

    pfljax estimate --target=tpu:v5e:4x4 --method=federico --num_clients=1024
    pfljax estimate --target=cuda:h100:8 --method=fedavg --json=estimate.json
    pfljax estimate --target=tpu:v5e:2x2 --methods=local,fedavg,federico

The run has the flags of `pfljax train`, but nothing is trained. With --methods, each method has a table, and hours are
also added up. All programs are compiled by the target's own compiler, and read. The figures are estimates, not
measurements; evaluation is not counted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
from absl import flags

from pfljax import api
from pfljax.api import comparison
from pfljax.api.estimating import Estimate, estimate
from pfljax.cli import build, tables, train
from pfljax.cli.flags import RUNS, WHAT
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.folder import files

UNREAD = {"all plans are compared": ("plan", "chunk", "exchange", "devices")}
UNREAD |= {"nothing is trained": ("out", "resume", "profile", "tracker", "coordinator")}


def define(registry: flags.FlagValues) -> None:
    train.define(registry)
    text = "several methods, or all, instead of --method; FILE.py:NAME for your own"
    Group(WHAT, registry).several("methods", [], text, empty=True)
    add = Group(RUNS, registry)
    add.declare(estimate, "target", "seconds")
    add.add("json", Path, None, "file for all figures")


def run(settings: Settings) -> None:
    if settings.methods:
        settings.refuse("method", "--methods has the methods")
    names = build.read_methods(settings)
    for why, unread in UNREAD.items():
        for flag in unread:
            settings.refuse(flag, why)
    if settings.json:
        files.check_writable(Path(settings.json).parent, "json")
    settings = settings.with_defaults(names)
    settings.check_read()
    trial = build.Trial(settings.seed, settings.split)
    clients = build.cached_clients(settings, trial.of_data)

    def make(name: str) -> api.Run:
        return build.build_run(settings, name, clients, trial)

    if settings.methods == [build.ALL]:
        names = comparison.fitting(names, make)
    runs = [make(name) for name in names]  # finds mistakes before compiling anything
    estimates: list[Estimate] = []
    for made in runs:
        found = estimate(made, settings.target, rounds=settings.rounds, seconds=settings.seconds)
        show(found)
        estimates.append(found)
    hours = (
        None
        if any(each.hours is None for each in estimates)
        else sum(each.hours or 0.0 for each in estimates)
    )
    if settings.methods:
        total = (
            "no total, since not all methods fit"
            if hours is None
            else f"about {_time(hours)} (an estimate)"
        )
        print(f"all {len(estimates)} methods, one seed each: {total}")
    if settings.json:
        entries = [dataclasses.asdict(each) for each in estimates]
        content = {"hours": hours, "estimates": entries} if settings.methods else entries[0]
        files.write_json(Path(settings.json), content)


def show(found: Estimate) -> None:
    """Prints the table of a method, and what is recommended."""
    head = f"{found.method}, {found.num_clients} clients on {found.target}"
    title = f"{head}; bytes of one device, time: {found.rests_on}"
    tables.show(title, *found.table(), text=2, notes=found.notes)
    if found.hours is not None:
        chosen = " ".join(f"--{flag}={value}" for flag, value in found.recommended.items())
        print(
            f"recommended: {chosen}; about {_time(found.hours)} for {found.rounds} rounds (an estimate)"
        )


def _time(hours: float) -> str:
    return f"{hours:.3g} hours" if hours >= 0.1 else f"{3600 * hours:.3g} s"


def on_cpu(settings: Settings) -> int:
    """Builds the run on as few CPU devices as a model needs, even if JAX has found others."""
    jax.config.update("jax_platforms", "cpu")
    return settings.model_devices if "model_devices" in settings else 1


# a GPU's cannot be read again
COMMAND = Command(__doc__ or "", define, run, devices=on_cpu, keep_compiled=False)
