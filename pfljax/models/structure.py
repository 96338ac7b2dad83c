"""A module as pure functions, and the structure of its parameter tree: layers, normalizations and statistics.

A path is a tuple of names, from the tree's root to a leaf or a branch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.interpreters import partial_eval

from pfljax.contract.errors import ArgumentError
from pfljax.contract.held import current_frozen
from pfljax.contract.types import Array, Factors, Key, Mode, Params, PyTree, Training

Path = tuple[str, ...]
Around = Callable[[Path, type, Callable[..., Any], Any, Any], Any]
UNSET: Any = None  # number of outputs until the network is built for data

# Arguments of modules' calls, and their values in training mode
TRAINING = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}

# Names of classes of Flax (Linen and NNX) and PyTorch. `_NormBase` is that of batch and instance normalization there.
DENSE = {"Dense", "Linear"}
NORMS = {"BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm", "_NormBase"}


@dataclasses.dataclass
class Call:
    """A call of a module inside a network: the module's path and class, its arguments and what it returned."""

    path: Path
    kind: type
    args: tuple[Any, ...]
    returned: Any = None


class Network:
    """A Flax or PyTorch module as pure functions.

    Attributes:
        example: Shape and type of inputs (B, *features), or a tree of them.
        shapes: The parameters' shapes and types.
        statistics: Paths of the leaves that a forward pass in training mode writes.
        collections: Names of the tree's branches that have further leaves of the modules, such as batch statistics.
        fixed: Whether there is only one initial model, whatever the key.
        constants: Paths of arrays that the module has, and that are no part of its parameters.
        frozen_on_host: Arrays that are not trained, on the host, once for all clients.
    """

    example: PyTree
    shapes: Params
    statistics: frozenset[Path]
    collections: tuple[str, ...] = ()
    fixed: bool = False
    constants: frozenset[Path] = frozenset()
    frozen_on_host: PyTree = ()

    @property
    def momenta(self) -> list[float]:
        """Momenta of the layers inside that average batch statistics over steps; 0.9 keeps 90 % of the old ones."""
        return []

    def on(self, plan: Any) -> PyTree:
        """`frozen_on_host` on a plan's devices."""
        del plan
        return self.frozen_on_host

    @property
    def frozen_in_program(self) -> PyTree:
        """The arrays that are not trained, as the program that is being traced has them."""
        return current_frozen(self)

    def init(self, key: Key) -> Params:
        """Initial parameters, with the statistics in them."""
        raise NotImplementedError

    def forward(
        self, params: Params, x: PyTree, mode: Mode, around: Around | None = None
    ) -> tuple[Array, Params]:
        """The outputs, and the parameters with the new statistics of the real examples.

        `around` is called in place of each module inside, with its path, its class, its function and the arguments.
        """
        raise NotImplementedError

    def exported(self, params: Params) -> tuple[Any, Any]:
        """The module and its variables: Linen's collections; or the NNX module with these parameters, and its state."""
        raise NotImplementedError

    def factors(self, params: Params) -> dict[Path, Factors]:
        """What LoRA adds to each weight, by the path of A; empty if nothing."""
        del params
        return {}

    def with_factors(self, params: Params, factors: Mapping[Path, Factors]) -> Params:
        """The parameters with other `factors`, whose rank r may differ."""
        del factors
        return params

    def calls(self, params: Params, x: PyTree, mode: Mode) -> list[Call]:
        """The calls of modules in a forward pass, in the order in which they begin."""
        calls: list[Call] = []

        def record(
            path: Path, kind: type, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
        ) -> Any:
            call = Call(path, kind, (*args, *kwargs.values()))
            calls.append(call)
            call.returned = fn(*args, **kwargs)
            return call.returned

        self.forward(params, x, mode, record)
        return calls

    def dense(self, params: Params, x: PyTree, mode: Mode) -> list[tuple[Array, Array]]:
        """Inputs (B, F) and outputs (B, F') of each dense layer, at least one."""
        calls = [call for call in self.calls(params, x, mode) if is_layer(call.kind, DENSE)]
        if not calls:
            raise ArgumentError("model", "has no dense layer, so it has no features")
        return [(call.args[0], call.returned) for call in calls]

    def head(self, params: Params, features: Array) -> Array:
        """The outputs in inference mode if the last dense layer receives these features (B, F)."""
        number = itertools.count(1)
        last = self.num_dense

        def around(
            path: Path, kind: type, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
        ) -> Any:
            del path
            if is_layer(kind, DENSE) and next(number) == last:
                return fn(features, *args[1:], **kwargs)
            return fn(*args, **kwargs)

        def zeros(leaf: Any) -> Array:
            return jnp.zeros((len(features), *leaf.shape[1:]), leaf.dtype)

        x = jax.tree.map(zeros, self.example)
        return self.forward(params, x, None, around)[0]

    @functools.cached_property
    def num_dense(self) -> int:
        """Number of calls of dense layers in a forward pass."""

        def run(params: Params, x: PyTree) -> list[tuple[Array, Array]]:
            return self.dense(params, x, None)

        return len(jax.eval_shape(run, self.shapes, self.example))

    @functools.cached_property
    def stochastic(self) -> bool:
        """Whether training draws random numbers (dropout)."""
        traced = jax.make_jaxpr(self.forward)(self.shapes, self.example, jax.random.key(0))
        _, is_input_read = partial_eval.dce_jaxpr(traced.jaxpr, True)
        return is_input_read[-1]  # the key

    @functools.cached_property
    def above(self) -> dict[Path, list[Path]]:
        """Path of each leaf -> paths of the modules that it is in, from its own module to the root."""
        paths: list[Path] = []
        by_path(paths.append, self.shapes)

        def modules(path: Path) -> list[Path]:
            start = int(path[0] in self.collections)
            ends = range(len(path) - 1, start - 1, -1)
            return [path[start:end] for end in ends]

        return {path: modules(path) for path in paths}

    @functools.cached_property
    def called(self) -> dict[Path, bool]:
        """Paths of the modules in the order of their first calls, and whether they normalize."""
        calls = self.calls_of_example()
        return {call.path: is_layer(call.kind, NORMS) for call in calls}

    def calls_of_example(self) -> list[Call]:
        """The calls of modules in a forward pass of the example, with shapes in place of arrays."""
        calls: list[Call] = []

        def run(params: Params, x: PyTree) -> None:
            calls.extend(self.calls(params, x, None))

        jax.eval_shape(run, self.shapes, self.example)
        return calls

    @functools.cached_property
    def layers(self) -> list[list[Path]]:
        """The layers: the branches at the tree's first fork, in the order of computation.

        A list of modules is not a layer, but each module in it is. A normalization belongs to the layer before it.
        """
        branches = self._first_fork()
        in_order = [path for path in self.called if path in branches]
        uncalled = [path for path in branches if path not in self.called]
        layers: list[list[Path]] = []
        for path in [*in_order, *uncalled]:
            is_norm = self.called.get(path, False)
            if layers and is_norm:
                layers[-1].append(path)
            else:
                layers.append([path])
        return layers

    def _first_fork(self) -> list[Path]:
        """The branches at the tree's first fork, or the module if it has parameters itself."""
        modules = {paths[0] for paths in self.above.values()}
        depth = 0
        while True:
            branches = dict.fromkeys(self._branch(paths, depth) for paths in self.above.values())
            if len(branches) != 1 or modules & branches.keys():
                return list(branches)
            (branch,) = branches
            depth = len(branch)

    def _branch(self, paths: Sequence[Path], depth: int) -> Path:
        """The outermost module that is called and deeper than `depth`, of a leaf's modules `paths`."""
        for path in reversed(paths):
            if len(path) > depth and path in self.called:
                return path
        return paths[0]


def is_flax(kind: type, names: Collection[str]) -> bool:
    """Whether a class is one of Flax's of these names, or a subclass; NNX, which is slow to import, is not needed."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("flax.")]
    return any(base.__name__ in names for base in bases)


def is_layer(kind: type, names: Collection[str]) -> bool:
    """Whether a class is one of Flax's or PyTorch's of these names, or a subclass."""
    libraries = ("flax.", "torch.nn.")
    bases = [base for base in kind.__mro__ if base.__module__.startswith(libraries)]
    return any(base.__name__ in names for base in bases)


def flags(module: Any, training: bool) -> dict[str, Any]:
    """The arguments of a module's call that select training mode, or inference mode."""
    names = inspect.signature(type(module).__call__).parameters
    return {name: value == training for name, value in TRAINING.items() if name in names}


def key_and_mask(mode: Mode) -> tuple[Key | None, Array | None]:
    """The key of training mode, or None; and the mask (B,) of real examples, or None if all are."""
    return (mode.key, mode.mask) if isinstance(mode, Training) else (mode, None)


def without_padding(
    mask: Array, call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by name of a batch normalization, with a mask that leaves padding out of its statistics.

    Its input has the examples along its first axis, or several positions of each in turn, as after
    `x.reshape(-1, x.shape[-1])`. With another shape there, the arguments are as they are; see `training.mixing`.

    Args:
        mask: (B,) bool, which examples are real.
        call: The layer's call.
        args: Its arguments by position.
        kwargs: Its arguments by name.
    """
    x = args[0] if args else kwargs["x"]
    positions, rest = divmod(x.shape[0], len(mask))
    if rest or not positions or "mask" not in inspect.signature(call).parameters:
        return dict(kwargs)
    real = jnp.repeat(mask, positions).reshape(-1, *[1] * (x.ndim - 1))
    layer_mask = kwargs.get("mask")
    if layer_mask is not None:
        real = real & jnp.asarray(layer_mask, bool)
    return {**kwargs, "mask": real}


def widened(leaf: Array) -> Array:
    """An array of shorter floats as float32; any other array as it is."""
    short = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(jnp.float32) if short else leaf


def widened_shapes(shapes: PyTree) -> PyTree:
    """Shapes and types of `widened` arrays."""
    return jax.eval_shape(lambda arrays: jax.tree.map(widened, arrays), shapes)


def by_name(params: Params) -> dict[Path, Any]:
    """The leaves of nested dicts by path."""
    leaves: Any = traverse_util.flatten_dict(params)
    return leaves


def nested(leaves: Mapping[Path, Any]) -> Params:
    """Nested dicts from their leaves by path."""
    return traverse_util.unflatten_dict(dict(leaves))


def by_path(fn: Callable[[Path], Any], params: Params) -> PyTree:
    """Replaces every leaf with fn(path)."""

    def replace(path: Any, leaf: Any) -> Any:
        del leaf
        return fn(tuple(str(entry.key) for entry in path))

    return jax.tree_util.tree_map_with_path(replace, params)
