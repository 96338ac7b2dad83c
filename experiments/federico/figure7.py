"""FedeRiCo's Figure 7: each client's weights over rounds for values of beta, the weight of the newest loss.

python -m experiments.federico.figure7
python -m experiments.federico.figure7 --data_file=FEATURES.npz --preset=features
"""

from __future__ import annotations

from experiments.federico.paper import Line, weights_command
from pfljax.cli import launch

LINES = [
    Line(f"beta-{beta:g}", "federico", {"federico.beta": beta}) for beta in (0.1, 0.3, 0.6, 0.9)
]
COMMAND = weights_command(__doc__, "figure7", LINES, "weights by beta", varied=["federico.beta"])

if __name__ == "__main__":
    launch.main(COMMAND)
