"""Robustness to attacks: accuracy of the honest clients against the share of attackers, for every attack.

    python -m experiments.robustness
    python -m experiments.robustness --attacks=sign_flip --shares=0,0.2 --seeds=0,1,2

Ditto's paper has such figures (Li, Hu, Beirami, Smith, ICML 2021). The lines are FedAvg with every aggregator, Local,
Ditto with the mean and the median, and FedeRiCoFriends. A run has diverged if the loss of an honest client is no longer
finite; it counts as guessing, 1 / C. The table shows the weight that FedeRiCoFriends' honest clients give to attackers.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments.figures import sweep_figure
from experiments.papers import of_accuracies, over_runs
from pfljax import report
from pfljax.api import table
from pfljax.cli import build, launch, tables
from pfljax.cli.flags import (
    RUNS,
    define_data,
    define_devices,
    define_evaluation,
    define_sweep,
    define_training,
)
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.data.federation import draw_attackers
from pfljax.folder import files
from pfljax.stages.attacks import Kind
from pfljax.stages.robust import Aggregator

METHODS = ("fedavg", "local", "ditto", "federico_friends")
# The aggregators that a method runs with by default; all other methods use the mean.
AGGREGATED = {
    "fedavg": ("mean", "median", "trimmed_mean", "krum", "geometric_median"),
    "ditto": ("mean", "median"),
}


class Line(NamedTuple):
    """A line of the figure: a method with an aggregator."""

    method: str
    aggregator: str

    @property
    def title(self) -> str:
        """Title in the table and figure."""
        return self.method if self.aggregator == "mean" else f"{self.method}, {self.aggregator}"


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags: 20 clients with examples from one distribution."""
    define_sweep(registry, METHODS, ["0"], "runs/robustness")
    define_training(registry)
    define_data(registry)
    define_devices(registry)
    define_evaluation(registry)
    add = Group(RUNS, registry)
    attacks = typing.get_args(Kind)[1:]
    add.several(
        "attacks", ["label_flip", "sign_flip", "noise", "scale"], "attacks, one panel each", attacks
    )
    add.several(
        "shares",
        ["0", "0.1", "0.2", "0.3", "0.4"],
        "shares of attackers",
        float,
        at_least=0,
        below=1,
    )
    aggregators = typing.get_args(Aggregator)
    text = "aggregators of every method whose server averages; none: some for fedavg, mean and median for ditto"
    add.several("aggregators", [], text, aggregators, empty=True)
    for name, value in {"num_clients": 20, "partition": "iid"}.items():
        registry.set_default(name, value)


def aggregators_of(settings: Settings, name: str) -> Sequence[str]:
    """The aggregators that a method runs with: the mean if its server averages nothing."""
    if not settings.aggregators:
        return AGGREGATED.get(name, ("mean",))
    trial = build.trials_of(settings)[0]
    try:
        build.build_run(
            settings.pinned(aggregator="median"),
            name,
            build.cached_clients(settings, trial.data_seed),
            trial,
        )
    except ArgumentError as error:
        if error.argument != "aggregator":
            raise
        return ("mean",)
    return settings.aggregators


def cell_of(
    settings: Settings, line: Line, attack: str, share: float, out: Path
) -> tuple[Settings, Path]:
    """Settings and folder for a line and a share of attackers."""
    values = {
        "attack_kind": attack if share else "none",
        "attackers": share,
        "aggregator": line.aggregator,
    }
    folder = out / line.title.replace(", ", "-") / (f"{attack}-{share:g}" if share else "clean")
    return settings.pinned(**values), folder


def attacked(settings: Settings, line: Line, attack: str, share: float, out: Path) -> dict:
    """Scores for a line and a share of attackers: honest clients' accuracy, and the weight they give to attackers."""
    settings, folder = cell_of(settings, line, attack, share, out)
    trials = build.trials_of(settings)
    # All seeds at once, which one program may train. If some of them fail, each seed is trained alone below.
    with contextlib.suppress(RunError):
        build.train_cells(settings, line.method, folder)

    accuracies = []
    given = []
    for trial in trials:
        try:
            alone = settings.replace(
                seeds=[str(trial.seed)], splits=[] if trial.split is None else [str(trial.split)]
            )
            (summary,) = build.train_cells(alone, line.method, folder).summaries
        except RunError as error:
            print(f"  {folder / trial.folder}: {error}")
            clients, _ = build.cached_clients(settings, trial.data_seed)
            accuracies.append(1 / clients.num_classes)
        else:
            accuracies.append(summary["last"]["accuracy"])
            given.append(
                weight_of_attackers(
                    folder / trial.folder, summary["num_clients"], share, trial.seed
                )
            )
    known = [weight for weight in given if weight is not None]
    return {
        "panel": attack,
        "method": line.title,
        "value": share,
        "accuracy": float(np.mean(accuracies)),
        **of_accuracies(accuracies),
        "paper": None,
        "diverged": len(trials) - len(given),
        "weight_of_attackers": float(np.mean(known)) if known else None,
    }


def weight_of_attackers(folder: Path, num_clients: int, share: float, seed: int) -> float | None:
    """Mean share of weight that honest clients give to attackers' models; None if models do not belong to clients."""
    used = files.read_npz(folder / "collaboration.npz")
    if str(used["topology"]) != "peers" or not share:
        return None
    attacker = draw_attackers(num_clients, share, seed)
    on_attackers = (used["weights"][-1] * attacker[used["index"][-1]]).sum(axis=1)
    return float(on_attackers[~attacker].mean())


def run(settings: Settings) -> None:
    """The command."""
    names = build.read_methods(settings)
    for flag, why in {
        "attack_kind": "--attacks",
        "attackers": "--shares",
        "aggregator": "--aggregators",
    }.items():
        settings.refuse(flag, f"{why} sets its values")
    shares = settings.numbers("shares", float)
    settings = settings.with_defaults(names)
    # the preset has few examples per client, so medians are far from means
    if not settings.present("train_examples"):
        settings = settings.replace(train_examples=0)
    lines = [Line(name, each) for name in names for each in aggregators_of(settings, name)]
    out = Path(settings.out)
    points = []
    body = []
    asked = [
        (line, *cell_of(settings, line, *place, out))
        for line in lines
        for place in product(settings.attacks, shares)
    ]
    cells = [(own, line.method, folder) for line, own, folder in asked]
    build.check_cells(settings, cells)
    build.print_defaults(settings)
    for number, line in enumerate(lines, 1):
        for attack in settings.attacks:
            found = [attacked(settings, line, attack, share, out) for share in shares]
            points += found
            body.append([line.title, attack, *[shown(cell) for cell in found]])
        print(f"{number} of {len(lines)} lines done: {line.title}")
    axes = {attack: f"share of attackers, {attack}" for attack in settings.attacks}
    report.save(sweep_figure(points, axes), out / "robustness.png")
    clients = f"{settings.dataset}, {settings.partition} partition"
    title = f"{clients}: accuracy of the honest clients after {settings.rounds} rounds, %, by share of attackers"
    title += f"; {table.named(build.trials_of(settings))}; sample deviation over runs, their number in brackets"
    title += "; and the weight that honest clients give to attackers"
    heads = ["method", "attack", *[f"{share:g}" for share in shares]]
    tables.write(title, heads, body, points, out, "robustness.png")


def shown(cell: dict[str, Any]) -> str:
    """A cell of the table."""
    text = over_runs(cell["accuracies"])
    weight = cell["weight_of_attackers"]
    diverged = cell["diverged"]
    text += "" if weight is None else f", attackers {100 * weight:.1f}"
    return text + (f", diverged {diverged} of {len(cell['accuracies'])}" if diverged else "")


COMMAND = launch.Command(__doc__ or "", define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
