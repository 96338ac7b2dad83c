"""Plays for next-character prediction: every role is a client."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import read_text
from pfljax.data.sources.source import PAD_TOKEN, Fraction, Source, generator, subsample
from pfljax.settings.fields import Seed, checked, hyperparameter

Stride = Annotated[int, hyperparameter(at_least=1)]
PLAY = "a text file with a play in lines of NAME: and what NAME says"
TEXT_WINDOW = 80  # number of characters in an example
# minimum number of windows in each part of a role's text, if it has enough characters
LEAST_WINDOWS = 8
TEXT_TRAIN = 0.8  # fraction of a role's lines to train on, starting at the first


@checked()
def text(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=PLAY, help=PLAY)],
    *,
    stride: Stride = 1,
    seed: Seed = 0,
    fraction: Fraction = 1.0,
) -> Source:
    """Reads a play; its roles are clients that predict the next character (Shakespeare in FedAvg and FedEM).

    Each role's lines are split into a training and a test part, and no window of characters spans both.

    Args:
        file: Path of a text with blocks of lines, separated by blank lines. The first line of a block, "NAME:", names
            the role that speaks the other lines.
        stride: Number of characters between the starts of consecutive windows.
        seed: Seed for the subsample.
        fraction: Fraction of the windows to keep, sampled uniformly.

    Raises:
        ArgumentError: if file, stride or fraction is not accepted.
    """
    file = str(file)
    roles = {name: halves(lines) for name, lines in _spoken(file).items()}
    return next_characters(roles, file, stride=stride, seed=seed, fraction=fraction)


def next_characters(
    roles: Mapping[str, tuple[str, str]], file: str, *, stride: int, seed: int, fraction: float
) -> Source:
    """The windows of each role's training and test text; the arguments are those of `text`. Leaves out short roles."""
    # With a single character, there is nothing to predict.
    roles = {name: parts for name, parts in roles.items() if min(map(len, parts)) > 1}
    if not roles:
        raise ArgumentError(
            "file", "no role has two lines, one for training and one for testing", file
        )
    letters = sorted(set("\n".join(part for parts in roles.values() for part in parts)))
    if len(letters) >= PAD_TOKEN:
        raise ArgumentError(
            "file",
            f"has {len(letters)} different characters; accepted: at most {PAD_TOKEN - 1}",
            file,
        )
    code = {letter: i for i, letter in enumerate(letters)}
    xs = []
    ys = []
    is_test = []
    client = []
    for k, parts in enumerate(roles.values()):
        for test, part in enumerate(parts):
            x, y = _windows(np.array([code[letter] for letter in part], np.uint8), stride)
            xs.append(x)
            ys.append(y)
            is_test.append(np.full(len(x), bool(test)))
            client.append(np.full(len(x), k))
    x, y, is_test, client = map(np.concatenate, (xs, ys, is_test, client))
    rows = subsample(generator(seed, "load"), len(x), fraction)
    name = pathlib.Path(file).stem
    return Source(
        x[rows],
        y[rows],
        client[rows],
        is_test[rows],
        len(letters),
        "classification",
        name,
        client_names=np.array(list(roles)),
        tokens=True,
    )


def halves(lines: Sequence[str]) -> tuple[str, str]:
    """A role's lines to train on, as one text, and those to test on."""
    cut = min(max(1, int(TEXT_TRAIN * len(lines))), len(lines) - 1)
    return "\n".join(lines[:cut]), "\n".join(lines[cut:])


def _spoken(file: str) -> dict[str, list[str]]:
    """Returns the lines of each role, in order of first appearance."""
    content = read_text(file)
    spoken: dict[str, list[str]] = {}
    speaker = None
    for block in re.split(r"\n\s*\n", content):
        lines = [line for line in block.split("\n") if line.strip()]
        if lines and re.fullmatch("[^:]+:", lines[0].strip()):
            speaker = lines.pop(0).strip().removesuffix(":").strip()
        if speaker:  # lines before the first heading belong to no role
            spoken.setdefault(speaker, []).extend(lines)
    if not spoken:
        accepted = (
            "blocks of lines separated by blank lines, each with a first line "
            '"NAME:" followed by the lines that NAME speaks'
        )
        raise ArgumentError("file", f"has no roles; accepted: {accepted}", file)
    return spoken


def _windows(tokens: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the windows of tokens (length,) and the tokens that follow each: both uint8 (n, TEXT_WINDOW).

    If a part is too short for LEAST_WINDOWS windows at the given stride, the stride is reduced. If that is not enough,
    the last windows run past the part's end, so that every role has more than one example.
    """
    starts = np.arange(0, max(len(tokens) - TEXT_WINDOW, 1), stride)
    if len(starts) < LEAST_WINDOWS:
        last = max(len(tokens) - TEXT_WINDOW - 1, min(LEAST_WINDOWS - 1, len(tokens) - 2))
        starts = np.unique(np.linspace(0, last, LEAST_WINDOWS).astype(int))
    missing = max(starts[-1] + TEXT_WINDOW + 1 - len(tokens), 0)
    x = np.pad(tokens, (0, missing))
    y = np.pad(tokens, (0, missing), constant_values=PAD_TOKEN)
    view = np.lib.stride_tricks.sliding_window_view
    return view(x, TEXT_WINDOW + 1)[starts, :-1], view(y, TEXT_WINDOW + 1)[starts, 1:]
