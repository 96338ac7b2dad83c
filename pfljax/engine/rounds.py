"""One round of any method: download, exchange, update, on the rows of the round's cohort."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.types import Algorithm, Array, ClientContext, ClientData, Cohort, Key, Metrics, State
from pfljax.engine.plan import ExecutionPlan


class Record(NamedTuple):
    """What is logged of a round."""

    train_loss: Array  # () mean over the cohort, weighted by n_k
    diverged: Array  # () int32: a client whose loss is not finite, or -1
    down: Array  # () bytes that the cohort's clients downloaded from others
    up: Array  # () bytes that they sent to others
    metrics: Metrics  # the method's own


def _key(key: Key, purpose: int, round_number: Array) -> Key:
    return jax.random.fold_in(jax.random.fold_in(key, purpose), round_number)


def draw_cohort(key: Key, num_clients: int, size: int) -> Cohort:
    """S of K clients, uniformly without replacement."""
    ids = jnp.arange(num_clients, dtype=jnp.int32)
    if size == num_clients:
        return Cohort(ids, everyone=True)
    if size**2 > 16 * num_clients:
        return Cohort(jnp.sort(jax.random.permutation(key, ids)[:size]))

    # Few of very many, by Floyd's algorithm, which touches S clients and not K.
    def draw(number, chosen):
        top = num_clients - size + number
        drawn = jax.random.randint(jax.random.fold_in(key, number), (), 0, top + 1, jnp.int32)
        return chosen.at[number].set(jnp.where((chosen == drawn).any(), top, drawn))

    return Cohort(jnp.sort(jax.lax.fori_loop(0, size, draw, jnp.full((size,), -1, jnp.int32))))


def cohort_of(key: Key, number: Array, num_clients: int, size: int) -> Cohort:
    """The cohort of a round of the run that `key` decides: the same for every method and every plan."""
    return draw_cohort(_key(key, 0, number), num_clients, size)


def participations(key: Key, num_clients: int, size: int, rounds: int) -> Array:
    """(K,) in how many of the first `rounds` rounds each client is in the cohort."""
    count = lambda number, total: total.at[cohort_of(key, number, num_clients, size).ids].add(1)
    return jax.lax.fori_loop(0, rounds, count, jnp.zeros((num_clients,), jnp.int32))


def by_client(algorithm: Algorithm) -> State:
    """Which parts of a method's State are rows of clients: a State of bools."""
    models = algorithm.topology != "shared"  # else models and their optimizers are the server's
    return State(server=False, models=models, optimizer=models, clients=True, round=False)


def split_state(algorithm: Algorithm, state: State) -> tuple[State, State]:
    """(the clients' rows, the rest): two States with () in the places of the other."""
    pick = lambda wanted: State(
        *(part if rows == wanted else () for part, rows in zip(state, by_client(algorithm), strict=True))
    )
    return pick(True), pick(False)


def join_state(algorithm: Algorithm, rows: State, rest: State) -> State:
    """Undoes `split_state`."""
    return State(*(a if of_client else b for a, b, of_client in zip(rows, rest, by_client(algorithm), strict=True)))


def make_round(
    algorithm: Algorithm, plan: ExecutionPlan, num_clients: int, cohort_size: int
) -> Callable[[Key, Array, State, ClientData], tuple[State, Record]]:
    """Composes a method's functions into (key, round, state, clients) -> (state, record).

    Only the cohort's rows are taken, worked on and put back, so a round costs S and not K.
    """
    work = make_cohort_round(algorithm, plan)

    def one_round(key: Key, number: Array, state: State, clients: ClientData) -> tuple[State, Record]:
        cohort = cohort_of(key, number, num_clients, cohort_size)
        if cohort.everyone:
            return work(key, number, cohort, state, clients)
        all_rows, rest = split_state(algorithm, state)
        rows, clients = plan.take_rows((all_rows, clients), cohort.ids)
        state, record = work(key, number, cohort, join_state(algorithm, rows, rest), clients)
        rows, rest = split_state(algorithm, state)
        return join_state(algorithm, plan.put_rows(all_rows, cohort.ids, rows), rest), record

    return one_round


def make_cohort_round(
    algorithm: Algorithm, plan: ExecutionPlan
) -> Callable[[Key, Array, Cohort, State, ClientData], tuple[State, Record]]:
    """As `make_round` on the cohort's rows alone: (key, round, cohort, state, clients) -> (state, record)."""
    peers = algorithm.topology == "peers"

    def one_round(key: Key, number: Array, cohort: Cohort, state: State, clients: ClientData) -> tuple[State, Record]:
        state = state._replace(round=number)
        index = algorithm.download(_key(key, 1, number), state, cohort)
        position = cohort.position(index) if algorithm.topology != "shared" else index
        work_key = _key(key, 2, number)
        ids_and_data = (cohort.ids, index, clients)

        def exchange(step, state: State):
            def client(models, row, data, server):
                own, index, shard = data
                turn = ClientContext(jax.random.fold_in(work_key, own), number, step, index[...], server)
                return algorithm.work(turn, models, row, shard)

            rows, returned = plan.exchange(
                client,
                state.models,
                position,
                state.clients,
                ids_and_data,
                topology=algorithm.topology,
                own_first=peers,
                push=algorithm.push,
                common=state.server,
                sizes=clients.train.size,
            )
            state = state._replace(clients=rows)
            update_key = jax.random.fold_in(_key(key, 3, number), step)
            state, metrics = algorithm.update(update_key, state, returned)
            # Of a push, too, as many models arrive as are sent.
            shared = algorithm.topology == "shared"
            moved = jnp.ones_like(index, bool) if shared else index != cohort.ids[:, None]
            lifted = moved | algorithm.uploads_own
            sizes = clients.train.size
            loss = returned.report["loss"]
            none = jnp.iinfo(jnp.int32).max
            diverged = jnp.where(jnp.isfinite(loss), none, cohort.ids).min()
            record = Record(
                train_loss=jnp.sum(loss * sizes) / jnp.maximum(sizes.sum(), 1),
                diverged=jnp.where(diverged == none, -1, diverged),
                # After the first exchange a client that has no batch left downloads no more.
                down=(moved & (returned.sent | (step == 0))).sum(dtype=jnp.float32) * tree.row_bytes(state.models),
                up=(lifted & returned.sent).sum(dtype=jnp.float32) * tree.row_bytes(returned.upload),
                metrics=metrics,
            )
            return state, record

        state, record = exchange(jnp.zeros((), jnp.int32), state)
        if algorithm.exchanges > 1:
            # The first exchange's loss and metrics are those of the models as they were downloaded.
            def again(step, carry):
                state, record = carry
                state, new = exchange(step, state)
                diverged = jnp.maximum(record.diverged, new.diverged)
                return state, record._replace(diverged=diverged, down=record.down + new.down, up=record.up + new.up)

            state, record = jax.lax.fori_loop(1, algorithm.exchanges, again, (state, record))
        return state._replace(round=number + 1), record

    return one_round
