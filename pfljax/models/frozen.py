"""Networks of which only a small part is trained; their frozen arrays are stored once for all clients.

The tree of parameters of such a network contains what is trained and nothing else, so that methods, stores and traffic
see a small model. Compiled programs take the frozen arrays as an argument (`contract.held`);
`Network.frozen_in_program` returns them, inside and outside of a program.
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
from pfljax.models.adapters import A, B, Parameters, all_adaptations, as_adapters, itself
from pfljax.models.low_rank import adapted, merged, uses
from pfljax.models.standardizing import SCALING, Statistics
from pfljax.models.structure import Call, Network, Path, by_name, by_path, is_flax, nested
from pfljax.models.torch_modules import is_torch

PROMPT = "prompt"


class AdaptedNetwork(Network):
    """A network with frozen parameters, of which some are adapted and others trained themselves.

    Attributes:
        base: The full network.
        frozen: The values of its parameters.
        adaptations: What is trained, by the path of the frozen parameter that it belongs to.
        prompt_shapes: Shape (L, width) of trained tokens, by the path of the module that gets them.
        frozen_on_host: The frozen arrays by path, once for all clients; and the initial values of parameters that are
            trained themselves.
    """

    def __init__(self, base: Network, frozen: Frozen, trainable: Any, dtype: str):
        self.base = base
        self.example = base.example
        self.frozen = frozen
        self.collections = base.collections
        self.fixed = False
        self.statistics = base.statistics
        shapes = by_name(base.shapes)
        parameters = self._parameters()
        self.adaptations = all_adaptations(trainable, parameters)
        # Batch statistics are small, and worth nothing if they do not belong to the clients' data.
        for path in base.statistics:
            self.adaptations.setdefault(path, [itself(parameters.shapes[path])])
        # Adapters come on top of a parameter that is trained itself.
        for adaptations in self.adaptations.values():
            adaptations.sort(key=lambda adaptation: "" not in adaptation.shapes)
        self.prompt_shapes: dict[Path, tuple[int, int]] = {}
        for adapter in as_adapters(trainable):
            self.prompt_shapes |= adapter.prompts(parameters)

        # The frozen arrays.
        retrained = frozenset(
            path for path, (first, *_) in self.adaptations.items() if "" in first.shapes
        )
        key = dtype, retrained, described(shapes)
        self.frozen_on_host: dict[str, dict[str, np.ndarray]] = frozen.once(
            key, lambda: self._arrays(retrained, dtype)
        )

        # The trained ones.
        leaves: dict[Path, jax.ShapeDtypeStruct] = {}
        for path, adaptations in self.adaptations.items():
            for adaptation in adaptations:
                for suffix, shape in adaptation.shapes.items():
                    leaf_dtype = jnp.float32 if suffix else shapes[path].dtype
                    leaf = jax.ShapeDtypeStruct(shape, leaf_dtype)
                    leaves[with_suffix(path, suffix)] = leaf
        for path, shape in self.prompt_shapes.items():
            leaves[*path, PROMPT] = jax.ShapeDtypeStruct(shape, jnp.float32)
        self.shapes = nested(leaves)

    def init(self, key: Key) -> Params:
        start = by_name(self.base.init(key))
        initial = self.frozen_in_program["initial"]
        leaves: dict[Path, Array] = {}
        for number, (path, adaptations) in enumerate(sorted(self.adaptations.items())):
            name = "/".join(path)
            for adaptation in adaptations:
                if adaptation.init:
                    arrays = adaptation.init(jax.random.fold_in(key, 1 + number))
                elif name in initial:
                    arrays = {"": initial[name].astype(start[path].dtype)}
                else:
                    arrays = {"": start[path]}
                for suffix, array in arrays.items():
                    leaves[with_suffix(path, suffix)] = array
        first_prompt = 1 + len(self.adaptations)
        for number, (path, shape) in enumerate(sorted(self.prompt_shapes.items())):
            tokens = jax.random.normal(jax.random.fold_in(key, first_prompt + number), shape)
            leaves[*path, PROMPT] = 0.02 * tokens
        return nested(leaves)

    def forward(self, params: Params, x: PyTree, mode: Mode) -> tuple[Array, Params]:
        trained = by_name(params)
        prompts = {"/".join(path): trained[*path, PROMPT] for path in self.prompt_shapes}

        def run(
            full_params: Params, prompts: Mapping[str, Array], x: PyTree, mode: Mode
        ) -> tuple[Array, dict[Path, Array]]:
            def around(
                path: Path, kind: type, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
            ) -> Any:
                del kind
                tokens = prompts.get("/".join(path))
                if tokens is None:
                    return fn(*args, **kwargs)
                return with_tokens(tokens, fn, args, kwargs)

            replace = around if prompts else None
            outputs, written = self.base.forward(full_params, x, mode, replace)
            leaves = by_name(written)
            return outputs, {path: leaves[path] for path in self.statistics}

        outputs, written = adapted(run, self._full_params(params), prompts, x, mode)
        if not self.statistics:
            return outputs, params
        return outputs, nested(trained | written)

    def exported(self, params: Params) -> tuple[Any, Any]:
        if self.prompt_shapes:
            text = "has prompts, which no module contains; use Result.predict"
            raise ArgumentError("model", text)
        return self.base.exported(self.merged(params))

    def merged(self, params: Params) -> Params:
        """All parameters of the full network, adapters merged."""
        leaves = by_name(self._full_params(params))
        return nested({path: merged(value) for path, value in leaves.items()})

    def factors(self, params: Params) -> dict[Path, Factors]:
        leaves = by_name(params)
        factors = {}
        for path, num_layers, _ in self._low_rank:
            a = leaves[with_suffix(path, A)]
            b = leaves[with_suffix(path, B)]
            rank = a.shape[-1]
            matrix_a = a.reshape(num_layers, -1, rank)
            matrix_b = b.reshape(num_layers, rank, -1)
            factors[with_suffix(path, A)] = Factors(matrix_a, matrix_b)
        return factors

    def with_factors(self, params: Params, factors: Mapping[Path, Factors]) -> Params:
        leaves = by_name(params)
        for path, _, stacked in self._low_rank:
            name_a = with_suffix(path, A)
            name_b = with_suffix(path, B)
            a, b = factors[name_a]
            old_a = leaves[name_a].shape
            old_b = leaves[name_b].shape
            leaves[name_a] = a.reshape(*old_a[:-1], a.shape[-1])
            leaves[name_b] = b.reshape(*old_b[:stacked], b.shape[1], *old_b[stacked + 1 :])
        return nested(leaves)

    @functools.cached_property
    def _low_rank(self) -> list[tuple[Path, int, int]]:
        """Path of each weight with LoRA, number of stacked layers, and of their axes."""
        rows = []
        for path, adaptations in self.adaptations.items():
            for adaptation in adaptations:
                if adaptation.layers is not None:
                    layers = adaptation.shapes[A][: adaptation.layers]
                    rows.append((path, math.prod(layers), adaptation.layers))
        return rows

    def calls(self, params: Params, x: PyTree, mode: Mode) -> list[Call]:
        return self.base.calls(self.merged(params), x, mode)

    def dense(self, params: Params, x: PyTree, mode: Mode) -> list[tuple[Array, Array]]:
        if self.prompt_shapes:
            raise ArgumentError("model", "with prompts has no features")
        return adapted(self.base.dense, self._full_params(params), x, mode)

    def head(self, params: Params, features: Array) -> Array:
        return adapted(self.base.head, self._full_params(params), features)

    @functools.cached_property
    def called(self) -> dict[Path, bool]:
        return self.base.called

    def on(self, plan: Any) -> PyTree:
        """The frozen arrays on a plan's devices, once on each or spread over those that share a model."""
        key = id(self.frozen_on_host), plan.mesh
        return self.frozen.once(key, lambda: jax.tree.map(plan.hold, self.frozen_on_host))

    def digest(self) -> str:
        """A digest of the frozen arrays and initial values."""
        stream = hashlib.sha256()
        arrays = self.frozen_on_host["frozen"] | self.frozen_on_host["initial"]
        for name, array in sorted(arrays.items()):
            stream.update(f"{name}{array.dtype}{array.shape}".encode())
            stream.update(np.ascontiguousarray(array).tobytes())
        return stream.hexdigest()[:16]

    def _parameters(self) -> Parameters:
        """The full network, as adapters see it."""
        base = self.base
        shapes = {path: leaf.shape for path, leaf in by_name(base.shapes).items()}

        # How the network multiplies by its parameters.
        def run(params: Params, x: PyTree) -> Array:
            outputs, _ = base.forward(params, x, None)
            return outputs

        paths: list[Path] = []
        by_path(paths.append, base.shapes)
        unnamed = [None] * len(jax.tree.leaves(base.example))
        traced = jax.make_jaxpr(run)(base.shapes, base.example)
        products = dict(uses(traced.jaxpr, [*paths, *unnamed]))

        # The parameters in each layer.
        numbers = {
            branch: number for number, branches in enumerate(base.layers) for branch in branches
        }
        layers: list[list[Path]] = [[] for _ in base.layers]
        for path, modules in base.above.items():
            number = next(numbers[branch] for branch in modules if branch in numbers)
            layers[number].append(path)

        # What modules get.
        inputs = {}
        for call in base.calls_of_example():
            if call.args and hasattr(call.args[0], "shape"):
                inputs[call.path] = call.args[0].shape
        return Parameters(shapes, products, layers, inputs)

    def _arrays(self, retrained: Collection[Path], dtype: str) -> dict[str, dict[str, np.ndarray]]:
        """The frozen arrays in their type, and initial values of what is trained itself, as far as they fit."""
        shapes = by_name(self.base.shapes)
        source = self.frozen.source
        values = self.frozen.values(shapes, self.base.constants)
        missing = [path for path in shapes if path not in values and path not in retrained]
        if missing:
            names = ", ".join(f"{'/'.join(path)} {shapes[path].shape}" for path in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ArgumentError("frozen", f"{source}: lacks {names}{more}, which are not trained")
        frozen: dict[str, np.ndarray] = {}
        initial: dict[str, np.ndarray] = {}
        for path, value in values.items():
            name = "/".join(path)
            leaf = shapes[path]
            fits = value.shape == leaf.shape
            if path in retrained:
                if fits:
                    initial[name] = value.astype(leaf.dtype)
                continue
            if not fits:
                text = f"{source}: {name} has shape {value.shape}; accepted: {leaf.shape}"
                raise ArgumentError("frozen", text)
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            frozen[name] = value.astype(jnp.dtype(dtype) if is_float else leaf.dtype)
        return {"frozen": frozen, "initial": initial}

    def _full_params(self, params: Params) -> Params:
        """The full network's parameters, with adapted values where adapters are."""
        trained = by_name(params)
        frozen = self.frozen_in_program["frozen"]
        full = {}
        for path in by_name(self.base.shapes):
            value = frozen.get("/".join(path))
            for adaptation in self.adaptations.get(path, ()):
                arrays = {
                    suffix: trained[with_suffix(path, suffix)] for suffix in adaptation.shapes
                }
                value = adaptation.adapt(value, arrays)
            full[path] = value
        return nested(full)


def with_tokens(tokens: Array, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A module's call, with tokens (L, width) before those of its first argument; the result has none of them."""
    x, *rest = args
    wide = jnp.broadcast_to(tokens, (x.shape[0], *tokens.shape)).astype(x.dtype)
    return fn(jnp.concatenate([wide, x], axis=1), *rest, **kwargs)[:, len(tokens) :]


def described(shapes: Mapping[Path, Any]) -> frozenset:
    """A network's shapes and types, to tell networks apart that share frozen values."""
    return frozenset((path, leaf.shape, leaf.dtype) for path, leaf in shapes.items())


def with_suffix(path: Path, suffix: str) -> Path:
    """Path of an array that is trained for a parameter."""
    *modules, name = path
    return (*modules, name + suffix)


class Frozen:
    """Values of a network's parameters, stored once for all clients.

    Attributes:
        source: What messages call them, such as a file.
    """

    source = "frozen"

    def __init__(self, tree: Any):
        """Takes a tree of arrays: Linen's variables or parameters, an NNX state or module, or PyTorch's state dict."""
        arrays = {path: np.asarray(value) for path, value in named_leaves(tree).items()}
        self._values, self._statistics = standardizing.split(arrays)
        self._cache: dict[Any, Any] = {}

    @property
    def statistics(self) -> Statistics:
        """The means and standard deviations with which the network's inputs are standardized; {}: none come along."""
        return self._statistics

    def values(
        self, shapes: Mapping[Path, Any], constants: Collection[Path] = ()
    ) -> dict[Path, np.ndarray]:
        """The arrays by path in a network with these shapes, without its constants.

        Raises `ArgumentError` for an array that it does not have.
        """
        for path in self._values:
            if path not in shapes and path not in constants:
                text = f"has {'/'.join(path)}, which the network lacks; it has {named(shapes)}"
                raise ArgumentError("frozen", text)
        return {path: value for path, value in self._values.items() if path in shapes}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, which is called once for each key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


def tensor_to_array(tensor: Any) -> np.ndarray:
    """A tensor of PyTorch as an array; short floats, which NumPy lacks, become float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def named(shapes: Mapping[Path, Any], most: int = 12) -> str:
    """The first names of a network's parameters."""
    names = ["/".join(path) for path in shapes]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def named_leaves(frozen: Any) -> dict[Path, Any]:
    """A tree of arrays by path, without Linen's "params" at its root."""
    if is_flax(type(frozen), {"State", "Module"}) and not isinstance(frozen, nn.Module):
        from flax import nnx

        is_state = isinstance(frozen, nnx.State)
        state = frozen if is_state else nnx.state(frozen, nnx.Not(nnx.RngState))
        return {tuple(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
    if is_torch(frozen):
        frozen = frozen.state_dict()
    if not isinstance(frozen, Mapping):
        text = "accepted: a tree of arrays, such as a Linen module's variables"
        raise ArgumentError("frozen", text, type(frozen))
    variables = nn.unbox(dict(frozen))
    if isinstance(variables.get("params"), Mapping):
        variables = {**variables.pop("params"), **variables}
    leaves = {}
    for path, leaf in by_name(variables).items():
        names = tuple(map(str, path))
        if hasattr(leaf, "detach"):  # a tensor of PyTorch, whose name joins those of modules
            joined = ".".join(names)
            names = tuple(joined.split("/" if joined.startswith(f"{SCALING}/") else "."))
            leaf = tensor_to_array(leaf)
        leaves[names] = leaf
    return leaves
