"""The study engine: runs in folders of their own, each trained once, by any number of processes that share them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from pfljax.api.result import Result
from pfljax.api.run import Run, train_replicates
from pfljax.contract import processes, speech
from pfljax.contract.alike import alike
from pfljax.contract.errors import ArgumentError, OutOfMemory, RunError
from pfljax.contract.pooled import is_pooled
from pfljax.contract.speech import logger
from pfljax.data import Federation
from pfljax.folder import files, folders, former, locks, manifest
from pfljax.report.run_data import score_of
from pfljax.run.experiment import differences, groups_alike
from pfljax.stores.registry import store_of
from pfljax.training import never_trained
from pfljax.training.loop import EVERY, Schedule
from pfljax.training.scoring import entries_of_score, recoveries
from pfljax.training.tracking import Tracker

SUMMARY = "summary.json"
ROWS = "metrics.jsonl"
POLL_SECONDS = 1.0  # between looks at a cell that another process trains

T = TypeVar("T")
R = TypeVar("R")
Rerun = Literal["never", "changed"]
Replicate = Literal["auto", "vmap", "no"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """The scores of one method with one seed.

    Attributes:
        summary: The content of summary.json.
        rows: One entry per evaluated round, as in metrics.jsonl.
    """

    summary: dict
    rows: list[dict]

    @classmethod
    def read(cls, folder: Path) -> Cell:
        """Reads the cell of a finished run from its folder."""
        return cls(former.read_summary(folder / SUMMARY), files.read_jsonl(folder / ROWS))


@dataclasses.dataclass(frozen=True)
class Study:
    """How cells are trained.

    Attributes:
        rounds: Number of rounds.
        schedule: When to evaluate and save the runs.
        replicate: Whether runs that differ only in numbers share a kernel: "auto", if their training and validation
            examples have the same shapes; "vmap", also if these must be padded; or "no". Test examples are padded.
        rerun: "changed" trains cells again that were trained with other settings, data or another program.
        profile: Folder for a profiler trace of a few rounds.
    """

    rounds: int
    schedule: Schedule = EVERY
    replicate: Replicate = "auto"
    rerun: Rerun = "never"
    profile: str | Path | None = None

    def check(self, run: Run, folder: Path) -> bool:
        """Whether a cell can go on from its folder; False if the folder must be emptied first.

        Raises:
            ArgumentError: if the folder contains something else, a run with more rounds, or a changed run.
        """
        changes: list[folders.Changed] = []
        experiment = run.experiment.with_rounds(self.rounds)

        def check() -> None:
            try:
                folders.check(folder, experiment, "if_possible")
                folders.Folders([experiment], [folder], "if_possible").check_rounds(self.rounds)
            except folders.Changed as error:
                if self.rerun != "changed":
                    reason = error.text.removesuffix(f"; {folders.WAY_ON}")
                    text = f"{reason}; accepted: changed, to train it again"
                    raise ArgumentError("rerun", text) from error
                changes.append(error)

        processes.first(check)
        return bool(processes.from_first(np.int32(not changes)))

    def read(self, run: Run, folder: Path) -> tuple[Cell | None, str]:
        """Returns the finished cell in a folder, or None; and what is wrong with its files, if that is why."""
        if not self.check(run, folder):
            return None, "it has changed"
        wrong = ""
        is_done = False
        if processes.is_first():  # other processes may see the files later
            is_done, wrong = self._finished(run, folder)
            if is_done and not has_score_of(run, folder):
                is_done = False
                wrong = "it has another score"
        is_done = bool(processes.from_first(np.int32(is_done)))
        return Cell.read(folder) if is_done else None, wrong

    def _finished(self, run: Run, folder: Path) -> tuple[bool, str]:
        """Whether a folder has the finished run, whatever its score; and what is wrong with its files."""
        wrong = damage(folder)
        if wrong or not (folder / SUMMARY).exists():
            return False, wrong
        summary = Cell.read(folder).summary
        last = summary.get("last", {})
        lacking = [name for name in run.experiment.measures if last and name not in last]
        if lacking:
            return False, f"it lacks the metrics {', '.join(lacking)}"
        is_done = last.get("round") == self.rounds or bool(summary.get("stopped"))
        return is_done, ""

    def _with_score(self, run: Run, folder: Path) -> Cell | None:
        """The finished cell in a folder, whose files get the score of the run; None if it is not finished.

        Its rows have all that the score changes, so that nothing is trained. A stop rule that follows the score
        belongs to the program; see `check`.
        """
        if not self.check(run, folder):
            return None
        is_done = False
        if processes.is_first():
            is_done, _ = self._finished(run, folder)
            if is_done:
                rewrite_score(run, folder)
        if not processes.from_first(np.int32(is_done)):
            return None
        logger.info(f"  {folder}: already finished; its score is now {run.experiment.score_name}")
        return Cell.read(folder)

    def train(
        self,
        runs: Sequence[Run],
        outs: Sequence[Path] | None,
        trackers: Sequence[Tracker | None] = (),
        *,
        wait: bool = True,
    ) -> list[Cell | None]:
        """Returns the cells of some runs; trains those that are not finished.

        Args:
            runs: The runs, not trained yet.
            outs: A folder for each run; None: write no files.
            trackers: A tracker for each run.
            wait: Whether to wait for cells that another process is training; otherwise they are None.
        """
        cells: list[Cell | None] = [None] * len(runs)
        trackers = trackers or [None] * len(runs)
        while self._train_free(share_programs(runs), outs, trackers, cells) and wait:
            time.sleep(POLL_SECONDS)
        return cells

    def _train_free(
        self,
        runs: Sequence[Run],
        outs: Sequence[Path] | None,
        trackers: Sequence[Tracker | None],
        cells: list[Cell | None],
    ) -> bool:
        """Reads finished cells and trains those that no other process trains. Returns whether some are left."""
        left = [number for number, cell in enumerate(cells) if cell is None]
        is_busy = False
        with contextlib.ExitStack() as locked:
            # Read finished cells, and lock the others that are free.
            unread = [(number, outs[number]) for number in left] if outs else []
            for number, out in unread:
                run = runs[number]
                cells[number], wrong = self.read(run, out)
                if cells[number]:
                    logger.info(f"  {out}: already finished")
                elif taken(locked, out):
                    # another process may just have finished it
                    cells[number], wrong = self.read(run, out)
                    cells[number] = cells[number] or self._with_score(run, out)
                    if cells[number] is None:
                        self._prepare(run, out, wrong)
                        continue
                is_busy = is_busy or cells[number] is None
                left.remove(number)

            # Train those; an error of some does not keep the others from training.
            failures: list[RunError] = []
            for group in self._groups(runs, left):
                members = [(runs[n], outs[n] if outs else None, trackers[n]) for n in group]
                try:
                    results = in_halves(self._together, members)
                except RunError as error:
                    is_single = len(group) == 1 and len(runs) > 1
                    seed = f"seed {runs[group[0]].experiment.seed}, " if is_single else ""
                    failures.append(RunError(f"{seed}{error.reason}", error.further))
                    continue
                for number, result in zip(group, results, strict=True):
                    cells[number] = Cell(result.summary, result.history)
            if failures:
                raise failures[0]
        return is_busy

    def _prepare(self, run: Run, out: Path, wrong: str) -> None:
        """Empties the folder of a cell that has changed."""
        again = f", running again: {wrong}" if wrong else ""
        logger.info(f"  {out}: {run.clients.num_clients} clients, {self.rounds} rounds{again}")
        if not self.check(run, out):
            folders.clear(out)
            processes.wait()

    def _groups(self, runs: Sequence[Run], numbers: Sequence[int]) -> list[list[int]]:
        """Groups runs that share a kernel."""
        groups: dict[Any, list[int]] = {}
        for number in numbers:
            experiment = runs[number].experiment
            shares = store_of(experiment).on_devices and in_turn(runs[number])
            is_single = experiment.stop is not None  # at its own round
            is_single = is_single or self.replicate == "no"
            is_single = is_single or (self.replicate == "auto" and not shares)
            key: Any = ""
            if is_single:
                key = number
            elif self.replicate != "vmap":
                clients = experiment.federation
                key = f"{shapes_in_training(clients)} {clients.late_scaling}"
            groups.setdefault(key, []).append(number)
        return [alike_runs for group in groups.values() for alike_runs in split_alike(runs, group)]

    def _together(self, group: Sequence[tuple[Run, Path | None, Tracker | None]]) -> list[Result]:
        """Trains runs in one kernel."""
        runs = [run for run, _, _ in group]
        outs = [out for _, out, _ in group]
        trackers = [tracker for _, _, tracker in group]

        def matters(line: str) -> bool:
            return "profile: " in line or folders.LOST in line

        folder_options = {"outs": outs, "resume": "if_possible"} if outs[0] else {}
        with speech.only("pfljax.training", matters):
            return train_replicates(
                runs,
                self.rounds,
                schedule=self.schedule,
                profile=self.profile,
                trackers=trackers,
                **folder_options,
            )


def has_score_of(run: Run, folder: Path) -> bool:
    """Whether the finished run in a folder has the score of a run."""
    return score_of(Cell.read(folder).summary) == run.experiment.score_name


def rewrite_score(run: Run, folder: Path) -> None:
    """Gives the files of a finished run the score of a run that computes the same."""
    cell = Cell.read(folder)
    recorded = manifest.read(folder)
    score = run.experiment.score_name
    summary = cell.summary | entries_of_score(run.experiment, cell.rows)
    summary |= recoveries(run.experiment, files.read_npz(folder / "results.npz"))
    if summary.get("never_trained"):
        summary["never_trained"] |= never_trained.scores(summary["per_client"], score)
    config = files.read_json(folder / "config.json")
    files.write_json(folder / "config.json", config | {"score": score})
    files.write_json(folder / SUMMARY, summary)
    if recorded is not None:  # it lists digests of the files
        manifest.write(folder, recorded._asdict(), recorded.rounds, recorded.checkpoints)


def split_alike(runs: Sequence[Run], numbers: Sequence[int]) -> list[list[int]]:
    """Splits a group of runs into those that can share a kernel."""
    groups = groups_alike([runs[number].experiment for number in numbers])
    return [[numbers[position] for position in group] for group in groups]


def in_halves(train: Callable[[Sequence[T]], list[R]], runs: Sequence[T]) -> list[R]:
    """Returns train(runs), or train(half) for each half of the runs if all of them do not fit in memory."""
    try:
        return train(runs)
    except OutOfMemory:
        if len(runs) == 1:
            raise
        half = len(runs) // 2
        return in_halves(train, runs[:half]) + in_halves(train, runs[half:])


def taken(stack: contextlib.ExitStack, folder: Path, *, wait: bool = False) -> bool:
    """Locks a folder until `stack` ends. Unless it may `wait`, returns False if another process has locked it."""
    while True:
        is_free = True
        try:
            stack.enter_context(locks.locked([folder], logger.info))
        except locks.Locked:
            is_free = False
        is_free = bool(processes.from_first(np.int32(is_free)))
        if is_free or not wait:
            return is_free
        time.sleep(POLL_SECONDS)


def share_programs(runs: Sequence[Run]) -> Sequence[Run]:
    """Lets runs that differ only in seed and values of data share the description of their program: one trace."""
    distinct: list[Run] = []
    for run in runs:
        same = (earlier for earlier in distinct if computes_as(earlier, run))
        first = next(same, None)
        if first is None:
            distinct.append(run)
        else:
            run.experiment = dataclasses.replace(run.experiment, programs=first.experiment.programs)
    return runs


def computes_as(a: Run, b: Run) -> bool:
    """Whether two runs surely have the same program."""
    first = a.experiment
    second = b.experiment
    if first.local is None:
        return False
    same_shapes = shapes(first.federation) == shapes(second.federation)
    same_numbers = alike(first.numbers, second.numbers)
    # which the program contains
    same_scaling = alike(first.federation.late_scaling, second.federation.late_scaling)
    is_alike = same_shapes and same_numbers and same_scaling
    return is_alike and not differences(first, second)


def in_turn(run: Run) -> bool:
    """Whether runs in one kernel are trained one after the other, or at once on a device that is made for that."""
    plan = run.experiment.problem.plan
    return plan.chunk == 1 or plan.device.platform != "cpu"


def shapes(clients: Federation) -> Any:
    """Shapes and types of the clients' examples."""
    splits = (clients.train, clients.validation, clients.test)
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), splits)


def shapes_in_training(clients: Federation) -> Any:
    """Shapes and types of what training reads. Numbers of test examples, and of pooled examples, do not count."""

    def shape(examples: Any) -> tuple[tuple[int, ...], str]:
        return examples.shape, str(examples.dtype)

    def shape_of_one(examples: Any) -> tuple[tuple[int, ...], str]:
        return examples.shape[2:], str(examples.dtype)

    in_training = (clients.train, clients.validation)
    test = (clients.test.x, clients.test.y)
    return (
        jax.tree.map(shape, in_training, is_leaf=is_pooled),
        jax.tree.map(shape_of_one, test, is_leaf=is_pooled),
    )


def damage(folder: Path) -> str:
    """Describes what is wrong with the files of a finished cell; "" if they are intact or the cell is not finished."""
    recorded = manifest.read(folder)
    if recorded:
        return (recorded.damaged(folder) or "") if SUMMARY in recorded.files else ""
    if not (folder / SUMMARY).exists():
        return ""

    # The manifest is missing or damaged, so that all files are read.
    readers = {".json": files.read_json, ".npz": files.read_npz}
    for name in manifest.RECORDS:
        read = readers.get(Path(name).suffix, files.read_jsonl)
        try:
            read(folder / name)
        except Exception:  # a truncated file can make its reader raise anything
            return f"{name} cannot be read"
    cell = Cell.read(folder)
    is_whole = cell.rows and cell.rows[-1]["round"] == cell.summary["last"]["round"]
    return "" if is_whole else f"{ROWS} lacks rows"
