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
step (docs/results/pfedmb-pairs.md compares them). A branch to which no client gives weight stays as
it is. A layer's normalization is branched with it. alpha's learning rate is the same in all rounds.
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
    ClientReport,
    First,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Mode,
    Params,
    Prediction,
    PyTree,
    Split,
    Start,
    State,
    Topology,
    Trained,
    Upload,
)
from pfljax.local.problem import Problem
from pfljax.local.solver import TrainState
from pfljax.settings.method import hyperparameter, method

# Folded into a client's key for a round: the mini-batches of l. 19, other ones than those of l. 20.
ALPHA_BATCHES = 1


@method(keeps="its branch weights", travels="B branches of every layer, both ways; its weights up")
@dataclasses.dataclass(frozen=True)
class PFedMB:
    """pFedMB (Mori et al., 2022): every layer is a mixture of B shared branches, by own weights.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.PFedMB(branches=3)
        PFedMB(branches=3, alpha_learning_rate=0.1, simplex='projection', averaging='alpha',
               per_layer=True)
    """

    branches: int = hyperparameter(
        5,
        at_least=1,
        at_most=1000,
        grid=(2, 3, 5, 10),
        help="B, number of branches; 1 is FedAvg",
    )
    alpha_learning_rate: float = hyperparameter(
        0.1,
        above=0,
        grid=(0.03, 0.1, 0.3, 1.0),
        help="eta_alpha, learning rate of alpha",
        former="alpha_rate",
    )
    simplex: Literal["projection", "softmax"] = hyperparameter(
        "projection", help="how alpha stays on the simplex"
    )
    averaging: Literal["alpha", "plain"] = hyperparameter(
        "alpha", help="average branches with alpha (Eq. 5) or without (Eq. 6)"
    )
    per_layer: bool = hyperparameter(
        True, help="one vector alpha per layer; no: one for all layers, as in Section 5.2"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        # ---- alpha (L, B), or (1, B) for all layers, and alpha's parameters, which clients train.

        def alpha_of(alpha_params: Array) -> Array:
            """alpha, from its parameters: its logits, or alpha itself."""
            return jax.nn.softmax(alpha_params) if self.simplex == "softmax" else alpha_params

        def project(alpha: Array) -> Array:
            """The nearest point of the simplex, for each layer."""
            return problem.plan.over_rows(optax.projections.projection_simplex, alpha)

        # The optimizer of alpha's parameters, and their first values, for equal weights
        alpha_optimizer = optax.with_extra_args_support(optax.sgd(self.alpha_learning_rate))
        first_value = 0.0
        if self.simplex == "projection":
            alpha_optimizer = projected(alpha_optimizer, project)
            first_value = 1 / self.branches
        num_vectors = len(problem.model.layers) if self.per_layer else 1
        first_alpha_params = jnp.full((num_vectors, self.branches), first_value, jnp.float32)

        # ---- The client. `local_problem` has the number of epochs, of a round or of fine-tuning.

        def client_loss(
            branches: Params, alpha_params: Array, x: PyTree, y: Array, mode: Mode
        ) -> Array:
            """f_i(W, alpha), an example at a time, for branches W (B, ...)."""
            mixed = mix(problem, alpha_of(alpha_params), branches)
            return solver.loss(mixed, x, y, mode)

        def train_alpha(
            local_problem: Problem,
            key: Key,
            alpha_params: Array,
            branches: Params,
            split: Split,
            round_number: Array,
        ) -> Array:
            """l. 19: E epochs of SGD on f_i(W, alpha) in alpha, W fixed  (Eq. 3)."""

            def loss(alpha_params: Array, x: PyTree, y: Array, mode: Mode = None) -> Array:
                return client_loss(branches, alpha_params, x, y, mode)

            alpha_solver = local_problem.solver.with_loss(loss)._replace(optimizer=alpha_optimizer)
            start = TrainState(
                params=alpha_params,
                statistics=None,
                opt_state=alpha_optimizer.init(alpha_params),
            )
            state, _ = alpha_solver.fit(key, start, split, round_number=round_number)
            return state.params

        def train_branches(
            local_problem: Problem,
            context: ClientContext,
            models: Params,
            alpha_params: Array,
            split: Split,
        ) -> Trained:
            """l. 20: E epochs of SGD on f_i(W, alpha) in W, alpha fixed  (Eq. 4)."""

            def loss(branches: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                return client_loss(branches, alpha_params, x, y, mode)

            return local_problem.with_loss(loss).fit(context, models, split)

        def local_learning(
            local_problem: Problem,
            context: ClientContext,
            models: Params,
            alpha_params: Array,
            split: Split,
        ) -> Trained:
            """l. 16 to 21: branches W^i (1, B, ...), and alpha^i's parameters as the row."""
            # l. 19: alpha^i, with W as received
            key = jax.random.fold_in(context.key, ALPHA_BATCHES)
            branches = tree.first(models)
            alpha_params = train_alpha(
                local_problem,
                key,
                alpha_params,
                branches,
                split,
                round_number=context.round,
            )

            # l. 20: W^i, with the new alpha^i
            trained = train_branches(local_problem, context, models, alpha_params, split)
            return trained._replace(row=alpha_params)

        def first_row(key: Key, client: Array, start: Start) -> First:
            """A client's row is the parameters of alpha^i."""
            return First(first_alpha_params)

        def client_update(
            context: ClientContext, models: Params, alpha_params: Array, data: ClientData
        ) -> ClientOutput:
            """The client receives all branches, as one model (1, B, ...)."""
            trained = local_learning(problem, context, models, alpha_params, data.train)

            # n_i alpha^i W^i and n_i alpha^i  (Eq. 5), or without alpha  (Eq. 6)
            size = data.train.size.astype(jnp.float32)
            alpha = alpha_of(trained.row)
            factor = alpha if self.averaging == "alpha" else jnp.ones_like(alpha)
            weight = size * factor
            weighted = scale(problem, weight, tree.first(trained.models))
            return ClientOutput(
                row=trained.row,
                upload=Upload(sums={"branches": tree.stack_one(weighted)}, count=weight[None]),
                report=ClientReport(trained.losses[0]),
                opt_state=trained.opt_state,
                sent=(size > 0)[None],
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            """Branches that start from different parameters, as one model (1, B, ...)."""
            different = problem._replace(common_init=False)
            branches = different.init_models(key, self.branches)
            return Start(models=tree.stack_one(branches))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # l. 10: W_{l,b} <- sum_i n_i alpha_{l,b}^i W_{l,b}^i / sum_j n_j alpha_{l,b}^j
            assert aggregate.upload.count is not None
            weight = aggregate.upload.count[0]
            total = tree.first(aggregate.upload.sums["branches"])
            divisor = jnp.where(weight > 0, weight, 1)
            mean = scale(problem, 1 / divisor, total)

            # A branch without weight, whose mean is 0, stays.
            is_unweighted = (weight <= 0).astype(jnp.float32)
            unweighted = scale(problem, is_unweighted, tree.first(state.models))
            branches = tree.add(mean, unweighted)
            return state.with_models(tree.stack_one(branches)), {}

        # ---- What a client predicts with.

        def mixture(models: Params, alpha_params: Array) -> Prediction:
            """W and alpha^i, mixed."""
            alpha = alpha_of(alpha_params)
            return Prediction.single(mix(problem, alpha, tree.first(models)))

        def train_newcomer_alpha(context: ClientContext, models: Params, data: ClientData) -> Array:
            """The parameters of a newcomer's alpha, which it trains for all rounds, W fixed."""
            branches = tree.first(models)

            def one_round(number: Array, alpha_params: Array) -> Array:
                key = jax.random.fold_in(context.key, number)
                return train_alpha(
                    problem, key, alpha_params, branches, data.train, round_number=number
                )

            return jax.lax.fori_loop(0, problem.rounds, one_round, first_alpha_params)

        def predict(
            context: ClientContext, models: Params, alpha_params: Array, data: ClientData
        ) -> Prediction:
            return mixture(models, alpha_params)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            alpha_params = train_newcomer_alpha(context, models, data)
            return mixture(models, alpha_params)

        def fine_tuned(epochs: int) -> Algorithm:
            """`algorithm`, see below, with `epochs` epochs of training before predictions."""
            local_problem = problem.with_epochs(epochs)

            def predict_tuned(
                context: ClientContext, models: Params, alpha_params: Array, data: ClientData
            ) -> Prediction:
                # Other mini-batches than in a newcomer's rounds, whose numbers are below R.
                key = jax.random.fold_in(context.key, problem.rounds)
                context = context._replace(key=key, round=jnp.int32(0), optimizer=None)
                trained = local_learning(local_problem, context, models, alpha_params, data.train)
                return mixture(trained.models, trained.row)

            def adapt_tuned(context: ClientContext, models: Params, data: ClientData) -> Prediction:
                alpha_params = train_newcomer_alpha(context, models, data)
                return predict_tuned(context, models, alpha_params, data)

            return dataclasses.replace(algorithm, predict=predict_tuned, adapt=adapt_tuned)

        # ---- Accounting.

        def collaboration(context: ClientContext, alpha_params: Array) -> dict[str, Array]:
            """Every branch with its weight, the mean over layers; and alpha."""
            alpha = alpha_of(alpha_params)
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
            ledger=Ledger(gradients=1, passes=2),  # l. 19 and l. 20
            report=MethodReport(
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
    problem: Problem,
    combine: Callable[[Array, Array], Array],
    weights: Array,
    branches: Params,
) -> PyTree:
    """combine(its layer's weights (B,), leaf (B, ...)) for every leaf of the branches.

    Batch statistics pass no gradient to the weights.

    Args:
        problem: The problem of the method.
        combine: (weights (B,), leaf (B, ...)) -> leaf.
        weights: (L, B), or (1, B) for all layers.
        branches: Leaves (B, ...).
    """
    model = problem.model

    def combine_leaf(layer: int, is_statistic: bool, leaf: Array) -> Array:
        row = layer if len(weights) > 1 else 0
        layer_weights = weights[row]
        if is_statistic:
            layer_weights = jax.lax.stop_gradient(layer_weights)
        return combine(layer_weights, leaf)

    layers = model.layer_numbers(branches)
    is_statistic = model.statistics(branches)
    if is_statistic is None:
        is_statistic = jax.tree.map(lambda _: False, branches)
    return jax.tree.map(combine_leaf, layers, is_statistic, branches)
