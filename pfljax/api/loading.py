"""Results of earlier runs, from their folders."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import optax

from pfljax import data
from pfljax.api.predicting import Predictor
from pfljax.api.result import Result, Scores
from pfljax.api.run import Run
from pfljax.contract.errors import ArgumentError
from pfljax.data import Federation, datasets, return_validation
from pfljax.folder import files, fingerprint, folders, former, recorded_clients
from pfljax.folder.recorded_clients import RecordedClients
from pfljax.local.training import LocalTraining
from pfljax.run.experiment import Execution
from pfljax.settings import recorded
from pfljax.settings.fields import checked, hyperparameter
from pfljax.training.outcome import saved_outcome

COMMANDS = "pfljax.cli.again"  # imported only for runs of a command
OPTIONS = ("seed", "participation", "fine_tune_epochs", "eval_clients", "never_trained")
OPTIONS += ("server", "attack", "compression", "faults", "client_privacy", "clock", "drift")
NOT_RECORDED = "cannot be made again from config.json"
Unseen = Annotated[
    Federation | float | None,
    hyperparameter(accepted="a Federation, or the share of the clients held out of training"),
]


class Folder(NamedTuple):
    """A folder with a finished run.

    Attributes:
        out: Its path.
        config: The content of config.json.
        summary: The content of summary.json.
        clients: The clients as the folder records them; None: it does not.
    """

    out: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    clients: RecordedClients | None

    @property
    def client_store(self) -> Literal["device", "disk"]:
        """A store that reads the clients' rows."""
        return "disk" if (self.out / folders.CLIENTS).is_dir() else "device"

    @property
    def is_of_command(self) -> bool:
        """Whether a command trained the run."""
        return "flags" in self.config


class PassedParts(NamedTuple):
    """The arguments of `load` that replace what config.json describes; None: as in config.json."""

    method: Any = None
    model: Any = None
    clients: Federation | None = None
    local: LocalTraining | None = None

    @property
    def passed(self) -> dict[str, Any]:
        """The arguments that are passed, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Training(NamedTuple):
    """The clients that a run is loaded with.

    Attributes:
        clients: The training clients, with their examples or with placeholders.
        unseen: Clients held out of training; None: none, or unknown.
        missing: Why the examples are missing; None: they are present.
    """

    clients: Federation
    unseen: Federation | None = None
    missing: ArgumentError | None = None


@checked()
def load(
    path: str | Path,
    *,
    method: Any = None,
    model: Any = None,
    clients: Federation | None = None,
    local: LocalTraining | None = None,
    unseen: Unseen = None,
) -> Result:
    """Returns the result of a finished run from its folder, for predictions, history, collaboration and figures.

    Scores, history and figures need nothing but the folder. Predictions and `export` need the run's model and method,
    which are made again as config.json describes them; the data only if the method trains before it predicts, or looks
    up examples. A part that cannot be made again, such as a model with a function of your own in it, must be passed as
    it was to `Run`: what needs the part says so. Parts that are passed are compared with those of the run. Code is
    imported from the modules and files that config.json names, so load only folders that you trust; nothing is
    unpickled.

    Args:
        path: The run's folder.
        method: The method. Default: as in config.json.
        model: The model. Default: as in config.json.
        clients: The training clients. Default: as in config.json if a function of `pfl.data` made them; otherwise
            without their examples.
        local: Local training. Default: as in config.json; an optimizer that cannot be made again is missed only by
            methods that train for their predictions.
        unseen: The clients held out of training, if `clients` are passed without them; or the share of `clients` that
            `compare` or a command held out.

    Raises:
        ArgumentError: if the folder has no finished run, or a part that is passed is not that of the run; the message
            says what differs.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> import pfljax as pfl
        >>> out = tempfile.mkdtemp()
        >>> x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
        >>> clients = pfl.Federation.from_arrays(x, y, client=np.arange(20) % 4)
        >>> run = pfl.Run(pfl.Ditto(), clients, pfl.models.MLP(hidden=(4,)))
        >>> result = run.train(rounds=2, out=out, progress=False)
        >>> loaded = pfl.load(out)  # without the clients' examples
        >>> loaded.accuracy == result.accuracy
        True
        >>> bool(np.allclose(loaded.predict(x, client=1), result.predict(x, client=1)))
        True
        >>> pfl.load(out, clients=clients).clients.num_clients
        4
    """
    folder = read_folder(Path(path))
    arguments = PassedParts(method, model, clients, local)
    if unseen is not None and clients is None:
        raise ArgumentError("unseen", "accepted with the clients that it belongs to, clients=...")
    try:
        scores = Scores.read(folder.out, folder.summary)
    except (OSError, KeyError, ValueError) as error:
        raise ArgumentError("path", f"its files are damaged ({error})", path) from error
    try:
        predictor = load_predictor(folder, arguments, unseen)
    except ArgumentError as error:
        # An error says what is missing when it is needed.
        if error.argument.partition(".")[0] in ("path", "unseen", *arguments.passed):
            raise
        predictor = error
    known = None if folder.clients is None else folder.clients.federation
    return Result(scores, predictor, folder.out, known)


def read_folder(out: Path) -> Folder:
    """Reads the records of a run's folder. Raises `ArgumentError` if it has no finished run."""
    try:
        config = files.read_json(out / "config.json")
        summary = former.read_summary(out / "summary.json")
        done = summary["last"]["round"]
        _ = config.keys()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = "accepted: the folder of a finished run; resume one that was interrupted"
        if (out / "table.json").exists():
            runs = "accepted: the folder of one of its runs, METHOD/seed-SEED"
            text = f"is a comparison's folder; {runs}"
        raise ArgumentError("path", text, out) from error
    if done not in folders.whole_checkpoints(out):
        text = f"has no intact checkpoint of its last round, {done}"
        raise ArgumentError("path", f"{text}; resume the run to finish it again", out)
    return Folder(out, config, summary, recorded_clients.read(out))


def load_predictor(
    folder: Folder, arguments: PassedParts, unseen: Federation | float | None
) -> Predictor:
    """Makes a run again, with its trained models.

    Args:
        folder: The run's folder.
        arguments: Parts of the run, instead of those in config.json.
        unseen: See `load`.

    Raises:
        ArgumentError: if a part cannot be made again, or is not that of the run.
    """
    from pfljax.folder import checkpoints  # orbax is slow to import

    out = folder.out
    rounds = folder.summary["rounds"]
    done = folder.summary["last"]["round"]
    try:
        training = training_clients(folder, arguments.clients, unseen)
        if folder.is_of_command:
            again = importlib.import_module(COMMANDS)
            clients = (training.clients, training.unseen)
            run = again.run(folder.config, folder.client_store, clients, arguments.passed)
        else:
            run = run_again(folder, training, arguments)
        planned = folder.config.get("program", {}).get("planned_rounds")
        experiment = dataclasses.replace(run.experiment, planned_rounds=planned)
        run.experiment = experiment.with_rounds(rounds)
    except (KeyError, TypeError, AttributeError) as error:
        text = f"its config.json is damaged ({error!r})"
        raise ArgumentError("path", text, out) from error
    if not checkpoints.is_former(out / "checkpoints", done):  # otherwise nothing can predict
        check_same(folder, run)
    outcome = saved_outcome(run.experiment, out, folder.summary)
    return Predictor(run.experiment, outcome, training.missing)


def training_clients(
    folder: Folder, passed: Federation | None, unseen: Federation | float | None
) -> Training:
    """The clients that are handed over, or those that config.json describes, or those that the folder records.

    Raises:
        ArgumentError: if clients that are handed over are not those of the run, or there are none.
    """
    if passed is not None:
        training = with_held_out(passed, unseen)
        clients = as_trained(folder.config, training.clients)
        difference = difference_from(folder, clients)
        if difference:
            raise not_of_the_run("clients", difference)
        return training._replace(clients=clients)

    # Made again, if that is possible and they are still the same.
    try:
        training = clients_again(folder)
        clients = as_trained(folder.config, training.clients)
        difference = difference_from(folder, clients)
        if not difference:
            return training._replace(clients=clients)
        missing = not_of_the_run("clients", difference)
    except ArgumentError as error:
        missing = error
    if folder.clients is None:
        raise missing
    return Training(folder.clients.federation, missing=missing)


def with_held_out(clients: Federation, unseen: Federation | float | None) -> Training:
    """The clients that are handed over, of which a share may have been held out of training."""
    if isinstance(unseen, Federation) or unseen is None:
        return Training(clients, unseen)
    return Training(*data.split_unseen(clients, unseen, 0))


def clients_again(folder: Folder) -> Training:
    """Makes clients again that config.json describes. Raises `ArgumentError` if that is not possible."""
    try:
        if folder.is_of_command:
            again = importlib.import_module(COMMANDS)
            return Training(*again.clients(folder.config))
        records = folder.config.get("parts", {})
        if "clients" in records:
            return Training(datasets.made_again(records["clients"]))
    except (ArgumentError, OSError) as error:
        text = f"cannot be made again ({error}); {recorded.hand_over('clients')}"
        raise ArgumentError("clients", text) from error
    raise ArgumentError("clients", f"{NOT_RECORDED}; {recorded.hand_over('clients')}")


def difference_from(folder: Folder, clients: Federation) -> str:
    """Says how clients differ from those of the run, apart from how x is scaled, which the model may determine."""
    if folder.clients is None:
        return ""
    return recorded_clients.difference(folder.clients, clients, scaled=False)


def not_of_the_run(part: str, difference: str) -> ArgumentError:
    """The error for clients that are not those of the run."""
    expected = {"clients": "the clients", "unseen": "the unseen clients"}
    text = f"expected {expected[part]} of the run, but {difference}"
    return ArgumentError(part, f"{text}; {recorded.hand_over(part)}")


def run_again(folder: Folder, training: Training, arguments: PassedParts) -> Run:
    """Makes a run of the Python API again, from its config.json and the arguments that replace parts of it."""
    records = folder.config.get("parts", {})

    def passed_or_recorded(name: str) -> Any:
        if name in arguments.passed:
            return arguments.passed[name]
        if name not in records:
            raise ArgumentError(name, f"{NOT_RECORDED}; {recorded.hand_over(name)}")
        return recorded.restored(records[name], name)

    local = arguments.local
    if local is None:
        has_own_loss = "local.loss" in folder.config.get("settings", {})
        if has_own_loss and "local.loss" not in records:
            text = f"{NOT_RECORDED}; {recorded.hand_over('local.loss')}"
            raise ArgumentError("local.loss", text)
    options = {name: recorded.restored(records[name], name) for name in OPTIONS if name in records}
    method = passed_or_recorded("method")
    model = passed_or_recorded("model")
    return Run(
        method,
        training.clients,
        model,
        local or local_again(records, folder.client_store),
        **options,
        unseen=training.unseen,
        execution=Execution(client_store=folder.client_store),
    )


def as_trained(config: Mapping[str, Any], clients: Federation) -> Federation:
    """The clients as a run was trained on: with their validation examples for training, if these were returned."""
    returned = config.get("data", {}).get("returned", False)
    return return_validation(clients) if returned else clients


def local_again(records: Mapping[str, Any], client_store: str) -> LocalTraining:
    """Makes local training again; without an optimizer or a schedule that was not recorded, it cannot train."""
    fields = {}
    for name, record in records.items():
        if name.startswith("local."):
            fields[name.removeprefix("local.")] = recorded.restored(record, name)
    if {"optimizer", "schedule"} <= fields.keys():
        return LocalTraining(**fields)

    if client_store == "disk":  # the clients' rows in the files contain its state
        cannot_train()
    missing = optax.GradientTransformation(no_state, cannot_train)

    def missing_at_rate(learning_rate: Any) -> optax.GradientTransformation:
        del learning_rate
        return missing

    has_rate = fields.get("learning_rate") is not None
    fields["optimizer"] = missing_at_rate if has_rate else missing
    fields["schedule"] = None
    return LocalTraining(**fields)


def no_state(params: Any) -> optax.OptState:
    """The state of an optimizer that is missing."""
    del params
    return optax.EmptyState()


def cannot_train(*args: Any, **options: Any) -> Any:
    """Raises `ArgumentError`: the optimizer is missing."""
    name = "local.optimizer"
    text = f"the optimizer or schedule {NOT_RECORDED}, but this run needs it to predict"
    raise ArgumentError(name, f"{text}; {recorded.hand_over(name)}")


def check_same(folder: Folder, run: Run) -> None:
    """Raises `ArgumentError` if a run's clients, or what it predicts with, are not the recorded ones."""
    before = folder.config.get("data", {})
    now = run.experiment.config["data"]
    if before.get("digest") != now["digest"]:
        difference = f"their digest was {before.get('digest')} and is {now['digest']}"
        if folder.clients is not None:
            difference = recorded_clients.difference(folder.clients, run.clients)
        raise not_of_the_run("clients", difference)
    if run.experiment.unseen is not None and before.get("unseen") != now["unseen"]:
        difference = f"their digest was {before.get('unseen')} and is {now['unseen']}"
        raise not_of_the_run("unseen", difference)

    parts_of_argument = {"model": [fingerprint.MODEL], "method": list(fingerprint.PREDICTS)}
    for argument, names in parts_of_argument.items():
        try:
            program = fingerprint.program(run.experiment, names)
        # predictions train, with an optimizer that was not recorded: `predict` says so
        except ArgumentError:
            continue
        changed = fingerprint.differences(folder.config.get("program", {}), program, names)
        if changed:
            text = f"is not the run's: {', '.join(changed)} changed"
            raise ArgumentError(argument, f"{text}; {recorded.hand_over(argument)}")
