"""Clients whose data change: what each change does to their examples, worked out from the clients as they were."""

import numpy as np
import pytest

import pfljax as pfl
from pfljax.data import Drift, drifted

SIZES = (6, 8, 4, 8)


def make_clients(**options):
    """Four clients; each example's x tells the client and its number, and three classes take turns."""
    owner = np.repeat(np.arange(4), SIZES)
    number = np.concatenate([np.arange(size) for size in SIZES])
    x = np.stack([owner, number, owner * 100 + number], axis=1).astype(float)
    is_test = number % 2 == 1
    return pfl.Federation.from_arrays(
        x, (number // 2) % 3, owner, is_test=is_test, standardize=False, **options
    )


def examples(clients, client, split="train"):
    """A client's x and y as lists."""
    x, y = clients.examples(client, split)
    return x.tolist(), y.tolist()


def test_labels_are_permuted_from_the_round_after_on():
    clients = make_clients()
    drift = Drift(round=3, change="labels", clients=[1, 3], labels=[2, 0, 1])
    before = drifted(clients, drift, round=3)
    after = drifted(clients, drift, round=4)
    for split in ("train", "test"):
        for client in range(4):
            x, y = examples(clients, client, split)
            assert examples(before, client, split) == (x, y)
            expected = [[2, 0, 1][label] for label in y] if client in (1, 3) else y
            assert examples(after, client, split) == (x, expected)
    assert (
        after.train.y.shape == clients.train.y.shape
        and after.train.y.dtype == clients.train.y.dtype
    )


def test_a_drawn_permutation_is_shared_and_moves_every_class():
    clients = pfl.data.digits(num_clients=8)
    after = drifted(clients, Drift(round=1, share=0.5), round=2, seed=3)
    pairs = set()
    for client in range(8):
        _, before = clients.examples(client, "train")
        _, now = after.examples(client, "train")
        if (before != now).any():
            assert (before != now).all()
            pairs |= {*zip(before.tolist(), now.tolist(), strict=True)}
    assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
    assert (after.group != clients.group).sum() == 4  # they draw from a distribution of their own


def test_an_exchange_passes_examples_on_in_the_given_order():
    clients = make_clients()
    after = drifted(clients, Drift(round=1, change="exchange", clients=[0, 2, 1]), round=2)
    for split in ("train", "test"):
        for client, giver in ((0, 2), (2, 1), (1, 0), (3, 3)):
            assert examples(after, client, split) == examples(clients, giver, split)


def test_a_drawn_exchange_is_between_groups():
    clients = pfl.data.digits(num_clients=8)  # two groups of four
    after = drifted(clients, Drift(round=1, change="exchange", share=1), round=2)
    assert (after.group != clients.group).all()
    assert sorted(after.train.size) == sorted(clients.train.size)


def test_new_classes_are_those_that_were_held_back():
    clients = make_clients()
    drift = Drift(round=2, change="classes", clients=[1, 2], labels=[1])
    before = drifted(clients, drift, round=2)
    after = drifted(clients, drift, round=3)
    for split in ("train", "test"):
        for client in range(4):
            x, y = examples(clients, client, split)
            is_early = [label != 1 or client not in (1, 2) for label in y]
            early_x = [row for row, early in zip(x, is_early, strict=True) if early]
            early_y = [label for label, early in zip(y, is_early, strict=True) if early]
            assert examples(before, client, split) == (early_x, early_y)
            assert examples(after, client, split) == (x, y)
    padding = np.arange(before.train.y.shape[1]) >= before.train.size[:, None]
    assert not before.train.y[padding].any() and not np.asarray(before.train.x)[padding].any()


def test_half_of_a_clients_classes_are_new_by_default():
    clients = pfl.data.digits(num_clients=4)
    before = drifted(clients, Drift(round=1, change="classes", share=1), round=1)
    had = (clients.class_counts() > 0).sum(axis=1)
    assert (before.class_counts() > 0).sum(axis=1).tolist() == (had - had // 2).tolist()


def test_clients_come_and_leave():
    clients = make_clients()
    drift = [
        Drift(round=5, change="leave", clients=[3]),
        Drift(round=2, change="arrive", clients=[0]),
    ]
    for number, there in ((1, [1, 2, 3]), (2, [1, 2, 3]), (3, [0, 1, 2, 3]), (6, [0, 1, 2])):
        current = drifted(clients, drift, number)
        for name in ("train", "test"):
            expected = np.where(np.isin(np.arange(4), there), getattr(clients, name).size, 0)
            assert getattr(current, name).size.tolist() == expected.tolist()


def test_changes_follow_each_other():
    clients = make_clients()
    drift = [
        Drift(round=1, change="labels", clients=[0], labels=[1, 2, 0]),
        Drift(round=1, change="exchange", clients=[0, 3]),
        Drift(round=2, change="labels", clients=[3], labels=[1, 2, 0]),
    ]
    x, y = examples(clients, 0)
    after = drifted(clients, drift, round=3)
    assert examples(after, 3) == (x, [(label + 2) % 3 for label in y])
    assert examples(after, 0) == examples(clients, 3)


@pytest.mark.parametrize(
    ("drift", "words"),
    [
        (Drift(round=1, clients=[4]), "accepted: 0 to 3"),
        (Drift(round=1, labels=[1, 0]), "accepted: a permutation of the 3 classes"),
        (
            Drift(round=1, change="classes", labels=[3]),
            "accepted: classes 0 to 2",
        ),
        (Drift(round=1, change="exchange"), "accepted: an exchange of at least 2 clients"),
        (Drift(round=1, change="leave", share=1), "drift: leaves no client"),
        (Drift(round=1, change="arrive", share=1), "drift: leaves no client"),
    ],
)
def test_a_change_that_cannot_be_is_told_in_one_line(drift, words):
    clients = make_clients()
    with pytest.raises(pfl.ArgumentError) as raised:
        drifted(clients, drift, round=2, seed=5)
    line = str(raised.value)
    assert words in line and "\n" not in line


def test_targets_without_classes_have_no_labels_to_change():
    x = np.arange(16.0).reshape(8, 2)
    clients = pfl.Federation.from_arrays(x, x[:, 0], client=np.arange(8) % 2)
    with pytest.raises(pfl.ArgumentError, match=r"'labels' changes classes; accepted here"):
        drifted(clients, Drift(round=1), round=2)
    after = drifted(clients, Drift(round=1, change="exchange", clients=[0, 1]), round=2)
    assert examples(after, 0) == examples(clients, 1)
