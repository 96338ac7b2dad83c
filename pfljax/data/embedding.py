"""Embeddings of images for latent partitions: the last hidden layer of a network trained on all of them.

FedFomo, Appendix A.5: VGG-11 is trained to classify the data set, and an image's semantic embedding is what its second
dense layer gives.
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
from pfljax.core.types import Split
from pfljax.data.sources.source import Source
from pfljax.local.training import LocalTraining

LEAST_SIDE = 32  # pixels from which on "auto" trains a network
NETWORK = "vgg11"
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Trains a network on a source's training images and gives every image's last hidden layer.

    Attributes:
        name: A registered model.
        epochs: Passes over the training images.
        seed: Decides initial parameters and batches.
        widths: Of the models that have them.
        learning_rate: Of SGD with momentum 0.9.
        batch_size: B.
        say: Takes a line an epoch for the user.
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
        return repr([getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "say"])

    def __call__(self, source: Source) -> np.ndarray:
        """(n, F) float32 of all examples; the labels of official test examples are not looked at."""
        if self.name == "auto":
            sides = source.x.shape[1:3] if source.x.ndim == 4 else (0,)
            if min(sides) < LEAST_SIDE:
                return source.x.reshape(len(source.x), -1)
            return dataclasses.replace(self, name=NETWORK)(source)
        model = models.make(self.name, source.x.shape[1:], source.task, source.num_classes, **dict(self.widths))
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
        features = jax.jit(model.features)
        return np.concatenate(
            [
                np.asarray(features(params, source.x[start : start + BLOCK]), np.float32)
                for start in range(0, len(source.x), BLOCK)
            ]
        )


def make(name: str, *, epochs: int = 5, seed: int = 0, **widths: tuple[int, ...]) -> Embedding | None:
    """The embedding of this name; None for the pixels themselves.

    "auto" takes the pixels of images smaller than 32 x 32, and VGG-11 for others.

    Raises:
        ArgumentError: for a name that there is not.
    """
    if name == "pixels":
        return None
    if name not in ("auto", *models.NAMES) or name == "lstm":
        accepted = ", ".join(known for known in models.NAMES if known != "lstm")
        raise ArgumentError("embedding", f"accepted: auto, pixels, {accepted}", name)
    read = {"mlp": "hidden", "cnn": "channels"}.get(name)
    return Embedding(name, epochs, seed, tuple((n, width) for n, width in widths.items() if n == read))
