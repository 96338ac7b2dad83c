"""FedRoD: a generic model with a balanced loss, plus the logits of personal heads.

Chen, Chao, "On bridging generic and personalized federated learning for image classification" (ICLR 2022).

    g = h(z; psi) are the generic head's logits of the body's features z = f(x; theta); n_kc counts class c's examples.
    A round: client k receives theta and psi; on each mini-batch
    (theta, psi) <- (theta, psi) - eta grad CE(g + log n_k, y), the balanced softmax, and
    phi_k <- phi_k - eta grad CE(g + h(z; phi_k), y), where g and z are constants; phi_k stays;
    (theta, psi) <- sum_k n_k (theta_k, psi_k) / sum_k n_k.  Client k predicts with softmax(g + h(z; phi_k)).

Departures from the paper: Personal heads are free parameters; the variant that generates them with a hypernetwork is
left out. In a client's balanced softmax, a class without examples counts as the smallest positive number. Personal
heads start from heads of initial models (our reading). Newcomers train a personal head with the global model fixed, for
as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import beside, classes
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Prediction, Report
from pfljax.local.problem import OwnModel, Problem


@method(keeps="its personal head", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedRoD:
    """FedRoD (Chen and Chao, 2022): a generic model with a balanced loss, plus the logits of personal heads."""

    balance: float = knob(
        1.0,
        at_least=0,
        help="factor of log n_kc in the generic model's loss; with 0 the generic model is FedAvg's",
    )

    def build(self, problem: Problem) -> Algorithm:
        model, solver, num_classes = problem.model, problem.solver, classes.required(problem, "fedrod")
        head = lambda params: tree.partition(params, model.mask(params, 1))[0]
        under = lambda own, generic: tree.combine(own, tree.partition(generic, model.mask(generic, 1))[1])

        def empirical(generic):
            """Solver for a personal head on top of a fixed generic model."""

            def loss(own, x, y, key=None):
                return solver.loss(under(own, generic), x, y, key, shift=model.apply(generic, x, key))

            return solver.with_loss(loss)

        def train(context, models, row, data):
            count = classes.counts(data.train, num_classes)
            shift = self.balance * jnp.log(jnp.maximum(count, jnp.finfo(jnp.float32).tiny))
            balanced = solver.with_loss(functools.partial(solver.loss, shift=shift))

            def gradient(params, memory, batch):
                generic, own = params
                slope = jax.grad(balanced.mean_loss)(generic, batch(0).of_model(0))
                loss, of_own = jax.value_and_grad(empirical(generic).mean_loss)(own, batch(0).of_model(1))
                return loss, beside.Pair(slope, of_own), memory

            models, row, loss, _ = beside.descend(problem, context, models, row, data.train, gradient)
            return models, row, loss[None]

        def row(key, client, models):
            own = head(problem.init_model(key, client))
            return beside.Row(OwnModel(own, solver.optimizer.init(own)), problem.kept_optimizers(models))

        def apply(models, own, x):
            generic = tree.first(models)
            return model.apply(generic, x) + model.apply(under(own, generic), x)

        def adapt(context, models, data):
            init_key, train_key = jax.random.split(context.key)
            objective, own = empirical(tree.first(models)).mean_loss, head(model.init(init_key))
            context = context._replace(key=train_key)
            return Prediction(inputs=problem.alone(context, own, data, rounds=problem.rounds, objective=objective))

        return averaging(
            problem,
            train=train,
            row=row,
            predict=lambda context, models, row, data: Prediction(inputs=row.own.model),
            apply=apply,
            adapt=adapt,
            ledger=Ledger(gradients=2, unaccounted="a client's class counts, which balance its loss"),
            report=Report(scored="the global model with each client's personal head"),
        )
