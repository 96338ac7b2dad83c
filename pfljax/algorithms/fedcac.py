"""FedCAC: clients share non-critical parameters with everyone, critical ones with those who have similar ones.

Wu, Liu, Niu, Zhu, Tang, "Bold but cautious: unlocking the potential of personalized federated
learning through cautiously aggressive collaboration" (ICCV 2023).

    A round: client k receives u_k and trains it to w_k;
    its critical parameters M_k are, in each array, the share tau with the largest |(w_k - u_k) w_k|;
    O_kj = 1 - |M_k - M_j|_1 / (2 |M_k|) is their overlap;
    w <- sum_k n_k w_k / sum_k n_k;
    c_k <- the mean of w_j over k and all j with O_kj >= T, where
        T = mean O + r / (beta R) (max O - mean O) after r of R rounds;
    u_k <- c_k where M_k, w elsewhere.  Client k predicts with w_k.

Departures from the paper: The authors' code scores u_k, before local training (`predict=received`).
beta is a share of the rounds, not a number of them. The server finds M_k, since it knows u_k and
w_k. Parameters that did not move are not critical, nor are batch statistics. Overlaps, means and w
are those of the cohort; other clients keep their u_k. Newcomers train from the mean of all u_k, for
as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.one_each import start_for_each
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    MethodReport,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
)
from pfljax.local.problem import Problem
from pfljax.local.solver import joined
from pfljax.settings.method import hyperparameter, method

SLACK = 1e-4  # of comparisons, so that ties do not depend on rounding


@method(keeps="its model", travels="a mixture of models down, its own up")
@dataclasses.dataclass(frozen=True)
class FedCAC:
    """FedCAC (Wu et al., 2023): critical parameters are shared only with clients that have similar ones.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedCAC(tau=0.3)
        FedCAC(tau=0.3, beta=0.34, predict='trained')
    """

    tau: float = hyperparameter(
        0.5,
        at_least=0,
        at_most=1,
        grid=(0.1, 0.3, 0.5, 0.7),
        help="share of critical parameters; 0: FedAvg's models",
    )
    beta: float = hyperparameter(
        0.34,
        above=0,
        grid=(0.2, 0.34, 1.0),
        help="share of the rounds after which critical parameters stay private",
    )
    predict: Literal["trained", "received"] = hyperparameter(
        "trained",
        help="predict with the model that the client has trained, or with the one that it receives "
        "next",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_clients = problem.num_clients
        solver = problem.solver

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            initial = tree.stack_one(problem.init_global(key))
            return Start(models=tree.repeat(initial, num_clients))

        def critical_parameters(w: Array, u: Array) -> Array:
            """M_k of all clients in one array (K, ...): the share tau with the largest |(w_k - u_k) w_k|."""
            return largest(jnp.abs((w - u) * w), self.tau)

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            trained = aggregate.upload.update
            sizes = aggregate.upload.count
            assert sizes is not None
            params, _ = solver.without_statistics(trained)
            received, _ = solver.without_statistics(state.models)
            critical = jax.tree.map(critical_parameters, params, received)

            # w <- sum_k n_k w_k / sum_k n_k
            mean = tree.mix(sizes / jnp.maximum(sizes.sum(), 1), trained)
            mean_params, mean_statistics = solver.without_statistics(mean)

            # Who has O_kj >= T, after r of R rounds
            progress = (state.round + 1) / (self.beta * problem.rounds)
            products = problem.plan.gram(jax.tree.map(jnp.float32, critical))
            has_sent = sizes > 0
            pairs = has_sent[:, None] & has_sent
            partners = similar(products, pairs, progress) | jnp.eye(num_clients, dtype=bool)

            # c_k <- the mean of w_j over k and all those j
            weights = partners / partners.sum(axis=1, keepdims=True)
            customized = problem.plan.mix(weights, params)

            # u_k <- c_k where M_k, w elsewhere
            models = jax.tree.map(jnp.where, critical, customized, mean_params)
            statistics = tree.repeat(tree.stack_one(mean_statistics), num_clients)
            models = joined(models, statistics)
            moves = (aggregate.num_sent > 0) & (sizes.sum() > 0)
            models = tree.where(moves, models, state.models)
            return state.with_models(models), {"partners": partners.sum() / num_clients - 1}

        # ---- What a client predicts with.

        def predict_with_received(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            return Prediction(models)

        if self.predict == "received":
            predict = predict_with_received
            report = MethodReport("the model that each client receives, before it trains it")
        else:
            predict = None
            report = None
        return start_for_each(
            problem,
            start=start,
            server_update=server_update,
            predict=predict,
            report=report,
        )


def largest(values: Array, share: Array | float) -> Array:
    """Which of a row's values (K, ...) are its largest ones, a share of them rounded to a number, and above 0."""
    rows = values.reshape(len(values), -1)
    number = jnp.rint(share * rows.shape[1]).astype(jnp.int32)
    descending = -jnp.sort(-rows, axis=1)
    least = jnp.take(descending, jnp.maximum(number - 1, 0), axis=1)
    is_large = values >= (1 - SLACK) * tree.per_row(least, values)
    return is_large & (values > 0) & (number > 0)


def similar(products: Array, pairs: Array, progress: Array) -> Array:
    """(K, K) bool: which pairs have O_kj >= T.

    Args:
        products: (K, K) inner products of clients' critical parameters, |M_k| on the diagonal.
        pairs: (K, K) bool: the pairs that count.
        progress: () r / (beta R).
    """
    # O_kj = 1 - |M_k - M_j|_1 / (2 |M_k|)
    size = jnp.diagonal(products)
    distance = size[:, None] + size - 2 * products
    overlap = 1 - distance / (2 * jnp.maximum(size[:, None], 1))

    # T = mean O + r / (beta R) (max O - mean O)
    pairs = pairs & ~jnp.eye(len(size), dtype=bool)
    mean = jnp.where(pairs, overlap, 0).sum() / jnp.maximum(pairs.sum(), 1)
    most = jnp.where(pairs, overlap, mean).max()
    threshold = mean + progress * (most - mean)
    return pairs & (overlap >= threshold - SLACK)
