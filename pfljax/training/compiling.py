"""Compiled rounds that fit in memory, and what is done with them beside training: timed rounds."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from pfljax.contract.types import ClientData, Key
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.rounds import Record
from pfljax.run import memory
from pfljax.run.compiled import Compiled
from pfljax.run.experiment import Experiment
from pfljax.run.replicates import ONE, Replicates
from pfljax.stores.registry import store_of
from pfljax.training import choosing

Dispatch = Callable[[], tuple[float, Record]]  # plays the next round: (seconds, record)


def compile_to_fit(
    experiment: Experiment, clients: ClientData, length: int, replicates: Replicates = ONE
) -> Compiled:
    """Compiles with the largest chunk, no larger than the plan's, that fits in device memory.

    Models that would be gathered on every device are first passed around a ring instead.

    Raises:
        RunError: if even one client at a time does not fit.
    """
    cohort_size = experiment.problem.cohort_size
    store = store_of(experiment)

    def compiled_with(plan: ExecutionPlan, length: int) -> Compiled:
        sorted_plan = plan.for_steps(experiment.steps, cohort_size)
        return store.compile_segment(experiment, clients, sorted_plan, length, replicates)

    def any_key(purpose: int) -> Key:
        key = jax.random.key(purpose)
        if purpose:
            key = experiment.keys(key, key)
        return replicates.join([key] * replicates.num)

    def played_seconds(plan: ExecutionPlan) -> float | None:
        """Seconds of the plan's second round, which has no first time to wait for."""
        compiled = compiled_with(plan, 1)
        if not compiled.memory.fits:
            return None
        dispatch = dispatcher(compiled, any_key, clients)
        dispatch()
        seconds, _ = dispatch()
        return seconds

    plan = choosing.chosen(experiment, played_seconds)
    while plan is not None:
        compiled = compiled_with(plan, length)
        if compiled.memory.fits:
            if compiled.making and not compiled.making.fits:
                raise memory.too_large(compiled.making, "initializing the state")
            return compiled
        plan = memory.next_smaller(plan, cohort_size, compiled.algorithm.topology)
    raise memory.too_large(compiled.memory)


def dispatcher(
    compiled: Compiled,
    key_for: Callable[[int], Key],
    clients: ClientData,
    period: int | None = None,
) -> Dispatch:
    """Initializes a state. Returns a function that plays its next round to the end.

    Args:
        compiled: The rounds.
        key_for: Has the keys of the initial state (0) and of the rounds (1).
        clients: The clients' data, as the store keeps it.
        period: Number of rounds after which round numbers, and so cohorts, repeat; None: never.
    """
    state = compiled.init(key_for(0), clients)
    rounds_key = key_for(1)
    done = 0

    def dispatch() -> tuple[float, Record]:
        nonlocal state, done
        number = done % period if period else done
        begin = time.perf_counter()
        state, record, _ = compiled.segment(rounds_key, number, number + 1, state, clients)
        jax.block_until_ready(state)
        done += 1
        return time.perf_counter() - begin, record

    return dispatch
