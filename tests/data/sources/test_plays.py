"""Texts: roles, windows and their targets, and malformed files."""

import re

import numpy as np
import pytest

from pfljax.contract.errors import ArgumentError
from pfljax.data import sources


@pytest.fixture
def text(tmp_path):
    """Writes a text to a file and loads it: text(content, **load)."""

    def load(content, **arguments):
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "play.txt").write_bytes(content)
        return sources.text(str(tmp_path / "play.txt"), **arguments)

    return load


LINES = [f"{letter * 40}{letter.upper() * 20}" for letter in "abcde"]
PLAY = f"""Nobody says this.

Ann:
{LINES[0]}
{LINES[1]}

{LINES[2]}
{LINES[3]}

Bob:
one
two

Mute:

Once:
just this

Ann:
{LINES[4]}
"""


def test_a_role_is_one_with_a_space_before_its_colon_too(text):
    source = text(PLAY.replace("Ann:", "Ann :", 1))
    assert source.client_names.tolist() == ["Ann", "Bob"]


def test_a_text_is_its_roles_windows_with_targets_one_on(text):
    source = text(PLAY)
    spoken = "\n".join(LINES[:4]), LINES[4]  # four fifths of Ann's lines, and the last
    letters = sorted(set("".join(LINES) + "onetw\n"))
    assert (
        source.num_classes == len(letters)
        and source.task == "classification"
        and source.name == "play"
    )
    assert source.x.dtype == source.y.dtype == np.uint8
    windows = len(spoken[0]) - 80
    assert source.x.shape == source.y.shape == (windows + 8 + 4, 80)
    # Once has a single line
    np.testing.assert_array_equal(source.client, [0] * (windows + 8) + [1] * 4)
    assert source.client_names.tolist() == ["Ann", "Bob"]
    tests = [*range(windows, windows + 8), windows + 10, windows + 11]
    np.testing.assert_array_equal(np.flatnonzero(source.is_test), tests)
    assert source.group is None  # nobody knows whose lines are alike
    for i in range(windows):
        assert "".join(letters[c] for c in source.x[i]) == spoken[0][i : i + 80]
        assert "".join(letters[c] for c in source.y[i]) == spoken[0][i + 1 : i + 81]


def test_windows_of_short_parts_run_past_their_ends(text):
    source = text(PLAY)
    letters = sorted(set("".join(LINES) + "onetw\n"))
    ends = [(-12 + start, LINES[4][start:]) for start in range(8)]
    for row, content in [*ends, (-4, "one"), (-3, "ne"), (-2, "two"), (-1, "wo")]:
        known = len(content) - 1
        assert "".join(letters[c] for c in source.x[row, :known]) == content[:-1]
        assert "".join(letters[c] for c in source.y[row, :known]) == content[1:]
        assert (source.y[row, known:] == sources.PAD_TOKEN).all()


@pytest.mark.parametrize(
    ("length", "stride", "starts"),
    [
        (100, 1, range(20)),
        (81, 1, range(8)),
        (2, 1, [0]),
        (5, 80, range(4)),
        (800, 80, range(0, 720, 80)),
        (151, 80, range(0, 71, 10)),
    ],
)
def test_every_part_has_eight_windows_if_it_has_the_characters(text, length, stride, starts):
    line = "".join(
        chr(ord("a") + i % 26) if i % 7 else chr(ord("A") + i // 7 % 26) for i in range(length)
    )
    source = text(f"A:\n{line}\nxy\n", stride=stride)
    letters = sorted(set(line + "xy\n"))
    found = [
        "".join(letters[c] for c in row if c != sources.PAD_TOKEN)
        for row in source.y[~source.is_test]
    ]
    assert found == [line[start + 1 : start + 81] for start in starts]


def test_windows_can_be_apart_and_subsampled(text):
    every = text(PLAY)
    third = text(PLAY, stride=3)
    train = ~every.is_test & (every.client == 0)
    np.testing.assert_array_equal(
        third.x[~third.is_test & (third.client == 0)], every.x[train][::3]
    )
    part = text(PLAY, fraction=0.25)
    assert (
        len(part.x)
        == len(part.y)
        == len(part.client)
        == len(part.is_test)
        == round(len(every.x) / 4)
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 10])
def test_four_fifths_of_the_lines_train(text, count):
    play = "A:\nxx\nyy\n\nB:\n" + "\n".join(chr(ord("a") + i) * 2 for i in range(count))
    source = text(play)
    held = [
        set(source.y[(source.client == 1) & (source.is_test == test)].ravel()) - {0, 255}
        for test in (0, 1)
    ]
    expected = {1: (0, 0), 2: (1, 1), 3: (2, 1), 5: (4, 1), 9: (7, 2), 10: (8, 2)}[count]
    assert tuple(map(len, held)) == expected and not held[0] & held[1]


LETTERS = "".join(map(chr, range(256, 507)))


def test_a_text_may_have_254_characters(text):
    source = text(f"A:\n{LETTERS}\nxy\n")
    assert source.num_classes == 254 and source.x.max() < sources.PAD_TOKEN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no roles; accepted: blocks"),
        ("Only prose.\nMore: of it.\n", "has no roles; accepted: blocks"),
        ("A:\none line\n\nB:\none line\n", "no role has two lines"),
        ("A:\n\nB:\n", "no role has two lines"),
        (b"A:\n\xff\xfe\n", "is not UTF-8 text .byte 3"),
        (f"A:\n{LETTERS}\nxyz\n", "has 255 different characters; accepted: at most 254"),
    ],
)
def test_malformed_texts_are_refused_in_one_line(text, content, message):
    with pytest.raises(ArgumentError, match=message) as error:
        text(content)
    assert re.match(r"file=.*play\.txt: ", str(error.value)) and "\n" not in str(error.value)
