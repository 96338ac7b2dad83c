"""Mixtures of several models of one network, as one Flax module.

Its variables are those of its members, stacked along a leading axis under the names that the network gives them, and
the members' weights in the collection `ENSEMBLE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from pfljax.contract.types import Array, PyTree, Task
from pfljax.models.standardizing import SCALING
from pfljax.models.structure import flags
from pfljax.models.torch_modules import is_torch

ENSEMBLE = "ensemble"
WEIGHTS = "weights"


def mixed(
    task: Task, weights: Float[Array, "J ..."], outputs: Float[Array, "J B ..."]
) -> Float[Array, "B ..."]:
    """Outputs whose predictions are the mean of several models' predictions, with weights on the simplex.

    Probabilities are added in logarithms, log sum_j w_j p_j, so that no probability is rounded to 0 or 1. A single
    model's outputs stay as they are.

    Args:
        task: What the outputs mean: logits of classes or labels, or values.
        weights: (J,) w_j; or (J, C) w_jc, of each class.
        outputs: (J, B, ...) outputs of the models.
    """
    if task == "regression":
        return jnp.tensordot(weights, outputs, axes=1)
    if len(outputs) == 1:
        return outputs[0]

    def mean(log_probabilities: Array) -> Array:
        by_class = weights.shape[1:]
        between = [1] * (outputs.ndim - 1 - len(by_class))
        share = weights.reshape(-1, *between, *by_class)
        return jax.nn.logsumexp(log_probabilities, axis=0, b=share)

    if task == "multilabel":
        return mean(jax.nn.log_sigmoid(outputs)) - mean(jax.nn.log_sigmoid(-outputs))
    return mean(jax.nn.log_softmax(outputs))


class Ensemble(nn.Module):
    """A mixture of models of one Linen module, in inference mode.

    The outputs are logits whose softmax (of labels: whose sigmoid) is the weighted mean of the members' predictions,
    or the weighted mean of their values.

    Attributes:
        ensemble_member: The members' module. No module inside may have this name.
        num_members: J.
        task: What the outputs mean.
        drops_last: Whether the last axis of the outputs, of a single value, is dropped.
    """

    ensemble_member: nn.Module
    num_members: int
    task: Task = "classification"
    drops_last: bool = False

    def setup(self) -> None:
        nn.share_scope(self, self.ensemble_member)
        self.weights = self.variable(ENSEMBLE, WEIGHTS, self._equal_weights)

    def __call__(self, x: PyTree) -> Array:
        run_members = nn.vmap(
            _inference,
            in_axes=None,  # pyright: ignore[reportArgumentType]
            variable_axes={nn.DenyList((ENSEMBLE, SCALING)): 0},
            split_rngs={"params": True},
            axis_size=self.num_members,
        )
        outputs = run_members(self.ensemble_member, x)
        if self.drops_last:
            outputs = outputs[..., 0]
        return mixed(self.task, self.weights.value, outputs)

    def _equal_weights(self) -> Array:
        return jnp.full((self.num_members,), 1 / self.num_members)


def _inference(network: nn.Module, x: PyTree) -> Array:
    """The outputs of one member."""
    return network(x, **flags(network, False))


def ensemble(
    exported: Sequence[tuple[Any, Any]], weights: Array, task: Task, drops_last: bool
) -> tuple[Any, Any]:
    """A mixture of models as a module and its variables.

    Args:
        exported: Module and variables of each member, as `Network.exported` returns them.
        weights: (J,) or (J, C) their weights, as in `mixed`.
        task: What their outputs mean.
        drops_last: See `Ensemble`.
    """
    module = exported[0][0]
    if is_torch(module):
        from pfljax.models import torch_export  # imported lazily, since it needs PyTorch

        members = [member for member, _ in exported]
        return torch_export.ensemble(members, weights, task, drops_last)
    if not isinstance(module, nn.Module):
        from pfljax.models import nnx  # imported lazily, since it is slow

        return nnx.ensemble([member for member, _ in exported], weights, task, drops_last)
    members = [variables for _, variables in exported]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    mixture = Ensemble(module, len(members), task, drops_last)
    return mixture, {**stacked, ENSEMBLE: {WEIGHTS: jnp.asarray(weights)}}
