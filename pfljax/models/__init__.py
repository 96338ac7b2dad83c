"""Networks behind one pair of pure functions: Model(init, apply)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.models.networks import CNN, MLP, FemnistCNN, MobileNetV2
from pfljax.models.recurrent import CharacterLSTM
from pfljax.types import Array, Key, Params, Task, UsageError

NAMES = ("linear", "mlp", "cnn", "femnist_cnn", "mobilenet_v2", "lstm")

# Of each network for images: (channels of the cnn, outputs) -> the module, and the least height and width.
IMAGE_NETWORKS = {
    "cnn": lambda channels, outputs: (CNN(channels, outputs), 2 ** len(channels)),
    "femnist_cnn": lambda channels, outputs: (FemnistCNN(outputs), 16),
    "mobilenet_v2": lambda channels, outputs: (MobileNetV2(outputs), 8),
}


class Model(NamedTuple):
    """A network and what its outputs mean.

    Attributes:
        init: key -> parameters.
        apply: (parameters, x (B, *features)) -> outputs (B, C) logits, or (B,) values of a regression.
        task: "classification" or "regression".
    """

    init: Callable[[Key], Params]
    apply: Callable[[Params, Array], Array]
    task: Task

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        """Per-example loss (B,): cross entropy in nats (of a sequence the mean over places), or the squared error."""
        outputs = self.apply(params, x)
        if self.task == "regression":
            return jnp.square(outputs - y)
        # One-hot labels: on a CPU the gradient of a gather is a slow scatter.
        losses = optax.softmax_cross_entropy(outputs, jax.nn.one_hot(y, outputs.shape[-1]))
        return mean_over_places(losses, y, outputs.shape[-1])

    def predict(self, params: Params, x: Array) -> Array:
        """What mixtures mix: class probabilities (B, C) or (B, T, C), or the outputs (B,) of a regression."""
        outputs = self.apply(params, x)
        return outputs if self.task == "regression" else jax.nn.softmax(outputs)


def mean_over_places(values: Array, y: Array, num_classes: int) -> Array:
    """One value an example: values (B,) as they are, values (B, T) as means over the T places whose y is a class."""
    if y.ndim == 1:
        return values.astype(jnp.float32)
    real, places = y < num_classes, tuple(range(1, y.ndim))
    return jnp.where(real, values, 0).sum(places) / jnp.maximum(real.sum(places), 1)


def make(
    name: str,
    input_shape: Sequence[int],
    task: Task,
    num_classes: int,
    *,
    hidden: Sequence[int] = (64,),
    channels: Sequence[int] = (128, 128, 128),
) -> Model:
    """Builds a model for inputs of `input_shape` (without the batch axis).

    Raises:
        UsageError: for an unknown name, or images too small for the poolings.
    """
    outputs = 1 if task == "regression" else num_classes
    zeros = jnp.zeros((1, *input_shape))
    if name in ("linear", "mlp"):
        module = MLP(() if name == "linear" else tuple(hidden), outputs)
    elif name in IMAGE_NETWORKS:
        network, least = IMAGE_NETWORKS[name](tuple(channels), outputs)
        if len(input_shape) != 3 or min(input_shape[:2]) < least:
            raise UsageError(
                f"--model={name}: takes images (height, width, channels) of at least {least} x {least}; this data "
                f"set's examples have shape {tuple(input_shape)}: try --model=mlp"
            )
        module = network
    elif name == "lstm":
        if len(input_shape) != 1:
            raise UsageError(f"--model=lstm: takes sequences of tokens; this data set's examples: {tuple(input_shape)}")
        module, zeros = CharacterLSTM(outputs), jnp.zeros((1, *input_shape), jnp.int32)
    else:
        raise UsageError(f"--model={name}: unknown model; accepted: {', '.join(NAMES)}")

    def init(key: Key) -> Params:
        return module.init(key, zeros)["params"]

    def apply(params: Params, x: Array) -> Array:
        out = module.apply({"params": params}, x)
        return out[..., 0] if task == "regression" else out

    return Model(init, apply, task)
