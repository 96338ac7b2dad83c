"""Folders of runs: what is gone on from, what is refused, and that signals and full disks lose nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from runs import ROUNDS, assert_same_runs, make_experiment, train

from pfljax.contract import processes, speech
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.folder import checkpoints, endings, files, folders, manifest
from pfljax.training import loop
from pfljax.training.loop import Schedule, Trainer

TESTS = Path(__file__).parents[1]
pytestmark = [pytest.mark.usefixtures("compile_once"), pytest.mark.xdist_group("runs")]


@pytest.fixture
def copied(whole, tmp_path):
    """A finished run, to be damaged."""
    out = tmp_path / "run"
    shutil.copytree(whole("local")[0], out)
    return out


def resumed(out, resume=True, rounds=ROUNDS):
    """What a resumed run says."""
    lines = []
    with speech.lines_to(lines.append):
        train(make_experiment("local"), out, rounds, resume=resume)
    return "\n".join(lines)


def flip(path):
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def killed(*_, **__):
    """Stands for a kill -9."""
    raise RuntimeError("killed")


def parts_of(out, step):
    found = sorted((out / "checkpoints" / str(step)).rglob("*"))
    return [path for path in found if path.is_file() and path.stat().st_size]


def test_the_manifest_lists_all_that_a_run_wrote(copied):
    kept = manifest.read(copied)
    there = {path.relative_to(copied).as_posix() for path in copied.rglob("*") if path.is_file()}
    assert {*kept.files} == there - {"manifest.json"}
    assert kept.rounds == ROUNDS and kept.checkpoints == [6, 4]
    assert kept.settings["method"] == "local"
    assert all((copied / name).stat().st_size == size for name, (size, _) in kept.files.items())
    assert kept.damaged(copied) is kept.damaged(copied, 6) is kept.damaged(copied, 4) is None


def test_a_changed_list_is_told_as_on_the_command_line():
    before = {
        "settings": {"--channels": ["128", "64"], "--metrics": [], "--lr_schedule": "cosine"},
        "program": {},
        "data": {},
    }
    config = {"settings": {"--channels": ["16"], "--metrics": ["f1"], "--lr_schedule": "step"}}
    experiment = types.SimpleNamespace(config=config, program=dict)
    expected = (
        "--channels was 128,64 and is 16; --metrics was empty and is f1; --lr_schedule "
        "was 'cosine' and is 'step'"
    )
    assert folders.changed(before, experiment) == f"with other settings: {expected}"


def test_a_changed_bit_in_any_part_of_a_checkpoint_is_found(copied, whole):
    parts = [*parts_of(copied, 6), copied / "checkpoints/history-6.npz"]
    assert len(parts) > 3
    for path in parts:
        content = path.read_bytes()
        flip(path)
        assert folders.whole_checkpoints(copied) == [4], path
        path.write_bytes(content)
    assert folders.whole_checkpoints(copied) == [6, 4]
    flip(max(parts, key=lambda path: path.stat().st_size))
    assert "resumed after round 4" in resumed(copied)
    assert_same_runs(whole("local")[0], copied)
    assert manifest.read(copied).damaged(copied, 6) is None  # it was made again


@pytest.mark.parametrize("resume", [True, "if_possible", "from_scratch"])
def test_a_run_that_has_lost_its_checkpoints_is_started_over_only_if_asked_to(
    resume, copied, whole
):
    for step in (4, 6):
        for path in parts_of(copied, step):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    if resume is True:
        with pytest.raises(
            ArgumentError, match=r"resume: .*run has no intact checkpoint left; resume from scratch"
        ):
            resumed(copied)
        assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    else:
        assert "starting over at round 0" in resumed(copied, resume)
        assert_same_runs(whole("local")[0], copied)


def test_removed_checkpoints_of_a_finished_run_are_not_taken_for_a_new_one(copied):
    shutil.rmtree(copied / "checkpoints")
    (copied / "manifest.json").unlink()
    with pytest.raises(ArgumentError, match="has no intact checkpoint left"):
        resumed(copied)
    assert (copied / "summary.json").exists()


def test_from_scratch_replaces_a_whole_run_but_nothing_else(copied, whole, tmp_path):
    (copied / "notes.txt").write_text("mine")
    (copied / "tensorboard").mkdir()
    assert "starting over at round 0" in resumed(copied, "from_scratch")
    assert_same_runs(whole("local")[0], copied)
    assert (copied / "notes.txt").read_text() == "mine" and not (copied / "tensorboard").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="contains something other than a run"):
        resumed(other, "from_scratch")
    (other / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ArgumentError, match=r"config\.json is damaged or not from a run"):
        resumed(other, "from_scratch")
    assert (other / "config.json").exists() and (other / "thesis.txt").exists()


def test_from_scratch_empties_what_links_point_to_and_keeps_the_links(
    copied, whole, tmp_path, monkeypatch
):
    names = ("checkpoints", "clients", "figures", "tensorboard")
    mine = tmp_path / "elsewhere" / "mine"
    for name in names:
        folder = tmp_path / "elsewhere" / name
        shutil.copytree(copied / "checkpoints", folder)
        (folder / "linked").symlink_to(mine)
    for name in names:
        shutil.rmtree(copied / name, ignore_errors=True)
        (copied / name).symlink_to(tmp_path / "elsewhere" / name)
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Display, "rounds", killed)  # which is shown as the first round begins
        with pytest.raises(RuntimeError, match="killed"):
            resumed(copied, "from_scratch")
    assert all(
        (copied / name).is_symlink() and not any((copied / name).iterdir()) for name in names
    )
    assert (mine / "thesis.txt").read_text() == "mine"
    # not from the old run's weights
    assert "no checkpoint was saved yet; starting at round 0" in resumed(copied)
    assert_same_runs(whole("local")[0], copied)
    assert (copied / "checkpoints").is_symlink() and manifest.read(copied).damaged(
        copied, ROUNDS
    ) is None
    # the empty link "clients" names no store
    assert f"resumed after round {ROUNDS}" in resumed(copied)


def test_what_cannot_be_deleted_is_told(copied, monkeypatch):
    def refused(path, *args, **options):
        raise PermissionError(13, "Permission denied", f"{path}/6")

    monkeypatch.setattr("shutil.rmtree", refused)
    with pytest.raises(
        ArgumentError, match=r"^out=.*run: cannot delete .*checkpoints/6: Permission denied$"
    ):
        resumed(copied, "from_scratch")
    assert manifest.read(copied).rounds == ROUNDS


def test_old_checkpoints_that_are_links_are_unlinked_and_others_are_told(
    copied, tmp_path, monkeypatch, caplog
):
    folder = copied / "checkpoints"
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder / "4", elsewhere)
    (folder / "4").symlink_to(elsewhere)
    checkpoints.keep(folder, [6])
    assert not (folder / "4").is_symlink() and any(elsewhere.iterdir())
    monkeypatch.setattr("shutil.rmtree", os.rmdir)  # the folder is not empty
    checkpoints.keep(folder, [])
    assert f"cannot delete {folder / '6'}: Directory not empty" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{", '{"settings": 3}'])
def test_a_damaged_config_is_restored(content, copied, whole):
    (copied / "config.json").write_text(content)
    assert f"resumed after round {ROUNDS}" in resumed(copied)
    assert files.read_json(copied / "config.json") == files.read_json(
        whole("local")[0] / "config.json"
    )


@pytest.mark.parametrize("damage", ["removed", "emptied", "flipped"])
def test_a_lost_manifest_is_made_again(damage, copied, whole, caplog):
    path = copied / "manifest.json"
    if damage == "flipped":
        flip(path)
    else:
        path.unlink()
        if damage == "emptied":
            path.touch()
    assert manifest.read(copied) is None
    assert f"resumed after round {ROUNDS}" in resumed(copied)
    assert "manifest.json is missing or damaged" in caplog.text
    assert_same_runs(whole("local")[0], copied)
    assert manifest.read(copied).damaged(copied, ROUNDS) is None


def test_a_lost_manifest_is_made_before_the_next_round(copied, monkeypatch):
    (copied / "manifest.json").unlink()
    monkeypatch.setattr(loop.Display, "rounds", killed)
    with pytest.raises(RuntimeError, match="killed"):
        resumed(copied, rounds=ROUNDS + 2)
    assert folders.whole_checkpoints(copied) == [ROUNDS]
    assert (
        manifest.read(copied).rounds == ROUNDS
        and manifest.read(copied).damaged(copied, ROUNDS) is None
    )


def test_a_folder_of_a_later_version_is_refused(copied, monkeypatch):
    (copied / "manifest.json").unlink()
    with monkeypatch.context() as later:
        later.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
        manifest.write(copied, {}, ROUNDS, [])
    with pytest.raises(
        ArgumentError, match=r"in format 3 by another version of pfljax; accepted: format 2"
    ):
        resumed(copied)


def test_a_lock_that_a_dead_process_left_is_taken_over(copied):
    (copied / ".lock").write_text("4242")
    assert "was locked by process 4242, which has ended; taking over the lock" in resumed(copied)


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "text", "folder", "pipe"])
def test_what_is_not_a_lock_is_neither_written_to_nor_deleted(kind, copied, tmp_path):
    lock = copied / ".lock"
    other = tmp_path / "thesis.txt"
    other.write_text("1234")
    if kind == "text":
        lock.write_text("mine")
    elif kind == "folder":
        lock.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock)
    elif kind == "hard link":
        os.link(other, lock)
    else:
        lock.symlink_to(other if kind == "link" else tmp_path / "nothing")
    with pytest.raises(
        ArgumentError,
        match=r"^out=.*run: its \.lock is not a lock of pfljax; move or delete .*/\.lock$",
    ):
        resumed(copied)
    assert (
        other.read_text() == "1234"
        and os.path.lexists(lock)
        and not (tmp_path / "nothing").exists()
    )
    assert kind != "text" or lock.read_text() == "mine"


def test_an_interrupted_run_saves_its_rounds(tmp_path, monkeypatch, said):
    """Between evaluations and checkpoints too."""
    rare = Schedule(eval_every=2, checkpoint_every=2)
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 0)  # one round a dispatch
    trainer = Trainer([make_experiment("local")], outs=[tmp_path / "whole"])
    trainer.train(ROUNDS, rare)
    asked = processes.most
    for round_number in (1, 3):
        out = tmp_path / f"run-{round_number}"
        trainer = Trainer([make_experiment("local")], outs=[out])

        def signaled(number, trainer=trainer, last=round_number):
            return (trainer.done == last and signal.SIGTERM) or asked(number)

        with monkeypatch.context() as patch:
            patch.setattr(processes, "most", signaled)
            message = f"interrupted after round {round_number}, which is saved in"
            with pytest.raises(endings.Interrupted, match=message) as stop:
                trainer.train(ROUNDS, rare)
        assert stop.value.number == signal.SIGTERM
        Trainer([make_experiment("local")], outs=[out], resume=True).train(ROUNDS, rare)
        assert f"  resumed after round {round_number}" in said
        assert_same_runs(tmp_path / "whole", out)


SIGNALED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import conftest, pathlib, runs
def signaled(evaluation):
    if evaluation.round == 3:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
runs.train(runs.make_experiment("local", unseen=False), pathlib.Path(sys.argv[2]), trackers=[signaled])
"""


@pytest.mark.slow
def test_the_second_signal_ends_at_once(tmp_path):
    words = [sys.executable, "-c", SIGNALED, str(TESTS), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "SIGTERM: finishing the current rounds" in done.stderr
    assert done.returncode == -signal.SIGTERM and manifest.read(tmp_path / "run").rounds == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves(number, tmp_path, capfd, interrupts):
    def signaled(evaluation):
        if evaluation.round == 3:
            signal.raise_signal(number)

    with pytest.raises(
        endings.Interrupted, match="interrupted after round 3, which is saved in"
    ) as stop:
        train(make_experiment("local"), tmp_path / "run", trackers=[signaled])
    assert stop.value.number == number and manifest.read(tmp_path / "run").rounds == 3
    assert f"{number.name}: finishing the current rounds" in capfd.readouterr().err


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, even if the tests run as a background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_that_a_finalizer_drops_is_repeated(monkeypatch, interrupts):
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: dropped.append(told.exc_type))
    monkeypatch.setattr(endings, "REPEAT_SECONDS", 0.05)
    with pytest.raises(KeyboardInterrupt), endings.interruptible():
        Finalized()
        assert dropped == [KeyboardInterrupt]
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(0.2)  # it is not repeated while the block ends
            raise
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interruption_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in `command &` of a script
    try:
        with endings.interruptible():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_too_little_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    message = r"out of disk space in .*: a checkpoint needs .* but only 1000 B is free\."
    with monkeypatch.context() as patch, pytest.raises(RunError, match=message):
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        train(make_experiment("local"), tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()
    assert "starting at round 0" in resumed(tmp_path / "run")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a small disk")
# of files that Orbax cannot close
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pages", [0, 6])
def test_a_disk_that_fills_up_while_it_is_written_to_loses_nothing(
    pages, tmp_path, monkeypatch, whole, said
):
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=False
    ).returncode:
        pytest.skip("no small disk can be made here")
    try:
        train(make_experiment("local"), place / "run", 2)
        usage = shutil.disk_usage(place)
        filler = place / "filler"
        filler.write_bytes(bytes(usage.free - pages * 4096))  # room for some of what is written
        message = r"out of disk space in .*\. Earlier checkpoints are intact"
        with monkeypatch.context() as unseen, pytest.raises(RunError, match=message):
            unseen.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 40))
            resumed(place / "run")
        filler.unlink()
        train(make_experiment("local"), place / "run", resume=True)
        assert any("resumed after round" in line for line in said)
        assert_same_runs(whole("local")[0], place / "run")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_other_data_of_the_same_shape_is_not_gone_on_with(tmp_path):
    train(make_experiment("local", config={"data": {"digest": "a1"}}), tmp_path)
    with pytest.raises(ArgumentError, match=r"was run on other data \(digest a1, now b2\)"):
        train(make_experiment("local", config={"data": {"digest": "b2"}}), tmp_path, resume=True)


@pytest.mark.parametrize("name", ["run[1]", "a*b", "why?", "back\\slash"])
def test_a_path_that_checkpoints_cannot_have_is_refused_before_the_run(tmp_path, name):
    with pytest.raises(ArgumentError, match="accepted: a path without any of"):
        train(make_experiment("local"), tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "[]", "{", '{"settings": 3}'])
def test_a_damaged_config_is_told_in_a_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ArgumentError, match=r"config\.json is damaged"):
        train(make_experiment("local"), tmp_path, resume=True)


def test_folders_of_other_names_are_no_checkpoints(whole, tmp_path, said):
    out, _ = whole("local")
    other = tmp_path / "run"
    shutil.copytree(out, other)
    for name in ("²", "99999999999", "007"):
        (other / "checkpoints" / name).mkdir()
    train(make_experiment("local"), other, resume=True)
    assert f"  resumed after round {ROUNDS}" in said


def test_nothing_to_resume_is_said(tmp_path, said):
    (tmp_path / "config.json").write_text('{"settings": {}}')
    train(make_experiment("local"), tmp_path, resume=True)
    assert any("nothing to resume" in line and "starting at round 0" in line for line in said)


@pytest.mark.slow
def test_one_process_at_a_time_writes_to_a_folder(tmp_path):
    script = "import sys, time\nfrom pathlib import Path\nfrom pfljax.folder.locks import locked\n"
    script += "with locked([Path(sys.argv[1])], print):\n    print('held', flush=True)\n    time.sleep(60)\n"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(
            ArgumentError, match=f"another process .number {other.pid}. is writing to it"
        ):
            train(make_experiment("local"), tmp_path / "run")
    finally:
        other.kill()
        other.communicate()
    train(make_experiment("local"), tmp_path / "run")  # what a killed process held is free
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [('{"checked": true}', True), ("{}", False), ("[]", False), ("{", False)],
)
def test_a_run_that_started_over_to_drop_clients_says_so(tmp_path, content, expected):
    (tmp_path / "config.json").write_text(content)
    assert folders.is_checked(tmp_path) is expected


def test_a_folder_without_a_run_says_nothing(tmp_path):
    assert folders.is_checked(tmp_path) is False
