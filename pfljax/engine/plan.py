"""How work on clients and models is mapped over devices; methods and tools get a plan and never say vmap or shard_map.

An `ExecutionPlan` says how many clients a device works on at a time (`chunk`: 1 is a map over clients, 0 a vmap over
all of a device's clients), over which devices the client axis is spread, and how models reach clients on other devices:
    own models move nothing; a server's small stack is on every device, and what comes back is summed (psum);
    peers' models are gathered on every device and what comes back is summed at the owners' (gather), or travel around
    the ring of devices, as many at a time as a message holds, and contributions likewise (ring).
Every plan gives the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pfljax.core import tree
from pfljax.core.types import Aggregate, Array, ClientOutput, Params, PyTree, Topology
from pfljax.engine import buckets
from pfljax.engine.exchange import Clients, Exchange, in_chunks, on_this_device, spread_rows
from pfljax.engine.layout import lay_out, pad
from pfljax.engine.routes import AXIS, Gather, Own, OwnFirst, Push, Ring, Route, Server, is_dense

Peers = Literal["auto", "gather", "ring"]
GATHERED = 32 << 20  # bytes of a stack that CPU devices, which share one memory, may each have a copy of
MESSAGE_BYTES = 2 << 20  # bytes of models that travel around the ring at a time
SUMMED, SUMMED_BYTES = 64, 64 << 20  # clients whose uploads are summed at a time, and bytes of those uploads, at most
SMALL = 64 << 10  # bytes of a client's models up to which they are worked on at once, not one by one


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """How clients are mapped.

    Attributes:
        mesh: One axis, `clients`, over D devices.
        chunk: Clients that a device works on at a time; 0: all of them (vmap), 1: one by one (map).
        peers: How models reach clients on other devices: by "gather" or "ring"; "auto": by gather, but for a large
            stack on CPU devices, which share one memory; the memory plan turns it into a ring where copies do not fit.
        buckets: Where clients' work differs in length: (clients side by side, how often) on each device, which sorts
            its clients, the longest first; (): clients as they come, all by `chunk`.
    """

    mesh: Mesh
    chunk: int
    peers: Peers = "auto"
    buckets: buckets.Buckets = ()

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
        lengths = buckets.on_devices(steps, num_clients, self.num_devices)
        return dataclasses.replace(self, buckets=buckets.buckets_of(lengths, self.chunk or lengths.shape[1]))

    def waiting(self, steps: np.ndarray, num_clients: int) -> float:
        """The share of a round's steps, in the mean over cohorts, in which a client waits for others beside it."""
        lengths = buckets.on_devices(steps, num_clients, self.num_devices)
        if self.buckets:
            return buckets.waiting(buckets.longest_first(lengths), self.buckets)
        width = min(self.chunk or lengths.shape[1], lengths.shape[1])
        return buckets.waiting(lengths, ((width, -(-lengths.shape[1] // width)),))

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
        if topology == "push":
            return "uploads go around the ring of devices" if self.rings(models) else "every device sums its uploads"
        return "around the ring of devices" if self.rings(models) else "all models are gathered on every device"

    def own_rows(self, num: int) -> slice:
        """Which of `num` clients' rows live on this process's devices: all, where they do not divide."""
        if num % self.num_devices:
            return slice(0, num)
        here = [device.process_index == jax.process_index() for device in self.mesh.devices.flat]
        per_device = num // self.num_devices
        return slice(here.index(True) * per_device, (here.index(True) + sum(here)) * per_device)

    def place(self, leaf: Any, num: int, axis: int = 0, by_rows: bool = True) -> Array:
        """Puts a host array on the devices: rows (at `axis`), all `num` or those of this process, or all on each."""
        shape = (*leaf.shape[:axis], num, *leaf.shape[axis + 1 :])
        sharding = self.sharding(jax.ShapeDtypeStruct(shape, leaf.dtype), by_rows=by_rows, axis=axis)
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
        return in_chunks(fn, stacks, 1 if large else tree.num_rows(stacks))

    def over_rows(self, fn: Callable[..., PyTree], *stacks: PyTree) -> PyTree:
        """Applies `fn` to every row at once: for elementwise or small work on whole stacks."""
        return jax.vmap(fn)(*stacks)

    def gram(self, models: Params) -> Array:
        """(N, N) inner products of N stacked models, each device computing its share of the rows."""
        return self._share_rows(tree.inner_products, models, models)

    def mix(self, weights: Array, models: Params) -> Params:
        """As `tree.mix` for weights (K, N), each device computing its share of the mixtures."""
        return self._share_rows(tree.mix, weights, models)

    def _share_rows(self, fn: Callable[..., PyTree], stack: PyTree, whole: PyTree) -> PyTree:
        """fn(stack, whole), whose rows are those of the stack."""
        if not self._is_spread(stack):
            return fn(stack, whole)
        specs = PartitionSpec(AXIS), PartitionSpec()
        return jax.shard_map(fn, mesh=self.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(stack, whole)

    def over_replicates(self, fn: Callable[..., PyTree], in_axes: Any = 0) -> Callable[..., PyTree]:
        """`fn` of a whole run's arrays as a function of several runs', stacked in front.

        One run after the other where clients are worked on one by one, else all at once.

        Args:
            fn: Of one run's arrays.
            in_axes: Of each of its arguments, 0 where it is stacked and None where all runs have the same; 0: all are.
        """
        if self.chunk != 1:
            return jax.vmap(fn, in_axes=in_axes)

        def mapped(*args):
            axes = [in_axes] * len(args) if isinstance(in_axes, int) else in_axes
            stacked = [arg for arg, axis in zip(args, axes, strict=True) if axis == 0]

            def one(rows):
                rows = iter(rows)
                return fn(*(next(rows) if axis == 0 else arg for arg, axis in zip(args, axes, strict=True)))

            return jax.lax.map(one, stacked)

        return mapped

    def exchange(
        self,
        client_fn: Callable[..., ClientOutput],
        models: Params,
        index: Array,
        rows: PyTree,
        data: PyTree,
        *,
        topology: Topology,
        own_first: bool = False,
        common: PyTree = None,
        sizes: Array | None = None,
    ) -> tuple[PyTree, Aggregate]:
        """Every client receives models, works, and its contributions are summed at their owners.

        Args:
            client_fn: (models_s, row_s, data_s) -> ClientOutput, for one client; models_s has leading axis J, and the
                upload one of at most J: contributions to the first of the received models, and summed there. Under
                "own" the upload is the next model and replaces it. Under "push" models_s is the client's own model
                (1, ...), and the upload has no such axis: it goes to all models of the index.
            models: Stacked, leaves (N, ...).
            index: (S, J) int32, the models that each client receives, or under "push" uploads to; not read under
                "own".
            rows: The clients' own state, leaves (S, ...), replaced in place by ClientOutput.client.
            data: What clients read, leaves (S, ...).
            topology: As in `Algorithm`; under "own" there may be J models to a client, N = S J.
            own_first: Whether, under "peers", N = S and column 0 of index is arange(S): own models then stay where
                they are.
            common: If given, what all clients read alike; client_fn takes it as its last argument.
            sizes: (S,), by which clients are sorted where the plan has buckets.

        Returns:
            The next rows, and what came back.
        """
        models, clients = jax.tree.map(jnp.asarray, (models, Clients(index, rows, data, sizes)))
        num_clients, held = clients.index.shape
        by_size = self.buckets if sizes is not None else ()
        together = self._together(topology, models, held)
        layout = lay_out(num_clients, self.num_devices, self.chunk, by_size, together)
        route = self._route(topology, models, held, own_first and layout.as_they_come)
        return Exchange(self.mesh, layout, route, client_fn).run(models, clients, () if common is None else (common,))

    def _together(self, topology: Topology, models: Params, held: int) -> int:
        """How many clients' models travel, or are summed, together: messages are few, and products are of matrices."""
        row = tree.row_bytes(models) if topology in ("peers", "push") else 0
        num_models = tree.num_rows(models) if row else 0
        if topology == "push" and is_dense(held, num_models):
            return min(SUMMED, SUMMED_BYTES // row)
        if row and self._is_spread(models) and self.rings(models):
            return MESSAGE_BYTES // (row * (held if topology == "peers" else 1))
        return 1

    def _route(self, topology: Topology, models: Params, held: int, own_first: bool) -> Route:
        """How models reach clients; `own_first` as in `exchange`, where place k is client k."""
        if topology == "own":
            return Own(held)
        num_models, devices = tree.num_rows(models) if jax.tree.leaves(models) else 0, self.num_devices
        route = Server(num_models, devices)
        if topology in ("peers", "push") and self._is_spread(models):
            ring = self.rings(models)
            route = Ring(num_models // devices, devices) if ring else Gather(num_models, devices)
        if topology == "push":
            return Push(route)
        at_home = own_first and topology == "peers" and (isinstance(route, Ring) or devices == 1)
        return OwnFirst(route) if at_home else route

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
        has_rows = bool(jax.tree.leaves(stack))
        return self.num_devices > 1 and has_rows and tree.num_rows(stack) % self.num_devices == 0

    def _around(self, fn: Callable, stack: PyTree, ids: Array, *rows: PyTree) -> PyTree:
        """Runs fn(ring, stack, ids, *rows) with everything spread over the devices."""
        num, devices, spec = ids.shape[0], self.num_devices, PartitionSpec(AXIS)
        padded = -(-num // devices) * devices
        ring = Ring(tree.num_rows(stack) // devices, devices)
        run = jax.shard_map(
            lambda stack, *args: fn(ring, on_this_device(stack), *args),
            mesh=self.mesh,
            in_specs=(spread_rows(stack), *[spec] * (1 + len(rows))),
            out_specs=spec,
            check_vma=False,
        )
        return run(stack, *pad((ids, *rows), num, padded))


def make_plan(kind: str = "auto", chunk: int = 0, devices: int = 0, peers: Peers = "auto") -> ExecutionPlan:
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
