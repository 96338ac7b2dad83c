"""Deviations, intervals, paired differences and ranks, by hand."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from pfljax.contract.errors import ArgumentError
from pfljax.evaluation import statistics
from pfljax.evaluation.statistics import RunSummary

# Upper 2.5 % points of Student's t distribution, from a printed table, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 29: 2.045}
PERCENT = "{:.1f}".format


def of_seeds(*values):
    return {(seed, None): value for seed, value in enumerate(values)}


def of_splits(values):
    """Scores by split and seed: an array (splits, seeds)."""
    return {(seed, split): value for (split, seed), value in np.ndenumerate(np.asarray(values))}


def test_a_deviation_is_that_of_the_sample():
    # mean 3; squares 4 + 1 + 9 = 14, over 3 - 1
    found = RunSummary.from_values([1.0, 2.0, None, 6.0, math.nan])
    assert found == (3.0, pytest.approx(math.sqrt(7)), 3)
    assert found.text(PERCENT) == "3.0 ± 2.6 (3)"
    np.testing.assert_allclose(statistics.deviation([[0.0, 1.0], [2.0, 1.0]]), [math.sqrt(2), 0])


def test_a_single_run_has_no_deviation():
    one = RunSummary.from_values([0.5])
    none = RunSummary.from_values([math.nan])
    assert (one.mean, one.runs) == (0.5, 1) and math.isnan(one.std) and one.text(PERCENT) == "0.5"
    assert none.runs == 0 and none.text(PERCENT) == "-"
    assert np.isnan(statistics.deviation(np.ones((1, 3)))).all()
    assert np.isnan(statistics.interval([0.5])).all() and math.isnan(statistics.sign_flip([0.5]))


@pytest.mark.parametrize("freedom", STUDENT)
def test_an_interval_is_student_s(freedom):
    values = np.random.default_rng(freedom).normal(5, 2, size=freedom + 1)
    spread = math.sqrt(((values - values.mean()) ** 2).sum() / freedom)
    half = STUDENT[freedom] * spread / math.sqrt(freedom + 1)
    low, high = statistics.interval(values)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-3)
    assert statistics.interval(3 * values - 1) == pytest.approx((3 * low - 1, 3 * high - 1))


@pytest.mark.parametrize("number", [2, 5, 6, 10])
def test_differences_of_one_sign_have_the_smallest_p(number):
    """Of 2^n flips, only the one of all signs is as extreme: p = 2 / 2^n."""
    values = np.arange(1.0, number + 1)
    assert (
        statistics.sign_flip(values)
        == statistics.sign_flip(-values)
        == pytest.approx(2 / 2**number)
    )


def test_a_sign_flip_test_counts_the_flips_that_are_as_extreme():
    # 3 + 2 - 1 = 4: of the eight sums, 6 and 4 are at least 4, and -6 and -4 at most -4.
    assert statistics.sign_flip([3.0, 2.0, -1.0]) == pytest.approx(4 / 8)
    assert statistics.sign_flip([0.0, 0.0, 0.0]) == 1


def test_splits_are_the_unit_if_there_are_several():
    ours = np.array([[0.5, 0.7], [0.8, 0.8], [0.2, 0.6]])
    theirs = np.array([[0.5, 0.5], [0.6, 0.8], [0.3, 0.5]])
    gains = (ours - theirs).mean(axis=1)  # 0.1, 0.1 and 0
    found = statistics.difference(of_splits(ours), of_splits(theirs))
    assert found.difference == pytest.approx(gains.mean())
    half = STUDENT[2] * gains.std(ddof=1) / math.sqrt(3)
    assert (found.difference_low, found.difference_high) == pytest.approx(
        (gains.mean() - half, gains.mean() + half), abs=1e-4
    )
    assert (found.wins, found.ties, found.losses) == (2, 1, 0)
    assert found.p == pytest.approx(4 / 8)  # the sign of 0 does not matter
    # On a single split the seeds are the units, and trials that only one method has are left out.
    one = {(seed, 7): value for seed, value in enumerate([0.5, 0.7, 0.9])}
    other = {(seed, 7): 0.6 for seed in (0, 1, 5)}
    found = statistics.difference(one, other)
    assert (found.wins, found.ties, found.losses) == (
        1,
        0,
        1,
    ) and found.difference == pytest.approx(0)


def test_a_difference_turns_its_sign_with_the_methods_and_its_wins_with_the_score():
    ours = of_seeds(3.0, 5.0, 2.0)
    theirs = of_seeds(1.0, 1.0, 4.0)
    one = statistics.difference(ours, theirs)
    other = statistics.difference(theirs, ours)
    assert (one.difference, one.difference_low) == pytest.approx(
        (-other.difference, -other.difference_high)
    )
    assert (one.p, one.wins, one.losses) == (other.p, other.losses, other.wins) == (one.p, 2, 1)
    assert statistics.difference(ours, theirs, sign=-1)[4:] == (1, 0, 2)  # low losses are good
    again = {trial: ours[trial] for trial in reversed(ours)}
    assert statistics.difference(again, theirs) == pytest.approx(one)
    assert math.isnan(statistics.difference(ours, {}).difference)


def test_methods_that_do_not_separate_share_a_rank():
    noise = np.array([0.01, -0.01, 0.02, -0.02, 0.0, 0.01])
    methods = {
        "worst": of_seeds(*(0.2 + 0 * noise)),
        "first": of_seeds(*(0.9 + 0 * noise)),
        "close": of_seeds(*(0.899 + noise)),
        "lower": of_seeds(*(0.5 + noise)),
    }
    assert statistics.ranks(methods) == {"first": 1, "close": 1, "lower": 3, "worst": 4}
    assert statistics.ranks(methods, sign=-1) == {"worst": 1, "lower": 2, "close": 3, "first": 3}
    # Adding a number to a unit's scores changes no rank.
    shifted = {
        name: {trial: score + trial[0] for trial, score in own.items()}
        for name, own in methods.items()
    }
    assert statistics.ranks(shifted) == statistics.ranks(methods)


def test_a_sign_flip_test_decides_from_six_units_on():
    gains = np.array([1.0, 1.2, 0.9, 1.1, 1.0, 0.3])

    def p_of(values):
        return statistics.difference(of_seeds(*values), of_seeds(*(0 * values)))

    five = p_of(gains[:5])
    six = p_of(gains)
    mixed = p_of(np.array([9.0, 9, 9, 9, 9, -1]))
    assert five.p == 2 / 32 > 0.05 and five.separates  # by the t interval
    assert six.p == 2 / 64 and six.separates
    assert mixed.difference_low > 0 and mixed.p == 4 / 64 and not mixed.separates


def test_a_method_with_one_run_has_no_rank_and_no_interval():
    found = statistics.standings({"a": of_seeds(0.5), "b": of_seeds(0.6, 0.7)}, reference="b")
    assert (found["a"]["rank"], found["b"]["rank"]) == (None, 1)
    assert found["a"]["difference"] == pytest.approx(-0.1) and math.isnan(
        found["a"]["interval_low"]
    )
    assert found["b"]["difference"] is None
    alone = [*statistics.standings({"a": of_seeds(0.5)}).values()]
    assert statistics.columns(alone, PERCENT) == ([], [[]]) and statistics.explanation(alone) == ""
    pair = [*statistics.standings({"a": of_seeds(3.0), "b": of_seeds(1.0)}, reference="b").values()]
    assert statistics.columns(pair, PERCENT)[1] == [["+2.0", "-", "1/0/0"], ["-"] * 3]


def test_a_table_shows_intervals_ranks_and_differences():
    scores = {"a": of_splits([[2.0, 4.0], [6.0, 4.0]]), "b": of_splits([[2.0, 2.0], [1.0, 1.0]])}
    rows = [*statistics.standings(scores, reference="b").values()]
    heads, body = statistics.columns(rows, PERCENT)
    assert heads == ["95 % interval", "rank", "over b", "p", "win/tie/loss"]
    # Splits: a has 3 and 5, so 4 and a half of 12.706; b has 2 and 1; the differences are 1 and 4.
    assert body[0] == ["[-8.7, 16.7]", "1", "+2.5 [-16.6, +21.6]", "0.5", "2/0/0"]
    assert body[1] == ["[-4.9, 7.9]", "1", "-", "-", "-"]
    assert "over 2 splits, each with the mean over its seeds" in statistics.explanation(rows)
    assert "need 6 or more" in statistics.explanation(rows)
    assert [statistics.signed_text(value, PERCENT) for value in (1.25, -0.01, -2)] == [
        "+1.2",
        "0.0",
        "-2.0",
    ]


def test_deviations_over_runs_are_computed_in_one_place():
    """NumPy's own divide by n. Those of a run's clients are in `pfljax.evaluation.metrics`."""
    root = Path(__file__).parents[2]
    folders = [
        root / "experiments",
        *(root / "pfljax" / name for name in ("api", "cli", "report", "training")),
    ]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    own = re.compile(r"(?<!`\.)\b((nan)?(std|var)|pstdev)\(")  # but in docstrings
    assert len(files) > 50 and [path for path in files if own.search(path.read_text())] == []


def test_a_reference_is_a_title_or_the_name_of_a_method_in_any_case():
    methods = {"Local": "local", "Mine": "fedavg", "mu 1": "fedprox", "mu 2": "fedprox"}
    found = [
        statistics.find_reference(name, methods) for name in ("local", "LOCAL", "FedAvg", None)
    ]
    assert found == ["Local", "Local", "Mine", None]
    with pytest.raises(ArgumentError, match="one of mu 1, mu 2"):
        statistics.find_reference("fedprox", methods)
    with pytest.raises(ArgumentError, match="a method of the table: Local, Mine, mu 1, mu 2"):
        statistics.find_reference("ditto", methods)
