"""pFedMB's Table 1: ten clients in five pairs of the same two classes, beside the paper's values.

    python -m experiments.pfedmb_table1
    python -m experiments.pfedmb_table1 --data_file=CIFAR10.npz

One alpha for all layers and five branches, as in Section 5.2; every method is tuned for five epochs before it is
scored.
"""

from __future__ import annotations

from absl import flags

from experiments import common, pfedmb, tables

FLAGS = flags.FLAGS

pfedmb.define_flags(["local", "fedavg", "pfedmb"], ["0", "1", "2"], "runs/pfedmb-table1")
FLAGS.set_default("pfedmb.per_layer", False)


def run() -> None:
    """The command."""
    names, seeds, out = pfedmb.STUDY.set_up()
    rows = []
    for name in names:
        if name == "pfedmb" and not FLAGS["pfedmb.averaging"].present:
            rows.append(tables.Row(pfedmb.WITHOUT, name, {"pfedmb__averaging": "plain"}))
        rows.append(tables.Row(name, name, {}))
    column = tables.Column("test accuracy, %", FLAGS.partition, {}, pfedmb.STUDY.values(pfedmb.TABLE1))
    title = f"{FLAGS.dataset}, {FLAGS.num_clients} clients in pairs, after the last round and fine-tuning"
    pfedmb.STUDY.write_table(title, rows, [column], seeds, out)


if __name__ == "__main__":
    common.main(run)
