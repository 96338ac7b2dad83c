"""What clients do with their predictions, for every store: scores, outputs, exported models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pfljax.contract.held import Holder
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientData,
    First,
    Key,
    Mixture,
    Prediction,
    PyTree,
    Split,
    State,
    Task,
)
from pfljax.evaluation import measures, metrics
from pfljax.exchange.lifting import Served, Use, serve, whom
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.local.problem import Problem
from pfljax.run.compiled import Jitted
from pfljax.run.experiment import OWN, Numbers
from pfljax.stores import stacks

# of clients that are served at once, if they take part in a round with fewer bytes
BLOCK_BYTES = 64 << 20


def scores(problem: Problem, algorithm: Algorithm, outputs: bool = False) -> Use:
    """Returns (prediction, a client's splits by name) -> its scores by split and name.

    With `outputs`, the clients' outputs come along, for `measured`.
    """

    def of_split(prediction: Prediction, split: Split) -> dict[str, Array]:
        found = metrics.evaluate(problem, algorithm, prediction, split)
        return (
            found | measures.outputs_of(problem, algorithm, prediction, split) if outputs else found
        )

    return lambda prediction, splits: {
        name: of_split(prediction, part) for name, part in splits.items()
    }


def outputs(problem: Problem, algorithm: Algorithm, x: PyTree) -> Use:
    """Returns (prediction, anything) -> its outputs for x (B, *features)."""
    return lambda prediction, _: metrics.predict(problem, algorithm, prediction, x)


def measured(
    own: Mapping[str, measures.Metric], found: dict[str, dict], task: Task
) -> dict[str, dict]:
    """Replaces the outputs in what `scores` found, as NumPy arrays, by a run's own metrics."""
    if not own:
        return found
    names = measures.OUTPUTS
    kept = {
        part: {name: values for name, values in of.items() if name not in names}
        for part, of in found.items()
    }
    return {part: kept[part] | measures.measured(own, of, task) for part, of in found.items()}


def blocks(num: int, size: int) -> Iterator[np.ndarray]:
    """Places of n clients in blocks of one size; the last block repeats the last client."""
    size = min(max(size, 1), num)
    for start in range(0, num, size):
        yield np.minimum(np.arange(start, start + size, dtype=np.int32), num - 1)


def joined(parts: Sequence[Served], num: int) -> Served:
    """What n clients found, from what their `blocks` found, as NumPy arrays (n, ...)."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:num], *parts)


def in_blocks(
    network: Holder,
    build: Callable[[Numbers], Algorithm],
    plan: ExecutionPlan,
    use: Callable[[Algorithm], Use],
    size: int,
    finish: Callable[[Any], Any] = lambda found: found,
) -> Callable[..., Served]:
    """Serves clients in blocks: rows, data and other clients' models are fetched from the host for each block.

    Args:
        network: The clients' network.
        build: Builds the method.
        plan: How clients are mapped to devices.
        use: The built method -> what clients do with their predictions.
        size: Number of clients at a time.
        finish: Turns what a block of clients found, NumPy arrays, into what is kept.

    Returns:
        (numbers, ids (n,), key, state, clients, inputs) -> what these clients found, as NumPy arrays (n, ...); see
        `lifting.serve`.
    """
    reads_others = build(OWN).topology.reads_others

    def choose(numbers: Numbers, ids: Array, key: Key, state: State, sizes: Array) -> Mixture:
        return whom(build(numbers), plan, key, state, ids, sizes)

    def serve_block(numbers: Numbers, ids: Array, key: Key, state: State, *args: Any) -> Served:
        method = build(numbers)
        return serve(method, plan, use(method), key, state, ids, *args)

    chosen, served = (
        Jitted(network, plan, fn, out_shardings=plan.everywhere) for fn in (choose, serve_block)
    )

    def read(stack: PyTree, ids: np.ndarray) -> PyTree:
        return place(plan, stacks.read(stack, ids), len(ids))

    def of_block(
        numbers: Numbers,
        ids: np.ndarray,
        key: Key,
        state: State,
        clients: ClientData,
        inputs: PyTree,
    ):
        stack: First = state.clients
        clients = read(clients, ids)
        inputs = read(inputs, ids)
        if reads_others:  # each client's collaborators become models of its own, adjacent
            stacks.verify(stack, ids)
            held = read(stack._replace(model=()), ids)
            mixture = chosen(numbers, ids, key, state._replace(clients=held), clients.train.size)
            index = np.asarray(mixture.index).reshape(-1)
            stacks.verify(stack, index)
            held = held._replace(model=read(stack.model, index))
        else:
            held = read(stack, ids)
            mixture = None
        state = state._replace(clients=held)
        found = jax.device_get(served(numbers, ids, key, state, clients, inputs, mixture))
        return found._replace(found=finish(found.found))

    def of_all(
        numbers: Numbers,
        ids: np.ndarray,
        key: Key,
        state: State,
        clients: ClientData,
        inputs: PyTree = (),
    ):
        parts = [
            of_block(numbers, ids[block], key, state, clients, inputs)
            for block in blocks(len(ids), size)
        ]
        return joined(parts, len(ids))

    return of_all
