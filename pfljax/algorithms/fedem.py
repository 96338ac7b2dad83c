"""FedEM and D-FedEM: every client's distribution is a mixture of M shared ones.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a mixture of distributions" (NeurIPS 2021),
Algorithm 1 and Section 3.3; both are instances of federated surrogate optimization (`common.surrogates`).

    A round: client k receives the components theta_1..theta_M and, on all its training data,
    q_k(i, m) ~ pi_k[m] exp(-l(theta_m; s_i))                    (Eq. 8; l. 5)
    pi_k[m] = mean_i q_k(i, m)                                   (Eq. 9; l. 6)
    theta_{m,k} = local SGD from theta_m on sum_i q_k(i, m) l    (l. 7)
    FedEM: theta_m = sum_k n_k theta_{m,k} / n                   (l. 10)
    D-FedEM: client k has components of its own, and theta_{m,k} = sum_i W[k, i] theta_{m,i}.

A client predicts with sum_m pi_k[m] p(y | x, theta_m) (Eq. 5). A newcomer takes one E-step and one step of Eq. 9 from
equal weights. Logged with every evaluation, for the last round's components as they were received: f (Eq. 6) and
Delta_Pi f (Theorem 3.2), what the new pi alone improve f by.

Departures from the paper: local optimizers start afresh in every round, unless they are to be kept
(`Problem.keep_optimizer`), as in the authors' code. With client sampling, the server averages over the cohort.
Decentralized clients count alike in D-FedEM's averages, whatever their n_k, and a newcomer uses the mean over clients
of each component.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import graphs, surrogates
from pfljax.core.types import Algorithm, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class FedEMConfig:
    """FedEM's knobs.

    Attributes:
        components: M, the underlying distributions
    """

    components: int = 3


@dataclasses.dataclass(frozen=True)
class DFedEMConfig:
    """D-FedEM's knobs.

    Attributes:
        components: M, the underlying distributions
        graph: who mixes with whom
        edge_probability: of erdos_renyi
        degree: of random_regular
        edge_file: of the graph file: a line "i j" for each edge, clients from 0
        graphs: how many graphs are drawn and used in turn, round after round (erdos_renyi, random_regular)
        mixing: the mixing matrix W on the graph
        mixing_file: of the mixing file: K x K numbers (.npy or text), which say the graph too
        graph_seed: decides the random graphs
    """

    components: int = 3
    graph: Literal["erdos_renyi", "ring", "torus", "random_regular", "complete", "file"] = "erdos_renyi"
    edge_probability: float = 0.5
    degree: int = 4
    edge_file: str = ""
    graphs: int = 1
    mixing: Literal["metropolis", "fastest", "file"] = "metropolis"
    mixing_file: str = ""
    graph_seed: int = 0


def fedem(problem: Problem, config: FedEMConfig) -> Algorithm:
    """FedEM (Algorithm 1)."""
    return surrogates.client_server(problem, mixture(problem, config.components, "--fedem."))


def dfedem(problem: Problem, config: DFedEMConfig) -> Algorithm:
    """D-FedEM (Section 3.3)."""
    prefix = "--dfedem."
    mixing = graphs.make_mixing(
        problem.num_clients,
        graph=config.graph,
        edge_probability=config.edge_probability,
        degree=config.degree,
        edge_file=config.edge_file,
        num_graphs=config.graphs,
        mixing=config.mixing,
        mixing_file=config.mixing_file,
        seed=config.graph_seed,
        prefix=prefix,
    )
    return surrogates.decentralized(problem, mixture(problem, config.components, prefix), mixing)


def mixture(problem: Problem, num: int, prefix: str) -> surrogates.Surrogate:
    """EM's surrogate of the negative log-likelihood f_k (Eq. 6): u are the components, v is pi_k."""
    if num < 1 or (problem.n_min is not None and num > problem.n_min):
        most = f"to {problem.n_min}, the examples of the smallest client" if problem.n_min is not None else "or more"
        raise UsageError(f"{prefix}components={num}: accepted: 1 {most}")

    def init(models):
        return jnp.full((num,), 1 / num, jnp.float32)

    def minimize(turn, models, pi, split):
        losses = problem.plan.over_models(lambda p: problem.solver.losses_of_examples(p, split), models)  # (M, n_max)
        inside = jnp.arange(losses.shape[1]) < split.size

        def negative_log_likelihood(pi):
            joint = jnp.log(pi)[:, None] - losses
            log_p = jax.nn.logsumexp(joint, axis=0)
            return joint - log_p, -jnp.where(inside, log_p, 0).sum()  # Eq. 6, for this client

        log_q, before = negative_log_likelihood(pi)
        q = jnp.where(inside, jnp.exp(log_q), 0)  # Eq. 8; Alg. 1, l. 5
        pi = jnp.where(split.size > 0, q.sum(axis=1) / jnp.maximum(split.size, 1), pi)  # Eq. 9; l. 6
        _, after = negative_log_likelihood(pi)
        return pi, q, {"negative_log_likelihood": before, "delta_pi": before - after}

    def loss(params, batch, q):
        return problem.solver.mean_loss(params, batch, q)  # l. 7

    scored = "each client's mixture of the components"
    return surrogates.Surrogate(num, init, minimize, loss, surrogates.with_weights, scored)  # Eq. 5
