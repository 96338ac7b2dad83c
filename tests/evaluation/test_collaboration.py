"""Agreement of two partitions."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from pfljax.evaluation.collaboration import adjusted_rand_index


@pytest.mark.parametrize("num", (2, 9, 40))
@pytest.mark.parametrize("groups", (1, 2, 5))
def test_adjusted_rand_index_is_scikit_learns(num, groups):
    rng = np.random.default_rng(num + groups)
    a, b = rng.integers(groups, size=num) * 7, rng.integers(3, size=num)
    assert adjusted_rand_index(a, b) == pytest.approx(adjusted_rand_score(a, b), abs=1e-12)


def test_adjusted_rand_index_by_hand():
    # Of 10 pairs, 2 are together in both, 4 in a (3 + 1) and 2 in b (1 + 1).
    a, b = np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 2, 2])
    assert adjusted_rand_index(a, b) == pytest.approx((2 - 4 * 2 / 10) / ((4 + 2) / 2 - 4 * 2 / 10))
    assert adjusted_rand_index(a, a + 3) == adjusted_rand_index(np.zeros(4, int), np.ones(4, int)) == 1
    assert adjusted_rand_index(np.zeros(4, int), np.arange(4)) == 0
