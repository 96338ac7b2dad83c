"""Tuning: searching for the learning rate and hyperparameters with the best validation score."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np

from pfljax.api.run import (
    ClientsOfSplit,
    Folder,
    Run,
    check_method,
    check_splits,
    data_of_trials,
    data_to_tune_on,
    padded_alike,
    start,
)
from pfljax.api.study import Rerun, in_halves
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.contract.speech import logger, with_former_say
from pfljax.data import Federation, distinct_codes
from pfljax.evaluation import rounding
from pfljax.evaluation.metrics import score_of_task, sign_of
from pfljax.evaluation.statistics import Trial
from pfljax.folder import files, fingerprint, former, locks
from pfljax.local.training import LocalTraining
from pfljax.report import terms
from pfljax.run.experiment import Experiment, groups_alike
from pfljax.settings import grids
from pfljax.settings.fields import Seeds, checked, fields_of, hyperparameter, with_present_names
from pfljax.settings.method import numbers_of_groups
from pfljax.training.loop import Rounds, Schedule

T = TypeVar("T")
# Values to try, by hyperparameter.
Values = Mapping[str, Sequence[Any]] | Literal["paper"] | bool | None
DIVERGED = (np.nan, np.nan)
WIDEN = 3  # further values of a grid whose edge wins
SEEDS = (1000, 1001, 1002)  # of tuning, far from those that one reports


class Point(NamedTuple):
    """A point of a grid.

    Attributes:
        learning_rate: Learning rate of local training; None: unchanged.
        hyperparameters: Values of the method's hyperparameters, by name.
    """

    learning_rate: float | None = None
    hyperparameters: Mapping[str, Any] = {}

    @property
    def values(self) -> dict[str, Any]:
        """The values by name; the learning rate is "learning_rate"."""
        values = {} if self.learning_rate is None else {"learning_rate": self.learning_rate}
        return values | dict(self.hyperparameters)

    def at(self, name: str, value: Any) -> Point:
        """Returns the point with another value."""
        if name == "learning_rate":
            return self._replace(learning_rate=value)
        return self._replace(hyperparameters={**self.hyperparameters, name: value})

    def applied(self, method: Any, local: LocalTraining) -> tuple[Any, LocalTraining]:
        """Returns a method and local training with these values."""
        if self.learning_rate is not None:
            local = dataclasses.replace(local, learning_rate=self.learning_rate)
        return dataclasses.replace(method, **self.hyperparameters), local

    def __str__(self) -> str:
        return terms.values(self.values)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of a grid search. `compare` accepts it as a method, which it trains with the best values.

    Attributes:
        points: The grid.
        scores: The score of the runs (see `Run`) on validation examples after the last round, such as the accuracy,
            averaged over the runs of each point; negative if low scores are good, as losses are. NaN if a run diverged.
        losses: Validation losses; they break ties between equal scores.
        before: The searches for other hyperparameters before this one, whose best values it uses.
        at_edge: Names of the best point's values that are the least or largest of those tried, although the method
            and its network accept further ones.
        seeds: The seeds that the scores are means over.
        chosen_on: Codes of the validation examples that the scores are of, without those whose x is also that of a test
            example of the same splits; see `data.distinct_codes`.
        method: The method with the best hyperparameters.
        local: Local training at the best learning rate.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8, validation_fraction=0.5)
        >>> model = pfl.models.MLP(hidden=(4,))
        >>> tuning = pfl.tune(pfl.Local(), clients, model, rounds=2, learning_rates=[0.01, 0.1], widen=0, seeds=[7])
        >>> [point.learning_rate for point in tuning.points]
        [0.01, 0.1]
        >>> tuning.best in tuning.points
        True
    """

    points: list[Point]
    scores: list[float]
    losses: list[float]
    before: list[Tuning] = dataclasses.field(default_factory=list)
    at_edge: list[str] = dataclasses.field(default_factory=list)
    seeds: Sequence[int] = dataclasses.field(default=(), compare=False)
    chosen_on: Any = dataclasses.field(default=None, compare=False)
    method: Any = dataclasses.field(default=None, compare=False)
    local: LocalTraining | None = dataclasses.field(default=None, compare=False)

    def __repr__(self) -> str:
        best = terms.values(self.best.values, self.at_edge)
        return f"Tuning(best: {best}; scores: {tried(self.points, self.scores)})"

    def applied(self, method: Any, local: LocalTraining) -> Tuning:
        """Returns the search with a method and local training at its best point."""
        method, local = self.best.applied(method, local)
        return dataclasses.replace(self, method=method, local=local)

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of a table's row: the best values as text, and those at an edge."""
        return {"tuned": terms.values(self.best.values, self.at_edge), "at_edge": self.at_edge}

    @property
    def best(self) -> Point:
        """The point with the best score; of several with equal scores, the one with the lowest loss."""
        equal = np.flatnonzero(rounding.is_best(self.scores))
        return self.points[min(equal, key=self.losses.__getitem__)]


def tried(points: Sequence[Point], scores: Sequence[float]) -> str:
    """Formats points with their scores, such as "mu 0.1 (0.8123); mu 1 (0.7954)"."""
    texts = [f"{point} ({score:.4f})" for point, score in zip(points, scores, strict=True)]
    return "; ".join(texts)


def grid(
    rates: Sequence[float] = (), hyperparameters: Mapping[str, Sequence[Any]] | None = None
) -> list[Point]:
    """Returns all combinations of learning rates and hyperparameter values."""
    hyperparameters = hyperparameters or {}
    points = []
    for rate in rates or [None]:
        for values in itertools.product(*hyperparameters.values()):
            points.append(Point(rate, dict(zip(hyperparameters, values, strict=True))))
    return points


@with_former_say
def search(
    points: Sequence[Point],
    trials: Sequence[T],
    make: Callable[[Point, T], Run],
    rounds: int,
    *,
    widen: int = WIDEN,
    path: Path | None = None,
    rerun: Rerun = "never",
) -> Tuning:
    """Scores every point on all trials. Runs that differ only in numbers share a kernel.

    Args:
        points: The grid.
        trials: Trials to score each point on.
        make: (point, trial) -> run. The run's clients need validation examples.
        rounds: Number of rounds.
        widen: See `tune`.
        path: A JSON file for the scores; None: none.
        rerun: "changed" scores the points again if the file has scores of something else.

    Raises:
        RunError: if a run diverges at every point.
        ArgumentError: if the file has scores of something else, and `rerun` is "never".
    """

    def runs_at(point: Point) -> list[Run]:
        return [make(point, trial) for trial in trials]

    runs = [run for point in points for run in runs_at(point)]
    name = runs[0].experiment.name
    about = {} if path is None else described(points, trials, runs[: len(trials)], rounds, widen)
    tuning = None
    if path is not None and path.exists():
        tuning = earlier_scores(path, about, runs_at, rerun)
    if tuning is None:
        logger.info(f"  {name}: tuning, {len(points)} points, {len(trials)} runs each")
        scores, losses = scores_of(runs, len(trials), rounds)
        tuning = Tuning(list(points), scores, losses)
        if np.isnan(tuning.scores).all():
            raise RunError(f"tuning: {name} diverges at every point of the grid")
        tuning = widened(tuning, runs_at, rounds, widen)
        if path is not None:
            results = {
                "points": [point._asdict() for point in tuning.points],
                "best": tuning.best._asdict(),
                "scores": tuning.scores,
                "losses": tuning.losses,
                "at_edge": tuning.at_edge,
                "programs": programs_at(tuning.points, runs_at, rounds),
            }
            files.write_json(path, about | results)
    experiment = runs[0].experiment
    sign = sign_of(experiment.score_name, experiment.lower_is_better)
    values = [sign * score for score in tuning.scores]
    logger.info(f"  {name}: best: {tuning.best}; scores: {tried(tuning.points, values)}")
    for value in map(terms.tuned_name, tuning.at_edge):
        logger.info(f"  {name}: {value} is at the edge of the values tried; others may do better")
    return tuning


def described(
    points: Sequence[Point], trials: Sequence[Any], runs: Sequence[Run], rounds: int, widen: int
) -> dict[str, Any]:
    """Entries of a file of scores that a new search must have in common with it, besides the programs."""
    experiments = [run.experiment for run in runs]
    entries = {
        "settings": experiments[0].config["settings"],
        "data": [experiment.config["data"] for experiment in experiments],
        "rounds": rounds,
        "trials": list(trials),
        "grid": [point._asdict() for point in points],
        "widen": widen,
        "score": chosen_score(experiments[0]),
    }
    return files.plain(entries)


def chosen_score(experiment: Experiment) -> str | None:
    """The score that points are chosen by; None: that of the task, as in files without this entry."""
    score = experiment.score_name
    return None if score == score_of_task(experiment.federation.task) else score


def changed_entries(before: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """Names the entries of a file of scores that differ from those of a search. Raises KeyError if it lacks one."""
    before = {"score": None, **before}
    return [key for key, value in about.items() if before[key] != value]


def programs_at(
    points: Sequence[Point], runs_at: Callable[[Point], list[Run]], rounds: int
) -> list[dict[str, Any]]:
    """The programs of all points that were tried, those beyond the edges of the grid as well."""
    return files.plain(programs_of([runs_at(point)[0] for point in points], rounds))


def programs_of(runs: Sequence[Run], rounds: int) -> list[dict[str, Any]]:
    """The programs of a grid's points; points that differ only in numbers share one."""
    groups = groups_alike([run.experiment for run in runs])
    return [runs[group[0]].experiment.with_rounds(rounds).program() for group in groups]


def widened(
    tuning: Tuning, runs_at: Callable[[Point], list[Run]], rounds: int, widen: int
) -> Tuning:
    """Tries values beyond the edges at which the best point lies, up to `widen` times.

    Args:
        tuning: The scores of the grid.
        runs_at: point -> its runs.
        rounds: Number of rounds.
        widen: See `tune`.
    """
    method = runs_at(tuning.best)[0].experiment.method
    fields = {**fields_of(type(method)), "learning_rate": fields_of(LocalTraining)["learning_rate"]}
    for step in range(widen + 1):
        # The points beyond the edges, with their runs.
        best = tuning.best
        values_tried = [point.values for point in tuning.points]
        further: dict[str, tuple[Point, list[Run]]] = {}
        for name, value in grids.beyond_edges(values_tried, best.values, fields).items():
            point = best.at(name, value)
            with contextlib.suppress(ArgumentError):  # such as more layers than the network has
                further[name] = (point, runs_at(point))
        tuning = dataclasses.replace(tuning, at_edge=list(further))
        if not further or step == widen:
            break

        # Their scores.
        points = [point for point, _ in further.values()]
        runs_of_points = [runs for _, runs in further.values()]
        names = "; ".join(map(str, points))
        logger.info(f"  {method.info.name}: the edge of the grid wins; also trying {names}")
        runs = list(itertools.chain(*runs_of_points))
        scores, losses = scores_of(runs, len(runs_of_points[0]), rounds)
        tuning = Tuning(
            points=[*tuning.points, *points],
            scores=[*tuning.scores, *scores],
            losses=[*tuning.losses, *losses],
        )
    return tuning


def scores_of(runs: Sequence[Run], trials: int, rounds: int) -> tuple[list[float], list[float]]:
    """Trains the runs of each point in turn, `trials` of them. Returns the points' mean scores and losses."""

    def train(group: Sequence[Run]) -> list[tuple[float, float]]:
        return final_scores(group, rounds)

    scores = np.full((len(runs), 2), np.nan)
    for numbers in groups_alike([run.experiment for run in runs]):
        scores[numbers] = in_halves(train, [runs[number] for number in numbers])
    means, losses = scores.reshape(-1, trials, 2).mean(axis=1).T
    return means.tolist(), losses.tolist()


def search_in_turn(
    rates: Sequence[float],
    hyperparameters: Mapping[str, Sequence[Any]],
    trials: Sequence[T],
    make: Callable[[Point, T], Run],
    rounds: int,
    *,
    together: int = 1,
    folder: Path | None = None,
    **options: Any,
) -> Tuning:
    """Tunes the learning rate and the first hyperparameters together, then each further one at the best values so far.

    Args:
        rates: Learning rates to try.
        hyperparameters: Values to try, by hyperparameter.
        trials: See `search`.
        make: See `search`.
        rounds: Number of rounds.
        together: Number of hyperparameters that are tuned together with the learning rate.
        folder: Folder for the scores; see `score_files`. None: none.
        options: `widen` and `rerun` of `search`.

    Returns:
        The search for the last hyperparameter; `before` has the others.
    """
    names = list(hyperparameters)
    further = names[together:]
    paths = score_files(folder, further) if folder else [None] * (1 + len(further))
    points = grid(rates, {name: hyperparameters[name] for name in names[:together]})
    first_path, *further_paths = paths
    tuning = search(points, trials, make, rounds, path=first_path, **options)
    before = []
    for name, path in zip(further, further_paths, strict=True):
        before.append(tuning)
        points = [tuning.best.at(name, value) for value in hyperparameters[name]]
        further_tuning = search(points, trials, make, rounds, path=path, **options)
        at_edge = [*tuning.at_edge, *further_tuning.at_edge]
        tuning = dataclasses.replace(further_tuning, before=[*before], at_edge=at_edge)
    return tuning


def score_files(folder: Path, further: Sequence[str]) -> list[Path]:
    """The files of the scores of `search_in_turn`: of its first search, and of those for further hyperparameters."""
    return [folder / "tuning.json", *(folder / f"tuning-{name}.json" for name in further)]


def papers_hyperparameters(method: Any, tell_groups: bool = False) -> dict[str, Sequence[Any]]:
    """The hyperparameters of a method, or of its class, that its paper tunes, with their values.

    Leaves out numbers of groups that the method gets, and those of an instance that differ from their defaults.
    """
    known = numbers_of_groups(method) if tell_groups else []
    hyperparameters = {}
    for field in dataclasses.fields(method):
        values = field.metadata.get("grid")
        is_set = not isinstance(method, type) and getattr(method, field.name) != field.default
        if values and field.name not in known and not is_set:
            hyperparameters[field.name] = values
    return hyperparameters


def earlier_scores(
    path: Path,
    about: Mapping[str, Any],
    runs_at: Callable[[Point], list[Run]],
    rerun: Rerun,
) -> Tuning | None:
    """Reads the scores in a file; None if they must be computed again.

    Args:
        path: The file.
        about: The entries of the present search; see `described`.
        runs_at: point -> its runs, whose programs must be those of the file.
        rerun: See `search`.

    Raises:
        ArgumentError: if the file has scores of something else, and `rerun` is "never".
    """

    def number(value: float | None) -> float:
        return np.nan if value is None else float(value)

    try:
        before = former.read_scores(path)
        scores = list(map(number, before["scores"]))
        losses = list(map(number, before["losses"]))
        points = [Point(**point) for point in before["points"]]
        tuning = Tuning(points, scores, losses, at_edge=before["at_edge"])
        different = changed_entries(before, about)
        if not different:
            different = changed_programs(before["programs"], points, runs_at, about["rounds"])
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, ArgumentError):
            raise
        logger.info(f"  {path} is damaged; tuning again")
        return None
    if different and rerun == "never":
        raise other_scores(path, different)
    if different:
        return None
    logger.info(f"  {path}: already tuned")
    return tuning


def other_scores(path: Path, different: Sequence[str]) -> ArgumentError:
    """The error for a file with scores of a search that differs from the present one."""
    text = f"{path} has scores of something else ({', '.join(different)} changed); accepted: changed, to tune again"
    return ArgumentError("rerun", text)


def check_scores(path: Path, about: Mapping[str, Any]) -> None:
    """Raises `ArgumentError` if a file has scores of another search, as far as that shows without its programs."""
    try:
        before = former.read_scores(path)
        different = changed_entries(before, about)
    # there is none, or it is damaged, and the search begins anew
    except (OSError, ValueError, TypeError, KeyError):
        return
    if different:
        raise other_scores(path, different)


def changed_programs(
    before: Sequence[Any],
    points: Sequence[Point],
    runs_at: Callable[[Point], list[Run]],
    rounds: int,
) -> list[str]:
    """Names what differs between the programs of points now and before."""
    try:
        now = programs_at(points, runs_at, rounds)
    except ArgumentError as error:  # a hyperparameter no longer accepts a value beyond the grid
        return [error.argument]
    if len(now) != len(before):
        return ["programs"]
    for program_before, program in zip(before, now, strict=True):
        different = fingerprint.differences(program_before, program)
        if different:
            return different
    return []


def final_scores(runs: Sequence[Run], rounds: int) -> list[tuple[float, float]]:
    """Returns (validation score, validation loss) of each run after the last round; NaN if it diverged.

    High scores are good.
    """
    trainer = start(padded_alike(runs), keep_going=True)
    if not trainer.play(rounds, Schedule(rounds, rounds)):
        return [DIVERGED] * len(runs)
    rows = [history.rows[-1] for history in trainer.histories]
    if "validation_loss" not in rows[0]:
        text = "have no validation examples to tune on; set validation_fraction above 0"
        raise ArgumentError("clients", text)
    scores = []
    for number, (run, row) in enumerate(zip(runs, rows, strict=True)):
        score = validation_score(run.experiment, row)
        scores.append(DIVERGED if number in trainer.diverged else score)
    return scores


def validation_score(experiment: Experiment, row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns a run's score on validation examples, of which high values are good, and its loss there.

    Raises:
        ArgumentError: if the score is undefined for all clients, such as an AUROC if each of them has a single class.
    """
    score = experiment.score_name
    loss = row["validation_loss"]
    value = row[f"validation_{score}"]
    if np.isnan(value) and np.isfinite(loss):
        text = "is undefined on the validation examples of every client, such as an AUROC with a single class"
        accepted = "accepted: another score, or more validation examples"
        raise ArgumentError("score", f"{text}; {accepted}", score)
    return sign_of(score, experiment.lower_is_better) * value, loss


def hyperparameters_to_try(
    method: Any,
    hyperparameters: Mapping[str, Sequence[Any]] | str | bool,
    one_by_one: bool,
    tell_groups: bool,
    argument: str = "hyperparameters",
) -> Mapping[str, Sequence[Any]]:
    """Returns the values to try. Raises `ArgumentError` for a wrong name or value, before anything is trained."""
    if isinstance(hyperparameters, str | bool):
        return papers_hyperparameters(method, tell_groups)
    hyperparameters = with_present_names(hyperparameters, fields_of(type(method)), method.info.name)
    known = [field.name for field in dataclasses.fields(method)]
    for name, values in hyperparameters.items():
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        if name not in known or not is_list or not values:
            text = "the method has no hyperparameters"
            if known:
                text = f"accepted: values for the hyperparameters {', '.join(known)}"
            raise ArgumentError(argument, text, name)
        # combinations are checked when their runs are made
        for value in values if one_by_one else ():
            dataclasses.replace(method, **{name: value})
    return hyperparameters


@with_former_say
@checked(options=[Run], without=["seed"])
def tune(
    method: Any,
    clients: ClientsOfSplit,
    model: Any,
    local: LocalTraining | None = None,
    *,
    rounds: Rounds,
    learning_rates: Annotated[
        Sequence[float],
        hyperparameter(above=0, distinct=True, empty=True, former="rates"),  # former name
    ] = (),
    hyperparameters: Annotated[Values, hyperparameter(former="knobs")] = None,  # former name
    in_turn: bool = True,
    widen: Annotated[int, hyperparameter(at_least=0, at_most=100)] = WIDEN,
    seeds: Seeds = SEEDS,
    splits: Seeds | None = None,
    out: Folder | None = None,
    rerun: Rerun = "never",
    **options: Any,
) -> Tuning:
    """Finds the learning rate and hyperparameters with which a method scores best on the clients' validation examples.

    The score is that of `Run`: the accuracy, or another one with `score="auroc"`.

    Grid points and seeds that differ only in numbers are trained together in one kernel.

    Args:
        method: The method; hyperparameters that are not tuned keep its values.
        clients: The clients, who need validation examples; or a function split -> clients, with `splits`.
        model: See `Run`.
        local: See `Run`; with `learning_rates`, its optimizer must be a function of the learning rate.
        rounds: Number of rounds.
        learning_rates: Learning rates to try.
        hyperparameters: Values to try, by hyperparameter; "paper" or True: the hyperparameters and values that the
            method's paper tries.
        in_turn: Whether to tune the learning rate and the first hyperparameter together and then each further
            hyperparameter at the best values so far, instead of trying all combinations.
        widen: Number of values, at most, that continue a grid whose least or largest value wins, by its ratio or step,
            one after the other, as far as the hyperparameter accepts.
        seeds: See `compare`; scores are means over the seeds. Use other seeds than those that you report.
        splits: The splits of the table, if `clients` is a function; those that the seeds take in turn, each at least
            once. On other splits, test examples of the table would choose.
        out: Folder for tuning.json, which keeps the scores; they are not computed again. With `in_turn`, each further
            hyperparameter has a file tuning-HYPERPARAMETER.json.
        rerun: See `compare`.
        options: Further arguments of `Run`.

    Returns:
        The scores; `tuning.best` is the best point, and `compare([tuning, ...], ...)` uses its method and learning
            rate.

    Raises:
        ArgumentError: if the method has no such hyperparameter.
        RunError: if a run diverges at every point.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8, validation_fraction=0.5)
        >>> model = pfl.models.MLP(hidden=(4,))
        >>> values = {"mu": [0.01, 0.1]}
        >>> tuning = pfl.tune(
        ...     pfl.FedProx(), clients, model, rounds=2, hyperparameters=values, widen=0, seeds=[7]
        ... )
        >>> tuning.method.mu in values["mu"]
        True
        >>> table = pfl.compare([tuning], clients, model, rounds=2, seeds=[0])
        >>> table.rows[0]["method"], len(table.rows[0]["seeds"])
        ('fedprox', 1)
    """
    method = check_method(method)
    tell_groups = options.get("tell_groups", False)
    values = hyperparameters or {}
    hyperparameters = hyperparameters_to_try(method, values, in_turn, tell_groups)
    check_splits(clients, splits)
    if splits is None and not isinstance(clients, Federation):
        text = "validation examples of another split may be test examples of the table; accepted: the table's splits"
        raise ArgumentError("splits", f"required if clients are a function: {text}")
    trials = trials_on(list(seeds), splits)
    data_by_trial = data_to_tune_on(data_of_trials(clients, trials), trials, trials)
    default_local = local or LocalTraining()

    def make(point: Point, trial: Trial) -> Run:
        tuned_method, tuned_local = point.applied(method, default_local)
        tuned_clients = data_by_trial[trial].clients
        return Run(tuned_method, tuned_clients, model, tuned_local, seed=trial.seed, **options)

    folder = None if out is None else Path(out)
    if folder:
        files.check_writable(folder)
    with locks.locked([folder] if folder else [], ignore):
        tuning = search_in_turn(
            learning_rates,
            hyperparameters,
            trials,
            make,
            rounds,
            together=1 if in_turn else len(hyperparameters),
            folder=folder,
            rerun=rerun,
            widen=widen,
        )
    tuning = tuning.applied(method, default_local)

    # Where rows are too few to tell validation and test examples apart, a warning has said so.
    distinct = {id(split.clients): split.clients for split in data_by_trial.values()}
    tested = distinct_codes(distinct.values(), "test")
    validated = distinct_codes(distinct.values(), "validation")
    chosen_on = np.setdiff1d(validated, tested)
    return dataclasses.replace(tuning, seeds=list(seeds), chosen_on=chosen_on)


def ignore(line: str) -> None:
    """Drops a line of the lock."""


def trials_on(
    seeds: Sequence[int], splits: Sequence[int] | None, split_of_seed: Sequence[int] | None = None
) -> list[Trial]:
    """Trials to tune on, whatever the order of the table's seeds and splits.

    Args:
        seeds: Seeds of tuning.
        splits: The table's splits, which they take in turn, so that each seed and each split occurs at least once;
            None: those are the table's seeds.
        split_of_seed: The table's seeds, each of which has a split of its own, for the first of which each seed of
            tuning stands; None: all have the same clients.
    """
    if splits is None and split_of_seed is None:
        return [Trial(seed) for seed in seeds]
    if splits is None:
        in_turn = itertools.cycle(sorted(split_of_seed or ()))
        return [Trial(seed, split) for seed, split in zip(seeds, in_turn, strict=False)]

    splits = sorted(splits)
    trials = []
    for number in range(max(len(seeds), len(splits))):
        seed = seeds[number % len(seeds)]
        split = splits[number % len(splits)]
        trials.append(Trial(seed, split))
    return trials
