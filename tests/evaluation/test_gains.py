"""Who gains and who is hurt, and trends at the end: values worked out by hand."""

import numpy as np
import pytest

from pfljax.evaluation.gains import Effect, Trend, mean_gain, pairs, trend
from pfljax.evaluation.statistics import Trial


def test_clients_of_common_runs_are_paired_and_those_without_a_score_are_left_out():
    own = {
        Trial(0): np.array([0.5, 0.9, np.nan]),
        Trial(1): np.array([0.1, 0.2, 0.3]),
        Trial(2): np.ones(3),
    }
    others = {
        Trial(1): np.array([0.3, 0.2, 0.1]),
        Trial(0): np.array([0.4, 1.0, 0.7]),
        Trial(3): np.ones(3),
    }
    found = pairs(own, others)
    np.testing.assert_array_equal(
        found, [[0.4, 0.5], [1.0, 0.9], [0.3, 0.1], [0.2, 0.2], [0.1, 0.3]]
    )
    assert pairs(own, {Trial(0): np.ones(2)}).shape == (0, 2)


def test_shares_of_clients_that_are_helped_and_hurt():
    """Of five gains two are positive, two negative, and one loses more than five points; exactly five are not more."""
    after = 0.5 + np.array([0.2, 0.0, -0.05, 0.1, -0.3])
    effect = Effect.from_scores(np.stack([np.full(5, 0.5), after], axis=1))
    assert effect == pytest.approx(Effect(0.4, 0.4, 0.2, -0.3, 0.0, 5))
    nobody = Effect.from_scores(np.empty((0, 2)))
    assert np.isnan(nobody[:5]).all() and nobody.clients == 0


def test_the_mean_gain_counts_a_client_once():
    """Runs 0 and 1 have the same clients, who gain 0.2 and 0 in the mean; run 2 has another, who gains 0.4."""
    own = {
        Trial(0): np.array([0.5, 0.7]),
        Trial(1): np.array([0.9, 0.7]),
        Trial(2): np.array([0.9, np.nan]),
    }
    others = {trial: np.full(2, 0.5) for trial in own} | {Trial(1): np.array([0.5, 0.9])}
    mean, low, high = mean_gain(own, others, {Trial(0): "a", Trial(1): "a", Trial(2): "b"})
    # Three clients: mean 0.2, deviation 0.2, t(2) = 4.3027.
    half = 4.3027 * 0.2 / np.sqrt(3)
    np.testing.assert_allclose([mean, low, high], [0.2, 0.2 - half, 0.2 + half], rtol=1e-4)
    # Were all three of one data set, the second client would have no score in one of them, and so be left out.
    np.testing.assert_allclose(mean_gain(own, others, dict.fromkeys(own, 0), -1)[0], -0.8 / 3)
    assert np.isnan(mean_gain(own, {}, {})).all()


def test_a_trend_is_the_change_along_lines_fitted_to_the_last_quarter():
    """Rounds 0 to 40: the last quarter is 30 to 40. There, runs change by 0.01 and 0.03 per round, before by much."""
    rounds = list(range(0, 41, 5))
    steep = np.concatenate([np.linspace(5, 0, 6), [0.0, 0.05, 0.10]])
    steeper = np.concatenate([np.linspace(-3, 0, 6), [0.0, 0.15, 0.30]])
    found = trend(rounds, np.stack([steep, steeper]))
    # Mean (0.1 + 0.3) / 2; Student's interval of two values: 12.706 times half their distance.
    np.testing.assert_allclose(found, [0.2, 0.2 - 12.7062 * 0.1, 0.2 + 12.7062 * 0.1], rtol=1e-4)
    assert found.verdict() == "no trend"


def test_a_trend_needs_three_evaluations_and_uses_the_last_three_if_the_quarter_has_fewer():
    assert np.isnan(trend([0, 10], np.zeros((4, 2)))).all()
    assert np.isnan(trend([0, 5, 10], np.array([[0.1, 0.2, np.nan]]))).all()
    single = trend([0, 5, 10], np.array([[0.1, 0.2, 0.3]]))
    assert single.change == pytest.approx(0.2) and np.isnan(single.low) and single.verdict() == "-"


def test_the_verdict_follows_the_interval_and_the_direction_in_which_scores_are_good():
    assert (
        Trend(0.2, 0.1, 0.3).verdict() == Trend(-0.2, -0.3, -0.1).verdict(-1) == "still improving"
    )
    assert Trend(-0.2, -0.3, -0.1).verdict() == Trend(0.2, 0.1, 0.3).verdict(-1) == "getting worse"
    assert Trend(0.0, -0.1, 0.1).verdict() == "no trend"
