"""FedBABU: the federation trains only the body; clients fine-tune before they predict.

Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification" (ICLR 2022, Algorithm 1).

    A round: client k receives the body theta and trains it to theta_k under the head phi, which is common to all
    clients and never trained; theta <- sum_k n_k theta_k / sum_k n_k.
    Before evaluation: client k tunes (theta, phi), or a part of it, for `tune_epochs` epochs on D_k.

Departures from the paper: none. The server draws the head once. It is not counted as traffic, since clients can draw it
from the same seed. Tuning starts with a fresh optimizer and the initial learning rate, as in FedAvg+.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, First, Ledger, Prediction, Report, Start
from pfljax.local.problem import Problem


@method(keeps="its tuned copy", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class FedBABU:
    """FedBABU (Oh et al., 2022): clients train the body together under a fixed head, then fine-tune both."""

    tune_epochs: int = knob(5, at_least=0, grid=(1, 5, 10), help="number of tuning epochs before evaluation")
    tuned: Literal["all", "head", "body"] = knob("all", help="what each client tunes before evaluation")

    def build(self, problem: Problem) -> Algorithm:
        head = lambda params: problem.model.mask(params, 1)
        body = lambda params: tree.complement(head(params))

        of_part = lambda part: problem.part(part(problem.model.network.shapes))
        training, tuning = of_part(body), {"all": problem, "head": of_part(head), "body": of_part(body)}[self.tuned]
        tuning = tuning.with_epochs(self.tune_epochs)

        def start(key, clients):
            models = problem.init_models(key, 1)
            theta, phi = tree.partition(models, body(models))
            return Start(server=phi, models=theta)

        def first_row(key, client, start):
            return First(training.kept_optimizers(tree.combine(start.models, start.server)))

        def train(context, theta, kept, data):
            models = tree.combine(theta, context.server)
            models, kept, losses = training.fit(context, models, kept, data.train)
            return tree.partition(models, body(models))[0], kept, losses

        def predict(context, theta, row, data):
            received = tree.first(tree.combine(theta, context.server))
            return Prediction.one(tuning.alone(context, received, data))

        what = {"all": "tuned", "head": "the head tuned", "body": "the body tuned"}[self.tuned]
        report = Report(scored=f"the shared body under the common head, {what} by each client on its training data")
        ledger = Ledger(gradients=1, unaccounted="the tuning")
        # Clients read only the head from the server's state, and they have it from the start.
        traffic = lambda counted: counted._replace(server=0.0)
        functions = {"start": start, "first_row": first_row, "train": train, "predict": predict, "traffic": traffic}
        return averaging(problem, **functions, ledger=ledger, report=report)
