"""FedPAC: features pulled toward common class centroids; a combination of heads for each client.

Xu, Tong, Huang, "Personalized federated learning with feature alignment and classifier
collaboration" (ICLR 2023).

    A round: client k receives the body theta, centroids c (C, F) and its combined head phi_k. From
    the features z of its examples under theta it computes
        h_kc = (sum of z over class c) / n_k  and  V_k = mean of |z|^2 - sum_c |h_kc|^2.
    It trains phi_k for `head_epochs` epochs, theta fixed; then theta to theta_k for `body_epochs`
    epochs, phi_k fixed, on l_k + lambda times the mean over examples of |z - c_y|^2 / F; classes
    without a centroid have no such term.
    theta <- sum_k n_k theta_k / sum_k n_k;
    c <- the mean features of class c under the theta_k, over all examples;
    phi_k <- sum_j a_kj phi_j, where a_k minimizes over the simplex
        sum_j a_kj^2 V_j / (n_j - 1) + sum_c |h_kc - sum_j a_kj h_jc|^2,
    the variance and squared bias of sum_j a_kj h_j.

Departures from the paper: h_j has variance V_j / n_j, which V_j / (n_j - 1) estimates without bias.
The paper's V_j / n_j is 0 for a client with a single example, whose head would then look the most
certain of all. Such a client keeps its own head, which nobody else uses. Both training phases use
the solver's learning rate; the paper uses a larger one for the head. The statistics h and V use the
received body, so that clients are comparable; the centroids use the trained bodies; the squared
distance is a mean over F (our readings). The weights come from a fixed number of accelerated
projected-gradient steps, not from a quadratic-programming solver; the authors' code sets those
below 0.001 to 0. It also pulls features of a class without a centroid toward the client's own mean
before training; here a centroid stays once some client has had the class, so this is the case in
the first rounds only, and nothing pulls. The loss uses training features (batch statistics of the
mini-batch); statistics and centroids use inference features. The heads of the round's cohort are
combined; clients outside it keep theirs. Traffic counts a combined head for every client, although
one with a single example downloads none. Newcomers train their own head on the shared body, for as
many rounds of `head_epochs` epochs as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from optax.projections import projection_simplex

from pfljax.algorithms.common import classes
from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.algorithms.common.layers import Phase, train_phases
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Mode,
    Params,
    Prediction,
    PyTree,
    State,
    Traffic,
    Trained,
)
from pfljax.exchange.plan import ExecutionPlan
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

BY_CLASS = "per-class feature means, their variance and class counts, which are sent without noise"
QP_STEPS = 200  # accelerated projected-gradient steps for the weights of heads
FAR_BELOW = -1e6  # what the projection onto the simplex turns into a weight of 0


class Centroids(NamedTuple):
    """The server's class centroids.

    Attributes:
        mean: c (C, F).
        count: (C,) number of examples behind each; a class with 0 has no centroid.
    """

    mean: Array
    count: Array


@method(
    keeps="its head",
    travels="the body and class centroids, both ways; class statistics and its head up, "
    "a mixture of heads down",
)
@dataclasses.dataclass(frozen=True)
class FedPAC:
    """FedPAC (Xu et al., 2023): aligned features, and a combination of heads for each client.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedPAC(alignment=0.1)
        FedPAC(alignment=0.1, heads='combined', head_epochs=1, body_epochs=None)
    """

    alignment: float = hyperparameter(
        1.0,
        at_least=0,
        grid=(0.1, 1.0, 10.0),
        help="lambda, pull of features toward their class centroid; 0: none",
    )
    heads: Literal["combined", "own"] = hyperparameter(
        "combined",
        help="head that clients continue with; own with alignment 0 is FedRep with as many epochs",
    )
    head_epochs: int = hyperparameter(
        1, at_least=1, help="number of epochs for the head, with the body fixed"
    )
    body_epochs: int | None = hyperparameter(
        None,
        at_least=1,
        grid=(1, 5),
        help="number of epochs for the body. Default: as in local training",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        num_classes = classes.required(problem, "fedpac", per_position=False)
        num_features = classes.num_features(problem)

        def is_head(params: Params) -> PyTree:
            return model.mask(params, 1)

        def is_body(params: Params) -> PyTree:
            return tree.complement(model.mask(params, 1))

        def body_and_head(params: Params) -> tuple[Params, Params]:
            return tree.partition(params, is_body(params))

        phases = [Phase(is_head, self.head_epochs), Phase(is_body, self.body_epochs)]

        # ---- The client.

        def first_row(key: Key, client: Array) -> Params:
            """phi_k. A client's row is its head."""
            _, head = body_and_head(problem.init_model(key, client))
            return head

        def train(context: ClientContext, body: Params, head: Params, data: ClientData) -> Trained:
            centroids = context.server
            context, body = problem.whole(context, body)
            start = tree.combine(body, tree.stack_one(head))

            # Train phi_k with theta fixed, then theta_k with phi_k fixed and features pulled.
            pulled = with_alignment(problem, centroids, self.alignment)
            trained = train_phases(pulled, phases, context, start, data.train)
            new_body, new_head = body_and_head(trained.models)
            new_head = tree.first(new_head)

            # Sums for the next centroids, under theta_k.
            params = tree.first(trained.models)
            after = classes.feature_sums(problem, params, data.train, num_classes)

            # h_k and V_k / (n_k - 1), under theta as received, so that clients are comparable.
            report = {}
            if self.heads == "combined":
                before = classes.feature_sums(problem, tree.first(start), data.train, num_classes)
                feature_means, variance = estimate(before, data.train.size)
                report = {
                    "head": new_head,
                    "means": feature_means,
                    "variance": variance,
                    "several": data.train.size > 1,
                }
            return trained._replace(
                models=new_body,
                row=new_head,
                sums={"centroids": after.sums},
                count=after.counts,
                report=report,
            )

        # ---- The server.

        def first_server(key: Key, params: Params, clients: ClientData) -> Centroids:
            return Centroids(jnp.zeros((num_classes, num_features)), jnp.zeros(num_classes))

        def server_step(received: Received, centroids: Centroids) -> ServerStep:
            """The next centroids; a class without new examples keeps its centroid."""
            count = received.sums["count"]
            new = Centroids(classes.means(received.sums["centroids"], count), count)
            return ServerStep(server=tree.where(count > 0, new, centroids))

        # ---- What a client predicts with: its head on the shared body.

        def predict(
            context: ClientContext, models: Params, head: Params, data: ClientData
        ) -> Prediction:
            return Prediction(tree.combine(models, tree.stack_one(head)))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train their own head on the shared body."""
            init_key, train_key = jax.random.split(context.key)
            _, head = body_and_head(model.init(init_key))
            start = tree.combine(tree.first(models), head)
            head_problem = problem.part(is_head(start)).with_epochs(self.head_epochs)
            context = context._replace(key=train_key)
            return Prediction.single(head_problem.train_newcomer(context, data, start=start))

        # ---- Accounting.

        _, head_shapes = body_and_head(model.network.shapes)
        head_bytes = tree.num_bytes(head_shapes) if self.heads == "combined" else 0

        def traffic(counted: Traffic) -> Traffic:
            """The server writes combined heads into rows, so the engine does not count them."""
            return counted._replace(server=counted.server + head_bytes)

        body_epochs = "as given" if self.body_epochs is None else self.body_epochs
        epochs = f"{self.head_epochs}, then {body_epochs}"
        algorithm = averaging(
            problem,
            shared=is_body,
            train=train,
            first_row=first_row,
            first_server=first_server,
            server_step=server_step,
            predict=predict,
            adapt=adapt,
            ledger=Ledger(
                gradients=1,
                passes=problem.passes(self.head_epochs) + problem.passes(self.body_epochs),
                unaccounted=BY_CLASS,
            ),
            report=MethodReport(
                scored="each client's head on the shared body",
                facts=(("local epochs, phase by phase", epochs),),
            ),
            traffic=traffic,
            sends="sums",  # of features by class, next to the models
        )
        if self.heads == "own":
            return algorithm

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            """After the averages, phi_k <- sum_j a_kj phi_j for the clients of the round."""
            state, _ = algorithm.server_update(key, state, aggregate)
            report = aggregate.report.entries
            active = report["several"]
            weights = head_weights(problem.plan, report["means"], report["variance"], active)
            combined = problem.plan.mix(weights, report["head"])
            heads = tree.where(active, combined, state.rows)
            weight_of_others = jnp.where(active, 1 - jnp.diagonal(weights), 0).sum()
            metrics = {"weight_of_others": weight_of_others / jnp.maximum(active.sum(), 1)}
            return state.with_rows(heads), metrics

        return dataclasses.replace(algorithm, server_update=server_update)


def with_alignment(problem: Problem, centroids: Centroids, strength: float) -> Problem:
    """The problem with lambda |z - c_y|^2 / F added to its loss.

    Only the body gets a gradient from it: features do not depend on the head.
    """
    model = problem.model
    solver = problem.solver

    def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
        features = model.features(params, x, mode)
        distance = jnp.square(features - centroids.mean[y]).mean(axis=1)
        pull = jnp.where(centroids.count[y] > 0, distance, 0)
        return solver.loss(params, x, y, mode) + strength * pull

    return problem.with_loss(loss)


def estimate(feature_sums: classes.FeatureSums, size: Array) -> tuple[Array, Array]:
    """A client's h (C, F) and V / (n - 1), from its `classes.feature_sums`."""
    count = jnp.maximum(size, 1)
    means = feature_sums.sums / count
    variance = feature_sums.squares / count - jnp.square(means).sum()
    return means, jnp.maximum(variance, 0) / jnp.maximum(size - 1, 1)


def head_weights(plan: ExecutionPlan, means: Array, variance: Array, active: Array) -> Array:
    """(S, S) the a_k on the simplex with the least variance and squared bias of sum_j a_kj h_j.

    Minimizes sum_j a_kj^2 V_j / (n_j - 1) + sum_c |h_kc - sum_j a_kj h_jc|^2. Since weights sum to
    1, a common part of the means cancels, and all S problems share one Hessian.

    Args:
        plan: Maps over rows.
        means: (S, C, F) h.
        variance: (S,) V_j / (n_j - 1).
        active: (S,) bool; the others have weight 0.
    """
    shares = active / jnp.maximum(active.sum(), 1)
    centered = means - jnp.einsum("s,scf->cf", shares, means)
    products = plan.gram(jnp.where(active[:, None, None], centered, 0))
    hessian = products + jnp.diag(variance)
    largest = jnp.linalg.eigvalsh(hessian)[-1]
    step_size = 1 / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)

    def project(rows: Array) -> Array:
        return plan.over_rows(projection_simplex, jnp.where(active, rows, FAR_BELOW))

    def step(_: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        weights, ahead, age = carry
        gradient = ahead @ hessian - products
        new = project(ahead - step_size * gradient)
        change = new - weights
        # Momentum restarts in the problems where it leads uphill.
        uphill = ((ahead - new) * change).sum(axis=1) > 0
        age = jnp.where(uphill, 0, age + 1)
        momentum = tree.per_row(age / (age + 3), new)
        return new, new + momentum * change, age

    start = jnp.eye(len(active))
    age = jnp.zeros(len(active))
    weights, _, _ = jax.lax.fori_loop(0, QP_STEPS, step, (start, start, age))
    return weights
