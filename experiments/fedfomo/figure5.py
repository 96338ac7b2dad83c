"""FedFomo's Figure 5: private training, with clients' affinities (left) and accuracy against privacy (right).

    pip install -e '.[privacy]'
    python -m experiments.fedfomo.figure5
    python -m experiments.fedfomo.figure5 --data_file=CIFAR10.npz --seeds=0,1,2

Writes figure5.png, and the points as table.md, .csv and .json: those of Table 4, next to the paper's values. The
left panel shows the affinities of the first run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments.fedfomo import table4
from pfljax import report
from pfljax.cli import launch
from pfljax.cli.settings import Settings
from pfljax.folder import files


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    table4.define(registry)
    for name, value in {"algorithms": ["fedavg", "fedfomo"], "out": "runs/fedfomo-figure5"}.items():
        registry.set_default(name, value)


def run(settings: Settings) -> None:
    """The command."""
    if "fedfomo" not in settings.algorithms:
        raise settings.error("algorithms", "accepted: lists with fedfomo, since its affinities are drawn")
    study, entries = table4.measured(settings)
    affinities = {}
    for entry in entries:
        if entry["algorithm"] == "fedfomo":
            used = files.read_npz(Path(entry["folder"]) / study.trials[0].folder / "collaboration.npz")
            title = f"sigma {entry['sigma']:g}, epsilon {entry['epsilon_text']}"
            affinity = used["affinity"][-1]
            affinities[title] = affinity, used.get("distribution", np.zeros(len(affinity), int))
    report.save(report.privacy_figure(affinities, entries), study.out / "figure5.png")
    table4.write(study, entries, "figure5.png")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
