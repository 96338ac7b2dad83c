"""Agreement of two partitions, and similarity of clients' weights."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import cosine_similarity

from pfljax.evaluation.collaboration import adjusted_rand_index, cosines, sharing


@pytest.mark.parametrize("num", (2, 9, 40))
@pytest.mark.parametrize("groups", (1, 2, 5))
def test_adjusted_rand_index_is_scikit_learns(num, groups):
    rng = np.random.default_rng(num + groups)
    a = rng.integers(groups, size=num) * 7
    b = rng.integers(3, size=num)
    assert adjusted_rand_index(a, b) == pytest.approx(adjusted_rand_score(a, b), abs=1e-12)


def test_similarity_of_weights_is_their_cosine():
    """Clients 0 and 1 are of one group, 2 of another; one model has no weight of anybody."""
    index = np.array([[0, 1], [1, 0], [1, 3]])
    weights = np.array([[3.0, 4.0], [0.5, 0.2], [2.0, 2.0]])
    dense = np.array([[3, 4, 0, 0], [0.2, 0.5, 0, 0], [0, 2, 0, 2]])
    expected = cosine_similarity(dense)
    np.testing.assert_allclose(cosines(index, weights), expected)
    found = sharing(index, weights, np.array([7, 7, 5]))
    assert found.within == pytest.approx(expected[0, 1])
    assert found.across == pytest.approx((expected[0, 2] + expected[1, 2]) / 2)
