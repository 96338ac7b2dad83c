"""FedDPA: a global and a personal adapter, mixed for each input by its similarity to the client's examples.

Yang, Long, Shen, Jiang, Blumenstein, "Dual-personalizing adapter for federated foundation models" (NeurIPS 2024;
FedDPA-T).

    A round: client k receives the global adapter W and trains its own V_k beside it, the model being
    frozen + (W + V_k) / 2 and W fixed; it trains W alone to W_k, as in FedAvg; W <- sum_k n_k W_k / sum_k n_k.
    Client k predicts x with frozen + (1 - alpha) W + alpha V_k, where
    alpha(x) = weight x the mean cosine of phi(x) and phi(x_s) over `instances` of its examples x_s, and
    phi is the input of the last layer under V_k alone.

Departures from the paper: The authors' code averages the W_k uniformly; here, n_k weights them, as everywhere. W + V_k
is a sum of LoRA's products. Other trained parameters, such as a head, are mixed with the same weights. phi is the input
of the last dense layer; for sequences, its mean over positions. alpha is at least 0. FedDPA-F, which trains V_k after
training only, is not here. Newcomers train V as in a round, beside the final W, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import low_rank
from pfljax.algorithms.common.averaging import averaging
from pfljax.algorithms.common.beside import Row, first_row
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, Ledger, Params, Prediction, Report
from pfljax.local.batches import examples
from pfljax.local.problem import Problem

INSTANCES = 0xD9A  # folded into a client's key for a round: its examples that inputs are compared with


@method(name="feddpa", keeps="its adapter", travels="the global adapter, both ways")
@dataclasses.dataclass(frozen=True)
class FedDPA:
    """FedDPA (Yang et al., 2024): a global and a personal adapter, mixed for each input."""

    weight: float = knob(
        0.5, at_least=0, at_most=1, grid=(0.3, 0.5, 0.8), help="largest weight of the personal adapter; 0 is FedIT"
    )
    instances: int = knob(5, at_least=1, help="number of a client's examples that an input is compared with")

    def build(self, problem: Problem) -> Algorithm:
        low_rank.required(problem, "feddpa")
        both = lambda w, v, alpha: mixed(problem, w, v, alpha)

        def beside(w):
            return lambda v, batch: problem.solver.mean_loss(both(w, v, 0.5), batch.of_model(1))

        def train(context, models, row, data):
            own, loss = row.own.fit(problem, context, data.train, beside(tree.first(models)))
            trained, optimizer, _ = problem.fit(context, models, row.optimizer, data.train)
            return trained, Row(own, optimizer), loss[None]

        def compared(context, v, data):
            drawn = jax.random.uniform(jax.random.fold_in(context.key, INSTANCES), (problem.n_max,))
            real = jnp.where(jnp.arange(problem.n_max) < data.train.size, drawn, -1)
            order, places = jax.lax.top_k(real, min(self.instances, problem.n_max))
            weights = (order >= 0) / jnp.maximum((order >= 0).sum(), 1)
            found = directions(problem, v, examples(data.train, places)[0])
            return {"v": v, "direction": weights @ found}

        def apply(models, inputs, x):
            w, v = tree.first(models), inputs["v"]
            alpha = self.weight * jnp.maximum(directions(problem, v, x) @ inputs["direction"], 0)  # of unit vectors

            def logits_of(alpha, x):
                mixed = both(w, v, alpha)
                return problem.model.apply(mixed, tree.stack_one(x))[0]

            return problem.plan.over_models(logits_of, alpha, x)

        def predict(context, models, row, data):
            return Prediction(inputs=compared(context, row.own.model, data))

        def adapt(context, models, data):
            w = tree.first(models)
            v = problem.alone(context, w, data, rounds=problem.rounds, objective=beside(w))
            return Prediction(inputs=compared(context, v, data))

        functions = {"train": train, "row": first_row(problem), "predict": predict, "adapt": adapt, "apply": apply}
        ledger = Ledger(gradients=2, unaccounted="the stored examples that a client predicts with")
        report = Report(scored="the global and each client's own adapter, mixed for each input")
        return averaging(problem, **functions, ledger=ledger, report=report)


def mixed(problem: Problem, w: Params, v: Params, alpha: Array | float) -> Params:
    """The model with (1 - alpha) W + alpha V beside the frozen weights."""
    rest = jax.tree.map(lambda a, b: (1 - alpha) * a + alpha * b, w, v)
    return low_rank.side_by_side(problem, (w, low_rank.with_others(problem, v, rest)), (1 - alpha, alpha))


def directions(problem: Problem, params: Params, x: Array) -> Array:
    """(B, F) normalized features of inputs (B, *features)."""
    found = problem.model.features(params, x)
    found = found.reshape(found.shape[0], -1, found.shape[-1]).mean(axis=1)
    return found / jnp.maximum(jnp.linalg.norm(found, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
