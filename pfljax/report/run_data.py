"""What the files of a run hold, as its pictures and its page need it."""

from __future__ import annotations

import dataclasses
import functools
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pfljax.contract.errors import RunError
from pfljax.contract.types import Topology
from pfljax.evaluation.metrics import is_percent, score_of_task, sign_of
from pfljax.folder import files, former

BYTES = ("bytes_down", "bytes_up")  # columns of metrics.jsonl: per client, summed over rounds
# Columns of metrics.jsonl that every method has, besides clients' scores.
COMMON = ("round", "seconds", "simulated_seconds", "train_loss", *BYTES, "validation_")


class Score(NamedTuple):
    """A score that each client has: its name in the run's files, what it is called, whether it is in percent.

    Its sign is 1 if high values are good, and -1 if low ones are.
    """

    name: str
    label: str
    percent: bool
    sign: int


def over_clients(
    reduce: Callable[..., np.ndarray], values: Float[np.ndarray, "T K"], *args: Any
) -> np.ndarray:
    """Reduces scores over the clients that have any, such as by `np.nanmean`. Shape (T,); NaN for rounds without."""
    some = ~np.isnan(values).all(axis=1)  # a metric may be newer than the first rounds
    scored = values[some][:, ~np.isnan(values[some]).all(axis=0)]
    reduced = np.full(len(values), np.nan)
    if scored.size:
        reduced[some] = reduce(scored, *args, axis=1)
    return reduced


def score_of(summary: Mapping[str, Any]) -> str:
    """Returns the name of the score that a run's clients are ranked by; for an old run, that of its task."""
    return summary.get("score") or score_of_task(summary.get("task", "classification"))


def score_sign(summary: Mapping[str, Any]) -> int:
    """Returns 1 if high values of a run's score are good, and -1 if low ones are."""
    return sign_of(score_of(summary), summary.get("lower_is_better", ()))


def label_of(score: str) -> str:
    """Returns how a score is called in headings and on axes, such as "test accuracy"."""
    return f"test {score.replace('_', ' ')}"


def number_of(percent: bool) -> Callable[[float], str]:
    """Returns how a score is formatted: as a number of percents with one decimal, or with four decimals."""
    return (lambda value: f"{100 * value:.1f}") if percent else (lambda value: f"{value:.4f}")


def evenly(num: int, most: int) -> Int[np.ndarray, " n"]:
    """Returns at most `most` of `num` places, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, num - 1, min(num, most)).round().astype(int))


def validated(summary: Mapping[str, Any]) -> bool:
    """Whether the run's best round was chosen on validation examples."""
    return str((summary.get("best") or {}).get("selected_by", "")).startswith("validation")


def measures(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Float[np.ndarray, " n"]]:
    """Returns what a comparison says of runs after their last rounds, by their summary.json; NaN if unknown.

    "score" (see `score_of`), "decile" (the score that a tenth of the clients are worse than; not for the loss), "best"
    (the score of the round that is best on validation examples, if there are any), "unseen" (that of clients who never
    trained), "gradients" and "megabytes" (per client and round), "seconds" (per round), "simulated" (seconds in all),
    and further metrics by name.
    """
    score = score_of(summaries[0])

    def rounds(summary):
        return max(summary["last"]["round"], 1)

    read: dict[str, Callable[[Mapping], Any]] = {
        "score": lambda summary: summary["last"].get(score),
        "decile": lambda summary: summary["last"].get(f"{score}_bottom_decile"),
        "best": lambda summary: summary["best"].get(score) if validated(summary) else None,
        "unseen": lambda summary: (summary.get("unseen") or {}).get(score),
        "gradients": lambda summary: summary.get("gradients_per_round"),
        "megabytes": lambda summary: (
            sum(summary["last"][name] for name in BYTES) / rounds(summary) / 1e6
        ),
        "seconds": lambda summary: summary.get("seconds_per_round"),
        "simulated": lambda summary: summary["last"].get("simulated_seconds"),
    }
    own_metrics = [name for summary in summaries for name in summary.get("metrics", ())]
    read |= {name: lambda summary, name=name: summary["last"].get(name) for name in own_metrics}
    return {
        name: np.array([read_value(summary) for summary in summaries], float)
        for name, read_value in read.items()
    }


def over_rounds(
    rows: Sequence[Sequence[Mapping]], name: str
) -> tuple[list[int], Float[np.ndarray, "n T"]]:
    """Returns the rounds (T,) in which all runs were evaluated, and an entry of their metrics.jsonl `rows` in them.

    The entry is NaN where it is missing.
    """
    values_by_round = [{row["round"]: row.get(name) for row in run_rows} for run_rows in rows]
    rounds = sorted(set.intersection(*map(set, values_by_round)))
    return rounds, np.array(
        [[values[number] for number in rounds] for values in values_by_round], float
    )


@dataclasses.dataclass(frozen=True, repr=False)
class RunData:
    """Data of a run."""

    summary: Mapping[str, Any]  # content of summary.json
    rows: Sequence[Mapping[str, Any]]  # rows of metrics.jsonl, one dict per evaluated round
    # Content of results.npz: "rounds" (T,) and scores by split, such as "accuracy_test" (T, K)
    results: Mapping[str, np.ndarray]
    # Content of collaboration.npz: "round" (T,), "index" and "weights" (T, K, J), "topology" and, if available,
    # "group" (K,), "target" (K,), "labels" (K, C) and "affinity" (T, K, K)
    used: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # content of curve.npz, if the data are a curve
    curve: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # content of config.json

    @classmethod
    def read(cls, directory: Path):  # returns the class's own type
        """Reads the run in a folder. Raises `RunError` if the files are damaged or do not belong to a run."""

        def arrays(
            name: str, read: Callable[[Path], dict[str, np.ndarray]]
        ) -> dict[str, np.ndarray]:
            return read(directory / name) if (directory / name).exists() else {}

        try:
            run = cls(
                summary=former.read_summary(directory / "summary.json"),
                rows=files.read_jsonl(directory / "metrics.jsonl"),
                results=arrays("results.npz", files.read_npz),
                used=arrays("collaboration.npz", former.read_collaboration),
                curve=arrays("curve.npz", files.read_npz),
                config=former.read_config(directory / "config.json"),
            )
            _ = run.summary["method"], run.summary["last"]["round"], run.test
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            EOFError,
            zipfile.BadZipFile,
        ) as error:
            message = (
                f"{directory}: the run's files are damaged, or this is not a run's folder: {error}"
            )
            raise RunError(message) from error
        return run

    @property
    def score(self) -> Score:
        """The score that clients are ranked by; see `score_of`."""
        return self._score(score_of(self.summary))

    @functools.cached_property
    def scores(self) -> dict[str, Score]:
        """All scores that clients have, by name, `score` first."""
        names = sorted(
            name.removesuffix("_test") for name in self.results if name.endswith("_test")
        )
        return {name: self._score(name) for name in dict.fromkeys([self.score.name, *names])}

    def _score(self, name: str) -> Score:
        sign = sign_of(name, self.summary.get("lower_is_better", ()))
        return Score(name, label_of(name), is_percent(name), sign)

    @property
    def rounds(self) -> Int[np.ndarray, " T"]:
        """The evaluated rounds."""
        return np.asarray(self.results["rounds"])

    @property
    def test(self) -> Float[np.ndarray, "T K"]:
        """Each client's score on its test examples, by evaluated round."""
        return self.results[f"{self.score.name}_test"]

    def mean(self, score: Score) -> Float[np.ndarray, " T"]:
        """The mean of a score over clients, weighted by numbers of examples, by evaluated round."""
        if len(self.rows) == len(self.test):
            return np.array([row.get(score.name, np.nan) for row in self.rows], float)
        return over_clients(np.nanmean, self.results[f"{score.name}_test"])

    @functools.cached_property
    def client_rows(self) -> dict[int, Mapping[str, Any]]:
        """The per-client rows of summary.json, by client."""
        return {row["client"]: row for row in self.summary.get("per_client") or []}

    @functools.cached_property
    def group(self) -> Int[np.ndarray, " K"]:
        """Each client's true group; all zero if unknown."""
        if "group" in self.used:
            return np.asarray(self.used["group"])
        return np.array([self.client_rows.get(k, {}).get("group", 0) for k in self.ids.tolist()])

    @functools.cached_property
    def target(self) -> Int[np.ndarray, " K"]:
        """The group that each client's models should fit: that of its test data."""
        return np.asarray(self.used.get("target", self.group))

    @functools.cached_property
    def has_groups(self) -> bool:
        """Whether the clients are known to have several true groups."""
        return len(np.unique(self.target)) > 1

    @property
    def knows_groups(self) -> bool:
        """Whether the clients' true groups are known."""
        return "group" in self.used or any("group" in row for row in self.client_rows.values())

    @property
    def num_models(self) -> int | None:
        """Number of shared models that clients use; None if models are the clients' own."""
        return int(np.max(self.used["index"])) + 1 if self._topology.on_server else None

    @property
    def chooses(self) -> bool:
        """Whether clients choose among models. With only own models, or one model for all, there is nothing to plot."""
        return (
            "weights" in self.used and self._topology.moves and int(np.max(self.used["index"])) > 0
        )

    @property
    def _topology(self) -> Topology:
        return Topology(str(self.used["topology"]))

    @property
    def all_scored(self) -> bool:
        """Whether all clients were scored, and not only a sample of them."""
        return "clients" not in self.used

    @property
    def ids(self) -> Int[np.ndarray, " K"]:
        """The scored clients: all, or a sample."""
        return np.asarray(
            self.used.get("clients", self.results.get("clients", np.arange(self.test.shape[1])))
        )

    @property
    def megabytes(self) -> Float[np.ndarray, " T"] | None:
        """Megabytes received and sent per client up to each evaluated round; None if nothing was sent or counted."""
        sent = (
            np.array(
                [row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in self.rows], float
            )
            / 1e6
        )
        return sent if len(sent) == len(self.test) and sent.any() else None

    @property
    def simulated(self) -> Float[np.ndarray, " T"] | None:
        """Simulated seconds up to each evaluated round; None without a clock."""
        seconds = np.array([row.get("simulated_seconds", np.nan) for row in self.rows], float)
        return seconds if len(seconds) == len(self.test) and np.isfinite(seconds).all() else None

    @property
    def drifts(self) -> list[int]:
        """The last rounds before changes of the clients' data."""
        return sorted({entry["round"] for entry in self.summary.get("drift") or ()})

    @property
    def measured(self) -> dict[str, Float[np.ndarray, " T"]]:
        """The method's own metrics over the evaluated rounds, by name; NaN for the initial models."""
        last = self.rows[-1] if len(self.rows) == len(self.test) else {}
        own_metrics = [name for name in last if not name.startswith((*COMMON, *self.scores))]
        return {
            name: np.array([row.get(name, np.nan) for row in self.rows], float)
            for name in own_metrics
        }
