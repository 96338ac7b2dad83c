"""PyTorch modules that a run leaves behind: with a client's parameters, its inputs' scaling, and as mixtures.

They compute with PyTorch alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

from pfljax.contract.types import Array, Params, PyTree, Task
from pfljax.models.standardizing import SCALING, Statistics, array_name
from pfljax.models.structure import Path, by_name

StateDict = dict[str, torch.Tensor]


def loaded(
    module: nn.Module, params: Params, names: Mapping[Path, str]
) -> tuple[nn.Module, StateDict]:
    """A copy of a module with other parameters, in evaluation mode, and its state dict.

    Args:
        module: The module.
        params: Parameters and statistics.
        names: Their names in the module, by path.
    """
    module = copy.deepcopy(module).eval()
    leaves = by_name(params)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for path, name in names.items():
            tensors[name].copy_(torch.from_numpy(np.array(leaves[path], np.float32)))
    return module, module.state_dict()


class Standardize:
    """A hook that standardizes a module's inputs before its forward pass, by the statistics in its buffers."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        buffers = dict(module.named_buffers(recurse=False))

        def scale(path: Any, leaf: torch.Tensor) -> torch.Tensor:
            name = array_name(path)
            mean = buffers.get(buffer_name("mean", name))
            if mean is None:
                return leaf
            return (leaf.to(mean.dtype) - mean) / buffers[buffer_name("std", name)]

        return (jax.tree_util.tree_map_with_path(scale, x), *rest)


def buffer_name(statistic: str, array: str) -> str:
    """Name of the buffer with a statistic of an array in x. No buffer's name may have a "."."""
    return f"{SCALING}/{statistic}/{array.replace('.', ':')}"


def standardizing(module: nn.Module, statistics: Statistics) -> tuple[nn.Module, StateDict]:
    """The module, which from now on standardizes its inputs, and its state dict; see `models.standardizing`."""
    for statistic, values in statistics.items():
        for array, value in values.items():
            tensor = torch.from_numpy(np.array(value, np.float32))
            module.register_buffer(buffer_name(statistic, array), tensor)
    module.register_forward_pre_hook(Standardize())
    return module, module.state_dict()


def inside(module: nn.Module) -> tuple[nn.Module, dict[str, dict[str, np.ndarray]]]:
    """A copy of the module as it was before `standardizing`, and its statistics."""
    module = copy.deepcopy(module)
    statistics: dict[str, dict[str, np.ndarray]] = {}
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name.startswith(f"{SCALING}/"):
            _, statistic, array = name.split("/", 2)
            statistics.setdefault(statistic, {})[array.replace(":", ".")] = buffer.numpy()
            delattr(module, name)
    hooks = module._forward_pre_hooks
    for number, hook in list(hooks.items()):
        if isinstance(hook, Standardize):
            del hooks[number]
    return module, statistics


class Ensemble(nn.Module):
    """A mixture of modules; see `models.ensembles.Ensemble`.

    Attributes:
        members: The modules.
        weights: (J,) or (J, C) their weights.
    """

    weights: torch.Tensor

    def __init__(
        self, members: Sequence[nn.Module], weights: Array, task: Task, drops_last: bool
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer("weights", torch.from_numpy(np.array(weights, np.float32)))
        self.task: Task = task
        self.drops_last = drops_last

    def forward(self, x: PyTree) -> torch.Tensor:
        outputs = torch.stack([member(x) for member in self.members])
        if self.drops_last:
            outputs = outputs[..., 0]
        if self.task == "regression":
            return torch.tensordot(self.weights, outputs, dims=1)
        if self.task == "multilabel":
            log_sigmoid = nn.functional.logsigmoid
            return self._mean(log_sigmoid, outputs) - self._mean(log_sigmoid, -outputs)
        return self._mean(lambda values: values.log_softmax(-1), outputs)

    def _mean(
        self, log_probabilities: Callable[[torch.Tensor], torch.Tensor], outputs: torch.Tensor
    ) -> torch.Tensor:
        """The logarithm of the members' mean probabilities."""
        by_class = self.weights.shape[1:]
        between = [1] * (outputs.ndim - 1 - len(by_class))
        share = self.weights.reshape(len(self.weights), *between, *by_class)
        return torch.logsumexp(log_probabilities(outputs) + share.log(), dim=0)


def ensemble(
    members: Sequence[nn.Module], weights: Array, task: Task, drops_last: bool
) -> tuple[nn.Module, StateDict]:
    """A mixture of models as a module and its state dict; see `models.ensembles.ensemble`."""
    module = Ensemble(members, weights, task, drops_last).eval()
    return module, module.state_dict()
