"""FedFomo's Tables 4 and 6: differentially private local training, next to the paper's values.

    pip install -e '.[privacy]'
    python -m experiments.fedfomo.table4
    python -m experiments.fedfomo.table4 --data_file=CIFAR10.npz --seeds=0,1,2

epsilon is the clients' largest epsilon in the ledger, at --privacy_delta. fedfomo_average is the paper's "Ours (MA)".
Without noise, nothing is clipped either.
"""

from __future__ import annotations

import math

from absl import flags

from experiments.fedfomo import paper
from experiments.papers import Study
from pfljax.api.table import epsilon_text
from pfljax.cli import launch, tables
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.local.privacy import Privacy


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    methods = ["fedavg", "fedfomo", "fedfomo_average"]
    paper.define(registry, methods, ["0", "1", "2"], "runs/fedfomo-table4", privacy_clip_norm=1.0)
    Group(RUNS, registry).several(
        "sigmas",
        ["0", "1", "2"],
        "noise multipliers, one row each for every method",
        float,
        at_least=0,
    )


def run(settings: Settings) -> None:
    """The command."""
    study, entries = measured(settings)
    write(study, entries)


def measured(settings: Settings) -> tuple[Study, list[dict]]:
    """Every method with every sigma, with its epsilon and the paper's (epsilon, accuracy in percent)."""
    sigmas = settings.numbers("sigmas", float, sets="privacy_noise_multiplier")
    clips = {sigma: settings.privacy_clip_norm if sigma else math.inf for sigma in sigmas}
    for sigma, clip in clips.items():
        Privacy(sigma, clip)
    study = Study.start(paper.PAPER, settings)
    entries = []
    private = {
        sigma: {"privacy_noise_multiplier": sigma, "privacy_clip_norm": clip}
        for sigma, clip in clips.items()
    }
    rows = [
        (row, values, study.out / f"sigma-{sigma:g}" / row.folder)
        for row in paper.rows_of(study, downloads=())
        for sigma, values in private.items()
    ]
    study.check(rows)
    theirs = paper.values(study.settings, paper.TABLE4, partition_groups=5, targets="own").by_row
    for row, values, folder in rows:
        sigma = values["privacy_noise_multiplier"]
        cell = study.accuracies(row, folder, values)
        value = theirs.get(row.method, {}).get(sigma)
        fixed = {
            "method": row.title,
            "sigma": sigma,
            "delta": settings.privacy_delta,
            "folder": str(folder),
        }
        entries.append(
            fixed | {**cell, "epsilon_text": epsilon_text(cell["epsilon"]), "paper": value}
        )
        print(f"{row.title}, sigma {sigma:g} done")
    return study, entries


def write(study: Study, entries: list[dict], figure: str = "") -> None:
    """Writes the table."""
    body = []
    for entry in entries:
        line = [
            entry["method"],
            f"{entry['delta']:g}",
            f"{entry['sigma']:g}",
            entry["epsilon_text"],
        ]
        body.append([*line, study.shown(entry), beside(entry["paper"])])
    own = study.settings
    head = (
        paper.PAPER.values(own, paper.TABLE4).head
        if any(entry["paper"] for entry in entries)
        else "paper"
    )
    heads = ["method", "delta", "sigma", "epsilon", "test accuracy, %", head]
    title = f"{own.dataset}, {own.partition_groups} groups, private local training, after the last round"
    tables.write(title, heads, body, entries, study.out, figure)
    study.print_differences(paper.rows_of(study, downloads=())[0], entries[0])
    for entry in {entry["method"]: entry for entry in entries if entry["unaccounted"]}.values():
        print(f"{entry['method']}: epsilon does not cover {entry['unaccounted']}.")


def beside(value: tuple[float, float] | None) -> str:
    """The paper's accuracy and epsilon, or a dash."""
    if value is None:
        return "-"
    return f"{value[1]:.1f} (epsilon {'∞' if math.isinf(value[0]) else value[0]})"


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
