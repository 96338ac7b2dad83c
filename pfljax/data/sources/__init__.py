"""Data sources: data sets as plain arrays, before they are divided among clients."""

from collections.abc import Callable

from pfljax.data.sources.arrays import make_source
from pfljax.data.sources.builtin import digits, sine, synthetic
from pfljax.data.sources.federated import tff
from pfljax.data.sources.files import npy, npz
from pfljax.data.sources.folders import images
from pfljax.data.sources.kinds import KINDS, has_tests, kind_of, read
from pfljax.data.sources.leaf_files import leaf
from pfljax.data.sources.plays import text
from pfljax.data.sources.prepared import tfds
from pfljax.data.sources.records import arrayrecord
from pfljax.data.sources.saved import huggingface
from pfljax.data.sources.source import PAD_TOKEN, Source
from pfljax.data.sources.tables import table

__all__ = [
    "KINDS",
    "PAD_TOKEN",
    "SOURCES",
    "Source",
    "arrayrecord",
    "digits",
    "has_tests",
    "huggingface",
    "images",
    "kind_of",
    "leaf",
    "make_source",
    "npy",
    "npz",
    "read",
    "sine",
    "synthetic",
    "table",
    "text",
    "tfds",
    "tff",
]

SOURCES: dict[str, Callable[..., Source]] = {
    "digits": digits,
    "sine": sine,
    "synthetic": synthetic,
    **{name: kind.read for name, kind in KINDS.items()},
    "tfds": tfds,
}
