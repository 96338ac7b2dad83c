"""What methods compute, as digests: a table is stale if its methods compute something else than when it was measured.

A digest is of the traced program of a small federation: 5 clients with 3 to 7 training examples of two classes, cohorts
of 4, an MLP, and mini-batches with momentum. It covers all that a run computes: initial models, a round with the
engine's part of it, predictions and newcomers. Names, comments, files and the order of functions do not change it;
operations, constants and shapes do (see `pfljax.folder.fingerprint`). It is the same on all machines with one version
of jax. A partition has a digest, too: of the examples that it deals to the clients.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pfljax as pfl
from experiments.ledger.entries import PARTITION
from pfljax.algorithms import METHODS
from pfljax.contract.errors import ArgumentError
from pfljax.data import Federation, partitions
from pfljax.folder import fingerprint

SIZES = (6, 8, 10, 12, 14)  # examples of each client, a half of which it trains with
FEATURES = 3
HIDDEN = 4
CLASSES = 2
COHORT = 0.8  # FedeRiCo needs 4 clients in a round
ROUNDS = 10
# What a method needs besides an MLP and its defaults.
REQUIRED: dict[str, dict[str, Any]] = {"q_ffl": {"lipschitz": 10.0}}
ADAPTED = ("fedit", "ffa_lora", "fedsa_lora", "flexlora", "feddpa", "hilora")
ATTENTIVE = ("fedtp",)
# Partitions of arrays with classes. The clusters of "latent" depend on the machine's rounding.
DEALT = ("iid", "label_groups", "label_dirichlet", "dirichlet", "pathological", "pairs")


class Attentive(nn.Module):
    """Attention over the features, and a dense layer."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(HIDDEN)(x[..., None])
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(x)
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


def adapted() -> Any:
    """An MLP whose hidden layer is frozen: LoRA and the last layer are trained."""
    kernel = jnp.arange(FEATURES * HIDDEN, dtype=jnp.float32).reshape(FEATURES, HIDDEN) / 8
    frozen = {"Dense_0": {"kernel": kernel, "bias": jnp.zeros(HIDDEN)}}
    lora = pfl.models.adapters.lora(rank=2, where="Dense_0")
    return pfl.models.Model(pfl.models.MLP((HIDDEN,)), frozen=frozen, trainable=[lora, "Dense_1"])


@functools.cache
def federation() -> Federation:
    """Five clients; only the shapes of their examples enter programs."""
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    x = np.zeros((len(client), FEATURES), np.float32)
    y = np.arange(len(client)) % CLASSES
    splits = pfl.data.Splits(test_fraction=0.25, validation_fraction=0.25)
    return Federation.from_arrays(x, y, client, standardize=False, splits=splits)


def network(name: str) -> Any:
    """The network that a method is traced with."""
    if name in ADAPTED:
        return adapted()
    if name in ATTENTIVE:
        return Attentive(CLASSES)
    return pfl.models.MLP((HIDDEN,))


def digest_of(method: Any) -> str:
    """The digest of what a method computes with its hyperparameters.

    Raises:
        ArgumentError: if the method does not accept the federation or the network.
    """
    optimizer = optax.sgd(0.1, momentum=0.9)
    local = pfl.LocalTraining(optimizer, batch_size=2)
    run = pfl.Run(method, federation(), network(method.info.name), local, participation=COHORT)
    traced = fingerprint.traced(run.experiment, ROUNDS)
    stream = hashlib.sha256()
    for part, digest in sorted(traced.parts.items()):
        stream.update(f"{part}={digest};".encode())
    stream.update(traced.newcomers.encode())
    return stream.hexdigest()[:16]


@functools.cache
def digest_of_partition(name: str) -> str:
    """The digest of the examples that a partition, with its defaults, deals to the clients."""
    number = 240
    x = np.arange(number * FEATURES, dtype=np.float32).reshape(number, FEATURES)
    y = np.arange(number) % 10
    clients = Federation.from_arrays(
        x,
        y,
        num_clients=8,
        partition=partitions.PARTITIONS[name](),
        standardize=False,
    )
    return pfl.data.digest(clients)[:16]


@functools.cache
def digest(name: str) -> str | None:
    """The digest of a registered method with its defaults, or of "partition:NAME"; None if there is none.

    There is none if the method is gone or does not accept what it is traced with any more, and of partitions that need
    other data.
    """
    if name.startswith(PARTITION):
        partition = name.removeprefix(PARTITION)
        return digest_of_partition(partition) if partition in DEALT else None
    if name not in METHODS:
        return None
    try:
        return digest_of(METHODS[name](**REQUIRED.get(name, {})))
    except ArgumentError:
        return None


def digests(names: Iterable[str]) -> dict[str, str]:
    """The digests of methods and partitions that have one, by name."""
    found = {}
    for name in names:
        value = digest(name)
        if value is not None:
            found[name] = value
    return found


def jax_version() -> str:
    """The version of jax, with which digests may change."""
    return importlib.metadata.version("jax")
