"""One round of any method: sample a cohort, then download, exchange and server update on the cohort's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    Key,
    Metrics,
    Params,
    PyTree,
    State,
    Topology,
    Traffic,
)
from pfljax.exchange import lifting, traffic
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.views import view


class Record(NamedTuple):
    """Logged values of a round.

    Attributes:
        train_loss: () mean over the cohort, weighted by n_k; NaN if no client counts.
        diverged: () int32, a client with a loss that is not finite, or one that was dropped if nobody is left; or -1.
        down: () bytes that the cohort's clients received from others.
        up: () bytes that they sent.
        metrics: The method's own metrics.
        seconds: () simulated seconds that the round takes; None without a clock.
        dropped: (S,) int32, clients that were dropped, since their results were not finite, and -1; None if results are
            not checked.
    """

    train_loss: Array
    diverged: Array
    down: Array
    up: Array
    metrics: Metrics
    seconds: Array | None = None
    dropped: Array | None = None


COHORT, DOWNLOAD, WORK, UPDATE, SAMPLE = range(5)  # uses of a round's keys


def _key(key: Key, purpose: int, round_number: Array) -> Key:
    """A round's key for a purpose. Of two keys (2,), cohorts use the first; the second may be secret."""
    key = key[int(purpose != COHORT)] if key.ndim else key
    return jax.random.fold_in(jax.random.fold_in(key, purpose), round_number)


def draw_cohort(key: Key, num_clients: int, size: int) -> Cohort:
    """Draws S of K clients uniformly without replacement."""
    ids = jnp.arange(num_clients, dtype=jnp.int32)
    if size == num_clients:
        return Cohort(ids, everyone=True)
    if size**2 > 16 * num_clients:
        return Cohort(jnp.sort(jax.random.permutation(key, ids)[:size]))
    return Cohort(jnp.sort(draw_distinct(key, num_clients, size)))  # few of very many clients


def draw_distinct(key: Key, num: int, count: int) -> Array:
    """Draws a uniform subset of range(num), (count,) int32, whose order is not uniform.

    By Floyd's algorithm, which touches `count` numbers instead of `num`.
    """

    def draw(number: Array, chosen: jax.Array) -> jax.Array:
        top = num - count + number
        drawn = jax.random.randint(jax.random.fold_in(key, number), (), 0, top + 1, jnp.int32)
        return chosen.at[number].set(jnp.where((chosen == drawn).any(), top, drawn))

    return jax.lax.fori_loop(0, count, draw, jnp.full((count,), -1, jnp.int32))


def cohort_of(key: Key, number: Array, num_clients: int, size: int) -> Cohort:
    """The uniform cohort of a round; depends only on `key` and the round, not on the method or plan."""
    return draw_cohort(_key(key, COHORT, number), num_clients, size)


def known_cohort(
    algorithm: Algorithm, key: Key, number: Array, num_clients: int, size: int
) -> Cohort:
    """The cohort of a round if it depends on keys only: uniform, or those who choose to take part, and others."""
    takes_part = algorithm.engine.takes_part
    if takes_part is None or size == num_clients:
        return cohort_of(key, number, num_clients, size)
    work = _key(key, WORK, number)
    comes = jax.vmap(lambda client: takes_part(jax.random.fold_in(work, client)))(
        jnp.arange(num_clients)
    )
    return Cohort(jnp.sort(jax.lax.top_k(comes.astype(jnp.int32), size)[1]).astype(jnp.int32))


def sample_cohort(
    algorithm: Algorithm, key: Key, number: Array, state: State, clients: ClientData, size: int
) -> Cohort:
    """The cohort of a round: as `known_cohort`, or chosen by the method from all K clients' state and data.

    Raises:
        ValueError: if a method does not choose exactly S clients.
    """
    if algorithm.sample is None:
        return known_cohort(algorithm, key, number, tree.num_rows(clients), size)
    ids = algorithm.sample(_key(key, SAMPLE, number), state._replace(round=number), clients)
    if ids.shape != (size,):
        raise ValueError(
            f"sample: returned ids of shape {ids.shape}; accepted: ({size},), the size of a cohort"
        )
    return Cohort(jnp.sort(ids).astype(jnp.int32))


def participations(key: Key, num_clients: int, size: int, rounds: int) -> Array:
    """(K,), in how many of the first `rounds` rounds each client is in the cohort.

    Valid only for uniform sampling: with `Algorithm.sample`, cohorts depend on the training.
    """

    def count(number, total):
        return total.at[cohort_of(key, number, num_clients, size).ids].add(1)

    return jax.lax.fori_loop(0, rounds, count, jnp.zeros((num_clients,), jnp.int32))


def make_round(
    algorithm: Algorithm, plan: ExecutionPlan, cohort_size: int
) -> Callable[[Key, Array, State, ClientData], tuple[State, Record]]:
    """Composes a method's functions into (key, round, state, clients) -> (state, record).

    Only the cohort's rows are read, processed and written back, so a round costs S, not K.
    """
    work = make_cohort_round(algorithm, plan)

    def one_round(
        key: Key, number: Array, state: State, clients: ClientData
    ) -> tuple[State, Record]:
        cohort = sample_cohort(algorithm, key, number, state, clients, cohort_size)
        if cohort.everyone:
            return work(key, number, cohort, state, clients)
        if plan.num_devices > 1:
            # On every device. If they were spread, looking up the cohort would need independent collectives; together
            # with those that move rows, they can occupy all of a CPU's few threads and deadlock.
            cohort = Cohort(jax.lax.with_sharding_constraint(cohort.ids, plan.everywhere))
        of_cohort, data = plan.take_rows((state.clients, clients), cohort.ids)
        trained, record = work(key, number, cohort, state._replace(clients=of_cohort), data)
        everyone = plan.put_rows(state.clients, cohort.ids, trained.clients)
        return trained._replace(clients=everyone), record

    return lifting.in_precision(algorithm, one_round)


def make_cohort_round(
    algorithm: Algorithm, plan: ExecutionPlan
) -> Callable[[Key, Array, Cohort, State, ClientData], tuple[State, Record]]:
    """Like `make_round`, but on the cohort's rows only: (key, round, cohort, state, clients) -> (state, record)."""

    def one_round(
        key: Key, number: Array, cohort: Cohort, state: State, clients: ClientData
    ) -> tuple[State, Record]:
        state = state._replace(round=number)
        index = lifting.download(algorithm, plan, _key(key, DOWNLOAD, number), state, cohort)
        position = index if algorithm.topology.on_server else cohort.position(index)
        playing = _Round(_key(key, WORK, number), number, cohort, index, position, clients)

        def exchange(step: Array, state: State, later: bool = False) -> tuple[State, Record]:
            state, aggregate, read = _exchange(algorithm, plan, playing, step, state, later)
            moved = traffic.of_exchange(state.models, aggregate, read)
            record = _record(algorithm, playing, step, aggregate, moved)
            update_key = jax.random.fold_in(_key(key, UPDATE, number), step)
            state, metrics = algorithm.server_update(update_key, state, aggregate)
            return state, record._replace(metrics=metrics)

        state, record = exchange(jnp.zeros((), jnp.int32), state)
        if algorithm.exchanges > 1:
            # The first exchange's loss and metrics refer to the downloaded models.
            def again(step, carry):
                state, record = carry
                state, new = exchange(step, state, later=True)
                diverged = jnp.maximum(record.diverged, new.diverged)

                def add(name):
                    return jax.tree.map(jnp.add, getattr(record, name), getattr(new, name))

                total = {name: add(name) for name in ("down", "up", "seconds")}
                dropped = jax.tree.map(jnp.maximum, record.dropped, new.dropped)
                return state, record._replace(diverged=diverged, dropped=dropped, **total)

            state, record = jax.lax.fori_loop(1, algorithm.exchanges, again, (state, record))
        return state._replace(round=number + 1), record

    return lifting.in_precision(algorithm, one_round)


@dataclasses.dataclass(frozen=True)
class _Round:
    """A round in progress."""

    key: Key  # for the client updates
    number: Array
    cohort: Cohort
    index: Array  # (S, J) from `Algorithm.download`
    position: Array  # (S, J) the same indices as rows of the cohort's models
    clients: ClientData  # the cohort's data


def _exchange(
    algorithm: Algorithm,
    plan: ExecutionPlan,
    playing: _Round,
    step: Array,
    state: State,
    later: bool,
) -> tuple[State, Aggregate, int]:
    """Returns (state with the clients' next rows, aggregate, bytes that a client read from the server's state)."""
    index = playing.index
    topology = algorithm.topology

    def client(models: Params, row: PyTree, data: tuple, server: PyTree) -> ClientOutput:
        number, index, client_data = data
        context = ClientContext(
            key=jax.random.fold_in(playing.key, number),
            round=playing.number,
            step=step,
            index=index[...],
            server=server,
            client=number,
            later=later,
        )
        output = algorithm.client_update(context, models, row, client_data)
        return as_sent(output) if topology.moves else output

    data = (playing.cohort.ids, index, playing.clients)
    rows, aggregate = plan.exchange(
        client,
        state.models,
        playing.position,
        state.rows,
        data,
        topology=topology,
        own_first=topology.reads_others,
        common=state.server.state,
        sizes=playing.clients.train.size,
    )

    # What a client reads from the server's state, by tracing one client's work.
    def client_at_zero(server: PyTree, models: Params, row: PyTree, data: tuple) -> ClientOutput:
        return client(models, row, view(data, jnp.zeros((), jnp.int32)), server)

    received = tree.shapes_of_rows(state.models, 1 if topology is Topology.PUSH else index.shape[1])
    row = tree.shapes_of_rows(state.rows)
    read = traffic.bytes_read(client_at_zero, state.server.state, received, row, data)
    return state.with_rows(rows), aggregate, read


def as_sent(output: ClientOutput) -> ClientOutput:
    """A client's output as it is added up: with w_k u_k in place of u_k, which is sent where w_k > 0."""
    upload = output.upload
    weight = output.upload.weight
    if weight is None:
        return output
    sent = weight > 0 if output.sent is None else output.sent
    return output._replace(
        upload=upload._replace(update=tree.scale(upload.update, weight)), sent=sent
    )


def _record(
    algorithm: Algorithm, playing: _Round, step: Array, aggregate: Aggregate, moved: Traffic
) -> Record:
    """The record of an exchange; `moved` holds the bytes of its parts."""
    ids = playing.cohort.ids
    sizes = playing.clients.train.size
    if algorithm.traffic is not None:
        moved = algorithm.traffic(moved)
    participation = aggregate.participation
    none = jnp.iinfo(jnp.int32).max
    away = jnp.zeros(ids.shape, bool) if participation.away is None else participation.away
    first = (step == 0) & ~away[:, None]
    down, up = traffic.messages(algorithm, ids, playing.index, aggregate.sent, first).num_bytes(
        moved
    )
    loss = aggregate.told.loss
    # their results do not count
    for left_out in (playing.clients.attacker, participation.absent, away):
        if left_out is not None:
            loss = jnp.where(left_out, 0, loss)
            sizes = jnp.where(left_out, 0, sizes)
    diverged = jnp.where(jnp.isfinite(loss), none, ids).min()
    dropped = participation.dropped
    if dropped is not None:
        own = dropped if participation.broken is None else dropped & ~participation.broken
        alone = jnp.where(own & ~(sizes > 0).any(), ids, none)  # nobody is left whose results count
        diverged = jnp.minimum(diverged, alone.min())
        dropped = jnp.where(dropped, ids, -1)
    return Record(
        train_loss=jnp.sum(loss * sizes) / sizes.sum(),
        diverged=jnp.where(diverged == none, -1, diverged),
        down=down,
        up=up,
        metrics={},
        seconds=traffic.seconds_of(participation),
        dropped=dropped,
    )
