"""Secure aggregation: the server sees nothing but the sum of what clients send.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (CCS 2017). Nothing is encrypted
here: what needs single messages is refused. A client's loss is the simulator's own, and the squared norm of its update
is added up, too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, ClientData, ClientOutput, Key, PyTree, Start
from pfljax.local.problem import Problem
from pfljax.stages.messages import LocalWork
from pfljax.stages.stage import Stage, StageState

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline

REFUSED = "accepted for this method: False"


def summing_stage(problem: Problem, pipeline: Pipeline) -> Summing:
    """The stage of secure aggregation.

    Raises:
        ArgumentError: if no server adds what clients send.
    """
    method = pipeline.method
    if not method.topology.on_server or method.sends == "models":
        text = f"{REFUSED}; no server adds what clients send"
        raise ArgumentError("secure_aggregation", text, True)
    return Summing(problem, method)


@dataclasses.dataclass(frozen=True)
class Summing(Stage):
    """Refuses methods whose server needs more than sums, when their rounds are traced."""

    name = "secure_aggregation"
    problem: Problem
    method: Algorithm

    def server_note(self, key: Key, start: Start, clients: ClientData) -> PyTree:
        num_clients = self.problem.num_clients
        lengths = [leaf.shape[0] for leaf in jax.tree.leaves(start.models)]
        if num_clients > 1 and num_clients in lengths and not self.method.stale:
            why = "its server has a model for each client, to which only that one adds"
            raise ArgumentError("secure_aggregation", f"{REFUSED}; {why}", True)
        return ()

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        if output.report.entries:
            why = f"its server reads each client's {', '.join(output.report.entries)}"
            raise ArgumentError("secure_aggregation", f"{REFUSED}; {why}", True)
        return output, note.client
