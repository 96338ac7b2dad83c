"""Trains one method on one data set, and leaves results, checkpoints, figures and a page.

    python -m experiments.train

FedeRiCo on scikit-learn's digits, 16 clients with 15 training examples each from 2 label groups; well under a minute
on 2 cores. `--help` lists every flag.
"""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import common, curves
from pfljax import algorithms, report
from pfljax.core.types import UsageError
from pfljax.engine import processes
from pfljax.training import loop

FLAGS = flags.FLAGS

common.define_data_flags()
common.define_training_flags()
common.define_device_flags()
flags.DEFINE_string("algorithm", "federico", f"one of {', '.join(algorithms.METHODS)}")
flags.DEFINE_integer("seed", 0, "decides splits, initial models, cohorts, batches and sampling", lower_bound=0)
flags.DEFINE_string("out", None, "folder of the run; default: runs/ALGORITHM-DATASET-TIME")
flags.DEFINE_bool("resume", False, "go on from the newest whole checkpoint in --out")


def table(summary: dict) -> Table:
    """The result, short."""
    classification = summary["task"] == "classification"
    out = Table(title=f"{summary['algorithm']} on {summary['dataset']}: {summary['scored']}", title_justify="left")
    names = ["accuracy", "accuracy_bottom_decile", "accuracy_min"] if classification else []
    private = [f"epsilon at delta {summary['privacy']['delta']:g}"] if summary["privacy"] else []
    scores = [name.replace("accuracy_", "").replace("_", " ") for name in names]
    for heading in ("", "round", *scores, "test loss", *private):
        out.add_column(heading, justify="left" if not heading else "right")
    for which in ("last", "best"):
        row = summary[which]
        label = which if which == "last" else f"best by {row['selected_by'].replace('_', ' ')}"
        percent = [f"{100 * row[name]:.1f} %" for name in names]
        spent = [common.epsilon_text([summary["privacy"]["epsilon"]]) if which == "last" else ""] if private else []
        out.add_row(label, str(row["round"]), *percent, f"{row['loss']:.4f}", *spent)
    return out


def run() -> None:
    """The command."""
    algorithms.get(FLAGS.algorithm)
    common.check_knobs([FLAGS.algorithm])
    if FLAGS.resume and not FLAGS.out:
        raise UsageError("--resume: name the run's folder with --out")
    common.set_defaults([FLAGS.algorithm])
    federation, unseen = common.build_data(FLAGS.seed)
    setup = common.build_setup(FLAGS.algorithm, federation, unseen, FLAGS.seed)
    now = int(processes.from_first(np.int32(time.time())))  # one name on all hosts, whatever their clocks
    when = f"{datetime.datetime.fromtimestamp(now, datetime.UTC):%Y%m%d-%H%M%S}"
    out = Path(FLAGS.out or f"runs/{FLAGS.algorithm}-{FLAGS.dataset.replace(':', '-')}-{when}")
    print(f"{FLAGS.algorithm} on {federation.name}: {federation.num_clients} clients, {FLAGS.rounds} rounds")
    result = loop.run(setup, out, resume=FLAGS.resume)
    if FLAGS.dataset == "sine":
        curves.write(setup, result, out, FLAGS.seed)
    page = report.write(out)
    Console(width=110).print(table(result.summary))
    print(f"report: {page}")


if __name__ == "__main__":
    common.main(run)
