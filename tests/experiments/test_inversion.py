"""Gradient inversion: the gradients that updates stand for, and reconstructions where the answer is known."""

import functools

import commands
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import pfljax as pfl
from experiments import inversion

PUBLIC = pfl.Privacy()
SEARCH = inversion.Search(steps=400, rate=0.1, variation=0.0, tries=2, low=-3.0, high=3.0)


@functools.cache
def seen(hidden=(), privacy=PUBLIC, **fields):
    """The victims, the model, its initial parameters, and the victims' gradients."""
    return play(hidden, privacy, **fields)


def play(hidden=(), privacy=PUBLIC, **fields):
    """As `seen`, each time anew."""
    victims = inversion.victims_of(toys.make_federation((4, 2, 3), features=5), 2)
    local = pfl.LocalTraining(optax.sgd(inversion.RATE), privacy=privacy)
    run = pfl.Run(pfl.FedAvg(), victims, pfl.models.MLP(hidden=hidden), local, **fields)
    return victims, run.experiment.problem.model, *inversion.gradients_seen(run, jax.random.key(3))


def by_numpy(x, y, layer):
    """The gradients of a linear model's cross entropy with kernel and bias: x (p - y)^T and p - y."""
    outputs = np.exp(x @ np.float64(layer["kernel"]) + np.float64(layer["bias"]))
    slope = outputs / outputs.sum() - np.eye(3)[y]
    return np.outer(x, slope), slope


def test_an_update_of_one_step_is_the_gradient_and_reveals_example_and_label():
    victims, model, params, gradients = seen()
    for k, gradient in enumerate(gradients):
        x = victims.train.x[k, 0]
        y = victims.train.y[k, 0]
        kernel, bias = by_numpy(x, y, params["Dense_0"])
        np.testing.assert_allclose(gradient["Dense_0"]["kernel"], kernel, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(gradient["Dense_0"]["bias"], bias, rtol=1e-3, atol=1e-5)
        assert inversion.label_of(gradient, 3) == np.argmin(bias) == y
        found = inversion.reconstructed(
            model, SEARCH, jax.random.key(0), params, gradient, jnp.int32(y)
        )
        np.testing.assert_allclose(found, kernel[:, y] / bias[y], atol=0.02)  # which is x, exactly
        np.testing.assert_allclose(found, x, atol=0.02)


@pytest.mark.slow
def test_a_hidden_layer_reveals_the_example_as_well():
    victims, model, params, gradients = seen(hidden=(16,))
    layer = gradients[0]["Dense_0"]
    best = np.argmax(np.abs(layer["bias"]))
    exact = np.asarray(layer["kernel"][:, best] / layer["bias"][best])
    np.testing.assert_allclose(exact, victims.train.x[0, 0], rtol=1e-3, atol=1e-4)
    label = jnp.int32(inversion.label_of(gradients[0], 3))
    found = inversion.reconstructed(model, SEARCH, jax.random.key(0), params, gradients[0], label)
    np.testing.assert_allclose(found, exact, atol=0.05)


@pytest.mark.slow
def test_what_is_seen_is_what_clipping_noise_and_compression_leave():
    def flat(gradient):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)])

    plain = flat(seen()[3][0])
    clipped = flat(seen(privacy=pfl.Privacy(clip_norm=0.1))[3][0])
    np.testing.assert_allclose(clipped, 0.1 * plain / np.linalg.norm(plain), rtol=1e-3, atol=1e-5)
    noised = [flat(play(privacy=pfl.Privacy(0.5, clip_norm=0.1))[3][0]) for _ in range(2)]
    np.testing.assert_array_equal(*noised)
    assert 0.01 < np.std(noised[0] - clipped) < 0.15  # of 18 draws at 0.05
    signs = flat(seen(compression=pfl.Compression("sign"))[3][0])
    np.testing.assert_allclose(signs, np.abs(plain).mean() * np.sign(plain), rtol=1e-3, atol=1e-5)


def test_the_table_has_the_error_of_the_picture():
    originals = np.zeros((2, 4))
    found = np.array([[0.6] * 4, [0.0, 0, 0, 1.2]])
    row = inversion.row_of("noise", originals, found, [True, False], SEARCH)
    assert (
        row["mse"] == pytest.approx((0.01 + 0.01) / 2)
        and row["psnr"] == pytest.approx(20)
        and row["labels"] == 1
    )
    np.testing.assert_allclose(
        inversion.total_variation(jnp.array([[0.0, 1], [2, 5]])), (2 + 4) / 2 + (1 + 3) / 2
    )


@pytest.mark.slow
def test_the_command_shows_that_noise_protects(tmp_path):
    words = [
        "--victims=2",
        "--hidden=8",
        "--guesses=200",
        "--tries=1",
        "--noises=1",
        "--compressions=",
    ]
    printed = commands.call(inversion.COMMAND, *words, f"--out={tmp_path}")
    plain, noised = commands.rows_of(tmp_path)
    assert plain["mse"] < 0.01 < noised["mse"] and "2 of 2" in printed
    assert (tmp_path / "inversion.png").stat().st_size > 1000


def test_what_cannot_be_inverted_is_refused_in_a_line(tmp_path):
    for flag, text in {
        "--dataset=sine": "accepted: arrays of numbers with a class",
        "--channels=4": "--model=cnn",
    }.items():
        assert text in commands.refused(inversion.COMMAND, tmp_path / "out", flag)
