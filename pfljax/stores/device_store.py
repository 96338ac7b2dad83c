"""Client store on the devices: several rounds run in one dispatch, evaluation in another."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.types import Algorithm, Array, ClientData, Key, Predictor, Split, State
from pfljax.evaluation import measures
from pfljax.evaluation import metrics as evaluation
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import Record, join_state, make_round, split_state
from pfljax.stores import memory
from pfljax.stores.compiled import Compiled, is_private_mixture, shaped, state_shardings, tuned
from pfljax.stores.experiment import Experiment
from pfljax.stores.replicates import Replicates

LARGE = 32 << 20  # bytes; with a model stack this large, a dispatch is one round


def put(plan: ExecutionPlan, replicates: Replicates, parts: Sequence[Any], num: int) -> Any:
    """Puts the data of each run on the devices."""
    return place(plan, replicates.join(parts, np.stack), num, replicates.axis)


def join_states(compiled: Compiled, replicates: Replicates, states: Sequence[State]) -> State:
    """Joins the restored states of all runs."""
    if replicates.num == 1:
        return states[0]
    return jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), replicates.join(states), compiled.state)


def restorable(compiled: Compiled, replicates: Replicates) -> State:
    """Returns the shapes, dtypes and locations of one run's state."""
    if replicates.num == 1:
        return compiled.state
    shape = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), compiled.state)
    return shaped(shape, state_shardings(compiled.algorithm, compiled.plan, shape))


def compile_segment(
    experiment: Experiment, clients: ClientData, plan: ExecutionPlan, length: int, replicates: Replicates
) -> Compiled:
    """Compiles up to `length` rounds into one dispatch; only one round for peers with a large model stack.

    Other clients read peers' models until the round ends, so the next models need separate memory. In a loop of rounds
    this is a temporary in addition to the models. In a single round it is the output, and the old models are freed.

    Args:
        experiment: The run.
        clients: Data of all replicates, on the devices.
        plan: How clients are mapped to devices.
        length: Maximum number of rounds per dispatch.
        replicates: The runs.
    """
    begin = time.perf_counter()
    algorithm, problem = experiment.algorithm(plan), experiment.problem

    def one_round(algorithm, *args):
        return make_round(algorithm, plan, problem.num_clients, problem.cohort_size)(*args)

    # Jitted, so that the trace for the record's shape is reused in the loop.
    one_round = jax.jit(replicates.lift(experiment, plan, one_round, (0, None, 0, 0)), inline=True)
    init = replicates.lift(experiment, plan, lambda algorithm, *args: algorithm.init(*args), (0, 0))
    key = jax.random.key(experiment.seed)
    keys = replicates.join([experiment.keys(key, key)] * replicates.num)
    key = replicates.join([key] * replicates.num)
    shape = jax.eval_shape(init, key, clients)
    shardings = state_shardings(algorithm, plan, shape, replicates.axis)
    state = shaped(shape, shardings)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    everyone = problem.cohort_size == problem.num_clients  # otherwise the models that clients read are copies
    single = algorithm.topology in ("peers", "push") and everyone and tree.num_bytes(shape.models) > LARGE
    if single:
        segment = _one_round(one_round)
    else:
        segment = _several_rounds(one_round, jax.eval_shape(one_round, keys, number, state, clients)[1], length)
    everywhere = plan.everywhere
    jitted = jax.jit(
        segment,
        donate_argnums=(3,) if single else (3, 4),
        out_shardings=(_apart(shardings), everywhere, everywhere),
    )
    compiled = jitted.lower(keys, number, number, *_apart(state), clients).compile()

    def dispatch(key, start, stop, state, clients):
        (rest, models), records, done = compiled(key, np.int32(start), np.int32(stop), *_apart(state), clients)
        return rest._replace(models=models), records, done

    init = jax.jit(init, out_shardings=shardings).lower(key, clients).compile()
    seconds = time.perf_counter() - begin
    needs = memory.of_compiled(compiled), memory.of_compiled(init)
    return Compiled(algorithm, plan, state, init, dispatch, needs[0], seconds, needs[1])


def _apart(state: State) -> tuple[State, Any]:
    """Splits a state into the rest and its models.

    The rest comes first because JAX reuses donated memory for the first outputs of the same shape, and Adam's moments
    have the shapes of the models.
    """
    return state._replace(models=()), state.models


def _one_round(one_round: Callable) -> Callable:
    def segment(key, start, stop, rest, models, clients):
        state, record = one_round(key, start, rest._replace(models=models), clients)
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
        state = rest._replace(models=models)
        done, state, records = jax.lax.while_loop(proceeds, body, (jnp.zeros((), jnp.int32), state, records))
        return _apart(state), records, done

    return segment


def make_evaluation(experiments: Sequence[Experiment], compiled: Compiled, replicates: Replicates) -> Callable:
    """Returns a function (key, state, clients, splits) -> (metrics by split and name, who uses whom)."""
    experiment = experiments[0]
    plan, model = compiled.plan, experiment.problem.model
    out_shardings: tuple = (plan.everywhere, plan.everywhere, *[None] * bool(experiment.metrics))
    if experiment.scored is not None:
        ids = replicates.join([each.scored for each in experiments], np.stack)
        part = functools.partial(_score_part, plan, experiment)
        part = jax.jit(replicates.lift(experiment, plan, part, (0, 0, 0, 0, 0), part=0), out_shardings=out_shardings)
        return _with_measures(experiment, compiled, replicates, functools.partial(part, ids), ids)

    def score(algorithm: Algorithm, key: Key, state: State, clients: ClientData, splits: dict[str, Split]):
        predictor = algorithm.predictor(key, state, clients)
        final = tuned(algorithm, key, predictor, clients)
        metrics = {name: evaluation.evaluate(plan, model, final, split) for name, split in splits.items()}
        if algorithm.report.collaboration:
            return metrics, algorithm.report.collaboration(state), *[final] * bool(experiment.metrics)
        index = predictor.index
        if is_private_mixture(predictor):
            index = jnp.broadcast_to(jnp.arange(index.shape[1], dtype=jnp.int32), index.shape)
        return metrics, {"index": index, "weights": predictor.weights}, *[final] * bool(experiment.metrics)

    score = jax.jit(replicates.lift(experiment, plan, score, (0, 0, 0, 0)), out_shardings=out_shardings)
    ids = replicates.join([np.arange(experiment.problem.num_clients, dtype=np.int32)] * replicates.num, np.stack)
    return _with_measures(experiment, compiled, replicates, score, ids)


def _with_measures(
    experiment: Experiment, compiled: Compiled, replicates: Replicates, score: Callable, ids: np.ndarray
) -> Callable:
    """Adds the run's own metrics to a compiled evaluation.

    Args:
        experiment: One of the runs.
        compiled: Their compiled functions.
        replicates: The runs.
        score: Returns metrics, who uses whom and, if there are own metrics, the predictor, whose clients are `ids`.
        ids: The scored clients (n,) of each run.
    """
    plan, model, metrics = compiled.plan, experiment.problem.model, experiment.metrics
    one = lambda algorithm, *args: measures.outputs_of_block(plan, model, *args)
    outputs = jax.jit(replicates.lift(experiment, plan, one, (None, 0, 0, 0)), out_shardings=plan.everywhere)

    def of_split(predictor: Predictor, split: Split, num_examples: int) -> dict[str, np.ndarray]:
        parts = []
        for places, real in measures.blocks(ids.shape[-1], measures.row_bytes(model, num_examples)):
            found = jax.device_get(outputs(places, ids[..., places], predictor, split))
            of_runs = [measures.measured(metrics, each) for each in replicates.split(found)]
            parts.append(jax.tree.map(lambda leaf, real=real: leaf[..., :real], replicates.join(of_runs, np.stack)))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=-1), *parts)

    def evaluate(*args):
        found, used, predictor = score(*args)
        sizes = {name: getattr(experiment.federation, name).y.shape[1] for name in found}
        own = {name: of_split(predictor, args[-1][name], size) for name, size in sizes.items()}
        return {name: scores | own[name] for name, scores in found.items()}, used

    return evaluate if metrics else score


def _score_part(
    plan: ExecutionPlan,
    experiment: Experiment,
    algorithm: Algorithm,
    ids: Array,
    key: Key,
    state: State,
    clients: ClientData,
    splits: dict[str, Split],
):
    """Like `make_evaluation`'s function, but only for clients `ids` (n,), from their rows and data."""
    rows, rest = split_state(algorithm, state)
    rows, clients, splits = plan.take_rows((rows, clients, splits), ids)
    part = join_state(algorithm, rows, rest)
    predictor = algorithm.predictor(key, part, clients)
    index, collaboration = predictor.index, algorithm.report.collaboration
    if is_private_mixture(predictor):
        index = jnp.broadcast_to(jnp.arange(index.shape[1], dtype=jnp.int32), index.shape)
    elif predictor.topology == "own":
        index = ids[:, None]
    used = collaboration(part) if collaboration else {"index": index, "weights": predictor.weights}
    if predictor.topology == "peers":  # each client's collaborators, stacked like models of its own
        places = jnp.arange(predictor.index.size, dtype=jnp.int32).reshape(predictor.index.shape)
        models = plan.take_rows(state.models, predictor.index.reshape(-1))
        predictor = dataclasses.replace(predictor, models=models, index=places, topology="own")
    final = tuned(algorithm, key, predictor, clients)
    model = experiment.problem.model
    metrics = {name: evaluation.evaluate(plan, model, final, split) for name, split in splits.items()}
    return metrics, used, *[final] * bool(experiment.metrics)
