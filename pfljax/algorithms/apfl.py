"""APFL: each client mixes the global model with its own and learns the mixing weight.

Deng, Kamani, Mahdavi, "Adaptive personalized federated learning" (2020, Algorithm 1 and Eq. 10).

    A round: client k receives w; on each mini-batch w_k <- w_k - eta grad f(w_k) and, for the mixture
    m = alpha_k v_k + (1 - alpha_k) w_k,  v_k <- v_k - eta alpha_k grad f(m);
    on the first mini-batch alpha_k <- alpha_k - rate <v_k - w_k, grad f(m)>, clipped to [0, 1];
    w <- sum_k n_k w_k / sum_k n_k.  Client k predicts with alpha_k v_k + (1 - alpha_k) w.

Departures from the paper: The mean is weighted by n_k. Steps are those of the solver's optimizer, one for each model;
the optimizer of v_k persists across rounds. alpha moves once per round, as in the authors' code. Only parameters are
mixed: batch statistics are written at m, and a mixture has the client's own. Newcomers train v through the mixture with
the final w, at the initial alpha, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.global_model import averaging, received_model
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
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Pair, Personal, Problem
from pfljax.local.solver import joined, slope
from pfljax.settings.method import hyperparameter, method


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        personal: v_k, with the batch statistics of the mixture.
        alpha: () alpha_k, the weight of v_k in the mixture.
    """

    personal: Personal
    alpha: Array


@method(keeps="its model, its mixing weight", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class APFL:
    """APFL (Deng et al., 2020): each client mixes the global model with its own and learns the mixing weight.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.APFL(alpha=0.25)
        APFL(alpha=0.25, alpha_learning_rate=0.1)
    """

    alpha: float = hyperparameter(
        0.5,
        at_least=0,
        at_most=1,
        grid=(0.25, 0.5, 0.75),
        help="initial weight of a client's own model in its mixture; 0 is FedAvg, 1 is Local",
    )
    alpha_learning_rate: float = hyperparameter(
        0.1, at_least=0, help="learning rate of alpha; 0 keeps alpha fixed", former="rate"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        def first_row(key: Key, client: Array) -> Row:
            personal = problem.init_personal(key, client)
            return Row(personal, jnp.asarray(self.alpha, jnp.float32))

        def direction(
            params: Pair, statistics: Pair, memory: tuple[Array, Array], batch: Batch
        ) -> tuple[Pair, tuple[Array, Array]]:
            alpha, step_number = memory
            w = params.shared
            v = params.personal

            # w_k <- w_k - eta grad f(w_k)
            w_slope = slope(solver.mean_loss, w, statistics.shared, batch.for_model(0))
            # v_k <- v_k - eta alpha_k grad f(m)
            m = mixture(alpha, v, w)
            m_slope = slope(solver.mean_loss, m, statistics.personal, batch.for_model(1))
            v_slope = m_slope._replace(gradient=tree.scale(m_slope.gradient, alpha))

            # On the first mini-batch alpha_k <- alpha_k - rate <v_k - w_k, grad f(m)>  (Eq. 10)
            difference = tree.subtract(v, w)
            moved = alpha - self.alpha_learning_rate * tree.inner(difference, m_slope.gradient)
            alpha = jnp.where(step_number == 0, jnp.clip(moved, 0, 1), alpha)
            return Pair(w_slope, v_slope), (alpha, step_number + 1)

        def train(context: ClientContext, models: Params, row: Row, data: ClientData) -> Trained:
            memory = (row.alpha, jnp.zeros((), jnp.int32))
            trained, memory = problem.descend_pair(
                context, models, row.personal, data.train, direction, memory
            )
            alpha, _ = memory
            return trained._replace(row=Row(trained.row, alpha))

        def mixed_model(alpha: Array, own_model: Params, global_model: Params) -> Params:
            """The mixture of two whole models, with the client's own batch statistics."""
            v, statistics = solver.without_statistics(own_model)
            w, _ = solver.without_statistics(global_model)
            return joined(mixture(alpha, v, w), statistics)

        def predict(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> Prediction:
            return Prediction.single(
                mixed_model(row.alpha, row.personal.params, tree.first(models))
            )

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train v through the mixture with w, at the initial alpha."""
            global_model = tree.first(models)
            w, _ = solver.without_statistics(global_model)
            alpha = jnp.asarray(self.alpha, jnp.float32)

            def objective(v: Params, batch: Batch) -> Array:
                return solver.mean_loss(mixture(alpha, v, w), batch)

            own_model = problem.train_newcomer(context, data, objective, start=global_model)
            return Prediction.single(mixed_model(alpha, own_model, global_model))

        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=2),
            first_row=first_row,
            predict=predict,
            adapt=adapt,
            global_model=received_model,
            report=MethodReport(
                scored="each client's mixture of its own and the global parameters"
            ),
        )


def mixture(alpha: Array, v: Params, w: Params) -> Params:
    """m = alpha v + (1 - alpha) w."""
    return jax.tree.map(
        lambda personal_leaf, shared: alpha * personal_leaf + (1 - alpha) * shared, v, w
    )
