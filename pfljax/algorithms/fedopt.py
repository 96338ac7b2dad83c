"""FedAvg with a server optimizer: momentum (FedAvgM), or Adam, Yogi and Adagrad (FedAdam and its variants).

FedAvgM: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual classification"
(2019). FedAdam, FedYogi, FedAdagrad: Reddi et al., "Adaptive federated optimization" (ICLR 2021, Algorithm 2).

    A round: clients train theta to theta_k as in FedAvg; for d = theta - sum_k n_k theta_k / sum_k n_k the server sets
    with momentum  v <- momentum v + d;  theta <- theta - rate v;
    else  m <- beta1 m + (1 - beta1) d;  theta <- theta - rate m / (sqrt(v) + tau), where v = tau^2 at first and then
        v + d^2 (Adagrad),  v - (1 - beta2) d^2 sign(v - d^2) (Yogi),  beta2 v + (1 - beta2) d^2 (Adam).

Departures from the papers: none. Any optax optimizer can run at the server: `averaging(problem, server_optimizer=...)`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, Array, Params, PyTree
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


class Moments(NamedTuple):
    """The server's moments of d.

    Attributes:
        m: First moments, a tree like the parameters.
        v: Second moments, likewise.
    """

    m: Params
    v: Params


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAvgM:
    """FedAvg with server momentum (Hsu et al., 2019): the server accumulates clients' updates.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedAvgM(server_momentum=0.7)
        FedAvgM(server_momentum=0.7, server_learning_rate=1.0)
    """

    server_momentum: float = hyperparameter(
        0.9,
        at_least=0,
        below=1,
        grid=(0.0, 0.7, 0.9, 0.97, 0.99),
        help="server momentum; 0 with server_learning_rate 1 is FedAvg",
        former="momentum",
    )
    server_learning_rate: float = hyperparameter(
        1.0,
        above=0,
        help="server learning rate; 1 - momentum moves as far as FedAvg in the long run",
        former="rate",
    )

    def build(self, problem: Problem) -> Algorithm:
        return averaging(
            problem, server_optimizer=optax.sgd(self.server_learning_rate, self.server_momentum)
        )


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAdam:
    """FedAdam, FedYogi, FedAdagrad (Reddi et al., 2021): an adaptive optimizer at the server.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedAdam(server_optimizer="yogi", server_learning_rate=0.03)
        FedAdam(server_optimizer='yogi', server_learning_rate=0.03, tau=0.001, beta1=None,
                beta2=None)
    """

    server_optimizer: Literal["adam", "yogi", "adagrad"] = hyperparameter(
        "adam", help="server optimizer", former="optimizer"
    )
    server_learning_rate: float = hyperparameter(
        0.01,
        above=0,
        grid=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        help="server learning rate",
        former="rate",
    )
    tau: float = hyperparameter(
        0.001,
        above=0,
        grid=(1e-5, 1e-4, 0.001, 0.01, 0.1),
        help="added to the root of the second moment; smaller values adapt more",
    )

    beta1: float | None = hyperparameter(
        None,
        at_least=0,
        below=1,
        help="decay of the first moment. Default: the paper's, 0 for adagrad, else 0.9",
    )
    beta2: float | None = hyperparameter(
        None,
        at_least=0,
        below=1,
        help="decay of adam's and yogi's second moment. Default: the paper's 0.99",
    )

    def build(self, problem: Problem) -> Algorithm:
        if self.server_optimizer == "adagrad" and self.beta2 is not None:
            text = "accepted only with adam and yogi; adagrad's second moment does not decay"
            raise ArgumentError("beta2", text)
        return averaging(problem, server_optimizer=self.adaptive())

    def adaptive(self) -> optax.GradientTransformation:
        """Algorithm 2's step; unlike optax's optimizers, it has no bias correction and starts v at tau^2."""
        default_beta1 = 0.0 if self.server_optimizer == "adagrad" else 0.9
        beta1 = default_beta1 if self.beta1 is None else self.beta1
        beta2 = 0.99 if self.beta2 is None else self.beta2

        def first_moment(m: Array, d: Array) -> Array:
            """m <- beta1 m + (1 - beta1) d."""
            return beta1 * m + (1 - beta1) * d

        def second_moment(v: Array, d: Array) -> Array:
            if self.server_optimizer == "adagrad":
                return v + d**2
            if self.server_optimizer == "yogi":
                return v - (1 - beta2) * d**2 * jnp.sign(v - d**2)
            return beta2 * v + (1 - beta2) * d**2

        def step(m: Array, v: Array) -> Array:
            """-rate m / (sqrt(v) + tau)."""
            return -self.server_learning_rate * m / (jnp.sqrt(v) + self.tau)

        def init(params: Params) -> Moments:
            m = jax.tree.map(jnp.zeros_like, params)
            v = jax.tree.map(lambda leaf: leaf + self.tau**2, m)
            return Moments(m, v)

        def update(updates: Params, state: PyTree, params: Params = None) -> tuple[Params, Moments]:
            m = jax.tree.map(first_moment, state.m, updates)
            v = jax.tree.map(second_moment, state.v, updates)
            return jax.tree.map(step, m, v), Moments(m, v)

        return optax.GradientTransformation(init, update)
