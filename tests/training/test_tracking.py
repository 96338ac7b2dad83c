"""Trackers: what they get at every evaluation, and what TensorBoard's files say of a run that was resumed."""

import struct
import sys

import numpy as np
import pytest
from runs import EVERY_ROUND, make_experiment, train

from pfljax.contract.errors import ArgumentError
from pfljax.training import loop
from pfljax.training.tracking import Evaluation, TensorBoard, make_evaluation, named

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
            found = {(tag, step): value for (tag, step), value in found.items() if step < event.step}
        for value in event.summary.value:
            assert (value.tag, event.step) not in found
            found[value.tag, event.step] = value
    return found


def close(tracker):
    for writer in tracker._writers.values():
        writer.close()


def test_a_tracker_gets_what_the_files_say():
    found = []
    history = train(make_experiment("federico", unseen=False), None, 2, trackers=[found.append]).history
    assert [each.round for each in found] == [0, 1, 2] and {(each.run, each.resumed) for each in found} == {("", 0)}
    for place, each in enumerate(found):
        row = history.rows[place]
        assert each.scalars["accuracy/test"] == row["accuracy"] and each.scalars["train_loss"] == row["train_loss"]
        assert each.scalars["bytes_up"] == row["bytes_up"] and "accuracy" not in each.scalars
        for name in ("accuracy", "loss"):
            np.testing.assert_array_equal(each.per_client[f"{name}/test"], history.results[f"{name}_test"][place])
        index, weights = (history.collaboration[name][place] for name in ("index", "weights"))
        expected = np.zeros((5, 5))
        for client, (models, shares) in enumerate(zip(index, weights, strict=True)):
            for model, share in zip(models, shares, strict=True):
                expected[client, model] += share
        np.testing.assert_allclose(each.collaboration, expected)


def test_clients_without_examples_and_matrices_of_a_sample_are_left_out():
    row = {"round": 3, "train_loss": 0.5, "loss": 1.0, "validation_loss": 2.0, "drift": 4.0}
    scores = {"test": {"loss": np.array([1.0, np.nan])}, "validation": {"loss": np.array([2.0, np.nan])}}
    means = {"test": {"loss": 1.0}, "validation": {"loss": 2.0}}
    found = make_evaluation(row, means, scores, {}, shared=False, resumed=2)
    assert found.scalars == {"loss/test": 1.0, "loss/validation": 2.0, "train_loss": 0.5, "drift": 4.0}
    assert found.per_client["loss/test"].tolist() == [1.0] and found.collaboration is None
    used = {"index": np.array([[0, 2], [2, 2]]), "weights": np.array([[0.25, 0.75], [0.5, 0.5]])}
    shared = make_evaluation(row, means, scores, used, shared=True, resumed=2)  # three models of two clients
    assert shared.collaboration.tolist() == [[0.25, 0, 0.75], [0, 0, 1]]


def test_a_name_tells_the_runs_of_a_comparison_apart():
    found = []
    evaluation = Evaluation("", 1, 0, {}, {}, None)
    named(found.append, "fedavg/seed-0")(evaluation)
    assert found == [evaluation._replace(run="fedavg/seed-0")] and named(None, "fedavg/seed-0") is None


def test_tensorboard_has_every_round_once_after_a_kill_and_a_resumption(tmp_path):
    """Killed after round 3 was tracked, with a checkpoint of round 2: round 3 is played and written again."""
    out, board = tmp_path / "run", tmp_path / "board"
    experiment = make_experiment("federico", unseen=False)
    tracker = TensorBoard(board)

    class Killed(Exception):
        pass

    def dies(evaluation):
        tracker(evaluation)
        if evaluation.round == 3:
            raise Killed

    with pytest.raises(Killed):
        train(experiment, out, 4, trackers=[dies])
    close(tracker)
    assert {step for _, step in shown(board)} == {0, 1, 2, 3}
    again = TensorBoard(board)
    history = train(experiment, out, 4, resume=True, trackers=[again]).history
    close(again)
    found = shown(board)
    accuracy = {step: value.simple_value for (tag, step), value in found.items() if tag == "accuracy/test"}
    expected = {row["round"]: row["accuracy"] for row in history.rows}
    assert accuracy.keys() == {0, 1, 2, 3, 4} and accuracy == pytest.approx(expected, rel=1e-6)
    for step, each in enumerate(history.results["accuracy_test"]):
        histogram = found["clients/accuracy/test", step].histo
        assert (histogram.num, histogram.sum) == (5, pytest.approx(each.sum()))
        image = found["collaboration", step].image
        assert (image.height, image.width) == (5, 5)


def test_runs_of_a_comparison_have_folders_of_their_own(tmp_path):
    tracker = TensorBoard(tmp_path)
    for name, value in (("local/seed-0", 0.25), ("local/seed-1", 0.75)):
        tracker(Evaluation(name, 0, 0, {"accuracy/test": value}, {"loss/test": np.array([np.inf])}, None))
    close(tracker)
    for name, value in (("local/seed-0", 0.25), ("local/seed-1", 0.75)):
        ((key, found),) = shown(tmp_path / name).items()  # a loss that is not finite is in no histogram
        assert key == ("accuracy/test", 0) and found.simple_value == value


@pytest.mark.slow
def test_replicates_have_trackers_of_their_own(monkeypatch):
    monkeypatch.undo()  # one run's compiled functions are not those of two
    found = {1: [], 2: []}
    runs = [make_experiment("local", seed=seed, unseen=False) for seed in found]
    trainer = loop.Trainer(runs, trackers=[each.append for each in found.values()])
    trainer.train(1, EVERY_ROUND)
    for history, each in zip(trainer.histories, found.values(), strict=True):
        assert [entry.scalars["loss/test"] for entry in each] == [row["loss"] for row in history.rows]
    assert found[1][0].scalars != found[2][0].scalars


def test_without_tensorboardx_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ArgumentError, match=r"^tensorboard: needs tensorboardX: pip install 'pfljax\[tensorboard\]'$"):
        TensorBoard(tmp_path)
