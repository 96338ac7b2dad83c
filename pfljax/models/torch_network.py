"""PyTorch modules as `Network`s, through torchax, which computes PyTorch's operations with JAX's.

While a module runs, its parameters and buffers are JAX's arrays, and so is every tensor that it creates. Batch
normalization is computed here: padding does not count, and its running statistics are PyTorch's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from jax.core import Tracer
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportMissingImports]
from torch.nn.parameter import is_lazy  # pyright: ignore[reportMissingImports]
from torch.utils import _pytree as torch_pytree  # pyright: ignore[reportMissingImports]

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Key, Mode, Params, PyTree
from pfljax.models import torch_derivatives, torch_export, torch_recurrent
from pfljax.models.structure import Around, Network, Path, by_name, key_and_mask, nested
from pfljax.models.torch_modules import TorchModule, is_torch, name_of

COUNT = "num_batches_tracked"  # of batch normalization, an integer
HALF = (torch.bfloat16, torch.float16)
# What JAX raises where Python or NumPy need a tensor's values
VALUES_NEEDED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def import_torchax() -> Any:
    """Imports torchax, although it names operations that this version of PyTorch may not have.

    Its settings of JAX and of the environment are undone.
    """
    overloads: Any = torch._ops.OpOverloadPacket
    look_up = overloads.__getattr__

    def look_up_or_name(packet: Any, name: str) -> Any:
        try:
            return look_up(packet, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return f"{packet}.{name}"  # a key in torchax's tables that nothing looks up

    options = "jax_pjrt_client_create_options"
    telemetry = "ENABLE_RUNTIME_UPTIME_TELEMETRY"
    option_before = getattr(jax.config, options, None)
    telemetry_before = os.environ.get(telemetry)
    overloads.__getattr__ = look_up_or_name
    try:
        import torchax  # pyright: ignore[reportMissingImports]

        torchax.default_env()  # imports the operations
    finally:
        overloads.__getattr__ = look_up
        if option_before is not None:
            jax.config.update(options, option_before)
        if telemetry_before is None:
            os.environ.pop(telemetry, None)
    return torchax


torchax = import_torchax()
Tensor = torchax.tensor.Tensor
View = torchax.view.View


class Data(Tensor):
    """What `x.data` is in a forward pass: the values of x, through which no gradient flows."""


def data_of(tensor: Any) -> Any:
    """A tensor's `data`. Code that creates modules may write into it, so there it is the tensor itself."""
    if not torch.is_grad_enabled():
        return tensor
    return Data(jax.lax.stop_gradient(tensor.jax()), tensor._env)


# torchax returns the tensor itself, with its gradient.
Tensor.data = property(data_of, Tensor.data.fset)


class Environment(torchax.tensor.Environment):
    """torchax's operations.

    Tensors of PyTorch's own are constants among them. Results have no gradient within `torch.no_grad()`.

    Attributes:
        stored: The arrays, by id, of an earlier forward pass, which this one must not read.
    """

    stored: Collection[int] = frozenset()

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        operands = (args, kwargs or {})
        if self.stored and reads(operands, self.stored):
            text = "its forward pass reads tensors that an earlier one stored in an attribute"
            raise ArgumentError("model", f"{text}; accepted: buffers")
        first = args[0] if args else None
        if isinstance(first, Data) and writes(func, {}):
            text = "its forward pass writes into x.data; accepted: x itself, within torch.no_grad()"
            raise ArgumentError("model", text)
        is_plain = [is_constant(leaf) for leaf in tensors_in(operands)]
        if any(is_plain) and not all(is_plain):
            written = operands[1].get("out", first)
            if is_constant(written) and writes(func, operands[1]):
                text = "writes into a tensor that is neither an input, a parameter nor a buffer"
                hint = "accepted: a new tensor, without a device of its own"
                raise ArgumentError("model", f"its forward pass {text}; {hint}")
            args, kwargs = torch_pytree.tree_map_only(torch.Tensor, constant_to_array, operands)
        result = super().dispatch(func, types, args, kwargs)
        if torch.is_grad_enabled():
            return result
        inputs = set(map(id, tensors_in((args, kwargs))))

        def convert(tensor: Any) -> Any:
            # What an operation changed in place stays the same tensor.
            return tensor if id(tensor) in inputs else without_gradient(tensor)

        return torch_pytree.tree_map_only(Tensor, convert, result)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a tree."""
    return [leaf for leaf in torch_pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def reads(operands: Any, arrays: Collection[int]) -> bool:
    """Whether tensors of torchax's among the operands have one of these arrays."""
    tensors: list[Any] = [leaf for leaf in tensors_in(operands) if isinstance(leaf, Tensor)]
    return any(id(tensor.jax()) in arrays for tensor in tensors)


def is_constant(value: Any) -> bool:
    """Whether a value is a tensor of PyTorch's own, and not one of torchax's."""
    return isinstance(value, torch.Tensor) and not isinstance(value, Tensor | View)


def constant_to_array(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of PyTorch's own as one of torchax's, which are returned as they are."""
    return Tensor(jnp.asarray(array_of(tensor)), ENV) if is_constant(tensor) else tensor


def without_gradient(tensor: Any) -> Any:
    """A tensor of torchax's through which no gradient flows."""
    return Tensor(jax.lax.stop_gradient(tensor.jax()), ENV)


def writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation changes its first argument, as `add_` and `x[0] = y` do, or has an argument `out`."""
    name = getattr(func, "__name__", "").partition(".")[0]
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name == "__setitem__" or name.startswith("__i") or "out" in kwargs


def new_environment() -> Any:
    """The operations that modules are computed with: torchax's, and some that it lacks or computes otherwise."""
    environment = Environment()

    def random(draw: Callable[..., Array]) -> Callable[..., Any]:
        """An operation that replaces a tensor's values by random ones: (key, shape, *args) -> values."""

        def fill(tensor: torch.Tensor, *args: float, generator: Any = None, **kwargs: float) -> Any:
            key = environment.get_and_rotate_prng_key(generator)
            shape = to_jax(tensor).shape
            return tensor.copy_(to_torch(draw(key, shape, *args, **kwargs)))

        return fill

    def normal(key: Key, shape: tuple[int, ...], mean: float = 0, std: float = 1) -> Array:
        return mean + std * jax.random.normal(key, shape)

    def cauchy(key: Key, shape: tuple[int, ...], median: float = 0, sigma: float = 1) -> Array:
        return median + sigma * jax.random.cauchy(key, shape)

    def exponential(key: Key, shape: tuple[int, ...], lambd: float = 1) -> Array:
        return jax.random.exponential(key, shape) / lambd

    def recurrent(cell: torch_recurrent.Cell) -> Callable[..., Any]:
        """An operation that runs recurrent layers, such as `torch.lstm`."""

        def run(
            x: torch.Tensor,
            start: Any,
            parameters: Sequence[torch.Tensor],
            has_biases: bool,
            num_layers: int,
            dropout: float,
            training: bool,
            bidirectional: bool,
            batch_first: bool,
        ) -> Any:
            states = to_jax(start)
            states = tuple(states) if isinstance(states, list | tuple) else (states,)
            num_directions = 2 if bidirectional else 1
            layers = layers_of(to_jax(list(parameters)), num_layers * num_directions, has_biases)
            is_random = training and dropout > 0 and num_layers > 1
            key = environment.get_and_rotate_prng_key() if is_random else None

            values = to_jax(x)
            values = jnp.swapaxes(values, 0, 1) if batch_first else values
            outputs, last = torch_recurrent.run_layers(
                cell, values, states, layers, num_directions, dropout, key
            )
            outputs = jnp.swapaxes(outputs, 0, 1) if batch_first else outputs
            return to_torch((outputs, *last))

        return run

    def unsupported(name: str) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            raise torchax.tensor.OperatorNotFound(f"Operator with name {name} has no lowering")

        return fail

    aten = torch.ops.aten
    in_place = torchax.ops.op_base.InplaceOp
    for operation, function in {
        aten.normal_: random(normal),
        aten.cauchy_: random(cauchy),
        aten.exponential_: random(exponential),
        aten.erfinv_: in_place(aten.erfinv),
        # torchax draws uniform floats here.
        aten.random_: unsupported("aten::random_"),
    }.items():
        environment.override_op_definition(operation, function, is_view_op=True)
    for operation, function in {
        nn.functional.group_norm: group_norm,
        torch.lstm: recurrent(torch_recurrent.lstm),
        torch.gru: recurrent(torch_recurrent.gru),
        torch.rnn_tanh: recurrent(torch_recurrent.rnn_tanh),
        torch.rnn_relu: recurrent(torch_recurrent.rnn_relu),
    }.items():
        environment.override_op_definition(operation, function)
    for packet, function in {
        aten.abs: torch_derivatives.absolute,
        aten.clamp: torch_derivatives.clamp,
        aten.clamp_max: torch_derivatives.clamp_max,
        aten.clamp_min: torch_derivatives.clamp_min,
        aten.dist: torch_derivatives.dist,
        aten.hardsigmoid: torch_derivatives.hardsigmoid,
        aten.hardswish: torch_derivatives.hardswish,
        aten.hardtanh: torch_derivatives.hardtanh,
        aten.leaky_relu: torch_derivatives.leaky_relu,
        aten.linalg_vector_norm: torch_derivatives.vector_norm,
    }.items():
        for name in packet.overloads():
            overload = getattr(packet, name)
            environment.override_op_definition(overload, on_tensors(function))
    for operation, function in {
        aten.adaptive_max_pool2d.default: adaptive_max_pool,
        aten.max.dim: torch_derivatives.largest,
        aten.min.dim: torch_derivatives.smallest,
        aten.pow.Tensor_Scalar: torch_derivatives.power,
        aten.sinc.default: jnp.sinc,
        aten.std.correction: torch_derivatives.std,
        torch.cdist: torch_derivatives.cdist,
        torch.pdist: torch_derivatives.pdist,
        torch.cosine_similarity: torch_derivatives.cosine_similarity,
    }.items():
        environment.override_op_definition(operation, on_tensors(function))
    return environment


def adaptive_max_pool(x: Array, output_size: Sequence[int] | int) -> tuple[Array, Array]:
    """The largest value of each window (..., H', W'), and its position in the image; torchax lacks it.

    Window i of n covers positions floor(i H / n) to ceil((i + 1) H / n) - 1, so that windows may overlap.
    """
    *_, height, width = x.shape
    sizes = output_size if isinstance(output_size, Sequence) else (output_size, output_size)
    positions = jnp.arange(height * width).reshape(height, width)

    def bounds(length: int, number: int) -> list[slice]:
        return [slice(i * length // number, -(-(i + 1) * length // number)) for i in range(number)]

    values = []
    indices = []
    for rows in bounds(height, sizes[0] or height):
        for columns in bounds(width, sizes[1] or width):
            window = x[..., rows, columns]
            window = window.reshape(*window.shape[:-2], -1)
            value, index = torch_derivatives.largest(window, -1)
            values.append(value)
            indices.append(positions[rows, columns].reshape(-1)[index])

    def image(entries: list[Array]) -> Array:
        return jnp.stack(entries, axis=-1).reshape(
            *x.shape[:-2], sizes[0] or height, sizes[1] or width
        )

    return image(values), image(indices)


def on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on tensors, from a function of JAX's arrays."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = to_jax((args, kwargs))
        return to_torch(function(*args, **kwargs))

    return run


def layers_of(
    parameters: Sequence[Array], num_layers: int, has_biases: bool
) -> list[torch_recurrent.Weights]:
    """The weights of each layer and direction, from those of all in a row, as PyTorch stores them."""
    number = len(parameters) // num_layers
    layers = []
    for first in range(0, len(parameters), number):
        inputs, states, *others = parameters[first : first + number]
        input_bias, state_bias = others[:2] if has_biases else (0.0, 0.0)
        projections = others[2:] if has_biases else others
        projection = projections[0] if projections else None
        layer = torch_recurrent.Weights(inputs, states, input_bias, state_bias, projection)
        layers.append(layer)
    return layers


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Group normalization with the channels last inside, as convolutions have them: faster on CPUs than torchax's."""
    values = jnp.moveaxis(to_jax(x), 1, -1)
    exact = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    axes = tuple(range(1, values.ndim - 1))
    channels = (len(values), *[1] * len(axes), values.shape[-1])

    def over_groups(means: Array) -> Array:
        """Means (B, C) of channels -> the mean of each one's group, (B, *1, C)."""
        groups = means.reshape(len(means), num_groups, -1)
        group_means = groups.mean(axis=-1, keepdims=True)
        return jnp.broadcast_to(group_means, groups.shape).reshape(channels)

    # The variance does not change with the mean that it is about, nor `offset` in value: the gradients are exact, and
    # two sums over the image are enough for them.
    mean = over_groups(exact.mean(axes))
    fixed_mean = jax.lax.stop_gradient(mean)
    centered = exact - fixed_mean
    var = over_groups(jnp.square(centered).mean(axes))
    scale = jax.lax.rsqrt(var + eps)
    if weight is not None:
        scale = scale * to_jax(weight)
    offset = (fixed_mean - mean) * scale
    if bias is not None:
        offset = offset + to_jax(bias)
    normalized = centered * scale + offset
    return to_torch(jnp.moveaxis(normalized.astype(values.dtype), -1, 1))


ENV = new_environment()
LOCK = (
    threading.RLock()
)  # programs are traced in several threads, but a module has one set of parameters at a time


class TorchNetwork(Network):
    """A PyTorch module.

    Attributes:
        module: The module, or the function that creates one.
        template: A module with the same parameters, whose names and constants are used.
    """

    def __init__(self, module: TorchModule, example: PyTree):
        self.module = module
        self.example = example
        self.fixed = module.is_module
        self.template = new_template(module)
        self._running = copy.deepcopy(self.template)
        constants_to_arrays(self._running)

        # Names in the module, by path in the tree of parameters.
        self.names: dict[Path, str] = {}
        shapes: dict[Path, jax.ShapeDtypeStruct] = {}
        self._constants: dict[str, np.ndarray] = {}
        for name, parameter in self.template.named_parameters():
            if not self.fixed and not parameter.requires_grad:
                self._constants[name] = array_of(parameter)
                continue
            self.names[path_of(name)] = name
            shapes[path_of(name)] = shape_of(parameter)
        written = self._written_buffers()
        for name, buffer in self.template.named_buffers():
            if name in written:
                self.names[path_of(name)] = name
                shapes[path_of(name)] = shape_of(buffer.float() if is_count(name) else buffer)
            else:
                self._constants[name] = array_of(buffer)
        self.shapes = nested(shapes)
        self.statistics = frozenset(map(path_of, written))
        others = self.template.state_dict(keep_vars=True).keys() - set(self.names.values())
        self.constants = frozenset(map(path_of, others))

    def init(self, key: Key) -> Params:
        if self.fixed:
            source: Mapping[str, Any] = dict(self.template.named_parameters())
            arrays = {name: jnp.asarray(array_of(tensor)) for name, tensor in source.items()}
        else:
            arrays = self._created(key)
        leaves = {}
        for path, name in self.names.items():
            value = arrays.get(name)
            if value is None:
                value = jnp.asarray(array_of(self.template.get_buffer(name)))
            leaves[path] = value.astype(by_name(self.shapes)[path].dtype)
        return nested(leaves)

    def _created(self, key: Key) -> dict[str, Array]:
        """The parameters of a new module, whose random numbers depend on the key."""
        with explained("creating a module"), interpreted(key):
            module = self.module.made_of()
            arrays = {}
            for name, parameter in module.named_parameters():
                arrays[name] = to_jax(constant_to_array(parameter))
        return arrays

    def forward(
        self, params: Params, x: PyTree, mode: Mode, around: Around | None = None
    ) -> tuple[Array, Params]:
        key, mask = key_and_mask(mode)
        leaves = by_name(params)
        arrays = {name: leaves[path] for path, name in self.names.items()}
        outputs, buffers = self._run(arrays, x, key, mask, around)
        if key is None:
            return outputs, params
        written = {path: buffers[self.names[path]] for path in self.statistics}
        return outputs, nested(leaves | written)

    def _run(
        self,
        arrays: Mapping[str, Array],
        x: PyTree,
        key: Key | None,
        mask: Array | None = None,
        around: Around | None = None,
    ) -> tuple[Any, dict[str, Array]]:
        """The outputs, and the buffers after the forward pass."""
        with explained("its forward pass"), interpreted(key), torch.enable_grad():
            tensors = to_torch({**self._constants, **arrays})
            self._running.train(key is not None)
            with replacing(self._running, mask, around):
                outputs = torch.func.functional_call(self._running, tensors, (to_torch(x),))
            outputs = to_jax(outputs)
            buffers = {name: to_jax(tensors[name]) for name, _ in self.template.named_buffers()}
        return outputs, buffers

    def _written_buffers(self) -> list[str]:
        """Names of the buffers that a forward pass in training mode writes, but for counts that nothing reads.

        Raises `ArgumentError` if a forward pass reads what an earlier one stored in an attribute.
        """
        arrays = dict(self.template.named_parameters()) | dict(self.template.named_buffers())
        shapes = {name: shape_of(tensor) for name, tensor in arrays.items()}
        names = [name for name, _ in self.template.named_buffers()]
        unread = unread_counts(self.template)
        written: set[str] = set()

        def run(arrays: dict[str, Array], x: PyTree, key: Key) -> Any:
            outputs, buffers = self._run(arrays, x, key)
            written.update(name for name in names if buffers[name] is not arrays[name])
            return jax.tree.map(jnp.asarray, (outputs, buffers))

        inputs = (shapes, self.example, jax.random.key(0))
        jax.make_jaxpr(run)(*inputs)
        stored = stored_tensors(self._running)
        if stored:
            ENV.stored = frozenset(id(tensor.jax()) for tensor in stored)
            try:
                jax.make_jaxpr(functools.partial(run))(*inputs)  # JAX would not trace `run` again
            finally:
                ENV.stored = frozenset()
        return [name for name in names if name in written and name not in unread]

    @property
    def momenta(self) -> list[float]:
        momenta = []
        for inner in self.template.modules():
            if isinstance(inner, _BatchNorm) and inner.momentum is not None:
                momenta.append(1 - inner.momentum)
        return momenta

    def exported(self, params: Params) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        return torch_export.loaded(self.template, params, self.names)


def new_template(module: TorchModule) -> nn.Module:
    """A module of PyTorch's own tensors on the host. Raises `ArgumentError` for what cannot become a `Network`."""
    made_of: Any = module.made_of
    if module.is_module:
        check_module(made_of)
        return copied(made_of).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        new = made_of()
    if not is_torch(new):
        text = f"accepted: a function that returns a torch.nn.Module, not {type(new).__name__}"
        raise ArgumentError("model", text, name_of(module))
    check_module(new)
    return copied(new).cpu()


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module. Tensors that it computes from parameters, as `weight_norm` does, are copied as values."""
    computed = {}
    for inner in module.modules():
        for value in vars(inner).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                computed[id(value)] = value.detach().clone()
    return copy.deepcopy(module, computed)


def check_module(module: nn.Module) -> None:
    """Raises `ArgumentError` for modules without Python code or with parameters that are not there yet."""
    if isinstance(module, torch.jit.ScriptModule):
        text = "is a module of TorchScript; accepted: the nn.Module from which it was made"
        raise ArgumentError("model", text)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            text = f"has lazy layers, so that {name} has no shape yet"
            hint = "accepted: modules that were called with a mini-batch"
            raise ArgumentError("model", f"{text}; {hint}")
        if tensor.is_meta:
            text = (
                f"has {name} on the device meta, without values; accepted: parameters with values"
            )
            raise ArgumentError("model", text)


@contextlib.contextmanager
def interpreted(key: Key | None) -> Iterator[None]:
    """Within this context, PyTorch computes with JAX; its random numbers depend on the key."""
    key = jax.random.key(0) if key is None else key
    with LOCK, warnings.catch_warnings():
        # PyTorch's integers have 64 bits, JAX's 32.
        warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
        # `load_state_dict` warns that tensors of torchax's do not change, but they do.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter", UserWarning)
        on_jax = torch.device("jax")
        with ENV, ENV.override_property(prng=key), on_jax, torch.no_grad(), without_own_gradients():
            yield


@contextlib.contextmanager
def without_own_gradients() -> Iterator[None]:
    """Within this context, a user's `torch.autograd.Function` refuses torchax's tensors.

    JAX would differentiate its `forward`, and never call its `backward`.
    """
    function: Any = torch.autograd.Function
    apply = function.__dict__["apply"]

    def checked_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch.utils.checkpoint":
            # JAX's own rematerialization is not needed here: call the function, or save nothing.
            is_reentrant = cls.__name__ == "CheckpointFunction"
            return args[0](*args[2:]) if is_reentrant else torch.empty(0)
        has_arrays = any(isinstance(tensor, Tensor | View) for tensor in tensors_in((args, kwargs)))
        if has_arrays and not cls.__module__.startswith("torch."):
            text = f"its forward pass uses {cls.__name__}, a torch.autograd.Function with a gradient of its own"
            hint = "accepted: PyTorch's operations, such as x + (f(x) - x).detach()"
            raise ArgumentError("model", f"{text}; {hint}")
        return apply.__func__(cls, *args, **kwargs)

    function.apply = classmethod(checked_apply)
    try:
        yield
    finally:
        function.apply = apply


def to_torch(value: PyTree) -> Any:
    """A tree of arrays as one of torchax's tensors."""

    def convert(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        return Tensor(jnp.asarray(leaf), ENV) if is_array else leaf

    return jax.tree.map(convert, value)


def to_jax(value: Any) -> Any:
    """A tree of torchax's tensors as one of arrays."""

    def convert(leaf: Any) -> Any:
        return leaf.jax() if isinstance(leaf, Tensor | View) else leaf

    return jax.tree.map(convert, value)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns errors of torchax into an `ArgumentError` that says what is not accepted."""
    try:
        yield
    except torchax.tensor.OperatorNotFound as error:
        name = str(error).removeprefix("Operator with name ").removesuffix(" has no lowering")
        text = f"{what} uses the operator {name}, which torchax does not support"
        raise ArgumentError("model", text) from error
    except VALUES_NEEDED as error:
        text = f"{what} depends on the values of tensors in Python, as `if x.sum() > 0` or `x.item()` do"
        hint = "accepted: operations on tensors alone, such as torch.where"
        raise ArgumentError("model", f"{text}; {hint}") from error


@contextlib.contextmanager
def replacing(module: nn.Module, mask: Array | None, around: Around | None) -> Iterator[None]:
    """Within this context, modules inside normalize batches as here, and `around` is called in their place."""
    replaced: list[tuple[nn.Module, Any]] = []
    for name, inner in module.named_modules():
        own = inner.__dict__.get("forward")
        function = inner.forward
        if isinstance(inner, _BatchNorm):
            function = functools.partial(normalize, inner, mask)
        if around is not None:
            function = functools.partial(watched, around, path_of(name), type(inner), function)
        if function is not inner.forward:
            replaced.append((inner, own))
            inner.__dict__["forward"] = function
    try:
        yield
    finally:
        for inner, own in replaced:
            del inner.__dict__["forward"]
            if own is not None:
                inner.__dict__["forward"] = own


def watched(
    around: Around, path: Path, kind: type, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls `around` in place of a module's `forward`, with arrays in place of tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return to_jax(forward(*to_torch(args), **to_torch(kwargs)))

    return to_torch(around(path, kind, run, to_jax(args), to_jax(kwargs)))


def normalize(module: _BatchNorm, mask: Array | None, x: torch.Tensor) -> torch.Tensor:
    """Batch normalization, whose statistics in training mode are those of the real examples.

    Running statistics are r <- (1 - momentum) r + momentum s, where s is the mean, or the variance divided by n - 1;
    the mini-batch itself is normalized by the variance divided by n. With n = 1, s is a variance of 0.
    """
    module._check_input_dim(x)
    values = jnp.moveaxis(to_jax(x), 1, -1)  # as convolutions have them inside
    exact = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    running_mean = module.running_mean
    running_var = module.running_var

    if module.training or running_mean is None or running_var is None:
        mean, var, count = moments(exact, mask)
        if module.training and running_mean is not None and running_var is not None:
            share = momentum_of(module)
            unbiased = var * (count / jnp.maximum(count - 1, 1))
            update(running_mean, mean, share)
            update(running_var, unbiased, share)
    else:
        mean = to_jax(running_mean)
        var = to_jax(running_var)
    scale = jax.lax.rsqrt(var + module.eps)
    if module.weight is not None:
        scale = scale * to_jax(module.weight)
    normalized = (exact - mean) * scale
    if module.bias is not None:
        normalized = normalized + to_jax(module.bias)
    return to_torch(jnp.moveaxis(normalized.astype(values.dtype), -1, 1))


def moments(x: Array, mask: Array | None) -> tuple[Array, Array, Array | float]:
    """Means and variances (C,) of the real examples in x (N, *S, C), and the number of values of each channel.

    N may be several times the number of examples, if x has the positions of each in turn.
    """
    axes = tuple(range(x.ndim - 1))
    if mask is None or len(x) % len(mask):
        mean = x.mean(axes)
        return mean, jnp.square(x - mean).mean(axes), float(math.prod(x.shape[:-1]))
    is_real = jnp.repeat(mask, len(x) // len(mask)).reshape(-1, *[1] * (x.ndim - 1))
    count = jnp.maximum(is_real.sum() * float(math.prod(x.shape[1:-1])), 1)
    mean = jnp.where(is_real, x, 0).sum(axes) / count
    squares = jnp.where(is_real, jnp.square(x - mean), 0)
    return mean, squares.sum(axes) / count, count


def momentum_of(module: _BatchNorm) -> Array | float:
    """The share of the mini-batch in new running statistics."""
    if module.momentum is not None:
        return module.momentum
    # The mean over all steps
    tracked: Any = module.num_batches_tracked
    tracked._elem = to_jax(tracked) + 1
    return 1 / tracked._elem


def update(running: Any, value: Array, share: Array | float) -> None:
    """Moves a running statistic towards a value, in place."""
    old = to_jax(running)
    running._elem = ((1 - share) * old + share * value).astype(old.dtype)


def is_count(name: str) -> bool:
    """Whether a buffer counts steps of batch normalization. Those that are read are averaged, so they are floats."""
    return name.rpartition(".")[2] == COUNT


def unread_counts(module: nn.Module) -> set[str]:
    """Names of batch normalizations' counts of steps that only count."""
    names = set()
    for name, inner in module.named_modules():
        if isinstance(inner, _BatchNorm) and inner.momentum is not None:
            names.add(f"{name}.{COUNT}" if name else COUNT)
    return names


def constants_to_arrays(module: nn.Module) -> None:
    """Replaces tensors that are plain attributes of modules by torchax's."""
    for inner in module.modules():
        for name, value in vars(inner).items():
            if isinstance(value, torch.Tensor):
                inner.__dict__[name] = to_torch(array_of(value))


def stored_tensors(module: nn.Module) -> list[Any]:
    """The tensors of a program that is being traced among modules' attributes."""
    attributes = [vars(inner) for inner in module.modules()]
    tensors: list[Any] = [leaf for leaf in tensors_in(attributes) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if isinstance(tensor.jax(), Tracer)]


def path_of(name: str) -> Path:
    """The path of a parameter or module in the tree of parameters."""
    return tuple(name.split(".")) if name else ()


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor of PyTorch's own as an array of a type that JAX computes in; floats have at least 32 bits."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in HALF:
        tensor = tensor.float()
    array = tensor.numpy()
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def shape_of(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """Shape and type of a tensor's array."""
    array = array_of(tensor)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
