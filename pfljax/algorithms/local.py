"""Local training: every client trains alone, the baseline that shows whether collaboration helps.

Each client k trains its own model phi_k on D_k; nothing is sent. Each client keeps its optimizer state across rounds.
"""

from __future__ import annotations

import dataclasses

from pfljax.contract import tree
from pfljax.contract.method import method
from pfljax.contract.types import Algorithm, ClientOutput, First, Ledger
from pfljax.local.problem import OwnModel, Problem


@method(keeps="its model", travels="nothing")
@dataclasses.dataclass(frozen=True)
class Local:
    """Local training: every client trains its own model alone."""

    def build(self, problem: Problem) -> Algorithm:
        def first_row(key, client, start):
            own = problem.own_model(key, client, common=problem.model.network.fixed)
            return First(own.optimizer, own.model)

        def client_update(context, models, optimizer, data):
            own, loss = OwnModel(tree.first(models), optimizer).fit(problem, context, data.train)
            return ClientOutput(own.optimizer, tree.stack_one(own.model), {"loss": loss})

        return Algorithm(
            first_row=first_row,
            client_update=client_update,
            server_update=lambda key, state, aggregate: (state._replace(models=aggregate.upload), {}),
            adapt=problem.newcomer,
            topology="own",
            ledger=Ledger(gradients=1),
        )
