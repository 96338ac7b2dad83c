"""Data sources: data sets as plain arrays, before they are divided among clients."""

from collections.abc import Callable

from pfljax.data.former import module_attributes
from pfljax.data.sources.arrays import make_source
from pfljax.data.sources.builtin import digits, sine, synthetic
from pfljax.data.sources.federated import tff
from pfljax.data.sources.files import npy, npz
from pfljax.data.sources.flbench_files import flbench
from pfljax.data.sources.folders import images
from pfljax.data.sources.formats import FORMATS, detect_format, has_tests, read
from pfljax.data.sources.hub import hub
from pfljax.data.sources.leaf_files import leaf
from pfljax.data.sources.pfllib_files import pfllib
from pfljax.data.sources.plays import text
from pfljax.data.sources.prepared import tfds
from pfljax.data.sources.records import arrayrecord
from pfljax.data.sources.saved import huggingface
from pfljax.data.sources.source import PAD_TOKEN, Source
from pfljax.data.sources.tables import table

__all__ = [
    "FORMATS",
    "PAD_TOKEN",
    "SOURCES",
    "Source",
    "arrayrecord",
    "detect_format",
    "digits",
    "flbench",
    "has_tests",
    "hub",
    "huggingface",
    "images",
    "leaf",
    "make_source",
    "npy",
    "npz",
    "pfllib",
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
    **{name: file_format.read for name, file_format in FORMATS.items()},
    "tfds": tfds,
    "hf": hub,
}
NAMED = ("tfds", "hf")  # data sets that have a name after a colon

__getattr__ = module_attributes(__name__, {"KINDS": "FORMATS", "kind_of": "detect_format"})


def __dir__() -> list[str]:
    return sorted(__all__)
