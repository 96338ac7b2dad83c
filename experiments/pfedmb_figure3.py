"""pFedMB's Figure 3: the clients' weights of the branches over rounds, with Eq. 5's average and with Eq. 6's.

    python -m experiments.pfedmb_figure3

Ten clients in five pairs of the same two classes, one alpha for all layers. Writes figure3.png, and as table.md, .csv,
.json for each seed how many pairs have found each other: the cosine of their two alphas, and the branch of most weight.
"""

from __future__ import annotations

from absl import flags

from experiments import common, pfedmb, sweeps, tables
from pfljax import report
from pfljax.core.types import UsageError
from pfljax.training import files

FLAGS = flags.FLAGS

pfedmb.define_flags(["pfedmb"], ["0", "1", "2"], "runs/pfedmb-figure3")
FLAGS.set_default("pfedmb.per_layer", False)
VARIANTS = {"alpha": "average by alpha (Eq. 5)", "plain": "plain average (Eq. 6)"}
ALIKE = 0.95  # cosine from which on two alphas are nearly the same


def run() -> None:
    """The command."""
    names, seeds, out = pfedmb.STUDY.set_up()
    if names != ["pfedmb"]:
        raise UsageError(f"--algorithms={','.join(names)}: accepted: pfedmb")
    sweeps.refuse("pfedmb.averaging", "both are compared")
    rows, body, panels = [], [], {}
    for averaging, title in VARIANTS.items():
        row = tables.Row(title, names[0], {f"{names[0]}__averaging": averaging})
        cell = pfedmb.STUDY.accuracies(row, seeds, out / averaging)
        for place, seed in enumerate(seeds):
            found = files.read_npz(out / averaging / f"seed-{seed}" / "collaboration.npz")
            cosines, branches = pfedmb.pairs_of(found["weights"][-1], found["distribution"])
            alike, apart = sum(cosine > ALIKE for cosine in cosines), len(set(branches))
            panels.setdefault(title, (found["round"], found["weights"], found["distribution"]))
            entry = {"averaging": averaging, "seed": seed, "cosines": cosines, "branches": branches}
            rows.append(entry | {"accuracy": cell["accuracies"][place], "paper": None})
            accuracy = f"{100 * cell['accuracies'][place]:.1f}"
            body.append([title, str(seed), f"{alike} of {len(cosines)}", f"{apart}", accuracy])
    report.save(report.branch_weights(panels), out / "figure3.png")
    heads = [
        "averaging",
        "seed",
        f"pairs with a cosine over {ALIKE}",
        "different branches of most weight",
        "accuracy, %",
    ]
    title = f"{FLAGS.dataset}, {FLAGS.num_clients} clients in pairs, after the last round"
    sweeps.write_table(title, heads, body, rows, out, "figure3.png")
    pfedmb.STUDY.print_differences(tables.Row(names[0], names[0], {}), cell)


if __name__ == "__main__":
    common.main(run)
