"""What local training adds to models, which a server scales and adds up: only parameters are differences.

Batch statistics travel as they have become, and a server takes their mean: a variance less a difference that was scaled
could be negative.
"""

from __future__ import annotations

from pfljax.core import tree
from pfljax.core.types import Array, Params, PyTree
from pfljax.local.solver import Solver


def added(solver: Solver, start: Params, trained: Params) -> PyTree:
    """theta_k - theta of stacked models, and the statistics of theta_k."""
    return tree.combine(tree.subtract(*solver.trained(trained, start)), trained)


def scaled(solver: Solver, update: PyTree, rows: Array | float) -> PyTree:
    """The updates (N, ...) times rows (N,), or times a number; statistics as they are."""
    return tree.combine(tree.scale(solver.trained(update)[0], rows), update)


def moved(solver: Solver, models: Params, update: PyTree, arrived: Array) -> Params:
    """theta + update, with the update's statistics, for those of N models to which something came back (N,)."""
    return tree.where(arrived, tree.combine(tree.add(*solver.trained(models, update)), update), models)
