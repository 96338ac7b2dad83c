"""Trains one method on one data set, and writes results, checkpoints, figures and a report page.

    pfljax train

trains FedeRiCoFriends, a method of ours, on scikit-learn's digits: 16 clients with 15 training examples each, from 2
label groups. It takes well under a minute on 2 cores.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from absl import flags

from pfljax import report
from pfljax.api.table import epsilon_text, undefined
from pfljax.cli import build, json_output, tables
from pfljax.cli.flag_help import HELP
from pfljax.cli.flags import (
    RUNS,
    WHAT,
    define_data,
    define_devices,
    define_evaluation,
    define_training,
    define_verbose,
)
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings
from pfljax.contract import processes
from pfljax.report import terms
from pfljax.report.run_data import score_of
from pfljax.settings.method import METHODS
from pfljax.training import progress

LARGE = ("per_client", "plan")  # entries that --json leaves out; summary.json has them


def define(registry: flags.FlagValues) -> None:
    text = f"Method to train: {', '.join(METHODS)}, or FILE.py:NAME for your own."
    Group(WHAT, registry).add("method", str, "federico_friends", text)
    define_training(registry)
    define_data(registry)
    define_devices(registry)
    define_evaluation(registry)
    define_verbose(registry)
    add = Group(RUNS, registry)
    add.add("seed", int, 0, HELP["seed"], at_least=0)
    add.add("split", int, None, HELP["split"], at_least=0)
    add.add("out", Path, None, "Folder of the run. Default: runs/METHOD-DATASET-TIME.")
    add.add("resume", bool | Literal["from_scratch"], False, HELP["resume"])
    json_output.define(registry)


def run(settings: Settings) -> Mapping[str, Any]:
    names = build.read_methods(settings)
    if settings.resume and not settings.out:
        raise FlagError("--resume: needs the run's folder, --out")
    settings = settings.with_defaults(names)
    settings.check_read()
    trial = build.Trial(settings.seed, settings.split)
    clients = build.build_clients(settings, trial.data_seed)
    run_of_flags = build.build_run(settings, names[0], clients, trial)
    out = folder(settings)
    unseen = f" and {clients[1].num_clients} unseen ones" if clients[1] else ""
    counts = f"{run_of_flags.clients.num_clients} clients{unseen}, {settings.rounds} rounds"
    print(f"{names[0]} on {run_of_flags.clients.name}: {counts}")
    build.print_defaults(settings)
    report.preload()
    result = run_of_flags.train(
        settings.rounds,
        out=out,
        resume=settings.resume,
        eval_every=settings.eval_every,
        checkpoint_every=settings.checkpoint_every,
        profile=settings.profile,
        tracker=build.build_tracker(settings, out),
    )
    with progress.announced("drawing the page"):
        page = result.write_report()
    show(result.summary)
    print(f"report: {page}")
    summary = {name: value for name, value in result.summary.items() if name not in LARGE}
    return {"out": str(out), "report": str(page), **summary}


def folder(settings: Settings) -> Path:
    if settings.out:
        return Path(settings.out)
    now = int(processes.from_first(np.array(time.time(), np.int32)))  # hosts' clocks may differ
    when = f"{datetime.datetime.fromtimestamp(now, datetime.UTC):%Y%m%d-%H%M%S}"
    data_set = re.sub(r"[:/\\]+", "-", settings.dataset)
    return Path(f"runs/{settings.method}-{data_set}-{when}")


def show(summary: dict) -> None:
    """Prints the table of a run's scores."""
    is_classification = summary["task"] == "classification"
    accuracies = ["accuracy", "accuracy_bottom_decile", "accuracy_min"] if is_classification else []
    metrics = summary["metrics"]
    heads = ["", "round"]
    heads += [name.replace("accuracy_", "").replace("_", " ") for name in accuracies]
    heads.append("test loss")
    heads += [name.replace("_", " ") for name in metrics]

    # A row for each evaluation.
    last = summary["last"]
    best = summary["best"]
    rows = [("last", last), (f"best by {best['selected_by'].replace('_', ' ')}", best)]
    if summary["unseen"]:
        rows.append(("last, on unseen clients", {"round": last["round"]} | summary["unseen"]))
    body = []
    for label, row in rows:
        cells = [label, str(row["round"])]
        cells += [f"{100 * row[name]:.1f} %" for name in accuracies]
        cells.append(f"{row['loss']:.4f}")
        cells += [f"{row.get(name, np.nan):.3f}" for name in metrics]
        body.append(cells)

    # Columns for privacy, which are of the last round.
    privacy = summary["privacy"] or {}
    ledgers = {"epsilon": privacy, "client epsilon": privacy.get("of_clients", {})}
    for name, ledger in ledgers.items():
        if "epsilon" in ledger:
            heads.append(f"{name} at delta {ledger['delta']:g}")
            body[0].append(epsilon_text([ledger["epsilon"]]))
            for cells in body[1:]:
                cells.append("")
    score = score_of(summary)
    row = {"method": summary["method"], "score": score, **undefined([summary], score)}
    notes = terms.means([row])
    title = f"{summary['method']} on {summary['dataset']}: {summary['scored']}"
    tables.show(title, heads, body, notes=notes)


COMMAND = Command(__doc__ or "", define, run)
