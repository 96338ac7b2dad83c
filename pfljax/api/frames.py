"""Scores as pandas DataFrames; pandas is an optional dependency, imported with the first of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.data import Federation

SPLITS = ("train", "validation", "test")


def pandas() -> ModuleType:
    """The module pandas.

    Raises:
        ArgumentError: if it is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ArgumentError("to_pandas", "needs pandas: pip install 'pfljax[pandas]'") from error
    return pandas


def of_results(results: Mapping[str, np.ndarray], federation: Federation) -> Any:
    """A DataFrame of the content of results.npz, with a row per evaluated round, client and split."""
    pd, rounds = pandas(), results["rounds"]
    found = [split for split in SPLITS if f"loss_{split}" in results]
    clients = results.get("clients", np.arange(federation.num_clients))
    index = pd.MultiIndex.from_product([rounds, clients, found], names=["round", "client", "split"])
    stacked = lambda metric: np.stack([results[f"{metric}_{split}"] for split in found], axis=-1).ravel()
    metrics = [metric for metric in ("loss", "accuracy") if f"{metric}_{found[0]}" in results]
    sizes = np.stack([getattr(federation, split).size[clients] for split in found], axis=-1)
    columns = {
        "group": np.tile(np.repeat(federation.distribution[clients], len(found)), len(rounds)),
        "size": np.tile(sizes.ravel(), len(rounds)),
    }
    columns |= {metric: stacked(metric) for metric in metrics}
    return pd.DataFrame(columns, index=index).reset_index()
