"""FedSAM and MoFedSAM: FedAvg whose clients take sharpness-aware steps.

Qu, Li, Duan, Liu, Tang, Lu, "Generalized federated learning via sharpness aware minimization" (ICML 2022), with the
steps of Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-aware minimization for efficiently improving generalization"
(ICLR 2021).

    A round: client k receives theta and takes local steps along s, the gradient of its loss on each mini-batch at
        theta_k + rho g / |g|,  where g is the gradient at theta_k;
    theta <- sum_k n_k theta_k / sum_k n_k.
    MoFedSAM: client k also receives d and steps along v = beta s + (1 - beta) d;
    d <- sum_k n_k v_k / sum_k n_k, where v_k is the mean of v over the client's steps; at first, d = 0.

Departures from the paper: The server's rate is 1. Clients are weighted by n_k. In MoFedSAM, clients send v_k beside
theta_k. With SGD it follows from theta - theta_k, as in the paper; with other optimizers it does not. The two gradients
of a step have their own dropout, and batch statistics are written at theta_k. The loss that is reported is the one at
theta_k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Ledger, Params
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver

RADII = (0.01, 0.05, 0.1, 0.5)


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedSAM:
    """FedSAM (Qu et al., 2022): FedAvg whose clients take sharpness-aware steps."""

    rho: float = knob(0.05, at_least=0, grid=RADII, help="radius of the ascent before each step; 0 is FedAvg")

    def build(self, problem: Problem) -> Algorithm:
        sharp = sharpness_aware(problem.solver, self.rho)

        def train(context, models, kept, data):
            along = lambda params, memory, batch: (*sharp(params, batch), memory)
            return problem.descend(context, models, kept, data.train, along)[:3]

        return averaging(problem, train=train, ledger=Ledger(gradients=2))


@method(keeps="nothing", travels="the global model and the direction of its last update, both ways")
@dataclasses.dataclass(frozen=True)
class MoFedSAM:
    """MoFedSAM (Qu et al., 2022): FedSAM whose clients' steps also follow the last global update."""

    rho: float = knob(0.05, at_least=0, grid=RADII, help="radius of the ascent before each step")
    beta: float = knob(
        0.1, at_least=0, at_most=1, grid=(0.1, 0.5, 0.9), help="weight of the client's own gradient; 1 is FedSAM"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver, sharp = problem.solver, sharpness_aware(problem.solver, self.rho)
        zeros = lambda models: jax.tree.map(jnp.zeros_like, solver.trained(models)[0])

        def client_update(context, models, kept, data):
            received = tree.scale(tree.first(context.server), 1 - self.beta)

            def along(params, total, batch):
                loss, slope = sharp(params, batch)
                own = tree.scale(solver.trained(slope)[0], self.beta)
                mixed = tree.add(own, received)
                return loss, tree.combine(mixed, slope), tree.add(total, mixed)

            start = zeros(tree.first(models))
            trained, kept, losses, total = problem.descend(context, models, kept, data.train, along, start)
            steps = solver.num_steps(data.train.size, problem.n_max)
            mean = tree.scale(total, data.train.size / jnp.maximum(steps, 1))
            upload, sent = aggregation.weighted(tree.subtract(trained, models), data.train.size)
            return ClientOutput(kept, upload | {"direction": tree.stack_one(mean)}, {"loss": losses[0]}, sent)

        def server_update(key, state, aggregate):
            weight, models = aggregate.upload["weight"], aggregation.average(state.models, aggregate)
            mean = tree.scale(aggregate.upload["direction"], 1 / jnp.maximum(weight, 1))
            return state._replace(server=tree.where(weight > 0, mean, state.server), models=models), {}

        functions = {"client_update": client_update, "server_update": server_update}
        return averaging(problem, beside=lambda models, clients: zeros(models), **functions, ledger=Ledger(gradients=2))


def sharpness_aware(solver: Solver, rho: Array | float) -> Callable[..., tuple[Array, Params]]:
    """(params, batch as of `Solver.descend`) -> the loss, and the gradient at the point of ascent."""

    def gradient(params, batch):
        loss, g = jax.value_and_grad(solver.mean_loss)(params, batch(0).of_model(0))
        own, steep = solver.trained(params, g)
        norm = jnp.sqrt(tree.inner(steep, steep))
        ascent = tree.scale(steep, rho / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        above = tree.combine(tree.add(own, ascent), params)
        (slope,) = solver.trained(jax.grad(solver.mean_loss)(above, batch(0).of_model(1)))
        return loss, tree.combine(slope, g)

    return gradient
