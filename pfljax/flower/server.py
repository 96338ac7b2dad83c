"""The server's side of a deployment: rounds with nodes that come and go."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import RunError, few
from pfljax.contract.types import (
    Array,
    ClientData,
    ClientOutput,
    Cohort,
    First,
    Mixture,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.evaluation import metrics
from pfljax.exchange.rounds import DOWNLOAD, SAMPLE, UPDATE, WORK, cohort_of, round_key
from pfljax.flower import messages, moments
from pfljax.flower.deployment import PREDICTIONS, ROUNDS, Deployment, Rows
from pfljax.flower.messages import Answer, Nodes, Task
from pfljax.flower.wire import Arrays, int32, num_bytes, pack, unpack
from pfljax.run.experiment import Experiment
from pfljax.settings.fields import hyperparameter, settings

logger = logging.getLogger("pfljax.flower")
TRAFFIC = (messages.DOWNLOAD, messages.WORK)  # tasks whose arrays count as a round's traffic
FIRST = {"test": "", "validation": "_validation", "train": "_train"}


@settings
class Patience:
    """How long a server waits, in seconds.

    Attributes:
        start: For all clients, before the first round.
        answer: For the answers to one message.
        rejoin: In a round, for a client whose node is gone; afterwards the round goes on without it.
    """

    start: float = hyperparameter(600.0, at_least=0)
    answer: float = hyperparameter(3600.0, above=0)
    rejoin: float = hyperparameter(0.0, at_least=0)


PATIENCE = Patience()


class Evaluated(NamedTuple):
    """One evaluation.

    Attributes:
        round: Number of completed rounds.
        scores: Split -> metric -> (K,) scores; NaN for clients that did not answer.
        newcomers: The same of clients unseen in training, (M,) in the order of `newcomer_ids`; {}: there are none.
        newcomer_ids: Their numbers, in ascending order; those that did not answer are missing.
    """

    round: int
    scores: dict[str, dict[str, np.ndarray]]
    newcomers: dict[str, dict[str, np.ndarray]]
    newcomer_ids: tuple[int, ...] = ()


@dataclasses.dataclass
class Outcome:
    """What a deployment leaves at its server.

    Attributes:
        history: A row for each evaluated round, as the lines of metrics.jsonl.
        evaluations: Every client's scores.
        state: The server's state and models; under "peers" and "push" also the models that it relays, leaves (K, ...).
    """

    history: list[dict]
    evaluations: list[Evaluated]
    state: State


@dataclasses.dataclass
class Known:
    """A client, as the server knows it.

    Attributes:
        node: Its node's id.
        sizes: Its numbers of examples, by split.
        measured: Sums over its features, for scaling.
    """

    node: int
    sizes: dict[str, int]
    measured: Arrays


class Federator:
    """Plays rounds of a run with clients on nodes.

    Attributes:
        nodes: The nodes.
        patience: How long it waits.
        bytes_down: Bytes of arrays that all clients received in rounds so far.
        bytes_up: Bytes that they sent.
        scaling: Whether all clients scale inputs alike ("federated"), or each by its own examples ("node").
    """

    def __init__(
        self,
        experiment: Experiment,
        nodes: Nodes,
        *,
        token: str,
        patience: Patience = PATIENCE,
        scaling: Literal["federated", "node"] = "federated",
        log: Callable[[str], None] | None = None,
    ):
        self.experiment = experiment
        self.nodes = nodes
        self.token = token
        self.patience = patience
        self.scaling = scaling
        self.log = log or logger.info
        self.clients: dict[int, Known] = {}
        self.newcomers: dict[int, Known] = {}
        self._described: set[int] = set()
        self._began = time.monotonic()
        self.bytes_down = 0
        self.bytes_up = 0

    @property
    def num_clients(self) -> int:
        """K."""
        return self.experiment.problem.num_clients

    # ---- The run.

    def run(
        self, rounds: int, eval_every: int = 10, tell: Callable[[Outcome], None] | None = None
    ) -> Outcome:
        """Waits for all clients, plays the rounds, and evaluates.

        Args:
            rounds: Number of rounds.
            eval_every: Number of rounds between evaluations; the initial models and the last ones are evaluated, too.
            tell: Called after each evaluation, with what the run leaves so far.

        Raises:
            RunError: if clients are missing at the start, all are missing in a round, or a node cannot go on.
        """
        self._wait_for_all()
        self._begin()
        history: list[dict] = []
        evaluations: list[Evaluated] = []

        def evaluate(record: dict) -> None:
            evaluated = self._evaluate()
            evaluations.append(evaluated)
            row = record | self._summary(evaluated)
            history.append(row)
            if tell is not None:
                tell(Outcome(history, evaluations, self.state))

        evaluate({"round": 0})
        for number in range(rounds):
            record = self._round(number)
            done = number + 1
            if done % eval_every == 0 or done == rounds:
                evaluate(record)
        return Outcome(history, evaluations, self.state)

    def _wait_for_all(self) -> None:
        """Waits until the nodes of all clients are connected."""
        deadline = time.monotonic() + self.patience.start
        self._refresh()
        while len(self.clients) < self.num_clients:
            if time.monotonic() > deadline:
                missing = [n for n in range(self.num_clients) if n not in self.clients]
                text = f"no node of client {few(missing)} after {self.patience.start:g} seconds"
                raise RunError(text)
            self.nodes.pause()
            self._refresh()
        self.log(f"all {self.num_clients} clients are connected")

    def _refresh(self) -> None:
        """Learns who is behind nodes that were not connected before.

        A mistake of a node ends a run that has not begun; later, the node is left out.
        """
        new = [node for node in self.nodes.ids() if node not in self._described]
        if not new:
            return
        task = Task(messages.DESCRIBE, {"token": self.token}, {})
        answers = self.nodes.ask(dict.fromkeys(new, task), self.patience.answer)
        for node, answer in answers.items():
            self._described.add(node)
            try:
                check_answer(answer, f"node {node}")
                self._learn(node, answer)
            except RunError as error:
                if not hasattr(self, "deployment"):
                    raise
                self.log(f"{error}; the run goes on without it")

    def _learn(self, node: int, answer: Answer) -> None:
        """Enters a node's client. Raises `RunError` for a client that there is not, or that has changed."""
        values = answer.values
        number = int(values["client"])
        sizes = {name: int(values[name]) for name in FIRST}
        known = Known(node, sizes, answer.arrays)
        if values["newcomer"]:
            earlier = self.newcomers.get(number)
            if earlier is not None and earlier.node in self.nodes.ids():
                raise RunError(f"two newcomers say partition-id={number}; each has a number")
            self.newcomers[number] = known
            return
        if not 0 <= number < self.num_clients:
            text = f"a node says partition-id={number}; accepted: 0 to {self.num_clients - 1}"
            raise RunError(text)
        earlier = self.clients.get(number)
        if earlier is not None and earlier.sizes != sizes:
            text = f"client {number} came back with other numbers of examples: {sizes}"
            raise RunError(f"{text}, before {earlier.sizes}")
        if earlier is not None:
            self.log(f"client {number} is back")
            if earlier.node in self.nodes.ids() and not hasattr(self, "deployment"):
                raise RunError(f"two nodes say partition-id={number}; each client has one node")
        self.clients[number] = known

    def _begin(self) -> None:
        """Makes what the server begins with, and what all nodes need to know."""
        clients = [self.clients[number] for number in range(self.num_clients)]
        everyone = [*clients, *self.newcomers.values()]
        rows = Rows(
            max(client.sizes["train"] for client in everyone),
            max(client.sizes["validation"] for client in everyone),
        )
        self.deployment = Deployment(self.experiment, rows)
        deployment = self.deployment
        self.sizes = Rows(
            np.array([client.sizes["train"] for client in clients], np.int32),  # pyright: ignore
            np.array([client.sizes["validation"] for client in clients], np.int32),  # pyright: ignore
        )

        # How all scale their inputs.
        self.prepared: Arrays = {}
        if self.scaling == "federated":
            self.prepared |= moments.combined([client.measured for client in clients])
        start = deployment.start(self.sizes, self._examples())
        self.prepared |= pack("start", start, deployment.travels.first)

        # What the server relays of clients, and what its update reads of their rows.
        self.state = State(start, First(), int32(0))
        reads_rows = any(jax.tree.leaves(deployment.travels.row))
        relays = deployment.topology.between_clients
        self.rows: list[np.ndarray] = []
        if reads_rows or relays:
            firsts = []
            for number in range(self.num_clients):
                first = deployment.first_row(int32(number), start)
                firsts.append(jax.tree.map(np.asarray, first))
            stacked: First = jax.tree.map(lambda *leaves: np.stack(leaves), *firsts)
            self.rows = leaves_of(stacked.row, deployment.travels.row)
            if relays:
                self.state = self.state._replace(clients=stacked._replace(row=()))

    def _examples(self) -> ClientData | None:
        """All clients' examples, if the server begins with some; None: it does not.

        Raises:
            RunError: if a client does not answer, or its node has not agreed.
        """
        if not self.deployment.start_reads_examples:
            return None
        rows = self.deployment.rows
        values: messages.Values = {
            "token": self.token,
            "method": self.experiment.name,
            "rows_train": rows.train,
            "rows_validation": rows.validation,
        }
        task = Task(messages.EXAMPLES, values, self.prepared)
        nodes = [self.clients[number].node for number in range(self.num_clients)]
        answers = self.nodes.ask(dict.fromkeys(nodes, task), self.patience.answer)
        examples = []
        for number, node in enumerate(nodes):
            if node not in answers:
                raise RunError(f"client {number} does not answer before the first round")
            check_answer(answers[node], f"client {number}")
            shapes = self.deployment.client_shapes
            examples.append(unpack("examples", shapes, answers[node].arrays))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *examples)

    def _round(self, number: int) -> dict:
        """Plays a round; returns its record."""
        began = time.monotonic()
        deployment = self.deployment
        number_array = int32(number)
        self.state = self.state._replace(round=number_array)
        rounds_key = deployment.key(ROUNDS)
        cohort = self._cohort(rounds_key, number_array)
        ids = np.asarray(cohort.ids)
        index = self._index(rounds_key, cohort)

        # The cohort's part of what is relayed.
        position = index
        state = self.state
        if deployment.topology.between_clients:
            position = np.asarray(cohort.position(jnp.asarray(index)))
            state = state._replace(clients=rows_of(state.clients, ids))
        loss = float("nan")
        absent: list[int] = []
        for step in range(deployment.algorithm.exchanges):
            outputs, is_there = self._work(rounds_key, state, ids, index, position, step)
            if step == 0:
                sizes = np.asarray(self.sizes.train)[ids] * is_there
                losses = np.where(is_there, np.asarray(outputs.report.loss), 0)
                loss = float((losses * sizes).sum() / sizes.sum())
                absent = ids[~is_there].tolist()
            state = self._update(rounds_key, number_array, step, state, outputs, ids, position)

        # Back to all clients.
        if deployment.topology.between_clients:
            clients = jax.tree.map(np.array, self.state.clients)

            def put(all_rows: np.ndarray, some: Array) -> np.ndarray:
                all_rows[ids] = np.asarray(some)
                return all_rows

            state = state._replace(clients=jax.tree.map(put, clients, state.clients))
        self.state = state._replace(round=int32(number + 1))
        if not np.isfinite(loss):
            raise RunError(f"the training loss of round {number + 1} is not finite")
        seconds = time.monotonic() - began
        self.log(f"round {number + 1}: training loss {loss:.4f}, {seconds:.1f} seconds")
        return {
            "round": number + 1,
            "train_loss": loss,
            "absent": absent,
            "seconds": time.monotonic() - self._began,
            "bytes_down": self.bytes_down / self.num_clients,
            "bytes_up": self.bytes_up / self.num_clients,
        }

    def _cohort(self, key: Any, number: Array) -> Cohort:
        """The clients of a round."""
        size = self.experiment.problem.cohort_size
        if self.deployment.algorithm.sample is None:
            return cohort_of(key, number, self.num_clients, size)
        sample_key = round_key(key, SAMPLE, number)
        ids = self.deployment.sample(sample_key, self.state, self.sizes)
        return Cohort(jnp.sort(ids).astype(jnp.int32))

    def _index(self, rounds_key: Any, cohort: Cohort) -> np.ndarray:
        """(S, J) the models that each client of the cohort receives."""
        deployment = self.deployment
        ids = np.asarray(cohort.ids)
        key = round_key(rounds_key, DOWNLOAD, self.state.round)
        server = self.state.server.state
        no_row = jax.tree.map(np_zeros, deployment.shapes.first.row)

        def chosen(client: int) -> np.ndarray:
            number = int32(client)
            index = deployment.download(key, number, self.state.round, server, no_row, cohort)
            return np.asarray(index)

        if not deployment.asks_download:
            return np.stack([chosen(client) for client in ids])
        values = {"everyone": cohort.everyone}
        arrays = pack("server", server, deployment.travels.download) | {"cohort/ids": ids}
        answers = self._ask({int(client): (messages.DOWNLOAD, values, arrays) for client in ids})
        # Those that do not answer will not train either.
        nobody = np.asarray(np.broadcast_to(ids[:1], deployment.shapes.index.shape), np.int32)
        rows = []
        for client in ids:
            answer = answers.get(int(client))
            if answer is None:
                rows.append(nobody)
            else:
                rows.append(unpack("index", deployment.shapes.index, answer.arrays))
        return np.stack(rows)

    def _work(
        self,
        rounds_key: Any,
        state: State,
        ids: np.ndarray,
        index: np.ndarray,
        position: np.ndarray,
        step: int,
    ) -> tuple[ClientOutput, np.ndarray]:
        """What the cohort sends, stacked; and (S,) who has answered."""
        deployment = self.deployment
        topology = deployment.topology
        server = pack("server", state.server.state, deployment.travels.work)
        tasks = {}
        for place, client in enumerate(ids):
            arrays = server | {"index/value": index[place]}
            if topology.moves:
                wanted = np.array([place]) if topology is Topology.PUSH else position[place]
                arrays |= pack("models", rows_of(state.models, wanted))
            tasks[int(client)] = (messages.WORK, {"step": step}, arrays)
        answers = self._ask(tasks)
        if not answers:
            raise RunError(f"no client of round {int(state.round) + 1} answered")

        # What arrived; of the others, what clients without examples would send.
        like = deployment.shapes.output._replace(row=(), opt_state=())
        if topology is Topology.OWN:
            like = like._replace(upload=Upload())
        outputs = []
        for place, client in enumerate(ids):
            answer = answers.get(int(client))
            if answer is not None:
                outputs.append(unpack("output", like, answer.arrays))
                read = deployment.travels.row
                row = unpack("row", deployment.shapes.first.row, answer.arrays, read)
                for stack, leaf in zip(self.rows, leaves_of(row, read), strict=True):
                    stack[client] = leaf
                continue
            self.log(f"round {int(state.round) + 1}: client {client} does not answer")
            key = round_key(rounds_key, WORK, state.round)
            number = int32(client)
            first = deployment.first_row(number, self.start_of_run())
            output = deployment.idle_output(
                key,
                number,
                state.round,
                int32(step),
                index[place],
                state.server.state,
                first,
                step > 0,
            )
            output = output._replace(row=(), opt_state=())
            if topology is Topology.OWN:
                output = output._replace(upload=Upload())
            outputs.append(jax.tree.map(np.asarray, output))
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *outputs)
        is_there = np.array([int(client) in answers for client in ids])
        return stacked, is_there

    def start_of_run(self) -> Start:
        """What a client's first row depends on."""
        shapes = self.deployment.shapes.start
        return unpack("start", shapes, self.prepared, self.deployment.travels.first)

    def _update(
        self,
        rounds_key: Any,
        number: Array,
        step: int,
        state: State,
        outputs: ClientOutput,
        ids: np.ndarray,
        position: np.ndarray,
    ) -> State:
        """The state after the server's update."""
        deployment = self.deployment
        if not deployment.topology.moves:
            return state
        key = jax.random.fold_in(round_key(rounds_key, UPDATE, number), step)
        rows = [stack[ids] for stack in self.rows]
        state, changed_rows, _ = deployment.update(key, state, rows, outputs, position)
        changed = [
            is_changed
            for is_changed, is_read in zip(
                jax.tree.leaves(deployment.travels.changed_row),
                jax.tree.leaves(deployment.travels.row),
                strict=True,
            )
            if is_read
        ]
        stacks = [stack for stack, is_changed in zip(self.rows, changed, strict=True) if is_changed]
        for stack, new in zip(stacks, changed_rows, strict=True):
            stack[ids] = np.asarray(new)
        return state

    # ---- Evaluation.

    def _evaluate(self) -> Evaluated:
        """Every client's scores."""
        deployment = self.deployment
        topology = deployment.topology
        clients = range(self.num_clients)
        mixtures = self._mixtures() if topology.moves else {}
        server = pack("server", self.state.server.state, deployment.travels.predict)
        tasks = {}
        for client in clients:
            arrays = dict(server)
            if topology.moves:
                if client not in mixtures:
                    continue
                mixture = mixtures[client]
                models = rows_of(self.state.models, mixture.index)
                arrays |= pack("mixture", mixture) | pack("models", models)
            tasks[client] = (messages.EVALUATE, {}, arrays)
        answers = self._ask(tasks)
        scores = stacked_scores(answers, self.num_clients)
        newcomers = self._evaluate_newcomers(server)
        ids = tuple(sorted(newcomers))
        by_rank = {rank: newcomers[number] for rank, number in enumerate(ids)}
        newcomer_scores = stacked_scores(by_rank, len(ids))
        return Evaluated(int(self.state.round), scores, newcomer_scores, ids)

    def _evaluate_newcomers(self, server: Arrays) -> dict[int, Answer]:
        """The scores of clients unseen in training, by their numbers."""
        if not self.newcomers:
            return {}
        arrays = dict(server)
        if self.deployment.topology.moves:
            arrays |= pack("models", self.state.models)
        tasks = {number: (messages.ADAPT, {}, arrays) for number in self.newcomers}
        return self._ask(tasks, self.newcomers)

    def _mixtures(self) -> dict[int, Mixture]:
        """Whose models each client predicts with; clients that do not answer are missing."""
        deployment = self.deployment
        server = self.state.server.state
        mixtures: dict[int, Mixture] = {}
        if deployment.asks_select:
            arrays = pack("server", server, deployment.travels.select)
            tasks = {client: (messages.SELECT, {}, arrays) for client in range(self.num_clients)}
            for client, answer in self._ask(tasks).items():
                mixtures[client] = unpack("mixture", deployment.shapes.mixture, answer.arrays)
            return mixtures
        key = deployment.key(PREDICTIONS, None, int(self.state.round))
        no_row = jax.tree.map(np_zeros, deployment.shapes.first.row)
        for client in range(self.num_clients):
            size = np.asarray(self.sizes.train)[client]
            mixture = deployment.select(key, int32(client), self.state.round, server, no_row, size)
            mixtures[client] = jax.tree.map(np.asarray, mixture)
        return mixtures

    def _summary(self, evaluated: Evaluated) -> dict:
        """An evaluation as a row of the history."""
        row: dict[str, Any] = {}
        lower = self.experiment.lower_is_better
        for split, values in evaluated.scores.items():
            sizes = np.array([self.clients[n].sizes[split] for n in range(self.num_clients)])
            answered = ~np.isnan(values["loss"])
            if (sizes * answered).any():
                summary = metrics.summarize(values, sizes * answered, lower)
                row |= {f"{name}{FIRST[split]}": value for name, value in summary.items()}
        for name, values in evaluated.newcomers.get("test", {}).items():
            row[f"{name}_newcomers"] = float(np.nanmean(values))
        return row

    # ---- Messages.

    def _ask(
        self,
        tasks: Mapping[int, tuple[str, Any, Arrays]],
        clients: dict[int, Known] | None = None,
    ) -> dict[int, Answer]:
        """Asks clients; those that do not answer are missing.

        A client whose node is gone is asked again when it is back, within `patience.rejoin` seconds after the others
        have answered.
        """
        clients = self.clients if clients is None else clients
        answers: dict[int, Answer] = {}
        pending = dict(tasks)
        asked_at: dict[int, int] = {}
        answered = time.monotonic()
        prepared: set[tuple[int, int]] = set()
        while pending:
            self._refresh()
            connected = set(self.nodes.ids())
            batch = {}
            for client, (name, values, arrays) in pending.items():
                node = clients[client].node
                if node not in connected:
                    # With a key of its own, a node comes back under the same id.
                    asked_at.pop(client, None)
                    continue
                if asked_at.get(client) == node:
                    continue
                batch[node] = self._task(client, name, values, arrays)
            by_node = {clients[client].node: client for client in pending}
            for node, task in batch.items():
                if task.name in TRAFFIC:
                    self.bytes_down += num_bytes(task.arrays)
                asked_at[by_node[node]] = node
            replies: dict[int, Answer] = {}
            if batch:
                replies = self.nodes.ask(batch, self.patience.answer)
                # It may take long until a node is known to be gone.
                answered = time.monotonic()
            unprepared = {}
            for node, answer in replies.items():
                client = by_node[node]
                check_answer(answer, f"client {client}")
                if answer.values.get("unprepared"):
                    if (client, node) in prepared:
                        raise RunError(f"the node of client {client} forgets how it was prepared")
                    unprepared[node] = self._preparation()
                    prepared.add((client, node))
                    continue
                if pending[client][0] in TRAFFIC:
                    self.bytes_up += num_bytes(answer.arrays)
                answers[client] = answer
                del pending[client]
            if unprepared:
                for node, answer in self.nodes.ask(unprepared, self.patience.answer).items():
                    check_answer(answer, f"client {by_node[node]}")
                    del asked_at[by_node[node]]
                continue
            if pending and time.monotonic() - answered >= self.patience.rejoin:
                break
            if pending:
                self.nodes.pause()
        return answers

    def _task(self, client: int, name: str, values: messages.Values, arrays: Arrays) -> Task:
        """A task for a client, with what the last update made of its row."""
        deployment = self.deployment
        values = values | {"token": self.token, "round": int(self.state.round)}
        if (
            self.rows
            and any(jax.tree.leaves(deployment.travels.changed_row))
            and name != messages.ADAPT
        ):
            travels = jax.tree.leaves(deployment.travels.row)
            stacks = iter(self.rows)
            leaves = [
                next(stacks)[client] if is_read else np_zeros(leaf)
                for leaf, is_read in zip(
                    jax.tree.leaves(deployment.shapes.first.row), travels, strict=True
                )
            ]
            structure = jax.tree.structure(deployment.shapes.first.row)
            row = structure.unflatten(leaves)
            arrays = arrays | pack("row", row, deployment.travels.changed_row)
        return Task(name, values, arrays)

    def _preparation(self) -> Task:
        """What a node needs to know before it trains."""
        rows = self.deployment.rows
        values: messages.Values = {
            "token": self.token,
            "rows_train": rows.train,
            "rows_validation": rows.validation,
        }
        return Task(messages.PREPARE, values, self.prepared)


def check_answer(answer: Answer, who: str) -> None:
    """Raises `RunError` for a node that cannot answer."""
    if "error" in answer.values:
        raise RunError(f"{who}: {answer.values['error']}")


def rows_of(stack: PyTree, index: Any) -> PyTree:
    """Some rows of a stack, as NumPy arrays."""
    numbers = np.asarray(index)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[numbers], stack)


def np_zeros(leaf: Any) -> np.ndarray:
    """Zeros of a shape and type."""
    return np.zeros(leaf.shape, leaf.dtype)


def leaves_of(values: PyTree, mask: PyTree) -> list[Any]:
    """The leaves of a tree for which the mask is true."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(mask), strict=True)
    return [leaf for leaf, is_read in pairs if is_read]


def stacked_scores(
    answers: Mapping[int, Answer], num_clients: int
) -> dict[str, dict[str, np.ndarray]]:
    """All clients' scores (K,) by split and metric; NaN where there is none."""
    scores: dict[str, dict[str, np.ndarray]] = {}
    for client, answer in answers.items():
        for name, value in answer.arrays.items():
            split, metric = name.removeprefix("scores/").split(".", 1)
            split_scores = scores.setdefault(split, {})
            values = split_scores.setdefault(metric, np.full(num_clients, np.nan))
            values[client] = value
    return scores
