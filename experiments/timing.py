"""Timing of compiled rounds, for scaling and benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np

from pfljax import algorithms
from pfljax.mapping import Plan
from pfljax.models import Model
from pfljax.solvers import Problem, Solver
from pfljax.training import loop
from pfljax.types import Federation


def compile_rounds(
    name: str,
    config: object,
    federation: Federation,
    model: Model,
    solver: Solver,
    plan: Plan,
    cohort_size: int,
    rounds_per_dispatch: int,
) -> tuple[loop.Compiled, Callable[[], float]]:
    """Compiles a method's rounds and returns a function that runs one dispatch and tells its seconds a round."""
    n_max = federation.train.y.shape[1]

    def make(plan: Plan):
        problem = Problem(model, solver, plan, federation.num_clients, cohort_size, n_max, 1)
        return algorithms.get(name).make(problem, config)

    setup = loop.Setup(
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
    )
    clients = loop.place(plan, federation.shards, federation.num_clients)
    compiled = loop.compile_to_fit(setup, clients)
    key = jax.random.key(0)
    state, done = compiled.init(key, clients), 0

    def dispatch() -> float:
        nonlocal state, done
        begin = time.perf_counter()
        state, _, count = compiled.segment(key, done, done + rounds_per_dispatch, state, clients)
        count = int(count)
        jax.block_until_ready(state)
        done += count
        return (time.perf_counter() - begin) / count

    return compiled, dispatch


def median_seconds(dispatch: Callable[[], float], repeats: int) -> float:
    """Median seconds a round over `repeats` dispatches, after one to warm up."""
    dispatch()
    return float(np.median([dispatch() for _ in range(repeats)]))
