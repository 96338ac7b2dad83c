"""FedFomo's Figure 3: accuracy against epsilon, and against the number of models downloaded, M.

    python -m experiments.fedfomo_figure3

Writes figure3.png, and the points as table.md, .csv and .json. The paper draws its curves without numbers.
"""

from __future__ import annotations

from absl import flags

from experiments import common, fedfomo, sweeps

FLAGS = flags.FLAGS

fedfomo.define_flags(["fedfomo"], ["0", "1", "2"], "runs/fedfomo-figure3")
flags.DEFINE_list("epsilons", ["0", "0.1", "0.3", "0.5", "1"], "probabilities of exploring, left; or none")
flags.DEFINE_list("downloads", ["1", "2", "5", "10"], "values of M, right; or none")


def run() -> None:
    """The command."""
    panels = {
        "epsilon": (
            "probability of a random model, first round",
            sweeps.numbers("epsilons", float, 0, sets="fedfomo.epsilon"),
        ),
        "neighbors": ("models downloaded, M", sweeps.numbers("downloads", int, sets="fedfomo.neighbors")),
    }
    fedfomo.STUDY.write_figure("figure3.png", panels)


if __name__ == "__main__":
    common.main(run)
