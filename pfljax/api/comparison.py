"""Comparing methods on the same clients, splits and seeds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from pfljax import data
from pfljax.api import tuning
from pfljax.api.run import (
    ClientsOfSplit,
    Folder,
    Run,
    SplitData,
    check_method,
    check_splits,
    data_of_trials,
    data_to_tune_on,
)
from pfljax.api.study import Cell, Replicate, Rerun, Study, share_programs, taken
from pfljax.api.table import FILES, Table, table_of
from pfljax.api.tuning import Point, Tuning
from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.contract.speech import logger, with_former_say
from pfljax.data import Federation
from pfljax.evaluation import measures
from pfljax.evaluation.metrics import is_percent
from pfljax.evaluation.statistics import RunSummary, Trial, find_reference
from pfljax.folder import files, former, planned
from pfljax.local.training import LocalTraining
from pfljax.report import terms
from pfljax.report.run_data import label_of, number_of, score_of
from pfljax.run.experiment import Experiment
from pfljax.settings.fields import Seed, Seeds, checked, hyperparameter
from pfljax.settings.method import METHODS
from pfljax.training import evaluating, tracking
from pfljax.training.conformance import RESERVED
from pfljax.training.loop import Rounds, Schedule
from pfljax.training.saving import AUTO
from pfljax.training.tracking import Tracker

SEEDS = (0, 1, 2)
ALL = "all"
Methods = Annotated[
    Sequence[Any] | Literal["all"],
    hyperparameter(empty=False, accepted="a list of methods with their hyperparameters, or all"),
]
Unseen = Annotated[
    Federation | float | None,
    hyperparameter(above=0, below=1, accepted="a share of the clients, or a Federation of others"),
]
Hyperparameters = Annotated[
    Mapping[str, Mapping[str, Sequence[Any]]] | Literal["paper"] | bool,
    hyperparameter(
        accepted="True or paper, for the hyperparameters that each method's paper tunes, or values by title and name",
        former="tune_knobs",  # former name
    ),
]
Config = Callable[[str, Trial, Mapping[str, Any]], dict]


class Unfinished(RunError):
    """Some runs of a table are left to other processes."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method of a table, before its runs are made.

    Attributes:
        title: Its title, which is also the name of its folder.
        method: The method with its hyperparameters.
        local: Local training.
        rates: Learning rates to choose from; a single one is taken as it is.
        hyperparameters: Values to choose from, by hyperparameter.
        tuning: What `tune` returned for it; None: it was not tuned before.
    """

    title: str
    method: Any
    local: LocalTraining
    rates: Sequence[float] = ()
    hyperparameters: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    tuning: Tuning | None = None

    @property
    def searches(self) -> bool:
        """Whether learning rate and hyperparameters are to be chosen."""
        return len(self.rates) > 1 or bool(self.hyperparameters)

    @property
    def first_point(self) -> Point:
        """The point at which it is trained without a search, and its runs are checked."""
        return Point(self.rates[0]) if self.rates else Point()

    def score_files(self, folder: Path) -> list[Path]:
        """The files of its search's scores."""
        return tuning.score_files(folder, list(self.hyperparameters)[1:])


class Trained(NamedTuple):
    """The cells of a method.

    Attributes:
        cells: Its cells, None for those that other processes train; empty if it failed.
        entries: Entries of its row about the values that were chosen.
        failure: Why it failed; None: it did not.
    """

    cells: list[Cell | None]
    entries: Mapping[str, Any] = {}
    failure: RunError | None = None

    @property
    def summaries(self) -> list[dict]:
        """The contents of the cells' summary.json."""
        return [cell.summary for cell in self.cells if cell is not None]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train."""
        return None not in self.cells


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Methods and trials of a table, before training.

    Attributes:
        entries: The methods by title.
        trials: Seeds and splits of the cells.
        tuning_trials: Those that learning rates and hyperparameters are chosen on.
        run_of: (entry, point, trial, whether it is for tuning) -> run.
        study: How cells are trained.
        out: The folder; None: none.
        share: (i, n): this process trains every n-th cell from number i on.
        widen: See `tune`.
        tracker: See `compare`.
        one_split: Whether all trials have the same clients.
        validation: Use of the validation examples after tuning: "returned" to training or "kept"; "": there are none.
        about: Entries of all runs' summary.json.
        checked_runs: The runs that `check` has made, by title.
    """

    entries: Mapping[str, Entry]
    trials: Sequence[Trial]
    tuning_trials: Sequence[Trial]
    run_of: Callable[[Entry, Point, Trial, bool], Run]
    study: Study
    out: Path | None = None
    share: tuple[int, int] = (0, 1)
    widen: int = tuning.WIDEN
    tracker: Tracker | None = None
    one_split: bool = False
    validation: str = ""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checked_runs: dict[str, Sequence[Run]] = dataclasses.field(default_factory=dict)

    @property
    def folders(self) -> list[Path]:
        """The folders of all cells; empty if nothing is written."""
        folders = []
        for title in self.entries:
            folders += [folder for folder in self._folders(title) if folder is not None]
        return folders

    def check(self) -> None:
        """Finds mistakes in all cells, and folders with something else, before anything is trained."""
        for title, entry in self.entries.items():
            runs = self._runs(entry, entry.first_point)
            if entry.searches:  # the settings of the table's runs are not known yet
                self._check_search(entry)
                continue
            for run, folder in zip(runs, self._folders(title), strict=True):
                if folder is not None:
                    self.study.check(run, folder)
            self.checked_runs[title] = runs

    def _check_search(self, entry: Entry) -> None:
        """Finds mistakes in the values that a method's search tries, and a file with other scores."""
        for name, values in entry.hyperparameters.items():
            for value in values:
                self.run_of(entry, entry.first_point.at(name, value), self.tuning_trials[0], True)
        folder = self._folder(entry.title)
        if folder is None or self.study.rerun != "never":
            return
        names = list(entry.hyperparameters)[:1]
        points = tuning.grid(entry.rates, {name: entry.hyperparameters[name] for name in names})
        runs = [self.run_of(entry, points[0], trial, True) for trial in self.tuning_trials]
        about = tuning.described(points, self.tuning_trials, runs, self.study.rounds, self.widen)
        tuning.check_scores(entry.score_files(folder)[0], about)

    def train(self) -> dict[str, Trained]:
        """Trains all cells: first those that no other process trains; then it waits for the others."""
        return dataclasses.replace(self, study=self._study_of_all())._train_all()

    def _study_of_all(self) -> Study:
        """The study, in which all cells are evaluated after the same rounds."""
        schedule = self.study.schedule
        if schedule.eval_every != AUTO:
            return self.study
        experiments: list[Experiment] = []
        for title, entry in self.entries.items():
            runs = self.checked_runs.get(title) or self._runs(entry, entry.first_point)
            experiments += [run.experiment for run in runs]
        every = evaluating.interval(AUTO, experiments)
        if every == evaluating.USUAL:
            return self.study
        logger.info(f"  all runs are evaluated every {every} rounds, to take less time")
        return dataclasses.replace(self.study, schedule=schedule._replace(eval_every=every))

    def _train_all(self) -> dict[str, Trained]:
        """Trains all cells."""
        results: dict[str, Trained] = {}
        for wait in (False, True):
            for title, entry in self.entries.items():
                if title in results and results[title].is_complete:
                    continue
                results[title] = self._result_of(entry, wait)
                if results[title].failure is not None:
                    logger.info(f"  {title} failed: {results[title].failure}")
                elif results[title].is_complete:
                    self._log_done(title, results)
        return {title: results[title] for title in self.entries}

    def _result_of(self, entry: Entry, wait: bool) -> Trained:
        """Trains a method's cells; the result of a method that fails, here or in another process, says why."""
        try:
            result = self._train_method(entry, wait)
        except RunError as error:  # the other methods' results count
            result = Trained([], failure=error)
            self._tell_others(entry.title, error)
        if wait and not result.is_complete:
            reason = self._failure_of_others(entry.title)
            if reason:
                result = Trained([], failure=RunError(reason))
        return result

    def _log_done(self, title: str, results: Mapping[str, Trained]) -> None:
        """Logs the score of a method that has been trained, and how many methods are done."""
        done = 0
        for result in results.values():
            done += result.is_complete and result.failure is None
        counted = f"{done} of {len(self.entries)} methods done"
        logger.info(f"  {counted}: {title}, {score_text(results[title].summaries)}")

    def _tell_others(self, title: str, error: RunError | None) -> None:
        """Writes why a method failed, or that it did not, for processes that train other cells of it."""
        path = self._failure_file(title, self.share[0])
        if path is None:
            return
        if error is not None:
            files.write_json(path, {"reason": error.reason})
        elif processes.is_first():
            files.delete(path)

    def _failure_of_others(self, title: str) -> str:
        """Why a method failed in another process, which so left its cells unfinished; "" if that is not known."""
        for number in range(self.share[1]):
            path = self._failure_file(title, number)
            if path is not None and number != self.share[0] and path.exists():
                return files.read_json(path)["reason"]
        return ""

    def _failure_file(self, title: str, number: int) -> Path | None:
        """The file in which one of several processes that share the cells says why a method failed; None: no file."""
        folder = self._folder(title)
        _, num = self.share
        if folder is None or num == 1:
            return None
        return folder / f"failed-{number + 1}-of-{num}.json"

    def _train_method(self, entry: Entry, wait: bool) -> Trained:
        """Chooses a method's learning rate and hyperparameters, and trains its cells.

        Without `wait`, trains only those that no other process trains.
        """
        folder = self._folder(entry.title)
        numbers = self._share_of(entry)
        if not wait:
            self._tell_others(entry.title, None)

        # The learning rate and hyperparameters.
        point = entry.first_point
        entries = entry.tuning.entries if entry.tuning else tuned_entries(point)
        if entry.searches:
            search = self._search_alone(entry, folder, wait, bool(numbers))
            if search is None:
                return Trained([None] * len(self.trials))
            point = search.best
            entries = search.entries
        if self.validation:
            entries = {**entries, "validation": self.validation}

        # This process's cells.
        runs = self.checked_runs.pop(entry.title, None) or self._runs(entry, point)
        folders = self._folders(entry.title)
        titles = [f"{entry.title}/{trial.folder}" for trial in self.trials]
        trackers = [tracking.named(self.tracker, title) for title in titles]
        outs = None
        if folder is not None:
            outs = [folder / self.trials[number].folder for number in numbers]
        trained = self.study.train(
            [runs[number] for number in numbers],
            outs,
            [trackers[number] for number in numbers],
            wait=wait,
        )

        # Those of other processes, if they are finished.
        cells = dict(zip(numbers, trained, strict=True))
        for number, (run, cell_folder) in enumerate(zip(runs, folders, strict=True)):
            if number not in cells:
                cells[number] = None
                if cell_folder is not None:
                    cells[number], _ = self.study.read(run, cell_folder)
        return Trained([cells[number] for number in range(len(self.trials))], entries)

    def _share_of(self, entry: Entry) -> list[int]:
        """The numbers of a method's cells that this process trains."""
        num = len(self.trials)
        first = list(self.entries).index(entry.title) * num
        number_of_process, num_processes = self.share
        return [
            number for number in range(num) if (first + number) % num_processes == number_of_process
        ]

    def _search_alone(
        self, entry: Entry, folder: Path | None, wait: bool, has_cells: bool
    ) -> Tuning | None:
        """Searches for a method's learning rate and hyperparameters, unless another process does; None: it does.

        A process without cells of the method reads the scores of others.
        """
        with contextlib.ExitStack() as locked:
            if folder is not None:
                is_scored = all(path.exists() for path in entry.score_files(folder))
                if not has_cells and not is_scored:
                    return None
                if not taken(locked, folder, wait=wait):
                    return None
            return self._search(entry, folder)

    def _search(self, entry: Entry, folder: Path | None) -> Tuning:
        """Searches for a method's best learning rate and hyperparameters."""

        def make(point: Point, trial: Trial) -> Run:
            return self.run_of(entry, point, trial, True)

        return tuning.search_in_turn(
            entry.rates,
            entry.hyperparameters,
            self.tuning_trials,
            make,
            self.study.rounds,
            folder=folder,
            rerun=self.study.rerun,
            widen=self.widen,
        )

    def _runs(self, entry: Entry, point: Point) -> Sequence[Run]:
        """A method's runs on all trials."""
        return share_programs([self.run_of(entry, point, trial, False) for trial in self.trials])

    def _folder(self, title: str) -> Path | None:
        """The folder of a method; None: none."""
        return None if self.out is None else self.out / title

    def _folders(self, title: str) -> list[Path | None]:
        """The folders of a method's cells."""
        folder = self._folder(title)
        return [None if folder is None else folder / trial.folder for trial in self.trials]


def score_text(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Formats a method's score after its last rounds, such as "test auroc 0.8123 ± 0.0100 (3)"."""
    score = score_of(summaries[0])
    percent = is_percent(score)
    values = RunSummary.from_values([summary["last"].get(score) for summary in summaries])
    unit = " %" if percent else ""
    return f"{label_of(score)} {values.text(number_of(percent))}{unit}"


def tuned_entries(point: Point) -> dict[str, Any]:
    """Entries of a row for values that the user chose; {} without any."""
    return {"tuned": terms.values(point.values), "at_edge": []} if point.values else {}


def titled(methods: Sequence[Any]) -> dict[str, Any]:
    """Returns the methods, or their tunings, by title.

    A title is the registered name, with the changed hyperparameters if the name occurs twice. A method with its
    default hyperparameters may be named, in upper or lower case.

    Raises:
        ArgumentError: if two methods have the same title.
    """
    pairs = [title_and_method(item) for item in methods]
    names = []
    for title, method in pairs:
        if title is None:
            names.append(method_of(method).info.name)
        else:
            files.check_name("methods", title, FILES)

    by_title: dict[str, Any] = {}
    for title, method in pairs:
        if title is None:
            title = method_of(method).info.name
            if names.count(title) > 1:
                title += changed_hyperparameters(method_of(method))
        files.check_name("methods", title, FILES)
        if title in by_title:
            text = f"two are called {title}; use (title, method) pairs to tell them apart"
            raise ArgumentError("methods", text)
        by_title[title] = method
    return by_title


def title_and_method(item: Any) -> tuple[Any, Any]:
    """Returns an item of `methods` as its title, or None, and the method or tuning."""
    is_pair = isinstance(item, tuple) and len(item) == 2
    title, method = item if is_pair else (None, item)
    if isinstance(method, Tuning):
        return title, method
    return title, check_method(method, "methods")


def changed_hyperparameters(method: Any) -> str:
    """Formats the hyperparameters that differ from their defaults, such as "(mu=0.1)"; "" if none does."""
    changed = []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if value != field.default:
            changed.append(f"{field.name}={value}")
    return f"({', '.join(changed)})" if changed else ""


def method_of(tuned: Any) -> Any:
    """The method that was tuned; anything else as it is."""
    return tuned.method if isinstance(tuned, Tuning) else tuned


def trials_of(seeds: Sequence[int], splits: Sequence[int] | None) -> list[Trial]:
    """All pairs of splits and seeds; without splits, each seed is its split, too."""
    if splits is None:
        return [Trial(seed) for seed in seeds]
    return [Trial(seed, split) for split in splits for seed in seeds]


def entries_of(
    methods: Mapping[str, Any],
    local: LocalTraining,
    learning_rates: Mapping[str, float],
    tune: Sequence[float],
    tune_hyperparameters: Mapping[str, Mapping[str, Sequence[Any]]] | str | bool,
    tell_groups: bool,
) -> dict[str, Entry]:
    """Returns the entries of methods, or of what `tune` returned for them, by title."""
    if tune and local.learning_rate is None:
        text = "accepted if `optimizer` is a function of the learning rate, such as optax.sgd without (...)"
        raise ArgumentError("tune", text)
    check_titles("learning_rates", learning_rates, methods)
    if isinstance(tune_hyperparameters, Mapping):
        check_titles("tune_hyperparameters", tune_hyperparameters, methods)

    entries = {}
    for title, method in methods.items():
        if isinstance(method, Tuning):
            tuned = method
            entries[title] = Entry(title, tuned.method, tuned.local or local, tuning=tuned)
            continue
        method_local = local
        if title in learning_rates:
            method_local = dataclasses.replace(local, learning_rate=learning_rates[title])
        hyperparameters: Mapping[str, Sequence[Any]] = {}
        if isinstance(tune_hyperparameters, Mapping):
            values = tune_hyperparameters.get(title, {})
            hyperparameters = tuning.hyperparameters_to_try(
                method, values, True, tell_groups, "tune_hyperparameters"
            )
        elif tune_hyperparameters:
            hyperparameters = tuning.papers_hyperparameters(method, tell_groups)
        entries[title] = Entry(title, method, method_local, list(tune), hyperparameters)
    return entries


def check_titles(argument: str, by_title: Mapping[str, Any], methods: Mapping[str, Any]) -> None:
    """Raises `ArgumentError` for a title that no method of the table has."""
    for title in by_title:
        if title not in methods:
            text = f"accepted: titles of methods of the table: {', '.join(methods)}"
            raise ArgumentError(argument, text, title)


def kept_validation(
    entries: Mapping[str, Entry], clients: Sequence[SplitData], stop: Any, keep: bool
) -> bool:
    """Whether training in the table goes without the validation examples of the tuning.

    It does if the user wants it, if a method or a stop rule reads them, and if they are other clients' examples.
    """
    is_read = any(entry.method.info.validates for entry in entries.values())
    is_shuffled = any(split.clients.target is not None for split in clients)
    return keep or is_read or stop is not None or is_shuffled


def tuning_seeds(seeds: Sequence[int], tune_seeds: Sequence[int]) -> list[int]:
    """Seeds of tuning: `tune_seeds`, or as many as the table has, at most three, from 1000 on.

    Raises:
        ArgumentError: if one is a seed of the table.
    """
    if not tune_seeds:
        others = (seed for seed in itertools.count(tuning.SEEDS[0]) if seed not in seeds)
        num = min(len(seeds), len(tuning.SEEDS))
        return list(itertools.islice(others, num))
    if set(tune_seeds) & set(seeds):
        text = f"accepted: other seeds than those of the table, {', '.join(map(str, seeds))}"
        raise ArgumentError("tune_seeds", text, ",".join(map(str, tune_seeds)))
    return list(tune_seeds)


def check_target(target: float | None, clock: Any, score: str) -> None:
    """Raises `ArgumentError` for a target that no column would show, or that no score can reach."""
    if target is not None and clock is None:
        text = "accepted with a clock, which simulates the seconds until it is reached"
        raise ArgumentError("target", text, target)
    if target is not None and is_percent(score) and not 0 <= target <= 1:
        raise ArgumentError("target", "accepted: 0 to 1, as accuracies are", target)


def share_of(cells: str) -> tuple[int, int]:
    """Returns "i/n" as (i - 1, n); (0, 1) for "", all cells."""
    match = re.fullmatch(r"(\d+)/(\d+)", cells or "1/1")
    number, num = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= num:
        raise ArgumentError("cells", "accepted: i/n with i from 1 to n, such as 1/4", cells)
    return number - 1, num


def check_folder(out: Path, folders: Sequence[Path], titles: Sequence[str], rerun: Rerun) -> None:
    """Raises `ArgumentError` if a folder has a table of methods or trials that the new one would not have."""
    files.check_writable(out)
    lost = []
    for folder in planned.read(out):
        if folder not in folders:
            lost.append(folder.relative_to(out).as_posix())

    # A folder without a plan has something else, or a table of an earlier version.
    if not (out / planned.NAME).exists():
        if (out / "table.json").exists():
            # A damaged file can make its reader raise anything.
            with contextlib.suppress(Exception):
                rows = former.read_table(out / "table.json")
                lost = [row["method"] for row in rows if row["method"] not in titles]
        else:
            for name in ("config.json", "table.csv", "table.md"):
                if (out / name).exists():
                    text = f"contains {name} of something else; choose an empty or new folder"
                    raise ArgumentError("out", text, out)

    if lost and rerun == "never":
        text = f"has a table with other runs, such as {lost[0]}, which the new one lacks"
        accepted = "accepted: a new folder, or `rerun=changed` to replace the table"
        raise ArgumentError("out", f"{text}; {accepted}", out)


@with_former_say
@checked(options=[Run, Schedule], without=["method", "seed", "unseen", "config"])
def compare(
    methods: Methods,
    clients: ClientsOfSplit,
    model: Any,
    local: LocalTraining | None = None,
    *,
    rounds: Rounds,
    seeds: Seeds = SEEDS,
    splits: Seeds | None = None,
    learning_rates: Mapping[str, float] | None = None,
    tune: Annotated[Sequence[float], hyperparameter(above=0, distinct=True, empty=True)] = (),
    tune_hyperparameters: Hyperparameters = False,
    tune_seeds: Annotated[Sequence[Seed], hyperparameter(distinct=True, empty=True)] = (),
    tune_widen: Annotated[int, hyperparameter(at_least=0, at_most=100)] = tuning.WIDEN,
    keep_validation: bool = False,
    unseen: Unseen = None,
    reference: str | None = None,
    target: Annotated[float | None, hyperparameter()] = None,
    out: Folder | None = None,
    leave_out: bool = False,
    replicate: Replicate = "auto",
    rerun: Rerun = "never",
    cells: str = "",
    tracker: Tracker | None = None,
    profile: Folder | None = None,
    config: Config | None = None,
    ready: Callable[[], None] | None = None,
    **options: Any,
) -> Table:
    """Trains several methods on the same clients, splits and seeds. Returns the table.

    The row of a method that fails, such as by a loss that is not finite, says why. The other rows are complete.

    Args:
        methods: Methods with their hyperparameters, or names of methods with their default hyperparameters, or what
            `tune` returned for them; or (title, method) pairs. "all": all methods with their default hyperparameters,
            but those that are not for such data; see `leave_out`.
        clients: The clients; or a function split -> clients, or -> (clients, unseen clients), which divides the data
            anew for each split.
        model: See `Run`.
        local: See `Run`; what `tune` returned has its own.
        rounds: Number of rounds.
        seeds: Seeds for initial models, cohorts, mini-batches and sampling.
        splits: Splits, each of which is trained with all seeds, if `clients` is a function; None: each seed is its
            split's number, too.
        learning_rates: Learning rates by title, for methods with another one than that of `local`. Those of `tune`
            replace them.
        tune: Learning rates to choose from, for each method, by its score on the validation examples of the table's
            own splits, with seeds of their own. A single one is taken as it is.
        tune_hyperparameters: Whether to choose hyperparameters, too: the first one together with the learning rate,
            each further one at the best values so far. True or "paper": of each method, the hyperparameters that its
            paper tunes and that have their default values.
        tune_seeds: Seeds to tune with, none of `seeds`; by default as many as `seeds`, at most three, from 1000 on.
        tune_widen: See `widen` of `tune`.
        keep_validation: Whether training goes without the validation examples after tuning. By default, it gets them
            back, unless a method or `stop` reads them. The table's notes say which.
        unseen: Share of the clients that are held out of training, drawn for each split; or other clients. Trained
            models are adapted to them; see `Run`.
        reference: The title or name of the method that the others are compared with, in upper or lower case, by paired
            differences with intervals and tests.
        target: Score, such as 0.9; with a clock, the table has the simulated seconds until runs reach it.
        out: Folder for the table and the runs. Finished ones are kept, and those of other processes are waited for. A
            table may get further methods, seeds and splits, but lose none.
        leave_out: Whether to leave out methods that are not for such data or other arguments, and say so. Otherwise,
            they are a mistake.
        replicate: Whether to train all trials of a method at once, stacked in one kernel: "auto", if their clients'
            data have the same shapes; "vmap", also if they must be padded; or "no".
        rerun: "changed" repeats finished runs of which anything has changed; "never" raises an error that names it.
        cells: "i/n": train only every n-th cell from the i-th on, beside n - 1 other processes that share `out`. The
            last to finish writes the table; the others raise an error that says how many cells are left.
        tracker: See `Run.train`. Runs are named METHOD/seed-SEED. Runs that finished earlier are not tracked again.
        profile: See `Run.train`.
        config: (title, trial, chosen values) -> further content of config.json; see `Run`.
        ready: Called when all arguments and folders have been checked, before the first run.
        options: Further arguments of `Run`, such as the `score` by which methods are compared and tuned, and
            `eval_every` and `checkpoint_every` of `Run.train`.

    Raises:
        ArgumentError: if an argument is not accepted, or `out` has other runs; before anything is trained.
        RunError: if some cells are other processes' share and not finished.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> model = pfl.models.MLP(hidden=(4,))
        >>> methods = [pfl.FedAvg(), pfl.Local()]
        >>> table = pfl.compare(methods, clients, model, rounds=2, seeds=[0, 1], reference="local")
        >>> [row["method"] for row in table.rows]
        ['fedavg', 'local']
        >>> table.rows[0]["runs"]
        2
    """
    folder = None if out is None else Path(out)
    schedule = Schedule(**{name: options.pop(name) for name in Schedule._fields if name in options})
    comparison = arranged(
        methods,
        clients,
        model,
        local,
        study=Study(rounds, schedule, replicate, rerun, profile),
        seeds=seeds,
        splits=splits,
        learning_rates=learning_rates,
        tune=tune,
        tune_hyperparameters=tune_hyperparameters,
        tune_seeds=tune_seeds,
        tune_widen=tune_widen,
        keep_validation=keep_validation,
        unseen=unseen,
        out=folder,
        leave_out=leave_out,
        share=share_of(cells),
        tracker=tracker,
        config=config,
        **options,
    )
    names = {title: entry.method.info.name for title, entry in comparison.entries.items()}
    reference = find_reference(reference, names)
    check_target(target, options.get("clock"), comparison.about["score"])
    folders = comparison.folders
    if folder is not None:
        titles = list(comparison.entries)
        processes.first(functools.partial(check_folder, folder, folders, titles, rerun))
    comparison.check()
    if folder is not None:
        planned.write(folder, folders, rounds)
    if ready is not None:
        ready()

    results = comparison.train()
    failures = {}
    cells_by_title = {}
    entries = {}
    num_missing = 0
    for title, result in results.items():
        if result.failure is not None:
            failures[title] = result.failure.reason
        cells_by_title[title] = [cell for cell in result.cells if cell]
        entries[title] = result.entries
        num_missing += result.cells.count(None)
    if num_missing:
        text = f"unfinished runs of other processes: {num_missing}; the process that finishes last writes the table"
        if failures:
            reasons = [f"{title} failed: {reason}" for title, reason in failures.items()]
            raise RunError("; ".join([*reasons, text]))
        raise Unfinished(text)

    table = table_of(
        cells_by_title,
        comparison.about,
        reference,
        comparison.trials,
        target,
        failures=failures,
        chosen=entries,
        one_split=comparison.one_split,
    )
    if folder is not None:
        table.write(folder)
    return table


def arranged(
    methods: Sequence[Any] | Literal["all"],
    clients: Federation | Callable[[int], Any],
    model: Any,
    local: LocalTraining | None,
    *,
    study: Study,
    seeds: Sequence[int],
    splits: Sequence[int] | None = None,
    learning_rates: Mapping[str, float] | None = None,
    tune: Sequence[float] = (),
    tune_hyperparameters: Mapping[str, Mapping[str, Sequence[Any]]] | str | bool = False,
    tune_seeds: Sequence[int] = (),
    tune_widen: int = tuning.WIDEN,
    keep_validation: bool = False,
    unseen: Federation | float | None = None,
    out: Path | None = None,
    leave_out: bool = False,
    share: tuple[int, int] = (0, 1),
    tracker: Tracker | None = None,
    config: Config | None = None,
    **options: Any,
) -> Comparison:
    """Returns the comparison, before training.

    Args:
        methods, clients, model, local, seeds, splits: As in `compare`, like all others but these.
        study: How cells are trained.
        share: (i, n): this process trains every n-th cell from number i on.
    """
    if methods == ALL:
        by_title = {name: method_class() for name, method_class in METHODS.items()}
    else:
        by_title = titled(methods)
    tell_groups = options.get("tell_groups", False)
    entries = entries_of(
        by_title,
        local or LocalTraining(),
        learning_rates or {},
        tune,
        tune_hyperparameters,
        tell_groups,
    )

    # Each seed has another split, unless `splits` has them or all have the same clients.
    check_splits(clients, splits)
    one_split = isinstance(clients, Federation)
    trials = trials_of(list(seeds), splits)
    splits_of_seeds = None if one_split else list(seeds)
    seeds_to_tune = tuning_seeds(list(seeds), tune_seeds)
    tuning_trials = tuning.trials_on(seeds_to_tune, splits, splits_of_seeds)

    # Learning rates and hyperparameters are chosen on validation examples, which training in the table then has back.
    searches = any(entry.searches for entry in entries.values())
    is_tuned = searches or any(entry.tuning for entry in entries.values())
    all_trials = [*trials, *tuning_trials] if searches else trials
    data_by_trial = data_of_trials(clients, all_trials, unseen)
    to_tune_on = data_to_tune_on(data_by_trial, tuning_trials, trials) if searches else {}
    distinct = {id(split): split for split in data_by_trial.values()}
    in_table = dict(distinct)

    def run_of(entry: Entry, point: Point, trial: Trial, for_tuning: bool) -> Run:
        method, local_training = point.applied(entry.method, entry.local)
        split = to_tune_on[trial] if for_tuning else in_table[id(data_by_trial[trial])]
        return Run(
            method,
            split.clients,
            model,
            local_training,
            seed=trial.seed,
            unseen=split.unseen,
            config=None if config is None else config(entry.title, trial, point.values),
            **options,
        )

    if leave_out or methods == ALL:

        def first_run(title: str) -> Run:
            return run_of(entries[title], entries[title].first_point, trials[0], False)

        entries = {title: entries[title] for title in fitting(list(entries), first_run)}

    tested = []
    for trial in trials:
        tested += [federation for federation in data_by_trial[trial] if federation is not None]
    check_tunings(entries, tested, seeds)

    # Training gets the validation examples back after tuning, unless something reads them.
    splits_of_data = list(distinct.values())
    has_validation = any(split.clients.validation.size.sum() for split in splits_of_data)
    validation = ""
    if is_tuned and has_validation:
        is_kept = kept_validation(entries, splits_of_data, options.get("stop"), keep_validation)
        validation = "kept" if is_kept else "returned"
    if validation == "returned":
        for key, split in distinct.items():
            in_table[key] = split.with_validation_returned()

    # Entries of all runs' summaries.
    first_clients = data_by_trial[trials[0]].clients
    task = first_clients.task
    metrics = measures.named(options.get("metrics"), RESERVED, task)
    scored = measures.scored(options.get("score"), metrics, RESERVED, task)
    about = {
        "dataset": first_clients.name,
        "num_clients": first_clients.num_clients,
        "task": task,
        "score": scored.name,
        "lower_is_better": [] if scored.higher_is_better else [scored.name],
        "rounds": study.rounds,
    }
    return Comparison(
        entries,
        trials,
        tuning_trials,
        run_of,
        study,
        out,
        share,
        widen=tune_widen,
        tracker=tracker,
        one_split=one_split,
        validation=validation,
        about=about,
    )


def check_tunings(
    entries: Mapping[str, Entry], clients: Sequence[Federation], seeds: Sequence[int]
) -> None:
    """Checks what `tune` returned for methods of a table.

    Raises:
        ArgumentError: if it was tuned on examples on which the table tests, or with seeds of the table.
    """
    tunings = {title: entry.tuning for title, entry in entries.items() if entry.tuning is not None}
    if not tunings:
        return
    distinct = {id(federation): federation for federation in clients}
    tested = data.distinct_codes(distinct.values(), "test")
    for title, tuned in tunings.items():
        if set(tuned.seeds) & set(seeds):
            tuned_seeds = ", ".join(map(str, tuned.seeds))
            text = f"{title} was tuned with seeds {tuned_seeds}; accepted: other seeds than those"
            raise ArgumentError("seeds", text, ",".join(map(str, seeds)))
        leaked = np.isin(tuned.chosen_on, tested)
        if leaked.any():
            text = f"{title} was tuned on {leaked.sum()} examples on which this table tests"
            accepted = "accepted: `tune=`, or a tuning on the splits of the table"
            raise ArgumentError("methods", f"{text}; {accepted}")


def fitting(titles: Sequence[str], make: Callable[[str], Run]) -> list[str]:
    """The methods that the data and the other arguments are for; logs which are left out, and why."""
    accepted_titles = []
    for title in titles:
        try:
            make(title)
        except ArgumentError as error:
            # An error's owner is the method of a hyperparameter.
            if error.argument != "method" and not error.owner:
                raise
            hyperparameter_name = "" if error.argument == "method" else f"{error.argument}: "
            reason, _, _ = error.text.partition(";")
            logger.info(f"  left out: {title}: {hyperparameter_name}{reason}")
        else:
            accepted_titles.append(title)
    return accepted_titles
