"""Estimates a run's memory and time on TPUs and GPUs that you do not have, for every plan and exchange.

    pfljax estimate --target=tpu:v5e:4x4 --method=federico --num_clients=1024
    pfljax estimate --target=cuda:h100:8 --method=fedavg --json
    pfljax estimate --target=tpu:v5e:2x2 --methods=local,fedavg,federico

Takes the flags of `pfljax train`, but trains nothing. With --methods, prints a table for each method and the sum of
their hours. All programs are compiled with the target's compiler. The figures are estimates, not measurements, and do
not include evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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

# Reason -> flags that do not apply.
REFUSED = {
    "all plans are compared": ("plan", "chunk", "exchange", "devices"),
    "nothing is trained": ("out", "resume", "profile", "tracker", "coordinator"),
}


def define(registry: flags.FlagValues) -> None:
    train.define(registry)
    text = "Several methods, or all, instead of --method; FILE.py:NAME for your own. Default: --method."
    Group(WHAT, registry).several("methods", [], text, empty=True)
    add = Group(RUNS, registry)
    text = "Devices: tpu:NAME:SHAPE with v5e, v5p or v6e, such as tpu:v5e:4x4, or cuda:NAME:NUMBER with a100, h100 "
    text = f"{text}or h200, such as cuda:h100:8."
    add.declare(estimate, "target", "seconds", texts={"target": text})


def run(settings: Settings) -> Mapping[str, Any]:
    if settings.methods:
        settings.refuse("method", "--methods has the methods")
    names = build.read_methods(settings)
    for why, refused in REFUSED.items():
        for flag in refused:
            settings.refuse(flag, why)
    settings = settings.with_defaults(names)
    settings.check_read()
    trial = build.Trial(settings.seed, settings.split)
    clients = build.cached_clients(settings, trial.data_seed)

    def make(name: str) -> api.Run:
        return build.build_run(settings, name, clients, trial)

    if settings.methods == [build.ALL]:
        names = comparison.fitting(names, make)
    runs = [make(name) for name in names]  # finds mistakes before compiling anything
    estimates: list[Estimate] = []
    for run_of_method in runs:
        result = estimate(
            run_of_method,
            settings.target,
            rounds=settings.rounds,
            seconds=settings.seconds,
        )
        show(result)
        estimates.append(result)

    # All methods together.
    hours = None
    if all(result.hours is not None for result in estimates):
        hours = sum(result.hours or 0.0 for result in estimates)
    if settings.methods:
        total = "no total, since not all methods fit"
        if hours is not None:
            total = f"about {_time(hours)} (an estimate)"
        print(f"all {len(estimates)} methods, one seed each: {total}")
    entries = [dataclasses.asdict(result) for result in estimates]
    return {"hours": hours, "estimates": entries} if settings.methods else entries[0]


def show(result: Estimate) -> None:
    """Prints the table of a method, and what is recommended."""
    head = f"{result.method}, {result.num_clients} clients on {result.target}"
    title = f"{head}; bytes of one device, time: {result.rests_on}"
    tables.show(title, *result.table(), text=2, notes=result.notes)
    if result.hours is not None:
        chosen = " ".join(f"--{flag}={value}" for flag, value in result.recommended.items())
        total = f"about {_time(result.hours)} for {result.rounds} rounds (an estimate)"
        print(f"recommended: {chosen}; {total}")


def _time(hours: float) -> str:
    return f"{hours:.3g} hours" if hours >= 0.1 else f"{3600 * hours:.3g} s"


def on_cpu(settings: Settings) -> int:
    """Builds the run on as few CPU devices as a model needs, even if JAX has found others."""
    jax.config.update("jax_platforms", "cpu")
    return settings.model_devices if "model_devices" in settings else 1


# a GPU's cannot be read again
COMMAND = Command(__doc__ or "", define, run, devices=on_cpu, keep_compiled=False)
