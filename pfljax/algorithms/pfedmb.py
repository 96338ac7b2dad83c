"""pFedMB: every layer is a mixture of B shared branches, with each client's own weights.

Mori, Yoshiyama, Ryo, Teranishi, "Personalized federated learning with multi-branch architecture" (2022, Algorithm 1).

    W_l = sum_b alpha_{b,l} W_{b,l}                                                                            (Eq. 1)
    A round: client i of the cohort receives all branches W;
    l. 19: alpha^i takes E epochs of SGD on f_i(W, alpha) with W as received;                                  (Eq. 3)
    l. 20: W^i takes E epochs of SGD on f_i(W, alpha^i) with the new alpha^i;                                  (Eq. 4)
    l. 10: W_{l,b} <- sum_i n_i alpha_{l,b}^i W_{l,b}^i / sum_j n_j alpha_{l,b}^j, or without alpha.      (Eq. 5 or 6)
    Client i predicts with W and alpha^i. Fine-tuning before evaluation repeats lines 19 and 20 for its own epochs,
    from what client i received and keeps: at equal alpha the mixed layers then move at about eta / B, as in a round.

Departures from the paper: The mean is over the cohort (we read l. 5-7 and 10 together). The paper does not say how
alpha stays on the simplex: here by a softmax of its logits, or by projecting every step (BUILD_NOTES.md compares them).
A branch to which no client gives weight stays as it is. A layer's normalization is branched with it. alpha's learning
rate is the same in all rounds. Newcomers learn alpha for as many rounds as the run has, with W fixed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import branches
from pfljax.algorithms.common.projection import projected
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientOutput,
    First,
    Ledger,
    Params,
    Prediction,
    PyTree,
    Report,
    Start,
)
from pfljax.local.problem import Problem

OF_ALPHA = 1  # folded into a client's key for a round: the mini-batches for alpha


class Row(NamedTuple):
    """What alpha is computed from (L, B), and the optimizer of the branches, if it is kept."""

    raw: Array
    optimizer: PyTree


@method(keeps="its branch weights", travels="B branches of every layer, both ways; its weights up")
@dataclasses.dataclass(frozen=True)
class PFedMB:
    """pFedMB (Mori et al., 2022): every layer is a mixture of B shared branches, with each client's own weights."""

    branches: int = knob(5, at_least=1, at_most=1000, grid=(2, 3, 5, 10), help="B, number of branches; 1 is FedAvg")
    alpha_rate: float = knob(0.1, above=0, grid=(0.03, 0.1, 0.3, 1.0), help="eta_alpha, learning rate of alpha")
    simplex: Literal["projection", "softmax"] = knob("projection", help="how alpha stays on the simplex")
    averaging: Literal["alpha", "plain"] = knob("alpha", help="average branches with alpha (Eq. 5) or without (Eq. 6)")
    per_layer: bool = knob(True, help="one vector alpha per layer; no: one for all layers, as in Section 5.2")

    def build(self, problem: Problem) -> Algorithm:
        num = self.branches
        alpha_of, learn_alpha, raw_start = self._alpha(problem)
        client_step = self._client_step(problem)

        def start(key, clients):
            return Start((), tree.stack_one(problem._replace(common_init=False).init_models(key, num)))

        def first_row(key, client, start):
            return First(Row(raw_start, problem.kept_optimizers(start.models)))

        def client_update(context, models, row, data):
            trained, row, loss = client_step(context, models, row, data.train)
            alpha, size = alpha_of(row.raw), data.train.size.astype(jnp.float32)
            weight = size * (alpha if self.averaging == "alpha" else jnp.ones_like(alpha))
            upload = {"model": branches.scale(problem, weight, tree.first(trained)), "weight": weight}
            return ClientOutput(row, tree.stack_one(upload), {"loss": loss}, (size > 0)[None])

        def server_update(key, state, aggregate):
            total, weight = (tree.first(aggregate.upload[name]) for name in ("model", "weight"))
            mean = branches.scale(problem, 1 / jnp.where(weight > 0, weight, 1), total)  # l. 10
            kept = branches.scale(problem, (weight <= 0).astype(jnp.float32), tree.first(state.models))
            return state._replace(models=tree.stack_one(tree.add(mean, kept))), {}

        def newcomer(context, models, data):
            """The row of a client that learns alpha, with fixed branches."""
            learn = lambda n, raw: learn_alpha(
                jax.random.fold_in(context.key, n), raw, tree.first(models), data.train, n
            )
            return Row(jax.lax.fori_loop(0, problem.rounds, learn, raw_start), ())

        def weights_of_branches(context, row):
            alpha = alpha_of(row.raw)
            return {"index": jnp.arange(num, dtype=jnp.int32), "weights": alpha.mean(axis=0), "alpha": alpha}

        scored = "each client's mixture of the branches"
        algorithm = Algorithm(
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: self._mixed(problem, models, row),
            adapt=lambda context, models, data: self._mixed(problem, models, newcomer(context, models, data)),
            fine_tuned=lambda epochs: self._fine_tuned(problem, algorithm, newcomer, epochs),
            topology="shared",
            sends="sums",
            ledger=Ledger(gradients=1, passes=2),
            report=Report(scored=scored, collaboration=weights_of_branches, topology="shared"),
        )
        return algorithm

    def _mixed(self, problem: Problem, models: Params, row: Row) -> Prediction:
        """The mixture of the branches in a stack (1, B, ...), with a client's alpha."""
        alpha_of, _, _ = self._alpha(problem)
        return Prediction.one(branches.mix(problem, alpha_of(row.raw), tree.first(models)))

    def _fine_tuned(self, problem: Problem, algorithm: Algorithm, newcomer, epochs: int) -> Algorithm:
        """The algorithm whose clients train for `epochs` epochs before they predict."""
        trainer = problem.with_epochs(epochs)
        step = self._client_step(trainer)

        def tuned(context, models, row, data):
            key = jax.random.fold_in(context.key, problem.rounds)  # a newcomer's rounds take the numbers below
            context = context._replace(key=key, round=jnp.int32(0))
            row = row._replace(optimizer=trainer.kept_optimizers(models))
            trained, row, _ = step(context, models, row, data.train)
            return self._mixed(problem, trained, row)

        def adapt(context, models, data):
            return tuned(context, models, newcomer(context, models, data), data)

        return dataclasses.replace(algorithm, predict=tuned, adapt=adapt)

    def _client_step(self, problem: Problem):
        """A client's local training, alpha and then its branches: (models (1, ...), row, loss)."""
        alpha_of, learn_alpha, _ = self._alpha(problem)

        def step(context, models, row, split):
            key, shared = jax.random.fold_in(context.key, OF_ALPHA), tree.first(models)
            raw = learn_alpha(key, row.raw, shared, split, context.round)  # l. 19
            mixed = lambda own: branches.mix(problem, alpha_of(raw), own)
            loss = lambda own, x, y, key=None: problem.solver.loss(mixed(own), x, y, key)
            trainer = problem.with_loss(loss)
            models, optimizer, losses = trainer.fit(context, models, row.optimizer, split)  # l. 20
            return models, Row(raw, optimizer), losses[0]

        return step

    def _alpha(self, problem: Problem):
        """Functions for alpha: from learned parameters to alpha, local SGD (Eq. 3), and initial parameters."""
        model, solver, softmax = problem.model, problem.solver, self.simplex == "softmax"
        alpha_of = jax.nn.softmax if softmax else lambda raw: raw
        shape = (len(model.layers) if self.per_layer else 1, self.branches)
        start = jnp.full(shape, 0.0 if softmax else 1 / self.branches, jnp.float32)
        descent = optax.with_extra_args_support(optax.sgd(self.alpha_rate))
        on_simplex = lambda rows: problem.plan.over_rows(optax.projections.projection_simplex, rows)
        descent = descent if softmax else projected(descent, on_simplex)

        def learn(key, raw: Array, shared, split, number) -> Array:
            mixed = lambda raw: branches.mix(problem, alpha_of(raw), shared)
            loss = lambda raw, x, y, key=None: solver.loss(mixed(raw), x, y, key)
            own = solver.with_loss(loss)._replace(optimizer=descent)
            return own.fit(key, raw, descent.init(raw), split, round_number=number)[0]

        return alpha_of, learn, start
