"""What clients do with their predictions, for every store: scores, outputs, exported models."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.held import Holder
from pfljax.contract.pooled import is_pooled
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


class OnHost(NamedTuple):
    """What a block's clients need from the host's stacks.

    Attributes:
        rows: Their rows, but for models that are read by who predicts with them.
        clients: Their data.
        inputs: What they predict.
    """

    rows: First
    clients: ClientData
    inputs: PyTree


class BlockServer:
    """Serves clients in blocks: rows, data and other clients' models are fetched from the host for each block.

    Arrays that no result depends on, such as optimizers' states, are fetched for the first block only.
    """

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
        # Whether a result depends on a leaf of `OnHost`, once this is known.
        self.is_used: list[bool] | None = None

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
        has_more_blocks = len(ids) > self.size
        unused: dict[int, Array] | None = {} if has_more_blocks else None
        for positions in blocks(len(ids), self.size):
            block_ids = ids[positions]
            served_blocks.append(
                self.block(numbers, block_ids, key, state, clients, inputs, trained, unused)
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
        trained: np.ndarray | None,
        unused: dict[int, Array] | None,
    ) -> Served:
        """Serves one block of clients.

        Args:
            unused: Arrays on the devices of an earlier block, by their position in `OnHost`, in place of those that no
                result depends on. The first block adds them. None: there is one block.
        """
        rows = state.clients
        stacks.verify(rows, ids)
        on_host = OnHost(rows, clients, inputs)
        if self.reads_others:
            on_host = on_host._replace(rows=rows._replace(model=()))
        block = self.read_used(on_host, ids, unused or {})
        trained = self.read(trained, ids)

        mixture = None
        chosen = ()
        block_rows = block.rows
        if self.reads_others:
            block_state = state._replace(clients=block_rows)
            chosen = (numbers, ids, key, block_state, block.clients.train.size)
            mixture, models = self.read_collaborators(rows, chosen)
            block_rows = block_rows._replace(model=models)
        state = state._replace(clients=block_rows)
        arguments = (numbers, ids, key, state, block.clients, block.inputs, mixture, trained)
        served = jax.device_get(self.jitted_serve(*arguments))

        if unused is not None and not unused:
            if self.is_used is None:
                self.is_used = self.find_used(arguments, chosen)
            leaves = jax.tree.leaves(block)
            for number, (leaf, is_used) in enumerate(zip(leaves, self.is_used, strict=True)):
                if not is_used:
                    unused[number] = leaf
        if self.finish is None:
            return served
        return served._replace(outputs=self.finish(served.outputs))

    def read_used(self, on_host: OnHost, ids: np.ndarray, unused: Mapping[int, Array]) -> OnHost:
        """Puts what clients `ids` need on the devices; in place of `unused` leaves, those of an earlier block."""
        leaves, structure = jax.tree.flatten(on_host, is_leaf=is_pooled)
        needed = {number: leaf for number, leaf in enumerate(leaves) if number not in unused}
        on_devices = self.read(needed, ids) | dict(unused)
        return jax.tree.unflatten(structure, [on_devices[number] for number in range(len(leaves))])

    def find_used(self, arguments: tuple, chosen: tuple) -> list[bool]:
        """Returns whether predictions, or the choice of collaborators, depend on a leaf of `OnHost`."""
        _, _, _, state, clients, inputs, *_ = self.jitted_serve.used(*arguments)
        rows = state.clients
        if not chosen:
            return jax.tree.leaves(OnHost(rows, clients, inputs))

        # Clients read their rows and sizes when they choose, too.
        _, _, _, state, size = self.jitted_choose.used(*chosen)
        used_by_both = OnHost(rows._replace(model=()), clients, inputs)
        chosen_rows = jax.tree.map(operator.or_, used_by_both.rows, state.clients)
        train = clients.train._replace(size=clients.train.size or size)
        both = used_by_both._replace(rows=chosen_rows, clients=clients._replace(train=train))
        return jax.tree.leaves(both)

    def read(self, stack: PyTree, ids: np.ndarray) -> PyTree:
        """Puts rows `ids` of a stack on the host on the devices."""
        rows = stacks.read(stack, ids)
        return place(self.plan, rows, len(ids))

    def read_collaborators(self, stack: First, chosen: tuple) -> tuple[Mixture, PyTree]:
        """Returns whose models clients predict with, and these models (n J, ...), each client's J adjacent.

        Args:
            stack: All clients' rows, on the host.
            chosen: Arguments of the program that chooses.
        """
        mixture = self.jitted_choose(*chosen)
        index = np.asarray(mixture.index).reshape(-1)
        stacks.verify(stack, index)
        return mixture, self.read(stack.model, index)
