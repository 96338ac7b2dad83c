"""FedProx: FedAvg with a proximal term that keeps clients near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks"
(MLSys 2020).

    A round: client k receives theta and takes local steps on l_k(theta_k) + mu / 2 |theta_k - theta|^2    (Eq. 2)
    theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: The mean is weighted by n_k over uniformly drawn cohorts; the paper draws
clients in proportion to n_k and weights them equally. Every client trains for the same number of
epochs.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Ledger,
    Params,
    PyTree,
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedProx:
    """FedProx (Li et al., 2020): a proximal term keeps clients near the global model.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedProx(mu=0.01)
        FedProx(mu=0.01)
    """

    mu: float = hyperparameter(
        0.1,
        at_least=0,
        grid=(0.001, 0.01, 0.1, 1.0),
        help="weight of the proximal term; 0 is FedAvg",
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        def objective(params: Params, batch: Batch, global_params: Params) -> Array:
            """l_k(theta_k) + mu / 2 |theta_k - theta|^2  (Eq. 2)."""
            distance = solver.squared_distance(params, global_params)
            return solver.mean_loss(params, batch) + self.mu / 2 * distance

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            # Local steps on the objective from theta_k = theta; `per_model` is its `global_params`.
            return problem.fit(context, models, data.train, objective, per_model=models)

        # theta <- sum_k n_k theta_k / sum_k n_k
        return averaging(problem, train=train, ledger=Ledger(gradients=1))
