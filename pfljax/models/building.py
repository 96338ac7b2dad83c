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
from pfljax.models.rewriting import equations
from pfljax.models.standardizing import inside
from pfljax.models.structure import is_flax
from pfljax.settings.fields import in_their_case, nearest


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of networks that are built by name.

    Attributes:
        hidden: Widths of the mlp's hidden layers.
        channels: Numbers of channels of the cnn's convolutions.
        patch: Rows and columns of a patch of the vit.
        width: Width of the tokens of the vit or transformer.
        depth: Number of their blocks.
        heads: Number of their attention heads; divides `width`.
        style: How their blocks are built, a name in `transformers.STYLES`; "": vit, or gpt2 for a transformer.
    """

    hidden: Sequence[int] = (64,)
    channels: Sequence[int] = (128, 128, 128)
    patch: int = 4
    width: int = 128
    depth: int = 4
    heads: int = 4
    style: str = ""

    def vit(self) -> nn.Module:
        """A vision Transformer."""
        style = self.style or "vit"
        return transformers.ViT(
            patch=self.patch, width=self.width, depth=self.depth, heads=self.heads, style=style
        )

    def transformer(self) -> nn.Module:
        """A decoder."""
        return transformers.Transformer(
            width=self.width, depth=self.depth, heads=self.heads, style=self.style or "gpt2"
        )


NAMES: dict[str, Callable[[Sizes], nn.Module]] = {
    "linear": lambda sizes: networks.MLP(hidden=()),
    "logistic": lambda sizes: networks.Logistic(),
    "mlp": lambda sizes: networks.MLP(hidden=tuple(sizes.hidden)),
    "cnn": lambda sizes: networks.CNN(channels=tuple(sizes.channels)),
    "lenet": lambda sizes: networks.LeNet(),
    "mcmahan_cnn": lambda sizes: networks.McMahanCNN(),
    "femnist_cnn": lambda sizes: networks.FemnistCNN(),
    "pfl_research_cnn": lambda sizes: networks.PflResearchCNN(),
    "vgg11": lambda sizes: networks.VGG11(),
    "resnet18": lambda sizes: networks.ResNet18(),
    "mobilenet_v2": lambda sizes: networks.MobileNetV2(),
    "vit": Sizes.vit,
    "lstm": lambda sizes: recurrent.CharacterLSTM(),
    "transformer": Sizes.transformer,
}

FEATURES = 512  # of all networks in a family
_cnn = networks.FemnistCNN(hidden=FEATURES)
_resnet = functools.partial(networks.ResNet, features=FEATURES)
_resnet18 = _resnet()
_resnet34 = _resnet(blocks=(3, 4, 6, 3))
_four: dict[str, nn.Module] = {
    "cnn": _cnn,
    "googlenet": networks.GoogLeNet(features=FEATURES),
    "mobilenet_v2": networks.MobileNetV2(features=FEATURES),
    "resnet18": _resnet18,
}
# Families of networks for small images that differ between clients, as HtFLlib's HtFE-img-2, -3, -4 and -8 (Zhang et
# al., KDD 2025), with group norm in place of batch norm.
FAMILIES: dict[str, dict[str, nn.Module]] = {
    "htfe2": {"cnn": _cnn, "resnet18": _resnet18},
    "htfe3": {
        "resnet10": _resnet(blocks=(1, 1, 1, 1)),
        "resnet18": _resnet18,
        "resnet34": _resnet34,
    },
    "htfe4": _four,
    "htfe8": _four
    | {"resnet34": _resnet34, "resnet50": _resnet(blocks=(3, 4, 6, 3), bottleneck=True)}
    | {
        f"resnet{n}": _resnet(blocks=(3, m, r, 3), bottleneck=True)
        for n, m, r in ((101, 4, 23), (152, 8, 36))
    },
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
        sizes: Fields of `Sizes`.

    Raises:
        ArgumentError: for an unknown name, or inputs that the network does not accept.
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

    Raises:
        ArgumentError: if `model` is none of these, does not accept the data or has outputs of another shape, or the
            loss does not fit.
    """
    outputs = num_classes
    if task == "regression":
        outputs = target_shape[0] if target_shape is not None and len(target_shape) == 1 else 1
    given, _ = inside(module_of(model))
    name = str(name or getattr(given, "__name__", type(given).__name__))
    module = called(given, outputs, name)
    if isinstance(module, nn.Module) and getattr(module, "outputs", outputs) is None:
        module = module.clone(outputs=outputs)
    is_shape = all(isinstance(leaf, int | np.integer) for leaf in jax.tree.leaves(input_shape))
    if isinstance(module, TOKENS) and not is_shape:
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(input_shape)]
        wrong = {str(dtype) for dtype in dtypes if not jnp.issubdtype(dtype, jnp.integer)}
        if wrong:
            raise ArgumentError(
                "model",
                f"takes tokens, but x is {', '.join(sorted(wrong))}; accepted: integers",
                name,
            )
    if is_shape:
        input_shape = jax.ShapeDtypeStruct(tuple(input_shape), dtype)

    def integer(leaf):
        return jnp.issubdtype(leaf.dtype, jnp.integer) or isinstance(module, TOKENS)

    def batch_of(num, leaf):
        return leaf.update(
            shape=(num, *leaf.shape), dtype=jnp.int32 if integer(leaf) else leaf.dtype
        )

    # Of several examples, whose number is no other size, so that mistaking one axis for another shows.
    several = next(num for num in itertools.count(2) if num not in (outputs, *(target_shape or ())))
    inputs = jax.tree.map(functools.partial(batch_of, several), input_shape)
    example = jax.tree.map(functools.partial(batch_of, 1), input_shape)
    if not isinstance(model, Model):
        model = Model(module, example)
    elif model.example_input is None:
        model = dataclasses.replace(model, example_input=example)
    criterion = losses.named(loss, task)
    options = {
        "task": task,
        "criterion": criterion,
        "target_shape": target_shape,
        "dtype": computes_in,
    }
    built = dataclasses.replace(model, module=module, **options)
    check_outputs(built, inputs, outputs, name)
    if criterion is not None:
        found = jax.ShapeDtypeStruct((several, *built.output_shape[1:]), jnp.float32)
        targets = jax.ShapeDtypeStruct((several, *built.targets.shape[1:]), built.targets.dtype)
        losses.check(criterion, found, targets)
    return built


def arguments_of(model: Callable) -> Mapping[str, inspect.Parameter]:
    """The arguments of a function, class or `partial`; a class's are those of `__init__`, since NNX's own hide them."""
    given = model if isinstance(model, functools.partial) else functools.partial(model)
    fn = functools.partial(given.func.__init__, None) if inspect.isclass(given.func) else given.func
    return inspect.signature(functools.partial(fn, *given.args, **given.keywords)).parameters


def called(model: Any, outputs: int, name: str) -> Any:
    """Calls a function of the number of classes; returns its module or function of `rngs`."""
    if not callable(model) or is_flax(type(model), {"Module"}):
        return model
    try:
        arguments = arguments_of(model)
    except (TypeError, ValueError) as error:
        raise ArgumentError("model", f"accepted: {ACCEPTED}", name) from error
    if "num_classes" in arguments:
        model = functools.partial(model, num_classes=outputs)
    elif any(
        a.kind <= a.POSITIONAL_OR_KEYWORD and a.default is a.empty and n != "rngs"
        for n, a in arguments.items()
    ):
        model = functools.partial(model, outputs)
    try:
        return model if "rngs" in arguments else model()
    except ArgumentError:
        raise
    except Exception as error:  # a user's function
        line = (str(error).splitlines() or [""])[0]
        raise ArgumentError(
            "model", f"raised {type(error).__name__}: {line}; accepted: {ACCEPTED}", name
        ) from error


def check_outputs(model: Model, inputs: PyTree, outputs: int, name: str) -> None:
    """Raises `ArgumentError` if the model fails on inputs (B, *features), or returns anything but logits or values."""
    told = f"{jax.tree.map(lambda leaf: leaf.shape, inputs)}{'' if model.dtype == FLOAT32 else f' in {model.dtype}'}"
    try:
        params = model.network.shapes
        traced, found = jax.make_jaxpr(model.apply, return_shape=True)(params, inputs)
    except ArgumentError as error:
        raise ArgumentError(error.argument, error.text, error.value or name) from None
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        flat = len(getattr(inputs, "shape", ())) == 3
        hint = (
            "; if x has images, add an axis for their channels, as x[..., None] does"
            if flat
            else ""
        )
        raise ArgumentError(
            "model", f"fails on inputs of shape {told}: {line}{hint}", name
        ) from error
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(params)):
        raise ArgumentError("model", "has parameters or statistics that are not real numbers", name)
    if not isinstance(found, jax.ShapeDtypeStruct):
        text = f"returns {type(found).__name__}; accepted: one array of logits or values"
        raise ArgumentError("model", text, name)
    batch, *features = getattr(inputs, "shape", jax.tree.leaves(inputs)[0].shape[:1])
    # Sequences may have logits everywhere, unless each has one target.
    places = features if len(features) == 1 and model.target_shape is None else []
    if model.target_shape is not None and (model.target_shape or model.task == "multilabel"):
        wanted = (*model.target_shape, *[outputs] * (model.task == "classification"))
        each, accepted = (
            ", ".join(map(str, ("batch", *shape))) for shape in (model.target_shape, wanted)
        )
        accepted = (
            f"({accepted}) for targets of shape ({each}); one class per example needs integers (n,)"
        )
        shapes = [(batch, *wanted)]
    elif model.task == "regression":
        shapes = [(batch,)]
        accepted = "(batch,) or (batch, 1) values for regression; classes need integers, not floats"
    else:
        shapes = [(batch, outputs), (batch, *places, outputs)]
        accepted = f"(batch, {outputs}) logits"
    if found.shape not in shapes:
        given = ", ".join(["batch", *map(str, found.shape[1:])])
        raise ArgumentError(
            "model", f"returns outputs of shape ({given}); accepted: {accepted}", name
        )
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise ArgumentError("model", f"returns outputs of {found.dtype}; accepted: floats", name)
    if model.task != "regression":
        if ends_in(traced.jaxpr, "logistic"):
            raise ArgumentError("model", OF_SIGMOID, name)
        # A softmax ends in a division; only a network that has one is worth evaluating.
        divides = any(
            e.primitive.name == "div" and e.outvars[0].aval.size == found.size
            for e in equations(traced)
        )
        if divides and sum_to_1(model.apply(model.init(jax.random.key(0)), random_like(inputs))):
            raise ArgumentError("model", OF_SOFTMAX, name)


OF_SIGMOID = "returns probabilities, those of a sigmoid; accepted: logits, so leave out the sigmoid at its end"
OF_SOFTMAX = (
    "returns probabilities, which sum to 1; accepted: logits, so leave out the softmax at its end"
)


def random_like(shapes: PyTree) -> PyTree:
    """Normal numbers in place of arrays, given their shapes, and random keys in place of keys."""
    key = jax.random.key(0)

    def one(leaf: Any) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(key, leaf.shape)
        return jax.random.normal(key, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(one, shapes)


def sum_to_1(outputs: Array) -> bool:
    """Whether outputs (..., C) are probabilities."""
    return bool((outputs >= 0).all()) and bool(jnp.allclose(outputs.sum(axis=-1), 1, atol=1e-3))


# Operations that only move numbers or change their type, and those that call an inner function.
MOVES = {
    "reshape",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "transpose",
    "convert_element_type",
    "copy",
}
MOVES |= {"stop_gradient", "concatenate"}
CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "checkpoint", "closed_call"}


def ends_in(jaxpr: Any, operation: str, place: int = 0) -> bool:
    """Whether an output of a traced function comes straight from an operation, such as "logistic"."""
    made_by = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}

    def is_from(value: Any) -> bool:
        eqn = None if isinstance(value, core.Literal) else made_by.get(value)
        if eqn is None:
            return False
        if eqn.primitive.name == operation:
            return True
        if eqn.primitive.name in MOVES:
            return all(map(is_from, eqn.invars))
        if eqn.primitive.name not in CALLS:
            return False
        return any(
            ends_in(inner, operation, eqn.outvars.index(value))
            for inner in core.jaxprs_in_params(eqn.params)
        )

    return is_from(jaxpr.outvars[place])
