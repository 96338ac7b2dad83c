"""FedProto: clients keep their models and share only class prototypes (mean features).

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous clients" (AAAI
2022).

    A round: client k receives the prototypes P (C, F) and takes local steps, from its own theta_k, on
        l_k(theta_k) + strength |f(x) - P_y|^2 / F,  f the features, for examples whose class has a prototype;
    it sends, for each class, the sum of its examples' features under the new theta_k and their number;
    P_c <- the mean over all examples of class c that were sent; it stays if there are none. With mean="uniform", it is
    the mean of the clients' means, as in the authors' code.
    Client k predicts the class of the nearest prototype, with probabilities softmax_c(-|f(x) - P_c|^2).

Departures from the paper: The distance is squared, a mean over features, and taken for each example, not between a
client's mean and the prototype. We read its Eq. 6 as the mean over examples, without a further division by the number
of clients. The loss uses training features, with dropout and the batch statistics of the mini-batch; features that are
sent or compared with prototypes are inference features. Sums and counts travel instead of means and counts.
Probabilities are needed only for the loss in the evaluation. All clients' models have the same architecture and start
from the same parameters unless told otherwise. Newcomers train alone with fixed prototypes, for as many rounds as the
run has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp

from pfljax.algorithms.common import classes
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, First, Ledger, Prediction, Report, Start
from pfljax.local.problem import Problem

UNKNOWN = -1e9  # score of a class without a prototype; finite, so that classes tie if there are no prototypes


class Prototypes(NamedTuple):
    """The mean features of each class (1, C, F), and the number of examples behind them (1, C)."""

    mean: Array
    count: Array


@method(keeps="its model", travels="mean features per class, both ways")
@dataclasses.dataclass(frozen=True)
class FedProto:
    """FedProto (Tan et al., 2022): clients keep their models and share only class prototypes (mean features)."""

    strength: float = knob(
        1.0, at_least=0, grid=(0.1, 1.0, 4.0), help="lambda, pull of features toward prototypes; 0 with head is Local"
    )
    predict: Literal["nearest", "head"] = knob(
        "nearest", help="predict by the nearest prototype, or by the model's own last layer"
    )
    mean: Literal["weighted", "uniform"] = knob(
        "weighted", help="prototypes are means over examples, or over the clients that have the class (authors)"
    )

    def build(self, problem: Problem) -> Algorithm:
        model, solver = problem.model, problem.solver
        num_classes = classes.required(problem, "fedproto", places=False)
        width = classes.num_features(problem)

        def pulled(received):
            """The loss of each example with the pull, so that private training clips the pull's gradient too."""

            def loss(params, x, y, *key):
                target, known = received.mean[y], received.count[y] > 0
                distance = jnp.square(model.features(params, x, *key) - target).mean(axis=-1)
                return solver.loss(params, x, y, *key) + self.strength * jnp.where(known, distance, 0)

            return problem.with_loss(loss)

        def start(key, clients):
            return Start((), Prototypes(jnp.zeros((1, num_classes, width)), jnp.zeros((1, num_classes))))

        def client_update(context, models, row, data):
            row, loss = row.fit(pulled(tree.first(models)), context, data.train)
            found = classes.feature_sums(problem, row.model, data.train, num_classes)
            sums, counts = found["sums"], found["counts"]
            if self.mean == "uniform":
                sums, counts = classes.means(sums, counts), jnp.minimum(counts, 1)
            upload = tree.stack_one({"sum": sums, "count": counts})
            return ClientOutput(row, upload, {"loss": loss}, (data.train.size > 0)[None])

        def server_update(key, state, aggregate):
            sums, counts = aggregate.upload["sum"], aggregate.upload["count"]
            new = Prototypes(classes.means(sums, counts), counts)  # Eq. 6
            return state._replace(models=tree.where(counts > 0, new, state.models)), {}

        def adapt(context, models, data):
            received = tree.first(models)
            return pulled(received).newcomer(context, models, data)._replace(inputs=received)

        def apply(models, prototypes, x):
            """Logits -|f - P_c|^2, without |f|^2, which all classes share."""
            z = model.features(tree.first(models), x)
            scores = 2 * z @ prototypes.mean.T - jnp.square(prototypes.mean).sum(axis=-1)
            return jnp.where(prototypes.count > 0, scores, UNKNOWN)

        nearest = self.predict == "nearest"
        by = "the nearest prototype" if nearest else "its last layer"
        return Algorithm(
            start=start,
            first_row=lambda key, client, start: First(problem.own_model(key, client)),
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: Prediction(tree.stack_one(row.model), inputs=tree.first(models)),
            apply=apply if nearest else None,
            adapt=adapt,
            topology="shared",
            sends="sums",
            ledger=Ledger(gradients=1, unaccounted="the per-class feature sums and counts, sent without noise"),
            report=Report(scored=f"each client's own model, by {by}"),
        )
