"""Adapters of frozen backbones beside heads and whole networks, by method, on images and on text.

    python -m experiments.adapters.table images --data_file=CIFAR10.npz --backbone=VIT.safetensors
    python -m experiments.adapters.table text --data_file=PLAY.txt --backbone=DECODER.safetensors

The backbones are those of `experiments.adapters.backbones`. Images: 8 clients in 4 label groups of CIFAR-10, 50
examples for training (a fifth of them for validation) and 100 for testing each. Text: the 12 roles with most text among
those that the backbone has not seen, 50 windows of 80 characters for training and 20 for testing each. The learning
rate of each cell is the best of three on the validation examples of the same clients, which training then has back. A
column is what is trained:

    head      the last layer
    lora-R    LoRA of rank R in the last two blocks, and the head
    full      everything, from the backbone's values
    scratch   everything, from random values
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import optax

import pfljax as pfl
from experiments.adapters import backbones
from pfljax.data import partitions

METHODS = {
    "local": pfl.Local(),
    "fedavg": pfl.FedAvg(),
    "fedsa_lora": pfl.methods.FedSALoRA(),
    "feddpa": pfl.methods.FedDPA(),
    "fedem": pfl.FedEM(),
    "federico_friends": pfl.FedeRiCoFriends(),
}
NEED_LORA = ("fedsa_lora", "feddpa")
COLUMNS = ("head", "lora-2", "lora-8", "lora-32", "full", "scratch")
RATES = (1e-3, 3e-3, 1e-2)
OTHERS = 1000  # first seed of the runs that choose rates


class Task(NamedTuple):
    """A backbone and the clients that it is adapted to.

    Attributes:
        network: The backbone's name in `backbones.RECIPES`.
        clients: (file, seed) -> the clients, with validation examples.
        blocks: Regular expression of the blocks that LoRA adapts.
        batch_size: B.
    """

    network: str
    clients: Callable[[Path, int], pfl.Federation]
    blocks: str
    batch_size: int


def label_groups(file: Path, seed: int) -> pfl.Federation:
    """Eight clients in four label groups."""
    options = {"train_examples": 50, "test_examples": 100, "validation_fraction": 0.2}
    return pfl.data.npz(file, 8, partitions.LabelGroups(4), seed=seed, **options)


def other_roles(file: Path, seed: int) -> pfl.Federation:
    """The roles with most text among those that the backbone has not seen."""
    options = {"train_examples": 50, "test_examples": 20, "validation_fraction": 0.2}
    return backbones.roles(file, 1, most=12, seed=seed, **options)


TASKS = {
    "images": Task("vit", label_groups, "block_[23]", 10),
    "text": Task("decoder", other_roles, "block_[12]", 10),
}


def model_of(column: str, task: Task, backbone: Path) -> Any:
    """What is trained in a column."""
    network = backbones.RECIPES[task.network].model
    if column == "scratch":
        return network
    kind, _, rank = column.partition("-")
    lora = functools.partial(pfl.adapters.lora, where=task.blocks)
    trainable = {"head": "head", "full": ".", "lora": [lora(rank=int(rank or 1)), "head"]}[kind]
    return pfl.Model(network, frozen=pfl.models.weights.Saved(backbone), trainable=trainable)


def main() -> None:
    """The command."""
    logging.basicConfig(level="INFO", format="%(message)s")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data_file", type=Path, required=True)
    parser.add_argument("--backbone", type=Path, required=True)
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/adapters"))
    args = parser.parse_args()
    columns = args.columns.split(",")
    methods = args.methods.split(",")
    for name, given, known in (("columns", columns, COLUMNS), ("methods", methods, METHODS)):
        if not set(given) <= set(known):
            parser.error(f"--{name}={','.join(given)}: accepted: {','.join(known)}")
    task = TASKS[args.task]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    of_seed = {seed: task.clients(args.data_file, seed) for seed in seeds}
    local = pfl.LocalTraining(optax.adam, learning_rate=RATES[0], batch_size=task.batch_size)
    for column in columns:
        fitting = [name for name in methods if name not in NEED_LORA or column.startswith("lora")]
        table = pfl.compare(
            [(name, METHODS[name]) for name in fitting],
            of_seed.__getitem__,
            model_of(column, task, args.backbone),
            local,
            rounds=args.rounds,
            seeds=seeds,
            tune=RATES,
            tune_widen=1,
            tune_seeds=[OTHERS + number for number in range(len(seeds))],
            eval_every=args.rounds,
            out=args.out / column,
        )
        print(column, table)


if __name__ == "__main__":
    main()
