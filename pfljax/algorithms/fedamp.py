"""FedAMP: each client is pulled toward its own cloud model, a mixture of the models most similar to its own.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on non-IID data" (AAAI 2021), with
A(x) = 1 - exp(-x / sigma).

    A round: client k receives u_k and trains w_k toward argmin l_k(w) + strength / 2 |w - u_k|^2;
    xi_kj = a exp(-|w_k - w_j|^2 / sigma) for j != k, xi_kk = 1 - sum_j xi_kj;  u_k <- sum_j xi_kj w_j.

Departures from the paper: `attention` = alpha (K - 1) / sigma, the most that all other clients together can weigh, sets
the paper's step alpha, so a = attention / (K - 1). sigma is in units of the mean squared distance between clients'
models, which varies by orders of magnitude between networks and over rounds. strength stands for lambda / alpha. Local
training starts from u_k. The server keeps the last models of all clients, since it needs those outside the cohort too.
Newcomers train from the mean of all models, regularized toward it, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.one_each import one_for_each
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, First, Params, Prediction, Report, Start
from pfljax.local.problem import OwnModel, Problem

SHOWN = 16  # number of heaviest clients that a run records for each client


class Server(NamedTuple):
    """All clients' last models (K, ...) and xi (K, K)."""

    models: Params
    xi: Array


@method(keeps="its model", travels="a mixture of all models down, its own up")
@dataclasses.dataclass(frozen=True)
class FedAMP:
    """FedAMP (Huang et al., 2021): each client is pulled toward its own cloud model."""

    attention: float = knob(
        0.9,
        at_least=0,
        at_most=1,
        grid=(0.3, 0.6, 0.9),
        help="largest total weight of the other clients' models in a cloud model; 0: none",
    )
    sigma: float = knob(
        0.3,
        above=0,
        grid=(0.1, 0.3, 1.0),
        help="squared distance, relative to the mean, at which attention falls to 1 / e",
    )
    strength: float = knob(
        0.1,
        at_least=0,
        grid=(0.01, 0.1, 1.0),
        help="pull of a client's model toward its cloud model; 0 with attention 0 is Local",
    )

    def build(self, problem: Problem) -> Algorithm:
        num = problem.num_clients
        near = lambda cloud: problem.solver.proximal(cloud, self.strength)

        def start(key, clients):
            models = problem.init_models(key, num)
            return Start(Server(models, jnp.eye(num)), models)

        def client_update(context, models, optimizer, data):
            cloud = tree.first(models)
            own, loss = OwnModel(cloud, optimizer).fit(problem, context, data.train, near(cloud))
            return ClientOutput(own.optimizer, tree.stack_one(own.model), {"loss": loss})

        def server_update(key, state, aggregate):
            models = tree.where(aggregate.count > 0, aggregate.upload, state.server.models)
            xi = attention(problem.plan.gram(centered(problem.solver.trained(models)[0])), self)
            metrics = {"weight_of_others": 1 - jnp.diagonal(xi).mean()}
            return state._replace(server=Server(models, xi), models=problem.plan.mix(xi, models)), metrics

        def adapt(context, models, data):
            mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), context.server.models)
            trained = problem.alone(context, mean, data, rounds=problem.rounds, objective=near(mean))
            return Prediction.one(trained)

        def heaviest(context, row):
            weights, index = jax.lax.top_k(context.server.xi[context.client], min(SHOWN, num))
            return {"index": index.astype(jnp.int32), "weights": weights / weights.sum()}

        return one_for_each(
            sends="models",
            start=start,
            first_row=lambda key, client, start: First(problem.own_model(key, client).optimizer),
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: Prediction(tree.take(context.server.models, context.index)),
            adapt=adapt,
            report=Report(scored="each client's own model", collaboration=heaviest, topology="peers"),
        )


def centered(models: Params) -> Params:
    """Stacked models minus their mean, so that distances between nearby models do not cancel large products."""
    return jax.tree.map(lambda leaf: leaf - leaf.mean(axis=0), models)


def attention(products: Array, knobs: FedAMP) -> Array:
    """(K, K) xi, each row on the simplex, from the inner products (K, K) of the centered models."""
    num, size = products.shape[0], jnp.diagonal(products)
    others = 1 - jnp.eye(num)
    distance = jnp.maximum(size[:, None] + size[None, :] - 2 * products, 0) * others
    unit = distance.sum() / max(num * (num - 1), 1)
    near = jnp.exp(-distance / jnp.maximum(knobs.sigma * unit, jnp.finfo(jnp.float32).tiny))
    weights = knobs.attention / max(num - 1, 1) * near * others
    return weights + jnp.diag(1 - weights.sum(axis=1))
