"""FML: each client trains its own model and a shared one, the meme model, by deep mutual learning.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated mutual learning" (2020).

    A round: client k receives the meme w; with p_v and p_w the two models' predictions, on each mini-batch
    v_k <- v_k - eta grad (alpha CE(p_v, y) + (1 - alpha) KL(p_w || p_v)), w_k fixed, and
    w_k <- w_k - eta grad (beta CE(p_w, y) + (1 - beta) KL(p_v || p_w)), v_k fixed, both from the same models;
    w <- sum_k n_k w_k / sum_k n_k.  Client k predicts with v_k.

Departures from the paper: Clients' own models have the meme's architecture unless networks differ. The mean is weighted
by n_k. Steps are those of the solver's optimizer, one for each model; the optimizer of v_k persists across rounds.
Newcomers train a model of their own as in a round, with the final meme fixed, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common import classes, distillation
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Mode,
    Params,
    Prediction,
    PyTree,
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Personal, Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="its model", travels="the meme model, both ways")
@dataclasses.dataclass(frozen=True)
class FML:
    """FML (Shen et al., 2020): each client's own model and a shared one learn from each other.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FML(alpha=0.9, beta=0.9)
        FML(alpha=0.9, beta=0.9)
    """

    alpha: float = hyperparameter(
        0.5,
        at_least=0,
        at_most=1,
        grid=(0.1, 0.5, 0.9),
        help="weight of the labels in its own model's loss; 1: Local",
    )
    beta: float = hyperparameter(
        0.5,
        at_least=0,
        at_most=1,
        grid=(0.1, 0.5, 0.9),
        help="weight of the labels in the meme's loss; 1: FedAvg",
    )

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "fml")
        meme_problem = problem.server_problem

        def own_objective(params: Params, meme: Params, batch: Batch) -> Array:
            """alpha CE(p_v, y) + (1 - alpha) KL(p_w || p_v), w_k fixed."""

            def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                teacher_logits = meme_problem.model.apply(meme, x, mode)
                logits = problem.model.apply(params, x, mode)
                divergence = distillation.divergence(problem, teacher_logits, logits, y)
                label_loss = problem.solver.loss(params, x, y, mode)
                return self.alpha * label_loss + (1 - self.alpha) * divergence

            return problem.solver.with_loss(loss).mean_loss(params, batch)

        def meme_objective(params: Params, personal_params: Params, batch: Batch) -> Array:
            """beta CE(p_w, y) + (1 - beta) KL(p_v || p_w), v_k fixed."""

            def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                teacher_logits = problem.model.apply(personal_params, x, mode)
                logits = meme_problem.model.apply(params, x, mode)
                divergence = distillation.divergence(problem, teacher_logits, logits, y)
                label_loss = meme_problem.solver.loss(params, x, y, mode)
                return self.beta * label_loss + (1 - self.beta) * divergence

            return meme_problem.solver.with_loss(loss).mean_loss(params, batch)

        def first_row(key: Key, client: Array) -> Personal:
            """v_k. A client's row is its model."""
            return problem.init_personal(key, client)

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            return problem.fit_side_by_side(
                context,
                models,
                personal,
                data.train,
                global_objective=meme_objective,
                personal_objective=own_objective,
            )

        def own_model(personal: Personal) -> Params:
            return personal.params

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train a model of their own, with the final meme fixed."""
            meme = tree.first(models)

            def objective(params: Params, batch: Batch) -> Array:
                return own_objective(params, meme, batch)

            return Prediction.single(problem.train_newcomer(context, data, objective))

        return averaging(
            meme_problem,
            train=train,
            ledger=Ledger(gradients=2),
            first_row=first_row,
            own_model=own_model,
            adapt=adapt,
        )
