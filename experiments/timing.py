"""Timing of compiled rounds, for scaling and benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfljax import algorithms
from pfljax.core.types import ClientData
from pfljax.data import Federation
from pfljax.engine.plan import ExecutionPlan
from pfljax.engine.rounds import Record
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver
from pfljax.models import Model
from pfljax.training import loop

Dispatch = Callable[[], tuple[float, Record]]  # runs one dispatch: its seconds a round, and its records, stacked


def setup(
    name: str,
    config: object,
    federation: Federation,
    model: Model,
    solver: Solver,
    plan: ExecutionPlan,
    cohort_size: int,
    rounds_per_dispatch: int,
    client_store: str = "device",
    **options: Any,
) -> loop.Setup:
    """A run of a method for the sake of its rounds; of the federation the shapes are enough.

    Args:
        name: The method's.
        config: Its hyper-parameters.
        federation: The clients.
        model: Their network.
        solver: How they train it.
        plan: How they are mapped.
        cohort_size: S.
        rounds_per_dispatch: Rounds that a dispatch may take at once.
        client_store: As in `loop.Setup`.
        options: Fields of `Problem` by name.
    """
    n_max = federation.train.y.shape[1]

    def make(plan: ExecutionPlan):
        problem = Problem(model, solver, plan, federation.num_clients, cohort_size, n_max, 1, **options)
        return algorithms.get(name).make(problem, config)

    return loop.Setup(
        name=name,
        make=make,
        model=model,
        solver=solver,
        federation=federation,
        unseen=None,
        plan=plan,
        rounds=rounds_per_dispatch,
        cohort_size=cohort_size,
        eval_every=rounds_per_dispatch,
        checkpoint_every=rounds_per_dispatch,
        seed=0,
        config={},
        client_store=client_store,
    )


def start(
    compiled: loop.Compiled, clients: ClientData, rounds_per_dispatch: int, trace: Path | None = None
) -> Dispatch:
    """Makes the state, and gives what runs the next rounds on it; a profiler's trace of others goes to `trace`."""
    if trace:
        print(f"  {loop.profile(trace, compiled, lambda purpose: jax.random.key(purpose), clients)}", flush=True)
    key = jax.random.key(0)
    state, done = compiled.init(key, clients), 0

    def dispatch() -> tuple[float, Record]:
        nonlocal state, done
        begin = time.perf_counter()
        state, records, count = compiled.segment(key, done, done + rounds_per_dispatch, state, clients)
        count = int(count)
        jax.block_until_ready(state)
        done += count
        return (time.perf_counter() - begin) / count, records

    return dispatch


def compile_rounds(setup: loop.Setup, trace: Path | None = None) -> Dispatch:
    """Compiles a method's rounds and starts them, as `start`."""
    clients = loop.place(setup.plan, setup.federation.client_data, setup.federation.num_clients)
    return start(loop.compile_to_fit(setup, clients), clients, setup.rounds, trace)


def median_seconds(dispatch: Dispatch, repeats: int) -> float:
    """Median seconds a round over `repeats` dispatches, after one to warm up."""
    dispatch()
    return float(np.median([dispatch()[0] for _ in range(repeats)]))
