"""Estimates a run's memory and time on TPUs or GPUs that are not here, for every plan and exchange. Trains nothing.

    pfljax plan --target=tpu:v5e:4x4 --algorithm=federico --num_clients=1024
    pfljax plan --target=cuda:h100:8 --algorithm=fedavg --json=plan.json
    pfljax plan --target=tpu:v5e:2x2 --algorithms=local,fedavg,federico

The run has the flags of `pfljax train`. With --algorithms, each method has a table, and hours are also added up. All
programs are compiled by the target's own compiler, and read. The figures are estimates, not measurements; evaluation is
not counted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
from absl import flags

from pfljax.api.planning import Planned, plan
from pfljax.cli import build, sweep, train
from pfljax.cli.flags import RUNS, WHAT
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.folder import files

UNREAD = {"the plan chooses them": ("plan", "chunk", "exchange", "devices")}
UNREAD |= {"nothing is trained": ("out", "resume", "profile", "tracker", "coordinator")}


def define(registry: flags.FlagValues) -> None:
    train.define(registry)
    text = "several methods, or all, instead of --algorithm; FILE.py:NAME for your own"
    Group(WHAT, registry).several("algorithms", [], text, empty=True)
    add = Group(RUNS, registry)
    add.declare(plan, "target", "seconds")
    add.add("json", Path, None, "file for all figures")


def run(settings: Settings) -> None:
    if settings.algorithms:
        settings.refuse("algorithm", "--algorithms has the methods")
    names = build.read_methods(settings)
    for why, unread in UNREAD.items():
        for flag in unread:
            settings.refuse(flag, why)
    if settings.json:
        files.check_writable(Path(settings.json).parent, "json")
    settings = settings.with_defaults(names)
    settings.check_read()
    trial = build.Trial(settings.seed, settings.split)
    names = sweep.able(settings, names, trial)
    runs = [sweep.make_run(settings, name, trial) for name in names]  # finds mistakes before compiling anything
    plans = []
    for made in runs:
        plans.append(plan(made, settings.target, rounds=settings.rounds, seconds=settings.seconds, say=print))
        show(plans[-1])
    hours = None if any(each.hours is None for each in plans) else sum(each.hours or 0.0 for each in plans)
    if settings.algorithms:
        total = "no total, since not all methods fit" if hours is None else f"about {_time(hours)} (an estimate)"
        print(f"all {len(plans)} methods, one seed each: {total}")
    if settings.json:
        all_plans = {"hours": hours, "plans": [dataclasses.asdict(each) for each in plans]}
        files.write_json(Path(settings.json), all_plans if settings.algorithms else all_plans["plans"][0])


def show(found: Planned) -> None:
    """Prints the table of a method, and what is recommended."""
    head = f"{found.method}, {found.num_clients} clients on {found.target}"
    title = f"{head}; bytes of one device, time: {found.rests_on}"
    sweep.print_table(title, *found.table(), text=2, note="\n".join(found.notes))
    if found.hours is not None:
        chosen = " ".join(f"--{flag}={value}" for flag, value in found.recommended.items())
        print(f"recommended: {chosen}; about {_time(found.hours)} for {found.rounds} rounds (an estimate)")


def _time(hours: float) -> str:
    return f"{hours:.3g} hours" if hours >= 0.1 else f"{3600 * hours:.3g} s"


def on_cpu(settings: Settings) -> int:
    """Builds the run on as few CPU devices as a model needs, even if JAX has found others."""
    jax.config.update("jax_platforms", "cpu")
    return settings.model_devices if "model_devices" in settings else 1


COMMAND = Command(__doc__ or "", define, run, devices=on_cpu, keep_compiled=False)  # a GPU's cannot be read again
