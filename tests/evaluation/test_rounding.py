"""Scores that are equal but for rounding: expected values are from numbers of right answers, in exact arithmetic."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from pfljax.api.table import times_to
from pfljax.api.tuning import Point, Tuning
from pfljax.evaluation import metrics, rounding, statistics
from pfljax.evaluation.gains import Effect, Trend, gains_of, trend
from pfljax.evaluation.statistics import Trial
from pfljax.training.scoring import best_row

# Clients' numbers of test examples, which are the weights of a run's score.
SIZES = np.array([7, 9, 11, 13, 6, 8, 10, 12, 5, 14, 15, 3, 17, 19, 21, 23])
TOTAL = int(SIZES.sum())
# FedAvg and FedBuff on digits (ledger entry clock-digits): right answers and test examples of ten runs.
FEDAVG = (342, 352, 356, 340, 345, 341, 343, 345, 338, 349)
FEDBUFF = (335, 353, 352, 340, 342, 339, 340, 347, 338, 346)
TESTED = (359, 360, 359, 358, 357, 359, 359, 359, 360, 362)


def right_answers(total, seed):
    """How many of its examples each client has right, `total` in all, dealt at random."""
    examples = np.repeat(np.arange(len(SIZES)), SIZES)
    chosen = np.random.default_rng(seed).permutation(examples)[:total]
    return np.bincount(chosen, minlength=len(SIZES))


def score_of(total, seed):
    """A run's accuracy as the library computes it: the mean of clients' float32 accuracies by their weights."""
    accuracy = right_answers(total, seed).astype(np.float32) / SIZES.astype(np.float32)
    return metrics.summarize({"accuracy": accuracy, "loss": 1 - accuracy}, SIZES)["accuracy"]


def exact_p(differences):
    """The share of all sign patterns whose sum is at least as far from 0 as that of the differences."""
    observed = abs(sum(differences))
    is_extreme = []
    for signs in itertools.product((1, -1), repeat=len(differences)):
        total = sum(sign * value for sign, value in zip(signs, differences, strict=True))
        is_extreme.append(abs(total) >= observed)
    return Fraction(sum(is_extreme), len(is_extreme))


def compared(totals, others):
    """The difference of two methods with these total numbers of right answers by run."""
    ours = {Trial(seed): score_of(total, seed) for seed, total in enumerate(totals)}
    theirs = {Trial(seed): score_of(total, 100 + seed) for seed, total in enumerate(others)}
    return statistics.difference(ours, theirs)


def test_the_scores_of_these_tests_are_only_almost_equal():
    scores = {score_of(150, seed) for seed in range(20)}
    assert len(scores) > 1 and max(scores) - min(scores) < 1e-7


@pytest.mark.parametrize("number", [2, 7, 10, 16])
@pytest.mark.parametrize("seed", range(4))
def test_p_is_that_of_the_numbers_of_right_answers(number, seed):
    """Differences of few examples, so that many of them, and many sums of flips, are equal."""
    rng = np.random.default_rng(1000 * seed + number)
    others = rng.integers(100, 180, size=number)
    gains = rng.integers(-2, 4, size=number)
    found = compared(others + gains, others)
    assert Fraction(found.p) == exact_p([int(gain) for gain in gains])
    counts = ((gains > 0).sum(), (gains == 0).sum(), (gains < 0).sum())
    assert (found.wins, found.ties, found.losses) == counts


def test_one_pair_has_no_p_and_is_won_tied_or_lost():
    assert compared([150], [150])[4:] == (0, 1, 0) and compared([151], [150])[4:] == (1, 0, 0)
    assert math.isnan(compared([150], [150]).p)


@pytest.mark.parametrize("number", [2, 7, 10, 16, 25])
def test_methods_with_equal_numbers_tie_in_all_pairs(number):
    totals = range(100, 100 + number)
    found = compared(totals, totals)
    assert found == (0, 0, 0, 1, 0, number, 0) and not found.separates


def test_p_of_ten_runs_with_several_sizes():
    """16 of the 1,024 patterns tie with the observed sum; 0.049, or 50, was published, as six ties were not counted."""
    fractions = []
    for ours, theirs, tested in zip(FEDBUFF, FEDAVG, TESTED, strict=True):
        fractions.append(Fraction(ours - theirs, tested))
    assert exact_p(fractions) == Fraction(56, 1024)
    sizes = np.array(TESTED)
    ours = np.array(FEDBUFF) / sizes
    theirs = np.array(FEDAVG) / sizes
    for seed in range(20):
        rng = np.random.default_rng(seed)
        noise = rng.normal(0, 1e-9, size=(2, 10))  # as of float32 means
        scores = {Trial(k): value for k, value in enumerate(ours + noise[0])}
        others = {Trial(k): value for k, value in enumerate(theirs + noise[1])}
        assert Fraction(statistics.difference(scores, others).p) == Fraction(56, 1024)


def test_seeds_of_a_split_that_cancel_are_a_tie():
    """+1 and -1 examples on each split; the mean of the two differences is 1e-10, and no gain."""
    ours = {}
    theirs = {}
    for split, seed in itertools.product(range(3), range(2)):
        gain = 1 if seed else -1
        ours[Trial(seed, split)] = score_of(150 + gain, 10 * split + seed)
        theirs[Trial(seed, split)] = score_of(150, 200 + 10 * split + seed)
    found = statistics.difference(ours, theirs)
    assert (found.wins, found.ties, found.losses, found.p) == (0, 3, 0, 1)


def test_more_units_are_flipped_at_random_and_ties_count():
    """All gains are of one example: the observed sum is 5 of 25, and all that are 5 or more or -5 or less count."""
    gains = [1] * 15 + [-1] * 10
    others = [150] * 25
    totals = [total + gain for total, gain in zip(others, gains, strict=True)]
    at_least_five = sum(math.comb(25, heads) for heads in range(15, 26))
    expected = 2 * at_least_five / 2**25
    assert compared(totals, others).p == pytest.approx(expected, abs=0.02)


def test_an_infinite_difference_has_no_p():
    assert math.isnan(statistics.sign_flip([math.inf, 1.0, 2.0]))


def test_equal_methods_share_a_rank_in_any_order():
    """With fewer than 6 runs the t interval decides; that of differences of 1e-9 in all runs may exclude 0."""
    totals = [150, 160, 170]
    methods = {}
    for name, nudge in (("b", 2e-9), ("a", 0.0), ("c", 1e-9)):
        methods[name] = {Trial(k): total / TOTAL + nudge for k, total in enumerate(totals)}
    methods["low"] = {Trial(k): (total - 60) / TOTAL for k, total in enumerate(totals)}
    for names in itertools.permutations(methods):
        ranks = statistics.ranks({name: methods[name] for name in names})
        assert ranks == {"a": 1, "b": 1, "c": 1, "low": 4}


def test_equal_means_share_a_rank_whichever_is_above_by_rounding():
    """Two methods with equal means, of which only the first separates from the best one."""
    best = np.array([100, 100, 100, 100, 100, 100])
    steady = best - 3
    wild = best - np.array([30, -24, 20, -20, 10, 2])
    assert steady.sum() == wild.sum()
    for nudge in (1e-9, -1e-9):
        scores = {"best": best / TOTAL, "steady": steady / TOTAL, "wild": wild / TOTAL + nudge}
        methods = {}
        for name, values in scores.items():
            methods[name] = {Trial(k): value for k, value in enumerate(values)}
        assert statistics.difference(methods["steady"], methods["best"]).separates
        assert not statistics.difference(methods["wild"], methods["best"]).separates
        assert statistics.ranks(methods) == {"best": 1, "steady": 1, "wild": 1}


def test_clients_with_equal_numbers_are_neither_helped_nor_hurt():
    """Twenty examples: float32(0.9) - float32(0.95) is more than 5 points below 0 by rounding."""
    right = np.array([[18, 18], [19, 18], [17, 19], [20, 18], [10, 10]])
    scores = right.astype(np.float32) / np.float32(20)
    noise = np.array([[0, 1e-9]])
    effect = Effect.from_scores(scores + noise)
    assert (effect.helped, effect.hurt, effect.far, effect.clients) == (0.2, 0.4, 0.2, 5)
    swapped = Effect.from_scores(scores + noise, sign=-1)
    assert (swapped.helped, swapped.hurt) == (0.4, 0.2)
    np.testing.assert_array_equal(np.sign(gains_of(scores + noise)), [0, -1, 1, -1, 0])


def test_a_score_that_stays_has_no_trend():
    """The numbers of right answers stay the same in four runs, whose scores rise by 1e-9."""
    curves = 0.5 + np.linspace(0, 1e-9, 5) * np.array([[1.0], [1.1], [0.9], [1.0]])
    assert trend([0, 1, 2, 3, 4], curves) == Trend(0, 0, 0)
    assert trend([0, 1, 2, 3, 4], curves).verdict() == "no trend"


def test_an_accuracy_that_is_the_target_reaches_it():
    curve = np.array([[np.float32(0.8), np.float32(0.9)]], float)  # float32(0.9) < 0.9
    assert curve[0, 1] < 0.9
    assert times_to(0.9, curve, np.array([[1.0, 2.0]]), 1) == [2.0]


def test_the_loss_decides_between_points_with_equal_scores():
    scores = [score_of(150, seed) for seed in range(20)]
    losses = [2.0] * 20
    best = int(np.argmin(scores))  # which is below the others by rounding
    losses[best] = 1.0
    points = [Point(learning_rate=float(number)) for number in range(20)]
    assert Tuning(points, scores, losses).best == points[best]


def test_the_first_of_equal_rounds_is_the_best():
    rows = []
    for number in range(1, 21):
        rows.append({"round": number, "validation_accuracy": score_of(150, number)})
    rows.append({"round": 21, "validation_accuracy": score_of(140, 0)})
    assert best_row(rows)["round"] == 1


def test_scores_are_made_comparable():
    values = [0.5 + 1e-9, 0.7, math.nan, 0.5, 0.7 + 1e-6, -math.inf, 0.5 - 1e-9]
    expected = [0.5 - 1e-9, 0.7, math.nan, 0.5 - 1e-9, 0.7 + 1e-6, -math.inf, 0.5 - 1e-9]
    np.testing.assert_array_equal(rounding.comparable(values), expected)
    assert rounding.is_best(values).tolist() == [False] * 4 + [True] + [False] * 2
    assert rounding.is_equal(math.inf, math.inf) and not rounding.is_equal(math.nan, math.nan)
    np.testing.assert_array_equal(rounding.subtract([1.0, 1.0], [1 + 1e-8, 0.0]), [0, 1])
