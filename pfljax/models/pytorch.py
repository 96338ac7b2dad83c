"""`from_torch`: PyTorch modules as models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pfljax.contract.errors import ArgumentError
from pfljax.models.model import Model
from pfljax.models.torch_modules import (
    TorchModule,
    is_torch,
    is_torch_class,
    load_torch,
    trained_names,
)

if TYPE_CHECKING:
    from torch import nn  # pyright: ignore[reportMissingImports]


def from_torch(
    module: nn.Module | Callable[..., nn.Module],
    *,
    trainable: Any = (),
    frozen_dtype: str = "float32",
) -> Model:
    """Makes a model from a PyTorch module, which torchax turns into a function of its parameters.

    The module stays as it is. Inputs reach it as you have them, so images keep their channels first. Training calls
    it in training mode, predictions in evaluation mode; dropout and other random numbers depend on the client's key.
    Buffers that training writes, such as batch statistics, are sent and averaged like parameters; the others are
    constants.

    Args:
        module: A module, whose parameters are the initial model of all clients. Or a class of modules or a function
            that creates one, whose argument may be the number of classes. It is called with random numbers from
            JAX's keys, so that independent initial models have the distributions that the module's code draws from.
            Parameters without `requires_grad` are constants there.
        trainable: With a module, what is trained of it: regular expressions on names of parameters, with "/" in place
            of ".", or adapters such as `pfl.adapters.lora(rank=8)`, one or several. All else is stored once for all
            clients and never sent. (): the parameters with `requires_grad`.
        frozen_dtype: Data type of the parameters that are not trained, "float32" or "bfloat16".

    Returns:
        A model; pass it to `pfl.Run` as it is. Passing the module itself does the same.

    Raises:
        ArgumentError: if `module` is something else, nothing of it is trained, or PyTorch or torchax is not installed
            (the extra `torch`).

    Examples:
        >>> import numpy as np
        >>> import pfljax as pfl
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
        >>> model = pfl.models.from_torch(network)
        >>> images = np.random.default_rng(0).normal(size=(40, 1, 6, 6))
        >>> clients = pfl.Federation.from_arrays(
        ...     images, np.arange(40) % 2, client=np.arange(40) // 10, channels_first=True
        ... )
        >>> result = pfl.Run(pfl.FedAvg(), clients, model).train(2, progress=False)
        >>> module, state = result.export(client=1)
        >>> type(module).__name__, state["3.weight"].shape
        ('Sequential', torch.Size([2, 64]))
    """
    is_module = is_torch(module)
    if not is_module and not is_torch_class(module) and not callable(module):
        text = "accepted: a torch.nn.Module, a class of modules, or a function that returns one"
        raise ArgumentError("module", text, type(module).__name__)
    load_torch()
    torch_module = TorchModule(module)
    if not is_module:
        if trainable:
            text = "accepted for a module with its weights, not for a class or function"
            raise ArgumentError("trainable", text)
        return Model(torch_module)

    model = Model(torch_module)
    if not trainable:
        return with_frozen(model, frozen_dtype, "module")
    values = module.state_dict()
    return Model(torch_module, frozen=values, trainable=trainable, frozen_dtype=frozen_dtype)


def with_frozen(model: Model, frozen_dtype: str = "float32", argument: str = "model") -> Model:
    """A model whose frozen parameters are those of its PyTorch module without gradients; any other as it is.

    Raises:
        ArgumentError: if the module has parameters, but none with gradients.
    """
    torch_module = model.module
    is_module = isinstance(torch_module, TorchModule) and torch_module.is_module
    if not is_module or model.frozen is not None:
        return model
    module: Any = torch_module.made_of
    trained = trained_names(module)
    if trained is None:
        return model
    if not trained:
        text = "has no parameter with requires_grad, so nothing would be trained"
        raise ArgumentError(argument, text)
    return dataclasses.replace(
        model,
        frozen=module.state_dict(),
        trainable=[f"^{re.escape(name)}$" for name in trained],
        frozen_dtype=frozen_dtype,
    )
