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

    def update(updates, state, params: Any = None, **extra):
        del extra
        updates, state = optimizer.update(updates, state, params)
        return tree.subtract(project(tree.add(params, updates)), params), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
