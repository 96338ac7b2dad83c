"""Losses per example: functions of a model's outputs (B, ...) and targets y (B, ...) that return (B,)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, Num, Shaped

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Task
from pfljax.settings.fields import nearest

Loss = Callable[[Array, Array], Array]


def cross_entropy(
    outputs: Float[Array, "B ..."],
    y: Num[Array, "B ..."],
    class_weights: Float[Array, " C"] | None = None,
    label_smoothing: float = 0.0,
) -> Float[Array, " B"]:
    """Cross entropy of logits (B, C) in nats; of sequences or images (B, ..., C), the mean over positions.

    In sequences and images, positions whose target is not one of 0..C-1, such as -1 or padding, are ignored. Of the
    target distribution, a share `label_smoothing` is spread evenly over all classes.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.models import losses
        >>> losses.cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])).tolist()  # ln 4
        [1.386..., 1.386...]
    """
    # One-hot labels: on a CPU, the gradient of a gather is a slow scatter.
    num_classes = outputs.shape[-1]
    labels = jax.nn.one_hot(y, num_classes)
    if label_smoothing:
        labels = optax.smooth_labels(labels, label_smoothing)
    if class_weights is not None:
        labels = labels * class_weights
    losses = optax.softmax_cross_entropy(outputs, labels)
    return mean_over_positions(losses, y, num_classes)


def mse(outputs: Float[Array, "B ..."], y: Num[Array, "B ..."]) -> Float[Array, " B"]:
    """Squared error, averaged over the values of an example.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.models import losses
        >>> losses.mse(jnp.array([[1.0, 3.0]]), jnp.array([[0.0, 0.0]])).tolist()
        [5.0]
    """
    return mean_of_values(jnp.square(outputs - y))


def huber(outputs: Float[Array, "B ..."], y: Num[Array, "B ..."]) -> Float[Array, " B"]:
    """Huber loss: half the squared error up to 1 and linear beyond, averaged over the values of an example.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.models import losses
        >>> losses.huber(jnp.array([0.5, 3.0]), jnp.zeros(2)).tolist()
        [0.125, 2.5]
    """
    return mean_of_values(optax.huber_loss(outputs, y))


def bce(outputs: Float[Array, "B ..."], y: Num[Array, "B ..."]) -> Float[Array, " B"]:
    """Binary cross entropy of logits (B, C) and labels 0 or 1 in nats, averaged over the labels of an example.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.models import losses
        >>> losses.bce(jnp.zeros((1, 3)), jnp.array([[0, 1, 1]])).tolist()  # ln 2
        [0.693...]
    """
    return mean_of_values(optax.sigmoid_binary_cross_entropy(outputs, y.astype(outputs.dtype)))


def mean_of_values(values: Shaped[Array, "B ..."]) -> Float[Array, " B"]:
    """One value per example: the mean over all axes but the first."""
    if values.ndim == 1:
        return values
    return values.reshape(values.shape[0], -1).mean(axis=1)


def mean_over_positions(
    values: Shaped[Array, "B ..."], y: Num[Array, "B ..."], num_classes: int
) -> Float[Array, " B"]:
    """One value per example: values (B,) unchanged, values (B, T) averaged over the positions where y is a class."""
    if values.ndim == 1:
        return values.astype(jnp.float32)
    real = (y >= 0) & (y < num_classes)
    axes = tuple(range(1, y.ndim))
    total = jnp.where(real, values, 0).sum(axes)
    return total / jnp.maximum(real.sum(axes), 1)


DEFAULTS: dict[Task, Callable[..., Array]] = {
    "classification": cross_entropy,
    "regression": mse,
    "multilabel": bce,
}
# Name -> the task that a loss is for, and the loss
LOSSES: dict[str, tuple[Task, Callable[..., Array]]] = {
    "cross_entropy": ("classification", cross_entropy),
    "mse": ("regression", mse),
    "huber": ("regression", huber),
    "bce": ("multilabel", bce),
}


def check_name(name: str) -> None:
    """Raises `ArgumentError` if there is no loss of a name."""
    if name != "auto" and name not in LOSSES:
        text = f"is no function, and unknown; {nearest(name, ['auto', *LOSSES])}"
        raise ArgumentError("loss", text, name)


def named(loss: str | Loss, task: Task) -> Loss | None:
    """The loss of a name, or a function as it is; None for the task's default.

    Raises `ArgumentError` if the named loss is for another task.
    """
    if not isinstance(loss, str):
        return loss
    if loss == "auto":
        return None
    task_of_loss, function = LOSSES[loss]
    if task_of_loss != task:
        names = [name for name, (other_task, _) in LOSSES.items() if other_task == task]
        text = f"accepted for {task}: auto, {', '.join(names)}, or a function"
        raise ArgumentError("loss", text, loss)
    return None if function is DEFAULTS[task] else function


def check(loss: Loss, outputs: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> None:
    """Raises `ArgumentError` if a loss fails on outputs (B, ...) and targets (B, ...), or is not (B,) numbers."""
    arguments = f"outputs {outputs.shape} and y {y.shape}"
    name = getattr(loss, "__name__", type(loss).__name__)
    try:
        losses: Any = jax.eval_shape(loss, outputs, y)
    except Exception as error:  # a user's function
        line = (str(error).splitlines() or [""])[0]
        text = f"for {arguments}, raised {type(error).__name__}: {line}"
        raise ArgumentError("loss", text, name) from error

    shape = getattr(losses, "shape", None)
    dtype = getattr(losses, "dtype", jnp.int32)
    if shape != outputs.shape[:1] or not jnp.issubdtype(dtype, jnp.floating):
        result = type(losses).__name__ if shape is None else f"shape {shape} of {dtype}"
        accepted = f"one float per example, shape {outputs.shape[:1]}"
        text = f"returns {result} for {arguments}; accepted: {accepted}"
        raise ArgumentError("loss", text, name)
