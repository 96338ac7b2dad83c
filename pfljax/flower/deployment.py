"""What a server and its nodes agree on without a message: the method, the shapes, and which arrays travel.

Both sides build a `Deployment` from the same run, so a message holds arrays and nothing else. Tracing the method's
functions says which arrays they read; no others leave their side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.held import taking
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    First,
    Key,
    Metrics,
    Mixture,
    Params,
    PyTree,
    Split,
    Start,
    State,
    Topology,
)
from pfljax.exchange import lifting
from pfljax.exchange.in_python import collect
from pfljax.exchange.plan import ExecutionPlan, make_plan
from pfljax.exchange.rounds import as_sent
from pfljax.exchange.views import view
from pfljax.local.privacy import secret_key
from pfljax.run.compiled import Jitted
from pfljax.run.experiment import Experiment
from pfljax.training.dependence import used_arguments
from pfljax.training.outcome import make_key

INITIAL, ROUNDS, PREDICTIONS, NEWCOMERS = range(4)  # purposes of `make_key`


class Rows(NamedTuple):
    """Numbers of examples to which all clients' data is padded.

    Attributes:
        train: Training examples.
        validation: Validation examples.
    """

    train: int
    validation: int


class Travels(NamedTuple):
    """Which arrays leave their side: trees of bools.

    Attributes:
        work: Of the server's state, those that a client reads in `client_update`.
        download: Those that it reads in `download`.
        select: Those that it reads in `select_models`.
        predict: Those that it reads before it predicts.
        adapt: Those that a newcomer reads; None if newcomers are not possible.
        first: Of what the server begins with, those that a client's first row depends on.
        row: Of a client's row, those that the server's update reads.
        changed_row: Of a client's row, those that the server's update changes.
        models: Whether a newcomer reads models.
    """

    work: PyTree
    download: PyTree
    select: PyTree
    predict: PyTree
    first: Start
    row: PyTree
    changed_row: PyTree


class Shapes(NamedTuple):
    """Shapes and types of what travels or is kept.

    Attributes:
        start: What the server begins with.
        first: What a client begins with.
        index: (J,) which models a client receives.
        models: These models, leaves (J, ...).
        output: What a client returns, as it is sent.
        mixture: Whose models it predicts with.
        predicted_models: These models.
    """

    start: Start
    first: First
    index: Any
    models: Params
    output: ClientOutput
    mixture: Mixture
    predicted_models: Params


class Deployment:
    """One run as functions of one client and of the server, which may be in different processes.

    Attributes:
        experiment: The run.
        plan: One device of this process.
        algorithm: The method with its stages.
        rows: The numbers of examples to which clients' data is padded.
        shapes: Shapes of all arrays.
        travels: Which arrays leave their side.
        asks_download: Whether the client has to say which models it wants, since that depends on its row.
        asks_select: Whether it has to say whose models it predicts with.
        start_reads_examples: Whether the server begins with clients' examples.
        reads_validation: Whether a client's update reads validation examples.
    """

    def __init__(self, experiment: Experiment, rows: Rows):
        """Traces the method.

        Raises:
            ArgumentError: if the run has something that cannot be deployed.
        """
        check(experiment)
        self.rows = rows
        self.plan: ExecutionPlan = make_plan("map", devices=1)
        problem = experiment.problem
        self.experiment = dataclasses.replace(
            experiment, problem=problem._replace(plan=self.plan, n_max=rows.train)
        )
        self.problem = self.experiment.problem
        self.algorithm: Algorithm = self.experiment.algorithm(self.plan)
        self.topology = self.algorithm.topology
        self.data_shapes = self._data_shapes(self.problem.num_clients)
        self.client_shapes = self._data_shapes(1)
        self.shapes = self._shapes()
        self.start_reads_examples = self._start_reads_examples()
        self._trace()

    # ---- Keys.

    def key(self, purpose: int, secret: Key | None = None, done: int = 0) -> Key:
        """The run's key for its initial state, rounds, predictions or newcomers.

        Args:
            purpose: One of the constants above.
            secret: This side's own secret, for private noise; None: the run has no noise, or a seed for tests.
            done: Number of rounds so far.
        """
        experiment = self.experiment
        public = jax.random.key(experiment.seed)
        if secret is None:
            secret = secret_key(experiment.noise_seeds, public)
        return make_key(experiment, public, secret, purpose, done)

    # ---- A client's functions.

    def first_row(self, client: Array, start: Start) -> First:
        """What a client begins with."""
        key = self.key(INITIAL)

        def first(client: Array, start: Start) -> First:
            return self.algorithm.first_row(key, client, start)

        return self._jitted("first_row", first)(client, start)

    def download(
        self,
        key: Key,
        client: Array,
        round_number: Array,
        server: PyTree,
        row: PyTree,
        cohort: Cohort,
    ) -> Array:
        """(J,) the models that a client receives."""
        function = functools.partial(self.trace_download, everyone=cohort.everyone)
        name = f"download{cohort.everyone}{cohort.ids.shape}"
        return self._jitted(name, function)(key, client, round_number, server, row, cohort.ids)

    def trace_download(
        self,
        key: Key,
        client: Array,
        round_number: Array,
        server: PyTree,
        row: PyTree,
        ids: Array,
        *,
        everyone: bool = False,
    ) -> Array:
        """As `download`, to be traced."""
        if not self.topology.moves:
            return client[None]
        algorithm = self.algorithm
        if algorithm.download is None:
            return jnp.arange(self.num_models, dtype=jnp.int32)
        context = self._context(key, client, round_number, server)
        download = lifting.in_precision(algorithm, algorithm.download)
        return download(context, row, Cohort(ids, everyone))

    def work(
        self,
        key: Key,
        client: Array,
        round_number: Array,
        step: Array,
        index: Array,
        models: Params,
        server: PyTree,
        row: PyTree,
        data: ClientData,
        later: bool = False,
    ) -> ClientOutput:
        """A client's part in an exchange, as it is sent."""
        function = functools.partial(self.trace_work, later=later)
        jitted = self._jitted(f"work{later}", function)
        return jitted(key, client, round_number, step, index, models, server, row, data)

    def trace_work(
        self,
        key: Key,
        client: Array,
        round_number: Array,
        step: Array,
        index: Array,
        models: Params,
        server: PyTree,
        row: PyTree,
        data: ClientData,
        *,
        later: bool = False,
    ) -> ClientOutput:
        """As `work`, to be traced."""
        context = ClientContext(
            key=jax.random.fold_in(key, client),
            round=round_number,
            step=step,
            index=index,
            server=server,
            client=client,
            later=later,
        )
        update = lifting.in_precision(self.algorithm, self.algorithm.client_update)
        output = update(context, models, row, view(data, jnp.zeros((), jnp.int32)))
        return as_sent(output) if self.topology.moves else output

    def select(
        self, key: Key, client: Array, round_number: Array, server: PyTree, row: PyTree, size: Array
    ) -> Mixture:
        """Whose models a client predicts with."""
        arguments = (key, client, round_number, server, row, size)
        return self._jitted("select", self.trace_select)(*arguments)

    def trace_select(
        self, key: Key, client: Array, round_number: Array, server: PyTree, row: PyTree, size: Array
    ) -> Mixture:
        """As `select`, to be traced."""
        stacked = First(row=jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], row))
        models = jax.tree.map(zeros_like_shape, self.shapes_of_stack)
        state = State(Start(state=server, models=models), stacked, round_number)
        if not self.topology.on_server:
            state = state._replace(clients=stacked._replace(model=models))
        mixtures = lifting.select_models(
            self.algorithm, self.plan, key, state, client[None], size[None]
        )
        return jax.tree.map(lambda leaf: leaf[0], mixtures)

    def serve(
        self,
        use: lifting.Use,
        key: Key,
        client: Array,
        round_number: Array,
        models: Params,
        server: PyTree,
        row: PyTree,
        data: ClientData,
        inputs: PyTree,
        mixture: Mixture,
        trained: Array | None,
    ) -> PyTree:
        """What a client's `use` of its prediction returns.

        Args:
            use: (prediction, inputs) -> anything.
            key: Key of the predictions.
            client: The client's number.
            round_number: Number of completed rounds.
            models: The models of the mixture, leaves (J, ...); under "own" its own, leaves (1, ...).
            server: The server's own state.
            row: The client's row.
            data: Its data, leaves (1, ...).
            inputs: Further inputs of `use`, leaves (1, ...).
            mixture: Whose models these are.
            trained: Whether it has ever trained; None: yes.
        """
        function = functools.partial(self.trace_serve, use)
        arguments = (key, client, round_number, models, server, row, data, inputs, mixture, trained)
        outputs = self._jitted("serve", function)(*arguments)
        return jax.tree.map(lambda leaf: leaf[0], outputs)

    def trace_serve(
        self,
        use: lifting.Use,
        key: Key,
        client: Array,
        round_number: Array,
        models: Params,
        server: PyTree,
        row: PyTree,
        data: ClientData,
        inputs: PyTree,
        mixture: Mixture,
        trained: Array | None,
    ) -> PyTree:
        """As `serve`, to be traced; leaves (1, ...)."""

        def stack(values: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], values)

        state = State(Start(state=server), First(row=stack(row)), round_number)
        if self.topology.on_server:
            state = state._replace(server=state.server._replace(models=models))
        else:
            state = state._replace(clients=state.clients._replace(model=models))
        # The models were fetched, those of a server, too.
        algorithm = dataclasses.replace(self.algorithm, topology=Topology.OWN)
        return lifting.serve(
            algorithm,
            self.plan,
            use,
            key,
            state,
            client[None],
            data,
            inputs,
            stack(mixture),
            None if trained is None else trained[None],
        ).outputs

    def serve_newcomer(
        self,
        use: lifting.Use,
        key: Key,
        round_number: Array,
        models: Params,
        server: PyTree,
        data: ClientData,
        inputs: PyTree,
    ) -> PyTree:
        """What a client unseen in training makes of all N models, leaves (N, ...), and of its own data."""

        def served(
            key: Key,
            round_number: Array,
            models: Params,
            server: PyTree,
            data: ClientData,
            inputs: PyTree,
        ) -> PyTree:
            state = State(Start(state=server, models=models), First(), round_number)
            return lifting.serve_newcomers(self.algorithm, self.plan, use, key, state, data, inputs)

        arguments = (key, round_number, models, server, data, inputs)
        outputs = self._jitted("serve_newcomer", served)(*arguments)
        return jax.tree.map(lambda leaf: leaf[0], outputs)

    # ---- The server's functions.

    def start(self, sizes: Rows, clients: ClientData | None = None) -> Start:
        """What the server begins with.

        Args:
            sizes: The clients' numbers of examples, (K,) each.
            clients: Their examples, if the server begins with some.
        """
        key = self.key(INITIAL)

        def start(sizes: Rows, clients: ClientData | None) -> Start:
            known = with_sizes(self.data_shapes, sizes) if clients is None else clients
            return lifting.begin(self.algorithm, key, known)

        return self._jitted("start", start)(sizes, clients)

    def sample(self, key: Key, state: State, sizes: Rows) -> Array:
        """(S,) the cohort that the method or a stage chooses."""

        def sample(key: Key, state: State, sizes: Rows) -> Array:
            assert self.algorithm.sample is not None
            return self.algorithm.sample(key, state, with_sizes(self.data_shapes, sizes))

        return self._jitted("sample", sample)(key, state, sizes)

    def update(
        self,
        key: Key,
        state: State,
        rows: Sequence[Array],
        outputs: ClientOutput,
        receivers: Array,
    ) -> tuple[State, list[Array], Metrics]:
        """The server's update with what S clients sent.

        Args:
            key: Key of the update.
            state: The state, with what is relayed of these clients, and without their rows.
            rows: Of their rows, the arrays that the update reads, leaves (S, ...).
            outputs: What they sent, stacked.
            receivers: (S, J) the models whose owners get it; see `in_python.collect`.

        Returns:
            The next state, without rows; of the rows, what has changed; and the method's metrics.
        """

        def update(
            key: Key,
            state: State,
            rows: Sequence[Array],
            outputs: ClientOutput,
            receivers: Array,
        ) -> tuple[State, list[Array], Metrics]:
            # Arrays of the rows that nothing depends on are zeros, which are never computed.
            num = receivers.shape[0]
            values = iter(rows)
            leaves, structure = jax.tree.flatten(self.shapes.first.row)
            all_leaves = []
            for leaf, is_read in zip(leaves, jax.tree.leaves(self.travels.row), strict=True):
                zeros = jnp.zeros((num, *leaf.shape), leaf.dtype)
                all_leaves.append(next(values) if is_read else zeros)
            state = state.with_rows(structure.unflatten(all_leaves))
            state, metrics = self.trace_update(key, state, outputs, receivers)
            changed = zip(
                jax.tree.leaves(state.rows), jax.tree.leaves(self.travels.changed_row), strict=True
            )
            new_rows = [leaf for leaf, is_changed in changed if is_changed]
            return state.with_rows(()), new_rows, metrics

        return self._jitted("update", update)(key, state, rows, outputs, receivers)

    def update_own(
        self, key: Key, state: State, outputs: ClientOutput, receivers: Array
    ) -> tuple[State, Metrics]:
        """The update of one client whose model never leaves it, on its own node."""
        return self._jitted("update_own", self.trace_update)(key, state, outputs, receivers)

    def trace_update(
        self, key: Key, state: State, outputs: ClientOutput, receivers: Array
    ) -> tuple[State, Metrics]:
        """The server's update of whole rows, to be traced."""
        num_received = receivers.shape[1]
        aggregate = collect(outputs, state.models, self.topology, receivers, num_received)
        server_update = lifting.in_precision(self.algorithm, self.algorithm.server_update)
        return server_update(key, state, aggregate)

    def idle_output(
        self,
        key: Key,
        client: Array,
        round_number: Array,
        step: Array,
        index: Array,
        server: PyTree,
        first: First,
        later: bool = False,
    ) -> ClientOutput:
        """What the server takes for the message of a client that does not answer: that of one without examples."""
        nobody = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.client_shapes)
        models = jax.tree.map(zeros_like_shape, self.shapes.models)
        return self.work(
            key, client, round_number, step, index, models, server, first.row, nobody, later
        )

    # ---- Tracing.

    @property
    def num_models(self) -> int:
        """N, the number of models that clients can download."""
        if not self.topology.on_server:
            return self.problem.num_clients
        leaves = jax.tree.leaves(self.shapes.start.models)
        return leaves[0].shape[0] if leaves else 1

    @property
    def shapes_of_all_models(self) -> Params:
        """Shapes of all N models, leaves (N, ...)."""
        num = self.num_models
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((num, *leaf.shape[1:]), leaf.dtype),
            self.shapes_of_stack,
        )

    @property
    def shapes_of_stack(self) -> Params:
        """Shapes of the models that clients can download: the server's (N, ...), or the clients' own (1, ...)."""
        if self.topology.on_server:
            return self.shapes.start.models
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype),
            self.shapes.first.model,
        )

    def _data_shapes(self, num: int) -> ClientData:
        """Shapes of `num` clients' data."""
        federation = self.experiment.federation

        def split(rows: int) -> Split:
            def x(leaf: Any) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct((num, rows, *leaf.shape), leaf.dtype)

            y = federation.train.y
            return Split(
                x=jax.tree.map(x, federation.inputs),
                y=jax.ShapeDtypeStruct((num, rows, *y.shape[2:]), y.dtype),
                size=shape_of((num,), np.int32),
            )

        return ClientData(split(self.rows.train), split(self.rows.validation))

    def _shapes(self) -> Shapes:
        """Traces one client's round and its prediction."""
        cohort_size = self.problem.cohort_size
        shapes = lifting.shapes_of_client(self.algorithm, self.data_shapes, cohort_size)
        output = shapes.output
        if self.topology.moves:
            output = jax.eval_shape(as_sent, output)
        shapes_so_far = Shapes(
            shapes.start,
            shapes.first,
            shapes.index,
            shapes.models,
            output,
            Mixture(shape_of((), np.int32), shape_of((), np.float32)),
            (),
        )
        self.shapes = shapes_so_far
        number = jax.ShapeDtypeStruct((), np.int32)
        mixture = jax.eval_shape(
            self.trace_select,
            jax.eval_shape(jax.random.key, 0),
            number,
            number,
            shapes.start.state,
            shapes.first.row,
            number,
        )
        num_predicted = mixture.index.shape[0]
        predicted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((num_predicted, *leaf.shape[1:]), leaf.dtype),
            self.shapes_of_stack,
        )
        return shapes_so_far._replace(mixture=mixture, predicted_models=predicted)

    def used(self, function: Any, arguments: tuple) -> tuple:
        """Trees of bools: which arguments a function's results depend on."""
        network = self.problem.model.network
        return used_arguments(taking(network, function), arguments, network.frozen_on_host)

    def _start_reads_examples(self) -> bool:
        """Whether the server begins with clients' examples; otherwise it knows no more than their numbers."""
        key = self.key(INITIAL)

        def start(clients: ClientData) -> Start:
            return self.algorithm.start(key, clients)

        (used,) = self.used(start, (self.data_shapes,))
        reads = [(split.x, split.y) for split in (used.train, used.validation)]
        return any(jax.tree.leaves(reads))

    @property
    def name(self) -> str:
        """The method's registered name."""
        return self.experiment.name

    def _trace(self) -> None:
        """Finds out which arrays travel."""
        shapes = self.shapes
        key = jax.eval_shape(lambda: self.key(ROUNDS))
        number = jax.ShapeDtypeStruct((), np.int32)
        server = shapes.start.state
        row = shapes.first.row

        # What a client reads.
        ids = jax.ShapeDtypeStruct((self.problem.cohort_size,), np.int32)
        work_key = jax.eval_shape(jax.random.key, 0)
        arguments = (
            work_key,
            number,
            number,
            number,
            shapes.index,
            shapes.models,
            server,
            row,
            self.client_shapes,
        )
        used = self.used(self.trace_work, arguments)
        work = used[6]
        self.reads_validation = any(jax.tree.leaves(used[8].validation))
        if self.algorithm.exchanges > 1:
            later = functools.partial(self.trace_work, later=True)
            work = jax.tree.map(either, work, self.used(later, arguments)[6])
        download = self.used(self.trace_download, (work_key, number, number, server, row, ids))
        self.asks_download = any(jax.tree.leaves(download[4]))
        predict_key = jax.eval_shape(lambda: self.key(PREDICTIONS))
        select = self.used(self.trace_select, (predict_key, number, number, server, row, number))
        self.asks_select = any(jax.tree.leaves((select[4], select[5])))

        # What a client's first row depends on.
        initial_key = self.key(INITIAL)

        def first(client: Array, start: Start) -> First:
            return self.algorithm.first_row(initial_key, client, start)

        first_used = self.used(first, (number, shapes.start))[1]

        row_read, row_changed = self._rows_of_update(key)
        everything = jax.tree.map(lambda leaf: True, server)
        self.travels = Travels(
            work=work,
            download=download[3],
            select=select[3],
            predict=everything if self.algorithm.predict is not None else select[3],
            first=first_used,
            row=row_read,
            changed_row=row_changed,
        )

    def _rows_of_update(self, key: Any) -> tuple[PyTree, PyTree]:
        """Which arrays of clients' rows the server's update reads, and which it changes.

        Raises:
            ArgumentError: if a method whose clients keep their models would need them at the server.
        """
        shapes = self.shapes
        num = 1 if not self.topology.moves else self.problem.cohort_size

        def stack(values: PyTree) -> PyTree:
            def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct((num, *leaf.shape), leaf.dtype)

            return jax.tree.map(stacked, values)

        state = State(shapes.start, stack(shapes.first), shape_of((), np.int32))
        outputs = stack(shapes.output._replace(row=(), opt_state=()))
        receivers = stack(shapes.index)
        update_key = jax.eval_shape(jax.random.key, 0)
        row_leaves = len(jax.tree.leaves(shapes.first.row))

        def update(
            rows: PyTree, key: Key, state: State, outputs: ClientOutput, receivers: Array
        ) -> tuple[PyTree, State, Metrics]:
            state = state.with_rows(rows)
            aggregate = collect(outputs, state.models, self.topology, receivers, receivers.shape[1])
            state, metrics = self.algorithm.server_update(key, state, aggregate)
            return state.rows, state.with_rows(()), metrics

        network = self.problem.model.network
        arguments = (state.rows, update_key, state.with_rows(()), outputs, receivers)
        traced = jax.make_jaxpr(taking(network, update))(*arguments, frozen=network.frozen_on_host)
        jaxpr = traced.jaxpr
        is_changed = [
            before is not after
            for before, after in zip(
                jaxpr.invars[:row_leaves], jaxpr.outvars[:row_leaves], strict=True
            )
        ]
        changed = jax.tree.unflatten(jax.tree.structure(shapes.first.row), is_changed)

        def without_same(*arguments: Any) -> PyTree:
            rows, state, metrics = update(*arguments)
            leaves = jax.tree.leaves(rows)
            return (
                [leaf for leaf, new in zip(leaves, is_changed, strict=True) if new],
                state,
                metrics,
            )

        read = self.used(without_same, arguments)[0]
        if not self.topology.moves:
            self._check_own(update, arguments)
        # A row that is changed in a cohort stays as it was outside of it, so it is held at the server, too.
        return jax.tree.map(either, read, changed), changed

    def _check_own(self, update: Any, arguments: tuple) -> None:
        """Raises `ArgumentError` for a method whose clients send nothing, but whose server keeps something of them."""

        def server_state(*arguments: Any) -> PyTree:
            _, state, _ = update(*arguments)
            return state.server.state

        outputs = self.used(server_state, arguments)[3]
        if any(jax.tree.leaves(outputs)):
            text = "its server keeps what clients report, though their models never leave them"
            raise ArgumentError("method", f"cannot be deployed: {text}", self.name)

    def _context(
        self, key: Key, client: Array, round_number: Array, server: PyTree
    ) -> ClientContext:
        state = State(Start(state=server), First(), round_number)
        return lifting.context_of(key, client, state)

    def _jitted(self, name: str, function: Any) -> Jitted:
        """A compiled function, made once."""
        if not hasattr(self, "_compiled"):
            self._compiled: dict[str, Jitted] = {}
        if name not in self._compiled:
            network = self.problem.model.network
            self._compiled[name] = Jitted(network, self.plan, function)
        return self._compiled[name]


def either(a: bool, b: bool) -> bool:
    """Whether one of two is true."""
    return a or b


def shape_of(shape: tuple[int, ...], dtype: Any) -> Any:
    """The shape and type of an array that is not computed."""
    return jax.ShapeDtypeStruct(shape, dtype)


def zeros_like_shape(leaf: Any) -> Array:
    """Zeros of a shape and type."""
    return jnp.zeros(leaf.shape, leaf.dtype)


def with_sizes(shapes: ClientData, sizes: Any) -> ClientData:
    """All clients' data without content, of which only the numbers of examples are known."""

    def split(shape: Split, size: Array) -> Split:
        x = jax.tree.map(zeros_like_shape, shape.x)
        return Split(x, zeros_like_shape(shape.y), size)

    return ClientData(split(shapes.train, sizes.train), split(shapes.validation, sizes.validation))


def check(experiment: Experiment) -> None:
    """Raises `ArgumentError` for what cannot be deployed."""
    reasons = {
        "attack": (experiment.attack.active, "nodes' data is their own; simulate attacks instead"),
        "faults": (experiment.faults.active, "nodes fail by themselves"),
        "clock": (experiment.problem.clock is not None, "a deployment takes real time"),
        "client_privacy": (
            experiment.client_privacy.active,
            "its coins and its noise are one secret of a program that holds all clients",
        ),
        "drift": (experiment.phases is not None, "nodes' data are their own"),
        "stop": (experiment.stop is not None, "the server plays all rounds"),
        "eval_clients": (experiment.scored is not None, "all clients are scored"),
        "cache_features": (experiment.features is not None, "nodes compute frozen layers"),
    }
    for name, (is_set, why) in reasons.items():
        if is_set:
            raise ArgumentError(name, f"accepted in a deployment: none; {why}")
