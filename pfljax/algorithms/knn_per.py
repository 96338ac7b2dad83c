"""kNN-Per: FedAvg's model, interpolated with each client's nearest neighbors.

Marfoq, Neglia, Kameni, Vidal, "Personalized federated learning through local memorization" (ICML 2022). Training is
FedAvg's. Then client k keeps a datastore: for each of its training examples (x_i, y_i), the label y_i and the features
phi(x_i), the input of the global model's last layer. It predicts

    lambda_k p_knn(y | x) + (1 - lambda_k) p(y | x; theta),
    p_knn(y | x) proportional to the sum of exp(-d_i / scale) [y_i = y] over the k nearest examples,

where d_i is the mean squared difference of features, |phi(x) - phi(x_i)|^2 / F.

Departures from the paper: d is our reading; like the authors' code, it divides the squared distance by F, so that one
scale fits networks of any width. Features are used as the network outputs them. lambda_k is the value of the grid with
the least mean loss (not error) on the client's validation examples, which may be few; a client without any uses `mix`.
Newcomers do the same. Fine-tuning before evaluation trains the global model; the datastore is then rebuilt from the
result.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Ledger,
    MethodReport,
    Params,
    Prediction,
    PyTree,
)
from pfljax.local.batches import over_examples, sum_over_examples
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


class Datastore(NamedTuple):
    """What a client remembers of its training examples.

    Attributes:
        features: (n_max, F) phi(x_i).
        y: (n_max,) y_i, classes.
        size: () int32, number of real examples.
        scale: () as in `votes`.
        mix: () lambda_k, weight of the neighbors in predictions.
    """

    features: Array
    y: Array
    size: Array
    scale: Array
    mix: Array


@method(name="knn_per", keeps="features of its examples", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class KNNPer:
    """kNN-Per (Marfoq et al., 2022): FedAvg's model, interpolated with each client's nearest neighbors.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.KNNPer(neighbors=5)
        KNNPer(neighbors=5, scale=1.0, mix=0.5, grid_steps=10)
    """

    neighbors: int = hyperparameter(
        10, at_least=1, grid=(5, 10, 20), help="k, neighbors among a client's own examples"
    )
    scale: float = hyperparameter(
        1.0,
        above=0,
        grid=(0.1, 1.0, 10.0),
        help="mean squared feature difference at which weight falls to 1 / e",
    )
    mix: float = hyperparameter(
        0.5,
        at_least=0,
        at_most=1,
        help="lambda, the neighbors' weight, unless chosen on a grid; 0 is then FedAvg",
    )
    grid_steps: int = hyperparameter(
        10,
        at_least=0,
        at_most=10_000,
        help="n: validation examples choose lambda from 0, 1/n, ..., 1; 0: use mix",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        num_classes = classes.required(problem, "knn_per", per_position=False)

        def log_probabilities(params: Params, stored: Datastore, x: PyTree) -> tuple[Array, Array]:
            """log p_knn, at least the logarithm of the least float32, and log p(y | x; theta), both (B, C)."""
            queries = model.features(params, x)
            index, weights = votes(
                queries, stored.features, stored.size, self.neighbors, stored.scale
            )
            labels = jax.nn.one_hot(stored.y[index], num_classes)
            by_neighbors = jnp.einsum("bk,bkc->bc", weights, labels)
            by_neighbors = jnp.maximum(by_neighbors, jnp.finfo(jnp.float32).tiny)
            return jnp.log(by_neighbors), jax.nn.log_softmax(model.apply(params, x))

        def remember(params: Params, data: ClientData) -> Datastore:
            """A client's datastore, of features under these parameters."""

            def features(x: PyTree, y: Array) -> Array:
                return model.features(params, x)

            stored = Datastore(
                features=over_examples(features, data.train),
                y=data.train.y[...],
                size=data.train.size,
                scale=jnp.asarray(self.scale, jnp.float32),
                mix=jnp.asarray(self.mix, jnp.float32),
            )
            mix = choose_mix(params, stored, data) if self.grid_steps else stored.mix
            return stored._replace(mix=jnp.where(data.train.size > 0, mix, 0.0))

        def choose_mix(params: Params, stored: Datastore, data: ClientData) -> Array:
            """lambda_k: the value of the grid with the least loss on the client's validation examples, if any."""
            validation = data.validation
            if not validation.y.shape[0]:
                return stored.mix
            grid = jnp.linspace(0, 1, self.grid_steps + 1)

            def losses(x: PyTree, y: Array, mask: Array) -> Array:
                """Of each value of the grid, summed over examples."""
                by_neighbors, by_model = log_probabilities(params, stored, x)
                by_neighbors = jnp.take_along_axis(by_neighbors, y[:, None], axis=1)
                by_model = jnp.take_along_axis(by_model, y[:, None], axis=1)
                log_likelihood = interpolated(grid, by_neighbors, by_model)
                return jnp.where(mask[:, None], -log_likelihood, 0).sum(axis=0)

            best = jnp.argmin(sum_over_examples(losses, validation))
            return jnp.where(validation.size > 0, grid[best], stored.mix)

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            return Prediction(inputs=remember(tree.first(models), data))

        def apply(models: Params, stored: Datastore, x: PyTree) -> Array:
            """log(lambda_k p_knn(y | x) + (1 - lambda_k) p(y | x; theta)), (B, C)."""
            by_neighbors, by_model = log_probabilities(tree.first(models), stored, x)
            return interpolated(stored.mix, by_neighbors, by_model)

        def fine_tuned(epochs: int) -> Algorithm:
            """Clients train the global model before they predict; the datastore is that of the result."""
            tuning = problem.with_epochs(epochs)

            def predict(
                context: ClientContext, models: Params, row: PyTree, data: ClientData
            ) -> Prediction:
                tuned = tuning.train_newcomer(context, data, start=tree.first(models), rounds=1)
                return Prediction.single(tuned, inputs=remember(tuned, data))

            return dataclasses.replace(algorithm, predict=predict)

        algorithm = averaging(
            problem,
            ledger=Ledger(
                gradients=1, unaccounted="the stored examples that a client predicts with"
            ),
            predict=predict,
            apply=apply,
            report=MethodReport(
                "the global model, interpolated with each client's nearest neighbors"
            ),
        )
        algorithm = dataclasses.replace(algorithm, fine_tuned=fine_tuned)
        return algorithm


def votes(
    queries: Array, features: Array, size: Array, num: int, scale: Array | float
) -> tuple[Array, Array]:
    """Returns each query's nearest examples and their weights, proportional to exp(-d_i / scale).

    Args:
        queries: Features (B, F).
        features: Features (n_max, F) of a client's examples.
        size: () int32, number of real examples.
        num: k, the largest number of neighbors.
        scale: Mean squared feature difference at which weight falls to 1 / e.

    Returns:
        Indices (B, num) int32, and weights (B, num), each row on the simplex; zeros for a client without examples.
    """
    # d_i = |phi(x) - phi(x_i)|^2 / F
    squares = jnp.square(queries).sum(axis=1)[:, None] + jnp.square(features).sum(axis=1)
    products = jnp.matmul(queries, features.T, precision="highest")
    distance = jnp.maximum(squares - 2 * products, 0) / features.shape[1]
    is_real = jnp.arange(features.shape[0]) < size
    nearness = jnp.where(is_real, -distance, -jnp.inf)

    nearest, index = jax.lax.top_k(nearness, min(num, features.shape[0]))
    is_neighbor = jnp.isfinite(nearest)
    weights = jax.nn.softmax(nearest / scale, axis=1, where=is_neighbor)
    return index, jnp.where(is_neighbor, weights, 0)


def interpolated(mix: Array, by_neighbors: Array, by_model: Array) -> Array:
    """log(mix p_knn + (1 - mix) p), from logarithms."""
    return jnp.logaddexp(jnp.log(mix) + by_neighbors, jnp.log1p(-mix) + by_model)
