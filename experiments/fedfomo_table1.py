"""FedFomo's Table 1: two classes a client, 15 clients and 100, beside the paper's values.

    python -m experiments.fedfomo_table1
    python -m experiments.fedfomo_table1 --data_file=CIFAR10.npz --seeds=0,1,2

Of 100 clients a tenth takes part in a round, in five times the rounds. On digits, whose 1,797 images are few for so
many clients, beside the paper's values for MNIST.
"""

from __future__ import annotations

from absl import flags

from experiments import common, fedfomo, sweeps, tables

FLAGS = flags.FLAGS

fedfomo.define_flags([*fedfomo.BASELINES, "fedfomo"], ["0"], "runs/fedfomo-table1")
FLAGS.set_default("partition", "pathological")
flags.DEFINE_list("clients", ["15", "100"], "numbers of clients, a column each; of more than 15 a tenth a round")


def run() -> None:
    """The command."""
    rows, seeds, out = fedfomo.set_up()
    sweeps.refuse("participation", "the table's columns have their own")
    paper = fedfomo.STUDY.values(fedfomo.TABLE1, "mnist")
    with fedfomo.STUDY.settings_of(rows[0]):
        rounds = FLAGS.rounds
    columns = []
    for number in sweeps.numbers("clients", int, sets="num_clients"):
        many = number > 15
        settings = {"num_clients": number, "participation": 0.1 if many else 1.0, "rounds": rounds * (5 if many else 1)}
        place = {15: 0, 100: 1}.get(number)
        values = {} if place is None else {title: both[place] for title, both in paper.by_row.items()}
        values = paper._replace(by_row=values)
        columns.append(tables.Column(f"{number} clients, %", f"clients-{number}", settings, values))
    title = f"{FLAGS.dataset}, two classes a client, test accuracy after the last round"
    fedfomo.STUDY.write_table(title, rows, columns, seeds, out)


if __name__ == "__main__":
    common.main(run)
