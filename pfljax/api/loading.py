"""Results of earlier runs, from their folders."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optax

from pfljax.api.result import Result
from pfljax.api.run import Run
from pfljax.contract.errors import ArgumentError
from pfljax.data import Federation, datasets, return_validation
from pfljax.folder import files, fingerprint, folders, former
from pfljax.local.training import LocalTraining
from pfljax.run.experiment import Execution
from pfljax.settings import recorded
from pfljax.settings.fields import checked
from pfljax.training.outcome import saved_outcome

OF_COMMANDS = "pfljax.cli.again"  # imported only for runs of a command
OPTIONS = ("seed", "participation", "fine_tune_epochs", "eval_clients")
OPTIONS += ("server", "attack", "compression", "faults", "client_privacy", "clock")


@checked()
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
        config = files.read_json(out / "config.json")
        summary = former.read_summary(out / "summary.json")
        done = summary["last"]["round"]
        recorded_in = config.keys()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = "accepted: the folder of a finished run; resume one that was interrupted"
        if (out / "table.json").exists():
            text = "is a comparison's folder; accepted: the folder of one of its runs, METHOD/seed-SEED"
        raise ArgumentError("path", text, path) from error
    from pfljax.folder import checkpoints  # orbax is slow to import

    if done not in folders.whole_checkpoints(out):
        text = (
            f"has no intact checkpoint of its last round, {done}; resume the run to finish it again"
        )
        raise ArgumentError("path", text, path)
    store = "disk" if (out / folders.CLIENTS).is_dir() else "device"
    parts = dict(method=method, model=model, clients=clients, local=local)
    given = {name: part for name, part in parts.items() if part is not None}
    try:
        if "flags" in recorded_in:
            run = importlib.import_module(OF_COMMANDS).run(config, store, given)
        else:
            run = run_again(config, store, local, given)
        planned = config.get("program", {}).get("planned_rounds")
        run.experiment = dataclasses.replace(run.experiment, planned_rounds=planned).with_rounds(
            summary["rounds"]
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ArgumentError("path", f"its config.json is damaged ({error!r})", path) from error
    if not checkpoints.is_former(out / "checkpoints", done):  # otherwise nothing can predict
        check_same(config, run)
    return Result(run.experiment, saved_outcome(run.experiment, out, summary), out)


def run_again(
    config: dict, client_store: Any, local: LocalTraining | None, given: Mapping[str, Any]
) -> Run:
    """Makes a run of the Python API again, from its config.json and the parts that are given."""
    parts = config.get("parts", {})

    def part(name: str) -> Any:
        if name in given:
            return given[name]
        if name not in parts:
            raise ArgumentError(
                name, f"cannot be made again from config.json; {recorded.hand_over(name)}"
            )
        return (
            datasets.made_again(parts[name])
            if name == "clients"
            else recorded.restored(parts[name], name)
        )

    if local is None and "local.loss" in config.get("settings", {}) and "local.loss" not in parts:
        raise ArgumentError(
            "local.loss",
            f"cannot be made again from config.json; {recorded.hand_over('local.loss')}",
        )
    options = {name: recorded.restored(parts[name], name) for name in OPTIONS if name in parts}
    execution = Execution(client_store=client_store)
    found = local or local_again(parts, client_store)
    clients = as_trained(config, part("clients"))
    return Run(part("method"), clients, part("model"), found, **options, execution=execution)


def as_trained(config: Mapping[str, Any], clients: Federation) -> Federation:
    """The clients as a run was trained on: with their validation examples for training, if these were returned."""
    returned = config.get("data", {}).get("returned", False)
    return return_validation(clients) if returned else clients


def local_again(parts: dict[str, Any], client_store: str) -> LocalTraining:
    """Makes local training again; without an optimizer or a schedule that was not recorded, it cannot train."""
    named = {name.removeprefix("local."): name for name in parts if name.startswith("local.")}
    made = {field: recorded.restored(parts[name], name) for field, name in named.items()}
    if not {"optimizer", "schedule"} <= made.keys():
        if client_store == "disk":  # the clients' rows in the files contain its state
            cannot_train()
        missing = optax.GradientTransformation(lambda params: optax.EmptyState(), cannot_train)
        made |= {
            "schedule": None,
            "optimizer": missing if made.get("learning_rate") is None else lambda _: missing,
        }
    return LocalTraining(**made)


def cannot_train(*args: Any, **options: Any):
    """Raises `ArgumentError`: the optimizer is missing."""
    name = "local.optimizer"
    text = "the optimizer or schedule cannot be made again from config.json, but this run needs it to predict"
    raise ArgumentError(name, f"{text}; {recorded.hand_over(name)}")


def check_same(config: dict, run: Run) -> None:
    """Raises `ArgumentError` if a run's clients, or what it predicts with, are not the recorded ones."""
    was = config.get("data", {}).get("digest")
    now = run.experiment.config["data"]["digest"]
    if was != now:
        text = f"are not those of the run (digest {was}, now {now})"
        raise ArgumentError("clients", f"{text}; {recorded.hand_over('clients')}")
    of_argument = {"model": [fingerprint.MODEL], "method": list(fingerprint.PREDICTS)}
    for argument, parts in of_argument.items():
        try:
            now = fingerprint.program(run.experiment, parts)
        # predictions train, with an optimizer that was not recorded: `predict` says so
        except ArgumentError:
            continue
        if changed := fingerprint.differences(config.get("program", {}), now, parts):
            text = f"is not the run's: {', '.join(changed)} changed"
            raise ArgumentError(argument, f"{text}; {recorded.hand_over(argument)}")
