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
from pfljax.exchange.lifting import Served, Use, select_models, serve
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.local.problem import Problem
from pfljax.run.compiled import Jitted
from pfljax.run.experiment import OWN, Experiment, Numbers
from pfljax.stores import stacks

# of clients that are served at once, if they take part in a round with fewer bytes
BLOCK_BYTES = 64 << 20


def scores(problem: Problem, algorithm: Algorithm, outputs: bool = False) -> Use:
    """Returns (prediction, a client's splits by name) -> its scores by split and name.

    With `outputs`, the clients' outputs come along, for `measured`.
    """

    def split_scores(prediction: Prediction, split: Split) -> dict[str, PyTree]:
        values = metrics.evaluate(problem, algorithm, prediction, split)
        if not outputs:
            return values
        return values | measures.outputs_of(problem, algorithm, prediction, split)

    def use(prediction: Prediction, splits: Mapping[str, Split]) -> dict[str, dict[str, PyTree]]:
        return {name: split_scores(prediction, split) for name, split in splits.items()}

    return use


def outputs(problem: Problem, algorithm: Algorithm, x: PyTree) -> Use:
    """Returns (prediction, anything) -> its outputs for x (B, *features)."""

    def use(prediction: Prediction, inputs: PyTree) -> Array:
        del inputs
        return metrics.predict(problem, algorithm, prediction, x)

    return use


def measured(
    run_metrics: Mapping[str, measures.Metric], served_scores: dict[str, dict], task: Task
) -> dict[str, dict]:
    """Replaces the outputs in what `scores` returned, as NumPy arrays, by a run's further metrics."""
    if not run_metrics:
        return served_scores

    def with_metrics(split_scores: dict[str, PyTree]) -> dict[str, PyTree]:
        values = {
            name: array for name, array in split_scores.items() if name not in measures.OUTPUTS
        }
        return values | measures.measured(run_metrics, split_scores, task)

    return {name: with_metrics(split_scores) for name, split_scores in served_scores.items()}


def scored_ids(experiment: Experiment) -> np.ndarray:
    """Returns the scored clients of a run, int32 (n,)."""
    if experiment.scored is not None:
        return experiment.scored
    return np.arange(experiment.problem.num_clients, dtype=np.int32)


def blocks(num: int, size: int) -> Iterator[np.ndarray]:
    """Positions of n clients in blocks of one size; the last block repeats the last client."""
    size = min(max(size, 1), num)
    for start in range(0, num, size):
        yield np.minimum(np.arange(start, start + size, dtype=np.int32), num - 1)


def joined(served_blocks: Sequence[Served], num: int) -> Served:
    """What n clients found, from what their `blocks` found, as NumPy arrays (n, ...)."""

    def join(*leaves: np.ndarray) -> np.ndarray:
        return np.concatenate(leaves)[:num]

    return jax.tree.map(join, *served_blocks)


class BlockServer:
    """Serves clients in blocks: rows, data and other clients' models are fetched from the host for each block."""

    def __init__(
        self,
        network: Holder,
        build: Callable[[Numbers], Algorithm],
        plan: ExecutionPlan,
        use: Callable[[Algorithm], Use],
        size: int,
        finish: Callable[[Any], Any] | None = None,
    ):
        """Compiles nothing yet.

        Args:
            network: The clients' network.
            build: Builds the method.
            plan: How clients are mapped to devices.
            use: The built method -> what clients do with their predictions.
            size: Number of clients at a time.
            finish: Turns what a block of clients found, NumPy arrays, into what is returned; None: unchanged.
        """

        def choose(numbers: Numbers, ids: Array, key: Key, state: State, sizes: Array) -> Mixture:
            algorithm = build(numbers)
            return select_models(algorithm, plan, key, state, ids, sizes)

        def serve_block(
            numbers: Numbers,
            ids: Array,
            key: Key,
            state: State,
            clients: ClientData,
            inputs: PyTree,
            mixture: Mixture | None,
            trained: Array | None,
        ) -> Served:
            algorithm = build(numbers)
            use_of = use(algorithm)
            return serve(
                algorithm, plan, use_of, key, state, ids, clients, inputs, mixture, trained
            )

        self.plan = plan
        self.size = size
        self.finish = finish
        self.reads_others = build(OWN).topology.reads_others
        self.jitted_choose = Jitted(network, plan, choose, out_shardings=plan.everywhere)
        self.jitted_serve = Jitted(network, plan, serve_block, out_shardings=plan.everywhere)

    def __call__(
        self,
        numbers: Numbers,
        ids: np.ndarray,
        key: Key,
        state: State,
        clients: ClientData,
        inputs: PyTree = (),
        trained: np.ndarray | None = None,
    ) -> Served:
        """Returns what clients `ids` (n,) found, as NumPy arrays (n, ...); see `lifting.serve`."""
        served_blocks: list[Served] = []
        for positions in blocks(len(ids), self.size):
            block_ids = ids[positions]
            served_blocks.append(
                self.block(numbers, block_ids, key, state, clients, inputs, trained)
            )
        return joined(served_blocks, len(ids))

    def block(
        self,
        numbers: Numbers,
        ids: np.ndarray,
        key: Key,
        state: State,
        clients: ClientData,
        inputs: PyTree,
        trained: np.ndarray | None = None,
    ) -> Served:
        """Serves one block of clients; when it returns, nothing of theirs is left on the devices."""
        clients = self.read(clients, ids)
        inputs = self.read(inputs, ids)
        trained = self.read(trained, ids)
        if self.reads_others:
            rows, mixture = self.read_with_collaborators(numbers, ids, key, state, clients)
        else:
            rows = self.read(state.clients, ids)
            mixture = None
        state = state._replace(clients=rows)
        served = self.jitted_serve(numbers, ids, key, state, clients, inputs, mixture, trained)
        served = jax.device_get(served)
        if self.finish is None:
            return served
        return served._replace(outputs=self.finish(served.outputs))

    def read(self, stack: PyTree, ids: np.ndarray) -> PyTree:
        """Puts rows `ids` of a stack on the host on the devices."""
        rows = stacks.read(stack, ids)
        return place(self.plan, rows, len(ids))

    def read_with_collaborators(
        self, numbers: Numbers, ids: np.ndarray, key: Key, state: State, data: ClientData
    ) -> tuple[First, Mixture]:
        """Returns the rows of clients `ids` (n,), and whose models they predict with.

        These models (n J, ...) are in place of their own, each client's J adjacent.
        """
        stack: First = state.clients
        stacks.verify(stack, ids)
        rows = self.read(stack._replace(model=()), ids)
        block_state = state._replace(clients=rows)
        mixture = self.jitted_choose(numbers, ids, key, block_state, data.train.size)

        index = np.asarray(mixture.index).reshape(-1)
        stacks.verify(stack, index)
        models = self.read(stack.model, index)
        return rows._replace(model=models), mixture
