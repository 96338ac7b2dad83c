"""Shared by the experiments of FedFomo's paper (Zhang et al., 2021): its values, its rows, its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments.papers import Paper, Row, Study, Values
from pfljax.cli.settings import Settings

PAPER = Paper(
    Path(__file__).parent / "presets",
    ("digits", "mnist", "cifar10", "cifar100"),
    {
        "npz": "cifar10",
        "digits": "digits",
        "tfds:mnist": "mnist",
        "tfds:cifar10": "cifar10",
        "tfds:cifar100": "cifar100",
    },
    "MNIST, CIFAR-10 and CIFAR-100, a CNN of three convolutions (122,570 parameters in the authors' code), 20 rounds "
    "(100 with 100 clients), sgd at rate 0.1 (MNIST 0.01), batches of 50. Its n counts a client's own model",
)
BASELINES = (
    *(
        "local",
        "fedavg",
        "fedavg_data",
        "fedprox",
        "lg_fedavg",
        "mocha",
        "clustered",
        "per_fedavg",
        "pfedme",
    ),
)
DOWNLOADS = (5, 10)  # FedFomo's rows: "n" of the paper, which counts a client's own model

# Table 1: accuracy in percent and its deviation, pathological splits; 15 clients, then 100.
TABLE1 = {
    "mnist": {
        "local": ((99.62, 0.21), (94.25, 4.28)),
        "fedavg": ((91.97, 2.17), (78.83, 9.68)),
        "fedavg_data": ((91.99, 2.14), (78.85, 9.66)),
        "fedprox": ((90.94, 1.85), (79.06, 10.88)),
        "lg_fedavg": ((99.79, 0.07), (84.17, 1.92)),
        "mocha": ((94.74, 2.27), (84.58, 5.80)),
        "clustered": ((95.00, 3.61), (92.26, 3.91)),
        "per_fedavg": ((92.39, 4.72), (85.32, 12.93)),
        "pfedme": ((97.70, 1.26), (88.40, 10.86)),
        "fedfomo, n=5": ((99.62, 2.91), (98.81, 1.26)),
        "fedfomo, n=10": ((99.63, 0.07), (98.71, 2.86)),
    },
    "cifar10": {
        "local": ((92.73, 0.87), (85.42, 4.06)),
        "fedavg": ((57.12, 1.14), (53.08, 7.40)),
        "fedavg_data": ((58.5, 1.67), (56.62, 8.92)),
        "fedprox": ((54.60, 3.26), (52.92, 5.56)),
        "lg_fedavg": ((92.36, 1.00), (84.17, 4.45)),
        "mocha": ((93.85, 2.04), (76.09, 8.49)),
        "clustered": ((85.07, 8.16), (77.75, 1.78)),
        "per_fedavg": ((81.96, 8.12), (72.40, 4.06)),
        "pfedme": ((83.85, 5.11), (71.75, 6.78)),
        "fedfomo, n=5": ((93.01, 0.96), (92.10, 5.20)),
        "fedfomo, n=10": ((92.73, 0.96), (92.67, 4.21)),
    },
}
# Tables 2 (CIFAR-10) and 5 (CIFAR-100): the same by the number of latent distributions, 15 clients.
DISTRIBUTIONS = (2, 3, 4, 5, 10)
_TABLE2 = {
    "cifar10": {
        "local": (60.03, 9.22, 66.61, 9.90, 69.12, 12.07, 76.52, 11.46, 92.64, 7.32),
        "fedavg": (38.92, 11.88, 21.56, 9.14, 22.34, 12.36, 32.13, 1.95, 10.10, 3.65),
        "fedavg_data": (53.43, 2.89, 33.87, 2.53, 65.73, 1.07, 63.32, 0.49, 41.61, 0.92),
        "fedprox": (66.42, 1.79, 31.38, 2.54, 50.61, 1.53, 48.20, 0.14, 13.41, 3.39),
        "lg_fedavg": (70.87, 1.12, 74.16, 2.37, 67.25, 1.97, 63.64, 2.52, 94.42, 1.25),
        "mocha": (83.79, 1.54, 73.68, 2.80, 71.23, 4.08, 69.02, 2.93, 94.28, 0.81),
        "clustered": (72.58, 10.30, 75.69, 1.11, 78.31, 12.90, 70.04, 13.56, 85.22, 6.70),
        "per_fedavg": (63.85, 5.11, 69.70, 7.27, 72.60, 9.28, 76.61, 6.65, 93.97, 2.34),
        "pfedme": (49.87, 3.16, 66.95, 10.65, 69.00, 4.97, 78.66, 3.72, 94.57, 1.95),
        "fedfomo, n=5": (77.823, 2.24, 82.38, 0.66, 84.45, 0.21, 85.050, 0.13, 95.55, 0.26),
        "fedfomo, n=10": (79.59, 0.34, 83.66, 0.72, 84.35, 0.38, 85.534, 0.53, 95.55, 0.06),
    },
    "cifar100": {
        "local": (23.36, 0.33, 23.89, 2.03, 28.44, 1.97, 23.11, 9.44, 41.26, 1.31),
        "fedavg": (28.01, 0.74, 18.95, 0.22, 25.69, 0.41, 21.26, 0.89, 18.19, 0.987),
        "fedavg_data": (28.12, 0.63, 19.01, 0.27, 25.85, 0.27, 25.18, 0.39, 18.23, 0.835),
        "fedprox": (28.21, 0.79, 27.78, 0.0, 25.79, 0.05, 24.93, 0.38, 18.18, 0.82),
        "lg_fedavg": (26.97, 7.52, 24.69, 4.29, 24.79, 4.50, 25.62, 5.70, 27.53, 9.12),
        "mocha": (33.66, 4.14, 33.61, 7.88, 29.44, 8.30, 32.34, 7.09, 34.72, 7.80),
        "clustered": (41.50, 6.66, 36.36, 10.72, 37.41, 8.30, 36.78, 12.05, 34.43, 10.14),
        "per_fedavg": (32.14, 6.90, 32.22, 7.37, 34.50, 5.81, 36.58, 6.72, 38.41, 7.41),
        "pfedme": (31.53, 3.83, 32.39, 5.36, 30.86, 3.75, 30.86, 3.80, 37.70, 2.13),
        "fedfomo, n=5": (35.44, 1.91, 36.21, 4.92, 38.41, 2.58, 42.96, 1.24, 44.29, 1.22),
        "fedfomo, n=10": (37.09, 1.95, 37.09, 3.84, 39.94, 0.74, 43.06, 0.42, 43.75, 1.74),
    },
}
TABLE2 = {
    data: {
        title: dict(zip(DISTRIBUTIONS, zip(v[::2], v[1::2], strict=True), strict=True))
        for title, v in rows.items()
    }
    for data, rows in _TABLE2.items()
}
EMD = {  # beside the numbers of distributions
    "cifar10": dict(zip(DISTRIBUTIONS, (1.05, 1.41, 1.28, 2.80, 2.70), strict=True)),
    "cifar100": dict(zip(DISTRIBUTIONS, (1.58, 1.96, 2.21, 2.41, 2.71), strict=True)),
}
# Table 3: targets out of the local distribution, 5 latent distributions.
TABLE3 = {
    "cifar10": {
        "local": (20.39, 3.36),
        "fedavg": (23.11, 2.51),
        "fedavg_data": (42.15, 2.16),
        "fedprox": (39.79, 8.57),
        "lg_fedavg": (38.95, 1.85),
        "mocha": (30.80, 2.60),
        "clustered": (29.73, 3.67),
        "per_fedavg": (39.8, 5.38),
        "pfedme": (43.7, 7.27),
        "fedfomo, n=5": (64.06, 2.80),
        "fedfomo, n=10": (63.98, 1.81),
    },
    "cifar100": {
        "local": (7.40, 1.31),
        "fedavg": (13.06, 1.48),
        "fedavg_data": (24.98, 4.98),
        "fedprox": (14.39, 2.85),
        "lg_fedavg": (18.50, 1.10),
        "mocha": (13.73, 2.83),
        "clustered": (19.75, 1.58),
        "per_fedavg": (21.30, 1.35),
        "pfedme": (25.41, 2.33),
        "fedfomo, n=5": (34.43, 1.48),
        "fedfomo, n=10": (40.94, 1.62),
    },
}
# Tables 4 and 6: by method and sigma, (epsilon, accuracy in percent), delta 1e-5.
TABLE4 = {
    "cifar10": {
        "fedavg": {0: (np.inf, 19.37), 1: (10.26, 17.60), 2: (3.57, 16.19)},
        "fedfomo": {0: (np.inf, 71.56), 1: (6.89, 71.28), 2: (1.70, 65.97)},
        "fedfomo_average": {0: (np.inf, 47.90), 1: (9.26, 46.33), 2: (3.20, 43.76)},
    },
    "cifar100": {
        "fedavg": {0: (np.inf, 5.09), 1: (8.20, 5.05), 2: (2.33, 4.33)},
        "fedfomo": {0: (np.inf, 26.76), 1: (8.20, 26.14), 2: (1.71, 15.95)},
        "fedfomo_average": {0: (np.inf, 12.02), 1: (10.32, 11.60), 2: (3.22, 9.52)},
    },
}


def define(
    registry: flags.FlagValues,
    methods: Sequence[str],
    seeds: Sequence[str],
    out: str,
    **defaults: Any,
) -> None:
    """Registers the flags of these experiments, with the paper's defaults."""
    defaults = {"num_clients": 15, "partition_groups": 5, "partition": "latent"} | defaults
    PAPER.define(registry, methods, seeds, out, rounds=20, **defaults)


def values(
    settings: Settings, table: Mapping[str, Mapping], standing: str = "cifar10", **setting: Any
) -> Values:
    """Like `Paper.values` if the run has the table's `setting`, by flag; otherwise no values."""
    found = PAPER.values(settings, table, standing)
    same = all(
        settings[flag] == value
        for flag, value in ({"num_clients": 15, "partition": "latent"} | setting).items()
    )
    return found if same else found._replace(by_row={})


def refuse_others(settings: Settings) -> None:
    """Raises `FlagError` for methods other than FedFomo, since the figure varies its hyperparameters."""
    if settings.methods != ["fedfomo"]:
        raise settings.error("methods", "accepted: fedfomo")


def last_round(study: Study) -> str:
    """Title of a table with the last points."""
    own = study.settings
    return f"{own.dataset}, {own.partition_groups} groups, test accuracy after the last round"


def rows_of(study: Study, downloads: Sequence[int] = DOWNLOADS) -> list[Row]:
    """A row for each method in --methods; for FedFomo, one for each n in `downloads`, with M = n - 1."""
    rows = []
    for name in study.methods:
        if name == "fedfomo" and not study.settings.present("fedfomo.neighbors") and downloads:
            rows += [Row(f"{name}, n={n}", name, {"fedfomo.neighbors": n - 1}) for n in downloads]
        else:
            rows.append(Row(name, name, {}))
    return rows
