"""FedProto: clients own their models and share what classes look like to them.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous clients" (AAAI
2022).

    A round: client k receives the prototypes P (C, F) and takes local steps, from its own theta_k, on
        l_k(theta_k) + strength |f(x) - P_y|^2 / F,  f the features, for examples whose class has a prototype;
    it sends, class by class, the sum of the features of its examples under the new theta_k, and their number;
    P_c <- the mean over all examples of class c that were sent, and stays where there are none.
    Client k predicts the class of the nearest prototype, with probabilities softmax_c(-|f(x) - P_c|^2).

Departures from the paper: the distance is squared, a mean over features, and taken example by example, not between a
client's mean and the prototype; its Eq. 6 is read as the mean over examples, without a further division by the number
of clients. Features in the loss are those of training, with dropout and the batch statistics of the mini-batch; those
that are sent and compared with prototypes are those of predictions. Sums and counts travel for means and counts.
Probabilities are for the loss in the evaluation. Models of all clients have one form, and start alike unless told
otherwise. Newcomers train alone with the prototypes as they are, for as many rounds as a run has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes
from pfljax.core import tree
from pfljax.core.method import knob, method
from pfljax.core.types import Algorithm, Array, ClientOutput, Ledger, Params, Predictor, PyTree, Report, State
from pfljax.local.problem import Problem
from pfljax.models import Model

UNKNOWN = -1e9  # the score of a class without a prototype; finite, so that without any all classes are alike


@method(keeps="its model", travels="features' means by class, both ways")
@dataclasses.dataclass(frozen=True)
class FedProto:
    """FedProto (Tan et al., 2022): clients own their models and share what classes look like to them."""

    strength: float = knob(
        1.0, at_least=0, grid=(0.1, 1.0, 4.0), help="lambda, the pull of features to prototypes; 0, with head, is Local"
    )
    predict: Literal["nearest", "head"] = knob(
        "nearest", help="predictions by the nearest prototype, or by the model's own last layer"
    )

    def build(self, problem: Problem) -> Algorithm:
        model, solver = problem.model, problem.solver
        num_classes = classes.required(problem, "fedproto", places=False)
        width = classes.num_features(model)

        def pulled(received):
            """The loss of each example, so that private gradients are clipped with the pull in them."""

            def loss(params, x, y, *key):
                target, known = received["mean"][y], received["count"][y] > 0
                distance = jnp.square(model.features(params, x, *key) - target).mean(axis=-1)
                return solver.loss(params, x, y, *key) + self.strength * jnp.where(known, distance, 0)

            return problem._replace(solver=solver._replace(loss=loss))

        def init(key, clients):
            empty = {"mean": jnp.zeros((1, num_classes, width)), "count": jnp.zeros((1, num_classes))}
            return State((), empty, (), problem.own_rows(key, problem.ids(clients)))

        def client_update(context, models, row, data):
            row, loss = pulled(tree.first(models)).fit_own(context, row, data.train)
            found = classes.feature_sums(model, row["model"], data.train, num_classes)
            upload = tree.stack_one({"sum": found["sums"], "count": found["counts"]})
            return ClientOutput(row, upload, {"loss": loss}, (data.train.size > 0)[None])

        def server_update(key, state, aggregate):
            sums, counts = aggregate.upload["sum"], aggregate.upload["count"]
            new = {"mean": classes.means(sums, counts), "count": counts}  # Eq. 6
            choose = lambda a, b: jnp.where(tree.per_row(counts, a) > 0, a, b)
            return state._replace(models=jax.tree.map(choose, new, state.models)), {}

        def predictor_of(own, state):
            if self.predict == "head":
                return Predictor.own(own)
            rows = tree.repeat(state.models, tree.num_rows(own))
            return dataclasses.replace(Predictor.own(own), rows=rows, apply=Nearest(model))

        def adapt(key, state, clients):
            return predictor_of(pulled(tree.first(state.models)).newcomers_alone(key, clients).models, state)

        by = "the nearest prototype" if self.predict == "nearest" else "its last layer"
        return Algorithm(
            init=init,
            client_update=client_update,
            server_update=server_update,
            predictor=lambda key, state, clients: predictor_of(state.clients["model"], state),
            adapt=adapt,
            topology="shared",
            ledger=Ledger(gradients=1, unaccounted="the features' sums and counts by class, sent without noise"),
            report=Report(scored=f"each client's own model, by {by}"),
        )


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Predictions (B, C) by the distance of a model's features to prototypes; equal for the same model."""

    model: Model

    def __call__(self, models: Params, row: PyTree, x: Array) -> Array:
        z = self.model.features(tree.first(models), x)
        # Scores of a softmax: |f|^2, which all classes have in common, is left out of -|f - P_c|^2.
        scores = 2 * z @ row["mean"].T - jnp.square(row["mean"]).sum(axis=-1)
        return jax.nn.softmax(jnp.where(row["count"] > 0, scores, UNKNOWN))
