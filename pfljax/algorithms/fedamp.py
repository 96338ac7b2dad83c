"""FedAMP: each client is pulled toward its own cloud model, a mixture of the models most similar to its own.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on non-IID
data" (AAAI 2021), with A(x) = 1 - exp(-x / sigma).

    A round: client k receives u_k and trains w_k toward
        argmin l_k(w) + mu / 2 |w - u_k|^2;
    xi_kj = a exp(-|w_k - w_j|^2 / sigma) for j != k, xi_kk = 1 - sum_j xi_kj;
    u_k <- sum_j xi_kj w_j.  Client k predicts with w_k.

Departures from the paper: `attention` = alpha (K - 1) / sigma, the most that all other clients
together can weigh, sets the paper's step alpha, so a = attention / (K - 1). sigma is in units of the
mean squared distance between clients' models, which varies by orders of magnitude between networks
and over rounds. mu stands for lambda / alpha. Local training starts from u_k. The server keeps
the last models of all clients, since it needs those outside the cohort too. Newcomers train from the
mean of all models, regularized toward it, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.one_each import one_for_each
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    First,
    Key,
    MethodReport,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Objective, Personal, Problem
from pfljax.settings.method import hyperparameter, method

SHOWN = 16  # number of heaviest clients that a run records for each client


class Server(NamedTuple):
    """What the server keeps beside the cloud models u_k.

    Attributes:
        models: w_k, all clients' last models (K, ...).
        xi: (K, K).
    """

    models: Params
    xi: Array


@method(keeps="its model", travels="a mixture of all models down, its own up")
@dataclasses.dataclass(frozen=True)
class FedAMP:
    """FedAMP (Huang et al., 2021): each client is pulled toward its own cloud model.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedAMP(attention=0.6)
        FedAMP(attention=0.6, sigma=0.3, mu=0.1)
    """

    attention: float = hyperparameter(
        0.9,
        at_least=0,
        at_most=1,
        grid=(0.3, 0.6, 0.9),
        help="largest total weight of the other clients' models in a cloud model; 0: none",
    )
    sigma: float = hyperparameter(
        0.3,
        above=0,
        grid=(0.1, 0.3, 1.0),
        help="squared distance, relative to the mean, at which attention falls to 1 / e",
    )
    mu: float = hyperparameter(
        0.1,
        at_least=0,
        grid=(0.01, 0.1, 1.0),
        help="pull of a client's model toward its cloud model; 0 with attention 0 is Local",
        former="strength",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_clients = problem.num_clients
        solver = problem.solver

        # ---- The client.

        def near(cloud: Params) -> Objective:
            """l_k(w) + mu / 2 |w - u_k|^2."""

            def objective(params: Params, batch: Batch) -> Array:
                distance = solver.squared_distance(params, cloud)
                return solver.mean_loss(params, batch) + self.mu / 2 * distance

            return objective

        def first_row(key: Key, client: Array, start: Start) -> First:
            """A client's row is its optimizer's state."""
            return First(problem.init_personal(key, client).opt_state)

        def client_update(
            context: ClientContext, models: Params, opt_state: PyTree, data: ClientData
        ) -> ClientOutput:
            cloud = tree.first(models)
            personal, loss = problem.fit_personal(
                context, Personal(cloud, opt_state), data.train, near(cloud)
            )
            return ClientOutput(
                row=personal.opt_state,
                upload=Upload(tree.stack_one(personal.params)),
                report=ClientReport(loss),
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            models = problem.init_models(key, num_clients)
            return Start(Server(models, xi=jnp.eye(num_clients)), models)

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            server: Server = state.server.state
            models = tree.where(aggregate.num_sent > 0, aggregate.upload.update, server.models)

            # xi_kj = a exp(-|w_k - w_j|^2 / sigma) for j != k, xi_kk = 1 - sum_j xi_kj
            params, _ = solver.without_statistics(models)
            xi = attention(problem.plan.gram(centered(params)), self)

            # u_k <- sum_j xi_kj w_j
            cloud_models = problem.plan.mix(xi, models)
            state = state.with_server(Server(models, xi)).with_models(cloud_models)
            return state, {"weight_of_others": 1 - jnp.diagonal(xi).mean()}

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, models: Params, opt_state: PyTree, data: ClientData
        ) -> Prediction:
            return Prediction(tree.take(context.server.models, context.index))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), context.server.models)
            return Prediction.single(problem.train_newcomer(context, data, near(mean), start=mean))

        def heaviest(context: ClientContext, opt_state: PyTree) -> Mapping[str, Array]:
            num_shown = min(SHOWN, num_clients)
            weights, index = jax.lax.top_k(context.server.xi[context.client], num_shown)
            return {"index": index.astype(jnp.int32), "weights": weights / weights.sum()}

        return one_for_each(
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            adapt=adapt,
            report=MethodReport(
                scored="each client's own model",
                collaboration=heaviest,
                topology=Topology.PEERS,
            ),
            sends="models",
        )


def centered(models: Params) -> Params:
    """Stacked models minus their mean, so that distances between nearby models do not cancel large products."""
    return jax.tree.map(lambda leaf: leaf - leaf.mean(axis=0), models)


def attention(products: Array, hyperparameters: FedAMP) -> Array:
    """(K, K) xi, each row on the simplex, from the inner products (K, K) of the centered models."""
    num_clients = products.shape[0]
    is_other = 1 - jnp.eye(num_clients)

    # |w_k - w_j|^2, and sigma in units of its mean
    square = jnp.diagonal(products)
    distance = square[:, None] + square[None, :] - 2 * products
    distance = jnp.maximum(distance, 0) * is_other
    mean_distance = distance.sum() / max(num_clients * (num_clients - 1), 1)
    sigma = jnp.maximum(hyperparameters.sigma * mean_distance, jnp.finfo(jnp.float32).tiny)

    # a exp(-|w_k - w_j|^2 / sigma), a = attention / (K - 1)
    a = hyperparameters.attention / max(num_clients - 1, 1)
    weights = a * jnp.exp(-distance / sigma) * is_other
    return weights + jnp.diag(1 - weights.sum(axis=1))
