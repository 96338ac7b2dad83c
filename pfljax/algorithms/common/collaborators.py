"""How a client weighs others' models: by the posterior of its training losses, or as friends.

Training losses are near zero for every model that a client trains, its own or not, so they cannot tell whom to train.
A stranger's model has never trained on the client's examples: all n_k of them are held out for it. A friend's model
explains these examples better than no model does: it classifies most of them correctly, or its loss is far below the
bar, the lower one of an untrained model's loss and of the code length of the client's labels. Since models are
overconfident on examples that did not train them, their outputs are also divided by a few temperatures; the least loss
counts, without label smoothing and class weights. See docs/results/federico.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import by_loss, classes, neighbors
from pfljax.algorithms.common.neighbors import Candidates
from pfljax.contract.types import Array, ClientData, Params, Prediction, Split
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem

TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the outputs of models that a client evaluates
SHARE = 1 / 5  # of the bar; a model explains the client's examples if its loss is at least this much lower


class Posterior(NamedTuple):
    """FedeRiCo's line 15: the softmax of minus the tracked losses.

    Attributes:
        problem: The problem of the method.
        examples: Number of examples, at most n_k, that the likelihood counts as after the first pass.
        first_pass: Number of rounds in which a client can hold all candidates once.
    """

    problem: Problem
    examples: Array | float
    first_pass: int

    def scores(self, table: Candidates, bar: Array, rounds: Array, size: Array) -> Array:
        """(C,) logarithms of the candidates' weights, up to a constant."""
        tempered = jnp.minimum(self.examples, size) / jnp.maximum(size, 1)
        return neighbors.logits(table, jnp.where(rounds < self.first_pass, 1.0, tempered))

    def evaluate(self, bar: Array) -> None:
        """What evaluates a model on a client's examples, summed; None: the training loss."""

    def of_gradients(self, weights: Array) -> Array:
        """(J,) weights of the gradients for the held models, the client's own first."""
        return weights

    def of_newcomer(self, models: Params, data: ClientData, num_mixed: int) -> Prediction:
        """What a client unseen in training makes of N models."""
        return by_loss.posterior(self.problem, models, data, num_mixed, self.examples)


class Friends(NamedTuple):
    """The client's own model and its friends weigh alike; in regression, by their losses.

    Its methods are those of `Posterior`.

    Attributes:
        problem: The problem of the method.
        candidates: C, number of models whose losses a client tracks.
    """

    problem: Problem
    candidates: int

    def scores(self, table: Candidates, bar: Array, rounds: Array, size: Array) -> Array:
        """(C,) logarithms of the candidates' weights, up to a constant."""
        own = -table.tracked[:1] if self.problem.model.task == "regression" else jnp.zeros((1,))
        return jnp.concatenate([own, log_weights(self.problem, table.tracked[1:], bar, size)])

    def evaluate(self, bar: Array) -> Callable[[Params, Split], Array] | None:
        """What evaluates a model by its evidence against the bar; in regression, None: by the training loss."""
        return None if self.problem.model.task == "regression" else functools.partial(self._evidence, bar)

    def _evidence(self, bar: Array, params: Params, split: Split) -> Array:
        """A model's loss at the temperature of least loss, summed; the bar's, if it is less but explains too little.

        A model explains enough if its loss is `SHARE` of the bar below the bar, or if it classifies most of the n
        examples correctly: more than n/2 + sqrt(n log(N) / 2), which one that is right on half of all examples reaches
        with a probability of at most 1/N (Hoeffding's inequality).
        """
        model = self.problem.model

        def of_block(x, y, mask):
            outputs = model.apply(params, masked(x, y, mask)[0])
            losses = [model.losses_of(outputs / heat, y) for heat in TEMPERATURES]
            right = model.over_places(outputs.argmax(axis=-1) == y, y) if model.task == "classification" else 0
            return jnp.where(mask, jnp.stack(losses), 0).sum(axis=1), jnp.where(mask, right, 0).sum()

        totals, right = sum_over_examples(of_block, split)
        total, size = totals.min(), split.size
        most = right > size / 2 + jnp.sqrt(size / 2 * math.log(max(self.candidates - 1, 1)))
        enough = most | (total <= (1 - SHARE) * bar * size) | ~jnp.isfinite(bar)
        return jnp.where(enough, total, jnp.maximum(total, bar * size))

    def of_gradients(self, weights: Array) -> Array:
        """(J,): the gradient of the client's own model always counts in full."""
        return jnp.where(jnp.arange(len(weights)) == 0, 1.0, weights)

    def of_newcomer(self, models: Params, data: ClientData, num_mixed: int) -> Prediction:
        """Its friends among N models; without any, and in regression, the posterior of all its examples."""
        size = data.train.size
        bar = classes.label_code(self.problem, data.train)
        totals = by_loss.losses_of(self.problem, models, data.train, self.evaluate(bar)) * size
        found = log_weights(self.problem, totals, bar, size)
        found = jnp.where(jnp.isneginf(found).all(), -totals, found)
        order = jnp.lexsort((totals, -found))[:num_mixed]
        return Prediction(index=order.astype(jnp.int32), weights=jax.nn.softmax(found[order]))


Rule = Posterior | Friends


def rule(problem: Problem, candidates: int, neighbors: int, examples: float | None) -> Rule:
    """Returns how clients weigh C candidates, of which they hold M neighbors at a time; with examples, by posterior."""
    if examples is None:
        return Friends(problem, candidates)
    return Posterior(problem, examples, -(-(candidates - 1) // max(neighbors, 1)))


def log_weights(problem: Problem, totals: Array, bar: Array, size: Array) -> Array:
    """Logarithms of the weights of others' models, up to a constant; -inf for strangers.

    A friend has 2 log(N) nats of evidence. With one friend expected among N models, its odds are then N to 1, and less
    than one of N strangers is taken for a friend. In classification, the evidence is the gain in log likelihood, and
    friends weigh alike. In regression, where the scale of the loss is unknown, it is n_k / 2 times the log of the ratio
    of the losses, a friend's loss is also `SHARE` of the bar below the bar, and friends weigh by their losses.

    Args:
        problem: The problem of the method.
        totals: (N,) what `evaluate` gave for them; inf: not evaluated.
        bar: () mean loss to beat, that of a model that knows nothing of the client; inf: unknown, nobody is a friend.
        size: () n_k.
    """
    regression, needed = problem.model.task == "regression", 2 * math.log(max(len(totals), 1))
    nats = size / 2 * jnp.log(bar * size / totals) if regression else bar * size - totals
    known = jnp.isfinite(totals) & jnp.isfinite(bar)
    explains = totals <= (1 - SHARE) * bar * size if regression else True
    return jnp.where(known & explains & (nats > needed), -totals if regression else 0.0, -jnp.inf)
