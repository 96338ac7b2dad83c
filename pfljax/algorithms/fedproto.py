"""FedProto: clients keep their models and share only class prototypes (mean features).

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous clients" (AAAI
2022).

    A round: client k receives the prototypes P (C, F) and takes local steps, from its own theta_k, on
        l_k(theta_k) + alignment |f(x) - P_y|^2 / F,  f the features, for examples whose class has a prototype;
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
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    First,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Mode,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.problem import Personal, Problem
from pfljax.settings.method import hyperparameter, method

UNKNOWN = (
    -1e9
)  # score of a class without a prototype; finite, so that classes tie if there are no prototypes


class Prototypes(NamedTuple):
    """The prototypes of all classes, which clients receive as a stack of one.

    Attributes:
        mean: P (1, C, F).
        count: (1, C), number of examples behind each; a class with 0 has no prototype.
    """

    mean: Array
    count: Array


@method(keeps="its model", travels="mean features per class, both ways")
@dataclasses.dataclass(frozen=True)
class FedProto:
    """FedProto (Tan et al., 2022): clients keep their models and share only class prototypes (mean features).

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedProto(alignment=0.1, predict="head")
        FedProto(alignment=0.1, predict='head', mean='weighted')
    """

    alignment: float = hyperparameter(
        1.0,
        at_least=0,
        grid=(0.1, 1.0, 4.0),
        help="lambda, pull of features toward prototypes; 0 with head is Local",
        former="strength",
    )
    predict: Literal["nearest", "head"] = hyperparameter(
        "nearest", help="predict by the nearest prototype, or by the model's own last layer"
    )
    mean: Literal["weighted", "uniform"] = hyperparameter(
        "weighted",
        help="prototypes are means over examples, or over the clients that have the class (authors)",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver
        num_classes = classes.required(problem, "fedproto", per_position=False)
        num_features = classes.num_features(problem)

        def with_pull(prototypes: Prototypes) -> Problem:
            """The problem with the pull in each example's loss, so that private training clips its gradient, too."""

            def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                """l_k + alignment |f(x) - P_y|^2 / F."""
                features = model.features(params, x, mode)
                distance = jnp.square(features - prototypes.mean[y]).mean(axis=-1)
                pull = jnp.where(prototypes.count[y] > 0, distance, 0)
                return solver.loss(params, x, y, mode) + self.alignment * pull

            return problem.with_loss(loss)

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            return First(row=problem.init_personal(key, client))

        def client_update(
            context: ClientContext, models: Prototypes, personal: Personal, data: ClientData
        ) -> ClientOutput:
            # Local steps, from its own theta_k, with the pull toward P.
            pulled = with_pull(tree.first(models))
            personal, loss = pulled.fit_personal(context, personal, data.train)
            # For each class, the sum of its examples' features under the new theta_k and their number;
            # with mean="uniform", their mean, which counts once.
            totals = classes.feature_sums(problem, personal.params, data.train, num_classes)
            sums = totals.sums
            counts = totals.counts
            if self.mean == "uniform":
                sums = classes.means(sums, counts)
                counts = jnp.minimum(counts, 1)
            return ClientOutput(
                row=personal,
                upload=Upload(sums={"features": sums[None]}, count=counts[None]),
                report=ClientReport(loss),
                sent=(data.train.size > 0)[None],
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            mean = jnp.zeros((1, num_classes, num_features))
            return Start(models=Prototypes(mean, jnp.zeros((1, num_classes))))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # P_c <- the mean over all examples of class c that were sent  (Eq. 6)
            sums = aggregate.upload.sums["features"]
            count = aggregate.upload.count
            assert count is not None
            new = Prototypes(classes.means(sums, count), count)
            # It stays if there are none.
            return state.with_models(tree.where(count > 0, new, state.models)), {}

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, models: Prototypes, personal: Personal, data: ClientData
        ) -> Prediction:
            return Prediction.single(personal.params, inputs=tree.first(models))

        def adapt(context: ClientContext, models: Prototypes, data: ClientData) -> Prediction:
            """Newcomers train alone with fixed prototypes."""
            prototypes = tree.first(models)
            params = with_pull(prototypes).train_newcomer(context, data)
            return Prediction.single(params, inputs=prototypes)

        def nearest_prototype(models: Params, prototypes: Prototypes, x: PyTree) -> Array:
            """Logits -|f - P_c|^2, without |f|^2, which all classes share."""
            features = model.features(tree.first(models), x)
            squares = jnp.square(prototypes.mean).sum(axis=-1)
            scores = 2 * features @ prototypes.mean.T - squares
            return jnp.where(prototypes.count > 0, scores, UNKNOWN)

        nearest = self.predict == "nearest"
        by = "the nearest prototype" if nearest else "its last layer"
        return Algorithm(
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            apply=nearest_prototype if nearest else None,
            adapt=adapt,
            topology=Topology.SHARED,
            sends="sums",
            ledger=Ledger(
                gradients=1,
                unaccounted="the per-class feature sums and counts, sent without noise",
            ),
            report=MethodReport(scored=f"each client's own model, by {by}"),
        )
