"""Timing of compiled rounds, for experiments that compare them with other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pfljax.api.measuring import Dispatch, dispatcher
from pfljax.data import Federation
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver
from pfljax.models import Model
from pfljax.run.experiment import Experiment
from pfljax.training import compiling


def build(
    method: Any,
    federation: Federation,
    model: Model,
    solver: Solver,
    plan: ExecutionPlan,
    **options: Any,
) -> Experiment:
    """Builds a run in which all clients take part, from a model and a solver that are ready; see `Problem`."""
    num = federation.num_clients
    n_max = federation.train.y.shape[1]
    return Experiment(
        method, Problem(model, solver, plan, num, num, n_max, 1, **options), federation
    )


def compile_rounds(experiment: Experiment, trace: Path | None = None) -> Dispatch:
    """Compiles a method's rounds. Returns a function that runs the next one.

    Args:
        experiment: The run.
        trace: Folder for a profiler trace of additional rounds.
    """
    federation = experiment.federation
    clients = place(experiment.problem.plan, federation.client_data, federation.num_clients)
    return dispatcher(experiment, compiling.compile_to_fit(experiment, clients, 1), clients, trace)


def median_seconds(dispatch: Dispatch, repeats: int) -> float:
    """Returns the median seconds per round over `repeats` dispatches, after one warm-up dispatch."""
    dispatch()
    return float(np.median([dispatch()[0] for _ in range(repeats)]))
