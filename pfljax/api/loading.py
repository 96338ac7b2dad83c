"""Results of earlier runs, from their folders."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import optax

from pfljax.api.result import Result
from pfljax.api.run import Run
from pfljax.core import recorded
from pfljax.core.errors import ArgumentError
from pfljax.data import Federation, datasets
from pfljax.local.training import LocalTraining
from pfljax.training import files, fingerprint, folders
from pfljax.training.experiment import Execution
from pfljax.training.loop import saved_outcome

OF_COMMANDS = "pfljax.cli.again"  # imported only for runs of a command, whose flags it reads


def load(
    path: str | Path,
    *,
    method: Any = None,
    model: Any = None,
    clients: Federation | None = None,
    local: LocalTraining | None = None,
) -> Result:
    """Returns the result of a finished run from its folder, for predictions, history, collaboration and figures.

    config.json says how the run's parts were made, and they are made again. Code is imported from the modules and files
    that config.json names, so load only folders that you trust; nothing is unpickled. A part that cannot be made again,
    such as clients from your own arrays, must be handed over as it was passed to `Run`. Without `local`, an optimizer
    that cannot be made again is missed only by methods that train for their predictions.

    Args:
        path: The run's folder.
        method: The method; None: as in config.json.
        model: The model; None: as in config.json.
        clients: The training clients; None: as in config.json.
        local: Local training; None: as in config.json.

    Raises:
        ArgumentError: if the folder has no finished run, or a part must be handed over; the message names it.
    """
    out = Path(path)
    try:
        config, summary = (files.read_json(out / name) for name in ("config.json", "summary.json"))
        done = summary["last"]["round"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            "path", "accepted: the folder of a finished run; resume one that was interrupted", path
        ) from error
    if done not in folders.whole_checkpoints(out):
        text = f"has no intact checkpoint of its last round, {done}; resume the run to finish it again"
        raise ArgumentError("path", text, path)
    store = "disk" if (out / folders.CLIENTS).is_dir() else "device"
    given = {"method": method, "model": model, "clients": clients, "local": local}
    given = {name: part for name, part in given.items() if part is not None}
    if "flags" in config:
        run = importlib.import_module(OF_COMMANDS).run(config, store, given)
    else:
        run = run_again(config, store, given)
    check_same(config, run)
    experiment = run.experiment.with_rounds(summary["rounds"])
    return Result(experiment, saved_outcome(experiment, out, summary), out)


def run_again(config: dict, client_store: Any, given: dict[str, Any]) -> Run:
    """Makes a run of the Python API again, from its config.json and the parts that are given."""
    parts, settings = config.get("parts", {}), config.get("settings", {})
    for name in ("method", "model", "clients"):
        if name not in given and name not in parts:
            raise ArgumentError(name, f"cannot be made again from config.json; {recorded.hand_over(name)}")
    others = parts.keys() - given.keys() - {"local", "clients"}
    made = {name: recorded.found(parts[name], name) for name in others}
    made["clients"] = given["clients"] if "clients" in given else datasets.made_again(parts["clients"])
    made["local"] = given.get("local") or local_again(parts.get("local", {}), client_store)
    names = ("seed", "participation", "fine_tune_epochs", "eval_clients")
    options = {name: settings[name] for name in names if name in settings}
    return Run(**made | given | options, execution=Execution(client_store=client_store))


def local_again(fields: dict[str, Any], client_store: str) -> LocalTraining:
    """Makes local training again; without an optimizer or a schedule that was not recorded, it cannot train."""
    made = {name: recorded.found(value, "local") for name, value in fields.items()}
    if not {"optimizer", "schedule"} <= fields.keys():
        if client_store == "disk":  # the clients' rows in the files contain its state
            cannot_train()
        missing = optax.GradientTransformation(lambda params: optax.EmptyState(), cannot_train)
        made |= {"schedule": None, "optimizer": missing if made.get("learning_rate") is None else lambda _: missing}
    return LocalTraining(**made)


def cannot_train(*args: Any, **options: Any):
    """Raises `ArgumentError`: the optimizer is missing."""
    text = "the optimizer or schedule cannot be made again from config.json, but this run needs it to predict"
    raise ArgumentError("local", f"{text}; {recorded.hand_over('local')}")


def check_same(config: dict, run: Run) -> None:
    """Raises `ArgumentError` if a run's clients, or what it predicts with, are not the recorded ones."""
    was, now = config.get("data", {}).get("digest"), run.experiment.config["data"]["digest"]
    if was != now:
        text = f"are not those of the run (digest {was}, now {now})"
        raise ArgumentError("clients", f"{text}; {recorded.hand_over('clients')}")
    program = run.experiment.program()
    for argument, parts in {"model": [fingerprint.MODEL], "method": ["predictor", "collaboration"]}.items():
        if changed := fingerprint.differences(config.get("program", {}), program, parts):
            text = f"has changed since the run ({', '.join(changed)})"
            raise ArgumentError(argument, f"{text}; {recorded.hand_over(argument)}")
