"""Embeddings by networks trained here."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from pfljax.contract.errors import ArgumentError
from pfljax.data import embedding, latent
from pfljax.data.sources import Source

QUIET = {"say": lambda line: None}


def images(n=60, side=8, seed=0):
    """Images whose mean determines the class; a third are for testing."""
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=n).astype(np.int32)
    x = (rng.normal(size=(n, side, side, 1)) + y[:, None, None, None]).astype(np.float32)
    return Source(x, y, None, np.arange(n) % 3 == 0, 2, "classification", "images")


def test_auto_is_pixels_of_small_images_and_of_large_ones_classes_where_there_are_as_many():
    small = images()
    large = images(side=32)
    assert embedding.make("pixels") is None and embedding.automatic(small, 2) == "pixels"
    assert [embedding.automatic(large, clusters) for clusters in (1, 2, 3)] == [
        "vgg11",
        "classes",
        "vgg11",
    ]
    flat = Source(**(vars(large) | {"x": large.x.reshape(60, -1)}))
    assert embedding.automatic(flat, 3) == "pixels"


@pytest.mark.parametrize("num_classes", [2, 10])
def test_as_many_clusters_of_classes_are_the_classes(num_classes, tmp_path):
    y = np.random.default_rng(0).integers(num_classes, size=500).astype(np.int32)
    source = Source(
        np.zeros((500, 2), np.float32), y, None, None, num_classes, "classification", "labels"
    )
    found = latent.clusters(source, embedding.make("classes"), num_classes, 0, str(tmp_path))
    assert adjusted_rand_score(y, found) == 1


def test_it_is_what_the_last_hidden_layer_gives_before_the_relu_and_tells_the_classes():
    source = images()
    lines = []
    found = embedding.Embedding(
        "mlp", epochs=30, widths=(("hidden", (4,)),), batch_size=10, say=lines.append
    )(source)
    assert found.shape == (60, 4) and found.dtype == np.float32 and (found < 0).any()
    assert len(lines) == 31 and "epoch 30 of 30" in lines[-2]
    # A line through the embeddings of the training images separates the test images.
    design = np.c_[found, np.ones(60)]
    train = ~source.is_test
    test = source.is_test
    weights = np.linalg.lstsq(design[train], 2.0 * source.y[train] - 1, rcond=None)[0]
    assert ((design[test] @ weights > 0) == source.y[test]).mean() > 0.9


@pytest.mark.parametrize("tests", [True, False])
def test_a_network_that_misses_the_demanded_accuracy_is_named(tests):
    """A network that has learned nothing, on labels independent of the images."""
    lines = []
    changed = {"y": (np.arange(60) % 2).astype(np.int32)} | ({} if tests else {"is_test": None})
    embed = embedding.Embedding("mlp", epochs=1, batch_size=0, learning_rate=1e-9, say=lines.append)
    embed(Source(**(vars(images()) | changed)))
    assert f"accuracy on the {'test' if tests else 'training'} images" in lines[-1]
    assert "warning: FedFomo's paper requires 85%" in lines[-1]


def test_a_network_that_reaches_it_is_not():
    lines = []
    easy = Source(**(vars(images()) | {"y": np.zeros(60, np.int32)}))
    embedding.Embedding("mlp", epochs=30, batch_size=10, say=lines.append)(easy)
    assert "100.0% accuracy on the test images" in lines[-1] and "warning" not in lines[-1]


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


def test_embeddings_of_another_version_are_not_taken_from_the_cache(monkeypatch, tmp_path):
    made = []
    base = embedding.Embedding("mlp", epochs=1, say=made.append)
    for version, lines in (
        (embedding.VERSION, 2),
        (embedding.VERSION, 2),
        (embedding.VERSION + 1, 4),
    ):
        monkeypatch.setattr(embedding, "VERSION", version)
        latent.clusters(images(), base, 2, 0, str(tmp_path))
        assert len(made) == lines


@pytest.mark.parametrize("name", ["resnet", "lstm"])
def test_unknown_embeddings_are_named(name):
    with pytest.raises(
        ArgumentError,
        match=f"^embedding={name}: accepted: auto, pixels, classes, linear, logistic, mlp",
    ):
        embedding.make(name)
