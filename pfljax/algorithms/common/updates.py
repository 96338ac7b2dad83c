"""Updates from local training, which a server scales and adds up; only parameters are differences.

Batch statistics travel as they are, and the server averages them: subtracting a scaled difference could make a variance
negative.
"""

from __future__ import annotations

from pfljax.contract import tree
from pfljax.contract.types import Array, Params, PyTree
from pfljax.local.solver import Solver


def added(solver: Solver, start: Params, trained: Params) -> PyTree:
    """theta_k - theta for stacked models, with the batch statistics of theta_k."""
    return tree.combine(tree.subtract(*solver.trained(trained, start)), trained)


def scaled(solver: Solver, update: PyTree, rows: Array | float) -> PyTree:
    """The updates (N, ...) times rows (N,) or a number; batch statistics are not scaled."""
    return tree.combine(tree.scale(solver.trained(update)[0], rows), update)


def moved(solver: Solver, models: Params, update: PyTree, arrived: Array) -> Params:
    """theta + update, with the update's batch statistics, for those of N models that got an update (N,)."""
    return tree.where(arrived, tree.combine(tree.add(*solver.trained(models, update)), update), models)
