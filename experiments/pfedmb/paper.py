"""Shared by the experiments of pFedMB's paper (Mori et al., 2022): its values and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments.papers import Paper

PAPER = Paper(
    Path(__file__).parent / "presets",
    ("digits", "cifar10"),
    {"npz": "cifar10", "digits": "digits", "tfds:cifar10": "cifar10"},
    "CIFAR-10 as 40,000, 10,000 and 10,000 images, a CNN of 5x5 convolutions of 6 and 16 and dense layers of 120 and "
    "84, trained until convergence at tuned rates, batches of 64, 5 local epochs, 5 more of fine-tuning, three runs",
)
WITHOUT = "pfedmb, plain average"  # Eq. 6 instead of Eq. 5
# Table 1: mean test accuracy in percent, 10 clients in 5 pairs.
TABLE1 = {"cifar10": {"local": 87.26, "fedavg": 87.99, WITHOUT: 89.08, "pfedmb": 89.49}}
# Table 2: two classes a client, 15 clients and 50; Dirichlet, 15 and 50.
TABLE2 = {
    "cifar10": {
        "local": (90.01, 83.79, 67.54, 61.27),
        "fedavg": (89.69, 85.68, 73.52, 70.32),
        "fedprox": (90.51, 86.07, 73.38, 70.98),
        "fedper": (89.73, 84.56, 71.97, 67.57),
        "pfedme": (90.04, 83.09, 72.92, 71.00),
        "ifca": (90.17, 85.68, 72.42, 69.84),
        "fedfomo": (90.12, 85.01, 67.55, 62.62),
        "fedamp": (90.73, 85.90, 72.91, 65.98),
        "pfedmb": (90.69, 86.36, 73.53, 72.14),
    }
}


def define(
    registry: flags.FlagValues,
    methods: Sequence[str],
    seeds: Sequence[str],
    out: str,
    **defaults: Any,
) -> None:
    """Registers the flags of these experiments, with the paper's defaults."""
    common = {
        "num_clients": 10,
        "partition": "pairs",
        "partition_alpha": 0.5,
        "fine_tune_epochs": 5,
    }
    PAPER.define(registry, methods, seeds, out, rounds=100, **common, **defaults)


def pairs_of(alpha: np.ndarray, groups: np.ndarray) -> tuple[list[float], list[int]]:
    """For alpha (K, B), the cosine and the heaviest branch of each pair of clients."""
    cosines = []
    branches = []
    for group in np.unique(groups):
        members = alpha[groups == group]
        unit = members / np.linalg.norm(members, axis=1, keepdims=True)
        cosines.append(float((unit @ unit.T).min()))
        branches.append(int(members.mean(axis=0).argmax()))
    return cosines, branches
