"""Clients that do not wait for each other: the order of their work follows from a simulated clock; see `local.clock`.

Under a server whose models may be stale (`Algorithm.stale`), a fixed number of clients are always at work. Whoever is
done sends its update and another client begins, with the newest model. After S updates, the server takes a step: a
round is one buffer of updates, and its cohort are the clients that sent them. This is how FedBuff runs (Nguyen et al.,
AISTATS 2022, Algorithm 1), and FedAsync with S = 1 (Xie, Koyejo, Gupta, 2019, Algorithm 1).

Without a server's model, each client takes its turns at its own pace: a round is the time in which the next few turns
end, fewer if a client would otherwise end two. Those clients do then what a round of the method asks for, with the
others' models as they are at that time, which some of the others last changed long ago.

An update counts however late it is, as in both papers (`Algorithm.any_age`): the stack of models then has the newest
one, that of each client at work, and that of each update in the buffer. A method that limits how late updates may be
keeps the server's last models instead; updates that are later are discarded, and do not count as traffic.

Departures from the papers: Those at work and in the buffer are different clients; the next one is drawn uniformly among
the rest. A client that fails (`stages.faults`) has a place in the buffer. A turn reads others' models when it ends, not
when it begins.
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

MOST = 2**31 - 1  # steps late, if any number is accepted
ARRIVALS = 0xA551  # folded into a round's key to draw the clients that begin


class AtWork(NamedTuple):
    """The clients that are training.

    Attributes:
        client: (C,) int32.
        left: (C,) seconds until each is done.
        late: (C,) int32: number of the server's steps since each began.
        row: (C,) int32: place of the model that each trains from, in the stack before the server's next step.
    """

    client: Array
    left: Array
    late: Array
    row: Array


class Buffer(NamedTuple):
    """The updates of a round.

    Attributes:
        ids: (S,) int32, ascending: the clients that sent them.
        late: (S,) int32: steps that each is late.
        seconds: () since the last round.
        discarded: () int32: updates that were too late.
        row: (S,) int32: place of the model that each was trained from; see `AtWork`.
    """

    ids: Array
    late: Array
    seconds: Array
    discarded: Array
    row: Array


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
    any_age = algorithm.any_age

    def most_late(models):
        return MOST if any_age else tree.num_rows(models) - 1

    def begin(clients):
        seconds, shapes = seconds_of_all(problem, algorithm, clients)
        key = jax.random.fold_in(jax.random.key(clock.seed), ARRIVALS)
        first = jax.random.permutation(key, num)[:at_once].astype(jnp.int32)
        zeros = jnp.zeros_like(first)
        at_work = AtWork(first, seconds[first], zeros, zeros)
        return Arrivals(seconds, *next_buffer(key, seconds, at_work, size, most_late(shapes.models)))

    noted = with_notes(algorithm, begin)

    def start(key, clients):
        begun = noted.start(key, clients)
        # A server's step puts its new model first and drops the last one, which is nobody's.
        rows = 1 + at_once + size + 1
        return begun._replace(models=tree.repeat(begun.models, rows)) if any_age else begun

    def place_in_buffer(context):
        return jnp.searchsorted(context.server.note.buffer.ids, context.client).astype(jnp.int32)

    def late_of(context):
        return context.server.note.buffer.late[place_in_buffer(context)][None]

    def download(context, row, cohort):
        return 1 + at_once + place_in_buffer(context)[None] if any_age else late_of(context)

    def client_update(context, models, row, data):
        # To the method, an index is a number of steps late.
        out = noted.client_update(context._replace(index=late_of(context)), models, row, data)
        return out._replace(report=messages.beside(out.report) | {"seconds": context.server.note.buffer.seconds})

    def server_update(key, state, aggregate):
        report, arrivals = aggregate.report, state.server.note
        state, metrics = noted.server_update(key, state, aggregate._replace(report=report["method"]))
        # Where the models of those at work are after the step, which put the new one first.
        at_work = arrivals.at_work
        behind = 2 + jnp.arange(at_once, dtype=jnp.int32) if any_age else at_work.late
        at_work = at_work._replace(row=jnp.where(at_work.late == 0, 0, behind))
        draw = jax.random.fold_in(key, ARRIVALS)
        at_work, buffer = next_buffer(draw, arrivals.seconds, at_work, size, most_late(state.models))
        if any_age:
            newest = jnp.zeros((1,), jnp.int32)
            rows = jnp.concatenate([newest, at_work.row, buffer.row, newest])
            state = state._replace(models=tree.take(state.models, rows))
        metrics |= {"discarded_updates": arrivals.buffer.discarded}
        following = Arrivals(arrivals.seconds, at_work, buffer)
        return state._replace(server=Noted(state.server.inner, following)), metrics

    return dataclasses.replace(
        noted,
        start=start,
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
        count, draws, now, discarded, at_work, ids, late, rows = carry
        place = jnp.argmin(at_work.left)
        client, age, row = at_work.client[place], at_work.late[place], at_work.row[place]
        now = jnp.maximum(now, at_work.left[place])
        kept = age <= most
        slot = jnp.where(kept, count, size)
        ids, late, rows = (part.at[slot].set(x) for part, x in ((ids, client), (late, age), (rows, row)))
        busy = jnp.zeros(seconds.shape, bool).at[at_work.client].set(True).at[ids].set(True)
        drawn = jax.random.uniform(jax.random.fold_in(key, draws), seconds.shape)
        new = jnp.argmax(jnp.where(busy, -1.0, drawn)).astype(jnp.int32)
        count = count + kept
        # Who begins after the last update has the model that the server makes of this buffer.
        begins = jnp.where(kept & (count == size), -1, 0)
        entries = AtWork(new, now + seconds[new], begins, zero)
        at_work = AtWork(*(part.at[place].set(x) for part, x in zip(at_work, entries, strict=True)))
        return count, draws + 1, now, discarded + ~kept, at_work, ids, late, rows

    zero = jnp.zeros((), jnp.int32)
    nobody = jnp.full((size,), seconds.shape[0], jnp.int32)  # out of range, so that it is written nowhere
    zeros = jnp.zeros((size,), jnp.int32)
    carry = zero, zero, jnp.zeros(()), zero, at_work, nobody, zeros, zeros
    *_, now, discarded, at_work, ids, late, rows = jax.lax.while_loop(lambda carry: carry[0] < size, arrive, carry)
    order = jnp.argsort(ids)
    after = at_work._replace(left=at_work.left - now, late=at_work.late + 1)
    return after, Buffer(ids[order], late[order], now, discarded, rows[order])


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
