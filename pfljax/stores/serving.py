"""What clients do with their predictions, for every store: scores, outputs, exported models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pfljax.contract.types import Algorithm, Array, ClientData, Key, Mixture, Prediction, PyTree, Split, State
from pfljax.evaluation import measures, metrics
from pfljax.exchange.lifting import Served, Use, join_state, serve, split_state, whom
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.models import Model
from pfljax.stores import stacks
from pfljax.stores.experiment import OWN, Numbers


def scores(plan: ExecutionPlan, model: Model, algorithm: Algorithm, outputs: bool = False) -> Use:
    """Returns (prediction, a client's splits by name) -> its scores by split and name.

    With `outputs`, the predictions come along, for `measured`.
    """

    def of_split(prediction: Prediction, split: Split) -> dict[str, Array]:
        found = metrics.evaluate(plan, model, algorithm, prediction, split)
        return found | measures.outputs_of(plan, model, algorithm, prediction, split) if outputs else found

    return lambda prediction, splits: {name: of_split(prediction, part) for name, part in splits.items()}


def measured(own: Mapping[str, measures.Metric], found: dict[str, dict]) -> dict[str, dict]:
    """Replaces the predictions in what `scores` found, as NumPy arrays, by a run's own metrics."""
    if not own:
        return found
    names = measures.OUTPUTS
    kept = {part: {name: values for name, values in of.items() if name not in names} for part, of in found.items()}
    return {part: kept[part] | measures.measured(own, of) for part, of in found.items()}


class Blocks:
    """Serves clients in blocks: rows, data and other clients' models are fetched from the host for each block."""

    def __init__(
        self,
        build: Callable[[Numbers], Algorithm],
        plan: ExecutionPlan,
        use: Callable[[Algorithm], Use],
        size: int,
        finish: Callable[[Any], Any] = lambda found: found,
    ):
        """Compiles nothing yet.

        Args:
            build: Builds the method.
            plan: How clients are mapped to devices.
            use: The built method -> what clients do with their predictions.
            size: Number of clients at a time.
            finish: Turns what a block of clients found, NumPy arrays, into what is kept.
        """
        self.build, self.plan, self.use, self.size, self.finish = build, plan, use, size, finish
        self.algorithm = build(OWN)
        self.choose = jax.jit(self._choose, out_shardings=plan.everywhere)
        self.serve = jax.jit(self._serve, out_shardings=plan.everywhere)

    def _choose(self, numbers: Numbers, ids: Array, key: Key, rows: State, rest: State, sizes: Array) -> Mixture:
        algorithm = self.build(numbers)
        return whom(algorithm, self.plan, key, join_state(algorithm, rows, rest), ids, sizes)

    def _serve(
        self,
        numbers: Numbers,
        ids: Array,
        key: Key,
        rows: State,
        rest: State,
        clients: ClientData,
        inputs: PyTree,
        mixture: Mixture | None,
    ) -> Served:
        algorithm = self.build(numbers)
        state = join_state(algorithm, rows, rest)
        return serve(algorithm, self.plan, self.use(algorithm), key, state, ids, clients, inputs, mixture)

    def __call__(
        self, numbers: Numbers, ids: np.ndarray, key: Key, state: State, clients: ClientData, inputs: PyTree = ()
    ) -> Served:
        """Returns what clients `ids` (n,) found, as NumPy arrays (n, ...); see `lifting.serve`."""
        parts, size = [], min(self.size, len(ids))
        for start in range(0, len(ids), size):
            block = ids[np.minimum(np.arange(start, start + size), len(ids) - 1)]  # repeats the last client
            found = self._of_block(numbers, block, key, state, clients, inputs)
            parts.append(found)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(ids)], *parts)

    def _of_block(
        self, numbers: Numbers, ids: np.ndarray, key: Key, state: State, clients: ClientData, inputs: PyTree
    ) -> Served:
        peers = self.algorithm.topology == "peers"
        there = lambda stack: place(self.plan, stacks.read(stack, ids), len(ids))
        stack, rest = split_state(self.algorithm, state)
        if peers:
            stacks.verify(stack, ids)
        rows, mixture = there(stack._replace(models=()) if peers else stack), None
        clients, inputs = there(clients), there(inputs)
        if peers:  # each client's collaborators become models of its own, adjacent
            mixture = self.choose(numbers, ids, key, rows, rest, clients.train.size)
            index = np.asarray(mixture.index).reshape(-1)
            stacks.verify(stack, index)
            rows = rows._replace(models=place(self.plan, stacks.read(stack.models, index), len(index)))
        served = jax.device_get(self.serve(numbers, ids, key, rows, rest, clients, inputs, mixture))
        return served._replace(found=self.finish(served.found))
