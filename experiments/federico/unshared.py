"""Does FedeRiCo hurt clients that share nothing? Methods beside Local, from nothing in common to everything.

    python -m experiments.federico.unshared
    python -m experiments.federico.unshared --data_file=MNIST.npz --cells=own-20,groups-2,writers --seeds=0,1

Eight clients have a network of 64 hidden units and examples of 64 dimensions (digits, or an npz file's images by their
64 principal components). Each seed has its own data, initial models and sampling. The cells:

    own-N         every client numbers the classes its own way; N training examples each
    rotated-N     every client rotates its inputs its own way
    groups-D      D label groups, 100 training examples each; D=1: one distribution
    dirichlet     shares of the classes from a Dirichlet distribution
    writers       natural clients, where the file has `client`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import optax

import pfljax as pfl
from pfljax.data import partitions
from pfljax.evaluation import statistics
from pfljax.folder import files
from pfljax.report.rendering import markdown_table
from pfljax.report.run_data import number_of

CLIENTS = 8
DIMENSIONS = 64
HIDDEN = 64
RATE = 0.01
TEST = 100
CELLS = (
    "own-20",
    "own-100",
    "rotated-20",
    "rotated-100",
    *(f"groups-{d}" for d in (1, 2, 3, 4, 8)),
    "dirichlet",
)
METHODS = {
    "local": pfl.Local(),
    "fedavg": pfl.FedAvg(),
    "fedem": pfl.FedEM(),
    "ifca": pfl.IFCA(),
    "literal": pfl.FedeRiCo(literal=True),
    "federico": pfl.FedeRiCo(),
    "federico_friends": pfl.FedeRiCoFriends(),
}
Data = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def read(file: str | None) -> Data:
    """x (n, 64), y (n,) and the clients (n,), if the file has them. Without a file, scikit-learn's digits."""
    if file is None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        client = None
    else:
        found = files.read_npz(Path(file))
        x = found["x"].reshape(len(found["y"]), -1)
        y = found["y"]
        client = found.get("client")
    x = x.astype(np.float32)
    x = x - x.mean(axis=0)
    if x.shape[1] > DIMENSIONS:
        axes = np.linalg.eigh(x.T @ x)[1][:, ::-1][:, :DIMENSIONS]
        x = x @ axes
    return x / np.sqrt(np.square(x).mean()), y.astype(np.int32), client


def clients_of(cell: str, data: Data) -> Callable[[int], pfl.Federation]:
    """Returns seed -> the clients of a cell."""
    kind, _, number = cell.partition("-")
    x, y, client = data

    def shared(seed: int) -> pfl.Federation:
        options = {"seed": seed, "standardize": False, "train_examples": 100, "test_examples": TEST}
        if kind == "writers":
            return pfl.Federation.from_arrays(x, y, client, num_clients=CLIENTS, **options)
        found = (
            partitions.Dirichlet() if kind == "dirichlet" else partitions.LabelGroups(int(number))
        )
        return pfl.Federation.from_arrays(x, y, num_clients=CLIENTS, partition=found, **options)

    def separate(seed: int) -> pfl.Federation:
        rng = np.random.default_rng([seed, int(number)])
        size = int(number) + TEST
        ids = rng.permutation(len(y))[: CLIENTS * size].reshape(CLIENTS, size)
        owner = np.repeat(np.arange(CLIENTS), size)
        is_test = np.tile(np.arange(size) >= int(number), CLIENTS)
        inputs = x[ids]
        labels = y[ids]
        for k in range(CLIENTS):
            if kind == "own":
                labels[k] = rng.permutation(y.max() + 1)[labels[k]]
            else:
                inputs[k] = inputs[k] @ np.linalg.qr(rng.normal(size=(x.shape[1],) * 2))[0]
        arrays = (inputs.reshape(-1, x.shape[1]), labels.reshape(-1), owner)
        return pfl.Federation.from_arrays(*arrays, is_test=is_test, standardize=False, seed=seed)

    return separate if kind in ("own", "rotated") else shared


def measure(
    cell: str, data: Data, methods: list[str], seeds: list[int], rounds: int, out: Path
) -> dict[str, tuple[dict, float]]:
    """Trains the methods on a cell. Returns each one's row, and its share of clients more than 5 points below Local."""
    local = pfl.LocalTraining(optax.adam(RATE))
    model = pfl.models.MLP((HIDDEN,))
    pairs = [(name, METHODS[name]) for name in methods]
    table = pfl.compare(
        pairs,
        clients_of(cell, data),
        model,
        local,
        rounds=rounds,
        seeds=seeds,
        out=out,
        reference="local",
    )

    def last(name, seed):
        return files.read_npz(out / name / f"seed-{seed}" / "results.npz")["accuracy_test"][-1]

    found = {name: 100 * np.stack([last(name, seed) for seed in seeds]) for name in methods}
    rows = {row["method"]: row for row in table.rows}
    return {
        name: (rows[name], float((found[name] - found["local"] < -5).mean())) for name in methods
    }


def shown(row: dict, losing: float) -> str:
    """A cell of the table: accuracy, the paired difference to Local, and the share of losing clients."""
    number = number_of(True)
    gain = statistics.difference_columns([row], number)[1][0][0]
    return number(row["score_mean"]) + f", {gain}, {losing:.0%}" * (row["method"] != "local")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    found = {
        cell: measure(cell, data, methods, seeds, args.rounds, args.out / cell) for cell in cells
    }
    body = [[name, *(shown(*found[cell][name]) for cell in cells)] for name in methods]
    files.write_csv(args.out / "table.csv", [["method", *cells], *body])
    print(markdown_table(["method", *cells], body))
    print(
        "accuracy, paired difference to Local with its 95 % interval, share of clients more than 5 points below Local"
    )


if __name__ == "__main__":
    main()
