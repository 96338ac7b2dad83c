"""One round of any method: download, exchange, update, on the rows of the round's cohort."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax import tree
from pfljax.mapping import Plan
from pfljax.types import Algorithm, Array, Cohort, Key, Metrics, Shard, State, Turn


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
        return Cohort(ids, ids)
    ids = jnp.sort(jax.random.permutation(key, ids)[:size])
    return Cohort(ids, jnp.full((num_clients,), -1, jnp.int32).at[ids].set(jnp.arange(size, dtype=jnp.int32)))


def participations(key: Key, num_clients: int, size: int, rounds: int) -> Array:
    """(K,) in how many of the first `rounds` rounds each client is in the cohort."""

    def count(number, total):
        return total + (draw_cohort(_key(key, 0, number), num_clients, size).position >= 0)

    return jax.lax.fori_loop(0, rounds, count, jnp.zeros((num_clients,), jnp.int32))


def make_round(
    algorithm: Algorithm, plan: Plan, num_clients: int, cohort_size: int
) -> Callable[[Key, Array, State, Shard], tuple[State, Record]]:
    """Composes a method's functions into (key, round, state, clients) -> (state, record).

    Only the cohort's rows are gathered, worked on and put back, so a round costs S and not K. The cohorts are drawn
    from the key and the round alone: every method sees the same ones.
    """
    by_client = algorithm.topology != "shared"  # models and their optimizers are rows of clients
    everyone = cohort_size == num_clients

    def rows_of(state: State):
        return (state.models, state.optimizer, state.clients) if by_client else state.clients

    def with_rows(state: State, rows) -> State:
        if by_client:
            return state._replace(models=rows[0], optimizer=rows[1], clients=rows[2])
        return state._replace(clients=rows)

    def one_round(key: Key, number: Array, state: State, clients: Shard) -> tuple[State, Record]:
        cohort = draw_cohort(_key(key, 0, number), num_clients, cohort_size)
        full = state = state._replace(round=number)
        if not everyone:
            rows, clients = plan.take_rows((rows_of(full), clients), cohort.ids)
            state = with_rows(full, rows)
        index = algorithm.download(_key(key, 1, number), state, cohort)
        position = index if everyone or not by_client else cohort.position[index]
        work_key = _key(key, 2, number)
        ids_and_data = (cohort.ids, index, clients)

        def exchange(step, state: State):
            def client(models, row, data, server):
                own, index, shard = data
                turn = Turn(jax.random.fold_in(work_key, own), number, step, index[...], server)
                return algorithm.work(turn, models, row, shard)

            rows, returned = plan.exchange(
                client,
                state.models,
                position,
                state.clients,
                ids_and_data,
                topology=algorithm.topology,
                own_first=algorithm.topology == "peers",
                push=algorithm.push,
                common=state.server,
            )
            state = state._replace(clients=rows)
            update_key = jax.random.fold_in(_key(key, 3, number), step)
            state, metrics = algorithm.update(update_key, state, returned)
            # Of a push, too, as many models arrive as are sent.
            moved = jnp.ones_like(index, bool) if not by_client else index != cohort.ids[:, None]
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
        if not everyone:
            state = with_rows(state, plan.put_rows(rows_of(full), cohort.ids, rows_of(state)))
        return state._replace(round=number + 1), record

    return one_round
