"""Client store in host memory or on disk: prefetches each cohort, trains it on the devices, and writes it back.

The host's memory or disk limits K. The time per round and the devices' memory depend on the cohort size S. This module
has the same functions as `device_store`. Clients' parts of the state are stacks of rows that are changed in place, and
data are NumPy arrays. On disk, a client has no row until it first takes part; initial rows are recomputed whenever
they are needed.
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

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, ClientData, Cohort, Key, Predictor, Split, State
from pfljax.evaluation import measures
from pfljax.evaluation import metrics as evaluation
from pfljax.exchange import processes
from pfljax.exchange.plan import ExecutionPlan, make_host_plan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import cohort_of, join_state, make_cohort_round, predicts_by_rows, split_state
from pfljax.stores import memory, stacks
from pfljax.stores.compiled import Compiled, Saving, is_private_mixture, shaped, state_shardings, tuned
from pfljax.stores.experiment import OWN, Experiment, Numbers
from pfljax.stores.replicates import Replicates

BLOCK_BYTES = 64 << 20  # minimum size of a block of clients that is evaluated at once


class Ahead(NamedTuple):
    """A prefetched cohort: its state is still on the host, its data are on the devices."""

    ids: np.ndarray
    rows: State
    clients: ClientData


def put(plan: ExecutionPlan, replicates: Replicates, parts: Sequence[Any], num: int) -> Any:
    """Returns the data of each run, which stay on the host."""
    del plan, num
    return replicates.side_by_side(parts)


def join_states(compiled: Compiled, replicates: Replicates, states: Sequence[State]) -> State:
    """Joins the restored states of all runs."""
    del compiled
    return replicates.side_by_side(states)


def restorable(compiled: Compiled, replicates: Replicates) -> State:
    """Returns the shapes, dtypes and locations of one run's state."""
    del replicates
    return compiled.state


def check(experiment: Experiment, algorithm: Algorithm) -> None:
    """Raises `ArgumentError` if this store does not support the run."""
    clients = experiment.federation.client_data
    state = jax.eval_shape(algorithm.init, jax.random.key(0), clients)
    build = lambda part: experiment.algorithm(experiment.problem.plan, part=part)
    refused = {
        "methods that predict with all clients' states at once": not predicts_by_rows(build, state, clients),
        "cohorts that are not drawn uniformly": algorithm.sample is not None,
    }
    for what, found in refused.items():
        if found:
            raise ArgumentError(
                "client_store", f"does not support {what}; accepted here: device", experiment.client_store
            )
    if experiment.client_store == "disk":
        check_first_rows(experiment, split_state(algorithm, state)[0], clients)


def compile_segment(
    experiment: Experiment, clients: ClientData, plan: ExecutionPlan, length: int, replicates: Replicates
) -> Compiled:
    """Like `device_store.compile_segment`, but runs round by round on the cohort's rows."""
    del length
    begin = time.perf_counter()
    algorithm, problem = experiment.algorithm(plan), experiment.problem
    check(experiment, algorithm)
    num_clients, size, data = problem.num_clients, problem.cohort_size, replicates.split(clients)
    clients = data[0]
    key = jax.random.key(experiment.seed)
    shape = jax.eval_shape(algorithm.init, key, clients)
    rows, rest = split_state(algorithm, shape)
    state = join_state(algorithm, tree.shapes_of_rows(rows, size), rest)
    shardings = state_shardings(algorithm, plan, state)
    state, cohort = shaped(state, shardings), tree.shapes_of_rows(clients, size)
    cohort = shaped(cohort, jax.tree.map(lambda leaf: plan.sharding(leaf, by_rows=True), cohort))

    def step(numbers, key, number, ids, state, clients):
        one_round = make_cohort_round(experiment.algorithm(plan, numbers), plan)
        return one_round(key, number, Cohort(ids, everyone=size == num_clients), state, clients)

    number, ids = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((size,), jnp.int32)
    jitted = jax.jit(step, donate_argnums=4, out_shardings=(shardings, plan.everywhere))
    keys = experiment.keys(key, key)
    compiled = jitted.lower(replicates.numbers_of(0), keys, number, ids, state, cohort).compile()
    rest_at = split_state(algorithm, shardings)[1]
    rest = shaped(rest, rest_at)
    like = join_state(algorithm, jax.tree.map(_placeholder, rows), rest)
    needs = memory.of_compiled(compiled)
    ahead = tree.num_bytes((split_state(algorithm, state)[0], cohort)) // plan.num_devices
    others = (replicates.num - 1) * tree.num_bytes(
        split_state(algorithm, state)[1]
    )  # the other runs' server and models
    needs = dataclasses.replace(needs, arguments=needs.arguments + ahead + others)
    segments = [
        Segment(algorithm, plan, functools.partial(compiled, replicates.numbers_of(run)), num_clients, size)
        for run in range(replicates.num)
    ]
    if experiment.client_store == "disk":
        init, saving = _on_disk(experiment, replicates, rows, rest, data)
        saving.check(problem.rounds)
    else:
        memory.check_host(like, replicates.num)
        init = _in_memory(experiment, replicates, rest_at)
        saving = _whole(like) if jax.process_count() > 1 else None

    def init_all(key, clients):
        parts = zip(replicates.split(key), replicates.split(clients), strict=True)
        return replicates.side_by_side([init(run, *part) for run, part in enumerate(parts)])

    seconds = time.perf_counter() - begin
    segment = functools.partial(_segment_of_all, replicates, segments)
    return Compiled(algorithm, plan, like, init_all, segment, needs, seconds, saving=saving)


def _segment_of_all(
    replicates: Replicates, segments: Sequence[Segment], key: Key, start: int, stop: int, state: State, clients: Any
):
    """Runs the rounds of one run after the other with the same compiled code. Diverged runs repeat the last record."""
    if replicates.num == 1:
        return segments[0](key, start, stop, state, clients)
    parts = zip(segments, replicates.split(key), replicates.split(state), replicates.split(clients), strict=True)
    found = [one(key, start, stop, state, clients) for one, key, state, clients in parts]
    count = max(played for _, _, played in found)
    last = lambda leaf: leaf[np.minimum(np.arange(count), len(leaf) - 1)]
    records = jax.tree.map(lambda *leaves: np.stack([last(leaf) for leaf in leaves], 1), *[each[1] for each in found])
    return replicates.side_by_side([state for state, _, _ in found]), records, count


def _in_memory(experiment: Experiment, replicates: Replicates, rest_at: State) -> Callable[..., State]:
    """Returns (run, key, clients) -> initial state, made on the host, since not all rows may fit on the devices."""
    host = make_host_plan()
    algorithm = experiment.algorithm(host)
    make = jax.jit(lambda numbers, *args: experiment.algorithm(host, numbers).init(*args))

    def init(run: int, key: Key, clients: ClientData) -> State:
        with jax.default_device(host.mesh.devices.flat[0]):
            state = make(replicates.numbers_of(run), key, clients)
        rows, rest = split_state(algorithm, state)
        rest = jax.tree.map(_on_devices, jax.device_get(rest), rest_at)
        return join_state(algorithm, jax.tree.map(_taken_over, rows), rest)

    return init


def _whole(like: State) -> Saving:
    """Saves the rows of all processes' clients in one checkpoint, which a single process can restore, too."""

    def thaw(run: int, key: Key, saved: State) -> State:
        del run, key
        return jax.tree.map(lambda leaf: stacks.Shared(leaf) if isinstance(leaf, np.ndarray) else leaf, saved)

    return Saving(like, stacks.in_memory, thaw, lambda state: None, lambda rounds: 0)


def read_saved(experiment: Experiment, read: Callable[[Any], Any], clients: ClientData) -> State:
    """Reads a run's saved state, for predictions: arrays are on the host.

    Args:
        experiment: The run.
        read: Reads a checkpoint: shapes -> arrays.
        clients: Data of all clients.
    """
    algorithm = experiment.algorithm(experiment.problem.plan)
    key = jax.random.fold_in(jax.random.key(experiment.seed), 0)
    shape = jax.eval_shape(algorithm.init, key, clients)
    if experiment.client_store != "disk":
        return read(shape)
    rows, rest = split_state(algorithm, shape)
    saving = _on_disk(experiment, Replicates.of([experiment]), rows, rest, [clients], writable=False)[1]
    return saving.thaw(0, key, read(saving.like))


def _on_disk(
    experiment: Experiment,
    replicates: Replicates,
    shapes: State,
    rest: State,
    data: Sequence[ClientData],
    writable: bool = True,
) -> tuple[Callable[..., State], Saving]:
    """Returns (run, key, clients) -> initial state, without any client's row; and how to save the state.

    Args:
        experiment: One of the runs.
        replicates: All runs.
        shapes: Shapes of the clients' rows.
        rest: Shapes and locations of the rest of the state.
        data: All clients' data, for each run; used by `thaw`.
        writable: Whether rows may be written.
    """
    algorithm, problem = experiment.algorithm(experiment.problem.plan), experiment.problem
    host, directories = make_host_plan(), replicates.directories or (experiment.directory,)
    if jax.process_count() > 1 and None in directories:
        raise ArgumentError("client_store", "needs a run folder that all processes can access", "disk")
    build = functools.partial(experiment.algorithm, host)
    others = jax.jit(lambda numbers, *args: split_state(algorithm, build(numbers).init(*args))[1])
    make = jax.jit(functools.partial(_first_rows, experiment))

    def join(run: int, key: Key, clients: ClientData, kept: dict[str, np.ndarray], rest: State) -> State:
        check_first_rows(experiment, shapes, clients)
        of_run = functools.partial(make, replicates.numbers_of(run))
        initial = FirstRows(of_run, key, clients, problem.cohort_size)
        directory, table = directories[run], stacks.Table(np.array(kept["slots"]), np.array(kept["sums"]), initial)
        if directory is not None:
            files = stacks.open_files(directory, shapes, table, writable)
        else:
            with tempfile.TemporaryDirectory(prefix="pfljax-") as folder:  # open files outlive their folder
                files = stacks.open_files(Path(folder), shapes, table)
        return join_state(algorithm, files, rest)

    def init(run: int, key: Key, clients: ClientData) -> State:
        with jax.default_device(host.mesh.devices.flat[0]):
            made = jax.device_get(others(replicates.numbers_of(run), key, clients))
        made = jax.tree.map(lambda leaf, like: _on_devices(leaf, like.sharding), made, rest)
        return join(run, key, clients, stacks.no_rows(problem.num_clients), made)

    def freeze(state: State) -> dict:
        rows, others = split_state(algorithm, state)
        return {**stacks.flush(rows, problem.num_clients), "rest": others}

    def thaw(run: int, key: Key, saved: dict) -> State:
        return join(run, key, data[run], saved, saved["rest"])

    like = {**stacks.no_rows(problem.num_clients), "rest": rest}
    saved = lambda state: stacks.keep(split_state(algorithm, state)[0])

    def check(rounds: int) -> int:
        played = min(rounds * problem.cohort_size, problem.num_clients)
        return stacks.check_disk(directories, shapes, played)

    return init, Saving(like, freeze, thaw, saved, check)


class FirstRows:
    """Computes the rows of clients that have not taken part yet: ids (n,) -> list of arrays (n, ...)."""

    def __init__(self, make: Callable[..., list[jax.Array]], key: Key, clients: ClientData, size: int):
        """Tests the function on a few clients.

        Args:
            make: (key, ids (size,), their data) -> their rows.
            key: Key of the initial state.
            clients: All clients' data.
            size: Number of clients whose rows are computed at a time.

        Raises:
            ArgumentError: if a client's row depends on more than its number, its data and the key.
        """
        self.make, self.key, self.clients, self.size = make, key, clients, size
        self.device = make_host_plan().mesh.devices.flat[0]
        # Client 0 must have the same row at every position, alone and among others; so must the last client.
        last = tree.num_rows(clients) - 1
        first, beside, others = (self(np.resize(ids, self.size)) for ids in ([0], [0, *[last] * self.size], [last]))
        for a, b, c in zip(first, beside, others, strict=True):
            expected = np.concatenate([a[:1], np.broadcast_to(c[:1], (self.size - 1, *c.shape[1:]))])
            same_everywhere = np.array_equal(a, np.broadcast_to(a[:1], a.shape))
            if not (same_everywhere and np.array_equal(b, expected)):
                raise depends_on_others()

    def __call__(self, ids: np.ndarray) -> list[np.ndarray]:
        """Returns the rows, computed in blocks of one size."""
        blocks = []
        for start in range(0, len(ids), self.size):
            block = np.resize(ids[start : start + self.size], self.size).astype(np.int32)
            with jax.default_device(self.device):
                blocks.append(jax.device_get(self.make(self.key, block, stacks.read(self.clients, block))))
        joined = blocks[0] if len(blocks) == 1 else [np.concatenate(leaves) for leaves in zip(*blocks, strict=True)]
        return [leaf[: len(ids)] for leaf in joined]


def _first_rows(
    experiment: Experiment, numbers: Numbers, key: Key, ids: jax.Array, clients: ClientData
) -> list[jax.Array]:
    """Returns the rows that `init` gives to clients `ids` (n,) with the given data: a list of leaves (n, ...)."""
    algorithm = experiment.algorithm(make_host_plan(), numbers, part=ids)
    return jax.tree.leaves(split_state(algorithm, algorithm.init(key, clients))[0])


def check_first_rows(experiment: Experiment, shapes: State, clients: ClientData) -> None:
    """Checks by tracing that `init` works for a subset of the clients.

    Args:
        experiment: The run.
        shapes: Shapes of all clients' rows.
        clients: All clients' data, or their shapes.

    Raises:
        ArgumentError: if it cannot.
    """
    size = experiment.problem.cohort_size
    ids, data = jax.ShapeDtypeStruct((size,), jnp.int32), tree.shapes_of_rows(clients, size)
    try:
        made = jax.eval_shape(functools.partial(_first_rows, experiment, OWN), jax.random.key(0), ids, data)
    except (TypeError, ValueError, IndexError) as error:  # the method does not support fewer clients
        raise depends_on_others() from error
    if [leaf.shape for leaf in made] != [(size, *leaf.shape[1:]) for leaf in jax.tree.leaves(shapes)]:
        raise depends_on_others()


def depends_on_others() -> ArgumentError:
    """Returns the error for a method whose initial rows cannot be computed one by one."""
    text = "does not support methods whose initial client rows depend on other clients; accepted here: device"
    return ArgumentError("client_store", text, "disk")


class Segment:
    """Runs rounds on the cohort's rows. With a single process, a thread prefetches the next cohort."""

    def __init__(self, algorithm: Algorithm, plan: ExecutionPlan, compiled: Callable, num_clients: int, size: int):
        self.algorithm, self.plan, self.compiled, self.size = algorithm, plan, compiled, size
        self.draw = jax.jit(lambda key, number: cohort_of(key, number, num_clients, size).ids)

    def fetch(self, key: Key, number: int, rows: State, clients: ClientData) -> Ahead:
        """Fetches a round's cohort."""
        ids = np.asarray(self.draw(key, number))
        return Ahead(ids, stacks.read(rows, ids), place(self.plan, stacks.read(clients, ids), self.size))

    def __call__(self, key: Key, start: int, stop: int, state: State, clients: ClientData):
        """Returns (state, stacked records, number of rounds done). Changes the clients' rows of the state in place."""
        rows, rest = split_state(self.algorithm, state)
        records, ahead = [], self.fetch(key, start, rows, clients)
        alone = jax.process_count() == 1  # otherwise other processes may have to send or write rows first
        with ThreadPoolExecutor(1) as fetcher:
            for number in range(start, stop):
                more = number + 1 < stop
                future = fetcher.submit(self.fetch, key, number + 1, rows, clients) if alone and more else None
                given = join_state(self.algorithm, place(self.plan, ahead.rows, self.size), rest)
                given, record = self.compiled(key, np.int32(number), ahead.ids, given, ahead.clients)
                trained, rest = split_state(self.algorithm, given)
                records.append(jax.device_get(record))
                following = future.result() if future else None  # it may read rows that are written next
                stacks.write(rows, ahead.ids, trained)
                processes.wait()
                if more and not alone:
                    ahead = self.fetch(key, number + 1, rows, clients)
                if following:
                    ahead = renew(following, np.isin(following.ids, ahead.ids), rows)
                if records[-1].diverged >= 0:
                    break
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *records)
        return join_state(self.algorithm, rows, rest), stacked, len(records)


def renew(ahead: Ahead, old: np.ndarray, rows: State) -> Ahead:
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


def _on_devices(leaf: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts an array that all processes have on all their devices."""
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def _placeholder(leaf: Any) -> np.ndarray:
    """Returns an array of this shape that takes no memory, for code that reads only its shape and dtype."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


class Evaluation:
    """Like `device_store.make_evaluation`, but in blocks of clients.

    A block needs no more memory than a cohort or `BLOCK_BYTES`, whichever is larger.
    """

    def __init__(self, experiment: Experiment, compiled: Compiled):
        self.algorithm, self.plan = compiled.algorithm, compiled.plan
        self.build = functools.partial(experiment.algorithm, compiled.plan)
        self.model, self.metrics = experiment.problem.model, experiment.metrics
        self.num_clients = experiment.problem.num_clients
        self.size = self._block_size(experiment)
        everywhere = compiled.plan.everywhere
        self.predict = jax.jit(self._predict, out_shardings=(None, everywhere))
        self.score = jax.jit(self._score, out_shardings=everywhere)

    def _block_size(self, experiment: Experiment) -> int:
        clients, devices = experiment.federation.client_data, self.plan.num_devices
        state = jax.eval_shape(self.algorithm.init, jax.random.key(0), clients)
        weighed = jax.eval_shape(self.algorithm.predictor, jax.random.key(0), state, clients)
        of_cohort = each = tree.row_bytes((split_state(self.algorithm, state)[0], clients))
        if self.metrics:
            sizes = (getattr(experiment.federation, part).y.shape[1] for part in ("train", "validation", "test"))
            each += sum(measures.row_bytes(self.model, size) for size in sizes)
        if weighed.topology == "peers":  # other clients' models are stored next to each client's
            each += weighed.index.shape[1] * tree.row_bytes(state.models)
        size = max(BLOCK_BYTES // each, experiment.problem.cohort_size * of_cohort // each, 1)
        num_scored = self.num_clients if experiment.scored is None else len(experiment.scored)
        return min(-(-size // devices) * devices, num_scored)

    def _predict(self, numbers: Numbers, ids: jax.Array, key: Key, rows: State, rest: State, clients: ClientData):
        algorithm = self.build(numbers, ids)
        state = join_state(algorithm, rows, rest)
        predictor = algorithm.predictor(key, state, clients)
        collaboration = {"index": predictor.index, "weights": predictor.weights}
        if algorithm.report.collaboration:
            collaboration = algorithm.report.collaboration(state)
        others = predictor.topology == "peers"  # models outside this block
        predictor = dataclasses.replace(predictor, models=()) if others else predictor
        return predictor, (collaboration, predictor.index)

    def _score(
        self,
        numbers: Numbers,
        ids: jax.Array,
        key: Key,
        predictor: Predictor,
        clients: ClientData,
        splits: dict[str, Split],
    ):
        final = tuned(self.build(numbers, ids), key, predictor, clients)
        scores = {name: evaluation.evaluate(self.plan, self.model, final, split) for name, split in splits.items()}
        own = splits.items() if self.metrics else ()
        return scores, {name: measures.outputs_of(self.plan, self.model, final, split) for name, split in own}

    def __call__(
        self, numbers: Numbers, scored: np.ndarray | None, key: Key, state: State, clients: ClientData, splits: dict
    ):
        """Returns (metrics by split and name, who uses whom) for the scored clients; None: all."""
        rows, rest = split_state(self.algorithm, state)
        found, scored = [], np.arange(self.num_clients) if scored is None else scored
        for start in range(0, len(scored), self.size):
            ids = scored[np.minimum(np.arange(start, start + self.size), len(scored) - 1)]  # repeats the last client
            parts = self._of_block(numbers, ids, key, (rows, rest), (clients, splits))
            real = min(self.size, len(scored) - start)
            found.append(jax.tree.map(lambda leaf, real=real: leaf[:real], parts))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def _of_block(
        self, numbers: Numbers, ids: np.ndarray, key: Key, state: tuple[State, State], data: tuple[ClientData, dict]
    ):
        there = lambda stack: place(self.plan, stacks.read(stack, ids), self.size)
        (rows, rest), (clients, splits) = state, map(there, data)
        predictor, noted = self.predict(numbers, ids, key, there(rows), rest, clients)
        collaboration, index = jax.device_get(noted)
        if predictor.topology == "peers":  # each client's collaborators, stacked like models of its own
            models = place(self.plan, stacks.read(rows.models, index.reshape(-1)), index.size)
            places = jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
            predictor = dataclasses.replace(predictor, models=models, index=places, topology="own")
        elif predictor.topology == "own" and not self.algorithm.report.collaboration:
            private = is_private_mixture(predictor)
            models = np.arange(predictor.index.shape[1]) if private else ids[:, None]
            collaboration["index"] = np.broadcast_to(np.int32(models), predictor.index.shape)
        scores, outputs = jax.device_get(self.score(numbers, ids, key, predictor, clients, splits))
        for name, found in outputs.items():
            scores[name] |= measures.measured(self.metrics, found)
        return scores, collaboration


def make_evaluation(experiments: Sequence[Experiment], compiled: Compiled, replicates: Replicates) -> Callable:
    """Returns (key, state, clients, splits) -> (metrics by split and name, who uses whom), one run after the other."""
    evaluate = Evaluation(experiments[0], compiled)

    def of_all(*args):
        parts = zip(experiments, *(replicates.split(arg) for arg in args), strict=True)
        found = [evaluate(replicates.numbers_of(run), each.scored, *part) for run, (each, *part) in enumerate(parts)]
        return replicates.side_by_side(found)

    return of_all
