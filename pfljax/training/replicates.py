"""Runs that share one kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.core.types import PyTree
from pfljax.engine.plan import ExecutionPlan


@dataclasses.dataclass(frozen=True)
class Replicates:
    """Several runs that differ in seeds and data only, stacked in front of every array; a single one is not stacked.

    Outside of compiled functions there is a list with one entry per run, whatever their number.

    Attributes:
        num: Number of runs.
    """

    num: int = 1

    @property
    def axis(self) -> int:
        """Position of the client axis in the arrays of all runs."""
        return int(self.num > 1)

    def join(self, parts: Sequence[PyTree], stack: Callable = jnp.stack) -> PyTree:
        """One tree of arrays out of one per run."""
        return jax.tree.map(lambda *leaves: stack(leaves), *parts) if self.num > 1 else parts[0]

    def split(self, joined: PyTree) -> list[PyTree]:
        """Undoes `join`."""
        if self.num == 1:
            return [joined]
        return [jax.tree.map(lambda leaf, n=n: leaf[n], joined) for n in range(self.num)]

    def lift(self, plan: ExecutionPlan, fn: Callable, in_axes: Any = 0) -> Callable:
        """A function of one run's arrays as a function of all runs'."""
        return plan.over_replicates(fn, in_axes) if self.num > 1 else fn


ONE = Replicates()
