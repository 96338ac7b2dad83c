"""Mixtures of predictions, against NumPy."""

import jax
import numpy as np
import pytest
from scipy.special import expit, softmax

from pfljax.models.ensembles import mixed


@pytest.mark.parametrize("num", [1, 2, 5])
def test_classes_are_mixed_by_weights_of_their_own(num):
    """p(c | x) is proportional to sum_j w_jc p_j(c | x)."""
    rng = np.random.default_rng(num)
    outputs = rng.normal(0, 3, (num, 7, 4))
    weights = rng.dirichlet(np.ones(num), 4).T
    found = jax.nn.softmax(mixed("classification", weights, outputs))
    expected = np.einsum("jc,jbc->bc", weights, softmax(outputs, axis=-1))
    expected = expected / expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_weights_that_do_not_differ_by_class_are_those_of_models():
    rng = np.random.default_rng(1)
    outputs = rng.normal(0, 3, (3, 5, 4))
    weights = np.array([0.5, 0.3, 0.2])
    of_models = jax.nn.softmax(mixed("classification", weights, outputs))
    by_class = jax.nn.softmax(
        mixed("classification", np.repeat(weights[:, None], 4, axis=1), outputs)
    )
    np.testing.assert_allclose(of_models, by_class, rtol=1e-5)
    np.testing.assert_allclose(
        of_models, np.einsum("j,jbc->bc", weights, softmax(outputs, axis=-1)), rtol=1e-5
    )


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 2)])
def test_values_and_labels_are_mixed_by_weights_of_models(shape):
    rng = np.random.default_rng(2)
    outputs = rng.normal(size=shape)
    weights = np.array([0.5, 0.3, 0.2])
    values = mixed("regression", weights, outputs)
    np.testing.assert_allclose(values, np.tensordot(weights, outputs, axes=1), rtol=1e-5)
    labels = jax.nn.sigmoid(mixed("multilabel", weights, outputs))
    np.testing.assert_allclose(labels, np.tensordot(weights, expit(outputs), axes=1), rtol=1e-5)
