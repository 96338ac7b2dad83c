"""pFedMB: every layer is a mixture of B shared branches, with each client's own weights.

Mori, Yoshiyama, Ryo, Teranishi, "Personalized federated learning with multi-branch architecture"
(2022, Algorithm 1).

    W_l = sum_b alpha_{b,l} W_{b,l}                                                        (Eq. 1)
    A round: client i of the cohort receives all branches W;
    l. 19: alpha^i takes E epochs of SGD on f_i(W, alpha) with W as received;              (Eq. 3)
    l. 20: W^i takes E epochs of SGD on f_i(W, alpha^i) with the new alpha^i;              (Eq. 4)
    l. 10: W_{l,b} <- sum_i n_i alpha_{l,b}^i W_{l,b}^i / sum_j n_j alpha_{l,b}^j,
        or without alpha.                                                             (Eq. 5 or 6)
    Client i predicts with W and alpha^i. Fine-tuning before evaluation repeats lines 19 and 20 for
    its own epochs, from what client i received and keeps: at equal alpha the mixed layers then move
    at about eta / B, as in a round.

Any model can be multi-branch: Eq. 1 gives an ordinary layer with mixed weights, so that its
parameters get a leading axis of B branches.

Departures from the paper: The mean is over the cohort (we read l. 5-7 and 10 together). The paper
does not say how alpha stays on the simplex: here by a softmax of its logits, or by projecting every
step (BUILD_NOTES.md compares them). A branch to which no client gives weight stays as it is. A
layer's normalization is branched with it. alpha's learning rate is the same in all rounds.
Newcomers learn alpha for as many rounds as the run has, with W fixed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.projection import projected
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    First,
    Key,
    Ledger,
    Metrics,
    Mode,
    Params,
    Prediction,
    PyTree,
    Report,
    Split,
    Start,
    State,
    Told,
    Topology,
    Trained,
    Upload,
)
from pfljax.local.problem import Problem
from pfljax.local.solver import TrainState
from pfljax.settings.method import knob, method

OF_ALPHA = 1  # folded into a client's key for a round: the mini-batches for alpha


@method(keeps="its branch weights", travels="B branches of every layer, both ways; its weights up")
@dataclasses.dataclass(frozen=True)
class PFedMB:
    """pFedMB (Mori et al., 2022): every layer is a mixture of B shared branches, by own weights."""

    branches: int = knob(
        5,
        at_least=1,
        at_most=1000,
        grid=(2, 3, 5, 10),
        help="B, number of branches; 1 is FedAvg",
    )
    alpha_rate: float = knob(
        0.1, above=0, grid=(0.03, 0.1, 0.3, 1.0), help="eta_alpha, learning rate of alpha"
    )
    simplex: Literal["projection", "softmax"] = knob(
        "projection", help="how alpha stays on the simplex"
    )
    averaging: Literal["alpha", "plain"] = knob(
        "alpha", help="average branches with alpha (Eq. 5) or without (Eq. 6)"
    )
    per_layer: bool = knob(
        True, help="one vector alpha per layer; no: one for all layers, as in Section 5.2"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        # ---- alpha (L, B), or (1, B) for all layers, and what a client keeps for it.

        def alpha_of(raw: Array) -> Array:
            """alpha of what is learned: its logits, or alpha itself."""
            return jax.nn.softmax(raw) if self.simplex == "softmax" else raw

        def project(raw: Array) -> Array:
            return problem.plan.over_rows(optax.projections.projection_simplex, raw)

        alpha_optimizer = optax.with_extra_args_support(optax.sgd(self.alpha_rate))
        first_value = 0.0
        if self.simplex == "projection":
            alpha_optimizer = projected(alpha_optimizer, project)
            first_value = 1 / self.branches
        num_vectors = len(problem.model.layers) if self.per_layer else 1
        first_raw = jnp.full((num_vectors, self.branches), first_value, jnp.float32)

        def learn_alpha(
            trainer: Problem, key: Key, raw: Array, branches: Params, split: Split, number: Array
        ) -> Array:
            """E epochs of SGD on f_i(W, alpha), W fixed  (Eq. 3)."""

            def loss(raw: Array, x: PyTree, y: Array, mode: Mode = None) -> Array:
                mixed = mix(problem, alpha_of(raw), branches)
                return solver.loss(mixed, x, y, mode)

            alpha_solver = trainer.solver.with_loss(loss)._replace(optimizer=alpha_optimizer)
            start = TrainState(raw, None, alpha_optimizer.init(raw))
            state, _ = alpha_solver.fit(key, start, split, round_number=number)
            return state.params

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            """A client's row is what its alpha is computed from."""
            return First(first_raw)

        def fit(
            trainer: Problem, context: ClientContext, models: Params, raw: Array, split: Split
        ) -> Trained:
            """The branches (1, B, ...) and the row after a client's work, with a trainer's epochs."""
            # l. 19: alpha^i, with W as received
            key = jax.random.fold_in(context.key, OF_ALPHA)
            raw = learn_alpha(trainer, key, raw, tree.first(models), split, context.round)

            # l. 20: W^i, with the new alpha^i
            def loss(branches: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                mixed = mix(problem, alpha_of(raw), branches)
                return solver.loss(mixed, x, y, mode)

            trained = trainer.with_loss(loss).fit(context, models, split)
            return trained._replace(row=raw)

        def client_update(
            context: ClientContext, models: Params, raw: Array, data: ClientData
        ) -> ClientOutput:
            trained = fit(problem, context, models, raw, data.train)

            # n_i alpha^i W^i and n_i alpha^i  (Eq. 5), or without alpha  (Eq. 6)
            size = data.train.size.astype(jnp.float32)
            alpha = alpha_of(trained.row)
            weight = size * (alpha if self.averaging == "alpha" else jnp.ones_like(alpha))
            weighted = scale(problem, weight, tree.first(trained.models))
            return ClientOutput(
                row=trained.row,
                upload=Upload(sums={"branches": tree.stack_one(weighted)}, count=weight[None]),
                told=Told(trained.losses[0]),
                opt_state=trained.opt_state,
                sent=(size > 0)[None],
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            """Branches that differ."""
            apart = problem._replace(common_init=False)
            return Start(models=tree.stack_one(apart.init_models(key, self.branches)))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # l. 10; a branch without weight stays.
            assert aggregate.upload.count is not None
            weight = aggregate.upload.count[0]
            total = tree.first(aggregate.upload.sums["branches"])
            mean = scale(problem, 1 / jnp.where(weight > 0, weight, 1), total)
            is_without = (weight <= 0).astype(jnp.float32)
            stays = scale(problem, is_without, tree.first(state.models))
            return state.with_models(tree.stack_one(tree.add(mean, stays))), {}

        # ---- What a client predicts with.

        def mixture(models: Params, raw: Array) -> Prediction:
            return Prediction.one(mix(problem, alpha_of(raw), tree.first(models)))

        def newcomer(context: ClientContext, models: Params, data: ClientData) -> Array:
            """The row of a newcomer, which learns alpha with W fixed."""
            branches = tree.first(models)

            def one_round(number: Array, raw: Array) -> Array:
                key = jax.random.fold_in(context.key, number)
                return learn_alpha(problem, key, raw, branches, data.train, number)

            return jax.lax.fori_loop(0, problem.rounds, one_round, first_raw)

        def predict(
            context: ClientContext, models: Params, raw: Array, data: ClientData
        ) -> Prediction:
            return mixture(models, raw)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            return mixture(models, newcomer(context, models, data))

        def fine_tuned(epochs: int) -> Algorithm:
            """The algorithm whose clients train for `epochs` epochs before they predict."""
            trainer = problem.with_epochs(epochs)

            def predict_tuned(
                context: ClientContext, models: Params, raw: Array, data: ClientData
            ) -> Prediction:
                # A newcomer's rounds take the numbers below.
                key = jax.random.fold_in(context.key, problem.rounds)
                context = context._replace(key=key, round=jnp.int32(0), optimizer=None)
                trained = fit(trainer, context, models, raw, data.train)
                return mixture(trained.models, trained.row)

            def adapt_tuned(context: ClientContext, models: Params, data: ClientData) -> Prediction:
                raw = newcomer(context, models, data)
                return predict_tuned(context, models, raw, data)

            return dataclasses.replace(algorithm, predict=predict_tuned, adapt=adapt_tuned)

        def collaboration(context: ClientContext, raw: Array) -> dict[str, Array]:
            alpha = alpha_of(raw)
            index = jnp.arange(self.branches, dtype=jnp.int32)
            return {"index": index, "weights": alpha.mean(axis=0), "alpha": alpha}

        algorithm = Algorithm(
            topology=Topology.SHARED,
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            adapt=adapt,
            fine_tuned=fine_tuned,
            ledger=Ledger(gradients=1, passes=2),
            report=Report(
                scored="each client's mixture of the branches",
                collaboration=collaboration,
                topology=Topology.SHARED,
            ),
            sends="sums",
        )
        return algorithm


# ---- Branches: a layer's parameters get a leading axis of B.


def mix(problem: Problem, alpha: Array, branches: Params) -> Params:
    """W_l = sum_b alpha_{b,l} W_{b,l} for leaves (B, ...)  (Eq. 1)."""

    def mix_leaf(weights: Array, leaf: Array) -> Array:
        return jnp.tensordot(weights, leaf, axes=1)

    return by_layer(problem, mix_leaf, alpha, branches)


def scale(problem: Problem, weights: Array, branches: Params) -> Params:
    """Every branch (B, ...) times its weight (L, B)."""

    def scale_leaf(weights: Array, leaf: Array) -> Array:
        return leaf * tree.per_row(weights, leaf)

    return by_layer(problem, scale_leaf, weights, branches)


def by_layer(
    problem: Problem, of_leaf: Callable[[Array, Array], Array], weights: Array, params: Params
) -> PyTree:
    """of_leaf(weights of its layer (B,), leaf) for every leaf.

    Batch statistics pass no gradient to the weights.

    Args:
        problem: The problem of the method.
        of_leaf: What is computed.
        weights: (L, B), or (1, B) for all layers.
        params: Leaves (B, ...).
    """
    model = problem.model

    def with_weights(number: int, is_statistic: bool, leaf: Array) -> Array:
        layer_weights = weights[number if len(weights) > 1 else 0]
        if is_statistic:
            layer_weights = jax.lax.stop_gradient(layer_weights)
        return of_leaf(layer_weights, leaf)

    numbers = model.layer_numbers(params)
    is_statistic = model.statistics(params) or jax.tree.map(lambda _: False, params)
    return jax.tree.map(with_weights, numbers, is_statistic, params)
