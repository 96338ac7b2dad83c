"""Predictions from a client's nearest examples, by the features that enter a network's last layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Array, ClientData, Params
from pfljax.local.batches import of_examples, sum_over_examples


def votes(queries: Array, features: Array, size: Array, num: int, scale: Array | float) -> tuple[Array, Array]:
    """Returns each query's nearest examples and their weights.

    Args:
        queries: Features (B, F).
        features: Features (n_max, F) of a client's examples.
        size: () int32, number of real examples.
        num: Largest number of neighbors.
        scale: Mean squared feature difference at which weight falls to 1 / e.

    Returns:
        Indices (B, num) int32, and weights (B, num), each row on the simplex; zeros for a client without examples.
    """
    products = jnp.matmul(queries, features.T, precision="highest")
    distance = jnp.square(queries).sum(axis=1)[:, None] + jnp.square(features).sum(axis=1) - 2 * products
    nearness = -jnp.maximum(distance, 0) / features.shape[1]
    nearness = jnp.where(jnp.arange(features.shape[0]) < size, nearness, -jnp.inf)
    nearest, places = jax.lax.top_k(nearness, min(num, features.shape[0]))
    inside = jnp.isfinite(nearest)
    weights = jax.nn.softmax(nearest / scale, axis=1, where=inside)
    return places, jnp.where(inside, weights, 0)


class Datastore(NamedTuple):
    """What a client remembers of its training examples.

    Attributes:
        features: (n_max, F).
        y: (n_max,) classes.
        size: () int32, number of real examples.
        scale: () as in `votes`.
        mix: () weight of the neighbors in predictions.
    """

    features: Array
    y: Array
    size: Array
    scale: Array
    mix: Array


@dataclasses.dataclass(frozen=True)
class ByNearest:
    """Mixes a model's predictions with those of the nearest examples: an `Algorithm.apply` on a `Datastore`.

    Attributes:
        model: The clients' network.
        num: Largest number of neighbors.
        classes: C.
    """

    model: Any
    num: int
    classes: int

    def __call__(self, models: Params, stored: Datastore, x: Array) -> Array:
        """log(mix p_knn + (1 - mix) p_model), (B, C)."""
        by_examples, by_model = self.log_probabilities(tree.first(models), stored, x)
        return jnp.logaddexp(jnp.log(stored.mix) + by_examples, jnp.log1p(-stored.mix) + by_model)

    def log_probabilities(self, params: Params, stored: Datastore, x: Array) -> tuple[Array, Array]:
        """log p_knn, at least the logarithm of the least float32, and log p_model, both (B, C)."""
        by_examples = jnp.maximum(self.by_examples(params, stored, x), jnp.finfo(jnp.float32).tiny)
        return jnp.log(by_examples), jax.nn.log_softmax(self.model.apply(params, x))

    def by_examples(self, params: Params, stored: Datastore, x: Array) -> Array:
        """(B, C) p_knn; zeros for a client without examples."""
        queries = self.model.features(params, x)
        places, weights = votes(queries, stored.features, stored.size, self.num, stored.scale)
        return jnp.einsum("bk,bkc->bc", weights, jax.nn.one_hot(stored.y[places], self.classes))

    def remember(
        self, params: Params, data: ClientData, scale: Array | float, mix: Array | float, grid: Array | None
    ) -> Datastore:
        """Returns a client's datastore.

        Args:
            params: The model whose features are stored.
            data: The client's data.
            scale: As in `votes`.
            mix: Weight of the neighbors in predictions, for clients that do not choose it.
            grid: Weights (G,), from which a client chooses the one with the least loss on its validation examples, if
                it has any; or None.
        """
        train, validation = data.train, data.validation
        features = of_examples(lambda x, _: self.model.features(params, x), train)
        scale, mix = jnp.asarray(scale, jnp.float32), jnp.asarray(mix, jnp.float32)
        stored = Datastore(features, train.y[...], train.size, scale, mix)
        if grid is not None and validation.y.shape[0]:
            best = jnp.argmin(sum_over_examples(self._losses(params, stored, grid), validation))
            mix = jnp.where(validation.size > 0, grid[best], mix)
        return stored._replace(mix=jnp.where(train.size > 0, mix, 0.0))

    def _losses(self, params: Params, stored: Datastore, grid: Array) -> Callable[[Array, Array, Array], Array]:
        """Returns (x, y, mask) -> losses (G,) for the weights of a grid, summed over examples."""

        def losses(x, y, mask):
            both = self.log_probabilities(params, stored, x)
            own, shared = (jnp.take_along_axis(p, y[:, None], axis=1) for p in both)
            likelihood = jnp.logaddexp(jnp.log(grid) + own, jnp.log1p(-grid) + shared)
            return jnp.where(mask[:, None], -likelihood, 0).sum(axis=0)

        return losses
