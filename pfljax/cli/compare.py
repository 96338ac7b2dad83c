"""Compares methods on the same splits, seeds and cohorts: a table (markdown, CSV, JSON) and a figure.

    pfljax compare --algorithms=local,fedavg,fedavg_plus,federico --seeds=0,1,2

Each cell, a method with a seed, is a run of its own in OUT/METHOD/seed-N; a finished cell is not run again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from pfljax import report
from pfljax.cli import build, sweep
from pfljax.cli.flags import define_data, define_devices, define_evaluation, define_sweep, define_training
from pfljax.cli.launch import Command
from pfljax.cli.settings import Settings
from pfljax.cli.train import epsilon_text
from pfljax.core.errors import RunError
from pfljax.training import files


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    define_sweep(registry, ["local", "fedavg", "fedavg_plus", "federico"], ["0", "1", "2"], "runs/compare")
    define_training(registry)
    define_data(registry)
    define_devices(registry)
    define_evaluation(registry)


def run(settings: Settings) -> None:
    """The command."""
    names, seeds = build.read_methods(settings), sweep.seed_numbers(settings)
    settings = settings.with_defaults(names)
    build.print_defaults(settings)
    out, failed = Path(settings.out), {}
    rows, summary = [], {}
    for number, name in enumerate(names, 1):
        try:
            summaries = sweep.cells(settings, name, seeds, out / name)
        except RunError as error:  # the others' results are worth having
            print(f"  {name}: {error}")
            failed[name] = error
        else:
            scores = [score(s, out / name / f"seed-{seed}") for seed, s in zip(seeds, summaries, strict=True)]
            rows.append(row_of(name, scores))
            summary = summaries[0]
        print(f"{number} of {len(names)} methods done: {name}")
    if not rows:
        raise next(iter(failed.values()))
    report.save(report.comparison_figure(rows), out / "comparison.png")
    title = (
        f"{summary['dataset']}, last of {settings.rounds} rounds, mean ± std over seeds {', '.join(map(str, seeds))}"
    )
    heads, body = columns(rows, summary["task"] == "classification")
    sweep.write_table(title, heads, body, rows, out, "comparison.png")
    for row in rows:
        if row["unaccounted"]:
            print(f"* {row['algorithm']}: epsilon does not count {row['unaccounted']}")
    if failed:
        raise RunError(f"not in the table: {'; '.join(f'{name}: {error}' for name, error in failed.items())}")


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
        "privacy": summary["privacy"],
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
        "epsilon": [score["privacy"]["epsilon"] for score in scores] if scores[0]["privacy"] else None,
        "unaccounted": (scores[0]["privacy"] or {}).get("unaccounted"),
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
    private = any(row["epsilon"] for row in rows)
    heads += ["epsilon"] if private else []
    heads += ["MB per client and round", "s per round"]
    body = []
    for row in rows:
        cells = [row["algorithm"], f"{percent(row['accuracy_mean'])} ± {percent(row['accuracy_std'])}"]
        cells += [percent(row["best_mean"])] + ([percent(row["bottom_decile_mean"])] if classification else [])
        cells += [percent(row["unseen_mean"])] if unseen else []
        cells += [epsilon_text(row["epsilon"]) + ("*" if row["unaccounted"] else "")] if private else []
        body.append([*cells, f"{row['megabytes_per_round']:.3g}", f"{row['seconds_per_round']:.3g}"])
    return heads, body


COMMAND = Command(__doc__, define, run)
