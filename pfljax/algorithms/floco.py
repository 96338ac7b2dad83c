"""Floco: a simplex of last layers, in which each client has a region of its own.

Grinwald, Wiesner, Nakajima, "Federated learning over connected modes" (NeurIPS 2024).

    The last layer's weights are sum_m alpha_m W_m, alpha on the simplex of M endpoints; the rest is as in FedAvg.
    A round: client k receives all of them and takes each step at an alpha drawn anew, first from the whole simplex;
    the server averages them, weighted by n_k.  Client k predicts at the simplex's center.
    After a share tau of the rounds: kappa_k are the first M principal components of the clients' changes of all W_m;
    beta_k(z) is kappa_k, projected onto the simplex of sum z, over z;
    beta_k = beta_k(z) for the z that minimizes the Riesz energy sum_{k < j} 1 / |beta_k(z) - beta_j(z)|^2.
    From then on, client k draws alpha from beta_k + r u, r uniform in [0, rho], |u|_1 = 1, and predicts at beta_k.

Departures from the paper: tau is a share of the rounds, not a number of them. In the authors' code, all clients train
once more for their changes; here these are from the last round that they took part in, and a client that has not taken
part yet has the simplex's center. As in that code, z is one of 1000 values up to 1, and the last layer's bias is
shared. Draws outside of the simplex, which that code uses as they are, are clipped and normalized. The server reads
clients' changes as they were, and at no cost, also where uploads are compressed. Floco+, with a personal model beside
the simplex, is not here. Newcomers predict at the simplex's center.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, simplex
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Ledger, Prediction, PyTree, Report, Start
from pfljax.local.problem import Problem

ALPHA = 0xF10  # folded into a mini-batch's key: a point of the simplex


class Server(NamedTuple):
    """Clients' last changes of the endpoints (K, M, ...), who has any (K,) bool, and their points beta (K, M)."""

    changes: PyTree
    known: Array
    points: Array


@method(keeps="nothing", travels="the body and M endpoints of the last layer, both ways; its point down")
@dataclasses.dataclass(frozen=True)
class Floco:
    """Floco (Grinwald et al., 2024): a simplex of last layers, in which each client has a region of its own."""

    endpoints: int = knob(10, at_least=1, at_most=1000, grid=(3, 5, 10), help="M, number of endpoints; 1 is FedAvg")
    tau: float = knob(
        0.5, above=0, at_most=1, grid=(0.25, 0.5, 0.75), help="share of the rounds before clients have regions; 1: none"
    )
    rho: float = knob(0.1, at_least=0, at_most=1, grid=(0.05, 0.1, 0.3), help="radius of a client's region")

    def build(self, problem: Problem) -> Algorithm:
        solver, num, size = problem.solver, problem.num_clients, self.endpoints
        shapes = problem.model.network.shapes
        last = jax.tree.map(lambda own, leaf: own and leaf.ndim > 1, problem.model.mask(shapes, 1), shapes)
        if not any(jax.tree.leaves(last)):
            raise ArgumentError("model", "floco needs a last layer with a matrix; accepted: networks that have one")
        begin = jnp.maximum(jnp.rint(self.tau * problem.rounds), 1)
        center = jnp.full((size,), 1 / size)

        def at(alpha, params):
            ends, rest = tree.partition(params, last)
            return tree.combine(tree.mix(alpha, ends), rest)

        def start(key, clients):
            ends, _ = tree.partition(problem._replace(common_init=False).init_models(key, size), last)
            models = tree.stack_one(ends), tree.partition(problem.init_models(key, 1), last)[1]
            changes = tree.repeat(jax.tree.map(jnp.zeros_like, models[0]), num)
            return Start(Server(changes, jnp.zeros(num, bool), jnp.tile(center, (num, 1))), tree.combine(*models))

        def client_update(context, models, kept, data):
            point = context.server.points[context.client]

            def objective(params, batch):
                key = jax.random.fold_in(batch.key, ALPHA)
                alpha = simplex.draw(key, point, jnp.where(context.round < begin, jnp.inf, self.rho))
                loss = lambda params, *example: solver.loss(at(alpha, params), *example)
                return solver.with_loss(loss).mean_loss(params, batch)

            trained, kept, losses = problem.fit(context, models, kept, data.train, objective)
            update = tree.subtract(trained, models)
            upload, sent = aggregation.weighted(update, data.train.size)
            change = tree.partition(tree.first(update), last)[0]
            return ClientOutput(kept, upload, {"loss": losses[0], "change": change, "client": context.client}, sent)

        def server_update(key, state, aggregate):
            changes, known, points = state.server
            who = jnp.where(aggregate.sent[:, 0], aggregate.report["client"], num)  # others are dropped
            changes = jax.tree.map(lambda a, b: a.at[who].set(b, mode="drop"), changes, aggregate.report["change"])
            known = known.at[who].set(True, mode="drop")
            now = (state.round + 1 == begin) & (begin < problem.rounds)
            points = jax.lax.cond(now, lambda: simplex.projected(problem.plan, changes, known, size), lambda: points)
            models = aggregation.average(state.models, aggregate)
            return state._replace(server=Server(changes, known, points), models=models), {}

        def predict(context, models, row, data):
            return Prediction.one(at(context.server.points[context.client], tree.first(models)))

        functions = {"start": start, "client_update": client_update, "server_update": server_update, "predict": predict}
        return averaging(
            problem,
            **functions,
            adapt=lambda context, models, data: Prediction.one(at(center, tree.first(models))),
            # A client receives its own point alone, and the server sees its change in what it uploads.
            traffic=lambda counted: counted._replace(server=4 * size, report=0),
            ledger=Ledger(gradients=1),
            report=Report("each client's point of the simplex"),
        )
