"""FedeRiCo's Figures 5 and 8: weights over rounds with accumulated losses and with their moving average.

    python -m experiments.federico.figure5
    python -m experiments.federico.figure5 --data_file=CIFAR10.npz

Accumulated losses use uniform sampling, as in the paper (its footnote 5); both runs use two label groups.
"""

from __future__ import annotations

from experiments.federico.paper import Line, weights_command
from pfljax.cli import launch

LINES = [
    Line(
        "accumulated",
        "federico",
        {"federico.tracking": "accumulated", "federico.epsilon": 1.0},
    ),
    Line("moving-average", "federico", {}),
]
COMMAND = weights_command(
    __doc__,
    "figure5",
    LINES,
    "accumulated losses and their moving average",
    varied=["federico.tracking", "federico.epsilon"],
    partition_groups=2,
)

if __name__ == "__main__":
    launch.main(COMMAND)
