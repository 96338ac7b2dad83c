"""Data sources: data sets as plain arrays, before they are divided among clients."""

from collections.abc import Callable

from pfljax.data.sources.arrays import make_source
from pfljax.data.sources.builtin import digits, sine, synthetic
from pfljax.data.sources.files import npz
from pfljax.data.sources.plays import text
from pfljax.data.sources.prepared import tfds
from pfljax.data.sources.source import PAD_TOKEN, Source

__all__ = [
    "PAD_TOKEN",
    "SOURCES",
    "Source",
    "digits",
    "make_source",
    "npz",
    "sine",
    "synthetic",
    "text",
    "tfds",
]

SOURCES: dict[str, Callable[..., Source]] = {
    "digits": digits,
    "sine": sine,
    "synthetic": synthetic,
    "npz": npz,
    "text": text,
    "tfds": tfds,
}
