"""Timing of compiled rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfljax.contract.types import ClientData
from pfljax.data import Federation
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import Record
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver
from pfljax.models import Model
from pfljax.stores.compiled import Compiled
from pfljax.stores.experiment import Experiment
from pfljax.training import loop

Dispatch = Callable[[], tuple[float, Record]]  # runs one dispatch: (seconds per round, stacked records)


def build(
    method: Any,
    federation: Federation,
    model: Model,
    solver: Solver,
    plan: ExecutionPlan,
    cohort_size: int,
    client_store: str = "device",
    **options: Any,
) -> Experiment:
    """Builds a run whose rounds are timed. The federation can consist of shapes only.

    Args:
        method: The method with its knobs.
        federation: The clients.
        model: The clients' network.
        solver: The clients' solver.
        plan: How clients are mapped to devices.
        cohort_size: S.
        client_store: See `Execution`.
        options: Fields of `Problem` by name.
    """
    n_max = federation.train.y.shape[1]
    problem = Problem(model, solver, plan, federation.num_clients, cohort_size, n_max, 1, **options)
    return Experiment(method, problem, federation, client_store=client_store)


def start(
    experiment: Experiment,
    rounds: Compiled,
    clients: ClientData,
    length: int,
    trace: Path | None = None,
    period: int | None = None,
) -> Dispatch:
    """Initializes the state. Returns a function that runs the next `length` rounds on it.

    Args:
        experiment: The run.
        rounds: The compiled rounds of `loop.compile_to_fit`.
        clients: The clients' data.
        length: Number of rounds per dispatch.
        trace: Folder for a profiler trace of additional rounds.
        period: Number of rounds after which round numbers, and so cohorts, repeat; None: never.
    """
    key = jax.random.key(0)
    keys = experiment.keys(key, key)
    if trace:
        print(f"  {loop.profile(trace, rounds, lambda purpose: keys if purpose else key, clients)}", flush=True)
    state, done = rounds.init(key, clients), 0

    def dispatch() -> tuple[float, Record]:
        nonlocal state, done
        begin = time.perf_counter()
        number = done % period if period else done
        state, records, count = rounds.segment(keys, number, number + length, state, clients)
        count = int(count)
        jax.block_until_ready(state)
        done += count
        return (time.perf_counter() - begin) / count, records

    return dispatch


def compile_rounds(experiment: Experiment, length: int = 1, trace: Path | None = None) -> Dispatch:
    """Compiles a method's rounds and calls `start`."""
    federation = experiment.federation
    clients = place(experiment.problem.plan, federation.client_data, federation.num_clients)
    return start(experiment, loop.compile_to_fit(experiment, clients, length), clients, length, trace)


def median_seconds(dispatch: Dispatch, repeats: int) -> float:
    """Returns the median seconds per round over `repeats` dispatches, after one warm-up dispatch."""
    dispatch()
    return float(np.median([dispatch()[0] for _ in range(repeats)]))
