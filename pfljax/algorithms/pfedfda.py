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
from pfljax.algorithms.common.aggregation import average
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
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
    Upload,
)
from pfljax.local.batches import over_examples
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

EPSILON = 1e-4  # e, the share of the identity in S, and what is added to shares of classes
NUM_VALUES = 11  # of a and of b
FEW = 2  # a class with at most as many examples has the means of others


class Gaussians(NamedTuple):
    """Features by class.

    Attributes:
        means: mu (C, F).
        covariance: Sigma (F, F), within classes.
    """

    means: Array
    covariance: Array


class LinearHead(NamedTuple):
    """A head that is computed from Gaussians: h(z) = z weights + offsets.

    Attributes:
        weights: m (F, C).
        offsets: (C,).
    """

    weights: Array
    offsets: Array

    def logits(self, features: Array) -> Array:
        """(B, C) of features (B, F)."""
        return features @ self.weights + self.offsets


class Shared(NamedTuple):
    """What clients receive, as a stack of one.

    Attributes:
        body: theta, with None in place of the head.
        gaussians: mu and Sigma.
    """

    body: Params
    gaussians: Gaussians


@method(keeps="nothing", travels="the body, class means and a covariance of features, both ways")
@dataclasses.dataclass(frozen=True)
class PFedFDA:
    """pFedFDA (McLaughlin and Su, 2024): clients adapt global Gaussians of features, of which a head is computed.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.PFedFDA(coefficients="one")
        PFedFDA(beta=None, coefficients='one', ridge=1.0)
    """

    beta: float | None = hyperparameter(
        None,
        at_least=0,
        at_most=1,
        help="a and b, weights of the client's own Gaussians. Default: cross-validated",
    )
    coefficients: Literal["two", "one"] = hyperparameter(
        "two", help="a and b apart, or one for means and covariance"
    )
    ridge: float = hyperparameter(
        1.0,
        above=0,
        grid=(0.01, 0.1, 1.0),
        help="rho, added to the variances of a client's features",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver
        shapes = model.network.shapes
        num_classes = classes.required(problem, "pfedfda", per_position=False)
        num_features = classes.num_features(problem)
        is_body = tree.complement(model.mask(shapes, 1))

        def with_no_head(body: Params) -> Params:
            """A whole model, whose own head is zeros and is not used."""
            head_shapes = heads.head_of(problem, shapes)
            no_head = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), head_shapes)
            return tree.combine(body, no_head)

        def body_of(params: Params) -> Params:
            body, _ = tree.partition(params, is_body)
            return body

        # ---- The client.

        def client_update(
            context: ClientContext, models: Shared, row: PyTree, data: ClientData
        ) -> ClientOutput:
            body, received = tree.first(models)

            # theta_k, trained under the head of mu and Sigma, which is fixed
            head = discriminant(received, class_shares(data.train, num_classes))

            def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                logits = head.logits(model.features(params, x, mode))
                shift = logits - model.apply(params, x, mode)
                return solver.loss(params, x, y, mode, shift=shift)

            body_problem = problem.with_loss(loss).part(is_body)
            start = tree.stack_one(with_no_head(body))
            trained = body_problem.fit(context, start, data.train)
            new_body = body_of(tree.first(trained.models))

            # mu' and Sigma'
            new = Shared(new_body, adapt_gaussians(new_body, received, data.train))
            return ClientOutput(
                row=(),
                upload=Upload(
                    update=tree.subtract(tree.stack_one(new), models),
                    weight=jnp.float32(data.train.size)[None],
                ),
                report=ClientReport(trained.losses[0]),
                opt_state=trained.opt_state,
            )

        def adapt_gaussians(body: Params, received: Gaussians, split: Split) -> Gaussians:
            """mu' and Sigma' of a client, from its features under this body."""

            def features_and_labels(x: PyTree, y: Array) -> tuple[Array, Array]:
                return model.features(with_no_head(body), x), jax.nn.one_hot(y, num_classes)

            # mu_k and Sigma_k
            features, labels = over_examples(features_and_labels, split)
            local_gaussians = estimate(features, labels, received.means, self.ridge, FEW)

            # a and b
            if self.beta is not None:
                return mix(local_gaussians, received, self.beta, self.beta)
            shares = class_shares(split, num_classes)
            table = cross_validate(features, labels, received, shares, self.ridge)
            a, b = best(table, equal=self.coefficients == "one")
            return mix(local_gaussians, received, a, b)

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            """Sigma = I, and random means."""
            body = body_of(problem.init_global(key))
            means_key = jax.random.fold_in(key, 1)
            means = jax.random.uniform(means_key, (num_classes, num_features))
            gaussians = Gaussians(means, jnp.eye(num_features))
            return Start(models=tree.stack_one(Shared(body, gaussians)))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # theta, mu, Sigma <- the means of theta_k, mu' and Sigma', weighted by n_k
            return state.with_models(average(state.models, aggregate)), {}

        # ---- What a client predicts with: theta and the head of mu' and Sigma'.

        def adapt(context: ClientContext, models: Shared, data: ClientData) -> Prediction:
            """Newcomers adapt as other clients do."""
            body, received = tree.first(models)
            gaussians = adapt_gaussians(body, received, data.train)
            head = discriminant(gaussians, class_shares(data.train, num_classes))
            return Prediction(inputs=head)

        def predict(
            context: ClientContext, models: Shared, row: PyTree, data: ClientData
        ) -> Prediction:
            return adapt(context, models, data)

        def apply(models: Shared, head: LinearHead, x: PyTree) -> Array:
            body = tree.first(models.body)
            return head.logits(model.features(with_no_head(body), x))

        return Algorithm(
            start=start,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            apply=apply,
            adapt=adapt,
            topology=Topology.SHARED,
            averages=True,
            ledger=Ledger(
                gradients=1,
                unaccounted="means and covariances of features, and class counts in the head",
            ),
            report=MethodReport(
                scored="the global body with a head of the Gaussians that each client has adapted"
            ),
        )


def class_shares(split: Split, num_classes: int) -> Array:
    """pi (C,), a client's shares of classes plus 0.0001, normalized."""
    shares = classes.counts(split, num_classes) / jnp.maximum(split.size, 1) + EPSILON
    return shares / shares.sum()


def discriminant(gaussians: Gaussians, shares: Array) -> LinearHead:
    """The head that is computed from Gaussians: h_c(z) = m_c' z - mu_c' m_c / 2 + log pi_c."""
    weights = solve(gaussians.covariance, gaussians.means)
    quadratic = (gaussians.means.T * weights).sum(axis=0)
    return LinearHead(weights, jnp.log(shares) - quadratic / 2)


def solve(covariance: Array, means: Array) -> Array:
    """m = S^-1 mu, (F, C), where S = (1 - e) Sigma + e tr(Sigma) / F I."""
    num_features = len(covariance)
    identity = EPSILON * jnp.trace(covariance) / num_features * jnp.eye(num_features)
    shrunk = (1 - EPSILON) * covariance + identity
    # Noise on what travels may leave it indefinite, so this takes no Cholesky factors.
    return jax.scipy.linalg.solve(shrunk, means.T)


def estimate(
    features: Array, labels: Array, means: Array, ridge: float, most: int = 0
) -> Gaussians:
    """mu_k and Sigma_k of a client's own features.

    Args:
        features: z (n, F).
        labels: (n, C) one-hot, rows of zeros where an example does not count.
        means: mu (C, F), for classes with few examples.
        ridge: rho.
        most: A class with at most so many examples has few.
    """
    # mu_kc is the mean, or mu_c if the client has few examples of class c.
    counts = labels.sum(axis=0)
    own_means = classes.means(labels.T @ features, counts)
    means = tree.where(counts > most, own_means, means)

    # Sigma_k = sum_i (z_i - mu_ky) (z_i - mu_ky)' / (n_k - 1) + rho I
    counted = labels.sum(axis=1)[:, None] * features
    centered = counted - labels @ means
    scatter = centered.T @ centered / jnp.maximum(counts.sum() - 1, 1)
    return Gaussians(means, scatter + ridge * jnp.eye(features.shape[1]))


def blend(weight: Array | float, local_gaussians: Array, received: Array) -> Array:
    """weight own + (1 - weight) received."""
    return weight * local_gaussians + (1 - weight) * received


def mix(
    local_gaussians: Gaussians, received: Gaussians, a: Array | float, b: Array | float
) -> Gaussians:
    """mu' = a mu_k + (1 - a) mu and Sigma' = b Sigma_k + (1 - b) Sigma."""
    means = blend(a, local_gaussians.means, received.means)
    return Gaussians(means, blend(b, local_gaussians.covariance, received.covariance))


def cross_validate(
    features: Array, labels: Array, received: Gaussians, shares: Array, ridge: float
) -> Array:
    """Cross entropies in two-fold cross validation, for each b and a: (NUM_VALUES, NUM_VALUES).

    Args:
        features: z (n, F) of the client.
        labels: (n, C) one-hot.
        received: mu and Sigma.
        shares: pi (C,).
        ridge: rho.
    """
    values = jnp.linspace(0, 1, NUM_VALUES)

    # Every other example of a class is in the first half. Classes with one example take no part.
    labels = labels * (labels.sum(axis=0) > 1)
    number_in_class = (jnp.cumsum(labels, axis=0) * labels).sum(axis=1)
    first_half = (number_in_class % 2)[:, None]

    def entropies(held_out: Array, local_gaussians: Gaussians, b: Array) -> Array:
        """(NUM_VALUES,), for each a, on the held-out labels (n, C)."""
        # Only S depends on b, so the weights for all a are mixtures of those for mu_k and for mu.
        covariance = mix(local_gaussians, received, b, b).covariance
        both_means = jnp.concatenate([local_gaussians.means, received.means])
        own_weights, received_weights = jnp.split(solve(covariance, both_means), 2, axis=1)

        a = values[:, None, None]
        means = blend(a, local_gaussians.means, received.means)
        weights = blend(a, own_weights.T, received_weights.T)
        offsets = jnp.log(shares) - (means * weights).sum(axis=2) / 2
        products = blend(a, features @ own_weights, features @ received_weights)
        logs = jax.nn.log_softmax(products + offsets[:, None])
        return -(held_out * logs).sum(axis=(1, 2)) / jnp.maximum(held_out.sum(), 1)

    def half_losses(held_out: Array) -> Array:
        local_gaussians = estimate(features, labels - held_out, received.means, ridge)

        def value_losses(carry: tuple[()], b: Array) -> tuple[tuple[()], Array]:
            return carry, entropies(held_out, local_gaussians, b)

        _, table = jax.lax.scan(value_losses, (), values)
        return table

    return half_losses(labels * first_half) + half_losses(labels * (1 - first_half))


def best(table: Array, equal: bool) -> tuple[Array, Array]:
    """(a, b) with the least of the cross entropies (by b and a); with `equal`, of those where a = b."""
    if equal:
        table = jnp.where(jnp.eye(NUM_VALUES, dtype=bool), table, jnp.inf)
    values = jnp.linspace(0, 1, NUM_VALUES)
    best_index = jnp.argmin(table)
    return values[best_index % NUM_VALUES], values[best_index // NUM_VALUES]
