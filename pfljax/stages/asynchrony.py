"""Clients that do not wait for each other: the order of their work follows from a simulated clock; see `local.clock`.

Under a server whose models may be stale (`Algorithm.stale`), a fixed number of clients are always at work. Whoever is
done sends its update and another client begins, with the newest model. After S updates, the server takes a step: a
round is one buffer of updates, and its cohort are the clients that sent them. This is how FedBuff runs (Nguyen et al.,
AISTATS 2022, Algorithm 1), and FedAsync with S = 1 (Xie, Koyejo, Gupta, 2019, Algorithm 1).

Without a server's model, each client takes its turns at its own pace: a round is the time in which the next few turns
end, fewer if a client would otherwise end two. Those clients do then what a round of the method asks for, with the
others' models as they are at that time, which some of the others last changed long ago.

Departures from the papers: Those at work and in the buffer are different clients; the next one is drawn uniformly among
the rest. Updates more than max_staleness steps late are discarded, and do not count as traffic. A client that fails
(`stages.faults`) has a place in the buffer. A turn reads others' models when it ends, not when it begins.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, Array, ClientData, Key, State
from pfljax.exchange import lifting
from pfljax.local.problem import Problem
from pfljax.stages import messages
from pfljax.stages.faults import absent
from pfljax.stages.notes import Noted, with_notes
from pfljax.stages.timing import round_seconds, with_clock

ARRIVALS = 0xA551  # folded into a round's key to draw the clients that begin


class AtWork(NamedTuple):
    """The clients that are training.

    Attributes:
        client: (C,) int32.
        left: (C,) seconds until each is done.
        late: (C,) int32: number of the server's steps since each began.
    """

    client: Array
    left: Array
    late: Array


class Buffer(NamedTuple):
    """The updates of a round.

    Attributes:
        ids: (S,) int32, ascending: the clients that sent them.
        late: (S,) int32: steps that each is late.
        seconds: () since the last round.
        discarded: () int32: updates that were too late.
    """

    ids: Array
    late: Array
    seconds: Array
    discarded: Array


class Arrivals(NamedTuple):
    """What a server keeps of its clients' progress.

    Attributes:
        seconds: (K,) that each client's work takes.
        at_work: Who is at work after the round.
        buffer: The round's updates.
    """

    seconds: Array
    at_work: AtWork
    buffer: Buffer


def on_clock(problem: Problem, algorithm: Algorithm) -> Algorithm:
    """The algorithm on the problem's clock, if it has one: with stale models, with turns, or with rounds that wait.

    Raises:
        ArgumentError: if the algorithm cannot do what the clock says.
    """
    if problem.clock is None:
        return algorithm
    if algorithm.stale:
        return with_arrivals(problem, algorithm)
    if problem.clock.concurrency:
        text = "accepted for this method: 0; its server waits for all clients of a round"
        raise ArgumentError("concurrency", text, problem.clock.concurrency)
    return (with_turns if problem.clock.turns else with_clock)(problem, algorithm)


def seconds_of_all(problem: Problem, algorithm: Algorithm, clients: ClientData) -> tuple[Array, State]:
    """(K,) seconds that the work of each client takes, and the shapes of the state."""
    init = lambda key, clients: lifting.init(algorithm, problem.plan, key, clients)
    shapes = jax.eval_shape(init, jax.random.key(0), clients)
    ids = jnp.arange(problem.num_clients, dtype=jnp.int32)
    return round_seconds(problem, algorithm, shapes, clients, ids), shapes


def with_arrivals(problem: Problem, algorithm: Algorithm) -> Algorithm:
    """The algorithm whose rounds are the server's steps, with the updates that arrive for each.

    Raises:
        ArgumentError: if there are too few clients, or the clock has settings of synchronous rounds.
    """
    clock, num, size = problem.clock, problem.num_clients, problem.cohort_size
    assert clock is not None
    at_once = clock.concurrency or min(2 * size, num - size)
    if num == size:
        raise ArgumentError("participation", "accepted for this method with a clock: below 1, so that others go on", 1)
    if not 1 <= at_once <= num - size:
        text = f"accepted for this method: 1 to {num - size}, the {num} clients without the {size} of a round"
        raise ArgumentError("concurrency", text, clock.concurrency)
    clock.check_unset(
        "this method, whose server waits for nobody", "deadline", "over_selection", "availability", "turns"
    )

    def begin(clients):
        seconds, shapes = seconds_of_all(problem, algorithm, clients)
        most = tree.num_rows(shapes.models) - 1
        key = jax.random.fold_in(jax.random.key(clock.seed), ARRIVALS)
        first = jax.random.permutation(key, num)[:at_once].astype(jnp.int32)
        at_work = AtWork(first, seconds[first], jnp.zeros_like(first))
        return Arrivals(seconds, *next_buffer(key, seconds, at_work, size, most))

    noted = with_notes(algorithm, begin)

    def download(context, row, cohort):
        buffer = context.server.note.buffer
        return buffer.late[jnp.searchsorted(buffer.ids, context.client)][None]

    def client_update(context, models, row, data):
        out = noted.client_update(context, models, row, data)
        return out._replace(report=messages.beside(out.report) | {"seconds": context.server.note.buffer.seconds})

    def server_update(key, state, aggregate):
        report, arrivals = aggregate.report, state.server.note
        most = tree.num_rows(state.models) - 1
        state, metrics = noted.server_update(key, state, aggregate._replace(report=report["method"]))
        draw = jax.random.fold_in(key, ARRIVALS)
        following = next_buffer(draw, arrivals.seconds, arrivals.at_work, size, most)
        metrics |= {"discarded_updates": arrivals.buffer.discarded}
        return state._replace(server=Noted(state.server.inner, Arrivals(arrivals.seconds, *following))), metrics

    return dataclasses.replace(
        noted,
        sample=lambda key, state, clients: state.server.note.buffer.ids,
        download=download,
        client_update=client_update,
        server_update=server_update,
    )


def next_buffer(key: Key, seconds: Array, at_work: AtWork, size: int, most: int) -> tuple[AtWork, Buffer]:
    """Plays the clock until a buffer is full.

    Args:
        key: Key for the clients that begin.
        seconds: (K,) that each client's work takes.
        at_work: Who is at work after the last step of the server.
        size: S, number of updates in a buffer.
        most: Most steps that an update may be late.

    Returns:
        Who is at work after the next step of the server, and the buffer for it.
    """

    def arrive(carry):
        count, draws, now, discarded, at_work, ids, late = carry
        place = jnp.argmin(at_work.left)
        client, age, now = at_work.client[place], at_work.late[place], jnp.maximum(now, at_work.left[place])
        kept = age <= most
        ids, late = (part.at[jnp.where(kept, count, size)].set(x) for part, x in ((ids, client), (late, age)))
        busy = jnp.zeros(seconds.shape, bool).at[at_work.client].set(True).at[ids].set(True)
        drawn = jax.random.uniform(jax.random.fold_in(key, draws), seconds.shape)
        new = jnp.argmax(jnp.where(busy, -1.0, drawn)).astype(jnp.int32)
        count = count + kept
        # Who begins after the last update has the model that the server makes of this buffer.
        begins = jnp.where(kept & (count == size), -1, 0)
        entries = new, now + seconds[new], begins
        at_work = AtWork(*(part.at[place].set(x) for part, x in zip(at_work, entries, strict=True)))
        return count, draws + 1, now, discarded + ~kept, at_work, ids, late

    zero = jnp.zeros((), jnp.int32)
    nobody = jnp.full((size,), seconds.shape[0], jnp.int32)  # out of range, so that it is written nowhere
    carry = zero, zero, jnp.zeros(()), zero, at_work, nobody, jnp.zeros((size,), jnp.int32)
    *_, now, discarded, at_work, ids, late = jax.lax.while_loop(lambda carry: carry[0] < size, arrive, carry)
    order = jnp.argsort(ids)
    after = AtWork(at_work.client, at_work.left - now, at_work.late + 1)
    return after, Buffer(ids[order], late[order], now, discarded)


class Turns(NamedTuple):
    """What is known of all clients' turns.

    Attributes:
        seconds: (K,) that a turn of each takes.
        left: (K,) seconds until each client's turn ends, as of the beginning of the round.
        until: () seconds that the round takes.
        exchange: () int32: number of the round's exchanges so far.
    """

    seconds: Array
    left: Array
    until: Array
    exchange: Array


def with_turns(problem: Problem, algorithm: Algorithm) -> Algorithm:
    """The algorithm in whose rounds only those clients take part whose turn ends.

    Raises:
        ArgumentError: if a server has the models, clients need what all others send, or the clock has settings of
            synchronous rounds.
    """
    clock, num = problem.clock, problem.num_clients
    assert clock is not None
    if algorithm.topology not in ("own", "peers"):
        why = "a server has its models" if algorithm.topology == "shared" else "clients mix what all neighbors send"
        raise ArgumentError("turns", f"accepted for this method: 0; {why}", clock.turns)
    if problem.cohort_size < num:
        raise ArgumentError("turns", "accepted with participation below 1: 0", clock.turns)
    if clock.turns > num:
        raise ArgumentError("turns", f"accepted: 0 to {num}, the number of clients", clock.turns)
    clock.check_unset("turns", "deadline", "over_selection", "availability")

    def begin(clients):
        seconds, _ = seconds_of_all(problem, algorithm, clients)
        return Turns(seconds, seconds, following(seconds, seconds), jnp.zeros((), jnp.int32))

    def following(left, seconds):
        most = jnp.minimum(jnp.sort(left)[clock.turns - 1], (left + seconds).min())
        return jnp.where(left <= most, left, 0).max()

    noted = with_notes(algorithm, begin, lambda turns, client: turns.left[client] <= turns.until)

    def client_update(context, models, row, data):
        idle = lambda: absent(noted, context, models, row, data)
        out = jax.lax.cond(row.note, lambda: noted.client_update(context, models, row, data), idle)
        seconds = jnp.where(context.step == 0, context.server.note.until, 0)
        return out._replace(report=messages.beside(out.report) | {"seconds": seconds, "away": ~row.note})

    def server_update(key, state, aggregate):
        turns = state.server.note
        state, metrics = noted.server_update(key, state, aggregate._replace(report=aggregate.report["method"]))
        last = turns.exchange == algorithm.exchanges - 1
        left = turns.left - turns.until
        left = jnp.where(turns.left <= turns.until, left + turns.seconds, left)
        ended = Turns(turns.seconds, left, following(left, turns.seconds), jnp.zeros_like(turns.exchange))
        going_on = turns._replace(exchange=turns.exchange + 1)
        turns = jax.tree.map(lambda a, b: jnp.where(last, a, b), ended, going_on)
        clients = Noted(state.clients.inner, turns.left <= turns.until)
        return state._replace(server=Noted(state.server.inner, turns), clients=clients), metrics

    return dataclasses.replace(noted, client_update=client_update, server_update=server_update)
