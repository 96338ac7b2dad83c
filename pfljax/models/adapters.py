"""What is trained of a network whose other parameters are frozen.

Each adapter is given the network and names the arrays that are trained, beside or in place of frozen ones. Several may
be combined: `trainable=(pfl.adapters.lora(rank=8, where="attention"), "head")`. A string is a regular expression: the
parameters whose paths, such as "block_0/attention/query/kernel", contain a match are trained themselves.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Key
from pfljax.models.low_rank import Adapted, Use
from pfljax.models.structure import Path
from pfljax.settings.fields import hyperparameter, settings

Leaves = dict[str, Array]  # by what is added to a parameter's name
A = "_lora_a"
B = "_lora_b"
PATTERN = "a regular expression"


@dataclasses.dataclass(frozen=True)
class Part:
    """What an adapter trains for one frozen parameter."""

    # Shapes of the trained arrays, by what is added to the parameter's name; "" is the parameter itself
    shapes: dict[str, tuple[int, ...]]
    # Key -> their initial values; None: the parameter's own, or the module's if nothing is frozen there
    init: Callable[[Key], Leaves] | None
    # (frozen parameter, trained arrays) -> the parameter that the network uses
    adapt: Callable[[Any, Leaves], Any]
    # number of leading axes of stacked layers, if it adds a product of two matrices
    layers: int | None = None


@dataclasses.dataclass(frozen=True)
class Given:
    """A network's parameters, as adapters see them."""

    shapes: Mapping[Path, tuple[int, ...]]  # shape of each parameter by path
    uses: Mapping[Path, Use]  # how the network multiplies by a parameter, for those that it does
    # paths of the parameters in each layer, in the order of computation
    layers: Sequence[Sequence[Path]]
    # shapes of the first arguments of modules, by path; for prompts
    inputs: Mapping[Path, tuple[int, ...]]


class Adapter:
    """What is trained of a network. Subclasses implement `parts`, or `prompts`."""

    def __post_init__(self):
        where = getattr(self, "where", "")
        try:
            re.compile(where)
        except re.error as error:
            raise ArgumentError("where", f"is no regular expression: {error}", where) from error

    def parts(self, given: Given) -> dict[Path, Part]:
        """What is trained, by the path of the frozen parameter that it belongs to."""
        del given
        return {}

    def prompts(self, given: Given) -> dict[Path, tuple[int, int]]:
        """Trained tokens (L, width) that modules get before those of their input, by the module's path."""
        del given
        return {}


@settings
class Themselves(Adapter):
    """Parameters that are trained themselves."""

    where: str = hyperparameter(accepted=PATTERN)  # regular expression that their paths contain

    def parts(self, given: Given) -> dict[Path, Part]:
        return {path: itself(given.shapes[path]) for path in matching(self.where, given.shapes)}


@settings
class head(Adapter):
    """The last layers are trained themselves.

    Attributes:
        layers: Number of layers, as `Model.layers` counts them.
    """

    layers: int = hyperparameter(1, at_least=1)

    def parts(self, given: Given) -> dict[Path, Part]:
        if self.layers > len(given.layers):
            raise ArgumentError(
                "trainable", f"head: accepted: 1 to {len(given.layers)} layers", self.layers
            )
        return {
            path: itself(given.shapes[path])
            for layer in given.layers[-self.layers :]
            for path in layer
        }


@settings
class bias(Adapter):
    """BitFit (Ben Zaken et al., 2022): the biases are trained themselves.

    Attributes:
        where: Regular expression that their paths contain.
    """

    where: str = hyperparameter("", accepted=PATTERN)

    def parts(self, given: Given) -> dict[Path, Part]:
        return {
            path: itself(given.shapes[path])
            for path in matching(self.where, given.shapes)
            if path[-1] == "bias"
        }


@settings
class lora(Adapter):
    """LoRA (Hu et al., 2022): a product with a frozen W becomes x W + (alpha / rank) (x A) B.

    A is drawn uniformly in +-1 / sqrt(inputs), as in the authors' code, and B begins at 0. For a convolution, A is a
    kernel of the same size with `rank` outputs, and B a product over channels.

    Attributes:
        rank: Number of columns of A and rows of B.
        where: Regular expression that the paths of the weights contain; others are not adapted.
        alpha: Scale of the product; None: `rank`.
    """

    rank: int = hyperparameter(8, at_least=1)
    where: str = hyperparameter("", accepted=PATTERN)
    alpha: float | None = hyperparameter(None, above=0)

    def parts(self, given: Given) -> dict[Path, Part]:
        """A and B of each weight."""
        return {
            path: self._part(path, given)
            for path in matching(self.where, given.shapes)
            if path in given.uses
        }

    def _part(self, path: Path, given: Given) -> Part:
        shape = given.shapes[path]
        (axes, stacked) = given.uses[path]
        layers = shape[:stacked]
        shape = shape[stacked:]
        inputs = tuple(shape[axis] for axis in axes)
        outputs = tuple(n for axis, n in enumerate(shape) if axis not in axes)
        fan_in = math.prod(inputs)
        most = min(math.prod(inputs), math.prod(outputs))
        if self.rank > most:
            name = "/".join(path)
            size = " x ".join(map(str, shape))
            raise ArgumentError(
                "trainable", f"lora: {name} is {size}; accepted: ranks up to {most}", self.rank
            )
        shapes = {A: (*layers, *inputs, self.rank), B: (*layers, self.rank, *outputs)}
        scale = (self.rank if self.alpha is None else self.alpha) / self.rank

        def init(key: Key) -> Leaves:
            bound = 1 / math.sqrt(fan_in)
            a = jax.random.uniform(key, shapes[A], minval=-bound, maxval=bound)
            return {A: a, B: jnp.zeros(shapes[B])}

        def adapt(weight: Any, leaves: Leaves) -> Adapted:
            found = as_adapted(weight, axes, stacked)
            return dataclasses.replace(found, a=leaves[A], b=leaves[B] * scale)

        return Part(shapes, init, adapt, stacked)


@settings
class ia3(Adapter):
    """(IA)^3 (Liu et al., 2022): the outputs of products with frozen weights are multiplied by trained factors.

    Departure from the paper: it scales an MLP's hidden layer after the activation, this before it.

    Attributes:
        where: Regular expression that the paths of the weights contain; others are not adapted.
    """

    where: str = hyperparameter("", accepted=PATTERN)

    def parts(self, given: Given) -> dict[Path, Part]:
        """The factors of each weight, which begin at 1."""
        return {
            path: self._part(path, given)
            for path in matching(self.where, given.shapes)
            if path in given.uses
        }

    def _part(self, path: Path, given: Given) -> Part:
        shape = given.shapes[path]
        (axes, stacked) = given.uses[path]
        outputs = tuple(n for axis, n in enumerate(shape[stacked:]) if axis not in axes)
        shapes = {"_ia3": (*shape[:stacked], *outputs)}

        def adapt(weight, leaves):
            return dataclasses.replace(as_adapted(weight, axes, stacked), scale=leaves["_ia3"])

        return Part(shapes, lambda key: {"_ia3": jnp.ones(shapes["_ia3"])}, adapt)


@settings
class prompt(Adapter):
    """Deep prompts (Jia et al., 2022): trained tokens before those that a block gets; the block's outputs drop them.

    Departures from the paper: prompts begin normal with deviation 0.02, not uniform, and precede the class token.

    Attributes:
        length: Number of tokens L.
        where: Regular expression that a module's whole path matches. The module's first argument is (B, T, width), and
            so is what it returns.
    """

    length: int = hyperparameter(8, at_least=1)
    where: str = hyperparameter(r"block_?\d+", accepted=PATTERN)

    def prompts(self, given: Given) -> dict[Path, tuple[int, int]]:
        found = [path for path in given.inputs if path and re.fullmatch(self.where, "/".join(path))]
        if not found:
            paths = ", ".join("/".join(path) for path in given.inputs if path)
            raise ArgumentError(
                "trainable", f"prompt: no module's path matches; modules: {paths}", self.where
            )
        for path in found:
            if len(given.inputs[path]) != 3:
                text = f"prompt: {'/'.join(path)} gets {given.inputs[path]}; accepted: modules that get (B, T, width)"
                raise ArgumentError("trainable", text, self.where)
        return {path: (self.length, given.inputs[path][-1]) for path in found}


def itself(shape: tuple[int, ...]) -> Part:
    """A parameter that is trained itself."""
    return Part({"": shape}, None, lambda frozen, leaves: leaves[""])


def as_adapted(weight: Any, inputs: tuple[int, ...], stacked: int) -> Adapted:
    """A frozen weight to which nothing is added yet; an adapted one as it is."""
    return (
        weight
        if isinstance(weight, Adapted)
        else Adapted(weight, None, None, None, inputs, stacked)
    )


def matching(where: str, paths: Iterable[Path]) -> list[Path]:
    """The paths that contain a match of a regular expression."""
    pattern = re.compile(where)
    return [path for path in paths if pattern.search("/".join(path))]


def as_adapters(trainable: Any) -> tuple[Adapter, ...]:
    """One or several adapters or regular expressions as adapters. Raises `ArgumentError` for anything else."""
    each = (
        trainable
        if isinstance(trainable, Sequence) and not isinstance(trainable, str)
        else [trainable]
    )
    found = [Themselves(one) if isinstance(one, str) else one for one in each]
    for one in found:
        if not isinstance(one, Adapter):
            text = "accepted: regular expressions, adapters such as pfl.adapters.lora(rank=8), or a list of them"
            raise ArgumentError("trainable", text, one)
    return tuple(found)


def parts_of(trainable: Any, given: Given) -> dict[Path, list[Part]]:
    """All parts that are trained, by the path of the frozen parameter that they belong to.

    Raises `ArgumentError` if an adapter matches nothing, or two of them train the same array.
    """
    found: dict[Path, list[Part]] = {}
    for one in as_adapters(trainable):
        parts = one.parts(given)
        if not parts and not one.prompts(given):
            kind = [
                "/".join(path)
                for path in given.shapes
                if not isinstance(one, lora | ia3) or path in given.uses
            ]
            shown = one.where if isinstance(one, Themselves) else one
            raise ArgumentError(
                "trainable", f"matches no parameter; accepted: {', '.join(kind)}", shown
            )
        for path, part in parts.items():
            names = {name for each in found.get(path, []) for name in each.shapes}
            if names & part.shapes.keys():
                raise ArgumentError(
                    "trainable", f"{'/'.join(path)} is adapted twice in the same way", one
                )
            found.setdefault(path, []).append(part)
    return found
