"""What comparisons with all peers share: clients, equal starts and orders, rounds in turn, differences, the table.

A peer is another library, whose own code plays a method on our arrays. Its file has `cells(settings)`, the comparisons
by name. `Cell.play` runs the peer's code from the given start and calls `on_round` before its first round and after
every round; that call plays our next round, and compares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import pfljax as pfl
from pfljax.contract import tree
from pfljax.contract.errors import RunError
from pfljax.contract.types import Params, PyTree, State
from pfljax.folder import files
from pfljax.local import batches, solver
from pfljax.stages.pipeline import state_of_method

NUM_CLIENTS = 6
CLASSES = 10
CLASSES_EACH = 5
TEST = 20
HIDDEN = 16
RATE = 0.1
BATCH = 10
EPOCHS = 2
# n_k, multiples of B
UNEQUAL = (20, 30, 40, 50, 60, 70)
EQUAL = (40,) * NUM_CLIENTS


class Snapshot(NamedTuple):
    """What is compared after a round.

    Attributes:
        models: Trees of arrays by name, such as the global model, or all clients' models, stacked.
        accuracy: Share of all clients' test examples that are predicted correctly.
    """

    models: dict[str, PyTree]
    accuracy: float


class Task(NamedTuple):
    """What both sides begin with.

    Attributes:
        clients: The clients.
        start: The initial parameters of a model, the same for all that begin equally.
        models: Our initial stack, for methods whose models begin differently.
    """

    clients: pfl.Federation
    start: Params
    models: Params

    def arrays(self, client: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """x (n_k, F) and y (n_k,) of a client's examples, by split, in the order in which both sides read them."""
        parts = {"train": self.clients.train, "test": self.clients.test}
        size = {name: int(part.size[client]) for name, part in parts.items()}
        return {
            n: (np.array(p.x[client, : size[n]]), np.array(p.y[client, : size[n]]))
            for n, p in parts.items()
        }


OnRound = Callable[[Callable[[], Snapshot]], None]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A comparison.

    Attributes:
        method: Our method, with the hyperparameters under which it should equal the peer's.
        ours: Our method's state -> what is compared, by name.
        play: (task, on_round) -> plays the peer's rounds, until `on_round` raises `Done`.
        sizes: n_k.
        local: What differs in local training from the usual.
        note: What was set, on either side, so that the two agree.
        differs: Why they cannot agree, for the part that is not compared or for the whole method.
    """

    method: Any
    ours: Callable[[State], dict[str, PyTree]]
    play: Callable[[Task, OnRound], None]
    sizes: Sequence[int] = UNEQUAL
    local: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    differs: str = ""


@dataclasses.dataclass(frozen=True)
class Apart:
    """A method that cannot be compared, and why."""

    differs: str


class Done(Exception):
    """The last round has been compared."""


def digits(sizes: Sequence[int]) -> pfl.Federation:
    """Clients with 5 of the 10 classes each, as many examples of each, in turn; no randomness."""
    x, y = map(np.asarray, load_digits(return_X_y=True))
    left = {label: list(np.flatnonzero(y == label)) for label in range(CLASSES)}
    chosen = []
    client = []
    is_test = []
    for k, size in enumerate(sizes):
        for number in range(size + TEST):
            chosen.append(left[(k + number % CLASSES_EACH) % CLASSES].pop())
            client.append(k)
            is_test.append(number >= size)
    parts: dict[str, Any] = {"client": np.array(client), "is_test": np.array(is_test)}
    images = np.float32(x[chosen] / 16)
    return pfl.Federation.from_arrays(
        images, y[chosen], **parts, num_classes=CLASSES, standardize=False
    )


def in_order(key: Any, size: Any, n_max: int, epochs: int) -> jax.Array:
    """Takes the place of `batches.shuffle`: every epoch reads the examples in their own order."""
    return jnp.broadcast_to(jnp.arange(n_max, dtype=jnp.int32), (epochs, n_max))


@contextlib.contextmanager
def without_shuffling() -> Iterator[None]:
    """Makes our mini-batches those of `in_order`."""
    with (
        mock.patch.object(solver, "shuffle", in_order),
        mock.patch.object(batches, "shuffle", in_order),
    ):
        yield


def flat(models: PyTree) -> dict[str, np.ndarray]:
    """A tree's arrays by path; None has none."""
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(models)
    }


def largest_difference(ours: dict[str, PyTree], theirs: dict[str, PyTree]) -> float:
    """The largest absolute difference of all numbers that the peer has.

    Raises:
        RunError: if there is nothing to compare, or names or shapes differ.
    """
    mine = flat({name: ours[name] for name in theirs if name in ours})
    other = flat(theirs)
    shapes = [{path: leaf.shape for path, leaf in side.items()} for side in (mine, other)]
    if not other or shapes[0] != shapes[1]:
        raise RunError(f"parity: the sides have different parameters: {shapes[0]} and {shapes[1]}")
    return max(float(np.abs(mine[path] - other[path]).max()) for path in other)


class Ours:
    """Our side: rounds of the method, one at a time."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self.clients = digits(cell.sizes)
        options = {
            "learning_rate": RATE,
            "batch_size": BATCH,
            "epochs": EPOCHS,
            "common_init": True,
        } | cell.local
        self.local = pfl.LocalTraining(options.pop("optimizer", optax.sgd), **options)
        self.model = pfl.models.MLP(hidden=(HIDDEN,))
        self.sim = pfl.Simulation(cell.method, self.clients, self.model, self.local)
        self.state = self.sim.init(jax.random.key(0))

    @property
    def task(self) -> Task:
        """What the peer begins with."""
        start = (
            pfl.Simulation(pfl.FedAvg(), self.clients, self.model, self.local)
            .init(jax.random.key(0))
            .models
        )

        def numbers(models):
            return jax.tree.map(np.array, models)

        return Task(self.clients, numbers(tree.first(start)), numbers(self.state.models))

    def step(self) -> None:
        """Plays a round."""
        self.state = jax.block_until_ready(self.sim.step(jax.random.key(1), self.state)[0])

    def snapshot(self) -> Snapshot:
        """What is compared."""
        size = np.asarray(self.clients.test.size)
        correct = np.rint(np.asarray(self.sim.evaluate(self.state)["test"]["accuracy"]) * size)
        ours = self.cell.ours(state_of_method(self.state))
        return Snapshot(ours, float(correct.sum() / size.sum()))


class Comparison:
    """Plays our rounds in turn with the peer's, and compares after some of them."""

    def __init__(self, ours: Ours, rounds: Sequence[int]):
        self.ours = ours
        self.rounds = sorted(rounds)
        self.done = -1
        self.rows: list[dict] = []
        self.seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
        self.start: dict[str, np.ndarray] = {}
        self.mark = time.perf_counter()

    def on_round(self, snapshot: Callable[[], Snapshot]) -> None:
        """Takes note of a round of the peer, or of its start, and plays ours.

        Raises:
            RunError: if the two do not start from the same parameters.
            Done: after the last round.
        """
        now = time.perf_counter()
        self.done += 1
        if self.done:
            self.seconds["theirs"].append(now - self.mark)
            self.ours.step()
            self.seconds["ours"].append(time.perf_counter() - now)
        if self.done in (0, *self.rounds):
            self.compare(snapshot())
        if self.done == self.rounds[-1]:
            raise Done
        self.mark = time.perf_counter()

    def compare(self, theirs: Snapshot) -> None:
        """Adds a row for the rounds so far."""
        mine = self.ours.snapshot()
        difference = largest_difference(mine.models, theirs.models)
        if self.done == 0:
            self.start = flat(theirs.models)
            if difference > 0:
                raise RunError(f"parity: the initial parameters differ by {difference:.3g}")
            return
        now = flat(theirs.models)
        moved = max(float(np.abs(now[path] - leaf).max()) for path, leaf in self.start.items())
        accuracy = {"accuracy": mine.accuracy, "accuracy_of_peer": theirs.accuracy}
        self.rows.append({"rounds": self.done, "difference": difference, "moved": moved} | accuracy)

    def figures(self) -> dict:
        """The rows, and the median seconds of a round after the first, in which programs are compiled."""
        mine, theirs = (
            float(np.median(each[1:] or each))
            for each in (self.seconds["ours"], self.seconds["theirs"])
        )
        return {"rows": self.rows, "seconds": mine, "seconds_of_peer": theirs}


def measure(cell: Cell, rounds: Sequence[int]) -> dict:
    """Plays a cell."""
    with without_shuffling():
        ours = Ours(cell)
        comparison = Comparison(ours, rounds)
        with contextlib.suppress(Done):
            cell.play(ours.task, comparison.on_round)
    if comparison.done != max(rounds):
        raise RunError(f"parity: the peer played {comparison.done} rounds, not {max(rounds)}")
    return comparison.figures()


HEADS = ("method", "difference", "moved", "accuracy of both", "ms of both", "settings", "not equal")


def row(name: str, found: dict) -> list[str]:
    """A method's cells of the table: ours first, where there are two."""
    last = found["rows"][-1] if "rows" in found else None
    if last is None:
        return [name, "", "", "", "", found["note"], found["differs"]]
    differences = ", ".join(f"{each['difference']:.1e}" for each in found["rows"])
    accuracies = f"{100 * last['accuracy']:.1f} / {100 * last['accuracy_of_peer']:.1f}"
    times = f"{1e3 * found['seconds']:.1f} / {1e3 * found['seconds_of_peer']:.1f}"
    return [
        name,
        differences,
        f"{last['moved']:.2g}",
        accuracies,
        times,
        found["note"],
        found["differs"],
    ]


class Book:
    """The results so far, in OUT/parity.json and OUT/parity.md."""

    def __init__(self, out: Path, about: dict):
        self.path = out / "parity.json"
        self.content = (
            files.read_json(self.path) if self.path.exists() else {"about": about, "cells": {}}
        )
        self.agrees = self.content["about"] == about

    def keep(self, name: str, found: dict) -> None:
        """Adds a cell and writes both files."""
        self.content["cells"][name] = found
        files.write_json(self.path, self.content)
        lines = [f"| {' | '.join(HEADS)} |", f"|{' --- |' * len(HEADS)}"]
        lines += [
            f"| {' | '.join(row(name, found))} |" for name, found in self.content["cells"].items()
        ]
        files.write_text(self.path.with_suffix(".md"), "\n".join(lines) + "\n")
