"""Mapping of clients and models over devices. All vmap, lax.map and shard_map calls live in `pfljax.exchange`.

An `ExecutionPlan` sets how many clients a device processes at a time (`chunk`: 1 is a map over clients, 0 a vmap over
all of a device's clients, or on a CPU over those that fit in a core's cache), the devices that the client axis is
spread over, and how models reach clients on other devices:
    own models do not move; a server's small stack is on every device, and contributions are summed (psum);
    peers' models are gathered on every device and contributions are summed at the owners (gather), or models and
    contributions travel around the ring of devices, one message at a time (ring).
Every plan gives the same numbers.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pfljax.contract import cores, tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Aggregate, Array, ClientOutput, Params, PyTree, Topology
from pfljax.exchange import buckets, model_axis
from pfljax.exchange.exchange import Clients, Exchange, in_chunks, on_this_device, spread_rows
from pfljax.exchange.layout import lay_out, pad
from pfljax.exchange.routes import (
    AXIS,
    SPREAD,
    WHOLE,
    AtServer,
    Gather,
    OwnFirst,
    OwnModels,
    Push,
    Ring,
    Route,
    is_dense,
)
from pfljax.exchange.side_by_side import TOGETHER, bytes_of, fitting
from pfljax.exchange.views import view

Plan = Literal["auto", "vmap", "map", "chunk", "python"]
Peers = Literal["auto", "gather", "ring"]
# largest stack in bytes that each CPU device may copy; CPU devices share one memory
GATHERED = 32 << 20
MESSAGE_BYTES = 2 << 20  # bytes of models that travel around the ring at a time
# most clients whose uploads are summed at a time, and most bytes of these uploads
SUMMED = 64
SUMMED_BYTES = 64 << 20
SMALL = 64 << 10  # bytes up to which a client's models are processed at once instead of one by one


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """Mapping of clients over devices.

    Attributes:
        mesh: One axis, `clients`, over D devices; or a second one, `model`, over the devices that share a model.
        chunk: Number of clients that a device processes at a time; 0: all of them (vmap; see `in_cache`), 1: one by one
            (map).
        peers: How models reach clients on other devices: "gather", "ring" or "auto", which gathers except for large
            stacks on CPU devices, which share one memory; the memory plan switches to a ring if copies do not fit.
        buckets: For clients with different numbers of steps: (clients side by side, repetitions) on each device, which
            sorts its clients, longest first; (): original order, in chunks of `chunk`.
        auto: Whether `chunk` is the platform's default, which estimates may replace.
    """

    mesh: Mesh
    chunk: int
    peers: Peers = "auto"
    buckets: buckets.Buckets = ()
    auto: bool = dataclasses.field(default=False, compare=False)

    @property
    def num_devices(self) -> int:
        """D: the number of devices that clients are spread over, or of groups of `model_devices` devices."""
        return self.mesh.shape[AXIS]

    @property
    def model_devices(self) -> int:
        """The number of devices that one client's model is spread over."""
        return self.mesh.size // self.num_devices

    @property
    def devices_in_words(self) -> str:
        num = self.num_devices
        share = self.model_devices
        if share == 1:
            return f"{num} device(s)"
        return f"{num} x {share} devices, each model on {share}"

    @property
    def in_cache(self) -> bool:
        """Whether clients are side by side only as far as they fit in a core's cache: under vmap on CPUs."""
        return self.chunk == 0 and self.device.platform == "cpu"

    @property
    def device(self) -> Any:
        """The first device."""
        return self.mesh.devices.flat[0]

    def sharding(
        self, leaf: Any, *, by_rows: bool, axis: int = 0, leading: int | None = None
    ) -> NamedSharding:
        """Sharding of a leaf: rows (at `axis`) spread over the devices if they divide evenly, otherwise replicated.

        Args:
            leaf: An array or its shape.
            by_rows: Whether it has rows of clients.
            axis: Their axis.
            leading: For arrays of models, the number of leading dimensions that are not spread over `model_devices`.
        """
        spread = by_rows and len(leaf.shape) > axis and leaf.shape[axis] % self.num_devices == 0
        before = [None] * axis
        first = (*before, AXIS) if spread else ()
        if leading is None:
            return NamedSharding(self.mesh, PartitionSpec(*first))
        spec = model_axis.spec(first, leaf.shape, self.model_devices, leading)
        return NamedSharding(self.mesh, spec)

    def for_steps(self, steps: np.ndarray, num_clients: int) -> ExecutionPlan:
        """The plan for clients with different numbers of steps, with few idle steps.

        Args:
            steps: (K,), number of steps of each client per round.
            num_clients: S, number of clients in a round.
        """
        if self.chunk == 1 or steps.min() == steps.max():
            return self
        lengths = buckets.on_devices(steps, num_clients, self.num_devices)
        widest = self.chunk or lengths.shape[1]
        return dataclasses.replace(self, buckets=buckets.buckets_of(lengths, widest))

    def waiting(self, steps: np.ndarray, num_clients: int) -> float:
        """Share of idle steps in a round, averaged over cohorts."""
        lengths, in_turn = self._in_turn(steps, num_clients)
        return buckets.waiting(lengths, in_turn)

    def repetitions(
        self, counts: np.ndarray, num_clients: int, sizes: np.ndarray | None = None
    ) -> float:
        """How often a loop runs in a client's update, averaged over the chunks of the device that needs the most.

        Clients side by side run it as often as the client among them that needs the most.

        Args:
            counts: (K,), how often each client needs it.
            num_clients: S, number of clients in a round.
            sizes: (K,), what buckets sort clients by; None: `counts`.
        """
        lengths, in_turn = self._in_turn(counts, num_clients, sizes)
        return buckets.repetitions(lengths, in_turn, self.num_devices)

    def _in_turn(
        self, steps: np.ndarray, num_clients: int, sizes: np.ndarray | None = None
    ) -> tuple[np.ndarray, buckets.Buckets]:
        """Returns steps (n, S / D) of each device's clients in the order in which it processes them, and how many."""
        lengths = buckets.on_devices(steps, num_clients, self.num_devices)
        if self.buckets:
            sort_by = lengths
            if sizes is not None:
                sort_by = buckets.on_devices(sizes, num_clients, self.num_devices)
            order = np.argsort(-sort_by, axis=1, kind="stable")
            return np.take_along_axis(lengths, order, axis=1), self.buckets
        per_device = lengths.shape[1]
        width = min(self.chunk or per_device, per_device)
        num_chunks = -(-per_device // width)
        return lengths, ((width, num_chunks),)

    def rings(self, models: Params) -> bool:
        """Whether peers' models (stacked) travel around the ring instead of being gathered on all devices."""
        if self.peers != "auto":
            return self.peers == "ring"
        is_large = tree.num_bytes(models) > GATHERED * self.model_devices
        return self.device.platform == "cpu" and is_large

    def exchange_of(self, topology: Topology, models: Params) -> str:
        """Describes how a stack's models reach clients on other devices."""
        if not topology.moves or self.num_devices == 1:
            return "no model leaves its device"
        if topology.on_server:
            return "models are on every device, contributions are summed"
        rings = self.rings(models)
        if topology is Topology.PUSH:
            return "uploads travel around the ring" if rings else "every device sums its uploads"
        return "models go around a ring of devices" if rings else "every device gathers all models"

    def own_rows(self, num: int) -> slice:
        """The slice of `num` clients' rows on this process's devices; all rows if they do not divide evenly."""
        if num % self.num_devices:
            return slice(0, num)
        # a model's devices belong to one process
        first_devices = self.mesh.devices.flat[:: self.model_devices]
        is_here = [device.process_index == jax.process_index() for device in first_devices]
        per_device = num // self.num_devices
        start = is_here.index(True)
        stop = start + sum(is_here)
        return slice(start * per_device, stop * per_device)

    def place(self, leaf: Any, num: int, axis: int = 0, by_rows: bool = True) -> Array:
        """Puts a host array on the devices: spreads rows (at `axis`; all `num` or this process's), or replicates it."""
        shape = (*leaf.shape[:axis], num, *leaf.shape[axis + 1 :])
        whole = jax.ShapeDtypeStruct(shape, leaf.dtype)
        sharding = self.sharding(whole, by_rows=by_rows, axis=axis)
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

    def hold(self, leaf: Any) -> Array:
        """Puts a host array that all clients share on the devices, spread over `model_devices` or replicated."""
        sharding = self.sharding(leaf, by_rows=False, leading=0)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding that replicates on all devices, so that every process can read the array."""
        return NamedSharding(self.mesh, PartitionSpec())

    def over_models(self, fn: Callable[..., PyTree], *stacks: PyTree) -> PyTree:
        """Applies `fn` to each of J stacked models; for use inside a client's update.

        Large models are processed one by one: clients side by side keep a device busy, and its memory limited.
        """
        num = tree.num_rows(stacks)
        if self.chunk == 1:
            is_large = tree.num_bytes(stacks) > SMALL
        elif num == 1:
            is_large = False
        else:
            one_model = tree.shapes_of_rows(stacks)
            is_large = num * bytes_of(fn, *one_model) > TOGETHER
        return in_chunks(fn, stacks, 1 if is_large else num)

    def over_rows(self, fn: Callable[..., PyTree], *stacks: PyTree) -> PyTree:
        """Applies `fn` to all rows at once; for elementwise or small operations on whole stacks."""
        return jax.vmap(fn)(*stacks)

    def gram(self, models: Params) -> Array:
        """(N, N) inner products of N stacked models; each device computes its share of the rows."""
        return self._share_rows(tree.inner_products, models, models)

    def mix(self, weights: Array, models: Params) -> Params:
        """Like `tree.mix` for weights (K, N); each device computes its share of the mixtures."""
        return self._share_rows(tree.mix, weights, models)

    def _share_rows(self, fn: Callable[..., PyTree], stack: PyTree, whole: PyTree) -> PyTree:
        """Computes fn(stack, whole), which has one row per row of the stack."""
        if not self._is_spread(stack):
            return fn(stack, whole)
        run = jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(SPREAD, WHOLE),
            out_specs=SPREAD,
            axis_names={AXIS},
            check_vma=False,
        )
        return run(stack, whole)

    def over_replicates(self, fn: Callable[..., PyTree], in_axes: Any = 0) -> Callable[..., PyTree]:
        """Maps `fn` of one run's arrays over several runs, stacked on a leading axis.

        Runs are processed in turn if clients are processed one by one, otherwise all at once.

        Args:
            fn: A function of one run's arrays.
            in_axes: For each argument, 0 if it is stacked or None if all runs share it; 0: all are stacked.
        """
        if self.chunk != 1:
            return jax.vmap(fn, in_axes=in_axes)

        def mapped(*args: PyTree) -> PyTree:
            axes = [in_axes] * len(args) if isinstance(in_axes, int) else in_axes
            stacked = [arg for arg, axis in zip(args, axes, strict=True) if axis == 0]

            def one_run(rows: list[PyTree]) -> PyTree:
                """`fn` of one run's rows, in place of what is stacked, and of what all runs share."""
                remaining = iter(rows)
                run_args = []
                for arg, axis in zip(args, axes, strict=True):
                    run_args.append(next(remaining) if axis == 0 else arg)
                return fn(*run_args)

            return jax.lax.map(one_run, stacked)

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
        """Sends models to every client, runs the client updates, and sums contributions at the models' owners.

        Args:
            client_fn: (models_s, row_s, data_s) -> ClientOutput, for one client; models_s has a leading axis J. The
                upload has a leading axis of at most J: contributions to the first received models, summed there. Under
                "own", the upload's `update` is the next model and replaces it. Under "push", models_s is the client's
                own model (1, ...), and the upload has no such axis: it goes to all models in the index.
            models: Stacked models, leaves (N, ...).
            index: (S, J) int32, the models that each client receives, or under "push" uploads to; not read under
                "own".
            rows: The clients' own state, leaves (S, ...), replaced in place by `ClientOutput.row`.
            data: The clients' data, leaves (S, ...).
            topology: As in `Algorithm`; under "own" a client may have J models, N = S J.
            own_first: Whether, under "peers", N = S and column 0 of index is arange(S): own models then stay in
                place.
            common: Optional last argument of client_fn, shared by all clients.
            sizes: (S,) sizes for sorting clients if the plan has buckets.

        Returns:
            The next rows, and the aggregate of what came back.
        """
        clients = Clients(index, rows, data, sizes, Topology(topology), own_first)
        models, clients = jax.tree.map(jnp.asarray, (models, clients))
        further = () if common is None else (common,)
        return self._exchange(client_fn, models, clients, further)

    def _exchange(
        self, client_fn: Callable, models: Params, clients: Clients, common: tuple
    ) -> Any:
        """As `exchange`; `common` holds the last argument of `client_fn`, if there is one."""
        num_clients, num_received = clients.index.shape
        topology = clients.topology
        client_fn = jax.jit(client_fn, inline=True)  # traced once for shapes and the loop

        # How many clients a device processes, or sends messages of, at a time.
        chunk = self.chunk
        if self.in_cache:
            chunk = self._in_cache(client_fn, models, clients, common)
        by_size = self.buckets if clients.sizes is not None and chunk != 1 else ()
        together = self._together(topology, models, num_received)
        layout = lay_out(num_clients, self.num_devices, chunk, by_size, together)

        own_first = clients.own_first and layout.as_they_come
        route = self._route(topology, models, num_received, own_first)
        exchange = Exchange(self.mesh, layout, route, client_fn)
        return exchange.run(models, clients, common)

    def _in_cache(
        self, client_fn: Callable, models: Params, clients: Clients, common: tuple
    ) -> int:
        """Number of clients that a CPU device processes side by side, so that they stay in its core's cache."""
        num_clients, num_received = clients.index.shape
        if clients.topology is Topology.PUSH:
            num_received = 1

        def run(models: Params, row: PyTree) -> ClientOutput:
            data = view(clients.data, jnp.zeros((), jnp.int32))
            return client_fn(models, row, data, *common)

        per_device = -(-num_clients // self.num_devices)
        received = tree.shapes_of_rows(models, num_received)
        row = tree.shapes_of_rows(clients.rows)
        return fitting(run, per_device, received, row)

    def _together(self, topology: Topology, models: Params, num_received: int) -> int:
        """Number of clients whose models travel, or are summed, together, for few messages and matrix products."""
        row_bytes = tree.row_bytes(models) if topology.between_clients else 0
        num_models = tree.num_rows(models) if row_bytes else 0
        if topology is Topology.PUSH and is_dense(num_received, num_models):
            return min(SUMMED, SUMMED_BYTES // row_bytes)
        if row_bytes and self._is_spread(models) and self.rings(models):
            num_sent = num_received if topology.reads_others else 1
            return MESSAGE_BYTES // (row_bytes * num_sent)
        return 1

    def _route(
        self, topology: Topology, models: Params, num_received: int, own_first: bool
    ) -> Route:
        """The route by which models reach clients; `own_first` as in `exchange`, where position k is client k."""
        if not topology.moves:
            return OwnModels(num_received)
        # If no part of a server's model is shared, no leaf shows that there is one.
        num_models = tree.num_rows(models) if jax.tree.leaves(models) else 1
        devices = self.num_devices
        route = AtServer(num_models, devices)
        if topology.between_clients and self._is_spread(models):
            if self.rings(models):
                route = Ring(num_models // devices, devices)
            else:
                route = Gather(num_models, devices)

        if topology is Topology.PUSH:
            return Push(route)
        stays_in_place = isinstance(route, Ring) or devices == 1
        if own_first and topology.reads_others and stays_in_place:
            return OwnFirst(route)
        return route

    def take_rows(self, stack: PyTree, ids: Array) -> PyTree:
        """Returns stack[ids]: the cohort's rows (S, ...) out of K, from any device."""
        if not self._is_spread(stack):
            return tree.take(stack, ids)
        padded = self._around(Ring.fetch, stack, ids)
        return jax.tree.map(lambda leaf: leaf[: ids.shape[0]], padded)

    def put_rows(self, stack: PyTree, ids: Array, rows: PyTree) -> PyTree:
        """Replaces rows `ids` (distinct) of the stack with `rows` (S, ...), on any device."""

        def write(leaf: jax.Array, new: Array) -> jax.Array:
            return leaf.at[ids].set(new, unique_indices=True)

        if not self._is_spread(stack):
            return jax.tree.map(write, stack, rows)
        return self._around(Ring.replace, stack, ids, rows)

    def _is_spread(self, stack: PyTree) -> bool:
        """Whether the rows of a stack are spread over several devices."""
        if self.num_devices == 1 or not jax.tree.leaves(stack):
            return False
        return tree.num_rows(stack) % self.num_devices == 0

    def _around(self, fn: Callable, stack: PyTree, ids: Array, *rows: PyTree) -> PyTree:
        """Runs fn(ring, stack, ids, *rows) with everything spread over the devices."""
        num = ids.shape[0]
        devices = self.num_devices
        padded = -(-num // devices) * devices
        ring = Ring(tree.num_rows(stack) // devices, devices)

        def on_device(stack: PyTree, *args: PyTree) -> PyTree:
            return fn(ring, on_this_device(stack), *args)

        specs = [SPREAD] * (1 + len(rows))
        run = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(spread_rows(stack), *specs),
            out_specs=SPREAD,
            axis_names={AXIS},
            check_vma=False,
        )
        args = pad((ids, *rows), num, padded)
        return run(stack, *args)


def make_plan(
    kind: str = "auto",
    chunk: int = 0,
    devices: int = 0,
    peers: Peers = "auto",
    model_devices: int = 1,
) -> ExecutionPlan:
    """Makes a plan for the devices of all processes.

    Args:
        kind: "map", "vmap", "chunk" or "auto" (map on a CPU, elsewhere vmap, which runs replace by what is estimated to
            be fastest).
        chunk: Number of clients at a time for "chunk".
        devices: Number of devices to use in each process; 0: all.
        peers: As in `ExecutionPlan`.
        model_devices: Number of devices that one client's model is spread over.

    Raises:
        ArgumentError: for "python", which `Execution` makes; for more devices than there are; and for `model_devices`
            that do not divide them.
    """
    if kind == "python":
        raise ArgumentError("plan", "compiles nothing; accepted here: auto, vmap, map, chunk", kind)
    cores.start()
    available = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    cores.check(devices)
    if devices:
        by_process = itertools.groupby(available, key=lambda device: device.process_index)
        available = [device for _, group in by_process for device in list(group)[:devices]]
    mesh = make_mesh(available, model_devices)

    is_auto = kind == "auto"
    if is_auto:
        kind = "map" if available[0].platform == "cpu" else "vmap"
    chunk = {"map": 1, "vmap": 0, "chunk": max(chunk, 1)}[kind]
    return ExecutionPlan(mesh, chunk, peers, auto=is_auto)


def make_mesh(devices: Sequence[Any], model_devices: int = 1) -> Mesh:
    """Makes the mesh of some devices, of which `model_devices` neighbors share a model."""
    counts = collections.Counter(device.process_index for device in devices)
    fewest = min(counts.values())
    if fewest % model_devices:
        text = f"accepted: a number that divides the {fewest} devices of a process"
        raise ArgumentError("model_devices", text, model_devices)
    grid = np.array(devices)
    if model_devices == 1:
        return Mesh(grid, (AXIS,), axis_types=(AxisType.Auto,))
    grid = grid.reshape(-1, model_devices)
    names = (AXIS, model_axis.MODEL)
    return Mesh(grid, names, axis_types=(AxisType.Auto, AxisType.Auto))


def make_host_plan() -> ExecutionPlan:
    """A plan for one CPU device, one client at a time, for one-time work in host memory."""
    cores.start()
    first = jax.local_devices(backend="cpu")[:1]
    return ExecutionPlan(make_mesh(first), chunk=1)
