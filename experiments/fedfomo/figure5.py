"""FedFomo's Figure 5: private training, with clients' affinities (left) and accuracy against privacy (right).

    pip install -e '.[privacy]'
    python -m experiments.fedfomo.figure5
    python -m experiments.fedfomo.figure5 --data_file=CIFAR10.npz --seeds=0,1,2

Writes figure5.png, and the points as table.md, .csv and .json: those of Table 4, next to the paper's values. The
left panel shows the affinities of the first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.fedfomo import table4
from experiments.figures import ACCURACY, crosses, with_band
from pfljax import report
from pfljax.cli import launch
from pfljax.cli.settings import Settings
from pfljax.folder import former
from pfljax.report import pictures
from pfljax.report.draw import draw
from pfljax.report.picture import GRAY, Axis, Panel, colors


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    table4.define(registry)
    for name, value in {"methods": ["fedavg", "fedfomo"], "out": "runs/fedfomo-figure5"}.items():
        registry.set_default(name, value)


def privacy_figure(
    affinities: Mapping[str, tuple[np.ndarray, np.ndarray]], points: Sequence[dict]
) -> Figure:
    """Plots affinities under noise, and accuracy against the noise and its epsilon.

    Args:
        affinities: By title: affinities (K, K) after the last round, and distributions (K,).
        points: For each point "method", "sigma", "epsilon_text", "accuracy_mean", "accuracy_std", and "paper":
            (epsilon, accuracy in percent), drawn as a cross, or None.
    """
    panels = [
        pictures.affinity(values, groups, title) for title, (values, groups) in affinities.items()
    ]
    methods = list(dict.fromkeys(point["method"] for point in points))
    series = []
    for method, shade in zip(methods, colors(np.arange(len(methods))), strict=True):
        own = [point for point in points if point["method"] == method]
        sigmas, mean, std = (
            [point[name] for point in own] for name in ("sigma", "accuracy_mean", "accuracy_std")
        )
        series += with_band(sigmas, mean, std, method, {"color": shade, "symbol": "circle"})
        known = [point for point in own if point["paper"]]
        series.append(
            crosses([p["sigma"] for p in known], [p["paper"][1] / 100 for p in known], shade)
        )
    if any(point["paper"] for point in points):
        series.append(crosses([np.nan], [np.nan], GRAY, "the paper, CIFAR-10"))
    ticks = {
        point["sigma"]: f"{point['sigma']:g}\n{point['epsilon_text']}" for point in reversed(points)
    }
    panels.append(
        Panel(Axis("noise multiplier sigma, and epsilon", list(ticks.items())), ACCURACY, series)
    )
    return draw(panels, (3.4 * len(panels), 3.6))


def run(settings: Settings) -> None:
    """The command."""
    if "fedfomo" not in settings.methods:
        raise settings.error(
            "methods", "accepted: lists with fedfomo, since its affinities are drawn"
        )
    study, entries = table4.measured(settings)
    affinities = {}
    for entry in entries:
        if entry["method"] == "fedfomo":
            used = former.read_collaboration(
                Path(entry["folder"]) / study.trials[0].folder / "collaboration.npz"
            )
            title = f"sigma {entry['sigma']:g}, epsilon {entry['epsilon_text']}"
            affinity = used["affinity"][-1]
            affinities[title] = affinity, used.get("group", np.zeros(len(affinity), int))
    report.save(privacy_figure(affinities, entries), study.out / "figure5.png")
    table4.write(study, entries, "figure5.png")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
