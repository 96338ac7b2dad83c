"""FedAS: received bodies are aligned with each client's features, and clients weigh by their Fisher information.

Yang, Huang, Ye, "FedAS: bridging inconsistency in personalized federated learning" (CVPR 2024).

    A round: client k receives the body theta; for each class c, P_kc is the mean of its examples' features under its
    own last body theta_k; `epochs` epochs of steps from theta on the mean of |f(x) - P_ky|^2 / F give theta'
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

from pfljax.algorithms.common import aggregation, classes
from pfljax.algorithms.common.layers import base_layers, sharing_layers
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientOutput,
    First,
    Ledger,
    Params,
    Prediction,
    PyTree,
    Report,
    Split,
)
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem

ALIGNMENT = 0xA5  # folded into a client's key for a round: the mini-batches of the alignment
UNACCOUNTED = "class means that bodies are aligned with, and Fisher information, both without noise"


class Row(NamedTuple):
    """The client's last model, whether it is trained, and its optimizer, if it is kept."""

    model: Params
    trained: Array
    optimizer: PyTree


@method(keeps="its model, of which the head is personal", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class FedAS:
    """FedAS (Yang et al., 2024): bodies aligned with clients' features and weighted by Fisher information."""

    epochs: int = knob(1, at_least=0, help="number of epochs in which a received body is aligned; 0: none")
    weights: Literal["fisher", "size"] = knob(
        "fisher", help="weight clients by Fisher information or by n_k, which without alignment is FedPer"
    )

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "fedas", places=False)
        body = base_layers(problem, 1)
        base = sharing_layers(problem, body, report=Report(scored="each client's own model"))

        def first_row(key, client, start):
            model = problem.init_model(key, client)
            return First(Row(model, jnp.zeros((), bool), problem.kept_optimizers(tree.stack_one(model))))

        def client_update(context, models, row, data):
            split, start = data.train, tree.combine(tree.first(models), row.model)
            if self.epochs:
                part = problem.part(body(start)).with_epochs(self.epochs)
                earlier = tree.first(row.optimizer)
                counts = problem.solver.lasting(earlier, start) if problem.keep_optimizer else earlier
                moved = aligned(part, context, start, row.model, split, counts)
                start = jax.tree.map(lambda new, old: jnp.where(row.trained, new, old), moved, start)
            trained, optimizer, losses = problem.fit(context, tree.stack_one(start), row.optimizer, split)
            row = Row(tree.first(trained), row.trained | (split.size > 0), optimizer)
            weight = fisher_trace(problem, row.model, split) if self.weights == "fisher" else split.size
            update = tree.subtract(tree.partition(trained, body(trained))[0], models)
            upload, sent = aggregation.weighted(update, weight)
            return ClientOutput(row, upload, {"loss": losses[0]}, sent)

        return dataclasses.replace(
            base,
            first_row=first_row,
            client_update=client_update,
            predict=lambda context, models, row, data: Prediction.one(row.model),
            ledger=Ledger(gradients=1, passes=1 + problem.passes(self.epochs), unaccounted=UNACCOUNTED),
        )


def aligned(
    problem: Problem, context: ClientContext, params: Params, own: Params, split: Split, counts: tuple
) -> Params:
    """A model after training toward the class means of the features of the client's own model.

    `counts` is what goes on of the client's optimizer, such as the count of steps of its schedule.
    """
    model, solver = problem.model, problem.solver
    found = classes.feature_sums(problem, own, split, model.output_shape[-1])
    means = classes.means(found["sums"], found["counts"])
    distance = lambda params, x, y, *key: jnp.square(model.features(params, x, *key) - means[y]).mean(axis=-1)
    key, optimizer = jax.random.fold_in(context.key, ALIGNMENT), solver.resumed(params, counts)
    return solver.with_loss(distance).fit(key, params, optimizer, split, round_number=context.round)[0]


def fisher_trace(problem: Problem, params: Params, split: Split) -> Array:
    """() mean over a client's examples of the squared norm of the gradient of an example's loss."""
    solver = problem.solver

    def one(x, y):
        x, y = tree.stack_one((x, y))
        slope = jax.grad(lambda params: solver.loss(params, x, y).sum())(params)
        return tree.inner(*solver.trained(slope, slope))

    def of_block(x, y, mask):
        return jnp.where(mask, problem.plan.over_models(one, *masked(x, y, mask)), 0).sum()

    return sum_over_examples(of_block, split) / jnp.maximum(split.size, 1)
