"""The only file that says vmap, lax.map or shard_map: how work on clients and models is laid out.

A `ExecutionPlan` says how many clients a device works on at a time (`chunk`: 1 is a map over clients, 0 a vmap over all
of a device's clients), over which devices the client axis is spread, and how models reach clients on other devices:
    own models move nothing; a server's small stack is on every device, and what comes back is summed (psum);
    peers' models are gathered on every device and what comes back is summed at the owners' (gather), or travel around
    the ring of devices, as many at a time as a message holds, and contributions likewise (ring).
Every plan gives the same numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pfljax.core import tree
from pfljax.core.types import Aggregate, Array, ClientOutput, Params, PyTree, Topology
from pfljax.engine import buckets as schedules
from pfljax.engine.routes import AXIS, Local, Ring
from pfljax.engine.views import view

MESSAGE_BYTES = 2 << 20
GATHERED = 32 << 20  # bytes of a stack that CPU devices, which share one memory, may each have a copy of
SMALL = 64 << 10  # bytes of a client's models up to which they are worked on at once, not one by one


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """How clients are mapped.

    Attributes:
        mesh: One axis, `clients`, over D devices.
        chunk: Clients that a device works on at a time; 0: all of them (vmap), 1: one by one (map).
        peers: How models reach clients on other devices: by "gather" or "ring"; "auto": by gather, but for a large
            stack on CPU devices, which share one memory; the memory plan turns it into a ring where copies do not fit.
        sections: Where clients' work differs in length: (clients at a time, how often) on each device, its clients
            sorted, the longest first; (): as they come, all by `chunk`.
    """

    mesh: Mesh
    chunk: int
    peers: Literal["auto", "gather", "ring"] = "auto"
    sections: tuple[tuple[int, int], ...] = ()

    @property
    def num_devices(self) -> int:
        return self.mesh.size

    def sharding(self, leaf: Any, *, by_rows: bool, axis: int = 0) -> NamedSharding:
        """Where a leaf lives: its rows (at `axis`) spread over the devices if they divide evenly, else replicated."""
        spread = by_rows and len(leaf.shape) > axis and leaf.shape[axis] % self.num_devices == 0
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXIS) if spread else PartitionSpec())

    def for_steps(self, steps: np.ndarray, num_clients: int) -> ExecutionPlan:
        """The plan for clients whose work differs in length, so that few wait for long for those beside them.

        Args:
            steps: (K,) that each of all clients takes in a round.
            num_clients: S of a round.
        """
        if self.chunk == 1 or steps.min() == steps.max():
            return self
        lengths = schedules.on_devices(steps, num_clients, self.num_devices)
        return dataclasses.replace(self, sections=schedules.sections_of(lengths, self.chunk or lengths.shape[1]))

    def waiting(self, steps: np.ndarray, num_clients: int) -> float:
        """The share of a round's steps, in the mean over cohorts, in which a client waits for others beside it."""
        lengths = schedules.on_devices(steps, num_clients, self.num_devices)
        if self.sections:
            return schedules.waiting(schedules.longest_first(lengths), self.sections)
        width = min(self.chunk or lengths.shape[1], lengths.shape[1])
        return schedules.waiting(lengths, ((width, -(-lengths.shape[1] // width)),))

    def rings(self, models: Params) -> bool:
        """Whether peers' models (stacked) go around the ring rather than to all devices."""
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return self.peers == "ring" or (self.peers == "auto" and on_cpu and tree.num_bytes(models) > GATHERED)

    def exchange_of(self, topology: Topology, models: Params) -> str:
        """How the models of a stack reach clients on other devices, in words."""
        if topology == "own" or self.num_devices == 1:
            return "no model leaves its device"
        if topology == "shared":
            return "the models are on every device, contributions are summed"
        return "around the ring of devices" if self.rings(models) else "all models are gathered on every device"

    def own_rows(self, num: int) -> slice:
        """Which of `num` clients' rows live on this process's devices: all, where they do not divide."""
        if num % self.num_devices:
            return slice(0, num)
        here = [device.process_index == jax.process_index() for device in self.mesh.devices.flat]
        per_device = num // self.num_devices
        return slice(here.index(True) * per_device, (here.index(True) + sum(here)) * per_device)

    def place(self, leaf: Any, num: int, axis: int = 0) -> Array:
        """Puts a host array on the devices: clients' rows, of all `num` or of `own_rows`, at `axis`."""
        shape = (*leaf.shape[:axis], num, *leaf.shape[axis + 1 :])
        sharding = self.sharding(jax.ShapeDtypeStruct(shape, leaf.dtype), by_rows=True, axis=axis)
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

    @property
    def everywhere(self) -> NamedSharding:
        """The same on all devices, so that every process can read it."""
        return NamedSharding(self.mesh, PartitionSpec())

    def over_models(self, fn: Callable[..., PyTree], *stacks: PyTree) -> PyTree:
        """Applies `fn` to each of J stacked models; for use inside a client's work."""
        large = self.chunk == 1 and tree.num_bytes(stacks) > SMALL
        return _in_chunks(fn, stacks, 1 if large else tree.num_rows(stacks))

    def over_rows(self, fn: Callable[..., PyTree], *stacks: PyTree) -> PyTree:
        """Applies `fn` to every row at once: for elementwise or small work on whole stacks."""
        return jax.vmap(fn)(*stacks)

    def over_replicates(self, fn: Callable[..., PyTree], in_axes: Any = 0) -> Callable[..., PyTree]:
        """`fn` of a whole run's arrays as a function of several runs', stacked in front."""
        return jax.vmap(fn, in_axes=in_axes)

    def exchange(
        self,
        client_fn: Callable[[Params, PyTree, PyTree], ClientOutput],
        models: Params,
        index: Array,
        rows: PyTree,
        data: PyTree,
        *,
        topology: Topology,
        own_first: bool = False,
        push: bool = False,
        common: PyTree = None,
        sizes: Array | None = None,
    ) -> tuple[PyTree, Aggregate]:
        """Every client receives models, works, and its contributions are summed at their owners.

        Args:
            client_fn: (models_s, row_s, data_s) -> ClientOutput, for one client; models_s has leading axis J, and the
                upload one of at most J: contributions to the first of the received models, and summed there. Under
                "own" the upload is the next model and replaces it.
            models: Stacked, leaves (N, ...).
            index: (S, J) int32, the models that each client receives; not read under "own".
            rows: The clients' own state, leaves (S, ...), replaced in place by ClientOutput.client.
            data: What clients read, leaves (S, ...).
            topology: As in `Algorithm`; under "own" there may be J models to a client, N = S J.
            own_first: Whether N = S and column 0 of index is arange(S): own models then stay where they are.
            push: As in `Algorithm`: models_s holds the first model of the index only, the upload is one for all.
            common: If given, what all clients read alike; client_fn takes it as its last argument.
            sizes: (S,), by which clients are sorted where the plan has sections.

        Returns:
            The next rows, and what came back.
        """
        models, index, rows, data, sizes = jax.tree.map(jnp.asarray, (models, index, rows, data, sizes))
        num_clients, devices, own = index.shape[0], self.num_devices, topology == "own"
        per_device = -(-num_clients // devices)
        num_models = tree.num_rows(models) if jax.tree.leaves(models) else 0
        spread = topology == "peers" and devices > 1 and num_models % devices == 0
        ring = spread and self.rings(models)
        chunk = min(self.chunk or per_device, per_device)
        if ring and chunk < per_device:
            # One chunk after the other all the same, but their models travel together.
            message = tree.row_bytes(models) * (1 if push else index.shape[1]) * chunk
            chunk *= _largest_divisor(per_device // chunk, MESSAGE_BYTES // message)
        # What is left is a chunk of its own: clients that are made up would have to be copied, and the others moved.
        sections = [(chunk, per_device // chunk), *([(per_device % chunk, 1)] if per_device % chunk else [])]
        by_size = sizes is not None and bool(self.sections)
        if by_size:
            sections = self.sections
        padded = devices * sum(width * count for width, count in sections)
        lines_up = padded == num_clients and (ring or devices == 1) and not by_size
        own_first = own_first and lines_up
        valid = jnp.arange(padded) < num_clients
        index, rows, data = _pad((index, rows, data), num_clients, padded)
        own_rows = index.shape[1] if own else 1  # of models to a client
        if own and padded > num_clients:
            models = _flat(_pad(_by_client(models, own_rows), num_clients, padded))
        store = Ring(num_models // devices, devices) if ring else Local(num_models)
        common = () if common is None else (common,)

        sizes = jnp.where(valid, _pad(sizes, num_clients, padded), -1) if by_size else jnp.zeros((padded,))

        def on_device(models, index, valid, sizes, rows, data, *common):
            order = jnp.argsort(-sizes, stable=True) if by_size else jnp.arange(valid.shape[0])
            sort = lambda stack, order=order: tree.take(stack, order) if by_size else stack
            index, valid, rows = sort((index, valid, rows))
            if own:
                models = _flat(sort(_by_client(models, own_rows)))

            def block(stack, at, width, each=1):
                """The `width` clients from place `at` on, of `each` rows."""
                return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, at * each, width * each), stack)

            def replace(stack, at, new, each=1):
                return jax.tree.map(
                    lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b.astype(a.dtype), at * each, 0), stack, new
                )

            def received(models, at, width):
                if own:
                    return _by_client(block(models, at, width, own_rows), own_rows)
                at_home = lambda: jax.tree.map(lambda a: a[:, None], block(models, at, width))
                if own_first and (push or index.shape[1] == 1):
                    return at_home()
                if not own_first:
                    return store.fetch(models, block(index, at, width)[:, : 1 if push else None])
                others = store.fetch(models, block(index, at, width)[:, 1:])
                return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), at_home(), others)

            def deposit(sums, at, width, upload, mask):
                to = block(index, at, width)[:, : mask.shape[1]]
                if not own_first:
                    return store.deposit(sums, to, upload, mask)
                mine, others = (jax.tree.map(lambda a, p=p: a[:, p], upload) for p in (0, slice(1, None)))
                if mask.shape[1] > 1:
                    sums = store.deposit(sums, to[:, 1:], others, mask[:, 1:])
                rows = block(sums, at, width)
                added = tree.add(rows, (mine, jnp.ones_like(rows[1])))
                return replace(sums, at, tree.where(mask[:, 0], added, rows))

            def work(models, rows, at, width):
                """The block's clients at work; what they read of their data is gathered where it is used."""
                run = lambda models, row, position: client_fn(models, row, view(data, position), *common)
                at_once = width if by_size else min(self.chunk or width, width)
                return _in_chunks(run, (models, rows, block(order, at, width)), at_once)

            def step(width, carry, at):
                rows, kept, sums = carry
                out = work(received(kept if own else models, at, width), block(rows, at, width), at, width)
                mask = jnp.broadcast_to(block(valid, at, width)[:, None], (width, num_sent))
                mask = mask if out.sent is None else mask & out.sent
                rows = replace(rows, at, out.client)
                if own and jax.tree.leaves(out.upload):
                    new = _flat(out.upload)
                    if out.sent is not None:
                        new = tree.where(mask.reshape(-1), new, block(kept, at, width, own_rows))
                    kept = replace(kept, at, new, own_rows)
                elif push:
                    sums = store.mix(sums, block(index, at, width), out.upload, out.shares, mask)
                elif not own:
                    sums = deposit(sums, at, width, out.upload, mask)
                mask = jnp.pad(mask, ((0, 0), (0, index.shape[1] - num_sent)))
                return (rows, kept, sums), (out.report, mask)

            sums, num_sent = (), index.shape[1]
            if spread and not ring:
                models = jax.lax.all_gather(models, AXIS, tiled=True)
            if not own:
                first = lambda: work(received(models, 0, chunk), block(rows, 0, chunk), 0, chunk)
                upload = jax.eval_shape(first).upload
                if jax.tree.leaves(upload) and not push:
                    num_sent = jax.tree.leaves(upload)[0].shape[1]
                sums = store.empty(upload, 1 if push else 2)
            carry = (rows, models if own else (), sums)
            parts, start = [], 0
            for width, count in sections:
                places = start + width * jnp.arange(count)
                carry, out = jax.lax.scan(functools.partial(step, width), carry, places)
                parts.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out))
                start += width * count
            rows, kept, sums = carry
            report, sent = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
            if by_size:
                back = jnp.argsort(order)
                rows, report, sent = sort((rows, report, sent), back)
                kept = _flat(sort(_by_client(kept, own_rows), back)) if own else kept
            if own:
                sums = kept, sent.reshape(-1).astype(jnp.int32)
            elif spread and not ring:
                sums = jax.lax.psum_scatter(sums, AXIS, scatter_dimension=0, tiled=True)
            elif devices > 1 and not spread:
                sums = jax.lax.psum(sums, AXIS)
            return (rows, report, sent), sums

        if devices > 1:
            by_client, whole = PartitionSpec(AXIS), PartitionSpec()
            at_owner = by_client if own or spread else whole
            on_device = jax.shard_map(
                on_device,
                mesh=self.mesh,
                in_specs=(at_owner, *[by_client] * 5, *[whole] * len(common)),
                out_specs=(by_client, at_owner),
                check_vma=False,
            )
        by_client, at_owner = on_device(models, index, valid, sizes, rows, data, *common)
        rows, report, sent = _cut(by_client, num_clients, padded)
        upload, count = _cut(at_owner, num_clients * own_rows, padded * own_rows) if own else at_owner
        return rows, Aggregate(upload, count, sent, report)

    def take_rows(self, stack: PyTree, ids: Array) -> PyTree:
        """stack[ids]: the cohort's rows (S, ...) out of K, wherever they live."""
        if not self._is_spread(stack):
            return tree.take(stack, ids)
        rows = self._around(lambda ring, stack, ids: ring.fetch(stack, ids), stack, ids)
        return jax.tree.map(lambda leaf: leaf[: ids.shape[0]], rows)

    def put_rows(self, stack: PyTree, ids: Array, rows: PyTree) -> PyTree:
        """Replaces rows `ids` (distinct) of the stack by `rows` (S, ...), wherever they live."""
        if not self._is_spread(stack):
            return jax.tree.map(lambda leaf, new: leaf.at[ids].set(new, unique_indices=True), stack, rows)
        return self._around(lambda ring, *args: ring.replace(*args), stack, ids, rows)

    def _is_spread(self, stack: PyTree) -> bool:
        leaves = jax.tree.leaves(stack)
        return self.num_devices > 1 and bool(leaves) and leaves[0].shape[0] % self.num_devices == 0

    def _around(self, fn: Callable, stack: PyTree, ids: Array, *rows: PyTree) -> PyTree:
        """Runs fn(ring, stack, ids, *rows) with everything spread over the devices."""
        num, devices, spec = ids.shape[0], self.num_devices, PartitionSpec(AXIS)
        padded = -(-num // devices) * devices
        ring = Ring(tree.num_rows(stack) // devices, devices)
        run = jax.shard_map(
            lambda *args: fn(ring, *args), mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return run(stack, *_pad((ids, *rows), num, padded))


def _in_chunks(fn: Callable[..., PyTree], stacks: tuple, chunk: int) -> PyTree:
    """fn over rows, `chunk` of them at once; a single row is done without a loop."""
    num = tree.num_rows(stacks)
    if num == 1:
        return tree.stack_one(fn(*jax.tree.map(lambda leaf: leaf[0], stacks)))
    if chunk == 1:
        return jax.lax.map(lambda row: fn(*row), stacks)
    if chunk >= num:
        return jax.vmap(fn)(*stacks)
    blocks = jax.tree.map(lambda leaf: leaf.reshape(num // chunk, chunk, *leaf.shape[1:]), stacks)
    return _flat(jax.lax.map(lambda rows: jax.vmap(fn)(*rows), blocks))


def _by_client(stack: PyTree, num: int) -> PyTree:
    """(S num, ...) as (S, num, ...)."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, num, *leaf.shape[1:]), stack)


def _flat(stack: PyTree) -> PyTree:
    """(S, J, ...) as (S J, ...)."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stack)


def _largest_divisor(number: int, at_most: int) -> int:
    return max(d for d in range(1, number + 1) if number % d == 0 and d <= max(at_most, 1))


def _pad(stack: PyTree, num: int, padded: int) -> PyTree:
    """Repeats the last row until there are `padded`; the caller masks what comes of them."""
    if num == padded:
        return stack
    return tree.take(stack, jnp.minimum(jnp.arange(padded), num - 1))


def _cut(stack: PyTree, num: int, padded: int) -> PyTree:
    return stack if num == padded else jax.tree.map(lambda leaf: leaf[:num], stack)


def make_plan(kind: str = "auto", chunk: int = 0, devices: int = 0, peers: str = "auto") -> ExecutionPlan:
    """Lays out clients on the devices of all processes.

    Args:
        kind: "map", "vmap", "chunk" or "auto" (map on a CPU, vmap elsewhere: see BUILD_NOTES.md).
        chunk: Clients at a time under "chunk".
        devices: How many devices to use of each process; 0: all.
        peers: As in `ExecutionPlan`.
    """
    found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if devices:
        found = [d for d in found if d in [e for e in found if e.process_index == d.process_index][:devices]]
    mesh = Mesh(np.array(found), (AXIS,), axis_types=(AxisType.Auto,))
    if kind == "auto":
        kind = "map" if found[0].platform == "cpu" else "vmap"
    return ExecutionPlan(mesh, {"map": 1, "vmap": 0, "chunk": max(chunk, 1)}[kind], peers)


def make_host_plan() -> ExecutionPlan:
    """One CPU device, client by client: for what is made once in the host's memory."""
    return ExecutionPlan(Mesh(np.array(jax.local_devices(backend="cpu")[:1]), (AXIS,), axis_types=(AxisType.Auto,)), 1)
