"""MOCHA: multi-task learning of linear models or last layers, along with the relationship between clients.

Smith, Chiang, Sanjabi, Talwalkar, "Federated multi-task learning" (NeurIPS 2017), with the task
relationship of Zhang and Yeung, "A convex formulation for learning task relationships in multi-task
learning" (UAI 2010):

    min over W, Omega of  sum_k l_k(w_k) + mu / 2 tr(W' Omega^-1 W),
        Omega positive, tr Omega = 1.

    At first Omega = I / K.
    A round: client k receives u_k = sum_{j != k} (Omega^-1)_kj w_j and (Omega^-1)_kk;
    w_k takes local steps on the part of the objective that depends on it, with the other w_j fixed,
        l_k(w_k) + mu / 2 ((Omega^-1)_kk |w_k|^2 + 2 w_k . u_k);  client k sends w_k;
    the server: Omega <- (W W')^(1/2) / tr (W W')^(1/2), which minimizes the objective in Omega
        (Zhang & Yeung).
    Client k predicts with w_k.

W is a whole linear model, or a network's last layer, as in FedFomo's comparison; the layers below
stay with their client.

Departures from the paper: Local steps are the solver's steps on the model's own loss, not dual
coordinate ascent on a hinge loss. This loss is a mean over examples, while the paper has a sum.
`ridge` is added to Omega before it is inverted. Newcomers train alone.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

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
    Start,
    State,
    Upload,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Personal, Problem
from pfljax.settings.method import hyperparameter, method


class Pull(NamedTuple):
    """What client k receives; on the server, stacked over all K clients.

    Attributes:
        others: u_k = sum_{j != k} (Omega^-1)_kj w_j, the pull of the other clients' weights.
        own: () (Omega^-1)_kk, the factor of client k's own weights.
    """

    others: Params
    self_weight: Array


class Server(NamedTuple):
    """What the server keeps beside the clients' pulls.

    Attributes:
        weights: W, leaves (K, ...): the w_k that each client sent last.
        omega: (K, K) Omega, the relationship between clients.
    """

    weights: Params
    omega: Array


@method(keeps="its model", travels="a combination of others' last layers down, its own up")
@dataclasses.dataclass(frozen=True)
class MOCHA:
    """MOCHA (Smith et al., 2017): multi-task learning that also learns the relationship between tasks.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.MOCHA(mu=0.003)
        MOCHA(mu=0.003, ridge=0.1)
    """

    mu: float = hyperparameter(
        0.01,
        at_least=0,
        grid=(0.001, 0.003, 0.01, 0.03),
        help="lambda, weight of the regularization by Omega; 0 is Local",
        former="strength",
    )
    ridge: float = hyperparameter(
        0.1,
        above=0,
        help="ridge / K is added to the diagonal of Omega, whose trace is 1, before it is inverted",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_clients = problem.num_clients
        solver = problem.solver

        def last_layer(models: Params) -> Params:
            """w of one model or of a stack; None in place of other layers and of batch statistics."""
            params, _ = solver.without_statistics(models)
            is_last = problem.model.mask(params, num=1)
            weights, _ = tree.partition(params, is_last)
            return weights

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            """A client's row is its model, with all layers, and the optimizer's state."""
            return First(problem.init_personal(key, client))

        def client_update(
            context: ClientContext, pulls: Pull, personal: Personal, data: ClientData
        ) -> ClientOutput:
            pull = tree.first(pulls)

            def objective(params: Params, batch: Batch) -> Array:
                """l_k(w_k) + mu / 2 ((Omega^-1)_kk |w_k|^2 + 2 w_k . u_k)."""
                weights = last_layer(params)
                square = tree.inner(weights, weights)
                penalty = pull.self_weight * square + 2 * tree.inner(weights, pull.others)
                return solver.mean_loss(params, batch) + self.mu / 2 * penalty

            # w_k takes local steps, as do the layers below it.
            personal, loss = problem.fit_personal(context, personal, data.train, objective)

            # Client k sends w_k.
            weights = last_layer(personal.params)
            return ClientOutput(
                row=personal,
                upload=Upload(update=tree.stack_one(weights)),
                report=ClientReport(loss),
            )

        # ---- The server.

        def compute_pulls(server: Server) -> Pull:
            """u_k = sum_{j != k} (Omega^-1)_kj w_j and (Omega^-1)_kk of all clients, (K, ...)."""
            identity = jnp.eye(num_clients)
            precision = jnp.linalg.inv(server.omega + self.ridge / num_clients * identity)
            off_diagonal = precision * (1 - identity)
            others = problem.plan.mix(off_diagonal, server.weights)
            return Pull(others=others, self_weight=jnp.diagonal(precision))

        def start(key: Key, clients: ClientData) -> Start:
            # W: the last layers of the models that the clients begin with.
            models = problem.init_models(key, num_clients)
            weights = last_layer(models)
            # At first Omega = I / K.
            server = Server(weights=weights, omega=jnp.eye(num_clients) / num_clients)
            return Start(state=server, models=compute_pulls(server))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # W: the new w_k of clients that sent one, and the last ones of the others.
            is_new = aggregate.num_sent > 0
            weights = tree.where(is_new, aggregate.upload.update, state.server.state.weights)

            # Omega <- (W W')^(1/2) / tr (W W')^(1/2)
            products = problem.plan.gram(weights)
            server = Server(weights=weights, omega=relationship(products))

            # u_k and (Omega^-1)_kk for the next round.
            state = state.with_server(server)
            return state.with_models(compute_pulls(server)), {}

        # ---- What a client predicts with: w_k, on its own layers below.

        def predict(
            context: ClientContext, pulls: Pull, personal: Personal, data: ClientData
        ) -> Prediction:
            return Prediction.single(personal.params)

        def adapt(context: ClientContext, pulls: Pull, data: ClientData) -> Prediction:
            """Newcomers train alone."""
            model = problem.train_newcomer(context, data)
            return Prediction.single(model)

        return one_for_each(
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            adapt=adapt,
            report=MethodReport(scored="each client's own model"),
            sends="models",
        )


def relationship(products: Array) -> Array:
    """(K, K) Omega = (W W')^(1/2) / tr (W W')^(1/2) from W W', the inner products of K models."""
    # A matrix and its root have the same eigenvectors.
    eigenvalues, eigenvectors = jnp.linalg.eigh(products)
    roots = jnp.sqrt(jnp.maximum(eigenvalues, 0))
    trace = jnp.maximum(roots.sum(), jnp.finfo(jnp.float32).tiny)
    return (eigenvectors * roots / trace) @ eigenvectors.T
