"""The flags of the commands, by group. A command registers those that it reads with an absl `FlagValues` of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import optax
from absl import flags

from pfljax.api import (
    METRICS,
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
from pfljax.cli.parsing import Group, Rates
from pfljax.data import Splits, partitions, sources, split_unseen
from pfljax.settings.fields import GIVEN, Seeds, knob, settings
from pfljax.settings.method import METHODS

WHAT = "Training"
DATA = "Data"
HOW = "Execution"
RUNS = "Runs and output"
PARTITIONS = ("auto", *partitions.PARTITIONS)
IMPLIED = {"tune": "0.01,0.03,0.1,0.3,1,3"}  # values of flags given without a value
METHOD_FLAGS = ("method", "methods")
TRAIN = Run.train
LATENT = {"partition": ("latent",)}
BLOCKS = ("vit", "transformer")
FROZEN = {"frozen": GIVEN}
TUNED = {"tune": GIVEN, "tune_knobs": GIVEN}


@settings
class Data:
    """Which data, for how many clients.

    Attributes:
        dataset: digits, sine, synthetic, tfds:NAME (with --data_dir), or the kind of a --data_file: npz, text, csv,
            parquet, leaf, hdf5, sqlite, images, npy, arrayrecord or huggingface; file: the kind that its path looks
            like.
        partition: How examples are dealt to clients; auto is natural if the data name clients, otherwise label_groups
            (iid for regression).
        num_clients: Number of clients K; 0: all clients of a natural partition, otherwise 16.
        embedding: Features to cluster: pixels, classes, or those of a --model trained for it; auto: pixels below
            32 x 32, otherwise classes if there are as many groups, otherwise vgg11.
        embedding_epochs: Number of epochs to train the embedding.
    """

    dataset: str = "digits"
    partition: str = knob("auto", choices=PARTITIONS)
    num_clients: int = knob(0, at_least=0)
    embedding: str = knob("auto", read_with=LATENT)
    embedding_epochs: int = knob(5, at_least=1, read_with=LATENT)


@settings
class Network:
    """The clients' network.

    Attributes:
        model: Name of a network, or FILE.py:NAME, your own callable that takes num_classes; auto: linear for
            regression, lstm for text, otherwise mlp. A list of several, which clients take in turns, a family of
            networks (htfe2, htfe3, htfe4, htfe8), or FILE.py:NAME of a dict of networks: they differ between clients.
        hidden: Widths of the hidden layers of the mlp.
        channels: Numbers of channels of the convolutions of the cnn.
        patch: Rows and columns of a patch of the vit.
        width: Width of the tokens of the vit or transformer.
        depth: Number of blocks of the vit or transformer.
        heads: Number of attention heads of the vit or transformer; a divisor of --width.
        style: Whose blocks the vit or transformer has; auto: vit for images, gpt2 for text.
    """

    model: str = "auto"
    hidden: Sequence[int] = knob(
        (64,), at_least=1, empty=True, read_with={"model": ("auto", "mlp"), **LATENT}
    )
    channels: Sequence[int] = knob((128,) * 3, at_least=1, read_with={"model": ("cnn",), **LATENT})
    patch: int = knob(4, at_least=1, read_with={"model": ("vit",)})
    width: int = knob(128, at_least=1, read_with={"model": BLOCKS})
    depth: int = knob(4, at_least=1, at_most=1000, read_with={"model": BLOCKS})
    heads: int = knob(4, at_least=1, read_with={"model": BLOCKS})
    style: str = knob("auto", choices=("auto", *models.STYLES), read_with={"model": BLOCKS})


@settings
class Adapting:
    """What is trained of a network whose other parameters are frozen.

    Attributes:
        frozen: A safetensors file with the network's parameters, which are held once and not trained; empty: all
            parameters are trained.
        frozen_layout: Whose names and axes the file has: a published family's; paths: the network's own.
        frozen_dtype: What frozen parameters are kept in.
        adapter: What is trained besides --trainable: lora, ia3, bias, or prompt (tokens for every block).
        adapter_rank: Rank of lora, length of prompt.
        adapter_where: Regular expression that the paths of adapted parameters contain.
        trainable: Regular expression; parameters whose paths contain it are trained themselves. Empty: none are.
    """

    frozen: str | Path = ""
    frozen_layout: str = knob("paths", choices=("paths", *weights.LAYOUTS), read_with=FROZEN)
    frozen_dtype: Literal["bfloat16", "float32"] = knob("bfloat16", read_with=FROZEN)
    adapter: Literal["none", "lora", "ia3", "prompt", "bias"] = knob("none", read_with=FROZEN)
    adapter_rank: int = knob(8, at_least=1, read_with={"adapter": ("lora", "prompt")})
    adapter_where: str = knob("", read_with={"adapter": ("lora", "ia3", "bias")})
    trainable: str = knob("head", read_with=FROZEN)

    def options(self) -> dict[str, Any]:
        """Returns the fields of `Model`; {} if nothing is frozen."""
        if not self.frozen:
            return {}
        made = {
            "lora": lambda: [adapters.lora(self.adapter_rank, self.adapter_where)],
            "ia3": lambda: [adapters.ia3(self.adapter_where)],
            "bias": lambda: [adapters.bias(self.adapter_where)],
            "prompt": lambda: [adapters.prompt(self.adapter_rank)],
            "none": list,
        }[self.adapter]()
        layout = "" if self.frozen_layout == "paths" else self.frozen_layout
        trainable = (*made, *([self.trainable] if self.trainable else []))
        return {
            "frozen": weights.Saved(self.frozen, layout),
            "trainable": trainable,
            "frozen_dtype": self.frozen_dtype,
        }


@settings
class Optimizer:
    """The clients' optimizer, its learning rate over the rounds, and the loss.

    Attributes:
        optimizer: Optimizer of the clients (and of the model owners in FedeRiCo).
        momentum: Momentum of sgd.
        weight_decay: L2 penalty: this times the parameters is added to the gradient.
        lr_schedule: multistep: divide the rate by 10 at 1/2 and 3/4 of the rounds; exponential: times --lr_decay per
            round.
        lr_decay: Decay factor per round.
        class_weights: Class weights in the training loss; inverse: inverse frequency, capped at the weight of an
            average class.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: float = knob(0.0, at_least=0, below=1, read_with=("optimizer", "sgd"))
    weight_decay: float = knob(0.0, at_least=0)
    lr_schedule: Literal["constant", "multistep", "exponential"] = "constant"
    lr_decay: float = knob(0.99, above=0, at_most=1, read_with=("lr_schedule", "exponential"))
    class_weights: Literal["none", "inverse"] = "none"

    def make(self, learning_rate: Any) -> optax.GradientTransformation:
        """Returns the optimizer with a learning rate."""
        if self.optimizer == "sgd":
            made = optax.sgd(learning_rate, momentum=self.momentum or None)
        else:
            made = optax.adam(learning_rate)
        return (
            optax.chain(optax.add_decayed_weights(self.weight_decay), made)
            if self.weight_decay
            else made
        )

    def schedule(self, rounds: int) -> optax.Schedule | None:
        """Returns the factor of the learning rate, by round."""
        if self.lr_schedule == "multistep":
            starts = (rounds // 2, 3 * rounds // 4)
            return optax.piecewise_constant_schedule(1.0, {start: 0.1 for start in starts if start})
        return (
            optax.exponential_decay(1.0, 1, self.lr_decay)
            if self.lr_schedule == "exponential"
            else None
        )


@settings
class Processes:
    """Several processes that run together.

    Attributes:
        coordinator: HOST:PORT of process 0, to run several processes together; auto: detect a TPU pod or SLURM.
        num_processes: Number of processes.
        process_id: Index of this process, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = knob(None, at_least=1)
    process_id: int | None = knob(None, at_least=0)


@settings
class Sweep:
    """The runs of a table.

    Attributes:
        seeds: Seeds; each determines the split, initial models, cohorts, mini-batches and sampling of a run.
        splits: Seeds of the data split; every seed is trained on every split.
        replicate: Whether a method's trials share a compiled program; auto: if their data have the same shapes; vmap:
            also if they must be padded.
        rerun: changed: train finished runs again if their settings, data, method, model or optimizer have changed.
        out: Folder of the table; finished runs in it are kept.
        tune: Learning rates to choose from by the validation score, for each method; without a value,
            0.01,0.03,0.1,0.3,1,3.
        tune_knobs: Also tune the knobs that each method's paper tunes.
        tune_seeds: Seeds that rates and knobs are chosen on, none of --seeds; by default as many as --seeds, at most
            three, from 1000 on.
        tune_widen: Number of values to try, one by one, beyond the edge of a grid that wins.
        keep_validation: Train without the validation examples after tuning. By default, training gets them back,
            unless a method or --patience reads them.
    """

    seeds: Seeds = knob(SEEDS, distinct=True)
    splits: Seeds = knob((), distinct=True, empty=True)
    replicate: Replicate = "auto"
    rerun: Rerun = "never"
    out: str | Path = "runs"
    tune: Sequence[float] = knob((), above=0, distinct=True, empty=True)
    tune_knobs: bool = False
    tune_seeds: Seeds = knob((), distinct=True, empty=True, read_with=TUNED)
    tune_widen: int = knob(tuning.WIDEN, at_least=0, at_most=100, read_with=TUNED)
    keep_validation: bool = knob(False, read_with=TUNED)


def define_data(registry: flags.FlagValues, dataset: str = "digits") -> None:
    """Registers the flags of data set, partition and splits."""
    add = Group(DATA, registry)
    add.declare(Data, dataset=dataset)
    add.declare(Splits)
    for name, kind in partitions.PARTITIONS.items():
        add.declare(
            kind, where={"partition": ("auto", name) if kind is partitions.LabelGroups else (name,)}
        )
    for name, source in sources.SOURCES.items():
        add.declare(source, where={"dataset": (name,)})
    fraction: Any = registry["data_fraction"]
    fraction.read_with = {}  # by all sources
    add.declare(split_unseen, unseen=0.0)


def define_training(registry: flags.FlagValues, rounds: int = 150, scored: bool = True) -> None:
    """Registers flags of training and every method's knobs; those that read scores or attack only for `scored` runs."""
    add = Group(WHAT, registry)
    add.declare(Network)
    add.declare(Adapting)
    registry[
        "model"
    ].help = (
        f"{', '.join(models.NAMES)}, {registry['model'].help.removeprefix('Name of a network, ')}"
    )
    add.declare(TRAIN, "rounds", rounds=rounds)
    add.declare(LocalTraining, learning_rate=LocalTraining().learning_rate)
    rates = "METHOD:RATE pairs that override the default rate; ignored if --learning_rate is given"
    add.listed("learning_rates", [], rates, Rates())
    around = [Server, Attack, Compression, Faults, ClientPrivacy, Patience] if scored else []
    for declaring in (Optimizer, Run, Privacy, *around):
        add.declare(declaring)
    if scored:
        add.add(
            "clock",
            bool,
            False,
            "simulate how long clients compute and send; see the flags --clock_*",
        )
        add.declare(Clock, where={"clock": (True,)})
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
    known = ", ".join(METRICS)
    text = f"further metrics of each client's predictions: {known}, or FILE.py:NAME, a function of your own"
    add.several("metrics", [], text, empty=True)
    text = "score by which clients, rounds and methods are ordered and tuned: accuracy, loss, a metric as in --metrics"
    add.add("score", str, None, f"{text}; default: accuracy, or loss for regression")
    text = "log every evaluation to a tracker, whose files are in a folder of its name in the run's folder"
    text = f"{text}; needs pip install 'pfljax[NAME]'"
    add.add("tracker", str, "none", text, choices=["none", *TRACKERS])


def define_sweep(
    registry: flags.FlagValues, methods: Sequence[str], seeds: Sequence[str], out: str
) -> None:
    """Registers methods, seeds, the folder and tuning."""
    Group(WHAT, registry).several(
        "methods", methods, "methods to compare, or all; FILE.py:NAME for your own"
    )
    Group(RUNS, registry).declare(Sweep, seeds=seeds, out=out)
