"""Data: a `Federation` is made from a source of examples, a partition among clients and splits within clients."""

from pfljax.data import partitions, sources
from pfljax.data.datasets import digits, huggingface, npz, read, sine, synthetic, text, tfds
from pfljax.data.drift import Drift, drifted
from pfljax.data.federation import Federation, keep_clients, load, shuffle_targets
from pfljax.data.former import module_attributes
from pfljax.data.splits import Splits
from pfljax.data.statistics import (
    client_codes,
    describe,
    digest,
    distinct_codes,
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
    "Drift",
    "Federation",
    "Splits",
    "client_codes",
    "describe",
    "digest",
    "digits",
    "distinct_codes",
    "drifted",
    "heterogeneity",
    "huggingface",
    "inverse_frequency_weights",
    "keep_clients",
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

__getattr__ = module_attributes(
    __name__, {"codes_of": "distinct_codes", "keep_own": "keep_clients"}
)


def __dir__() -> list[str]:
    return sorted(__all__)
