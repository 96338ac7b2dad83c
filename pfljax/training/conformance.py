"""Checks that users' methods return what `Algorithm` asks for: shapes when a run is created, values at round 0.

Every error names the field, what came and what is accepted. Built-in methods are not checked; tests do that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError, RunError, raised
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    Key,
    Predictor,
    PyTree,
    State,
)
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import draw_cohort, join_state, split_state
from pfljax.exchange.views import view
from pfljax.stores import stacks
from pfljax.stores.experiment import Experiment

TOLERANCE = 1e-3  # of the sum of a client's weights
# Entries of a row of metrics.jsonl, and of the tables and summaries that contain such rows.
RESERVED = {"round", "seconds", "train_loss", "bytes_down", "bytes_up", "loss", "accuracy", "accuracy_mean"}
RESERVED |= {"accuracy_std", "accuracy_bottom_decile", "accuracy_min", "validation_loss", "validation_accuracy"}
RESERVED |= {"method", "seed", "selected_by"}
ARRAYS = {"round", "topology", "distribution", "labels", "target", "clients"}  # of collaboration.npz


def check(experiment: Experiment) -> None:
    """Checks the shapes of what a user's method returns, by tracing its functions.

    Raises:
        ArgumentError: if one returns something that is not accepted, or raises an error.
    """
    if not is_built_in(experiment.method):
        Contract(experiment, experiment.problem.plan).check_shapes()


def check_start(experiment: Experiment, plan: ExecutionPlan, key: Key, state: State, clients: ClientData) -> None:
    """Checks the values of what a user's method returns for the initial state.

    Args:
        experiment: The run.
        plan: How clients are mapped to devices.
        key: The run's key.
        state: Its initial state, as the client store keeps it.
        clients: All clients' data, as the client store keeps them.

    Raises:
        ArgumentError: if a value is not accepted.
    """
    if is_built_in(experiment.method):
        return
    if experiment.client_store == "device":
        return Contract(experiment, plan).check_values(key, state, clients)
    num = experiment.problem.cohort_size
    ids = np.linspace(0, experiment.problem.num_clients - 1, num).astype(np.int32)  # the first and the last one, too
    contract = Contract(experiment, plan, ids)
    rows, rest = split_state(contract.algorithm, state)
    rows, clients = (place(plan, stacks.read(stack, ids), num) for stack in (rows, clients))
    contract.check_values(key, join_state(contract.algorithm, rows, rest), clients)


def check_weights(experiment: Experiment, weights: np.ndarray) -> None:
    """Checks that the weights (K, J) of a user's method are on the simplex.

    Raises:
        ArgumentError: if a client's are not.
    """
    total, least = weights.sum(axis=1), weights.min(axis=1)
    wrong = ~((least >= 0) & (np.abs(total - 1) <= TOLERANCE))
    if not is_built_in(experiment.method) and wrong.any():
        client = int(np.argmax(wrong))
        text = f"the weights of client {client} sum to {total[client]:.4g}, and the smallest is {least[client]:.4g}"
        raise ArgumentError("predictor", f"{text}; accepted: 0 or more, with sum 1", owner=experiment.name)


def is_built_in(method: Any) -> bool:
    """Whether a method is part of pfljax."""
    return type(method).__module__.startswith("pfljax.")


class Contract:
    """A method's functions, called with checks of what they return.

    Attributes:
        problem: The problem that the method is built for.
        algorithm: The built method.
    """

    def __init__(self, experiment: Experiment, plan: ExecutionPlan, part: Array | None = None):
        """Builds the method; `part` as in `Problem`."""
        self.experiment, self.problem = experiment, experiment.problem._replace(plan=plan, part=part)
        self.algorithm: Algorithm = self._call("build", experiment.method.build, self.problem)
        self._instance("build", self.algorithm, Algorithm)

    def check_shapes(self) -> None:
        """Traces all functions with the shapes of the federation."""
        algorithm, num, size = self.algorithm, self.problem.num_clients, self.problem.cohort_size
        if not isinstance(algorithm.exchanges, int) or algorithm.exchanges < 1:
            raise self._error("exchanges", f"is {algorithm.exchanges}; accepted: whole numbers, 1 or more")
        clients, key = self.experiment.federation.client_data, jax.random.key(0)
        state = self._traced("init", key, clients)
        self._instance("init", state, State)
        rows, rest = split_state(algorithm, state)
        self._rows("init", "State", rows, num)
        if algorithm.sample:
            self._shape("sample", "the array", self._traced("sample", key, state, clients), (size,), "integer")
        rows, data = tree.shapes_of_rows((rows, clients), size)
        self._check_round(key, join_state(algorithm, rows, rest), data)
        predictor = self._traced("predictor", key, state, clients)
        self._check_predictor("predictor", predictor, clients)
        if algorithm.fine_tune:
            self._check_predictor("fine_tune", self._traced("fine_tune", key, predictor, clients), clients)
        if self.experiment.unseen:
            newcomers = self.experiment.unseen.client_data
            self._check_predictor("adapt", self._traced("adapt", key, state, newcomers), newcomers)
        if algorithm.report.collaboration:
            self._check_collaboration(state)

    def _check_round(self, key: Key, state: State, data: ClientData) -> None:
        """Traces a round of a cohort's state and data."""
        algorithm, size = self.algorithm, self.problem.cohort_size
        ids = jax.ShapeDtypeStruct((size,), jnp.int32)
        cohort = Cohort(ids, everyone=size == self.problem.num_clients)  # pyright: ignore[reportArgumentType]
        index = self._traced("download", key, state, cohort)
        held = 1 if algorithm.topology == "own" else _width(index)
        self._shape("download", "the index", index, (size, held), "integer")
        output = self._check_client(key, state, data, held)
        aggregate = self._aggregate(state, index, data, output)
        found = self._traced("server_update", key, state, aggregate)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], State):
            raise self._error("server_update", f"returned {_kind(found)}; accepted: (State, dict of metrics)")
        self._same("server_update", "State", found[0], state)
        self._instance("server_update", found[1], Mapping)
        for name, value in found[1].items():
            if name in RESERVED or not isinstance(name, str):
                text = f"returned a metric named {name}; accepted: any name but {', '.join(sorted(RESERVED))}"
                raise self._error("server_update", text)
            self._shape("server_update", f"the metric {name}", value, (), "number")

    def _check_client(self, key: Key, state: State, data: ClientData, held: int) -> ClientOutput:
        """Traces one client's update. Returns the shapes of its output."""
        algorithm, push = self.algorithm, self.algorithm.topology == "push"
        one = functools.partial(_with_rows, ())
        received = _with_rows((1,) if push else (held,), state.models)
        zero = jnp.zeros((), jnp.int32)

        def update(key, models, row, data, index, server):
            context = ClientContext(key, zero, zero, index, server)
            return algorithm.client_update(context, models, row, view(data, zero))

        index = jax.ShapeDtypeStruct((held,), jnp.int32)
        found = self._evaluate("client_update", update, key, received, one(state.clients), data, index, state.server)
        self._instance("client_update", found, ClientOutput)
        self._same("client_update", "client", found.client, one(state.clients))
        self._instance("client_update", found.report, Mapping, "report: ")
        self._shape("client_update", "report['loss']", found.report.get("loss"), (), "float")
        sent = held
        if found.mixing_weights is not None or push:
            self._shape("client_update", "mixing_weights", found.mixing_weights, (held,), "float")
        elif jax.tree.leaves(found.upload) and algorithm.topology == "own":
            self._same("client_update", "upload", found.upload, received)
        elif uploads := jax.tree.leaves(found.upload):
            sent = min((uploads[0].shape or (0,))[0], held) or held
            self._rows("client_update", "upload", found.upload, sent)
        if found.sent is not None:
            self._shape("client_update", "sent", found.sent, (sent,), "bool")
        return found

    def _aggregate(self, state: State, index: Array, data: ClientData, output: ClientOutput) -> Aggregate:
        """Shapes of what the server gets back if all clients return outputs of these shapes."""
        topology = self.algorithm.topology
        zeros = lambda *args: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), output)
        exchange = functools.partial(
            self.problem.plan.exchange, zeros, topology=topology, own_first=topology == "peers"
        )
        return jax.eval_shape(exchange, state.models, index, state.clients, data)[1]

    def _check_predictor(self, field: str, predictor: Predictor, clients: ClientData) -> None:
        """Checks the shapes of a predictor of these clients."""
        self._instance(field, predictor, Predictor)
        if predictor.topology not in ("own", "shared", "peers"):
            raise self._error(field, f"topology is {predictor.topology!r}; accepted: 'own', 'shared', 'peers'")
        num, model = tree.num_rows(clients), self.problem.model
        held = _width(predictor.weights)
        self._shape(field, "weights", predictor.weights, (num, held), "float")
        self._shape(field, "index", predictor.index, (num, held), "integer")
        self._rows(field, "rows", predictor.rows, num)
        leaves = jax.tree.leaves(predictor.models)
        num_models = {"own": num * held, "peers": self.problem.num_clients}.get(predictor.topology)
        if num_models is None:
            num_models = (leaves[0].shape or (0,))[0] if leaves else 0
        self._rows(field, "models", predictor.models, num_models)
        params = jax.eval_shape(model.init, jax.random.key(0))
        if predictor.apply is None:
            expected = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_models, *leaf.shape), leaf.dtype), params)
            return self._same(field, "models", predictor.models, expected)
        x = tree.shapes_of_rows(clients.train.x, 1)
        x = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        like = jax.eval_shape(model.predict, params, x)
        received, row = _with_rows((held,), predictor.models), _with_rows((), predictor.rows)
        found = self._evaluate(f"{field}.apply", predictor.apply, received, row, x)
        self._shape(f"{field}.apply", "the predictions", found, like.shape, "float")

    def _check_collaboration(self, state: State) -> None:
        """Checks the shapes of the arrays for collaboration.npz."""
        field, num = "report.collaboration", self.problem.num_clients
        assert self.algorithm.report.collaboration
        used = self._evaluate(field, self.algorithm.report.collaboration, state)
        self._instance(field, used, Mapping)
        if taken := ARRAYS & used.keys():
            raise self._error(field, f"returned {', '.join(sorted(taken))}; accepted: other names of arrays")
        held = _width(used.get("weights"))
        self._shape(field, "weights", used.get("weights"), (num, held), "float")
        self._shape(field, "index", used.get("index"), (num, held), "integer")

    def check_values(self, key: Key, state: State, clients: ClientData) -> None:
        """Checks cohort, index, weights and models of the initial state; rows and data are those of `Problem.part`."""
        found = jax.jit(self._values, out_shardings=self.problem.plan.everywhere)(key, state, clients)
        cohort, index, used, weights, num_models, finite = jax.device_get(found)
        if not finite:
            raise self._error("init", "returned models with values that are not finite")
        num, topology = self.problem.num_clients, self.algorithm.topology
        ids, counts = np.unique(cohort, return_counts=True)
        self._check_range("sample", ids, num)
        if counts.max() > 1:
            raise self._error("sample", f"returned {ids[counts.argmax()]} more than once; accepted: distinct ids")
        if topology == "shared":
            self._check_range("download", index, num_models[0])
        elif topology != "own":
            others = np.setdiff1d(index, cohort)
            if others.size:
                raise self._error("download", f"returned index {others[0]}; accepted: the ids of the cohort")
            if topology == "peers" and (index[:, 0] != cohort).any():
                raise self._error("download", "column 0 of the index is not the client itself; accepted: its own id")
        self._check_range("predictor", used, num_models[1])
        check_weights(self.experiment, weights)

    def _values(self, key: Key, state: State, clients: ClientData):
        """What `check_values` checks."""
        algorithm, problem = self.algorithm, self.problem
        if problem.part is not None:
            cohort = Cohort(jnp.asarray(problem.part), everyone=len(problem.part) == problem.num_clients)
        elif algorithm.sample:
            cohort = Cohort(jnp.sort(algorithm.sample(key, state, clients)).astype(jnp.int32))
        else:
            cohort = draw_cohort(key, problem.num_clients, problem.cohort_size)
        rows, rest = split_state(algorithm, state)
        if problem.part is None and not cohort.everyone:
            cohort = Cohort(jax.lax.with_sharding_constraint(cohort.ids, problem.plan.everywhere))  # as in a round
            rows = problem.plan.take_rows(rows, cohort.ids)
        index = algorithm.download(key, join_state(algorithm, rows, rest), cohort)
        predictor = algorithm.predictor(key, state, clients)
        models = [state.models, predictor.models]
        counts = [tree.num_rows(stack) if jax.tree.leaves(stack) else 1 for stack in models]
        if predictor.topology == "peers":
            counts[1] = problem.num_clients
        floats = [leaf for leaf in jax.tree.leaves(state.models) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        finite = jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all()
        return cohort.ids, index, predictor.index, predictor.weights, counts, finite

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
            file = inspect.unwrap(type(self.experiment.method).build).__code__.co_filename
            raise self._error(field, raised(error, file)) from error

    def _evaluate(self, field: str, fn: Callable, *args: Any) -> Any:
        """Shapes of what a function returns."""
        return self._call(field, jax.eval_shape, fn, *args)

    def _traced(self, field: str, *args: Any) -> Any:
        """Shapes of what a function of the algorithm returns."""
        return self._evaluate(field, getattr(self.algorithm, field), *args)

    def _instance(self, field: str, found: Any, kind: type, where: str = "") -> None:
        if not isinstance(found, kind):
            accepted = "dict" if kind is Mapping else kind.__name__
            raise self._error(field, f"{where}returned {_kind(found)}; accepted: {accepted}")

    def _shape(self, field: str, what: str, found: Any, shape: tuple[int, ...], kind: str) -> None:
        kinds = {"integer": jnp.integer, "float": jnp.floating, "bool": jnp.bool_, "number": jnp.generic}
        if getattr(found, "shape", None) != shape or not jnp.issubdtype(found.dtype, kinds[kind]):
            raise self._error(field, f"{what} is {_form(found)}; accepted: {kind}[{', '.join(map(str, shape))}]")

    def _rows(self, field: str, what: str, found: PyTree, num: int) -> None:
        """Raises `ArgumentError` if a leaf has another number of rows."""
        for path, leaf in jax.tree.leaves_with_path(found):
            if leaf.shape[:1] != (num,):
                text = f"{what}{jax.tree_util.keystr(path)} is {_form(leaf)}; accepted: an axis of length {num} first"
                raise self._error(field, text)

    def _same(self, field: str, what: str, found: PyTree, like: PyTree) -> None:
        """Raises `ArgumentError` if a tree has other leaves, shapes or types."""
        named = lambda tree: {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        one, other = named(found), named(like)
        for name in [*other, *one]:
            came, expected = _form(one.get(name)), _form(other.get(name))
            if came != expected:
                raise self._error(field, f"{what}{name} is {came}; accepted: {expected}")
        if jax.tree.structure(found) != jax.tree.structure(like):
            text = f"{what} is {jax.tree.structure(found)}; accepted: {jax.tree.structure(like)}"
            raise self._error(field, text)


def _with_rows(leading: tuple[int, ...], stack: PyTree) -> PyTree:
    """Shapes of a stack with other leading axes in place of its rows."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leading, *leaf.shape[1:]), leaf.dtype), stack)


def _width(index: Any) -> Any:
    """J of an array (n, J), or "J" for anything else."""
    return index.shape[1] if len(getattr(index, "shape", ())) == 2 else "J"


def _form(found: Any) -> str:
    """An array's type and shape, in words."""
    if found is None:
        return "missing"
    return f"{found.dtype}{list(found.shape)}" if hasattr(found, "dtype") else _kind(found)


def _kind(found: Any) -> str:
    return "None" if found is None else type(found).__name__
