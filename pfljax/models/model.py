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
from pfljax.contract.errors import ArgumentError
from pfljax.contract.held import given
from pfljax.contract.types import Array, Key, Mode, Params, PyTree, Task
from pfljax.models import ensembles, standardizing
from pfljax.models.behind import Behind
from pfljax.models.frozen import AdaptedNetwork, Frozen
from pfljax.models.linen import LinenNetwork
from pfljax.models.losses import DEFAULTS, Loss, cross_entropy, mean_over_places
from pfljax.models.rewriting import rewritten, slow_layers
from pfljax.models.standardizing import Statistics
from pfljax.models.structure import Network, by_path

FLOAT32 = "float32"
Inputs = Tree[Num[Array, "B ..."]]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A Flax module, Linen or NNX, and the meaning of its outputs.

    Its parameters are one tree of arrays that includes everything training writes: batch statistics travel, are
    averaged and are kept like parameters. In training mode, the gradient of the loss with respect to a statistic is
    minus its change, so that a step of SGD at rate 1 sets it to the value that the forward pass wrote.

    Attributes:
        module: A Linen module; an NNX module, which is then the initial model; or a function of `rngs` that returns an
            NNX module. Training mode is passed to its call if that has an argument `train`, `training`, `is_training`,
            `deterministic` or `use_running_average`.
        example_input: (B, *features), or a tree of such arrays; only shapes and dtypes are read. None: set from the
            data when a run is created. Where these are floats
            and the data integers, such as pixels, each mini-batch is converted.
        task: "classification", "regression" or "multilabel"; set from the data when a run is created.
        criterion: (outputs (B, ...), y (B, ...)) -> losses (B,), the loss per example; None: the task's default.
        target_shape: Shape of an example's target; None: unknown, a class or number per example or per position.
        dtype: What the network computes in; "float32": in its own types. Set by `LocalTraining` when a run is created.
            In "bfloat16" it is given rounded parameters and inputs, so layers without a dtype of their own compute in
            it, forward and backward. Parameters, gradients, batch statistics, outputs and losses are float32.
        frozen: Values of the parameters that are not trained, held once for all clients: a tree of arrays, such as a
            Linen module's variables or an NNX module. Parameters that are trained themselves start from their values
            here, or from the module's own where there are none.
        trainable: What is trained if `frozen` is given: regular expressions on parameters' paths, or adapters such as
            `pfl.adapters.lora(rank=8)`, one or several.
        frozen_dtype: What frozen parameters are kept in: "bfloat16" or "float32".
        behind: The network behind its frozen layers, if the inputs are the features there. Set when a run is created.
        scaling: Mean and standard deviation of pixels that the engine reads from a file as they are, and that the model
            scales. Set when a run is created.
        own_statistics: How an exported NNX module standardizes its inputs; set from the module. None: it does not.
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
    behind: Behind | None = dataclasses.field(default=None, metadata=DERIVED)
    scaling: tuple[PyTree, PyTree] | None = None
    own_statistics: Statistics | None = None

    def __post_init__(self):
        if self.frozen is not None and not isinstance(self.frozen, Frozen):
            object.__setattr__(self, "frozen", Frozen(self.frozen))
        module, statistics = standardizing.inside(self.module)
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "own_statistics", statistics or self.own_statistics)
        if self.frozen is None and self.trainable:
            raise ArgumentError(
                "trainable", "needs frozen, the values of the parameters that are not trained"
            )
        if self.frozen is not None and not self.trainable:
            raise ArgumentError(
                "frozen", 'needs trainable, such as "head" or pfl.adapters.lora(rank=8)'
            )
        if self.frozen_dtype not in (FLOAT32, "bfloat16"):
            raise ArgumentError("frozen_dtype", "accepted: bfloat16, float32", self.frozen_dtype)

    @property
    def input_statistics(self) -> Statistics | None:
        """How inputs are standardized, if `frozen` or the module come from `Result.export`; None: they do not.

        A run uses these statistics in place of those of its clients' data.
        """
        return (self.frozen.statistics if self.frozen is not None else None) or self.own_statistics

    @functools.cached_property
    def network(self) -> Network:
        """The module as pure functions of what is trained."""
        return self.behind or (self.whole if self.frozen is None else self.adapted)

    @functools.cached_property
    def adapted(self) -> AdaptedNetwork:
        """The module, of which a part is frozen."""
        if self.behind is not None:
            return self.behind.whole
        assert isinstance(self.frozen, Frozen)
        return AdaptedNetwork(self.whole, self.frozen, self.trainable, self.frozen_dtype)

    @functools.cached_property
    def whole(self) -> Network:
        """The module as pure functions of all its parameters."""
        # with a type that JAX computes in
        example = jax.eval_shape(lambda x: x, self.example_input)
        if isinstance(self.module, nn.Module):
            return LinenNetwork(self.module, example)
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

        def run(params, x):
            return self.network.forward(params, x, None)[0]

        traced = jax.make_jaxpr(run)(self.network.shapes, self.example_input)
        names = ["/".join(above[0]) for above in self.network.above.values()]
        names += [""] * len(jax.tree.leaves(self.example_input))
        return list(dict.fromkeys(slow_layers(traced.jaxpr, names, platform)))

    def init(self, key: Key) -> Params:
        """Initial parameters."""
        return self._start(self.network.held, key)

    def apply(self, params: Params, x: Inputs, key: Mode = None) -> Float[Array, "B ..."]:
        """The outputs: (B, C) or (B, T, C) logits, or (B,) regression values; `key` as in `loss`."""
        return self._forward(params, x, key)[0]

    def forward(self, params: Params, x: Inputs, key: Mode = None) -> tuple[Array, Params]:
        """The outputs, as of `apply`, and the parameters with the batch statistics that training mode writes."""
        return self._forward(params, x, key)

    def features(self, params: Params, x: Inputs, key: Mode = None) -> Array:
        """Input of the last dense layer, (B, F); `key` as in `loss`."""
        return self._features(self.network.held, self._held(params), self.converted(x), key)

    def head(self, params: Params, features: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
        """The outputs, as of `apply`, for `features`: what the last dense layer and all after it compute."""
        return self._values(self._head(self.network.held, self._held(params), features), features)

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

        def run(params, x):
            *hidden, (features, _) = self.network.dense(params, x, None)
            return hidden[-1][1] if hidden and hidden[-1][1].shape == features.shape else features

        return self._computed(run)(self.network.held, self._held(params), self.converted(x))

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
        outputs, written = self._forward(params, x, key)
        outputs = outputs if shift is None else outputs + shift
        if self.criterion is None and self.task == "classification":
            losses = cross_entropy(outputs, y, class_weights, label_smoothing)
        else:
            losses = (self.criterion or DEFAULTS[self.task])(outputs, y)
        moved = self.statistics(params)
        return losses if key is None or moved is None else losses + change(moved, params, written)

    def predict(self, params: Params, x: Inputs) -> Float[Array, "B ..."]:
        """Predictions: probabilities (B, ..., C) of classes or labels, or values (B, ...)."""
        return self.predictions_of(self.apply(params, x))

    def predictions_of(self, outputs: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
        """As `predict`, from a model's outputs."""
        if self.task == "multilabel":
            return jax.nn.sigmoid(outputs)
        return outputs if self.task == "regression" else jax.nn.softmax(outputs)

    def mixed(
        self, weights: Float[Array, " J"], outputs: Float[Array, "J B ..."]
    ) -> Float[Array, "B ..."]:
        """Outputs whose predictions are the mean of several models' predictions; see `ensembles.mixed`."""
        return ensembles.mixed(self.task, weights, outputs)

    def losses_of(
        self, outputs: Float[Array, "B ..."], y: Num[Array, "B ..."]
    ) -> Float[Array, " B"]:
        """Per-example loss (B,) of a client's outputs, those of a mixture among them."""
        return (self.criterion or DEFAULTS[self.task])(outputs, y)

    def over_places(
        self, values: Shaped[Array, "B ..."], y: Num[Array, "B ..."]
    ) -> Float[Array, " B"]:
        """One value per example: values (B,) unchanged, values (B, T) averaged over the places where y is a class."""
        return mean_over_places(values, y, self.output_shape[-1])

    @property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameter tree's branches for each layer, in the order of computation.

        A normalization layer belongs to the layer before it.
        """
        return tuple(tuple(map("/".join, paths)) for paths in self.network.layers)

    def layer_numbers(self, params: Params) -> PyTree:
        """A tree of ints like `params`: the number of each leaf's layer."""
        numbers = {
            branch: number for number, paths in enumerate(self.network.layers) for branch in paths
        }

        def number(path):
            return next(numbers[branch] for branch in self.network.above[path] if branch in numbers)

        return by_path(number, params)

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
        called = self.network.called
        norms = {path for path in called if called[path]} | {
            above[path][0] for path in self.network.statistics
        }
        return by_path(lambda path: not norms.isdisjoint(above[path]), params)

    def statistics(self, params: Params) -> PyTree | None:
        """A tree of bools like `params`: whether forward passes write a leaf; None if they write no leaf."""
        return (
            by_path(lambda path: path in self.network.statistics, params)
            if self.network.statistics
            else None
        )

    _start = functools.cached_property(lambda self: rewritten(self._initial))
    _compute = functools.cached_property(lambda self: self._computed(self.network.forward))
    _features = functools.cached_property(
        lambda self: self._computed(lambda *args: self.network.dense(*args)[-1][0])
    )
    _head = functools.cached_property(lambda self: self._computed(self.network.head))

    def _initial(self, frozen: PyTree, key: Key) -> Params:
        with given(self.network, frozen):
            params = self.network.init(key)
        return params if self.dtype == FLOAT32 else jax.tree.map(widened, params)

    def _computed(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """(frozen, params, x, ...) -> float32 arrays; `fn` gets parameters and inputs in the model's dtype."""

        def run(frozen, params, x, *rest):
            def narrow(leaf):
                return leaf.astype(self.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

            if self.dtype != FLOAT32:
                kept = self.statistics(params) or jax.tree.map(lambda leaf: False, params)
                params = jax.tree.map(lambda s, leaf: leaf if s else narrow(leaf), kept, params)
                x = jax.tree.map(narrow, x)
            with given(self.network, jax.tree.map(narrow, frozen)):
                return jax.tree.map(widened, fn(params, x, *rest))

        return rewritten(run)

    def _forward(self, params: Params, x: PyTree, key: Mode) -> tuple[Array, Params]:
        outputs, written = self._compute(
            self.network.held, self._held(params), self.converted(x), key
        )
        return self._values(outputs, x), written

    def _values(self, outputs: Array, x: PyTree) -> Array:
        """The outputs for x (B, ...), with the axis B, and without an axis of one where a regression has one value."""
        # the network squeezes
        if jax.tree.leaves(x)[0].shape[0] == 1 and outputs.shape[:1] != (1,):
            outputs = outputs[None]
        single = self.task == "regression" and outputs.ndim > 1 and outputs.shape[-1] == 1
        return (
            outputs[..., 0]
            if single and self.target_shape in (None, outputs.shape[1:-1])
            else outputs
        )

    def converted(self, x: PyTree) -> PyTree:
        """The inputs, with floats in place of integers where the network takes floats, scaled if the model does so."""

        def one(like, leaf, mean=None, std=None):
            if not (
                jnp.issubdtype(like.dtype, jnp.floating) and jnp.issubdtype(leaf.dtype, jnp.integer)
            ):
                return leaf
            return (
                leaf.astype(like.dtype)
                if mean is None
                else ((leaf - mean) / std).astype(like.dtype)
            )

        return jax.tree.map(one, self.example_input, x, *(self.scaling or ()))

    def _held(self, params: Params) -> Params:
        """The parameters with gradients to the statistics stopped, since `change` provides those."""
        statistics = self.statistics(params)
        if statistics is None:
            return params
        return jax.tree.map(
            lambda s, leaf: jax.lax.stop_gradient(leaf) if s else leaf, statistics, params
        )


ACCEPTED = "a Flax module (Linen or NNX), a Model, or a function of num_classes, rngs or both that returns a module"


def widened(leaf: Array) -> Array:
    """An array of shorter floats as float32; any other array as it is."""
    short = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(FLOAT32) if short else leaf


def module_of(model: Any) -> Any:
    """The module of a `Model`; anything else as it is."""
    return model.module if isinstance(model, Model) else model


def change(statistics: PyTree, params: Params, written: Params) -> Array:
    """A term of value zero; its gradient with respect to each statistic is the old value minus the written one."""
    fixed = jax.lax.stop_gradient

    def term(s, old, new):
        return jnp.vdot(old - fixed(old), fixed(old - new)) if s else 0.0

    return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(term, statistics, params, written))))
