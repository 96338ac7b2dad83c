"""Client store in host memory or on disk: prefetches each cohort, trains it on the devices, and writes it back.

The host's memory or disk limits K. The time per round and the devices' memory depend on the cohort size S. Clients'
parts of the state are stacks of rows that are changed in place, and data are NumPy arrays. On disk, a client has no row
until it first takes part; initial rows are recomputed whenever they are needed.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import processes, tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, ClientData, Cohort, First, Key, PyTree, Start, State
from pfljax.evaluation import measures
from pfljax.exchange import lifting
from pfljax.exchange.plan import ExecutionPlan, make_host_plan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import known_cohort, make_cohort_round
from pfljax.run import memory
from pfljax.run.compiled import Compiled, Jitted, Lowered, Saving, shaped, state_shardings
from pfljax.run.experiment import OWN, Experiment
from pfljax.run.replicates import Replicates
from pfljax.stores import stacks
from pfljax.stores.serving import BLOCK_BYTES, in_blocks, measured, scores
from pfljax.stores.store import Build, Store, UseOf, shapes_of


class Ahead(NamedTuple):
    """A prefetched cohort: its state is still on the host, its data are on the devices."""

    ids: np.ndarray
    rows: First
    clients: ClientData


def _segment_of_all(
    replicates: Replicates,
    segments: Sequence[Segment],
    key: Key,
    start: int,
    stop: int,
    state: State,
    clients: Any,
):
    """Runs the rounds of one run after the other with the same compiled code. Diverged runs repeat the last record."""
    if replicates.num == 1:
        return segments[0](key, start, stop, state, clients)
    parts = zip(
        segments,
        replicates.split(key),
        replicates.split(state),
        replicates.split(clients),
        strict=True,
    )
    found = [one(key, start, stop, state, clients) for one, key, state, clients in parts]
    count = max(played for _, _, played in found)

    def last(leaf):
        return leaf[np.minimum(np.arange(count), len(leaf) - 1)]

    records = jax.tree.map(
        lambda *leaves: np.stack([last(leaf) for leaf in leaves], 1), *[each[1] for each in found]
    )
    return replicates.side_by_side([state for state, _, _ in found]), records, count


def _in_memory(experiment: Experiment, replicates: Replicates, like: State) -> Callable[..., State]:
    """Returns (run, key, clients) -> initial state, made on the host, since not all rows may fit on the devices."""
    host = make_host_plan()
    jitted = functools.partial(Jitted, experiment.problem.model.network, host)
    make = jitted(
        lambda numbers, *args: lifting.init(experiment.algorithm(host, numbers), host, *args)
    )

    def init(run: int, key: Key, clients: ClientData) -> State:
        with jax.default_device(host.device):
            state = make(replicates.numbers_of(run), key, clients)
        clients = jax.tree.map(_taken_over, state.clients)
        rest = jax.device_get(without_clients(state))
        return jax.tree.map(_on_devices, rest, without_clients(like))._replace(clients=clients)

    return init


def _whole(like: State) -> Saving:
    """Saves the rows of all processes' clients in one checkpoint, which a single process can restore, too."""

    def thaw(run: int, key: Key, saved: State) -> State:
        del run, key
        return jax.tree.map(
            lambda leaf: stacks.Shared(leaf) if isinstance(leaf, np.ndarray) else leaf, saved
        )

    return Saving(like, stacks.in_memory, thaw, lambda state: None, lambda rounds: 0)


def _on_disk(
    experiment: Experiment,
    replicates: Replicates,
    like: State,
    data: Sequence[ClientData],
    writable: bool = True,
) -> tuple[Callable[..., State], Saving]:
    """Returns (run, key, clients) -> initial state, without any client's row; and how to save the state.

    Args:
        experiment: One of the runs.
        replicates: All runs.
        like: Shapes of the state, and locations except for the clients' rows.
        data: All clients' data, for each run; used by `thaw`.
        writable: Whether rows may be written.
    """
    problem = experiment.problem
    shapes = like.clients
    rest = without_clients(like)
    host = make_host_plan()
    directories = replicates.directories or (experiment.directory,)
    if jax.process_count() > 1 and None in directories:
        raise ArgumentError(
            "client_store", "needs a run folder that all processes can access", "disk"
        )
    build = functools.partial(experiment.algorithm, host)
    device = host.device
    jitted = functools.partial(Jitted, problem.model.network, host)
    begin = jitted(lambda numbers, *args: lifting.begin(build(numbers), *args))
    rows_of = jitted(
        lambda numbers, *args: jax.tree.leaves(lifting.first_rows(build(numbers), host, *args))
    )

    def started(run: int, key: Key, clients: ClientData) -> Start:
        with jax.default_device(device):
            return jax.device_get(begin(replicates.numbers_of(run), key, clients))

    def with_files(
        run: int, key: Key, start: Start, kept: dict[str, np.ndarray], rest: State
    ) -> State:
        of_run = functools.partial(rows_of, replicates.numbers_of(run), key, start)
        first_rows = functools.partial(_in_blocks, of_run, problem.cohort_size, device)
        directory = directories[run]
        table = stacks.SlotTable(np.array(kept["slots"]), np.array(kept["sums"]), first_rows)
        if directory is not None:
            files = stacks.open_files(directory, shapes, table, writable)
        else:
            # open files outlive their folder
            with tempfile.TemporaryDirectory(prefix="pfljax-") as folder:
                files = stacks.open_files(Path(folder), shapes, table)
        return rest._replace(clients=files)

    def init(run: int, key: Key, clients: ClientData) -> State:
        start = started(run, key, clients)
        placed = jax.tree.map(_on_devices, State(start), rest)
        return with_files(run, key, start, stacks.no_rows(problem.num_clients), placed)

    def freeze(state: State) -> State:
        kept: Any = stacks.flush(state.clients, problem.num_clients)
        return state._replace(clients=kept)

    def thaw(run: int, key: Key, saved: State) -> State:
        kept: Any = saved.clients
        return with_files(run, key, started(run, key, data[run]), kept, without_clients(saved))

    def saved(state: State) -> None:
        stacks.keep(state.clients)

    def check(rounds: int) -> int:
        return stacks.check_disk(
            directories, shapes, min(rounds * problem.cohort_size, problem.num_clients)
        )

    no_rows: Any = stacks.no_rows(problem.num_clients)
    return init, Saving(rest._replace(clients=no_rows), freeze, thaw, saved, check)


def _in_blocks(
    rows_of: Callable[[np.ndarray], list[jax.Array]], size: int, device: Any, ids: np.ndarray
) -> list[np.ndarray]:
    """Computes rows of clients `ids` in blocks of one size, which compile once."""
    blocks = []
    for first in range(0, len(ids), size):
        block = np.resize(ids[first : first + size], size).astype(np.int32)
        with jax.default_device(device):
            blocks.append(jax.device_get(rows_of(block)))
    return [np.concatenate(leaves)[: len(ids)] for leaves in zip(*blocks, strict=True)]


class Segment:
    """Runs rounds on the cohort's rows. With a single process, a thread prefetches the next cohort."""

    def __init__(
        self,
        algorithm: Algorithm,
        plan: ExecutionPlan,
        compiled: Callable,
        num_clients: int,
        size: int,
    ):
        self.plan = plan
        self.compiled = compiled
        self.size = size
        self.draw = jax.jit(
            lambda key, number: known_cohort(algorithm, key, number, num_clients, size).ids
        )

    def fetch(self, key: Key, number: int, rows: First, clients: ClientData) -> Ahead:
        """Fetches a round's cohort."""
        ids = np.asarray(self.draw(key, number))
        return Ahead(
            ids, stacks.read(rows, ids), place(self.plan, stacks.read(clients, ids), self.size)
        )

    def __call__(self, key: Key, start: int, stop: int, state: State, clients: ClientData):
        """Returns (state, stacked records, number of rounds done). Changes the clients' rows of the state in place."""
        rows = state.clients
        records = []
        ahead = self.fetch(key, start, rows, clients)
        # otherwise other processes may have to send or write rows first
        alone = jax.process_count() == 1
        with ThreadPoolExecutor(1) as fetcher:
            for number in range(start, stop):
                more = number + 1 < stop
                future = (
                    fetcher.submit(self.fetch, key, number + 1, rows, clients)
                    if alone and more
                    else None
                )
                state = state._replace(clients=place(self.plan, ahead.rows, self.size))
                state, record = self.compiled(
                    key, np.int32(number), ahead.ids, state, ahead.clients
                )
                records.append(jax.device_get(record))
                # it may read rows that are written next
                following = future.result() if future else None
                stacks.write(rows, ahead.ids, state.clients)
                processes.wait()
                if more and not alone:
                    ahead = self.fetch(key, number + 1, rows, clients)
                if following:
                    ahead = renew(following, np.isin(following.ids, ahead.ids), rows)
                if records[-1].diverged >= 0:
                    break
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *records)
        return state._replace(clients=rows), stacked, len(records)


def without_clients(state: State) -> State:
    """The state without what the clients hold."""
    return state._replace(clients=First())


def renew(ahead: Ahead, old: np.ndarray, rows: First) -> Ahead:
    """Reads the rows of a cohort again where `old` (S,) is true: these clients were in the previous cohort, too."""

    def one(leaf, new):
        leaf = leaf if leaf.flags.writeable else leaf.copy()
        leaf[old] = new
        return leaf

    if not old.any():
        return ahead
    return ahead._replace(rows=jax.tree.map(one, ahead.rows, stacks.read(rows, ahead.ids[old])))


def _taken_over(leaf: jax.Array) -> np.ndarray | stacks.Shared:
    """Returns a writable copy of an array and frees the array. With several processes, each keeps its share."""
    copy = np.array(leaf)
    leaf.delete()
    return copy if jax.process_count() == 1 else stacks.Shared(copy)


def _on_devices(leaf: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Puts an array that all processes have on all their devices."""
    return jax.make_array_from_callback(leaf.shape, like.sharding, lambda index: leaf[index])


def _placeholder(leaf: Any) -> np.ndarray:
    """Returns an array of this shape that takes no memory, for code that reads only its shape and dtype."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def block_size(experiment: Experiment, plan: ExecutionPlan) -> int:
    """Number of clients to evaluate at a time: they need no more memory than a cohort, or than `BLOCK_BYTES`."""
    problem = experiment.problem
    clients = experiment.federation.client_data
    algorithm = experiment.algorithm(plan)
    key = jax.random.key(0)
    state = shapes_of(experiment, clients)
    of_cohort = each = tree.row_bytes((state.clients, clients))
    if experiment.metrics:
        sizes = (
            getattr(experiment.federation, part).y.shape[1]
            for part in ("train", "validation", "test")
        )
        each += sum(measures.row_bytes(problem, size) for size in sizes)
    if algorithm.topology.reads_others:  # other clients' models are stored next to each client's
        each += len(lifting.shapes(algorithm, plan, key, state, clients)[0].index) * tree.row_bytes(
            state.models
        )
    size = max(BLOCK_BYTES // each, problem.cohort_size * of_cohort // each, 1)
    num_scored = problem.num_clients if experiment.scored is None else len(experiment.scored)
    return min(-(-size // plan.num_devices) * plan.num_devices, num_scored)


class HostStore(Store):
    """Clients' state and data are in host memory; a round's cohort is on the devices."""

    home = "in host memory; a round's cohort on the devices"

    def check(self, experiment: Experiment, algorithm: Algorithm) -> None:
        """Raises `ArgumentError` if this store does not support the run."""
        if algorithm.sample is not None:
            text = "does not support cohorts that are not drawn uniformly; accepted here: device"
            raise ArgumentError("client_store", text, experiment.client_store)
        if (found := experiment.problem.plan.model_devices) > 1:
            raise ArgumentError(
                "model_devices", f"accepted with client_store={experiment.client_store}: 1", found
            )

    def put(
        self, plan: ExecutionPlan, replicates: Replicates, parts: Sequence[Any], num: int
    ) -> Any:
        """Returns the data of each run, which stay on the host."""
        del plan, num
        return replicates.side_by_side(parts)

    def join_states(
        self, compiled: Compiled, replicates: Replicates, states: Sequence[State]
    ) -> State:
        """Joins the restored states of all runs."""
        del compiled
        return replicates.side_by_side(states)

    def restorable(self, compiled: Compiled, replicates: Replicates) -> State:
        """Returns the shapes, dtypes and locations of one run's state."""
        del replicates
        return compiled.state

    def lower_segment(
        self,
        experiment: Experiment,
        clients: ClientData,
        plan: ExecutionPlan,
        length: int,
        replicates: Replicates,
    ) -> Lowered:
        """Lowers a round of the cohort's rows; `ahead` is the next cohort."""
        del length
        algorithm = experiment.algorithm(plan)
        problem = experiment.problem
        self.check(experiment, algorithm)
        num_clients = problem.num_clients
        size = problem.cohort_size
        clients = replicates.split(clients)[0]
        state = shapes_of(experiment, clients)
        state = state._replace(clients=tree.shapes_of_rows(state.clients, size))
        shardings = state_shardings(plan, state)
        state = shaped(state, shardings)
        cohort = tree.shapes_of_rows(clients, size)
        cohort = shaped(
            cohort, jax.tree.map(lambda leaf: plan.sharding(leaf, by_rows=True), cohort)
        )

        def step(numbers, key, number, ids, state, clients):
            one_round = make_cohort_round(experiment.algorithm(plan, numbers), plan)
            return one_round(key, number, Cohort(ids, everyone=size == num_clients), state, clients)

        number = jax.ShapeDtypeStruct((), jnp.int32)
        ids = jax.ShapeDtypeStruct((size,), jnp.int32)
        options = {"donate_argnums": 4, "out_shardings": (shardings, plan.everywhere)}
        jitted = Jitted(problem.model.network, plan, step, **options)
        keys = experiment.keys(*[jax.random.key(experiment.seed)] * 2)
        program = jitted.lower(replicates.numbers_of(0), keys, number, ids, state, cohort)
        ahead = tree.num_bytes((state.clients, cohort)) // plan.num_devices
        return Lowered(algorithm, state, program, jitted.frozen, ahead)

    def compile_segment(
        self,
        experiment: Experiment,
        clients: ClientData,
        plan: ExecutionPlan,
        length: int,
        replicates: Replicates,
    ) -> Compiled:
        """Compiles a round of the cohort's rows; a segment plays round by round."""
        begin = time.perf_counter()
        algorithm, state, program, frozen, ahead = self.lower_segment(
            experiment, clients, plan, length, replicates
        )
        num_clients = experiment.problem.num_clients
        size = experiment.problem.cohort_size
        data = replicates.split(clients)
        compiled = program.compile()
        needs = memory.of_compiled(compiled)
        # a run's server and models
        others = (replicates.num - 1) * tree.num_bytes(without_clients(state))
        needs = dataclasses.replace(needs, arguments=needs.arguments + ahead + others)

        def of_run(run):
            return functools.partial(compiled, replicates.numbers_of(run), frozen=frozen)

        segments = [
            Segment(algorithm, plan, of_run(run), num_clients, size)
            for run in range(replicates.num)
        ]
        rows = shapes_of(experiment, data[0]).clients
        like = state._replace(clients=jax.tree.map(_placeholder, rows))
        init, saving = self.begin(experiment, replicates, like, data)

        def init_all(key, clients):
            parts = zip(replicates.split(key), replicates.split(clients), strict=True)
            return replicates.side_by_side([init(run, *part) for run, part in enumerate(parts)])

        seconds = time.perf_counter() - begin
        segment = functools.partial(_segment_of_all, replicates, segments)
        return Compiled(algorithm, plan, like, init_all, segment, needs, seconds, saving=saving)

    def begin(
        self,
        experiment: Experiment,
        replicates: Replicates,
        like: State,
        data: Sequence[ClientData],
    ) -> tuple[Callable[..., State], Saving | None]:
        """Returns (run, key, clients) -> initial state, and how to save the state.

        Args:
            experiment: One of the runs.
            replicates: All runs.
            like: Shapes of the state, and locations except for the clients' rows.
            data: All clients' data, for each run.
        """
        del data
        held = like.server.models, like.server.opt_state, like.clients
        leaves = [tree.num_bytes(leaf) for leaf in jax.tree.leaves(held)]
        # one more leaf, while it is copied
        memory.check_host(replicates.num * sum(leaves) + max(leaves, default=0))
        return _in_memory(experiment, replicates, like), _whole(
            like
        ) if jax.process_count() > 1 else None

    def make_evaluation(
        self, experiments: Sequence[Experiment], compiled: Compiled, replicates: Replicates
    ) -> Callable:
        """Evaluates in blocks, one run after the other."""
        first = experiments[0]
        plan = compiled.plan
        use = functools.partial(
            scores, first.problem._replace(plan=plan), outputs=bool(first.metrics)
        )
        finish = functools.partial(measured, first.metrics, task=first.problem.model.task)
        build = functools.partial(first.algorithm, plan)
        network = first.problem.model.network
        evaluate = in_blocks(network, build, plan, use, block_size(first, plan), finish)
        everyone = np.arange(first.problem.num_clients, dtype=np.int32)
        ids = [everyone if each.scored is None else each.scored for each in experiments]

        def of_all(*args):
            parts = zip(ids, *(replicates.split(arg) for arg in args), strict=True)
            found = [evaluate(replicates.numbers_of(run), *part) for run, part in enumerate(parts)]
            return replicates.side_by_side(found)

        return of_all

    def serve(
        self, experiment: Experiment, build: Build, plan: ExecutionPlan, use: UseOf, *args: Any
    ) -> PyTree:
        """Serves these clients in blocks of the size of a cohort."""
        problem = experiment.problem
        return in_blocks(problem.model.network, build, plan, use, problem.cohort_size)(
            OWN, *args
        ).found


class DiskStore(HostStore):
    """Clients' rows are in files and their data in host memory; a round's cohort is on the devices."""

    home = "state on disk, data in host memory; a round's cohort on the devices"
    on_disk = True

    def begin(
        self,
        experiment: Experiment,
        replicates: Replicates,
        like: State,
        data: Sequence[ClientData],
    ) -> tuple[Callable[..., State], Saving]:
        """Begins with no client's row."""
        init, saving = _on_disk(experiment, replicates, like, data)
        saving.check(experiment.problem.rounds)
        return init, saving

    def read_saved(
        self, experiment: Experiment, read: Callable[[Any], Any], clients: ClientData
    ) -> State:
        """Reads the state; the clients' rows stay in their files."""
        key = jax.random.fold_in(jax.random.key(experiment.seed), 0)
        like = shapes_of(experiment, clients)
        saving = _on_disk(experiment, Replicates.of([experiment]), like, [clients], writable=False)[
            1
        ]
        return saving.thaw(0, key, read(saving.like))
