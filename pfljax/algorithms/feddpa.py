"""FedDPA: a global and a personal adapter, mixed for each input by its similarity to the client's.

Yang, Long, Shen, Jiang, Blumenstein, "Dual-personalizing adapter for federated foundation models"
(NeurIPS 2024; FedDPA-T).

    A round: client k receives the global adapter W and trains its own V_k beside it, the model
    being frozen + (W + V_k) / 2 and W fixed; it trains W alone to W_k, as in FedAvg;
    W <- sum_k n_k W_k / sum_k n_k.
    Client k predicts x with frozen + (1 - alpha) W + alpha V_k, where
    alpha(x) = weight x the mean cosine of phi(x) and phi(x_s) over `instances` of its examples x_s,
    and phi is the input of the last layer under V_k alone.

Departures from the paper: The authors' code averages the W_k uniformly; here, n_k weights them, as
everywhere. W + V_k is a sum of LoRA's products. Other trained parameters, such as a head, are mixed
with the same weights. Batch statistics of V_k are those of the model beside W. phi is the input of
the last dense layer; for sequences, its mean over positions. alpha is at least 0. FedDPA-F, which
trains V_k after training only, is not here. Newcomers train V as in a round, beside the final W,
for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import low_rank
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Params,
    Prediction,
    PyTree,
    Trained,
)
from pfljax.local.batches import Batch, examples
from pfljax.local.problem import Objective, Personal, Problem
from pfljax.settings.method import hyperparameter, method

INSTANCES = (
    0xD9A  # folded into a client's key for a round: its examples that inputs are compared with
)


class Inputs(NamedTuple):
    """What a client predicts with, beside the global adapter.

    Attributes:
        direction: (F,) the mean of phi(x_s) / |phi(x_s)|.
        personal: V_k.
    """

    direction: Array
    personal: Params


@method(name="feddpa", keeps="its adapter", travels="the global adapter, both ways")
@dataclasses.dataclass(frozen=True)
class FedDPA:
    """FedDPA (Yang et al., 2024): a global and a personal adapter, mixed for each input.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedDPA(weight=0.3)
        FedDPA(weight=0.3, instances=5)
    """

    weight: float = hyperparameter(
        0.5,
        at_least=0,
        at_most=1,
        grid=(0.3, 0.5, 0.8),
        help="largest weight of the personal adapter; 0 is FedIT",
    )
    instances: int = hyperparameter(
        5, at_least=1, help="number of a client's examples that an input is compared with"
    )

    def build(self, problem: Problem) -> Algorithm:
        low_rank.required(problem, "feddpa")
        model = problem.model
        solver = problem.solver

        def mixed(w: Params, v: Params, alpha: Array | float) -> Params:
            """frozen + (1 - alpha) W + alpha V; other parameters are mixed alike."""
            rest = jax.tree.map(lambda a, b: (1 - alpha) * a + alpha * b, w, v)
            v = low_rank.with_others(problem, v, rest)
            return low_rank.side_by_side(problem, (w, v), (1 - alpha, alpha))

        def personal_objective(w: Params) -> Objective:
            """The loss of frozen + (W + V) / 2, W fixed."""

            def objective(v: Params, batch: Batch) -> Array:
                # Dropout and noise are not those of W alone.
                return solver.mean_loss(mixed(w, v, 0.5), batch.for_model(1))

            return objective

        # ---- The client.

        def first_row(key: Key, client: Array) -> Personal:
            return problem.init_personal(key, client)

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            # V_k, beside W as received
            objective = personal_objective(tree.first(models))
            personal, loss = problem.fit_personal(context, personal, data.train, objective)
            # W alone to W_k, as in FedAvg
            trained = problem.fit(context, models, data.train)
            return trained._replace(row=personal, losses=loss[None])

        # ---- What a client predicts with.

        def directions(v: Params, x: PyTree) -> Array:
            """(B, F) phi(x) / |phi(x)| under V alone."""
            features = model.features(v, x)
            features = features.reshape(features.shape[0], -1, features.shape[-1]).mean(axis=1)
            norm = jnp.linalg.norm(features, axis=1, keepdims=True)
            return features / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)

        def inputs_of(context: ClientContext, v: Params, data: ClientData) -> Inputs:
            # Draw `instances` of the client's examples; fewer if it has fewer.
            key = jax.random.fold_in(context.key, INSTANCES)
            lots = jax.random.uniform(key, (problem.n_max,))
            lots = jnp.where(jnp.arange(problem.n_max) < data.train.size, lots, -1)
            largest, positions = jax.lax.top_k(lots, min(self.instances, problem.n_max))
            is_real = largest >= 0
            weights = is_real / jnp.maximum(is_real.sum(), 1)

            x, _ = examples(data.train, positions)
            return Inputs(direction=weights @ directions(v, x), personal=v)

        def predict(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Prediction:
            return Prediction(inputs=inputs_of(context, personal.params, data))

        def apply(models: Params, inputs: Inputs, x: PyTree) -> Array:
            """frozen + (1 - alpha(x)) W + alpha(x) V_k for each x."""
            w = tree.first(models)
            cosines = directions(inputs.personal, x) @ inputs.direction
            alphas = self.weight * jnp.maximum(cosines, 0)

            def logits_of(alpha: Array, example: PyTree) -> Array:
                params = mixed(w, inputs.personal, alpha)
                return model.apply(params, tree.stack_one(example))[0]

            return problem.plan.over_models(logits_of, alphas, x)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train V beside the final W."""
            w = tree.first(models)
            w_params, _ = solver.without_statistics(w)
            v = problem.train_newcomer(context, data, personal_objective(w_params), start=w)
            return Prediction(inputs=inputs_of(context, v, data))

        return averaging(
            problem,
            train=train,
            ledger=Ledger(
                gradients=2, unaccounted="the stored examples that a client predicts with"
            ),
            first_row=first_row,
            predict=predict,
            apply=apply,
            adapt=adapt,
            report=MethodReport(
                scored="the global and each client's own adapter, mixed for each input"
            ),
        )
