"""Sums and counts of features by class against a loop in NumPy."""

import jax
import networks
import numpy as np
import optax
import toys

from pfljax.algorithms.common import classes
from pfljax.contract.types import Split


def test_sums_and_counts_are_those_of_a_loop():
    """Of a block's part, and of several blocks of both widths."""
    federation = toys.make_federation((1200,), classes=4)
    problem = toys.make_problem(federation, optax.sgd(0.1), hidden=(5,))
    y = np.where(federation.train.y[0] == 2, 1, federation.train.y[0])
    models = problem.init_models(jax.random.key(0), 1)
    params = jax.tree.map(lambda leaf: leaf[0], models)
    summed = jax.jit(lambda split: classes.feature_sums(problem, params, split, 4))
    for size in (0, 7, 600, 1200):
        x = np.array(federation.train.x[0])
        x[size:] = np.nan
        found = summed(Split(x, y, np.int32(size)))
        sums = found.sums
        counts = found.counts
        z = networks.features(networks.row(models, 0), np.float64(x[:size]))
        expected = np.array([z[y[:size] == c].sum(axis=0) for c in range(4)])
        np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(counts, np.bincount(y[:size], minlength=4))
        mean = np.asarray(classes.means(sums, counts))
        for c in range(4):
            of_class = z[y[:size] == c].mean(axis=0) if counts[c] else 0
            np.testing.assert_allclose(mean[c], of_class, rtol=1e-4, atol=1e-5)
        assert counts[2] == 0
        np.testing.assert_allclose(found.squares, np.square(z).sum(), rtol=1e-4)
