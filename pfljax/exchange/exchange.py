"""One scan over blocks of clients: each block receives models, runs the client updates, and deposits the results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pfljax.contract import tree
from pfljax.contract.pooled import is_pooled
from pfljax.contract.types import (
    Aggregate,
    Array,
    ClientOutput,
    Params,
    Participation,
    PyTree,
    Topology,
    Upload,
)
from pfljax.exchange.layout import Layout, block, flat, replace
from pfljax.exchange.routes import AXIS, SPREAD, WHOLE, Block, Contributions, Route
from pfljax.exchange.side_by_side import CLIENTS
from pfljax.exchange.views import view


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Clients:
    """Inputs of the S clients of an exchange.

    Attributes:
        index: (S, J) int32, the models that each client receives.
        rows: The clients' own state, leaves (S, ...).
        data: The clients' data, leaves (S, ...).
        sizes: (S,) sizes for sorting the clients, or None.
        topology, own_first: As in `ExecutionPlan.exchange`.
    """

    index: Array
    rows: PyTree
    data: PyTree
    sizes: Array | None
    topology: Topology = dataclasses.field(metadata={"static": True})
    own_first: bool = dataclasses.field(metadata={"static": True})


class Results(NamedTuple):
    """What an exchange hands to the server of each client, as in `Aggregate`."""

    report: PyTree
    participation: Participation
    notes: dict[str, PyTree]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange with a layout.

    Attributes:
        mesh: The mesh of devices.
        layout: Placement of clients on the devices.
        route: The way models reach the clients.
        client_fn: As in `ExecutionPlan.exchange`.
    """

    mesh: Mesh
    layout: Layout
    route: Route
    client_fn: Callable[..., ClientOutput]

    def run(self, models: Params, clients: Clients, common: tuple) -> tuple[PyTree, Aggregate]:
        """Runs the exchange; `common` holds further arguments of `client_fn`, shared by all clients."""
        layout = self.layout
        route = self.route

        # An equal number of clients on each device; padding comes last where clients are sorted.
        real = layout.real()
        sizes = clients.sizes
        clients = layout.pad(dataclasses.replace(clients, sizes=None))
        if sizes is not None and layout.by_size:
            sizes = jnp.where(real, layout.pad(sizes), -1)
            clients = dataclasses.replace(clients, sizes=sizes)
        if route.models_held:
            models = layout.pad(models, route.models_held)

        on_device = self._on_device
        if self.mesh.shape[AXIS] > 1:
            on_device = jax.shard_map(
                on_device,
                mesh=self.mesh,
                in_specs=(route.models_at, spread_rows(clients), SPREAD, WHOLE),
                out_specs=(SPREAD, route.sums_at),
                axis_names={AXIS},
                check_vma=False,
            )
        client_results, collected = on_device(models, clients, real, common)

        rows, results, sent = layout.cut(client_results)
        if route.sums_held:
            collected = layout.cut(collected, route.sums_held)
        sums, num_sent = collected
        upload = sums if clients.topology.moves else Upload(sums)
        aggregate = Aggregate(
            upload=upload,
            num_sent=num_sent,
            sent=sent,
            report=results.report,
            participation=results.participation,
            notes=results.notes,
        )
        return rows, aggregate

    def _on_device(
        self, models: Params, clients: Clients, real: Array, common: tuple
    ) -> tuple[tuple[PyTree, Results, Array], Contributions]:
        """The exchange on one device: ((rows, results, sent) of its clients, collected contributions)."""
        route = self.route
        order = self.layout.order(clients.sizes)
        index, real, rows = order.sort((clients.index, real, clients.rows))
        data = on_this_device(clients.data)
        if route.models_held:
            models = order.sort(models, route.models_held)
        models = route.open(models)
        work = functools.partial(self._work, data, common, order.clients)
        step = functools.partial(self._step, work, models, index, real)

        def output() -> ClientOutput:
            """Shapes of what the first block of clients returns."""
            width, _ = self.layout.buckets[0]
            at = jnp.zeros((), jnp.int32)
            first = Block(at, block(index, at, width))

            def first_output() -> ClientOutput:
                received = route.receive(models, None, first)
                return work(received, block(rows, at, width), first)

            return jax.eval_shape(first_output)

        # One scan a bucket; the rows and the route's contributions go on from one to the next.
        contributions = route.start(models, index, output)
        outputs = []
        start = 0
        for width, count in self.layout.buckets:
            positions = start + width * jnp.arange(count)
            carry = (rows, contributions, block(rows, positions[0], width))
            carry, out = jax.lax.scan(functools.partial(step, width), carry, positions)
            rows, contributions, _ = carry
            outputs.append(flat(out))
            start += width * count
        results, sent = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)

        if route.sums_held:
            contributions = order.undo(contributions, route.sums_held)
        client_results = order.undo((rows, results, sent))
        return client_results, route.collect(contributions)

    def _step(
        self,
        work: Callable[[Params, PyTree, Block], ClientOutput],
        models: Params,
        index: Array,
        real: Array,
        width: int,
        carry: tuple[PyTree, Contributions, PyTree],
        at: Array,
    ) -> tuple[tuple[PyTree, Contributions, PyTree], tuple[Results, Array]]:
        """Processes one block of clients; replaces rows and the route's carry in place.

        A block's rows are read in the previous step, from what that step has written. If a step read its own rows, XLA
        could read them again after their replacement and would copy the whole stack to do so.
        """
        rows, contributions, block_rows = carry
        here = Block(at, block(index, at, width))
        received = self.route.receive(models, contributions, here)
        out = work(received, block_rows, here)

        # Which contributions count: those that a client sends, unless it is padding.
        num_received = index.shape[1]
        uploads = jax.tree.leaves(out.upload)
        num_sent = num_received
        if uploads and out.mixing_weights is None:
            num_sent = uploads[0].shape[1]
        is_real = block(real, at, width)
        sent = jnp.broadcast_to(is_real[:, None], (width, num_sent))
        if out.sent is not None:
            sent = sent & out.sent
        contributions = self.route.deposit(contributions, here, out, sent)

        sent = jnp.pad(sent, ((0, 0), (0, num_received - num_sent)))
        rows = replace(rows, at, out.row)
        results = Results(out.report, out.participation, out.notes)
        next_rows = block(rows, at + width, width)
        return (rows, contributions, next_rows), (results, sent)

    def _work(
        self, data: PyTree, common: tuple, order: Array, models: Params, rows: PyTree, here: Block
    ) -> ClientOutput:
        """Runs the client updates of a block; data is gathered where it is used."""

        def run(models: Params, row: PyTree, client: Array) -> ClientOutput:
            return self.client_fn(models, row, view(data, client), *common)

        width = here.index.shape[0]
        at_once = min(self.layout.at_once or width, width)
        clients = block(order, here.at, width)
        return in_chunks(run, (models, rows, clients), at_once, CLIENTS)


def spread_rows(stack: PyTree) -> PyTree:
    """`shard_map` specs of a stack with spread rows; a pool of examples is also spread, or on every device."""

    def spec(leaf: Any) -> Any:
        if not is_pooled(leaf):
            return SPREAD
        whole = jax.tree.map(lambda _: WHOLE, leaf)
        pool = SPREAD if leaf.spread else WHOLE
        return dataclasses.replace(whole, pool=pool, index=SPREAD)

    return jax.tree.map(spec, stack, is_leaf=is_pooled)


def on_this_device(stack: PyTree) -> PyTree:
    """A stack inside `shard_map`; the index of a spread pool then refers to this device's rows."""

    def local(leaf: Any) -> Any:
        if is_pooled(leaf) and leaf.spread:
            return leaf.on_device(jax.lax.axis_index(AXIS))
        return leaf

    return jax.tree.map(local, stack, is_leaf=is_pooled)


def in_chunks(
    fn: Callable[..., PyTree], stacks: tuple, chunk: int, axis: str | None = None
) -> PyTree:
    """Maps fn over rows, `chunk` rows at once, on an axis that may have a name; a single row needs no loop."""
    num = tree.num_rows(stacks)
    if num == 1:
        row = tree.first(stacks)
        return tree.stack_one(fn(*row))
    if chunk == 1:
        return jax.lax.map(lambda row: fn(*row), stacks)
    together = jax.vmap(fn, axis_name=axis)
    if chunk >= num:
        return together(*stacks)

    def split(leaf: Array) -> Array:
        return leaf.reshape(num // chunk, chunk, *leaf.shape[1:])

    blocks = jax.tree.map(split, stacks)
    return flat(jax.lax.map(lambda rows: together(*rows), blocks))
