"""pFedMB's Table 2: two classes a client, and Dirichlet shares of each class, 15 clients and 50.

    python -m experiments.pfedmb_table2
    python -m experiments.pfedmb_table2 --data_file=CIFAR10.npz --seeds=0,1,2

Of 50 clients a fifth takes part in a round. The paper does not say its Dirichlet concentration; 0.5 is that of the
studies which it follows. Every method is tuned for five epochs before it is scored.
"""

from __future__ import annotations

from absl import flags

from experiments import common, pfedmb, sweeps, tables

FLAGS = flags.FLAGS

METHODS = ("local", "fedavg", "fedprox", "fedper", "pfedme", "ifca", "fedfomo", "fedamp", "pfedmb")
pfedmb.define_flags(METHODS, ["0"], "runs/pfedmb-table2")
flags.DEFINE_list("clients", ["15", "50"], "numbers of clients, for both partitions; of more than 15 a fifth a round")


def run() -> None:
    """The command."""
    names, seeds, out = pfedmb.STUDY.set_up()
    for flag in ("partition", "participation"):
        sweeps.refuse(flag, "the table's columns have their own")
    paper, numbers = pfedmb.STUDY.values(pfedmb.TABLE2), sweeps.numbers("clients", int, sets="num_clients")
    columns = []
    for start, (partition, label) in ((0, ("pathological", "two classes")), (2, ("dirichlet", "Dirichlet"))):
        for number in numbers:
            place = {15: start, 50: start + 1}.get(number)
            values = {} if place is None else {name: both[place] for name, both in paper.by_row.items()}
            settings = {"partition": partition, "num_clients": number, "participation": 0.2 if number > 15 else 1.0}
            columns.append(
                tables.Column(f"{label}, {number}, %", f"{partition}-{number}", settings, paper._replace(by_row=values))
            )
    rows = [tables.Row(name, name, {}) for name in names]
    title = f"{FLAGS.dataset}, test accuracy after the last round and fine-tuning"
    pfedmb.STUDY.write_table(title, rows, columns, seeds, out)


if __name__ == "__main__":
    common.main(run)
