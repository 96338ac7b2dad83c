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
from pfljax.contract.speech import logger
from pfljax.folder import files, folders, former, locks, manifest
from pfljax.report.run_data import score_of
from pfljax.run.experiment import differences, groups_alike
from pfljax.stores.registry import store_of
from pfljax.training import never_trained
from pfljax.training.loop import EVERY, Schedule
from pfljax.training.scoring import entries_of_score
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
        replicate: Whether runs that differ only in numbers share a kernel: "auto", if their data have the same shapes;
            "vmap", also if they must be padded; or "no".
        rerun: "changed" trains cells again that were trained with other settings, data or another program.
        profile: Folder for a profiler trace of a few rounds.
    """

    rounds: int
    schedule: Schedule = EVERY
    replicate: Replicate = "auto"
    rerun: Rerun = "never"
    profile: str | Path | None = None

    def check(self, run: Run, folder: Path) -> bool:
        """Whether a cell can go on from its folder; False if what is there must go first.

        Raises:
            ArgumentError: if the folder contains something else, a run with more rounds, or a changed run.
        """
        found: list[bool] = []
        experiment = run.experiment.with_rounds(self.rounds)

        def check() -> None:
            try:
                folders.check(folder, experiment, "if_possible")
                folders.Folders([experiment], [folder], "if_possible").check_rounds(self.rounds)
            except folders.Changed as error:
                if self.rerun != "changed":
                    text = error.text.removesuffix(f"; {folders.WAY_ON}")
                    raise ArgumentError(
                        "rerun", f"{text}; accepted: changed, to train it again"
                    ) from error
                found.append(False)

        processes.first(check)
        return bool(processes.from_first(np.int32(not found)))

    def read(self, run: Run, folder: Path) -> tuple[Cell | None, str]:
        """The finished cell in a folder, or None; and what is wrong with its files, if that is why it is None."""
        if not self.check(run, folder):
            return None, "it has changed"
        wrong = ""
        done = False
        if processes.is_first():  # other processes may see the files later
            done, wrong = self._finished(run, folder)
            if done and not has_score_of(run, folder):
                done = False
                wrong = "it has another score"
        return (Cell.read(folder) if processes.from_first(np.int32(done)) else None), wrong

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
        return last.get("round") == self.rounds or bool(summary.get("stopped")), ""

    def _with_score(self, run: Run, folder: Path) -> Cell | None:
        """The finished cell in a folder, whose files get the score of the run; None if it is not finished.

        Its rows have all that the score changes, so that nothing is trained. A stop rule that follows the score
        belongs to the program; see `check`.
        """
        if not self.check(run, folder):
            return None
        done = False
        if processes.is_first():
            done, _ = self._finished(run, folder)
            if done:
                rewrite_score(run, folder)
        if not processes.from_first(np.int32(done)):
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
        busy = False
        with contextlib.ExitStack() as held:
            for number, out in [(n, outs[n]) for n in left] if outs else ():
                cells[number], wrong = self.read(runs[number], out)
                if cells[number]:
                    logger.info(f"  {out}: already finished")
                elif taken(held, out):
                    # another process may just have finished it
                    cells[number], wrong = self.read(runs[number], out)
                    cells[number] = cells[number] or self._with_score(runs[number], out)
                    if cells[number] is None:
                        self._prepare(runs[number], out, wrong)
                        continue
                busy = busy or cells[number] is None
                left.remove(number)
            failed: list[RunError] = []
            for group in self._groups(runs, left):
                parts = [(runs[n], outs[n] if outs else None, trackers[n]) for n in group]
                try:
                    results = in_parts(self._together, parts)
                except RunError as error:  # the others are trained all the same
                    alone = len(group) == 1 and len(runs) > 1
                    seed = f"seed {runs[group[0]].experiment.seed}, " if alone else ""
                    failed.append(RunError(f"{seed}{error.reason}", error.further))
                    continue
                for number, result in zip(group, results, strict=True):
                    cells[number] = Cell(result.summary, result.history)
            if failed:
                raise failed[0]
        return busy

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
            shares = store_of(runs[number].experiment).on_devices and in_turn(runs[number])
            federation = runs[number].experiment.federation
            shape = (
                ""
                if self.replicate == "vmap"
                else f"{shapes(federation)} {federation.late_scaling}"
            )
            alone = runs[number].experiment.stop is not None  # at its own round
            alone = alone or self.replicate == "no" or (self.replicate == "auto" and not shares)
            groups.setdefault(number if alone else shape, []).append(number)
        return [part for group in groups.values() for part in split_alike(runs, group)]

    def _together(self, group: Sequence[tuple[Run, Path | None, Tracker | None]]) -> list[Result]:
        """Trains runs in one kernel."""
        runs = [run for run, _, _ in group]
        outs = [out for _, out, _ in group]
        trackers = [tracker for _, _, tracker in group]

        def matters(line: str) -> bool:
            return "profile: " in line or folders.LOST in line

        options = {
            "schedule": self.schedule,
            "profile": self.profile,
            "trackers": trackers,
        }
        options |= {"outs": outs, "resume": "if_possible"} if outs[0] else {}
        with speech.only("pfljax.training", matters):
            return train_replicates(runs, self.rounds, **options)


def has_score_of(run: Run, folder: Path) -> bool:
    """Whether the finished run in a folder has the score of a run."""
    return score_of(Cell.read(folder).summary) == run.experiment.score_name


def rewrite_score(run: Run, folder: Path) -> None:
    """Gives the files of a finished run the score of a run that computes the same."""
    cell = Cell.read(folder)
    recorded = manifest.read(folder)
    score = run.experiment.score_name
    summary = cell.summary | entries_of_score(run.experiment, cell.rows)
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
    return [[numbers[place] for place in group] for group in groups]


def in_parts(train: Callable[[Sequence[T]], list[R]], runs: Sequence[T]) -> list[R]:
    """Returns train(runs); of each half alone if all runs together do not fit in memory."""
    try:
        return train(runs)
    except OutOfMemory:
        if len(runs) == 1:
            raise
        half = len(runs) // 2
        return in_parts(train, runs[:half]) + in_parts(train, runs[half:])


def taken(held: contextlib.ExitStack, folder: Path, *, wait: bool = False) -> bool:
    """Locks a folder until `held` ends. Unless it may `wait`, returns False if another process has locked it."""
    while True:
        free = True
        try:
            held.enter_context(locks.locked([folder], logger.info))
        except locks.Locked:
            free = False
        free = bool(processes.from_first(np.int32(free)))
        if free or not wait:
            return free
        time.sleep(POLL_SECONDS)


def share_programs(runs: Sequence[Run]) -> Sequence[Run]:
    """Lets runs that differ only in seed and values of data share the description of their program: one trace."""
    seen: list[Run] = []
    for run in runs:
        same = (each for each in seen if computes_as(each, run))
        first = next(same, None)
        if first is None:
            seen.append(run)
        else:
            run.experiment = dataclasses.replace(run.experiment, programs=first.experiment.programs)
    return runs


def computes_as(a: Run, b: Run) -> bool:
    """Whether two runs surely have the same program."""
    one = a.experiment
    other = b.experiment
    return (
        one.local is not None
        and shapes(one.federation) == shapes(other.federation)
        and alike(one.numbers, other.numbers)
        # which the program holds
        and alike(one.federation.late_scaling, other.federation.late_scaling)
        and not differences(one, other)
    )


def in_turn(run: Run) -> bool:
    """Whether runs in one kernel are trained one after the other, or at once on a device that is made for that."""
    plan = run.experiment.problem.plan
    return plan.chunk == 1 or plan.device.platform != "cpu"


def shapes(clients: Any) -> Any:
    """Shapes of the clients' training data and of what is drawn from it."""
    return jax.tree.map(
        lambda leaf: (leaf.shape, str(leaf.dtype)),
        (clients.train, clients.validation, clients.test),
    )


def damage(folder: Path) -> str:
    """Describes what is wrong with the files of a finished cell; "" if they are intact or the cell is not finished."""
    kept = manifest.read(folder)
    if kept:
        return (kept.damaged(folder) or "") if SUMMARY in kept.files else ""
    if not (folder / SUMMARY).exists():
        return ""
    for name in manifest.RECORDS:  # the manifest is missing or damaged
        try:
            {".json": files.read_json, ".npz": files.read_npz}.get(
                Path(name).suffix, files.read_jsonl
            )(folder / name)
        except Exception:  # a truncated file can make its reader raise anything
            return f"{name} cannot be read"
    cell = Cell.read(folder)
    return (
        ""
        if cell.rows and cell.rows[-1]["round"] == cell.summary["last"]["round"]
        else f"{ROWS} lacks rows"
    )
