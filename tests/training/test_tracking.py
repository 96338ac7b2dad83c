"""Trackers: what they get at every evaluation, and what TensorBoard's files say of a run that was resumed."""

import gc
import itertools
import struct
import sys
import types

import numpy as np
import pytest
from runs import EVERY_ROUND, make_experiment, train

from pfljax.contract.errors import ArgumentError
from pfljax.folder import folders
from pfljax.training import loop
from pfljax.training.tracking import (
    TRACKERS,
    Evaluation,
    MLflow,
    TensorBoard,
    WandB,
    make_evaluation,
    named,
)

pytestmark = [pytest.mark.usefixtures("compile_once"), pytest.mark.xdist_group("runs")]


def events(folder):
    """The events in a folder's files, in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.out.tfevents.*")):
        rest = path.read_bytes()
        while rest:  # its length, a checksum of 4 bytes, the event, a checksum of 4 bytes
            (length,) = struct.unpack("<Q", rest[:8])
            yield Event.FromString(rest[12 : 12 + length])
            rest = rest[16 + length :]


def shown(folder):
    """{(tag, step): value} as TensorBoard shows them: a start drops what has its step or a later one."""
    found = {}
    for event in events(folder):
        if event.HasField("session_log"):
            found = {
                (tag, step): value for (tag, step), value in found.items() if step < event.step
            }
        for value in event.summary.value:
            assert (value.tag, event.step) not in found
            found[value.tag, event.step] = value
    return found


@pytest.fixture
def close(monkeypatch):
    """Closes all files of TensorBoard that were opened in the test so far."""
    import tensorboardX

    opened = []
    make = tensorboardX.SummaryWriter

    def noted(*args, **options):
        opened.append(make(*args, **options))
        return opened[-1]

    def close_all():
        for writer in opened:
            writer.close()

    monkeypatch.setattr(tensorboardX, "SummaryWriter", noted)
    return close_all


def test_a_tracker_gets_what_the_files_say():
    found = []
    history = train(
        make_experiment("local", unseen=False), None, 2, trackers=[found.append]
    ).history
    assert [each.round for each in found] == [0, 1, 2] and {
        (each.run, each.resumed) for each in found
    } == {("", 0)}
    for place, each in enumerate(found):
        row = history.rows[place]
        assert (
            each.scalars["accuracy/test"] == row["accuracy"]
            and each.scalars["train_loss"] == row["train_loss"]
        )
        assert each.scalars["bytes_up"] == row["bytes_up"] and "accuracy" not in each.scalars
        for name in ("accuracy", "loss"):
            np.testing.assert_array_equal(
                each.per_client[f"{name}/test"], history.results[f"{name}_test"][place]
            )
        np.testing.assert_array_equal(each.collaboration, np.eye(5))  # of clients that are alone


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        (False, [[0.75, 0.25, 0], [0, 1, 0], [0.5, 0.5, 0]]),
        (True, [[0.75, 0.25], [0, 1], [0.5, 0.5]]),
    ],
)
def test_the_matrix_has_a_column_for_each_model(shared, expected):
    """Of clients' own models one for each client, whether it is used or not; a repeated index adds."""
    used = {
        "index": np.array([[1, 0], [1, 1], [0, 1]]),
        "weights": np.array([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]),
    }
    row = {"round": 3, "train_loss": 0.5, "loss": 1.0}
    found = make_evaluation(
        row, {"test": {"loss": 1.0}}, {"test": {}}, used, shared=shared, resumed=0
    )
    np.testing.assert_array_equal(found.collaboration, expected)


def test_clients_without_examples_and_matrices_of_a_sample_are_left_out():
    row = {"round": 3, "train_loss": 0.5, "loss": 1.0, "validation_loss": 2.0, "drift": 4.0}
    scores = {
        "test": {"loss": np.array([1.0, np.nan])},
        "validation": {"loss": np.array([2.0, np.nan])},
    }
    means = {"test": {"loss": 1.0}, "validation": {"loss": 2.0}}
    found = make_evaluation(row, means, scores, {}, shared=False, resumed=2)
    assert found.scalars == {
        "loss/test": 1.0,
        "loss/validation": 2.0,
        "train_loss": 0.5,
        "drift": 4.0,
    }
    assert found.per_client["loss/test"].tolist() == [1.0] and found.collaboration is None
    used = {"index": np.array([[0, 2], [2, 2]]), "weights": np.array([[0.25, 0.75], [0.5, 0.5]])}
    # three models of two clients
    shared = make_evaluation(row, means, scores, used, shared=True, resumed=2)
    assert shared.collaboration.tolist() == [[0.25, 0, 0.75], [0, 0, 1]]


def test_a_name_tells_the_runs_of_a_comparison_apart():
    found = []
    evaluation = Evaluation("", 1, 0, {}, {}, None)
    named(found.append, "fedavg/seed-0")(evaluation)
    assert (
        found == [evaluation._replace(run="fedavg/seed-0")] and named(None, "fedavg/seed-0") is None
    )


def test_tensorboard_has_every_round_once_after_a_kill_and_a_resumption(tmp_path, close):
    """Killed after round 3 was tracked, with a checkpoint of round 2: round 3 is played and written again."""
    out = tmp_path / "run"
    board = tmp_path / "board"
    experiment = make_experiment("local", unseen=False)
    tracker = TensorBoard(board)

    class Killed(Exception):
        pass

    def dies(evaluation):
        tracker(evaluation)
        if evaluation.round == 3:
            raise Killed

    with pytest.raises(Killed):
        train(experiment, out, 4, trackers=[dies])
    close()
    assert {step for _, step in shown(board)} == {0, 1, 2, 3}
    again = TensorBoard(board)
    history = train(experiment, out, 4, resume=True, trackers=[again]).history
    close()
    found = shown(board)
    accuracy = {
        step: value.simple_value for (tag, step), value in found.items() if tag == "accuracy/test"
    }
    expected = {row["round"]: row["accuracy"] for row in history.rows}
    assert accuracy.keys() == {0, 1, 2, 3, 4} and accuracy == pytest.approx(expected, rel=1e-6)
    for step, each in enumerate(history.results["accuracy_test"]):
        histogram = found["clients/accuracy/test", step].histo
        assert (histogram.num, histogram.sum) == (5, pytest.approx(each.sum()))
        image = found["collaboration", step].image
        assert (image.height, image.width) == (5, 5)


def test_runs_of_a_comparison_have_folders_of_their_own(tmp_path, close):
    tracker = TensorBoard(tmp_path)
    for name, value in (("local/seed-0", 0.25), ("local/seed-1", 0.75)):
        tracker(
            Evaluation(
                name, 0, 0, {"accuracy/test": value}, {"loss/test": np.array([np.inf])}, None
            )
        )
    close()
    for name, value in (("local/seed-0", 0.25), ("local/seed-1", 0.75)):
        # a loss that is not finite is in no histogram
        ((key, found),) = shown(tmp_path / name).items()
        assert key == ("accuracy/test", 0) and found.simple_value == value


@pytest.mark.slow
def test_replicates_have_trackers_of_their_own(monkeypatch):
    monkeypatch.undo()  # one run's compiled functions are not those of two
    found = {1: [], 2: []}
    runs = [make_experiment("local", seed=seed, unseen=False) for seed in found]
    trainer = loop.Trainer(runs, trackers=[each.append for each in found.values()])
    trainer.train(1, EVERY_ROUND)
    for history, each in zip(trainer.histories, found.values(), strict=True):
        assert [entry.scalars["loss/test"] for entry in each] == [
            row["loss"] for row in history.rows
        ]
    assert found[1][0].scalars != found[2][0].scalars


class Runs:
    """Stands in for wandb and for mlflow: runs by id, each with its scalars by (name, step), and whether it is open.

    As wandb, a run takes no step before its last one.
    """

    Histogram = staticmethod(np.sort)
    entities = types.SimpleNamespace(
        Metric=lambda *given: types.SimpleNamespace(given=given, step=given[3])
    )

    def __init__(self):
        self.ids = itertools.count()
        self.runs = {}

    def _begin(self, **about):
        run = types.SimpleNamespace(id=f"id-{next(self.ids)}", values={}, open=True, about=about)
        return self.runs.setdefault(run.id, run)

    def init(self, *, project, name, dir, reinit, id=None, resume=None):
        assert reinit == "create_new" and (resume == "allow") == (id is not None)
        run = self.runs[id] if id else self._begin(project=project, name=name, dir=dir)
        run.open = True
        run.finish = lambda: setattr(run, "open", False)
        run.log = lambda values, step: run.values.update(
            {
                (key, step): value
                for key, value in values.items()
                if step >= max((at for _, at in run.values), default=0)
            }
        )
        return run

    def MlflowClient(self):
        return self

    def set_experiment(self, name):
        return types.SimpleNamespace(experiment_id=f"experiment {name}")

    def create_run(self, experiment, run_name):
        return types.SimpleNamespace(
            info=types.SimpleNamespace(run_id=self._begin(project=experiment, name=run_name).id)
        )

    def update_run(self, run, status):
        self.runs[run].open = status == "RUNNING"

    def set_terminated(self, run):
        self.runs[run].open = False

    def get_metric_history(self, run, name):
        return [
            types.SimpleNamespace(step=step) for key, step in self.runs[run].values if key == name
        ]

    def log_batch(self, run, metrics):
        for name, value, milliseconds, step in (metric.given for metric in metrics):
            assert milliseconds > 1e12 and (name, step) not in self.runs[run].values
            self.runs[run].values[name, step] = value


@pytest.fixture
def library(monkeypatch):
    """A stand-in for both libraries."""
    found = Runs()
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", found)
    monkeypatch.setitem(sys.modules, "mlflow", found)
    return found


def evaluation(round_number, resumed=0, run="", score=None):
    scalars = {"accuracy/test": 0.1 * round_number if score is None else score, "train_loss": 2.0}
    clients = {"accuracy/test": np.array([0.5, np.nan, 0.25]), "loss/test": np.array([np.inf])}
    return Evaluation(run, round_number, resumed, scalars, clients, None)


@pytest.mark.parametrize("tracker", [WandB, MLflow])
def test_a_resumed_run_continues_the_librarys_run_and_has_every_round_once(
    tracker, library, tmp_path
):
    folder = tmp_path / "fedavg" / "seed-0" / tracker.board
    first = tracker(folder)
    assert not library.runs and not folder.exists()  # nothing before the first evaluation
    for number in (0, 1, 2):
        first(evaluation(number))
    (run,) = library.runs.values()
    assert (
        run.open
        and run.about["name"] == "fedavg/seed-0"
        and run.about["project"].endswith("pfljax")
    )
    del first
    gc.collect()
    assert not run.open
    again = tracker(folder)
    again(evaluation(2, resumed=1, score=0.2))
    again(evaluation(3, resumed=1))
    assert len(library.runs) == 1 and run.open
    found = {step: value for (name, step), value in run.values.items() if name == "accuracy/test"}
    assert found == pytest.approx({0: 0, 1: 0.1, 2: 0.2, 3: 0.3})
    tracker(folder)(evaluation(0))  # starts over
    assert len(library.runs) == 2


def test_wandb_has_histograms_of_finite_scores_and_mlflow_has_none(library, tmp_path):
    WandB(tmp_path)(evaluation(3))
    MLflow(tmp_path)(evaluation(3))
    with_clients, without = library.runs.values()
    assert with_clients.values.pop(("clients/accuracy/test", 3)).tolist() == [0.25, 0.5]
    expected = {("accuracy/test", 3): pytest.approx(0.3), ("train_loss", 3): 2.0}
    assert with_clients.values == expected and without.values == expected


@pytest.mark.parametrize("tracker", [WandB, MLflow])
def test_runs_of_a_comparison_are_runs_of_the_library(tracker, library, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    whole = tracker(tmp_path)
    for number in (0, 1):
        for name in ("local/seed-0", "local/seed-1"):
            whole(evaluation(number, run=name))
    assert [run.about["name"] for run in library.runs.values()] == ["local/seed-0", "local/seed-1"]
    assert {run.about["project"].split()[-1] for run in library.runs.values()} == {"mine"}
    tracker(tmp_path)(evaluation(2, resumed=1, run="local/seed-1"))
    first, second = library.runs.values()
    assert (
        max(step for _, step in first.values) == 1 and max(step for _, step in second.values) == 2
    )
    tracker(tmp_path, "other")(evaluation(0))
    assert [*library.runs.values()][-1].about["project"].split()[-1] == "other"


def test_runs_that_start_over_delete_what_trackers_left():
    assert {*TRACKERS} == {*folders.BOARDS}


@pytest.mark.parametrize(("name", "tracker"), TRACKERS.items())
def test_without_the_library_one_line_says_how_to_get_it(name, tracker, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker.package, None)
    with pytest.raises(
        ArgumentError, match=rf"^tracker: needs {tracker.package}: pip install 'pfljax\[{name}\]'$"
    ):
        tracker(tmp_path)
