"""Validation examples: returned to the training part after tuning, and left out of tuning where others test on them."""

import numpy as np
import pytest

import pfljax as pfl
from pfljax import data

PARTITIONS = {
    "label groups": None,
    "Dirichlet": pfl.partitions.Dirichlet(0.5),
    "IID": pfl.partitions.IID(),
}


def equal(ours, theirs):
    """Whether two federations have the same examples in the same order, scaled alike."""
    for part in ("train", "validation", "test"):
        a = getattr(ours, part)
        b = getattr(theirs, part)
        np.testing.assert_array_equal(a.size, b.size)
        np.testing.assert_array_equal(np.asarray(a.y), np.asarray(b.y))
        np.testing.assert_array_equal(np.asarray(a.x), np.asarray(b.x))
    for own, other in zip(ours.scaling or (), theirs.scaling or (), strict=True):
        np.testing.assert_array_equal(own, other)
    return data.digest(ours) == data.digest(theirs)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_clients_are_those_without_a_validation_part(partition, fraction):
    """To the bit, with the statistics of all training examples."""
    options = {
        "num_clients": 7,
        "partition": PARTITIONS[partition],
        "seed": 3,
        "train_examples": 19,
    }
    held_out = data.digits(validation_fraction=fraction, **options)
    returned = data.return_validation(held_out)
    assert equal(returned, data.digits(**options)) and returned.validation_returned
    assert held_out.validation.size.sum() > 0 and not held_out.validation_returned
    seen, unseen = data.split_unseen(held_out, 0.3, 1)
    others = data.split_unseen(data.digits(**options), 0.3, 1)
    assert equal(data.return_validation(seen), others[0]) and equal(
        data.return_validation(unseen), others[1]
    )


@pytest.mark.parametrize(
    "kind", ["columns", "numbers", "images", "a tree", "sequences", "regression"]
)
def test_every_kind_of_examples(kind):
    rng = np.random.default_rng(0)
    n = 61  # a prime
    x = {
        "columns": rng.normal(size=(n, 3)),
        "numbers": rng.normal(size=n)[:, None],
        "images": rng.integers(0, 256, size=(n, 4, 4, 3), dtype=np.uint8),
        "a tree": {"a": rng.normal(size=(n, 3)), "b": rng.integers(0, 9, size=(n, 2))},
        "sequences": rng.integers(0, 9, size=(n, 5)),
        "regression": rng.normal(size=(n, 3)),
    }[kind]
    y = np.arange(n) % 3
    y = {"sequences": rng.integers(0, 9, size=(n, 5)), "regression": rng.normal(size=n)}.get(
        kind, y
    )
    client = np.repeat(np.arange(4), [2, 3, 17, 39])

    def make(fraction):
        return pfl.Federation.from_arrays(x, y, client=client, validation_fraction=fraction, seed=5)

    held_out = make(0.3)
    whole = make(0.0)
    returned = data.return_validation(held_out)
    for number in range(4):
        parts = [held_out.examples(number, part) for part in ("validation", "train")]
        own, labels = returned.examples(number, "train")
        expected, targets = whole.examples(number, "train")
        if kind != "a tree":
            np.testing.assert_array_equal(own, np.concatenate([part[0] for part in parts]))
            np.testing.assert_array_equal(own, expected)
        np.testing.assert_array_equal(labels, targets)
    assert data.digest(returned) == data.digest(whole)


def test_clients_without_validation_examples_stay_as_they_are():
    clients = data.digits(num_clients=3, train_examples=5)
    assert data.return_validation(clients) is clients
    returned = data.return_validation(
        data.digits(num_clients=3, train_examples=5, validation_fraction=0.4)
    )
    assert data.return_validation(returned) is returned


def test_validation_examples_that_others_test_on_are_left_out():
    """By hand: of the numbers 0 to 9, others test on 2, 3 and 7, and on a number of another client."""

    def federation(test, validation):
        parts = {"test": test, "validation": validation}
        splits = {}
        for part in ("train", "validation", "test"):
            rows = parts.get(part, [[0.0], [1.0]])
            size = np.array([len(row) for row in rows], np.int32)
            stacked = np.zeros((2, max(size.max(), 1), 1), np.float32)
            for number, row in enumerate(rows):
                stacked[number, : len(row), 0] = row
            splits[part] = data.federation.Split(
                stacked, np.zeros(stacked.shape[:2], np.int32), size
            )
        return pfl.Federation(
            **splits, group=None, task="classification", num_classes=2, name="by hand"
        )

    ours = federation(test=[[4.0], [5.0]], validation=[[1.0, 2.0, 6.0], [7.0, 8.0]])
    theirs = federation(test=[[2.0, 3.0], [7.0]], validation=[[9.0], [0.0]])
    kept, other = data.without_tested([ours, theirs], [ours, theirs])
    assert [kept.examples(number, "validation")[0].ravel().tolist() for number in (0, 1)] == [
        [1.0, 6.0],
        [8.0],
    ]
    assert kept.validation.size.tolist() == [2, 1] and kept.validation.x[1, 1:].sum() == 0
    assert other.validation.size.tolist() == [1, 1]
    assert kept.train is ours.train and kept.test is ours.test
