"""Embeddings by networks trained here."""

import numpy as np
import pytest

from pfljax.core.errors import ArgumentError
from pfljax.data import embedding
from pfljax.data.sources import Source

QUIET = {"say": lambda line: None}


def images(n=60, side=8, seed=0):
    """Images whose mean tells the class; a third are for testing."""
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=n).astype(np.int32)
    x = (rng.normal(size=(n, side, side, 1)) + y[:, None, None, None]).astype(np.float32)
    return Source(x, y, None, np.arange(n) % 3 == 0, 2, "classification", "images")


def test_pixels_need_no_network_and_auto_trains_one_for_large_images_only(monkeypatch):
    assert embedding.make("pixels") is None
    small = images()
    np.testing.assert_array_equal(embedding.make("auto")(small), small.x.reshape(60, -1))
    monkeypatch.setattr(embedding, "NETWORK", "mlp")
    large = embedding.Embedding("auto", epochs=1, widths=(("hidden", (5,)),), **QUIET)(images(side=32))
    assert large.shape == (60, 5)


def test_it_is_what_the_last_layer_receives_and_tells_the_classes():
    source = images()
    lines = []
    found = embedding.Embedding("mlp", epochs=30, widths=(("hidden", (4,)),), batch_size=10, say=lines.append)(source)
    assert found.shape == (60, 4) and found.dtype == np.float32 and (found >= 0).all()  # after the ReLU
    assert len(lines) == 30 and "epoch 30 of 30" in lines[-1]
    # A line through the embeddings of the training images separates the test images.
    design = np.c_[found, np.ones(60)]
    train, test = ~source.is_test, source.is_test
    weights = np.linalg.lstsq(design[train], 2.0 * source.y[train] - 1, rcond=None)[0]
    assert ((design[test] @ weights > 0) == source.y[test]).mean() > 0.9


def test_labels_of_test_examples_are_not_looked_at():
    source = images()
    changed = source.y.copy()
    changed[source.is_test] = 1 - changed[source.is_test]
    embed = embedding.Embedding("mlp", epochs=2, batch_size=10, **QUIET)
    np.testing.assert_array_equal(embed(source), embed(Source(**(vars(source) | {"y": changed}))))


def test_what_decides_it_is_in_its_key():
    base = embedding.make("mlp", epochs=2, seed=1, hidden=(4,))
    others = [
        embedding.make("mlp", epochs=3, seed=1, hidden=(4,)),
        embedding.make("mlp", epochs=2, seed=2, hidden=(4,)),
        embedding.make("mlp", epochs=2, seed=1, hidden=(5,)),
        embedding.make("cnn", epochs=2, seed=1, hidden=(4,)),
    ]
    assert base.key == embedding.make("mlp", epochs=2, seed=1, hidden=(4,)).key
    assert base.key not in {other.key for other in others}


@pytest.mark.parametrize("name", ["resnet", "lstm"])
def test_unknown_embeddings_are_named(name):
    with pytest.raises(ArgumentError, match=f"^embedding={name}: accepted: auto, pixels, linear, mlp"):
        embedding.make(name)
