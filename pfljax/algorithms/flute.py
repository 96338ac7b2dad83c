"""FLUTE: FedRep whose heads are pulled toward a simplex of the client's classes, by clients and by the server.

Liu, Shen, Yang, "Federated representation learning in the under-parameterized regime" (ICML 2024), its nonlinear form.

    H (C, F) is the matrix of the head phi, z = f(x; theta) are features, and m_kc is 1 if client k has class c, or 0.
        N_k(H) = |H H' / |H H'| - (I - 11' / C) * (m_k m_k') / sqrt(C - 1)|,  with Frobenius norms.
    A round: client k receives theta, and minimizes
        CE + l1 N_k(H) + l2 |H|^2 + l3 mean |z|^2
    over its head phi_k for `head_epochs` epochs, theta fixed; then over both for `joint_epochs`, to theta_k and phi_k;
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

from pfljax.algorithms.common import classes, heads
from pfljax.algorithms.common.global_model import averaging
from pfljax.algorithms.common.layers import Phase, base_layers, train_phases
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Mode,
    Params,
    Prediction,
    PyTree,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.local.solver import joined
from pfljax.settings.method import hyperparameter, method


@method(keeps="its head", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class FLUTE:
    """FLUTE (Liu et al., 2024): a shared body, and personal heads pulled toward a simplex of the client's classes.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FLUTE(collapse=1.0)
        FLUTE(collapse=1.0, weight_decay=0.0025, features=0.005, server_learning_rate=0.5,
              head_epochs=10, joint_epochs=None)
    """

    collapse: float = hyperparameter(
        0.25, at_least=0, grid=(0.0, 0.25, 1.0), help="l1, pull of heads to a simplex of classes"
    )
    weight_decay: float = hyperparameter(
        0.0025, at_least=0, help="l2, weight of the head's squared norm", former="decay"
    )
    features: float = hyperparameter(
        0.005, at_least=0, grid=(0.0, 0.005, 0.05), help="l3, weight of features' squared norm"
    )
    server_learning_rate: float = hyperparameter(
        0.5,
        at_least=0,
        help="eta, rate of the server's step for the heads of S clients",
        former="server_rate",
    )
    head_epochs: int = hyperparameter(
        10, at_least=1, grid=(1, 5, 10), help="number of epochs for the head, with the body fixed"
    )
    joint_epochs: int | None = hyperparameter(
        None,
        at_least=1,
        grid=(1, 5),
        help="epochs for both. Default: as in local training",
        former="epochs",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver
        num_classes = classes.required(problem, "flute", per_position=False)
        is_body = base_layers(problem, 1)

        def is_head(params: Params) -> PyTree:
            return model.mask(params, 1)

        def is_any(params: Params) -> PyTree:
            return jax.tree.map(lambda leaf: True, params)

        def body_and_head(params: Params) -> tuple[Params, Params]:
            return tree.partition(params, is_body(params))

        phases = [Phase(is_head, self.head_epochs), Phase(is_any, self.joint_epochs)]

        # ---- The client.

        def first_row(key: Key, client: Array) -> Params:
            """phi_k. A client's row is its head."""
            _, head = body_and_head(problem.init_model(key, client))
            return head

        def train(context: ClientContext, body: Params, head: Params, data: ClientData) -> Trained:
            present = classes.counts(data.train, num_classes) > 0

            def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                """CE + l1 N_k(H) + l2 |H|^2 + l3 |z|^2."""
                h = heads.matrix(problem, params)
                z = model.features(params, x, mode)
                head_penalty = (
                    self.collapse * distance(h, present) + self.weight_decay * jnp.square(h).sum()
                )
                feature_penalty = self.features * jnp.square(z).sum(axis=-1)
                return solver.loss(params, x, y, mode) + head_penalty + feature_penalty

            # phi_k with theta fixed; then both.
            context, body = problem.whole(context, body)
            start = tree.combine(body, tree.stack_one(head))
            regularized = problem.with_loss(loss)
            trained = train_phases(regularized, phases, context, start, data.train)
            new_body, new_head = body_and_head(trained.models)
            new_head = server_step(tree.first(new_head), tree.first(new_body), present)
            return trained._replace(models=new_body, row=new_head)

        def server_step(head: Params, body: Params, present: Array) -> Params:
            """phi_k <- phi_k - eta / S grad N_k(H_k), which a client computes itself."""
            params, statistics = solver.without_statistics(head)

            def distance_of(params: Params) -> Array:
                head = joined(params, statistics)
                h = heads.matrix(problem, tree.combine(head, body))
                return distance(h, present)

            rate = self.server_learning_rate / problem.expected_clients
            gradient = jax.grad(distance_of)(params)
            return joined(tree.subtract(params, tree.scale(gradient, rate)), statistics)

        # ---- What a client predicts with: theta and phi_k.

        def predict(
            context: ClientContext, models: Params, head: Params, data: ClientData
        ) -> Prediction:
            return Prediction(tree.combine(models, tree.stack_one(head)))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train a head on the shared body."""
            init_key, train_key = jax.random.split(context.key)
            _, head = body_and_head(model.init(init_key))
            start = tree.combine(tree.first(models), head)
            head_problem = problem.part(is_head(start)).with_epochs(self.head_epochs)
            context = context._replace(key=train_key)
            return Prediction.single(head_problem.train_newcomer(context, data, start=start))

        # ---- Accounting.

        epochs = "as given" if self.joint_epochs is None else self.joint_epochs
        return averaging(
            problem,
            shared=is_body,
            train=train,
            first_row=first_row,
            predict=predict,
            adapt=adapt,
            ledger=Ledger(
                gradients=1,
                passes=problem.passes(self.head_epochs) + problem.passes(self.joint_epochs),
                unaccounted="which classes a client has, in the loss",
            ),
            report=MethodReport(
                scored="each client's own head on the shared body",
                facts=(("local epochs, phase by phase", f"{self.head_epochs}, then {epochs}"),),
            ),
        )


def distance(h: Array, present: Array) -> Array:
    """() N_k of H (C, F), for a client that has the classes `present` (C,)."""
    num_classes = len(present)

    # (I - 11' / C) * (m_k m_k') / sqrt(C - 1)
    both_present = present[:, None] & present
    centered = jnp.where(both_present, jnp.eye(num_classes) - 1 / num_classes, 0)
    simplex = centered / max(num_classes - 1, 1) ** 0.5

    # |H H' / |H H'| - that|
    products = h @ h.T
    return norm(products / norm(products) - simplex)


def norm(matrix: Array) -> Array:
    """() the Frobenius norm, differentiable at 0."""
    return jnp.sqrt(jnp.maximum(jnp.square(matrix).sum(), 1e-12))
