"""FedSAM: FedAvg whose clients take sharpness-aware steps.

Qu, Li, Duan, Liu, Tang, Lu, "Generalized federated learning via sharpness aware minimization" (ICML 2022), with the
steps of Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-aware minimization for efficiently improving generalization"
(ICLR 2021).

    A round: client k receives theta and takes local steps along the gradient of its loss, at each mini-batch taken at
        theta_k + rho g / |g|,  where g is the gradient at theta_k;
    theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: The server's rate is 1. The two gradients of a step have their own dropout, and batch
statistics are written at theta_k. The loss that is reported is the one at theta_k.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger
from pfljax.local.problem import Problem


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedSAM:
    """FedSAM (Qu et al., 2022): FedAvg whose clients take sharpness-aware steps."""

    rho: float = knob(
        0.05, at_least=0, grid=(0.01, 0.05, 0.1, 0.5), help="radius of the ascent before each step; 0 is FedAvg"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        def gradient(params, memory, batch):
            loss, g = jax.value_and_grad(solver.mean_loss)(params, batch(0).of_model(0))
            own, steep = solver.trained(params, g)
            norm = jnp.sqrt(tree.inner(steep, steep))
            ascent = tree.scale(steep, self.rho / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            above = tree.combine(tree.add(own, ascent), params)
            (slope,) = solver.trained(jax.grad(solver.mean_loss)(above, batch(0).of_model(1)))
            return loss, tree.combine(slope, g), memory

        def train(context, models, kept, data):
            return problem.descend(context, models, kept, data.train, gradient)[:3]

        return averaging(problem, train=train, ledger=Ledger(gradients=2))
