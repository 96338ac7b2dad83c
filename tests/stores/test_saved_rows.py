"""Clients' rows in checkpoints of host memory: only changed ones, as they were when the checkpoint began."""

import errno
import json
import logging
import os
import shutil
import threading

import jax
import numpy as np
import optax
import pytest
import toys

import pfljax as pfl
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.folder import checkpoints, files, folders, manifest
from pfljax.stores import saved_rows, stacks
from pfljax.training import loop
from pfljax.training.loop import Schedule, Trainer

SIZES = (5, 1, 3, 4, 2, 4, 0, 3)
ROUNDS = 6
COHORT = 2
OFTEN = Schedule(2, 2)
K = 7


def make_experiment(name, client_store="host", seed=0, **hyperparameters):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(
        federation, optax.adam(0.05), batch_size=2, cohort=COHORT, **toys.network(name)
    )
    return toys.make_experiment(
        name,
        problem,
        federation,
        hyperparameters=hyperparameters,
        client_store=client_store,
        seed=seed,
    )


def outcome_of(experiment, rounds=ROUNDS, **options):
    """(the last row but its seconds, the state in memory) of a run."""
    outcome = toys.run(experiment, rounds, **{"schedule": OFTEN} | options)
    last = {name: value for name, value in outcome.summary["last"].items() if name != "seconds"}
    return last, jax.device_get(stacks.in_memory(outcome.state))


def assert_same(outcome, other):
    assert outcome[0] == other[0] and toys.same_trees(outcome[1], other[1])


def rows_folder(out, step):
    return out / "checkpoints" / f"{step}.rows"


def stored(out, step):
    return json.loads((rows_folder(out, step) / saved_rows.INDEX).read_text())["index"]


@pytest.fixture
def stack():
    """Rows of three types, of which three have changed."""
    generator = np.random.default_rng(0)
    arrays = {
        "w": generator.normal(size=(K, 3, 2)).astype(np.float32),
        "half": generator.normal(size=(K, 2)).astype(jax.numpy.bfloat16),
        "count": generator.integers(9, size=K).astype(np.int32),
    }
    changed = np.isin(np.arange(K), [1, 4, 5])
    return stacks.tracked(arrays, changed, {"models/w": np.arange(4.0)})


def in_memory(stack):
    return jax.tree.map(np.copy, stacks.in_memory(stack))


def save(folder, stack):
    writer = saved_rows.RowsWriter(folder, stack, saved_rows.table_of(stack))
    writer.freeze()
    writer.finish()


def test_changed_rows_are_read_as_they_were_and_others_are_zero(stack, tmp_path):
    before = in_memory(stack)
    writer = saved_rows.RowsWriter(tmp_path / "rows", stack, saved_rows.table_of(stack))
    writer.freeze()
    digests = writer.finish()
    assert {*digests} == {path.name for path in (tmp_path / "rows").iterdir()}
    read = saved_rows.load(tmp_path / "rows", before)
    table = saved_rows.table_of(read)
    assert np.flatnonzero(table.changed).tolist() == [1, 4, 5]
    np.testing.assert_array_equal(table.start["models/w"], np.arange(4.0))
    for name, rows in stacks.in_memory(read).items():
        assert rows.dtype == before[name].dtype
        np.testing.assert_array_equal(rows[table.changed], before[name][table.changed])
        assert not rows[~table.changed].any()


def test_rows_that_change_while_they_are_saved_are_saved_as_they_were(stack, tmp_path, monkeypatch):
    """A round writes while the thread is in the middle: the checkpoint has no row of that round."""
    monkeypatch.setattr(saved_rows, "BLOCK_BYTES", 1)  # a row at a time
    before = in_memory(stack)
    table = saved_rows.table_of(stack)
    writer = saved_rows.RowsWriter(tmp_path / "rows", stack, table)
    writer.freeze()
    append = saved_rows._File.append
    is_begun = threading.Event()
    goes_on = threading.Event()

    def slow(file, rows):
        append(file, rows)
        if threading.current_thread() is not threading.main_thread():
            is_begun.set()

    def sync(self):
        goes_on.wait()

    monkeypatch.setattr(saved_rows._File, "append", slow)
    monkeypatch.setattr(saved_rows, "SYNC_BYTES", 1)
    monkeypatch.setattr(saved_rows.RowsWriter, "_sync", sync)
    thread = threading.Thread(target=writer.finish)
    thread.start()
    is_begun.wait()
    ids = np.array([0, 4, 5])
    new = jax.tree.map(lambda leaf: jax.numpy.full((3, *leaf.shape[1:]), 7, leaf.dtype), before)
    stacks.write(stack, ids, new)
    goes_on.set()
    thread.join()
    assert table.changed.sum() == 4 and stacks.in_memory(stack)["count"][0] == 7
    read = saved_rows.load(tmp_path / "rows", before)
    assert np.flatnonzero(saved_rows.table_of(read).changed).tolist() == [1, 4, 5]
    for name, rows in stacks.in_memory(read).items():
        np.testing.assert_array_equal(rows[[1, 4, 5]], before[name][[1, 4, 5]])


def test_rows_are_written_ahead_and_again_if_they_change(stack, tmp_path):
    table = saved_rows.table_of(stack)
    writer = saved_rows.RowsWriter(tmp_path / "rows", stack, table)
    writer.add(np.array([0, 1, 4]))  # 0 is an initial row
    writer.write_added()
    assert writer.num_bytes == 2 * 32
    before = in_memory(stack)
    ids = np.array([0, 4])
    new = jax.tree.map(lambda leaf: jax.numpy.full((2, *leaf.shape[1:]), 7, leaf.dtype), before)
    stacks.write(stack, ids, new)
    writer.add(np.array([0]))
    writer.write_added()
    at_freeze = in_memory(stack)
    writer.freeze()
    stacks.write(stack, np.array([1, 5]), jax.tree.map(lambda leaf: leaf + 1, new))
    writer.finish()
    read = saved_rows.load(tmp_path / "rows", before)
    assert np.flatnonzero(saved_rows.table_of(read).changed).tolist() == [0, 1, 4, 5]
    for name, rows in stacks.in_memory(read).items():
        np.testing.assert_array_equal(rows[[0, 1, 4, 5]], at_freeze[name][[0, 1, 4, 5]])


@pytest.mark.parametrize("damage", ["bit", "truncated", "longer", "missing"])
def test_a_damaged_file_of_rows_is_found(damage, stack, tmp_path):
    folder = tmp_path / "rows"
    before = in_memory(stack)
    save(folder, stack)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 4
        damaged = {"bit": changed, "truncated": content[:-1], "longer": content + b"\1"}
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(damaged[damage])
        with pytest.raises((saved_rows.Damaged, OSError)):
            saved_rows.load(folder, before)
        path.write_bytes(content)
    saved_rows.load(folder, before)


def test_rows_of_another_model_are_refused_in_one_line(stack, tmp_path):
    before = in_memory(stack)
    save(tmp_path / "rows", stack)
    other = before | {"w": np.zeros((K, 3, 3), np.float32)}
    text = r"w needs an array of shape \(7, 3, 3\); the checkpoint has shape \(7, 3, 2\)"
    with pytest.raises(ArgumentError, match=text):
        saved_rows.load(tmp_path / "rows", other)
    with pytest.raises(ArgumentError, match=r"new needs an array .* the checkpoint has none"):
        saved_rows.load(tmp_path / "rows", {"new": before["w"]})


def test_a_full_disk_is_told_by_the_thread_and_rounds_go_on(stack, tmp_path, monkeypatch):
    def full(file, rows):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    table = saved_rows.table_of(stack)
    writer = saved_rows.RowsWriter(tmp_path / "rows", stack, table)
    writer.freeze()
    monkeypatch.setattr(saved_rows._File, "append", full)
    table.change(np.array([4]))  # what a round does
    with pytest.raises(OSError, match="No space left"):
        writer.finish()
    writer.close()
    assert not (tmp_path / "rows").exists()
    table.change(np.array([5]))


def test_a_run_saves_rows_ahead_that_no_further_round_changes(tmp_path, monkeypatch):
    """Most of the last checkpoint is written before it begins, and it is that of a run that saves nothing ahead."""
    ahead = []
    freeze = saved_rows.RowsWriter.freeze

    def freeze_and_note(writer):
        with writer._lock:  # the thread may still write
            ahead.append(writer._written.sum() + writer._added.sum())
        freeze(writer)

    monkeypatch.setattr(saved_rows.RowsWriter, "freeze", freeze_and_note)
    rare = Schedule(3, 100)
    saved = outcome_of(make_experiment("ditto"), 9, out=tmp_path / "ahead", schedule=rare)
    assert len(ahead) == 1 and ahead[0] > len(SIZES) // 2
    again = outcome_of(make_experiment("ditto"), 9, out=tmp_path / "ahead", resume=True)
    assert_same(again, saved)
    monkeypatch.setattr(loop, "MOST_AHEAD", -1)
    other = outcome_of(make_experiment("ditto"), 9, out=tmp_path / "other", schedule=rare)
    assert ahead[1:] == [0]
    assert_same(other, saved)
    whole = outcome_of(make_experiment("ditto"), 12, out=tmp_path / "other", resume=True)
    assert_same(
        outcome_of(make_experiment("ditto"), 12, out=tmp_path / "ahead", resume=True), whole
    )


@toys.each_method(["ditto", "federico", "local"], fast=("ditto",), slow=("federico", "local"))
def test_a_run_goes_on_from_its_changed_rows_to_the_bit(name, tmp_path):
    hyperparameters = {"neighbors": 1} if name == "federico" else {}

    def experiment():
        return make_experiment(name, **hyperparameters)

    whole = outcome_of(experiment(), out=tmp_path / "whole")
    outcome_of(experiment(), 2, out=tmp_path / "part")
    index = stored(tmp_path / "part", 2)
    assert 0 < index["stored"] <= 2 * COHORT < index["clients"]
    again = outcome_of(experiment(), out=tmp_path / "part", resume=True)
    assert_same(again, whole)
    kept = manifest.read(tmp_path / "part")
    assert kept.checkpoints == [6, 4] and kept.damaged(tmp_path / "part", 6) is None
    names = {path.name for path in (tmp_path / "part/checkpoints").iterdir()}
    assert names == {"4", "4.rows", "history-4.npz", "6", "6.rows", "history-6.npz"}
    # A finished run that is resumed has its last state.
    assert_same(outcome_of(experiment(), out=tmp_path / "part", resume=True), whole)


@pytest.mark.parametrize("damage", ["bit", "index", "rows", "whole"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(damage, tmp_path, caplog):
    whole = outcome_of(make_experiment("ditto"), out=tmp_path / "run")
    folder = rows_folder(tmp_path / "run", 6)
    if damage == "rows":
        shutil.rmtree(folder)
    elif damage == "whole":
        shutil.rmtree(tmp_path / "run/checkpoints/6")
    else:
        path = folder / ("0.bin" if damage == "bit" else saved_rows.INDEX)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        again = outcome_of(make_experiment("ditto"), out=tmp_path / "run", resume=True)
    assert_same(again, whole)
    assert "is damaged and is skipped" in caplog.text
    assert manifest.read(tmp_path / "run").damaged(tmp_path / "run", 6) is None


@pytest.mark.parametrize("damage", ["bit", "rows"])
def test_without_a_manifest_damaged_rows_are_found_when_they_are_read(damage, tmp_path, caplog):
    whole = outcome_of(make_experiment("ditto"), out=tmp_path / "run")
    (tmp_path / "run/manifest.json").unlink()
    folder = rows_folder(tmp_path / "run", 6)
    if damage == "rows":
        shutil.rmtree(folder)
    else:
        content = bytearray((folder / "0.bin").read_bytes())
        content[-1] ^= 4
        (folder / "0.bin").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        again = outcome_of(make_experiment("ditto"), out=tmp_path / "run", resume=True)
    assert_same(again, whole)
    assert "checkpoints/6 is damaged and is skipped" in caplog.text


@pytest.mark.parametrize("step", ["rows", "state", "manifest"])
def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    step, tmp_path, monkeypatch
):
    """Killed before the rows are complete, before the rest is, and before the manifest lists it."""
    whole = outcome_of(make_experiment("ditto"), out=tmp_path / "whole")
    names = {
        "rows": (saved_rows.RowsWriter, "_finish"),
        "state": (checkpoints, "_save"),
        "manifest": (folders.manifest, "write"),
    }
    outcome_of(make_experiment("ditto"), 2, out=tmp_path / "run")

    def killed(*_, **__):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(*names[step], killed)
        outcome_of(make_experiment("ditto"), out=tmp_path / "run", resume=True)
    assert manifest.read(tmp_path / "run").checkpoints == [2]
    again = outcome_of(make_experiment("ditto"), out=tmp_path / "run", resume=True)
    assert_same(again, whole)


def test_a_disk_that_is_full_is_one_error_and_loses_nothing(tmp_path, monkeypatch):
    def full(file, rows):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = outcome_of(make_experiment("ditto"), out=tmp_path / "whole")
    outcome_of(make_experiment("ditto"), 2, out=tmp_path / "run")
    message = r"out of disk space in .*\. Earlier checkpoints are intact"
    with monkeypatch.context() as patch, pytest.raises(RunError, match=message):
        patch.setattr(saved_rows._File, "append", full)
        outcome_of(make_experiment("ditto"), out=tmp_path / "run", resume=True)
    assert not (tmp_path / "run/checkpoints" / checkpoints.PARTIAL).exists()
    assert_same(outcome_of(make_experiment("ditto"), out=tmp_path / "run", resume=True), whole)


def test_a_checkpoint_with_all_rows_is_gone_on_with(tmp_path, monkeypatch):
    """As earlier versions wrote them, and as several runs in one do."""
    whole = outcome_of(make_experiment("ditto"), out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(stacks, "tracked", lambda rows, *_: rows)
        outcome_of(make_experiment("ditto"), 4, out=tmp_path / "run")
    assert not rows_folder(tmp_path / "run", 4).exists()
    assert_same(outcome_of(make_experiment("ditto"), out=tmp_path / "run", resume=True), whole)
    assert stored(tmp_path / "run", 6)["stored"] == len(SIZES)  # any of them may have changed
    assert_same(outcome_of(make_experiment("ditto"), out=tmp_path / "run", resume=True), whole)


@pytest.mark.slow
def test_several_runs_in_one_go_on_from_those_of_single_ones(tmp_path):
    """And single ones from theirs."""
    outs = [tmp_path / str(seed) for seed in range(2)]

    def experiments():
        return [make_experiment("ditto", seed=seed) for seed in range(2)]

    wholes = [
        outcome_of(experiment, out=tmp_path / f"whole-{number}")
        for number, experiment in enumerate(experiments())
    ]
    for experiment, out in zip(experiments(), outs, strict=True):
        outcome_of(experiment, 2, out=out)
    Trainer(experiments(), outs=outs, resume=True).train(4, OFTEN)
    assert not rows_folder(outs[0], 4).exists()
    for experiment, out, whole in zip(experiments(), outs, wholes, strict=True):
        assert_same(outcome_of(experiment, out=out, resume=True), whole)


def test_a_loaded_run_predicts_from_its_changed_rows(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(48, 3)).astype(np.float32)
    y = np.arange(48) % 2
    clients = pfl.Federation.from_arrays(x, y, client=np.arange(48) % 12)
    run = pfl.Run(
        pfl.Ditto(),
        clients,
        pfl.models.MLP(hidden=(4,)),
        participation=0.25,
        execution=pfl.Execution(client_store="host"),
    )
    result = run.train(rounds=2, out=tmp_path / "run", progress=False)
    assert stored(tmp_path / "run", 2)["stored"] < 12
    for options in ({}, {"clients": clients}):
        loaded = pfl.load(tmp_path / "run", **options)
        for client in range(12):
            predictions = loaded.predict(x, client=client)
            np.testing.assert_allclose(predictions, result.predict(x, client=client), rtol=1e-6)


def test_the_index_says_what_files_have(stack, tmp_path):
    save(tmp_path / "rows", stack)
    index = files.read_json(tmp_path / "rows" / saved_rows.INDEX)["index"]
    assert index["clients"] == K and index["stored"] == 3
    sizes = {
        entry["name"]: (tmp_path / "rows" / entry["file"]).stat().st_size for entry in index["rows"]
    }
    assert sizes == {"w": 3 * 24, "half": 3 * 4, "count": 3 * 4, "ids": 3 * 4}
