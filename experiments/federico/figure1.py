"""FedeRiCo's Figure 1: a sine curve on successive intervals, personal linear models and one global model.

    python -m experiments.federico.figure1

It trains Algorithm 1 ("federico") and its listing to the letter ("literal"), FedeRiCoFriends, which is ours, all with
the paper's epsilon, beta and M, and FedAvg. Every run leaves a page with the curve; the table shows the errors and
which intervals share models.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments.federico import curve, paper
from pfljax.cli import build, launch, tables, train
from pfljax.cli.settings import Settings
from pfljax.evaluation import collaboration
from pfljax.folder import files

# by name: the method, and the flags that it sets
RUNS = {
    "literal": ("federico", paper.TO_THE_LETTER),
    "federico": ("federico", {}),
    "federico_friends": (paper.FRIENDS, {}),
}


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    train.define(registry)
    registry.set_default("dataset", "sine")
    registry.set_default("method", "federico")
    registry.set_default("out", "runs/federico-figure1")


def run(settings: Settings) -> None:
    """The command."""
    if settings.method != "federico":
        raise settings.error("method", "accepted: federico")
    settings.refuse("federico.literal", "the runs differ in it")
    for flag in ("resume", "profile"):
        settings.refuse(flag, "finished runs in the folder are always kept")
    build.read_methods(settings)
    settings = settings.with_defaults(["federico", paper.FRIENDS])
    rows = []
    body = []
    for name, (method, hyperparameters) in RUNS.items():
        own = settings.replace({"method": method, **hyperparameters})
        row = {
            "run": name,
            **score(own, Path(settings.out) / name),
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
    result = build.build_run(settings, settings.method, clients, trial).train(
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
