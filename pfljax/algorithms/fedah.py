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

from pfljax.algorithms.common.adoption import Adoption
from pfljax.algorithms.common.global_model import averaging, received_model
from pfljax.algorithms.common.layers import Phase, train_phases
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Params,
    Prediction,
    PyTree,
    Split,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

WEIGHTS = 0xA4  # folded into a client's key for a round: the mini-batches for W


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        head: phi_k, with None in place of the body.
        weights: W_k, like the head.
    """

    head: Params
    weights: PyTree


@method(keeps="its head, weights of the global head", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAH:
    """FedAH (Zhou et al., 2024): a shared body, and personal heads that begin as mixtures with the global head.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedAH(weights_learning_rate=0.1)
        FedAH(weights_learning_rate=0.1, head_epochs=1, body_epochs=None, predict='aggregated')
    """

    weights_learning_rate: float = hyperparameter(
        1.0,
        at_least=0,
        grid=(0.1, 1.0, 10.0),
        help="eta, learning rate of the weights; 0: rounds begin with psi",
        former="rate",
    )
    head_epochs: int = hyperparameter(
        1, at_least=1, grid=(1, 5), help="number of epochs for the weights, and for the head"
    )
    body_epochs: int | None = hyperparameter(
        None,
        at_least=1,
        grid=(1, 5),
        help="number of epochs for the body. Default: as in local training",
    )
    predict: Literal["aggregated", "own"] = hyperparameter(
        "aggregated",
        help="predict with the aggregated head, or with the head as the client has trained it",
    )

    def build(self, problem: Problem) -> Algorithm:
        adoption = Adoption(
            problem, layers=1, rate=self.weights_learning_rate, epochs=self.head_epochs
        )

        def is_head(params: Params) -> PyTree:
            return problem.model.mask(params, 1)

        def is_body(params: Params) -> PyTree:
            return tree.complement(is_head(params))

        phases = [Phase(is_head, self.head_epochs), Phase(is_body, self.body_epochs)]

        # ---- The client.

        def first_row(key: Key, client: Array) -> Row:
            """phi_k = psi and W_k = 1."""
            model = problem.init_global(key)
            return Row(head=adoption.part(model), weights=adoption.first_weights(model))

        def aggregate_head(
            context: ClientContext, row: Row, received: Params, split: Split
        ) -> tuple[Params, PyTree]:
            """The received model (...) with the aggregated head, and W_k, which it learns first."""
            # W_k <- clip(W_k - eta grad l_k(theta, phi_k + (psi - phi_k) * W_k) * (psi - phi_k), 0, 1)
            context = context._replace(key=jax.random.fold_in(context.key, WEIGHTS))
            weights = adoption.learn(
                context, row.weights, row.head, received, split, self.head_epochs
            )
            # phi_k + (psi - phi_k) * W
            return adoption.mix(weights, row.head, received), weights

        def train(context: ClientContext, models: Params, row: Row, data: ClientData) -> Trained:
            context, models = problem.whole(context, models)
            start, weights = aggregate_head(context, row, tree.first(models), data.train)
            # phi_k, trained from the aggregated head with theta fixed; then theta_k, phi_k fixed.
            trained = train_phases(problem, phases, context, tree.stack_one(start), data.train)
            head = adoption.part(tree.first(trained.models))
            return trained._replace(row=Row(head, weights))

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> Prediction:
            """The head from which its next round would start, or its own, on the received body."""
            received = tree.first(models)
            if self.predict == "own":
                return Prediction.single(tree.combine(row.head, received))
            model, _ = aggregate_head(context, row, received, data.train)
            return Prediction.single(model)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train their own head from psi, with theta fixed."""
            start = tree.first(models)
            head_problem = problem.part(is_head(start)).with_epochs(self.head_epochs)
            return Prediction.single(head_problem.train_newcomer(context, data, start=start))

        passes = 2 * problem.passes(self.head_epochs) + problem.passes(self.body_epochs)
        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1, passes=passes),
            first_row=first_row,
            predict=predict,
            adapt=adapt,
            global_model=received_model if self.predict == "own" else None,
            report=MethodReport(scored=f"the global body with each client's {self.predict} head"),
        )
