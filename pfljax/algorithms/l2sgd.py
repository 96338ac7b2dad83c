"""L2SGD: every client has its own model, pulled toward the mean of all models.

Hanzely, Richtarik, "Federated learning of a mixture of global and local models" (2020):
min 1/K sum_k l_k(x_k) + lambda / (2 K) sum_k |x_k - mean|^2.

    A round: client k receives the mean;
    x_k <- (1 - pull) x_k + pull mean;
    x_k takes local steps on l_k;
    mean <- sum_k n_k x_k / sum_k n_k.  Client k predicts with x_k.

Departures from the paper: The paper tosses a coin for each step: a local step or, with probability p, a step of pull =
alpha lambda / (K p) toward the mean. Here a round is one step toward the mean, then the solver's local steps. The mean
is weighted by n_k. Newcomers train from the mean for one round. The first mean is the common initial model, or the
first client's.
"""

from __future__ import annotations

import dataclasses

import jax

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Params,
    Prediction,
    Trained,
)
from pfljax.local.problem import Personal, Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="its model", travels="the mean down, its model up")
@dataclasses.dataclass(frozen=True)
class L2SGD:
    """L2SGD (Hanzely and Richtárik, 2020): every client has its own model, pulled toward the mean of all models.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.L2SGD(pull=0.3)
        L2SGD(pull=0.3)
    """

    pull: float = hyperparameter(
        0.5,
        at_least=0,
        at_most=1,
        grid=(0.1, 0.3, 0.5, 0.7, 0.9),
        help="fraction of the distance to the mean that a model moves; 0 is Local",
    )

    def build(self, problem: Problem) -> Algorithm:
        # ---- The client.

        def first_row(key: Key, client: Array) -> Personal:
            """A client's row is its model x_k and the optimizer's state."""
            return problem.init_personal(key, client)

        def pull_toward(x: Array, mean: Array) -> Array:
            """(1 - pull) x_k + pull mean, of one leaf."""
            return (1 - self.pull) * x + self.pull * mean

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            # x_k <- (1 - pull) x_k + pull mean; both have batch statistics, which are mixed, too.
            _, whole_models = problem.whole(context, models)
            mean = tree.first(whole_models)
            mixed = jax.tree.map(pull_toward, personal.params, mean)

            # x_k takes local steps on l_k.
            start = personal._replace(params=mixed)
            personal, loss = problem.fit_personal(context, start, data.train)

            # Client k sends x_k; its optimizer's state stays.
            return Trained(
                models=tree.stack_one(personal.params),
                losses=loss[None],
                row=personal,
            )

        # ---- What a client predicts with.

        def own_model(personal: Personal) -> Params:
            """x_k."""
            return personal.params

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train from the mean for one round."""
            mean = tree.first(models)
            model = problem.train_newcomer(context, data, start=mean, rounds=1)
            return Prediction.single(model)

        # mean <- sum_k n_k x_k / sum_k n_k, which is what `averaging` does without a `server_step`.
        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1),
            first_row=first_row,
            own_model=own_model,
            adapt=adapt,
        )
