"""Tuning: searching for the learning rate and knobs with the best validation score."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np

from pfljax.api.run import ClientsOfSeed, Folder, Run, Say, check_method, of_each_seed, padded_alike, start
from pfljax.api.study import Rerun, in_parts
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.contract.fields import Seeds, checked, knob
from pfljax.folder import files, fingerprint, locks
from pfljax.local.training import LocalTraining
from pfljax.training.loop import Rounds, Schedule

T = TypeVar("T")
DIVERGED = (np.nan, np.nan)


class Point(NamedTuple):
    """A point of a grid.

    Attributes:
        learning_rate: Learning rate of local training; None: unchanged.
        knobs: Values of the method's knobs, by name.
    """

    learning_rate: float | None = None
    knobs: Mapping[str, Any] = {}

    def __str__(self) -> str:
        rate = {} if self.learning_rate is None else {"rate": self.learning_rate}
        values = {name: f"{v:g}" if isinstance(v, float) else str(v) for name, v in (rate | dict(self.knobs)).items()}
        return ", ".join(f"{name} {value}" for name, value in values.items())


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of a grid search.

    Attributes:
        points: The grid.
        scores: Validation accuracy after the last round, averaged over the runs of each point; for regression, the
            negative validation loss. NaN if a run diverged.
        losses: Validation losses; they break ties between equal scores.
        before: The searches for other knobs before this one, whose best values it uses.
    """

    points: list[Point]
    scores: list[float]
    losses: list[float]
    before: list[Tuning] = dataclasses.field(default_factory=list)

    @property
    def best(self) -> Point:
        """The point with the best score."""
        found = [number for number, score in enumerate(self.scores) if not np.isnan(score)]
        return self.points[max(found, key=lambda number: (self.scores[number], -self.losses[number]))]

    @property
    def at_edge(self) -> list[str]:
        """Names of the best point's values that lie at the edge of their grid, if it has three or more of them."""
        rows = [{"learning_rate": point.learning_rate, **point.knobs} for point in self.points]
        best = {"learning_rate": self.best.learning_rate, **self.best.knobs}
        values = {name: sorted({row[name] for row in rows}) for name, value in best.items() if is_number(value)}
        own = [name for name, seen in values.items() if len(seen) > 2 and best[name] in (seen[0], seen[-1])]
        return [*(self.before[-1].at_edge if self.before else ()), *own]


def is_number(value: Any) -> bool:
    """Whether a knob's value is a number; bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def grid(rates: Sequence[float] = (), knobs: Mapping[str, Sequence[Any]] | None = None) -> list[Point]:
    """Returns all combinations of learning rates and knob values."""
    names, values = list(knobs or {}), list((knobs or {}).values())
    return [
        Point(rate, dict(zip(names, chosen, strict=True)))
        for rate in (rates or [None])
        for chosen in itertools.product(*values)
    ]


def search(
    points: Sequence[Point],
    trials: Sequence[T],
    make: Callable[[Point, T], Run],
    rounds: int,
    *,
    path: Path | None = None,
    rerun: Rerun = "never",
    say: Say = lambda line: None,
) -> Tuning:
    """Scores every point on all trials. Runs that differ only in numbers share a kernel.

    Args:
        points: The grid.
        trials: Trials to score each point on, such as seeds.
        make: (point, trial) -> run. The run's clients need validation examples.
        rounds: Number of rounds.
        path: A JSON file that keeps the scores; None: none.
        rerun: "changed" scores the points again if the file has scores of something else.
        say: Called with lines about the scores, or if the file's are reused or damaged.

    Raises:
        RunError: if a run diverges at every point.
        ArgumentError: if the file has scores of something else, and `rerun` is "never".
    """
    runs = [make(point, trial) for point in points for trial in trials]
    name, about, known = runs[0].experiment.name, {}, None
    if path:
        first = [run.experiment for run in runs[: len(trials)]]
        about = {"settings": first[0].config["settings"], "data": [each.config["data"] for each in first]}
        about |= {"rounds": rounds, "trials": list(trials), "grid": [point._asdict() for point in points]}
        about = files.plain(about | {"program": first[0].program()})
        known = earlier_scores(path, about, points, rerun, say) if path.exists() else None
    if known is None:
        say(f"{name}: tuning, {len(points)} points, {len(trials)} runs each")
    found = known or Tuning(list(points), *scores_of(runs, len(trials), rounds))
    if path and known is None:
        number = lambda values: [None if np.isnan(value) else value for value in values]
        scored = {"scores": number(found.scores), "losses": number(found.losses), "best": found.best._asdict()}
        files.write_json(path, about | scored)
    say(f"{name}: {found.best} of {'; '.join(map('{} ({:.4f})'.format, points, found.scores))}")
    for value in found.at_edge:
        say(f"{name}: {value} is at the edge of the grid; a wider grid may do better")
    return found


def scores_of(runs: Sequence[Run], trials: int, rounds: int) -> tuple[list[float], list[float]]:
    """Trains the runs of each point in turn, `trials` of them. Returns the points' mean scores and losses."""
    scores = np.full((len(runs), 2), np.nan)
    groups: list[list[int]] = []
    for number, run in enumerate(runs):
        same = (each for each in groups if runs[each[0]].experiment.structure == run.experiment.structure)
        group = next(same, None)
        groups.append([number]) if group is None else group.append(number)
    for group in groups:
        scores[group] = in_parts(lambda part: final_scores(part, rounds), [runs[number] for number in group])
    means, losses = scores.reshape(-1, trials, 2).mean(axis=1).T
    if np.isnan(means).all():
        raise RunError(f"tuning: {runs[0].experiment.name} diverges at every point of the grid")
    return means.tolist(), losses.tolist()


def search_in_turn(
    rates: Sequence[float],
    knobs: Mapping[str, Sequence[Any]],
    trials: Sequence[T],
    make: Callable[[Point, T], Run],
    rounds: int,
    *,
    together: int = 1,
    folder: Path | None = None,
    **options: Any,
) -> Tuning:
    """Tunes the rate and the first knobs together, then each further knob at the best values so far.

    Args:
        rates: Learning rates to try.
        knobs: Values to try, by knob.
        trials: See `search`.
        make: See `search`.
        rounds: Number of rounds.
        together: Number of knobs that are tuned together with the rate.
        folder: Folder for the scores; see `score_files`. None: none.
        options: `rerun` and `say` of `search`.

    Returns:
        The search for the last knob; `before` has the others.
    """
    names = list(knobs)
    further = names[together:]
    paths = score_files(folder, further) if folder else [None] * (1 + len(further))
    points, found = grid(rates, {name: knobs[name] for name in names[:together]}), []
    for name, path in zip(["", *further], paths, strict=True):
        if found:
            best = found[-1].best
            points = [best._replace(knobs={**best.knobs, name: value}) for value in knobs[name]]
        tuning = search(points, trials, make, rounds, path=path, **options)
        found.append(dataclasses.replace(tuning, before=[*found]))
    return found[-1]


def score_files(folder: Path, further: Sequence[str]) -> list[Path]:
    """The files of the scores of `search_in_turn`: of its first search, and of those for further knobs."""
    return [folder / "tuning.json", *(folder / f"tuning-{name}.json" for name in further)]


def papers_knobs(method: Any) -> dict[str, Sequence[Any]]:
    """The knobs of a method, or of its class, that its paper tunes, with their values."""
    return {field.name: field.metadata["grid"] for field in dataclasses.fields(method) if field.metadata.get("grid")}


def earlier_scores(path: Path, about: dict, points: Sequence[Point], rerun: Rerun, say: Say) -> Tuning | None:
    """Reads the scores in a file; None if they must be computed again."""
    number = lambda value: np.nan if value is None else float(value)
    try:
        before = files.read_json(path)
        scores, losses = ([*map(number, before[key])] for key in ("scores", "losses"))
        Point(**before["best"])
        different = [key for key, value in about.items() if key != "program" and before[key] != value]
        different = different or fingerprint.differences(before["program"], about["program"])
    except (ValueError, TypeError, KeyError):
        say(f"{path} is damaged; tuning again")
        return None
    if different and rerun == "never":
        text = f"{path} has scores of something else ({', '.join(different)} changed); accepted: changed, to tune again"
        raise ArgumentError("rerun", text)
    if different:
        return None
    say(f"{path}: already tuned")
    return Tuning(list(points), scores, losses)


def final_scores(runs: Sequence[Run], rounds: int) -> list[tuple[float, float]]:
    """Returns (validation score, validation loss) of each run after the last round; NaN if it diverged."""
    trainer = start(padded_alike(runs), keep_going=True)
    if not trainer.play(rounds, Schedule(rounds, rounds)):
        return [DIVERGED] * len(runs)
    rows = [history.rows[-1] for history in trainer.histories]
    if "validation_loss" not in rows[0]:
        raise ArgumentError("clients", "have no validation examples to tune on; set validation_fraction above 0")
    scores = [(row.get("validation_accuracy", -row["validation_loss"]), row["validation_loss"]) for row in rows]
    return [DIVERGED if number in trainer.diverged else score for number, score in enumerate(scores)]


def checked_knobs(method: Any, knobs: Mapping[str, Sequence[Any]], one_by_one: bool) -> Mapping[str, Sequence[Any]]:
    """Returns the values to try. Raises `ArgumentError` for a wrong name or value, before anything is trained."""
    known = [field.name for field in dataclasses.fields(method)]
    for name, values in knobs.items():
        if name not in known or not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ArgumentError("knobs", f"accepted: values for the knobs {', '.join(known)}", name)
        for value in values if one_by_one else ():  # combinations are checked when their runs are made
            dataclasses.replace(method, **{name: value})
    return knobs


@checked(options=[Run], without=["seed"])
def tune(
    method: Any,
    clients: ClientsOfSeed,
    model: Any,
    local: LocalTraining | None = None,
    *,
    rounds: Rounds,
    rates: Annotated[Sequence[float], knob(above=0, distinct=True)] = (),
    knobs: Mapping[str, Sequence[Any]] | Literal["paper"] | None = None,
    in_turn: bool = False,
    seeds: Seeds = (0,),
    out: Folder | None = None,
    rerun: Rerun = "never",
    say: Say | None = None,
    **options: Any,
) -> Tuning:
    """Finds the learning rate and knobs with which a method scores best on the clients' validation examples.

    Grid points and seeds that differ only in numbers are trained together in one kernel.

    Args:
        method: The method; knobs that are not tuned keep its values.
        clients: See `compare`; they need validation examples.
        model: See `Run`.
        local: See `Run`; with `rates`, its optimizer must be a function of the learning rate.
        rounds: Number of rounds.
        rates: Learning rates to try.
        knobs: Values to try, by knob; "paper": the knobs and values that the method's paper tries.
        in_turn: Whether to tune the rate and the first knob together and then each further knob at the best values so
            far, instead of trying all combinations.
        seeds: See `compare`; scores are means over the seeds.
        out: Folder for tuning.json, which keeps the scores; they are not computed again. With `in_turn`, each further
            knob has a file tuning-KNOB.json.
        rerun: See `compare`.
        say: Called with lines about the scores, such as `print`.
        options: Further arguments of `Run`.

    Returns:
        The scores; `tuning.best` is the best point.

    Raises:
        ArgumentError: if the method has no such knob.
        RunError: if a run diverges at every point.
    """
    check_method(method)
    knobs = papers_knobs(method) if isinstance(knobs, str) else checked_knobs(method, knobs or {}, in_turn)
    of_seed, default = of_each_seed(clients, seeds), local or LocalTraining()

    def make(point: Point, seed: int) -> Run:
        rate = {} if point.learning_rate is None else {"learning_rate": point.learning_rate}
        tried, how = dataclasses.replace(method, **point.knobs), dataclasses.replace(default, **rate)
        return Run(tried, of_seed[seed], model, how, seed=seed, **options)

    folder, quiet = None if out is None else Path(out), lambda line: None
    if folder:
        files.check_writable(folder)
    how = {"together": 1 if in_turn else len(knobs), "folder": folder, "rerun": rerun, "say": say or quiet}
    with locks.locked([folder] if folder else [], quiet):
        return search_in_turn(rates, knobs, list(seeds), make, rounds, **how)
