"""Compares methods on the same splits, seeds and cohorts: a table (markdown, CSV, JSON) and a figure.

    python -m experiments.compare --algorithms=local,fedavg,fedavg_plus,federico --seeds=0,1,2

Each cell, a method with a seed, is a run of its own in OUT/METHOD/seed-N; a finished cell is not run again.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import common
from pfljax import algorithms, report
from pfljax.training import files, loop
from pfljax.types import UsageError

FLAGS = flags.FLAGS

common.define_data_flags()
common.define_training_flags()
common.define_device_flags()
flags.DEFINE_list("algorithms", ["local", "fedavg", "fedavg_plus", "federico"], "methods, or all")
flags.DEFINE_list("seeds", ["0", "1", "2"], "each decides its own split, initial models, cohorts, batches, sampling")
flags.DEFINE_string("out", "runs/compare", "folder of the comparison; finished cells in it are kept")


def cell(name: str, seed: int, out: Path) -> dict:
    """One run's summary, trained unless it is there already."""
    federation, unseen = common.build_data(seed)
    setup = common.build_setup(name, federation, unseen, seed)
    loop.check_directory(out, setup.config, resume=True)
    summary = out / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["last"]["round"] >= setup.rounds:
        print(f"{name}, seed {seed}: finished before, kept")
        return json.loads(summary.read_text())
    print(f"{name}, seed {seed}: {federation.num_clients} clients, {setup.rounds} rounds")
    return loop.run(setup, out, resume=True, say=lambda line: None).summary


def score(summary: dict, out: Path) -> dict[str, np.ndarray]:
    """A cell's scores: the last accuracy (or mean squared error), its bottom decile, and the curve over rounds."""
    rows = files.read_jsonl(out / "metrics.jsonl")
    name = "accuracy" if summary["task"] == "classification" else "loss"
    last = summary["last"]
    return {
        "last": last[name],
        "best": summary["best"][name],
        "bottom_decile": last.get("accuracy_bottom_decile", np.nan),
        "rounds": np.array([row["round"] for row in rows]),
        "curve": np.array([row[name] for row in rows]),
        "megabytes": (last["bytes_down"] + last["bytes_up"]) / last["round"] / 1e6,
        "seconds": summary["seconds_per_round"],
        "unseen": (summary["unseen"] or {}).get(name, np.nan),
    }


def row_of(name: str, scores: list[dict]) -> dict:
    """A method's row: means and standard deviations over seeds."""
    mean = lambda key: float(np.mean([score[key] for score in scores]))
    curves = np.stack([score["curve"] for score in scores])
    return {
        "algorithm": name,
        "accuracy_mean": mean("last"),
        "accuracy_std": float(np.std([score["last"] for score in scores])),
        "best_mean": mean("best"),
        "bottom_decile_mean": mean("bottom_decile"),
        "unseen_mean": mean("unseen"),
        "megabytes_per_round": mean("megabytes"),
        "seconds_per_round": mean("seconds"),
        "rounds": scores[0]["rounds"].tolist(),
        "curve_mean": curves.mean(axis=0).tolist(),
        "curve_std": curves.std(axis=0).tolist(),
    }


def columns(rows: list[dict], classification: bool) -> tuple[list[str], list[list[str]]]:
    """The table's headings and cells."""
    percent = (lambda value: f"{100 * value:.1f}") if classification else (lambda value: f"{value:.4f}")
    heads = ["method", "test accuracy, %" if classification else "test MSE", "best round"]
    heads += ["bottom decile, %"] if classification else []
    unseen = any(np.isfinite(row["unseen_mean"]) for row in rows)
    heads += ["unseen clients"] if unseen else []
    heads += ["MB per client and round", "s per round"]
    body = []
    for row in rows:
        cells = [row["algorithm"], f"{percent(row['accuracy_mean'])} ± {percent(row['accuracy_std'])}"]
        cells += [percent(row["best_mean"])] + ([percent(row["bottom_decile_mean"])] if classification else [])
        cells += [percent(row["unseen_mean"])] if unseen else []
        body.append([*cells, f"{row['megabytes_per_round']:.3g}", f"{row['seconds_per_round']:.3g}"])
    return heads, body


def write(rows: list[dict], classification: bool, out: Path) -> Table:
    """Writes table.md, table.csv, table.json and comparison.png; returns the table for the terminal."""
    heads, body = columns(rows, classification)
    lines = [" | ".join(line) for line in [heads, ["---"] * len(heads), *body]]
    files.write_text(out / "table.md", "".join(f"| {line} |\n" for line in lines))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *body])
    files.write_text(out / "table.csv", text.getvalue())
    files.write_json(out / "table.json", rows)
    report.save(report.comparison_figure(rows), out / "comparison.png")
    table = Table()
    for head in heads:
        table.add_column(head, justify="left" if head == "method" else "right")
    for cells in body:
        table.add_row(*cells)
    return table


def run() -> None:
    """The command."""
    names = list(algorithms.METHODS) if FLAGS.algorithms == ["all"] else FLAGS.algorithms
    for name in names:
        algorithms.get(name, flag="--algorithms")
    common.check_knobs(names)
    try:
        seeds = [int(seed) for seed in FLAGS.seeds]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise UsageError(f"--seeds={','.join(FLAGS.seeds)}: accepted: whole numbers of 0 or more, separated by commas")
    common.set_defaults_of_data()
    out, rows = Path(FLAGS.out), []
    for number, name in enumerate(names):
        folders = [out / name / f"seed-{seed}" for seed in seeds]
        summaries = [cell(name, seed, folder) for seed, folder in zip(seeds, folders, strict=True)]
        rows.append(row_of(name, [score(s, f) for s, f in zip(summaries, folders, strict=True)]))
        print(f"{number + 1} of {len(names)} methods done")
    table = write(rows, summaries[0]["task"] == "classification", out)
    seeds = ", ".join(FLAGS.seeds)
    table.title = f"{summaries[0]['dataset']}, last of {FLAGS.rounds} rounds, mean ± std over seeds {seeds}"
    Console(width=120).print(table)
    print(f"table: {out / 'table.md'}, .csv, .json; figure: {out / 'comparison.png'}")


if __name__ == "__main__":
    common.main(run)
