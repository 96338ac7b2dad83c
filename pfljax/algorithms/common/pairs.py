"""A received model and a client's own part, trained on one objective of both."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pfljax.contract.types import Array, PyTree
from pfljax.local.batches import Batch
from pfljax.local.problem import Pair, PairDirection
from pfljax.local.solver import Slope, joined

# (a pair of whole models, memory, mini-batch) -> (the value to minimize (), memory)
JointObjective = Callable[[Pair, PyTree, Batch], tuple[Array, PyTree]]


def joint(objective: JointObjective) -> PairDirection:
    """The direction of `Problem.descend_pair` along the gradient of one objective in both of a pair.

    Dropout and noise are those of model 0.
    """

    def direction(
        params: Pair, statistics: Pair, memory: PyTree, batch: Batch
    ) -> tuple[Pair, PyTree]:
        def value(params: Pair, statistics: Pair) -> tuple[Array, PyTree]:
            shared = joined(params.shared, statistics.shared)
            personal = joined(params.personal, statistics.personal)
            return objective(Pair(shared, personal), memory, batch.for_model(0))

        value_and_gradients = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)
        (loss, new_memory), (gradients, changes) = value_and_gradients(params, statistics)
        shared_slope = Slope(loss, gradients.shared, changes.shared)
        personal_slope = Slope(loss, gradients.personal, changes.personal)
        return Pair(shared_slope, personal_slope), new_memory

    return direction
