"""Data: a `Federation` is made from a source of examples, a partition among clients and splits within clients."""

from pfljax.data import partitions, sources
from pfljax.data.datasets import digits, npz, read, sine, synthetic, text, tfds
from pfljax.data.federation import Federation, keep_own, load, shuffle_targets
from pfljax.data.splits import Splits
from pfljax.data.statistics import (
    client_codes,
    codes_of,
    describe,
    digest,
    heterogeneity,
    inverse_frequency_weights,
)
from pfljax.data.variants import (
    match_classes,
    pad_alike,
    random_pixels,
    return_validation,
    split_unseen,
    without_tested,
)

__all__ = [
    "Federation",
    "Splits",
    "client_codes",
    "codes_of",
    "describe",
    "digest",
    "digits",
    "heterogeneity",
    "inverse_frequency_weights",
    "keep_own",
    "load",
    "match_classes",
    "npz",
    "pad_alike",
    "partitions",
    "random_pixels",
    "read",
    "return_validation",
    "shuffle_targets",
    "sine",
    "sources",
    "split_unseen",
    "synthetic",
    "text",
    "tfds",
    "without_tested",
]


def __dir__() -> list[str]:
    return __all__
