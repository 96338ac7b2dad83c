"""Dense layers between Flax and PyTorch, for peers in PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np
import torch
from torch import nn

from pfljax.contract.types import Params


def converted(parameters: Iterable[torch.Tensor], first: int = 0) -> Params:
    """Dense layers' weights and biases in turn, named as in a Flax MLP, from layer `first` on."""
    found = [tensor.detach().numpy().copy() for tensor in parameters]
    layers = zip(found[::2], found[1::2], strict=True)
    return {f"Dense_{number}": {"kernel": w.T, "bias": b} for number, (w, b) in enumerate(layers, first)}


def stacked(modules: Iterable[nn.Module], first: int = 0) -> Params:
    """Several modules' dense layers, with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *[converted(each.parameters(), first) for each in modules])


def load(module: nn.Module, params: Params) -> None:
    """Sets a module's dense layers to a Flax MLP's parameters."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for number, layer in enumerate(layers):
            layer.weight.copy_(torch.from_numpy(params[f"Dense_{number}"]["kernel"].T.copy()))
            layer.bias.copy_(torch.from_numpy(params[f"Dense_{number}"]["bias"]))
