"""Names of flags: which fields and arguments of the library have a flag, and what flags were called before.

A flag has the name of its field or argument, or OWNER_FIELD, where OWNER is the word under which Python code passes the
object that has the field: `Run(server=Server(trim=0.1))` is --server_trim=0.1. A method's hyperparameters are
METHOD.HYPERPARAMETER.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pfljax.api import (
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
    compare,
    estimate,
)
from pfljax.data import Drift, Splits, partitions, sources, split_unseen
from pfljax.settings.fields import fields_of
from pfljax.settings.method import METHODS, former_names, registered_name

# What declares fields or arguments -> owner -> names of those that have a flag. Under the owner "", a flag has the name
# of its field. Fields that are not listed have no flag.
LIBRARY: Mapping[Any, Mapping[str, Sequence[str]]] = {
    Run: {
        "": (
            "participation",
            "fine_tune_epochs",
            "eval_clients",
            "never_trained",
            "tell_groups",
            "planned_rounds",
        )
    },
    Run.train: {"": ("rounds", "eval_every", "checkpoint_every", "profile")},
    compare: {"": ("reference", "target")},
    estimate: {"": ("target", "seconds")},
    LocalTraining: {
        "": (
            "learning_rate",
            "batch_size",
            "epochs",
            "steps",
            "keep_optimizer",
            "common_init",
            "loss",
            "label_smoothing",
            "augment",
            "dtype",
            "matmul_precision",
        )
    },
    Privacy: {"privacy": ("noise_multiplier", "clip_norm", "delta", "noise_seed")},
    ClientPrivacy: {
        "client_privacy": (
            "noise_multiplier",
            "clip_norm",
            "mechanism",
            "adaptive_quantile",
            "clip_rate",
            "count_noise",
            "delta",
            "noise_seed",
        )
    },
    Server: {
        "": ("sampler", "aggregator", "root_examples", "secure_aggregation"),
        "server": ("candidates", "trim"),
    },
    Attack: {
        "": ("attackers",),
        "attack": ("kind", "strength", "z", "target", "poisoned", "trigger"),
    },
    Compression: {
        "": ("error_feedback",),
        "compression": ("upload", "download"),
    },
    Faults: {"faults": ("dropout", "lost", "broken", "on_divergence")},
    Patience: {"": ("patience",)},
    Drift: {"drift": ("share",)},
    Clock: {
        "clock": (
            "compute",
            "bandwidth",
            "devices",
            "availability",
            "deadline",
            "over_selection",
            "turns",
            "concurrency",
            "seed",
        )
    },
    Execution: {
        "": (
            "plan",
            "chunk",
            "devices",
            "model_devices",
            "exchange",
            "client_store",
            "cache_features",
        ),
    },
    Splits: {
        "": (
            "test_fraction",
            "validation_fraction",
            "train_examples",
            "test_examples",
            "official_test",
            "replacement",
            "targets",
            "by_time",
        )
    },
    split_unseen: {"": ("unseen",)},
    partitions.LabelGroups: {"partition": ("groups", "balanced")},
    partitions.LabelDirichlet: {"partition": ("groups", "alpha")},
    partitions.Dirichlet: {"partition": ("alpha", "capped")},
    partitions.Pathological: {"partition": ("classes",)},
    partitions.Pairs: {"partition": ("classes",)},
    partitions.Shards: {"partition": ("shards",)},
    partitions.InnerDirichlet: {"partition": ("alpha",)},
    partitions.Latent: {"partition": ("groups",)},
    partitions.Pachinko: {"partition": ("alpha",)},
    partitions.Sizes: {"partition": ("growth", "sizes")},
    partitions.Quantiles: {"partition": ("strictness",)},
    partitions.QuantileDirichlet: {"partition": ("bins", "alpha")},
    partitions.Grouped: {"partition": ("members",)},
    sources.digits: {"data": ("fraction",)},
    sources.sine: {"data": ("fraction",)},
    sources.synthetic: {
        "": ("test_examples",),
        "data": ("fraction",),
        "partition": ("groups", "alpha"),
        "synthetic": ("labels",),
    },
    sources.npz: {
        "": ("standardize", "task", "ignored_index"),
        "data": ("file", "fraction"),
    },
    sources.npy: {
        "": ("standardize", "task", "ignored_index"),
        "data": ("file", "fraction"),
    },
    sources.text: {"data": ("file", "stride", "fraction")},
    sources.table: {
        "": ("fill", "separator", "encoding", "decimal", "standardize", "task"),
        "data": (
            "file",
            "label",
            "client",
            "features",
            "categorical",
            "text",
            "test",
            "time",
            "missing",
            "fraction",
        ),
    },
    sources.arrayrecord: {
        "": ("standardize", "task"),
        "data": ("file", "label", "client", "image", "fraction"),
    },
    sources.huggingface: {
        "": ("fill", "standardize", "task"),
        "data": (
            "file",
            "label",
            "client",
            "image",
            "features",
            "categorical",
            "text",
            "time",
            "size",
            "fraction",
        ),
    },
    sources.leaf: {
        "": ("standardize", "task"),
        "data": ("file", "shape", "fraction"),
    },
    sources.tff: {
        "": ("standardize", "task"),
        "data": ("file", "shape", "stride", "fraction"),
    },
    sources.pfllib: {
        "": ("standardize", "task"),
        "data": ("file", "fraction"),
    },
    sources.flbench: {
        "": ("standardize", "task"),
        "data": ("file", "shape", "fraction"),
    },
    sources.images: {
        "": ("standardize",),
        "data": ("file", "size", "fraction"),
    },
    sources.hub: {
        "": ("data_dir", "fill", "standardize", "task"),
        "data": (
            "config",
            "test_split",
            "label",
            "client",
            "image",
            "features",
            "categorical",
            "text",
            "time",
            "size",
            "fraction",
        ),
    },
    sources.tfds: {
        "": ("data_dir", "standardize"),
        "data": ("fraction",),
    },
}


def owners_of(declaring: Callable, prefix: str = "") -> dict[str, str]:
    """Returns the owner of each field or argument that has a flag, "" if the flag has the field's name.

    These are the fields in the table; with the prefix of a method, its hyperparameters with help. All fields of a
    command's own settings have flags.
    """
    if prefix:
        return {
            name: "" for name, field in fields_of(declaring).items() if field.limits.get("help")
        }
    if declaring not in LIBRARY:
        return dict.fromkeys(fields_of(declaring), "")
    return {name: owner for owner, names in LIBRARY[declaring].items() for name in names}


def flags_of(declaring: Callable, prefix: str = "") -> dict[str, str]:
    """Returns the flag of each field or argument that has one."""
    owners = owners_of(declaring, prefix)
    return {
        name: f"{prefix}{owner}_{name}" if owner else f"{prefix}{name}"
        for name, owner in owners.items()
    }


# Former name of a flag -> its name. Flags that are not listed have not been renamed.
FORMER: Mapping[str, str] = {
    "algorithm": "method",
    "algorithms": "methods",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "dp_noise_multiplier": "privacy_noise_multiplier",
    "dp_clip_norm": "privacy_clip_norm",
    "dp_delta": "privacy_delta",
    "noise_seed": "privacy_noise_seed",
    "client_dp_noise_multiplier": "client_privacy_noise_multiplier",
    "client_dp_clip_norm": "client_privacy_clip_norm",
    "client_dp_mechanism": "client_privacy_mechanism",
    "client_dp_adaptive_quantile": "client_privacy_adaptive_quantile",
    "client_dp_clip_rate": "client_privacy_clip_rate",
    "client_dp_count_noise": "client_privacy_count_noise",
    "client_dp_delta": "client_privacy_delta",
    "client_dp_noise_seed": "client_privacy_noise_seed",
    "sampler_candidates": "server_candidates",
    "aggregator_trim": "server_trim",
    "attack": "attack_kind",
    "compress": "compression_upload",
    "compress_download": "compression_download",
    "dropout_clients": "faults_dropout",
    "lost_uploads": "faults_lost",
    "broken_uploads": "faults_broken",
    "on_divergence": "faults_on_divergence",
    "num_distributions": "partition_groups",
    "balanced_groups": "partition_balanced",
    "dirichlet_alpha": "partition_alpha",
    "classes_per_client": "partition_classes",
    "text_stride": "data_stride",
    "label_column": "data_label",
    "client_column": "data_client",
    "feature_columns": "data_features",
    "categorical_columns": "data_categorical",
    "text_column": "data_text",
    "test_column": "data_test",
    "image_column": "data_image",
    "image_size": "data_size",
    "image_shape": "data_shape",
    "missing_values": "data_missing",
    "synthetic.labels": "synthetic_labels",
    "unseen_clients": "unseen",
    "tune_knobs": "tune_hyperparameters",  # former name
}


def present_name(flag: str) -> str:
    """Returns the present name of a flag, in which methods' names are in lower case."""
    if flag in FORMER:
        return FORMER[flag]
    method, dot, name = flag.partition(".")
    if dot and registered_name(method) in METHODS:
        flag = f"{registered_name(method)}.{name}"
    return former_names().get(flag, flag)


def renamed(word: str) -> tuple[str, str]:
    """Returns a word of a command line with the present name of its flag, and a note if that was a former name.

    A switch may have "no" before its name.
    """
    match = re.fullmatch(r"(--?)(no)?([\w.]+)(=.*)?", word, re.DOTALL)
    if match is None:
        return word, ""
    dashes, no, name, value = (part or "" for part in match.groups())
    if f"{no}{name}" in FORMER:
        name = f"{no}{name}"
        no = ""
    present = present_name(name)
    note = "" if present.lower() == name.lower() else f"--{name} is now --{present}"
    return f"{dashes}{no}{present}{value}", note


def current(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns recorded values under the present names of their flags, which may be recorded with their dashes."""
    renamed_values = {}
    for name, value in values.items():
        dashes = "--" if name.startswith("--") else ""
        renamed_values[f"{dashes}{present_name(name.removeprefix('--'))}"] = value
    return renamed_values
