"""What the server and the clients of runs begin with, computed on the host's CPU; also for rows that are not saved."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from pfljax.contract import tree
from pfljax.contract.types import Array, ClientData, Key, PyTree, Start, State
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_host_plan
from pfljax.run.compiled import Jitted
from pfljax.run.experiment import Experiment, Numbers
from pfljax.run.replicates import Replicates
from pfljax.stores import saved_rows
from pfljax.stores.serving import BLOCK_BYTES
from pfljax.stores.stacks import MemoryRows


class InitialState:
    """What the server and the clients of some runs begin with, computed on the host's CPU."""

    def __init__(self, experiment: Experiment, replicates: Replicates, block: int):
        """Compiles nothing yet.

        Args:
            experiment: One of the runs.
            replicates: All runs.
            block: Number of clients whose rows are computed at a time.
        """
        self.replicates = replicates
        self.block = block
        host = make_host_plan()
        self.device = host.device

        def begin(numbers: Numbers, key: Key, clients: ClientData) -> Start:
            algorithm = experiment.algorithm(host, numbers)
            return lifting.begin(algorithm, key, clients)

        def first_rows(numbers: Numbers, key: Key, start: Start, ids: Array) -> list[Array]:
            algorithm = experiment.algorithm(host, numbers)
            rows = lifting.first_rows(algorithm, host, key, start, ids)
            return jax.tree.leaves(rows)

        network = experiment.problem.model.network
        self.jitted_begin = Jitted(network, host, begin)
        self.jitted_first_rows = Jitted(network, host, first_rows)

    def server(self, run: int, key: Key, clients: ClientData) -> Start:
        """Returns what the server of a run begins with, on the host."""
        with jax.default_device(self.device):
            start = self.jitted_begin(self.replicates.numbers_of(run), key, clients)
            return jax.device_get(start)

    def rows(self, run: int, key: Key, start: Start, ids: np.ndarray) -> list[np.ndarray]:
        """Computes the initial rows of clients `ids` (n,): a list of leaves (n, ...)."""
        blocks = [rows for _, rows in self.blocks(run, key, start, ids)]
        return [np.concatenate(leaves) for leaves in zip(*blocks, strict=True)]

    def blocks(
        self, run: int, key: Key, start: Start, ids: np.ndarray
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Computes initial rows in blocks of one size, which compile once: yields (ids of a block, its leaves)."""
        numbers = self.replicates.numbers_of(run)
        for first in range(0, len(ids), self.block):
            block_ids = ids[first : first + self.block]
            padded_ids = np.resize(block_ids, self.block).astype(np.int32)
            with jax.default_device(self.device):
                rows = jax.device_get(self.jitted_first_rows(numbers, key, start, padded_ids))
            yield block_ids, [leaf[: len(block_ids)] for leaf in rows]


def block_of(experiment: Experiment, clients: PyTree) -> int:
    """Number of clients whose rows are computed at a time, for rows like `clients` (K, ...)."""
    row_bytes = tree.row_bytes(clients)
    block = max(BLOCK_BYTES // max(row_bytes, 1), 1)
    return min(block, experiment.problem.num_clients)


def completed(
    experiment: Experiment, replicates: Replicates, run: int, key: Key, state: State
) -> State:
    """Returns a state from a checkpoint without initial rows, with these rows; other states as they are.

    Args:
        experiment: One of the runs.
        replicates: All runs.
        run: Number of the run.
        key: Its key of `Compiled.init`.
        state: Its state; changed in place.
    """
    table = saved_rows.table_of(state.clients)
    if table is None or table.changed.all() or table.start is None:
        return state
    saved = table.start
    server = jax.tree.map_with_path(lambda path, _: saved[saved_rows.name_of(path)], state.server)
    initial = InitialState(experiment, replicates, block_of(experiment, state.clients))
    leaves: list[MemoryRows] = jax.tree.leaves(state.clients)
    ids = np.flatnonzero(~table.changed).astype(np.int32)
    for block_ids, rows in initial.blocks(run, key, server, ids):
        for leaf, block_rows in zip(leaves, rows, strict=True):
            if np.any(block_rows):  # other rows are zero already, and take no memory
                leaf.array[block_ids] = block_rows
    return state
