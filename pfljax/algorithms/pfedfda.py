"""pFedFDA: a body trained under the global Gaussians of features, which each client adapts to its own features.

McLaughlin, Su, "Personalized federated learning via feature distribution adaptation" (NeurIPS 2024).

    z = f(x; theta) are features, mu_c their mean in class c, Sigma (F, F) their covariance within classes, and pi_k the
    client's shares of classes plus 0.0001, normalized. The head computes
        h_c(z) = m_c' z - mu_c' m_c / 2 + log pi_kc,  m_c = S^-1 mu_c,  S = (1 - e) Sigma + e tr(Sigma) / F I, e 0.0001.
    A round: client k receives theta, mu and Sigma; it trains theta to theta_k under the head of mu and Sigma, which is
    fixed; of its features under theta_k, mu_kc are the means (mu_c, if it has at most 2 examples of class c), and
    Sigma_k = sum_i (z_i - mu_ky) (z_i - mu_ky)' / (n_k - 1) + rho I;
    mu' = a mu_k + (1 - a) mu and Sigma' = b Sigma_k + (1 - b) Sigma, where (a, b) has the least cross entropy in
    two-fold cross validation, between every other example of a class and the rest;
    theta, mu, Sigma <- the means of theta_k, mu' and Sigma', weighted by n_k.
    Client k predicts with theta and the head of mu' and Sigma' that it computes, as above, under theta.

Departures from the paper: (a, b) are the best of 11 x 11 values in [0, 1], not where L-BFGS is after 10 steps from 0.5.
Features of a round are inference features under theta_k; the authors' code takes those of the mini-batches, while theta
moves. It adds 0.0001 to all entries of Sigma_k, and its rho is 1. Its halves are random, and take mu_c for a class with
at most 2 examples; here a half has its own mean from one example on. Classes with one example take no part in cross
validation. Newcomers adapt as other clients do.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes, heads
from pfljax.algorithms.common.averaging import averaging
from pfljax.algorithms.common.gaussians import EPSILON, Gaussians, blend, discriminant, estimated, mixed, solved
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, Ledger, Params, Prediction, Report, Split, Start
from pfljax.local.batches import of_examples
from pfljax.local.problem import Problem

VALUES = 11  # of a and of b
FEW = 2  # a class with at most as many examples has the means of others


class Shared(NamedTuple):
    """What clients receive: the body (1, ...) and the global Gaussians (1, ...)."""

    body: Params
    gaussians: Gaussians


@method(keeps="nothing", travels="the body, class means and a covariance of features, both ways")
@dataclasses.dataclass(frozen=True)
class PFedFDA:
    """pFedFDA (McLaughlin and Su, 2024): clients adapt global Gaussians of features, of which a head is computed."""

    beta: float | None = knob(
        None, at_least=0, at_most=1, help="a and b, weights of the client's own Gaussians; not given: cross-validated"
    )
    coefficients: Literal["two", "one"] = knob("two", help="a and b apart, or one for means and covariance")
    ridge: float = knob(1.0, above=0, grid=(0.01, 0.1, 1.0), help="rho, added to the variances of a client's features")

    def build(self, problem: Problem) -> Algorithm:
        model, num_classes = problem.model, classes.required(problem, "pfedfda", places=False)
        width, shapes = classes.num_features(problem), model.network.shapes
        no_head = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), heads.head_of(problem, shapes))
        whole = lambda body: tree.combine(body, no_head)
        of_body = tree.complement(model.mask(shapes, 1))
        body_of = lambda models: tree.partition(models, of_body)[0]

        def start(key, clients):
            models = problem.init_models(key, 1)
            means = jax.random.uniform(jax.random.fold_in(key, 1), (num_classes, width))
            return Start(models=Shared(body_of(models), tree.stack_one(Gaussians(means, jnp.eye(width)))))

        def adapted(models, split):
            """mu' and Sigma' of a client."""
            body, received = tree.first(models)
            features = lambda x, y: (model.features(whole(body), x), jax.nn.one_hot(y, num_classes))
            z, labels = of_examples(features, split)
            own = estimated(z, labels, received.means, self.ridge, FEW)
            if self.beta is not None:
                return mixed(own, received, self.beta, self.beta)
            table = validated(z, labels, received, shares_of(split, num_classes), self.ridge)
            return mixed(own, received, *best(table, one=self.coefficients == "one"))

        def train(context, models, row, data):
            weights, offsets = discriminant(tree.first(models.gaussians), shares_of(data.train, num_classes))

            def loss(params, x, y, *key):
                logits = model.features(params, x, *key) @ weights + offsets
                return problem.solver.loss(params, x, y, *key, shift=logits - model.apply(params, x, *key))

            start = tree.stack_one(whole(tree.first(models.body)))
            trained, row, losses = problem.with_loss(loss).part(of_body).fit(context, start, row, data.train)
            body = body_of(trained)
            gaussians = adapted(models._replace(body=body), data.train)
            return Shared(body, tree.stack_one(gaussians)), row, losses

        def predicting(models, data):
            shares = shares_of(data.train, num_classes)
            return Prediction(inputs=discriminant(adapted(models, data.train), shares))

        def apply(models, inputs, x):
            weights, offsets = inputs
            return model.features(whole(tree.first(models.body)), x) @ weights + offsets

        return averaging(
            problem,
            start=start,
            row=lambda key, client, models: problem.part(of_body).kept_optimizers(problem.init_models(key, 1)),
            train=train,
            predict=lambda context, models, row, data: predicting(models, data),
            apply=apply,
            adapt=lambda context, models, data: predicting(models, data),
            ledger=Ledger(gradients=1, unaccounted="means and covariances of features, and class counts in the head"),
            report=Report("the global body with a head of the Gaussians that each client has adapted"),
        )


def shares_of(split: Split, num_classes: int) -> Array:
    """pi (C,)."""
    shares = classes.counts(split, num_classes) / jnp.maximum(split.size, 1) + EPSILON
    return shares / shares.sum()


def validated(z: Array, labels: Array, received: Gaussians, shares: Array, ridge: Array | float) -> Array:
    """The cross entropies in two-fold cross validation, by b and a: (VALUES, VALUES)."""
    labels = labels * (labels.sum(axis=0) > 1)
    half = ((jnp.cumsum(labels, axis=0) * labels).sum(axis=1) % 2)[:, None]
    values = jnp.linspace(0, 1, VALUES)

    def of_covariance(held, own, b):
        covariance = mixed(own, received, b, b).covariance
        weights = jnp.split(solved(covariance, jnp.concatenate([own.means, received.means])), 2, axis=1)
        every = values[:, None, None]
        means = blend(every, own.means, received.means)
        offsets = jnp.log(shares) - (means * blend(every, weights[0].T, weights[1].T)).sum(axis=2) / 2
        logs = jax.nn.log_softmax(blend(every, z @ weights[0], z @ weights[1]) + offsets[:, None])
        return -(held * logs).sum(axis=(1, 2)) / jnp.maximum(held.sum(), 1)

    def of_half(held):
        own = estimated(z, labels - held, received.means, ridge)
        return jax.lax.scan(lambda none, b: (none, of_covariance(held, own, b)), None, values)[1]

    return of_half(labels * half) + of_half(labels * (1 - half))


def best(table: Array, one: bool) -> tuple[Array, Array]:
    """(a, b) with the least of the cross entropies; with `one`, of those where they are equal."""
    place = jnp.argmin(jnp.where(jnp.eye(VALUES, dtype=bool), table, jnp.inf) if one else table)
    values = jnp.linspace(0, 1, VALUES)
    return values[place % VALUES], values[place // VALUES]
