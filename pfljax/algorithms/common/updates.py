"""Updates from local training, which a server scales and adds up; only parameters are differences.

Batch statistics travel as they are, and the server averages them: subtracting a scaled difference could make a variance
negative.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Array, Params, PyTree
from pfljax.local.solver import Solver

Mean = Literal["weighted", "uniform"]  # over clients: by number of examples, or equally


def weight_of(size: Array, mean: Mean) -> Array:
    """Weights of clients with these numbers of examples; 0 for clients without examples."""
    return (size if mean == "weighted" else size > 0).astype(jnp.float32)


def added(solver: Solver, start: Params, trained: Params) -> PyTree:
    """theta_k - theta for stacked models, with the batch statistics of theta_k."""
    return tree.combine(tree.subtract(*solver.trained(trained, start)), trained)


def scaled(solver: Solver, update: PyTree, rows: Array | float) -> PyTree:
    """The updates (N, ...) times rows (N,) or a number; batch statistics are not scaled."""
    return tree.combine(tree.scale(solver.trained(update)[0], rows), update)


def moved(solver: Solver, models: Params, update: PyTree, arrived: Array) -> Params:
    """theta + update, with the update's batch statistics, for those of N models that got an update (N,)."""
    return tree.where(arrived, tree.combine(tree.add(*solver.trained(models, update)), update), models)
