"""The flags of the commands, by group. A command registers those that it reads; `flag_help` has their texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import optax
from absl import flags

from pfljax.api import (
    TRACKERS,
    Attack,
    ClientPrivacy,
    Clock,
    Compression,
    Execution,
    Faults,
    LocalTraining,
    Patience,
    Privacy,
    Run,
    Server,
    adapters,
    models,
    tuning,
    weights,
)
from pfljax.api.comparison import SEEDS
from pfljax.api.study import Replicate, Rerun
from pfljax.cli.flag_help import HELP
from pfljax.cli.parsing import Group, Rates
from pfljax.data import Drift, Splits, partitions, sources, split_unseen
from pfljax.settings.fields import ANY_TEXT, Seeds, hyperparameter, settings
from pfljax.settings.method import METHODS

WHAT = "Training"
DATA = "Data"
HOW = "Execution"
RUNS = "Runs and output"
PARTITIONS = ("auto", *partitions.PARTITIONS)
# values of flags given without a value
IMPLIED = {"tune": "0.01,0.03,0.1,0.3,1,3", "json": "-"}
METHOD_FLAGS = ("method", "methods")
TRAIN = Run.train
LATENT = {"partition": ("latent",)}
BLOCKS = ("auto", "vit", "transformer", "encoder")
FROZEN = {"frozen": ANY_TEXT}
DRIFT = "(labels|exchange|classes|arrive|leave)@[1-9][0-9]{0,8}"
DRIFTS = "CHANGE@ROUND, such as labels@40; changes: labels, exchange, classes, arrive, leave"
TUNED = {"tune": ANY_TEXT, "tune_hyperparameters": ANY_TEXT}


@settings
class Data:
    """The data set and its division among clients."""

    dataset: str = "digits"
    partition: str = hyperparameter("auto", choices=PARTITIONS, refused=partitions.REFUSED)
    num_clients: int = hyperparameter(0, at_least=0)
    embedding: str = hyperparameter("auto", read_with=LATENT)
    embedding_epochs: int = hyperparameter(5, at_least=1, read_with=LATENT)


@settings
class Network:
    """The clients' network."""

    model: str = "auto"
    hidden: Sequence[int] = hyperparameter(
        (64,), at_least=1, empty=True, read_with={"model": ("auto", "mlp"), **LATENT}
    )
    channels: Sequence[int] = hyperparameter(
        (128,) * 3, at_least=1, read_with={"model": ("cnn",), **LATENT}
    )
    patch: int = hyperparameter(4, at_least=1, read_with={"model": ("vit",)})
    width: int = hyperparameter(128, at_least=1, read_with={"model": BLOCKS})
    depth: int = hyperparameter(4, at_least=1, at_most=1000, read_with={"model": BLOCKS})
    heads: int = hyperparameter(4, at_least=1, read_with={"model": BLOCKS})
    style: str = hyperparameter(
        "auto", choices=("auto", *models.STYLES), read_with={"model": BLOCKS}
    )


@settings
class Adapting:
    """Adapters and trainable parameters of a network whose other parameters are frozen."""

    frozen: str | Path = ""
    frozen_layout: str = hyperparameter(
        "paths", choices=("paths", *weights.LAYOUTS), read_with=FROZEN
    )
    frozen_dtype: Literal["bfloat16", "float32"] = hyperparameter("bfloat16", read_with=FROZEN)
    adapter: Literal["none", "lora", "ia3", "prompt", "bias"] = hyperparameter(
        "none", read_with=FROZEN
    )
    adapter_rank: int = hyperparameter(8, at_least=1, read_with={"adapter": ("lora", "prompt")})
    adapter_where: str = hyperparameter("", read_with={"adapter": ("lora", "ia3", "bias")})
    trainable: str = hyperparameter("head", read_with=FROZEN)

    def options(self) -> dict[str, Any]:
        """Returns the fields of `Model`; {} if nothing is frozen."""
        if not self.frozen:
            return {}
        adapter: list[Any] = []
        if self.adapter == "lora":
            adapter = [adapters.lora(self.adapter_rank, self.adapter_where)]
        elif self.adapter == "ia3":
            adapter = [adapters.ia3(self.adapter_where)]
        elif self.adapter == "bias":
            adapter = [adapters.bias(self.adapter_where)]
        elif self.adapter == "prompt":
            adapter = [adapters.prompt(self.adapter_rank)]
        layout = "" if self.frozen_layout == "paths" else self.frozen_layout
        paths = [self.trainable] if self.trainable else []
        return {
            "frozen": weights.Saved(self.frozen, layout),
            "trainable": (*adapter, *paths),
            "frozen_dtype": self.frozen_dtype,
        }


@settings
class Optimizer:
    """The clients' optimizer, the schedule of its learning rate, and class weights."""

    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: float = hyperparameter(0.0, at_least=0, below=1, read_with=("optimizer", "sgd"))
    weight_decay: float = hyperparameter(0.0, at_least=0)
    lr_schedule: Literal["constant", "multistep", "exponential"] = "constant"
    lr_decay: float = hyperparameter(
        0.99, above=0, at_most=1, read_with=("lr_schedule", "exponential")
    )
    class_weights: Literal["none", "inverse"] = "none"

    def make(self, learning_rate: Any) -> optax.GradientTransformation:
        """Returns the optimizer with a learning rate."""
        if self.optimizer == "sgd":
            optimizer = optax.sgd(learning_rate, momentum=self.momentum or None)
        else:
            optimizer = optax.adam(learning_rate)
        if not self.weight_decay:
            return optimizer
        return optax.chain(optax.add_decayed_weights(self.weight_decay), optimizer)

    def schedule(self, rounds: int) -> optax.Schedule | None:
        """Returns the factor of the learning rate, by round."""
        if self.lr_schedule == "multistep":
            starts = (rounds // 2, 3 * rounds // 4)
            return optax.piecewise_constant_schedule(1.0, {start: 0.1 for start in starts if start})
        if self.lr_schedule == "exponential":
            return optax.exponential_decay(1.0, 1, self.lr_decay)
        return None


@settings
class Processes:
    """Several processes that train a run together."""

    coordinator: str | None = None
    num_processes: int | None = hyperparameter(None, at_least=1)
    process_id: int | None = hyperparameter(None, at_least=0)


@settings
class Sweep:
    """The runs of a table."""

    seeds: Seeds = hyperparameter(SEEDS, distinct=True)
    splits: Seeds = hyperparameter((), distinct=True, empty=True)
    replicate: Replicate = "auto"
    rerun: Rerun = "never"
    out: str | Path = "runs"
    tune: Sequence[float] = hyperparameter((), above=0, distinct=True, empty=True)
    tune_hyperparameters: bool = False
    tune_seeds: Seeds = hyperparameter((), distinct=True, empty=True, read_with=TUNED)
    tune_widen: int = hyperparameter(tuning.WIDEN, at_least=0, at_most=100, read_with=TUNED)
    keep_validation: bool = hyperparameter(False, read_with=TUNED)


def define_data(registry: flags.FlagValues, dataset: str = "digits") -> None:
    """Registers the flags of data set, partition and splits."""
    add = Group(DATA, registry)
    add.declare(Data, dataset=dataset)
    add.declare(Splits)
    for name, partition in partitions.PARTITIONS.items():
        names = ("auto", name) if partition is partitions.LabelGroups else (name,)
        add.declare(partition, where={"partition": names})
    for name, source in sources.SOURCES.items():
        add.declare(source, where={"dataset": (name,)})
    fraction: Any = registry["data_fraction"]
    fraction.read_with = {}  # by all sources
    add.declare(split_unseen, unseen=0.0)


def define_training(registry: flags.FlagValues, rounds: int = 150, scored: bool = True) -> None:
    """Registers flags of training and of all methods; those that read scores or attack only for `scored` runs."""
    add = Group(WHAT, registry)
    add.declare(Network)
    add.declare(Adapting)
    add.declare(TRAIN, "rounds", rounds=rounds)
    add.declare(LocalTraining, learning_rate=LocalTraining().learning_rate)
    add.listed("learning_rates", [], HELP["learning_rates"], Rates())
    stages = [Server, Attack, Compression, Faults, ClientPrivacy, Patience] if scored else []
    for declaring in (Optimizer, Run, Privacy, *stages):
        add.declare(declaring)
    if scored:
        add.add("clock", bool, False, HELP["clock"])
        add.declare(Clock, where={"clock": (True,)})
        add.several("drift", [], HELP["drift"], empty=True, pattern=DRIFT, accepted=DRIFTS)
        add.declare(Drift, where={"drift": ANY_TEXT})
    for name, method in METHODS.items():
        Group(name, registry).declare(method, prefix=f"{name}.")


def define_devices(registry: flags.FlagValues, *, lists: bool = False) -> None:
    """Registers the flags of devices; with `lists`, several plans, chunks and numbers of devices are accepted."""
    add = Group(HOW, registry)
    add.declare(Execution, lists=("plan", "chunk", "devices") if lists else ())
    add.declare(TRAIN, "profile")
    add.declare(Processes)


def define_evaluation(registry: flags.FlagValues) -> None:
    """Registers how often a run is evaluated and saved."""
    add = Group(HOW, registry)
    add.declare(TRAIN, "eval_every", "checkpoint_every")
    add.several("metrics", [], HELP["metrics"], empty=True)
    add.add("score", str, None, HELP["score"])
    add.add("tracker", str, "none", HELP["tracker"], choices=["none", *TRACKERS])


def define_verbose(registry: flags.FlagValues) -> None:
    """Registers the flag that prints all lines of the plan."""
    Group(RUNS, registry).add("verbose", bool, False, HELP["verbose"])


def define_sweep(
    registry: flags.FlagValues, methods: Sequence[str], seeds: Sequence[str], out: str
) -> None:
    """Registers methods, seeds, the folder and tuning."""
    Group(WHAT, registry).several("methods", methods, HELP["methods"])
    Group(RUNS, registry).declare(Sweep, seeds=seeds, out=out)
