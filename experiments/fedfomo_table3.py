"""FedFomo's Table 3: targets out of the local distribution, beside the paper's values.

    python -m experiments.fedfomo_table3
    python -m experiments.fedfomo_table3 --data_file=CIFAR10.npz --seeds=0,1,2,3,4

The clients' (validation, test) pairs are dealt among them, anew for each seed.
"""

from __future__ import annotations

from absl import flags

from experiments import common, fedfomo, tables

FLAGS = flags.FLAGS

fedfomo.define_flags([*fedfomo.BASELINES, "fedfomo"], ["0", "1", "2"], "runs/fedfomo-table3")
FLAGS.set_default("targets", "shuffled")


def run() -> None:
    """The command."""
    rows, seeds, out = fedfomo.set_up()
    column = tables.Column("test accuracy, %", FLAGS.targets, {}, fedfomo.STUDY.values(fedfomo.TABLE3))
    title = f"{FLAGS.dataset}, {FLAGS.num_distributions} distributions, {FLAGS.targets} targets, after the last round"
    fedfomo.STUDY.write_table(title, rows, [column], seeds, out)


if __name__ == "__main__":
    common.main(run)
