"""A method's functions of one client, mapped over clients: what they begin with, receive and predict with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

from pfljax.contract import tree
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
    def traced(*args, **options):
        with jax.default_matmul_precision(precision):
            return fn(*args, **options)

    return cast(F, traced)


def precisely(fn: F) -> F:
    """As `in_precision`, for a function whose first argument is the algorithm."""

    def called(algorithm, *args, **options):
        return in_precision(algorithm, fn)(algorithm, *args, **options)

    return cast(F, functools.wraps(fn)(called))


def init(algorithm: Algorithm, plan: ExecutionPlan, key: Key, clients: ClientData) -> State:
    """The initial state of all K clients and the server."""
    start = begin(algorithm, key, clients)
    ids = jnp.arange(tree.num_rows(clients), dtype=jnp.int32)
    return State(start, first_rows(algorithm, plan, key, start, ids))


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
        num = tree.num_rows(state.models)
        return jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (cohort.ids.shape[0], num))
    method_download = algorithm.download

    def download_of(client: Array, row: PyTree) -> Array:
        return method_download(context_of(key, client, state), row, cohort)

    return plan.over_rows(download_of, cohort.ids, state.rows)


@precisely
def whom(
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

    def whom_of(client: Array, row: PyTree, size: Array) -> Mixture:
        return _whom_of(algorithm, context_of(key, client, state), state.models, row, size)

    return plan.over_rows(whom_of, ids, state.rows, sizes)


def _whom_of(
    algorithm: Algorithm, context: ClientContext, models: Params, row: PyTree, size: Array
) -> Mixture:
    if algorithm.whom is not None:
        return algorithm.whom(context, row, size)
    if algorithm.topology.first_is_own:
        return Mixture(context.client[None], jnp.ones((1,)))
    num = tree.num_rows(models)
    return Mixture(jnp.arange(num, dtype=jnp.int32), jnp.full((num,), 1 / num))


class Served(NamedTuple):
    """What clients did with their predictions.

    Attributes:
        found: What `use` returned for each client, stacked.
        used: Arrays for collaboration.npz: "index" and "weights" (n, J), and those of `Report.collaboration`.
    """

    found: PyTree
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
        mixture: What `whom` returned, if the models in its index were fetched.
    """
    topology = algorithm.topology
    # Models that were fetched lie beside their client, as its own do, and no client reads those of others.
    if topology.first_is_own and (mixture is not None or not topology.reads_others):
        topology = Topology.OWN
    if mixture is None:
        mixture = whom(algorithm, plan, key, state, ids, clients.train.size)

    def client(models: Params, _: PyTree, data: tuple, server: PyTree) -> ClientOutput:
        number, row, own, mixture, inputs = data
        row, mixture = read((row, mixture))
        context = context_of(key, number, state, mixture.index, server)
        made = algorithm.predict(context, models, row, own) if algorithm.predict else Prediction()
        used = _recorded(context, made, mixture)
        if algorithm.report.collaboration:
            used = dict(algorithm.report.collaboration(context, row))
        prediction = _tuned(algorithm, key, context, resolved(made, models, mixture.weights), own)
        served: Any = Served(use(prediction, inputs), used)
        return ClientOutput(row=(), upload=Upload(), told=served)

    _, aggregate = plan.exchange(
        client,
        state.models,
        mixture.index,
        rows=(),
        data=(ids, state.rows, clients, mixture, inputs),
        topology=topology,
        common=state.server.state,
    )
    served: Any = aggregate.told
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
) -> Served:
    """Like `serve`, but for clients `ids` (n,) of the K whose rows, data and inputs are given."""
    of_some, clients, inputs = plan.take_rows((state.clients, clients, inputs), ids)
    part = state._replace(clients=of_some)
    mixture = whom(algorithm, plan, key, part, ids, clients.train.size)
    if algorithm.topology.reads_others:
        part = part.with_models(plan.take_rows(state.models, mixture.index.reshape(-1)))
    return serve(algorithm, plan, use, key, part, ids, clients, inputs, mixture)


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
    num = tree.num_rows(clients)

    def client(_: Params, __: PyTree, data: tuple, common: tuple) -> ClientOutput:
        number, own, inputs = data
        models, server = common
        context = context_of(key, number, state, None, server)
        if algorithm.adapt is not None:
            prediction = resolved(algorithm.adapt(context, models, own), models)
        else:
            index, weights = _whom_of(algorithm, context, models, (), own.train.size)
            received = tree.take(models, index)
            context = context._replace(index=index)
            made = (
                algorithm.predict(context, received, (), own) if algorithm.predict else Prediction()
            )
            prediction = resolved(made, received, weights)
        prediction = _tuned(algorithm, key, context, prediction, own)
        return ClientOutput(row=(), upload=Upload(), told=use(prediction, inputs))

    _, aggregate = plan.exchange(
        client,
        models=(),
        index=jnp.zeros((num, 1), jnp.int32),
        rows=(),
        data=(jnp.arange(num, dtype=jnp.int32), clients, inputs),
        topology=Topology.SHARED,
        common=(state.models if algorithm.topology.moves else (), state.server.state),
    )
    return aggregate.told


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
        num = tree.num_rows(received)
        weights = jnp.full((num,), 1 / num)
    return Prediction(received, weights, None, prediction.inputs)


def _tuned(
    algorithm: Algorithm, key: Key, context: ClientContext, prediction: Prediction, data: ClientData
) -> Prediction:
    tune = algorithm.engine.tune
    if tune is None:
        return prediction
    own_key = jax.random.fold_in(jax.random.fold_in(key, TUNE), context.client)
    return tune(context._replace(key=own_key), prediction, data)


def _recorded(context: ClientContext, made: Prediction, mixture: Mixture) -> dict[str, Array]:
    """Whose models a client uses: see `recorded_topology`."""
    form = recorded_topology(Topology.PEERS, made, mixture.index.shape[0])
    if form is Topology.OWN:
        return {"index": context.client[None], "weights": jnp.ones((1,))}
    if form is Topology.SHARED:  # places among its own models
        weights = resolved(made, ()).weights
        assert weights is not None
        return {"index": jnp.arange(len(weights), dtype=jnp.int32), "weights": weights}
    places = jnp.arange(mixture.index.shape[0]) if made.index is None else made.index
    own = jax.tree.leaves(made.models)
    weights = mixture.weights[places] if own or made.weights is None else made.weights
    return {"index": mixture.index[places], "weights": weights}


def recorded_topology(topology: Topology, made: Prediction, width: int) -> Topology:
    """Topology of the models that a run records as used by its clients.

    Args:
        topology: The method's.
        made: Shapes of what a client's `predict` returns.
        width: J of its mixture.
    """
    own = jax.tree.leaves(made.models)
    if own and own[0].shape[0] > 1:
        return Topology.SHARED  # a mixture of models of its own, by their places
    if own and width == 1:
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
        context = ClientContext(key, client, client, jnp.arange(num_models), start.state, client)
        if algorithm.download is not None and topology.moves:
            index = algorithm.download(context, first.row, Cohort(ids))
            context = context._replace(index=index)
        num_received = 1 if topology is Topology.PUSH else context.index.shape[0]
        models = jax.tree.map(
            lambda leaf: jnp.zeros((num_received, *leaf.shape[1:]), leaf.dtype), stack
        )
        data = view(clients, jnp.zeros((), jnp.int32))
        output = algorithm.client_update(context, models, first.row, data)
        return ClientShapes(start, first, context.index, models, output)

    key = jax.eval_shape(jax.random.key, 0)
    client = jax.ShapeDtypeStruct((), jnp.int32)
    ids = jax.ShapeDtypeStruct((cohort_size,), jnp.int32)
    return jax.eval_shape(one_client, key, client, ids, clients)


def shapes(
    algorithm: Algorithm, plan: ExecutionPlan, key: Key, state: State, clients: ClientData
) -> tuple[Any, Any]:
    """Shapes of a client's (Mixture, what `predict` returns), given those of all clients' state and data."""
    ids = jax.ShapeDtypeStruct((tree.num_rows(clients),), jnp.int32)
    mixture = jax.eval_shape(
        functools.partial(whom, algorithm, plan), key, state, ids, clients.train.size
    )
    width = mixture.index.shape[1]
    of_client = tree.shapes_of_rows(mixture)
    if algorithm.predict is None:
        return of_client, Prediction()
    predict = algorithm.predict

    def one(key, state, mixture, models, row, data):
        context = context_of(key, jnp.zeros((), jnp.int32), state, mixture.index)
        return predict(context, models, row, view(data, jnp.zeros((), jnp.int32)))

    args = (
        of_client,
        tree.shapes_of_rows(state.models, width),
        tree.shapes_of_rows(state.rows),
        clients,
    )
    return of_client, jax.eval_shape(one, key, state, *args)
