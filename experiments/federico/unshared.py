"""Does FedeRiCo hurt clients that share nothing, or only a part? Methods beside Local, in many cells.

    python -m experiments.federico.unshared
    python -m experiments.federico.unshared --data_file=MNIST.npz --cells=own-20,groups-2,writers --seeds=0,1
    python -m experiments.federico.unshared --methods=local,local_again

Eight clients have a network of 64 hidden units and examples of 64 dimensions (digits, or an npz file's images by their
64 principal components). Each seed has its own data, initial models and sampling. `experiments.federico.cells` has the
cells. Scores are accuracies in percent, in regression 100 times R squared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optax

import pfljax as pfl
from experiments.federico.cells import ABOUT, CELLS, Data, clients_of, is_regression, read
from pfljax.evaluation import rounding, statistics
from pfljax.folder import files
from pfljax.report.rendering import markdown_table

HIDDEN = 64
RATE = 0.01
AGAIN = 1000  # added to the seeds of `local_again`
METHODS = {
    "local": pfl.Local(),
    "local_again": pfl.Local(),  # on the same data, from other initial models: what chance does
    "fedavg": pfl.FedAvg(),
    "ditto": pfl.Ditto(),
    "fedem": pfl.FedEM(),
    "ifca": pfl.IFCA(),
    "literal": pfl.FedeRiCo(literal=True),
    "federico": pfl.FedeRiCo(),
    "federico_friends": pfl.FedeRiCoFriends(),
    # without one of its parts
    "without_references": pfl.FedeRiCoFriends(references=False),
    "without_classes": pfl.FedeRiCoFriends(by_class=False),
    "without_weights": pfl.FedeRiCoFriends(by_example=False),
    "without_temperatures": pfl.FedeRiCoFriends(temperatures=False),
}


class Scores(NamedTuple):
    """What a method reaches in a cell.

    Attributes:
        scores: (seeds, K) scores of all clients, in percent.
        local: (seeds, K) those of Local.
    """

    scores: np.ndarray
    local: np.ndarray

    @property
    def gains(self) -> np.ndarray:
        """The differences to Local (seeds, K)."""
        return rounding.subtract(self.scores, self.local)

    @property
    def losing(self) -> float:
        """The share of clients more than 5 points below Local."""
        errors = rounding.error_of(self.scores, self.local)  # five points are not more than five
        return float((self.gains < -5 - errors).mean())


def measure(
    cell: str, data: Data, methods: list[str], seeds: list[int], rounds: int, out: Path
) -> dict[str, Scores]:
    """Trains the methods on a cell."""
    local = pfl.LocalTraining(optax.adam(RATE))
    model = pfl.models.MLP((HIDDEN,))
    clients = clients_of(cell, data)
    score = "r2" if is_regression(cell) else "accuracy"
    options = {"metrics": {"r2": pfl.metrics.r2}, "score": "r2"} if score == "r2" else {}

    def same_clients(seed: int) -> pfl.Federation:
        return clients(seed % AGAIN)

    pairs = [(name, METHODS[name]) for name in methods if name != "local_again"]
    training = {"rounds": rounds, "reference": "local", **options}
    pfl.compare(pairs, clients, model, local, seeds=seeds, out=out, **training)
    if "local_again" in methods:
        others = [AGAIN + seed for seed in seeds]
        folder = out / "again"
        pfl.compare(["local"], same_clients, model, local, seeds=others, out=folder, **training)

    def last_scores(name: str) -> np.ndarray:
        folders = [out / name / f"seed-{seed}" for seed in seeds]
        if name == "local_again":
            folders = [out / "again" / "local" / f"seed-{AGAIN + seed}" for seed in seeds]
        arrays = [files.read_npz(folder / "results.npz") for folder in folders]
        return 100 * np.stack([array[f"{score}_test"][-1] for array in arrays], dtype=np.float64)

    scores = {name: last_scores(name) for name in methods}
    return {name: Scores(values, scores["local"]) for name, values in scores.items()}


def shown(name: str, found: Scores) -> str:
    """A cell of the table: the mean score, the paired difference to Local, and the share of losing clients."""
    mean = f"{found.scores.mean():.1f}"
    if name == "local":
        return mean
    gains = found.gains.mean(axis=1)
    low, high = statistics.interval(gains)
    return f"{mean}, {gains.mean():+.1f} [{low:+.1f}, {high:+.1f}], {found.losing:.0%}"


def main() -> None:
    about = "\n".join(f"{cell:18} {text}" for cell, text in ABOUT.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{about}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data_file", help="npz file with x, y and perhaps client; default: digits"
    )
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/federico-unshared"))
    args = parser.parse_args()
    methods = args.methods.split(",")
    cells = args.cells.split(",")
    for name, given, known in (
        ("methods", methods, METHODS),
        ("cells", cells, (*CELLS, "writers")),
    ):
        if not set(given) <= set(known):
            parser.error(f"--{name}={','.join(given)}: accepted: {','.join(known)}")
    if "local" not in methods:
        parser.error("--methods: accepted: methods with local, which they are compared with")
    data = read(args.data_file)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if "writers" in cells and data[2] is None:
        parser.error("--cells=writers: accepted with an npz file that has the array client")
    body = []
    for cell in cells:
        found = measure(cell, data, methods, seeds, args.rounds, args.out / cell)
        line = [cell, *(shown(name, found[name]) for name in methods)]
        body.append(line)
        print(", ".join(line), flush=True)
        files.write_csv(args.out / "table.csv", [["cell", *methods], *body])
    print(markdown_table(["cell", *methods], body))
    text = "mean over clients of the score, difference to Local with its 95 % interval over seeds, "
    print(text + "share of clients more than 5 points below Local")


if __name__ == "__main__":
    main()
