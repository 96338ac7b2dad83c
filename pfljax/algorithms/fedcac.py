"""FedCAC: clients share non-critical parameters with everyone, critical ones with those who have similar ones.

Wu, Liu, Niu, Zhu, Tang, "Bold but cautious: unlocking the potential of personalized federated learning through
cautiously aggressive collaboration" (ICCV 2023).

    A round: client k receives u_k and trains it to w_k; its critical parameters M_k are, in each array, the share tau
    with the largest |(w_k - u_k) w_k|;  O_kj = 1 - |M_k - M_j|_1 / (2 |M_k|) is their overlap;
    w <- sum_k n_k w_k / sum_k n_k;  c_k <- the mean of w_j over k and all j with O_kj >= T, where
    T = mean O + r / (beta R) (max O - mean O) after r of R rounds;
    u_k <- c_k where M_k, w elsewhere.  Client k predicts with w_k.

Departures from the paper: The authors' code scores u_k, before local training (`predict=received`). beta is a share of
the rounds, not a number of them. The server finds M_k, since it knows u_k and w_k. Parameters that did not move are not
critical, nor are batch statistics. Overlaps, means and w are those of the cohort; other clients keep their u_k.
Newcomers train from the mean of all u_k, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.one_each import start_for_each
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, Prediction, Report, Start
from pfljax.local.problem import Problem

SLACK = 1e-4  # of comparisons, so that ties do not depend on rounding


@method(keeps="its model", travels="a mixture of models down, its own up")
@dataclasses.dataclass(frozen=True)
class FedCAC:
    """FedCAC (Wu et al., 2023): critical parameters are shared only with clients that have similar ones."""

    tau: float = knob(
        0.5, at_least=0, at_most=1, grid=(0.1, 0.3, 0.5, 0.7), help="share of critical parameters; 0: FedAvg's models"
    )
    beta: float = knob(
        0.34, above=0, grid=(0.2, 0.34, 1.0), help="share of the rounds after which critical parameters stay private"
    )

    predict: Literal["trained", "received"] = knob(
        "trained", help="predict with the model that the client has trained, or with the one that it receives next"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver, num = problem.solver, problem.num_clients

        def server_update(key, state, aggregate):
            trained, sizes = aggregate.upload["model"], aggregate.upload["weight"]
            own, received = solver.trained(trained, state.models)
            critical = jax.tree.map(lambda w, u: largest(jnp.abs((w - u) * w), self.tau), own, received)
            progress = (state.round + 1) / (self.beta * problem.rounds)
            products = problem.plan.gram(jax.tree.map(jnp.float32, critical))
            partners = similar(products, (sizes[:, None] > 0) & (sizes > 0), progress) | jnp.eye(num, dtype=bool)
            customized = problem.plan.mix(partners / partners.sum(axis=1, keepdims=True), own)
            mean = tree.mix(sizes / jnp.maximum(sizes.sum(), 1), trained)
            models = jax.tree.map(jnp.where, critical, customized, solver.trained(mean)[0])
            models = tree.combine(models, tree.repeat(tree.stack_one(mean), num))
            models = tree.where((aggregate.count > 0) & (sizes.sum() > 0), models, state.models)
            return state._replace(models=models), {"partners": partners.sum() / num - 1}

        start = lambda key, clients: Start(models=tree.repeat(problem.init_models(key, 1), num))
        functions: dict[str, Any] = {"start": start, "server_update": server_update}
        if self.predict == "received":
            functions["predict"] = lambda context, models, row, data: Prediction(models)
            functions["report"] = Report("the model that each client receives, before it trains it")
        return start_for_each(problem, **functions)


def largest(values: Array, share: Array | float) -> Array:
    """Which of a row's values (K, ...) are its largest ones, a share of them rounded to a number, and above 0."""
    rows = values.reshape(len(values), -1)
    number = jnp.rint(share * rows.shape[1]).astype(jnp.int32)
    least = jnp.take(-jnp.sort(-rows, axis=1), jnp.maximum(number - 1, 0), axis=1)
    return (values >= (1 - SLACK) * tree.per_row(least, values)) & (values > 0) & (number > 0)


def similar(products: Array, pairs: Array, progress: Array) -> Array:
    """(K, K) bool: which pairs overlap enough, given the inner products (K, K) of their critical parameters."""
    size = jnp.diagonal(products)
    overlap = 1 - (size[:, None] + size - 2 * products) / (2 * jnp.maximum(size[:, None], 1))
    pairs &= ~jnp.eye(len(size), dtype=bool)
    mean = jnp.where(pairs, overlap, 0).sum() / jnp.maximum(pairs.sum(), 1)
    return pairs & (overlap >= mean + progress * (jnp.where(pairs, overlap, mean).max() - mean) - SLACK)
