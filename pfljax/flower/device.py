"""One client's update and prediction as a serialized program with its weights, for devices that have JAX alone."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Array,
    ClientData,
    Cohort,
    First,
    Mixture,
    Params,
    PyTree,
    Split,
    Start,
    State,
    Topology,
)
from pfljax.exchange.rounds import UPDATE, WORK, round_key
from pfljax.flower.deployment import PREDICTIONS, ROUNDS, Deployment, Rows
from pfljax.flower.wire import int32, names_of
from pfljax.run.experiment import Experiment
from pfljax.stores import serving

ACCEPTED = "accepted: methods whose clients receive the server's models, or keep their own"


class Holding(NamedTuple):
    """What a device holds.

    Attributes:
        models: The models that it received, leaves (J, ...).
        server: What it reads of the server's state; zeros otherwise.
        row: What the client keeps.
    """

    models: Params
    server: PyTree
    row: PyTree


def stack(values: PyTree) -> PyTree:
    """A client's arrays as a stack of one."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], values)


def serialized(experiment: Experiment, state: State, number: int, rows: int, batch: int) -> bytes:
    """The program of one client, as `jax.export` serializes it.

    Args:
        experiment: The run.
        state: Its final state.
        number: The client's number.
        rows: Number of rows for training examples.
        batch: Number of examples to predict at a time.

    Raises:
        ArgumentError: if the client cannot be told apart from the others, or needs a secret.
    """
    optional.load("flatbuffers", "path")
    if experiment.noise_seeds:
        text = "its noise is drawn from a secret, which no file has; accepted: a run without noise"
        raise ArgumentError("path", f"cannot be written: {text}")
    deployment = Deployment(experiment, Rows(rows, experiment.federation.validation.y.shape[1]))
    if deployment.topology.between_clients:
        text = f"{experiment.name} predicts with other clients' models"
        raise ArgumentError("path", f"cannot be written: {text}; {ACCEPTED}")
    if deployment.algorithm.exchanges > 1:
        text = f"{experiment.name} exchanges messages several times in a round"
        raise ArgumentError("path", f"cannot be written: {text}; {ACCEPTED} once a round")
    client = int32(number)
    done = int32(state.round)

    # What the client received last.
    row = jax.tree.map(lambda leaf: jnp.asarray(leaf)[number], state.clients.row)
    server = state.server.state
    index = np.zeros((1,), np.int32)
    if deployment.topology is Topology.OWN:
        models = jax.tree.map(lambda leaf: jnp.asarray(leaf)[number][None], state.clients.model)
    else:
        ids = jnp.arange(deployment.problem.cohort_size, dtype=jnp.int32)
        cohort = Cohort(ids, everyone=len(ids) == deployment.problem.num_clients)
        key = deployment.key(ROUNDS)
        index = np.asarray(deployment.download(key, client, done, server, row, cohort))
        models = jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], state.server.models)
        size = int32(experiment.federation.train.size[number])
        predict_key = deployment.key(PREDICTIONS, None, int(done))
        mixture = deployment.select(predict_key, client, done, server, row, size)
        if not np.isin(np.asarray(mixture.index), index).all():
            text = f"{experiment.name} predicts with other models than it trains"
            raise ArgumentError("path", f"cannot be written: {text}")
    travels = deployment.travels
    needed = jax.tree.map(lambda a, b: a or b, travels.work, travels.predict)
    reads = jax.tree.map(
        lambda is_read, leaf: leaf if is_read else jnp.zeros_like(leaf), needed, server
    )
    weights = Holding(models, reads, row)
    names = names_of(weights)
    leaves, structure = jax.tree.flatten(weights)
    problem = deployment.problem
    scaling = experiment.federation.scaling

    def scaled(x: Array) -> Array:
        if scaling is None or problem.model.scaling is not None:
            return x
        mean = np.asarray(scaling.mean, np.float32)
        return (x.astype(jnp.float32) - mean) / np.asarray(scaling.std, np.float32)

    def program(
        holding: dict[str, Array],
        started: Array,
        round_number: Array,
        x: Array,
        y: Array,
        size: Array,
        inputs: Array,
    ) -> tuple[dict[str, Array], dict[str, Array], Array]:
        # The weights in the file, unless the device hands over what it holds.
        now = [
            jnp.where(started, holding[name], leaf)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        current: Holding = structure.unflatten(now)
        train = Split(scaled(x)[None], y[None], size[None])
        validation = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), deployment.client_shapes.validation
        )
        data = ClientData(train, validation)
        rounds = deployment.key(ROUNDS)
        key = round_key(rounds, WORK, round_number)
        step = jnp.zeros((), jnp.int32)
        output = deployment.trace_work(
            key,
            client,
            round_number,
            step,
            index,
            current.models,
            current.server,
            current.row,
            data,
        )
        trains = size > 0
        row = jax.tree.map(lambda new, old: jnp.where(trains, new, old), output.row, current.row)
        models = current.models
        if deployment.topology is Topology.OWN:
            update_key = jax.random.fold_in(round_key(rounds, UPDATE, round_number), 0)
            own = State(Start(state=current.server), First(stack(row), models), round_number)
            outputs = stack(output._replace(row=(), opt_state=()))
            updated, _ = deployment.trace_update(
                update_key, own, outputs, jnp.zeros((1, 1), jnp.int32)
            )
            models = jax.tree.map(
                lambda new, old: jnp.where(trains, new, old), updated.clients.model, models
            )

        # What the client predicts with after that.
        predict_key = deployment.key(PREDICTIONS)
        mixture = deployment.trace_select(
            predict_key, client, round_number + 1, current.server, row, size
        )
        predicting = models
        if deployment.topology is not Topology.OWN:
            positions = jnp.argmax(mixture.index[:, None] == index, axis=1)
            predicting = jax.tree.map(lambda leaf: leaf[positions], models)
        predictions = deployment.trace_serve(
            serving.outputs(problem, deployment.algorithm, scaled(inputs)),
            predict_key,
            client,
            round_number + 1,
            predicting,
            current.server,
            row,
            data,
            (),
            mixture,
            None,
        )[0]
        following = Holding(models, current.server, row)
        sent = {} if deployment.topology is Topology.OWN else output.upload
        upload = dict(zip(names_of(sent), jax.tree.leaves(sent), strict=True))
        return dict(zip(names, jax.tree.leaves(following), strict=True)), upload, predictions

    def predicted(data: ClientData, mixture: Mixture) -> PyTree:
        inputs = jnp.zeros(deployment.client_shapes.train.x.shape[1:])[:1]
        return deployment.trace_serve(
            serving.outputs(problem, deployment.algorithm, inputs),
            deployment.key(PREDICTIONS),
            client,
            done,
            models,
            reads,
            row,
            data,
            (),
            mixture,
            None,
        )

    read = deployment.used(predicted, (deployment.client_shapes, deployment.shapes.mixture))[0]
    if deployment.reads_validation or any(jax.tree.leaves(read.validation)):
        text = f"{experiment.name} reads validation examples, which the program has no place for"
        raise ArgumentError("path", f"cannot be written: {text}")

    federation = experiment.federation
    x_shape = federation.inputs
    if not hasattr(x_shape, "shape"):
        raise ArgumentError("path", "cannot be written: examples of several arrays")
    y = federation.train.y
    shapes = (
        {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for name, leaf in zip(names, leaves, strict=True)
        },
        jax.ShapeDtypeStruct((), np.bool_),
        jax.ShapeDtypeStruct((), np.int32),
        jax.ShapeDtypeStruct((rows, *x_shape.shape), x_shape.dtype),
        jax.ShapeDtypeStruct((rows, *y.shape[2:]), y.dtype),
        jax.ShapeDtypeStruct((), np.int32),
        jax.ShapeDtypeStruct((batch, *x_shape.shape), x_shape.dtype),
    )
    return bytes(jax.export.export(jax.jit(program))(*shapes).serialize())
