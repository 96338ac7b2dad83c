"""A run's compiled functions: initial state, segments of rounds, evaluation; and where everything lives."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.core import tree
from pfljax.core.types import Algorithm, ClientData, Key, Predictor, Split, State
from pfljax.data import Federation
from pfljax.engine.plan import ExecutionPlan
from pfljax.engine.rounds import by_client, make_round
from pfljax.evaluation import metrics as evaluation
from pfljax.local.solver import Solver
from pfljax.models import Model
from pfljax.training import memory


@dataclasses.dataclass(frozen=True)
class Setup:
    """One run.

    Attributes:
        name: The algorithm's registered name.
        make: ExecutionPlan -> Algorithm; called again with a smaller chunk if the first does not fit.
        model: The clients' network.
        solver: How they train it.
        federation: The clients that train.
        unseen: Clients kept out of training, or None.
        plan: How clients are mapped.
        rounds: R.
        cohort_size: S.
        eval_every: Rounds between evaluations.
        checkpoint_every: Least rounds between checkpoints, which are made after evaluations.
        seed: Decides initial models, cohorts, batches and sampling.
        config: For config.json: flags, versions, device, commit, command.
        client_store: Where clients' rows and data are between rounds: on the "device" or the "host".
        profile: Folder for a trace of a few rounds, or None.
    """

    name: str
    make: Callable[[ExecutionPlan], Algorithm]
    model: Model
    solver: Solver
    federation: Federation
    unseen: Federation | None
    plan: ExecutionPlan
    rounds: int
    cohort_size: int
    eval_every: int
    checkpoint_every: int
    seed: int
    config: dict
    client_store: str = "device"
    profile: Path | None = None

    @property
    def steps(self) -> np.ndarray:
        """(K,) steps that each client takes in a round; all alike where only shapes of the data are known."""
        size, n_max = self.federation.train.size, self.federation.train.y.shape[1]
        size = size if isinstance(size, np.ndarray) else np.full(size.shape, n_max)
        return np.asarray(self.solver.num_steps(size, n_max))


@dataclasses.dataclass
class Compiled:
    """A run's compiled functions, and where its state lives."""

    algorithm: Algorithm
    plan: ExecutionPlan
    state: Any  # a State of ShapeDtypeStructs with shardings
    init: Callable[[Key, ClientData], State]
    segment: Callable  # (key, start, stop, state, clients) -> (state, stacked records, rounds done)
    memory: memory.MemoryPlan
    compile_seconds: float
    making: memory.MemoryPlan | None = None  # of the initial state


def state_shardings(algorithm: Algorithm, plan: ExecutionPlan, state: State, axis: int = 0) -> State:
    """Rows (at `axis`) of clients, and of models where they are the clients' own, are spread over the devices."""
    parts = [
        jax.tree.map(lambda leaf, rows=rows: plan.sharding(leaf, by_rows=rows, axis=axis), part)
        for part, rows in zip(state, by_client(algorithm), strict=True)
    ]
    return State(*parts)


LARGE = 32 << 20  # bytes of a model stack from which on a dispatch is one round


def lifted(plan: ExecutionPlan, fn: Callable, replicates: int, in_axes: Any = 0) -> Callable:
    """`fn` for one run, or for as many `replicates` at once."""
    return plan.over_replicates(fn, in_axes) if replicates else fn


def compile_segment(setup: Setup, clients: ClientData, plan: ExecutionPlan, replicates: int = 0) -> Compiled:
    """Compiles up to `eval_every` rounds into one dispatch, or a single one of peers with a large model stack.

    Peers' models are read by others until the round ends, so that the next ones need memory of their own. In a loop
    of rounds that is a temporary beside the models; for a single round it is the output, and the old models are freed.

    Args:
        setup: The run.
        clients: Its data; with `replicates` stacked, and everything else then too.
        plan: How clients are mapped.
        replicates: Runs in one kernel; 0: one, without an axis of its own.
    """
    begin = time.perf_counter()
    algorithm = setup.make(plan)
    num_clients = setup.federation.num_clients
    one_round = make_round(algorithm, plan, num_clients, setup.cohort_size)
    one_round = lifted(plan, one_round, replicates, in_axes=(0, None, 0, 0))
    init = lifted(plan, algorithm.init, replicates)
    key = jax.random.key(setup.seed)
    key = jnp.stack([key] * replicates) if replicates else key
    shape = jax.eval_shape(init, key, clients)
    shardings = state_shardings(algorithm, plan, shape, axis=int(replicates > 0))
    state = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shape, shardings)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    logged = jax.eval_shape(one_round, key, number, state, clients)[1]
    everyone = setup.cohort_size == num_clients  # else the others' models that are read are copies, the cohort's
    single = algorithm.topology == "peers" and everyone and tree.num_bytes(shape.models) > LARGE
    length = 1 if single else setup.eval_every

    def segment(key, start, stop, rest, models, clients):
        state = rest._replace(models=models)
        if single:
            state, record = one_round(key, start, state, clients)
            return split(state), tree.stack_one(record), jnp.ones((), jnp.int32)

        def body(carry):
            done, state, records = carry
            state, record = one_round(key, start + done, state, clients)
            records = jax.tree.map(lambda all, one: all.at[done].set(one), records, record)
            return done + 1, state, records

        def proceeds(carry):
            done, _, records = carry
            return (start + done < stop) & (records.diverged[jnp.maximum(done - 1, 0)] < 0).all()

        records = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), logged)
        records = records._replace(diverged=jnp.full_like(records.diverged, -1))
        done, state, records = jax.lax.while_loop(proceeds, body, (jnp.zeros((), jnp.int32), state, records))
        return split(state), records, done

    # The rest first: JAX gives donated memory to the first outputs of the same shape, and Adam's moments have the
    # models' shapes.
    def split(state):
        return state._replace(models=()), state.models

    everywhere = plan.everywhere
    jitted = jax.jit(
        segment,
        donate_argnums=(3,) if single else (3, 4),
        out_shardings=(split(shardings), everywhere, everywhere),
    )
    compiled = jitted.lower(key, number, number, *split(state), clients).compile()

    def dispatch(key, start, stop, state, clients):
        (rest, models), records, done = compiled(key, np.int32(start), np.int32(stop), *split(state), clients)
        return rest._replace(models=models), records, done

    init = jax.jit(init, out_shardings=shardings).lower(key, clients).compile()
    seconds = time.perf_counter() - begin
    needs = memory.of_compiled(compiled), memory.of_compiled(init)
    return Compiled(algorithm, plan, state, init, dispatch, needs[0], seconds, needs[1])


def place(plan: ExecutionPlan, stacked: Any, num: int, axis: int = 0) -> Any:
    """Puts stacked host arrays on the devices, the rows (at `axis`) of `num` clients spread over them."""
    return jax.tree.map(lambda leaf: plan.place(leaf, num, axis), stacked)


def make_evaluation(setup: Setup, algorithm: Algorithm, plan: ExecutionPlan, replicates: int = 0) -> Callable:
    """(key, state, clients, splits) -> (metrics by split and name, who uses whom), in one compiled call."""

    def score(key: Key, state: State, clients: ClientData, splits: dict[str, Split]):
        predictor = algorithm.predictor(key, state, clients)
        final = tuned(algorithm, key, predictor, clients)
        metrics = {name: evaluation.evaluate(plan, setup.model, final, split) for name, split in splits.items()}
        index = predictor.index
        if is_private_mixture(predictor):
            index = jnp.broadcast_to(jnp.arange(index.shape[1], dtype=jnp.int32), index.shape)
        collaboration = {"index": index, "weights": predictor.weights}
        return metrics, algorithm.collaboration[1](state) if algorithm.collaboration else collaboration

    return jax.jit(lifted(plan, score, replicates), out_shardings=plan.everywhere)


def tuned(algorithm: Algorithm, key: Key, predictor: Predictor, clients: ClientData) -> Predictor:
    """What is evaluated in the predictor's place."""
    return algorithm.tune(jax.random.fold_in(key, 1), predictor, clients) if algorithm.tune else predictor


def is_private_mixture(predictor: Predictor) -> bool:
    """Whether clients mix several models of their own; weights are then recorded by the models' places, 0 to J - 1."""
    return predictor.topology == "own" and predictor.index.shape[-1] > 1
