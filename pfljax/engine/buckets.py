"""Uneven clients: which of them are worked on side by side, so that few steps wait for longer ones.

A device sorts its clients by size, the longest first, and takes them in sections: (clients at a time, how often). The
sections are the same in all rounds and on all devices, and so are made for clients as they typically are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

WASTE = 0.2  # of the steps at most, in which clients wait for those beside them
COHORTS = 16  # that are drawn to see how clients typically are, where not all are in a round
Sections = tuple[tuple[int, int], ...]


def on_devices(steps: np.ndarray, num_clients: int, devices: int) -> np.ndarray:
    """(n, ceil(S / D)) steps of the clients on a device, in the order of their ids, for all devices and some rounds.

    Args:
        steps: (K,) that each of all clients takes in a round.
        num_clients: S of a round; random ones, if fewer than K.
        devices: D.
    """
    rng = np.random.default_rng(0)
    cohorts = [steps]
    if num_clients < len(steps):
        draw = lambda: np.sort(rng.choice(len(steps), num_clients, replace=False))
        cohorts = [steps[draw()] for _ in range(COHORTS)]
    per_device = -(-num_clients // devices)
    padded = [np.pad(cohort, (0, per_device * devices - num_clients)) for cohort in cohorts]
    return np.concatenate([cohort.reshape(devices, per_device) for cohort in padded]).astype(float)


def waiting(lengths: np.ndarray, sections: Sections) -> float:
    """The share of steps in which a client waits for others beside it; `lengths` (n, S / D) in the order of work."""
    done, place = 0.0, 0
    for width, count in sections:
        for _ in range(count):
            done += width * lengths[:, place : place + width].max(axis=1, initial=0).sum()
            place += width
    return 1 - lengths.sum() / done if done else 0.0


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Each device's clients in the order in which sections take them."""
    return -np.sort(-lengths, axis=1)


def sections_of(lengths: np.ndarray, widest: int) -> Sections:
    """Sections of at most `widest` clients for devices with clients of these `lengths` (n, S / D)."""
    lengths = longest_first(lengths)
    widths = sorted({max(widest // 8**n, 1) for n in range(4)} | {1})
    for allowed in (WASTE, WASTE / 2, WASTE / 4, WASTE / 8):
        sections = _fill(lengths.mean(axis=0), widths, allowed)
        if waiting(lengths, sections) < WASTE:
            return sections
    return ((1, lengths.shape[1]),)


def _fill(lengths: np.ndarray, widths: Sequence[int], allowed: float) -> Sections:
    """Each chunk as wide as waste allows, but never narrower again, since each width is compiled by itself."""
    chunks, place, width = [], 0, 1
    while place < len(lengths):

        def fits(width, place=place):
            together = lengths[place : place + width]
            return width * together[0] - together.sum() <= allowed * max(together.sum(), lengths.mean() * width)

        width = max(w for w in widths if w == width or (w > width and fits(w)))
        chunks.append(min(width, len(lengths) - place))  # not more clients than there are: they would be copies
        place += width
    return tuple((width, len(list(same))) for width, same in itertools.groupby(chunks))
