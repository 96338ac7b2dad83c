"""Do the constants of FedeRiCoFriends matter? Each is varied alone, in some cells of `experiments.federico.unshared`.

    python -m experiments.federico.constants
    python -m experiments.federico.constants --data_file=MNIST.npz --variants=default,slack-0 --cells=own-20,groups-2

The published constants were chosen on digits. The table shows the mean score in each cell; its last columns have the
mean difference to the published constants over cells, and the lowest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from experiments.federico.cells import CELLS, read
from experiments.federico.unshared import measure
from pfljax.algorithms import federico_friends
from pfljax.folder import files
from pfljax.report.rendering import markdown_table

FRIENDS = "federico_friends"
# Constants of `pfljax.algorithms.federico_friends` that take the place of the published ones.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"SLACK": federico_friends.SLACK},
    "slack-0": {"SLACK": 0.0},
    "slack-0.1": {"SLACK": 0.1},
    "slack-0.4": {"SLACK": 0.4},
    "prior-0.5": {"EVERYTHING": 0.45, "SOME": 0.05},
    "prior-0.99": {"EVERYTHING": 0.009, "SOME": 0.001},
    "everything-only": {"EVERYTHING": 0.1, "SOME": 1e-12},
    "classes-often": {"EVERYTHING": 0.05, "SOME": 0.05},
    "grid-8": {"GRID": 8},
    "grid-128": {"GRID": 128},
    "temperatures-2": {"TEMPERATURES": (1.0, 4.0)},
    "temperatures-9": {"TEMPERATURES": tuple(2.0 ** (power / 2) for power in range(9))},
}
SOME_CELLS = "own-20,groups-2,swap-4,exceptions-20,few-5,regression-1,regression-2,regression-8"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data_file", help="npz file with x, y and perhaps client; default: digits"
    )
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--cells", default=SOME_CELLS)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/federico-constants"))
    args = parser.parse_args()
    variants = args.variants.split(",")
    cells = args.cells.split(",")
    for name, given, known in (("variants", variants, VARIANTS), ("cells", cells, CELLS)):
        if not set(given) <= set(known):
            parser.error(f"--{name}={','.join(given)}: accepted: {','.join(known)}")
    if variants[0] != "default":
        parser.error("--variants: accepted: default first, with which others are compared")

    data = read(args.data_file)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    means = np.zeros((len(variants), len(cells)))
    for number, variant in enumerate(variants):
        with mock.patch.multiple(federico_friends, **VARIANTS[variant]):
            for place, cell in enumerate(cells):
                out = args.out / variant / cell
                found = measure(cell, data, ["local", FRIENDS], seeds, args.rounds, out)
                means[number, place] = found[FRIENDS].scores.mean()
        print(variant, *(f"{mean:.1f}" for mean in means[number]), flush=True)

    body = []
    for variant, scores in zip(variants, means, strict=True):
        differences = scores - means[0]
        line = [variant, *(f"{score:.1f}" for score in scores)]
        body.append([*line, f"{differences.mean():+.1f}", f"{differences.min():+.1f}"])
    head = ["constants", *cells, "mean difference", "lowest"]
    files.write_csv(args.out / "table.csv", [head, *body])
    print(markdown_table(head, body))


if __name__ == "__main__":
    main()
