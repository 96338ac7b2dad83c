"""Ditto: a global model and personal models regularized toward it.

Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization" (ICML
2021, Algorithm 1).

    A round: client k receives w and trains it to w_k as in FedAvg;
    its own v_k takes local steps on l_k(v_k) + lambda / 2 |v_k - w|^2, w as received;
    w <- sum_k n_k w_k / sum_k n_k.  Client k predicts with v_k.

On adapters of a frozen model, this is PerAda (Xie et al., CVPR 2024, `perada`) without its server's
distillation.

Departures from the paper: Both models see the data in the same order and for equally long. The mean
is weighted by n_k. Newcomers train a model from w, regularized toward it, for as many rounds as the
run has.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Params,
    Prediction,
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Objective, Personal, Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="its model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Ditto:
    """Ditto (Li et al., 2021): a global model and personal models regularized toward it.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.Ditto(mu=1.0)
        Ditto(mu=1.0)
    """

    mu: float = hyperparameter(
        0.1,
        at_least=0,
        grid=(0.01, 0.1, 1.0, 2.0),
        help="lambda, pull of the personal model toward the global one; 0 is Local",
        former="strength",
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        def near(global_params: Params) -> Objective:
            """l_k(v_k) + lambda / 2 |v_k - w|^2."""

            def objective(params: Params, batch: Batch) -> Array:
                distance = solver.squared_distance(params, global_params)
                return solver.mean_loss(params, batch) + self.mu / 2 * distance

            return objective

        def first_row(key: Key, client: Array) -> Personal:
            return problem.init_personal(key, client)

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            # w_k, as in FedAvg.
            trained = problem.fit(context, models, data.train)
            # v_k, toward w as received.
            objective = near(tree.first(models))
            personal, loss = problem.fit_personal(
                context, personal, data.train, objective, number=1
            )
            return trained._replace(row=personal, losses=loss[None])

        def own_model(personal: Personal) -> Params:
            return personal.params

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train a model from w, regularized toward it."""
            global_params = tree.first(models)
            params = problem.train_newcomer(
                context, data, near(global_params), start=global_params, number=1
            )
            return Prediction.single(params)

        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=2),
            first_row=first_row,
            own_model=own_model,
            adapt=adapt,
        )
