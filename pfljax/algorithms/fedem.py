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
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Prediction
from pfljax.local.problem import Problem


@method(keeps="its mixture weights", travels="M components, both ways")
@dataclasses.dataclass(frozen=True)
class FedEM:
    """FedEM (Marfoq et al., 2021): shared components, mixed with each client's own weights."""

    components: int = knob(3, at_least=1, grid=(2, 3, 4, 5), groups=True, help="M, number of components; 1 is FedAvg")
    newcomer_steps: int = knob(1, at_least=1, help="number of E-steps a newcomer takes to find its mixture weights")

    def build(self, problem: Problem) -> Algorithm:
        return surrogates.client_server(problem, mixture(problem, self.components, self.newcomer_steps))


@method(keeps="M components, its mixture weights", travels="M components, to and from each neighbor in the graph")
@dataclasses.dataclass(frozen=True)
class DFedEM(FedEM, CommunicationGraph):
    """D-FedEM (Marfoq et al., 2021): FedEM without a server, over a communication graph."""

    def build(self, problem: Problem) -> Algorithm:
        return surrogates.decentralized(problem, mixture(problem, self.components, self.newcomer_steps), self)


def mixture(problem: Problem, num: int, newcomer_steps: int) -> surrogates.Surrogate:
    """EM's surrogate of the negative log-likelihood f_k (Eq. 6): u holds the components, v is pi_k."""

    def minimize(context, models, pi, split):
        losses = problem.plan.over_models(lambda p: problem.solver.losses_of_examples(p, split), models)  # (M, n_max)
        inside = jnp.arange(losses.shape[1]) < split.size

        def negative_log_likelihood(pi):
            joint = jnp.log(pi)[:, None] - losses
            log_p = jax.nn.logsumexp(joint, axis=0)
            return joint - log_p, -jnp.where(inside, log_p, 0).sum()  # Eq. 6, for this client

        log_q, before = negative_log_likelihood(pi)
        q = jnp.where(inside, jnp.exp(log_q), 0)  # Eq. 8; Alg. 1, l. 5
        pi = jnp.where(split.size > 0, q.sum(axis=1) / jnp.maximum(split.size, 1), pi)  # Eq. 9; l. 6
        return pi, q, {"negative_log_likelihood": before, "delta_pi": before - negative_log_likelihood(pi)[1]}

    return surrogates.Surrogate(
        num_models=num,
        init=lambda models: jnp.full((num,), 1 / num, jnp.float32),
        minimize=minimize,
        loss=lambda params, batch, q: problem.solver.mean_loss(params, batch, q),  # l. 7
        predict=lambda pi: Prediction(weights=pi),  # Eq. 5
        scored="each client's mixture of the components",
        newcomer_steps=newcomer_steps,
    )
