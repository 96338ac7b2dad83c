"""Compiled rounds that fit in memory, and what is done with them beside training: profiles and timed rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import jax

from pfljax.contract.types import ClientData, Key
from pfljax.exchange.rounds import Record
from pfljax.stores import memory
from pfljax.stores.compiled import Compiled
from pfljax.stores.experiment import Experiment
from pfljax.stores.registry import store_of
from pfljax.stores.replicates import ONE, Replicates
from pfljax.training import choosing

Dispatch = Callable[[], tuple[float, Record]]  # plays the next round: (seconds, record)


def compile_to_fit(experiment: Experiment, clients: ClientData, length: int, replicates: Replicates = ONE) -> Compiled:
    """Compiles with the largest chunk, no larger than the plan's, that fits in device memory.

    Models that would be gathered on every device are first passed around a ring instead. Raises `RunError` if even one
    client at a time does not fit.
    """
    problem = experiment.problem
    plan, store = choosing.chosen(experiment), store_of(experiment)
    while True:
        sorted_plan = plan.for_steps(experiment.steps, problem.cohort_size)
        found = store.compile_segment(experiment, clients, sorted_plan, length, replicates)
        if found.memory.fits:
            if found.making and not found.making.fits:
                raise memory.too_large(found.making, "initializing the state")
            return found
        plan = memory.next_smaller(plan, problem.cohort_size, found.algorithm.topology)
        if plan is None:
            raise memory.too_large(found.memory)


def profile(directory: Path, compiled: Compiled, key_for: Callable[[int], Key], clients: ClientData) -> str:
    """Traces a few rounds on a state that is then discarded. Returns a line that describes where their time goes."""
    from pfljax.exchange import profiling

    dispatch = dispatcher(compiled, key_for, clients)
    dispatch()
    return profiling.describe(profiling.profile(directory, dispatch))


def dispatcher(
    compiled: Compiled, key_for: Callable[[int], Key], clients: ClientData, period: int | None = None
) -> Dispatch:
    """Initializes a state. Returns a function that plays its next round to the end.

    `key_for` has the keys of the initial state (0) and of the rounds (1). After `period` rounds, round numbers, and so
    cohorts, repeat; None: never.
    """
    state, done, rounds_key = compiled.init(key_for(0), clients), 0, key_for(1)

    def dispatch() -> tuple[float, Record]:
        nonlocal state, done
        begin, number = time.perf_counter(), done % period if period else done
        state, record, _ = compiled.segment(rounds_key, number, number + 1, state, clients)
        jax.block_until_ready(state)
        done += 1
        return time.perf_counter() - begin, record

    return dispatch
