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
        trained: (S,) int32, clients that trained, and -1 for the others.
    """

    train_loss: Array
    diverged: Array
    down: Array
    up: Array
    metrics: Metrics
    seconds: Array | None = None
    dropped: Array | None = None
    trained: Array | None = None


COHORT, DOWNLOAD, WORK, UPDATE, SAMPLE = range(5)  # uses of a round's keys


def round_key(key: Key, purpose: int, round_number: Array) -> Key:
    """A round's key for a purpose. Of two keys (2,), cohorts use the first; the second may be secret."""
    key = key[int(purpose != COHORT)] if key.ndim else key
    purpose_key = jax.random.fold_in(key, purpose)
    return jax.random.fold_in(purpose_key, round_number)


def draw_cohort(key: Key, num_clients: int, size: int) -> Cohort:
    """Draws S of K clients uniformly without replacement."""
    ids = jnp.arange(num_clients, dtype=jnp.int32)
    if size == num_clients:
        return Cohort(ids, everyone=True)
    if size**2 > 16 * num_clients:
        drawn = jax.random.permutation(key, ids)[:size]
    else:  # few of very many clients
        drawn = draw_distinct(key, num_clients, size)
    return Cohort(jnp.sort(drawn))


def draw_distinct(key: Key, num: int, count: int) -> Array:
    """Draws a uniform subset of range(num), (count,) int32, whose order is not uniform.

    By Floyd's algorithm, which touches `count` numbers instead of `num`.
    """

    def draw(number: Array, chosen: jax.Array) -> jax.Array:
        # A number in 0..top; if it was chosen before, top itself, which was not.
        top = num - count + number
        draw_key = jax.random.fold_in(key, number)
        drawn = jax.random.randint(draw_key, (), 0, top + 1, jnp.int32)
        is_taken = (chosen == drawn).any()
        return chosen.at[number].set(jnp.where(is_taken, top, drawn))

    chosen = jnp.full((count,), -1, jnp.int32)
    return jax.lax.fori_loop(0, count, draw, chosen)


def cohort_of(key: Key, number: Array, num_clients: int, size: int) -> Cohort:
    """The uniform cohort of a round; depends only on `key` and the round, not on the method or plan."""
    return draw_cohort(round_key(key, COHORT, number), num_clients, size)


def known_cohort(
    algorithm: Algorithm, key: Key, number: Array, num_clients: int, size: int
) -> Cohort:
    """The cohort of a round if it depends on keys only: uniform, or those who choose to take part, and others."""
    takes_part = algorithm.engine.takes_part
    if takes_part is None or size == num_clients:
        return cohort_of(key, number, num_clients, size)
    work_key = round_key(key, WORK, number)

    def comes(client: Array) -> Array:
        return takes_part(jax.random.fold_in(work_key, client))

    # Those who take part come first, in the order of their ids.
    is_coming = jax.vmap(comes)(jnp.arange(num_clients))
    _, ids = jax.lax.top_k(is_coming.astype(jnp.int32), size)
    return Cohort(jnp.sort(ids).astype(jnp.int32))


def sample_cohort(
    algorithm: Algorithm, key: Key, number: Array, state: State, clients: ClientData, size: int
) -> Cohort:
    """The cohort of a round: as `known_cohort`, or chosen by the method from all K clients' state and data.

    Raises:
        ValueError: if a method does not choose exactly S clients.
    """
    if algorithm.sample is None:
        return known_cohort(algorithm, key, number, tree.num_rows(clients), size)
    sample_key = round_key(key, SAMPLE, number)
    ids = algorithm.sample(sample_key, state._replace(round=number), clients)
    if ids.shape != (size,):
        text = f"returned ids of shape {ids.shape}; accepted: ({size},), the size of a cohort"
        raise ValueError(f"sample: {text}")
    return Cohort(jnp.sort(ids).astype(jnp.int32))


def participations(key: Key, num_clients: int, size: int, rounds: int) -> Array:
    """(K,), in how many of the first `rounds` rounds each client is in the cohort.

    Valid only for uniform sampling: with `Algorithm.sample`, cohorts depend on the training.
    """

    def add_round(number: Array, counts: jax.Array) -> jax.Array:
        cohort = cohort_of(key, number, num_clients, size)
        return counts.at[cohort.ids].add(1)

    counts = jnp.zeros((num_clients,), jnp.int32)
    return jax.lax.fori_loop(0, rounds, add_round, counts)


def make_round(
    algorithm: Algorithm, plan: ExecutionPlan, cohort_size: int
) -> Callable[[Key, Array, State, ClientData], tuple[State, Record]]:
    """Composes a method's functions into (key, round, state, clients) -> (state, record).

    Only the cohort's rows are read, processed and written back, so a round costs S, not K.
    """
    play_cohort = make_cohort_round(algorithm, plan)

    def one_round(
        key: Key, number: Array, state: State, clients: ClientData
    ) -> tuple[State, Record]:
        cohort = sample_cohort(algorithm, key, number, state, clients, cohort_size)
        if cohort.everyone:
            return play_cohort(key, number, cohort, state, clients)
        if plan.num_devices > 1:
            # On every device. If they were spread, looking up the cohort would need independent collectives; together
            # with those that move rows, they can occupy all of a CPU's few threads and deadlock.
            cohort = Cohort(jax.lax.with_sharding_constraint(cohort.ids, plan.everywhere))
        cohort_rows, data = plan.take_rows((state.clients, clients), cohort.ids)
        cohort_state = state._replace(clients=cohort_rows)
        trained, record = play_cohort(key, number, cohort, cohort_state, data)
        all_rows = plan.put_rows(state.clients, cohort.ids, trained.clients)
        return trained._replace(clients=all_rows), record

    return lifting.in_precision(algorithm, one_round)


def make_cohort_round(
    algorithm: Algorithm, plan: ExecutionPlan
) -> Callable[[Key, Array, Cohort, State, ClientData], tuple[State, Record]]:
    """Like `make_round`, but on the cohort's rows only: (key, round, cohort, state, clients) -> (state, record)."""

    def one_round(
        key: Key, number: Array, cohort: Cohort, state: State, clients: ClientData
    ) -> tuple[State, Record]:
        # Every client of the cohort decides which models it receives.
        state = state._replace(round=number)
        download_key = round_key(key, DOWNLOAD, number)
        index = lifting.download(algorithm, plan, download_key, state, cohort)
        position = index if algorithm.topology.on_server else cohort.position(index)
        work_key = round_key(key, WORK, number)
        current = _Round(work_key, number, cohort, index, position, clients)

        def exchange(step: Array, state: State, later: bool = False) -> tuple[State, Record]:
            """The cohort's work on these models, and the server's update."""
            state, aggregate, server_bytes = _exchange(algorithm, plan, current, step, state, later)
            moved = traffic.exchange_traffic(state.models, aggregate, server_bytes)
            record = _record(algorithm, current, step, aggregate, moved)
            update_key = jax.random.fold_in(round_key(key, UPDATE, number), step)
            state, metrics = algorithm.server_update(update_key, state, aggregate)
            return state, record._replace(metrics=metrics)

        def exchange_again(step: Array, carry: tuple[State, Record]) -> tuple[State, Record]:
            state, record = carry
            state, new = exchange(step, state, later=True)
            return state, _add_later(record, new)

        carry = exchange(jnp.zeros((), jnp.int32), state)
        if algorithm.exchanges > 1:
            carry = jax.lax.fori_loop(1, algorithm.exchanges, exchange_again, carry)
        state, record = carry
        return state._replace(round=number + 1), record

    return lifting.in_precision(algorithm, one_round)


def _add_later(record: Record, later: Record) -> Record:
    """A round's record after one more exchange.

    The first exchange's loss and metrics stay, since they refer to the downloaded models.
    """
    return record._replace(
        diverged=jnp.maximum(record.diverged, later.diverged),
        down=jnp.add(record.down, later.down),
        up=jnp.add(record.up, later.up),
        seconds=jax.tree.map(jnp.add, record.seconds, later.seconds),
        dropped=jax.tree.map(jnp.maximum, record.dropped, later.dropped),
        trained=jax.tree.map(jnp.maximum, record.trained, later.trained),
    )


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
    current: _Round,
    step: Array,
    state: State,
    later: bool,
) -> tuple[State, Aggregate, int]:
    """Returns (state with the clients' next rows, aggregate, bytes that a client read from the server's state)."""
    topology = algorithm.topology

    def client(models: Params, row: PyTree, data: tuple, server: PyTree) -> ClientOutput:
        number, index, client_data = data
        context = ClientContext(
            key=jax.random.fold_in(current.key, number),
            round=current.number,
            step=step,
            index=index[...],
            server=server,
            client=number,
            later=later,
        )
        output = algorithm.client_update(context, models, row, client_data)
        return as_sent(output) if topology.moves else output

    data = (current.cohort.ids, current.index, current.clients)
    rows, aggregate = plan.exchange(
        client,
        models=state.models,
        index=current.position,
        rows=state.rows,
        data=data,
        topology=topology,
        own_first=topology.reads_others,
        common=state.server.state,
        sizes=current.clients.train.size,
    )

    # What a client reads from the server's state, by tracing one client's work.
    def first_client(server: PyTree, models: Params, row: PyTree, data: tuple) -> ClientOutput:
        first_data = view(data, jnp.zeros((), jnp.int32))
        return client(models, row, first_data, server)

    num_received = 1 if topology is Topology.PUSH else current.index.shape[1]
    received = tree.shapes_of_rows(state.models, num_received)
    row = tree.shapes_of_rows(state.rows)
    server_bytes = traffic.bytes_read(first_client, state.server.state, received, row, data)
    return state.with_rows(rows), aggregate, server_bytes


def as_sent(output: ClientOutput) -> ClientOutput:
    """A client's output as it is added up: with w_k u_k in place of u_k, which is sent where w_k > 0."""
    upload = output.upload
    if upload.weight is None:
        return output
    sent = upload.weight > 0 if output.sent is None else output.sent
    weighted = upload._replace(update=tree.scale(upload.update, upload.weight))
    return output._replace(upload=weighted, sent=sent)


def _record(
    algorithm: Algorithm, current: _Round, step: Array, aggregate: Aggregate, moved: Traffic
) -> Record:
    """The record of an exchange; `moved` holds the bytes of its parts."""
    ids = current.cohort.ids
    sizes = current.clients.train.size
    if algorithm.traffic is not None:
        moved = algorithm.traffic(moved)
    participation = aggregate.participation
    none = jnp.iinfo(jnp.int32).max  # no client, in a minimum of ids

    # The bytes that clients received and sent.
    away = jnp.zeros(ids.shape, bool) if participation.away is None else participation.away
    first = (step == 0) & ~away[:, None]
    messages = traffic.messages(algorithm, ids, current.index, aggregate.sent, first)
    down, up = messages.num_bytes(moved)

    # The clients that trained; without examples, there is nothing to train on.
    has_trained = sizes > 0
    if participation.idle is not None:
        has_trained = has_trained & ~participation.idle

    # The loss of attackers and of clients that did not take part does not count.
    loss = aggregate.report.loss
    for left_out in (current.clients.attacker, participation.absent, away):
        if left_out is not None:
            loss = jnp.where(left_out, 0, loss)
            sizes = jnp.where(left_out, 0, sizes)

    # The first client that diverged. Dropped clients did only if nobody is left whose results
    # count, except for those that were broken on purpose.
    diverged = jnp.where(jnp.isfinite(loss), none, ids).min()
    dropped = participation.dropped
    if dropped is not None:
        broken = participation.broken
        by_itself = dropped if broken is None else dropped & ~broken
        nobody_left = ~(sizes > 0).any()
        diverged_ids = jnp.where(by_itself & nobody_left, ids, none)
        diverged = jnp.minimum(diverged, diverged_ids.min())
        dropped = jnp.where(dropped, ids, -1)
    return Record(
        train_loss=jnp.sum(loss * sizes) / sizes.sum(),
        diverged=jnp.where(diverged == none, -1, diverged),
        down=down,
        up=up,
        metrics={},
        seconds=traffic.seconds_of(participation),
        dropped=dropped,
        trained=jnp.where(has_trained, ids, -1),
    )
