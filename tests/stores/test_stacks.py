"""Clients' rows on disk: no row before a client takes part, and no checkpoint lost."""

import dataclasses
import os
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.contract.errors import ArgumentError, OutOfMemory, RunError
from pfljax.exchange.plan import make_plan
from pfljax.folder import checkpoints, manifest
from pfljax.stores import stacks
from pfljax.training.loop import Schedule, Trainer

SIZES = (5, 1, 3, 4, 2, 4, 0, 3)
ROUNDS = 6
COHORT = 3
OFTEN = Schedule(2, 2)


def make_experiment(name, client_store="disk", **hyperparameters):
    hyperparameters = {"neighbors": 1} | hyperparameters if name == "federico" else hyperparameters
    federation = toys.make_federation(SIZES)
    network = toys.network(name)
    problem = toys.make_problem(
        federation, optax.adam(0.05), batch_size=2, cohort=COHORT, **network
    )
    return toys.make_experiment(
        name, problem, federation, hyperparameters=hyperparameters, client_store=client_store
    )


def outcome_of(experiment, rounds=ROUNDS, **options):
    """(the last row but its seconds, the state in memory) of a run."""
    found = toys.run(experiment, rounds, schedule=OFTEN, **options)
    last = {name: value for name, value in found.summary["last"].items() if name != "seconds"}
    return last, jax.device_get(stacks.in_memory(found.state))


@toys.each_method(["scaffold", "federico"], fast=(), slow=("scaffold",))
def test_a_run_killed_between_checkpoints_goes_on_as_if_never_killed(name, tmp_path):
    """Killed in round 5, whose rows are on disk by then, the run goes on from round 4."""
    whole = outcome_of(make_experiment(name), out=tmp_path / "whole")
    trainer = Trainer([make_experiment(name)], outs=[tmp_path / "killed"])
    save = checkpoints.save

    def killed(directory, done, state):
        if done == ROUNDS - 1:
            raise KeyboardInterrupt
        save(directory, done, state)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "save", killed)
        trainer.play(ROUNDS - 1, OFTEN._replace(checkpoint_every=4))
    del trainer
    folder = tmp_path / "killed" / "checkpoints"
    assert [name for name in os.listdir(folder) if name.isdigit()] == ["4"]
    again = outcome_of(make_experiment(name), out=tmp_path / "killed", resume=True)
    assert again[0] == whole[0] and toys.same_trees(again[1], whole[1])


@pytest.mark.parametrize(
    "runs", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)]
)
def test_a_manifest_lists_only_checkpoints_that_are_there(runs, tmp_path, caplog):
    """After each save, and after a resumed run has forgotten other rounds: no checkpoint counts as damaged."""
    outs = [tmp_path / str(number) for number in range(runs)]

    def start(resume):
        return Trainer([make_experiment("local") for _ in outs], outs=outs, resume=resume)

    start(False).play(4, OFTEN)
    for rounds in (5, 6):
        again = start(True)
        again.play(rounds, OFTEN)
        assert again.done == rounds
        for out in outs:
            assert (
                manifest.read(out).checkpoints
                == checkpoints.history.checkpoints(out / "checkpoints")
                == [rounds]
            )
    assert not caplog.records


@pytest.mark.slow
def test_rows_of_a_checkpoint_are_never_overwritten_before_the_next(tmp_path):
    """Any rounds may follow a checkpoint: thawed, it is the state that was saved."""
    experiment = dataclasses.replace(make_experiment("local"), directory=tmp_path)
    trainer = Trainer([experiment])
    trainer.play(2, OFTEN)
    saving = trainer.compiled.saving
    before = jax.device_get(stacks.in_memory(trainer.state))
    key = jax.random.fold_in(jax.random.key(experiment.seed), 0)  # of the initial state
    saved = jax.device_get(saving.freeze(trainer.state))
    saving.saved(trainer.state)
    for rounds in (3, 4, 5):
        trainer.play(rounds, Schedule(1, 100))
        state = jax.device_get(stacks.in_memory(trainer.state))
        assert not toys.same_trees(state, before)
        thawed = saving.thaw(0, key, saved)
        assert toys.same_trees(jax.device_get(stacks.in_memory(thawed)), before)


@pytest.mark.parametrize(
    ("name", "epochs"),
    [
        pytest.param("fedavg", 1, marks=pytest.mark.slow),
        pytest.param("federico", 0, marks=pytest.mark.long),
    ],
)
def test_newcomers_are_scored_under_every_store(name, epochs):
    unseen = toys.make_federation((3, 2), seed=1)
    found = []
    for store in ("device", "host", "disk"):
        experiment = dataclasses.replace(
            make_experiment(name, store), unseen=unseen, fine_tune_epochs=epochs
        )
        scores = toys.run(experiment, 2).summary["unseen"]
        found.append({key: scores[key] for key in ("loss", "accuracy")})
    assert found[0]["loss"] > 0
    assert found[1:] == [pytest.approx(found[0], rel=1e-4)] * 2


def table_of(directory, num=6, width=5, **kept):
    shapes = {
        "a": jax.ShapeDtypeStruct((num, width), np.float32),
        "b": jax.ShapeDtypeStruct((num,), np.int32),
    }

    def first(ids):
        return [ids[:, None] + np.zeros(width, np.float32), -ids.astype(np.int32)]

    return stacks.open_files(
        directory, shapes, stacks.SlotTable(**(kept or stacks.no_rows(num)), initial=first)
    )


def test_rows_are_read_as_they_were_written_and_else_are_the_first_ones(tmp_path):
    files = table_of(tmp_path)
    rows = {"a": np.arange(10, dtype=np.float32).reshape(2, 5), "b": np.array([7, 8], np.int32)}
    stacks.write(files, np.array([1, 4]), jax.device_put(rows))
    found = stacks.read(files, np.array([4, 0, 1]))
    np.testing.assert_array_equal(found["a"], [rows["a"][1], [0] * 5, rows["a"][0]])
    np.testing.assert_array_equal(found["b"], [8, 0, 7])


def test_a_client_changes_its_slot_once_between_checkpoints(tmp_path):
    files = table_of(tmp_path)
    ids = np.array([2])
    table = files["a"].table
    slots = []
    for number in range(6):
        rows = {"a": np.full((1, 5), number, np.float32), "b": np.array([number], np.int32)}
        stacks.write(files, ids, jax.device_put(rows))
        slots.append(int(table.slots[2]))
        if number in (1, 3):
            stacks.flush(files, 6)
            stacks.keep(files)
    assert slots == [1, 1, 2, 2, 1, 1]
    assert stacks.read(files, ids)["b"] == [5]
    table.slots = table.saved
    assert stacks.read(files, ids)["b"] == [3]


def test_damaged_rows_are_noticed_when_they_are_first_read(tmp_path):
    files = table_of(tmp_path)
    ids = np.array([1, 4])
    rows = {"a": np.arange(10, dtype=np.float32).reshape(2, 5), "b": np.array([7, 8], np.int32)}
    stacks.write(files, ids, jax.device_put(rows))
    kept = stacks.flush(files, 6)
    expected = [
        zlib.crc32(a.tobytes(), 0) ^ zlib.crc32(b.tobytes(), 1)
        for a, b in zip(rows["a"], rows["b"], strict=True)
    ]
    np.testing.assert_array_equal(kept["sums"], [0, expected[0], 0, 0, expected[1], 0])

    def copy():
        return {name: values.copy() for name, values in kept.items()}

    assert stacks.read(table_of(tmp_path, **copy()), np.array([4, 0]))["b"].tolist() == [8, 0]

    content = bytearray((tmp_path / "1.bin").read_bytes())
    content[4 * 4] ^= 1  # of client 4, in the first slot
    (tmp_path / "1.bin").write_bytes(bytes(content))
    again = table_of(tmp_path, **copy())
    assert stacks.read(again, np.array([1, 0]))["b"].tolist() == [7, 0]
    with pytest.raises(
        RunError,
        match="the rows of client 4 on disk are not what the run wrote; resume from scratch",
    ):
        stacks.read(again, np.array([0, 4]))
    with pytest.raises(RunError, match="the rows of client 4 on disk"):
        stacks.verify(again, np.array([1, 4]))
    stacks.write(again, np.array([4]), jax.device_put(jax.tree.map(lambda leaf: leaf[1:], rows)))
    assert stacks.read(again, np.array([4]))["b"] == [8]  # what was written since is whole


def test_a_part_of_a_row_is_read_once_the_whole_is_verified(tmp_path):
    files = table_of(tmp_path)
    ids = np.array([1, 4])
    rows = {"a": np.arange(10, dtype=np.float32).reshape(2, 5), "b": np.array([7, 8], np.int32)}
    stacks.write(files, ids, jax.device_put(rows))
    again = table_of(tmp_path, **stacks.flush(files, 6))
    stacks.verify(again, np.array([4, 0, 4]))
    np.testing.assert_array_equal(
        stacks.read(again["a"], np.array([4, 0])), [rows["a"][1], [0] * 5]
    )
    assert again["a"].table.unread.tolist() == [False, True, False, False, False, False]


@pytest.mark.slow
def test_a_finished_run_whose_peers_were_not_scored_resumes_to_itself(tmp_path):
    """Scores of the unseen clients are by models that no evaluation has read from disk."""
    experiment = dataclasses.replace(
        make_experiment("federico"), unseen=toys.make_federation((3, 2), seed=1), eval_clients=2
    )
    first, again = (
        toys.run(experiment, 2, out=tmp_path, resume=resume) for resume in (False, True)
    )
    assert (
        again.summary["unseen"] == first.summary["unseen"] and first.summary["unseen"]["loss"] > 0
    )


def disk_of(free):
    """The usage of a disk."""
    return types.SimpleNamespace(total=free, used=0, free=free)


def test_files_take_the_space_of_the_clients_that_took_part(tmp_path):
    shapes = [jax.ShapeDtypeStruct((100_000, 1024), np.float32)]  # of 390 MiB
    table = stacks.SlotTable(
        **stacks.no_rows(100_000), initial=lambda ids: [np.zeros((len(ids), 1024))]
    )
    files = stacks.open_files(tmp_path, shapes, table)
    assert (tmp_path / "0.bin").stat().st_size == 2 * 100_000 * 4096
    stacks.write(files, np.arange(0, 100_000, 1000), [jnp.ones((100, 1024))])
    assert (tmp_path / "0.bin").stat().st_blocks * 512 <= 2 * 100 * 4096 + 65536


def test_what_does_not_fit_the_disk_is_refused_before_it_starts(tmp_path, monkeypatch):
    shapes = [
        jax.ShapeDtypeStruct((1000, 1024), np.float32),
        jax.ShapeDtypeStruct((1000, 3), np.float32),
    ]
    # the small leaf's file has three pages; a row of the large one fills one
    need = 2 * (10 * 4096 + 3 * 4096)
    assert stacks.check_disk([tmp_path], shapes, 10) == need
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk_of(need))
    with pytest.raises(
        OutOfMemory,
        match=r"out of disk space: clients' rows may need 104.0 KiB in .* only 104.0 KiB",
    ):
        stacks.check_disk([tmp_path], shapes, 10)


def test_a_full_disk_is_an_error_of_one_line(tmp_path, monkeypatch):
    files = table_of(tmp_path)
    rows = jax.device_put({"a": np.zeros((1, 5), np.float32), "b": np.array([1], np.int32)})

    def full(*args):
        raise OSError(28, "No space left on device")

    for write in (full, lambda file, row, at: 1):  # or a row is written in part
        monkeypatch.setattr("os.pwrite", write)
        with pytest.raises(RunError, match=r"^.*\.bin: No space left on device$"):
            stacks.write(files, np.array([1]), rows)


def test_a_run_goes_on_with_the_store_that_it_began_with(tmp_path):
    """Rows on disk and in host memory make the same run."""
    disk, host = (
        outcome_of(make_experiment("local", store), 2, out=tmp_path / store)
        for store in ("disk", "host")
    )
    assert disk[0] == host[0]
    for store, accepted in (("disk", "disk"), ("host", "device or host")):
        other = make_experiment("local", {"disk": "host", "host": "disk"}[store])
        with pytest.raises(
            ArgumentError,
            match=f"^client_store=.*: .* was started with another one; accepted: {accepted}$",
        ):
            toys.run(other, 4, out=tmp_path / store, resume=True)


def test_without_a_folder_rows_are_in_files_that_nothing_leaves_behind(tmp_path, monkeypatch):
    """The space that further rounds need is checked, too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trainer = Trainer([make_experiment("local")])
    trainer.play(2, OFTEN)
    # gone while the files are in use, so that nothing can leave it behind
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk_of(0))
    with pytest.raises(OutOfMemory, match="out of disk space"):
        trainer.play(4, OFTEN)


@pytest.mark.slow
def test_files_of_a_run_that_saved_nothing_bind_no_other_store(tmp_path):
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "0.bin").touch()
    (tmp_path / "config.json").write_text('{"settings": {}}')
    toys.run(make_experiment("local", "device"), 2, out=tmp_path, resume=True)
    assert not (tmp_path / "clients").exists()
    toys.run(make_experiment("local", "device"), 4, out=tmp_path, resume=True)


@pytest.mark.slow
def test_the_devices_and_the_host_hold_nothing_of_the_size_of_k():
    """But for a byte or two and the data of each client."""
    experiment = make_experiment("federico", candidates=3)
    trainer = Trainer(
        [
            dataclasses.replace(
                experiment, problem=experiment.problem._replace(plan=make_plan("map"))
            )
        ]
    )
    trainer.play(2, OFTEN)
    assert all(isinstance(leaf, stacks.RowFile) for leaf in jax.tree.leaves(trainer.state.clients))
