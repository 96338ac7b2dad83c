"""Builds the run of a command line again, from the flags in its config.json. `pfljax.load` imports this module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfljax import api
from pfljax.cli import build, train
from pfljax.cli.names import current
from pfljax.cli.settings import Settings, parse
from pfljax.data import Federation
from pfljax.settings import own_files, recorded


def clients(config: Mapping[str, Any]) -> tuple[Federation, Federation | None]:
    """Builds the training clients of a config.json, and those held out of training (or None)."""
    settings = settings_of(config)
    return build.build_clients(settings, trial_of(config).data_seed)


def run(
    config: Mapping[str, Any],
    client_store: str,
    clients: tuple[Federation, Federation | None],
    prebuilt: Mapping[str, Any],
) -> api.Run:
    """Builds the run of a config.json on this machine's devices.

    Args:
        config: The content of config.json.
        client_store: Where the clients are stored.
        clients: The training clients, and those held out of training (or None).
        prebuilt: Parts that are not built: "method", "model" and "local".
    """
    if "method" not in prebuilt:
        recorded.restored(config.get("method"), "method")  # registers a method of one's own
    settings = settings_of(config, client_store)
    return build.build_run(settings, settings.method, clients, trial_of(config), prebuilt)


def trial_of(config: Mapping[str, Any]) -> build.Trial:
    """The seed and the split of a run."""
    flags = current(config["flags"])
    return build.Trial(flags["seed"], flags["split"])


def settings_of(config: Mapping[str, Any], client_store: str = "device") -> Settings:
    """The settings of a run, for this machine's devices."""
    flags = current(config["flags"])
    folder = Path(config.get("directory", "."))
    paths = ["data_file", "data_dir"]
    if own_files.is_file_and_name(flags["model"]):
        paths.append("model")
    for flag in paths:
        flags[flag] = flags[flag] and str(folder / flags[flag])

    # Execution is this machine's.
    flags |= {
        "plan": "auto",
        "devices": 0,
        "model_devices": 1,
        "exchange": "auto",
        "client_store": client_store,
    }
    settings = parse(train.define, [])
    for flag in flags.keys() & settings.values.keys():
        # config.json has no infinity
        is_infinite = flags[flag] is None and isinstance(settings[flag], float)
        settings = settings.replace({flag: math.inf if is_infinite else flags[flag]})
    return settings
