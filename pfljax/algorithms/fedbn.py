"""FedBN: everything is averaged but normalization layers, of which each client keeps its own.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local batch normalization" (ICLR 2021,
Algorithm 1).

    A round: client k receives theta, all parameters outside of normalization layers, and trains them together with its
    own normalizations phi_k on D_k; phi_k stays, with its running statistics; theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: the mean is weighted by n_k (the paper counts clients alike); normalizations of every kind
stay, not those by batches alone. A model without any is trained as by FedAvg, and the run says so. Newcomers train
normalizations of their own beside theta, for as many rounds as a run has.
"""

from __future__ import annotations

import dataclasses

import jax

from pfljax.algorithms.common.averaging import averaging, sharing_layers
from pfljax.core import tree
from pfljax.core.method import method
from pfljax.core.types import Algorithm, Report
from pfljax.local.problem import Problem


@method(keeps="its normalization layers", travels="everything but normalization layers, both ways")
@dataclasses.dataclass(frozen=True)
class FedBN:
    """FedBN (Li et al., 2021): everything is averaged but normalization layers."""

    def build(self, problem: Problem) -> Algorithm:
        own = problem.model.normalization
        count = sum(jax.tree.leaves(own(problem.model.network.shapes)))
        if not count:
            facts = (("normalization", "none in this model, so it is trained as in FedAvg"),)
            scored = "the global model, since it has no normalization that a client could keep"
            return averaging(problem, report=Report(scored=scored, facts=facts))
        facts = (("arrays of normalization layers, which stay", count),)
        report = Report(scored="the shared model with each client's own normalization layers", facts=facts)
        return sharing_layers(problem, lambda params: tree.complement(own(params)), report=report)
