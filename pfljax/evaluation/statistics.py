"""Statistics over runs: deviations, intervals, paired differences and ranks of methods.

Every deviation over runs is the sample deviation (ddof = 1, as in pandas), and none is given for a single run.
Deviations over the clients of one run are in `pfljax.evaluation.metrics`.

Intervals, differences and ranks need independent repetitions, the units. With several splits of the data these are the
splits, each with the mean over its seeds, because runs on one split share their clients. Otherwise they are the seeds.
If all of these have the same split, the intervals do not cover the draw of the clients' data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.evaluation import rounding

LEVEL = 0.05  # two-sided; intervals cover 1 - LEVEL
FEWEST = 6  # units of a sign-flip test that can reach LEVEL: its smallest p is 2^(1 - n)
MOST = 20  # units of an exact sign-flip test, which adds up 2^(n - 1) sums
RESAMPLES = 9999  # random flips of tests with more units


class Trial(NamedTuple):
    """The seeds of a run.

    Attributes:
        seed: Seed for initial models, cohorts, mini-batches and sampling.
        split: Seed that divides examples among clients; None: it is `seed`.
    """

    seed: int
    split: int | None = None

    @property
    def data_seed(self) -> int:
        """The seed that divides examples among clients."""
        return self.seed if self.split is None else self.split

    @property
    def folder(self) -> str:
        """Name of the run's folder."""
        return f"seed-{self.seed}" if self.split is None else f"split-{self.split}-seed-{self.seed}"


Scores = Mapping[Trial, float]  # of one method
Columns = tuple[list[str], list[list[str]]]  # headings, and cells by row


class RunSummary(NamedTuple):
    """A number over runs. Runs in which it is NaN are left out."""

    mean: float  # the mean; NaN without runs
    std: float  # the sample deviation; NaN for fewer than two runs
    runs: int  # the number of runs

    @classmethod
    def from_values(cls, values: Sequence[float | None] | np.ndarray) -> RunSummary:
        """Summarizes a number's values (n,), one per run."""
        known = np.array(values, float)
        known = known[~np.isnan(known)]
        mean = float(known.mean()) if known.size else math.nan
        return cls(mean=mean, std=float(deviation(known)), runs=known.size)

    def text(self, number: Callable[[float], str]) -> str:
        """Formats as "85.1 ± 0.3 (5)", or as "85.1" for a single run."""
        if not self.runs:
            return "-"
        mean = number(self.mean)
        return f"{mean} ± {number(self.std)} ({self.runs})" if self.runs > 1 else mean


class Difference(NamedTuple):
    """A method's paired difference from another."""

    # the mean over units of the method's score minus the other's; NaN without common units
    difference: float
    difference_low: float  # lower end of its 95 % interval; NaN for fewer than two units
    difference_high: float  # upper end
    p: float  # of a two-sided sign-flip test; NaN for fewer than two units
    wins: int  # number of units in which the method is better
    ties: int  # number of units in which both are equal
    losses: int  # number of units in which it is worse

    def text(self, number: Callable[[float], str]) -> str:
        """Formats as "+1.2 [+0.3, +2.1]", without the interval for a single unit."""
        return signed_interval(self.difference, self.difference_low, self.difference_high, number)

    @property
    def separates(self) -> bool:
        """Whether the two methods differ at the level of 5 %.

        From 6 units on, the sign-flip test decides. With fewer it cannot reach 5 %, and the t interval decides.
        """
        if self.wins + self.ties + self.losses >= FEWEST:
            return self.p <= LEVEL
        return self.difference_low > 0 or self.difference_high < 0


def deviation(values: np.ndarray | Sequence[float]) -> np.ndarray:
    """Returns the sample deviation (ddof = 1) of values (n, ...) of n runs; NaN for fewer than two."""
    values = np.asarray(values, float)
    return values.std(axis=0, ddof=1) if len(values) > 1 else np.full(values.shape[1:], math.nan)


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Returns Student's 95 % interval of the mean of independent values (n,); NaN for fewer than two."""
    from scipy import special  # slow to import

    n = len(values)
    if n < 2:
        return math.nan, math.nan
    mean = np.mean(values)
    quantile = special.stdtrit(n - 1, 1 - LEVEL / 2)
    half = quantile * deviation(values) / math.sqrt(n)
    return float(mean - half), float(mean + half)


def sign_flip(
    values: Sequence[float] | np.ndarray, errors: Sequence[float] | np.ndarray | float = 0.0
) -> float:
    """Returns the two-sided p of the hypothesis that the values (n,) are symmetric about 0.

    It is NaN for fewer than two values, and if one is infinite. The p is the share of flips of signs whose sum is at
    least as far from 0 as that of the values. A sum that is equal up to rounding counts. The p is exact for up to 20
    values; more are flipped at random.

    Args:
        values: Differences of scores, one per unit.
        errors: Their errors by rounding, which are relative to the scores (see `rounding.error_of`).
    """
    values = np.asarray(values, float)
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan

    # The error of a sum is that of its terms, and of their addition.
    addition = 2 * len(values) * np.finfo(float).eps * np.abs(values)
    error = np.sum(addition + errors)
    extreme = abs(values.sum()) - error

    if len(values) <= MOST:
        is_extreme = np.abs(sums_of_flips(values)) >= extreme
        return float(is_extreme.mean())

    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(RESAMPLES, len(values)))
    is_extreme = np.abs(signs @ values) >= extreme
    return float(is_extreme.sum() + 1) / (
        RESAMPLES + 1
    )  # the values themselves are one of the flips


def sums_of_flips(values: np.ndarray) -> np.ndarray:
    """Returns the sums (2^(n-1),) of values (n,) with all signs, of which the first one is +.

    The others are the same with the opposite sign.
    """
    sums = values[:1]
    for value in values[1:]:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def in_units(scores: Scores) -> dict[int | None, float]:
    """Returns a method's score in each unit: the mean of each split if there are several, else of each seed."""
    known = {}
    for trial, score in scores.items():
        if score is not None and not math.isnan(score):
            known[trial] = score

    by_split = has_splits(known)
    scores_by_unit: dict[int | None, list[float]] = {}
    for (seed, split), score in known.items():
        unit = split if by_split else seed
        scores_by_unit.setdefault(unit, []).append(score)
    return {unit: float(np.mean(unit_scores)) for unit, unit_scores in scores_by_unit.items()}


def has_splits(trials: Iterable[Trial]) -> bool:
    """Whether runs differ in their splits, which are then the units."""
    return len({split for _, split in trials}) > 1


class Paired(NamedTuple):
    """A method's scores minus another's, in units.

    Attributes:
        gains: (n,) the differences; exactly 0 where the scores are equal up to rounding.
        errors: (n,) the largest errors of the differences by rounding.
    """

    gains: np.ndarray
    errors: np.ndarray


def paired(scores: Scores, others: Scores) -> Paired:
    """Returns a method's score minus another's in each unit of their common trials."""
    differences = {}
    errors = {}
    for trial in scores:
        if trial in others:
            difference = scores[trial] - others[trial]
            error = float(rounding.error_of(scores[trial], others[trial]))
            differences[trial] = difference
            errors[trial] = math.nan if math.isnan(difference) else error

    gains = np.array([*in_units(differences).values()])
    gain_errors = np.array([*in_units(errors).values()])
    is_zero = np.abs(gains) <= gain_errors
    return Paired(np.where(is_zero, 0.0, gains), gain_errors)


def difference(scores: Scores, others: Scores, sign: int = 1) -> Difference:
    """Compares a method with another in the units of their common trials; `sign` is -1 if low scores are good."""
    gains, errors = paired(scores, others)
    low, high = interval(gains)
    better = sign * gains
    return Difference(
        difference=RunSummary.from_values(gains).mean,
        difference_low=low,
        difference_high=high,
        p=sign_flip(gains, errors),
        wins=int((better > 0).sum()),
        ties=int((better == 0).sum()),
        losses=int((better < 0).sum()),
    )


def ranks(scores: Mapping[str, Scores], sign: int = 1) -> dict[str, int | None]:
    """Ranks methods by their scores; those that do not separate from the best of their rank share it.

    Methods are sorted by mean. The first opens rank 1. Each next one shares the rank if it does not separate from the
    method that opened it (see `Difference.separates`). Otherwise it opens a rank, which is its position in the order,
    such as 1, 1, 3. Methods whose means are equal up to rounding have one rank: they share the rank before unless all
    of them separate, and the first one given opens theirs. The levels are not adjusted for the number of comparisons,
    and a shared rank does not show that methods are equal. A method with fewer than two units has no rank (None).
    `sign` is -1 if low scores are good.
    """
    names = [name for name in scores if len(in_units(scores[name])) > 1]
    means = [RunSummary.from_values([*scores[name].values()]).mean for name in names]
    sort_keys = dict(zip(names, -sign * rounding.comparable(means), strict=True))
    in_order = sorted(names, key=sort_keys.__getitem__)

    rank_by_method: dict[str, int | None] = dict.fromkeys(scores)
    rank = 0
    first = ""  # the method that opened the rank
    position = 1
    for _, group in itertools.groupby(in_order, key=sort_keys.__getitem__):
        equal = [*group]
        if not first or all(
            difference(scores[name], scores[first], sign).separates for name in equal
        ):
            rank = position
            first = equal[0]
        rank_by_method |= dict.fromkeys(equal, rank)
        position += len(equal)
    return rank_by_method


def standings(
    scores: Mapping[str, Scores], sign: int = 1, reference: str | None = None
) -> dict[str, dict[str, Any]]:
    """Returns each method's entries of a table besides its mean and deviation; `sign` is -1 if low scores are good.

    By method "unit" ("split" or "seed"), "units" (their number), "interval_low" and "interval_high" (of the mean),
    "rank" and, with a reference method, "reference" and the entries of `Difference`, which are None for the reference.
    """
    ranked = ranks(scores, sign)
    entries = {}
    for name, method_scores in scores.items():
        units = in_units(method_scores)
        low, high = interval([*units.values()])
        entry: dict[str, Any] = {
            "unit": "split" if has_splits(method_scores) else "seed",
            "units": len(units),
            "interval_low": low,
            "interval_high": high,
            "rank": ranked[name],
        }
        if reference is not None and reference in scores:
            entry["reference"] = reference
            fields = dict.fromkeys(Difference._fields)
            if name != reference:
                fields = difference(method_scores, scores[reference], sign)._asdict()
            entry |= fields
        entries[name] = entry
    return entries


def find_reference(reference: str | None, methods: Mapping[str, str]) -> str | None:
    """Returns the title of the method that the others of a table are compared with; None: there is none.

    Args:
        reference: The title or the name of the method, in upper or lower case; None: there is none.
        methods: The name of each method of the table by its title.

    Raises:
        ArgumentError: if no method of the table has this title or name, or if several have it.
    """
    if reference is None or reference in methods:
        return reference
    wanted = reference.casefold()
    same = [title for title in methods if title.casefold() == wanted]
    same = same or [title for title, name in methods.items() if name.casefold() == wanted]
    if len(same) == 1:
        return same[0]
    if same:
        text = f"is the name of several methods; accepted: one of {', '.join(same)}"
    else:
        text = f"accepted: a method of the table: {', '.join(methods)}"
    raise ArgumentError("reference", text, reference)


def compared(
    rows: Sequence[Mapping[str, Any]], score: str, sign: int, reference: str | None = None
) -> list[dict[str, Any]]:
    """Adds the entries of `standings` to the rows of a table, by a score.

    Args:
        rows: Rows with "method" and "seeds": for each run its "seed", its "split" if it has one, and its scores, which
            are None or NaN if they are undefined.
        score: The name of the score.
        sign: 1 if high scores are good, -1 if low ones are.
        reference: The method that the others are compared with; None: none.
    """
    scores = {}
    for row in rows:
        method_scores = {}
        for run in row["seeds"]:
            trial = Trial(run["seed"], run.get("split"))
            value = run.get(score)
            method_scores[trial] = math.nan if value is None else value
        scores[row["method"]] = method_scores
    entries = standings(scores, sign, reference)
    return [{**row, **entries[row["method"]]} for row in rows]


def columns(rows: Sequence[Mapping[str, Any]], number: Callable[[float], str]) -> Columns:
    """Returns the columns of intervals, ranks and differences, from rows with the entries of `standings`."""
    interval_heads, interval_cells = interval_columns(rows, number)
    difference_heads, difference_cells = difference_columns(rows, number)
    cells = zip(interval_cells, difference_cells, strict=True)
    return interval_heads + difference_heads, [left + right for left, right in cells]


def interval_columns(rows: Sequence[Mapping[str, Any]], number: Callable[[float], str]) -> Columns:
    """Returns the columns of intervals and ranks; none without several units (see `columns`)."""
    if not any(row.get("units", 0) > 1 for row in rows):
        return [], [[] for _ in rows]

    cells = []
    for row in rows:
        span = between(row["interval_low"], row["interval_high"], number)
        cells.append([span, str(row["rank"] or "-")])
    return ["95 % interval", "rank"], cells


def difference_columns(
    rows: Sequence[Mapping[str, Any]], number: Callable[[float], str]
) -> Columns:
    """Returns the columns of differences; none without a reference (see `columns`)."""
    references = [row["reference"] for row in rows if row.get("reference")]
    if not references:
        return [], [[] for _ in rows]

    cells = []
    for row in rows:
        if row.get("difference") is None:
            cells.append(["-"] * 3)
            continue
        entries = {name: row[name] for name in Difference._fields}
        compared_with = Difference(**entries)
        counts = f"{compared_with.wins}/{compared_with.ties}/{compared_with.losses}"
        cells.append([compared_with.text(number), p_text(compared_with.p), counts])
    return [f"over {references[0].split('/')[-1]}", "p", "win/tie/loss"], cells


def between(low: float, high: float, number: Callable[[float], str]) -> str:
    """Formats an interval as "[84.2, 86.0]"."""
    return "-" if math.isnan(low) else f"[{number(low)}, {number(high)}]"


def signed_text(value: float, number: Callable[[float], str]) -> str:
    """Formats a difference with its sign; without one if it rounds to 0."""
    text = number(value)
    if float(text) > 0:
        return f"+{text}"
    return text if float(text) else text.lstrip("-")


def signed_interval(mean: float, low: float, high: float, number: Callable[[float], str]) -> str:
    """Formats a difference and its interval as "+1.2 [+0.3, +2.1]", without the interval if there is none."""

    def signed(value: float) -> str:
        return signed_text(value, number)

    if math.isnan(mean):
        return "-"
    span = between(low, high, signed)
    return signed(mean) if span == "-" else f"{signed(mean)} {span}"


def p_text(p: float) -> str:
    """Formats a p with two digits."""
    return "-" if math.isnan(p) else f"{p:.2g}"


def explanation(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns sentences on what intervals and ranks rest on, from rows of `standings`; "" without intervals."""
    known = [row for row in rows if row.get("units", 0) > 1]
    if not known:
        return ""
    # What intervals are over.
    counts = sorted({(row["unit"], row["units"]) for row in known})
    units = " or ".join(f"{number} {unit}s" for unit, number in counts)
    if any(unit == "split" for unit, _ in counts):
        units += ", each with the mean over its seeds"

    # How methods are separated.
    test = "sign-flip tests"
    if any(number < FEWEST for _, number in counts):
        test = f"t intervals of the paired differences; sign-flip tests need {FEWEST} or more to reach 5 %"

    deviations = "± is the sample deviation over runs, whose number is in brackets."
    intervals = f"Intervals are over {units}."
    ranking = f"Methods that do not separate at 5 % share a rank (by {test})."
    return f"{deviations} {intervals} {ranking}"
