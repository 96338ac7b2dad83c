"""FedAvg with an optimizer at the server: momentum (FedAvgM), and Adam, Yogi or Adagrad (FedAdam and its kin).

FedAvgM: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual classification"
(2019). FedAdam, FedYogi, FedAdagrad: Reddi et al., "Adaptive federated optimization" (ICLR 2021, Algorithm 2).

    A round: clients train theta to theta_k as in FedAvg; of d = theta - sum_k n_k theta_k / sum_k n_k the server takes
    for momentum  v <- momentum v + d;  theta <- theta - rate v;
    else  m <- 0.9 m + 0.1 d;  theta <- theta - rate m / (sqrt(v) + tau), with v = tau^2 at first and then
        v + d^2 (Adagrad),  v - 0.01 d^2 sign(v - d^2) (Yogi),  0.99 v + 0.01 d^2 (Adam).

Departures from the papers: none. Any optax optimizer at the server is a line: `averaging(problem, server=...)`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.averaging import averaging
from pfljax.core.types import Algorithm, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class FedAvgMConfig:
    """FedAvgM's knobs.

    Attributes:
        momentum: of the server; 0, with rate 1, is FedAvg
        rate: of the server; 1 - momentum lets it go as far as FedAvg in the long run
    """

    momentum: float = 0.9
    rate: float = 0.1

    def __post_init__(self):
        if not 0 <= self.momentum < 1:
            raise UsageError(f"--fedavgm.momentum={self.momentum}: accepted: 0 to below 1")
        if not self.rate > 0:
            raise UsageError(f"--fedavgm.rate={self.rate}: accepted: above 0")


@dataclasses.dataclass(frozen=True)
class FedAdamConfig:
    """FedAdam's knobs.

    Attributes:
        optimizer: of the server
        rate: of the server
        tau: added to the root of the second moment, how far the server adapts
    """

    optimizer: Literal["adam", "yogi", "adagrad"] = "adam"
    rate: float = 0.01
    tau: float = 0.001

    def __post_init__(self):
        for name, value in (("rate", self.rate), ("tau", self.tau)):
            if not value > 0:
                raise UsageError(f"--fedadam.{name}={value}: accepted: above 0")


def fedavgm(problem: Problem, config: FedAvgMConfig) -> Algorithm:
    """FedAvg with server momentum."""
    return averaging(problem, server=optax.sgd(config.rate, config.momentum or None))


def fedadam(problem: Problem, config: FedAdamConfig) -> Algorithm:
    """FedAvg with an adaptive server optimizer."""
    return averaging(problem, server=adaptive(config))


def adaptive(config: FedAdamConfig) -> optax.GradientTransformation:
    """Algorithm 2's step, which unlike optax's of these names corrects no bias and starts v at tau^2."""
    second = {
        "adagrad": lambda v, d: v + d**2,
        "yogi": lambda v, d: v - 0.01 * d**2 * jnp.sign(v - d**2),
        "adam": lambda v, d: 0.99 * v + 0.01 * d**2,
    }[config.optimizer]

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"m": zeros, "v": jax.tree.map(lambda leaf: leaf + config.tau**2, zeros)}

    def update(updates, state, params=None):
        m = jax.tree.map(lambda m, d: 0.9 * m + 0.1 * d, state["m"], updates)
        v = jax.tree.map(second, state["v"], updates)
        step = jax.tree.map(lambda m, v: -config.rate * m / (jnp.sqrt(v) + config.tau), m, v)
        return step, {"m": m, "v": v}

    return optax.GradientTransformation(init, update)
