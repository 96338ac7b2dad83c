"""Builds the run of a command line again, from the flags in its config.json. `pfljax.load` imports this module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfljax import api
from pfljax.cli import build, train
from pfljax.cli.settings import parse
from pfljax.core import own_files, recorded


def run(config: Mapping[str, Any], client_store: str, given: Mapping[str, Any]) -> api.Run:
    """Builds the run on this machine's devices.

    Args:
        config: Content of config.json.
        client_store: Where the run is to keep its clients.
        given: Parts that are not built: "method", "clients", "model" and "local".
    """
    flags = dict(config["flags"])
    if "method" not in given:
        recorded.found(config["method"], "method")  # registers a method of one's own
    for flag in ("data_file", "data_dir"):
        flags[flag] = flags[flag] and str(Path(config["directory"], flags[flag]))
    if own_files.is_file_and_name(flags["model"]):
        flags["model"] = str(Path(config["directory"], flags["model"]))
    flags |= {"plan": "auto", "devices": 0, "exchange": "auto", "client_store": client_store}
    settings = parse(train.define, [])
    settings = settings.replace({flag: value for flag, value in flags.items() if flag in settings})
    trial = build.Trial(flags["seed"], flags["split"])
    clients = (given["clients"], None) if "clients" in given else build.build_clients(settings, trial.of_data)
    return build.build_run(settings, settings.algorithm, clients, trial, given)
