"""A run's compiled functions, and what both stores of clients need to make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pfljax.core.types import Algorithm, ClientData, Key, Predictor, State
from pfljax.engine.plan import ExecutionPlan
from pfljax.engine.rounds import by_client
from pfljax.training import memory


class Saving(NamedTuple):
    """How a run's state is saved that is not on the devices as a checkpoint holds it: its rows are in files or shared.

    Attributes:
        like: Shapes, types and places of what a checkpoint holds.
        freeze: state -> what a checkpoint holds, after all else is on the disk.
        thaw: (number of the run, its key of `Compiled.init`, what a checkpoint holds) -> state.
        saved: Takes the state once the checkpoint is whole; earlier ones are of no use from now on.
        check: Takes a number of rounds and gives the bytes on disk that all runs may need; raises if there are fewer.
    """

    like: Any
    freeze: Callable[[State], Any]
    thaw: Callable[[int, Key, Any], State]
    saved: Callable[[State], None]
    check: Callable[[int], int]


@dataclasses.dataclass
class Compiled:
    """A run's compiled functions, and where its state lives.

    Attributes:
        algorithm: The method, built for `plan`.
        plan: How clients are mapped.
        state: A State of ShapeDtypeStructs with shardings, of all runs (device store), or with NumPy arrays for the
            clients' rows, of one run (host store).
        init: (key, clients) -> State.
        segment: (key, start, stop, state, clients) -> (state, stacked records, number of rounds done).
        memory: What a segment needs on one device.
        compile_seconds: How long compiling took.
        making: What making the initial state needs on one device, where that is on the devices.
        saving: How the state is saved; None: as it is.
    """

    algorithm: Algorithm
    plan: ExecutionPlan
    state: Any
    init: Callable[[Key, ClientData], State]
    segment: Callable
    memory: memory.MemoryPlan
    compile_seconds: float
    making: memory.MemoryPlan | None = None
    saving: Saving | None = None


def state_shardings(algorithm: Algorithm, plan: ExecutionPlan, state: State, axis: int = 0) -> State:
    """Rows (at `axis`) of clients, and of models where they are the clients' own, are spread over the devices."""
    parts = [
        jax.tree.map(lambda leaf, rows=rows: plan.sharding(leaf, by_rows=bool(rows), axis=axis), part)
        for part, rows in zip(state, by_client(algorithm), strict=True)
    ]
    return State(*parts)


def shaped(stack: Any, shardings: Any) -> Any:
    """Shapes and types of a tree of arrays, living where `shardings` says."""
    make = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(make, stack, shardings)


def tuned(algorithm: Algorithm, key: Key, predictor: Predictor, clients: ClientData) -> Predictor:
    """What is evaluated in the predictor's place."""
    return algorithm.fine_tune(jax.random.fold_in(key, 1), predictor, clients) if algorithm.fine_tune else predictor


def is_private_mixture(predictor: Predictor) -> bool:
    """Whether clients mix several models of their own; weights are then recorded by the models' places, 0 to J - 1."""
    return predictor.topology == "own" and predictor.index.shape[-1] > 1
