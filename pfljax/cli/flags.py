"""The flags of the commands, by group. A command registers those that it reads with an absl `FlagValues` of its own."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Sequence
from typing import Any

from absl import flags

import pfljax.algorithms  # noqa: F401  (registers the methods)
from pfljax import models
from pfljax.algorithms.common.attacks import KINDS as ATTACKS
from pfljax.algorithms.common.robust import Aggregator
from pfljax.algorithms.common.sampling import Sampler
from pfljax.cli.parsing import Group, Rates
from pfljax.core.method import METHODS, out_of_range, value_type
from pfljax.data.sources.builtin import SyntheticLabels
from pfljax.local.augmentation import Augment

WHAT, DATA, HOW, RUNS = "Training", "Data", "Execution", "Runs and output"
OPTIMIZERS = ("adam", "sgd")
SCHEDULES = ("constant", "multistep", "exponential")
CLASS_WEIGHTS = ("none", "inverse")
PLANS = ("auto", "vmap", "map", "chunk")
PARTITIONS = (
    *("auto", "iid", "label_groups", "label_dirichlet", "dirichlet", "pathological", "pairs", "pachinko"),
    *("latent", "natural"),
)
# Flags by the library's name for the same argument.
FLAG_OF = {
    "groups": "num_distributions",
    "balanced": "balanced_groups",
    "clusters": "num_distributions",
    "components": "num_distributions",
    "alpha": "dirichlet_alpha",
    "classes": "classes_per_client",
    "file": "data_file",
    "share": "unseen_clients",
    "fraction": "data_fraction",
    "stride": "text_stride",
    "epochs": "local_epochs",
    "steps": "local_steps",
    "noise_multiplier": "dp_noise_multiplier",
    "clip_norm": "dp_clip_norm",
    "delta": "dp_delta",
    "candidates": "sampler_candidates",
    "algorithm": "algorithms",
    "seed": "seeds",
}
IMPLIED = {"tune": "0.01,0.03,0.1,0.3,1,3"}  # values of flags given without a value
MOST_DEVICES = 1024
# Flags that are read only if another flag has one of these values.
READ_WITH = {
    "lr_decay": {"lr_schedule": ("exponential",)},
    "momentum": {"optimizer": ("sgd",)},
    "channels": {"model": ("cnn",), "partition": ("latent",)},
    "hidden": {"model": ("auto", "mlp"), "partition": ("latent",)},
    "embedding": {"partition": ("latent",)},
    "embedding_epochs": {"partition": ("latent",)},
    "num_distributions": {
        "partition": ("auto", "label_groups", "label_dirichlet", "latent"),
        "dataset": ("synthetic",),
    },
    "dirichlet_alpha": {"partition": ("label_dirichlet", "dirichlet", "pachinko"), "dataset": ("synthetic",)},
    "classes_per_client": {"partition": ("pathological", "pairs")},
    "balanced_groups": {"partition": ("auto", "label_groups", "label_dirichlet")},
    "text_stride": {"dataset": ("text",)},
    "standardize": {"dataset": ("npz", "tfds")},
    "test_fraction": {"official_test": ("False",)},
    "chunk": {"plan": ("chunk",)},
    "sampler_candidates": {"sampler": ("power_of_choice",)},
    "aggregator_trim": {"aggregator": ("trimmed_mean", "krum")},
    "attackers": {"attack": ("label_flip", "sign_flip", "noise", "scale")},
    "attack_strength": {"attack": ("sign_flip", "noise", "scale")},
}
METHOD_FLAGS = ("algorithm", "algorithms")


def define_data(registry: flags.FlagValues, dataset: str = "digits") -> None:
    """Registers the flags of data set, partition and splits."""
    add = Group(DATA, registry)
    add.text(
        "dataset", dataset, "digits, sine, synthetic, npz or text (with --data_file), or tfds:NAME (with --data_dir)"
    )
    add.text(
        "data_file",
        None,
        "npz: holds x and y; client (or writer), is_test and coarse are optional; text: a play with NAME: lines",
    )
    add.text("data_dir", None, "folder of prepared TensorFlow data sets")
    add.real("data_fraction", 1.0, "fraction of the examples to use", above=0, at_most=1)
    add.switch("standardize", True, "scale npz and tfds data to mean 0 and variance 1, from the training examples")
    add.choice(
        "partition",
        "auto",
        PARTITIONS,
        "how examples are dealt to clients; auto is natural if the data name clients, otherwise label_groups (iid for "
        "regression)",
    )
    add.whole("num_clients", 0, "number of clients K; 0: all clients of a natural partition, otherwise 16", least=0)
    add.whole(
        "num_distributions",
        2,
        "number of label groups (label_groups, label_dirichlet), clusters (latent) or components (synthetic)",
        least=1,
    )
    add.switch(
        "balanced_groups",
        True,
        "give each label group as many clients; false: draw each client's group",
    )
    add.real("dirichlet_alpha", 0.4, "concentration of the Dirichlet partitions and synthetic mixtures", above=0)
    add.whole("classes_per_client", 2, "number of classes per client (pathological, pairs)", least=1)
    add.choice(
        "synthetic.labels",
        "mixture",
        typing.get_args(SyntheticLabels),
        "published: the data of FedEM's authors, whose generator has a bug that makes a quarter of the labels constant",
    )
    _define_splits(add)
    add.text(
        "embedding",
        "auto",
        "features to cluster with --partition=latent: pixels, classes, or those of a --model trained for it; auto: "
        "pixels below 32 x 32, otherwise classes if there are as many distributions, otherwise vgg11",
    )
    add.whole("embedding_epochs", 5, "number of epochs to train the embedding", least=1)
    add.real(
        "unseen_clients",
        0.0,
        "fraction of the clients held out of training; they adapt and are scored afterwards",
        at_least=0,
        below=1,
    )


def _define_splits(add: Group) -> None:
    """Registers the sizes of clients and of their splits."""
    add.switch("replacement", False, "let clients share examples, for more clients than examples suffice for")
    text = "test on the data set's own test examples instead of a fraction of each client's"
    add.switch("official_test", False, f"{text}; true for an npz file with is_test, unless --test_fraction is given")
    add.whole("train_examples", 0, "maximum number of training examples per client; 0: no limit", least=0)
    add.whole("test_examples", 0, "maximum number of test examples per client; 0: no limit (synthetic: 5,000)", least=0)
    add.real(
        "test_fraction",
        0.2,
        "fraction of each client's examples used for testing, without --official_test",
        above=0,
        below=1,
    )
    add.real(
        "validation_fraction",
        0.0,
        "fraction of each client's training examples used for validation; 0.2 if a method needs them",
        at_least=0,
        below=1,
    )
    add.whole("text_stride", 1, "number of characters between the starts of consecutive text windows", least=1)
    add.choice("targets", "own", ["own", "shuffled"], "shuffled: reassign clients' validation and test splits")


def define_training(registry: flags.FlagValues, rounds: int = 150) -> None:
    """Registers the training flags and every method's knobs; `rounds` is the default of --rounds."""
    add = Group(WHAT, registry)
    add.text(
        "model",
        "auto",
        f"{', '.join(models.NAMES)}, or FILE.py:NAME, your own callable that takes num_classes; "
        "auto: linear for regression, lstm for text, otherwise mlp",
    )
    add.several("hidden", ["64"], "widths of the hidden layers of --model=mlp", int, distinct=False, empty=True)
    channels = ["128", "128", "128"]
    add.several("channels", channels, "numbers of channels of the convolutions of --model=cnn", int, distinct=False)
    add.whole("rounds", rounds, "number of communication rounds R", least=1)
    add.whole("local_epochs", 1, "number of local epochs per round", least=1)
    add.whole("local_steps", 0, "number of local steps per round; 0: use --local_epochs", least=0)
    add.whole("batch_size", 0, "mini-batch size B; 0: full batches", least=0)
    add.choice("augment", "none", typing.get_args(Augment), "random crops and flips of training images")
    add.choice("optimizer", "adam", OPTIMIZERS, "optimizer of the clients (and of the model owners in FedeRiCo)")
    add.real("learning_rate", 0.01, "learning rate", above=0)
    rates = "METHOD:RATE pairs that override the default rate; ignored if --learning_rate is given"
    add.listed("learning_rates", [], rates, Rates())
    add.real("momentum", 0.0, "momentum of --optimizer=sgd", at_least=0, below=1)
    add.real("weight_decay", 0.0, "L2 penalty: this times the parameters is added to the gradient", at_least=0)
    add.choice(
        "lr_schedule",
        "constant",
        SCHEDULES,
        "multistep: divide the rate by 10 at 1/2 and 3/4 of the rounds; exponential: times --lr_decay per round",
    )
    add.real("lr_decay", 0.99, "decay factor per round of --lr_schedule=exponential", above=0, at_most=1)
    add.choice(
        "class_weights",
        "none",
        CLASS_WEIGHTS,
        "class weights in the training loss; inverse: inverse frequency, capped at the weight of an average class",
    )
    add.switch("keep_optimizer", False, "keep each client's optimizer state for shared models between rounds")
    add.switch(
        "common_init",
        None,
        "start all clients' models from the same parameters; default: true, but false for local and both federico",
    )
    add.real("participation", 1.0, "fraction of clients that take part in a round", above=0, at_most=1)
    add.whole("eval_clients", 0, "number of clients to evaluate, sampled uniformly; 0: all", least=0)
    add.whole(
        "fine_tune_epochs",
        0,
        "number of epochs of fine-tuning by each client before evaluation",
        least=0,
    )
    _define_privacy(add)
    _define_server(add)
    for name, method in METHODS.items():
        _define_knobs(Group(name, registry), method)


def _define_privacy(add: Group) -> None:
    """Registers the flags of private training."""
    add.real(
        "dp_noise_multiplier",
        0.0,
        "noise multiplier of DP-SGD, relative to --dp_clip_norm; needs pip install 'pfljax[privacy]'",
        at_least=0,
    )
    add.real(
        "dp_clip_norm",
        float("inf"),
        "per-example gradient clipping norm; inf disables clipping",
        above=0,
        infinite=True,
    )
    add.real("dp_delta", 1e-5, "delta at which epsilon is reported", above=0, below=1)
    text = "for tests only: seed of the noise, which whoever knows it can subtract; default: a new secret every start"
    add.whole("noise_seed", None, text, least=0)


def _define_server(add: Group) -> None:
    """Registers the flags of cohorts, aggregation and attackers."""
    add.choice(
        "sampler",
        "uniform",
        typing.get_args(Sampler),
        "how a round's clients are sampled; weighted: by number of examples; power_of_choice: those with the highest "
        "loss among candidates sampled that way",
    )
    add.whole("sampler_candidates", 0, "number of candidates of power_of_choice; 0: twice the cohort", least=0)
    add.choice("aggregator", "mean", typing.get_args(Aggregator), "how the server combines the clients' models")
    add.real(
        "aggregator_trim",
        0.2,
        "fraction of attackers that trimmed_mean and krum assume",
        at_least=0,
        below=0.5,
    )
    add.choice("attack", "none", ATTACKS, "what attackers do; attackers are not evaluated")
    add.real(
        "attackers",
        0.2,
        "fraction of the clients that attack",
        at_least=0,
        below=1,
    )
    add.real("attack_strength", 4.0, "factor by which sign_flip, noise and scale multiply the update", above=0)


def _define_knobs(add: Group, method: Any) -> None:
    """Registers a flag NAME.KNOB for each knob of a method."""
    hints = typing.get_type_hints(method)
    for field in dataclasses.fields(method):
        name, text = f"{add.heading}.{field.name}", field.metadata["help"]
        default, hint = field.default, value_type(hints[field.name])
        if hint in (int, float):
            text += f"; accepted: {out_of_range(math.nan, field.metadata)}"
        if typing.get_origin(hint) is typing.Literal:
            add.choice(name, default, typing.get_args(hint), text)
        else:
            {int: add.whole, float: add.real, bool: add.switch, str: add.text}[hint](name, default, text)


def define_devices(registry: flags.FlagValues, *, lists: bool = False) -> None:
    """Registers the flags of devices; with `lists`, several plans, chunks and numbers of devices are accepted."""
    add = Group(HOW, registry)
    if lists:
        add.several("plan", ["auto"], "how a device processes its clients; several plans are accepted", PLANS)
        add.several("chunk", ["8"], "numbers of clients per chunk under --plan=chunk", int)
        devices = "numbers of devices; 0: all (on a CPU, one per core)"
        add.several("devices", ["0"], devices, int, at_least=0, at_most=MOST_DEVICES)
    else:
        add.choice(
            "plan",
            "auto",
            PLANS,
            "how a device processes clients: vmap all, map one by one, or in chunks",
        )
        add.whole("chunk", 8, "number of clients per chunk under --plan=chunk", least=1)
        add.whole("devices", 0, "number of devices; 0: all (on a CPU, one per core)", least=0, most=MOST_DEVICES)
    add.choice(
        "exchange",
        "auto",
        ["auto", "gather", "ring"],
        "how clients' models reach other devices: gather copies them to all, ring passes them around; auto: gather if "
        "they fit",
    )
    add.choice(
        "client_store",
        "device",
        ["device", "host", "disk"],
        "where clients' state is kept between rounds; host and disk allow more clients than the devices or the host "
        "can hold",
    )
    add.text("profile", None, "folder for a profiler trace of a few rounds; prints a summary")
    add.text(
        "coordinator",
        None,
        "HOST:PORT of process 0, to run several processes together; auto: detect a TPU pod or SLURM",
    )
    add.whole("num_processes", None, "number of processes", least=1)
    add.whole("process_id", None, "index of this process, from 0", least=0)


def define_evaluation(registry: flags.FlagValues) -> None:
    """Registers how often a run is evaluated and saved."""
    add = Group(HOW, registry)
    add.whole("eval_every", 10, "number of rounds between evaluations", least=1)
    add.whole(
        "checkpoint_every",
        50,
        "minimum number of rounds between checkpoints",
        least=1,
    )
    text = "log every evaluation to TensorBoard, in tensorboard/ in the run's folder"
    add.switch("tensorboard", False, f"{text}; needs pip install 'pfljax[tensorboard]'")


def define_sweep(registry: flags.FlagValues, methods: Sequence[str], seeds: Sequence[str], out: str) -> None:
    """Registers methods, seeds, the folder and tuning."""
    Group(WHAT, registry).several("algorithms", methods, "methods to compare, or all; FILE.py:NAME for your own")
    add = Group(RUNS, registry)
    each = "seeds; each determines the split, initial models, cohorts, mini-batches and sampling of a run"
    add.several("seeds", seeds, each, int, at_least=0)
    each = "seeds of the data split; every seed is trained on every split"
    add.several("splits", [], each, int, empty=True, at_least=0)
    text = "whether a method's trials share a compiled program; auto: if their data have the same shapes; vmap: padded"
    add.choice("replicate", "auto", ["auto", "vmap", "no"], text)
    text = "changed: train finished runs again if their settings, data, method, model or optimizer have changed"
    add.choice("rerun", "never", ["never", "changed"], text)
    add.text("out", out, "folder of the table; finished runs in it are kept")
    add.several(
        "tune",
        [],
        f"learning rates to choose from by validation accuracy, for each method; --tune alone is {IMPLIED['tune']}",
        float,
        empty=True,
        above=0,
    )
    add.switch("tune_knobs", False, "also tune the knobs that each method's paper tunes")
