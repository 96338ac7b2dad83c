"""Compares methods on the same splits, seeds and cohorts: a table (Markdown, CSV, JSON, LaTeX) and a figure.

    pfljax compare --methods=local,fedavg,fedavg_plus,federico_friends --seeds=0,1,2

Each pair of method and seed is a run in OUT/METHOD/seed-N. Finished runs are not repeated. Several processes may share
OUT: each trains runs that no other is training, and all write the same table. With --splits=0,1,2, every seed is run on
every split of the data. With --reference=local, the table also has each method's paired difference to local. A method
that fails has a row that says why, and the exit code is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from pfljax import api
from pfljax.api.comparison import Unfinished
from pfljax.cli import build, json_output, tables, workers
from pfljax.cli.flags import (
    RUNS,
    define_data,
    define_devices,
    define_evaluation,
    define_sweep,
    define_training,
    define_verbose,
)
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.contract.errors import RunError

# entries of a row, lists of many numbers, that --json leaves out; table.json has them
LARGE = ("rounds", "curve_mean", "curve_std", "megabytes_curve", "clock_mean", "client_gains")


def define(registry: flags.FlagValues) -> None:
    methods = ["local", "fedavg", "fedavg_plus", "federico_friends"]
    define_sweep(registry, methods, ["0", "1", "2"], "runs/compare")
    Group(RUNS, registry).declare(api.compare, "reference", "target")
    workers.define(registry)
    define_training(registry)
    define_data(registry)
    define_devices(registry)
    define_evaluation(registry)
    define_verbose(registry)
    json_output.define(registry)


def arguments(settings: Settings) -> dict[str, Any]:
    """Returns the arguments of `pfljax.compare` that the flags stand for."""
    names = build.read_methods(settings)
    settings = settings.with_defaults(names)
    settings.check_read()
    out = Path(settings.out)
    return {
        **build.table_options(settings, {name: name for name in names}),
        "leave_out": settings.methods == [build.ALL],
        "rounds": settings.rounds,
        "eval_every": settings.eval_every,
        "checkpoint_every": settings.checkpoint_every,
        "reference": settings.reference,
        "target": settings.target,
        "out": out,
        "replicate": settings.replicate,
        "rerun": settings.rerun,
        "cells": settings.cells,
        "tracker": build.build_tracker_of_table(settings, out),
        "profile": settings.profile,
    }


def run(settings: Settings) -> Mapping[str, Any]:
    several = workers.several(settings)
    options = arguments(settings)

    def ready() -> None:
        build.print_defaults(settings.with_defaults(build.read_methods(settings)))
        if several:
            workers.run(settings)

    out = options["out"]
    try:
        table = api.compare(**options, ready=ready)
    except Unfinished as unfinished:  # with --cells
        print(unfinished)
        return {"out": str(out), "finished": False}
    tables.show(table.title, *table.columns(), notes=table.notes)
    tables.print_paths(out, figure="table.png")
    if table.failures:
        failures = [f"{title} failed: {reason}" for title, reason in table.failures.items()]
        raise RunError("; ".join(failures))
    rows = []
    for row in table.rows:
        rows.append({name: value for name, value in row.items() if name not in LARGE})
    return {
        "out": str(out),
        "finished": True,
        "table": str(out / "table.json"),
        "report": str(out / "report.html"),
        "title": table.title,
        "score": table.score,
        "higher_is_better": table.higher_is_better,
        "notes": table.notes,
        "rows": rows,
    }


COMMAND = Command(__doc__ or "", define, run)
