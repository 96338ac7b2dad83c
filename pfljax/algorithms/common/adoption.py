"""How much of a received model a client adopts in its last layers, parameter by parameter."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.projection import projected
from pfljax.contract import tree
from pfljax.contract.types import Array, ClientContext, Params, PyTree, Split
from pfljax.local.problem import Problem


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
    rate: Any
    epochs: int

    def part(self, params: Params) -> Params:
        """The mixed parameters; None for everything else."""
        model = self.problem.model
        mask, statistics = model.mask(params, self.layers), model.statistics(params)
        mask = mask if statistics is None else jax.tree.map(lambda m, s: m and not s, mask, statistics)
        return tree.partition(params, mask)[0]

    def mix(self, weights: PyTree, own: Params, theta: Params) -> Params:
        """own + (theta - own) * W in the last layers, and theta below."""
        parts = weights, self.part(own), self.part(theta)
        return tree.combine(jax.tree.map(lambda w, mine, shared: mine + (shared - mine) * w, *parts), theta)

    def learn(
        self, context: ClientContext, weights: PyTree, own: Params, theta: Params, split: Split, passes: Array | int
    ) -> PyTree:
        """W after projected steps on a client's loss of the mixed model, in `passes` passes, at most `epochs`."""
        loss = lambda w, x, y, key=None: self.problem.solver.loss(self.mix(w, own, theta), x, y, key)
        descent = projected(optax.sgd(self.rate), lambda moved: jax.tree.map(lambda w: jnp.clip(w, 0, 1), moved))
        solver = self.problem.solver.with_loss(loss).with_epochs(self.epochs)._replace(optimizer=descent)
        steps, start = passes * -(-split.size // solver.batch(split.y.shape[0])), descent.init(weights)
        return solver.fit(context.key, weights, start, split, round_number=context.round, steps=steps)[0]
