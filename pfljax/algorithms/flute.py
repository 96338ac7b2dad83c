"""FLUTE: FedRep whose heads are pulled toward a simplex of the client's classes, by clients and by the server.

Liu, Shen, Yang, "Federated representation learning in the under-parameterized regime" (ICML 2024), its nonlinear form.

    H (C, F) is the matrix of the head phi, z = f(x; theta) are features, and m_kc is 1 if client k has class c, or 0.
        N_k(H) = |H H' / |H H'| - (I - 11' / C) * (m_k m_k') / sqrt(C - 1)|,  with Frobenius norms.
    A round: client k receives theta, and minimizes
        CE + l1 N_k(H) + l2 |H|^2 + l3 mean |z|^2
    over its head phi_k for `head_epochs` epochs, theta fixed; then over both for `epochs` epochs, to theta_k and phi_k;
    theta <- sum_k n_k theta_k / sum_k n_k;  phi_k <- phi_k - eta / S grad N_k(H_k), the step of the server.
    Client k predicts with theta and phi_k.

Departures from the paper: A server's step for a head depends on no other head, so clients take it, and heads do not
travel; the authors' code leaves it out by default. That code weighs clients equally, sums |z|^2 over mini-batches of 10
(l3 is ten times theirs, for a mean), and ends with a round of heads alone. Newcomers train a head on the shared body.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, classes, heads
from pfljax.algorithms.common.layers import PersonalPart, Phase, base_layers, fit_phases, sharing_layers
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Report
from pfljax.local.problem import Problem


@method(keeps="its head", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class FLUTE:
    """FLUTE (Liu et al., 2024): a shared body, and personal heads pulled toward a simplex of the client's classes."""

    collapse: float = knob(0.25, at_least=0, grid=(0.0, 0.25, 1.0), help="l1, pull of heads to a simplex of classes")
    decay: float = knob(0.0025, at_least=0, help="l2, weight of the head's squared norm")
    features: float = knob(0.005, at_least=0, grid=(0.0, 0.005, 0.05), help="l3, weight of features' squared norm")
    server_rate: float = knob(0.5, at_least=0, help="eta, rate of the server's step for the heads of S clients")
    head_epochs: int = knob(10, at_least=1, grid=(1, 5, 10), help="number of epochs for the head, with the body fixed")
    epochs: int | None = knob(None, at_least=1, grid=(1, 5), help="epochs for both; not given: as in local training")

    def build(self, problem: Problem) -> Algorithm:
        model, num_classes = problem.model, classes.required(problem, "flute", places=False)
        body = base_layers(problem, 1)
        every = lambda params: jax.tree.map(lambda leaf: True, params)
        phases = [Phase(lambda params: model.mask(params, 1), self.head_epochs), Phase(every, self.epochs)]
        base = sharing_layers(problem, body, phases=phases, report=Report("each client's own head on the shared body"))

        def client_update(context, models, row, data):
            present = classes.counts(data.train, num_classes) > 0

            def loss(params, x, y, *key):
                h, z = heads.matrix(problem, params), model.features(params, x, *key)
                of_head = self.collapse * distance(h, present) + self.decay * jnp.square(h).sum()
                return problem.solver.loss(params, x, y, *key) + of_head + self.features * jnp.square(z).sum(axis=-1)

            start = tree.combine(models, tree.stack_one(row.own))
            found = fit_phases(problem.with_loss(loss), phases, context, start, row.optimizer, data.train)
            trained, optimizers, losses = found
            theta, phi = tree.partition(trained, body(trained))
            whole = lambda own: heads.matrix(problem, tree.combine(own, tree.first(theta)))
            slope = jax.grad(lambda own: distance(whole(own), present))(tree.first(phi))
            rate = self.server_rate / problem.expected_clients
            own = jax.tree.map(lambda leaf, of_server: leaf - rate * of_server, tree.first(phi), slope)
            upload, sent = aggregation.weighted(tree.subtract(theta, models), data.train.size)
            return ClientOutput(PersonalPart(own, optimizers), upload, {"loss": losses[0]}, sent)

        ledger = dataclasses.replace(base.ledger, unaccounted="which classes a client has, in the loss")
        return dataclasses.replace(base, client_update=client_update, ledger=ledger)


def distance(h: Array, present: Array) -> Array:
    """() N_k of H (C, F), for a client that has the classes `present` (C,)."""
    size = len(present)
    norm = lambda leaf: jnp.sqrt(jnp.maximum(jnp.square(leaf).sum(), 1e-12))  # differentiable at 0
    simplex = jnp.where(present[:, None] & present, jnp.eye(size) - 1 / size, 0) / max(size - 1, 1) ** 0.5
    return norm(h @ h.T / norm(h @ h.T) - simplex)
