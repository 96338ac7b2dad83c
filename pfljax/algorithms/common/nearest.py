"""Predictions by a client's nearest examples, in the features that a network's last layer receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.types import Array, ClientData, Params, PyTree, Split
from pfljax.local.batches import BLOCKS, masked, over_blocks, sum_over_examples
from pfljax.models import Model


def features_of(model: Model, params: Params, split: Split) -> Array:
    """(n_max, F) of a client's examples, a block at a time; padding has any values."""
    n_max = split.y.shape[0]

    def note(positions, found):
        index, inside = jnp.minimum(positions, n_max - 1), positions < split.size
        x, _ = masked(split.x[index], split.y[index], inside)
        return jax.lax.dynamic_update_slice(found, model.features(params, x), (positions[0], 0))

    one = jax.eval_shape(lambda: model.features(params, split.x[jnp.arange(1)]))
    found = jnp.zeros((n_max + BLOCKS[-1], one.shape[1]), one.dtype)  # room for the last block
    return over_blocks(split.size, n_max, note, found)[:n_max]


def votes(queries: Array, features: Array, size: Array, num: int, scale: Array | float) -> tuple[Array, Array]:
    """Each query's nearest examples, and how much they weigh.

    Args:
        queries: (B, F).
        features: (n_max, F) of a client's examples, `size` of which are real.
        size: () int32.
        num: How many are asked, at most.
        scale: Mean squared difference of features at which weight falls to 1 / e.

    Returns:
        (B, num) int32 places, and weights, each row on the simplex; zeros for a client without examples.
    """
    products = jnp.matmul(queries, features.T, precision="highest")
    distance = jnp.square(queries).sum(axis=1)[:, None] + jnp.square(features).sum(axis=1) - 2 * products
    nearness = -jnp.maximum(distance, 0) / features.shape[1]
    nearness = jnp.where(jnp.arange(features.shape[0]) < size, nearness, -jnp.inf)
    nearest, places = jax.lax.top_k(nearness, min(num, features.shape[0]))
    inside = jnp.isfinite(nearest)
    weights = jax.nn.softmax(nearest / scale, axis=1, where=inside)
    return places, jnp.where(inside, weights, 0)


@dataclasses.dataclass(frozen=True)
class ByNearest:
    """A model's predictions mixed with those of the nearest examples: a `Predictor.apply`, whose rows are datastores.

    Attributes:
        model: The clients' network.
        num: How many examples are asked, at most.
        classes: C.
    """

    model: Model
    num: int
    classes: int

    def __call__(self, models: Params, row: PyTree, x: Array) -> Array:
        params = tree.first(models)
        return row["mix"] * self.by_examples(params, row, x) + (1 - row["mix"]) * self.model.predict(params, x)

    def by_examples(self, params: Params, row: PyTree, x: Array) -> Array:
        """(B, C) p_knn; zeros for a client without examples."""
        queries = self.model.features(params, x)
        places, weights = votes(queries, row["features"], row["size"], self.num, row["scale"])
        return jnp.einsum("bk,bkc->bc", weights, jax.nn.one_hot(row["y"][places], self.classes))

    def remember(
        self, params: Params, data: ClientData, scale: Array | float, mix: Array | float, grid: Array | None
    ) -> PyTree:
        """A client's row.

        Args:
            params: The model whose features are stored.
            data: The client's.
            scale: As in `votes`.
            mix: Share of the examples in predictions, of clients that do not choose it.
            grid: Shares (G,), of which a client with validation examples chooses the one of their least loss; or None.
        """
        train, validation = data.train, data.validation
        stored = features_of(self.model, params, train)
        row = {"features": stored, "y": train.y[...], "size": train.size, "scale": jnp.asarray(scale, jnp.float32)}

        if grid is not None and validation.y.shape[0]:
            best = jnp.argmin(sum_over_examples(self._losses(params, row, grid), validation))
            mix = jnp.where(validation.size > 0, grid[best], mix)
        return row | {"mix": jnp.where(train.size > 0, mix, 0.0)}

    def _losses(self, params: Params, row: PyTree, grid: Array) -> Callable[[Array, Array, Array], Array]:
        """(x, y, mask) -> the losses (G,) by the shares of a grid, summed over examples."""

        def losses(x, y, mask):
            both = self.by_examples(params, row, x), self.model.predict(params, x)
            own, shared = (jnp.take_along_axis(p, y[:, None], axis=1) for p in both)
            likelihood = jnp.maximum(grid * own + (1 - grid) * shared, jnp.finfo(jnp.float32).tiny)
            return jnp.where(mask[:, None], -jnp.log(likelihood), 0).sum(axis=0)

        return losses
