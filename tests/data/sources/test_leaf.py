"""Data sets in LEAF's layout, written as its scripts write them."""

import json

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources


def write(folder, part, users, name="all_data_0_keep_0_train_9.json"):
    """Writes a part: {user: (x, y)}."""
    (folder / part).mkdir(exist_ok=True, parents=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    (folder / part / name).write_text(json.dumps(content))
    return folder / part / name


def drawn(seed, n):
    """n examples as FEMNIST has them: lists of 784 shades, and a class each."""
    rng = np.random.default_rng(seed)
    return rng.random((n, 784)).round(4).tolist(), [0, *rng.integers(62, size=n - 1).tolist()]


@pytest.fixture
def femnist(tmp_path):
    """Two writers, one in each training file, and their test examples."""
    folder = tmp_path / "femnist"
    parts = {"f1": (drawn(0, 5), drawn(1, 2)), "f0": (drawn(2, 4), drawn(3, 1))}
    for number, (user, (train, _)) in enumerate(parts.items()):
        write(folder, "train", {user: train}, f"{number}.json")
    write(folder, "test", {user: test for user, (_, test) in parts.items()})
    return folder, parts


def test_users_are_clients_and_the_test_part_is_kept(femnist):
    folder, parts = femnist
    source = sources.leaf(folder, shape=(28, 28, 1), standardize=False)
    assert source.x.shape == (12, 28, 28, 1) and source.client_names.tolist() == ["f0", "f1"]
    assert source.num_classes <= 62
    for k, user in enumerate(source.client_names):
        for test, (x, y) in enumerate(parts[str(user)]):
            rows = (source.client == k) & (source.is_test == bool(test))
            np.testing.assert_allclose(source.x[rows].reshape(-1, 784), x, rtol=1e-6)
            np.testing.assert_array_equal(source.y[rows], y)


def test_a_folder_becomes_a_federation_the_same_each_time(femnist):
    folder, _ = femnist
    first, again = (data.read(folder, shape=(28, 28)) for _ in range(2))
    assert sources.detect_format(folder) == "leaf" and sources.has_tests("leaf", folder)
    assert data.digest(first) == data.digest(again) and first.official_test is True
    assert (first.train.size.tolist(), first.test.size.tolist()) == ([4, 5], [1, 2])
    assert data.read(folder).train.x.shape[2:] == (784,)


def test_without_a_test_part_none_is_official(tmp_path):
    write(tmp_path, "train", {"a": drawn(0, 3)})
    assert sources.leaf(tmp_path).is_test is None and not sources.has_tests("leaf", tmp_path)


@pytest.mark.parametrize("tested", [["d", "e"], ["a", "b"]])
def test_users_that_have_no_test_examples_or_no_others_are_told(tested, tmp_path):
    """LEAF's split by user (`-t user`), and one user without test examples."""
    users = {user: drawn(number, 6) for number, user in enumerate("abcde")}
    write(tmp_path, "train", {user: users[user] for user in "abc"})
    write(tmp_path, "test", {user: users[user] for user in tested})
    with pytest.raises(
        ArgumentError,
        match=r"official_test: \d of \d clients have no official training or test examples",
    ):
        data.read(tmp_path)
    clients = data.read(tmp_path, official_test=False)
    assert set(clients.client_names) == {"a", "b", "c", *tested} and clients.test.size.min() == 1


def test_texts_predict_the_character_after_the_last(tmp_path):
    users = {"HAMLET": (["abcd", "bcd "], [" ", "a"]), "OPHELIA": (["dddd", "cccc"], ["b", "d"])}
    write(tmp_path, "train", users)
    source = sources.leaf(tmp_path)
    # Sorted: " " is 0, a is 1, b is 2, c is 3, d is 4.
    np.testing.assert_array_equal(
        source.x, [[1, 2, 3, 4], [2, 3, 4, 0], [4, 4, 4, 4], [3, 3, 3, 3]]
    )
    np.testing.assert_array_equal(source.y[:, -1], [0, 1, 2, 4])
    assert (source.y[:, :-1] < 0).all() and source.tokens and source.x.dtype == np.uint8
    assert source.num_classes == 5 and source.client.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (
            [["1", "Mon", "NO_QUERY", "me", "so sad"]] * 2,
            [0, 1],
            "x of u is neither numbers of one length",
        ),
        (["1.jpg", "22.jpg"], [0, 1], "x of u is neither numbers"),
        ([[1.0, 2.0], [3.0]], [0, 1], "x of u is neither numbers"),
        ([[1.0], [2.0], [3.0]], [0, 1], "has 3 x but 2 y of u"),
        (["ab", "abc"], ["a", "b"], "has texts of several lengths"),
    ],
)
def test_other_layouts_are_refused(tmp_path, x, y, said):
    write(tmp_path, "train", {"u": (x, y)})
    with pytest.raises(ArgumentError, match=f"^file=.*: {said}"):
        sources.leaf(tmp_path)


def test_damaged_folders_are_refused_in_a_line(tmp_path, femnist):
    folder, _ = femnist
    with pytest.raises(
        ArgumentError, match=r"^shape=8,8: examples have 784 numbers; accepted: a shape of as many"
    ):
        sources.leaf(folder, shape=(8, 8))
    with pytest.raises(ArgumentError, match=r"^file=.*: has no examples in train/\*\.json"):
        sources.leaf(tmp_path / "nowhere")
    write(folder, "train", {"f2": ([[1.0, 2.0]], [0])}, "2.json")
    with pytest.raises(
        ArgumentError, match=r"^file=.*femnist: has examples of several kinds or lengths"
    ):
        sources.leaf(folder)
    path = folder / "train" / "2.json"
    for content in (
        '{"users": ["f2"], "user_data": {"f2": {"x": [[1.0',
        '{"users": ["a"]}',
        "[1, 2]",
        "[" * 100_000,
    ):
        path.write_text(content)
        with pytest.raises(
            ArgumentError, match=r"^file=.*2\.json: is not a JSON file with users and user_data"
        ) as error:
            sources.leaf(folder)
        assert "\n" not in str(error.value)
