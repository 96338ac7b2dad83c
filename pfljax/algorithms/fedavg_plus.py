"""FedAvg+: FedAvg whose clients tune the global model before they predict.

Jiang, Konecny, Rush, Kannan, "Improving federated learning personalization via model agnostic meta learning" (2019), as
FedEM and FedeRiCo compare with it.

    Before evaluation: client k trains theta for `tune_epochs` epochs on D_k.

Departures from the paper: none. Tuning always starts with a fresh optimizer and the initial learning rate, whatever the
schedule: at a hundredth of that rate, which a schedule may end at, tuning would change almost nothing.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    ClientContext,
    ClientData,
    Ledger,
    MethodReport,
    Params,
    Prediction,
    PyTree,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(name="fedavg_plus", keeps="its tuned copy", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAvgPlus:
    """FedAvg with local tuning (Jiang et al., 2019): every client fine-tunes the global model before it predicts.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedAvgPlus(tune_epochs=5)
        FedAvgPlus(tune_epochs=5)
    """

    tune_epochs: int = hyperparameter(
        1,
        at_least=0,
        grid=(1, 2, 5, 10),
        help="number of epochs of each client's tuning before evaluation",
    )

    def build(self, problem: Problem) -> Algorithm:
        tuning = problem.with_epochs(self.tune_epochs)

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            """Client k trains theta for `tune_epochs` epochs on D_k."""
            tuned = tuning.train_newcomer(context, data, start=tree.first(models), rounds=1)
            return Prediction.single(tuned)

        return averaging(
            problem,
            ledger=Ledger(gradients=1, unaccounted="the tuning"),
            predict=predict,
            report=MethodReport("the global model, tuned by each client on its training data"),
        )
