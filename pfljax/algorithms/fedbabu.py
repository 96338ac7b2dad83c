"""FedBABU: the federation trains only the body; clients fine-tune before they predict.

Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification" (ICLR 2022, Algorithm 1).

    A round: client k receives the body theta and trains it to theta_k under the head phi, which is common to all
    clients and never trained;
    theta <- sum_k n_k theta_k / sum_k n_k.
    Before evaluation: client k tunes (theta, phi), or a part of it, for `tune_epochs` epochs on D_k.

Departures from the paper: none. The server draws the head once. It is not counted as traffic, since clients can draw it
from the same seed. Tuning starts with a fresh optimizer and the initial learning rate, as in FedAvg+.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Params,
    Prediction,
    PyTree,
    Traffic,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="its tuned copy", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class FedBABU:
    """FedBABU (Oh et al., 2022): clients train the body together under a fixed head, then fine-tune both.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedBABU(tune_epochs=10, tuned="head")
        FedBABU(tune_epochs=10, tuned='head')
    """

    tune_epochs: int = hyperparameter(
        5, at_least=0, grid=(1, 5, 10), help="number of tuning epochs before evaluation"
    )
    tuned: Literal["all", "head", "body"] = hyperparameter(
        "all", help="what each client tunes before evaluation"
    )

    def build(self, problem: Problem) -> Algorithm:
        def is_head(params: Params) -> PyTree:
            """Which leaves are phi: those of the last layer."""
            return problem.model.mask(params, num=1)

        def is_body(params: Params) -> PyTree:
            """Which leaves are theta: all others."""
            return tree.complement(is_head(params))

        # Problems whose local training changes only theta, only phi, or what `tuned` says.
        shapes = problem.model.network.shapes
        body_problem = problem.part(is_body(shapes))
        head_problem = problem.part(is_head(shapes))
        problems = {"all": problem, "head": head_problem, "body": body_problem}
        tuning_problem = problems[self.tuned].with_epochs(self.tune_epochs)

        def first_server(key: Key, theta: Params, clients: ClientData) -> Params:
            """phi (1, ...), the head of the initial model. The server's state is phi."""
            models = problem.init_models(key, num=1)
            _, phi = tree.partition(models, is_body(models))
            return phi

        def train(context: ClientContext, theta: Params, row: PyTree, data: ClientData) -> Trained:
            # Client k receives theta, here with its batch statistics, and has phi.
            context, theta = problem.whole(context, theta)
            phi = context.server
            models = tree.combine(theta, phi)
            # theta_k under phi, which is never trained
            trained = body_problem.fit(context, models, data.train)
            theta_k, _ = tree.partition(trained.models, is_body(models))
            return trained._replace(models=theta_k)

        def predict(
            context: ClientContext, theta: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            """Client k tunes (theta, phi), or a part of it, for `tune_epochs` epochs on D_k."""
            phi = context.server
            models = tree.combine(theta, phi)
            tuned = tuning_problem.train_newcomer(
                context,
                data,
                start=tree.first(models),
                rounds=1,
            )
            return Prediction.single(tuned)

        def traffic(counted: Traffic) -> Traffic:
            """Clients read only the head from the server's state, and they have it from the start."""
            return counted._replace(server=0.0)

        texts = {"all": "tuned", "head": "the head tuned", "body": "the body tuned"}
        text = texts[self.tuned]
        scored = (
            f"the shared body under the common head, {text} by each client on its training data"
        )
        # theta <- sum_k n_k theta_k / sum_k n_k, of the body
        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1, unaccounted="the tuning"),
            first_server=first_server,
            shared=is_body,
            predict=predict,
            report=MethodReport(scored),
            traffic=traffic,
        )
