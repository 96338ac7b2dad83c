"""Checks that users' methods return what `Algorithm` asks for: shapes when a run is created, values at round 0.

Every error names the field, what came and what is accepted. Built-in methods are not checked; tests do that.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import former_contract, tree
from pfljax.contract.errors import ArgumentError, RunError, raised
from pfljax.contract.held import use_frozen
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientData,
    ClientOutput,
    ClientReport,
    Cohort,
    First,
    Key,
    Mixture,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.exchange import lifting
from pfljax.exchange.in_python import PythonPlan
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import as_sent, draw_cohort, make_round
from pfljax.exchange.views import view
from pfljax.models import building
from pfljax.run.compiled import Jitted
from pfljax.run.experiment import Experiment
from pfljax.stores import stacks
from pfljax.stores.registry import store_of

TOLERANCE = 1e-3  # of the sum of a client's weights
# Entries of a row of metrics.jsonl, and of the tables and summaries that contain such rows.
RESERVED = {
    "round",
    "seconds",
    "train_loss",
    "bytes_down",
    "bytes_up",
    "simulated_seconds",
    "loss",
    "accuracy",
    "accuracy_mean",
    "accuracy_std",
    "accuracy_bottom_decile",
    "accuracy_min",
    "validation_loss",
    "validation_accuracy",
    "method",
    "seed",
    "selected_by",
}
# Arrays of collaboration.npz; "distribution" is the former name of "group".
ARRAYS = {"round", "topology", "group", "labels", "target", "clients", "distribution"}
TYPES = {
    "integer": jnp.integer,
    "float": jnp.floating,
    "bool": jnp.bool_,
    "number": jnp.generic,
}


def check(experiment: Experiment) -> None:
    """Checks the shapes of what a user's method returns, by tracing its functions.

    Raises `ArgumentError` if one returns something that is not accepted, or raises an error.
    """
    if not is_built_in(experiment.method) and not isinstance(experiment.problem.plan, PythonPlan):
        Contract(experiment, experiment.problem.plan).check_shapes()


def check_metrics(experiment: Experiment, algorithm: Algorithm) -> None:
    """Checks, by tracing a round, that none of the run's metrics has the name of one of the method's or the attack's.

    Raises `ArgumentError` if one has, or if a stage finds what it does not support in what clients send.
    """
    problem = experiment.problem
    plan = problem.plan
    for name in experiment.metrics.keys() & {*experiment.attack.measures}:
        text = f"is the attack's own; accepted: another name, such as own_{name}"
        raise ArgumentError("metrics", text, name)
    needs_trace = (
        experiment.measures
        or experiment.client_privacy.active
        or experiment.server.secure_aggregation
    )
    if not needs_trace or isinstance(plan, PythonPlan):
        return

    # Trace a round, with the shapes of all clients.
    key = jax.random.key(0)
    clients = tree.shapes_of_rows(experiment.federation.client_data, problem.num_clients)
    init = functools.partial(lifting.init, algorithm, plan)
    state = jax.eval_shape(init, key, clients)
    play_round = make_round(algorithm, plan, problem.cohort_size)
    keys = experiment.keys(key, key)
    _, record = jax.eval_shape(play_round, keys, jnp.int32(0), state, clients)
    for name in record.metrics.keys() & {*experiment.measures}:
        metric = f"is also a metric of {experiment.name} itself"
        text = f"{metric}; accepted: another name, such as own_{name}"
        raise ArgumentError("metrics", text, name)


def check_start(
    experiment: Experiment, plan: ExecutionPlan, key: Key, state: State, clients: ClientData
) -> None:
    """Raises `ArgumentError` if values of the initial state, or what a user's method makes of it, are not accepted.

    State and clients' data are those that the client store keeps.
    """
    # A plan in Python shows by itself what is wrong.
    if is_built_in(experiment.method) or isinstance(plan, PythonPlan):
        return
    contract = Contract(experiment, plan)
    contract.algorithm = experiment.algorithm(plan)  # the state is its
    problem = experiment.problem
    size = problem.cohort_size
    # The first and the last client are among those that are checked.
    ids = np.linspace(0, problem.num_clients - 1, size).astype(np.int32)
    contract.check_positions(key, state, clients, ids)
    if store_of(experiment).on_devices:
        contract.check_values(key, state, clients)
        return
    rows = place(plan, stacks.read(state.clients, ids), size)
    data = place(plan, stacks.read(clients, ids), size)
    contract.check_values(key, state._replace(clients=rows), data, ids)


def check_weights(
    experiment: Experiment, field: str, weights: np.ndarray, ids: np.ndarray | None = None
) -> None:
    """Raises `ArgumentError` unless weights (n, J) of a user's method are on the simplex.

    `field` is where they come from, and `ids` (n,) are the clients' numbers; None: all clients.
    """
    total = weights.sum(axis=1)
    least = weights.min(axis=1)
    close = np.abs(total - 1) <= TOLERANCE
    wrong = ~((least >= 0) & close)
    if is_built_in(experiment.method) or not wrong.any():
        return
    first = int(np.argmax(wrong))
    client = first if ids is None else ids[first]
    sums = f"the weights of client {client} sum to {total[first]:.4g}"
    text = f"{sums}, and the smallest is {least[first]:.4g}; accepted: 0 or more, with sum 1"
    raise ArgumentError(field, text, owner=experiment.name)


def is_built_in(method: Any) -> bool:
    """Whether a method is part of pfljax."""
    return type(method).__module__.startswith("pfljax.")


class Contract:
    """The functions of a method, built for a problem, which are called with checks of what they return."""

    def __init__(self, experiment: Experiment, plan: ExecutionPlan):
        self.experiment = experiment
        self.problem = experiment.problem._replace(plan=plan)
        self.algorithm: Algorithm = self._call("build", experiment.method.build, self.problem)
        self._instance("build", self.algorithm, Algorithm)

    def check_shapes(self) -> None:
        """Traces all functions with the shapes of the federation."""
        algorithm = self.algorithm
        key = jax.random.key(0)
        exchanges = algorithm.exchanges
        if not isinstance(exchanges, int) or exchanges < 1:
            text = f"is {exchanges}; accepted: whole numbers, 1 or more"
            raise self._error("exchanges", text)
        clients = self.experiment.federation.client_data
        self._check_initial(key, clients)
        init = functools.partial(lifting.init, algorithm, self.problem.plan)
        state = jax.eval_shape(init, key, clients)
        if algorithm.sample:
            ids = self._traced("sample", key, state, clients)
            self._shape("sample", "the array", ids, (self.problem.cohort_size,), "integer")
        self._check_round(key, state, clients)
        self._check_predictions(key, state, clients)

    def _check_initial(self, key: Key, clients: ClientData) -> None:
        """Traces what the server and a client begin with."""
        start = self._traced("start", key, clients)
        self._instance("start", start, Start)
        client = jax.ShapeDtypeStruct((), jnp.int32)
        first = self._traced("first_row", key, client, start)
        self._instance("first_row", first, First)

        on_server = self.algorithm.topology.on_server
        required = "the models that clients can download"
        self._check_owner("start", "Start.models", start.models, on_server, required)
        self._check_owner("start", "Start.opt_state", start.opt_state, on_server)
        required = "the client's own model"
        self._check_owner("first_row", "First.model", first.model, not on_server, required)
        self._check_owner("first_row", "First.opt_state", first.opt_state, not on_server)

    def _check_owner(
        self, field: str, what: str, value: PyTree, accepted: bool, required: str = ""
    ) -> None:
        """Checks that a value is given only where it is accepted, and always there if it is `required`."""
        topology = str(self.algorithm.topology)
        is_given = bool(jax.tree.leaves(value))
        if is_given and not accepted:
            text = f"{what} is given; accepted with topology={topology!r}: ()"
            raise self._error(field, text)
        if required and not is_given and accepted:
            text = f"{what} is empty; accepted with topology={topology!r}: {required}"
            raise self._error(field, text)

    def _check_round(self, key: Key, state: State, clients: ClientData) -> None:
        """Traces download, client update and server update of a cohort."""
        size = self.problem.cohort_size
        state = state._replace(clients=tree.shapes_of_rows(state.clients, size))
        data = tree.shapes_of_rows(clients, size)
        num_received = self._check_download(key, state)
        output = self._check_client(key, state, data, num_received)

        index = jax.ShapeDtypeStruct((size, num_received), jnp.int32)
        aggregate = self._aggregate(state, index, data, output)
        updated = self._traced("server_update", key, state, aggregate)
        is_pair = isinstance(updated, tuple) and len(updated) == 2
        if not is_pair or not isinstance(updated[0], State):
            text = f"returned {_kind(updated)}; accepted: (State, dict of metrics)"
            raise self._error("server_update", text)
        new_state, metrics = updated
        self._same("server_update", "State", new_state, state)
        self._instance("server_update", metrics, Mapping)
        for name, value in metrics.items():
            if name in RESERVED or not isinstance(name, str):
                accepted = f"any name but {', '.join(sorted(RESERVED))}"
                text = f"returned a metric named {name}; accepted: {accepted}"
                raise self._error("server_update", text)
            self._shape("server_update", f"the metric {name}", value, (), "number")

    def _check_download(self, key: Key, state: State) -> Any:
        """Traces which models one client receives. Returns their number."""
        topology = self.algorithm.topology
        size = self.problem.cohort_size
        if self.algorithm.download is None or not topology.moves:
            return tree.num_rows(state.models) if topology.on_server else 1
        ids: Any = jax.ShapeDtypeStruct((size,), jnp.int32)
        cohort = Cohort(ids, everyone=size == self.problem.num_clients)
        row = tree.shapes_of_rows(state.rows)
        index = self._for_client("download", key, state, row, cohort)
        num_received = _width(index)
        self._shape("download", "the index", index, (num_received,), "integer")
        return num_received

    def _for_client(
        self, field: str, key: Key, state: State, *args: Any, num_received: int = 0
    ) -> Any:
        """Shapes of what a function of (context, *args) returns for one client, which reads its part of the data."""
        function = operator.attrgetter(field)(self.algorithm)
        zero = jnp.zeros((), jnp.int32)

        def client_view(arg: Any) -> Any:
            return view(arg, zero) if isinstance(arg, ClientData) else arg

        def call(key: Key, state: State, args: tuple[Any, ...]) -> Any:
            index = jnp.zeros((num_received,), jnp.int32)
            context = lifting.context_of(key, zero, state, index)
            return function(context, *map(client_view, args))

        return self._evaluate(field, call, key, state, args)

    def _check_client(
        self, key: Key, state: State, data: ClientData, num_received: int
    ) -> ClientOutput:
        """Traces one client's update. Returns the shapes of its output."""
        field = "client_update"
        push = self.algorithm.topology is Topology.PUSH
        received = tree.shapes_of_rows(state.models, 1 if push else num_received)
        row = tree.shapes_of_rows(state.rows)
        output = self._for_client(field, key, state, received, row, data, num_received=num_received)
        self._instance(field, output, ClientOutput)
        self._same(field, "row", output.row, row)
        self._instance(field, output.upload, Upload, "upload: ")
        self._instance(field, output.report, ClientReport, "report: ")
        self._shape(field, "report.loss", output.report.loss, (), "float")
        num_sent = self._check_upload(output, received, num_received)
        weight = output.upload.weight
        if push and weight is not None:
            text = "upload.weight is given; accepted with topology='push': None"
            raise self._error(field, text)
        if weight is not None:
            self._shape(field, "upload.weight", weight, (num_sent,), "float")
        if output.sent is not None:
            self._shape(field, "sent", output.sent, (num_sent,), "bool")
        return output

    def _check_upload(self, output: ClientOutput, received: PyTree, num_received: int) -> int:
        """Checks the shapes of an upload. Returns for how many of the received models it is."""
        field = "client_update"
        topology = self.algorithm.topology
        weights = output.mixing_weights
        leaves = jax.tree.leaves(output.upload)
        if weights is not None or topology is Topology.PUSH:
            self._shape(field, "mixing_weights", weights, (num_received,), "float")
        elif leaves and not topology.moves:
            self._same(field, "upload", output.upload, Upload(received))
        elif leaves:
            num_rows = (leaves[0].shape or (0,))[0]
            num_sent = min(num_rows, num_received) or num_received
            self._rows(field, "upload", output.upload, num_sent)
            return num_sent
        return num_received

    def _aggregate(
        self, state: State, index: Any, data: ClientData, output: ClientOutput
    ) -> Aggregate:
        """Shapes of what the server gets back if all clients return outputs of these shapes."""
        topology = self.algorithm.topology

        def zeros(*args: Any) -> ClientOutput:
            """An output as it is added up, when `sent` is known."""
            empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), output)
            return as_sent(empty)

        exchange = functools.partial(
            self.problem.plan.exchange, zeros, topology=topology, own_first=topology.reads_others
        )
        _, aggregate = jax.eval_shape(exchange, state.models, index, state.rows, data)
        return aggregate

    def _check_predictions(self, key: Key, state: State, clients: ClientData) -> None:
        """Traces what clients predict with, and what is recorded of it."""
        algorithm = self.algorithm
        row = tree.shapes_of_rows(state.rows)
        width = tree.num_rows(state.models) if algorithm.topology.on_server else 1
        if algorithm.select_models:
            size = jax.ShapeDtypeStruct((), jnp.int32)
            mixture = self._for_client("select_models", key, state, row, size)
            self._instance("select_models", mixture, Mixture)
            width = _width(mixture.index)
            self._shape("select_models", "index", mixture.index, (width,), "integer")
            self._shape("select_models", "weights", mixture.weights, (width,), "float")

        received = tree.shapes_of_rows(state.models, width)
        prediction = Prediction()
        if algorithm.predict:
            prediction = self._for_client(
                "predict", key, state, received, row, clients, num_received=width
            )
        prediction = self._check_prediction("predict", prediction, received, clients)
        if self.experiment.unseen:
            self._check_newcomers(key, state, self.experiment.unseen.client_data)
        if algorithm.report.collaboration:
            self._check_collaboration(key, state, row)

    def _check_collaboration(self, key: Key, state: State, row: PyTree) -> None:
        """Traces the arrays that are recorded of a client's collaboration."""
        field = "report.collaboration"
        arrays = self._for_client(field, key, state, row)
        self._instance(field, arrays, Mapping)
        reserved = ARRAYS & arrays.keys()
        if reserved:
            names = ", ".join(sorted(reserved))
            raise self._error(field, f"returned {names}; accepted: other names of arrays")
        weights = arrays.get("weights")
        width = _width(weights)
        self._shape(field, "weights", weights, (width,), "float")
        self._shape(field, "index", arrays.get("index"), (width,), "integer")

    def _check_newcomers(self, key: Key, state: State, clients: ClientData) -> None:
        """Traces what clients unseen in training predict with."""
        algorithm = self.algorithm
        topology = algorithm.topology
        plan = self.problem.plan
        models = state.models if topology.moves else ()
        if algorithm.adapt:
            prediction = self._for_client("adapt", key, state, models, clients)
        elif not topology.on_server:
            required = f"required for unseen clients with topology={str(topology)!r}"
            raise self._error("adapt", f"{required}; it says what they predict with")
        else:  # `select_models` and `predict`, with an empty row

            def unchanged(prediction: Prediction, _: Any) -> Prediction:
                return prediction

            serve = functools.partial(lifting.serve_newcomers, algorithm, plan, unchanged)
            predictions = self._evaluate("adapt", serve, key, state, clients, ())
            prediction = tree.shapes_of_rows(predictions)
        self._check_prediction("adapt", prediction, models, clients)

    def _check_prediction(
        self, field: str, prediction: Prediction, received: PyTree, clients: ClientData
    ) -> Prediction:
        """Checks the shapes of what a client predicts with. Returns them with models and weights."""
        model = self.problem.model
        apply = self.algorithm.apply
        self._instance(field, prediction, Prediction)
        if prediction.index is not None:
            width = _width(prediction.index)
            self._shape(field, "index", prediction.index, (width,), "integer")
        prediction = self._evaluate(field, lifting.resolved, prediction, received)
        leaves = jax.tree.leaves(prediction.models) or [prediction.weights]
        num_models = leaves[0].shape[0]
        weights_shape: tuple[int, ...] = (num_models,)
        is_by_class = prediction.weights is not None and len(prediction.weights.shape) == 2
        if is_by_class and self.problem.model.task == "classification":
            weights_shape = (num_models, self.problem.model.output_shape[-1])
        self._shape(field, "weights", prediction.weights, weights_shape, "float")

        params = jax.eval_shape(model.init, jax.random.key(0))
        if apply is None:

            def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct((num_models, *leaf.shape), leaf.dtype)

            expected = jax.tree.map(stacked, params)
            self._same(field, "models", prediction.models, expected)
            return prediction

        x = tree.shapes_of_rows(clients.train.x)
        expected = jax.eval_shape(model.apply, params, x)
        outputs = self._evaluate("apply", apply, prediction.models, prediction.inputs, x)
        self._shape("apply", "the outputs", outputs, expected.shape, "float")
        if model.task != "regression":
            self._check_logits(apply, prediction, x)
        return prediction

    def _check_logits(self, apply: Callable, prediction: Prediction, x: PyTree) -> None:
        """Raises `ArgumentError` if `Algorithm.apply` returns probabilities, for random models and two examples."""

        def at_most_two(leaf: Any) -> Any:
            num = min(leaf.shape[0], 2)
            return leaf.update(shape=(num, *leaf.shape[1:]))

        x = jax.tree.map(at_most_two, x)
        args = (prediction.models, prediction.inputs, x)
        network = self.problem.model.network
        with use_frozen(network, network.on(self.problem.plan)):
            traced = jax.make_jaxpr(apply)(*args)
            if building.ends_in(traced.jaxpr, "logistic"):
                raise self._error("apply", building.SIGMOID_OUTPUTS)
            random_args = building.random_like(args)
            outputs = jax.jit(apply)(*random_args)
            if building.sum_to_1(outputs):
                raise self._error("apply", building.SOFTMAX_OUTPUTS)

    def check_values(
        self, key: Key, state: State, clients: ClientData, ids: Array | None = None
    ) -> None:
        """Checks cohort, index, weights and models of the initial state, whose rows are those of `ids`, or all."""
        plan = self.problem.plan
        run = Jitted(self.problem.model.network, plan, self._values, out_shardings=plan.everywhere)
        values = jax.device_get(run(key, state, clients, ids))
        cohort, index, mixture, num_models, finite = values
        if not finite:
            text = "returned models with values that are not finite"
            raise self._error("start and first_row", text)

        num_clients = self.problem.num_clients
        unique_ids, counts = np.unique(cohort, return_counts=True)
        self._check_range("sample", unique_ids, num_clients)
        if counts.max() > 1:
            repeated = unique_ids[counts.argmax()]
            text = f"returned {repeated} more than once; accepted: distinct ids"
            raise self._error("sample", text)

        on_server = self.algorithm.topology.on_server
        self._check_index(index, cohort, num_models)
        self._check_range("select_models", mixture.index, num_models if on_server else num_clients)
        check_weights(self.experiment, "select_models", mixture.weights, cohort)

    def _check_index(self, index: np.ndarray, cohort: np.ndarray, num_models: int) -> None:
        """Checks which models the clients of a cohort download."""
        topology = self.algorithm.topology
        if topology.on_server:
            self._check_range("download", index, num_models)
            return
        if not topology.moves:
            return
        absent = np.setdiff1d(index, cohort)
        if absent.size:
            text = f"returned index {absent[0]}; accepted: the ids of the cohort"
            raise self._error("download", text)
        if topology.reads_others and (index[:, 0] != cohort).any():
            text = "column 0 of the index is not the client itself; accepted: its own id"
            raise self._error("download", text)

    def check_positions(self, key: Key, state: State, clients: ClientData, ids: np.ndarray) -> None:
        """Checks the positions of the models that clients `ids` predict with, among those that they received.

        State and clients' data are those that the client store keeps.
        """
        algorithm = self.algorithm
        plan = self.problem.plan
        data = self.experiment.federation.client_data
        predict = algorithm.predict
        if predict is None:
            return
        init = functools.partial(lifting.init, algorithm, plan)
        shapes = jax.eval_shape(init, key, data)
        mixture, prediction = lifting.shapes(algorithm, plan, key, shapes, data)
        if prediction.index is None:
            return

        def predict_index(*args: Any) -> Prediction:
            """A prediction with its index as inputs, which are passed on unchanged."""
            prediction = predict(*args)
            return prediction._replace(inputs=prediction.index)

        def index_of(prediction: Prediction, _: Any) -> PyTree:
            return prediction.inputs

        engine = algorithm.engine._replace(tune=None)
        with_index = dataclasses.replace(algorithm, predict=predict_index, engine=engine)
        index = store_of(self.experiment).serve(
            self.experiment,
            lambda numbers: with_index,
            plan,
            lambda algorithm: index_of,
            ids,
            key,
            state,
            clients,
            None,
        )
        self._check_range("predict", index, len(mixture.index))

    def _values(
        self, key: Key, state: State, clients: ClientData, ids: Array | None
    ) -> tuple[Array, Array, Mixture, int, Array]:
        """What `check_values` checks: cohort, index, mixture, number of models, whether these are finite."""
        algorithm = self.algorithm
        problem = self.problem
        plan = problem.plan
        if ids is not None:
            cohort = Cohort(ids, everyone=len(ids) == problem.num_clients)
        elif algorithm.sample:
            ids_of_cohort = jnp.sort(algorithm.sample(key, state, clients))
            cohort = Cohort(ids_of_cohort.astype(jnp.int32))
        else:
            cohort = draw_cohort(key, problem.num_clients, problem.cohort_size)

        # The cohort's rows, taken as in a round.
        cohort_state = state
        if ids is None and not cohort.everyone:
            cohort = Cohort(jax.lax.with_sharding_constraint(cohort.ids, plan.everywhere))
            rows, clients = plan.take_rows((state.clients, clients), cohort.ids)
            cohort_state = state._replace(clients=rows)
        index = lifting.download(algorithm, plan, key, cohort_state, cohort)
        sizes = clients.train.size
        mixture = lifting.select_models(algorithm, plan, key, cohort_state, cohort.ids, sizes)

        leaves = jax.tree.leaves(state.models)
        num_models = tree.num_rows(state.models) if leaves else 1
        floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        finite = [jnp.isfinite(leaf).all() for leaf in floats]
        return cohort.ids, index, mixture, num_models, jnp.array(finite).all()

    def _check_range(self, field: str, index: np.ndarray, num: int) -> None:
        outside = (index < 0) | (index >= num)
        wrong = index[outside]
        if wrong.size:
            raise self._error(field, f"returned index {wrong[0]}; accepted: 0 to {num - 1}")

    def _error(self, field: str, text: str) -> ArgumentError:
        return ArgumentError(field, text, owner=self.experiment.name)

    def _call(self, field: str, function: Callable, *args: Any) -> Any:
        """Calls a function; raises an `ArgumentError` for any error in it."""
        try:
            return function(*args)
        except (ArgumentError, RunError):
            raise
        except Exception as error:
            text = raised(error, self._file())
            raise self._error(field, text) from error

    def _evaluate(self, field: str, function: Callable, *args: Any) -> Any:
        """Shapes of what a function returns."""
        return self._call(field, jax.eval_shape, function, *args)

    def _traced(self, field: str, *args: Any) -> Any:
        """Shapes of what a function of the algorithm returns."""
        return self._evaluate(field, getattr(self.algorithm, field), *args)

    def _instance(self, field: str, value: Any, accepted: type, prefix: str = "") -> None:
        if isinstance(value, accepted):
            return
        name = "dict" if accepted is Mapping else accepted.__name__
        hint = former_contract.hint(self._file())
        raise self._error(field, f"{prefix}returned {_kind(value)}; accepted: {name}{hint}")

    def _file(self) -> str:
        """The file of the method."""
        build = inspect.unwrap(type(self.experiment.method).build)
        return build.__code__.co_filename

    def _shape(self, field: str, what: str, value: Any, shape: tuple[int, ...], kind: str) -> None:
        same_shape = getattr(value, "shape", None) == shape
        if not same_shape or not jnp.issubdtype(value.dtype, TYPES[kind]):
            accepted = f"{kind}[{', '.join(map(str, shape))}]"
            raise self._error(field, f"{what} is {_kind(value, 'missing')}; accepted: {accepted}")

    def _rows(self, field: str, what: str, value: PyTree, num: int) -> None:
        """Raises `ArgumentError` if a leaf has another number of rows."""
        for path, leaf in jax.tree.leaves_with_path(value):
            if leaf.shape[:1] != (num,):
                name = f"{what}{jax.tree_util.keystr(path)}"
                accepted = f"an axis of length {num} first"
                raise self._error(field, f"{name} is {_kind(leaf)}; accepted: {accepted}")

    def _same(self, field: str, what: str, value: PyTree, expected: PyTree) -> None:
        """Raises `ArgumentError` if a tree has other leaves, shapes or types than expected."""
        leaves = _by_path(value)
        expected_leaves = _by_path(expected)
        for path in [*expected_leaves, *leaves]:
            kind = _kind(leaves.get(path), "missing")
            accepted = _kind(expected_leaves.get(path), "missing")
            if kind != accepted:
                raise self._error(field, f"{what}{path} is {kind}; accepted: {accepted}")
        structure = jax.tree.structure(value)
        accepted = jax.tree.structure(expected)
        if structure != accepted:
            raise self._error(field, f"{what} is {structure}; accepted: {accepted}")


def _by_path(value: PyTree) -> dict[str, Any]:
    """Leaves of a tree by their paths."""
    leaves = jax.tree.leaves_with_path(value)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _width(index: Any) -> Any:
    """J of an array (J,), or "J" for anything else."""
    shape = getattr(index, "shape", ())
    return shape[0] if len(shape) == 1 else "J"


def _kind(value: Any, none: str = "None") -> str:
    """An array's type and shape, or an object's type, in words."""
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return none if value is None else type(value).__name__
