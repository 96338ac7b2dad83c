"""Random crops and flips: equal to NumPy's for the same draws, only in training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax import models
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Split
from pfljax.local import augmentation
from pfljax.local.training import LocalTraining

SHAPE = (6, 5, 2)


def images(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, *SHAPE)).astype(np.float32)


def moved(image, move, flip):
    """The crop of a padded image, by slices."""
    height, width, _ = SHAPE
    top, left = np.asarray(move) + 4
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    crop = padded[top : top + height, left : left + width]
    return crop[:, ::-1] if flip else crop


def test_crops_and_flips_are_those_of_numpy():
    moves = [(0, 0), (0, 0), (4, -4), (-4, 4), (1, 2), (-3, -1)]
    flips = [False, True, False, True, True, False]
    x = images(len(moves))
    found = jax.jit(augmentation.move_and_flip)(jnp.asarray(x), jnp.array(moves), jnp.array(flips))
    expected = np.stack([moved(*each) for each in zip(x, moves, flips, strict=True)])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[0], x[0])
    np.testing.assert_array_equal(found[1], x[1, :, ::-1])


def test_all_moves_come_alike_and_half_of_the_images_are_mirrored():
    """In an image with pixels numbered from 1, the center identifies the crop."""
    one = 1 + np.arange(9 * 9, dtype=np.float32).reshape(9, 9, 1)
    stack = jnp.asarray(np.broadcast_to(one, (8000, 9, 9, 1)))
    found = np.asarray(jax.jit(augmentation.crop_flip)(jax.random.key(0), stack))
    # the only pixel that no move loses, and no mirror moves
    centers = found[:, 4, 4, 0].astype(int) - 1
    rows, columns = np.divmod(centers, 9)
    for draws in (rows, columns):
        share = np.bincount(draws, minlength=9) / 8000
        assert len(share) == 9 and abs(share - 1 / 9).max() < 0.02
    grows = found[:, 4, 4, 0] < found[:, 4, 5, 0]
    known = columns.astype(bool) & (columns < 8)  # where both neighbors are pixels
    assert abs(grows[known].mean() - 0.5) < 0.03


def solver(augment, batch_size=2):
    model = models.make("mlp", SHAPE, "classification", 3, hidden=(4,))
    return LocalTraining(optax.sgd(0.1), batch_size=batch_size, augment=augment).bind(model), model


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 0])
def test_a_batch_holds_the_same_examples_cropped_and_its_padding_is_one_of_them(batch_size):
    split = Split(
        jnp.asarray(images(5)).at[3:].set(jnp.nan), jnp.array([0, 1, 2, 0, 0]), jnp.int32(3)
    )
    found = []
    plain = []
    for augment, batches in (("crop_flip", found), ("none", plain)):
        how, _ = solver(augment, batch_size)
        orders = how.draw_orders(jax.random.key(1), split.size, 5)
        for step in range(4):
            batches.append(how.take_batch(jax.random.key(1), orders, split, jnp.int32(step)))
    for a, b in zip(found, plain, strict=True):
        for name in ("y", "mask", "index"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        for padding in np.asarray(b.x)[np.asarray(b.mask) == 0]:
            assert any(np.array_equal(padding, image) for image in images(5)[:3])
        assert np.isfinite(a.x).all()
        for image, original in zip(a.x[: int(a.mask.sum())], b.x, strict=False):
            original = np.asarray(original)
            made = [
                moved(original, (i, j), flip)
                for i in range(-4, 5)
                for j in range(-4, 5)
                for flip in (False, True)
            ]
            assert any(np.array_equal(image, other) for other in made)
    # Every step draws anew, and the same key gives the same draws.
    first, second = (np.asarray(batch.x) for batch in (found[0], found[2 if batch_size else 1]))
    assert not np.array_equal(np.sort(first, axis=None), np.sort(second, axis=None))
    how, _ = solver("crop_flip", batch_size)
    again = how.take_batch(
        jax.random.key(1), how.draw_orders(jax.random.key(1), split.size, 5), split, jnp.int32(0)
    )
    np.testing.assert_array_equal(again.x, found[0].x)


@pytest.mark.slow
def test_evaluation_sees_the_images_themselves():
    split = Split(jnp.asarray(images(5)), jnp.array([0, 1, 2, 0, 1]), jnp.int32(4))
    (how, model) = solver("crop_flip")
    (plain, _) = solver("none")
    params = model.init(jax.random.key(0))
    losses = model.loss(params, split.x[:4], split.y[:4])
    np.testing.assert_allclose(how.total_loss(params, split), losses.sum(), rtol=1e-5)

    def gradient(how):
        return how.loss_and_gradient(params, split)[1]

    toys.assert_trees_close(gradient(how), gradient(plain))

    def fit(how):
        state, _ = how.fit(jax.random.key(0), how.begin(params), split, round_number=0)
        return state.whole

    assert not toys.same_trees(fit(how), fit(plain))  # training does not


@pytest.mark.parametrize("shape", [(4,), (5, 5)])
def test_it_is_for_images_only(shape):
    model = models.make("mlp", shape, "classification", 3)
    with pytest.raises(
        ArgumentError,
        match=r"^augment=crop_flip: needs images .*accepted for inputs of shape .*: none",
    ):
        LocalTraining(augment="crop_flip").bind(model)
    with pytest.raises(ArgumentError, match=r"^augment=mirror: accepted: none, crop_flip"):
        LocalTraining(augment="mirror")  # pyright: ignore[reportArgumentType]


def test_images_with_channels_first_are_moved_alike():
    x = np.random.default_rng(0).normal(size=(5, 3, 9, 7)).astype(np.float32)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    first = augmentation.augmentation("crop_flip", shape, channels_first=True)
    last = augmentation.augmentation("crop_flip", shape)
    moved = last(jax.random.key(3), x.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(first(jax.random.key(3), x), moved.transpose(0, 3, 1, 2))
