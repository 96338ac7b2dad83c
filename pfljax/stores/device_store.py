"""Client store on the devices: several rounds run in one dispatch, evaluation in another."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.held import taking
from pfljax.contract.types import Algorithm, Array, ClientData, Key, PyTree, State
from pfljax.evaluation import measures
from pfljax.exchange.in_python import PythonPlan, calling
from pfljax.exchange.lifting import init as init_state
from pfljax.exchange.lifting import serve, serve_some
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import Record, make_round
from pfljax.run import memory
from pfljax.run.compiled import Compiled, Jitted, Lowered, shaped, state_shardings
from pfljax.run.experiment import OWN, Experiment
from pfljax.run.replicates import Replicates
from pfljax.stores.serving import BLOCK_BYTES, blocks, joined, measured, scores
from pfljax.stores.store import Build, Store, UseOf

LARGE = 32 << 20  # bytes; with a model stack this large, a dispatch is one round


def _in_python(experiment: Experiment, clients: ClientData, plan: PythonPlan) -> Compiled:
    """Compiles nothing: rounds run in Python, on concrete arrays."""
    algorithm = experiment.algorithm(plan)
    problem = experiment.problem
    one_round = calling(make_round(algorithm, plan, problem.cohort_size))
    init = functools.partial(init_state, algorithm, plan)
    shape = jax.eval_shape(init, jax.random.key(0), clients)

    def segment(key, start, stop, state, clients):
        records: list[Record] = []
        for number in range(int(start), int(stop)):
            state, record = one_round(key, np.int32(number), state, clients)
            records.append(record)
            if record.diverged >= 0:
                break
        return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *records), len(records)

    state = shaped(shape, state_shardings(plan, shape))
    nothing = memory.MemoryPlan(0, 0, 0, memory.device_limit())
    return Compiled(algorithm, plan, state, calling(init), segment, nothing, 0.0)


def _apart(state: State) -> tuple[State, Any]:
    """Splits a state into the rest and its models.

    The rest comes first because JAX reuses donated memory for the first outputs of the same shape, and Adam's moments
    have the shapes of the models.
    """
    models = state.server.models, state.clients.model
    return _together(state, ((), ())), models


def _together(rest: State, models: Any) -> State:
    """Undoes `_apart`."""
    of_server, of_clients = models
    server = rest.server._replace(models=of_server)
    clients = rest.clients._replace(model=of_clients)
    return rest._replace(server=server, clients=clients)


def _one_round(one_round: Callable) -> Callable:
    def segment(key, start, stop, rest, models, clients):
        state, record = one_round(key, start, _together(rest, models), clients)
        return _apart(state), tree.stack_one(record), jnp.ones((), jnp.int32)

    return segment


def _several_rounds(one_round: Callable, logged: Record, length: int) -> Callable:
    """Runs rounds from `start` to `stop`, at most `length`. Stops once every run has diverged."""

    def segment(key, start, stop, rest, models, clients):
        def body(carry):
            done, state, records = carry
            state, record = one_round(key, start + done, state, clients)
            records = jax.tree.map(lambda all, one: all.at[done].set(one), records, record)
            return done + 1, state, records

        def proceeds(carry):
            done, _, records = carry
            return (start + done < stop) & (records.diverged[jnp.maximum(done - 1, 0)] < 0).any()

        records = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), logged)
        records = records._replace(diverged=jnp.full_like(records.diverged, -1))
        state = _together(rest, models)
        done, state, records = jax.lax.while_loop(
            proceeds, body, (jnp.zeros((), jnp.int32), state, records)
        )
        return _apart(state), records, done

    return segment


class DeviceStore(Store):
    """Clients' state and data are on the devices."""

    home = "on the devices"
    on_devices = True

    def put(
        self, plan: ExecutionPlan, replicates: Replicates, parts: Sequence[Any], num: int
    ) -> Any:
        """Puts the data of each run on the devices."""
        return place(plan, replicates.join(parts, np.stack), num, replicates.axis)

    def join_states(
        self, compiled: Compiled, replicates: Replicates, states: Sequence[State]
    ) -> State:
        """Joins the restored states of all runs."""
        if replicates.num == 1:
            return states[0]
        return jax.tree.map(
            lambda leaf, to: jax.device_put(leaf, to.sharding),
            replicates.join(states),
            compiled.state,
        )

    def restorable(self, compiled: Compiled, replicates: Replicates) -> State:
        """Returns the shapes, dtypes and locations of one run's state."""
        if replicates.num == 1:
            return compiled.state
        shape = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), compiled.state
        )
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

        def play(algorithm, *args):
            return make_round(algorithm, plan, problem.cohort_size)(*args)

        # Jitted, so that the trace for the record's shape is reused in the loop; so it must not capture frozen arrays.
        network = problem.model.network
        lifted = taking(network, replicates.lift(experiment, plan, play, (0, None, 0, 0)))
        traced = jax.jit(lifted, inline=True)

        def one_round(*args):
            return traced(*args, frozen=network.held)

        init, key = self._init(experiment, plan, replicates)
        keys = replicates.join(
            [experiment.keys(*[jax.random.key(experiment.seed)] * 2)] * replicates.num
        )
        shape = jax.eval_shape(init, key, clients)
        shardings = state_shardings(plan, shape, replicates.axis)
        state = shaped(shape, shardings)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        # otherwise the models that clients read are copies
        everyone = problem.cohort_size == problem.num_clients
        single = (
            algorithm.topology.between_clients and everyone and tree.num_bytes(shape.models) > LARGE
        )
        if single:
            segment = _one_round(one_round)
        else:
            segment = _several_rounds(
                one_round, jax.eval_shape(one_round, keys, number, state, clients)[1], length
            )
        everywhere = plan.everywhere
        jitted = Jitted(
            network,
            plan,
            segment,
            donate_argnums=(3,) if single else (3, 4),
            out_shardings=(_apart(shardings), everywhere, everywhere),
        )
        program = jitted.lower(keys, number, number, *_apart(state), clients)
        return Lowered(algorithm, state, program, jitted.frozen)

    def _init(
        self, experiment: Experiment, plan: ExecutionPlan, replicates: Replicates
    ) -> tuple[Callable, Key]:
        """Returns (key, clients) -> initial state, and a key of its shape."""
        init = replicates.lift(
            experiment, plan, lambda algorithm, *args: init_state(algorithm, plan, *args), (0, 0)
        )
        return init, replicates.join([jax.random.key(experiment.seed)] * replicates.num)

    def compile_segment(
        self,
        experiment: Experiment,
        clients: ClientData,
        plan: ExecutionPlan,
        length: int,
        replicates: Replicates,
    ) -> Compiled:
        """Compiles the rounds of `lower_segment`, and the initialization of the state."""
        if isinstance(plan, PythonPlan):
            return _in_python(experiment, clients, plan)
        begin = time.perf_counter()
        algorithm, state, program, frozen, _ = self.lower_segment(
            experiment, clients, plan, length, replicates
        )
        compiled = program.compile()

        def dispatch(key, start, stop, state, clients):
            args = key, np.int32(start), np.int32(stop), *_apart(state), clients
            (rest, models), records, done = compiled(*args, frozen=frozen)
            return _together(rest, models), records, done

        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        init, key = self._init(experiment, plan, replicates)
        init = (
            Jitted(experiment.problem.model.network, plan, init, out_shardings=shardings)
            .lower(key, clients)
            .compile()
        )
        seconds = time.perf_counter() - begin
        needs = memory.of_compiled(compiled), memory.of_compiled(init)
        made = functools.partial(init, frozen=frozen)
        return Compiled(algorithm, plan, state, made, dispatch, needs[0], seconds, needs[1])

    def make_evaluation(
        self, experiments: Sequence[Experiment], compiled: Compiled, replicates: Replicates
    ) -> Callable:
        """Evaluates all clients at once, or some in blocks if only some are scored, or by metrics on the host."""
        experiment = experiments[0]
        plan = compiled.plan
        problem = experiment.problem._replace(plan=compiled.plan)
        metrics = experiment.metrics
        num = experiment.problem.num_clients
        parts = experiment.scored is not None or bool(metrics)  # otherwise all clients at once

        def score(
            algorithm: Algorithm,
            ids: Array | None,
            key: Key,
            state: State,
            clients: ClientData,
            splits: Any,
        ):
            use = scores(problem, algorithm, bool(metrics))
            if ids is not None:
                return serve_some(algorithm, plan, use, key, state, ids, clients, splits)
            return serve(
                algorithm, plan, use, key, state, jnp.arange(num, dtype=jnp.int32), clients, splits
            )

        of_all = replicates.lift(experiment, plan, score, (0 if parts else None, 0, 0, 0, 0))
        compiles = functools.partial(
            Jitted, problem.model.network, plan, out_shardings=plan.everywhere
        )
        run = calling(of_all) if isinstance(plan, PythonPlan) else compiles(of_all)
        if not parts:
            return functools.partial(run, None)
        everyone = np.arange(num, dtype=np.int32)
        ids = replicates.join(
            [everyone if each.scored is None else each.scored for each in experiments], np.stack
        )
        if not metrics:
            return functools.partial(run, ids)
        examples = max(
            getattr(experiment.federation, part).y.shape[1]
            for part in ("train", "validation", "test")
        )
        task = problem.model.task
        scored = ids.shape[-1]
        size = BLOCK_BYTES // max(measures.row_bytes(problem, examples), 1)

        def in_blocks(*args):
            found = []
            for places in blocks(scored, size):
                of_runs = replicates.split(jax.device_get(run(ids[..., places], *args)))
                found.append(
                    [
                        served._replace(found=measured(metrics, served.found, task))
                        for served in of_runs
                    ]
                )
            return replicates.join(
                [joined(of_run, scored) for of_run in zip(*found, strict=True)], np.stack
            )

        return in_blocks

    def serve(
        self, experiment: Experiment, build: Build, plan: ExecutionPlan, use: UseOf, *args: Any
    ) -> PyTree:
        """Serves these clients at once."""
        algorithm = build(OWN)
        (ids, key, state, clients) = args
        some = functools.partial(serve_some, algorithm, plan, use(algorithm))
        run = Jitted(experiment.problem.model.network, plan, some, out_shardings=plan.everywhere)
        return jax.device_get(run(key, state, ids, clients).found)
