"""A folder records its clients without their examples, and what other clients differ in."""

import dataclasses

import jax
import numpy as np
import pytest

from pfljax import data
from pfljax.data import Federation
from pfljax.folder import recorded_clients

X = np.random.default_rng(0).normal(5, 3, size=(40, 2))
Y = np.array(["cat", "cow", "dog"])[np.arange(40) % 3]
NAMES = np.array(["east", "north", "south", "west"])[np.arange(40) % 4]


def federation(x=X, y=Y, client=NAMES, **options):
    return Federation.from_arrays(x, y, client=client, **options)


def recorded(folder, clients):
    recorded_clients.write(folder, clients)
    return recorded_clients.read(folder)


@pytest.mark.parametrize(
    "x", [X, X[:, :1], {"a": X, "b": np.arange(40)[:, None]}, (X.astype(np.uint8), X[:, :1])]
)
def test_everything_but_the_examples_is_read_back(x, tmp_path):
    clients = federation(x, validation_fraction=0.2)
    found = recorded(tmp_path, clients).federation
    assert data.digest(found) == data.digest(clients)
    assert found.class_names == ("cat", "cow", "dog") and found.num_classes == 3
    np.testing.assert_array_equal(found.client_names, clients.client_names)
    assert jax.tree.structure(found.inputs) == jax.tree.structure(clients.inputs)
    assert jax.tree.leaves(found.inputs) == jax.tree.leaves(clients.inputs)
    for part in ("train", "validation", "test"):
        split = getattr(found, part)
        original = getattr(clients, part)
        np.testing.assert_array_equal(split.size, original.size)
        assert split.y.shape == original.y.shape
    jax.tree.map(np.testing.assert_array_equal, found.scaling, clients.scaling)
    with pytest.raises(ValueError, match=r"^clients: were loaded without their examples"):
        found.examples(0)


def changed(array, position, value):
    array = array.copy()
    array[position] = value
    return array


DIFFERENT = [
    ({"client": np.arange(40) % 5}, "the run had 4 clients, and these are 5"),
    ({"x": X[:, :1]}, "an example's x was float64 (2,) and is float64 (1,)"),
    ({"y": np.where(Y == "cat", "cab", Y)}, "names of classes differ: cat -> cab"),
    ({"client": np.char.upper(NAMES)}, "names of clients differ: east -> EAST, north -> NORTH, "),
    ({"x": X[4:], "y": Y[4:], "client": NAMES[4:]}, "client east had 8 train examples, and has 7"),
    ({"x": changed(X, 6, 0.0)}, "x of client south differs"),
    ({"y": changed(Y, 3, "cow")}, "y of client west differs"),
    ({"x": -X}, "x of client east and 3 more differs"),
    ({"standardize": False}, "an example's x was float64 (2,) and is float32 (2,)"),
]


@pytest.mark.parametrize(("options", "text"), DIFFERENT)
def test_what_differs_is_named(options, text, tmp_path):
    known = recorded(tmp_path, federation())
    assert recorded_clients.difference(known, federation()) == ""
    assert recorded_clients.difference(known, federation(**options)).startswith(text)


def test_only_names_that_differ_are_shown(tmp_path):
    """The first of them, with the names of the run's clients before those of others."""
    ids = np.char.add("site-", (10 + np.arange(40) % 20).astype(str))
    known = recorded(tmp_path, federation(client=ids))
    last = np.where(ids == "site-29", "site-30", ids)
    text = recorded_clients.difference(known, federation(client=last))
    assert text == "names of clients differ: site-29 -> site-30"
    text = recorded_clients.difference(known, federation(client=np.char.upper(ids)))
    shown = [f"site-{number} -> SITE-{number}" for number in range(10, 15)]
    assert text == f"names of clients differ: {', '.join(shown)}, ... 15 more"
    long = np.char.add("a long prefix of the names of these sites, ", ids)
    known_long = recorded(tmp_path / "long", federation(client=long))
    first = np.where(ids == "site-10", np.char.replace(long, "-10", "-30"), long)
    text = recorded_clients.difference(known_long, federation(client=first))
    assert text.endswith(f" differ: {long[0]} -> {first[0]}")
    classes = dataclasses.replace(federation(), class_names=("cow", "cat", "dog"))
    text = recorded_clients.difference(recorded(tmp_path / "classes", federation()), classes)
    assert text == "names of classes differ: cat -> cow, cow -> cat"
    unnamed = recorded(tmp_path / "unnamed", federation(client=np.arange(40) % 20))
    text = recorded_clients.difference(unnamed, federation(client=ids))
    assert text.startswith("the clients had no names, and are named site-10, ")


def test_another_scaling_of_the_same_pixels_is_a_difference(tmp_path):
    pixels = X.astype(np.uint8)
    known = recorded(tmp_path, federation(pixels))
    other = federation(pixels, standardize=False)
    assert recorded_clients.difference(known, other) == "x is standardized in another way"
    assert recorded_clients.difference(known, other, scaled=False) == ""


def test_a_damaged_record_counts_as_none(tmp_path):
    assert recorded_clients.read(tmp_path) is None
    recorded_clients.write(tmp_path, federation())
    path = tmp_path / recorded_clients.NAME
    path.write_bytes(path.read_bytes()[:200])
    assert recorded_clients.read(tmp_path) is None
