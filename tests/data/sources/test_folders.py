"""Folders of images, written by Pillow."""

import sys

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources

Image = pytest.importorskip("PIL.Image")


def draw(path, seed, shape=(4, 6, 3)):
    """Writes an image of random colors without loss; its pixels."""
    pixels = np.random.default_rng(seed).integers(256, size=shape).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.fixture
def photos(tmp_path):
    """(folder of two clients' images in train and test, pixels by the path below the folder)."""
    names = [
        f"train/{c}/{k}/{i}.png" for c in ("eve", "ada") for k in ("dog", "cat") for i in range(2)
    ]
    names += [f"test/{c}/{k}/9.png" for c in ("eve", "ada") for k in ("dog", "cat")]
    folder = tmp_path / "photos"
    return folder, {name: draw(folder / name, seed) for seed, name in enumerate(names)}


def test_names_of_folders_are_parts_clients_and_classes(photos):
    folder, pixels = photos
    source = sources.images(folder, standardize=False)
    assert source.class_names == ("cat", "dog") and source.client_names.tolist() == ["ada", "eve"]
    assert (
        source.x.shape == (12, 4, 6, 3) and source.x.dtype == np.float32 and source.name == "photos"
    )
    for row, name in enumerate(sorted(pixels, key=lambda name: (name.startswith("test"), name))):
        part, client, kind, _ = name.split("/")
        np.testing.assert_array_equal(source.x[row], np.float32(pixels[name]) / 255)
        found = (
            source.is_test[row],
            source.client_names[source.client[row]],
            source.class_names[source.y[row]],
        )
        assert found == (part == "test", client, kind)


def test_a_folder_becomes_a_federation_the_same_each_time(photos):
    folder, _ = photos
    assert sources.detect_format(folder) == "images" and sources.has_tests("images", folder)
    first = data.read(folder)
    again = data.read(str(folder))
    assert data.digest(first) == data.digest(again) and first.official_test is True
    assert (first.train.size.tolist(), first.test.size.tolist()) == ([4, 4], [2, 2])
    part = data.read(folder / "train", official_test=False)
    assert part.official_test is None and part.num_clients == 2
    draw(folder / "train/ada/cat/0.png", seed=99)
    assert data.digest(data.read(folder)) != data.digest(first)


def test_classes_alone_have_no_clients_and_gray_images_one_channel(tmp_path):
    gray = [draw(tmp_path / f"{kind}/{i}.png", i, (5, 5)) for kind in "ab" for i in range(2)]
    (tmp_path / ".hidden").write_text("no image")
    source = sources.images(tmp_path, standardize=False)
    assert source.client is None and source.is_test is None
    np.testing.assert_array_equal(source.x[..., 0], np.float32(gray) / 255)
    color = draw(tmp_path / "b/9.png", 9, (5, 5, 3))
    mixed = np.rint(sources.images(tmp_path, standardize=False).x * 255)
    assert mixed.shape == (5, 5, 5, 3)
    np.testing.assert_array_equal(mixed[:4], np.stack([np.array(gray)] * 3, axis=-1))
    np.testing.assert_array_equal(mixed[4], color)


def test_a_size_resizes_images_of_any_size(tmp_path):
    draw(tmp_path / "a/0.png", 0, (8, 8, 3))
    flat = np.full((6, 4, 3), 200, np.uint8)
    (tmp_path / "b").mkdir()
    Image.fromarray(flat).save(tmp_path / "b/0.png")
    with pytest.raises(
        ArgumentError, match=r"^file=.*b/0\.png: has 6 x 4 pixels, but .*a/0\.png has 8 x 8; acc"
    ):
        sources.images(tmp_path)
    x = sources.images(tmp_path, size=(2, 3), standardize=False).x
    assert x.shape == (2, 2, 3, 3)
    np.testing.assert_array_equal(x[1], np.float32(200) / 255)  # of one color, whatever the filter
    with pytest.raises(ArgumentError, match=r"^size=2: accepted: rows and columns"):
        sources.images(tmp_path, size=(2,))


def test_other_folders_are_refused_in_a_line(tmp_path, monkeypatch):
    empty, mixed, deep = (tmp_path / name for name in ("empty", "mixed", "deep"))
    empty.mkdir()
    draw(mixed / "a/0.png", 0)
    draw(mixed / "ada/a/0.png", 0)
    draw(deep / "1/2/3/4.png", 0)
    torn = tmp_path / "torn"
    words = tmp_path / "words"
    draw(torn / "a/0.png", 0, (40, 40, 3))
    (torn / "a/0.png").write_bytes((torn / "a/0.png").read_bytes()[:400])
    (words / "a").mkdir(parents=True)
    (words / "a/b.txt").write_text("hello")
    (tmp_path / "long" / "a").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(tmp_path / "long/a/0.png")
    cases = {
        "empty": "has no images; accepted: a folder of images",
        "mixed": r"ada/a/0\.png is elsewhere; accepted",
        "deep": r"1/2/3/4\.png is elsewhere",
        "torn/a/0.png": "is damaged, or no image that Pillow reads",
        "words": r"has no images, and a/b\.txt is no image; accepted",
        "long/a/0.png": "has mode I;16; accepted: 8 bits per channel",
    }
    for path, said in cases.items():
        with pytest.raises(ArgumentError, match=f"^file=.*{path}: {said}") as caught:
            sources.images(tmp_path / path.split("/")[0])
        assert "\n" not in str(caught.value)
    with pytest.raises(ArgumentError, match=r"^file=.*nowhere: cannot be read .No such file"):
        sources.images(tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(
        ArgumentError, match=r"^file=.*: needs Pillow: pip install 'pfljax\[images\]'"
    ):
        sources.images(mixed / "ada")
