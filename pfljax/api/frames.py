"""Scores as pandas DataFrames. pandas is optional and imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pfljax.contract import optional
from pfljax.data import Federation

SPLITS = ("train", "validation", "test")


def of_results(results: Mapping[str, np.ndarray], federation: Federation) -> Any:
    """Converts the content of results.npz to a DataFrame with one row per evaluated round, client and split."""
    pd, rounds = optional.load("pandas", "to_pandas"), results["rounds"]
    found = [split for split in SPLITS if f"loss_{split}" in results]
    clients = results.get("clients", np.arange(federation.num_clients))
    index = pd.MultiIndex.from_product([rounds, clients, found], names=["round", "client", "split"])
    stacked = lambda metric: np.stack([results[f"{metric}_{split}"] for split in found], axis=-1).ravel()
    names = [name.removesuffix(f"_{found[0]}") for name in results if name.endswith(f"_{found[0]}")]
    metrics = sorted(names, key=lambda name: ("loss", "accuracy", name).index(name))
    sizes = np.stack([getattr(federation, split).size[clients] for split in found], axis=-1)
    of_clients = lambda values: np.tile(np.repeat(values[clients], len(found)), len(rounds))
    columns = {} if federation.distribution is None else {"group": of_clients(federation.distribution)}
    columns["size"] = np.tile(sizes.ravel(), len(rounds))
    if federation.client_names is not None:
        columns["name"] = of_clients(federation.client_names)
    columns |= {metric: stacked(metric) for metric in metrics}
    return pd.DataFrame(columns, index=index).reset_index()
