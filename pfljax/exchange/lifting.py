"""A method's functions of one client, mapped over clients: what they begin with, receive and predict with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    First,
    Key,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.views import read, view

TUNE = 1  # folded into a prediction's key for fine-tuning

Use = Callable[[Prediction, Any], PyTree]
F = TypeVar("F", bound=Callable)


def in_precision(algorithm: Algorithm, fn: F) -> F:
    """A function whose float32 products are traced with the precision of an algorithm's run."""
    precision = algorithm.engine.matmul_precision
    if precision is None:
        return fn

    @functools.wraps(fn)
    def traced(*args: Any, **options: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return fn(*args, **options)

    return cast(F, traced)


def precisely(fn: F) -> F:
    """As `in_precision`, for a function whose first argument is the algorithm."""

    @functools.wraps(fn)
    def called(algorithm: Algorithm, *args: Any, **options: Any) -> Any:
        traced = in_precision(algorithm, fn)
        return traced(algorithm, *args, **options)

    return cast(F, called)


def init(algorithm: Algorithm, plan: ExecutionPlan, key: Key, clients: ClientData) -> State:
    """The initial state of all K clients and the server."""
    start = begin(algorithm, key, clients)
    ids = jnp.arange(tree.num_rows(clients), dtype=jnp.int32)
    rows = first_rows(algorithm, plan, key, start, ids)
    return State(server=start, clients=rows)


@precisely
def begin(algorithm: Algorithm, key: Key, clients: ClientData) -> Start:
    """What the server begins with."""
    return algorithm.start(key, clients)


@precisely
def first_rows(
    algorithm: Algorithm, plan: ExecutionPlan, key: Key, start: Start, ids: Array
) -> First:
    """What clients `ids` (n,) begin with, leaves (n, ...)."""

    def first_row(client: Array) -> First:
        return algorithm.first_row(key, client, start)

    return plan.over_rows(first_row, ids)


def context_of(
    key: Key, client: Array, state: State, index: Array | None = None, server: PyTree | None = None
) -> ClientContext:
    """A client's view outside of an exchange of the round."""
    index = jnp.zeros((0,), jnp.int32) if index is None else index
    client = jnp.asarray(client, jnp.int32)
    return ClientContext(
        key=jax.random.fold_in(key, client),
        round=state.round,
        step=jnp.zeros((), jnp.int32),
        index=index,
        server=state.server.state if server is None else server,
        client=client,
    )


@precisely
def download(
    algorithm: Algorithm, plan: ExecutionPlan, key: Key, state: State, cohort: Cohort
) -> Array:
    """(S, J) int32: the models that each client of the cohort receives; `state` has the cohort's rows."""
    if not algorithm.topology.moves:
        return cohort.ids[:, None]
    if algorithm.download is None:
        num_models = tree.num_rows(state.models)
        all_models = jnp.arange(num_models, dtype=jnp.int32)
        return jnp.broadcast_to(all_models, (cohort.ids.shape[0], num_models))
    method_download = algorithm.download

    def client_download(client: Array, row: PyTree) -> Array:
        return method_download(context_of(key, client, state), row, cohort)

    return plan.over_rows(client_download, cohort.ids, state.rows)


@precisely
def select_models(
    algorithm: Algorithm, plan: ExecutionPlan, key: Key, state: State, ids: Array, sizes: Array
) -> Mixture:
    """Whose models clients `ids` (n,) predict with, leaves (n, J).

    Args:
        algorithm: The method.
        plan: How clients are mapped.
        key: Key of the predictions.
        state: The state, with the rows of these clients.
        ids: Their numbers.
        sizes: (n,) n_k.
    """

    def client_mixture(client: Array, row: PyTree, size: Array) -> Mixture:
        context = context_of(key, client, state)
        return _client_mixture(algorithm, context, state.models, row, size)

    return plan.over_rows(client_mixture, ids, state.rows, sizes)


def _client_mixture(
    algorithm: Algorithm, context: ClientContext, models: Params, row: PyTree, size: Array
) -> Mixture:
    """Whose models one client predicts with: as the method says, its own, or all of them equally."""
    if algorithm.select_models is not None:
        return algorithm.select_models(context, row, size)
    if algorithm.topology.first_is_own:
        return Mixture(context.client[None], jnp.ones((1,)))
    num_models = tree.num_rows(models)
    index = jnp.arange(num_models, dtype=jnp.int32)
    return Mixture(index, jnp.full((num_models,), 1 / num_models))


class Served(NamedTuple):
    """What clients did with their predictions.

    Attributes:
        outputs: What `use` returned for each client, stacked.
        used: Arrays for collaboration.npz: "index" and "weights" (n, J), and those of `Report.collaboration`.
    """

    outputs: PyTree
    used: dict[str, Array]


@precisely
def serve(
    algorithm: Algorithm,
    plan: ExecutionPlan,
    use: Use,
    key: Key,
    state: State,
    ids: Array,
    clients: ClientData,
    inputs: PyTree = (),
    mixture: Mixture | None = None,
    trained: Array | None = None,
) -> Served:
    """Every client uses its prediction; no client's models outlive its turn.

    Args:
        algorithm: The method.
        plan: How clients are mapped.
        use: (prediction, a client's inputs) -> anything. The prediction has its models and weights.
        key: Key of the predictions.
        state: The state, whose `clients` are clients `ids`. Under "peers" it has all K clients' models, or, with a
            `mixture`, those of its index, J for each client.
        ids: (n,) int32 numbers of the clients.
        clients: Their data, stacked.
        inputs: Further inputs of `use`, stacked.
        mixture: What `select_models` returned, if the models in its index were fetched.
        trained: (n,) bool, whether they have ever trained; see `Algorithm.global_model`. None: all have.
    """
    topology = algorithm.topology
    # Models that were fetched are in their client's rows, as its own are; no client reads those of others.
    if topology.first_is_own and (mixture is not None or not topology.reads_others):
        topology = Topology.OWN
    if mixture is None:
        mixture = select_models(algorithm, plan, key, state, ids, clients.train.size)

    def client(models: Params, _: PyTree, data: tuple, server: PyTree) -> ClientOutput:
        number, row, client_data, mixture, inputs, trained = data
        row, mixture = read((row, mixture))
        context = context_of(key, number, state, mixture.index, server)
        prediction = _predict(algorithm, context, models, row, client_data)

        # What is recorded of the client's collaboration.
        used = _recorded(context, prediction, mixture)
        if algorithm.report.collaboration:
            used = dict(algorithm.report.collaboration(context, row))

        prediction = resolved(prediction, models, mixture.weights)
        if algorithm.global_model is not None and trained is not None:
            instead = resolved(algorithm.global_model(models), models, mixture.weights)
            prediction = _either(trained, prediction, instead)
        prediction = _tuned(algorithm, key, context, prediction, client_data)
        served: Any = Served(use(prediction, inputs), used)
        return ClientOutput(row=(), upload=Upload(), report=served)

    _, aggregate = plan.exchange(
        client,
        models=state.models,
        index=mixture.index,
        rows=(),
        data=(ids, state.rows, clients, mixture, inputs, trained),
        topology=topology,
        common=state.server.state,
    )
    served: Any = aggregate.report
    return served


def serve_some(
    algorithm: Algorithm,
    plan: ExecutionPlan,
    use: Use,
    key: Key,
    state: State,
    ids: Array,
    clients: ClientData,
    inputs: PyTree = (),
    trained: Array | None = None,
) -> Served:
    """Like `serve`, but for clients `ids` (n,) of the K whose rows, data, inputs and `trained` are given."""
    all_clients = (state.clients, clients, inputs, trained)
    rows, clients, inputs, trained = plan.take_rows(all_clients, ids)
    some = state._replace(clients=rows)
    mixture = select_models(algorithm, plan, key, some, ids, clients.train.size)
    if algorithm.topology.reads_others:
        models = plan.take_rows(state.models, mixture.index.reshape(-1))
        some = some.with_models(models)
    return serve(algorithm, plan, use, key, some, ids, clients, inputs, mixture, trained)


@precisely
def serve_newcomers(
    algorithm: Algorithm,
    plan: ExecutionPlan,
    use: Use,
    key: Key,
    state: State,
    clients: ClientData,
    inputs: PyTree,
) -> PyTree:
    """What `use` returns for clients unseen in training; `state` needs no rows but peers' models."""
    num_clients = tree.num_rows(clients)

    def client(_: Params, __: PyTree, data: tuple, common: tuple) -> ClientOutput:
        number, client_data, inputs = data
        models, server = common
        context = context_of(key, number, state, None, server)
        if algorithm.adapt is not None:
            prediction = algorithm.adapt(context, models, client_data)
            prediction = resolved(prediction, models)
        else:
            size = client_data.train.size
            index, weights = _client_mixture(algorithm, context, models, (), size)
            received = tree.take(models, index)
            context = context._replace(index=index)
            prediction = _predict(algorithm, context, received, (), client_data)
            prediction = resolved(prediction, received, weights)
        prediction = _tuned(algorithm, key, context, prediction, client_data)
        return ClientOutput(row=(), upload=Upload(), report=use(prediction, inputs))

    models = state.models if algorithm.topology.moves else ()
    _, aggregate = plan.exchange(
        client,
        models=(),
        index=jnp.zeros((num_clients, 1), jnp.int32),
        rows=(),
        data=(jnp.arange(num_clients, dtype=jnp.int32), clients, inputs),
        topology=Topology.SHARED,
        common=(models, state.server.state),
    )
    return aggregate.report


def _predict(
    algorithm: Algorithm, context: ClientContext, models: Params, row: PyTree, data: ClientData
) -> Prediction:
    """What a client makes of the models that it received."""
    if algorithm.predict is None:
        return Prediction()
    return algorithm.predict(context, models, row, data)


def resolved(prediction: Prediction, received: Params, weights: Array | None = None) -> Prediction:
    """A prediction with its models and weights, given the received models and their weights."""
    if jax.tree.leaves(prediction.models):
        received = prediction.models
        weights = None
    elif prediction.index is not None:
        received = tree.take(received, prediction.index)
        weights = None if weights is None else weights[prediction.index]
    if prediction.weights is not None:
        weights = prediction.weights
    if weights is None:
        num_models = tree.num_rows(received)
        weights = jnp.full((num_models,), 1 / num_models)
    return Prediction(models=received, weights=weights, inputs=prediction.inputs)


def _either(trained: Array, own: Prediction, global_model: Prediction) -> Prediction:
    """A client's own prediction if it has trained, otherwise that of the global model.

    Raises:
        ArgumentError: if they have different shapes.
    """
    if jax.tree.map(jnp.shape, own) != jax.tree.map(jnp.shape, global_model):
        text = "returns other shapes than a client's own prediction has"
        raise ArgumentError("global_model", f"{text}; accepted: the same, or global_model=None")
    return jax.tree.map(lambda a, b: jnp.where(trained, a, b), own, global_model)


def _tuned(
    algorithm: Algorithm, key: Key, context: ClientContext, prediction: Prediction, data: ClientData
) -> Prediction:
    """The prediction after fine-tuning, if there is any."""
    tune = algorithm.engine.tune
    if tune is None:
        return prediction
    tune_key = jax.random.fold_in(key, TUNE)
    client_key = jax.random.fold_in(tune_key, context.client)
    return tune(context._replace(key=client_key), prediction, data)


def _recorded(context: ClientContext, prediction: Prediction, mixture: Mixture) -> dict[str, Array]:
    """Whose models a client uses: see `recorded_topology`."""
    num_received = mixture.index.shape[0]
    topology = recorded_topology(Topology.PEERS, prediction, num_received)
    if topology is Topology.OWN:
        return {"index": context.client[None], "weights": jnp.ones((1,))}
    if topology is Topology.SHARED:  # positions among its own models
        weights = resolved(prediction, ()).weights
        assert weights is not None
        weights = over_classes(weights)
        return {"index": jnp.arange(len(weights), dtype=jnp.int32), "weights": weights}

    # Some of the models that it received, with its own weights or those of the mixture.
    positions = jnp.arange(num_received) if prediction.index is None else prediction.index
    has_models = bool(jax.tree.leaves(prediction.models))
    if has_models or prediction.weights is None:
        weights = mixture.weights[positions]
    else:
        weights = over_classes(prediction.weights)
    return {"index": mixture.index[positions], "weights": weights}


def over_classes(weights: Array) -> Array:
    """(J,) weights of models: the means over classes, if they differ by class."""
    return weights if weights.ndim == 1 else weights.mean(axis=1)


def recorded_topology(topology: Topology, predicted: Prediction, width: int) -> Topology:
    """Topology of the models that a run records as used by its clients.

    Args:
        topology: The method's.
        made: Shapes of what a client's `predict` returns.
        width: J of its mixture.
    """
    leaves = jax.tree.leaves(predicted.models)
    if leaves and leaves[0].shape[0] > 1:
        return Topology.SHARED  # a mixture of models of its own, by their positions
    if leaves and width == 1:
        return Topology.OWN
    return Topology.OWN if topology is Topology.PUSH else topology


class ClientShapes(NamedTuple):
    """Shapes and types of what one client receives and returns in a round.

    Attributes:
        start: What the server begins with.
        first: What the client begins with.
        index: (J,), the models that it receives.
        models: These models, leaves (J, ...), or under "push" its own, leaves (1, ...).
        output: What it returns, before anything is weighted.
    """

    start: Start
    first: First
    index: Any
    models: Params
    output: ClientOutput


def shapes_of_client(algorithm: Algorithm, clients: ClientData, cohort_size: int) -> ClientShapes:
    """Traces one client's round.

    Args:
        algorithm: The method.
        clients: The data of all clients, stacked, or their shapes.
        cohort_size: S.
    """

    def one_client(key: Key, client: Array, ids: Array, clients: ClientData) -> ClientShapes:
        start = algorithm.start(key, clients)
        first = algorithm.first_row(key, client, start)
        topology = algorithm.topology
        stack = start.models if topology.on_server else tree.stack_one(first.model)
        num_models = tree.num_rows(stack) if jax.tree.leaves(stack) else 1
        context = ClientContext(
            key=key,
            round=client,
            step=client,
            index=jnp.arange(num_models),
            server=start.state,
            client=client,
        )

        # The models that the client receives.
        if algorithm.download is not None and topology.moves:
            index = algorithm.download(context, first.row, Cohort(ids))
            context = context._replace(index=index)
        num_received = 1 if topology is Topology.PUSH else context.index.shape[0]

        def received(leaf: Array) -> Array:
            return jnp.zeros((num_received, *leaf.shape[1:]), leaf.dtype)

        models = jax.tree.map(received, stack)

        # Its work on them.
        data = view(clients, jnp.zeros((), jnp.int32))
        output = algorithm.client_update(context, models, first.row, data)
        return ClientShapes(start, first, context.index, models, output)

    key = jax.eval_shape(jax.random.key, 0)
    client = jax.ShapeDtypeStruct((), jnp.int32)
    ids = jax.ShapeDtypeStruct((cohort_size,), jnp.int32)
    with np.errstate(over="ignore"):  # nothing is computed, so no constant is too large
        return jax.eval_shape(one_client, key, client, ids, clients)


def shapes(
    algorithm: Algorithm, plan: ExecutionPlan, key: Key, state: State, clients: ClientData
) -> tuple[Any, Any]:
    """Shapes of a client's (Mixture, what `predict` returns), given those of all clients' state and data."""
    ids = jax.ShapeDtypeStruct((tree.num_rows(clients),), jnp.int32)
    mixture_of = functools.partial(select_models, algorithm, plan)
    mixtures = jax.eval_shape(mixture_of, key, state, ids, clients.train.size)
    num_received = mixtures.index.shape[1]
    mixture = tree.shapes_of_rows(mixtures)
    if algorithm.predict is None:
        return mixture, Prediction()
    predict = algorithm.predict

    def first_client(
        key: Key, state: State, mixture: Mixture, models: Params, row: PyTree, data: ClientData
    ) -> Prediction:
        first = jnp.zeros((), jnp.int32)
        context = context_of(key, first, state, mixture.index)
        return predict(context, models, row, view(data, first))

    models = tree.shapes_of_rows(state.models, num_received)
    row = tree.shapes_of_rows(state.rows)
    prediction = jax.eval_shape(first_client, key, state, mixture, models, row, clients)
    return mixture, prediction
