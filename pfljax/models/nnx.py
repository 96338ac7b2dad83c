"""Flax NNX modules as `Network`s: their variables, except the state of random streams, are a tree of arrays."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Key, Mode, Params, PyTree, Task
from pfljax.models.ensembles import mixed
from pfljax.models.standardizing import SCALING, Statistics, standardize
from pfljax.models.structure import (
    Around,
    Network,
    by_name,
    flags,
    key_and_mask,
    nested,
    widened_shapes,
    without_padding,
)

# id of a module -> what is called in its place; modules that NNX creates for the inside of a transformation have none.
REPLACED: contextvars.ContextVar[dict[int, Callable[..., Any]]] = contextvars.ContextVar("replaced")
# (B,) bool, the real examples of the mini-batch; None: all are.
REAL: contextvars.ContextVar[Array | None] = contextvars.ContextVar("real", default=None)


class NNXNetwork(Network):
    """An NNX module, or a function of `rngs` that creates one."""

    def __init__(self, module: nnx.Module | Callable[..., Any], example: PyTree):
        self.module = module
        self.example = example
        self.fixed = isinstance(module, nnx.Module)
        new = nnx.eval_shape(self._new, jax.random.key(0))
        self.definitions = {}  # training or not -> the module without its arrays
        for training in (True, False):
            new.train() if training else new.eval()
            self.definitions[training], random, rest = nnx.split(new, nnx.RngState, ...)
        self.random = nnx.to_flat_state(random)
        self.variables = {}  # path in the tree of parameters -> path in the module, and variable
        for path, variable in nnx.to_flat_state(rest):
            self.variables[tuple(map(str, path))] = (path, variable)
        leaves = {names: v.get_value() for names, (_, v) in self.variables.items()}
        self.shapes = widened_shapes(nested(leaves))
        self.statistics = frozenset(
            names for names, (_, v) in self.variables.items() if not isinstance(v, nnx.Param)
        )

    def init(self, key: Key) -> Params:
        return self._tree(self._new(key))

    def forward(
        self, params: Params, x: PyTree, mode: Mode, around: Around | None = None
    ) -> tuple[Array, Params]:
        key, mask = key_and_mask(mode)
        module = self._merged(params, key)
        run = module
        if around or mask is not None:
            run = functools.partial(replacing, module, around, mask)
        options = flags(module, key is not None)
        if "rngs" in inspect.signature(type(module).__call__).parameters:  # as in bonsai's ViT
            options["rngs"] = None
            if key is not None:
                options["rngs"] = nnx.Rngs(jax.random.fold_in(key, len(self.random)))
        outputs = run(x, **options)
        return outputs, params if key is None else self._tree(module)

    @property
    def momenta(self) -> list[float]:
        if not self.statistics:
            return []
        new = nnx.eval_shape(self._new, jax.random.key(0))
        momenta = [getattr(inner, "momentum", None) for _, inner in nnx.iter_modules(new)]
        return [momentum for momentum in momenta if isinstance(momentum, float)]

    def exported(self, params: Params) -> tuple[nnx.Module, nnx.State]:
        module = self._merged(params, None)
        return module, nnx.state(module, nnx.Not(nnx.RngState))

    def _new(self, key: Key) -> nnx.Module:
        if isinstance(self.module, nnx.Module):
            return nnx.clone(self.module)
        new = self.module(rngs=nnx.Rngs(key))
        if not isinstance(new, nnx.Module):
            kind = type(new).__name__
            text = f"accepted: a function of rngs that returns an nnx.Module, not {kind}"
            raise ArgumentError("model", text)
        return new

    def _merged(self, params: Params, key: Key | None) -> nnx.Module:
        """The module with these parameters; its random streams begin with the key of training mode, or anywhere."""
        leaves = by_name(params)
        variables = []
        for names, (path, variable) in self.variables.items():
            variables.append((path, variable.replace(leaves[names])))
        streams = []
        for number, (path, variable) in enumerate(self.random):
            streams.append((path, variable.replace(self._stream(number, variable, key))))
        return nnx.merge(
            self.definitions[key is not None],
            nnx.from_flat_state(streams),
            nnx.from_flat_state(variables),
        )

    def _stream(self, number: int, variable: Any, key: Key | None) -> Array:
        """The state of a random stream."""
        shape = variable.get_value().shape
        if isinstance(variable, nnx.RngCount):
            return jnp.zeros(shape, jnp.uint32)
        key = jax.random.fold_in(jax.random.key(0) if key is None else key, number)
        return jax.random.split(key, shape) if shape else key

    def _tree(self, module: nnx.Module) -> Params:
        """The module's parameters."""
        state = dict(nnx.to_flat_state(nnx.state(module)))
        leaves = {}
        for names, (path, _) in self.variables.items():
            leaves[names] = jnp.array(state[path].get_value())
        return nested(leaves)


def replacing(
    module: nnx.Module, around: Around | None, mask: Array | None, *args: Any, **kwargs: Any
) -> Any:
    """Calls a module with `around` in place of the modules in it, and batch statistics of the real examples alone."""
    replaced: dict[int, Callable[..., Any]] = {}
    for path, inner in nnx.iter_modules(module):
        kind = type(inner)
        if around is not None and callable(inner):
            replaced[id(inner)] = functools.partial(around, tuple(map(str, path)), kind)
        if id(inner) in replaced or isinstance(inner, nnx.BatchNorm):
            object.__setattr__(inner, "__class__", watched(kind))
    tokens = REPLACED.set(replaced), REAL.set(mask)
    try:
        return module(*args, **kwargs)
    finally:
        REPLACED.reset(tokens[0])
        REAL.reset(tokens[1])


@functools.cache
def watched(cls: type) -> type:
    """A subclass of `cls` whose calls may be replaced."""

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        fn = functools.partial(cls.__call__, self)
        mask = REAL.get()
        if mask is not None and isinstance(self, nnx.BatchNorm):
            kwargs = without_padding(mask, fn, args, kwargs)
        around = REPLACED.get().get(id(self))
        return around(fn, args, kwargs) if around else fn(*args, **kwargs)

    return subclass(cls, call)


def subclass(cls: type, call: Callable[..., Any], **attributes: Any) -> type:
    """A subclass of the same name, with another `__call__` and further attributes."""
    attributes["__call__"] = functools.wraps(cls.__call__)(call)
    return type(cls)(cls.__name__, (cls,), attributes)


class Weight(nnx.Variable):
    """The weights of an ensemble's members."""


class Ensemble(nnx.Module):
    """A mixture of models of one NNX module, in inference mode; see `models.ensembles.Ensemble`.

    Attributes:
        members: The module, whose variables are those of the members, stacked along a leading axis.
        weights: (J,) or (J, C) the members' weights.
        task: What the outputs mean.
        drops_last: Whether the last axis of the outputs, of a single value, is dropped.
    """

    def __init__(self, members: nnx.Module, weights: Array, task: Task, drops_last: bool):
        self.members = members
        self.weights = Weight(jnp.asarray(weights))
        self.task: Task = task
        self.drops_last = drops_last

    def __call__(self, x: PyTree) -> Array:
        options = flags(self.members, False)
        if "rngs" in inspect.signature(type(self.members).__call__).parameters:
            options["rngs"] = None

        def inference(member: Callable[..., Array]) -> Array:
            return member(x, **options)

        outputs = nnx.vmap(inference)(self.members)
        if self.drops_last:
            outputs = outputs[..., 0]
        return mixed(self.task, self.weights.get_value(), outputs)


def ensemble(
    members: Sequence[nnx.Module], weights: Array, task: Task, drops_last: bool
) -> tuple[nnx.Module, nnx.State]:
    """A mixture of models as a module and its state; see `models.ensembles.ensemble`."""
    graph, _ = nnx.split(members[0])
    states = [nnx.split(member)[1] for member in members]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    module = Ensemble(nnx.merge(graph, stacked), weights, task, drops_last)
    return module, nnx.state(module, nnx.Not(nnx.RngState))


class Statistic(nnx.Variable):
    """A mean or standard deviation with which a module standardizes its inputs."""


def standardizing(module: nnx.Module, statistics: Statistics) -> tuple[nnx.Module, nnx.State]:
    """The module, of a subclass that standardizes its inputs first, and its state; see `models.standardizing`."""
    object.__setattr__(module, "__class__", with_standardizing(type(module)))
    variables = {}
    for statistic, values in statistics.items():
        arrays = {name: Statistic(jnp.asarray(value)) for name, value in values.items()}
        variables[statistic] = nnx.Dict(arrays)
    setattr(module, SCALING, nnx.Dict(variables))
    return module, nnx.state(module, nnx.Not(nnx.RngState))


@functools.cache
def with_standardizing(cls: type) -> type:
    """A subclass of `cls` whose calls standardize x first."""

    def call(self: Any, x: PyTree, *args: Any, **options: Any) -> Any:
        return cls.__call__(self, standardize(x, values_of(self.scaling)), *args, **options)

    return subclass(cls, call, inside=cls)


def values_of(scaling: nnx.Dict) -> dict[str, dict[str, Array]]:
    """The values of a standardizing module's statistics."""
    statistics = {}
    for statistic, variables in scaling.items():
        statistics[statistic] = {name: v.get_value() for name, v in variables.items()}
    return statistics


def inside(module: Any) -> tuple[nnx.Module, dict[str, dict[str, Array]]]:
    """A copy of the module as it was before `standardizing`, and its statistics."""
    module = nnx.clone(module)
    statistics = values_of(module.scaling)
    delattr(module, SCALING)
    object.__setattr__(module, "__class__", type(module).inside)
    return module, statistics
