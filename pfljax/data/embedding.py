"""Embeddings of images for latent partitions: the last hidden layer of a network trained on all of them.

FedFomo, Appendix A.5: VGG-11 is trained to classify the data set, to an accuracy of 85 % at least, and an image's
semantic embedding is what its second dense layer gives: before the ReLU, by the authors' code. There ten distributions
of CIFAR-10 are its classes.

Departures: the authors' network has batch norm, was trained on ImageNet before, and sees images of 224 x 224. Ours has
group norm, starts from random weights, and takes the images as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfljax import models
from pfljax.core.errors import ArgumentError
from pfljax.core.types import Params, Split
from pfljax.data.sources.source import Source
from pfljax.local.training import LocalTraining

LEAST_SIDE = 32  # pixels from which on "auto" is no longer the pixels
NETWORK = "vgg11"
DEMANDED = 0.85  # accuracy of the network, by the paper
BLOCK = 256
VERSION = 2  # of what an embedding is, for caches: 2 is before the last ReLU, 1 was after it


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Trains a network on a source's training images and gives what its last hidden layer gives, before the ReLU.

    Attributes:
        name: A registered model.
        epochs: Passes over the training images.
        seed: Decides initial parameters and batches.
        widths: Of the models that have them.
        learning_rate: Of SGD with momentum 0.9.
        batch_size: B.
        say: Takes a line an epoch for the user, and one about the network's accuracy.
    """

    name: str
    epochs: int = 5
    seed: int = 0
    widths: tuple[tuple[str, tuple[int, ...]], ...] = ()
    learning_rate: float = 0.02
    batch_size: int = 128
    say: Callable[[str], None] = print

    @property
    def key(self) -> str:
        """What decides the embedding, beside the data."""
        fields = [field.name for field in dataclasses.fields(self) if field.name != "say"]
        return repr([VERSION, *(getattr(self, name) for name in fields)])

    def __call__(self, source: Source) -> np.ndarray:
        """(n, F) float32 of all examples; of official test examples, labels count in the accuracy that is said only."""
        model = models.make(self.name, source.x.shape[1:], source.task, source.num_classes, **dict(self.widths))
        params = self.train(model, source)
        read = jax.jit(lambda params, x: (model.embedding(params, x), jnp.argmax(model.apply(params, x), axis=-1)))
        blocks = [read(params, source.x[start : start + BLOCK]) for start in range(0, len(source.x), BLOCK)]
        embedded, predicted = (
            np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*blocks, strict=True)
        )
        has_tests = source.is_test is not None and source.is_test.any()
        part = source.is_test if has_tests else np.ones(len(source.y), bool)
        accuracy = float((predicted == source.y)[part].mean())
        line = (
            f"  embedding by {self.name}: {accuracy:.1%} of the {'test' if has_tests else 'training'} images are right"
        )
        if accuracy < DEMANDED:
            line += f"; warning: FedFomo's paper demands {DEMANDED:.0%}, for which more epochs may be needed"
        self.say(line)
        return embedded.astype(np.float32)

    def train(self, model: models.Model, source: Source) -> Params:
        """The network's parameters, trained on what is not for testing."""
        rows = np.arange(len(source.y)) if source.is_test is None else np.flatnonzero(~source.is_test)
        train = Split(jnp.asarray(source.x[rows]), jnp.asarray(source.y[rows]), jnp.int32(len(rows)))
        solver = LocalTraining(optax.sgd(self.learning_rate, momentum=0.9), batch_size=self.batch_size).bind(model)
        key = jax.random.key(self.seed)
        params = jax.jit(model.init)(jax.random.fold_in(key, 0))
        state = solver.optimizer.init(params)
        epoch = jax.jit(lambda key, params, state, number: solver.fit(key, params, state, train, round_number=number))
        for number in range(1, self.epochs + 1):
            params, state, loss = epoch(jax.random.fold_in(key, number), params, state, jnp.int32(number - 1))
            self.say(f"  embedding by {self.name}: epoch {number} of {self.epochs}, training loss {float(loss):.3f}")
        return params


def classes(source: Source) -> np.ndarray:
    """(n, C) the label of each example, one-hot: as many clusters are the classes themselves."""
    return np.eye(source.num_classes, dtype=np.float32)[source.y]


def automatic(source: Source, clusters: int) -> str:
    """The name of the embedding that suits a source and a number of clusters.

    It is "pixels" unless there are images of 32 x 32 or more; of those "classes" for as many clusters as classes, as in
    the authors' code for CIFAR-10; else VGG-11.
    """
    sides = source.x.shape[1:3] if source.x.ndim == 4 else (0,)
    if min(sides) < LEAST_SIDE:
        return "pixels"
    return "classes" if clusters == source.num_classes else NETWORK


def make(
    name: str, *, epochs: int = 5, seed: int = 0, **widths: tuple[int, ...]
) -> Callable[[Source], np.ndarray] | None:
    """The embedding of this name: "classes", or a registered model; None for "pixels".

    Raises:
        ArgumentError: for a name that there is not.
    """
    if name in ("pixels", "classes"):
        return classes if name == "classes" else None
    if name not in models.NAMES or name == "lstm":
        accepted = ", ".join(known for known in models.NAMES if known != "lstm")
        raise ArgumentError("embedding", f"accepted: auto, pixels, classes, {accepted}", name)
    read = {"mlp": "hidden", "cnn": "channels"}.get(name)
    return Embedding(name, epochs, seed, tuple((n, width) for n, width in widths.items() if n == read))
