"""Reads files of runs, tables and studies, whose entries had other names when earlier versions wrote them.

Entries come with their present names: "method" was "algorithm", a client's "group" was "distribution", and methods'
hyperparameters had other names. The files stay as they are, since manifests list checksums of their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pfljax.folder import files
from pfljax.settings import method
from pfljax.settings.fields import fields_of, present_names

STATE = (
    "its checkpoints are those of an earlier version, whose states had another layout: the run cannot go on, and its "
    "models cannot predict; scores, history and figures can still be read"
)
METHOD = {"algorithm": "method"}
GROUP = {"distribution": "group"}


def renamed(entries: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the entries with those names that are in `names` replaced."""
    return {names.get(name, name): value for name, value in entries.items()}


def renamed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings or flags of a config.json, with or without dashes, under their present names."""
    names = {**METHOD}
    for former, present in method.former_names().items():
        names[former] = present
        names[f"--{former}"] = f"--{present}"
    return renamed(settings, names)


def read_config(path: Path) -> dict[str, Any]:
    """Reads a run's config.json."""
    config = files.read_json(path)
    for part in ("settings", "flags"):
        if part in config:
            config[part] = renamed_settings(config[part])
    return config


def read_summary(path: Path) -> dict[str, Any]:
    """Reads a run's summary.json."""
    summary = renamed(files.read_json(path), METHOD)
    if summary.get("unseen"):
        summary["unseen"] = _with_groups(summary["unseen"])
    return _with_groups(summary)


def read_collaboration(path: Path) -> dict[str, np.ndarray]:
    """Reads a run's collaboration.npz."""
    return renamed(files.read_npz(path), GROUP)


def read_table(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a comparison's table.json."""
    return [renamed(row, METHOD) for row in files.read_json(path)]


def read_scores(path: Path) -> dict[str, Any]:
    """Reads the file of the scores of a search for hyperparameters, tuning.json."""
    content = files.read_json(path)
    names: dict[str, str] = {}
    for program in content["programs"]:
        for cls in method.METHODS.values():
            if cls.__name__ == program["method"]:
                names = present_names(fields_of(cls))

    def renamed_point(point: Mapping[str, Any]) -> dict[str, Any]:
        rate = point["learning_rate"]
        values = point.get("hyperparameters", point.get("knobs", {}))  # former name
        return {"learning_rate": rate, "hyperparameters": renamed(values, names)}

    content["settings"] = renamed_settings(content["settings"])
    content["points"] = [renamed_point(point) for point in content["points"]]
    content["grid"] = [renamed_point(point) for point in content["grid"]]
    content["at_edge"] = [names.get(name, name) for name in content["at_edge"]]
    return content


def read_scaling(path: Path) -> dict[str, Any]:
    """Reads the file of a cell of a scaling study: its "row", "settings" and "program"."""
    cell = files.read_json(path)
    return cell | {"row": renamed(cell["row"], METHOD)}


def _with_groups(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a summary's scores with the present names in the rows of clients, if it has such rows."""
    rows = scores.get("per_client")
    if not rows:
        return {**scores}
    return {**scores, "per_client": [renamed(row, GROUP) for row in rows]}
