"""Client store on the devices: several rounds run in one dispatch, evaluation in another."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.held import taking
from pfljax.contract.types import Algorithm, Array, ClientData, Key, Params, PyTree, Split, State
from pfljax.evaluation import measures
from pfljax.exchange.in_python import PythonPlan, calling
from pfljax.exchange.lifting import Served, serve, serve_some
from pfljax.exchange.lifting import init as init_state
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import Record, make_round
from pfljax.run import memory
from pfljax.run.compiled import Compiled, Jitted, Lowered, shaped, state_shardings
from pfljax.run.experiment import OWN, Experiment
from pfljax.run.replicates import Replicates
from pfljax.stores import saved_rows, stacks
from pfljax.stores.serving import BLOCK_BYTES, blocks, joined, measured, scored_ids, scores
from pfljax.stores.store import Build, Store, UseOf

LARGE = 32 << 20  # bytes; with a model stack this large, a dispatch is one round

Models = tuple[Params, Params]  # the server's, and the clients' own
Round = Callable[[Key, Array, State, ClientData], tuple[State, Record]]


def _in_python(experiment: Experiment, clients: ClientData, plan: PythonPlan) -> Compiled:
    """Compiles nothing: rounds run in Python, on concrete arrays."""
    algorithm = experiment.algorithm(plan)
    problem = experiment.problem
    one_round = calling(make_round(algorithm, plan, problem.cohort_size))
    init = functools.partial(init_state, algorithm, plan)
    shape = jax.eval_shape(init, jax.random.key(0), clients)

    def segment(
        key: Key, start: int, stop: int, state: State, clients: ClientData
    ) -> tuple[State, Record, int]:
        records: list[Record] = []
        for number in range(int(start), int(stop)):
            state, record = one_round(key, np.int32(number), state, clients)
            records.append(record)
            if record.diverged >= 0:
                break
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *records)
        return state, stacked, len(records)

    return Compiled(
        algorithm,
        plan,
        state=shaped(shape, state_shardings(plan, shape)),
        init=calling(init),
        segment=segment,
        memory=memory.MemoryPlan(0, 0, 0, memory.device_limit()),
        compile_seconds=0.0,
    )


def _split_models(state: State) -> tuple[State, Models]:
    """Splits a state into the rest and its models.

    The rest comes first because JAX reuses donated memory for the first outputs of the same shape, and Adam's moments
    have the shapes of the models.
    """
    models = (state.server.models, state.clients.model)
    rest = _with_models(state, ((), ()))
    return rest, models


def _with_models(rest: State, models: Models) -> State:
    """Undoes `_split_models`."""
    server_models, client_models = models
    server = rest.server._replace(models=server_models)
    clients = rest.clients._replace(model=client_models)
    return rest._replace(server=server, clients=clients)


def _one_round(one_round: Round) -> Callable:
    """Runs the round `start`."""

    def segment(
        key: Key, start: Array, stop: Array, rest: State, models: Models, clients: ClientData
    ) -> tuple[tuple[State, Models], Record, Array]:
        del stop
        state = _with_models(rest, models)
        state, record = one_round(key, start, state, clients)
        return _split_models(state), tree.stack_one(record), jnp.ones((), jnp.int32)

    return segment


def _several_rounds(one_round: Round, logged: Record, length: int) -> Callable:
    """Runs rounds from `start` to `stop`, at most `length`. Stops once every run has diverged."""

    def no_records() -> Record:
        """Records of no round so far, none of them diverged."""
        records = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), logged)
        return records._replace(diverged=jnp.full_like(records.diverged, -1))

    def segment(
        key: Key, start: Array, stop: Array, rest: State, models: Models, clients: ClientData
    ) -> tuple[tuple[State, Models], Record, Array]:
        def body(carry: tuple[Array, State, Record]) -> tuple[Array, State, Record]:
            done, state, records = carry
            state, record = one_round(key, start + done, state, clients)
            records = jax.tree.map(lambda rows, row: rows.at[done].set(row), records, record)
            return done + 1, state, records

        def proceeds(carry: tuple[Array, State, Record]) -> Array:
            done, _, records = carry
            is_before_stop = start + done < stop
            last = jnp.maximum(done - 1, 0)
            is_finite = (records.diverged[last] < 0).any()
            return is_before_stop & is_finite

        records = no_records()
        state = _with_models(rest, models)
        carry = (jnp.zeros((), jnp.int32), state, records)
        done, state, records = jax.lax.while_loop(proceeds, body, carry)
        return _split_models(state), records, done

    return segment


def _measured_in_blocks(
    experiment: Experiment, replicates: Replicates, evaluate: Callable[..., Served], ids: Array
) -> Callable[..., Served]:
    """Evaluates in blocks of clients whose outputs, on the host, take at most `BLOCK_BYTES`.

    Args:
        experiment: One of the runs, with metrics of its own.
        replicates: All runs.
        evaluate: (ids, *args) -> what these clients of all runs found.
        ids: (n,) scored clients, or (runs, n).
    """
    problem = experiment.problem
    federation = experiment.federation
    splits = (federation.train, federation.validation, federation.test)
    num_examples = max(split.y.shape[1] for split in splits)
    size = BLOCK_BYTES // max(measures.row_bytes(problem, num_examples), 1)
    num_scored = ids.shape[-1]

    def measure(served: Served) -> Served:
        outputs = measured(experiment.metrics, served.outputs, problem.model.task)
        return served._replace(outputs=outputs)

    def evaluate_in_blocks(*args: Any) -> Served:
        blocks_of_runs: list[list[Served]] = [[] for _ in range(replicates.num)]
        for positions in blocks(num_scored, size):
            served = jax.device_get(evaluate(ids[..., positions], *args))
            for run, served_run in enumerate(replicates.split(served)):
                blocks_of_runs[run].append(measure(served_run))
        served_runs = [joined(served_blocks, num_scored) for served_blocks in blocks_of_runs]
        return replicates.join(served_runs, np.stack)

    return evaluate_in_blocks


class DeviceStore(Store):
    """Clients' state and data are on the devices."""

    home = "on the devices"
    on_devices = True

    def put(
        self, plan: ExecutionPlan, replicates: Replicates, runs: Sequence[Any], num: int
    ) -> Any:
        """Puts the data of each run on the devices."""
        stacked = replicates.join(runs, np.stack)
        return place(plan, stacked, num, replicates.axis)

    def join_states(
        self, compiled: Compiled, replicates: Replicates, states: Sequence[State]
    ) -> State:
        """Joins the restored states of all runs."""

        def put(leaf: Array, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jax.device_put(leaf, like.sharding)

        if replicates.num == 1:
            if saved_rows.table_of(states[0].clients) is None:
                return states[0]
            return jax.tree.map(put, stacks.in_memory(states[0]), compiled.state)
        return jax.tree.map(put, replicates.join(states), compiled.state)

    def restorable(self, compiled: Compiled, replicates: Replicates) -> State:
        """Returns the shapes, dtypes and locations of one run's state."""
        if replicates.num == 1:
            return compiled.state
        shape = tree.shapes_of_rows(compiled.state)
        return shaped(shape, state_shardings(compiled.plan, shape))

    def lower_segment(
        self,
        experiment: Experiment,
        clients: ClientData,
        plan: ExecutionPlan,
        length: int,
        replicates: Replicates,
    ) -> Lowered:
        """Lowers up to `length` rounds for one dispatch; only one round for peers with a large model stack.

        Other clients read peers' models until the round ends, so the next models need separate memory. In a loop of
        rounds this is a temporary in addition to the models. In a single round it is the output, and the old models are
        freed.
        """
        algorithm = experiment.algorithm(plan)
        problem = experiment.problem
        network = problem.model.network
        one_round = self._round(experiment, plan, replicates)

        # Shapes and locations of what a segment takes.
        init, key = self._init(experiment, plan, replicates)
        shape = jax.eval_shape(init, key, clients)
        shardings = state_shardings(plan, shape, replicates.axis)
        state = shaped(shape, shardings)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        run_key = jax.random.key(experiment.seed)
        round_keys = experiment.keys(run_key, run_key)
        keys = replicates.join([round_keys] * replicates.num)

        # If not all clients take part, the models that clients read are copies anyway.
        is_everyone = problem.cohort_size == problem.num_clients
        is_large = tree.num_bytes(shape.models) > LARGE
        if algorithm.topology.between_clients and is_everyone and is_large:
            segment = _one_round(one_round)
            donated = (3,)
        else:
            _, logged = jax.eval_shape(one_round, keys, number, state, clients)
            segment = _several_rounds(one_round, logged, length)
            donated = (3, 4)

        everywhere = plan.everywhere
        out_shardings = (_split_models(shardings), everywhere, everywhere)
        jitted = Jitted(network, plan, segment, donate_argnums=donated, out_shardings=out_shardings)
        rest, models = _split_models(state)
        program = jitted.lower(keys, number, number, rest, models, clients)
        return Lowered(algorithm, state, program, jitted.frozen)

    def _round(self, experiment: Experiment, plan: ExecutionPlan, replicates: Replicates) -> Round:
        """Returns one round of all runs.

        It is jitted, so that the trace for the record's shape is reused in the loop; so it must not capture frozen
        arrays.
        """
        network = experiment.problem.model.network

        def play(
            algorithm: Algorithm, key: Key, number: Array, state: State, clients: ClientData
        ) -> tuple[State, Record]:
            play_round = make_round(algorithm, plan, experiment.problem.cohort_size)
            return play_round(key, number, state, clients)

        lifted = replicates.lift(experiment, plan, play, (0, None, 0, 0))
        traced = jax.jit(taking(network, lifted), inline=True)

        def one_round(
            key: Key, number: Array, state: State, clients: ClientData
        ) -> tuple[State, Record]:
            return traced(key, number, state, clients, frozen=network.frozen_in_program)

        return one_round

    def _init(
        self, experiment: Experiment, plan: ExecutionPlan, replicates: Replicates
    ) -> tuple[Callable[[Key, ClientData], State], Key]:
        """Returns (key, clients) -> initial state, and a key of its shape."""

        def init(algorithm: Algorithm, key: Key, clients: ClientData) -> State:
            return init_state(algorithm, plan, key, clients)

        lifted = replicates.lift(experiment, plan, init, (0, 0))
        keys = [jax.random.key(experiment.seed)] * replicates.num
        return lifted, replicates.join(keys)

    def compile_segment(
        self,
        experiment: Experiment,
        clients: ClientData,
        plan: ExecutionPlan,
        length: int,
        replicates: Replicates,
    ) -> Compiled:
        """Compiles the rounds of `lower_segment` and, at the same time, the initialization of the state."""
        if isinstance(plan, PythonPlan):
            return _in_python(experiment, clients, plan)
        begin = time.perf_counter()
        lowered = self.lower_segment(experiment, clients, plan, length, replicates)
        state = lowered.state
        frozen = lowered.frozen
        init, key = self._init(experiment, plan, replicates)
        network = experiment.problem.model.network
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        jitted_init = Jitted(network, plan, init, out_shardings=shardings)
        with ThreadPoolExecutor(max_workers=1) as background:
            compiling = background.submit(lowered.program.compile)
            compiled_init = jitted_init.lower(key, clients).compile()
            compiled = compiling.result()
        compile_seconds = time.perf_counter() - begin

        def segment(
            key: Key, start: int, stop: int, state: State, clients: ClientData
        ) -> tuple[State, Record, Array]:
            rest, models = _split_models(state)
            first = np.int32(start)
            end = np.int32(stop)
            runs, records, done = compiled(key, first, end, rest, models, clients, frozen=frozen)
            rest, models = runs
            return _with_models(rest, models), records, done

        return Compiled(
            lowered.algorithm,
            plan,
            state,
            init=functools.partial(compiled_init, frozen=frozen),
            segment=segment,
            memory=memory.memory_plan(compiled),
            compile_seconds=compile_seconds,
            making=memory.memory_plan(compiled_init),
        )

    def make_evaluation(
        self, experiments: Sequence[Experiment], compiled: Compiled, replicates: Replicates
    ) -> Callable:
        """Evaluates all clients at once, or some in blocks if only some are scored, or by metrics on the host."""
        experiment = experiments[0]
        plan = compiled.plan
        problem = experiment.problem._replace(plan=plan)
        num_clients = problem.num_clients
        on_host = bool(experiment.metrics)
        all_at_once = experiment.scored is None and not on_host

        def score(
            algorithm: Algorithm,
            ids: Array | None,
            key: Key,
            state: State,
            clients: ClientData,
            splits: dict[str, Split],
            trained: Array | None,
        ) -> Served:
            use = scores(problem, algorithm, outputs=on_host)
            if ids is not None:
                return serve_some(algorithm, plan, use, key, state, ids, clients, splits, trained)
            everyone = jnp.arange(num_clients, dtype=jnp.int32)
            return serve(
                algorithm, plan, use, key, state, everyone, clients, splits, trained=trained
            )

        ids_axis = None if all_at_once else 0
        lifted = replicates.lift(experiment, plan, score, (ids_axis, 0, 0, 0, 0, 0))
        if isinstance(plan, PythonPlan):
            evaluate = calling(lifted)
        else:
            network = problem.model.network
            evaluate = Jitted(network, plan, lifted, out_shardings=plan.everywhere)

        if all_at_once:
            return functools.partial(evaluate, None)
        scored = [scored_ids(run) for run in experiments]
        ids = replicates.join(scored, np.stack)
        if not on_host:
            return functools.partial(evaluate, ids)
        return _measured_in_blocks(experiment, replicates, evaluate, ids)

    def serve(
        self, experiment: Experiment, build: Build, plan: ExecutionPlan, use: UseOf, *args: Any
    ) -> PyTree:
        """Serves these clients at once."""
        algorithm = build(OWN)
        ids, key, state, clients, trained = args
        some = functools.partial(serve_some, algorithm, plan, use(algorithm))
        network = experiment.problem.model.network
        jitted = Jitted(network, plan, some, out_shardings=plan.everywhere)
        served = jitted(key, state, ids, clients, (), trained)
        return jax.device_get(served.outputs)
