"""How long rounds take on a simulated clock, for any method; see `local.clock`.

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
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    PyTree,
    State,
    Traffic,
)
from pfljax.exchange import traffic
from pfljax.exchange.views import view
from pfljax.local.clock import Clock
from pfljax.local.problem import Problem
from pfljax.stages import messages
from pfljax.stages.faults import absent
from pfljax.stages.notes import bare, inner, with_notes

WAIT = 60.0  # seconds that a server waits if no client is available


def with_clock(problem: Problem, algorithm: Algorithm) -> Algorithm:
    """The algorithm whose rounds take the time that the problem's clock says.

    Raises:
        ArgumentError: if the algorithm cannot do what the clock says.
    """
    clock = problem.clock
    assert clock is not None
    check(clock, problem, algorithm)
    always = clock.availability == "always"
    noted = with_notes(algorithm, lambda clients: Elapsed(jnp.zeros(()), jnp.zeros(())))

    def client_update(context, models, row, data):
        here = always or clock.available(context.client, context.server.note.total)
        idle = lambda: absent(noted, context, models, row, data)
        train = lambda: noted.client_update(context, models, row, data)
        out = train() if always else jax.lax.cond(here, train, idle)
        moved = moved_by(algorithm, bare(context), models, row.inner, data, out)
        each = jnp.where(here, exchange_seconds(problem, algorithm, moved, context, data.train.size), WAIT)
        begun, told = jnp.where(context.step == 0, 0, context.server.note.of_round), {}
        if math.isfinite(clock.deadline):
            late = begun + each > clock.deadline
            lost = lambda: idle()._replace(client=out.client)
            out = jax.lax.cond(late, lost, lambda: out)
            each, told = jnp.minimum(each, jnp.maximum(clock.deadline - begun, 0)), {"absent": late}
        told |= {} if always else {"away": ~here}
        return out._replace(report=messages.beside(out.report, begun=begun, seconds=each, **told))

    def server_update(key, state, aggregate):
        report = aggregate.report
        state, metrics = noted.server_update(key, state, aggregate._replace(report=report["method"]))
        spent = traffic.seconds_of(report)
        note = Elapsed(state.server.note.total + spent, report["begun"][0] + spent)
        return state._replace(server=state.server._replace(note=note)), metrics

    def sample(key, state, clients):
        """The fastest of those that are asked; those that are not available come last."""
        ids = jnp.arange(problem.num_clients, dtype=jnp.int32)
        here = problem.plan.over_rows(lambda client: clock.available(client, state.server.note.total), ids)
        asked = min(math.ceil(problem.cohort_size * (1 + clock.over_selection) - 1e-6), problem.num_clients)
        ids = jax.lax.top_k(jax.random.uniform(key, here.shape) + here, asked)[1].astype(jnp.int32)
        seconds = round_seconds(problem, algorithm, inner(state), clients, ids)
        first = jax.lax.top_k(-jnp.where(here[ids], seconds, jnp.inf), problem.cohort_size)[1]
        return jnp.sort(ids[first])

    chosen = {"sample": sample} if clock.over_selection or not always else {}
    return dataclasses.replace(noted, client_update=client_update, server_update=server_update, **chosen)


class Elapsed(NamedTuple):
    """Simulated seconds so far.

    Attributes:
        total: () since the run began.
        of_round: () since the round began.
    """

    total: Array
    of_round: Array


def check(clock: Clock, problem: Problem, algorithm: Algorithm) -> None:
    """Raises `ArgumentError` if the algorithm cannot do what the clock says."""
    if clock.over_selection and problem.cohort_size == problem.num_clients:
        raise ArgumentError("over_selection", "accepted with all clients in every round: 0", clock.over_selection)
    if math.isfinite(clock.deadline) and algorithm.topology in ("own", "push"):
        why = (
            "clients mix what all their neighbors send" if algorithm.topology == "push" else "no client sends anything"
        )
        raise ArgumentError("deadline", f"accepted for this method: inf; {why}", clock.deadline)
    if clock.availability != "always" and algorithm.topology == "push":
        text = "accepted for this method: always; clients mix what all their neighbors send"
        raise ArgumentError("availability", text, clock.availability)


def moved_by(
    algorithm: Algorithm, context: ClientContext, models: PyTree, row: PyTree, data: ClientData, out: ClientOutput
) -> Traffic:
    """Bytes of the parts of a client's messages; `out` may be shapes."""
    update = lambda server: algorithm.client_update(context._replace(server=server), models, row, data)
    return traffic.of_client(algorithm, models, out, traffic.bytes_read(update, context.server))


def exchange_seconds(
    problem: Problem, algorithm: Algorithm, moved: Traffic, context: ClientContext, size: Array
) -> Array:
    """() seconds of a client's part in an exchange; 0 in those that it has no step for."""
    assert problem.clock is not None
    taken = exchanges_of(problem, algorithm, size)
    gradients = problem.solver.num_steps(size, problem.n_max) * algorithm.ledger.passes / taken
    sent = jnp.broadcast_to(size > 0, context.index.shape)
    found = traffic.messages(algorithm, context.client, context.index, sent, context.step == 0)
    batch = jnp.minimum(problem.solver.batch(problem.n_max), size)
    down, up = found.num_bytes(moved)
    each = problem.clock.seconds(context.client, gradients * max(algorithm.ledger.gradients, 1), batch, down + up)
    return jnp.where(context.step < taken, each, 0)


def exchanges_of(problem: Problem, algorithm: Algorithm, size: Array) -> Array:
    """() number of a round's exchanges that a client has a step for, at least 1."""
    return jnp.clip(problem.solver.num_steps(size, problem.n_max), 1, algorithm.exchanges)


def round_seconds(problem: Problem, algorithm: Algorithm, state: State, clients: ClientData, ids: Array) -> Array:
    """(n,) seconds of a whole round, of clients `ids`.

    Args:
        problem: The problem of the algorithm.
        algorithm: Any algorithm.
        state: The state of all clients, or its shapes.
        clients: All clients' data.
        ids: (n,) int32.
    """
    moved, received = message_shapes(problem, algorithm, state, clients)
    zero, key = jnp.zeros((), jnp.int32), jax.random.key(0)

    def one(client):
        # Under "peers", the first one is its own.
        context = ClientContext(key, zero, zero, client + jnp.arange(received), (), client)
        size = clients.train.size[client]
        each = exchange_seconds(problem, algorithm, moved, context, size)
        return each * exchanges_of(problem, algorithm, size)

    return problem.plan.over_rows(one, ids)


def message_shapes(problem: Problem, algorithm: Algorithm, state: State, clients: ClientData) -> tuple[Traffic, int]:
    """Bytes of the parts of a client's messages, and the number of models that it receives, from shapes alone."""
    first = jnp.zeros((), jnp.int32)

    def client(key, server, stack, row, clients):
        own = algorithm.topology == "own" or not jax.tree.leaves(stack)
        index = jnp.arange(1 if own else tree.num_rows(stack))
        context = ClientContext(key, first, first, index, server, first)
        if algorithm.download is not None:
            index = algorithm.download(context, row, Cohort(jnp.arange(problem.cohort_size)))
        models = tree.take(stack, jnp.zeros_like(index[:1] if algorithm.topology == "push" else index))
        return index, models, algorithm.client_update(context._replace(index=index), models, row, view(clients, first))

    key, row = jax.random.key(0), tree.shapes_of_rows(state.clients)
    args = state.models, row, clients
    index, models, out = jax.eval_shape(client, key, state.server, *args)
    read = traffic.bytes_read(lambda server, *args: client(key, server, *args)[2], state.server, *args)
    return traffic.of_client(algorithm, models, out, read), len(index)
