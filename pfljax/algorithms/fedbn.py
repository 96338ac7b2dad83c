"""FedBN: averages everything except normalization layers, which each client keeps to itself.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local batch normalization" (ICLR 2021,
Algorithm 1).

    A round: client k receives theta, all parameters outside normalization layers, and trains them together with its
    own normalization layers phi_k on D_k; phi_k and its running statistics stay;
    theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: The mean is weighted by n_k (the paper weights clients equally). Normalization layers of
every kind stay with the client, not only batch normalization. A model without any is trained as in FedAvg, and the run
says so. Newcomers train their own normalization layers with theta fixed, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses

import jax

from pfljax.algorithms.common.global_model import averaging
from pfljax.algorithms.common.layers import sharing_layers
from pfljax.contract import tree
from pfljax.contract.types import Algorithm, MethodReport, Params, PyTree
from pfljax.local.problem import Problem
from pfljax.settings.method import method


@method(
    keeps="its normalization layers", travels="everything except normalization layers, both ways"
)
@dataclasses.dataclass(frozen=True)
class FedBN:
    """FedBN (Li et al., 2021): averages everything except normalization layers.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedBN()
        FedBN()
    """

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        num_arrays = sum(jax.tree.leaves(model.normalization(model.network.shapes)))
        if num_arrays == 0:
            report = MethodReport(
                scored="the global model, which has no normalization layers",
                facts=(("normalization", "none in this model, so training is FedAvg"),),
            )
            return averaging(problem, report=report)

        def shared(params: Params) -> PyTree:
            """theta: everything outside normalization layers."""
            return tree.complement(model.normalization(params))

        report = MethodReport(
            scored="the shared model with each client's own normalization layers",
            facts=(("arrays of normalization layers kept by clients", num_arrays),),
        )
        return sharing_layers(problem, shared, report=report)
