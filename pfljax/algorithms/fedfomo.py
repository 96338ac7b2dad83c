"""FedFomo: each client mixes the models that do well on its own validation data.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order model optimization" (ICLR 2021).

    At first P, the affinity matrix with rows p_i, is the identity.                              (Section 3.1)
    A round of client i, which holds its last trained model theta_i and start_i, the model theta_i was trained from:
    M of the active clients' models <- the highest in its row p_i, each of the M
        replaced by a random one with probability epsilon                                        (Section 3.1)
    w_n <- (L_i(start_i) - L_i(theta_n)) / |theta_n - start_i|, for these and its own            (Eq. 3)
    w*_n <- max(w_n, 0) / sum_n max(w_n, 0)                                                      (Eq. 13)
    start_i <- start_i + sum_n w*_n (theta_n - start_i), unchanged if no w_n is positive         (Eq. 5)
    theta_i <- E epochs of local training from start_i; uploaded
    p_i <- p_i + w                                                                               (Section 3.1)

L_i is the mean loss on client i's validation data. This file computes Eq. 3; all other lines are in
common/first_order.py, which FedFomo on averages (`fedfomo_average`) shares.

We score the start_i with which the next round would begin, computed
from all clients' newest models (as FedAvg's mean is) with epsilon 0. This is the personalized model before it is
trained on local data again, which would lead it away from validation targets that differ from the local ones.

Departures from the paper:
- epsilon falls by `epsilon_decay` per round (Appendix A.6) and applies to each of the M slots independently, as in the
  authors' code. M counts other clients only. The paper's n, 5 and 10, includes the client's own model: its code
  downloads 4 and 9 others.
- |.| is the L2 norm over all parameters (`norm=l1` matches the authors' code).
- With client sampling, clients download from the others of their cohort. In the authors' code they download from the
  last uploaders, and before the first round all clients train for an epoch (`available=uploaded`). That code also draws
  every cohort from the same seed, so the same clients take part in every round; we draw a new cohort each round.
- The authors' code adds w / |sum of w| to p_i (`scaled`); p_i's own entry starts at 0.1 there and at 1 here. Its
  candidates include the means of spectral clusters of the clients, and the mean of those means (`clusters`; in that
  code, the number of true groups). The weights of these means belong to no client and are left out of
  collaboration figures.
- The authors' code crops and flips validation images as it does training images. We validate on the images themselves.
- A client without validation examples continues from its own trained model.
- All models start from the same parameters (if `common_init` is set), so the first exchange gives no weights, and
  affinities first matter in the third.
- Newcomers start from the mean of all models and take one step of Eq. 3 and 5 over all of them, on their training data
  if none of them has validation data.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from pfljax.algorithms.common import first_order
from pfljax.contract.types import Algorithm, Array, Params, Split, Topology
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(
    keeps="the model it trains from, its affinities",
    travels="M others' models down, its own up",
    validates=True,
)
@dataclasses.dataclass(frozen=True)
class FedFomo(first_order.Hyperparameters):
    """FedFomo (Zhang et al., 2021): clients mix the individual models that do well on their validation data.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedFomo(neighbors=9)
        FedFomo(neighbors=9, epsilon=0.3, epsilon_decay=0.05, scaled=False, norm='l2',
                clusters=0, available='cohort')
    """

    norm: Literal["l2", "l1"] = hyperparameter(
        "l2", help="norm of the distance between models in the weights"
    )
    clusters: int = hyperparameter(
        0,
        at_least=0,
        help="number of client clusters whose means, and the mean of these, are candidates too; 0: none",
    )
    available: Literal["cohort", "uploaded"] = hyperparameter(
        "cohort",
        help="whose models are available with client sampling: the round's cohort's, or the last uploaders'",
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        def weigh(models: Params, start: Params, split: Split, index: Array) -> first_order.Weighed:
            """w_n <- (L_i(start_i) - L_i(theta_n)) / |theta_n - start_i|  (Eq. 3)."""

            def total_loss(model: Params) -> Array:
                return solver.total_loss(model, split)

            num_examples = jnp.maximum(split.size, 1)
            losses = problem.plan.over_models(total_loss, models) / num_examples
            baseline = total_loss(start) / num_examples
            distance = first_order.distances(problem, models, start, self.norm)
            weights = first_order.first_order_weights(losses, baseline, distance)
            return first_order.Weighed(index=index, models=models, weights=weights, start=start)

        # If all clients take part in every round, the cohort's models are the last uploads.
        is_sampled = problem.cohort_size < problem.num_clients
        form = first_order.Form(
            topology=Topology.PEERS,
            weigh=weigh,
            norm=self.norm,
            clusters=self.clusters,
            uploaded=is_sampled and self.available == "uploaded",
        )
        return first_order.rounds(problem, self, form)
