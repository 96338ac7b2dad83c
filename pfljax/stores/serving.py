"""What clients do with their predictions, for every store: scores, outputs, exported models."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from pfljax.contract.types import Algorithm, Array, ClientData, Key, Mixture, Prediction, PyTree, Split, State
from pfljax.evaluation import metrics
from pfljax.exchange.lifting import Served, Use, join_state, serve, split_state, whom
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.models import Model
from pfljax.stores import stacks
from pfljax.stores.experiment import OWN, Numbers


def scores(plan: ExecutionPlan, model: Model, algorithm: Algorithm) -> Use:
    """Returns (prediction, a client's splits by name) -> its metrics by split and name."""

    def use(prediction: Prediction, splits: dict[str, Split]) -> dict[str, dict[str, Array]]:
        return {name: metrics.evaluate(plan, model, algorithm, prediction, part) for name, part in splits.items()}

    return use


class Blocks:
    """Serves clients in blocks: rows, data and other clients' models are fetched from the host for each block."""

    def __init__(
        self,
        build: Callable[[Numbers], Algorithm],
        plan: ExecutionPlan,
        use: Callable[[Algorithm], Use],
        size: int,
    ):
        """Compiles nothing yet.

        Args:
            build: Builds the method.
            plan: How clients are mapped to devices.
            use: The built method -> what clients do with their predictions.
            size: Number of clients at a time.
        """
        self.build, self.plan, self.use, self.size = build, plan, use, size
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
        return jax.device_get(self.serve(numbers, ids, key, rows, rest, clients, inputs, mixture))
