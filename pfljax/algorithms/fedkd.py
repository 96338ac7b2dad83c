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
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import aggregation, beside, classes, distillation, low_rank, updates
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Ledger, PyTree
from pfljax.local.problem import Problem

LEAST = 0.01  # of the divisor


class Row(NamedTuple):
    """The mentor beside the mentee's optimizer, W_k (F of the mentee, F of the mentor), and its optimizer."""

    models: beside.Row
    projection: Array
    optimizer: PyTree


@method(keeps="its mentor model", travels="the mentee model down, the leading singular vectors of its update up")
@dataclasses.dataclass(frozen=True)
class FedKD:
    """FedKD (Wu et al., 2022): a personal mentor and a shared, compressed mentee distill into each other."""

    strength: float = knob(
        1.0, at_least=0, help="factor of what mentor and mentee learn from each other; 0: Local beside FedAvg"
    )
    energy: float = knob(
        0.95, above=0, at_most=1, grid=(0.9, 0.95), help="T in the first round, share of an update's energy; 1: all"
    )
    last_energy: float = knob(0.98, above=0, at_most=1, grid=(0.98, 1.0), help="T in the last round")

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "fedkd")
        solver, server = problem.solver, problem.of_server
        widths = classes.num_features(server), classes.num_features(problem)
        of_mentor, of_mentee = objectives(problem, self.strength)

        def energy(number):
            return self.energy + (self.last_energy - self.energy) * jnp.minimum((number + 1) / problem.rounds, 1)

        def compressed(update, number):
            found, floats = leading(server.solver.trained(update)[0], energy(number))
            return tree.combine(found, update), floats

        def client_update(context, models, row, data):
            def gradient(pair, memory, batch):
                both = pair.own, memory[0]
                loss, (slope, of_projection) = jax.value_and_grad(of_mentor(pair.shared))(both, batch(0).of_model(1))
                slopes = beside.Pair(jax.grad(of_mentee(*both))(pair.shared, batch(0).of_model(0)), slope)
                moved, state = solver.optimizer.update(of_projection, memory[1], memory[0], round_number=context.round)
                return loss, slopes, (optax.apply_updates(memory[0], moved), state)

            memory = row.projection, row.optimizer
            trained, kept, loss, memory = beside.descend(
                problem, context, models, row.models, data.train, gradient, memory
            )
            update, floats = compressed(updates.added(server.solver, models, trained), context.round)
            upload, sent = aggregation.weighted(update, data.train.size)
            return ClientOutput(Row(kept, *memory), upload, {"loss": loss, "floats": floats}, sent)

        def server_update(key, state, aggregate):
            update, _ = compressed(aggregation.mean(aggregate), state.round)
            models = updates.moved(server.solver, state.models, update, aggregate.upload["weight"] > 0)
            return state._replace(models=models), {"upload_share": aggregate.report["floats"].mean()}

        def row(key, client, models):
            projection = jnp.eye(*widths)
            own = beside.first_row(problem)(key, client, models)
            return Row(own, projection, solver.optimizer.init(projection))

        def adapt(context, models, data):
            objective = of_mentor(tree.first(models))
            return problem.newcomer(
                context, models, data, lambda mentor, batch: objective((mentor, jnp.eye(*widths)), batch)
            )

        functions = {"client_update": client_update, "server_update": server_update, "averages": True}
        own = lambda row: row.models.own.model
        return averaging(server, row=row, own=own, adapt=adapt, ledger=Ledger(gradients=2), **functions)


def objectives(problem: Problem, strength: Array | float) -> tuple[Callable, Callable]:
    """The mean losses of (mentor, W_k) given a mentee, and of a mentee given the mentor and W_k."""
    server = problem.of_server

    def losses(mentor, mentee, projection, x, y, *key):
        """Of mentor and mentee: cross entropies (B,), logits, and the distance (B,) of their features."""
        both = (problem, mentor), (server, mentee)
        h_v, h_w = (each.model.features(params, x, *key) for each, params in both)
        far = problem.model.over_places(jnp.square(h_v - h_w @ projection).mean(axis=-1), y)
        logits = [each.model.apply(params, x, *key) for each, params in both]
        return [each.solver.loss(params, x, y, *key) for each, params in both], logits, far

    def adaptive(task, other, teacher, student, far, y):
        """The losses (B,) of a student that learns from labels and from the other model, whose features are far."""
        known = jax.lax.stop_gradient(jnp.maximum(task + other, LEAST))
        return task + strength * (distillation.divergence(problem, teacher, student, y) + far) / known

    def of_mentor(mentee):
        def loss(params, x, y, *key):
            (c_v, c_w), (v, w), far = losses(params[0], mentee, params[1], x, y, *key)
            return adaptive(c_v, c_w, w, v, far, y)

        return problem.solver.with_loss(loss).mean_loss

    def of_mentee(mentor, projection):
        def loss(mentee, x, y, *key):
            (c_v, c_w), (v, w), far = losses(mentor, mentee, projection, x, y, *key)
            return adaptive(c_w, c_v, v, w, far, y)

        return server.solver.with_loss(loss).mean_loss

    return of_mentor, of_mentee


def leading(update: PyTree, energy: Array) -> tuple[PyTree, Array]:
    """An update (J, ...) with the leading singular values of its matrices, and the share () of its size that it takes.

    A matrix (inputs, outputs) with r of its singular values takes r (inputs + outputs + 1) numbers.
    """

    def one(leaf):
        if leaf.ndim < 3:
            return leaf, leaf.size
        matrices = leaf.reshape(leaf.shape[0], -1, leaf.shape[-1])
        size, wide = sum(matrices.shape[1:]) + 1, matrices.shape[1] < matrices.shape[2]
        tall = jnp.swapaxes(matrices, 1, 2) if wide else matrices
        squares, v = low_rank.directions(tall)
        total = jnp.flip(jnp.cumsum(jnp.flip(squares, 1), axis=1), 1)  # of a square and all larger ones
        kept = total - squares <= energy * total[:, :1]
        found = (tall @ (v * kept[:, None])) @ jnp.swapaxes(v, 1, 2)
        return (jnp.swapaxes(found, 1, 2) if wide else found).reshape(leaf.shape), kept.sum() * size

    leaves, form = jax.tree.flatten(update)
    found, sizes = zip(*map(one, leaves), strict=True)
    return jax.tree.unflatten(form, found), jnp.asarray(sum(sizes) / sum(leaf.size for leaf in leaves), jnp.float32)
