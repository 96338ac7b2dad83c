"""Networks: sizes, losses, and convolutions against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfljax import models
from pfljax.models import layers
from pfljax.types import UsageError

SHAPES = [(4, 6, 6, 3), (3, 5, 7, 2), (6, 2, 3, 1)]


def reference_convolution(x, kernel, size):
    kernel = kernel.reshape(size, size, x.shape[-1], -1)
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def reference_pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("cache_bytes", [1, 4000, 6 << 20])
def test_convolutions_are_jax_s_in_value_and_gradient(monkeypatch, shape, size, cache_bytes):
    monkeypatch.setattr(layers, "CACHE_BYTES", cache_bytes)
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    kernel = rng.normal(size=(size * size * shape[-1], 4)).astype(np.float32)
    y, pull = jax.vjp(lambda x, kernel: layers.convolve(x, kernel, size), x, kernel)
    expected, reference_pull = jax.vjp(lambda x, kernel: reference_convolution(x, kernel, size), x, kernel)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    dy = rng.normal(size=y.shape).astype(np.float32)
    for found, wanted in zip(pull(dy), reference_pull(dy), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-4)


def test_small_caches_cut_the_batch_into_equal_blocks(monkeypatch):
    x = jnp.zeros((6, 4, 4, 2))
    monkeypatch.setattr(layers, "CACHE_BYTES", 1)
    assert layers._blocks(x, 3) == 6
    monkeypatch.setattr(layers, "CACHE_BYTES", 4 * 4 * 4 * 2 * 9 * 4)  # four images; the largest divisor of 6 is 3
    assert layers._blocks(x, 3) == 2
    monkeypatch.setattr(layers, "CACHE_BYTES", 1 << 30)
    assert layers._blocks(x, 3) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_max_pooling_is_jax_s_in_value_and_gradient(shape):
    rng = np.random.default_rng(1)
    x = rng.normal(size=shape).astype(np.float32)
    y, pull = jax.vjp(layers.max_pool, x)
    expected, reference_pull = jax.vjp(reference_pool, x)
    np.testing.assert_array_equal(y, expected)
    dy = rng.normal(size=y.shape).astype(np.float32)
    np.testing.assert_allclose(pull(dy)[0], reference_pull(dy)[0], rtol=1e-6)


def test_a_tie_s_gradient_goes_to_the_first():
    x = np.array([[1.0, 2.0], [2.0, 2.0]], np.float32).reshape(1, 2, 2, 1)
    gradient = jax.grad(lambda x: 5 * layers.max_pool(x).sum())(x)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[0, 5], [0, 0]])


def count(name, shape, classes=10, **options):
    model = models.make(name, shape, "classification", classes, **options)
    params = jax.eval_shape(model.init, jax.random.key(0))
    return sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def test_networks_have_the_papers_sizes():
    convolutions = (27 * 128 + 128) + 2 * (9 * 128 * 128 + 128)
    assert count("cnn", (32, 32, 3)) == convolutions + 4 * 4 * 128 * 10 + 10 == 319_242
    assert count("mlp", (8, 8, 1), hidden=(64,)) == 64 * 64 + 64 + 64 * 10 + 10
    assert count("mlp", (8, 8, 1), hidden=(30, 20)) == 64 * 30 + 30 + 30 * 20 + 20 + 20 * 10 + 10
    assert count("linear", (8, 8, 1)) == 64 * 10 + 10
    assert count("linear", (5,), classes=3, hidden=(99,)) == 5 * 3 + 3


def test_the_cnn_is_convolution_pooling_relu_and_a_dense_layer():
    model = models.make("cnn", (9, 8, 2), "classification", 3, channels=(4, 5))
    params = model.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # biases that matter
    x = np.random.default_rng(2).normal(size=(3, 9, 8, 2)).astype(np.float32)
    h = x
    for number in range(2):
        layer = params[f"PatchConv_{number}"]
        h = jax.nn.relu(reference_pool(reference_convolution(h, layer["kernel"], 3) + layer["bias"]))
    expected = h.reshape(3, -1) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-4, atol=1e-5)


def test_losses_are_cross_entropy_in_nats_and_squared_error():
    x = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
    model = models.make("linear", (4,), "classification", 3)
    params = model.init(jax.random.key(0))
    logits = np.float64(x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"])
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    y = np.array([0, 1, 2, 1, 0], np.int32)
    np.testing.assert_allclose(model.predict(params, x), probabilities, rtol=1e-5)
    np.testing.assert_allclose(model.loss(params, x, y), -np.log(probabilities[np.arange(5), y]), rtol=1e-5)

    model = models.make("linear", (4,), "regression", 1)
    params = model.init(jax.random.key(0))
    outputs = x @ params["Dense_0"]["kernel"][:, 0]
    np.testing.assert_allclose(model.predict(params, x), outputs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.loss(params, x, outputs + 2), np.full(5, 4.0), rtol=1e-4)


def test_misfits_are_named():
    with pytest.raises(UsageError, match=r"--model=rnn.*linear, mlp, cnn"):
        models.make("rnn", (4,), "classification", 3)
    with pytest.raises(UsageError, match=r"--model=cnn.*8 x 8"):
        models.make("cnn", (7, 8, 1), "classification", 3)
    with pytest.raises(UsageError, match=r"--model=cnn.*\(64,\)"):
        models.make("cnn", (64,), "classification", 3)
