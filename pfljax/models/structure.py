"""A Flax module as pure functions, and the structure of its parameter tree: layers, normalizations and statistics.

A path is a tuple of names, from the tree's root to a leaf or a branch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.interpreters import partial_eval

from pfljax.contract.errors import ArgumentError
from pfljax.contract.held import held_by
from pfljax.contract.types import Array, Factors, Key, Mode, Params, PyTree, Training

Path = tuple[str, ...]
Around = Callable[[Path, type, Callable[..., Any], Any, Any], Any]
UNSET: Any = None  # number of outputs until the network is built for data
TRAINING = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


# Names of Flax's classes, in Linen and NNX.
DENSE = {"Dense", "Linear"}
NORMS = {"BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm"}


@dataclasses.dataclass
class Call:
    """A call of a module inside a network: the module's path and class, its arguments and what it returned."""

    path: Path
    kind: type
    args: tuple[Any, ...]
    returned: Any = None


class Network:
    """A Flax module as pure functions."""

    example: PyTree  # shape and type of inputs (B, *features), or a tree of them
    shapes: Params  # the parameters' shapes and types
    statistics: frozenset[Path]  # paths of the leaves that a forward pass in training mode writes
    # Branches of the tree that hold other leaves of the modules whose parameters are beside them
    collections: tuple[str, ...] = ()
    fixed: bool = False  # whether there is only one initial model, whatever the key
    own: PyTree = ()  # arrays that are not trained, on the host, once for all clients

    @property
    def momenta(self) -> list[float]:
        """Momenta of the layers inside that average batch statistics over steps; 0.9 keeps 90 % of the old ones."""
        return []

    def on(self, plan: Any) -> PyTree:
        """`own` on a plan's devices."""
        del plan
        return self.own

    @property
    def held(self) -> PyTree:
        """The arrays that are not trained, as the program that is being traced has them."""
        return held_by(self)

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

        def record(path, kind, fn, args, kwargs):
            calls.append(call := Call(path, kind, (*args, *kwargs.values())))
            call.returned = fn(*args, **kwargs)
            return call.returned

        self.forward(params, x, mode, record)
        return calls

    def dense(self, params: Params, x: PyTree, mode: Mode) -> list[tuple[Array, Array]]:
        """Inputs (B, F) and outputs (B, F') of each dense layer, at least one."""
        calls = [call for call in self.calls(params, x, mode) if is_flax(call.kind, DENSE)]
        if not calls:
            raise ArgumentError("model", "has no dense layer, so it has no features")
        return [(call.args[0], call.returned) for call in calls]

    def head(self, params: Params, features: Array) -> Array:
        """The outputs in inference mode if the last dense layer receives these features (B, F)."""
        number = itertools.count(1)
        last = self.num_dense

        def around(path, kind, fn, args, kwargs):
            replaced = is_flax(kind, DENSE) and next(number) == last
            return fn(features, *args[1:], **kwargs) if replaced else fn(*args, **kwargs)

        x = jax.tree.map(
            lambda leaf: jnp.zeros((len(features), *leaf.shape[1:]), leaf.dtype), self.example
        )
        return self.forward(params, x, None, around)[0]

    @functools.cached_property
    def num_dense(self) -> int:
        """Number of calls of dense layers in a forward pass."""
        return len(
            jax.eval_shape(lambda params, x: self.dense(params, x, None), self.shapes, self.example)
        )

    @functools.cached_property
    def stochastic(self) -> bool:
        """Whether training draws random numbers (dropout)."""
        traced = jax.make_jaxpr(self.forward)(self.shapes, self.example, jax.random.key(0))
        # whether any output depends on the key
        return partial_eval.dce_jaxpr(traced.jaxpr, True)[1][-1]

    @functools.cached_property
    def above(self) -> dict[Path, list[Path]]:
        """Path of each leaf -> paths of the modules that it is in, from its own module to the root."""
        paths: list[Path] = []
        by_path(paths.append, self.shapes)

        def start(path):
            return int(path[0] in self.collections)

        return {
            path: [path[start(path) : end] for end in range(len(path) - 1, start(path) - 1, -1)]
            for path in paths
        }

    @functools.cached_property
    def called(self) -> dict[Path, bool]:
        """Paths of the modules in the order of their first calls, and whether they normalize."""
        calls: list[Call] = []
        jax.eval_shape(
            lambda params, x: calls.extend(self.calls(params, x, None)), self.shapes, self.example
        )
        return {call.path: is_flax(call.kind, NORMS) for call in calls}

    @functools.cached_property
    def layers(self) -> list[list[Path]]:
        """The layers: the branches at the tree's first fork, in the order of computation.

        A list of modules is not a layer, but each module in it is. A normalization belongs to the layer before it.
        """
        depth = 0
        own = {above[0] for above in self.above.values()}

        def branch(above):
            return next((p for p in above[::-1] if len(p) > depth and p in self.called), above[0])

        while (
            len(found := dict.fromkeys(map(branch, self.above.values()))) == 1
            and not own & found.keys()
        ):
            depth = len(*found)
        layers: list[list[Path]] = []
        for path in [
            *filter(found.__contains__, self.called),
            *(path for path in found if path not in self.called),
        ]:
            if not layers or not self.called.get(path):
                layers.append([])
            layers[-1].append(path)
        return layers


def is_flax(kind: type, names: Collection[str]) -> bool:
    """Whether a class is one of Flax's of these names, or a subclass; NNX, which is slow to import, is not needed."""
    return any(
        base.__name__ in names and base.__module__.startswith("flax.") for base in kind.__mro__
    )


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
    own = kwargs.get("mask")
    return {**kwargs, "mask": real if own is None else real & jnp.asarray(own, bool)}


def by_name(params: Params) -> dict[Path, Any]:
    """The leaves of nested dicts by path."""
    found: Any = traverse_util.flatten_dict(params)
    return found


def nested(leaves: Mapping[Path, Any]) -> Params:
    """Nested dicts from their leaves by path."""
    return traverse_util.unflatten_dict(dict(leaves))


def by_path(fn: Callable[[Path], Any], params: Params) -> PyTree:
    """Replaces every leaf with fn(path)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: fn(tuple(str(entry.key) for entry in path)), params
    )
