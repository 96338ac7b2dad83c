"""FedAvg with an optimizer at the server: momentum (FedAvgM), and Adam, Yogi or Adagrad (FedAdam and its kin).

FedAvgM: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual classification"
(2019). FedAdam, FedYogi, FedAdagrad: Reddi et al., "Adaptive federated optimization" (ICLR 2021, Algorithm 2).

    A round: clients train theta to theta_k as in FedAvg; the server takes theta - sum_k n_k theta_k / sum_k n_k for a
    gradient and theta a step along it with its optimizer.

Departures from the papers: none. Any other optax optimizer is a line: `global_model.averaging(problem, server=...)`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import optax

from pfljax.global_model import averaging
from pfljax.solvers import Problem
from pfljax.types import Algorithm, UsageError


@dataclasses.dataclass(frozen=True)
class FedAvgMConfig:
    """FedAvgM's knobs.

    Attributes:
        momentum: of the server; 0 is FedAvg
        rate: of the server
    """

    momentum: float = 0.9
    rate: float = 1.0

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
    rate: float = 0.1
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
    server = {
        "adam": lambda: optax.adam(config.rate, b1=0.9, b2=0.99, eps=config.tau),
        "yogi": lambda: optax.yogi(config.rate, b1=0.9, b2=0.99, eps=config.tau),
        "adagrad": lambda: optax.adagrad(config.rate, initial_accumulator_value=0.0, eps=config.tau**2),
    }
    return averaging(problem, server=server[config.optimizer]())
