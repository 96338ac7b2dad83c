"""FedPAC: features pulled toward common class centroids, and a combination of heads for each client.

Xu, Tong, Huang, "Personalized federated learning with feature alignment and classifier collaboration" (ICLR 2023).

    A round: client k receives the body theta, centroids c (C, F) and its combined head phi_k. From the features z of
    its examples under theta it computes h_kc = (sum of z over class c) / n_k and V_k = mean of |z|^2 - sum_c |h_kc|^2.
    It trains phi_k for `head_epochs` epochs, theta fixed; then theta to theta_k for `body_epochs` epochs, phi_k fixed,
    on l_k + lambda times the mean over examples of |z - c_y|^2 / F; classes without a centroid have no such term.
    theta <- sum_k n_k theta_k / sum_k n_k;  c <- the mean features of class c under the theta_k, over all examples;
    phi_k <- sum_j a_kj phi_j, where a_k minimizes over the simplex
    sum_j a_kj^2 V_j / (n_j - 1) + sum_c |h_kc - sum_j a_kj h_jc|^2, the variance and squared bias of sum_j a_kj h_j.

Departures from the paper: h_j has variance V_j / n_j, which V_j / (n_j - 1) estimates without bias. The paper's V_j /
n_j is 0 for a client with a single example, whose head would then look the most certain of all. Such a client keeps its
own head, which nobody else uses. Both training phases use the solver's learning rate; the paper uses a larger one for
the head. The statistics h and V use the received body, so that clients are comparable; the centroids use the trained
bodies; the squared distance is a mean over F (our readings). The weights come from a fixed number of accelerated
projected-gradient steps, not from a quadratic-programming solver; the authors' code sets those below 0.001 to 0. It
also pulls features of a class without a centroid toward the client's own mean before training; here a centroid stays
once some client has had the class, so this is the case in the first rounds only, and nothing pulls. The loss uses
training features (batch statistics of the mini-batch); statistics and centroids use inference features. The heads of
the round's cohort are combined; clients outside it keep theirs. Traffic counts a combined head for every client,
although one with a single example downloads none. Newcomers train their own head on the shared body, for as many rounds
of `head_epochs` epochs as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, classes
from pfljax.algorithms.common.combining import combination
from pfljax.algorithms.common.layers import PersonalPart, Phase, fit_phases, sharing_layers
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Aggregate, Algorithm, Array, ClientOutput, Params, PyTree, Report, Start
from pfljax.local.problem import Problem

BY_CLASS = "per-class feature means, their variance and class counts, which are sent without noise"


class Shared(NamedTuple):
    """What clients receive: the body (1, ...), class centroids (1, C, F), and the examples behind each (1, C)."""

    body: Params
    centroids: Array
    count: Array


@method(
    keeps="its head",
    travels="the body and class centroids, both ways; class statistics and its head up, a mixture of heads down",
)
@dataclasses.dataclass(frozen=True)
class FedPAC:
    """FedPAC (Xu et al., 2023): a body with aligned features, and a combination of heads for each client."""

    alignment: float = knob(
        1.0, at_least=0, grid=(0.1, 1.0, 10.0), help="lambda, pull of features toward their class centroid; 0: none"
    )
    heads: Literal["combined", "own"] = knob(
        "combined", help="head that clients continue with; own with alignment 0 is FedRep with as many epochs"
    )
    head_epochs: int = knob(1, at_least=1, help="number of epochs for the head, with the body fixed")
    body_epochs: int | None = knob(
        None, at_least=1, grid=(1, 5), help="number of epochs for the body; not given: as in local training"
    )

    def build(self, problem: Problem) -> Algorithm:
        model, combined = problem.model, self.heads == "combined"
        num_classes = classes.required(problem, "fedpac", places=False)
        body = lambda params: tree.complement(model.mask(params, 1))
        phases = [Phase(lambda params: model.mask(params, 1), self.head_epochs), Phase(body, self.body_epochs)]
        report = Report(scored="each client's head on the shared body")
        base = sharing_layers(problem, body, phases=phases, report=report)
        predict, adapt = base.predict, base.adapt
        assert predict and adapt
        sums = lambda models, data: classes.feature_sums(problem, tree.first(models), data.train, num_classes)

        def start(key, clients):
            centroids, count = jnp.zeros((1, num_classes, classes.num_features(problem))), jnp.zeros((1, num_classes))
            return Start(models=Shared(base.start(key, clients).models, centroids, count))

        def client_update(context, models, row, data):
            start = tree.combine(models.body, tree.stack_one(row.own))
            training = aligned(problem, tree.first(models), self.alignment)
            trained, optimizer, losses = fit_phases(training, phases, context, start, row.optimizer, data.train)
            theta, phi = tree.partition(trained, body(trained))
            row = PersonalPart(tree.first(phi), optimizer)
            upload, sent = aggregation.weighted(tree.subtract(theta, models.body), data.train.size)
            after, report = sums(trained, data), {"loss": losses[0]}
            upload |= {"centroids": after["sums"][None], "count": after["counts"][None]}
            if combined:
                means, variance = statistics(sums(start, data), data.train.size)
                report |= {"head": row.own, "means": means, "variance": variance, "several": data.train.size > 1}
            return ClientOutput(row, upload, report, sent)

        def server_update(key, state, aggregate):
            state = state._replace(models=averages(state.models, aggregate))
            if not combined:
                return state, {}
            report, active = aggregate.report, aggregate.report["several"]
            weights = combination(problem.plan, report["means"], report["variance"], active)
            own = tree.where(active, problem.plan.mix(weights, report["head"]), state.clients.own)
            of_others = jnp.where(active, 1 - jnp.diagonal(weights), 0).sum() / jnp.maximum(active.sum(), 1)
            return state._replace(clients=state.clients._replace(own=own)), {"weight_of_others": of_others}

        # The server writes combined heads into the clients' rows, so the engine does not count them as downloads.
        heads = tree.partition(model.network.shapes, body(model.network.shapes))[1]
        down = tree.num_bytes(heads) * combined
        return dataclasses.replace(
            base,
            start=start,
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: predict(context, models.body, row, data),
            adapt=lambda context, models, data: adapt(context, models.body, data),
            ledger=dataclasses.replace(base.ledger, unaccounted=BY_CLASS),
            traffic=lambda counted: counted._replace(server=counted.server + down),
            averages=True,
            sends="sums",  # of features by class, next to the models
        )


def aligned(problem: Problem, received: Shared, strength: float) -> Problem:
    """The problem with the pull toward the received centroids added to its loss; the head gets no gradient from it."""
    model, solver = problem.model, problem.solver

    def loss(params, x, y, key=None):
        distance = jnp.square(model.features(params, x, key) - received.centroids[y]).mean(axis=1)
        return solver.loss(params, x, y, key) + strength * jnp.where(received.count[y] > 0, distance, 0)

    return problem.with_loss(loss)


def averages(models: Shared, aggregate: Aggregate) -> Shared:
    """The next body and centroids; a class without new examples keeps its centroid."""
    count = aggregate.upload["count"]
    new = classes.means(aggregate.upload["centroids"], count), count
    kept = tree.where(count > 0, new, (models.centroids, models.count))
    return Shared(aggregation.average(models.body, aggregate), *kept)


def statistics(found: PyTree, size: Array) -> tuple[Array, Array]:
    """h (C, F), a client's per-class feature sums over n, and V / (n - 1), from its `classes.feature_sums`."""
    count = jnp.maximum(size, 1)
    means = found["sums"] / count
    total = jnp.maximum(found["squares"] / count - jnp.square(means).sum(), 0)
    return means, total / jnp.maximum(size - 1, 1)
