"""The code of FedEM's authors, github.com/omarfoq/FedEM: its aggregators, clients and learners.

Its loops read examples from iterators, which are here lists of mini-batches in order.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import pfljax as pfl
from experiments.parity.in_torch import converted, load, stacked
from experiments.parity.shared import (
    BATCH,
    CLASSES,
    EPOCHS,
    EQUAL,
    HIDDEN,
    RATE,
    Apart,
    Cell,
    OnRound,
    Snapshot,
    Task,
)
from pfljax.contract import tree
from pfljax.contract.types import Params

COMPONENTS = 3


class Nothing:
    """Takes the place of a TensorBoard logger."""

    def add_scalar(self, *args: Any) -> None:
        """Drops a figure."""


def examples(x: np.ndarray, y: np.ndarray) -> DataLoader:
    """Mini-batches in order, with the examples' numbers, as the authors' data sets give them."""
    y = torch.from_numpy(y.astype(np.int64))
    return DataLoader(list(zip(torch.from_numpy(x), y, range(len(y)), strict=True)), BATCH)


class Player:
    """Plays a method of FedEM's authors.

    Args:
        folder: The checkout.
        aggregator: Its class in `aggregator`.
        client: Its class in `client`.
        models: Aggregator -> what is compared.
        starts: The first models of each ensemble.
        rate: Learning rate.
        steps: Epochs, or in APFL mini-batches, of a client in a round.
        arguments: Further arguments of the aggregator.
    """

    def __init__(
        self,
        folder: Path,
        aggregator: str,
        client: str,
        models: Callable[[Any], dict],
        starts: Callable[[Task], Sequence[Params]],
        rate: float = RATE,
        steps: int = EPOCHS,
        **arguments: Any,
    ):
        self.folder = folder
        self.aggregator = aggregator
        self.client = client
        self.models = models
        self.starts = starts
        self.rate = rate
        self.steps = steps
        self.arguments = arguments

    def ensemble(self, starts: Sequence[Params]) -> Any:
        """The authors' ensemble of learners."""
        learners, ensembles, metrics = map(
            importlib.import_module,
            ("learners.learner", "learners.learners_ensemble", "utils.metrics"),
        )

        def learner(start):
            width = start["Dense_0"]["kernel"].shape[0]
            model = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
            load(model, start)
            criterion = nn.CrossEntropyLoss(reduction="none")
            optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
            return learners.Learner(model, criterion, metrics.accuracy, "cpu", optimizer)

        weights = torch.ones(len(starts)) / len(starts)
        return ensembles.LearnersEnsemble([learner(start) for start in starts], weights)

    def __call__(self, task: Task, on_round: OnRound) -> None:
        """As `Cell.play`."""
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        make = getattr(importlib.import_module("client"), self.client)
        clients = []
        tests = []
        starts = self.starts(task)
        for number in range(task.clients.num_clients):
            train, test = (examples(*part) for part in task.arrays(number).values())
            clients.append(make(self.ensemble(starts), train, train, test, Nothing(), self.steps))
            tests.append(test)
        aggregator = getattr(importlib.import_module("aggregator"), self.aggregator)(
            clients, self.ensemble(starts), 10**9, Nothing(), Nothing(), seed=0, **self.arguments
        )

        def snapshot():
            size = np.array([len(test.dataset) for test in tests])
            share = [
                c.learners_ensemble.evaluate_iterator(test)[1]
                for c, test in zip(clients, tests, strict=True)
            ]
            return Snapshot(
                self.models(aggregator), float((np.rint(share * size)).sum() / size.sum())
            )

        while True:
            on_round(snapshot)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of old forms of PyTorch calls
                aggregator.mix()


def modules(learners: Iterable[Any]) -> list[nn.Module]:
    """Learners' networks."""
    return [learner.model for learner in learners]


def global_model(aggregator: Any) -> dict:
    """The first global learner."""
    return {"global": converted(aggregator.global_learners_ensemble[0].model.parameters())}


def mixture(aggregator: Any) -> dict:
    """The components, and the clients' weights of them."""
    pi = [client.learners_ensemble.learners_weights.numpy().copy() for client in aggregator.clients]
    return {"components": stacked(modules(aggregator.global_learners_ensemble)), "pi": np.stack(pi)}


def personal(aggregator: Any) -> dict:
    """The clients' only learners."""
    return {"personal": stacked(client.learners_ensemble[0].model for client in aggregator.clients)}


def cells(folder: Path) -> dict[str, Cell | Apart]:
    """The comparisons by name."""

    def ours(state):
        return {"global": tree.first(state.models)}

    def one(task):
        return [task.start]

    def each(task):
        return [
            jax.tree.map(lambda leaf, n=number: leaf[n], task.models)
            for number in range(COMPONENTS)
        ]

    return {
        "FedEM": Cell(
            pfl.FedEM(components=COMPONENTS),
            lambda state: {"components": state.models, "pi": state.rows},
            Player(folder, "CentralizedAggregator", "MixtureClient", mixture, each),
            local={"common_init": None},
        ),
        "FedAvg": Cell(
            pfl.FedAvg(), ours, Player(folder, "CentralizedAggregator", "Client", global_model, one)
        ),
        "Local": Cell(
            pfl.Local(),
            lambda state: {"personal": state.models},
            Player(folder, "NoCommunicationAggregator", "Client", personal, one),
        ),
        "APFL": Cell(
            pfl.APFL(alpha=0.5),
            ours,
            Player(
                folder,
                "APFLAggregator",
                "Client",
                global_model,
                lambda task: [task.start] * 2,
                rate=2 * RATE,
                steps=EPOCHS * EQUAL[0] // BATCH,
                alpha=0.5,
            ),
            sizes=EQUAL,
            note="their rate doubled, since they halve the loss; clients of one size, since they count mini-batches",
            differs="the personal models: they train v alone, keep alpha, and move v toward w after every mini-batch",
        ),
        "Clustered FL": Apart(
            "it stops at the first split under scikit-learn 1.4 or later, which dropped an argument"
        ),
        "pFedMe": Apart(
            "theirs is `personalized` with ProxSGD, which has no inner problem per mini-batch"
        ),
    }
