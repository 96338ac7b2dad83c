"""Flax Linen modules as `Network`s: collections other than parameters are branches of the same tree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Key, Params
from pfljax.models.structure import Path, paths_of

NORMS = (nn.BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm, nn.RMSNorm)
TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}


def flags(call: Callable[..., Any], training: bool) -> dict[str, Any]:
    """The arguments of a module's call that select training mode."""
    names = inspect.signature(call).parameters
    return {name: value if training else not value for name, value in TRAINING.items() if name in names}


class LinenNetwork:
    """A Linen module: see `structure.Network`."""

    fixed = False

    def __init__(self, module: nn.Module, example: jax.ShapeDtypeStruct):
        self.module, self.example = module, example
        self.called: dict[Path, bool] = {}
        with nn.intercept_methods(self._note):
            variables = jax.eval_shape(self._variables, jax.random.key(0))
        self.collections = tuple(name for name in variables if name != "params")
        self.shapes = self._tree(variables)
        self.statistics = frozenset(path for path in paths_of(self.shapes) if path[0] in self.collections)
        self.stochastic = bool(flags(type(module).__call__, True)) and self._draws(variables)

    def init(self, key: Key) -> Params:
        return self._tree(self._variables(key))

    def forward(self, params: Params, x: Array, key: Key | None) -> tuple[Array, Params]:
        options = flags(type(self.module).__call__, key is not None)
        _, variables = self.exported(params)
        split = {name: params[name] for name in self.collections}
        if key is None:
            outputs: Any = self.module.apply(variables, x, **options)
            return outputs, params
        rngs = {"dropout": key, "params": jax.random.fold_in(key, 1)}  # "params" is the fallback stream
        outputs, written = self.module.apply(variables, x, **options, rngs=rngs, mutable=list(split))
        return outputs, params | {name: written[name] for name in split}

    def exported(self, params: Params) -> tuple[nn.Module, dict[str, Params]]:
        split = {name: params[name] for name in self.collections}
        return self.module, {"params": {name: leaf for name, leaf in params.items() if name not in split}} | split

    def dense(self, params: Params, x: Array, key: Key | None) -> list[tuple[Array, Array]]:
        layers = []

        def note(call, args, kwargs, context):
            given = call(*args, **kwargs)
            if isinstance(context.module, nn.Dense):
                layers.append((args[0], given))
            return given

        with nn.intercept_methods(note):
            self.forward(params, x, key)
        if not layers:
            raise ArgumentError("model", "has no dense layer, so it has no features")
        return layers

    def place(self, path: Path) -> Path:
        return path[1:] if path[0] in self.collections else path

    def _variables(self, key: Key) -> Any:
        x = jnp.zeros(self.example.shape, self.example.dtype)
        return self.module.init(key, x, **flags(type(self.module).__call__, False))

    def _tree(self, variables: dict[str, Params]) -> Params:
        return {**variables.get("params", {}), **{name: variables[name] for name in self.collections}}

    def _note(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "setup":
            self.called.setdefault(context.module.path, isinstance(context.module, NORMS))
        return call(*args, **kwargs)

    def _draws(self, variables: dict[str, Params]) -> bool:
        options = flags(type(self.module).__call__, True)
        run = lambda variables, x: self.module.apply(variables, x, **options, mutable=list(self.collections))
        try:
            jax.eval_shape(run, variables, self.example)
        except InvalidRngError:
            return True
        return False
