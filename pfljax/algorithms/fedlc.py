"""FedLC: FedAvg whose clients lower the logits of rare classes in their loss.

Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated learning with label distribution skew via logits calibration" (ICML 2022).

    A round: client k receives theta and takes local steps on the mean cross entropy of  g_c - tau n_kc^(-1/4),
    with logits g and n_kc examples of class c;  theta <- sum_k n_k theta_k / sum_k n_k.  Clients predict with g.

Departures from the paper: The paper's loss leaves the true class out of the softmax's denominator, so that it has no
lower bound; here it is the cross entropy. A class without examples counts as 1e-8 examples, which takes it out of the
softmax unless tau is small.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pfljax.algorithms.common import classes
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Ledger,
    Mode,
    Params,
    PyTree,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

LEAST_COUNT = 1e-8  # what a class without examples counts as


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedLC:
    """FedLC (Zhang et al., 2022): FedAvg whose clients lower the logits of rare classes in their loss.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedLC(tau=0.5)
        FedLC(tau=0.5)
    """

    tau: float = hyperparameter(
        1.0, at_least=0, grid=(0.1, 0.5, 1.0, 2.0), help="factor of n_kc^(-1/4); 0 is FedAvg"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver
        num_classes = classes.required(problem, "fedlc")

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            # -tau n_kc^(-1/4)
            count = classes.counts(data.train, num_classes)
            shift = -self.tau * jnp.maximum(count, LEAST_COUNT) ** -0.25

            def calibrated_loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                """The cross entropy of  g_c - tau n_kc^(-1/4)."""
                return solver.loss(params, x, y, mode, shift=shift)

            return problem.with_loss(calibrated_loss).fit(context, models, data.train)

        text = "a client's class counts, which calibrate its loss"
        return averaging(problem, train=train, ledger=Ledger(gradients=1, unaccounted=text))
