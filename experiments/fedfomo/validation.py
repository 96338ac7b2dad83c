"""How many validation examples does FedFomo need? Training and validation examples are varied apart.

    python -m experiments.fedfomo.validation --data_file=MNIST.npz

100 clients have two classes each, a tenth of them takes part in each of 30 rounds, as in `experiments.fedfomo.table1`
with 100 clients. Images are represented by their 64 principal components, and the network has 64 hidden units. Local
and FedAvg do not use validation examples. The rate of each method is the one of RATES with the best mean test accuracy
over all cells on TUNING_SEEDS, whose clients have other examples than those of the reported seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optax

import pfljax as pfl
from experiments.federico.cells import Data, read
from pfljax.data import partitions
from pfljax.evaluation import statistics
from pfljax.folder import files
from pfljax.report.rendering import markdown_table

CLIENTS = 100
CLASSES = 2
PARTICIPATION = 0.1
TEST = 50
HIDDEN = 64
BATCH = 10
EPOCHS = 5
ROUNDS = 30
DECAY = 0.99  # of the rate, per round
TRAIN = (12, 48)
VALIDATION = (3, 12, 48)
RATES = (0.03, 0.1, 0.3)
TUNING_SEEDS = (100, 101)
METHODS = {
    "local": pfl.Local(),
    "fedavg": pfl.FedAvg(),
    "fedfomo": pfl.FedFomo(neighbors=4),
}


class Cell(NamedTuple):
    """Numbers of training and validation examples of each client."""

    train: int
    validation: int


def clients_of(data: Data, cell: Cell, seed: int) -> pfl.Federation:
    """100 clients of two classes each."""
    x, y, _ = data
    order = np.random.default_rng(seed).permutation(len(y))
    splits = pfl.data.Splits(
        train_examples=sum(cell),
        test_examples=TEST,
        validation_fraction=cell.validation / sum(cell),
    )
    clients = pfl.Federation.from_arrays(
        x[order],
        y[order],
        num_clients=CLIENTS,
        partition=partitions.Pathological(classes=CLASSES),
        splits=splits,
        standardize=False,
        seed=seed,
    )
    sizes = np.stack([clients.train.size, clients.validation.size], axis=1)
    if not (sizes == np.array(cell)).all():
        text = f"{sum(cell) + TEST} examples of two classes for each of {CLIENTS} clients"
        raise ValueError(f"--data_file: expected {text}")
    return clients


def accuracies(data: Data, name: str, rate: float, cell: Cell, seeds: Sequence[int]) -> np.ndarray:
    """The mean test accuracy after the last round, in percent, for each seed."""
    schedule = optax.exponential_decay(1.0, 1, DECAY)
    local = pfl.LocalTraining(optax.sgd(rate), batch_size=BATCH, epochs=EPOCHS, schedule=schedule)
    found = []
    for seed in seeds:
        run = pfl.Run(
            METHODS[name],
            clients_of(data, cell, seed),
            pfl.models.MLP((HIDDEN,)),
            local,
            participation=PARTICIPATION,
            seed=seed,
        )
        result = run.train(rounds=ROUNDS, eval_every=ROUNDS, progress=False)
        found.append(100 * result.accuracy)
    return np.array(found)


def cells_of(name: str) -> list[Cell]:
    """The cells of a method: one for each number of training examples, if it uses no validation examples."""
    numbers = VALIDATION if name == "fedfomo" else VALIDATION[:1]
    return [Cell(train, validation) for train in TRAIN for validation in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_file", required=True, help="npz file with x and y")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--out", type=Path, default=Path("runs/fedfomo-validation"))
    args = parser.parse_args()
    data = read(args.data_file)
    seeds = [int(seed) for seed in args.seeds.split(",")]

    body: list[list[str]] = []
    runs: list[list[str]] = []
    for name in METHODS:
        tuning = {
            rate: np.mean(
                [accuracies(data, name, rate, cell, TUNING_SEEDS) for cell in cells_of(name)]
            )
            for rate in RATES
        }
        rate = max(RATES, key=lambda rate: tuning[rate])
        for cell in cells_of(name):
            scores = accuracies(data, name, rate, cell, seeds)
            low, high = statistics.interval(scores)
            validation = str(cell.validation) if name == "fedfomo" else "none"
            line = [name, str(cell.train), validation, str(rate)]
            body.append([*line, f"{scores.mean():.1f} [{low:.1f}, {high:.1f}]"])
            print(", ".join(body[-1]), flush=True)
            for seed, score in zip(seeds, scores, strict=True):
                runs.append([name, str(cell.train), validation, str(seed), str(score)])
            files.write_csv(
                args.out / "runs.csv",
                [["method", "train", "validation", "seed", "accuracy"], *runs],
            )
    head = ["method", "training examples", "validation examples", "rate", "test accuracy, %"]
    print(markdown_table(head, body))


if __name__ == "__main__":
    main()
