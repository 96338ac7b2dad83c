"""FedNTD: FedAvg whose clients keep the global model's ranking of the classes that an example does not have.

Lee, Jeong, Shin, Bae, Yun, "Preservation of the global knowledge by not-true distillation in federated learning"
(NeurIPS 2022).

    A round: client k receives theta and takes local steps on  l_k(theta_k) + beta l_NTD,  where for each example
        l_NTD = tau^2 KL(q(theta) || q(theta_k)),  q_c = exp(g_c / tau) / sum_{i != y} exp(g_i / tau) for c != y,
    with logits g;  theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: The factor tau^2 is that of the authors' code; it is 1 at the default tau. The global model's
logits are inference logits, without dropout and with running statistics. For a sequence, l_NTD is the mean over its
positions.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import classes
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger
from pfljax.local.problem import Problem

NEVER = -1e9  # logit of the true class; finite, since its probability 0 is multiplied by a log probability


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedNTD:
    """FedNTD (Lee et al., 2022): FedAvg with distillation of the global model over the classes that are not true."""

    beta: float = knob(1.0, at_least=0, grid=(0.1, 0.3, 1.0, 3.0), help="strength of the distillation; 0 is FedAvg")
    tau: float = knob(1.0, above=0, grid=(0.5, 1.0, 3.0), help="temperature of the distilled probabilities")

    def build(self, problem: Problem) -> Algorithm:
        model, solver, num_classes = problem.model, problem.solver, classes.required(problem, "fedntd")

        def distilling(received):
            """Adds the distillation to the loss of each example, so that private training clips its gradient too."""

            def loss(params, x, y, *key):
                true = jax.nn.one_hot(y, num_classes, dtype=bool)
                not_true = lambda logits: jax.nn.log_softmax(jnp.where(true, NEVER, logits / self.tau))
                ours, theirs = not_true(model.apply(params, x, *key)), not_true(model.apply(received, x))
                kept = optax.losses.kl_divergence_with_log_targets(ours, theirs)
                return solver.loss(params, x, y, *key) + self.beta * self.tau**2 * model.over_places(kept, y)

            return problem.with_loss(loss)

        def train(context, models, kept, data):
            return distilling(tree.first(models)).fit(context, models, kept, data.train)

        return averaging(problem, train=train, ledger=Ledger(gradients=1))
