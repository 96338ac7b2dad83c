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
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientData,
    Cohort,
    First,
    Key,
    PyTree,
    Start,
    State,
)
from pfljax.evaluation import measures
from pfljax.exchange import lifting
from pfljax.exchange.lifting import Served
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import Record, known_cohort, make_cohort_round
from pfljax.run import memory
from pfljax.run.compiled import Compiled, Jitted, Lowered, Saving, shaped, state_shardings
from pfljax.run.experiment import OWN, Experiment, Numbers
from pfljax.run.replicates import Replicates
from pfljax.stores import saved_rows, stacks
from pfljax.stores.initial_rows import InitialState, block_of
from pfljax.stores.serving import BLOCK_BYTES, BlockServer, measured, scored_ids, scores
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
) -> tuple[Any, Record, int]:
    """Runs the rounds of one run after the other with the same compiled code. Diverged runs repeat the last record."""
    if replicates.num == 1:
        return segments[0](key, start, stop, state, clients)
    keys = replicates.split(key)
    states = replicates.split(state)
    data = replicates.split(clients)
    records: list[Record] = []
    counts: list[int] = []
    for run, segment in enumerate(segments):
        last_state, played, count = segment(keys[run], start, stop, states[run], data[run])
        states[run] = last_state
        records.append(played)
        counts.append(count)

    num_rounds = max(counts)

    def join(*leaves: np.ndarray) -> np.ndarray:
        """Joins the runs' records on axis 1, all of one length."""
        rows = [leaf[np.minimum(np.arange(num_rounds), len(leaf) - 1)] for leaf in leaves]
        return np.stack(rows, 1)

    return replicates.side_by_side(states), jax.tree.map(join, *records), num_rounds


def _in_memory(
    experiment: Experiment, replicates: Replicates, like: State, block: int
) -> Callable[..., State]:
    """Returns (run, key, clients) -> initial state with all clients' rows in the host's memory.

    Rows are computed in blocks and written to where they stay. Rows of zeros, such as those of most optimizers' states,
    take no memory before they change.
    """
    initial = InitialState(experiment, replicates, block)
    everyone = np.arange(experiment.problem.num_clients)

    saves_changes = experiment.directory is not None and _tracks_changes(replicates)

    def init(run: int, key: Key, clients: ClientData) -> State:
        start = initial.server(run, key, clients)
        shapes, structure = jax.tree.flatten(like.clients)
        stack = [np.zeros(leaf.shape, leaf.dtype) for leaf in shapes]
        if stack:
            for ids, rows in initial.blocks(run, key, start, everyone):
                for leaf, block_rows in zip(stack, rows, strict=True):
                    if np.any(block_rows):
                        leaf[ids[0] : ids[-1] + 1] = block_rows

        clients_rows = jax.tree.unflatten(structure, [_own_share(leaf) for leaf in stack])
        if saves_changes:
            changed = np.zeros(len(everyone), bool)
            clients_rows = stacks.tracked(clients_rows, changed, saved_rows.by_name(start))
        rest = jax.tree.map(_on_devices, State(start), without_clients(like))
        return rest._replace(clients=clients_rows)

    return init


def _saving_whole(like: State) -> Saving:
    """Saves the rows of all processes' clients in one checkpoint, which a single process can restore, too."""

    def share(leaf: Array) -> Array | stacks.Shared:
        return stacks.Shared(leaf) if isinstance(leaf, np.ndarray) else leaf

    def thaw(run: int, key: Key, saved: State) -> State:
        del run, key
        return jax.tree.map(share, saved)

    return Saving(
        like,
        freeze=stacks.in_memory,
        thaw=thaw,
        saved=lambda state: None,
        check=lambda rounds: 0,
    )


class _RowsOnDisk:
    """The states of runs whose clients' rows are in files, and how they are saved; see `Saving`."""

    def __init__(
        self,
        experiment: Experiment,
        replicates: Replicates,
        like: State,
        data: Sequence[ClientData],
        writable: bool = True,
    ):
        """Opens no files yet.

        Args:
            experiment: One of the runs.
            replicates: All runs.
            like: Shapes of the state, and locations except for the clients' rows.
            data: All clients' data, for each run; used by `thaw`.
            writable: Whether rows may be written.
        """
        self.replicates = replicates
        self.data = data
        self.writable = writable
        self.shapes = like.clients
        self.rest = without_clients(like)
        self.num_clients = experiment.problem.num_clients
        self.cohort_size = experiment.problem.cohort_size
        self.directories = replicates.directories or (experiment.directory,)
        if jax.process_count() > 1 and None in self.directories:
            text = "needs a run folder that all processes can access"
            raise ArgumentError("client_store", text, "disk")

        self.initial = InitialState(experiment, replicates, self.cohort_size)

    @property
    def saving(self) -> Saving:
        """How to save the states."""
        no_rows: Any = stacks.no_rows(self.num_clients)
        return Saving(
            like=self.rest._replace(clients=no_rows),
            freeze=self.freeze,
            thaw=self.thaw,
            saved=self.mark_saved,
            check=self.check,
        )

    def init(self, run: int, key: Key, clients: ClientData) -> State:
        """Returns the initial state, without any client's row."""
        start = self.initial.server(run, key, clients)
        rest = jax.tree.map(_on_devices, State(start), self.rest)
        return self.with_files(run, key, start, stacks.no_rows(self.num_clients), rest)

    def freeze(self, state: State) -> State:
        slots_and_sums: Any = stacks.flush(state.clients, self.num_clients)
        return state._replace(clients=slots_and_sums)

    def thaw(self, run: int, key: Key, saved: State) -> State:
        slots_and_sums: Any = saved.clients
        start = self.initial.server(run, key, self.data[run])
        return self.with_files(run, key, start, slots_and_sums, without_clients(saved))

    def mark_saved(self, state: State) -> None:
        stacks.keep(state.clients)

    def check(self, rounds: int) -> int:
        played = min(rounds * self.cohort_size, self.num_clients)
        return stacks.check_disk(self.directories, self.shapes, played)

    def with_files(
        self, run: int, key: Key, start: Start, slots_and_sums: dict[str, np.ndarray], rest: State
    ) -> State:
        """Returns a run's state with its files of rows, of which a checkpoint recorded slots and checksums."""
        first_rows = functools.partial(self.initial.rows, run, key, start)
        slots = np.array(slots_and_sums["slots"])
        sums = np.array(slots_and_sums["sums"])
        table = stacks.SlotTable(slots, sums, first_rows)

        directory = self.directories[run]
        if directory is not None:
            files = stacks.open_files(directory, self.shapes, table, self.writable)
        else:
            # Open files outlive their folder.
            with tempfile.TemporaryDirectory(prefix="pfljax-") as folder:
                files = stacks.open_files(Path(folder), self.shapes, table)
        return rest._replace(clients=files)


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

        def draw(key: Key, number: Array) -> Array:
            cohort = known_cohort(algorithm, key, number, num_clients, size)
            return cohort.ids

        self.draw = jax.jit(draw)

    def fetch(self, key: Key, number: int, rows: First, clients: ClientData) -> Ahead:
        """Fetches a round's cohort."""
        ids = np.asarray(self.draw(key, number))
        cohort_rows = stacks.read(rows, ids)
        cohort_data = stacks.read(clients, ids)
        return Ahead(ids, cohort_rows, place(self.plan, cohort_data, self.size))

    def __call__(
        self, key: Key, start: int, stop: int, state: State, clients: ClientData
    ) -> tuple[State, Record, int]:
        """Returns (state, stacked records, number of rounds done). Changes the clients' rows of the state in place."""
        rows = state.clients
        records: list[Record] = []
        # Otherwise other processes may have to send or write rows first.
        prefetches = jax.process_count() == 1
        cohort = self.fetch(key, start, rows, clients)
        with ThreadPoolExecutor(1) as fetcher:
            for number in range(start, stop):
                has_next = number + 1 < stop
                future = None
                if has_next and prefetches:
                    future = fetcher.submit(self.fetch, key, number + 1, rows, clients)

                # Play the round.
                state = state._replace(clients=place(self.plan, cohort.rows, self.size))
                state, record = self.compiled(
                    key, np.int32(number), cohort.ids, state, cohort.clients
                )
                records.append(jax.device_get(record))

                # Write its rows only after the thread is done, which may read the same ones.
                prefetched = future.result() if future is not None else None
                stacks.write(rows, cohort.ids, state.clients)
                processes.wait()

                if prefetched is not None:
                    is_old = np.isin(prefetched.ids, cohort.ids)
                    cohort = renew(prefetched, is_old, rows)
                elif has_next:
                    cohort = self.fetch(key, number + 1, rows, clients)
                if records[-1].diverged >= 0:
                    break
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *records)
        return state._replace(clients=rows), stacked, len(records)


def without_clients(state: State) -> State:
    """The state without what the clients hold."""
    return state._replace(clients=First())


def renew(ahead: Ahead, old: np.ndarray, rows: First) -> Ahead:
    """Reads the rows of a cohort again where `old` (S,) is true: these clients were in the previous cohort, too."""
    if not old.any():
        return ahead

    def replace(leaf: np.ndarray, new_rows: np.ndarray) -> np.ndarray:
        leaf = leaf if leaf.flags.writeable else leaf.copy()
        leaf[old] = new_rows
        return leaf

    new_rows = stacks.read(rows, ahead.ids[old])
    return ahead._replace(rows=jax.tree.map(replace, ahead.rows, new_rows))


def _tracks_changes(replicates: Replicates) -> bool:
    """Whether checkpoints have only changed rows; those of several runs in one, or of several processes, have all."""
    return replicates.num == 1 and jax.process_count() == 1


def _own_share(leaf: np.ndarray) -> np.ndarray | stacks.Shared:
    """All clients' rows or, with several processes, this one's share of them."""
    return leaf if jax.process_count() == 1 else stacks.Shared(leaf)


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
    row_bytes = tree.row_bytes((state.clients, clients))

    # An evaluated client may also have predictions, and other clients' models next to its own.
    client_bytes = row_bytes
    if experiment.metrics:
        federation = experiment.federation
        for split in (federation.train, federation.validation, federation.test):
            client_bytes += measures.row_bytes(problem, split.y.shape[1])
    if algorithm.topology.reads_others:
        mixture, _ = lifting.shapes(algorithm, plan, key, state, clients)
        client_bytes += len(mixture.index) * tree.row_bytes(state.models)

    cohort_bytes = problem.cohort_size * row_bytes
    size = max(BLOCK_BYTES // client_bytes, cohort_bytes // client_bytes, 1)
    size_on_all_devices = -(-size // plan.num_devices) * plan.num_devices
    num_scored = problem.num_clients if experiment.scored is None else len(experiment.scored)
    return min(size_on_all_devices, num_scored)


class HostStore(Store):
    """Clients' state and data are in host memory; a round's cohort is on the devices."""

    home = "in host memory; a round's cohort on the devices"

    def check(self, experiment: Experiment, algorithm: Algorithm) -> None:
        """Raises `ArgumentError` if this store does not support the run."""
        if algorithm.sample is not None:
            text = "does not support cohorts that are not drawn uniformly; accepted here: device"
            raise ArgumentError("client_store", text, experiment.client_store)
        model_devices = experiment.problem.plan.model_devices
        if model_devices > 1:
            text = f"accepted with client_store={experiment.client_store}: 1"
            raise ArgumentError("model_devices", text, model_devices)

    def put(
        self, plan: ExecutionPlan, replicates: Replicates, runs: Sequence[Any], num: int
    ) -> Any:
        """Returns the data of each run, which stay on the host."""
        del plan, num
        return replicates.side_by_side(runs)

    def join_states(
        self, compiled: Compiled, replicates: Replicates, states: Sequence[State]
    ) -> State:
        """Joins the restored states of all runs."""
        del compiled
        if not _tracks_changes(replicates) or saved_rows.table_of(states[0].clients) is not None:
            return replicates.side_by_side(states)

        # A checkpoint with all rows, each of which may have changed.
        rows = states[0].clients
        leaves = jax.tree.leaves(rows)
        changed = np.ones(len(leaves[0]) if leaves else 0, bool)
        return states[0]._replace(clients=stacks.tracked(rows, changed, None))

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
        size = problem.cohort_size
        is_everyone = size == problem.num_clients

        # Shapes and locations of the state and the data of a cohort.
        clients = replicates.split(clients)[0]
        state = shapes_of(experiment, clients)
        state = state._replace(clients=tree.shapes_of_rows(state.clients, size))
        shardings = state_shardings(plan, state)
        state = shaped(state, shardings)
        cohort = tree.shapes_of_rows(clients, size)
        by_rows = jax.tree.map(lambda leaf: plan.sharding(leaf, by_rows=True), cohort)
        cohort = shaped(cohort, by_rows)

        def step(
            numbers: Numbers, key: Key, number: Array, ids: Array, state: State, clients: ClientData
        ) -> tuple[State, Record]:
            one_round = make_cohort_round(experiment.algorithm(plan, numbers), plan)
            return one_round(key, number, Cohort(ids, everyone=is_everyone), state, clients)

        jitted = Jitted(
            problem.model.network,
            plan,
            step,
            donate_argnums=4,
            out_shardings=(shardings, plan.everywhere),
        )
        numbers = replicates.numbers_of(0)
        run_key = jax.random.key(experiment.seed)
        keys = experiment.keys(run_key, run_key)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        ids = jax.ShapeDtypeStruct((size,), jnp.int32)
        program = jitted.lower(numbers, keys, number, ids, state, cohort)
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
        lowered = self.lower_segment(experiment, clients, plan, length, replicates)
        algorithm = lowered.algorithm
        state = lowered.state
        compiled = lowered.program.compile()

        # Beside the program's arguments: the next cohort, and the other runs' servers and models.
        needs = memory.memory_plan(compiled)
        other_runs = (replicates.num - 1) * tree.num_bytes(without_clients(state))
        arguments = needs.arguments + lowered.ahead + other_runs
        needs = dataclasses.replace(needs, arguments=arguments)

        # The rounds of each run.
        problem = experiment.problem
        segments: list[Segment] = []
        for run in range(replicates.num):
            numbers = replicates.numbers_of(run)
            step = functools.partial(compiled, numbers, frozen=lowered.frozen)
            segments.append(
                Segment(algorithm, plan, step, problem.num_clients, problem.cohort_size)
            )

        # The initial state of each run.
        data = replicates.split(clients)
        rows = shapes_of(experiment, data[0]).clients
        like = state._replace(clients=jax.tree.map(_placeholder, rows))
        init, saving = self.begin(experiment, replicates, like, data)

        def init_all(key: Key, clients: Any) -> Any:
            states: list[State] = []
            keys = replicates.split(key)
            for run, run_clients in enumerate(replicates.split(clients)):
                states.append(init(run, keys[run], run_clients))
            return replicates.side_by_side(states)

        return Compiled(
            algorithm,
            plan,
            state=like,
            init=init_all,
            segment=functools.partial(_segment_of_all, replicates, segments),
            memory=needs,
            compile_seconds=time.perf_counter() - begin,
            saving=saving,
            cohort=segments[0].draw if saving is None and replicates.num == 1 else None,
        )

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
        on_host = (like.server.models, like.server.opt_state, like.clients)
        row_bytes = tree.row_bytes(like.clients)
        block = block_of(experiment, like.clients)
        memory.check_host(replicates.num * tree.num_bytes(on_host) + block * row_bytes)
        init = _in_memory(experiment, replicates, like, block)
        saving = _saving_whole(like) if jax.process_count() > 1 else None
        return init, saving

    def make_evaluation(
        self, experiments: Sequence[Experiment], compiled: Compiled, replicates: Replicates
    ) -> Callable:
        """Evaluates in blocks, one run after the other."""
        first = experiments[0]
        plan = compiled.plan
        problem = first.problem._replace(plan=plan)
        evaluate = BlockServer(
            network=problem.model.network,
            build=functools.partial(first.algorithm, plan),
            plan=plan,
            use=functools.partial(scores, problem, outputs=bool(first.metrics)),
            size=block_size(first, plan),
            finish=functools.partial(measured, first.metrics, task=problem.model.task),
        )
        ids = [scored_ids(experiment) for experiment in experiments]

        def score_all(key: Key, state: Any, clients: Any, splits: Any, trained: Any) -> Any:
            keys = replicates.split(key)
            states = replicates.split(state)
            data = replicates.split(clients)
            inputs = replicates.split(splits)
            has_trained = replicates.split(trained)
            served: list[Served] = []
            for run in range(replicates.num):
                numbers = replicates.numbers_of(run)
                state_and_data = (states[run], data[run], inputs[run], has_trained[run])
                served.append(evaluate(numbers, ids[run], keys[run], *state_and_data))
            return replicates.side_by_side(served)

        return score_all

    def serve(
        self, experiment: Experiment, build: Build, plan: ExecutionPlan, use: UseOf, *args: Any
    ) -> PyTree:
        """Serves these clients in blocks of the size of a cohort."""
        problem = experiment.problem
        serve_clients = BlockServer(problem.model.network, build, plan, use, problem.cohort_size)
        ids, key, state, clients, trained = args
        return serve_clients(OWN, ids, key, state, clients, (), trained).outputs


class DiskStore(HostStore):
    """Clients' rows are in files and their data in host memory; a round's cohort is on the devices."""

    home = "state on disk, data in host memory; a round's cohort on the devices"
    on_disk = True

    def join_states(
        self, compiled: Compiled, replicates: Replicates, states: Sequence[State]
    ) -> State:
        """Joins the restored states of all runs, whose rows stay in their files."""
        del compiled
        return replicates.side_by_side(states)

    def begin(
        self,
        experiment: Experiment,
        replicates: Replicates,
        like: State,
        data: Sequence[ClientData],
    ) -> tuple[Callable[..., State], Saving]:
        """Begins with no client's row."""
        rows = _RowsOnDisk(experiment, replicates, like, data)
        rows.check(experiment.problem.rounds)
        return rows.init, rows.saving

    def read_saved(
        self, experiment: Experiment, read: Callable[[Any], Any], clients: ClientData
    ) -> State:
        """Reads the state; the clients' rows stay in their files."""
        key = jax.random.fold_in(jax.random.key(experiment.seed), 0)
        like = shapes_of(experiment, clients)
        replicates = Replicates.from_experiments([experiment])
        rows = _RowsOnDisk(experiment, replicates, like, [clients], writable=False)
        return rows.thaw(0, key, read(rows.saving.like))
