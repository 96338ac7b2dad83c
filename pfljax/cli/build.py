"""Builds objects of the Python API from settings: clients, model, local training, method, run."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from pfljax import api, data
from pfljax.cli.flags import DATA, WHAT, Adapting, Optimizer
from pfljax.cli.settings import FlagError, Settings
from pfljax.contract import method, optional, own_files, processes, recorded
from pfljax.data import Federation, partitions, sources, statistics
from pfljax.evaluation.statistics import Trial

DEFAULT_CLIENTS = 16  # for sources that generate their clients, and partitions that divide examples
Clients = tuple[Federation, Federation | None]  # training clients, and clients held out of training


def read_methods(settings: Settings) -> list[str]:
    """Returns the methods in --algorithm or --algorithms. Checks them, their knobs, --out and --tracker."""
    if "algorithm" in settings and not ("algorithms" in settings and settings.algorithms):
        names = [settings.algorithm]
    else:
        names = list(method.METHODS) if settings.algorithms == ["all"] else settings.algorithms
    for name in names:
        method.get(name)
    settings.check_knobs(names)
    settings.check_out()
    if "tracker" in settings and settings.tracker != "none":
        optional.load(api.TRACKERS[settings.tracker].package, "tracker", settings.tracker)
    return names


def build_method(settings: Settings, name: str) -> Any:
    found = method.get(name)
    return settings.make(found, prefix=f"{name}.")


def build_source(settings: Settings, seed: int) -> sources.Source:
    kind, _, member = settings.dataset.partition(":")
    if kind not in sources.SOURCES or bool(member) != (kind == "tfds"):
        known = [name + ":NAME" * (name == "tfds") for name in sources.SOURCES]
        raise settings.error("dataset", f"unknown; accepted: {', '.join(known)}, file")
    num_clients = settings.num_clients or DEFAULT_CLIENTS
    return settings.make(sources.SOURCES[kind], seed=seed, num_clients=num_clients, name=member)


def build_partition(settings: Settings, source: sources.Source, seed: int) -> Any:
    """Returns the partition of the examples; None: the library's default."""
    name = settings.partition
    if name == "auto":
        if source.client is not None or source.task == "regression":
            for flag in ("balanced_groups", *(["num_distributions"] if settings.dataset != "synthetic" else [])):
                settings.refuse(flag, f"the partition is {partitions.default(source).name}")
            return None
        name = "label_groups"
    kind, given = partitions.PARTITIONS[name], {}
    if kind is partitions.Latent:
        named = settings.embedding != "auto"
        by = settings.embedding if named else api.embedding.automatic(source, settings.num_distributions)
        given["embedding"] = api.embedding.make(by, epochs=settings.embedding_epochs, seed=seed, **widths(settings))
    return settings.make(kind, **given)


def build_clients(settings: Settings, seed: int) -> Clients:
    """Returns the training clients, and the clients held out of training (or None)."""
    share = settings.unseen_clients
    with api.announced(f"reading {settings.dataset}", print):
        source = build_source(settings, seed)
    splits = settings.make(data.Splits)
    partition = build_partition(settings, source, seed)
    # Otherwise each host loads all clients' data.
    apart = jax.process_count() > 1 and api.STORES[settings.client_store].on_devices
    own = settings.make(api.Execution).make_plan().own_rows if apart else None
    load = functools.partial(data.load, source, partition, splits, num_clients=settings.num_clients or None, seed=seed)
    with api.announced("dividing the examples among clients", print):
        if share:
            federation, unseen = data.split_unseen(load(), share, seed)
            if own:
                federation, unseen = (data.keep_own(each, own(each.num_clients)) for each in (federation, unseen))
        else:
            federation, unseen = load(own=own), None
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
    of_blocks = {name: settings[name] for name in ("patch", "width", "depth", "heads")}
    return {**widths(settings), **of_blocks, "style": "" if settings.style == "auto" else settings.style}


def build_model(settings: Settings, federation: Federation) -> api.models.Model | api.models.Networks:
    """Returns the clients' network or networks."""
    names, families = settings.model.split(","), api.models.FAMILIES
    if len(names) > 1:
        wrong = next((name for name in names if names.count(name) > 1 or name in families), None)
        if wrong is not None:
            raise settings.error("model", "accepted: a list of different networks, or the name of one family")
        return api.models.Networks({name: build_network(settings, federation, name) for name in names})
    if settings.model in families:
        return api.models.Networks(families[settings.model])
    return build_network(settings, federation, settings.model)


def build_network(settings: Settings, federation: Federation, name: str) -> api.models.Model | api.models.Networks:
    """Returns a network by name, or the network or networks of a user's file."""
    task, options = federation.task, settings.make(Adapting).options()
    shape, target_shape = federation.train.x.shape[2:], federation.train.y.shape[2:]
    if own_files.is_file_and_name(name):
        found = own_files.load("model", name)
        if isinstance(found, Mapping | api.models.Networks):
            return found if isinstance(found, api.models.Networks) else api.models.Networks(found)
        found = api.models.Model(found, **options) if options else found
        targets = {"num_classes": federation.num_classes, "target_shape": target_shape}
        return api.models.build(found, federation.inputs, task, name=name, **targets)
    sequences = task == "classification" and len(target_shape) == 1
    if name == "auto":
        name = "lstm" if sequences else "linear" if task == "regression" else "mlp"
        if name != "mlp" and settings.partition != "latent":
            settings.refuse("hidden", f"the model is {name}")
    of_places = ", ".join(api.models.SEQUENCES)
    if name in api.models.NAMES and sequences != (name in api.models.SEQUENCES):
        accepted = of_places if sequences else f"all but {of_places}"
        raise FlagError.of("model", f"accepted for {federation.name}: {accepted}", name)
    options = {"target_shape": target_shape, "options": options}
    return api.models.make(name, shape, task, federation.num_classes, **options, **sizes(settings))


def build_local(settings: Settings, federation: Federation) -> api.LocalTraining:
    how, loss = settings.make(Optimizer), settings.loss
    return settings.make(
        api.LocalTraining,
        loss=own_files.load("loss", loss) if own_files.is_file_and_name(loss) else loss,
        optimizer=how.make,
        schedule=how.schedule(settings.rounds),
        class_weights=build_class_weights(settings, federation),
        privacy=settings.make(api.Privacy),
    )


def build_metrics(settings: Settings) -> dict[str, Any]:
    """Returns the metrics of --metrics by name; those of the user's files have their function's name."""
    given = settings.metrics if "metrics" in settings else []
    own = own_files.is_file_and_name
    return {text.rpartition(":")[2]: own_files.load("metrics", text) if own(text) else text for text in given}


def build_class_weights(settings: Settings, federation: Federation) -> tuple[float, ...] | None:
    if settings.class_weights == "none":
        return None
    if settings.dp_noise_multiplier:
        raise settings.error("class_weights", "uses clients' label counts; accepted with --dp_noise_multiplier: none")
    return statistics.inverse_frequency_weights(federation)


def build_run(
    settings: Settings, name: str, clients: Clients, trial: Trial, given: Mapping[str, Any] = MappingProxyType({})
) -> api.Run:
    """Builds and checks one run; `given` may have its "method", "model" and "local"."""
    federation, unseen = clients
    settings = settings.of_method(name)
    make = {
        "method": lambda: build_method(settings, name),
        "model": lambda: build_model(settings, federation),
        "local": lambda: build_local(settings, federation),
    }
    return settings.make(
        api.Run,
        clients=federation,
        **{part: given[part] if part in given else build() for part, build in make.items()},
        seed=trial.seed,
        unseen=unseen,
        server=settings.make(api.Server),
        attack=settings.make(api.Attack),
        compression=settings.make(api.Compression),
        faults=settings.make(api.Faults),
        clock=settings.make(api.Clock) if settings.clock else None,
        client_privacy=settings.make(api.ClientPrivacy),
        metrics=build_metrics(settings),
        stop=settings.make(api.Patience) if settings.patience else None,
        execution=settings.make(api.Execution),
        config=config(settings, name, trial),
    )


def build_tracker(settings: Settings, out: Path) -> api.Tracker | None:
    """Returns the tracker of the run in a folder, or None without --tracker."""
    name = settings.tracker
    return None if name == "none" else api.TRACKERS[name](out / name)


def config(settings: Settings, name: str, trial: Trial) -> dict:
    """Returns the command line's part of config.json.

    Its "settings" must agree when a run is resumed: the training and data flags and the method's own knobs.
    """
    values = {**settings.values, "algorithm": name, "seed": trial.seed, "split": trial.split}
    same = [flag for flag, heading in settings.headings.items() if heading in (WHAT, DATA, name)]
    same = [flag for flag in same if flag not in ("algorithms", "rounds", "planned_rounds", "learning_rates")]
    same += ["algorithm", "seed", "split"]
    if settings.lr_schedule == "multistep":
        same.append("rounds")  # the schedule depends on it
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
    module = spec.name.removesuffix(".__main__") if spec else ""
    return shlex.join([*(["python", "-m", module] if module else [Path(sys.argv[0]).name]), *sys.argv[1:]])


def print_defaults(settings: Settings) -> None:
    """Prints the first line of the plan: the file with the data set's defaults."""
    if settings.defaults:
        print(f"  {'defaults':32} {settings.defaults}")
