"""Checks of the functions that users pass for local training, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Params, PyTree

OPTIMIZER = "an optax transformation, or a function of the learning rate that returns one, such as optax.sgd"
SCHEDULE = "a function of the round's number, which is traced (jnp.where in place of if), that returns a real number"


def make_optimizer(
    optimizer: Callable[[Any], Any], learning_rate: Any
) -> optax.GradientTransformation:
    """The optimizer that a user's function of the learning rate returns.

    Raises:
        ArgumentError: if it raises an error, or returns anything else.
    """
    result = _called("optimizer", OPTIMIZER, optimizer, learning_rate)
    if not isinstance(result, optax.GradientTransformation):
        text = f"returned {type(result).__name__} for learning rate {learning_rate}; accepted: {OPTIMIZER}"
        raise ArgumentError("optimizer", text)
    return result


def check_optimizer(optimizer: optax.GradientTransformationExtraArgs, params: Params) -> None:
    """Traces a step of an optimizer for parameters of these shapes.

    Raises:
        ArgumentError: if it raises an error, or its updates or state have other shapes than before.
    """

    def step(params: Params, state: PyTree, round_number: jax.Array, loss: jax.Array) -> Any:
        return optimizer.update(params, state, params, round_number=round_number, value=loss)

    state = _called("optimizer", OPTIMIZER, jax.eval_shape, optimizer.init, params)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        result = jax.eval_shape(step, params, state, number, loss)
    except ArgumentError:  # a loaded run's optimizer that was not recorded says so where it trains
        return
    except Exception as error:
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            text = "its update refuses the keywords that others get, the round's number and the loss as value"
            raise ArgumentError(
                "optimizer", f"{text}; accepted: an update with **extra_args"
            ) from error
        raise _failed("optimizer", OPTIMIZER, error) from error
    if not isinstance(result, tuple) or len(result) != 2:
        text = f"its update returned {type(result).__name__}; accepted: updates and the new state"
        raise ArgumentError("optimizer", text)
    updates, after = result
    if _shapes(updates) != _shapes(params):
        raise ArgumentError(
            "optimizer", "its updates have other shapes than the parameters; accepted: the same"
        )
    if _shapes(after) != _shapes(state):
        raise ArgumentError(
            "optimizer", "its state changes its shape in a step; accepted: the same for all steps"
        )


def check_schedule(schedule: Callable[[Any], Any]) -> None:
    """Traces a schedule of the learning rate.

    Raises:
        ArgumentError: if it raises an error, or returns anything but a real number.
    """
    number = jax.ShapeDtypeStruct((), jnp.int32)
    result = _called("schedule", SCHEDULE, jax.eval_shape, schedule, number)
    if not hasattr(result, "dtype"):
        raise ArgumentError("schedule", f"returned {type(result).__name__}; accepted: {SCHEDULE}")
    if result.shape != () or not (
        jnp.issubdtype(result.dtype, jnp.floating) or jnp.issubdtype(result.dtype, jnp.integer)
    ):
        text = f"returned {result.dtype}[{', '.join(map(str, result.shape))}]"
        raise ArgumentError("schedule", f"{text}; accepted: {SCHEDULE}")


def _called(argument: str, accepted: str, function: Callable, *args: Any) -> Any:
    """What a user's function returns. Raises `ArgumentError` for any error in it."""
    try:
        return function(*args)
    except ArgumentError:
        raise
    except Exception as error:
        raise _failed(argument, accepted, error) from error


def _failed(argument: str, accepted: str, error: Exception) -> ArgumentError:
    """The error of a function that raised an error."""
    line = str(error).strip().partition("\n")[0]
    return ArgumentError(argument, f"raised {type(error).__name__}: {line}; accepted: {accepted}")


def _shapes(tree: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    """The structure of a tree, and the shapes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(leaf) for leaf in leaves]
