"""Clients' rows and data in host memory: a cohort is fetched ahead, worked on by the devices, and written back.

So K is bounded by the host, and a round's time and the devices' memory by the cohort S. A run does the same with
`Compiled` and `make_evaluation` of this module as with those of `compiled`; only that the clients' parts of the state
and all data are NumPy arrays here, and that the state is changed in place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.core import tree
from pfljax.core.types import Algorithm, ClientData, Cohort, Key, Predictor, PyTree, Split, State, UsageError
from pfljax.engine.plan import ExecutionPlan, make_host_plan
from pfljax.engine.rounds import cohort_of, join_state, make_cohort_round, split_state
from pfljax.evaluation import metrics as evaluation
from pfljax.training import memory
from pfljax.training.compiled import Compiled, Setup, is_private_mixture, place, state_shardings, tuned

BLOCK_BYTES = 64 << 20  # of the clients that are evaluated at once, at least


class Ahead(NamedTuple):
    """A cohort that has been fetched: its state still on the host, its data on the devices."""

    ids: np.ndarray
    rows: State
    clients: ClientData


def rows_of(stack: PyTree, ids: np.ndarray) -> PyTree:
    """Copies of some rows of NumPy stacks."""
    return jax.tree.map(lambda leaf: np.take(leaf, ids, axis=0), stack)


def write_rows(stack: PyTree, ids: np.ndarray, rows: PyTree) -> None:
    """Replaces rows `ids` of NumPy stacks in place by arrays on the devices, shard by shard without a copy between."""

    def write(leaf, new):
        for shard in new.addressable_shards:
            if shard.replica_id == 0:
                leaf[ids[shard.index[0]]] = np.asarray(shard.data)

    jax.tree.map(write, stack, rows)


def compile_segment(setup: Setup, clients: ClientData, plan: ExecutionPlan) -> Compiled:
    """As `compiled.compile_segment`, round by round on the cohort's rows."""
    begin = time.perf_counter()
    algorithm = setup.make(plan)
    num_clients, size = setup.federation.num_clients, setup.cohort_size
    key = jax.random.key(setup.seed)
    shape = jax.eval_shape(algorithm.init, key, clients)
    rows, rest = split_state(algorithm, shape)
    of_cohort = lambda stack: jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), stack
    )
    state = join_state(algorithm, of_cohort(rows), rest)
    shardings = state_shardings(algorithm, plan, state)
    placed = lambda stack, where: jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), stack, where
    )
    state, of_clients = placed(state, shardings), of_cohort(clients)
    of_clients = placed(of_clients, jax.tree.map(lambda leaf: plan.sharding(leaf, by_rows=True), of_clients))
    one_round = make_cohort_round(algorithm, plan)

    def step(key, number, ids, state, clients):
        return one_round(key, number, Cohort(ids, everyone=size == num_clients), state, clients)

    number, ids = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((size,), jnp.int32)
    jitted = jax.jit(step, donate_argnums=3, out_shardings=(shardings, plan.everywhere))
    compiled = jitted.lower(key, number, ids, state, of_clients).compile()
    draw = jax.jit(lambda key, number: cohort_of(key, number, num_clients, size).ids)

    def fetch(key: Key, number: int, rows: State, clients: ClientData) -> Ahead:
        ids = np.asarray(draw(key, number))
        return Ahead(ids, rows_of(rows, ids), place(plan, rows_of(clients, ids), size))

    def renew(ahead: Ahead, old: np.ndarray, rows: State) -> None:
        """Of clients in both cohorts, what was fetched ahead is old by now."""

        def write(leaf, stack):
            leaf[old] = stack[ahead.ids[old]]

        jax.tree.map(write, ahead.rows, rows)

    def segment(key, start, stop, state, clients):
        rows, rest = split_state(algorithm, state)
        records, ahead = [], fetch(key, start, rows, clients)
        with ThreadPoolExecutor(1) as fetcher:
            for number in range(start, stop):
                following = fetcher.submit(fetch, key, number + 1, rows, clients) if number + 1 < stop else None
                given = join_state(algorithm, place(plan, ahead.rows, size), rest)
                given, record = compiled(key, np.int32(number), ahead.ids, given, ahead.clients)
                trained, rest = split_state(algorithm, given)
                records.append(jax.device_get(record))
                following = following and following.result()  # which may read what is written next
                write_rows(rows, ahead.ids, trained)
                if following:
                    renew(following, np.isin(following.ids, ahead.ids), rows)
                ahead = following
                if records[-1].diverged >= 0:
                    break
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *records)
        return join_state(algorithm, rows, rest), stacked, len(records)

    rest_at = split_state(algorithm, shardings)[1]
    host = make_host_plan()

    def init(key: Key, clients: ClientData) -> State:
        # On the host, since all clients' rows may not fit the devices.
        with jax.default_device(host.mesh.devices.flat[0]):
            state = jax.jit(setup.make(host).init)(key, clients)
        rows, rest = split_state(algorithm, state)
        rest = jax.tree.map(jax.device_put, jax.device_get(rest), rest_at)
        return join_state(algorithm, jax.tree.map(_taken_over, rows), rest)

    like = join_state(algorithm, jax.tree.map(_placeholder, rows), placed(rest, rest_at))
    needs = memory.of_compiled(compiled)
    ahead = tree.num_bytes((split_state(algorithm, state)[0], of_clients)) // plan.num_devices
    needs = dataclasses.replace(needs, arguments=needs.arguments + ahead)
    return Compiled(algorithm, plan, like, init, segment, needs, time.perf_counter() - begin)


def _taken_over(leaf: jax.Array) -> np.ndarray:
    """A writable copy of an array, which is freed."""
    copy = np.array(leaf)
    leaf.delete()
    return copy


def _placeholder(leaf: Any) -> np.ndarray:
    """An array of this shape for whom asks only for its shape and kind: it takes no memory."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def make_evaluation(setup: Setup, algorithm: Algorithm, plan: ExecutionPlan) -> Callable:
    """As `compiled.make_evaluation`, in blocks of clients that need no more memory than a cohort, or `BLOCK_BYTES`."""
    if not algorithm.by_rows:
        raise UsageError(
            f"--client_store=host: {setup.name} predicts with all clients' states at once; accepted: device"
        )
    num_clients, shards = setup.federation.num_clients, setup.federation.client_data
    state = jax.eval_shape(algorithm.init, jax.random.key(0), shards)
    weighed = jax.eval_shape(algorithm.predictor, jax.random.key(0), state, shards)
    rows = split_state(algorithm, state)[0]
    each = tree.row_bytes((rows, shards))
    if weighed.topology == "peers":  # whose models lie beside each client's
        each += weighed.index.shape[1] * tree.row_bytes(state.models)
    size = max(BLOCK_BYTES // each, setup.cohort_size * tree.row_bytes((rows, shards)) // each, 1)
    size = min(-(-size // plan.num_devices) * plan.num_devices, num_clients)

    @jax.jit
    def predict(key: Key, rows: State, rest: State, clients: ClientData):
        state = join_state(algorithm, rows, rest)
        predictor = algorithm.predictor(key, state, clients)
        collaboration = {"index": predictor.index, "weights": predictor.weights}
        if algorithm.collaboration:
            collaboration = algorithm.collaboration[1](state)
        others = predictor.topology == "peers"  # whose models are not in this block
        return dataclasses.replace(predictor, models=()) if others else predictor, collaboration

    @jax.jit
    def score(key: Key, predictor: Predictor, clients: ClientData, splits: dict[str, Split]):
        final = tuned(algorithm, key, predictor, clients)
        return {name: evaluation.evaluate(plan, setup.model, final, split) for name, split in splits.items()}

    def evaluate(key: Key, state: State, clients: ClientData, splits: dict[str, Split]):
        rows, rest = split_state(algorithm, state)
        found = []
        for start in range(0, num_clients, size):
            ids = np.minimum(np.arange(start, start + size), num_clients - 1)  # the last is repeated
            block_key = jax.random.fold_in(key, start) if start else key
            there = lambda stack, ids=ids: place(plan, rows_of(stack, ids), size)
            block = there(clients)
            predictor, collaboration = predict(block_key, there(rows), rest, block)
            collaboration = jax.device_get(collaboration)
            if predictor.topology == "peers":  # each client's collaborators, side by side as if they were its own
                index = np.asarray(predictor.index)
                models = place(plan, rows_of(rows.models, index.reshape(-1)), index.size)
                places = jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
                predictor = Predictor(models, places, predictor.weights, "own")
            elif predictor.topology == "own" and not algorithm.collaboration:
                private = is_private_mixture(predictor)
                models = np.arange(predictor.index.shape[1]) if private else ids[:, None]
                collaboration["index"] = np.broadcast_to(np.int32(models), predictor.index.shape)
            metrics = jax.device_get(score(block_key, predictor, block, there(splits)))
            real = min(size, num_clients - start)
            found.append(jax.tree.map(lambda leaf, real=real: leaf[:real], (metrics, collaboration)))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    return evaluate
