"""Clients that do not wait for each other: the order of their work follows from `stages.devices`.

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
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Key,
    Metrics,
    PyTree,
    Start,
    State,
    Topology,
)
from pfljax.exchange import lifting
from pfljax.local.problem import Problem
from pfljax.stages.devices import Clock
from pfljax.stages.messages import LocalWork, choose, either
from pfljax.stages.stage import Stage, StageState
from pfljax.stages.timing import Waiting, check, round_seconds

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline

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

    client: jax.Array
    left: jax.Array
    late: jax.Array
    row: jax.Array


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


def clock_stage(problem: Problem, pipeline: Pipeline) -> Stage | None:
    """The stage of the problem's clock, if it has one: arrivals, turns, or rounds that wait.

    Raises:
        ArgumentError: if the method cannot do what the clock says.
    """
    clock = problem.clock
    if clock is None:
        return None
    method = pipeline.method
    if method.stale:
        return Arriving(problem, clients_at_work(clock, problem), method)
    if clock.concurrency:
        text = "accepted for this method: 0; its server waits for all clients of a round"
        raise ArgumentError("concurrency", text, clock.concurrency)
    if clock.turns:
        check_turns(clock, problem, method)
        return TakingTurns(problem, clock.turns, method)
    check(clock, problem, method)
    return Waiting(problem, clock, method)


def clients_at_work(clock: Clock, problem: Problem) -> int:
    """C, the number of clients that are at work.

    Raises:
        ArgumentError: if there are too few clients, or the clock has settings of synchronous rounds.
    """
    num = problem.num_clients
    size = problem.cohort_size
    at_once = clock.concurrency or min(2 * size, num - size)
    if num == size:
        text = "accepted for this method with a clock: below 1, so that others go on"
        raise ArgumentError("participation", text, 1)
    if not 1 <= at_once <= num - size:
        accepted = f"1 to {num - size}, the {num} clients without the {size} of a round"
        text = f"accepted for this method: {accepted}"
        raise ArgumentError("concurrency", text, clock.concurrency)
    waits = ("deadline", "over_selection", "availability", "turns")
    clock.check_unset("this method, whose server waits for nobody", *waits)
    return at_once


def check_turns(clock: Clock, problem: Problem, method: Algorithm) -> None:
    """Raises `ArgumentError` if the method's clients cannot take turns."""
    if method.topology.on_server:
        text = "accepted for this method: 0; a server has its models"
        raise ArgumentError("turns", text, clock.turns)
    if method.topology is Topology.PUSH:
        text = "accepted for this method: 0; clients mix what all neighbors send"
        raise ArgumentError("turns", text, clock.turns)
    if problem.cohort_size < problem.num_clients:
        raise ArgumentError("turns", "accepted with participation below 1: 0", clock.turns)
    if clock.turns > problem.num_clients:
        text = f"accepted: 0 to {problem.num_clients}, the number of clients"
        raise ArgumentError("turns", text, clock.turns)
    clock.check_unset("turns", "deadline", "over_selection", "availability")


def seconds_of_all(
    problem: Problem, algorithm: Algorithm, clients: ClientData
) -> tuple[Array, State]:
    """(K,) seconds that the work of each client takes, and the shapes of the state."""

    def init(key: Key, clients: ClientData) -> State:
        return lifting.init(algorithm, problem.plan, key, clients)

    shapes = jax.eval_shape(init, jax.random.key(0), clients)
    ids = jnp.arange(problem.num_clients, dtype=jnp.int32)
    return round_seconds(problem, algorithm, shapes, clients, ids), shapes


@dataclasses.dataclass(frozen=True)
class Arriving(Stage):
    """Rounds are the server's steps, with the updates that arrive for each.

    If updates count however late they are, the stack of models holds the newest one, those of the
    clients at work, those of the updates in the buffer, and a place for the step's last model.

    Attributes:
        problem: The problem of the method.
        at_once: C, the number of clients at work.
        method: The method.
    """

    name = "clock"
    problem: Problem
    at_once: int
    method: Algorithm

    @property
    def chooses(self) -> bool:
        return True

    def start(self, start: Start) -> Start:
        if not self.method.any_age:
            return start
        # A server's step puts its new model first and drops the last one, which is nobody's.
        num_models = 1 + self.at_once + self.problem.cohort_size + 1
        return start._replace(models=tree.repeat(start.models, num_models))

    def server_note(self, key: Key, start: Start, clients: ClientData) -> Arrivals:
        assert self.problem.clock is not None
        seconds, shapes = seconds_of_all(self.problem, self.method, clients)
        key = jax.random.fold_in(jax.random.key(self.problem.clock.seed), ARRIVALS)
        everyone = jax.random.permutation(key, self.problem.num_clients)
        first = everyone[: self.at_once].astype(jnp.int32)
        zeros = jnp.zeros_like(first)
        at_work = AtWork(first, seconds[first], zeros, zeros)
        return self._following(key, seconds, at_work, tree.num_rows(shapes.models))

    def sample(self, key: Key, state: State, clients: ClientData, note: Arrivals) -> Array:
        return note.buffer.ids

    def download(self, context: ClientContext, index: Array, note: Arrivals) -> Array:
        position = place_in_buffer(context, note)
        if self.method.any_age:
            return 1 + self.at_once + position[None]
        return note.buffer.late[position][None]

    def before_client(self, work: LocalWork, note: StageState) -> LocalWork:
        # To the method, an index is a number of steps late.
        position = place_in_buffer(work.context, note.server)
        late = note.server.buffer.late[position][None]
        return work._replace(context=work.context._replace(index=late))

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        seconds = note.server.buffer.seconds
        participation = output.participation._replace(seconds=seconds)
        return output._replace(participation=participation), note.client

    def before_server(
        self, key: Key, state: State, aggregate: Aggregate, note: StageState
    ) -> tuple[Aggregate, StageState, Metrics]:
        return aggregate, note, {"discarded_updates": note.server.buffer.discarded}

    def after_server(self, key: Key, state: State, note: Arrivals) -> tuple[State, Arrivals]:
        # Where the models of those at work are after the step, which put the new one first.
        at_work = note.at_work
        behind = at_work.late
        if self.method.any_age:
            behind = 2 + jnp.arange(self.at_once, dtype=jnp.int32)
        at_work = at_work._replace(row=jnp.where(at_work.late == 0, 0, behind))

        draw_key = jax.random.fold_in(key, ARRIVALS)
        num_models = tree.num_rows(state.models)
        note = self._following(draw_key, note.seconds, at_work, num_models)
        if self.method.any_age:
            newest = jnp.zeros((1,), jnp.int32)
            rows = jnp.concatenate([newest, note.at_work.row, note.buffer.row, newest])
            state = state.with_models(tree.take(state.models, rows))
        return state, note

    def _following(self, key: Key, seconds: Array, at_work: AtWork, num_models: int) -> Arrivals:
        """The arrivals until the server's next step."""
        most_late = MOST if self.method.any_age else num_models - 1
        size = self.problem.cohort_size
        at_work, buffer = next_buffer(key, seconds, at_work, size, most_late)
        return Arrivals(seconds, at_work, buffer)


def place_in_buffer(context: ClientContext, note: Arrivals) -> Array:
    """() int32, a client's place in the buffer."""
    return jnp.searchsorted(note.buffer.ids, context.client).astype(jnp.int32)


class Filling(NamedTuple):
    """A buffer that is being filled.

    Attributes:
        count: () int32, number of updates in it.
        draws: () int32, number of clients that were drawn.
        now: () seconds since the last round.
        discarded: () int32: updates that were too late.
        at_work: Who is at work.
        ids: (S,) int32, the clients that sent updates, in order of arrival.
        late: (S,) int32: steps that each is late.
        row: (S,) int32: place of the model that each was trained from.
    """

    count: jax.Array
    draws: jax.Array
    now: jax.Array
    discarded: jax.Array
    at_work: AtWork
    ids: jax.Array
    late: jax.Array
    row: jax.Array


def next_buffer(
    key: Key, seconds: Array, at_work: AtWork, size: int, most: int
) -> tuple[AtWork, Buffer]:
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

    def is_filling(buffer: Filling) -> Array:
        return buffer.count < size

    def arrive(buffer: Filling) -> Filling:
        at_work = buffer.at_work

        # Whoever is done first sends its update, unless that is too late.
        position = jnp.argmin(at_work.left)
        age = at_work.late[position]
        now = jnp.maximum(buffer.now, at_work.left[position])
        is_accepted = age <= most
        slot = jnp.where(is_accepted, buffer.count, size)
        ids = buffer.ids.at[slot].set(at_work.client[position])
        late = buffer.late.at[slot].set(age)
        row = buffer.row.at[slot].set(at_work.row[position])

        # Another client begins, drawn uniformly among the rest.
        is_busy = jnp.zeros(seconds.shape, bool)
        is_busy = is_busy.at[at_work.client].set(True)
        is_busy = is_busy.at[ids].set(True)
        draw_key = jax.random.fold_in(key, buffer.draws)
        draws = jax.random.uniform(draw_key, seconds.shape)
        client = jnp.argmax(jnp.where(is_busy, -1.0, draws)).astype(jnp.int32)

        # Who begins after the last update has the model that the server makes of this buffer.
        count = buffer.count + is_accepted
        steps_late = jnp.where(is_accepted & (count == size), -1, 0)
        at_work = AtWork(
            client=at_work.client.at[position].set(client),
            left=at_work.left.at[position].set(now + seconds[client]),
            late=at_work.late.at[position].set(steps_late),
            row=at_work.row.at[position].set(0),
        )
        return Filling(
            count=count,
            draws=buffer.draws + 1,
            now=now,
            discarded=buffer.discarded + ~is_accepted,
            at_work=at_work,
            ids=ids,
            late=late,
            row=row,
        )

    zero = jnp.zeros((), jnp.int32)
    # Nobody's number is out of range, so that it is written nowhere.
    nobody = jnp.full((size,), seconds.shape[0], jnp.int32)
    zeros = jnp.zeros((size,), jnp.int32)
    empty = Filling(
        count=zero,
        draws=zero,
        now=jnp.zeros(()),
        discarded=zero,
        at_work=at_work,
        ids=nobody,
        late=zeros,
        row=zeros,
    )
    full = jax.lax.while_loop(is_filling, arrive, empty)

    order = jnp.argsort(full.ids)
    left = full.at_work.left - full.now
    after = full.at_work._replace(left=left, late=full.at_work.late + 1)
    buffer = Buffer(
        ids=full.ids[order],
        late=full.late[order],
        seconds=full.now,
        discarded=full.discarded,
        row=full.row[order],
    )
    return after, buffer


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


@dataclasses.dataclass(frozen=True)
class TakingTurns(Stage):
    """Each client takes turns at its own pace; those whose turn ends are the round's."""

    name = "clock"
    problem: Problem
    num_turns: int
    method: Algorithm

    def server_note(self, key: Key, start: Start, clients: ClientData) -> Turns:
        seconds, _ = seconds_of_all(self.problem, self.method, clients)
        exchange = jnp.zeros((), jnp.int32)
        return Turns(seconds, seconds, self._until(seconds, seconds), exchange)

    def client_note(self, note: Turns, client: Array) -> Array:
        """Whether the client's turn ends in this round."""
        return note.left[client] <= note.until

    def before_client(self, work: LocalWork, note: StageState) -> LocalWork:
        waits = ~note.client
        return work._replace(absent=either(work.absent, waits), away=either(work.away, waits))

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        seconds = jnp.where(work.context.step == 0, note.server.until, 0)
        participation = output.participation._replace(seconds=seconds)
        return output._replace(participation=participation), note.client

    def before_server(
        self, key: Key, state: State, aggregate: Aggregate, note: StageState
    ) -> tuple[Aggregate, StageState, Metrics]:
        turns = note.server
        left = turns.left - turns.until
        left = jnp.where(turns.left <= turns.until, left + turns.seconds, left)
        until = self._until(left, turns.seconds)
        ended = Turns(turns.seconds, left, until, jnp.zeros_like(turns.exchange))
        going_on = turns._replace(exchange=turns.exchange + 1)
        is_last = turns.exchange == self.method.exchanges - 1
        turns = choose(is_last, ended, going_on)
        return aggregate, StageState(turns, turns.left <= turns.until), {}

    def _until(self, left: Array, seconds: Array) -> Array:
        """() seconds of a round, in which as many turns end, and no client's twice."""
        enough_turns = jnp.sort(left)[self.num_turns - 1]
        second_turn = (left + seconds).min()
        most = jnp.minimum(enough_turns, second_turn)
        return jnp.where(left <= most, left, 0).max()
