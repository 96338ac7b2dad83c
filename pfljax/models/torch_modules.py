"""PyTorch modules as pfljax's models; this module imports neither PyTorch nor torchax."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pfljax.contract import optional
from pfljax.contract.types import PyTree
from pfljax.models.structure import Network

if TYPE_CHECKING:
    from torch import nn  # pyright: ignore[reportMissingImports]


@dataclasses.dataclass(frozen=True, eq=False)
class TorchModule:
    """A `torch.nn.Module`, which is the initial model, or a function that creates one.

    Attributes:
        made_of: The module; or the function, whose modules have other initial parameters for each random key.
    """

    made_of: nn.Module | Callable[..., nn.Module]

    @property
    def is_module(self) -> bool:
        """Whether this is a module and not a function."""
        return is_torch(self.made_of)


def written_by_user(module: Any) -> Any:
    """What a user's code defines of a model's module: the module, or a function that creates one."""
    return module.made_of if isinstance(module, TorchModule) else module


def name_of(module: Any) -> str:
    """Name of a module's class, or of a function that creates one."""
    module = written_by_user(module)
    while isinstance(module, functools.partial):
        module = module.func
    return str(getattr(module, "__name__", type(module).__name__))


def is_torch(value: Any) -> bool:
    """Whether a value is a PyTorch module."""
    return is_torch_class(type(value))


def is_torch_class(value: Any) -> bool:
    """Whether a value is a class of PyTorch modules."""
    if not inspect.isclass(value):
        return False
    names = {(base.__module__, base.__name__) for base in value.__mro__}
    return ("torch.nn.modules.module", "Module") in names


def wrapped(module: Any) -> Any:
    """A PyTorch module or class of modules as a `TorchModule`; anything else as it is."""
    return TorchModule(module) if is_torch(module) or is_torch_class(module) else module


def trained_names(module: nn.Module) -> list[str] | None:
    """Names of the parameters with gradients, with "/" in place of "."; None: all have them."""
    names = []
    is_all = True
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            names.append(name.replace(".", "/"))
        else:
            is_all = False
    return None if is_all else names


def has_frozen(module: Any) -> bool:
    """Whether a model's module is a PyTorch module in which parameters have no gradients."""
    if not isinstance(module, TorchModule) or not module.is_module:
        return False
    made_of: Any = module.made_of
    return trained_names(made_of) is not None


def network_of(module: TorchModule, example: PyTree) -> Network:
    """The module as a `Network`, given shapes and types of its inputs (B, *features)."""
    return load_torch().TorchNetwork(module, example)


def load_torch() -> Any:
    """The module `pfljax.models.torch_network`, which imports PyTorch and torchax.

    Raises `ArgumentError` if one of these is not installed.
    """
    optional.load("torch", "model")
    if importlib.util.find_spec("torchax") is None:
        optional.load("torchax", "model")  # raises
    from pfljax.models import torch_network

    return torch_network
