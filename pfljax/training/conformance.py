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
from pfljax.contract.held import given
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientData,
    ClientOutput,
    Cohort,
    First,
    Key,
    Mixture,
    Prediction,
    PyTree,
    Start,
    State,
    Told,
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
}
RESERVED |= {
    "accuracy_std",
    "accuracy_bottom_decile",
    "accuracy_min",
    "validation_loss",
    "validation_accuracy",
}
RESERVED |= {"method", "seed", "selected_by"}
ARRAYS = {"round", "topology", "group", "labels", "target", "clients"}  # of collaboration.npz
ARRAYS |= {"distribution"}  # the former name of "group" in files


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
    plan = experiment.problem.plan
    key = jax.random.key(0)
    for name in experiment.metrics.keys() & {*experiment.attack.measures}:
        raise ArgumentError(
            "metrics", f"is the attack's own; accepted: another name, such as own_{name}", name
        )
    checked = (
        experiment.measures
        or experiment.client_privacy.active
        or experiment.server.secure_aggregation
    )
    if not checked or isinstance(plan, PythonPlan):
        return
    clients = tree.shapes_of_rows(experiment.federation.client_data, problem.num_clients)
    state = jax.eval_shape(functools.partial(lifting.init, algorithm, plan), key, clients)
    one_round = make_round(algorithm, plan, problem.cohort_size)
    record = jax.eval_shape(one_round, experiment.keys(key, key), jnp.int32(0), state, clients)[1]
    for name in record.metrics.keys() & {*experiment.measures}:
        text = f"is also a metric of {experiment.name} itself; accepted: another name, such as own_{name}"
        raise ArgumentError("metrics", text, name)


def check_start(
    experiment: Experiment, plan: ExecutionPlan, key: Key, state: State, clients: ClientData
) -> None:
    """Raises `ArgumentError` if values of the initial state, or what a user's method makes of it, are not accepted.

    State and clients' data are those that the client store keeps.
    """
    # which shows what is wrong by itself
    if is_built_in(experiment.method) or isinstance(plan, PythonPlan):
        return
    contract = Contract(experiment, plan)
    num = experiment.problem.cohort_size
    contract.algorithm = experiment.algorithm(plan)  # the state is its
    # the first and the last one, too
    ids = np.linspace(0, experiment.problem.num_clients - 1, num).astype(np.int32)
    contract.check_places(key, state, clients, ids)
    if store_of(experiment).on_devices:
        return contract.check_values(key, state, clients)
    held, data = (place(plan, stacks.read(stack, ids), num) for stack in (state.clients, clients))
    contract.check_values(key, state._replace(clients=held), data, ids)


def check_weights(
    experiment: Experiment, field: str, weights: np.ndarray, ids: np.ndarray | None = None
) -> None:
    """Raises `ArgumentError` unless weights (n, J) of a user's method are on the simplex.

    `field` is where they come from, and `ids` (n,) are the clients' numbers; None: all clients.
    """
    total = weights.sum(axis=1)
    least = weights.min(axis=1)
    wrong = ~((least >= 0) & (np.abs(total - 1) <= TOLERANCE))
    if not is_built_in(experiment.method) and wrong.any():
        first = int(np.argmax(wrong))
        client = first if ids is None else ids[first]
        text = f"the weights of client {client} sum to {total[first]:.4g}, and the smallest is {least[first]:.4g}"
        raise ArgumentError(
            field, f"{text}; accepted: 0 or more, with sum 1", owner=experiment.name
        )


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
        problem = self.problem
        key = jax.random.key(0)
        if not isinstance(algorithm.exchanges, int) or algorithm.exchanges < 1:
            raise self._error(
                "exchanges", f"is {algorithm.exchanges}; accepted: whole numbers, 1 or more"
            )
        clients = self.experiment.federation.client_data
        start = self._traced("start", key, clients)
        self._instance("start", start, Start)
        first = self._traced("first_row", key, jax.ShapeDtypeStruct((), jnp.int32), start)
        self._instance("first_row", first, First)
        shared = algorithm.topology.on_server
        self._check_owner(
            "start", "Start.models", start.models, shared, "the models that clients can download"
        )
        self._check_owner("start", "Start.opt_state", start.opt_state, shared)
        self._check_owner(
            "first_row", "First.model", first.model, not shared, "the client's own model"
        )
        self._check_owner("first_row", "First.opt_state", first.opt_state, not shared)
        state = jax.eval_shape(
            lambda *args: lifting.init(algorithm, problem.plan, *args), key, clients
        )
        if algorithm.sample:
            found = self._traced("sample", key, state, clients)
            self._shape("sample", "the array", found, (problem.cohort_size,), "integer")
        self._check_round(key, state, clients)
        self._check_predictions(key, state, clients)

    def _check_owner(
        self, field: str, what: str, found: PyTree, accepted: bool, required: str = ""
    ) -> None:
        """Checks that a part is given only where it is accepted, and always there if it is `required`."""
        topology = str(self.algorithm.topology)
        is_given = bool(jax.tree.leaves(found))
        if is_given and not accepted:
            raise self._error(field, f"{what} is given; accepted with topology={topology!r}: ()")
        if required and not is_given and accepted:
            raise self._error(
                field, f"{what} is empty; accepted with topology={topology!r}: {required}"
            )

    def _check_round(self, key: Key, state: State, clients: ClientData) -> None:
        algorithm = self.algorithm
        size = self.problem.cohort_size
        of_cohort, data = tree.shapes_of_rows((state.clients, clients), size)
        state = state._replace(clients=of_cohort)
        held = tree.num_rows(state.models) if algorithm.topology.on_server else 1
        if algorithm.download and algorithm.topology.moves:
            ids = jax.ShapeDtypeStruct((size,), jnp.int32)
            cohort = Cohort(ids, everyone=size == self.problem.num_clients)  # pyright: ignore[reportArgumentType]
            index = self._of_client("download", key, state, tree.shapes_of_rows(state.rows), cohort)
            held = _width(index)
            self._shape("download", "the index", index, (held,), "integer")
        output = self._check_client(key, state, data, held)
        index = jax.ShapeDtypeStruct((size, held), jnp.int32)
        found = self._traced(
            "server_update", key, state, self._aggregate(state, index, data, output)
        )
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], State):
            raise self._error(
                "server_update", f"returned {_kind(found)}; accepted: (State, dict of metrics)"
            )
        self._same("server_update", "State", found[0], state)
        self._instance("server_update", found[1], Mapping)
        for name, value in found[1].items():
            if name in RESERVED or not isinstance(name, str):
                text = f"returned a metric named {name}; accepted: any name but {', '.join(sorted(RESERVED))}"
                raise self._error("server_update", text)
            self._shape("server_update", f"the metric {name}", value, (), "number")

    def _of_client(self, field: str, key: Key, state: State, *args: Any, held: int = 0) -> Any:
        """Shapes of what a function of (context, *args) returns for one client, which reads its part of the data."""
        fn = operator.attrgetter(field)(self.algorithm)
        zero = jnp.zeros((), jnp.int32)

        def one(key, state, args):
            context = lifting.context_of(key, zero, state, jnp.zeros((held,), jnp.int32))
            return fn(
                context, *(view(arg, zero) if isinstance(arg, ClientData) else arg for arg in args)
            )

        return self._evaluate(field, one, key, state, args)

    def _check_client(self, key: Key, state: State, data: ClientData, held: int) -> ClientOutput:
        """Traces one client's update. Returns the shapes of its output."""
        topology = self.algorithm.topology
        push = topology is Topology.PUSH
        received = tree.shapes_of_rows(state.models, 1 if push else held)
        row = tree.shapes_of_rows(state.rows)
        output = self._of_client("client_update", key, state, received, row, data, held=held)
        self._instance("client_update", output, ClientOutput)
        self._same("client_update", "row", output.row, row)
        self._instance("client_update", output.upload, Upload, "upload: ")
        self._instance("client_update", output.told, Told, "told: ")
        self._shape("client_update", "told.loss", output.told.loss, (), "float")
        sent = held
        uploads = jax.tree.leaves(output.upload)
        if output.mixing_weights is not None or push:
            self._shape("client_update", "mixing_weights", output.mixing_weights, (held,), "float")
        elif uploads and not topology.moves:
            self._same("client_update", "upload", output.upload, Upload(received))
        elif uploads:
            sent = min((uploads[0].shape or (0,))[0], held) or held
            self._rows("client_update", "upload", output.upload, sent)
        if push and output.upload.weight is not None:
            raise self._error(
                "client_update", "upload.weight is given; accepted with topology='push': None"
            )
        if output.upload.weight is not None:
            self._shape("client_update", "upload.weight", output.upload.weight, (sent,), "float")
        if output.sent is not None:
            self._shape("client_update", "sent", output.sent, (sent,), "bool")
        return output

    def _aggregate(
        self, state: State, index: Any, data: ClientData, output: ClientOutput
    ) -> Aggregate:
        """Shapes of what the server gets back if all clients return outputs of these shapes."""
        topology = self.algorithm.topology

        def zeros(*args: Any) -> ClientOutput:
            """An output as it is added up, when `sent` is known."""
            return as_sent(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), output))

        exchange = functools.partial(
            self.problem.plan.exchange, zeros, topology=topology, own_first=topology.reads_others
        )
        return jax.eval_shape(exchange, state.models, index, state.rows, data)[1]

    def _check_predictions(self, key: Key, state: State, clients: ClientData) -> None:
        """Traces what clients predict with, and what is recorded of it."""
        algorithm = self.algorithm
        row = tree.shapes_of_rows(state.rows)
        held = tree.num_rows(state.models) if algorithm.topology.on_server else 1
        if algorithm.whom:
            mixture = self._of_client("whom", key, state, row, jax.ShapeDtypeStruct((), jnp.int32))
            self._instance("whom", mixture, Mixture)
            held = _width(mixture.index)
            self._shape("whom", "index", mixture.index, (held,), "integer")
            self._shape("whom", "weights", mixture.weights, (held,), "float")
        received = tree.shapes_of_rows(state.models, held)
        prediction = Prediction()
        if algorithm.predict:
            prediction = self._of_client("predict", key, state, received, row, clients, held=held)
        prediction = self._check_prediction("predict", prediction, received, clients)
        if self.experiment.unseen:
            self._check_newcomers(key, state, self.experiment.unseen.client_data)
        if algorithm.report.collaboration:
            field = "report.collaboration"
            used = self._of_client(field, key, state, row)
            self._instance(field, used, Mapping)
            if taken := ARRAYS & used.keys():
                raise self._error(
                    field, f"returned {', '.join(sorted(taken))}; accepted: other names of arrays"
                )
            held = _width(used.get("weights"))
            self._shape(field, "weights", used.get("weights"), (held,), "float")
            self._shape(field, "index", used.get("index"), (held,), "integer")

    def _check_newcomers(self, key: Key, state: State, clients: ClientData) -> None:
        """Traces what clients unseen in training predict with."""
        algorithm = self.algorithm
        topology = algorithm.topology
        models = state.models if topology.moves else ()
        if algorithm.adapt:
            found = self._of_client("adapt", key, state, models, clients)
        elif not topology.on_server:
            text = f"required for unseen clients with topology={str(topology)!r}; it says what they predict with"
            raise self._error("adapt", text)
        else:  # `whom` and `predict`, with an empty row

            def as_it_is(prediction, _):
                return prediction

            serve = functools.partial(
                lifting.serve_newcomers, algorithm, self.problem.plan, as_it_is
            )
            found = tree.shapes_of_rows(self._evaluate("adapt", serve, key, state, clients, ()))
        self._check_prediction("adapt", found, models, clients)

    def _check_prediction(
        self, field: str, prediction: Prediction, received: PyTree, clients: ClientData
    ) -> Prediction:
        """Checks the shapes of what a client predicts with. Returns them with models and weights."""
        model = self.problem.model
        apply = self.algorithm.apply
        self._instance(field, prediction, Prediction)
        if prediction.index is not None:
            self._shape(field, "index", prediction.index, (_width(prediction.index),), "integer")
        full = self._evaluate(field, lifting.resolved, prediction, received)
        held = (jax.tree.leaves(full.models) or [full.weights])[0].shape[0]
        self._shape(field, "weights", full.weights, (held,), "float")
        params = jax.eval_shape(model.init, jax.random.key(0))
        if apply is None:
            expected = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((held, *leaf.shape), leaf.dtype), params
            )
            self._same(field, "models", full.models, expected)
            return full
        x = tree.shapes_of_rows(clients.train.x)
        like = jax.eval_shape(model.apply, params, x)
        found = self._evaluate("apply", apply, full.models, full.inputs, x)
        self._shape("apply", "the outputs", found, like.shape, "float")
        if self.problem.model.task != "regression":
            self._check_logits(apply, full, x)
        return full

    def _check_logits(self, apply: Callable, prediction: Prediction, x: PyTree) -> None:
        """Raises `ArgumentError` if `Algorithm.apply` returns probabilities, for random models and two examples."""
        few = jax.tree.map(
            lambda leaf: leaf.update(shape=(min(leaf.shape[0], 2), *leaf.shape[1:])), x
        )
        args = prediction.models, prediction.inputs, few
        network = self.problem.model.network
        with given(network, network.on(self.problem.plan)):
            traced = jax.make_jaxpr(apply)(*args)
            if building.ends_in(traced.jaxpr, "logistic"):
                raise self._error("apply", building.OF_SIGMOID)
            if building.sum_to_1(jax.jit(apply)(*building.random_like(args))):
                raise self._error("apply", building.OF_SOFTMAX)

    def check_values(
        self, key: Key, state: State, clients: ClientData, ids: Array | None = None
    ) -> None:
        """Checks cohort, index, weights and models of the initial state, whose rows are those of `ids`, or all."""
        plan = self.problem.plan
        run = Jitted(self.problem.model.network, plan, self._values, out_shardings=plan.everywhere)
        found = run(key, state, clients, ids)
        cohort, index, mixture, num_models, finite = jax.device_get(found)
        if not finite:
            raise self._error(
                "start and first_row", "returned models with values that are not finite"
            )
        num = self.problem.num_clients
        topology = self.algorithm.topology
        found, counts = np.unique(cohort, return_counts=True)
        self._check_range("sample", found, num)
        if counts.max() > 1:
            raise self._error(
                "sample",
                f"returned {found[counts.argmax()]} more than once; accepted: distinct ids",
            )
        if topology.on_server:
            self._check_range("download", index, num_models)
        elif topology.moves:
            others = np.setdiff1d(index, cohort)
            if others.size:
                raise self._error(
                    "download", f"returned index {others[0]}; accepted: the ids of the cohort"
                )
            if topology.reads_others and (index[:, 0] != cohort).any():
                raise self._error(
                    "download",
                    "column 0 of the index is not the client itself; accepted: its own id",
                )
        self._check_range("whom", mixture.index, num_models if topology.on_server else num)
        check_weights(self.experiment, "whom", mixture.weights, cohort)

    def check_places(self, key: Key, state: State, clients: ClientData, ids: np.ndarray) -> None:
        """Checks the places of the models that clients `ids` predict with, among those that they received.

        State and clients' data are those that the client store keeps.
        """
        algorithm = self.algorithm
        plan = self.problem.plan
        data = self.experiment.federation.client_data
        if (predict := algorithm.predict) is None:
            return
        shape = jax.eval_shape(functools.partial(lifting.init, algorithm, plan), key, data)
        mixture, made = lifting.shapes(algorithm, plan, key, shape, data)
        if made.index is None:
            return

        def told(*args: Any) -> Prediction:
            made = predict(*args)
            return made._replace(inputs=made.index)

        engine = algorithm.engine._replace(tune=None)
        told_of = dataclasses.replace(algorithm, predict=told, engine=engine)

        def use(algorithm):
            return lambda prediction, _: prediction.inputs

        args = (lambda numbers: told_of), plan, use, ids, key, state, clients
        index = store_of(self.experiment).serve(self.experiment, *args)
        self._check_range("predict", index, len(mixture.index))

    def _values(self, key: Key, state: State, clients: ClientData, ids: Array | None):
        """What `check_values` checks."""
        algorithm = self.algorithm
        problem = self.problem
        plan = self.problem.plan
        if ids is not None:
            cohort = Cohort(ids, everyone=len(ids) == problem.num_clients)
        elif algorithm.sample:
            cohort = Cohort(jnp.sort(algorithm.sample(key, state, clients)).astype(jnp.int32))
        else:
            cohort = draw_cohort(key, problem.num_clients, problem.cohort_size)
        if ids is None and not cohort.everyone:
            # as in a round
            cohort = Cohort(jax.lax.with_sharding_constraint(cohort.ids, plan.everywhere))
            of_cohort, clients = plan.take_rows((state.clients, clients), cohort.ids)
            part = state._replace(clients=of_cohort)
        else:
            part = state
        index = lifting.download(algorithm, plan, key, part, cohort)
        mixture = lifting.whom(algorithm, plan, key, part, cohort.ids, clients.train.size)
        num_models = tree.num_rows(state.models) if jax.tree.leaves(state.models) else 1
        floats = [
            leaf
            for leaf in jax.tree.leaves(state.models)
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        finite = jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all()
        return cohort.ids, index, mixture, num_models, finite

    def _check_range(self, field: str, index: np.ndarray, num: int) -> None:
        wrong = index[(index < 0) | (index >= num)]
        if wrong.size:
            raise self._error(field, f"returned index {wrong[0]}; accepted: 0 to {num - 1}")

    def _error(self, field: str, text: str) -> ArgumentError:
        return ArgumentError(field, text, owner=self.experiment.name)

    def _call(self, field: str, fn: Callable, *args: Any) -> Any:
        """Calls a function; raises an `ArgumentError` for any error in it."""
        try:
            return fn(*args)
        except (ArgumentError, RunError):
            raise
        except Exception as error:
            raise self._error(field, raised(error, self._file())) from error

    def _evaluate(self, field: str, fn: Callable, *args: Any) -> Any:
        """Shapes of what a function returns."""
        return self._call(field, jax.eval_shape, fn, *args)

    def _traced(self, field: str, *args: Any) -> Any:
        """Shapes of what a function of the algorithm returns."""
        return self._evaluate(field, getattr(self.algorithm, field), *args)

    def _instance(self, field: str, found: Any, kind: type, where: str = "") -> None:
        if not isinstance(found, kind):
            accepted = "dict" if kind is Mapping else kind.__name__
            hint = former_contract.hint(self._file())
            text = f"{where}returned {_kind(found)}; accepted: {accepted}{hint}"
            raise self._error(field, text)

    def _file(self) -> str:
        """The file of the method."""
        return inspect.unwrap(type(self.experiment.method).build).__code__.co_filename

    def _shape(self, field: str, what: str, found: Any, shape: tuple[int, ...], kind: str) -> None:
        kinds = {
            "integer": jnp.integer,
            "float": jnp.floating,
            "bool": jnp.bool_,
            "number": jnp.generic,
        }
        if getattr(found, "shape", None) != shape or not jnp.issubdtype(found.dtype, kinds[kind]):
            text = f"{what} is {_kind(found, 'missing')}; accepted: {kind}[{', '.join(map(str, shape))}]"
            raise self._error(field, text)

    def _rows(self, field: str, what: str, found: PyTree, num: int) -> None:
        """Raises `ArgumentError` if a leaf has another number of rows."""
        for path, leaf in jax.tree.leaves_with_path(found):
            if leaf.shape[:1] != (num,):
                text = f"{what}{jax.tree_util.keystr(path)} is {_kind(leaf)}; accepted: an axis of length {num} first"
                raise self._error(field, text)

    def _same(self, field: str, what: str, found: PyTree, like: PyTree) -> None:
        """Raises `ArgumentError` if a tree has other leaves, shapes or types."""

        def named(tree):
            return {
                jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)
            }

        one = named(found)
        other = named(like)
        for name in [*other, *one]:
            came, expected = (_kind(each.get(name), "missing") for each in (one, other))
            if came != expected:
                raise self._error(field, f"{what}{name} is {came}; accepted: {expected}")
        if jax.tree.structure(found) != jax.tree.structure(like):
            text = f"{what} is {jax.tree.structure(found)}; accepted: {jax.tree.structure(like)}"
            raise self._error(field, text)


def _width(index: Any) -> Any:
    """J of an array (J,), or "J" for anything else."""
    return index.shape[0] if len(getattr(index, "shape", ())) == 1 else "J"


def _kind(found: Any, none: str = "None") -> str:
    """An array's type and shape, or an object's type, in words."""
    if hasattr(found, "dtype"):
        return f"{found.dtype}{list(found.shape)}"
    return none if found is None else type(found).__name__
