"""Networks of which only a small part is trained; their frozen arrays are held once, whatever the number of clients.

The tree of parameters of such a network contains what is trained and nothing else, so that methods, stores and traffic
see a small model. Compiled programs take the frozen arrays as an argument (`contract.held`); `Network.held` gives them,
inside and outside of a program.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Factors, Key, Mode, Params, PyTree
from pfljax.models import standardizing
from pfljax.models.adapters import A, B, Given, as_adapters, itself, parts_of
from pfljax.models.low_rank import adapted, merged, uses
from pfljax.models.standardizing import Statistics
from pfljax.models.structure import Call, Network, Path, by_name, by_path, is_flax, nested

PROMPT = "prompt"


class AdaptedNetwork(Network):
    """A network of which a part is trained, or trained beside frozen parameters.

    Attributes:
        base: The whole network.
        parts: What is trained, by the path of the frozen parameter that it belongs to.
        prompts: Trained tokens (L, width) by the path of the module that gets them.
        own: The frozen arrays by path, once for all clients; and the initial values of parameters that are trained
            themselves.
    """

    def __init__(self, base: Network, frozen: Frozen, trainable: Any, dtype: str):
        self.base = base
        self.example = base.example
        self.frozen = frozen
        self.collections = base.collections
        self.fixed = False
        shapes = by_name(base.shapes)
        seen = self._given()
        self.parts = parts_of(trainable, seen)
        # small, and worth nothing if they do not belong to the clients' data
        for path in base.statistics:
            self.parts.setdefault(path, [itself(seen.shapes[path])])
        for parts in self.parts.values():
            # adapters come on top of what is trained itself
            parts.sort(key=lambda part: "" not in part.shapes)
        self.prompts = {
            path: shape
            for one in as_adapters(trainable)
            for path, shape in one.prompts(seen).items()
        }
        themselves = frozenset(path for path, parts in self.parts.items() if "" in parts[0].shapes)
        key = dtype, themselves, described(shapes)
        self.own: dict[str, dict[str, np.ndarray]] = frozen.once(
            key, lambda: self._arrays(themselves, dtype)
        )
        new = {
            beside(path, name): (shapes[path], name, shape) for path, name, shape in self._trained()
        }

        def kind(leaf, name, shape):
            return jax.ShapeDtypeStruct(shape, leaf.dtype if name == "" else jnp.float32)

        leaves = {path: kind(*each) for path, each in new.items()}
        leaves |= {
            (*path, PROMPT): jax.ShapeDtypeStruct(shape, jnp.float32)
            for path, shape in self.prompts.items()
        }
        self.shapes = nested(leaves)
        self.statistics = base.statistics

    def init(self, key: Key) -> Params:
        start = by_name(self.base.init(key))
        leaves = {}
        initial = self.held["initial"]
        for number, (path, parts) in enumerate(sorted(self.parts.items())):
            for part in parts:
                found = (
                    part.init(jax.random.fold_in(key, 1 + number))
                    if part.init
                    else {"": start[path]}
                )
                if not part.init and "/".join(path) in initial:
                    found = {"": initial["/".join(path)].astype(start[path].dtype)}
                leaves |= {beside(path, name): leaf for name, leaf in found.items()}
        for number, (path, shape) in enumerate(sorted(self.prompts.items())):
            drawn = jax.random.normal(jax.random.fold_in(key, 1 + len(self.parts) + number), shape)
            leaves[*path, PROMPT] = 0.02 * drawn
        return nested(leaves)

    def forward(self, params: Params, x: PyTree, mode: Mode) -> tuple[Array, Params]:
        trained = by_name(params)
        prompts = {"/".join(path): trained[*path, PROMPT] for path in self.prompts}

        def run(whole, prompts, x, mode):
            def around(path, kind, fn, args, kwargs):
                tokens = prompts.get("/".join(path))
                return (
                    fn(*args, **kwargs) if tokens is None else with_tokens(tokens, fn, args, kwargs)
                )

            outputs, written = self.base.forward(whole, x, mode, around if prompts else None)
            written = by_name(written)
            return outputs, {path: written[path] for path in self.statistics}

        outputs, written = adapted(run, self._whole(params), prompts, x, mode)
        return outputs, nested(trained | written) if self.statistics else params

    def exported(self, params: Params) -> tuple[Any, Any]:
        if self.prompts:
            raise ArgumentError(
                "model", "has prompts, which no module contains; use Result.predict"
            )
        return self.base.exported(self.merged(params))

    def merged(self, params: Params) -> Params:
        """All parameters of the whole network, adapters merged."""
        return jax.tree.map(
            merged, self._whole(params), is_leaf=lambda leaf: not isinstance(leaf, dict)
        )

    def factors(self, params: Params) -> dict[Path, Factors]:
        leaves = by_name(params)
        found = {}
        for path, layers, _ in self._low_rank:
            a = leaves[beside(path, A)]
            b = leaves[beside(path, B)]
            rank = a.shape[-1]
            found[beside(path, A)] = Factors(
                a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
            )
        return found

    def with_factors(self, params: Params, factors: Mapping[Path, Factors]) -> Params:
        leaves = by_name(params)
        for path, _, stacked in self._low_rank:
            name_a = beside(path, A)
            name_b = beside(path, B)
            a, b = factors[name_a]
            old_a = leaves[name_a].shape
            old_b = leaves[name_b].shape
            leaves[name_a] = a.reshape(*old_a[:-1], a.shape[-1])
            leaves[name_b] = b.reshape(*old_b[:stacked], b.shape[1], *old_b[stacked + 1 :])
        return nested(leaves)

    @functools.cached_property
    def _low_rank(self) -> list[tuple[Path, int, int]]:
        """Path of each weight with LoRA, number of stacked layers, and of their axes."""
        return [
            (path, math.prod(part.shapes[A][: part.layers]), part.layers)
            for path, parts in self.parts.items()
            for part in parts
            if part.layers is not None
        ]

    def calls(self, params: Params, x: PyTree, mode: Mode) -> list[Call]:
        return self.base.calls(self.merged(params), x, mode)

    def dense(self, params: Params, x: PyTree, mode: Mode) -> list[tuple[Array, Array]]:
        if self.prompts:
            raise ArgumentError("model", "with prompts has no features")
        return adapted(self.base.dense, self._whole(params), x, mode)

    def head(self, params: Params, features: Array) -> Array:
        return adapted(self.base.head, self._whole(params), features)

    @functools.cached_property
    def called(self) -> dict[Path, bool]:
        return self.base.called

    def on(self, plan: Any) -> PyTree:
        """The frozen arrays on a plan's devices, once on each or spread over those that share a model."""
        key = id(self.own), plan.mesh
        return self.frozen.once(key, lambda: jax.tree.map(plan.hold, self.own))

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, array in sorted((self.own["frozen"] | self.own["initial"]).items()):
            found.update(
                f"{name}{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()
            )
        return found.hexdigest()[:16]

    def _trained(self) -> list[tuple[Path, str, tuple[int, ...]]]:
        """Path, added name and shape of each trained array."""
        return [
            (path, name, shape)
            for path, parts in self.parts.items()
            for part in parts
            for name, shape in part.shapes.items()
        ]

    def _given(self) -> Given:
        """The whole network, as adapters see it."""
        base = self.base
        shapes = {path: leaf.shape for path, leaf in by_name(base.shapes).items()}
        names: Any = jax.tree.leaves(by_path(lambda path: "/".join(path), base.shapes))

        def run(params, x):
            return base.forward(params, x, None)[0]

        traced = jax.make_jaxpr(run)(base.shapes, base.example)
        none = [None] * len(jax.tree.leaves(base.example))
        found = {tuple(name.split("/")): use for name, use in uses(traced.jaxpr, [*names, *none])}
        numbers = {
            branch: number for number, branches in enumerate(base.layers) for branch in branches
        }
        layers: list[list[Path]] = [[] for _ in base.layers]
        for path, above in base.above.items():
            layers[next(numbers[branch] for branch in above if branch in numbers)].append(path)
        calls: list[Call] = []
        jax.eval_shape(
            lambda params, x: calls.extend(base.calls(params, x, None)), base.shapes, base.example
        )
        inputs = {
            call.path: call.args[0].shape
            for call in calls
            if call.args and hasattr(call.args[0], "shape")
        }
        return Given(shapes, found, layers, inputs)

    def _arrays(self, themselves: Collection[Path], dtype: str) -> dict[str, dict[str, np.ndarray]]:
        """The frozen arrays in their type, and initial values of what is trained itself, as far as they fit."""
        shapes = by_name(self.base.shapes)
        source = self.frozen.source
        values = self.frozen.values(shapes)
        missing = [path for path in shapes if path not in values and path not in themselves]
        if missing:
            names = ", ".join(f"{'/'.join(path)} {shapes[path].shape}" for path in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ArgumentError("frozen", f"{source}: lacks {names}{more}, which are not trained")
        found: dict[str, dict[str, np.ndarray]] = {"frozen": {}, "initial": {}}
        for path, value in values.items():
            name = "/".join(path)
            shape = shapes[path]
            own = path in themselves
            if value.shape == shape.shape:
                narrow = not own and jnp.issubdtype(shape.dtype, jnp.floating)
                found["initial" if own else "frozen"][name] = value.astype(
                    jnp.dtype(dtype) if narrow else shape.dtype
                )
            elif not own:
                raise ArgumentError(
                    "frozen", f"{source}: {name} has shape {value.shape}; accepted: {shape.shape}"
                )
        return found

    def _whole(self, params: Params) -> Params:
        """The whole network's parameters, with adapted values where adapters are."""
        shapes = by_name(self.base.shapes)
        trained = by_name(params)
        frozen = self.held["frozen"]
        whole = {}
        for path in shapes:
            value = frozen.get("/".join(path))
            for part in self.parts.get(path, ()):
                value = part.adapt(
                    value, {name: trained[beside(path, name)] for name in part.shapes}
                )
            whole[path] = value
        return nested(whole)


def with_tokens(tokens: Array, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A module's call, with tokens (L, width) before those of its first argument; the result has none of them."""
    x, *rest = args
    wide = jnp.broadcast_to(tokens, (x.shape[0], *tokens.shape)).astype(x.dtype)
    return fn(jnp.concatenate([wide, x], axis=1), *rest, **kwargs)[:, len(tokens) :]


def described(shapes: Mapping[Path, Any]) -> frozenset:
    """A network's shapes and types, to tell networks apart that share frozen values."""
    return frozenset((path, leaf.shape, leaf.dtype) for path, leaf in shapes.items())


def beside(path: Path, name: str) -> Path:
    """Path of an array that is trained beside a parameter."""
    return (*path[:-1], path[-1] + name)


class Frozen:
    """Values of a network's parameters that are held once for all clients.

    Messages call them `source`, such as a file.
    """

    source = "frozen"

    def __init__(self, tree: Any):
        """Takes a tree of arrays: Linen's variables or parameters, or an NNX state or module."""
        arrays = {path: np.asarray(value) for path, value in leaves_of(tree).items()}
        self._values, self._statistics = standardizing.split(arrays)
        self._kept: dict[Any, Any] = {}

    @property
    def statistics(self) -> Statistics:
        """The means and standard deviations with which the network's inputs are standardized; {}: none come along."""
        return self._statistics

    def values(self, shapes: Mapping[Path, Any]) -> dict[Path, np.ndarray]:
        """The arrays by path in a network with these shapes.

        Raises `ArgumentError` for an array that it does not have.
        """
        for path in self._values:
            if path not in shapes:
                raise ArgumentError(
                    "frozen",
                    f"has {'/'.join(path)}, which the network lacks; it has {named(shapes)}",
                )
        return self._values

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, which is called once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def named(shapes: Mapping[Path, Any], most: int = 12) -> str:
    """The first names of a network's parameters."""
    names = ["/".join(path) for path in shapes]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def leaves_of(frozen: Any) -> dict[Path, Any]:
    """A tree of arrays by path, without Linen's "params" at its root."""
    if is_flax(type(frozen), {"State", "Module"}) and not isinstance(frozen, nn.Module):
        from flax import nnx

        state = (
            frozen if isinstance(frozen, nnx.State) else nnx.state(frozen, nnx.Not(nnx.RngState))
        )
        return {tuple(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
    if not isinstance(frozen, Mapping):
        raise ArgumentError(
            "frozen", "accepted: a tree of arrays, such as a Linen module's variables", type(frozen)
        )
    variables = nn.unbox(dict(frozen))
    if isinstance(variables.get("params"), Mapping):
        variables = {**variables.pop("params"), **variables}
    return {tuple(map(str, path)): leaf for path, leaf in by_name(variables).items()}
