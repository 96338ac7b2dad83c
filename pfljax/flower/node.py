"""A node's side of a deployment: it reads its own data, trains, scores, and keeps its client's row."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import ArgumentError, RunError, few
from pfljax.contract.pooled import is_pooled
from pfljax.contract.types import (
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
    Upload,
)
from pfljax.data import Federation, match_classes
from pfljax.data.sources.source import Scaling
from pfljax.data.variants import match_columns
from pfljax.exchange.rounds import DOWNLOAD as DOWNLOAD_KEY
from pfljax.exchange.rounds import UPDATE as UPDATE_KEY
from pfljax.exchange.rounds import WORK as WORK_KEY
from pfljax.exchange.rounds import round_key
from pfljax.flower import messages, moments
from pfljax.flower.deployment import NEWCOMERS, PREDICTIONS, ROUNDS, Deployment, Rows, check
from pfljax.flower.messages import Answer, Memory, NodeConfig, Task, Values
from pfljax.flower.wire import Arrays, has_section, int32, pack, unpack
from pfljax.run.experiment import Experiment
from pfljax.stores import serving

SPLITS = ("train", "validation", "test")
# a node's configuration, the run's clients -> a federation of the node's client alone
Read = Callable[[NodeConfig, Federation], Federation]


def client_of_run(config: NodeConfig, clients: Federation) -> Federation:
    """A node's client, if it is one of those that the run was made with: number `partition-id`.

    Raises:
        ArgumentError: if the node's configuration names no such client.
    """
    return one_client(clients, clients.client_number(number_of(config)))


def one_client(clients: Federation, number: int) -> Federation:
    """A federation of one of the clients alone, with the scaling of all of them."""

    def split(stacked: Split) -> Split:
        size = int(np.asarray(stacked.size)[number])

        def row(leaf: Any) -> np.ndarray:
            return np.array(leaf[number, :size])[None]

        x = jax.tree.map(row, stacked.x, is_leaf=is_pooled)
        return Split(x, row(stacked.y), np.array([size], np.int32))

    def entry(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[number : number + 1]

    return dataclasses.replace(
        clients,
        train=split(clients.train),
        validation=split(clients.validation),
        test=split(clients.test),
        group=entry(clients.group),
        target=entry(clients.target),
        attacker=None,
        client_names=entry(clients.client_names),
        origin=None,
        local_clients=None,
    )


def number_of(config: NodeConfig) -> int:
    """The number of a node's client. Raises `ArgumentError` if its configuration has none."""
    number = config.get("partition-id")
    if number is None:
        text = "a node needs its client's number in its node-config, such as partition-id=0"
        raise ArgumentError("partition-id", text)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ArgumentError("partition-id", "accepted: a whole number, 0 or more", number)
    return number


class Node:
    """Answers a server's tasks for one client.

    It has no memory of its own: `answer` takes what the node remembers and returns what it remembers
    next, so that a process may end after every task.

    Attributes:
        experiment: The run.
        clients: The clients that the run was made with; their examples are read only by `client_of_run`.
        read: Reads the data of the node's client.
    """

    def __init__(self, experiment: Experiment, clients: Federation, read: Read = client_of_run):
        """Raises `ArgumentError` for what cannot be deployed."""
        check(experiment)
        self.experiment = experiment
        self.clients = clients
        self.read = read
        self._deployments: dict[Rows, Deployment] = {}
        self._federations: dict[tuple, Federation] = {}

    def answer(self, task: Task, memory: Memory, config: NodeConfig) -> tuple[Answer, Memory]:
        """The answer to a task, and what the node remembers next.

        A mistake in the node's configuration or data is an answer, too: the server ends the run with its line.
        """
        try:
            return self._answer(task, memory, config)
        except (ArgumentError, RunError) as error:
            return Answer({"error": str(error)}, {}), memory

    def _answer(self, task: Task, memory: Memory, config: NodeConfig) -> tuple[Answer, Memory]:
        if task.name == messages.DESCRIBE:
            return self._describe(config), memory
        if task.name == messages.PREPARE:
            return self._prepare(task, memory, config)
        if task.name == messages.EXAMPLES:
            return self._examples(task, config), memory
        if memory.values.get("token") != task.values["token"]:
            return Answer({"unprepared": True}, {}), memory
        client = Client(self, task, memory, config)
        functions = {
            messages.DOWNLOAD: client.download,
            messages.WORK: client.work,
            messages.SELECT: client.select,
            messages.EVALUATE: client.evaluate,
            messages.ADAPT: client.adapt,
        }
        if task.name not in functions:
            raise RunError(f"unknown task {task.name!r}; server and node need the same pfljax")
        return functions[task.name]()

    def _describe(self, config: NodeConfig) -> Answer:
        """Who the node's client is, how many examples it has, and their sums."""
        number = number_of(config)
        federation = self.federation(config)
        values: Values = {
            "client": number,
            "newcomer": bool(config.get("newcomer", False)),
        }
        for name in SPLITS:
            split: Split = getattr(federation, name)
            values[name] = int(split.size[0])
        if not values["train"]:
            raise ArgumentError("data", f"client {values['client']} has no training example")
        return Answer(values, moments.measure(federation))

    def _prepare(self, task: Task, memory: Memory, config: NodeConfig) -> tuple[Answer, Memory]:
        """Remembers how inputs are scaled; makes the client's first row unless it has one of this run."""
        token = task.values["token"]
        if memory.values.get("token") == token and has_section("now", memory.arrays):
            return Answer({"round": memory.values["round"]}, {}), memory
        rows = Rows(int(task.values["rows_train"]), int(task.values["rows_validation"]))
        deployment = self.deployment(rows)
        values: Values = {
            "token": token,
            "rows_train": rows.train,
            "rows_validation": rows.validation,
            "round": -1,
            "step": -1,
            "trained": False,
        }
        arrays: Arrays = {
            name: array for name, array in task.arrays.items() if name.startswith("scaling/")
        }
        if self.experiment.noise_seeds and None in self.experiment.noise_seeds:
            # The node's own secret, from which its noise is drawn; nobody else knows it.
            arrays["secret/key"] = np.frombuffer(secrets.token_bytes(8), np.uint32)
        if not config.get("newcomer", False):
            start = unpack("start", deployment.shapes.start, task.arrays, deployment.travels.first)
            number = int32(number_of(config))
            first = deployment.first_row(number, start)
            arrays |= pack("now", kept_by_client(deployment, first))
        return Answer({"round": -1}, {}), Memory(values, arrays)

    def _examples(self, task: Task, config: NodeConfig) -> Answer:
        """The client's examples, scaled and padded, if whoever runs the node agrees."""
        if not config.get("send-examples", False):
            text = f"{task.values['method']} needs clients' examples on the server"
            agree = "send-examples=true in the node-config agrees"
            raise ArgumentError("send-examples", f"{text}; {agree}")
        rows = Rows(int(task.values["rows_train"]), int(task.values["rows_validation"]))
        federation = scaled(self.federation(config), task.arrays)
        train = padded(federation.train, rows.train)
        data = ClientData(train, padded(federation.validation, rows.validation))
        return Answer({}, pack("examples", data))

    def deployment(self, rows: Rows) -> Deployment:
        """The run for these numbers of rows, traced once."""
        if rows not in self._deployments:
            self._deployments = {rows: Deployment(self.experiment, rows)}
        return self._deployments[rows]

    def federation(self, config: NodeConfig) -> Federation:
        """The node's client, read once."""
        key = tuple(sorted((name, str(value)) for name, value in config.items()))
        if key not in self._federations:
            federation = self.read(config, self.clients)
            if federation.num_clients != 1:
                text = f"has {federation.num_clients} clients; expected the node's client alone"
                raise ArgumentError("data", text)
            self._federations = {key: as_in_run(federation, self.clients)}
        return self._federations[key]


def as_in_run(federation: Federation, clients: Federation) -> Federation:
    """A node's client with the columns and classes of the run's clients, and a scaling of its own.

    Raises:
        ArgumentError: if its data are others.
    """
    same_columns = match_columns(federation, clients, "data")
    matched = match_classes(same_columns, clients, "data")
    assert matched is not None
    matched = dataclasses.replace(matched, scaling=same_columns.scaling)
    types = [leaf.dtype for leaf in jax.tree.leaves(matched.inputs)]
    expected = [leaf.dtype for leaf in jax.tree.leaves(clients.inputs)]
    if types != expected:
        text = f"has examples of {few(types)}, expected {few(expected)}, as the run's clients"
        raise ArgumentError("data", text)
    if (matched.scaling is None) != (clients.scaling is None):
        is_scaled = "are not" if matched.scaling is None else "are"
        text = f"its examples {is_scaled} standardized, unlike those of the run's clients"
        raise ArgumentError("data", text)
    return matched


def kept_by_client(deployment: Deployment, first: First) -> First:
    """What a client keeps: its row, and under "own" its model; otherwise the server relays its model."""
    if deployment.topology is Topology.OWN:
        return first
    return First(row=first.row)


class Client:
    """A node's client while it answers one task."""

    def __init__(self, node: Node, task: Task, memory: Memory, config: NodeConfig):
        self.task = task
        self.memory = memory
        self.values = dict(memory.values)
        rows = Rows(int(memory.values["rows_train"]), int(memory.values["rows_validation"]))
        self.deployment = node.deployment(rows)
        self.experiment = self.deployment.experiment
        self.federation = scaled(node.federation(config), memory.arrays)
        self.number = int32(number_of(config))
        self.round = int32(task.values["round"])
        self.like = kept_by_client(self.deployment, self.deployment.shapes.first)
        self.secret = None
        if "secret/key" in memory.arrays:
            self.secret = jax.random.wrap_key_data(jnp.asarray(memory.arrays["secret/key"]))

    def first(self, section: str = "now") -> First:
        """What the client keeps, with what the server's last update made of its row."""
        first: First = unpack(section, self.like, self.memory.arrays)
        changed = self.deployment.travels.changed_row
        if not any(jax.tree.leaves(changed)):
            return first
        row = unpack("row", self.like.row, self.task.arrays, changed)
        merged = jax.tree.map(choose, changed, row, first.row)
        return first._replace(row=merged)

    def server(self, mask: PyTree) -> PyTree:
        """The server's own state, as far as it travels."""
        return unpack("server", self.deployment.shapes.start.state, self.task.arrays, mask)

    def data(self) -> ClientData:
        """The client's data, leaves (1, ...), padded as all clients' is."""
        rows = self.deployment.rows
        train = padded(self.federation.train, rows.train)
        return ClientData(train, padded(self.federation.validation, rows.validation))

    def download(self) -> tuple[Answer, Memory]:
        """Which models the client wants."""
        deployment = self.deployment
        key = round_key(deployment.key(ROUNDS, self.secret), DOWNLOAD_KEY, self.round)
        cohort = Cohort(self.task.arrays["cohort/ids"], bool(self.task.values["everyone"]))
        server = self.server(deployment.travels.download)
        row = self.first().row
        index = deployment.download(key, self.number, self.round, server, row, cohort)
        return Answer({}, pack("index", index)), self.memory

    def work(self) -> tuple[Answer, Memory]:
        """The client's part in an exchange.

        If the server asks again, since the answer was lost, the client begins where it began before.
        """
        deployment = self.deployment
        step = int(self.task.values["step"])
        asked_again = (self.values["round"], self.values["step"]) == (int(self.round), step)
        before = self.first("before" if asked_again else "now")
        shapes = deployment.shapes
        index = unpack("index", shapes.index, self.task.arrays)
        models = before.model
        if deployment.topology is Topology.OWN:
            models = jax.tree.map(lambda leaf: leaf[None], models)
        else:
            models = unpack("models", shapes.models, self.task.arrays)
        server = self.server(deployment.travels.work)
        rounds = deployment.key(ROUNDS, self.secret)
        key = round_key(rounds, WORK_KEY, self.round)
        output = deployment.work(
            key,
            self.number,
            self.round,
            int32(step),
            index,
            models,
            server,
            before.row,
            self.data(),
            later=step > 0,
        )
        after = before._replace(row=output.row)
        sent = output._replace(row=(), opt_state=())
        if deployment.topology is Topology.OWN:
            update_key = jax.random.fold_in(round_key(rounds, UPDATE_KEY, self.round), step)
            after = self._own_update(update_key, after, output, server)
            sent = sent._replace(upload=Upload())

        # The answer, and what the client remembers.
        arrays = pack("output", sent) | pack("row", output.row, deployment.travels.row)
        remembered = {
            name: array
            for name, array in self.memory.arrays.items()
            if not name.startswith(("now/", "before/"))
        }
        remembered |= pack("now", after) | pack("before", before)
        values = self.values | {"round": int(self.round), "step": step, "trained": True}
        return Answer({}, arrays), Memory(values, remembered)

    def _own_update(self, key: Any, first: First, output: Any, server: PyTree) -> First:
        """What the server's update makes of a client whose model never leaves it."""

        def stack(values: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], values)

        state = State(Start(state=server), stack(first), self.round)
        outputs = stack(output._replace(row=(), opt_state=()))
        receivers = np.zeros((1, 1), np.int32)
        state, _ = self.deployment.update_own(key, state, outputs, receivers)
        return jax.tree.map(lambda leaf: leaf[0], state.clients)

    def select(self) -> tuple[Answer, Memory]:
        """Whose models the client predicts with."""
        return Answer({}, pack("mixture", self._mixture())), self.memory

    def _mixture(self) -> Mixture:
        deployment = self.deployment
        key = deployment.key(PREDICTIONS, self.secret, int(self.round))
        server = self.server(deployment.travels.select)
        size = int32(self.federation.train.size[0])
        return deployment.select(key, self.number, self.round, server, self.first().row, size)

    def evaluate(self) -> tuple[Answer, Memory]:
        """The client's scores on its own examples."""
        deployment = self.deployment
        first = self.first()
        if deployment.topology is Topology.OWN:
            mixture = self._mixture()
            models: Params = jax.tree.map(lambda leaf: leaf[None], first.model)
        else:
            mixture = unpack("mixture", deployment.shapes.mixture, self.task.arrays)
            models = unpack("models", deployment.shapes.predicted_models, self.task.arrays)
        trained = None
        if self.experiment.never_trained == "global":
            trained = np.asarray(bool(self.values["trained"]))
        scores = deployment.serve(
            self._use(),
            deployment.key(PREDICTIONS, self.secret, int(self.round)),
            self.number,
            self.round,
            models,
            self.server(deployment.travels.predict),
            first.row,
            self.data(),
            self._splits(),
            mixture,
            trained,
        )
        return Answer({}, pack("scores", self._measured(scores))), self.memory

    def adapt(self) -> tuple[Answer, Memory]:
        """The scores of a client unseen in training."""
        deployment = self.deployment
        models: Params = ()
        if deployment.topology.moves:
            shapes = deployment.shapes_of_all_models
            models = unpack("models", shapes, self.task.arrays)
        scores = deployment.serve_newcomer(
            self._use(),
            deployment.key(NEWCOMERS, self.secret),
            self.round,
            models,
            self.server(deployment.travels.predict),
            self.data(),
            self._splits(),
        )
        return Answer({}, pack("scores", self._measured(scores))), self.memory

    def _use(self) -> Any:
        """Scores of a prediction on the client's splits."""
        with_outputs = bool(self.experiment.metrics)
        return serving.scores(self.deployment.problem, self.deployment.algorithm, with_outputs)

    def _splits(self) -> dict[str, Split]:
        """The client's splits that have examples, leaves (1, ...)."""
        rows = self.deployment.rows
        known_rows: dict[str, int] = {"train": rows.train, "validation": rows.validation}
        splits = {}
        for name in SPLITS:
            split: Split = getattr(self.federation, name)
            if split.y.shape[1]:
                num_rows = known_rows[name] if name in known_rows else split.y.shape[1]
                splits[name] = padded(split, int(num_rows))
        return splits

    def _measured(self, scores: PyTree) -> dict[str, dict[str, Any]]:
        """The scores with the run's further metrics."""
        if not self.experiment.metrics:
            return scores
        stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], scores)
        measured = serving.measured(
            self.experiment.metrics, stacked, self.experiment.federation.task
        )
        return jax.tree.map(lambda leaf: np.asarray(leaf)[0], measured)


def choose(is_first: bool, first: Any, second: Any) -> Any:
    """One of two values."""
    return first if is_first else second


def scaled(federation: Federation, arrays: Arrays) -> Federation:
    """The client's data as the engine reads it, scaled by what the server sent, if it sent something."""
    if federation.scaling is not None and has_section("scaling", arrays):
        mean = unpack("scaling", federation.scaling.mean, moments.section(arrays, "mean"))
        std = unpack("scaling", federation.scaling.std, moments.section(arrays, "std"))
        federation = dataclasses.replace(federation, scaling=Scaling(mean, std))
    return federation.standardized


def padded(split: Split, rows: int) -> Split:
    """A client's examples, leaves (1, n, ...), with zeros up to a number of rows."""
    size = int(split.size[0])
    if size > rows:
        text = f"has {size} examples, but {rows} when the run began; a node's data stays the same"
        raise RunError(f"the client {text}")

    def pad(leaf: Any) -> np.ndarray:
        values = np.asarray(leaf[0, :size])
        filled = np.zeros((1, rows, *values.shape[1:]), values.dtype)
        filled[0, :size] = values
        return filled

    x = jax.tree.map(pad, split.x, is_leaf=is_pooled)
    return Split(x, pad(split.y), np.asarray(split.size, np.int32))
