"""A network and the meaning of its outputs, as pure functions of a parameter tree."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Num, Shaped
from jaxtyping import PyTree as Tree

from pfljax.contract.alike import DERIVED
from pfljax.contract.errors import ArgumentError, warn_former
from pfljax.contract.held import use_frozen
from pfljax.contract.types import Array, Key, Mode, Params, PyTree, Task
from pfljax.models import ensembles, standardizing
from pfljax.models.frozen import AdaptedNetwork, Frozen
from pfljax.models.linen import LinenNetwork
from pfljax.models.losses import DEFAULTS, Loss, cross_entropy, mean_over_positions
from pfljax.models.rewriting import rewritten, slow_layers
from pfljax.models.standardizing import Statistics
from pfljax.models.structure import Network, Path, by_path, widened
from pfljax.models.tail import Tail
from pfljax.models.torch_modules import TorchModule, network_of, wrapped

FLOAT32 = "float32"
Inputs = Tree[Num[Array, "B ..."]]


def renamed(old: str, new: str) -> Any:
    """A property of `Model` under its former name, which warns."""

    def get(self: Model) -> Any:
        warn_former(f"Model.{old}", f"Model.{new}")
        return getattr(self, new)

    return property(get)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A module of Flax (Linen or NNX) or PyTorch, and the meaning of its outputs.

    Its parameters are one tree of arrays that includes everything training writes: batch statistics travel, are
    averaged and stored like parameters. In training mode, the gradient of the loss with respect to a statistic is
    minus its change, so that a step of SGD at rate 1 sets it to the value that the forward pass wrote.

    Attributes:
        module: A Linen module; an NNX module, which is then the initial model; or a function of `rngs` that returns an
            NNX module; or a PyTorch module or class, see `from_torch`. Training mode is passed to a Flax module's call
            if that has an argument `train`, `training`, `is_training`, `deterministic` or `use_running_average`.
        example_input: (B, *features), or a tree of such arrays; only shapes and dtypes are read. None: set from the
            data when a run is created. Where these are floats and the data integers, such as pixels, each mini-batch
            is converted.
        task: "classification", "regression" or "multilabel"; set from the data when a run is created.
        criterion: (outputs (B, ...), y (B, ...)) -> losses (B,), the loss per example; None: the task's default.
        target_shape: Shape of an example's target; None: unknown, a class or number per example or per position.
        dtype: Type in which the network computes; "float32": the module's types. Set by `LocalTraining` when a run is
            created. In "bfloat16" the network gets rounded parameters and inputs, so layers without a dtype compute in
            it, forward and backward. Parameters, gradients, batch statistics, outputs and losses are float32, also
            where a module's `param_dtype` is shorter.
        frozen: Values of the parameters that are not trained, stored once for all clients: a tree of arrays, such as a
            Linen module's variables or an NNX module. Parameters that are trained themselves start from their values
            here, or else from the module's initial ones.
        trainable: What is trained, with `frozen`: regular expressions on parameters' paths, or adapters such as
            `pfl.adapters.lora(rank=8)`, one or several.
        frozen_dtype: Data type of the frozen parameters: "bfloat16" or "float32".
        tail: The part of the network after its frozen layers, if the inputs are the features there. Set when a run is
            created.
        scaling: Mean and standard deviation of pixels that the engine reads from a file as they are, and that the model
            scales. Set when a run is created.
        module_statistics: How an exported NNX module standardizes its inputs; set from the module. None: it does not.

    Raises:
        ArgumentError: for `frozen` without `trainable`, `trainable` without `frozen`, or an unknown `frozen_dtype`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import pfljax as pfl
        >>> model = pfl.Model(pfl.models.MLP((8,), outputs=3), example_input=jnp.zeros((1, 5)))
        >>> params = model.init(jax.random.key(0))
        >>> model.predict(params, jnp.ones((2, 5))).shape
        (2, 3)
    """

    module: Any
    example_input: PyTree = None
    task: Task = "classification"
    criterion: Loss | None = None
    target_shape: tuple[int, ...] | None = None
    dtype: str = FLOAT32
    frozen: Any = None
    trainable: Any = ()
    frozen_dtype: str = "bfloat16"
    tail: Tail | None = dataclasses.field(default=None, metadata=DERIVED)
    scaling: tuple[PyTree, PyTree] | None = None
    module_statistics: Statistics | None = None

    def __post_init__(self):
        if self.frozen is not None and not isinstance(self.frozen, Frozen):
            object.__setattr__(self, "frozen", Frozen(self.frozen))
        module, statistics = standardizing.inside(wrapped(self.module))
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "module_statistics", statistics or self.module_statistics)
        if self.frozen is None and self.trainable:
            text = "needs frozen, the values of the parameters that are not trained"
            raise ArgumentError("trainable", text)
        if self.frozen is not None and not self.trainable:
            text = 'needs trainable, such as "head" or pfl.adapters.lora(rank=8)'
            raise ArgumentError("frozen", text)
        if self.frozen_dtype not in (FLOAT32, "bfloat16"):
            raise ArgumentError("frozen_dtype", "accepted: bfloat16, float32", self.frozen_dtype)

    @property
    def input_statistics(self) -> Statistics | None:
        """How inputs are standardized, if `frozen` or the module come from `Result.export`; None: they do not.

        A run uses these statistics in place of those of its clients' data.
        """
        statistics = None if self.frozen is None else self.frozen.statistics
        return statistics or self.module_statistics

    @property
    def channels_first(self) -> bool:
        """Whether the network takes images (B, C, H, W), as PyTorch's do, instead of (B, H, W, C)."""
        return isinstance(self.module, TorchModule)

    @functools.cached_property
    def network(self) -> Network:
        """The module as pure functions of what is trained."""
        if self.tail is not None:
            return self.tail
        return self.full_network if self.frozen is None else self.adapted

    @functools.cached_property
    def adapted(self) -> AdaptedNetwork:
        """The module, of which a part is frozen."""
        if self.tail is not None:
            return self.tail.full
        assert isinstance(self.frozen, Frozen)
        return AdaptedNetwork(self.full_network, self.frozen, self.trainable, self.frozen_dtype)

    @functools.cached_property
    def full_network(self) -> Network:
        """The module as pure functions of all its parameters, frozen ones included."""
        # The example gets types that JAX computes in.
        example = jax.eval_shape(lambda x: x, self.example_input)
        if isinstance(self.module, nn.Module):
            return LinenNetwork(self.module, example)
        if isinstance(self.module, TorchModule):
            return network_of(self.module, example)
        if not callable(self.module):
            raise ArgumentError("model", f"accepted: {ACCEPTED}", type(self.module).__name__)
        from pfljax.models.nnx import NNXNetwork  # imported lazily, since it is slow

        return NNXNetwork(self.module, example)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, batch statistics included."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.network.shapes))

    def slow_layers(self, platform: str) -> list[str]:
        """Layers that XLA runs slowly on a platform ("cpu"), a line each."""

        def run(params: Params, x: PyTree) -> Array:
            outputs, _ = self.network.forward(params, x, None)
            return outputs

        traced = jax.make_jaxpr(run)(self.network.shapes, self.example_input)
        names = ["/".join(module) for module, *_ in self.network.above.values()]
        names += [""] * len(jax.tree.leaves(self.example_input))
        lines = slow_layers(traced.jaxpr, names, platform)
        return list(dict.fromkeys(lines))

    def init(self, key: Key) -> Params:
        """Initial parameters."""
        return self._init(self.network.frozen_in_program, key)

    def apply(self, params: Params, x: Inputs, key: Mode = None) -> Float[Array, "B ..."]:
        """The outputs: (B, C) or (B, T, C) logits, or (B,) regression values; `key` as in `loss`."""
        outputs, _ = self.forward(params, x, key)
        return outputs

    def forward(self, params: Params, x: Inputs, key: Mode = None) -> tuple[Array, Params]:
        """The outputs, as of `apply`, and the parameters with the batch statistics that training mode writes."""
        params = self._with_fixed_statistics(params)
        inputs = self.converted(x)
        outputs, written = self._forward(self.network.frozen_in_program, params, inputs, key)
        return self._values(outputs, x), written

    def features(self, params: Params, x: Inputs, key: Mode = None) -> Array:
        """Input of the last dense layer, (B, F); `key` as in `loss`."""
        params = self._with_fixed_statistics(params)
        return self._features(self.network.frozen_in_program, params, self.converted(x), key)

    def head(self, params: Params, features: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
        """The outputs, as of `apply`, for `features`: what the last dense layer and all after it compute."""
        params = self._with_fixed_statistics(params)
        outputs = self._head(self.network.frozen_in_program, params, features)
        return self._values(outputs, features)

    @functools.cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the outputs for the example input: (B, C), (B, T, C) or (B,)."""
        return jax.eval_shape(self.apply, self.network.shapes, self.example_input).shape

    @property
    def targets(self) -> jax.ShapeDtypeStruct:
        """Shape (B, ...) and dtype of the targets of the example input."""
        dtype = jnp.float32 if self.task == "regression" else jnp.int32
        shape = self.target_shape
        if shape is None:
            shape = self.output_shape[1:] if self.task == "regression" else self.output_shape[1:-1]
        return jax.ShapeDtypeStruct((self.output_shape[0], *shape), dtype)

    def embedding(self, params: Params, x: Inputs) -> Array:
        """Output of the last hidden dense layer before its activation, (B, F); the features if there is none."""

        def run(params: Params, x: PyTree) -> Array:
            *hidden, (features, _) = self.network.dense(params, x, None)
            if hidden:
                _, outputs = hidden[-1]
                if outputs.shape == features.shape:
                    return outputs
            return features

        params = self._with_fixed_statistics(params)
        embed = self._computed(run)
        return embed(self.network.frozen_in_program, params, self.converted(x))

    def loss(
        self,
        params: Params,
        x: Inputs,
        y: Num[Array, "B ..."],
        key: Mode = None,
        class_weights: Float[Array, " C"] | None = None,
        shift: Float[Array, ...] | None = None,
        label_smoothing: float = 0.0,
    ) -> Float[Array, " B"]:
        """Per-example loss (B,): `criterion` or the task's default, see `pfljax.models.losses`.

        Args:
            params: One model.
            x: Inputs.
            y: Classes or targets.
            key: Training mode of a mini-batch, or a key for dropout if no example is padding; None: inference mode.
            class_weights: Per-class factors of the cross entropy; None: 1.
            shift: Added to the outputs with broadcasting; None: 0.
            label_smoothing: Of the cross entropy.
        """
        outputs, written = self.forward(params, x, key)
        if shift is not None:
            outputs = outputs + shift
        if self.criterion is None and self.task == "classification":
            losses = cross_entropy(outputs, y, class_weights, label_smoothing)
        else:
            losses = self.loss_from_outputs(outputs, y)
        statistics = self.statistics(params)
        if key is None or statistics is None:
            return losses
        return losses + change(statistics, params, written)

    def predict(self, params: Params, x: Inputs) -> Float[Array, "B ..."]:
        """Predictions: probabilities (B, ..., C) of classes or labels, or values (B, ...)."""
        return self.predict_from_outputs(self.apply(params, x))

    def predict_from_outputs(self, outputs: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
        """As `predict`, from a model's outputs."""
        if self.task == "multilabel":
            return jax.nn.sigmoid(outputs)
        if self.task == "regression":
            return outputs
        return jax.nn.softmax(outputs)

    def mixed(
        self, weights: Float[Array, "J ..."], outputs: Float[Array, "J B ..."]
    ) -> Float[Array, "B ..."]:
        """Outputs whose predictions are the mean of several models' predictions; see `ensembles.mixed`."""
        return ensembles.mixed(self.task, weights, outputs)

    def loss_from_outputs(
        self, outputs: Float[Array, "B ..."], y: Num[Array, "B ..."]
    ) -> Float[Array, " B"]:
        """Per-example loss (B,) of a client's outputs, those of a mixture among them."""
        criterion = self.criterion or DEFAULTS[self.task]
        return criterion(outputs, y)

    def mean_over_positions(
        self, values: Shaped[Array, "B ..."], y: Num[Array, "B ..."]
    ) -> Float[Array, " B"]:
        """One value per example: values (B,) unchanged, (B, T) averaged over the positions where y is a class.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pfljax as pfl
            >>> network = pfl.models.Transformer(width=8, depth=1, heads=2)
            >>> model = pfl.models.build(network, (3,), "classification", 5, dtype=jnp.int32)
            >>> model.mean_over_positions(jnp.array([[1.0, 3.0, 7.0]]), jnp.array([[0, 4, -1]])).tolist()
            [2.0]
        """
        return mean_over_positions(values, y, self.output_shape[-1])

    predictions_of = renamed("predictions_of", "predict_from_outputs")
    losses_of = renamed("losses_of", "loss_from_outputs")
    over_places = renamed("over_places", "mean_over_positions")
    whole = renamed("whole", "full_network")
    behind = renamed("behind", "tail")
    own_statistics = renamed("own_statistics", "module_statistics")

    @property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameter tree's branches for each layer, in the order of computation.

        A normalization layer belongs to the layer before it.
        """
        return tuple(tuple("/".join(path) for path in paths) for paths in self.network.layers)

    def layer_numbers(self, params: Params) -> PyTree:
        """A tree of ints like `params`: the number of each leaf's layer."""
        numbers = {}
        for number, paths in enumerate(self.network.layers):
            numbers |= dict.fromkeys(paths, number)

        def layer_number(path: Path) -> int:
            modules = self.network.above[path]
            return next(numbers[module] for module in modules if module in numbers)

        return by_path(layer_number, params)

    def mask(self, params: Params, num: int) -> PyTree:
        """A tree of bools like `params`: whether a leaf is in the last `num` layers (0 to all)."""
        first = len(self.layers) - num
        return jax.tree.map(lambda number: number >= first, self.layer_numbers(params))

    def named(self, params: Params, where: str) -> PyTree:
        """A tree of bools like `params`: whether a leaf's path contains a match of a regular expression."""
        return by_path(lambda path: re.search(where, "/".join(path)) is not None, params)

    def normalization(self, params: Params) -> PyTree:
        """A tree of bools like `params`: whether a leaf belongs to a normalization layer."""
        above = self.network.above
        norms = {path for path, normalizes in self.network.called.items() if normalizes}
        norms |= {above[path][0] for path in self.network.statistics}

        def is_normalization(path: Path) -> bool:
            return not norms.isdisjoint(above[path])

        return by_path(is_normalization, params)

    def statistics(self, params: Params) -> PyTree | None:
        """A tree of bools like `params`: whether forward passes write a leaf; None if they write no leaf."""
        if not self.network.statistics:
            return None
        return by_path(lambda path: path in self.network.statistics, params)

    def converted(self, x: PyTree) -> PyTree:
        """The inputs, with floats in place of integers where the network takes floats, scaled if the model does so."""

        def convert(example: Any, leaf: Any, mean: Any = None, std: Any = None) -> Any:
            takes_floats = jnp.issubdtype(example.dtype, jnp.floating)
            if not (takes_floats and jnp.issubdtype(leaf.dtype, jnp.integer)):
                return leaf
            if mean is not None:
                leaf = (leaf - mean) / std
            return leaf.astype(example.dtype)

        return jax.tree.map(convert, self.example_input, x, *(self.scaling or ()))

    # The rewritten functions of the network, each of which is traced once for all calls with the same shapes.

    @functools.cached_property
    def _init(self) -> Callable[..., Params]:
        def init(frozen: PyTree, key: Key) -> Params:
            with use_frozen(self.network, frozen):
                return jax.tree.map(widened, self.network.init(key))

        return rewritten(init)

    @functools.cached_property
    def _forward(self) -> Callable[..., tuple[Array, Params]]:
        return self._computed(self.network.forward)

    @functools.cached_property
    def _features(self) -> Callable[..., Array]:
        def features(params: Params, x: PyTree, key: Mode) -> Array:
            *_, (features, _) = self.network.dense(params, x, key)
            return features

        return self._computed(features)

    @functools.cached_property
    def _head(self) -> Callable[..., Array]:
        return self._computed(self.network.head)

    def _computed(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """(frozen, params, x, ...) -> float32 arrays; `fn` gets parameters and inputs in the model's dtype."""

        def narrowed(leaf: Array) -> Array:
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            return leaf.astype(self.dtype) if is_float else leaf

        def run(frozen: PyTree, params: Params, x: PyTree, *rest: Any) -> PyTree:
            if self.dtype != FLOAT32:
                params = self._map_trained(narrowed, params)
                x = jax.tree.map(narrowed, x)
            with use_frozen(self.network, jax.tree.map(narrowed, frozen)):
                return jax.tree.map(widened, fn(params, x, *rest))

        return rewritten(run)

    def _map_trained(self, fn: Callable[[Array], Array], params: Params) -> Params:
        """Replaces all leaves but the batch statistics."""
        statistics = self.statistics(params)
        if statistics is None:
            return jax.tree.map(fn, params)
        return jax.tree.map(
            lambda is_statistic, leaf: leaf if is_statistic else fn(leaf), statistics, params
        )

    def _values(self, outputs: Array, x: PyTree) -> Array:
        """The outputs for x (B, ...), with the axis B, and without an axis of length 1 if a target is one value."""
        batch = jax.tree.leaves(x)[0].shape[0]
        if batch == 1 and outputs.shape[:1] != (1,):  # the network squeezes
            outputs = outputs[None]
        if self.task != "regression" or outputs.ndim == 1 or outputs.shape[-1] != 1:
            return outputs
        is_value = self.target_shape in (None, outputs.shape[1:-1])
        return outputs[..., 0] if is_value else outputs

    def _with_fixed_statistics(self, params: Params) -> Params:
        """The parameters with gradients to the statistics stopped, since `change` provides those."""
        statistics = self.statistics(params)
        if statistics is None:
            return params

        def fix(is_statistic: bool, leaf: Array) -> Array:
            return jax.lax.stop_gradient(leaf) if is_statistic else leaf

        return jax.tree.map(fix, statistics, params)


ACCEPTED = (
    "a Flax module (Linen or NNX), a torch.nn.Module, a Model, or a function of num_classes, rngs or both that returns "
    "a module"
)


def module_of(model: Any) -> Any:
    """The module of a `Model`; anything else as it is, a PyTorch module as a `TorchModule`."""
    return model.module if isinstance(model, Model) else wrapped(model)


def change(statistics: PyTree, params: Params, written: Params) -> Array:
    """A term of value zero; its gradient with respect to each statistic is the old value minus the written one."""
    fixed = jax.lax.stop_gradient

    def term(is_statistic: bool, old: Array, new: Array) -> Array | float:
        if not is_statistic:
            return 0.0
        return jnp.vdot(old - fixed(old), fixed(old - new))

    terms = jax.tree.map(term, statistics, params, written)
    return jnp.asarray(sum(jax.tree.leaves(terms)))
