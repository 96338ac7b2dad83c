"""Recovery after a change, from scores whose course is given."""

import numpy as np

from pfljax.evaluation.recovery import mean_recovery, pauses, recovery

ROUNDS = np.array([0, 10, 20, 25, 30, 40, 80])
# of three clients; the last one has no score before the change
SCORES = np.array(
    [
        [0.1, 0.1, np.nan],
        [0.5, 0.7, np.nan],
        [0.8, 0.9, np.nan],  # round 20, before the change
        [0.4, 0.5, 0.2],
        [0.79, 0.7, 0.3],
        [0.85, 0.8, 0.9],
        [0.9, 0.89, 0.9],
    ]
)


def test_runs_are_evaluated_before_a_change_and_after():
    assert pauses([20, 40]) == [20, 25, 40, 45, 60, 80, 100]


def test_each_clients_score_is_back_within_a_point():
    before, after, rounds = recovery(ROUNDS, SCORES, 20, np.inf, 1)
    np.testing.assert_array_equal(before, [0.8, 0.9, np.nan])
    np.testing.assert_array_equal(rounds, [10, 60, np.nan])
    assert list(after) == [5, 20, 60]
    np.testing.assert_array_equal(after[20], [0.85, 0.8, 0.9])


def test_what_is_later_than_the_next_change_does_not_count():
    _, after, rounds = recovery(ROUNDS, SCORES, 20, 40, 1)
    np.testing.assert_array_equal(rounds, [10, np.inf, np.nan])
    assert list(after) == [5, 20]


def test_low_scores_may_be_good_and_the_tolerance_may_be_another():
    _, _, rounds = recovery(ROUNDS, -SCORES, 20, np.inf, -1, tolerance=0.1)
    np.testing.assert_array_equal(rounds, [10, 20, np.nan])


def test_the_mean_is_that_of_clients_that_were_there_before_and_after():
    found = mean_recovery(ROUNDS, SCORES, 20, np.inf, 1)
    assert found["clients"] == 2 and np.isclose(found["before"], 0.85)
    assert np.isclose(found["after"]["5"], 0.45) and found["rounds"] == 60
    assert mean_recovery(ROUNDS, SCORES, 20, 40, 1)["rounds"] is None
    nobody = {"clients": 0, "before": None, "after": {}, "rounds": None}
    assert mean_recovery(ROUNDS, SCORES[:, 2:], 20, np.inf, 1) == nobody
