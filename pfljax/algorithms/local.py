"""Local training: every client trains alone, the baseline that shows whether collaboration helps.

Each client k trains its own model phi_k on D_k; nothing is sent. Each client keeps its optimizer state across rounds.
"""

from __future__ import annotations

import dataclasses

from pfljax.contract import tree
from pfljax.contract.method import method
from pfljax.contract.types import Algorithm, ClientOutput, Ledger, Predictor, State
from pfljax.local.problem import Problem


@method(keeps="its model", travels="nothing")
@dataclasses.dataclass(frozen=True)
class Local:
    """Local training: every client trains its own model alone."""

    def build(self, problem: Problem) -> Algorithm:
        def init(key, clients):
            rows = problem.own_rows(key, problem.ids(clients), common=problem.model.fixed)
            return State((), models=rows["model"], optimizer=(), clients=rows["optimizer"])

        def client_update(context, models, optimizer, data):
            row, loss = problem.fit_own(context, {"model": tree.first(models), "optimizer": optimizer}, data.train)
            return ClientOutput(row["optimizer"], tree.stack_one(row["model"]), {"loss": loss})

        return Algorithm(
            init=init,
            client_update=client_update,
            server_update=lambda key, state, aggregate: (state._replace(models=aggregate.upload), {}),
            predictor=lambda key, state, clients: Predictor.own(state.models),
            adapt=lambda key, state, clients: problem.newcomers_alone(key, clients),
            topology="own",
            ledger=Ledger(gradients=1),
        )
