"""Flax NNX modules as `Network`s: their variables, except the state of random streams, are a tree of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Key, Params
from pfljax.models.linen import flags
from pfljax.models.structure import Path

NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.RMSNorm)
NOTE: ContextVar[Callable[[nnx.Module, tuple[Any, ...]], object]] = ContextVar("note")


class NNXNetwork:
    """An NNX module, or a function of `rngs` that creates one: see `structure.Network`."""

    def __init__(self, module: nnx.Module | Callable[..., Any], example: jax.ShapeDtypeStruct):
        self.module = module
        self.fixed = isinstance(module, nnx.Module)
        self.definitions: dict[bool, Any] = {}  # training or not -> the module without its arrays
        random, rest = jax.eval_shape(self._define, jax.random.key(0))
        if not self.definitions:
            text = f"accepted: a function of rngs that returns an nnx.Module, not {self.kind.__name__}"
            raise ArgumentError("model", text)
        self.random, variables = nnx.to_flat_state(random), nnx.to_flat_state(rest)
        self.variables = {tuple(map(str, path)): (path, variable) for path, variable in variables}
        self.shapes = self._nested({path: variable.get_value() for path, (_, variable) in self.variables.items()})
        self.statistics = frozenset(p for p, (_, v) in self.variables.items() if not isinstance(v, nnx.Param))
        self.stochastic = bool(len(self.random))
        self.called: dict[Path, bool] = {}
        jax.eval_shape(self._watch_once, jax.random.key(0), example)

    def init(self, key: Key) -> Params:
        return self._tree(self._new(key))

    def forward(self, params: Params, x: Array, key: Key | None) -> tuple[Array, Params]:
        module = self._merged(params, key)
        outputs = self._call(module, x, key)
        return outputs, params if key is None else self._tree(module)

    def exported(self, params: Params) -> tuple[nnx.Module, nnx.State]:
        module = self._merged(params, None)
        return module, nnx.state(module, nnx.Not(nnx.RngState))

    def dense(self, params: Params, x: Array, key: Key | None) -> list[tuple[Array, Array]]:
        module, layers = self._merged(params, key), []

        def note(_, called, args):
            if isinstance(called, nnx.Linear):
                layers.append((args[0], nnx.Linear.__call__(called, args[0])))

        watch(module, note, lambda: self._call(module, x, key))
        if not layers:
            raise ArgumentError("model", "has no nnx.Linear, so it has no features")
        return layers

    def place(self, path: Path) -> Path:
        return path

    def _new(self, key: Key) -> nnx.Module:
        return nnx.clone(self.module) if isinstance(self.module, nnx.Module) else self.module(rngs=nnx.Rngs(key))

    def _define(self, key: Key) -> tuple[nnx.State, nnx.State]:
        module = self._new(key)
        self.kind = type(module)
        random = rest = nnx.State({})
        for training in (True, False) if isinstance(module, nnx.Module) else ():
            module.train() if training else module.eval()
            self.definitions[training], random, rest = nnx.split(module, nnx.RngState, ...)
        return random, rest

    def _call(self, module: nnx.Module, x: Array, key: Key | None) -> Array:
        return module(x, **flags(type(module).__call__, key is not None))

    def _watch_once(self, key: Key, x: Array) -> Array:
        module = self._new(key)
        module.eval()
        note = lambda path, called, _: self.called.setdefault(path, isinstance(called, NORMS))
        return watch(module, note, lambda: self._call(module, x, None))

    def _merged(self, params: Params, key: Key | None) -> nnx.Module:
        flat = [
            (path, v.replace(functools.reduce(dict.__getitem__, p, params))) for p, (path, v) in self.variables.items()
        ]
        drawn = [(path, v.replace(self._stream(number, v, key))) for number, (path, v) in enumerate(self.random)]
        return nnx.merge(self.definitions[key is not None], nnx.from_flat_state(drawn), nnx.from_flat_state(flat))

    def _stream(self, number: int, variable: Any, key: Key | None) -> Array:
        shape = variable.get_value().shape
        if isinstance(variable, nnx.RngCount):
            return jnp.zeros(shape, jnp.uint32)
        key = jax.random.fold_in(jax.random.key(0) if key is None else key, number)
        return jax.random.split(key, shape) if shape else key

    def _tree(self, module: nnx.Module) -> Params:
        state = nnx.to_pure_dict(nnx.state(module))
        value = lambda path: jnp.array(functools.reduce(lambda branch, name: branch[name], path, state))
        return self._nested({names: value(path) for names, (path, _) in self.variables.items()})

    def _nested(self, leaves: dict[Path, Any]) -> Params:
        tree: Params = {}
        for (*above, last), leaf in leaves.items():
            functools.reduce(lambda branch, name: branch.setdefault(name, {}), above, tree)[last] = leaf
        return tree


def watch(module: nnx.Module, note: Callable[[Path, nnx.Module, tuple[Any, ...]], Any], run: Callable[[], Any]) -> Any:
    """Calls run(), with note(path, module, arguments) before every call of `module` and its submodules."""
    paths = {}
    for path, inner in nnx.iter_modules(module):
        paths[id(inner)] = tuple(map(str, path))
        if callable(inner):
            object.__setattr__(inner, "__class__", watched(type(inner)))
    token = NOTE.set(lambda called, args: id(called) in paths and note(paths[id(called)], called, args))
    try:
        return run()
    finally:
        NOTE.reset(token)


@functools.cache
def watched(cls: type) -> type:
    """A subclass of `cls` that records calls."""

    def call(self, *args, **kwargs):
        NOTE.get()(self, args)
        return cls.__call__(self, *args, **kwargs)

    return type(cls)(cls.__name__, (cls,), {"__call__": functools.wraps(cls.__call__)(call)})
