"""FedeRiCo's Figure 1: a sine curve on successive intervals, personal linear models and one global model.

    python -m experiments.federico.figure1

It trains Algorithm 1 to the letter, FedeRiCo as implemented here (both with the paper's epsilon, beta and M), and
FedAvg. Every run leaves a page with the curve; the table shows the errors and which intervals share models.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments.federico import curve
from pfljax.cli import build, launch, tables, train
from pfljax.cli.settings import Settings
from pfljax.evaluation import collaboration
from pfljax.folder import files

RUNS = {"paper": {"federico.faithful": True}, "federico": {}}


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    train.define(registry)
    registry.set_default("dataset", "sine")
    registry.set_default("out", "runs/federico-figure1")


def run(settings: Settings) -> None:
    """The command."""
    if settings.method != "federico":
        raise settings.error("method", "accepted: federico")
    for hyperparameter in ("faithful", "effective_examples"):
        settings.refuse(f"federico.{hyperparameter}", "the two runs differ in it")
    for flag in ("resume", "profile"):
        settings.refuse(flag, "finished runs in the folder are always kept")
    build.read_methods(settings)
    settings = settings.with_defaults(["federico"])
    rows = []
    body = []
    for name, hyperparameters in RUNS.items():
        row = {
            "run": name,
            **score(settings.replace(hyperparameters), Path(settings.out) / name),
            "paper": None,
        }
        rows.append(row)
        cells = [row["loss"], row["loss"] / row["fedavg_loss"], row["next"], row["apart"]]
        body.append(
            [
                name,
                *(f"{cell:.{digits}f}" for cell, digits in zip(cells, (4, 2, 2, 2), strict=True)),
            ]
        )
    heads = ["", "mean squared error", "x FedAvg's", "cosine of weights, next intervals", "others"]
    title = f"sine, {settings.num_clients} intervals, after {settings.rounds} rounds"
    tables.write(title, heads, body, rows, Path(settings.out), "*/figures/curve.png")
    print("The paper prints no values; its figure shows weights on neighboring intervals only.")


def score(settings: Settings, out: Path) -> dict:
    """One run: its error and FedAvg's, and the similarity of weights between neighboring and other intervals."""
    trial = build.Trial(settings.seed, settings.split)
    clients = build.build_clients(settings, trial.data_seed)
    every = {"eval_every": settings.eval_every, "checkpoint_every": settings.checkpoint_every}
    result = build.build_run(settings, "federico", clients, trial).train(
        settings.rounds, out=out, resume=True, **every
    )
    curve.write(settings, clients, result, out)
    result.write_report()
    kept = files.read_npz(out / "collaboration.npz")
    alike = collaboration.cosines(kept["index"][-1], kept["weights"][-1])
    apart = np.abs(np.subtract.outer(np.arange(len(alike)), np.arange(len(alike))))
    fedavg = min(
        files.read_json(path)["last"]["loss"] for path in out.glob("fedavg-*/summary.json")
    )
    means = {"next": float(alike[apart == 1].mean()), "apart": float(alike[apart > 1].mean())}
    return {"loss": result.loss, "fedavg_loss": fedavg, **means}


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
