"""MOCHA: multi-task learning of linear models or last layers, along with the relationship between clients.

Smith, Chiang, Sanjabi, Talwalkar, "Federated multi-task learning" (NeurIPS 2017), with the task relationship of Zhang
and Yeung, "A convex formulation for learning task relationships in multi-task learning" (UAI 2010):

    min over W, Omega of  sum_k l_k(w_k) + strength / 2 tr(W' Omega^-1 W),   Omega positive, tr Omega = 1.

    A round: client k receives u_k = sum_{j != k} (Omega^-1)_kj w_j and (Omega^-1)_kk, takes local steps on
        l_k(w_k) + strength / 2 ((Omega^-1)_kk |w_k|^2 + 2 w_k . u_k), the objective with the others' w_j fixed;
        and sends w_k;
    the server: Omega <- (W W')^(1/2) / tr (W W')^(1/2), which minimizes the objective in Omega.      (Zhang & Yeung)

W is a whole linear model, or a network's last layer, as in FedFomo's comparison; the layers below stay with their
client.

Departures from the paper: Local steps are the solver's steps on the model's own loss, not dual coordinate ascent on a
hinge loss. This loss is a mean over examples, while the paper has a sum. `ridge` is added to Omega before it is
inverted. Newcomers train alone.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from pfljax.algorithms.common.one_each import one_for_each
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, First, Params, Prediction, Report, Start
from pfljax.local.problem import Problem


class Pull(NamedTuple):
    """u_k and (Omega^-1)_kk, which client k receives."""

    others: Params
    own: Array


class Server(NamedTuple):
    """W, stacked (K, ...), and Omega (K, K)."""

    weights: Params
    omega: Array


@method(keeps="its model", travels="a combination of others' last layers down, its own up")
@dataclasses.dataclass(frozen=True)
class MOCHA:
    """MOCHA (Smith et al., 2017): multi-task learning that also learns the relationship between tasks."""

    strength: float = knob(
        0.01, at_least=0, help="strength of the regularization by Omega; 0 is Local", grid=(0.001, 0.003, 0.01, 0.03)
    )
    ridge: float = knob(
        0.1, above=0, help="ridge / K is added to the diagonal of Omega, whose trace is 1, before it is inverted"
    )

    def build(self, problem: Problem) -> Algorithm:
        last_layer = lambda models: tree.partition(models, problem.model.mask(models, 1))[0]

        def pulls(weights, omega):
            identity = jnp.eye(len(omega))
            precision = jnp.linalg.inv(omega + self.ridge / len(omega) * identity)
            return Pull(problem.plan.mix(precision * (1 - identity), weights), jnp.diagonal(precision))

        def start(key, clients):
            num = problem.num_clients
            weights, omega = last_layer(problem.init_models(key, num)), jnp.eye(num) / num
            return Start(Server(weights, omega), pulls(weights, omega))

        def client_update(context, models, row, data):
            pull = tree.first(models)

            def objective(params, batch):
                weights = last_layer(params)
                penalty = pull.own * tree.inner(weights, weights) + 2 * tree.inner(weights, pull.others)
                return problem.solver.mean_loss(params, batch) + self.strength / 2 * penalty

            row, loss = row.fit(problem, context, data.train, objective)
            return ClientOutput(row, tree.stack_one(last_layer(row.model)), {"loss": loss})

        def server_update(key, state, aggregate):
            weights = tree.where(aggregate.count > 0, aggregate.upload, state.server.weights)
            omega = relationship(problem.plan.gram(weights))
            return state._replace(server=Server(weights, omega), models=pulls(weights, omega)), {}

        return one_for_each(
            sends="models",
            start=start,
            first_row=lambda key, client, start: First(problem.own_model(key, client)),
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: Prediction.one(row.model),
            adapt=problem.newcomer,
            report=Report(scored="each client's own model"),
        )


def relationship(products: Array) -> Array:
    """(K, K) Omega = (W W')^(1/2) / tr (W W')^(1/2) from W W', the inner products of K models."""
    values, vectors = jnp.linalg.eigh(products)
    roots = jnp.sqrt(jnp.maximum(values, 0))
    return (vectors * roots / jnp.maximum(roots.sum(), jnp.finfo(jnp.float32).tiny)) @ vectors.T
