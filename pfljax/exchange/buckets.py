"""Buckets for clients of different sizes, so that few steps are idle.

A device sorts its clients by size, longest first, and processes them in buckets: (clients side by side, repetitions).
The buckets are the same in all rounds and on all devices, so they are chosen for typical clients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

WASTE = 0.2  # largest share of idle steps
COHORTS = 16  # number of cohorts drawn to find typical clients, if a round has only some of them
Buckets = tuple[tuple[int, int], ...]


def on_devices(steps: np.ndarray, num_clients: int, devices: int) -> np.ndarray:
    """(n, ceil(S / D)) steps of each device's clients in the order of their ids, for all devices and several rounds.

    Args:
        steps: (K,), number of steps of each client per round.
        num_clients: S; the clients are random if S < K.
        devices: D.
    """
    cohorts = [steps]
    if num_clients < len(steps):
        rng = np.random.default_rng(0)
        draws = [rng.choice(len(steps), num_clients, replace=False) for _ in range(COHORTS)]
        cohorts = [steps[np.sort(ids)] for ids in draws]
    per_device = -(-num_clients // devices)
    num_padding = per_device * devices - num_clients
    padded = [np.pad(cohort, (0, num_padding)) for cohort in cohorts]
    by_device = [cohort.reshape(devices, per_device) for cohort in padded]
    return np.concatenate(by_device).astype(float)


def waiting(lengths: np.ndarray, buckets: Buckets) -> float:
    """Share of idle steps, given `lengths` (n, S / D) in processing order."""
    done = sum(width * longest.sum() for width, longest in _chunks(lengths, buckets))
    return 1 - lengths.sum() / done if done else 0.0


def repetitions(lengths: np.ndarray, buckets: Buckets, devices: int) -> float:
    """Mean over chunks of their longest client's steps, on the slowest of D devices, averaged over cohorts."""
    longest = np.stack([longest for _, longest in _chunks(lengths, buckets)])
    by_device = longest.mean(axis=0).reshape(-1, devices)
    slowest = by_device.max(axis=1)
    return float(slowest.mean())


def _chunks(lengths: np.ndarray, buckets: Buckets) -> Iterator[tuple[int, np.ndarray]]:
    """The width of each chunk, and the steps (n,) of its longest client."""
    start = 0
    for width, count in buckets:
        for _ in range(count):
            chunk = lengths[:, start : start + width]
            yield width, chunk.max(axis=1, initial=0)
            start += width


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Each device's clients in the order in which buckets process them."""
    return -np.sort(-lengths, axis=1)


def buckets_of(lengths: np.ndarray, widest: int) -> Buckets:
    """Buckets of at most `widest` clients, for clients with these `lengths` (n, S / D)."""
    lengths = longest_first(lengths)
    widths = sorted({max(widest // 8**n, 1) for n in range(4)} | {1})
    for allowed in (WASTE, WASTE / 2, WASTE / 4, WASTE / 8):
        buckets = _fill(lengths.mean(axis=0), widths, allowed)
        if waiting(lengths, buckets) < WASTE:
            return buckets
    return ((1, lengths.shape[1]),)


def _fill(lengths: np.ndarray, widths: Sequence[int], allowed: float) -> Buckets:
    """Makes each chunk as wide as WASTE allows, but never narrower again, since each width compiles separately."""
    chunks = []
    start = 0
    width = 1
    while start < len(lengths):
        width = max(
            candidate
            for candidate in widths
            if candidate == width
            or (candidate > width and _fits(lengths, start, candidate, allowed))
        )
        chunks.append(min(width, len(lengths) - start))  # further clients would be copies
        start += width
    return tuple((width, len(list(same))) for width, same in itertools.groupby(chunks))


def _fits(lengths: np.ndarray, start: int, width: int, allowed: float) -> bool:
    """Whether a chunk from position `start` on has few idle steps, for its own or for the mean number of steps."""
    chunk = lengths[start : start + width]
    idle = width * chunk[0] - chunk.sum()
    usual = lengths.mean() * width
    return idle <= allowed * max(chunk.sum(), usual)
