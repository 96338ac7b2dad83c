"""Builds models for given data, by name or from a user's module."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, PyTree, Task
from pfljax.models import losses, networks, recurrent, transformers
from pfljax.models.losses import Loss
from pfljax.models.model import ACCEPTED, FLOAT32, Model, module_of
from pfljax.models.pytorch import with_frozen
from pfljax.models.rewriting import equations
from pfljax.models.standardizing import inside
from pfljax.models.structure import is_flax
from pfljax.models.torch_modules import TorchModule, name_of, wrapped
from pfljax.settings.fields import in_their_case, nearest


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of networks that are built by name.

    Attributes:
        hidden: Widths of the mlp's hidden layers.
        channels: Numbers of channels of the cnn's convolutions.
        patch: Rows and columns of a patch of the vit.
        width: Width of the tokens of the vit, transformer or encoder.
        depth: Number of their blocks.
        heads: Number of their attention heads; divides `width`.
        style: How their blocks are built, a name in `transformers.STYLES`; "": vit, or gpt2 for texts.
    """

    hidden: Sequence[int] = (64,)
    channels: Sequence[int] = (128, 128, 128)
    patch: int = 4
    width: int = 128
    depth: int = 4
    heads: int = 4
    style: str = ""

    def mlp(self) -> nn.Module:
        """Dense layers."""
        return networks.MLP(hidden=tuple(self.hidden))

    def cnn(self) -> nn.Module:
        """Convolutions."""
        return networks.CNN(channels=tuple(self.channels))

    def vit(self) -> nn.Module:
        """A vision Transformer."""
        return transformers.ViT(
            patch=self.patch,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            style=self.style or "vit",
        )

    def transformer(self) -> nn.Module:
        """A decoder."""
        return transformers.Transformer(
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            style=self.style or "gpt2",
        )

    def encoder(self) -> nn.Module:
        """A Transformer that classifies texts with up to 255 different characters, 1 to 255; 0 is padding."""
        return transformers.Transformer(
            kind="encoder",
            tokens=256,
            padding=0,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            style=self.style or "gpt2",
        )


NAMES: dict[str, Callable[[Sizes], nn.Module]] = {
    "linear": lambda sizes: networks.MLP(hidden=()),
    "logistic": lambda sizes: networks.Logistic(),
    "mlp": Sizes.mlp,
    "cnn": Sizes.cnn,
    "lenet": lambda sizes: networks.LeNet(),
    "mcmahan_cnn": lambda sizes: networks.McMahanCNN(),
    "femnist_cnn": lambda sizes: networks.FemnistCNN(),
    "pfllib_cnn": lambda sizes: networks.PFLlibCNN(),
    "pfl_research_cnn": lambda sizes: networks.PflResearchCNN(),
    "vgg11": lambda sizes: networks.VGG11(),
    "resnet18": lambda sizes: networks.ResNet18(),
    "mobilenet_v2": lambda sizes: networks.MobileNetV2(),
    "vit": Sizes.vit,
    "lstm": lambda sizes: recurrent.CharacterLSTM(),
    "transformer": Sizes.transformer,
    "encoder": Sizes.encoder,
}

FEATURES = 512  # of all networks in a family


def family_resnet(*blocks: int, bottleneck: bool = False) -> nn.Module:
    """A residual network of a family."""
    return networks.ResNet(blocks=blocks, bottleneck=bottleneck, features=FEATURES)


FAMILY_NETWORKS: dict[str, nn.Module] = {
    "cnn": networks.FemnistCNN(hidden=FEATURES),
    "googlenet": networks.GoogLeNet(features=FEATURES),
    "mobilenet_v2": networks.MobileNetV2(features=FEATURES),
    "resnet10": family_resnet(1, 1, 1, 1),
    "resnet18": family_resnet(2, 2, 2, 2),
    "resnet34": family_resnet(3, 4, 6, 3),
    "resnet50": family_resnet(3, 4, 6, 3, bottleneck=True),
    "resnet101": family_resnet(3, 4, 23, 3, bottleneck=True),
    "resnet152": family_resnet(3, 8, 36, 3, bottleneck=True),
}


def family(*names: str) -> dict[str, nn.Module]:
    """A family of networks, in this order."""
    return {name: FAMILY_NETWORKS[name] for name in names}


FOUR = ("cnn", "googlenet", "mobilenet_v2", "resnet18")
# Families of networks for small images that differ between clients, as HtFLlib's HtFE-img-2, -3, -4 and -8 (Zhang et
# al., KDD 2025), with group norm in place of batch norm.
FAMILIES: dict[str, dict[str, nn.Module]] = {
    "htfe2": family("cnn", "resnet18"),
    "htfe3": family("resnet10", "resnet18", "resnet34"),
    "htfe4": family(*FOUR),
    "htfe8": family(*FOUR, "resnet34", "resnet50", "resnet101", "resnet152"),
}
TOKENS = (recurrent.CharacterLSTM, transformers.Transformer)  # networks that read integers
SEQUENCES = ("lstm", "transformer")  # networks with outputs at every position


def make(
    name: str,
    input_shape: Sequence[int],
    task: Task,
    num_classes: int,
    *,
    target_shape: tuple[int, ...] | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    **sizes: Any,
) -> Model:
    """Builds a model by name.

    Args:
        name: A name in `NAMES`, in any case.
        input_shape: Shape of an example, without the batch axis.
        task, num_classes, target_shape: As in `build`.
        options: Further fields of the `Model`, such as `frozen` and `trainable`.
        sizes: Fields of `Sizes`, such as `hidden` or `channels`.

    Returns:
        The model, whose outputs fit the task.

    Raises:
        ArgumentError: for an unknown name, or inputs that the network does not accept.

    Examples:
        >>> import pfljax as pfl
        >>> model = pfl.models.make("mlp", (8, 8, 1), "classification", 10, hidden=(16,))
        >>> model.output_shape
        (1, 10)
    """
    name = in_their_case(name, NAMES)
    if name not in NAMES:
        raise ArgumentError("model", f"unknown model; {nearest(name, NAMES)}", name)
    module = Model(NAMES[name](Sizes(**sizes)), **options)
    return build(module, input_shape, task, num_classes, name=name, target_shape=target_shape)


def build(
    model: Any,
    input_shape: Sequence[int] | PyTree,
    task: Task,
    num_classes: int,
    *,
    dtype: Any = jnp.float32,
    name: str | None = None,
    target_shape: tuple[int, ...] | None = None,
    loss: str | Loss = "auto",
    computes_in: str = FLOAT32,
) -> Model:
    """Builds a model for given data.

    Args:
        model: A Flax module (Linen or NNX); if a Linen module's field `outputs` is None, it is filled in. Or a `Model`.
            Or a function of `num_classes`, `rngs` or both; `num_classes` may also be its first positional argument.
        input_shape: Shape of an example, without the batch axis; or a tree of `jax.ShapeDtypeStruct`.
        task: "classification", "regression" or "multilabel".
        num_classes: C; 1 for regression.
        dtype: Dtype of the inputs, if these are a shape.
        name: Name of the model in messages; by default its class name.
        target_shape: See `Model`.
        loss: Name of a loss, or a function; see `pfljax.models.losses`.
        computes_in: The model's `dtype`.

    Returns:
        The model, with the module, task, loss and shapes of the data.

    Raises:
        ArgumentError: if `model` is none of these, does not accept the data or has outputs of another shape, or the
            loss does not fit.

    Examples:
        >>> import flax.linen as nn
        >>> import pfljax as pfl
        >>> model = pfl.models.build(nn.Dense(3), (5,), "classification", 3)
        >>> model.num_parameters  # (5 + 1) x 3
        18
    """
    outputs = num_classes
    if task == "regression":
        outputs = target_shape[0] if target_shape is not None and len(target_shape) == 1 else 1
    factory, _ = inside(module_of(model))
    name = str(name or name_of(factory))
    module = called(factory, outputs, name)
    if isinstance(module, nn.Module) and getattr(module, "outputs", outputs) is None:
        module = module.clone(outputs=outputs)

    # Inputs of several examples, whose number is no other size, so that mistaking one axis for another shows.
    features = example_features(module, input_shape, dtype, name)
    sizes = (outputs, *(target_shape or ()))
    several = next(num for num in itertools.count(2) if num not in sizes)
    inputs = batch(features, several)
    if not isinstance(model, Model):
        model = Model(module, batch(features, 1))
    elif model.example_input is None:
        model = dataclasses.replace(model, example_input=batch(features, 1))
    model = with_frozen(model)

    criterion = losses.named(loss, task)
    model = dataclasses.replace(
        model,
        module=module,
        task=task,
        criterion=criterion,
        target_shape=target_shape,
        dtype=computes_in,
    )
    check_outputs(model, inputs, outputs, name)
    if criterion is not None:
        shape = (several, *model.output_shape[1:])
        target = (several, *model.targets.shape[1:])
        losses.check(
            criterion,
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(target, model.targets.dtype),
        )
    return model


def example_features(
    module: Any, input_shape: Sequence[int] | PyTree, dtype: Any, name: str
) -> PyTree:
    """Shapes and types of an example's arrays: tokens and integers are int32.

    Raises `ArgumentError` for other inputs than integers of a network that reads tokens.
    """
    takes_tokens = isinstance(module, TOKENS)
    is_shape = all(isinstance(leaf, int | np.integer) for leaf in jax.tree.leaves(input_shape))
    if is_shape:
        input_shape = jax.ShapeDtypeStruct(tuple(input_shape), dtype)
    elif takes_tokens:
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(input_shape)]
        wrong = {str(dtype) for dtype in dtypes if not jnp.issubdtype(dtype, jnp.integer)}
        if wrong:
            text = f"takes tokens, but x is {', '.join(sorted(wrong))}; accepted: integers"
            raise ArgumentError("model", text, name)

    def convert(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_integer = takes_tokens or jnp.issubdtype(leaf.dtype, jnp.integer)
        return leaf.update(dtype=jnp.int32) if is_integer else leaf

    return jax.tree.map(convert, input_shape)


def batch(features: PyTree, num: int) -> PyTree:
    """Shapes and types of a batch of examples."""
    return jax.tree.map(lambda leaf: leaf.update(shape=(num, *leaf.shape)), features)


def arguments(factory: Callable) -> Mapping[str, inspect.Parameter]:
    """The arguments of a function, class or `partial`; a class's are those of `__init__`, since NNX's own hide them."""
    if not isinstance(factory, functools.partial):
        factory = functools.partial(factory)
    function = factory.func
    if inspect.isclass(function):
        function = functools.partial(function.__init__, None)
    remaining = functools.partial(function, *factory.args, **factory.keywords)
    return inspect.signature(remaining).parameters


def called(factory: Any, outputs: int, name: str) -> Any:
    """Calls a function of the number of classes; returns its module or function of `rngs`."""
    if isinstance(factory, TorchModule):
        if factory.is_module:
            return factory
        return TorchModule(with_outputs(factory.made_of, outputs, name))
    if not callable(factory) or is_flax(type(factory), {"Module"}):
        return factory
    factory = with_outputs(factory, outputs, name)
    try:
        if "rngs" in arguments(factory):
            return factory
        module = wrapped(factory())
        # A function of PyTorch modules is called for each random key, too.
        return TorchModule(factory) if isinstance(module, TorchModule) else module
    except ArgumentError:
        raise
    except Exception as error:  # a user's function
        line = (str(error).splitlines() or [""])[0]
        text = f"raised {type(error).__name__}: {line}; accepted: {ACCEPTED}"
        raise ArgumentError("model", text, name) from error


def with_outputs(factory: Callable, outputs: int, name: str) -> Callable:
    """A function with the number of classes set, if it has an argument for it."""
    try:
        names = arguments(factory)
    except (TypeError, ValueError) as error:
        raise ArgumentError("model", f"accepted: {ACCEPTED}", name) from error
    if "num_classes" in names:
        return functools.partial(factory, num_classes=outputs)
    if any(is_required(argument) for argument in names.values()):
        return functools.partial(factory, outputs)
    return factory


def is_required(argument: inspect.Parameter) -> bool:
    """Whether an argument may be passed by position and has no default, but for `rngs`."""
    is_positional = argument.kind <= argument.POSITIONAL_OR_KEYWORD
    return is_positional and argument.default is argument.empty and argument.name != "rngs"


def check_outputs(model: Model, inputs: PyTree, outputs: int, name: str) -> None:
    """Raises `ArgumentError` if the model fails on inputs (B, *features), or returns anything but logits or values."""
    try:
        params = model.network.shapes
        traced, result = jax.make_jaxpr(model.apply, return_shape=True)(params, inputs)
    except ArgumentError as error:
        raise ArgumentError(error.argument, error.text, error.value or name) from None
    except Exception as error:
        raise ArgumentError("model", failure(model, inputs, error), name) from error
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(params)):
        raise ArgumentError("model", "has parameters or statistics that are not real numbers", name)
    if not isinstance(result, jax.ShapeDtypeStruct):
        text = f"returns {type(result).__name__}; accepted: one array of logits or values"
        raise ArgumentError("model", text, name)
    shapes, accepted = accepted_shapes(model, inputs, outputs)
    if result.shape not in shapes:
        shape = shown(result.shape[1:])
        raise ArgumentError(
            "model", f"returns outputs of shape {shape}; accepted: {accepted}", name
        )
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise ArgumentError("model", f"returns outputs of {result.dtype}; accepted: floats", name)

    # Probabilities in place of logits.
    if model.task == "regression":
        return
    if ends_in(traced.jaxpr, "logistic"):
        raise ArgumentError("model", SIGMOID_OUTPUTS, name)
    # A softmax ends in a division; only a network that has one is worth evaluating.
    divisions = [eqn for eqn in equations(traced) if eqn.primitive.name == "div"]
    if any(eqn.outvars[0].aval.size == result.size for eqn in divisions):
        values = model.apply(model.init(jax.random.key(0)), random_like(inputs))
        if sum_to_1(values):
            raise ArgumentError("model", SOFTMAX_OUTPUTS, name)


def failure(model: Model, inputs: PyTree, error: Exception) -> str:
    """Says on what inputs a model fails, and how."""
    shapes = jax.tree.map(lambda leaf: leaf.shape, inputs)
    dtype = "" if model.dtype == FLOAT32 else f" in {model.dtype}"
    line = (str(error).splitlines() or [""])[0]
    hint = ""
    num_axes = len(getattr(inputs, "shape", ()))
    if num_axes == 4 and model.channels_first:
        hint = "; PyTorch's convolutions take channels first, x (n, channels, height, width)"
    elif num_axes == 3:
        hint = "; if x has images, add an axis for their channels, as x[..., None] does"
    return f"fails on inputs of shape {shapes}{dtype}: {line}{hint}"


def accepted_shapes(
    model: Model, inputs: PyTree, outputs: int
) -> tuple[list[tuple[int, ...]], str]:
    """The shapes that outputs may have, and these in words."""
    num, *features = getattr(inputs, "shape", jax.tree.leaves(inputs)[0].shape[:1])
    target = model.target_shape
    if target is not None and (target or model.task == "multilabel"):
        wanted = (*target, outputs) if model.task == "classification" else target
        text = f"{shown(wanted)} for targets of shape {shown(target)}"
        return [(num, *wanted)], f"{text}; one class per example needs integers (n,)"
    if model.task == "regression":
        text = "(batch,) or (batch, 1) values for regression; classes need integers, not floats"
        return [(num,)], text
    # Sequences may have logits everywhere, unless each has one target.
    positions = features if len(features) == 1 and target is None else []
    return [(num, outputs), (num, *positions, outputs)], f"(batch, {outputs}) logits"


def shown(shape: Sequence[int]) -> str:
    """The shape of a batch, in words."""
    return f"({', '.join(map(str, ('batch', *shape)))})"


SIGMOID_OUTPUTS = "returns probabilities, those of a sigmoid; accepted: logits, so leave out the sigmoid at its end"
SOFTMAX_OUTPUTS = (
    "returns probabilities, which sum to 1; accepted: logits, so leave out the softmax at its end"
)


def random_like(shapes: PyTree) -> PyTree:
    """Normal numbers in place of arrays, given their shapes, and random keys in place of keys."""
    key = jax.random.key(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(key, leaf.shape)
        return jax.random.normal(key, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(draw, shapes)


def sum_to_1(outputs: Array) -> bool:
    """Whether outputs (..., C) are probabilities."""
    if not bool((outputs >= 0).all()):
        return False
    return bool(jnp.allclose(outputs.sum(axis=-1), 1, atol=1e-3))


# Operations that only move numbers or change their type, and those that call an inner function.
MOVES = {
    "reshape",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "transpose",
    "convert_element_type",
    "copy",
    "stop_gradient",
    "concatenate",
}
CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "checkpoint", "closed_call"}


def ends_in(jaxpr: Any, operation: str, output: int = 0) -> bool:
    """Whether an output of a traced function comes straight from an operation, such as "logistic"."""
    sources = {variable: eqn for eqn in jaxpr.eqns for variable in eqn.outvars}

    def is_from(value: Any) -> bool:
        eqn = None if isinstance(value, core.Literal) else sources.get(value)
        if eqn is None:
            return False
        name = eqn.primitive.name
        if name == operation:
            return True
        if name in MOVES:
            return all(map(is_from, eqn.invars))
        if name not in CALLS:
            return False
        position = eqn.outvars.index(value)
        inner_functions = core.jaxprs_in_params(eqn.params)
        return any(ends_in(inner, operation, position) for inner in inner_functions)

    return is_from(jaxpr.outvars[output])
