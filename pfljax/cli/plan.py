"""Estimates a run's memory and time on TPUs or GPUs that are not here, for every plan and exchange. Trains nothing.

    pfljax plan --target=tpu:v5e:4x4 --algorithm=federico --num_clients=1024
    pfljax plan --target=cuda:h100:8 --algorithm=fedavg --json=plan.json

The run has the flags of `pfljax train`. Its programs are compiled by the target's own compiler, and read. The figures
are estimates, not measurements; evaluation is not counted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
from absl import flags

from pfljax.api import plan
from pfljax.cli import build, sweep, train
from pfljax.cli.flags import RUNS
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.folder import files

UNREAD = {"the plan chooses them": ("plan", "chunk", "exchange", "devices")}
UNREAD |= {"nothing is trained": ("out", "resume", "profile", "tensorboard", "coordinator")}


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    train.define(registry)
    add = Group(RUNS, registry)
    add.declare(plan, "target", "seconds")
    add.add("json", str, None, "file for all figures")


def run(settings: Settings) -> None:
    """Runs the command."""
    names = build.read_methods(settings)
    for why, unread in UNREAD.items():
        for flag in unread:
            settings.refuse(flag, why)
    if settings.json:
        files.check_writable(Path(settings.json).parent, "json")
    settings = settings.with_defaults(names)
    settings.check_read()
    trial = build.Trial(settings.seed, settings.split)
    made = build.build_run(settings, names[0], build.build_clients(settings, trial.of_data), trial)
    found = plan(made, settings.target, rounds=settings.rounds, seconds=settings.seconds, say=print)
    if settings.json:
        files.write_json(Path(settings.json), dataclasses.asdict(found))
    title = f"{names[0]}, {found.num_clients} clients on {found.target}; bytes of one device, time: {found.rests_on}"
    sweep.print_table(title, *found.table(), text=2, note="\n".join(found.notes))
    if found.hours is not None:
        chosen = " ".join(f"--{flag}={value}" for flag, value in found.recommended.items())
        print(f"recommended: {chosen}; about {found.hours:.3g} hours for {found.rounds} rounds (an estimate)")


def on_cpu(settings: Settings) -> int:
    """Builds the run on as few CPU devices as a model needs, even if JAX has found others."""
    jax.config.update("jax_platforms", "cpu")
    return settings.model_devices


COMMAND = Command(__doc__ or "", define, run, devices=on_cpu)
