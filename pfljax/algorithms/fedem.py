"""FedEM and D-FedEM: every client's distribution is a mixture of M shared distributions.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a mixture of distributions" (NeurIPS 2021),
Algorithm 1 and Section 3.3; both are instances of federated surrogate optimization (`common.surrogates`).

    A round: client k receives the components theta_1..theta_M and computes, on all its training data,
    q_k(i, m) ~ pi_k[m] exp(-l(theta_m; s_i))                    (Eq. 8; l. 5)
    pi_k[m] = mean_i q_k(i, m)                                   (Eq. 9; l. 6)
    theta_{m,k} = local SGD from theta_m on sum_i q_k(i, m) l    (l. 7)
    FedEM: theta_m = sum_k n_k theta_{m,k} / n (l. 10); D-FedEM: client k's own theta_m = sum_i W[k, i] theta_{m,i}.

A client predicts with sum_m pi_k[m] p(y | x, theta_m) (Eq. 5). Every evaluation logs, for the components that the last
round received, f (Eq. 6) and Delta_Pi f (Theorem 3.2), the improvement in f from the new pi alone.

Departures from the paper: The server averages over the cohort. Newcomers take their steps of Eq. 8 and 9 after
training, where the authors' code takes one at every evaluation. D-FedEM's averages weight clients equally; newcomers
use each component's mean over clients, and clients keep a share W[k, k] of their own update (in that code, none).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import surrogates
from pfljax.algorithms.common.communication import CommunicationGraph
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    Metrics,
    Params,
    Prediction,
    Split,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="its mixture weights", travels="M components, both ways")
@dataclasses.dataclass(frozen=True)
class FedEM:
    """FedEM (Marfoq et al., 2021): shared components, mixed with each client's own weights.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedEM(components=4)
        FedEM(components=4, newcomer_steps=1)
    """

    components: int = hyperparameter(
        3, at_least=1, grid=(2, 3, 4, 5), groups=True, help="M, number of components; 1 is FedAvg"
    )
    newcomer_steps: int = hyperparameter(
        1, at_least=1, help="number of E-steps a newcomer takes to find its mixture weights"
    )

    def build(self, problem: Problem) -> Algorithm:
        surrogate = mixture(problem, self.components, self.newcomer_steps)
        return surrogates.client_server(problem, surrogate)


@method(
    keeps="M components, its mixture weights",
    travels="M components, to and from each neighbor in the graph",
)
@dataclasses.dataclass(frozen=True)
class DFedEM(FedEM, CommunicationGraph):
    """D-FedEM (Marfoq et al., 2021): FedEM without a server, over a communication graph.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.DFedEM(graph="ring", components=2)
        DFedEM(graph='ring', edge_probability=0.5, degree=4, edge_file='', graphs=1,
               mixing='metropolis', mixing_file='', graph_seed=0, components=2,
               newcomer_steps=1)
    """

    def build(self, problem: Problem) -> Algorithm:
        surrogate = mixture(problem, self.components, self.newcomer_steps)
        return surrogates.decentralized(problem, surrogate, graph=self)


def mixture(problem: Problem, num_components: int, newcomer_steps: int) -> surrogates.Surrogate:
    """EM's surrogate of the negative log-likelihood f_k (Eq. 6): u holds the components, v is pi_k."""
    solver = problem.solver

    def init(models: Params) -> Array:
        return jnp.full((num_components,), 1 / num_components, jnp.float32)

    def minimize(
        context: ClientContext, models: Params, pi: Array, split: Split
    ) -> tuple[Array, Array, Metrics]:
        """The E-step: pi_k, the responsibilities q_k (M, n_max), and what is logged."""

        def losses_of(params: Params) -> Array:
            return solver.losses_of_examples(params, split)

        losses = problem.plan.over_models(losses_of, models)
        is_real = jnp.arange(losses.shape[1]) < split.size

        def log_posterior(pi: Array) -> tuple[Array, Array]:
            """log q_k (M, n_max), and the client's sum in f (Eq. 6)."""
            joint = jnp.log(pi)[:, None] - losses
            log_p = jax.nn.logsumexp(joint, axis=0)
            return joint - log_p, -jnp.where(is_real, log_p, 0).sum()

        # q_k(i, m) ~ pi_k[m] exp(-l(theta_m; s_i))  (Eq. 8; l. 5).
        log_q, before = log_posterior(pi)
        q = jnp.where(is_real, jnp.exp(log_q), 0)

        # pi_k[m] = mean_i q_k(i, m)  (Eq. 9; l. 6).
        mean_q = q.sum(axis=1) / jnp.maximum(split.size, 1)
        pi = jnp.where(split.size > 0, mean_q, pi)

        # Delta_Pi f of Theorem 3.2.
        _, after = log_posterior(pi)
        return pi, q, {"negative_log_likelihood": before, "delta_pi": before - after}

    def loss(params: Params, batch: Batch, q: Array) -> Array:
        """sum_i q_k(i, m) l, divided by the number of examples (l. 7)."""
        return solver.mean_loss(params, batch, q)

    def predict(pi: Array) -> Prediction:
        """sum_m pi_k[m] p(y | x, theta_m)  (Eq. 5)."""
        return Prediction(weights=pi)

    return surrogates.Surrogate(
        num_models=num_components,
        init=init,
        minimize=minimize,
        loss=loss,
        predict=predict,
        scored="each client's mixture of the components",
        newcomer_steps=newcomer_steps,
    )
