"""FedRoD: a generic model with a balanced loss, plus the logits of personal heads.

Chen, Chao, "On bridging generic and personalized federated learning for image classification" (ICLR
2022).

    g = h(z; psi) are the generic head's logits of the body's features z = f(x; theta);
        n_kc counts class c's examples.
    A round: client k receives theta and psi; on each mini-batch
    (theta, psi) <- (theta, psi) - eta grad CE(g + log n_k, y), the balanced softmax, and
    phi_k <- phi_k - eta grad CE(g + h(z; phi_k), y), where g and z are constants; phi_k stays;
    (theta, psi) <- sum_k n_k (theta_k, psi_k) / sum_k n_k.
        Client k predicts with softmax(g + h(z; phi_k)).

Departures from the paper: Personal heads are free parameters; the variant that generates them with
a hypernetwork is left out. In a client's balanced softmax, a class without examples counts as the
smallest positive number. Personal heads start from heads of initial models (our reading). Newcomers
train a personal head with the global model fixed, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes
from pfljax.algorithms.common.global_model import averaging
from pfljax.algorithms.common.heads import head_of
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Mode,
    Params,
    Prediction,
    PyTree,
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Personal, Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="its personal head", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedRoD:
    """FedRoD (Chen and Chao, 2022): a balanced generic model plus personal heads' logits.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedRoD(balance=0.5)
        FedRoD(balance=0.5)
    """

    balance: float = hyperparameter(
        1.0,
        at_least=0,
        help="factor of log n_kc in the generic model's loss; with 0 the generic model is FedAvg's",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver
        num_classes = classes.required(problem, "fedrod")

        def init_head(params: Params) -> Params:
            return head_of(problem, params)

        def with_head(head: Params, generic: Params) -> Params:
            """The body of the generic model under a personal head."""
            return tree.combine(head, generic)

        def personal_objective(head: Params, generic: Params, batch: Batch) -> Array:
            """CE(g + h(z; phi_k), y), where g and z are constants."""

            def loss(head: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                generic_logits = model.apply(generic, x, mode)
                whole = with_head(head, generic)
                return solver.loss(whole, x, y, mode, shift=generic_logits)

            return solver.with_loss(loss).mean_loss(head, batch)

        def first_row(key: Key, client: Array) -> Personal:
            return problem.init_personal(key, client, init_head)

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            counts = classes.counts(data.train, num_classes)
            smallest = jnp.finfo(jnp.float32).tiny
            log_counts = self.balance * jnp.log(jnp.maximum(counts, smallest))

            def generic_objective(params: Params, head: Params, batch: Batch) -> Array:
                """CE(g + log n_k, y), the balanced softmax."""

                def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                    return solver.loss(params, x, y, mode, shift=log_counts)

                return solver.with_loss(loss).mean_loss(params, batch)

            return problem.fit_side_by_side(
                context, models, personal, data.train, generic_objective, personal_objective
            )

        def predict(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Prediction:
            return Prediction(inputs=personal.params)

        def apply(models: Params, head: Params, x: PyTree) -> Array:
            """g + h(z; phi_k)."""
            generic = tree.first(models)
            generic_logits = model.apply(generic, x)
            return generic_logits + model.apply(with_head(head, generic), x)

        def generic_model(models: Params) -> Prediction:
            """The generic model alone: a personal head of zeros adds nothing to its logits."""
            head = init_head(tree.first(models))
            return Prediction(inputs=jax.tree.map(jnp.zeros_like, head))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train a personal head with the global model fixed."""
            generic = tree.first(models)

            def objective(head: Params, batch: Batch) -> Array:
                return personal_objective(head, generic, batch)

            head = problem.train_newcomer(context, data, objective, part=init_head)
            return Prediction(inputs=head)

        return averaging(
            problem,
            train=train,
            ledger=Ledger(
                gradients=2, unaccounted="a client's class counts, which balance its loss"
            ),
            first_row=first_row,
            predict=predict,
            apply=apply,
            adapt=adapt,
            global_model=generic_model,
            report=MethodReport(scored="the global model with each client's personal head"),
        )
