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

import jax.numpy as jnp

from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Params,
    PyTree,
    Trained,
)
from pfljax.local.problem import Problem, SlopeFunction
from pfljax.local.solver import Slope
from pfljax.settings.method import hyperparameter, method

RADII = (0.01, 0.05, 0.1, 0.5)


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedSAM:
    """FedSAM (Qu et al., 2022): FedAvg whose clients take sharpness-aware steps.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedSAM(rho=0.1)
        FedSAM(rho=0.1)
    """

    rho: float = hyperparameter(
        0.05, at_least=0, grid=RADII, help="radius of the ascent before each step; 0 is FedAvg"
    )

    def build(self, problem: Problem) -> Algorithm:
        def direction(
            slope_at: SlopeFunction, params: Params, memory: PyTree
        ) -> tuple[Slope, PyTree]:
            return sharpness_aware_slope(slope_at, params, self.rho), memory

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            trained, _ = problem.descend(context, models, data.train, direction)
            return trained

        return averaging(problem, train=train, ledger=Ledger(gradients=2))


@method(keeps="nothing", travels="the global model and the direction of its last update, both ways")
@dataclasses.dataclass(frozen=True)
class MoFedSAM:
    """MoFedSAM (Qu et al., 2022): FedSAM whose clients' steps also follow the last global update.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.MoFedSAM(rho=0.1, beta=0.5)
        MoFedSAM(rho=0.1, beta=0.5)
    """

    rho: float = hyperparameter(
        0.05, at_least=0, grid=RADII, help="radius of the ascent before each step"
    )
    beta: float = hyperparameter(
        0.1,
        at_least=0,
        at_most=1,
        grid=(0.1, 0.5, 0.9),
        help="weight of the client's own gradient; 1 is FedSAM",
    )

    def build(self, problem: Problem) -> Algorithm:
        def first_server(key: Key, params: Params, clients: ClientData) -> Params:
            """d = 0. The server's state is d."""
            return problem.zero_params()

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            # v = beta s + (1 - beta) d; along the way, sum the v.
            received = tree.scale(context.server, 1 - self.beta)

            def direction(
                slope_at: SlopeFunction, params: Params, total: Params
            ) -> tuple[Slope, Params]:
                slope = sharpness_aware_slope(slope_at, params, self.rho)
                v = tree.add(tree.scale(slope.gradient, self.beta), received)
                return slope._replace(gradient=v), tree.add(total, v)

            trained, total = problem.descend(
                context, models, data.train, direction, problem.zero_params()
            )

            # n_k v_k, where v_k is the mean of v over the steps.
            num_steps = problem.solver.num_steps(data.train.size, problem.n_max)
            v_sum = tree.scale(total, data.train.size / jnp.maximum(num_steps, 1))
            return trained._replace(sums={"direction": v_sum})

        def server_step(received: Received, d: Params) -> ServerStep:
            # d <- sum_k n_k v_k / sum_k n_k
            mean = tree.scale(received.sums["direction"], 1 / jnp.maximum(received.weight, 1))
            return ServerStep(server=tree.where(received.weight > 0, mean, d))

        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=2),
            first_server=first_server,
            server_step=server_step,
        )


def sharpness_aware_slope(slope_at: SlopeFunction, params: Params, rho: float) -> Slope:
    """The slope at theta, with s in place of its gradient: the gradient at theta + rho g / |g|."""
    slope = slope_at(params)
    norm = jnp.sqrt(tree.inner(slope.gradient, slope.gradient))
    step_size = rho / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
    above = tree.add(params, tree.scale(slope.gradient, step_size))
    return slope._replace(gradient=slope_at(above, number=1).gradient)
