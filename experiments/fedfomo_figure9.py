"""FedFomo's Figure 9: accuracy against the share of a client's examples that is for validation.

    python -m experiments.fedfomo_figure9

Writes figure9.png, and the points as table.md, .csv and .json. The paper draws its points without numbers. Its
first share, 0.01, is less than an example of digits.
"""

from __future__ import annotations

from absl import flags

from experiments import common, fedfomo, sweeps

FLAGS = flags.FLAGS

fedfomo.define_flags(["fedfomo"], ["0", "1", "2"], "runs/fedfomo-figure9")
flags.DEFINE_list("shares", ["0.05", "0.1", "0.2", "0.4", "0.6", "0.8", "0.9"], "of the examples for validation")


def run() -> None:
    """The command."""
    shares = sweeps.numbers("shares", float, below=1, sets="validation_fraction")
    label = "share of a client's examples for validation"
    fedfomo.STUDY.write_figure("figure9.png", {"validation_fraction": (label, shares)})


if __name__ == "__main__":
    common.main(run)
