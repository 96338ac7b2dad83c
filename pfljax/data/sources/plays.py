"""Texts of roles that speak: next-character prediction."""

from __future__ import annotations

import pathlib
import re

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.data.sources.reading import read_text
from pfljax.data.sources.source import PAD_TOKEN, Source, generator, subsample

TEXT_WINDOW = 80  # characters that a text's example shows
LEAST_WINDOWS = 8  # of a part of a role's text, as far as it has characters
TEXT_TRAIN = 0.8  # share of a role's lines, from the first on, to train on


def text(file: str, *, stride: int = 1, seed: int = 0, fraction: float = 1.0) -> Source:
    """The roles of a play as clients, who speak character by character (Shakespeare of FedAvg and FedEM).

    Each role's lines are divided into a training and a test part, and no window of characters crosses the two.

    Args:
        file: Holds blocks of lines, a blank line between them, each spoken by the role that the block's first line
            "NAME:" names.
        stride: How many characters the windows are apart.
        seed: Decides the subsample.
        fraction: The share of the windows to keep, drawn uniformly.

    Raises:
        ArgumentError: naming file, stride or fraction.
    """
    if not file:
        raise ArgumentError("file", "needed: a text of roles that speak")
    if stride < 1:
        raise ArgumentError("stride", "accepted: 1 or more", stride)
    roles = _roles(file)
    letters = sorted(set("\n".join(part for parts in roles for part in parts)))
    if len(letters) >= PAD_TOKEN:
        raise ArgumentError("file", f"has {len(letters)} different characters; accepted: up to {PAD_TOKEN - 1}", file)
    code = {letter: i for i, letter in enumerate(letters)}
    xs, ys, is_test, client = [], [], [], []
    for k, parts in enumerate(roles):
        for test, part in enumerate(parts):
            x, y = _windows(np.array([code[letter] for letter in part], np.uint8), stride)
            xs.append(x)
            ys.append(y)
            is_test.append(np.full(len(x), bool(test)))
            client.append(np.full(len(x), k))
    x, y, is_test, client = map(np.concatenate, (xs, ys, is_test, client))
    rows = subsample(generator(seed, "load"), len(x), fraction)
    name = pathlib.Path(file).stem
    distribution = np.arange(len(roles))
    return Source(x[rows], y[rows], client[rows], is_test[rows], len(letters), "classification", name, distribution)


def _roles(file: str) -> list[tuple[str, str]]:
    """The training and the test text of each role with two lines or more, in the order of first appearance."""
    content = read_text(file)
    spoken: dict[str, list[str]] = {}
    speaker = None
    for block in re.split(r"\n\s*\n", content):
        lines = [line for line in block.split("\n") if line.strip()]
        if lines and re.fullmatch("[^:]+:", lines[0].strip()):
            speaker = lines.pop(0).strip()
        if speaker:  # what comes before the first heading is nobody's
            spoken.setdefault(speaker, []).extend(lines)
    if not spoken:
        accepted = (
            "blocks of lines with a blank line between them, the first line of a block "
            '"NAME:" and the following ones what NAME speaks'
        )
        raise ArgumentError("file", f"is a text without roles; accepted: {accepted}", file)
    roles = []
    for lines in spoken.values():
        cut = min(max(1, int(TEXT_TRAIN * len(lines))), len(lines) - 1)
        parts = "\n".join(lines[:cut]), "\n".join(lines[cut:])
        if min(map(len, parts)) > 1:  # a single character would leave nothing to predict
            roles.append(parts)
    if not roles:
        raise ArgumentError("file", "no role has two lines, one to train on and one to test on", file)
    return roles


def _windows(tokens: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """The windows of tokens (length,), and what follows each token of theirs: both (n, TEXT_WINDOW) uint8.

    A part too short for LEAST_WINDOWS at that stride has them closer together, and the last ones run past its end
    where even that is not enough, so that every role has more than one example.
    """
    starts = np.arange(0, max(len(tokens) - TEXT_WINDOW, 1), stride)
    if len(starts) < LEAST_WINDOWS:
        last = max(len(tokens) - TEXT_WINDOW - 1, min(LEAST_WINDOWS - 1, len(tokens) - 2))
        starts = np.unique(np.linspace(0, last, LEAST_WINDOWS).astype(int))
    missing = max(starts[-1] + TEXT_WINDOW + 1 - len(tokens), 0)
    x, y = np.pad(tokens, (0, missing)), np.pad(tokens, (0, missing), constant_values=PAD_TOKEN)
    view = np.lib.stride_tricks.sliding_window_view
    return view(x, TEXT_WINDOW + 1)[starts, :-1], view(y, TEXT_WINDOW + 1)[starts, 1:]
