"""FedeRiCo's Figure 4: each client's weights for FedEM's four components over rounds, on the data of Figure 3.

python -m experiments.federico.figure4
python -m experiments.federico.figure4 --data_file=CIFAR100.npz --preset=cifar100
"""

from __future__ import annotations

from experiments.federico.paper import Line, weights_command
from pfljax.cli import launch

LINES = [Line("fedem", "fedem", {})]
COMMAND = weights_command(__doc__, "figure4", LINES, "who shares FedEM's components")

if __name__ == "__main__":
    launch.main(COMMAND)
