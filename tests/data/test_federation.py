"""Federations: splits within clients, padding, and descriptions."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import Splits, partitions
from pfljax.data.dealing import Assignment
from pfljax.data.federation import pack
from pfljax.data.sources import Source

SIZES = (2, 3, 5, 40, 11)
ASSIGNMENT = Assignment(
    np.split(np.arange(61), np.cumsum(SIZES)[:-1]), np.array([3, 1, 4, 1, 5], np.int32)
)
# x is the example's number, counted from 1, to distinguish it from padding (0); y follows from it.
SOURCE = Source(
    x=np.arange(1, 62, dtype=np.float32)[:, None] * np.ones(2, np.float32),
    y=(np.arange(61) % 3 + 1).astype(np.int32),
    client=None,
    is_test=np.arange(61) % 2 == 0,
    num_classes=4,
    task="classification",
    name="toy",
)


def parts(federation):
    return federation.train, federation.validation, federation.test


def examples(split, k):
    """Checks padding and targets, and returns the ids of client k's examples in a split."""
    size = split.size[k]
    assert not split.x[k, size:].any() and not split.y[k, size:].any()
    ids = split.x[k, :size, 0].astype(int) - 1
    np.testing.assert_array_equal(split.y[k, :size], SOURCE.y[ids])
    return ids


@pytest.mark.parametrize("validation_fraction", [0, 0.25])
def test_the_parts_of_a_client_are_its_examples_each_once(validation_fraction):
    federation = pack(SOURCE, ASSIGNMENT, Splits(validation_fraction=validation_fraction))
    for k, ids in enumerate(ASSIGNMENT.indices):
        found = np.concatenate([examples(split, k) for split in parts(federation)])
        np.testing.assert_array_equal(np.sort(found), ids)
    train, validation, test = (split.size for split in parts(federation))
    np.testing.assert_array_equal(test, [1, 1, 1, 8, 2])
    np.testing.assert_array_equal(validation, [0, 1, 1, 8, 2] if validation_fraction else 0)
    assert (train >= 1).all()


def test_shapes_and_types_fit_the_interface():
    federation = pack(SOURCE, ASSIGNMENT)
    assert federation.train.x.shape == (5, 32, 2) and federation.test.x.shape == (5, 8, 2)
    assert federation.validation.x.shape == (5, 0, 2) and federation.validation.y.shape == (5, 0)
    for split in parts(federation):
        assert (split.x.dtype, split.y.dtype, split.size.dtype) == (np.float32, np.int32, np.int32)
    np.testing.assert_array_equal(federation.group, ASSIGNMENT.group)
    assert (federation.task, federation.num_classes, federation.name) == (
        "classification",
        4,
        "toy",
    )


def test_train_examples_caps_training_and_not_testing():
    federation = pack(SOURCE, ASSIGNMENT, Splits(train_examples=7))
    np.testing.assert_array_equal(federation.train.size, [1, 2, 4, 7, 7])
    np.testing.assert_array_equal(federation.test.size, [1, 1, 1, 8, 2])
    whole = pack(SOURCE, ASSIGNMENT)
    np.testing.assert_array_equal(examples(federation.test, 3), examples(whole.test, 3))
    assert federation.train.x.shape[1] == 7
    halved = pack(SOURCE, ASSIGNMENT, Splits(train_examples=8, validation_fraction=0.5))
    np.testing.assert_array_equal(halved.train.size + halved.validation.size, [1, 2, 4, 8, 8])
    np.testing.assert_array_equal(halved.validation.size, [0, 1, 2, 4, 4])


def test_test_examples_caps_testing_and_not_training():
    federation = pack(SOURCE, ASSIGNMENT, Splits(test_examples=3))
    whole = pack(SOURCE, ASSIGNMENT)
    np.testing.assert_array_equal(federation.test.size, [1, 1, 1, 3, 2])
    assert federation.test.x.shape[1] == 3 and set(examples(federation.test, 3)) < set(
        examples(whole.test, 3)
    )
    np.testing.assert_array_equal(federation.train.x, whole.train.x)
    official = pack(SOURCE, ASSIGNMENT._replace(is_test=SOURCE.is_test), Splits(test_examples=3))
    np.testing.assert_array_equal(official.test.size, [1, 2, 2, 3, 3])
    assert (examples(official.test, 3) % 2 == 0).all()


def test_sequences_keep_their_tokens_and_targets():
    x = np.arange(1, 62, dtype=np.uint8)[:, None] * np.ones(3, np.uint8)
    source = dataclasses.replace(SOURCE, x=x, y=x + np.uint8(100))
    federation = pack(source, ASSIGNMENT, Splits(validation_fraction=0.25))
    for split in parts(federation):
        assert (
            split.x.shape == split.y.shape == (5, split.x.shape[1], 3)
            and split.x.dtype == split.y.dtype == np.uint8
        )
        for k, size in enumerate(split.size):
            np.testing.assert_array_equal(split.y[k, :size], split.x[k, :size] + 100)
            assert not split.x[k, size:].any() and not split.y[k, size:].any()
    found = np.concatenate([split.x[3, : split.size[3], 0] for split in parts(federation)])
    np.testing.assert_array_equal(np.sort(found), ASSIGNMENT.indices[3] + 1)
    told = data.describe(federation)
    assert "classes_per_client" not in told and told["digest"] == data.digest(federation)
    changed = pack(
        dataclasses.replace(source, y=x + np.uint8(101)),
        ASSIGNMENT,
        Splits(validation_fraction=0.25),
    )
    assert data.digest(changed) != data.digest(federation)


def test_splits_are_random_and_decided_by_the_seed():
    first, again, other = (pack(SOURCE, ASSIGNMENT, seed=seed) for seed in (1, 1, 2))
    for a, b in zip(parts(first), parts(again), strict=True):
        np.testing.assert_array_equal(a.x, b.x)
    assert set(examples(first.test, 3)) != set(examples(other.test, 3))
    assert data.digest(first) == data.digest(again) != data.digest(other)


def test_what_is_for_testing_by_assignment_is_for_testing():
    assignment = ASSIGNMENT._replace(is_test=SOURCE.is_test)
    federation = pack(SOURCE, assignment)
    for k in range(5):
        assert (examples(federation.test, k) % 2 == 0).all() and (
            examples(federation.train, k) % 2 == 1
        ).all()
    some = SOURCE.is_test & (np.arange(61) >= 5)  # clients 0 and 1 are left without test examples
    with pytest.raises(ArgumentError, match=r"^official_test: 2 of 5 clients"):
        pack(SOURCE, ASSIGNMENT._replace(is_test=some))


@pytest.mark.parametrize("partition", ["IID", "LabelGroups", "Dirichlet", "Pathological"])
def test_no_test_example_of_anyone_is_trained_on_by_anyone(partition):
    splits = Splits(replacement=True, train_examples=9, validation_fraction=0.2)
    federation = data.digits(300, getattr(partitions, partition)(), splits=splits)

    def rows(split):
        real = np.arange(split.x.shape[1]) < split.size[:, None]
        return {row.tobytes() for row in split.x[real]}

    assert (federation.train.size >= 1).all() and (federation.test.size >= 1).all()
    assert (federation.train.size + federation.validation.size).max() == 9
    learned = rows(federation.train) | rows(federation.validation)
    assert len(learned) > 500 and not learned & rows(federation.test)  # digits holds no image twice


def test_a_negative_seed_is_refused():
    with pytest.raises(ArgumentError, match=r"^seed=-3: accepted: 0 or more"):
        pack(SOURCE, ASSIGNMENT, seed=-3)


def test_unseen_clients_are_kept_out():
    federation = pack(SOURCE, ASSIGNMENT)
    seen, unseen = data.split_unseen(federation, 0.4, seed=0)
    assert (seen.num_clients, unseen.num_clients) == (3, 2)
    assert sorted([*seen.group, *unseen.group]) == sorted(ASSIGNMENT.group)
    both = np.concatenate([seen.test.x, unseen.test.x])
    assert {client.tobytes() for client in both} == {
        client.tobytes() for client in federation.test.x
    }
    for side in (seen, unseen):
        for k in range(side.num_clients):
            owner = {
                int(np.searchsorted(np.cumsum(SIZES), i, side="right"))
                for s in parts(side)
                for i in examples(s, k)
            }
            assert len(owner) == 1 and ASSIGNMENT.group[owner.pop()] == side.group[k]
    assert (
        len({data.split_unseen(federation, 0.4, seed=s)[1].group.tobytes() for s in range(6)}) > 1
    )


@pytest.mark.parametrize("share", [0, 0.05, 0.95])
def test_unseen_clients_need_one_on_each_side(share):
    with pytest.raises(ArgumentError, match=f"^unseen={share}: .* of 5 clients would be unseen"):
        data.split_unseen(pack(SOURCE, ASSIGNMENT), share, seed=0)
    with pytest.raises(ArgumentError, match=r"^unseen=1: accepted: 0 to below 1"):
        data.split_unseen(pack(SOURCE, ASSIGNMENT), 1, seed=0)


ANIMALS = np.array(["dog", "cat", "eel", "fox"])


def animals(numbers, x=None, **options):
    """A federation of two clients whose labels are names."""
    x = np.arange(len(numbers))[:, None] if x is None else x
    y = ANIMALS[numbers] if options.pop("named", True) else np.array(numbers)
    return data.Federation.from_arrays(x, y, np.arange(len(numbers)) % 2, **options)


def test_unseen_clients_have_training_s_classes_by_name():
    """Alone, a federation of dogs and eels has the classes 0 and 1; beside one with cats, these are 1 and 2."""
    clients = animals([0, 1, 2] * 4)
    unseen = animals([2, 2, 0, 0, 2])
    assert (clients.class_names, unseen.class_names) == (("cat", "dog", "eel"), ("dog", "eel"))
    found = data.match_classes(unseen, clients)
    assert found.class_names == clients.class_names and found.num_classes == 3
    for part in ("train", "test"):
        before = getattr(unseen, part)
        after = getattr(found, part)
        for k, size in enumerate(before.size):
            np.testing.assert_array_equal(after.y[k, :size], before.y[k, :size] + 1)
    assert (
        data.match_classes(None, clients) is None
        and data.match_classes(clients, clients) is clients
    )


@pytest.mark.parametrize(
    ("unseen", "message"),
    [
        (
            animals([0, 3, 3, 0, 1]),
            "has classes that training does not know: fox; accepted: cat, dog, eel",
        ),
        (
            animals([0, 1, 2, 1], named=False),
            "is <arrays, .*, classes with numbers; accepted: data like that of .* names",
        ),
        (animals([0, 1, 2, 1], np.ones((4, 3))), r"is .* x \(3,\)"),
        (animals([0.5, 1, 2, 1], named=False), "is .* regression"),
        ("x", "accepted: a Federation"),
    ],
)
def test_unseen_clients_of_other_data_are_refused(unseen, message):
    with pytest.raises(ArgumentError, match=f"^unseen: {message}"):
        data.match_classes(unseen, animals([0, 1, 2] * 4))


def test_numbers_beyond_training_s_classes_are_refused():
    clients = animals([0, 1, 2] * 4, named=False)
    with pytest.warns(UserWarning, match="^y: has labels from 2"):
        unseen = animals([2, 2, 3, 3], named=False)
    with pytest.raises(
        ArgumentError,
        match=r"^unseen: has classes that training does not know: 3; accepted: 0, 1, 2$",
    ):
        data.match_classes(unseen, clients)
    with pytest.warns(UserWarning, match="^y: has labels from 2"):
        same = animals([2, 2, 2, 2], named=False)
    assert data.match_classes(same, clients) is same  # numbers mean the same everywhere


def table(**columns):
    """A federation of the columns of a data frame, in which a client has all examples."""
    frame = pd.DataFrame(columns)
    return data.Federation.from_arrays(frame, np.arange(len(frame)) % 2, np.zeros(len(frame), int))


HEAT = np.array([5.0, 6.0, 7.0, 8.0, 9.0])


def test_columns_of_unseen_clients_are_matched_by_name():
    clients = table(heat=HEAT, rain=HEAT - 5)
    swapped = table(rain=HEAT - 5, heat=HEAT)
    found = data.match_classes(swapped, clients)
    assert found.feature_names == clients.feature_names == ("heat", "rain")
    for part in ("train", "test"):
        expected = np.asarray(getattr(clients, part).x)
        np.testing.assert_array_equal(np.asarray(getattr(found, part).x), expected)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"heat": HEAT, "snow": HEAT}, "has no column rain; expected heat, rain"),
        ({"heat": HEAT}, "has no column rain; expected heat, rain"),
        ({"Heat": HEAT, "rain": HEAT}, "has no column heat; expected heat, rain"),
    ],
)
def test_unseen_clients_without_a_column_are_refused(columns, message):
    with pytest.raises(ArgumentError, match=f"^unseen: {message}$"):
        data.match_classes(table(**columns), table(heat=HEAT, rain=HEAT))


def wards(tmp_path, names):
    """Clients of a table with a column of categories; every category is in training and test examples."""
    frame = pd.DataFrame({"ward": names * 2, "heat": np.arange(2.0 * len(names)), "label": 0})
    frame["label"] = np.arange(len(frame)) % 2
    frame["who"] = "all"
    frame["is_test"] = np.arange(len(frame)) >= len(names)
    frame.to_csv(tmp_path / "wards.csv", index=False)
    return data.read(tmp_path / "wards.csv", client="who", categorical="ward", test="is_test")


def test_categories_of_unseen_clients_are_matched_by_name(tmp_path):
    """D, which training does not know, is in no column; B, which the unseen clients do not have, is 0."""
    clients = wards(tmp_path, ["A", "B", "C"])
    assert clients.feature_names == ("ward=A", "ward=B", "ward=C", "heat")
    unseen = wards(tmp_path, ["A", "C", "D"])
    with pytest.warns(UserWarning, match="^unseen: has categories .*: ward=D; all columns"):
        found = data.match_classes(unseen, clients)
    x = np.asarray(found.test.x)[0]
    expected = [[1, 0, 0, 3], [0, 0, 1, 4], [0, 0, 0, 5]]
    np.testing.assert_array_equal(x[np.argsort(x[:, 3])], expected)
    assert found.scaling is clients.scaling


def test_unseen_clients_are_scaled_as_the_training_clients(recwarn):
    x = np.random.default_rng(0).normal(size=(12, 3))
    y = [0, 1, 2] * 4
    clients = animals(y, x)
    for unseen in (animals(y, x + 1), animals(y, x + 1, standardize=False)):
        found = data.match_classes(unseen, clients)
        assert found.scaling is clients.scaling
        pool = unseen.train.x.pool
        np.testing.assert_allclose(
            found.standardized.train.x[0, :1], clients.scaling(pool[unseen.train.x.index[0, :1]])
        )
    assert not recwarn.list


def test_the_digest_sees_sizes_targets_and_examples():
    digests = {data.digest(pack(SOURCE, ASSIGNMENT))}
    for name in ("x", "y", "size"):
        federation = pack(SOURCE, ASSIGNMENT)
        changed = np.array(getattr(federation.test, name))
        changed.flat[0] += 1  # of a real example, not of padding
        digests.add(
            data.digest(
                dataclasses.replace(federation, test=federation.test._replace(**{name: changed}))
            )
        )
    assert len(digests) == 4


def test_the_description_counts_and_is_json():
    told = data.describe(pack(SOURCE, ASSIGNMENT, Splits(train_examples=7)))
    assert json.loads(json.dumps(told)) == told
    assert told["clients"] == 5
    assert told["train"] == {"total": 21, "min": 1, "median": 4.0, "max": 7}
    assert told["test"] == {"total": 13, "min": 1, "median": 1.0, "max": 8}
    assert told["validation"]["total"] == 0
    assert told["classes_per_client"]["min"] == 1 and told["classes_per_client"]["max"] == 3
    assert "classes_per_client" not in data.describe(data.sine(4))


def test_random_pixels_have_the_asked_shape():
    federation = data.random_pixels(3, 8, (5, 4, 1), 7, seed=0)
    assert federation.train.x.shape == (3, 8, 5, 4, 1) and federation.train.x.dtype == np.float32
    assert (
        federation.train.y.dtype == np.int32
        and federation.train.y.max() < federation.num_classes == 7
    )
    assert federation.train.size.tolist() == [8, 8, 8] and federation.test.size.tolist() == [
        2,
        2,
        2,
    ]
    assert data.digest(federation) == data.digest(data.random_pixels(3, 8, (5, 4, 1), 7, seed=0))


def test_a_federation_is_shown_in_a_line():
    assert repr(data.digits(train_examples=15, test_examples=10)) == (
        "<digits, label_groups: 16 clients, 10 classes, x (8, 8, 1); 240 train, 160 test>"
    )
    assert repr(data.sine(4)) == "<sine, natural: 4 clients, regression, x (1,); 64 train, 16 test>"


@pytest.mark.parametrize("targets", ["own", "shuffled"])
def test_a_process_has_its_own_clients_examples_only(targets):
    whole, part = (
        data.load(data.sources.digits(), splits=Splits(targets=targets), seed=2, local_clients=own)
        for own in (None, lambda num_clients: slice(4, num_clients))
    )
    assert (
        part.local_clients == slice(4, 16)
        and part.num_clients == 16
        and part.index_digest == whole.index_digest
    )
    np.testing.assert_array_equal(part.test.x, whole.test.x[4:])
    np.testing.assert_array_equal(part.train.y, whole.train.y[4:])
    np.testing.assert_array_equal(part.train.size, whole.train.size)


@pytest.mark.parametrize("first", [7, 30])
def test_the_order_of_given_parts_is_each_client_s_own(first):
    """Client 2's examples are in the same order, whatever the size of client 0."""

    def order(size):
        sizes = [size, 6, 5]
        client = np.repeat(np.arange(3), sizes)
        number = np.concatenate([np.arange(each) for each in sizes])
        x = np.stack([client, number], axis=1).astype(np.float32)
        federation = data.Federation.from_arrays(
            x, number % 2, client, is_test=number < 1, standardize=False
        )
        return federation.examples(2, "train")[0][:, 1].tolist(), federation.examples(0, "train")[
            0
        ][:, 1].tolist()

    assert order(first)[0] == order(3)[0]
    assert sorted(order(first)[0]) == [1, 2, 3, 4]
    assert order(30)[1] != sorted(order(30)[1])  # shuffled


def test_names_that_are_integers_are_not_taken_for_numbers():
    sites = np.repeat([1, 2, 7], 2)
    y = [0, 1, 0, 1, 0, 1]
    clients = data.Federation.from_arrays(np.ones((6, 1)), y, sites, standardize=False)
    assert [clients.client_number(name) for name in ("1", "2", "7")] == [0, 1, 2]
    assert clients.client_number(0) == 0  # nobody's name
    with pytest.raises(ArgumentError, match=r"^client=1: is the number .* number 0; pass .*'1'$"):
        clients.client_number(1)
    with pytest.raises(ArgumentError, match=r"^client=2: is the number .* number 1; pass .*'2'$"):
        clients.client_number(np.int64(2))
    with pytest.raises(ArgumentError, match=r"^client=7: accepted: 0 to 2, or the name '7', a str"):
        clients.client_number(7)


def test_an_unknown_client_is_answered_with_what_there_is():
    sites = np.repeat(["7", "8"], 2)
    clients = data.Federation.from_arrays(np.ones((4, 1)), [0, 1, 0, 1], sites, standardize=False)
    assert clients.client_number("8") == clients.client_number(1) == 1
    with pytest.raises(ArgumentError, match=r"^client=7: accepted: 0 to 1, or the name '7', a str"):
        clients.client_number(7)
    with pytest.raises(ArgumentError, match=r"^client=-1: accepted: 0 to 1, or a name such as 7, "):
        clients.client_number(-1)
    numbered = data.Federation.from_arrays(np.ones((2, 1)), [0, 1], [0, 0], standardize=False)
    with pytest.raises(ArgumentError, match=r"^client=x: accepted: 0 to 0$"):
        numbered.client_number("x")
