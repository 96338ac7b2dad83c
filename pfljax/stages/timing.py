"""How long rounds take on a simulated clock, for any method; see `stages.devices`.

A round takes as long as the slowest client of its cohort. With a deadline, the results of slower clients are lost. With
over-selection, the server asks more clients than it needs and goes on with the first ones: Bonawitz et al., "Towards
federated learning at scale" (MLSys 2019).

Departures from the paper: Clients that are asked in addition leave no trace: their traffic is not counted, and their
rows stay as they are. A client that is late keeps what it has learned; its upload does not count as traffic. Whoever is
available when a round begins also finishes it. If nobody is, nothing happens in that round, which takes a minute. What
a server computes takes no time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

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
    Cohort,
    Key,
    Metrics,
    PyTree,
    Start,
    State,
    Topology,
    Traffic,
)
from pfljax.exchange import traffic
from pfljax.exchange.views import view
from pfljax.local.problem import Problem
from pfljax.stages.devices import Clock
from pfljax.stages.messages import LocalWork, either, lost, with_note
from pfljax.stages.stage import Stage, StageState

WAIT = 60.0  # seconds that a server waits if no client is available


class Elapsed(NamedTuple):
    """Simulated seconds so far.

    Attributes:
        total: () since the run began.
        of_round: () since the round began.
    """

    total: Array
    round_elapsed: Array


def check(clock: Clock, problem: Problem, algorithm: Algorithm) -> None:
    """Raises `ArgumentError` if the algorithm cannot do what the clock says."""
    if clock.over_selection and problem.cohort_size == problem.num_clients:
        text = "accepted with all clients in every round: 0"
        raise ArgumentError("over_selection", text, clock.over_selection)
    mixes = "clients mix what all their neighbors send"
    if math.isfinite(clock.deadline):
        text = "accepted for this method: inf"
        if algorithm.topology is Topology.PUSH:
            raise ArgumentError("deadline", f"{text}; {mixes}", clock.deadline)
        if not algorithm.topology.moves:
            raise ArgumentError("deadline", f"{text}; no client sends anything", clock.deadline)
    if clock.availability != "always" and algorithm.topology is Topology.PUSH:
        text = f"accepted for this method: always; {mixes}"
        raise ArgumentError("availability", text, clock.availability)


@dataclasses.dataclass(frozen=True)
class Waiting(Stage):
    """A round takes as long as its slowest client; what comes after a deadline is lost."""

    name = "clock"
    problem: Problem
    clock: Clock
    method: Algorithm

    @property
    def always(self) -> bool:
        """Whether all clients are there at all times."""
        return self.clock.availability == "always"

    @property
    def chooses(self) -> bool:
        return bool(self.clock.over_selection) or not self.always

    def server_note(self, key: Key, start: Start, clients: ClientData) -> Elapsed:
        return Elapsed(jnp.zeros(()), jnp.zeros(()))

    def before_client(self, work: LocalWork, note: StageState) -> LocalWork:
        if self.always:
            return work
        away = ~self.clock.available(work.context.client, note.server.total)
        return work._replace(absent=either(work.absent, away), away=either(work.away, away))

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        context = work.context
        moved = self._moved(work, output)
        size = work.data.train.size
        seconds = exchange_seconds(self.problem, self.method, moved, context, size)
        if not self.always:
            is_here = self.clock.available(context.client, note.server.total)
            seconds = jnp.where(is_here, seconds, WAIT)

        # The exchanges of a round follow each other; the deadline is for all of them.
        begun = jnp.where(context.step == 0, 0, note.server.round_elapsed)
        if math.isfinite(self.clock.deadline):
            output = lost(output, begun + seconds > self.clock.deadline)
            left = jnp.maximum(self.clock.deadline - begun, 0)
            seconds = jnp.minimum(seconds, left)
        participation = output.participation._replace(seconds=seconds)
        output = output._replace(participation=participation)
        return with_note(output, self.name, begun), note.client

    def before_server(
        self, key: Key, state: State, aggregate: Aggregate, note: StageState
    ) -> tuple[Aggregate, StageState, Metrics]:
        spent = traffic.seconds_of(aggregate.participation)
        assert spent is not None
        begun = aggregate.notes[self.name][0]
        elapsed = Elapsed(note.server.total + spent, begun + spent)
        return aggregate, note._replace(server=elapsed), {}

    def sample(self, key: Key, state: State, clients: ClientData, note: Elapsed) -> Array:
        """The fastest of those that are asked; those that are not available come last."""
        problem = self.problem
        clock = self.clock

        def is_here(client: Array) -> Array:
            return clock.available(client, note.total)

        everyone = jnp.arange(problem.num_clients, dtype=jnp.int32)
        here = problem.plan.over_rows(is_here, everyone)

        # Ask some clients, uniformly drawn among those that are available.
        wanted = math.ceil(problem.cohort_size * (1 + clock.over_selection) - 1e-6)
        num_asked = min(wanted, problem.num_clients)
        scores = jax.random.uniform(key, here.shape) + here
        _, ids = jax.lax.top_k(scores, num_asked)
        ids = ids.astype(jnp.int32)

        # Go on with the first ones.
        seconds = round_seconds(problem, self.method, state, clients, ids)
        seconds = jnp.where(here[ids], seconds, jnp.inf)
        _, first = jax.lax.top_k(-seconds, problem.cohort_size)
        return jnp.sort(ids[first])

    def _moved(self, work: LocalWork, output: ClientOutput) -> Traffic:
        """Bytes of the parts of the client's messages."""

        def update(server: PyTree) -> ClientOutput:
            context = work.context._replace(server=server)
            return self.method.client_update(context, work.models, work.row, work.data)

        read = traffic.bytes_read(update, work.context.server)
        return traffic.client_traffic(self.method, work.models, output, read)


def exchange_seconds(
    problem: Problem, algorithm: Algorithm, moved: Traffic, context: ClientContext, size: Array
) -> Array:
    """() seconds of a client's part in an exchange; 0 in those that it has no step for."""
    assert problem.clock is not None
    # The mini-batches of an exchange.
    num_exchanges = exchanges_of(problem, algorithm, size)
    num_steps = problem.solver.num_steps(size, problem.n_max)
    num_batches = num_steps * algorithm.ledger.passes / num_exchanges

    # The bytes that it moves.
    sent = jnp.broadcast_to(size > 0, context.index.shape)
    messages = traffic.messages(algorithm, context.client, context.index, sent, context.step == 0)
    batch_size = jnp.minimum(problem.solver.batch(problem.n_max), size)
    down, up = messages.num_bytes(moved)

    num_gradients = num_batches * max(algorithm.ledger.gradients, 1)
    seconds = problem.clock.seconds(context.client, num_gradients, batch_size, down + up)
    return jnp.where(context.step < num_exchanges, seconds, 0)


def exchanges_of(problem: Problem, algorithm: Algorithm, size: Array) -> Array:
    """() number of a round's exchanges that a client has a step for, at least 1."""
    return jnp.clip(problem.solver.num_steps(size, problem.n_max), 1, algorithm.exchanges)


def round_seconds(
    problem: Problem, algorithm: Algorithm, state: State, clients: ClientData, ids: Array
) -> Array:
    """(n,) seconds of a whole round, of clients `ids`.

    Args:
        problem: The problem of the algorithm.
        algorithm: Any algorithm.
        state: The state of all clients, or its shapes.
        clients: All clients' data.
        ids: (n,) int32.
    """
    moved, num_received = message_shapes(problem, algorithm, state, clients)
    zero = jnp.zeros((), jnp.int32)
    key = jax.random.key(0)

    def seconds_of(client: Array) -> Array:
        index = client + jnp.arange(num_received)  # under "peers", the first one is its own
        context = ClientContext(key=key, round=zero, step=zero, index=index, client=client)
        size = clients.train.size[client]
        seconds = exchange_seconds(problem, algorithm, moved, context, size)
        return seconds * exchanges_of(problem, algorithm, size)

    return problem.plan.over_rows(seconds_of, ids)


def message_shapes(
    problem: Problem, algorithm: Algorithm, state: State, clients: ClientData
) -> tuple[Traffic, int]:
    """Bytes of the parts of a client's messages, and the number of models that it receives."""
    zero = jnp.zeros((), jnp.int32)
    topology = algorithm.topology

    def play(key: Key, server: PyTree, stack: PyTree, row: PyTree, clients: ClientData) -> tuple:
        alone = not topology.moves or not jax.tree.leaves(stack)
        index = jnp.arange(1 if alone else tree.num_rows(stack))
        context = ClientContext(
            key=key, round=zero, step=zero, index=index, server=server, client=zero
        )
        if algorithm.download is not None:
            cohort = Cohort(jnp.arange(problem.cohort_size))
            index = algorithm.download(context, row, cohort)
        received = index[:1] if topology is Topology.PUSH else index
        models = tree.take(stack, jnp.zeros_like(received))
        data = view(clients, zero)
        output = algorithm.client_update(context._replace(index=index), models, row, data)
        return index, models, output

    key = jax.random.key(0)
    row = tree.shapes_of_rows(state.rows)
    inputs = (state.models, row, clients)
    index, models, output = jax.eval_shape(play, key, state.server.state, *inputs)

    def output_of(server: PyTree, *inputs: PyTree) -> ClientOutput:
        return play(key, server, *inputs)[2]

    read = traffic.bytes_read(output_of, state.server.state, *inputs)
    return traffic.client_traffic(algorithm, models, output, read), len(index)
