"""FedFomo's Table 2 (CIFAR-10) and 5 (CIFAR-100): 15 clients by the number of latent distributions.

    python -m experiments.fedfomo_table2
    python -m experiments.fedfomo_table2 --data_file=CIFAR10.npz --seeds=0,1,2

EMD is the clients' mean distance from the whole, sum_c |p_k(c) - p(c)|; the paper's, up to 2.8, cannot be this.
"""

from __future__ import annotations

from absl import flags

from experiments import common, fedfomo, sweeps, tables

FLAGS = flags.FLAGS

fedfomo.define_flags([*fedfomo.BASELINES, "fedfomo"], ["0"], "runs/fedfomo-table2")
flags.DEFINE_list("distributions", [str(d) for d in fedfomo.DISTRIBUTIONS], "numbers of distributions, a column each")


def run() -> None:
    """The command."""
    rows, seeds, out = fedfomo.set_up()
    paper = fedfomo.STUDY.values(fedfomo.TABLE2)
    columns = [
        tables.Column(
            f"D={number}, %",
            f"distributions-{number}",
            {"num_distributions": number},
            paper._replace(by_row={title: v[number] for title, v in paper.by_row.items() if number in v}),
        )
        for number in sweeps.numbers("distributions", int, sets="num_distributions")
    ]
    title = f"{FLAGS.dataset}, {FLAGS.num_clients} clients, test accuracy after the last round"
    fedfomo.STUDY.write_table(title, rows, columns, seeds, out)
    if paper.by_row:
        theirs = ", ".join(f"{value:g} (D={number})" for number, value in fedfomo.EMD[paper.data].items())
        print(f"The paper's EMD, by a measure that it does not define: {theirs}.")


if __name__ == "__main__":
    common.main(run)
