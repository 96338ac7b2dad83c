"""MOCHA: multi-task learning of linear models or last layers, along with the relationship between clients.

Smith, Chiang, Sanjabi, Talwalkar, "Federated multi-task learning" (NeurIPS 2017), with the task
relationship of Zhang and Yeung, "A convex formulation for learning task relationships in multi-task
learning" (UAI 2010):

    min over W, Omega of  sum_k l_k(w_k) + strength / 2 tr(W' Omega^-1 W),
        Omega positive, tr Omega = 1.

    A round: client k receives u_k = sum_{j != k} (Omega^-1)_kj w_j and (Omega^-1)_kk,
    takes local steps on the objective with the others' w_j fixed,
        l_k(w_k) + strength / 2 ((Omega^-1)_kk |w_k|^2 + 2 w_k . u_k),  and sends w_k;
    the server: Omega <- (W W')^(1/2) / tr (W W')^(1/2), which minimizes the objective in Omega.
        (Zhang & Yeung)

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
    First,
    Key,
    Metrics,
    Params,
    Prediction,
    Report,
    Start,
    State,
    Told,
    Upload,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Personal, Problem
from pfljax.settings.method import knob, method


class Pull(NamedTuple):
    """What client k receives.

    Attributes:
        others: u_k.
        own: () (Omega^-1)_kk.
    """

    others: Params
    own: Array


class Server(NamedTuple):
    """What the server keeps beside the clients' pulls.

    Attributes:
        weights: W, stacked (K, ...).
        omega: (K, K) Omega.
    """

    weights: Params
    omega: Array


@method(keeps="its model", travels="a combination of others' last layers down, its own up")
@dataclasses.dataclass(frozen=True)
class MOCHA:
    """MOCHA (Smith et al., 2017): multi-task learning that also learns the relationship between tasks."""

    strength: float = knob(
        0.01,
        at_least=0,
        grid=(0.001, 0.003, 0.01, 0.03),
        help="strength of the regularization by Omega; 0 is Local",
    )
    ridge: float = knob(
        0.1,
        above=0,
        help="ridge / K is added to the diagonal of Omega, whose trace is 1, before it is inverted",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_clients = problem.num_clients
        solver = problem.solver

        def last_layer(models: Params) -> Params:
            """w, with None in place of the other layers and of batch statistics."""
            params, _ = solver.without_statistics(models)
            weights, _ = tree.partition(params, problem.model.mask(params, 1))
            return weights

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            """A client's row is its model."""
            return First(problem.init_personal(key, client))

        def client_update(
            context: ClientContext, pulls: Pull, personal: Personal, data: ClientData
        ) -> ClientOutput:
            pull = tree.first(pulls)

            def objective(params: Params, batch: Batch) -> Array:
                """l_k(w_k) + strength / 2 ((Omega^-1)_kk |w_k|^2 + 2 w_k . u_k)."""
                weights = last_layer(params)
                square = tree.inner(weights, weights)
                penalty = pull.own * square + 2 * tree.inner(weights, pull.others)
                return solver.mean_loss(params, batch) + self.strength / 2 * penalty

            personal, loss = problem.fit_personal(context, personal, data.train, objective)
            upload = Upload(tree.stack_one(last_layer(personal.params)))
            return ClientOutput(row=personal, upload=upload, told=Told(loss))

        # ---- The server.

        def pulls_of(server: Server) -> Pull:
            """u_k = sum_{j != k} (Omega^-1)_kj w_j and (Omega^-1)_kk of all clients, (K, ...)."""
            identity = jnp.eye(num_clients)
            precision = jnp.linalg.inv(server.omega + self.ridge / num_clients * identity)
            of_others = precision * (1 - identity)
            others = problem.plan.mix(of_others, server.weights)
            return Pull(others, own=jnp.diagonal(precision))

        def start(key: Key, clients: ClientData) -> Start:
            weights = last_layer(problem.init_models(key, num_clients))
            server = Server(weights, omega=jnp.eye(num_clients) / num_clients)
            return Start(server, pulls_of(server))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # Omega <- (W W')^(1/2) / tr (W W')^(1/2)
            received = aggregate.num_sent > 0
            weights = tree.where(received, aggregate.upload.update, state.server.state.weights)
            omega = relationship(problem.plan.gram(weights))
            server = Server(weights, omega)
            return state.with_server(server).with_models(pulls_of(server)), {}

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, pulls: Pull, personal: Personal, data: ClientData
        ) -> Prediction:
            return Prediction.one(personal.params)

        def adapt(context: ClientContext, pulls: Pull, data: ClientData) -> Prediction:
            """Newcomers train alone."""
            return Prediction.one(problem.train_newcomer(context, data))

        return one_for_each(
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            adapt=adapt,
            report=Report(scored="each client's own model"),
            sends="models",
        )


def relationship(products: Array) -> Array:
    """(K, K) Omega = (W W')^(1/2) / tr (W W')^(1/2) from W W', the inner products of K models."""
    eigenvalues, eigenvectors = jnp.linalg.eigh(products)
    roots = jnp.sqrt(jnp.maximum(eigenvalues, 0))
    trace = jnp.maximum(roots.sum(), jnp.finfo(jnp.float32).tiny)
    return (eigenvectors * roots / trace) @ eigenvectors.T
