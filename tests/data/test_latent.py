"""Latent distributions: clusters are recovered, cached on disk and dealt evenly."""

import dataclasses

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Split
from pfljax.data import Federation, Splits, latent, partitions
from pfljax.data.sources import Source

KINDS = 3


def blobs(n=240, seed=0):
    """Examples around three distant centers, independent of the labels, and the center of each."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(KINDS, size=n)
    centers = 20 * np.eye(KINDS, 5)
    x = (centers[kind] + rng.normal(size=(n, 5))).astype(np.float32)
    y = rng.integers(2, size=n).astype(np.int32)
    return Source(x, y, None, np.arange(n) % 5 == 0, 2, "classification", "blobs"), kind


def same_partition(a, b):
    """Whether two labelings are equal up to renaming."""
    pairs = set(zip(a.tolist(), b.tolist(), strict=True))
    return len(pairs) == len(set(a.tolist())) == len(set(b.tolist()))


def test_clusters_are_those_of_the_examples(tmp_path):
    source, kind = blobs()
    assert same_partition(latent.clusters(source, None, KINDS, 0, str(tmp_path)), kind)


def test_the_embedding_is_what_is_clustered(tmp_path):
    source, kind = blobs()

    def embed(source):
        return source.y[:, None].astype(np.float32)

    found = latent.clusters(source, embed, 2, 0, str(tmp_path))
    assert same_partition(found, source.y) and not same_partition(found, kind)
    # This embedding has no key, so it is not cached.
    assert same_partition(
        latent.clusters(source, lambda source: source.x, KINDS, 0, str(tmp_path)), kind
    )
    assert not list(tmp_path.iterdir())


def test_a_clustering_is_made_once_for_the_same_inputs(tmp_path):
    source, _ = blobs()
    calls = []

    def embed(source):
        calls.append(1)
        return source.x

    embed.key = "mine"
    first = latent.clusters(source, embed, KINDS, 0, str(tmp_path))
    np.testing.assert_array_equal(latent.clusters(source, embed, KINDS, 0, str(tmp_path)), first)
    assert len(calls) == 1
    moved = dataclasses.replace(source, x=source.x + 1)
    other_tests = dataclasses.replace(source, is_test=~source.is_test)
    for changed, seed in ((moved, 0), (other_tests, 0), (source, 1)):
        before = len(calls)
        latent.clusters(changed, embed, KINDS, seed, str(tmp_path))
        assert len(calls) == before + 1
    embed.key = "another"
    latent.clusters(source, embed, KINDS, 0, str(tmp_path))
    assert len(calls) == 5
    # The embedding does not depend on the number of clusters.
    assert len(set(latent.clusters(source, embed, 2, 0, str(tmp_path)).tolist())) == 2
    assert len(calls) == 5


@pytest.mark.parametrize("damage", ["truncated", "other", "shape"])
def test_a_damaged_cache_is_made_anew(tmp_path, damage):
    source, _ = blobs()
    first = latent.clusters(source, None, KINDS, 0, str(tmp_path))
    paths = sorted(tmp_path.iterdir())
    whole = [path.read_bytes() for path in paths]
    assert len(paths) == 2  # the embedding and the clusters
    for path, content in zip(paths, whole, strict=True):
        if damage == "truncated":
            path.write_bytes(content[:100])
        else:
            np.savez(path, **({"x": first} if damage == "other" else {"array": first[:-1]}))
    np.testing.assert_array_equal(latent.clusters(source, None, KINDS, 0, str(tmp_path)), first)
    with np.load(paths[1]) as found:
        np.testing.assert_array_equal(found["array"], first)
    assert sorted(tmp_path.iterdir()) == paths


def test_a_cache_that_cannot_be_written_is_no_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    source, kind = blobs()
    assert same_partition(
        latent.clusters(source, None, KINDS, 0, str(tmp_path / "file" / "folder")), kind
    )


@pytest.mark.parametrize("number", [0, 241])
def test_there_are_at_most_as_many_clusters_as_examples(tmp_path, number):
    with pytest.raises(
        ArgumentError, match=f"^groups={number}: accepted: 1 to 240, the number of examples"
    ):
        latent.clusters(blobs()[0], None, number, 0, str(tmp_path))


@pytest.mark.parametrize("official_test", [False, True])
def test_clients_are_dealt_evenly_to_clusters_and_share_nothing(official_test, monkeypatch):
    source, kind = blobs()
    monkeypatch.setattr(latent, "clusters", lambda *arguments: kind)
    partition = partitions.Latent(groups=KINDS)
    splits = Splits(official_test=official_test)
    assignment = partitions.assign(source, partition, num_clients=7, splits=splits, seed=1)
    counts = np.bincount(assignment.group, minlength=KINDS)
    assert counts.max() - counts.min() <= 1
    ids = np.concatenate(assignment.indices)
    np.testing.assert_array_equal(np.sort(ids), np.arange(len(kind)))  # each once, all given out
    for own, group in zip(assignment.indices, assignment.group, strict=True):
        assert set(kind[own].tolist()) == {int(group)}
    if official_test:
        np.testing.assert_array_equal(assignment.is_test, source.is_test)
    else:
        assert assignment.is_test is None


def test_shuffled_targets_move_validation_and_test_together_and_nothing_else(tmp_path):
    partition = partitions.Latent(groups=3, cache=str(tmp_path))

    def make(targets):
        return data.digits(6, partition, seed=3, validation_fraction=0.2, targets=targets)

    own = make("own")
    shuffled = make("shuffled")
    assert own.target is None and "shuffled" in shuffled.name
    np.testing.assert_array_equal(own.train.x, shuffled.train.x)
    origin = []
    for k in range(6):
        same = [np.array_equal(shuffled.test.x[k], own.test.x[j]) for j in range(6)]
        assert same.count(True) == 1
        origin.append(same.index(True))
        for part in ("validation", "test"):
            for name in ("x", "y", "size"):
                found, wanted = (getattr(getattr(f, part), name) for f in (shuffled, own))
                np.testing.assert_array_equal(found[k], wanted[origin[k]])
    assert sorted(origin) == list(range(6)) and origin != list(range(6))
    np.testing.assert_array_equal(shuffled.target, own.group[origin])


@pytest.mark.parametrize("places", [(), (2,)])
def test_inverse_frequency_weights_by_hand(places):
    """Of four classes with shares 3/4, 1/4, 0 and 0, only the first is more frequent than average."""
    y = np.array([[0, 0, 1, 9], [0, 9, 9, 9]], np.int32)
    if places:  # as sequences of two, of which the second client's ends in padding
        y = np.array([[[0, 0], [0, 0], [1, 1], [9, 9]], [[0, 0], [9, 9], [9, 9], [9, 9]]], np.int32)
        y[0, 0, 1] = 1
        y[1, 0, 1] = 255
    split = Split(np.zeros((2, 4, 1), np.float32), y, np.array([3, 1], np.int32))
    federation = Federation(split, split, split, np.zeros(2, np.int32), "classification", 4, "toy")
    share = [4 / 7, 3 / 7, 0, 0] if places else [3 / 4, 1 / 4, 0, 0]
    capped = np.array([1 / (4 * share[0]), 1 / (4 * share[1]) if places else 1, 1, 1])
    mean = share[0] * capped[0] + share[1] * capped[1]
    np.testing.assert_allclose(data.inverse_frequency_weights(federation), capped / mean, rtol=1e-6)
    with pytest.raises(ArgumentError, match="class_weights: accepted only for classification"):
        data.inverse_frequency_weights(dataclasses.replace(federation, task="regression"))


def test_heterogeneity_by_hand():
    # Three clients: labels {0, 0}, {0, 1}, {1, 1, 1, 1}; the whole: 3/8 and 5/8.
    y = np.array([[0, 0, 9, 9], [0, 1, 9, 9], [1, 1, 1, 1]], np.int32)
    split = Split(np.zeros((3, 4, 1), np.float32), y, np.array([2, 2, 4], np.int32))
    federation = Federation(split, split, split, np.zeros(3, np.int32), "classification", 2, "toy")
    expected = np.mean([2 * 5 / 8, 2 * 1 / 8, 2 * 3 / 8])
    assert data.heterogeneity(federation) == pytest.approx(expected)
    assert data.heterogeneity(dataclasses.replace(federation, task="regression")) is None
