"""Flower's apps: a node's and the server's side of a run, as `flwr run` starts them."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.flower.messages import NOTHING, Answer, Memory, NodeConfig, Task
from pfljax.flower.node import Node, Read, client_of_run
from pfljax.flower.server import PATIENCE, Federator, Outcome, Patience
from pfljax.flower.wire import names_of
from pfljax.folder import files
from pfljax.settings.fields import checked, hyperparameter, settings

# Versions of flwr between those that the tests have run with; as in the extra.
OLDEST: tuple[int, int] = (1, 26)
NEWEST: tuple[int, int] = (1, 42)
VALUES = "pfljax.values"  # names of records
ARRAYS = "pfljax.arrays"
CRASHED = (1, 2, 7, 8)  # codes of Flower's errors that do not pass by themselves
PAUSE = 1.0  # seconds between looks at which nodes are connected

Rounds = Annotated[int, hyperparameter(at_least=1)]

logger = logging.getLogger("pfljax.flower")


def client_app(run: Any, read: Read = client_of_run) -> Any:
    """Returns the `ClientApp` of a run, for the nodes of a Flower federation.

    A node is one client. Its configuration says which: `partition-id`, 0 to K - 1. Other entries:

    - `keep`: a folder in which the node keeps its client's row, so that it may be stopped and started again in a run.
      Without it, a node that starts again begins anew, as a client that has never trained.
    - `newcomer`: whether the client is unseen in training; it is scored with what it makes of the models.

    Args:
        run: The run. Its server needs the same one, so make both in one function.
        read: (the node's configuration, the run's clients) -> a `Federation` of the node's client alone. Default: the
            client of the run's own clients with number `partition-id`, as in a simulation.

    Raises:
        ArgumentError: if flwr is not installed, or in a version that was not tested; or if the run has something that
            cannot be deployed.

    Examples:
        In client_app.py, with a function that makes the run and one that reads the node's file:

        >>> import pfljax as pfl
        >>> def make_run():
        ...     clients = pfl.data.digits(num_clients=3, train_examples=8)
        ...     return pfl.Run(pfl.Ditto(), clients, pfl.models.MLP(hidden=(4,)))
        >>> app = pfl.flower.client_app(make_run())  # doctest: +SKIP
    """
    check_version()
    app_class = optional.load("flwr.clientapp", "flower").ClientApp
    node = Node(run.experiment, run.experiment.clients, read)

    def handle(message: Any, context: Any) -> Any:
        records = optional.load("flwr.app", "flower")
        task = task_of(message.content)
        memory = remembered(context, task)
        answer, memory_after = node.answer(task, memory, context.node_config)
        if memory_after is not memory:
            remember(context, task, memory_after)
        content = content_of(answer.values, answer.arrays)
        return records.Message(content, reply_to=message)

    app = app_class()
    app.train()(handle)
    app.evaluate()(handle)
    app.query()(handle)
    return app


@checked()
def server_app(
    run: Any,
    rounds: Rounds,
    *,
    out: str | Path | None = None,
    eval_every: Rounds = 10,
    scaling: Literal["federated", "node"] = "federated",
    patience: Patience = PATIENCE,
    finished: Callable[[Outcome], None] | None = None,
) -> Any:
    """Returns the `ServerApp` of a run.

    Entries of the app's run configuration replace the arguments of the same name: `rounds`, `eval-every`, `out`,
    `scaling`, and `start`, `answer` and `rejoin` of `Patience`.

    Args:
        run: The run; see `client_app`. Of its clients, only their number and the form of their examples are used.
        rounds: Number of rounds.
        out: Folder for metrics.jsonl, results.npz, summary.json and server.npz, new or empty. None: nothing is written.
        eval_every: Number of rounds between evaluations.
        scaling: Whether models standardize inputs by the examples of all clients ("federated": nodes send the sums of
            each feature), or of each node alone ("node").
        patience: How long the server waits for its nodes.
        finished: Called with what the run leaves at the server.

    Raises:
        ArgumentError: see `client_app`.

    Examples:
        >>> import pfljax as pfl
        >>> def make_run():
        ...     clients = pfl.data.digits(num_clients=3, train_examples=8)
        ...     return pfl.Run(pfl.Ditto(), clients, pfl.models.MLP(hidden=(4,)))
        >>> app = pfl.flower.server_app(make_run(), rounds=20)  # doctest: +SKIP
    """
    check_version()
    app_class = optional.load("flwr.serverapp", "flower").ServerApp
    app = app_class()

    def main(grid: Any, context: Any) -> None:
        config = dict(context.run_config)
        try:
            chosen = Options(
                rounds=config.get("rounds", rounds),
                eval_every=config.get("eval-every", eval_every),
                scaling=config.get("scaling", scaling),
            )
            folder = config.get("out", out)
            path = None if folder in (None, "") else new_folder(Path(str(folder)))
            federator = Federator(
                run.experiment.with_rounds(chosen.rounds),
                GridNodes(grid),
                token=f"run {context.run_id}",
                scaling=chosen.scaling,
                patience=Patience(
                    start=config.get("start", patience.start),
                    answer=config.get("answer", patience.answer),
                    rejoin=config.get("rejoin", patience.rejoin),
                ),
                log=say,
            )

            def tell(outcome: Outcome) -> None:
                row = outcome.history[-1]
                say(described(row))
                if path is not None:
                    with open(path / "metrics.jsonl", "a") as file:
                        file.write(json.dumps(files.plain(row)) + "\n")
                    write(path, outcome, chosen.rounds, run.experiment)

            outcome = federator.run(chosen.rounds, chosen.eval_every, tell)
        except (ArgumentError, RunError) as error:
            say(f"error: {error}")
            raise error.with_traceback(None) from None
        if finished is not None:
            finished(outcome)

    app.main()(main)
    return app


@settings
class Options:
    """What a run's configuration may set at its server; see `server_app`."""

    rounds: int = hyperparameter(at_least=1)
    eval_every: int = hyperparameter(10, at_least=1)
    scaling: Literal["federated", "node"] = "federated"


class GridNodes:
    """The nodes of a Flower grid."""

    def __init__(self, grid: Any):
        self.grid = grid

    def ids(self) -> Sequence[int]:
        """The nodes that are connected now."""
        return list(self.grid.get_node_ids())

    def ask(self, tasks: Mapping[int, Task], timeout: float) -> dict[int, Answer]:
        """Asks nodes, by their id; nodes that do not answer in time are missing.

        Raises:
            RunError: if the app of a node ends with an error.
        """
        records = optional.load("flwr.app", "flower")
        questions = []
        for node, task in tasks.items():
            content = content_of(task.values | {"task": task.name}, task.arrays)
            kind = "evaluate" if task.name in ("evaluate", "adapt") else "train"
            kind = "query" if task.name in ("describe", "prepare") else kind
            questions.append(
                records.Message(content, dst_node_id=node, message_type=kind, ttl=timeout)
            )
        answers: dict[int, Answer] = {}
        for reply in self.grid.send_and_receive(questions, timeout=timeout):
            node = reply.metadata.src_node_id
            if reply.has_error():
                if reply.error.code in CRASHED:
                    reason = str(reply.error.reason).strip().split("\n")[-1]
                    raise RunError(f"the app of node {node} ended with an error: {reason}")
                continue
            content = reply.content
            values = dict(content.config_records[VALUES])
            answers[node] = Answer(values, numpy_arrays(content.array_records[ARRAYS]))
        return answers

    def pause(self) -> None:
        """Waits a little."""
        time.sleep(PAUSE)


def check_version() -> None:
    """Raises `ArgumentError` for a version of flwr that the tests have not run with."""
    version = optional.load("flwr", "flower").__version__
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release: tuple[int, int] = (0, 0)
    if numbers:
        release = (int(numbers[1]), int(numbers[2]))
    if not OLDEST <= release <= NEWEST:
        oldest = ".".join(map(str, OLDEST))
        after = f"{NEWEST[0]}.{NEWEST[1] + 1}"
        text = f"accepted: >={oldest},<{after}, as pip install 'pfljax[flower]' installs it"
        raise ArgumentError("flwr", text, version)


def content_of(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    """Values and arrays as Flower's records."""
    records = optional.load("flwr.app", "flower")
    named = {
        name: records.Array(np.ascontiguousarray(array).reshape(array.shape))
        for name, array in arrays.items()
    }
    return records.RecordDict(
        {VALUES: records.ConfigRecord(dict(values)), ARRAYS: records.ArrayRecord(named)}
    )


def numpy_arrays(record: Any) -> dict[str, np.ndarray]:
    """The arrays of a record."""
    return {name: record[name].numpy() for name in record}


def task_of(content: Any) -> Task:
    """The task in a message.

    Raises:
        ArgumentError: if another program sent it.
    """
    if VALUES not in content.config_records:
        raise ArgumentError("message", "comes from another server than pfljax's")
    values = dict(content.config_records[VALUES])
    name = str(values.pop("task"))
    return Task(name, values, numpy_arrays(content.array_records[ARRAYS]))


def remembered(context: Any, task: Task) -> Memory:
    """What a node remembers: in Flower's state of the run, or in the folder `keep` after it was started again."""
    state = context.state
    if VALUES in state.config_records:
        values = dict(state.config_records[VALUES])
        return Memory(values, numpy_arrays(state.array_records[ARRAYS]))
    path = memory_file(context.node_config)
    if path is None or not path.exists():
        return NOTHING
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files if name != VALUES}
        values = json.loads(str(stored[VALUES]))
    # That of another run is of no use.
    return Memory(values, arrays) if values.get("token") == task.values["token"] else NOTHING


def remember(context: Any, task: Task, memory: Memory) -> None:
    """Keeps what a node remembers."""
    content = content_of(memory.values, memory.arrays)
    context.state.config_records[VALUES] = content.config_records[VALUES]
    context.state.array_records[ARRAYS] = content.array_records[ARRAYS]
    path = memory_file(context.node_config)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(memory.values)
        stored = {VALUES: np.array(text)} | memory.arrays
        files.write_atomically(path, lambda file: np.savez(file, allow_pickle=False, **stored))


def memory_file(config: NodeConfig) -> Path | None:
    """The file of a node's client in the folder `keep`; None: it keeps none."""
    folder = config.get("keep")
    if not folder:
        return None
    return Path(str(folder)) / f"client-{config.get('partition-id')}.npz"


def say(line: str) -> None:
    """Logs a line where Flower logs."""
    optional.load("flwr.common", "flower").log(logging.INFO, line)


def described(row: Mapping[str, Any]) -> str:
    """An evaluation in a line."""
    scores = [f"{name} {row[name]:.4f}" for name in ("accuracy", "loss") if name in row]
    return f"round {row['round']}: test {', '.join(scores) or 'scores unknown'}"


def new_folder(path: Path) -> Path:
    """The folder of a run, new or empty. Raises `ArgumentError` for any other."""
    if path.exists() and any(path.iterdir()):
        raise ArgumentError("out", "exists and is not empty; accepted: a new or empty folder", path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def write(out: Path, outcome: Outcome, rounds: int, experiment: Any) -> None:
    """Writes a run's results so far, in the form of the files of `Run.train`, and the server's models.

    The summary is written after the last round, so it says that the run has ended.
    """
    evaluations = outcome.evaluations
    ids = sorted({number for evaluated in evaluations for number in evaluated.newcomer_ids})
    results: dict[str, Any] = {"rounds": np.array([evaluated.round for evaluated in evaluations])}
    if ids:
        results["newcomers"] = np.array(ids)
    num_clients = experiment.problem.num_clients
    everyone = tuple(range(num_clients))
    tables = [(everyone, evaluated.scores) for evaluated in evaluations]
    results |= stacked(tables, everyone, "")
    tables = [(evaluated.newcomer_ids, evaluated.newcomers) for evaluated in evaluations]
    results |= stacked(tables, ids, "newcomers_")
    files.write_atomically(
        out / "results.npz", lambda file: np.savez(file, allow_pickle=False, **results)
    )
    models = outcome.state.models
    leaves = zip(names_of(models), jax.tree.leaves(models), strict=True)
    arrays = {name: np.asarray(leaf) for name, leaf in leaves}
    files.write_atomically(
        out / "server.npz", lambda file: np.savez(file, allow_pickle=False, **arrays)
    )
    if evaluations[-1].round < rounds:
        return
    summary = {
        "method": experiment.name,
        "rounds": rounds,
        "last": outcome.history[-1],
        "score": experiment.score_name,
    }
    files.write_json(out / "summary.json", files.plain(summary))


def stacked(
    tables: Sequence[tuple[Sequence[int], Mapping[str, Mapping[str, np.ndarray]]]],
    ids: Sequence[int],
    prefix: str,
) -> dict[str, np.ndarray]:
    """Scores of several evaluations as arrays (E, M), named PREFIX METRIC_SPLIT; NaN where there is none.

    Args:
        tables: For each of the E evaluations, the clients' numbers, and split -> metric -> their scores.
        ids: (M,) the numbers of all clients.
        prefix: What the names begin with.
    """
    position = {number: place for place, number in enumerate(ids)}
    arrays: dict[str, np.ndarray] = {}
    for row, (numbers, scores) in enumerate(tables):
        positions = [position[number] for number in numbers]
        for split, values_by_metric in scores.items():
            for metric, values in values_by_metric.items():
                name = f"{prefix}{metric}_{split}"
                array = arrays.setdefault(name, np.full((len(tables), len(ids)), np.nan))
                array[row, positions] = values
    return arrays
