"""Runs that share one kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.core.types import PyTree
from pfljax.engine.plan import ExecutionPlan
from pfljax.training.experiment import OWN, Experiment, Numbers


@dataclasses.dataclass(frozen=True)
class Apart:
    """What several runs have, side by side and not stacked: of one run each, a tree of arrays or of files."""

    runs: Sequence[PyTree]

    def __getitem__(self, number: int) -> PyTree:
        return self.runs[number]


@dataclasses.dataclass(frozen=True)
class Replicates:
    """Several runs of one method, stacked in front of every array on the devices; a single one is not stacked.

    Where clients' rows are not on the devices, the runs are `Apart` and played one after the other.

    Outside of compiled functions there is a list with one entry per run, whatever their number.

    Attributes:
        num: Number of runs.
        numbers: Those in which the runs differ, as arrays (num,).
        directories: For the clients' rows of each run, as in `Experiment`.
    """

    num: int = 1
    numbers: Numbers = OWN
    directories: Sequence[Path | None] = ()

    @classmethod
    def of(cls, experiments: Sequence[Experiment]) -> Replicates:
        """The runs as replicates: they may differ in seeds, data, learning rate and the method's float knobs.

        Raises:
            ArgumentError: if they differ in the method or in another of its knobs.
        """
        directories = tuple(each.directory for each in experiments)
        if len(experiments) == 1:
            return cls(directories=directories)
        if any(each.structure != experiments[0].structure for each in experiments):
            methods = ", ".join(dict.fromkeys(repr(each.method) for each in experiments))
            raise ArgumentError("method", "accepted in one kernel: one method, its knobs alike but for floats", methods)
        found = [each.numbers for each in experiments]
        knobs = {name: np.asarray([each.knobs[name] for each in found], np.float32) for name in found[0].knobs}
        knobs = {name: values for name, values in knobs.items() if len(set(values.tolist())) > 1}
        rates = [each.learning_rate for each in found]
        numbers = Numbers(np.asarray(rates, np.float32) if len(set(rates)) > 1 else None, knobs)
        return cls(len(experiments), numbers, directories)

    @property
    def axis(self) -> int:
        """Position of the client axis in the arrays of all runs."""
        return int(self.num > 1)

    def numbers_of(self, run: int) -> Numbers:
        """The numbers of one run."""
        return jax.tree.map(lambda values: values[run], self.numbers)

    def join(self, parts: Sequence[PyTree], stack: Callable = jnp.stack) -> PyTree:
        """One tree of arrays out of one per run."""
        return jax.tree.map(lambda *leaves: stack(leaves), *parts) if self.num > 1 else parts[0]

    def side_by_side(self, parts: Sequence[PyTree]) -> PyTree:
        """As `join`, without stacking; `Apart` for several runs."""
        return Apart(parts) if self.num > 1 else parts[0]

    def split(self, joined: PyTree) -> list[PyTree]:
        """Undoes `join` and `side_by_side`."""
        if self.num == 1:
            return [joined]
        return [jax.tree.map(lambda leaf, n=n: leaf[n], joined) for n in range(self.num)]

    def lift(
        self,
        experiment: Experiment,
        plan: ExecutionPlan,
        fn: Callable,
        in_axes: Sequence[int | None],
        part: int | None = None,
    ) -> Callable:
        """A function of a built method and one run's arrays as a function of all runs' arrays.

        Args:
            experiment: One of the runs.
            plan: How clients are mapped.
            fn: (algorithm, *arrays) -> arrays.
            in_axes: Of each of the arrays, 0 where it is stacked and None where all runs have the same.
            part: Which of the arrays are the ids (n,) of the clients at hand, as in `Problem`; None: all are.
        """

        def one(numbers, *args):
            return fn(experiment.algorithm(plan, numbers, None if part is None else args[part]), *args)

        if self.num == 1:
            return functools.partial(one, OWN)
        return functools.partial(plan.over_replicates(one, (0, *in_axes)), self.numbers)


ONE = Replicates()
