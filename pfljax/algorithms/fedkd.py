"""FedKD: a personal mentor and a shared mentee distill into each other; updates travel as leading singular vectors.

Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation" (Nature Communications
2022).

    h_v and h_w are the features, p_v and p_w the predictions and c_v and c_w the cross entropies of mentor and mentee.
    A round: client k receives the mentee w; each mini-batch is a step on the mean over its examples of
    for v_k and the matrix W_k:  c_v + (KL(p_w || p_v) + |h_v - W_k h_w|^2 / F) / (c_v + c_w), w_k fixed,
    for w_k:                     c_w + (KL(p_v || p_w) + |h_v - W_k h_w|^2 / F) / (c_v + c_w), v_k and W_k fixed;
    w <- w + C(sum_k n_k C(w_k - w) / sum_k n_k), where C keeps of each matrix the fewest leading singular values whose
    squares are more than a share T of the sum of all squares; T rises linearly over the rounds.
    Client k predicts with v_k.

Departures from the paper: The mentee has the mentor's architecture unless networks differ. Features are the input of
the last layer; losses of other layers and of attention maps are left out. The divisor c_v + c_w is a constant in
gradients and at least LEAST, since it goes to 0 as clients fit their examples. W_k starts as the identity and stays
with its client. The mean is weighted by n_k. Kernels of convolutions are matrices with a column for each output.
Traffic counts whole matrices, since ranks vary; the metric `upload_share` is the share of them that the clients'
factors take. Newcomers train a mentor as in a round, with the final mentee fixed and W the identity, for as many rounds
as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import classes, distillation, low_rank
from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
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
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Pair, Personal, Problem
from pfljax.local.solver import Slope, joined, slope
from pfljax.settings.method import hyperparameter, method

LEAST = 0.01  # of the divisor


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        mentor: v_k.
        projection: W_k (F of the mentee, F of the mentor).
    """

    mentor: Personal
    projection: Personal


class Mentor(NamedTuple):
    """What learns from a fixed mentee.

    Attributes:
        model: v_k.
        projection: W_k (F of the mentee, F of the mentor).
    """

    model: Params
    projection: Array


class Losses(NamedTuple):
    """Losses of a mini-batch's examples.

    Attributes:
        mentor_entropy: (B,) c_v.
        mentee_entropy: (B,) c_w.
        mentor_logits: (B, ..., C).
        mentee_logits: (B, ..., C).
        distance: (B,) |h_v - W_k h_w|^2 / F.
    """

    mentor_entropy: Array
    mentee_entropy: Array
    mentor_logits: Array
    mentee_logits: Array
    distance: Array


@method(
    keeps="its mentor model",
    travels="the mentee model down, the leading singular vectors of its update up",
)
@dataclasses.dataclass(frozen=True)
class FedKD:
    """FedKD (Wu et al., 2022): a personal mentor and a shared, compressed mentee distill into each other.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedKD(energy=0.9)
        FedKD(distillation=1.0, energy=0.9, last_energy=0.98)
    """

    distillation: float = hyperparameter(
        1.0,
        at_least=0,
        help="factor of what mentor and mentee learn from each other; 0: Local beside FedAvg",
        former="strength",
    )
    energy: float = hyperparameter(
        0.95,
        above=0,
        at_most=1,
        grid=(0.9, 0.95),
        help="T in the first round, share of an update's energy; 1: all",
    )
    last_energy: float = hyperparameter(
        0.98,
        above=0,
        at_most=1,
        grid=(0.98, 1.0),
        help="T in the last round",
    )

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "fedkd")
        solver = problem.solver
        mentee_problem = problem.server_problem
        identity = jnp.eye(classes.num_features(mentee_problem), classes.num_features(problem))

        def energy(round_number: Array) -> Array:
            """T, which rises linearly over the rounds."""
            share = jnp.minimum((round_number + 1) / problem.rounds, 1)
            return self.energy + (self.last_energy - self.energy) * share

        # ---- The client.

        def adaptive(
            entropy: Array, other_entropy: Array, divergence: Array, distance: Array
        ) -> Array:
            """c + (KL + |h_v - W_k h_w|^2 / F) / (c_v + c_w) of each example."""
            divisor = jnp.maximum(entropy + other_entropy, LEAST)
            divisor = jax.lax.stop_gradient(divisor)
            return entropy + self.distillation * (divergence + distance) / divisor

        def mentor_objective(mentor: Mentor, mentee: Params, batch: Batch) -> Array:
            """For v_k and W_k, w_k fixed."""

            def loss(mentor: Mentor, x: PyTree, y: Array, mode: Mode = None) -> Array:
                client_losses = losses(problem, mentor, mentee, x, y, mode)
                divergence = distillation.divergence(
                    problem, client_losses.mentee_logits, client_losses.mentor_logits, y
                )
                return adaptive(
                    client_losses.mentor_entropy,
                    client_losses.mentee_entropy,
                    divergence,
                    client_losses.distance,
                )

            return solver.with_loss(loss).mean_loss(mentor, batch)

        def mentee_objective(mentee: Params, mentor: Mentor, batch: Batch) -> Array:
            """For w_k, v_k and W_k fixed."""

            def loss(mentee: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                client_losses = losses(problem, mentor, mentee, x, y, mode)
                divergence = distillation.divergence(
                    problem, client_losses.mentor_logits, client_losses.mentee_logits, y
                )
                return adaptive(
                    client_losses.mentee_entropy,
                    client_losses.mentor_entropy,
                    divergence,
                    client_losses.distance,
                )

            return mentee_problem.solver.with_loss(loss).mean_loss(mentee, batch)

        def first_row(key: Key, client: Array) -> Row:
            return Row(problem.init_personal(key, client), problem.personal(identity))

        def train(context: ClientContext, models: Params, row: Row, data: ClientData) -> Trained:
            def direction(
                params: Pair, statistics: Pair, projection: Personal, batch: Batch
            ) -> tuple[Pair, Personal]:
                mentee = joined(params.shared, statistics.shared)
                mentor = Mentor(joined(params.personal, statistics.personal), projection.params)

                # For v_k and the matrix W_k, w_k fixed.
                def mentor_value(params: Params, statistics: Params, projection: Array) -> Array:
                    mentor = Mentor(joined(params, statistics), projection)
                    return mentor_objective(mentor, mentee, batch.for_model(1))

                mentor_gradients = jax.value_and_grad(mentor_value, argnums=(0, 1, 2))
                loss, gradients = mentor_gradients(
                    params.personal, statistics.personal, projection.params
                )
                gradient, change, projection_gradient = gradients
                mentor_slope = Slope(loss, gradient, change)

                # W_k has an optimizer of its own.
                update, opt_state = solver.optimizer.update(
                    projection_gradient,
                    projection.opt_state,
                    projection.params,
                    round_number=context.round,
                )
                new_projection = optax.apply_updates(projection.params, update)

                # For w_k, v_k and W_k fixed.
                def mentee_loss(params: Params, batch: Batch) -> Array:
                    return mentee_objective(params, mentor, batch)

                mentee_slope = slope(
                    mentee_loss, params.shared, statistics.shared, batch.for_model(0)
                )
                return Pair(mentee_slope, mentor_slope), Personal(new_projection, opt_state)

            trained, projection = problem.descend_pair(
                context, models, row.mentor, data.train, direction, memory=row.projection
            )

            # C(w_k - w)
            difference = tree.subtract(trained.models, models)
            update, upload_share = leading(difference, energy(context.round))
            return trained._replace(
                models=update,
                row=Row(trained.row, projection),
                report={"upload_share": upload_share},
            )

        # ---- The server.

        def server_step(received: Received, server: PyTree) -> ServerStep:
            # w <- w + C(sum_k n_k C(w_k - w) / sum_k n_k)
            update, _ = leading(tree.stack_one(received.update), energy(received.round))
            upload_share = received.report["upload_share"].mean()
            return ServerStep(tree.first(update), metrics={"upload_share": upload_share})

        # ---- What a client predicts with: v_k.

        def own_model(row: Row) -> Params:
            return row.mentor.params

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train a mentor, with the final mentee fixed and W the identity."""
            mentee = tree.first(models)

            def objective(params: Params, batch: Batch) -> Array:
                mentor = Mentor(joined(params, batch.statistics), identity)
                return mentor_objective(mentor, mentee, batch._replace(statistics=None))

            return Prediction.single(problem.train_newcomer(context, data, objective))

        return averaging(
            mentee_problem,
            train=train,
            ledger=Ledger(gradients=2),
            first_row=first_row,
            server_step=server_step,
            uploads="updates",
            own_model=own_model,
            adapt=adapt,
        )


def losses(
    problem: Problem, mentor: Mentor, mentee: Params, x: PyTree, y: Array, mode: Mode
) -> Losses:
    """The losses of a mini-batch's examples, from which the objectives are made."""
    mentor_model = problem.model
    mentee_model = problem.server_problem.model
    h_v = mentor_model.features(mentor.model, x, mode)
    h_w = mentee_model.features(mentee, x, mode)
    distances = jnp.square(h_v - h_w @ mentor.projection).mean(axis=-1)
    return Losses(
        mentor_entropy=problem.solver.loss(mentor.model, x, y, mode),
        mentee_entropy=problem.server_problem.solver.loss(mentee, x, y, mode),
        mentor_logits=mentor_model.apply(mentor.model, x, mode),
        mentee_logits=mentee_model.apply(mentee, x, mode),
        distance=mentor_model.mean_over_positions(distances, y),
    )


def leading(update: PyTree, energy: Array) -> tuple[PyTree, Array]:
    """C of an update (J, ...): the leading singular values of its matrices; and the share () of its size that travels.

    A matrix (inputs, outputs) with r of its singular values takes r (inputs + outputs + 1) numbers.
    """
    leaves, treedef = jax.tree.flatten(update)
    results = [leading_of_leaf(leaf, energy) for leaf in leaves]
    compressed = [result for result, _ in results]
    num_sent = sum(num for _, num in results)
    num_all = sum(leaf.size for leaf in leaves)
    share = jnp.asarray(num_sent / num_all, jnp.float32)
    return jax.tree.unflatten(treedef, compressed), share


def leading_of_leaf(leaf: Array, energy: Array) -> tuple[Array, Array | int]:
    """As `leading`, for one array (J, ...); and how many numbers travel. Vectors travel as they are."""
    if leaf.ndim < 3:
        return leaf, leaf.size

    # Matrices (J, inputs, outputs), turned so that they are tall.
    matrices = leaf.reshape(leaf.shape[0], -1, leaf.shape[-1])
    _, num_inputs, num_outputs = matrices.shape
    is_wide = num_inputs < num_outputs
    tall = jnp.swapaxes(matrices, 1, 2) if is_wide else matrices

    # The fewest leading singular values whose squares are more than a share of the sum of all.
    squares, v = low_rank.directions(tall)
    descending_sums = jnp.cumsum(jnp.flip(squares, 1), axis=1)
    total = jnp.flip(descending_sums, 1)  # of a square and all larger ones
    is_kept = total - squares <= energy * total[:, :1]

    truncated = (tall @ (v * is_kept[:, None])) @ jnp.swapaxes(v, 1, 2)
    truncated = jnp.swapaxes(truncated, 1, 2) if is_wide else truncated
    return truncated.reshape(leaf.shape), is_kept.sum() * (num_inputs + num_outputs + 1)
