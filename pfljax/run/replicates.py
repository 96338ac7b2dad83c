"""Runs that share one kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.alike import PLAIN
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import PyTree
from pfljax.exchange.plan import ExecutionPlan
from pfljax.run.experiment import OWN, SHARED, Experiment, Numbers, differences

MOST = 4  # names of differences in a message
CALLED = {  # what is named otherwise where a run is made
    "problem.cohort_size": "participation: clients in a round",
    "problem.chance": "participation: each client's chance",
    "problem.model.module": "model",
}


@dataclasses.dataclass(frozen=True)
class Separate:
    """Values of several runs, one tree of arrays or files per run, not stacked."""

    runs: Sequence[PyTree]

    def __getitem__(self, number: int) -> PyTree:
        return self.runs[number]


@dataclasses.dataclass(frozen=True)
class Replicates:
    """Several runs of one method, stacked on a leading axis of every array on the devices. A single run is not stacked.

    If clients' rows are not on the devices, the runs are `Apart` and trained one after the other.

    Outside of compiled functions, runs are a list with one entry per run, even for a single run.

    Attributes:
        num: Number of runs.
        numbers: Numbers that differ between runs, as arrays (num,).
        directories: Folder for the clients' rows of each run; see `Experiment`.
    """

    num: int = 1
    numbers: Numbers = OWN
    directories: Sequence[Path | None] = ()

    @classmethod
    def from_experiments(cls, experiments: Sequence[Experiment]) -> Replicates:
        """Makes replicates of runs. They may differ in seeds, data, learning rate and the method's float
        hyperparameters.

        Raises:
            ArgumentError: if they differ in anything else; see `Experiment.fixed`.
        """
        directories = tuple(experiment.directory for experiment in experiments)
        if len(experiments) == 1:
            return cls(directories=directories)
        check_alike(experiments)
        per_run = [experiment.numbers for experiment in experiments]

        # Only numbers that differ are traced; the others stay constants of the program.
        hyperparameters: dict[str, np.ndarray] = {}
        for name in per_run[0].hyperparameters:
            values = np.asarray([numbers.hyperparameters[name] for numbers in per_run], np.float32)
            if len(set(values.tolist())) > 1:
                hyperparameters[name] = values

        rates = [numbers.learning_rate for numbers in per_run]
        rates_differ = len(set(rates)) > 1
        learning_rate = np.asarray(rates, np.float32) if rates_differ else None
        return cls(len(experiments), Numbers(learning_rate, hyperparameters), directories)

    @property
    def axis(self) -> int:
        """Position of the client axis in the arrays of all runs."""
        return int(self.num > 1)

    def numbers_of(self, run: int) -> Numbers:
        """Returns the numbers of one run."""
        return jax.tree.map(lambda values: values[run], self.numbers)

    def join(self, items: Sequence[PyTree], stack: Callable = jnp.stack) -> PyTree:
        """Joins one tree of arrays per run into one tree."""
        if self.num == 1:
            return items[0]
        return jax.tree.map(lambda *leaves: stack(leaves), *items)

    def side_by_side(self, items: Sequence[PyTree]) -> PyTree:
        """Like `join`, but without stacking: `Apart` for several runs."""
        return Separate(items) if self.num > 1 else items[0]

    def split(self, joined: PyTree) -> list[PyTree]:
        """Undoes `join` and `side_by_side`."""
        if self.num == 1:
            return [joined]

        def run_slice(number: int) -> PyTree:
            return jax.tree.map(lambda leaf: leaf[number], joined)

        return [run_slice(number) for number in range(self.num)]

    def lift(
        self,
        experiment: Experiment,
        plan: ExecutionPlan,
        fn: Callable,
        in_axes: Sequence[int | None],
    ) -> Callable:
        """Turns a function of a built method and one run's arrays into a function of all runs' arrays.

        Args:
            experiment: One of the runs.
            plan: How clients are mapped to devices.
            fn: (algorithm, *arrays) -> arrays.
            in_axes: For each array, 0 if it is stacked, None if all runs share it.
        """

        def with_algorithm(numbers: Numbers, *arrays: PyTree) -> PyTree:
            algorithm = experiment.algorithm(plan, numbers)
            return fn(algorithm, *arrays)

        if self.num == 1:
            return functools.partial(with_algorithm, OWN)
        lifted = plan.over_replicates(with_algorithm, (0, *in_axes))
        return functools.partial(lifted, self.numbers)


def check_alike(experiments: Sequence[Experiment]) -> None:
    """Raises `ArgumentError` if runs differ in what runs in one kernel share."""
    first = experiments[0]
    for number, experiment in enumerate(experiments):
        names = differences(first, experiment)
        if names:
            text = f"number {number} differs from number 0 in {shown(names, first, experiment)}"
            accepted = f"accepted in one kernel: runs that differ in {SHARED} only"
            raise ArgumentError("runs", f"{text}; {accepted}")


def shown(names: Sequence[str], *experiments: Experiment) -> str:
    """The first names of what runs differ in, with the values of the first one if these are short."""
    settings: list[str] = []
    for name in names:
        setting = CALLED.get(name, name)
        if setting not in settings:
            settings.append(setting)

    values = [experiment.fixed[names[0]] for experiment in experiments]
    if all(isinstance(value, (*PLAIN, type)) for value in values):
        texts = [value.__name__ if isinstance(value, type) else repr(value) for value in values]
        settings[0] += f" ({' and '.join(texts)})"

    listed = settings[:MOST]
    if len(settings) > MOST:
        listed.append(f"{len(settings) - MOST} more")
    return ", ".join(listed)


ONE = Replicates()
