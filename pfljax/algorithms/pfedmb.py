"""pFedMB: every layer a mixture of B shared branches, with each client's own weights.

Mori, Yoshiyama, Ryo, Teranishi, "Personalized federated learning with multi-branch architecture" (2022, Algorithm 1).

    W_l = sum_b alpha_{b,l} W_{b,l}                                                                            (Eq. 1)
    A round: client i of the cohort receives all branches W;
    l. 19: alpha^i takes E epochs of SGD on f_i(W, alpha) with W as received;                                  (Eq. 3)
    l. 20: W^i takes E epochs of SGD on f_i(W, alpha^i) with alpha^i as it is now;                             (Eq. 4)
    l. 10: W_{l,b} <- sum_i n_i alpha_{l,b}^i W_{l,b}^i / sum_j n_j alpha_{l,b}^j, or without alpha.      (Eq. 5 or 6)
    Client i predicts with W and alpha^i.

Departures from the paper: the mean is over the cohort (as l. 5-7 and 10 are read together). The paper does not say how
alpha stays on the simplex: by a softmax of its logits, or by projecting every step (BUILD_NOTES.md compares them). A
branch to which nobody gives weight stays as it is. A layer's normalization gets branches with it. alpha's rate is the
same in all rounds. Newcomers learn alpha for as many rounds as a run has, with W as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import branches
from pfljax.core import tree
from pfljax.core.method import knob, method
from pfljax.core.types import Algorithm, Array, ClientOutput, Ledger, Predictor, Report, State
from pfljax.local.problem import Problem

OF_ALPHA = 1  # of a client's key for a round: the mini-batches of alpha


@method(keeps="its weights of the branches", travels="B branches of every layer, both ways; its weights up")
@dataclasses.dataclass(frozen=True)
class PFedMB:
    """pFedMB (Mori et al., 2022): every layer a mixture of B shared branches, with each client's own weights."""

    branches: int = knob(5, at_least=1, help="B; 1 is FedAvg")
    alpha_rate: float = knob(0.1, above=0, help="eta_alpha, the rate of alpha's SGD")
    simplex: Literal["projection", "softmax"] = knob("projection", help="how alpha stays on the simplex")
    averaging: Literal["alpha", "plain"] = knob("alpha", help="average the branches by alpha (Eq. 5) or not (Eq. 6)")
    per_layer: bool = knob(True, help="a vector alpha for each layer; no: one for all layers, as in Section 5.2")

    def build(self, problem: Problem) -> Algorithm:
        model, num = problem.model, self.branches
        alpha_of, learn_alpha, raw_start = self._alpha(problem)

        def init(key, clients):
            shared = tree.stack_one(problem._replace(common_init=False).init_models(key, num))
            kept = problem.optimizer_rows(shared, problem.num_clients)
            return State((), shared, (), {"raw": tree.repeat(raw_start[None], problem.num_clients), "optimizer": kept})

        def client_update(context, models, row, data):
            key, shared = jax.random.fold_in(context.key, OF_ALPHA), tree.first(models)
            raw = learn_alpha(key, row["raw"], shared, data.train, context.round)  # l. 19
            alpha = alpha_of(raw)
            loss = lambda own, x, y, key=None: problem.solver.loss(branches.mix(model, alpha, own), x, y, key)
            trainer = problem._replace(solver=problem.solver._replace(loss=loss))
            models, optimizer, losses = trainer.fit_models(context, models, row["optimizer"], data.train)  # l. 20
            size = data.train.size.astype(jnp.float32)
            weight = size * (alpha if self.averaging == "alpha" else jnp.ones_like(alpha))
            upload = {"model": branches.scale(model, weight, tree.first(models)), "weight": weight}
            row = {"raw": raw, "optimizer": optimizer}
            return ClientOutput(row, tree.stack_one(upload), {"loss": losses[0]}, (size > 0)[None])

        def server_update(key, state, aggregate):
            total, weight = (tree.first(aggregate.upload[name]) for name in ("model", "weight"))
            mean = branches.scale(model, 1 / jnp.where(weight > 0, weight, 1), total)  # l. 10
            kept = branches.scale(model, (weight <= 0).astype(jnp.float32), tree.first(state.models))
            return state._replace(models=tree.stack_one(tree.add(mean, kept))), {}

        def predictor(key, state, clients):
            return Predictor.own(branches.mix(model, alpha_of(state.clients["raw"]), tree.first(state.models)))

        def adapt(key, state, clients):
            def personal(key, shared, data):
                step = lambda n, raw: learn_alpha(jax.random.fold_in(key, n), raw, shared, data.train, n)
                return branches.mix(model, alpha_of(jax.lax.fori_loop(0, problem.rounds, step, raw_start)), shared)

            return Predictor.own(problem.personalize(key, state.models, clients, personal))

        def weights_of_branches(state):
            weights = alpha_of(state.clients["raw"])
            index = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (weights.shape[0], num))
            return {"index": index, "weights": weights.mean(axis=1), "alpha": weights}

        scored = "each client's mixture of the branches"
        return Algorithm(
            init=init,
            client_update=client_update,
            server_update=server_update,
            predictor=predictor,
            adapt=adapt,
            topology="shared",
            ledger=Ledger(gradients=1, passes=2),
            report=Report(scored=scored, collaboration=weights_of_branches, topology="shared"),
        )

    def _alpha(self, problem: Problem):
        """alpha out of what is learned, its local SGD (Eq. 3), and its start."""
        model, solver, softmax = problem.model, problem.solver, self.simplex == "softmax"
        alpha_of = jax.nn.softmax if softmax else lambda raw: raw
        shape = (len(model.layers) if self.per_layer else 1, self.branches)
        start = jnp.full(shape, 0.0 if softmax else 1 / self.branches, jnp.float32)
        descent = optax.with_extra_args_support(optax.sgd(self.alpha_rate))
        descent = descent if softmax else branches.projected(problem.plan, descent)

        def learn(key, raw: Array, shared, split, number) -> Array:
            mixed = lambda raw: branches.mix(model, alpha_of(raw), shared)
            loss = lambda raw, x, y, key=None: solver.loss(mixed(raw), x, y, key)
            own = solver._replace(loss=loss, optimizer=descent)
            return own.fit(key, raw, descent.init(raw), split, round_number=number)[0]

        return alpha_of, learn, start
