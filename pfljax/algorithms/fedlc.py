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
import functools

import jax.numpy as jnp

from pfljax.algorithms.common import classes
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger
from pfljax.local.problem import Problem


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedLC:
    """FedLC (Zhang et al., 2022): FedAvg whose clients lower the logits of rare classes in their loss."""

    tau: float = knob(1.0, at_least=0, grid=(0.1, 0.5, 1.0, 2.0), help="factor of n_kc^(-1/4); 0 is FedAvg")

    def build(self, problem: Problem) -> Algorithm:
        solver, num_classes = problem.solver, classes.required(problem, "fedlc")

        def train(context, models, kept, data):
            count = classes.counts(data.train, num_classes)
            shift = -self.tau * jnp.maximum(count, 1e-8) ** -0.25
            calibrated = problem.with_loss(functools.partial(solver.loss, shift=shift))
            return calibrated.fit(context, models, kept, data.train)

        ledger = Ledger(gradients=1, unaccounted="a client's class counts, which calibrate its loss")
        return averaging(problem, train=train, ledger=ledger)
