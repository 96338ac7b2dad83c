"""Sums and counts of features by class against a loop in NumPy."""

import jax
import networks
import numpy as np
import optax
import pytest
import toys

from pfljax.algorithms.common import classes
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Split


@pytest.mark.parametrize("size", [0, 7, 600, 1200])  # a block's part, and several blocks of both widths
def test_sums_and_counts_are_those_of_a_loop(size):
    federation = toys.make_federation((1200,), classes=4)
    problem = toys.make_problem(federation, optax.sgd(0.1), hidden=(5,))
    x, y = np.array(federation.train.x[0]), np.where(federation.train.y[0] == 2, 1, federation.train.y[0])
    x[size:] = np.nan
    models = problem.init_models(jax.random.key(0), 1)
    params = jax.tree.map(lambda leaf: leaf[0], models)
    summed = jax.jit(lambda split: classes.feature_sums(problem.model, params, split, 4))
    found = summed(Split(x, y, np.int32(size)))
    sums, counts = found["sums"], found["counts"]
    z = networks.features(networks.row(models, 0), np.float64(x[:size]))
    expected = np.array([z[y[:size] == c].sum(axis=0) for c in range(4)])
    np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(counts, np.bincount(y[:size], minlength=4))
    mean = np.asarray(classes.means(sums, counts))
    for c in range(4):
        np.testing.assert_allclose(mean[c], z[y[:size] == c].mean(axis=0) if counts[c] else 0, rtol=1e-4, atol=1e-5)
    assert counts[2] == 0
    np.testing.assert_allclose(found["squares"], np.square(z).sum(), rtol=1e-4)


def test_a_regression_has_no_classes():
    federation = toys.make_federation((3,), "regression")
    with pytest.raises(ArgumentError, match="needs classes; choose another method for a regression"):
        classes.required(toys.make_problem(federation), "fedproto")
