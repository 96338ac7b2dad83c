"""Flax Linen modules as `Network`s: collections other than parameters are branches of the same tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfljax.contract.types import Key, Mode, Params, PyTree
from pfljax.models.structure import (
    Around,
    Network,
    flags,
    key_and_mask,
    widened_shapes,
    without_padding,
)


class LinenNetwork(Network):
    """A Linen module.

    Attributes:
        module: The module.
    """

    def __init__(self, module: nn.Module, example: PyTree):
        self.module = module
        self.example = example
        params, rest = jax.eval_shape(self._variables, jax.random.key(0))
        self.collections = tuple(rest)
        self.shapes = widened_shapes({**params, **rest})
        self.statistics = frozenset(path for path in self.above if path[0] in self.collections)

    def init(self, key: Key) -> Params:
        params, rest = self._variables(key)
        return {**params, **rest}

    def forward(
        self, params: Params, x: PyTree, mode: Mode, around: Around | None = None
    ) -> tuple[Any, Params]:
        key, mask = key_and_mask(mode)

        def intercept(
            call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
        ) -> Any:
            module = context.module
            is_call = context.method_name == "__call__"
            if mask is not None and is_call and isinstance(module, nn.BatchNorm):
                kwargs = without_padding(mask, call, args, kwargs)
            if around is None or context.method_name == "setup":
                return call(*args, **kwargs)
            return around(module.path, type(module), call, args, kwargs)

        if around is None and mask is None:
            return self._forward(params, x, key)
        with nn.intercept_methods(intercept):
            return self._forward(params, x, key)

    def _forward(self, params: Params, x: PyTree, key: Key | None) -> tuple[Any, Params]:
        module, variables = self.exported(params)
        options = flags(module, key is not None)
        if key is None:
            return module.apply(variables, x, **options), params

        # "params" is the stream that Linen falls back to.
        rngs = {"dropout": key, "params": jax.random.fold_in(key, 1)}
        collections = list(self.collections)
        outputs, written = module.apply(variables, x, **options, rngs=rngs, mutable=collections)
        statistics = {name: written[name] for name in self.collections}
        return outputs, params | statistics

    @property
    def momenta(self) -> list[float]:
        momenta: list[float] = []

        def record(
            call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
        ) -> Any:
            momentum = getattr(context.module, "momentum", None)
            if isinstance(momentum, float):
                momenta.append(momentum)
            return call(*args, **kwargs)

        if self.statistics:
            with nn.intercept_methods(record):
                jax.eval_shape(self._forward, self.shapes, self.example, jax.random.key(0))
        return momenta

    def exported(self, params: Params) -> tuple[nn.Module, dict[str, Params]]:
        collections = {name: params[name] for name in self.collections}
        trained = {name: leaf for name, leaf in params.items() if name not in collections}
        return self.module, {"params": trained} | collections

    def _variables(self, key: Key) -> tuple[Params, dict[str, Params]]:
        x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.example)
        options = flags(self.module, False)
        variables: dict[str, Any] = dict(self.module.init(key, x, **options))
        return variables.pop("params", {}), variables
