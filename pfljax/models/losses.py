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
    """Cross entropy of logits (B, C) in nats; of sequences or images (B, ..., C), the mean over places.

    In sequences and images, places whose target is not one of 0..C-1, such as -1 or padding, are ignored. Of the target
    distribution, a share `label_smoothing` is spread evenly over all classes.
    """
    # One-hot labels: on a CPU, the gradient of a gather is a slow scatter.
    labels = jax.nn.one_hot(y, outputs.shape[-1])
    labels = optax.smooth_labels(labels, label_smoothing) if label_smoothing else labels
    losses = optax.softmax_cross_entropy(
        outputs, labels if class_weights is None else labels * class_weights
    )
    return mean_over_places(losses, y, outputs.shape[-1])


def mse(outputs: Float[Array, "B ..."], y: Num[Array, "B ..."]) -> Float[Array, " B"]:
    """Squared error, averaged over the values of an example."""
    return mean_of_values(jnp.square(outputs - y))


def huber(outputs: Float[Array, "B ..."], y: Num[Array, "B ..."]) -> Float[Array, " B"]:
    """Huber loss: half the squared error up to 1 and linear beyond, averaged over the values of an example."""
    return mean_of_values(optax.huber_loss(outputs, y))


def bce(outputs: Float[Array, "B ..."], y: Num[Array, "B ..."]) -> Float[Array, " B"]:
    """Binary cross entropy of logits (B, C) and labels 0 or 1 in nats, averaged over the labels of an example."""
    return mean_of_values(optax.sigmoid_binary_cross_entropy(outputs, y.astype(outputs.dtype)))


def mean_of_values(values: Shaped[Array, "B ..."]) -> Float[Array, " B"]:
    """One value per example: the mean over all axes but the first."""
    return values if values.ndim == 1 else values.reshape(values.shape[0], -1).mean(axis=1)


def mean_over_places(
    values: Shaped[Array, "B ..."], y: Num[Array, "B ..."], num_classes: int
) -> Float[Array, " B"]:
    """One value per example: values (B,) unchanged, values (B, T) averaged over the positions where y is a class."""
    if values.ndim == 1:
        return values.astype(jnp.float32)
    real = (y >= 0) & (y < num_classes)
    places = tuple(range(1, y.ndim))
    return jnp.where(real, values, 0).sum(places) / jnp.maximum(real.sum(places), 1)


DEFAULTS: dict[Task, Callable[..., Array]] = {
    "classification": cross_entropy,
    "regression": mse,
    "multilabel": bce,
}
LOSSES: dict[str, tuple[Task, Callable[..., Array]]] = {  # by name: their task
    "cross_entropy": ("classification", cross_entropy),
    "mse": ("regression", mse),
    "huber": ("regression", huber),
    "bce": ("multilabel", bce),
}


def check_name(name: str) -> None:
    """Raises `ArgumentError` if there is no loss of a name."""
    if name != "auto" and name not in LOSSES:
        raise ArgumentError(
            "loss", f"is no function, and unknown; {nearest(name, ['auto', *LOSSES])}", name
        )


def named(loss: str | Loss, task: Task) -> Loss | None:
    """The loss that is named, or a function as it is; None for the task's default.

    Raises `ArgumentError` if the named loss is one of another task.
    """
    if not isinstance(loss, str):
        return loss
    if loss != "auto" and LOSSES[loss][0] != task:
        known = [name for name, (of, _) in LOSSES.items() if of == task]
        raise ArgumentError(
            "loss", f"accepted for {task}: auto, {', '.join(known)}, or a function", loss
        )
    return None if loss == "auto" or LOSSES[loss][1] is DEFAULTS[task] else LOSSES[loss][1]


def check(loss: Loss, outputs: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> None:
    """Raises `ArgumentError` if a loss fails on outputs (B, ...) and targets (B, ...), or is not (B,) numbers."""
    given = f"outputs {outputs.shape} and y {y.shape}"
    name = getattr(loss, "__name__", type(loss).__name__)
    try:
        found: Any = jax.eval_shape(loss, outputs, y)
    except Exception as error:  # a user's function
        line = (str(error).splitlines() or [""])[0]
        raise ArgumentError(
            "loss", f"for {given}, raised {type(error).__name__}: {line}", name
        ) from error
    shape = getattr(found, "shape", None)
    dtype = getattr(found, "dtype", jnp.int32)
    if shape != outputs.shape[:1] or not jnp.issubdtype(dtype, jnp.floating):
        what = f"shape {shape} of {dtype}" if shape is not None else type(found).__name__
        text = f"returns {what} for {given}; accepted: one float per example, shape {outputs.shape[:1]}"
        raise ArgumentError("loss", text, name)
