"""Builds the run of a command line again, from the flags in its config.json. `pfljax.load` imports this module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfljax import api
from pfljax.api import loading
from pfljax.cli import build, train
from pfljax.cli.names import current
from pfljax.cli.settings import parse
from pfljax.settings import own_files, recorded


def run(config: Mapping[str, Any], client_store: str, overrides: Mapping[str, Any]) -> api.Run:
    """Builds the run of a config.json on this machine's devices, its clients in a store.

    `overrides` has what is not built: "method", "clients", "model" and "local".
    """
    if "method" not in overrides:
        recorded.restored(config.get("method"), "method")  # registers a method of the user's
    flags = current(config["flags"])

    # Paths are relative to the folder that the command was run in.
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

    # The clients.
    trial = build.Trial(flags["seed"], flags["split"])
    if "clients" in overrides:
        training = overrides["clients"]
        unseen = None
    else:
        training, unseen = build.build_clients(settings, trial.of_data)
    training = loading.as_trained(config, training)
    unseen = None if unseen is None else loading.as_trained(config, unseen)
    return build.build_run(settings, settings.method, (training, unseen), trial, overrides)
