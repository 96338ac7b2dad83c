"""Flax Linen modules as `Network`s: collections other than parameters are branches of the same tree."""

from __future__ import annotations

import contextlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfljax.contract.types import Key, Mode, Params, PyTree
from pfljax.models.structure import Around, Network, flags, key_and_mask, without_padding


class LinenNetwork(Network):
    def __init__(self, module: nn.Module, example: PyTree):
        self.module = module
        self.example = example
        params, rest = jax.eval_shape(self._variables, jax.random.key(0))
        self.collections = tuple(rest)
        self.shapes = {**params, **rest}
        self.statistics = frozenset(path for path in self.above if path[0] in self.collections)

    def init(self, key: Key) -> Params:
        params, rest = self._variables(key)
        return {**params, **rest}

    def forward(
        self, params: Params, x: PyTree, mode: Mode, around: Around | None = None
    ) -> tuple[Any, Params]:
        key, mask = key_and_mask(mode)

        def replaced(call, args, kwargs, context):
            if (
                mask is not None
                and isinstance(context.module, nn.BatchNorm)
                and context.method_name == "__call__"
            ):
                kwargs = without_padding(mask, call, args, kwargs)
            if around is None or context.method_name == "setup":
                return call(*args, **kwargs)
            return around(context.module.path, type(context.module), call, args, kwargs)

        intercepts = around is not None or mask is not None
        with nn.intercept_methods(replaced) if intercepts else contextlib.nullcontext():
            return self._forward(params, x, key)

    def _forward(self, params: Params, x: PyTree, key: Key | None) -> tuple[Any, Params]:
        module, variables = self.exported(params)
        options = flags(module, key is not None)
        if key is None:
            return module.apply(variables, x, **options), params
        # "params" is the fallback stream
        rngs = {"dropout": key, "params": jax.random.fold_in(key, 1)}
        outputs, written = module.apply(
            variables, x, **options, rngs=rngs, mutable=list(self.collections)
        )
        return outputs, params | {name: written[name] for name in self.collections}

    @property
    def momenta(self) -> list[float]:
        found: list[Any] = []

        def record(call, args, kwargs, context):
            found.append(getattr(context.module, "momentum", None))
            return call(*args, **kwargs)

        if self.statistics:
            with nn.intercept_methods(record):
                jax.eval_shape(self._forward, self.shapes, self.example, jax.random.key(0))
        return [each for each in found if isinstance(each, float)]

    def exported(self, params: Params) -> tuple[nn.Module, dict[str, Params]]:
        split = {name: params[name] for name in self.collections}
        return self.module, {
            "params": {name: leaf for name, leaf in params.items() if name not in split}
        } | split

    def _variables(self, key: Key) -> tuple[Params, dict[str, Params]]:
        x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.example)
        variables: dict[str, Any] = dict(self.module.init(key, x, **flags(self.module, False)))
        return variables.pop("params", {}), variables
