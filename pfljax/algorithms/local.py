"""Local training: every client trains alone, the baseline that shows whether collaboration helps.

Each client k trains its own model phi_k on D_k; nothing is sent. Each client keeps its optimizer's
state across rounds.
"""

from __future__ import annotations

import dataclasses

from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    First,
    Key,
    Ledger,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.problem import Personal, Problem
from pfljax.settings.method import method


@method(keeps="its model", travels="nothing")
@dataclasses.dataclass(frozen=True)
class Local:
    """Local training: every client trains its own model alone.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.Local()
        Local()
    """

    def build(self, problem: Problem) -> Algorithm:
        def first_row(key: Key, client: Array, start: Start) -> First:
            """A client's row is its optimizer's state."""
            personal = problem.init_personal(key, client, common=problem.model.network.fixed)
            return First(row=personal.opt_state, model=personal.params)

        def client_update(
            context: ClientContext, models: Params, opt_state: PyTree, data: ClientData
        ) -> ClientOutput:
            personal = Personal(tree.first(models), opt_state)
            personal, loss = problem.fit_personal(context, personal, data.train)
            return ClientOutput(
                row=personal.opt_state,
                upload=Upload(tree.stack_one(personal.params)),
                report=ClientReport(loss),
            )

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            return state.with_models(aggregate.upload.update), {}

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train alone, too."""
            return Prediction.single(problem.train_newcomer(context, data))

        return Algorithm(
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            adapt=adapt,
            topology=Topology.OWN,
            ledger=Ledger(gradients=1),
        )
