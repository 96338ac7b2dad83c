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

import jax.numpy as jnp

from pfljax.algorithms.common import classes
from pfljax.algorithms.common.averaging import averaging
from pfljax.algorithms.common.nearest import ByNearest
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Prediction, Report
from pfljax.local.problem import Problem


@method(name="knn_per", keeps="features of its examples", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class KNNPer:
    """kNN-Per (Marfoq et al., 2022): FedAvg's model, interpolated with each client's nearest neighbors."""

    neighbors: int = knob(10, at_least=1, grid=(5, 10, 20), help="k, neighbors among a client's own examples")
    scale: float = knob(
        1.0, above=0, grid=(0.1, 1.0, 10.0), help="mean squared feature difference at which weight falls to 1 / e"
    )
    mix: float = knob(
        0.5, at_least=0, at_most=1, help="lambda, the neighbors' weight, unless chosen on a grid; 0 is then FedAvg"
    )
    grid_steps: int = knob(
        10, at_least=0, at_most=10_000, help="n: validation examples choose lambda from 0, 1/n, ..., 1; 0: use `mix`"
    )

    def build(self, problem: Problem) -> Algorithm:
        apply = ByNearest(problem.model, self.neighbors, classes.required(problem, "knn_per", places=False))
        grid = jnp.linspace(0, 1, self.grid_steps + 1) if self.grid_steps else None

        def remember(params, data):
            return apply.remember(params, data, self.scale, self.mix, grid)

        def predict(context, models, row, data):
            return Prediction(inputs=remember(tree.first(models), data))

        def fine_tuned(epochs):
            tuning = problem.with_epochs(epochs)

            def predict(context, models, row, data):
                tuned = tuning.alone(context, tree.first(models), data)
                return Prediction.one(tuned, inputs=remember(tuned, data))

            return dataclasses.replace(algorithm, predict=predict)

        ledger = Ledger(gradients=1, unaccounted="the stored examples that a client predicts with")
        report = Report(scored="the global model, interpolated with each client's nearest neighbors")
        functions = {"predict": predict, "apply": apply, "fine_tuned": fine_tuned}
        algorithm = averaging(problem, **functions, ledger=ledger, report=report)
        return algorithm
