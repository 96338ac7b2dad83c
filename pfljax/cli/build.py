"""Builds objects of the Python API from settings: clients, model, local training, method, run."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from pfljax import api, data
from pfljax.api import comparison, tuning
from pfljax.api.study import Study
from pfljax.cli.flags import DATA, WHAT, Adapting, Optimizer
from pfljax.cli.settings import FlagError, Settings
from pfljax.contract import optional, processes
from pfljax.data import Federation, partitions, sources
from pfljax.evaluation.statistics import Trial
from pfljax.settings import method, own_files, recorded
from pfljax.settings.fields import nearest

ALL = comparison.ALL
TUNING_FRACTION = 0.25  # of the training examples, to tune on unless --validation_fraction is given
DEFAULT_CLIENTS = 16  # for sources that generate their clients, and partitions that divide examples
Clients = tuple[Federation, Federation | None]  # training clients, and clients held out of training


def read_methods(settings: Settings) -> list[str]:
    """Returns the methods in --method or --methods. Checks them, their hyperparameters, --out and --tracker."""
    names = settings.values.get("methods")
    if not names:
        names = [settings.method]
    elif names == [ALL]:
        names = list(method.METHODS)
    for name in names:
        method.get(name)
    settings.check_hyperparameters(names)
    settings.check_out()
    if "tracker" in settings and settings.tracker != "none":
        optional.load(api.TRACKERS[settings.tracker].package, "tracker", settings.tracker)
    return names


def build_method(settings: Settings, name: str) -> Any:
    return settings.make(method.get(name), prefix=f"{name}.")


def build_source(settings: Settings, seed: int) -> sources.Source:
    kind, _, member = settings.dataset.partition(":")
    if kind not in sources.SOURCES or bool(member) != (kind in sources.NAMED):
        known = [f"{name}:NAME" if name in sources.NAMED else name for name in sources.SOURCES]
        raise settings.error("dataset", f"unknown; {nearest(kind, [*known, 'file'])}")
    num_clients = settings.num_clients or DEFAULT_CLIENTS
    return settings.make(sources.SOURCES[kind], seed=seed, num_clients=num_clients, name=member)


def build_partition(settings: Settings, source: sources.Source, seed: int) -> Any:
    """Returns the partition of the examples; None: the library's default."""
    name = settings.partition
    if name == "auto":
        if source.client is not None or source.task == "regression":
            unread = ["partition_balanced"]
            if settings.dataset != "synthetic":
                unread.append("partition_groups")
            for flag in unread:
                settings.refuse(flag, f"the partition is {partitions.default(source).name}")
            return None
        name = "label_groups"
    kind = partitions.PARTITIONS[name]
    if kind is not partitions.Latent:
        return settings.make(kind)
    features = settings.embedding
    if features == "auto":
        features = api.embedding.automatic(source, settings.partition_groups)
    embedding = api.embedding.make(
        features,
        epochs=settings.embedding_epochs,
        seed=seed,
        **widths(settings),
    )
    return settings.make(kind, embedding=embedding)


def build_clients(settings: Settings, seed: int) -> Clients:
    """Returns the training clients, and the clients held out of training (or None)."""
    share = settings.unseen
    with api.announced(f"reading {settings.dataset}"):
        source = build_source(settings, seed)
    splits = settings.make(data.Splits)
    partition = build_partition(settings, source, seed)
    # Hosts load the data of the clients on their own devices only.
    local_rows = None
    if jax.process_count() > 1 and api.STORES[settings.client_store].on_devices:
        local_rows = settings.make(api.Execution).make_plan().own_rows
    load = functools.partial(
        data.load, source, partition, splits, num_clients=settings.num_clients or None, seed=seed
    )
    with api.announced("dividing the examples among clients"):
        if share:
            federation, unseen = data.split_unseen(load(), share, seed)
            if local_rows:
                federation = data.keep_clients(federation, local_rows(federation.num_clients))
                unseen = data.keep_clients(unseen, local_rows(unseen.num_clients))
        else:
            federation = load(local_clients=local_rows)
            unseen = None
    processes.agree({"who has which examples": federation.index_digest})
    return federation, unseen


_cached: dict[tuple, Clients] = {}  # only the most recent: an image data set may take a gigabyte


def cached_clients(settings: Settings, seed: int) -> Clients:
    """Returns `build_clients`, cached for all methods with the same seed and data."""
    names = [name for name, heading in settings.headings.items() if heading == DATA]
    key = (seed, *(str(settings[name]) for name in [*names, "hidden", "channels", "devices"]))
    if key not in _cached:
        while len(_cached) >= 3:
            del _cached[next(iter(_cached))]
        _cached[key] = build_clients(settings, seed)
    return _cached[key]


def widths(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Returns the widths of the mlp and the cnn."""
    return {name: tuple(settings.numbers(name, int)) for name in ("hidden", "channels")}


def sizes(settings: Settings) -> dict[str, Any]:
    """Returns the fields of `models.Sizes`."""
    blocks = {name: settings[name] for name in ("patch", "width", "depth", "heads")}
    style = "" if settings.style == "auto" else settings.style
    return {**widths(settings), **blocks, "style": style}


def build_model(
    settings: Settings, federation: Federation
) -> api.models.Model | api.models.Networks:
    """Returns the clients' network or networks."""
    names = settings.model.split(",")
    families = api.models.FAMILIES
    if len(names) > 1:
        if len({*names}) < len(names) or families.keys() & {*names}:
            text = "accepted: a list of different networks, or the name of one family"
            raise settings.error("model", text)
        networks = {name: build_network(settings, federation, name) for name in names}
        return api.models.Networks(networks)
    if settings.model in families:
        return api.models.Networks(families[settings.model])
    return build_network(settings, federation, settings.model)


def build_network(
    settings: Settings, federation: Federation, name: str
) -> api.models.Model | api.models.Networks:
    """Returns a network by name, or the network or networks of a user's file."""
    task = federation.task
    options = settings.make(Adapting).options()
    shape = federation.train.x.shape[2:]
    target_shape = federation.train.y.shape[2:]

    # A network, or a dict of networks, in the user's file.
    if own_files.is_file_and_name(name):
        model = own_files.load("model", name)
        if isinstance(model, api.models.Networks):
            return model
        if isinstance(model, Mapping):
            return api.models.Networks(model)
        if options:
            model = api.models.Model(model, **options)
        return api.models.build(
            model,
            federation.inputs,
            task,
            name=name,
            num_classes=federation.num_classes,
            target_shape=target_shape,
        )

    # A network of ours.
    has_sequences = task == "classification" and len(target_shape) == 1
    has_texts = federation.tokens and not has_sequences
    if name == "auto":
        name = automatic_network(task, has_sequences, has_texts)
        if name != "mlp" and settings.partition != "latent":
            settings.refuse("hidden", f"the model is {name}")
        if name != "encoder":
            for flag in ("width", "depth", "heads", "style"):
                settings.refuse(flag, f"the model is {name}")
    names_for_sequences = api.models.SEQUENCES
    if name in api.models.NAMES and has_sequences != (name in names_for_sequences):
        listed = ", ".join(names_for_sequences)
        expected = listed if has_sequences else f"all but {listed}"
        raise FlagError.at("model", f"accepted for {federation.name}: {expected}", name)
    if name == "encoder" and not has_texts:
        raise FlagError.at("model", "accepted for texts, such as a table's --data_text", name)
    return api.models.make(
        name,
        shape,
        task,
        federation.num_classes,
        target_shape=target_shape,
        options=options,
        **sizes(settings),
    )


def automatic_network(task: str, has_sequences: bool, has_texts: bool) -> str:
    """Returns the name of the network for --model=auto."""
    if has_sequences:
        return "lstm"
    if has_texts:
        return "encoder"
    return "linear" if task == "regression" else "mlp"


def build_local(settings: Settings) -> api.LocalTraining:
    optimizer = settings.make(Optimizer)
    loss = settings.loss
    if own_files.is_file_and_name(loss):
        loss = own_files.load("loss", loss)
    return settings.make(
        api.LocalTraining,
        loss=loss,
        optimizer=optimizer.make,
        schedule=optimizer.schedule(planned_rounds(settings)),
        class_weights=None if settings.class_weights == "none" else settings.class_weights,
        privacy=settings.make(api.Privacy),
    )


def planned_rounds(settings: Settings) -> int:
    """Returns the number of rounds that schedules are planned for."""
    planned = settings.values.get("planned_rounds")
    return settings.rounds if planned is None else planned


def build_metrics(settings: Settings) -> dict[str, Any]:
    """Returns the metrics of --metrics by name; those of the user's files have their function's name."""
    metrics = {}
    for text in settings.values.get("metrics", []):
        if own_files.is_file_and_name(text):
            metrics[text.rpartition(":")[2]] = own_files.load("metrics", text)
        else:
            metrics[text] = text
    return metrics


def build_score(settings: Settings) -> Any:
    """Returns the score of --score, a name or a function in the user's file; None: that of the task."""
    score = settings.score if "score" in settings else None
    if score is not None and own_files.is_file_and_name(score):
        return own_files.load("score", score)
    return score


def build_drifts(settings: Settings) -> list[data.Drift]:
    """Returns the changes of --drift.

    Raises:
        FlagError: for a change after the last round.
    """
    drifts = []
    for text in settings.drift:
        change, _, after = text.partition("@")
        if int(after) >= settings.rounds:
            raise settings.error(
                "drift", f"accepted: rounds before the last one, {settings.rounds}"
            )
        drifts.append(settings.make(data.Drift, round=int(after), change=change))
    return drifts


def run_options(settings: Settings) -> dict[str, Any]:
    """Returns the arguments of `Run` that the methods of a command share, besides clients, model and local training."""
    return {
        "server": settings.make(api.Server),
        "attack": settings.make(api.Attack),
        "compression": settings.make(api.Compression),
        "faults": settings.make(api.Faults),
        "clock": settings.make(api.Clock) if settings.clock else None,
        "client_privacy": settings.make(api.ClientPrivacy),
        "drift": build_drifts(settings),
        "metrics": build_metrics(settings),
        "score": build_score(settings),
        "stop": settings.make(api.Patience) if settings.patience else None,
        "execution": settings.make(api.Execution),
    }


def build_run(
    settings: Settings,
    name: str,
    clients: Clients,
    trial: Trial,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> api.Run:
    """Builds and checks one run; `overrides` may have its "method", "model" and "local"."""
    federation, unseen = clients
    settings = settings.for_method(name)
    built = {
        "method": overrides.get("method") or build_method(settings, name),
        "model": overrides.get("model") or build_model(settings, federation),
        "local": overrides.get("local") or build_local(settings),
    }
    return settings.make(
        api.Run,
        clients=federation,
        **built,
        seed=trial.seed,
        unseen=unseen,
        config=config(settings, name, trial),
        **run_options(settings),
    )


def trials_of(settings: Settings) -> list[Trial]:
    """Returns all pairs of --splits and --seeds. Without --splits, the seed also determines the split."""
    splits = settings.numbers("splits", int) if settings.splits else None
    return comparison.trials_of(settings.numbers("seeds", int), splits)


def tuned_hyperparameters(settings: Settings, name: str) -> Mapping[str, Sequence[Any]]:
    """Returns the values that --tune_hyperparameters tries: the paper's, except of any on the command line."""
    if not settings.tune_hyperparameters:
        return {}
    hyperparameters = tuning.papers_hyperparameters(method.get(name), settings.tell_groups)
    return {
        hyperparameter: values
        for hyperparameter, values in hyperparameters.items()
        if not settings.present(f"{name}.{hyperparameter}")
    }


def table_options(settings: Settings, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `pfljax.compare` that say what is trained, from the values of the flags.

    Args:
        settings: The flags.
        names: Names of methods by title.
    """
    hyperparameters = {
        title: tuned_hyperparameters(settings, name) for title, name in names.items()
    }
    rates = settings.numbers("tune", float)
    if len(rates) > 1 or any(hyperparameters.values()):
        settings = settings.replace(
            validation_fraction=settings.validation_fraction or TUNING_FRACTION
        )
    federation, _ = cached_clients(settings, trials_of(settings)[0].data_seed)

    def config_of(title: str, trial: Trial, chosen: Mapping[str, Any]) -> dict:
        name = names[title]
        flags = {}
        for chosen_name, value in chosen.items():
            is_rate = chosen_name == "learning_rate"
            flags[chosen_name if is_rate else f"{name}.{chosen_name}"] = value
        return config(settings.for_method(name).pinned(**flags), name, trial)

    return {
        "methods": [(title, build_method(settings, name)) for title, name in names.items()],
        "clients": functools.partial(cached_clients, settings),
        "model": build_model(settings, federation),
        "local": build_local(settings),
        "learning_rates": {
            title: settings.for_method(name).learning_rate for title, name in names.items()
        },
        "seeds": settings.numbers("seeds", int),
        "splits": settings.numbers("splits", int) or None,
        "tune": rates,
        "tune_hyperparameters": {
            title: values for title, values in hyperparameters.items() if values
        },
        "tune_seeds": settings.numbers("tune_seeds", int),
        "tune_widen": settings.tune_widen,
        "keep_validation": settings.keep_validation,
        "config": config_of,
        **settings.values_of(api.Run),
        **run_options(settings),
    }


def build_study(settings: Settings) -> Study:
    """Returns how the cells of a table are trained."""
    schedule = api.Schedule(settings.eval_every, settings.checkpoint_every)
    return Study(settings.rounds, schedule, settings.replicate, settings.rerun, settings.profile)


def train_cells(settings: Settings, name: str, out: Path) -> comparison.Trained:
    """Trains a method on all trials, each in a folder of `out`, after tuning if that is asked for.

    Raises:
        RunError: if a run fails.
    """
    trained = arranged_cells(settings, name, out).train()[out.name]
    if trained.failure is not None:
        raise trained.failure
    return trained


def arranged_cells(settings: Settings, name: str, out: Path) -> comparison.Comparison:
    """Arranges the cells of a method; those of all methods of a paper's table go without validation examples or none.

    See `train_cells`.
    """
    options = table_options(settings, {out.name: name})
    options["keep_validation"] = settings.keep_validation or settings.validation_fraction > 0
    tracker = build_tracker_of_table(settings, out.parent)
    return comparison.arranged(
        **options, study=build_study(settings), out=out.parent, tracker=tracker
    )


def check_cells(settings: Settings, groups: Sequence[tuple[Settings, str, Path]]) -> None:
    """Checks that all cells of a table of accuracies can be trained, before any of them is.

    Args:
        settings: The flags of the command.
        groups: Settings, method and folder of each group of cells that differ only in their trial.

    Raises:
        FlagError: for a flag that no cell uses, or data without classes.
        ArgumentError: for a mistake in a cell, or a folder that contains something else.
    """
    settings.check_read([variant for variant, _, _ in groups])
    for variant, name, out in groups:
        clients, _ = cached_clients(variant, trials_of(variant)[0].data_seed)
        if clients.task == "regression":
            raise settings.error("dataset", "has no classes; accepted: classification data sets")
        arranged_cells(variant, name, out).check()


def build_tracker(settings: Settings, out: Path) -> api.Tracker | None:
    """Returns the tracker of the run in a folder, or None without --tracker."""
    name = settings.tracker
    return None if name == "none" else api.TRACKERS[name](out / name)


def build_tracker_of_table(settings: Settings, out: Path) -> api.Tracker | None:
    """Returns the tracker of all runs of a table, each of which has its files in its own folder."""
    name = settings.tracker
    if name == "none":
        return None
    tracker = api.TRACKERS[name](out)

    def track(evaluation: api.Evaluation) -> None:
        tracker(evaluation._replace(run=f"{evaluation.run}/{name}"))

    return track


def config(settings: Settings, name: str, trial: Trial) -> dict:
    """Returns the command line's part of config.json.

    Its "settings" must agree when a run is resumed: the training and data flags and the method's own hyperparameters.
    """
    values = {**settings.values, "method": name, "seed": trial.seed, "split": trial.split}
    omitted = ("methods", "rounds", "planned_rounds", "learning_rates")
    same = []
    for flag, heading in settings.headings.items():
        if heading in (WHAT, DATA, name) and flag not in omitted:
            same.append(flag)
    same += ["method", "seed", "split"]
    if settings.lr_schedule == "multistep":  # which depends on it
        same.append("planned_rounds")
        values["planned_rounds"] = planned_rounds(settings)
    return {
        "flags": {flag: values[flag] for flag in sorted(values)},
        "settings": {f"--{flag}": values[flag] for flag in same},
        "defaults": settings.defaults or None,
        "command": command(),
        "directory": os.getcwd(),  # of relative paths in flags
        **recorded.recordable({"method": method.get(name)}),
    }


def command() -> str:
    """Returns the shell command that started this process."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec:
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    else:
        program = [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])


def print_defaults(settings: Settings) -> None:
    """Prints the first line of the plan: the file with the data set's defaults."""
    if settings.defaults:
        print(f"  {'defaults':32} {settings.defaults}")
