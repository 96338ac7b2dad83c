"""Builds objects of the Python API from settings: clients, model, local training, method, run."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax

from pfljax import api, data, models
from pfljax.algorithms.common.attacks import Attack
from pfljax.algorithms.common.server import Server
from pfljax.cli.flags import DATA, FLAG_OF, WHAT
from pfljax.cli.settings import FlagError, Settings
from pfljax.core import method, optional, own_files, recorded
from pfljax.data import Federation, embedding, partitions, sources, statistics
from pfljax.engine import processes
from pfljax.local.privacy import Privacy
from pfljax.local.training import LocalTraining
from pfljax.training.experiment import Execution
from pfljax.training.folders import BOARD
from pfljax.training.progress import told
from pfljax.training.tracking import TensorBoard

DEFAULT_CLIENTS = 16  # for sources that generate their clients, and partitions that divide examples
Clients = tuple[Federation, Federation | None]  # training clients, and clients held out of training


class Trial(NamedTuple):
    """The seeds of a run.

    Attributes:
        seed: Seed for initial models, cohorts, batches and sampling.
        split: Seed for dividing examples among clients; None: the same as `seed`.
    """

    seed: int
    split: int | None = None

    @property
    def of_data(self) -> int:
        """The seed that divides examples among clients."""
        return self.seed if self.split is None else self.split

    @property
    def folder(self) -> str:
        """Name of the run's folder."""
        return f"seed-{self.seed}" if self.split is None else f"split-{self.split}-seed-{self.seed}"


def read_methods(settings: Settings) -> list[str]:
    """Returns the methods in --algorithm or --algorithms. Checks them, their knobs, --out and --tensorboard.

    Raises:
        ArgumentError: for an unknown method, a folder that cannot be written to, or a missing package.
        FlagError: for a knob of a method that is not run.
    """
    if "algorithm" in settings:
        names = [settings.algorithm]
    else:
        names = list(method.METHODS) if settings.algorithms == ["all"] else settings.algorithms
    for name in names:
        method.get(name)
    settings.check_knobs(names)
    settings.check_out()
    if "tensorboard" in settings and settings.tensorboard:
        optional.load("tensorboardX", "tensorboard")
    return names


def build_method(settings: Settings, name: str) -> Any:
    """Returns a method with its knobs."""
    found = method.get(name)
    return found(**{field.name: settings[f"{name}.{field.name}"] for field in dataclasses.fields(found)})


def build_source(settings: Settings, seed: int) -> sources.Source:
    """Returns the data set's examples."""
    kind, _, member = settings.dataset.partition(":")
    if kind not in sources.SOURCES or bool(member) != (kind == "tfds"):
        known = [name + ":NAME" * (name == "tfds") for name in sources.SOURCES]
        raise settings.error("dataset", f"unknown; accepted: {', '.join(known)}")
    for flag, readers in (("data_file", ("npz", "text")), ("data_dir", ("tfds",))):
        if settings[flag] and kind not in readers:
            raise settings.error(
                flag, f"applies only with --dataset={' or '.join(readers)}, not with {settings.dataset}"
            )
    make = sources.get(kind)
    common = {"seed": seed, "fraction": settings.data_fraction, **own_options(settings, kind)}
    num_clients = settings.num_clients or DEFAULT_CLIENTS
    if kind == "sine":
        return make(num_clients, **common)
    if kind == "synthetic":
        mixture = {"components": settings.num_distributions, "alpha": settings.dirichlet_alpha}
        return make(num_clients, **mixture, test_examples=settings.test_examples, **common)
    if kind == "npz":
        return make(settings.data_file, standardize=settings.standardize, **common)
    if kind == "text":
        return make(settings.data_file, stride=settings.text_stride, **common)
    if kind == "tfds":
        return make(member, data_dir=settings.data_dir, standardize=settings.standardize, **common)
    return make(**common)


def own_options(settings: Settings, kind: str) -> dict[str, Any]:
    """Returns the values of the flags KIND.OPTION, which only this kind of data set uses.

    Raises:
        FlagError: if the command line has such a flag of another kind.
    """
    options = {}
    for flag, group in settings.headings.items():
        owner, dot, option = flag.partition(".")
        if group == DATA and dot and owner == kind:
            options[option] = settings[flag]
        elif group == DATA and dot:
            settings.refuse(flag, f"the data set is {settings.dataset}, not {owner}")
    return options


def build_partition(settings: Settings, source: sources.Source, seed: int) -> Any:
    """Returns the partition of the examples; None: the library's default."""
    name = settings.partition
    if name == "auto":
        if source.client is not None or source.task == "regression":
            for flag in ("balanced_groups", *(["num_distributions"] if settings.dataset != "synthetic" else [])):
                settings.refuse(flag, f"the partition is {partitions.default(source).name}")
            return None
        name = "label_groups"
    kind: Any = partitions.get(name)
    fields = {field.name for field in dataclasses.fields(kind)}
    knobs = {field: settings[FLAG_OF[field]] for field in fields if field in FLAG_OF}
    if "embedding" in fields:
        named = settings.embedding != "auto"
        by = settings.embedding if named else embedding.automatic(source, settings.num_distributions)
        knobs["embedding"] = embedding.make(by, epochs=settings.embedding_epochs, seed=seed, **widths(settings))
    return kind(**knobs)


def build_clients(settings: Settings, seed: int) -> Clients:
    """Returns the training clients, and the clients held out of training (or None)."""
    share = settings.unseen_clients
    if not 0 <= share < 1:
        raise settings.error("unseen_clients", "accepted: 0 to below 1")
    with told(f"reading {settings.dataset}", print):
        source = build_source(settings, seed)
    splits = data.Splits(**{field.name: settings[field.name] for field in dataclasses.fields(data.Splits)})
    partition = build_partition(settings, source, seed)
    apart = jax.process_count() > 1 and settings.client_store == "device"  # otherwise each host loads all clients' data
    own = build_execution(settings).make_plan().own_rows if apart else None
    load = functools.partial(data.load, source, partition, splits, num_clients=settings.num_clients or None, seed=seed)
    with told("dividing the examples among clients", print):
        if share:
            federation, unseen = data.split_unseen(load(), share, seed)
            if own:
                federation, unseen = (data.keep_own(each, own(each.num_clients)) for each in (federation, unseen))
        else:
            federation, unseen = load(own=own), None
    processes.agree({"who has which examples": federation.index_digest})
    return federation, unseen


_kept: dict[tuple, Clients] = {}  # only the most recent: an image data set may take a gigabyte


def cached_clients(settings: Settings, seed: int) -> Clients:
    """Returns `build_clients`, cached for all methods with the same seed and data."""
    names = [name for name, heading in settings.headings.items() if heading == DATA]
    key = (seed, *(str(settings[name]) for name in [*names, "hidden", "channels", "devices"]))
    if key not in _kept:
        while len(_kept) >= 3:
            del _kept[next(iter(_kept))]
        _kept[key] = build_clients(settings, seed)
    return _kept[key]


def widths(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Returns the widths of the mlp and the cnn."""
    return {name: tuple(settings.numbers(name, int)) for name in ("hidden", "channels")}


def build_model(settings: Settings, federation: Federation) -> models.Model:
    """Returns the clients' network."""
    name, task = settings.model, federation.task
    shape = federation.train.x.shape[2:]
    if own_files.is_file_and_name(name):
        return models.build(own_files.load("model", name), shape, task, federation.num_classes)
    sequences = federation.train.y.ndim > 2
    if name == "auto":
        name = "lstm" if sequences else "linear" if task == "regression" else "mlp"
        if name != "mlp" and settings.partition != "latent":
            settings.refuse("hidden", f"the model is {name}")
    if name in models.NAMES and sequences != (name == "lstm"):
        raise FlagError.of("model", f"accepted for {federation.name}: {'lstm' if sequences else 'all but lstm'}", name)
    return models.make(name, shape, task, federation.num_classes, **widths(settings))


def build_local(settings: Settings, federation: Federation) -> LocalTraining:
    """Returns the settings of local training."""
    if not 0 < settings.lr_decay <= 1:
        raise settings.error("lr_decay", "accepted: above 0, at most 1")
    if not 0 <= settings.momentum < 1:
        raise settings.error("momentum", "accepted: 0 to below 1")
    if settings.momentum and settings.optimizer != "sgd":
        raise settings.error("momentum", "applies only with --optimizer=sgd")
    return LocalTraining(
        functools.partial(make_optimizer, settings.optimizer, settings.momentum, settings.weight_decay),
        settings.learning_rate,
        batch_size=settings.batch_size,
        epochs=settings.local_epochs,
        steps=settings.local_steps,
        schedule=build_schedule(settings),
        keep_optimizer=settings.keep_optimizer,
        common_init=settings.common_init,
        class_weights=build_class_weights(settings, federation),
        augment=settings.augment,
        privacy=Privacy(settings.dp_noise_multiplier, settings.dp_clip_norm, settings.dp_delta, settings.noise_seed),
    )


def make_optimizer(name: str, momentum: float, weight_decay: float, learning_rate: Any) -> optax.GradientTransformation:
    """Returns SGD or Adam with a learning rate."""
    made = optax.sgd(learning_rate, momentum=momentum or None) if name == "sgd" else optax.adam(learning_rate)
    return optax.chain(optax.add_decayed_weights(weight_decay), made) if weight_decay else made


def build_class_weights(settings: Settings, federation: Federation) -> tuple[float, ...] | None:
    """Returns the class weights of the training loss."""
    if settings.class_weights == "none":
        return None
    if settings.dp_noise_multiplier:
        raise settings.error("class_weights", "uses clients' label counts; accepted with --dp_noise_multiplier: none")
    return statistics.inverse_frequency_weights(federation)


def build_schedule(settings: Settings) -> optax.Schedule | None:
    """Returns the factor of the learning rate, by round."""
    if settings.lr_schedule == "multistep":
        starts = (settings.rounds // 2, 3 * settings.rounds // 4)
        return optax.piecewise_constant_schedule(1.0, {start: 0.1 for start in starts if start})
    if settings.lr_schedule == "exponential":
        return optax.exponential_decay(1.0, 1, settings.lr_decay)
    return None


def build_execution(settings: Settings) -> Execution:
    """Returns where clients are stored and how they are mapped to devices."""
    return Execution(settings.plan, settings.chunk, settings.devices, settings.exchange, settings.client_store)


def build_server(settings: Settings) -> Server:
    """Returns how cohorts are sampled and models aggregated."""
    return Server(settings.sampler, settings.sampler_candidates, settings.aggregator, settings.aggregator_trim)


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
    return api.Run(
        clients=federation,
        **{part: given[part] if part in given else build() for part, build in make.items()},
        seed=trial.seed,
        participation=settings.participation,
        unseen=unseen,
        fine_tune_epochs=settings.fine_tune_epochs,
        eval_clients=settings.eval_clients,
        server=build_server(settings),
        attack=Attack(settings.attack, settings.attackers, settings.attack_strength),
        execution=build_execution(settings),
        config=config(settings, name, trial),
    )


def build_tracker(settings: Settings, out: Path) -> TensorBoard | None:
    """Returns the TensorBoard tracker of the run in a folder, or None without --tensorboard."""
    return TensorBoard(out / BOARD) if settings.tensorboard else None


def config(settings: Settings, name: str, trial: Trial) -> dict:
    """Returns the command line's part of config.json.

    Its "settings" must agree when a run is resumed: the training and data flags and the method's own knobs.
    """
    values = {**settings.values, "algorithm": name, "seed": trial.seed, "split": trial.split}
    same = [flag for flag, heading in settings.headings.items() if heading in (WHAT, DATA, name)]
    same = [flag for flag in same if flag not in ("algorithms", "rounds", "learning_rates")] + [
        "algorithm",
        "seed",
        "split",
    ]
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
