"""FedAH: a shared body, and personal heads that begin each round as a mixture with the global head.

Zhou, He, Zhai, Gao, Chen, Qin, Zhang, Guo, "FedAH: aggregated head for personalized federated learning" (2024).
Client k keeps its head phi_k and weights W_k in [0, 1] of the same shape, at first 1.

    A round: client k receives the body theta and the head psi; the aggregated head is phi_k + (psi - phi_k) * W;
        W_k <- clip(W_k - eta grad l_k(theta, phi_k + (psi - phi_k) * W_k) * (psi - phi_k), 0, 1)
    for `head_epochs` epochs; phi_k <- the aggregated head, trained for `head_epochs` epochs, theta fixed; then theta is
    trained to theta_k for `body_epochs` epochs, phi_k fixed;
    theta, psi <- sum_k n_k (theta_k, phi_k) / sum_k n_k.
    Client k predicts with theta and the aggregated head from which its next round would start.

Departures from the paper: In the authors' code, heads of clients that do not take part become aggregated heads, too;
here they do not change. Each phase resets its optimizer unless optimizers are kept. A prediction takes the steps of W_k
on mini-batches drawn anew, and keeps nothing. Newcomers train their own head from psi with theta fixed, for as many
rounds of `head_epochs` epochs as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.adoption import Adoption
from pfljax.algorithms.common.averaging import averaging
from pfljax.algorithms.common.layers import Phase, fit_phases
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Params, Prediction, PyTree, Report
from pfljax.local.problem import Problem

OF_WEIGHTS = 0xA4  # folded into a client's key for a round: the mini-batches for W


class Row(NamedTuple):
    """The client's head, its weights W_k, and the optimizers of its phases, if they are kept."""

    head: Params
    weights: PyTree
    optimizers: list


@method(keeps="its head, weights of the global head", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAH:
    """FedAH (Zhou et al., 2024): a shared body, and personal heads that begin as mixtures with the global head."""

    rate: float = knob(
        1.0,
        at_least=0,
        grid=(0.1, 1.0, 10.0),
        help="eta, learning rate of the weights; 0: rounds begin with psi",
    )
    head_epochs: int = knob(1, at_least=1, grid=(1, 5), help="number of epochs for the weights, and for the head")
    body_epochs: int | None = knob(
        None, at_least=1, grid=(1, 5), help="number of epochs for the body; not given: as in local training"
    )
    predict: Literal["aggregated", "own"] = knob(
        "aggregated", help="predict with the aggregated head, or with the head as the client has trained it"
    )

    def build(self, problem: Problem) -> Algorithm:
        head = lambda params: problem.model.mask(params, 1)
        phases = [Phase(head, self.head_epochs), Phase(lambda params: tree.complement(head(params)), self.body_epochs)]
        adoption = Adoption(problem, 1, self.rate, self.head_epochs)

        def row(key, client, models):
            own = adoption.part(tree.first(models))
            optimizers = [problem.part(phase.part(models)).kept_optimizers(models) for phase in phases]
            return Row(own, jax.tree.map(jnp.ones_like, own), optimizers)

        def begin(context, row, theta, split):
            """The global model with the aggregated head, and W_k."""
            context = context._replace(key=jax.random.fold_in(context.key, OF_WEIGHTS))
            weights = adoption.learn(context, row.weights, row.head, theta, split, self.head_epochs)
            return adoption.mix(weights, row.head, theta), weights

        def train(context, models, row, data):
            start, weights = begin(context, row, tree.first(models), data.train)
            trained, optimizers, losses = fit_phases(
                problem, phases, context, tree.stack_one(start), row.optimizers, data.train
            )
            return trained, Row(adoption.part(tree.first(trained)), weights, optimizers), losses

        def predict(context, models, row, data):
            theta = tree.first(models)
            if self.predict == "own":
                return Prediction.one(tree.combine(row.head, theta))
            return Prediction.one(begin(context, row, theta, data.train)[0])

        def adapt(context, models, data):
            start = tree.first(models)
            part = problem.part(head(start)).with_epochs(self.head_epochs)
            return Prediction.one(part.alone(context, start, data, rounds=problem.rounds))

        passes = 2 * problem.passes(self.head_epochs) + problem.passes(self.body_epochs)
        of_head = "aggregated head" if self.predict == "aggregated" else "own head"
        return averaging(
            problem,
            train=train,
            row=row,
            predict=predict,
            adapt=adapt,
            ledger=Ledger(gradients=1, passes=passes),
            report=Report(f"the global body with each client's {of_head}"),
        )
