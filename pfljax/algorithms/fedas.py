"""FedAS: received bodies are aligned with each client's features, and clients weigh by their Fisher information.

Yang, Huang, Ye, "FedAS: bridging inconsistency in personalized federated learning" (CVPR 2024).

    A round: client k receives the body theta; for each class c, P_kc is the mean of its examples' features under its
    own last body theta_k; `alignment_epochs` epochs of steps from theta on the mean of |f(x) - P_ky|^2 / F give theta'
    (parameter alignment); theta_k and the head phi_k <- local training from theta' and phi_k;
    F_k is the mean over its examples of the squared norm of the gradient of log p(y | x) under (theta_k, phi_k);
    theta <- sum_k F_k theta_k / sum_k F_k (client synchronization).  Client k predicts with (theta_k, phi_k).

Departures from the paper: The alignment is a mean over the examples of a mini-batch; the authors' code adds up the
means of the classes in it, so that rare classes count as much as others and more classes take longer steps. F_k is a
mean over examples; the authors' code adds up the squared norms of mini-batches' gradients, so that F_k also grows with
their number, and with n_k. Its alignment has a fixed learning rate of 0.01; ours has the solver's. In a client's first
round, whose body is not trained yet, nothing is aligned. Batch statistics are weighted like the body. Newcomers train
their own head on the shared body, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes
from pfljax.algorithms.common.global_model import averaging
from pfljax.algorithms.common.layers import base_layers
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Mode,
    Params,
    Prediction,
    PyTree,
    Split,
    Trained,
)
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem
from pfljax.local.solver import TrainState, joined
from pfljax.settings.method import hyperparameter, method

ALIGNMENT = 0xA5  # folded into a client's key for a round: the mini-batches of the alignment
UNACCOUNTED = "class means that bodies are aligned with, and Fisher information, both without noise"


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        model: (theta_k, phi_k).
        is_trained: () bool, whether it has trained them before.
    """

    model: Params
    is_trained: Array


@method(keeps="its model, of which the head is personal", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class FedAS:
    """FedAS (Yang et al., 2024): bodies aligned with clients' features and weighted by Fisher information.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedAS(weights="size")
        FedAS(alignment_epochs=1, weights='size')
    """

    alignment_epochs: int = hyperparameter(
        1,
        at_least=0,
        help="number of epochs in which a received body is aligned; 0: none",
        former="epochs",
    )
    weights: Literal["fisher", "size"] = hyperparameter(
        "fisher",
        help="weight clients by Fisher information or by n_k, which without alignment is FedPer",
    )

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "fedas", per_position=False)
        is_body = base_layers(problem, 1)

        # ---- The client.

        def first_row(key: Key, client: Array) -> Row:
            return Row(problem.init_model(key, client), jnp.zeros((), bool))

        def train(context: ClientContext, body: Params, row: Row, data: ClientData) -> Trained:
            # theta as received, and phi_k
            context, body = problem.whole(context, body)
            start = tree.combine(tree.first(body), row.model)
            # theta', aligned with the features under the client's own last body (not at first)
            if self.alignment_epochs > 0:
                aligned = align(
                    problem,
                    context,
                    start,
                    row.model,
                    data.train,
                    part=is_body(start),
                    epochs=self.alignment_epochs,
                )
                start = tree.where(row.is_trained, aligned, start)

            # theta_k and phi_k <- local training from theta' and phi_k
            trained = problem.fit(context, tree.stack_one(start), data.train)
            model = tree.first(trained.models)
            new_body, _ = tree.partition(trained.models, is_body(trained.models))
            # F_k
            weight = data.train.size
            if self.weights == "fisher":
                weight = fisher_trace(problem, model, data.train)

            row = Row(model, row.is_trained | (data.train.size > 0))
            return trained._replace(models=new_body, row=row, weight=weight)

        # ---- What a client predicts with.

        def own_model(row: Row) -> Params:
            return row.model

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train their own head on the shared body."""
            init_key, train_key = jax.random.split(context.key)
            start = tree.combine(tree.first(models), problem.model.init(init_key))
            head_problem = problem.part(tree.complement(is_body(start)))
            context = context._replace(key=train_key)
            return Prediction.single(head_problem.train_newcomer(context, data, start=start))

        return averaging(
            problem,
            shared=is_body,
            train=train,
            first_row=first_row,
            own_model=own_model,
            adapt=adapt,
            ledger=Ledger(
                gradients=1,
                passes=1 + problem.passes(self.alignment_epochs),
                unaccounted=UNACCOUNTED,
            ),
        )


def align(
    problem: Problem,
    context: ClientContext,
    start: Params,
    personal: Params,
    split: Split,
    part: PyTree,
    epochs: int,
) -> Params:
    """A model (...) after training toward the class means of the features under the client's own model.

    Args:
        problem: The problem of the method.
        context: The client's context.
        start: The received body and the client's head.
        own: The client's own last model.
        split: Its training data.
        part: A tree of bools like the model: the body, which is trained.
        epochs: Number of epochs.
    """
    model = problem.model

    # P_kc, the means of features under theta_k
    totals = classes.feature_sums(problem, personal, split, model.output_shape[-1])
    means = classes.means(totals.sums, totals.counts)

    def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
        """|f(x) - P_ky|^2 / F."""
        features = model.features(params, x, mode)
        return jnp.square(features - means[y]).mean(axis=-1)

    solver = problem.solver.with_loss(loss).part(part).with_epochs(epochs)
    params, statistics = solver.without_statistics(start)

    # A new optimizer. A schedule of learning rates goes on with the client's number of steps.
    opt_state = solver.optimizer.init(params)
    if context.optimizer is not None:
        counts = tree.first(context.optimizer.state)
        if problem.keep_optimizer:
            counts = problem.solver.lasting(counts, params)
        opt_state = solver.resumed(params, counts)

    key = jax.random.fold_in(context.key, ALIGNMENT)
    state = TrainState(params, statistics, opt_state)
    state, _ = solver.fit(key, state, split, round_number=context.round)
    return state.whole


def fisher_trace(problem: Problem, model: Params, split: Split) -> Array:
    """() mean over a client's examples of the squared norm of the gradient of log p(y | x)."""
    solver = problem.solver
    params, statistics = solver.without_statistics(model)

    def squared_norm(x: PyTree, y: Array) -> Array:
        """Of one example, without an axis of examples."""
        x, y = tree.stack_one((x, y))

        def loss(params: Params) -> Array:
            return solver.loss(joined(params, statistics), x, y).sum()

        gradient = jax.grad(loss)(params)
        return tree.inner(gradient, gradient)

    def sum_block(x: PyTree, y: Array, mask: Array) -> Array:
        x, y = masked(x, y, mask)
        squares = problem.plan.over_models(squared_norm, x, y)
        return jnp.where(mask, squares, 0).sum()

    return sum_over_examples(sum_block, split) / jnp.maximum(split.size, 1)
