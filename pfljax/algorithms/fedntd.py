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
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
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

NEVER = (
    -1e9
)  # logit of the true class; finite, since its probability 0 is multiplied by a log probability


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedNTD:
    """FedNTD (Lee et al., 2022): FedAvg with distillation of the global model over the classes that are not true.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedNTD(distillation=0.3, temperature=3.0)
        FedNTD(distillation=0.3, temperature=3.0)
    """

    distillation: float = hyperparameter(
        1.0,
        at_least=0,
        grid=(0.1, 0.3, 1.0, 3.0),
        help="beta, weight of the distillation; 0 is FedAvg",
        former="beta",
    )
    temperature: float = hyperparameter(
        1.0,
        above=0,
        grid=(0.5, 1.0, 3.0),
        help="tau, temperature of the distilled probabilities",
        former="tau",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver
        num_classes = classes.required(problem, "fedntd")

        def not_true(logits: Array, y: Array) -> Array:
            """log q: log probabilities of the classes that are not true."""
            is_true = jax.nn.one_hot(y, num_classes, dtype=bool)
            return jax.nn.log_softmax(jnp.where(is_true, NEVER, logits / self.temperature))

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            _, whole = problem.whole(context, models)
            global_model = tree.first(whole)

            # In the loss of each example, so that private training clips this gradient, too.
            def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                """l_k(theta_k) + beta l_NTD,  where  l_NTD = tau^2 KL(q(theta) || q(theta_k))."""
                ours = not_true(model.apply(params, x, mode), y)
                theirs = not_true(model.apply(global_model, x), y)
                divergence = optax.losses.kl_divergence_with_log_targets(ours, theirs)
                distillation = self.temperature**2 * model.mean_over_positions(divergence, y)
                return solver.loss(params, x, y, mode) + self.distillation * distillation

            return problem.with_loss(loss).fit(context, models, data.train)

        return averaging(problem, train=train, ledger=Ledger(gradients=1))
