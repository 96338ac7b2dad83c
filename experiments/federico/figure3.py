"""FedeRiCo's Figures 3 and 9: each client's weights over rounds, by true group of the models' owners.

python -m experiments.federico.figure3
python -m experiments.federico.figure3 --data_file=CIFAR100.npz --preset=cifar100
python -m experiments.federico.figure3 --splits=1,2,3                             (Figure 9: other splits)
"""

from __future__ import annotations

from experiments.federico.paper import Line, weights_command
from pfljax.cli import launch

LINES = [Line("federico", "federico", {})]
COMMAND = weights_command(__doc__, "figure3", LINES, "who shares models")

if __name__ == "__main__":
    launch.main(COMMAND)
