"""FedFomo's Tables 4 and 6: differentially private local training, beside the paper's values.

    pip install -e '.[privacy]'
    python -m experiments.fedfomo_table4
    python -m experiments.fedfomo_table4 --data_file=CIFAR10.npz --seeds=0,1,2

epsilon is the largest of the clients' by the ledger, at --dp_delta. fedfomo_average is the paper's "Ours (MA)". Without
noise nothing is clipped either.
"""

from __future__ import annotations

import math

from absl import flags

from experiments import common, fedfomo, sweeps, tables
from pfljax.local.privacy import Privacy

FLAGS = flags.FLAGS

fedfomo.define_flags(["fedavg", "fedfomo", "fedfomo_average"], ["0", "1", "2"], "runs/fedfomo-table4")
FLAGS.set_default("dp_clip_norm", 1.0)
flags.DEFINE_list("sigmas", ["0", "1", "2"], "noise multipliers, a row each for every method")


def run() -> None:
    """The command."""
    rows, seeds, out = fedfomo.set_up(downloads=())
    paper, entries, body = fedfomo.STUDY.values(fedfomo.TABLE4), [], []
    clips = {
        s: FLAGS.dp_clip_norm if s else math.inf for s in sweeps.numbers("sigmas", float, 0, sets="dp_noise_multiplier")
    }
    for sigma, clip in clips.items():
        Privacy(sigma, clip, FLAGS.dp_delta).check()
    for row in rows:
        for sigma, clip in clips.items():
            folder = out / f"sigma-{sigma:g}" / tables.folder(row)
            cell = fedfomo.STUDY.accuracies(row, seeds, folder, dp_noise_multiplier=sigma, dp_clip_norm=clip)
            theirs = paper.by_row.get(row.method, {}).get(sigma)
            entries.append({"algorithm": row.title, "sigma": sigma, "delta": FLAGS.dp_delta, **cell, "paper": theirs})
            line = [row.title, f"{FLAGS.dp_delta:g}", f"{sigma:g}", common.epsilon_text(cell["epsilon"])]
            beside = (
                "-" if theirs is None else f"{theirs[1]:.1f} (epsilon {'∞' if math.isinf(theirs[0]) else theirs[0]})"
            )
            body.append([*line, tables.shown(cell, seeds), beside])
            print(f"{row.title}, sigma {sigma:g} done")
    heads = ["method", "delta", "sigma", "epsilon", "test accuracy, %", paper.head]
    title = f"{FLAGS.dataset}, {FLAGS.num_distributions} distributions, private local training, after the last round"
    sweeps.write_table(title, heads, body, entries, out)
    fedfomo.STUDY.print_differences(rows[0], entries[0])
    for entry in {entry["algorithm"]: entry for entry in entries if entry["unaccounted"]}.values():
        print(f"{entry['algorithm']}: epsilon does not count {entry['unaccounted']}.")


if __name__ == "__main__":
    common.main(run)
