"""The folders of runs that are trained together: checking, resuming and saving."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pfljax.contract import processes, tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import State
from pfljax.folder import (
    endings,
    files,
    fingerprint,
    former,
    history,
    manifest,
    recorded_clients,
)
from pfljax.folder.history import History
from pfljax.folder.locks import LOCK
from pfljax.folder.recorded_clients import RecordedClients
from pfljax.run.compiled import Compiled
from pfljax.run.experiment import Experiment
from pfljax.stores.registry import STORES, store_of
from pfljax.stores.saved_rows import RowsWriter

CONFIG = "config.json"
CLIENTS = "clients"  # a run's subfolder for its clients' rows under client_store=disk
# Settings that name what belongs to the program.
NAMES = ("method", "algorithm", "model", "loss", "local.loss", "own_stages")
# Settings that follow from the clients.
OF_CLIENTS = {"num_clients", "partition"}
BOARDS = ("tensorboard", "wandb", "mlflow")  # a run's subfolders for trackers' files
UNSAFE = "[]*?\\"  # characters in a path that the checkpoint library reads as patterns
LOST = "no intact checkpoint is left; starting over"
WAY_ON = "resume from scratch to start over, or choose another folder"

# True resumes from the newest intact checkpoint, or starts at round 0 if no checkpoint was saved yet; it refuses a
# folder whose checkpoints were lost. "if_possible" starts over in that case, and "from_scratch" always starts over.
Resume = bool | Literal["from_scratch", "if_possible"]


class Folders:
    """The folders `outs` of some runs, one for each, or none if nothing is written; `resume` says how they go on."""

    def __init__(self, experiments: Sequence[Experiment], outs: Sequence[Path], resume: Resume):
        self.experiments = experiments
        self.outs = list(outs)
        self.resume: Resume = resume
        self._saving: Future | None = None  # the checkpoint that is being saved in a thread
        self.save_seconds = 0.0  # that the last checkpoint took, in a thread or not
        self._writer: RowsWriter | None = None  # writes rows of the next checkpoint ahead
        self._thread = ThreadPoolExecutor(1)  # begins with its first task

    def check(self) -> None:
        """Raises `ArgumentError` if a run would overwrite another run, or resume from other settings or data."""
        for experiment, out in self._runs():
            if self.resume in (True, "if_possible"):
                processes.first(functools.partial(check_layout, out))
            processes.first(functools.partial(check, out, experiment, self.resume))
            if self.resume != "from_scratch":
                processes.first(functools.partial(check_store, experiment.client_store, out))

    def _runs(self) -> Iterable[tuple[Experiment, Path]]:
        """The runs with their folders; nothing if nothing is written."""
        return zip(self.experiments, self.outs, strict=bool(self.outs))

    def check_rounds(self, rounds: int) -> None:
        """Checks that the runs in folders to resume from can be trained up to round `rounds`.

        Raises `ArgumentError` if one already has more rounds, and `Changed` if it depends on the number of rounds that
        are planned and was planned for another one.
        """

        def check() -> None:
            for experiment, out in self._runs():
                done = rounds_done(out)
                if done > rounds:
                    text = f"{out} already has {done} rounds; accepted: {done} or more"
                    raise ArgumentError("rounds", text, rounds)
                check_planned(out, experiment)

        if self.resume in (True, "if_possible"):
            processes.first(check)

    def restore(
        self, like: Any, say: Callable[[str], None], load: Callable[[Sequence[Any]], State]
    ) -> tuple[int, State] | None:
        """Restores the newest round for which all folders have an intact checkpoint: (round, joined states).

        If there is none, clears the folders for runs that start at round 0 and returns None. `like` is the expected
        content of a checkpoint (see `checkpoints.restore`), and `load` makes the runs' state of their contents. Raises
        `ArgumentError` if a folder's checkpoints were lost and `resume` does not allow starting over, or if a file
        cannot be deleted.
        """
        if not self.resume:
            return None
        restored = None if self.resume == "from_scratch" else self._newest(like)
        if restored:
            done, states = restored
            say(f"  resumed after round {done}{self._versions()}")
            self._complete(done)
            return done, load(states)

        # Start over, unless checkpoints were lost; a run that was killed early never had one.
        begun = [out for out in self.outs if has_begun(out)]
        num_begun = int(processes.from_first(np.int32(len(begun))))
        if num_begun == len(self.outs) and self.resume is True:
            lost = [out for out in self.outs if not whole_checkpoints(out)]
            out = lost[0] if lost else self.outs[0]
            raise ArgumentError("resume", f"{out} has no intact checkpoint left; {WAY_ON}")
        why = LOST if num_begun else "nothing to resume: no checkpoint was saved yet; starting"
        say(f"  {self.outs[0]}: {why} at round 0")
        for out in self.outs:
            processes.first(functools.partial(clear, out))
        return None

    def _versions(self) -> str:
        """Says if other versions of libraries began the runs."""
        before = manifest.read(self.outs[0])
        if before is None:
            return ""
        text = fingerprint.other_versions(before.program, self.experiments[0].program())
        if not text:
            return ""
        return f"; begun with {text}: sources are compared, not programs"

    def _complete(self, done: int) -> None:
        """Writes manifests that are missing because a run was killed between its checkpoint and its manifest."""
        for experiment, out in zip(self.experiments, self.outs, strict=True):
            if manifest.read(out) is None:
                manifest.write(out, experiment.described, done, [done], saved=done)

    def _newest(self, like: Any) -> tuple[int, list[Any]] | None:
        """The newest round for which all folders have an intact checkpoint, with the contents of these."""
        from pfljax.folder import checkpoints  # orbax is slow to import

        common: list[int] = []
        if processes.is_first():
            steps = [whole_checkpoints(out) for out in self.outs]
            common = [step for step in steps[0] if all(step in others for others in steps)]
        for step in checkpoints.agreed(common):
            states = [checkpoints.restore(out / "checkpoints", step, like) for out in self.outs]
            if all(state is not None for state in states):
                return step, states
        return None

    def forget_later(self, done: int) -> None:
        """Deletes checkpoints that can no longer be resumed from, before running further rounds.

        These are checkpoints of later rounds that only some of several runs have. With rows on disk, all checkpoints
        of other rounds are deleted, because their rows will be overwritten.
        """
        if not self._on_disk and len(self.outs) < 2:
            return
        rounds = [done] if self._on_disk else range(1, done + 1)
        for number in range(len(self.outs)):
            self._keep(number, done, rounds)

    @property
    def _on_disk(self) -> bool:
        return store_of(self.experiments[0]).on_disk

    def _keep(self, number: int, done: int, rounds: Sequence[int]) -> None:
        """Deletes a run's checkpoints except those after `rounds`. The manifest no longer lists them by then."""
        from pfljax.folder import checkpoints

        out = self.outs[number]
        if manifest.read(out) is not None:
            manifest.write(out, self.experiments[number].described, done, rounds)
        checkpoints.keep(out / "checkpoints", rounds)

    def save(
        self, done: int, compiled: Compiled, histories: Sequence[History], states: Sequence[State]
    ) -> None:
        """Writes files, then checkpoints, then manifests, so that none refers to something not written yet.

        Rounds may go on when this returns. If rows are in memory, the checkpoint may not be complete by then: `wait`
        waits for it. Raises `RunError` if the disk is full.
        """
        if not self.outs:
            return
        from pfljax.folder import checkpoints

        self.wait()
        begin = time.perf_counter()
        saving = compiled.saving
        need = self.num_bytes(compiled, states)
        need += sum(record.num_bytes for record in histories)
        need -= self._writer.num_bytes if self._writer else 0
        endings.check_room(self.outs[0], need)
        if not saving and all(map(checkpoints.can_wait, states)):
            self._begin_saving(done, histories, states)
            return
        runs = zip(self.experiments, self.outs, histories, states, strict=True)
        for experiment, out, record, state in runs:
            folder = out / "checkpoints"
            record.write()
            record.keep(done)
            checkpoints.save(folder, done, saving.freeze(state) if saving else state)
            rounds = checkpoints.newest(folder, done)
            manifest.write(out, experiment.described, done, rounds, saved=done)

        # They resume together: older checkpoints are deleted when all are saved.
        for number, (out, state) in enumerate(zip(self.outs, states, strict=True)):
            if self._on_disk:  # older ones refer to rows that will be overwritten
                self._keep(number, done, [done])
            else:
                folder = out / "checkpoints"
                checkpoints.keep(folder, checkpoints.newest(folder, done))
            if saving:
                saving.saved(state)
        self.save_seconds = time.perf_counter() - begin

    def num_bytes(self, compiled: Compiled, states: Sequence[State]) -> int:
        """Returns the size of the checkpoints of all runs."""
        from pfljax.folder import checkpoints

        if compiled.saving:
            return len(states) * tree.num_bytes(compiled.saving.like)
        return sum(checkpoints.num_bytes(state) for state in states)

    def _begin_saving(
        self, done: int, histories: Sequence[History], states: Sequence[State]
    ) -> None:
        """Like `save`, but saves states whose rows are in memory in a thread, while rounds go on."""
        from pfljax.folder import checkpoints

        begin = time.perf_counter()
        finishes: list[Callable[[], dict[str, str]]] = []
        for out, record, state in zip(self.outs, histories, states, strict=True):
            record.write()
            record.keep(done)
            folder = out / "checkpoints"
            writer = self._writer or checkpoints.writer_of(folder, state)
            self._writer = None
            finishes.append(checkpoints.begin(folder, done, state, writer))
        described = [experiment.described for experiment in self.experiments]

        def save() -> None:
            for out, config, finish in zip(self.outs, described, finishes, strict=True):
                folder = out / "checkpoints"
                digests = finish()
                rounds = checkpoints.newest(folder, done)
                manifest.write(out, config, done, rounds, saved=done, digests=digests)
                checkpoints.keep(folder, rounds)
            self.save_seconds = time.perf_counter() - begin

        self._saving = self._thread.submit(save)

    def save_ahead(self, state: State, ids: np.ndarray) -> None:
        """Begins to save the rows of clients that take part in no round before the next checkpoint, in a thread.

        Does nothing for a state that `save` does not save in a thread, and while it saves another checkpoint.
        """
        from pfljax.folder import checkpoints

        if len(self.outs) != 1 or self._saving is not None or not checkpoints.can_wait(state):
            return
        if self._writer is None:
            self._writer = checkpoints.writer_of(self.outs[0] / "checkpoints", state)
        self._writer.add(ids)
        self._thread.submit(self._writer.write_added)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being saved in a thread.

        Raises:
            OSError: if it could not be saved.
        """
        if self._saving is None:
            return False
        if not self._saving.done():
            return True
        self.wait()
        return False

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager of rounds; if they end with an error, waits until the newest checkpoint is complete."""
        try:
            yield
        except BaseException:
            saving = self._saving
            self._saving = None
            if self._writer is not None:
                self._thread.submit(self._writer.close).result()
                self._writer = None
            if saving is not None and saving.exception() is not None:
                logging.warning("the newest checkpoint cannot be saved: %s", saving.exception())
            raise

    def wait(self) -> None:
        """Waits until the checkpoint that is being saved is complete.

        Raises:
            OSError: if it cannot be saved.
        """
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()

    def finish(self, number: int, summary: dict, done: int) -> None:
        """Writes a run's summary, and the manifest that lists it."""
        if not self.outs:
            return
        out = self.outs[number]
        files.write_json(out / "summary.json", summary)
        before = manifest.read(out)
        rounds = before.checkpoints if before else []
        manifest.write(out, self.experiments[number].described, done, rounds)


def rounds_done(out: Path) -> int:
    """Returns the number of rounds of the run in a folder."""
    before = manifest.read(out)
    if before:
        return before.rounds
    return max(history.checkpoints(out / "checkpoints"), default=0)


def whole_checkpoints(out: Path) -> list[int]:
    """Returns the rounds of the intact checkpoints in a run's folder, newest first.

    If the manifest is lost, a checkpoint counts as intact if its history can be read. Orbax later reports those that
    it cannot read.
    """
    folder = out / "checkpoints"
    before = manifest.read(out)
    if before is None:
        steps = history.checkpoints(folder)
        if steps:
            path = out / manifest.NAME
            logging.warning("%s is missing or damaged: checkpoints are used unchecked", path)
        return [step for step in steps if history.is_whole(folder, step)]
    intact = []
    for step in before.checkpoints:
        damage = before.damaged(out, step)
        if damage:
            path = folder / str(step)
            logging.warning("checkpoint %s is damaged and is skipped: %s", path, damage)
        else:
            intact.append(step)
    return intact


def is_checked(out: Path) -> bool:
    """Whether the run in a folder has started over to drop clients whose results are not finite."""
    try:
        return bool(files.read_json(out / CONFIG).get("checked"))
    except (OSError, ValueError, AttributeError):  # `check` says what is wrong
        return False


def has_begun(out: Path) -> bool:
    """Whether a run's folder has ever had a checkpoint or a result."""
    if manifest.read(out) or history.checkpoints(out / "checkpoints"):
        return True
    return (out / "summary.json").exists()


def clear(out: Path) -> None:
    """Deletes a run's files from its folder. Raises `ArgumentError` if one cannot be deleted."""
    records = [name for name in manifest.RECORDS if name != CONFIG]
    names = ["checkpoints", CLIENTS, "figures", *BOARDS, "report.html", *records]
    # The last ones say that it is a run, for a process that is killed in between.
    names += [CONFIG, manifest.NAME]
    try:
        for name in names:
            files.delete(out / name)
    except OSError as error:
        text = f"cannot delete {error.filename}: {error.strerror}"
        raise ArgumentError("out", text, out) from error


def is_other(file: Path) -> bool:
    """Whether a file of a folder without a run is neither its lock nor being written."""
    is_temporary = file.name.startswith(".") and file.name.endswith(".tmp")
    return file.name != LOCK and not is_temporary


class Changed(ArgumentError):
    """A folder contains a run with other settings, data or another program."""


def check(out: Path, experiment: Experiment, resume: Resume) -> None:
    """Checks that a run neither overwrites another run nor resumes one that computes something else.

    Raises `Changed` if settings, data or the program differ, and names them; `ArgumentError` for a folder with
    something else.
    """
    if any(character in str(out.absolute()) for character in UNSAFE):
        raise ArgumentError("out", f"accepted: a path without any of {' '.join(UNSAFE)}", out)
    is_run = manifest.read(out) is not None
    if not is_run and not (out / CONFIG).exists() and not (out / manifest.NAME).exists():
        if out.exists() and (not out.is_dir() or any(map(is_other, out.iterdir()))):
            text = "contains something other than a run; choose an empty or new folder"
            raise ArgumentError("out", text, out)
        return
    if not resume:
        start_over = "`resume=from_scratch` to start over in it"
        way_on = f"choose a new folder, `resume` to continue it, or {start_over}"
        raise ArgumentError("out", f"contains another run; {way_on}", out)
    before = recorded(out)
    if resume == "from_scratch":
        return
    text = changed(before, experiment, recorded_clients.read(out))
    if text:
        raise Changed("resume", f"{out} was run {text}")


def check_planned(out: Path, experiment: Experiment) -> None:
    """Raises `Changed` if the run in a folder has begun, and depends on another number of planned rounds."""
    if not has_begun(out):
        return
    planned = planned_before(recorded(out))
    if planned is None or planned == experiment.planned or not experiment.depends_on_rounds:
        return
    text = f"{out} was planned for {planned} rounds, on which {experiment.name} depends"
    text = f"{text}; now {experiment.planned}"
    if experiment.problem.rounds <= planned:
        text = f"{text}; planned_rounds={planned} goes on with it"
    raise Changed("planned_rounds", f"{text}; {WAY_ON}")


def planned_before(parts: dict[str, dict]) -> int | None:
    """The number of rounds that a run with these parts of config.json was planned for, if it depends on that."""
    planned = parts["program"].get("planned_rounds")
    # A file that is not whole may say anything.
    return planned if isinstance(planned, int) and planned > 0 else None


def traced_before(parts: dict[str, dict]) -> int | None:
    """The number of rounds for which a run with these parts of config.json was traced, if anything depends on it."""
    return planned_before(parts) or fingerprint.rounds_of_newcomers(parts["program"])


def recorded(out: Path) -> dict[str, dict]:
    """Reads the parts of config.json that the manifest repeats from one of the two."""
    path = out / CONFIG
    before = manifest.read(out)
    try:
        content = before._asdict() if before else former.read_config(path)
        if not content.keys() & {*manifest.PARTS}:
            raise ValueError(path)
        return {part: dict(content.get(part, {})) for part in manifest.PARTS}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        text = f"{path} is damaged or not from a run; choose a new folder"
        raise ArgumentError("out", text, out) from error


def setting_text(value: Any) -> str:
    """A setting's value in a message; a list as on a command line, separated by commas."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "empty"
    return repr(value)


def changed(
    before: dict[str, dict], experiment: Experiment, clients: RecordedClients | None = None
) -> str:
    """Says how an earlier run differs from this one; "" if both compute the same.

    Both are compared for the number of rounds for which the earlier one was traced; see `check_planned`.

    Args:
        before: Parts of config.json of the earlier run.
        experiment: This run.
        clients: The clients of the earlier run; None: its folder does not record them.
    """
    planned = traced_before(before)
    program = experiment.program() if planned is None else experiment.programs(planned)
    parts = fingerprint.differences(before["program"], program)

    # Settings.
    settings_before = before["settings"]
    settings = files.plain(experiment.config.get("settings", {}))
    different = [
        name
        for name in settings
        if name in settings_before and settings_before[name] != settings[name]
    ]
    if not parts:  # the same method, model or loss may have another name
        different = [name for name in different if name.removeprefix("--") not in NAMES]
    difference = ""
    if clients is not None and experiment.clients is not None:
        difference = recorded_clients.difference(clients, experiment.clients)
    if difference and OF_CLIENTS.issuperset(different):
        return f"on other data: {difference}; {WAY_ON}"
    if different:
        texts = []
        for name in different:
            value_before = setting_text(settings_before[name])
            texts.append(f"{name} was {value_before} and is {setting_text(settings[name])}")
        return f"with other settings: {'; '.join(texts)}"

    # Data; an older run may not tell its digest.
    data_before = before["data"]
    data = experiment.config.get("data", {})
    for entry, what in {"digest": "data", "unseen": "unseen clients"}.items():
        digest_before = data_before.get(entry)
        digest = data.get(entry)
        is_known = bool(digest_before and digest) or entry == "unseen"
        if is_known and digest_before != digest:
            return f"on other {what} (digest {digest_before}, now {digest}); {WAY_ON}"

    drift_before = data_before.get("drift")
    drift = data.get("drift")
    if drift_before != drift:
        was = drift_before or "none"
        return f"with another drift (was {was}, is {drift or 'none'}); {WAY_ON}"

    # The program.
    if not parts:
        return ""
    return f"by another program; what differs: {', '.join(parts)}; {WAY_ON}"


def check_layout(out: Path) -> None:
    """Raises `ArgumentError` if a folder's newest checkpoint has the layout of an earlier version."""
    steps = whole_checkpoints(out)
    if not steps:
        return
    from pfljax.folder import checkpoints  # orbax is slow to import

    if checkpoints.is_former(out / "checkpoints", steps[0]):
        raise ArgumentError("resume", f"{out}: {former.STATE}; {WAY_ON}")


def check_store(client_store: str, out: Path) -> None:
    """Raises `ArgumentError` if a run's rows are on disk and another store is requested, or the other way around."""
    rows = out / CLIENTS
    on_disk = rows.is_dir()
    if not history.checkpoints(out / "checkpoints"):
        files.delete(rows)  # left by a run that saved nothing
    elif on_disk and rows.is_symlink() and not any(rows.iterdir()):
        return  # a link that is kept when runs start over
    elif on_disk != STORES[client_store].on_disk:
        accepted = "disk" if on_disk else "device or host"
        text = f"{out} was started with another one; accepted: {accepted}"
        raise ArgumentError("client_store", text, client_store)
