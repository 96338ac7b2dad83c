"""Runs: what they leave behind, and that stopping, tearing and resuming change nothing."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import optax
import pytest
import toys
from runs import (
    EVERY_ROUND,
    ROUNDS,
    SIZES,
    assert_same_predictions,
    assert_same_runs,
    figures,
    make_experiment,
    train,
)

from pfljax.contract.errors import ArgumentError, RunError
from pfljax.exchange.plan import make_plan
from pfljax.folder import checkpoints, files, history
from pfljax.run import memory
from pfljax.run.compiled import Compiled
from pfljax.stages.faults import Faults
from pfljax.stores.registry import STORES
from pfljax.training import loop
from pfljax.training.loop import Schedule

pytestmark = [pytest.mark.usefixtures("compile_once"), pytest.mark.xdist_group("runs")]


class Killed(Exception):
    """Stands for a kill -9 at a given place."""


@pytest.mark.slow
@toys.each_method(fast=("federico",), slow=("scaffold", "dfedem", "pfedhn", "fedbuff"))
def test_stopped_and_resumed_is_as_never_stopped(name, whole, tmp_path, monkeypatch):
    save = checkpoints.save

    def dies(directory, round_number, state, **options):
        if round_number == 4:  # the files of round 4 are there, its checkpoint is not
            raise Killed
        save(directory, round_number, state, **options)

    monkeypatch.setattr(checkpoints, "save", dies)
    with pytest.raises(Killed):
        train(make_experiment(name), tmp_path)
    assert not (tmp_path / "summary.json").exists()
    assert [row["round"] for row in files.read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    monkeypatch.setattr(checkpoints, "save", save)
    lines = []
    result = train(make_experiment(name), tmp_path, resume=True, say=lines.append)
    assert any("resumed after round 2" in line for line in lines)
    out, expected = whole(name)
    assert_same_runs(out, tmp_path)
    assert_same_predictions(result, expected)


@pytest.mark.slow
def test_a_run_leaves_its_files_whole(whole):
    out, result = whole("federico")
    names = {path.name for path in out.iterdir()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "results.npz",
        "collaboration.npz",
        "summary.json",
        "manifest.json",
        "checkpoints",
    }
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(ROUNDS + 1))
    wanted = (
        "train_loss loss accuracy accuracy_mean accuracy_std accuracy_bottom_decile "
        "accuracy_min bytes_down bytes_up"
    )
    assert set(wanted.split()) | {"round", "seconds"} <= set(rows[-1])
    assert (np.diff([row["seconds"] for row in rows]) > 0).all()

    results = files.read_npz(out / "results.npz")
    for split in ("train", "test"):
        for name in ("accuracy", "loss"):
            assert results[f"{name}_{split}"].shape == (ROUNDS + 1, 5)
    np.testing.assert_array_equal(results["rounds"], np.arange(ROUNDS + 1))
    assert "mixture" in str(results["scored"])
    collaboration = files.read_npz(out / "collaboration.npz")
    assert collaboration["index"].shape == collaboration["weights"].shape == (ROUNDS + 1, 5, 5)
    np.testing.assert_allclose(collaboration["weights"].sum(axis=2), 1, atol=1e-5)

    summary = files.read_json(out / "summary.json")
    sizes = [row["n_train"] for row in summary["per_client"]]
    np.testing.assert_array_equal(collaboration["labels"].sum(axis=1), sizes)
    assert (summary["method"], summary["num_clients"], summary["rounds"], summary["seed"]) == (
        "federico",
        5,
        6,
        1,
    )
    assert figures(summary["last"]) == figures(rows[-1])
    best = min(rows, key=lambda row: row["train_loss"])
    assert (
        summary["best"]["round"] == best["round"] and summary["best"]["selected_by"] == "train_loss"
    )
    clients = summary["per_client"]
    assert [row["client"] for row in clients] == list(range(5))
    assert [row["n_train"] for row in clients] == list(SIZES) and {
        row["n_test"] for row in clients
    } == {4}
    np.testing.assert_allclose(
        [row["accuracy"] for row in clients], results["accuracy_test"][-1], rtol=1e-6
    )
    assert result.summary["last"]["accuracy_mean"] == pytest.approx(
        results["accuracy_test"][-1].mean()
    )


def test_the_history_begins_with_the_initial_models():
    """Round 0: what a linear model predicts before any training, in NumPy."""
    experiment = make_experiment("fedavg", unseen=False)
    trainer = loop.Trainer([experiment])
    federation = experiment.federation
    found = trainer.train(2, EVERY_ROUND)[0].history
    first = found.rows[0]
    assert [row["round"] for row in found.rows] == [0, 1, 2]
    assert first["seconds"] == first["bytes_down"] == first["bytes_up"] == 0
    key = jax.random.fold_in(jax.random.key(experiment.seed), 0)
    state = toys.init(trainer.compiled.algorithm, experiment.problem, key, federation.client_data)
    kernel, bias = sorted(
        jax.tree.leaves(jax.device_get(state.models)), key=lambda leaf: -leaf.size
    )
    losses = {}
    for part in ("train", "test"):
        split = getattr(federation, part)
        logits = np.asarray(split.x[...]) @ kernel[0] + bias[0]
        true = np.take_along_axis(logits, np.asarray(split.y)[..., None], axis=-1)[..., 0]
        each = np.log(np.exp(logits).sum(axis=-1)) - true
        real = np.arange(each.shape[1]) < split.size[:, None]
        own = (each * real).sum(axis=1) / split.size
        np.testing.assert_allclose(found.results[f"loss_{part}"][0], own, rtol=1e-5)
        losses[part] = np.average(own, weights=split.size)
    assert first["loss"] == pytest.approx(losses["test"], rel=1e-5)
    assert first["train_loss"] == pytest.approx(losses["train"], rel=1e-5)
    assert found.rows[1]["loss"] != first["loss"]


def forget_round_0(out, done):
    """Leaves a folder as an earlier version would have, which did not evaluate the initial models."""
    path = history.kept_with(out / "checkpoints", done)
    arrays = files.read_npz(path)
    rows = json.loads(str(arrays["rows"]))
    assert rows[0]["round"] == 0
    series = {name: values[1:] for name, values in arrays.items() if "/" in name}
    files.write_npz(path, arrays | series | {"rows": np.asarray(json.dumps(rows[1:]))})
    (out / "manifest.json").unlink()


def test_a_run_that_was_begun_without_round_0_goes_on(whole, tmp_path):
    train(make_experiment("local"), tmp_path, 2)
    forget_round_0(tmp_path, 2)
    train(make_experiment("local"), tmp_path, resume=True)
    expected, found = (files.read_npz(out / "results.npz") for out in (whole("local")[0], tmp_path))
    assert found["rounds"].tolist() == list(range(1, ROUNDS + 1))
    np.testing.assert_array_equal(found["loss_test"], expected["loss_test"][1:])


def test_rows_of_fewer_evaluations_are_those_of_every_round(whole):
    rare = Schedule(eval_every=2, checkpoint_every=2)
    rows = toys.run(make_experiment("local"), ROUNDS, schedule=rare).history.rows
    every = whole("local")[1].history.rows
    assert [row["round"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        for name in ("train_loss", "loss", "accuracy", "bytes_down"):
            assert row[name] == pytest.approx(every[row["round"]][name], rel=1e-5), name


@pytest.mark.parametrize(("name", "models"), [("fedavg", 1), ("local", 0)])
def test_traffic_follows_from_what_is_exchanged(name, models, whole):
    model_bytes = 4 * (3 * 3 + 3)
    # by client, over the rounds so far
    for row in files.read_jsonl(whole(name)[0] / "metrics.jsonl"):
        cohorts = row["round"] * 4 / 5  # four of the five clients a round
        assert row["bytes_down"] == pytest.approx(cohorts * models * model_bytes)
        # n_k goes with a model
        assert row["bytes_up"] == pytest.approx(cohorts * models * (model_bytes + 4))


@pytest.mark.slow
def test_peers_traffic_is_a_model_and_a_gradient_for_each_batch_and_neighbor(whole):
    model_bytes = 4 * (3 * 3 + 3)
    for row in files.read_jsonl(whole("federico")[0] / "metrics.jsonl"):
        # In batches of 2 the clients have 2, 2, 3, 1 and 2 a round, so a cohort of four has 7 to 9.
        batches = row["bytes_down"] * 5 / (3 * model_bytes * max(row["round"], 1))
        assert 7 - 1e-6 <= batches <= 9 + 1e-6 or row["round"] == batches == 0
        assert row["bytes_up"] == pytest.approx(row["bytes_down"])


@toys.each_method(["fedavg", "federico", "fedfomo"], fast=["fedavg"], slow=["federico"])
def test_test_labels_reach_nothing_that_is_trained(name, whole, tmp_path):
    experiment = make_experiment(name)
    test = experiment.federation.test
    relabeled = dataclasses.replace(experiment.federation, test=test._replace(y=(test.y + 1) % 3))
    result = train(dataclasses.replace(experiment, federation=relabeled), tmp_path)
    out, expected = whole(name)
    assert_same_predictions(result, expected)
    for file in ("results.npz", "collaboration.npz"):
        a = files.read_npz(tmp_path / file)
        b = files.read_npz(out / file)
        for key in a:
            if key.endswith("_test"):
                assert not np.array_equal(a[key], b[key])
            else:
                np.testing.assert_array_equal(a[key], b[key], err_msg=key)
    assert result.summary["best"]["round"] == expected.summary["best"]["round"]


def test_unseen_clients_are_adapted_to_without_their_test_labels(compile_once):
    experiment = make_experiment("fedavg_plus")
    plan = experiment.problem.plan
    algorithm = experiment.algorithm(plan)
    state = toys.init(
        algorithm, experiment.problem, jax.random.key(0), experiment.federation.client_data
    )
    compiled = Compiled(algorithm, plan, *[None] * 4, 0.0)

    def score(unseen):
        return compile_once(
            dataclasses.replace(experiment, unseen=unseen), compiled, jax.random.key(1), state
        )

    before = score(experiment.unseen)
    assert len(before["per_client"]) == 2 and np.isfinite(before["loss"])
    test = experiment.unseen.test
    after = score(dataclasses.replace(experiment.unseen, test=test._replace(y=(test.y + 1) % 3)))
    assert after["train_loss"] == before["train_loss"] and after["loss"] != before["loss"]


@pytest.mark.parametrize("name", ["local", pytest.param("federico", marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_stops_the_run(name, tmp_path):
    federation = toys.make_federation((4, 3, 5, 2), "regression")
    # client 2's steps overshoot further and further; the others' do not
    federation.train.x[2] *= 300
    hyperparameters = {"neighbors": 0} if name == "federico" else {}
    problem = toys.make_problem(federation, optax.sgd(0.05))
    faults = Faults(on_divergence="stop")
    experiment = toys.make_experiment(
        name, problem, federation, hyperparameters=hyperparameters, faults=faults
    )
    with pytest.raises(RunError, match=r"round (\d+): the loss of client 2 is not finite") as error:
        toys.run(experiment, 50, out=tmp_path, schedule=EVERY_ROUND)
    stopped = int(str(error.value).split(":")[0].removeprefix("round "))
    rows = files.read_jsonl(tmp_path / "metrics.jsonl")
    assert 2 < stopped < 20 and [row["round"] for row in rows] == list(range(stopped))
    assert all(np.isfinite(row["train_loss"]) for row in rows)
    assert len(files.read_npz(tmp_path / "results.npz")["rounds"]) == len(rows)
    assert not (tmp_path / "summary.json").exists()


def test_a_folder_with_something_in_it_is_not_overwritten(whole, tmp_path):
    out, _ = whole("local")
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ArgumentError,
        match=r"out=.*contains another run; choose a new folder, `resume` .*`resume=from",
    ):
        train(make_experiment("local"), out)
    changed = make_experiment(
        "local", config={"settings": {"method": "local", "learning_rate": 0.5}}
    )
    with pytest.raises(ArgumentError, match=r"learning_rate was 0\.05 and is 0\.5"):
        train(changed, out, resume=True)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ArgumentError, match="other than a run"):
        train(make_experiment("local"), tmp_path)
    assert (out / "metrics.jsonl").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "plan", "expected"),
    [
        ("local", ("chunk", 4, 1), [(4, "auto"), (2, "auto"), (1, "auto")]),
        # of which a cache may have held any number
        ("local", ("vmap", 0, 1), [(0, "auto"), (1, "auto")]),
        (
            "federico",
            ("vmap", 0, 2),
            [(0, "auto"), (0, "ring"), (1, "ring")],
        ),  # first without copies
    ],
)
def test_the_chunk_shrinks_until_a_round_fits(name, plan, expected, monkeypatch):
    monkeypatch.undo()
    experiment = make_experiment(name)
    problem = experiment.problem._replace(plan=make_plan(*plan))
    experiment = dataclasses.replace(experiment, problem=problem)
    tried = []

    def compiled(experiment, clients, plan, length, replicates):
        tried.append((plan.chunk, plan.peers))
        fits = memory.MemoryPlan(1, 1, 1, limit=100 if plan.chunk == 1 else 1)
        return Compiled(experiment.algorithm(plan), plan, *[None] * 3, fits, 0.0)

    monkeypatch.setattr(STORES["device"], "compile_segment", compiled)
    assert loop.compile_to_fit(experiment, experiment.federation.client_data, 1).plan.chunk == 1
    assert tried == expected
    monkeypatch.setattr(memory, "next_smaller", lambda plan, num, topology: None)
    with pytest.raises(RunError, match="out of memory"):
        loop.compile_to_fit(experiment, experiment.federation.client_data, 1)


def test_training_goes_on_from_where_it_stands(whole, tmp_path):
    def rounds_of():
        return files.read_json(tmp_path / "run" / "config.json")["rounds"]

    trainer = loop.Trainer([make_experiment("fedavg")], outs=[tmp_path / "run"])
    trainer.train(2, EVERY_ROUND)
    assert rounds_of() == 2
    outcome = trainer.train(ROUNDS, EVERY_ROUND)[0]
    assert rounds_of() == ROUNDS
    expected = files.read_npz(whole("fedavg")[0] / "results.npz")
    found = outcome.history.results_arrays()
    for name in ("accuracy_test", "loss_train", "rounds"):
        np.testing.assert_array_equal(found[name], expected[name])


def test_a_model_that_the_last_update_breaks_is_told(tmp_path):
    federation = toys.make_federation((3, 3), "regression")
    problem = toys.make_problem(federation, optax.sgd(1e38), hidden=(4,))
    with pytest.raises(
        RunError,
        match=r"round 1: the loss of client \d is not finite after it.* Earlier evaluations are saved in",
    ):
        faults = Faults(on_divergence="stop")
        toys.run(
            toys.make_experiment("fedprox", problem, federation, faults=faults), 1, out=tmp_path
        )
    assert not (tmp_path / "summary.json").exists()
    assert [row["round"] for row in files.read_jsonl(tmp_path / "metrics.jsonl")] == [0]


def test_initial_models_without_a_finite_loss_are_told(tmp_path):
    federation = toys.make_federation((3, 3), "regression")
    federation.test.x[1] = np.inf
    experiment = toys.make_experiment("fedprox", toys.make_problem(federation), federation)
    line = r"^the initial models: the loss of client 1 is not finite on its test examples;.* The run is "
    with pytest.raises(RunError, match=line):
        toys.run(experiment, 1, out=tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        ("metrics.jsonl", "cut"),
        ("metrics.jsonl", "removed"),
        ("results.npz", "emptied"),
        ("collaboration.npz", "cut"),
        ("summary.json", "removed"),
    ],
)
def test_a_file_that_is_lost_is_made_again(whole, tmp_path, lost, how):
    out, _ = whole("local")
    other = tmp_path / "run"
    shutil.copytree(out, other)
    expected = files.read_npz(out / "results.npz")
    path = other / lost
    path.unlink() if how == "removed" else path.write_bytes(
        b"" if how == "emptied" else path.read_bytes()[:-20]
    )
    train(make_experiment("local"), other, resume=True)
    found = files.read_npz(other / "results.npz")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    assert (other / "metrics.jsonl").read_text() == (out / "metrics.jsonl").read_text()
    assert (
        files.read_json(other / "summary.json")["last"]
        == files.read_json(out / "summary.json")["last"]
    )
    assert (
        files.read_npz(other / "collaboration.npz").keys()
        == files.read_npz(out / "collaboration.npz").keys()
    )


def test_fewer_rounds_than_a_folder_has_are_refused(whole):
    out, _ = whole("local")
    with pytest.raises(
        ArgumentError, match=rf"rounds=1: .*already has {ROUNDS} rounds; accepted: {ROUNDS} or more"
    ):
        train(make_experiment("local"), out, resume=True, rounds=1)
