"""Optimizers for parameters constrained to a set, such as weights on a simplex."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from pfljax.contract import tree
from pfljax.contract.types import PyTree


def projected(
    optimizer: optax.GradientTransformation, project: Callable[[PyTree], PyTree]
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with a projection by `project` after every step."""

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        del extra
        updates, state = optimizer.update(updates, state, params)
        new_params = project(tree.add(params, updates))
        return tree.subtract(new_params, params), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
