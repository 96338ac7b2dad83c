"""Flax modules that standardize their own inputs, as a run's model does with the data that users give.

Their variables are those of the module inside, under the same names, and the collection `SCALING`: the means and
standard deviations of the arrays in x, by the names of these arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.types import Array, PyTree
from pfljax.models.structure import Path, is_flax
from pfljax.models.torch_modules import TorchModule, is_torch

SCALING = "scaling"
# "mean" and "std" -> an array by the name of each scaled array in x
Statistics = Mapping[str, Mapping[str, Any]]


class Standardizing(nn.Module):
    """A Linen module whose inputs are standardized first, by statistics in the collection `SCALING`.

    Attributes:
        standardized_module: The module inside, whose variables it has. No module inside may have this name.
    """

    standardized_module: nn.Module

    def setup(self):
        nn.share_scope(self, self.standardized_module)

    def __call__(self, x: PyTree, *args: Any, **options: Any) -> Any:
        statistics = {name: self.get_variable(SCALING, name) for name in ("mean", "std")}
        return self.standardized_module(standardize(x, statistics), *args, **options)


def standardize(x: PyTree, statistics: Statistics) -> PyTree:
    """(x - mean) / std, float32, of all arrays in x (B, *features) that have statistics; the others stay."""

    def scale(path: Any, leaf: Any) -> Any:
        name = array_name(path)
        if name not in statistics["mean"]:
            return leaf
        centered = jnp.asarray(leaf, jnp.float32) - statistics["mean"][name]
        return centered / statistics["std"][name]

    return jax.tree_util.tree_map_with_path(scale, x)


def array_name(path: Any) -> str:
    """The name of an array in x: keys, fields or positions, joined by "."; "x" if x is a single array."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "x"


def named_statistics(mean: PyTree, std: PyTree) -> dict[str, dict[str, np.ndarray]]:
    """The statistics, by name, of trees like x with None for arrays that are not scaled."""

    def by_name(values: PyTree) -> dict[str, np.ndarray]:
        leaves = jax.tree_util.tree_leaves_with_path(values)
        return {array_name(path): np.asarray(value, np.float32) for path, value in leaves}

    return {"mean": by_name(mean), "std": by_name(std)}


def standardizing(module: Any, variables: Any, statistics: Statistics) -> tuple[Any, Any]:
    """A module and its variables, as `Network.exported` returns them, that standardizes its inputs itself."""
    if isinstance(module, nn.Module):
        scaling = jax.tree.map(jnp.asarray, statistics)
        return Standardizing(module), {**variables, SCALING: scaling}
    if is_torch(module):
        from pfljax.models import torch_export  # imported lazily, since it needs PyTorch

        return torch_export.standardizing(module, statistics)
    from pfljax.models import nnx  # imported lazily, since it is slow

    return nnx.standardizing(module, statistics)


def inside(module: Any) -> tuple[Any, Statistics | None]:
    """The module inside a `standardizing` one, and its statistics if they are in the module; any other as it is."""
    if isinstance(module, Standardizing):
        return module.standardized_module, None
    if isinstance(module, TorchModule):
        made_of: Any = module.made_of
        buffers = made_of.named_buffers(recurse=False) if module.is_module else ()
        if not any(name.startswith(f"{SCALING}/") for name, _ in buffers):
            return module, None
        from pfljax.models import torch_export  # imported lazily, since it needs PyTorch

        unscaled, statistics = torch_export.inside(made_of)
        return TorchModule(unscaled), statistics
    if not is_flax(type(module), {"Module"}) or not hasattr(module, SCALING):
        return module, None
    from pfljax.models import nnx  # imported lazily, since it is slow

    return nnx.inside(module)


def split(values: Mapping[Path, Any]) -> tuple[dict[Path, Any], dict[str, dict[str, Array]]]:
    """Splits variables by path into those of the module inside and the statistics; {} if there are none."""
    variables: dict[Path, Any] = {}
    statistics: dict[str, dict[str, Array]] = {}
    for path, value in values.items():
        if path[0] == SCALING:
            _, statistic, *names = path
            name = "/".join(names).replace(":", ".")  # PyTorch's names of buffers have no "."
            statistics.setdefault(statistic, {})[name] = value
        else:
            variables[path] = value
    return variables, statistics
