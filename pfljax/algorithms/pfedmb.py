"""pFedMB: every layer a mixture of B shared branches, with each client's own weights.

Mori, Yoshiyama, Ryo, Teranishi, "Personalized federated learning with multi-branch architecture" (2022, Algorithm 1).

    W_l = sum_b alpha_{b,l} W_{b,l}                                                                            (Eq. 1)
    A round: client i of the cohort receives all branches W;
    l. 19: alpha^i takes E epochs of SGD on f_i(W, alpha) with W as received;                                  (Eq. 3)
    l. 20: W^i takes E epochs of SGD on f_i(W, alpha^i) with alpha^i as it is now;                             (Eq. 4)
    l. 10: W_{l,b} <- sum_i n_i alpha_{l,b}^i W_{l,b}^i / sum_j n_j alpha_{l,b}^j, or without alpha.      (Eq. 5 or 6)
    Client i predicts with W and alpha^i.

Departures from the paper: the mean is over the cohort (as l. 5-7 and 10 are read together). How alpha stays on the
simplex is not said: by a softmax of its logits, or by projecting every step (BUILD_NOTES.md compares them). A branch
to which nobody gives weight stays as it is. What normalizes a layer gets branches with it. alpha's rate is the same in
all rounds. Newcomers learn alpha for as many rounds as a run has, with W as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import aggregation, branches
from pfljax.core import tree
from pfljax.core.types import Algorithm, Array, ClientOutput, Predictor, State, UsageError
from pfljax.local.problem import Problem

OF_ALPHA = 1  # of a client's key for a round: the mini-batches of alpha


@dataclasses.dataclass(frozen=True)
class PFedMBConfig:
    """pFedMB's knobs.

    Attributes:
        branches: B; 1 is FedAvg
        alpha_rate: eta_alpha, of alpha's SGD
        simplex: how alpha stays on the simplex
        averaging: of the branches by alpha (Eq. 5), or plain (Eq. 6)
        per_layer: a vector alpha for each layer; no: one for all layers, as in Section 5.2
    """

    branches: int = 5
    alpha_rate: float = 0.1
    simplex: Literal["projection", "softmax"] = "projection"
    averaging: Literal["alpha", "plain"] = "alpha"
    per_layer: bool = True

    def __post_init__(self):
        if self.branches < 1:
            raise UsageError(f"--pfedmb.branches={self.branches}: accepted: 1 or more")
        if not self.alpha_rate > 0:
            raise UsageError(f"--pfedmb.alpha_rate={self.alpha_rate}: accepted: above 0")


def pfedmb(problem: Problem, config: PFedMBConfig) -> Algorithm:
    """pFedMB."""
    model, num = problem.model, config.branches
    softmax = config.simplex == "softmax"
    alpha_of = jax.nn.softmax if softmax else lambda raw: raw
    raw_start = jnp.full((len(model.layers) if config.per_layer else 1, num), 0.0 if softmax else 1 / num, jnp.float32)
    descent = optax.with_extra_args_support(optax.sgd(config.alpha_rate))
    descent = descent if softmax else branches.projected(problem.plan, descent)

    def learn_alpha(key, raw: Array, shared, split, number) -> Array:
        loss = lambda raw, x, y: problem.solver.loss(branches.mix(model, alpha_of(raw), shared), x, y)
        solver = problem.solver._replace(loss=loss, optimizer=descent)
        return solver.fit(key, raw, descent.init(raw), split, round_number=number)[0]

    def init(key, clients):
        shared = tree.stack_one(problem._replace(common_init=False).init_models(key, num))
        kept = problem.optimizer_rows(shared, problem.num_clients)
        return State((), shared, (), {"raw": tree.repeat(raw_start[None], problem.num_clients), "optimizer": kept})

    def download(key, state, cohort):
        return aggregation.all_models(cohort.ids.shape[0])

    def work(turn, models, row, shard):
        shared = jax.tree.map(lambda leaf: leaf[0], models)
        raw = learn_alpha(jax.random.fold_in(turn.key, OF_ALPHA), row["raw"], shared, shard.train, turn.round)  # l. 19
        alpha = alpha_of(raw)
        loss = lambda own, x, y: problem.solver.loss(branches.mix(model, alpha, own), x, y)
        trainer = problem._replace(solver=problem.solver._replace(loss=loss))
        models, optimizer, losses = trainer.fit_models(turn, models, row["optimizer"], shard.train)  # l. 20
        size = shard.train.size.astype(jnp.float32)
        weight = size * (alpha if config.averaging == "alpha" else jnp.ones_like(alpha))
        own = jax.tree.map(lambda leaf: leaf[0], models)
        upload = tree.stack_one({"model": branches.scale(model, weight, own), "weight": weight})
        return ClientOutput({"raw": raw, "optimizer": optimizer}, upload, {"loss": losses[0]}, (size > 0)[None])

    def update(key, state, returned):
        total, weight = (jax.tree.map(lambda leaf: leaf[0], returned.upload[name]) for name in ("model", "weight"))
        mean = branches.scale(model, 1 / jnp.where(weight > 0, weight, 1), total)  # l. 10
        old = jax.tree.map(lambda leaf: leaf[0], state.models)
        kept = branches.scale(model, (weight <= 0).astype(jnp.float32), old)
        return state._replace(models=tree.stack_one(tree.add(mean, kept))), {}

    def predictor(key, state, clients):
        shared = jax.tree.map(lambda leaf: leaf[0], state.models)
        return Predictor.own(branches.mix(model, alpha_of(state.clients["raw"]), shared))

    def adapt(key, state, clients):
        def personal(key, shared, shard):
            step = lambda number, raw: learn_alpha(jax.random.fold_in(key, number), raw, shared, shard.train, number)
            return branches.mix(model, alpha_of(jax.lax.fori_loop(0, problem.rounds, step, raw_start)), shared)

        return Predictor.own(problem.personalize(key, state.models, clients, personal))

    def weights_of_branches(state):
        weights = alpha_of(state.clients["raw"])
        index = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (weights.shape[0], num))
        return {"index": index, "weights": weights.mean(axis=1), "alpha": weights}

    scored = "each client's mixture of the branches"
    algorithm = Algorithm(init, download, work, update, predictor, adapt, "shared", scored, passes=2)
    return algorithm._replace(collaboration=("shared", weights_of_branches))
