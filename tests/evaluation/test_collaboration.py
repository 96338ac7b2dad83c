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
