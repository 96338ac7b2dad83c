"""How much of a received model a client adopts in its last layers, parameter by parameter."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.projection import projected
from pfljax.contract import tree
from pfljax.contract.types import Array, ClientContext, Mode, Params, PyTree, Split
from pfljax.local.problem import Problem
from pfljax.local.solver import TrainState


class Adoption(NamedTuple):
    """Weights W in [0, 1] by which a client mixes its own last layers with those of a received model theta.

    Attributes:
        problem: The problem of the method.
        layers: Number of last layers that are mixed; their batch statistics, like the layers below, are theta's.
        rate: Learning rate of W.
        epochs: Passes over the examples in which W is learned.
    """

    problem: Problem
    layers: int
    rate: float
    epochs: int

    def part(self, model: Params) -> Params:
        """The mixed parameters of a whole model; None in place of everything else."""
        params, _ = self.problem.solver.without_statistics(model)
        mixed, _ = tree.partition(params, self.problem.model.mask(params, self.layers))
        return mixed

    def first_weights(self, model: Params) -> PyTree:
        """W = 1: a client adopts all of theta."""
        return jax.tree.map(jnp.ones_like, self.part(model))

    def mix(self, weights: PyTree, personal: Params, theta: Params) -> Params:
        """own + (theta - own) * W in the last layers, and theta below; theta is a whole model."""

        def adopt(weight: Array, personal: Array, theta: Array) -> Array:
            return personal + (theta - personal) * weight

        mixed = jax.tree.map(adopt, weights, self.part(personal), self.part(theta))
        return tree.combine(mixed, theta)

    def learn(
        self,
        context: ClientContext,
        weights: PyTree,
        personal: Params,
        theta: Params,
        split: Split,
        passes: Array | int,
    ) -> PyTree:
        """W after steps on a client's loss of the mixed model, in `passes` passes, at most `epochs`.

        W <- clip(W - rate grad l_k(own + (theta - own) * W), 0, 1), the gradient in W.
        """

        def loss(weights: PyTree, x: PyTree, y: Array, mode: Mode = None) -> Array:
            return self.problem.solver.loss(self.mix(weights, personal, theta), x, y, mode)

        def clip(weights: PyTree) -> PyTree:
            return jax.tree.map(lambda weight: jnp.clip(weight, 0, 1), weights)

        optimizer = projected(optax.sgd(self.rate), clip)
        solver = self.problem.solver.with_loss(loss).with_epochs(self.epochs)
        solver = solver._replace(optimizer=optimizer)

        steps_per_pass = -(-split.size // solver.batch(split.y.shape[0]))
        state, _ = solver.fit(
            context.key,
            TrainState(weights, None, optimizer.init(weights)),
            split,
            round_number=context.round,
            num_steps=passes * steps_per_pass,
        )
        return state.params
