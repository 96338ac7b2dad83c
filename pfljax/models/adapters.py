"""What is trained of a network whose other parameters are frozen.

An adapter names the arrays that are trained, in place of frozen ones or in addition to them. Several may be combined:
`trainable=(pfl.adapters.lora(rank=8, where="attention"), "head")`. A string is a regular expression: the parameters
whose paths, such as "block_0/attention/query/kernel", contain a match are trained themselves.
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

__all__ = ["Adaptation", "Adapter", "Parameters", "bias", "head", "ia3", "lora", "prompt"]


def __dir__() -> list[str]:
    return __all__


Leaves = dict[str, Array]  # suffix of a parameter's name -> a trained array
A = "_lora_a"
B = "_lora_b"
FACTORS = "_ia3"
PATTERN = "a regular expression"


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """The arrays that an adapter trains for one frozen parameter.

    Attributes:
        shapes: Shapes of the trained arrays, by a suffix of the parameter's name; "" is the parameter itself.
        init: Key -> their initial values; None: the parameter's frozen value, or the module's if it has none.
        adapt: (frozen parameter, trained arrays) -> the parameter that the network uses.
        layers: Number of leading axes of stacked layers, if it adds a product of two matrices.

    Examples:
        >>> from pfljax.models.adapters import Adaptation
        >>> shift = Adaptation({"_shift": (3,)}, None, lambda frozen, arrays: frozen + arrays["_shift"])
        >>> shift.adapt(1.0, {"_shift": 2.0})
        3.0
    """

    shapes: dict[str, tuple[int, ...]]
    init: Callable[[Key], Leaves] | None
    adapt: Callable[[Any, Leaves], Any]
    layers: int | None = None


@dataclasses.dataclass(frozen=True)
class Parameters:
    """A network's parameters, as adapters see them.

    Attributes:
        shapes: Shape of each parameter by path.
        uses: How the network multiplies by a parameter, by path, for those that it multiplies by.
        layers: Paths of the parameters in each layer, in the order of computation.
        inputs: Shapes of modules' first arguments, by the module's path.

    Examples:
        >>> from pfljax.models.adapters import Parameters, bias
        >>> parameters = Parameters({("Dense_0", "bias"): (3,)}, {}, [], {})
        >>> list(bias().adaptations(parameters))
        [('Dense_0', 'bias')]
    """

    shapes: Mapping[Path, tuple[int, ...]]
    uses: Mapping[Path, Use]
    layers: Sequence[Sequence[Path]]
    inputs: Mapping[Path, tuple[int, ...]]


class Adapter:
    """What is trained of a network. Subclasses implement `adaptations`, or `prompts`.

    Examples:
        >>> import pfljax as pfl
        >>> isinstance(pfl.adapters.lora(rank=2), pfl.adapters.Adapter)
        True
    """

    def __post_init__(self):
        where = getattr(self, "where", "")
        try:
            re.compile(where)
        except re.error as error:
            raise ArgumentError("where", f"is no regular expression: {error}", where) from error

    def adaptations(self, parameters: Parameters) -> dict[Path, Adaptation]:
        """What is trained, by the path of the frozen parameter that it belongs to."""
        del parameters
        return {}

    def prompts(self, parameters: Parameters) -> dict[Path, tuple[int, int]]:
        """Trained tokens (L, width) that modules get before those of their input, by the module's path."""
        del parameters
        return {}


@settings
class Selected(Adapter):
    """Parameters that are trained themselves.

    Attributes:
        where: Regular expression that their paths contain.
    """

    where: str = hyperparameter(accepted=PATTERN)

    def adaptations(self, parameters: Parameters) -> dict[Path, Adaptation]:
        return retrained(parameters, matching(self.where, parameters.shapes))


@settings
class head(Adapter):
    """The last layers are trained themselves.

    Attributes:
        layers: Number of layers, as `Model.layers` counts them.

    Examples:
        >>> import jax, jax.numpy as jnp, pfljax as pfl
        >>> network = pfl.models.MLP((8,), outputs=3)
        >>> pretrained = network.init(jax.random.key(0), jnp.zeros((1, 5)))
        >>> model = pfl.Model(network, jnp.zeros((1, 5)), frozen=pretrained, trainable=pfl.adapters.head())
        >>> model.layers
        (('Dense_1',),)
    """

    layers: int = hyperparameter(1, at_least=1)

    def adaptations(self, parameters: Parameters) -> dict[Path, Adaptation]:
        num_layers = len(parameters.layers)
        if self.layers > num_layers:
            text = f"head: accepted: 1 to {num_layers} layers"
            raise ArgumentError("trainable", text, self.layers)
        last = parameters.layers[-self.layers :]
        return retrained(parameters, [path for layer in last for path in layer])


@settings
class bias(Adapter):
    """BitFit (Ben Zaken et al., 2022): the biases are trained themselves.

    Attributes:
        where: Regular expression that their paths contain.

    Examples:
        >>> import jax, jax.numpy as jnp, pfljax as pfl
        >>> network = pfl.models.MLP((8,), outputs=3)
        >>> pretrained = network.init(jax.random.key(0), jnp.zeros((1, 5)))
        >>> model = pfl.Model(network, jnp.zeros((1, 5)), frozen=pretrained, trainable=pfl.adapters.bias())
        >>> model.num_parameters  # 8 + 3
        11
    """

    where: str = hyperparameter("", accepted=PATTERN)

    def adaptations(self, parameters: Parameters) -> dict[Path, Adaptation]:
        paths = matching(self.where, parameters.shapes)
        return retrained(parameters, [path for path in paths if path[-1] == "bias"])


@settings
class lora(Adapter):
    """LoRA (Hu et al., 2022): a product with a frozen W becomes x W + (alpha / rank) (x A) B.

    A is drawn uniformly in +-1 / sqrt(inputs), as in the authors' code, and B begins at 0. For a convolution, A is a
    kernel of the same size with `rank` outputs, and B a product over channels.

    Attributes:
        rank: Number of columns of A and rows of B.
        where: Regular expression that the paths of the weights contain; others are not adapted.
        alpha: Scale of the product; None: `rank`.

    Examples:
        >>> import jax, jax.numpy as jnp, pfljax as pfl
        >>> network = pfl.models.MLP((8,), outputs=3)
        >>> pretrained = network.init(jax.random.key(0), jnp.zeros((1, 5)))
        >>> lora = pfl.adapters.lora(rank=2, where="Dense_0")
        >>> model = pfl.Model(network, jnp.zeros((1, 5)), frozen=pretrained, trainable=lora)
        >>> model.num_parameters  # (5 + 8) x 2
        26
    """

    rank: int = hyperparameter(8, at_least=1)
    where: str = hyperparameter("", accepted=PATTERN)
    alpha: float | None = hyperparameter(None, above=0)

    def adaptations(self, parameters: Parameters) -> dict[Path, Adaptation]:
        """A and B of each weight."""
        paths = matching(self.where, parameters.shapes)
        return {
            path: self._adaptation(path, parameters) for path in paths if path in parameters.uses
        }

    def _adaptation(self, path: Path, parameters: Parameters) -> Adaptation:
        axes, stacked = parameters.uses[path]
        shape = parameters.shapes[path]
        layers = shape[:stacked]
        shape = shape[stacked:]
        inputs = tuple(shape[axis] for axis in axes)
        outputs = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        fan_in = math.prod(inputs)
        largest = min(fan_in, math.prod(outputs))
        if self.rank > largest:
            name = "/".join(path)
            size = " x ".join(map(str, shape))
            text = f"lora: {name} is {size}; accepted: ranks up to {largest}"
            raise ArgumentError("trainable", text, self.rank)
        shapes = {A: (*layers, *inputs, self.rank), B: (*layers, self.rank, *outputs)}
        alpha = self.rank if self.alpha is None else self.alpha
        scale = alpha / self.rank

        def init(key: Key) -> Leaves:
            bound = 1 / math.sqrt(fan_in)
            a = jax.random.uniform(key, shapes[A], minval=-bound, maxval=bound)
            return {A: a, B: jnp.zeros(shapes[B])}

        def adapt(weight: Any, arrays: Leaves) -> Adapted:
            adapted = as_adapted(weight, axes, stacked)
            return dataclasses.replace(adapted, a=arrays[A], b=arrays[B] * scale)

        return Adaptation(shapes, init, adapt, stacked)


@settings
class ia3(Adapter):
    """(IA)^3 (Liu et al., 2022): the outputs of products with frozen weights are multiplied by trained factors.

    Departure from the paper: it scales an MLP's hidden layer after the activation, this before it.

    Attributes:
        where: Regular expression that the paths of the weights contain; others are not adapted.

    Examples:
        >>> import jax, jax.numpy as jnp, pfljax as pfl
        >>> network = pfl.models.MLP((8,), outputs=3)
        >>> pretrained = network.init(jax.random.key(0), jnp.zeros((1, 5)))
        >>> model = pfl.Model(network, jnp.zeros((1, 5)), frozen=pretrained, trainable=pfl.adapters.ia3())
        >>> model.num_parameters  # 8 + 3
        11
    """

    where: str = hyperparameter("", accepted=PATTERN)

    def adaptations(self, parameters: Parameters) -> dict[Path, Adaptation]:
        """The factors of each weight, which begin at 1."""
        paths = matching(self.where, parameters.shapes)
        return {
            path: self._adaptation(path, parameters) for path in paths if path in parameters.uses
        }

    def _adaptation(self, path: Path, parameters: Parameters) -> Adaptation:
        axes, stacked = parameters.uses[path]
        shape = parameters.shapes[path]
        layers = shape[:stacked]
        outputs = tuple(size for axis, size in enumerate(shape[stacked:]) if axis not in axes)
        factors = (*layers, *outputs)

        def init(key: Key) -> Leaves:
            del key
            return {FACTORS: jnp.ones(factors)}

        def adapt(weight: Any, arrays: Leaves) -> Adapted:
            adapted = as_adapted(weight, axes, stacked)
            return dataclasses.replace(adapted, scale=arrays[FACTORS])

        return Adaptation({FACTORS: factors}, init, adapt)


@settings
class prompt(Adapter):
    """Deep prompts (Jia et al., 2022): trained tokens before those that a block gets; the block's outputs drop them.

    Departures from the paper: prompts begin normal with deviation 0.02, not uniform, and precede the class token.

    Attributes:
        length: Number of tokens L.
        where: Regular expression that a module's whole path matches. The module's first argument is (B, T, width), and
            so is its result.

    Examples:
        >>> import jax, jax.numpy as jnp, pfljax as pfl
        >>> network = pfl.models.ViT(outputs=3, patch=4, width=8, depth=2, heads=2)
        >>> x = jnp.zeros((1, 8, 8, 1))
        >>> pretrained = jax.jit(network.init)(jax.random.key(0), x)
        >>> model = pfl.Model(network, x, frozen=pretrained, trainable=pfl.adapters.prompt(length=4))
        >>> model.num_parameters  # 4 tokens of width 8 in each of 2 blocks
        64
    """

    length: int = hyperparameter(8, at_least=1)
    where: str = hyperparameter(r"block_?\d+", accepted=PATTERN)

    def prompts(self, parameters: Parameters) -> dict[Path, tuple[int, int]]:
        names = {path: "/".join(path) for path in parameters.inputs if path}
        matches = [path for path, name in names.items() if re.fullmatch(self.where, name)]
        if not matches:
            text = f"prompt: no module's path matches; modules: {', '.join(names.values())}"
            raise ArgumentError("trainable", text, self.where)
        prompts = {}
        for path in matches:
            shape = parameters.inputs[path]
            if len(shape) != 3:
                text = (
                    f"prompt: {names[path]} gets {shape}; accepted: modules that get (B, T, width)"
                )
                raise ArgumentError("trainable", text, self.where)
            prompts[path] = (self.length, shape[-1])
        return prompts


def retrained(parameters: Parameters, paths: Iterable[Path]) -> dict[Path, Adaptation]:
    """Adaptations of parameters that are trained themselves."""
    return {path: itself(parameters.shapes[path]) for path in paths}


def itself(shape: tuple[int, ...]) -> Adaptation:
    """The adaptation of a parameter that is trained itself."""

    def adapt(frozen: Any, arrays: Leaves) -> Array:
        del frozen
        return arrays[""]

    return Adaptation({"": shape}, None, adapt)


def as_adapted(weight: Any, inputs: tuple[int, ...], stacked: int) -> Adapted:
    """A frozen weight to which nothing is added yet; an adapted one as it is."""
    if isinstance(weight, Adapted):
        return weight
    return Adapted(weight, None, None, None, inputs, stacked)


def matching(where: str, paths: Iterable[Path]) -> list[Path]:
    """The paths that contain a match of a regular expression."""
    pattern = re.compile(where)
    return [path for path in paths if pattern.search("/".join(path))]


def as_adapters(trainable: Any) -> tuple[Adapter, ...]:
    """Adapters or regular expressions as a tuple of adapters. Raises `ArgumentError` for anything else."""
    if isinstance(trainable, str) or not isinstance(trainable, Sequence):
        trainable = [trainable]
    adapters = []
    for adapter in trainable:
        if isinstance(adapter, str):
            adapter = Selected(adapter)
        if not isinstance(adapter, Adapter):
            text = "accepted: regular expressions, adapters such as pfl.adapters.lora(rank=8), or a list of them"
            raise ArgumentError("trainable", text, adapter)
        adapters.append(adapter)
    return tuple(adapters)


def all_adaptations(trainable: Any, parameters: Parameters) -> dict[Path, list[Adaptation]]:
    """The adaptations of all adapters, by the path of the frozen parameter that they belong to.

    Raises `ArgumentError` if an adapter matches nothing, or two of them train the same array.
    """
    collected: dict[Path, list[Adaptation]] = {}
    for adapter in as_adapters(trainable):
        adaptations = adapter.adaptations(parameters)
        if not adaptations and not adapter.prompts(parameters):
            raise _no_match(adapter, parameters)
        for path, adaptation in adaptations.items():
            others = collected.setdefault(path, [])
            if any(adaptation.shapes.keys() & other.shapes.keys() for other in others):
                text = f"{'/'.join(path)} is adapted twice in the same way"
                raise ArgumentError("trainable", text, adapter)
            others.append(adaptation)
    return collected


def _no_match(adapter: Adapter, parameters: Parameters) -> ArgumentError:
    """The error that an adapter matches no parameter; it names those that it may match."""
    accepted: Iterable[Path] = parameters.shapes
    if isinstance(adapter, lora | ia3):
        accepted = [path for path in parameters.shapes if path in parameters.uses]
    names = ", ".join("/".join(path) for path in accepted)
    value = adapter.where if isinstance(adapter, Selected) else adapter
    return ArgumentError("trainable", f"matches no parameter; accepted: {names}", value)
