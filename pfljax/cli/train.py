"""Trains one method on one data set, and writes results, checkpoints, figures and a report page.

    pfljax train

trains FedeRiCo on scikit-learn's digits: 16 clients with 15 training examples each, from 2 label groups. It takes well
under a minute on 2 cores.
"""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Literal

import numpy as np
from absl import flags

from pfljax import report
from pfljax.api.table import epsilon_text, undefined
from pfljax.cli import build, tables
from pfljax.cli.flags import (
    RUNS,
    WHAT,
    define_data,
    define_devices,
    define_evaluation,
    define_training,
)
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings
from pfljax.contract import processes
from pfljax.report import terms
from pfljax.report.run_data import score_of
from pfljax.settings.method import METHODS


def define(registry: flags.FlagValues) -> None:
    names = f"{', '.join(METHODS)}, or FILE.py:NAME, a method of your own"
    Group(WHAT, registry).add("method", str, "federico", names)
    define_training(registry)
    define_data(registry)
    define_devices(registry)
    define_evaluation(registry)
    add = Group(RUNS, registry)
    add.add(
        "seed", int, 0, "seed for splits, initial models, cohorts, batches and sampling", at_least=0
    )
    add.add("split", int, None, "seed for the split of the data, instead of --seed", at_least=0)
    add.add("out", Path, None, "folder for the run; default: runs/METHOD-DATASET-TIME")
    text = "continue from the newest intact checkpoint in --out; from_scratch: start over in that folder"
    add.add("resume", bool | Literal["from_scratch"], False, text)


def run(settings: Settings) -> None:
    names = build.read_methods(settings)
    if settings.resume and not settings.out:
        raise FlagError("--resume: needs the run's folder, --out")
    settings = settings.with_defaults(names)
    settings.check_read()
    trial = build.Trial(settings.seed, settings.split)
    clients = build.build_clients(settings, trial.of_data)
    made = build.build_run(settings, names[0], clients, trial)
    out = folder(settings)
    unseen = f" and {clients[1].num_clients} unseen ones" if clients[1] else ""
    print(
        f"{names[0]} on {made.clients.name}: {made.clients.num_clients} clients{unseen}, {settings.rounds} rounds"
    )
    build.print_defaults(settings)
    report.preload()
    result = made.train(
        settings.rounds,
        out=out,
        resume=settings.resume,
        eval_every=settings.eval_every,
        checkpoint_every=settings.checkpoint_every,
        say=print,
        profile=settings.profile,
        tracker=build.build_tracker(settings, out),
    )
    page = result.write_report()
    show(result.summary)
    print(f"report: {page}")


def folder(settings: Settings) -> Path:
    if settings.out:
        return Path(settings.out)
    now = int(processes.from_first(np.array(time.time(), np.int32)))  # hosts' clocks may differ
    when = f"{datetime.datetime.fromtimestamp(now, datetime.UTC):%Y%m%d-%H%M%S}"
    return Path(f"runs/{settings.method}-{settings.dataset.replace(':', '-')}-{when}")


def show(summary: dict) -> None:
    classification = summary["task"] == "classification"
    privacy = summary["privacy"]
    names = ["accuracy", "accuracy_bottom_decile", "accuracy_min"] if classification else []
    own = summary["metrics"]
    heads = [
        "",
        "round",
        *(name.replace("accuracy_", "").replace("_", " ") for name in names),
        "test loss",
    ]
    heads += [name.replace("_", " ") for name in own]
    last = summary["last"]
    best = summary["best"]
    unseen = summary["unseen"]
    rows = [("last", last), (f"best by {best['selected_by'].replace('_', ' ')}", best)]
    rows += [("last, on unseen clients", {"round": last["round"]} | unseen)] if unseen else []
    body = [
        [
            *(
                label,
                str(row["round"]),
                *(f"{100 * row[name]:.1f} %" for name in names),
                f"{row['loss']:.4f}",
            ),
            *(f"{row.get(name, np.nan):.3f}" for name in own),
        ]
        for label, row in rows
    ]
    for kind, ledger in (
        ("epsilon", privacy or {}),
        ("client epsilon", (privacy or {}).get("of_clients", {})),
    ):
        if "epsilon" in ledger:
            heads.append(f"{kind} at delta {ledger['delta']:g}")
            body = [
                [*body[0], epsilon_text([ledger["epsilon"]])],
                *([*row, ""] for row in body[1:]),
            ]
    score = score_of(summary)
    notes = terms.means([{"score": score, **undefined([summary], score)}])
    title = f"{summary['method']} on {summary['dataset']}: {summary['scored']}"
    tables.show(title, heads, body, notes=notes)


COMMAND = Command(__doc__ or "", define, run)
