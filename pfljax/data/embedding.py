"""Embeddings of images for latent partitions: the last hidden layer of a network trained on all images.

FedFomo, Appendix A.5: VGG-11 is trained to classify the data set with an accuracy of at least 85 %, and an image's
semantic embedding is the output of its second dense layer (before the ReLU in the authors' code). In that code, ten
distributions of CIFAR-10 are its classes.

Departures: The authors' network has batch norm, was pretrained on ImageNet, and takes images of 224 x 224. Ours has
group norm, starts from random weights, and takes the images at their original size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfljax import models
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Key, Params, Split
from pfljax.local.solver import TrainState
from pfljax.local.training import LocalTraining
from pfljax.settings.fields import Seed, accepted, fields_of, hyperparameter, settings

Source = Any  # a `data.sources.Source`
LEAST_SIDE = 32  # smallest image side in pixels for which "auto" is not "pixels"
NETWORK = "vgg11"
DEMANDED = 0.85  # accuracy of the network that the paper requires
BLOCK = 256
VERSION = 2  # version of cached embeddings: 2 is before the last ReLU, 1 was after it


@settings
class Embedding:
    """Trains a network on a source's training images and returns its last hidden layer's outputs, before the ReLU.

    Attributes:
        name: A registered model.
        epochs: Passes over the training images.
        seed: Seed for initial parameters and batches.
        widths: Widths, for models that have them.
        learning_rate: Learning rate of SGD with momentum 0.9.
        batch_size: B.
        say: Called with one line per epoch for the user, and one line about the network's accuracy.
    """

    name: str = hyperparameter(choices=[name for name in models.NAMES if name != "lstm"])
    epochs: int = hyperparameter(5, at_least=1)
    seed: Seed = 0
    widths: tuple[tuple[str, tuple[int, ...]], ...] = ()
    learning_rate: float = hyperparameter(0.02, above=0)
    batch_size: int = hyperparameter(128, at_least=0)
    say: Callable[[str], None] = print

    @property
    def key(self) -> str:
        """Cache key: everything besides the data that determines the embedding."""
        fields = [field.name for field in dataclasses.fields(self) if field.name != "say"]
        return repr([VERSION, *(getattr(self, name) for name in fields)])

    def __call__(self, source: Source) -> np.ndarray:
        """(n, F) float32 for all examples; labels of official test examples only affect the reported accuracy."""
        widths: dict[str, Any] = dict(self.widths)
        model = models.make(
            self.name, source.x.shape[1:], source.task, source.num_classes, **widths
        )
        params = self.train(model, source)
        read = jax.jit(
            lambda params, x: (
                model.embedding(params, x),
                jnp.argmax(model.apply(params, x), axis=-1),
            )
        )
        blocks = [
            read(params, source.x[start : start + BLOCK])
            for start in range(0, len(source.x), BLOCK)
        ]
        embedded, predicted = (
            np.concatenate([np.asarray(part) for part in parts])
            for parts in zip(*blocks, strict=True)
        )
        has_tests = source.is_test is not None and source.is_test.any()
        part = source.is_test if has_tests else np.ones(len(source.y), bool)
        accuracy = float((predicted == source.y)[part].mean())
        images = "test" if has_tests else "training"
        line = f"  embedding by {self.name}: {accuracy:.1%} accuracy on the {images} images"
        if accuracy < DEMANDED:
            line += f"; warning: FedFomo's paper requires {DEMANDED:.0%}; try more epochs"
        self.say(line)
        return embedded.astype(np.float32)

    def train(self, model: models.Model, source: Source) -> Params:
        """The network's parameters, trained on the examples that are not for testing."""
        rows = (
            np.arange(len(source.y)) if source.is_test is None else np.flatnonzero(~source.is_test)
        )
        train = Split(
            jnp.asarray(source.x[rows]), jnp.asarray(source.y[rows]), jnp.int32(len(rows))
        )
        solver = LocalTraining(
            optax.sgd(self.learning_rate, momentum=0.9), batch_size=self.batch_size
        ).bind(model)
        key = jax.random.key(self.seed)
        params = jax.jit(model.init)(jax.random.fold_in(key, 0))
        state = solver.begin(params)

        @jax.jit
        def epoch(key: Key, state: TrainState, number: Array) -> tuple[TrainState, Array]:
            return solver.fit(key, state, train, round_number=number)

        for number in range(1, self.epochs + 1):
            epoch_key = jax.random.fold_in(key, number)
            state, loss = epoch(epoch_key, state, jnp.int32(number - 1))
            progress = f"epoch {number} of {self.epochs}, training loss {float(loss):.3f}"
            self.say(f"  embedding by {self.name}: {progress}")
        return state.whole


def classes(source: Source) -> np.ndarray:
    """(n, C) one-hot labels; C clusters of them are the classes."""
    return np.eye(source.num_classes, dtype=np.float32)[source.y]


def automatic(source: Source, clusters: int) -> str:
    """The name of the default embedding for a source and a number of clusters.

    For images of at least 32 x 32, "classes" if there are as many clusters as classes, as in the authors' code for
    CIFAR-10, and VGG-11 otherwise. For everything else, "pixels".
    """
    sides = source.x.shape[1:3] if source.x.ndim == 4 else (0,)
    if min(sides) < LEAST_SIDE:
        return "pixels"
    return "classes" if clusters == source.num_classes else NETWORK


def make(
    name: str, *, epochs: int = 5, seed: int = 0, **widths: tuple[int, ...]
) -> Callable[[Source], np.ndarray] | None:
    """The embedding with this name: "classes", or a registered model; None for "pixels".

    Raises:
        ArgumentError: for an unknown name.
    """
    if name in ("pixels", "classes"):
        return classes if name == "classes" else None
    field = fields_of(Embedding)["name"]
    if name not in field.limits["choices"]:
        raise ArgumentError(
            "embedding", f"accepted: auto, pixels, classes, {accepted(str, field.limits)}", name
        )
    read = {"mlp": "hidden", "cnn": "channels"}.get(name)
    return Embedding(
        name, epochs, seed, tuple((n, width) for n, width in widths.items() if n == read)
    )
