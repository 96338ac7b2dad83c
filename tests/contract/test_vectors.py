"""Stacked trees as vectors, and orthonormal rows."""

import jax.numpy as jnp
import numpy as np

from pfljax.contract import vectors


def test_orthonormal_rows_span_the_given_ones():
    """A row that lies almost in the span of the others is still one; a multiple of another row, or 0, adds nothing."""
    rows = jnp.float32([[1, 0, 0, 0], [1, 0.01, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0], [0, 3, 4, 0]])
    found = np.asarray(vectors.orthonormal(rows))
    np.testing.assert_allclose(found @ found.T, np.diag([1, 1, 0, 0, 1]), atol=1e-5)
    np.testing.assert_allclose(found[:, :3][[0, 1, 4]], np.eye(3), atol=1e-4)


def test_functions_of_vectors_see_all_leaves_of_a_row_as_one():
    stack = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.arange(8.0).reshape(2, 2, 2)}
    found = vectors.over_vectors(
        lambda rows: rows / jnp.linalg.norm(rows, axis=1, keepdims=True), stack
    )
    for k in range(2):
        length = np.sqrt(np.square(stack["a"][k]).sum() + np.square(stack["b"][k]).sum())
        np.testing.assert_allclose(found["a"][k], stack["a"][k] / length, rtol=1e-6)
        np.testing.assert_allclose(found["b"][k], stack["b"][k] / length, rtol=1e-6)
