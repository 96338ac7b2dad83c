"""Networks behind one pair of pure functions: Model(init, apply)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from pfljax.core.types import Array, Key, Params, Task, UsageError
from pfljax.models.networks import (
    CNN,
    MLP,
    VGG11,
    FemnistCNN,
    LeNet,
    McMahanCNN,
    MobileNetV2,
    PflResearchCNN,
    ResNet18,
)
from pfljax.models.recurrent import CharacterLSTM

NAMES = (
    *("linear", "mlp", "cnn", "lenet", "mcmahan_cnn", "femnist_cnn", "pfl_research_cnn"),
    *("vgg11", "resnet18", "mobilenet_v2", "lstm"),
)

# Of each network for images: (channels of the cnn, outputs) -> the module, and the least height and width.
IMAGE_NETWORKS = {
    "cnn": lambda channels, outputs: (CNN(channels, outputs), 2 ** len(channels)),
    "lenet": lambda channels, outputs: (LeNet(outputs), 16),
    "mcmahan_cnn": lambda channels, outputs: (McMahanCNN(outputs), 4),
    "vgg11": lambda channels, outputs: (VGG11(outputs), 32),
    "femnist_cnn": lambda channels, outputs: (FemnistCNN(outputs), 16),
    "pfl_research_cnn": lambda channels, outputs: (PflResearchCNN(outputs), 6),
    "resnet18": lambda channels, outputs: (ResNet18(outputs), 8),
    "mobilenet_v2": lambda channels, outputs: (MobileNetV2(outputs), 8),
}


class Model(NamedTuple):
    """A network and what its outputs mean.

    Attributes:
        init: key -> parameters.
        apply: (parameters, x (B, *features)) -> outputs (B, C) logits, or (B,) values of a regression.
        task: "classification" or "regression".
        features: (parameters, x (B, *features)) -> what the last dense layer receives, (B, F).
        layers: The names of the parameter tree's branches, layer by layer in the order of computation; a
            normalization belongs to the layer before it.
    """

    init: Callable[[Key], Params]
    apply: Callable[[Params, Array], Array]
    task: Task
    features: Callable[[Params, Array], Array]
    layers: tuple[tuple[str, ...], ...]

    def mask(self, params: Params, num: int) -> Params:
        """A tree of bools like `params`: whether a parameter is in one of the last `num` layers (0 to all)."""
        last = {name for names in self.layers[len(self.layers) - num :] for name in names}
        return {name: jax.tree.map(lambda _, name=name: name in last, branch) for name, branch in params.items()}

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

    def features(params: Params, x: Array) -> Array:
        received = []

        def note(call, args, kwargs, context):
            if isinstance(context.module, nn.Dense):
                received.append(args[0])
            return call(*args, **kwargs)

        with nn.intercept_methods(note):
            module.apply({"params": params}, x)
        return received[-1]

    return Model(init, apply, task, features, _layers(module, zeros))


def _layers(module: nn.Module, x: Array) -> tuple[tuple[str, ...], ...]:
    """`Model.layers`, by watching a forward pass."""
    found: dict[str, bool] = {}  # branches in the order of their first call, and whether they normalize

    def note(call, args, kwargs, context):
        if len(context.module.path) == 1:
            found.setdefault(context.module.path[0], isinstance(context.module, nn.GroupNorm))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(module.init, jax.random.key(0), x)
    layers: list[tuple[str, ...]] = []
    for name, normalizes in found.items():
        if normalizes and layers:
            layers[-1] = (*layers[-1], name)
        else:
            layers.append((name,))
    return tuple(layers)
