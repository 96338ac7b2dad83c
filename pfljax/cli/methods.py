"""Lists the methods, or describes some of them.

    pfljax methods
    pfljax methods ditto fedem
    pfljax methods --json

Without names, lists all methods: what a client keeps and what travels in a round. With names, also shows their papers
and hyperparameters. --json has all of this for programs. Names are those of --method; FILE.py:NAME is a method of your
own. Trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags

from pfljax.api.describing import describe
from pfljax.cli import help, json_output, tables
from pfljax.cli.flags import RUNS
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.settings import method

BOUNDS = {"at_least": ">=", "above": ">", "at_most": "<=", "below": "<"}


def define(registry: flags.FlagValues) -> None:
    text = "Names of methods. The name of the flag can be omitted. Default: all."
    Group(RUNS, registry).several("methods", [], text, empty=True)
    json_output.define(registry)


def run(settings: Settings) -> Mapping[str, Any]:
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be busy, and is not needed
    names = settings.methods or list(method.METHODS)
    entries = [describe(name) for name in names]
    if not settings.json:
        show(entries)
        for entry in entries if settings.methods else []:
            show_method(entry)
    return {"methods": entries}


def show(entries: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table of methods."""
    heads = ["--method", "method", "topology", "a client keeps", "what travels in a round"]
    columns = ("name", "title", "topology", "keeps", "sends")
    body = [[str(entry[column] or "-") for column in columns] for entry in entries]
    tables.show(f"{len(entries)} methods", heads, body, text=len(heads))


def show_method(entry: Mapping[str, Any]) -> None:
    """Prints the paper of a method and the table of its hyperparameters."""
    notes = [f"paper: {entry['paper']}"] if entry["paper"] else []
    if entry["needs_validation"]:
        notes.append("It needs validation examples.")
    heads = ["flag", "default", "accepted", "grid", "what it is"]
    body = []
    for field in entry["hyperparameters"]:
        flag = f"--{entry['name']}.{field['name']}"
        default = help.shown(field["default"])
        body.append([flag, default, accepted(field), help.shown(field["grid"]), field["help"]])
    tables.show(entry["title"], heads, body, text=len(heads), notes=notes)


def accepted(field: Mapping[str, Any]) -> str:
    """Returns what a hyperparameter accepts: its choices, or its type and bounds."""
    if field["choices"]:
        return ", ".join(field["choices"])
    bounds = [f"{sign} {field[name]:g}" for name, sign in BOUNDS.items() if field[name] is not None]
    return " ".join([field["type"], ", ".join(bounds)]).strip()


COMMAND = Command(__doc__ or "", define, run, devices=None, listed="methods")
