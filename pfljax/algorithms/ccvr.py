"""CCVR: FedAvg whose head is calibrated on virtual features, drawn from a Gaussian for each class.

Luo, Chen, Hu, Zhang, Liang, Feng, "No fear of heterogeneity: classifier calibration for federated learning with non-IID
data" (NeurIPS 2021).

    theta is trained as in FedAvg. With the features z of theta, client k sends for each class c its number of
    examples and the sums of z and of z z';  from these the server has the mean mu_c (Eq. 3) and covariance Sigma_c
    (Eq. 4) of all N_c examples;  it draws M features of N(mu_c, Sigma_c) for each class and takes steps on their mean
    cross entropy, from theta's head and with the body fixed. Clients predict with the result.

Departures from the paper: The paper calibrates once, after training; here every round's model is calibrated, so that it
can be scored, and training goes on with the head as it was. Features are those of the model that clients receive, so
the model that is scored is that of the round's start. Means and covariances are over the round's cohort. Clients send
sums in place of means and covariances, from which the same follows. Each step takes all virtual features, with the
clients' optimizer. Features are inference features.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes, heads
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Params,
    Prediction,
    PyTree,
    State,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

ROOT_STEPS = 15  # of the Newton-Schulz iteration


class Gaussians(NamedTuple):
    """The features of each class.

    Attributes:
        mean: mu (C, F).
        covariance: Sigma (C, F, F).
        count: N (C,), number of examples behind them.
    """

    mean: Array
    covariance: Array
    count: Array


@method(
    keeps="nothing", travels="the global model, both ways; sums of features and their products up"
)
@dataclasses.dataclass(frozen=True)
class CCVR:
    """CCVR (Luo et al., 2021): FedAvg whose head is calibrated on features drawn from a Gaussian for each class.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.CCVR(virtual=500)
        CCVR(virtual=500, server_steps=100)
    """

    virtual: int = hyperparameter(
        100, at_least=1, grid=(50, 100, 500, 1000), help="M, number of virtual features per class"
    )
    server_steps: int = hyperparameter(
        100,
        at_least=0,
        help="number of the server's steps on virtual features; 0 is FedAvg",
        former="steps",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_classes = classes.required(problem, "ccvr", per_position=False)

        # ---- The client.

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            # Sums of z and z z' for each class, under theta as received.
            _, received = problem.whole(context, models)
            totals = classes.feature_sums(
                problem, tree.first(received), data.train, num_classes, products=True
            )
            # theta is trained as in FedAvg.
            trained = problem.fit(context, models, data.train)
            return trained._replace(
                sums={"sums": totals.sums, "products": totals.products},
                count=totals.counts,
            )

        # ---- The server. Its state is the model that clients predict with, leaves (1, ...).

        def first_server(key: Key, params: Params, clients: ClientData) -> Params:
            return problem.init_models(key, 1)

        def calibrate(
            key: Key, models: Params, gaussians: Gaussians, round_number: Array
        ) -> Params:
            """The model with a head that is trained on M virtual features of each class."""
            features, real = draw(key, gaussians, self.virtual)
            labels = jnp.repeat(jnp.arange(num_classes), self.virtual)
            head = tree.first(heads.head_of(problem, models))
            head, _ = heads.fit(
                problem,
                head,
                problem.solver.begin(head).opt_state,
                heads.LabeledFeatures(features, labels, real),
                self.server_steps,
                round_number,
            )
            return tree.combine(tree.stack_one(head), models)

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            """The calibrated model."""
            return Prediction(context.server)

        algorithm = averaging(
            problem,
            train=train,
            ledger=Ledger(
                gradients=1,
                unaccounted="the per-class sums of features and their products, without noise",
            ),
            first_server=first_server,
            predict=predict,
            report=MethodReport(
                scored="the global model of the round's start with a calibrated head"
            ),
            sends="sums",  # of features, next to the models
        )

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            """Calibrates the model of the round's start; FedAvg's average goes on with its own head."""
            upload = aggregate.upload
            gaussians = estimate(
                tree.first(upload.sums["sums"]),
                tree.first(upload.sums["products"]),
                tree.first(upload.count),
            )
            calibrated = calibrate(key, state.models, gaussians, state.round)
            state, metrics = algorithm.server_update(key, state, aggregate)
            return state.with_server(calibrated), metrics

        return dataclasses.replace(algorithm, server_update=server_update)


def estimate(sums: Array, products: Array, count: Array) -> Gaussians:
    """The Gaussians of all clients' features.

    Args:
        sums: (C, F), of the features z of each class.
        products: (C, F, F), of their z z'.
        count: (C,), numbers of examples.
    """
    # mu_c  (Eq. 3)
    mean = classes.means(sums, count)
    # Sigma_c  (Eq. 4)
    scatter = products - jnp.einsum("c,cf,cg->cfg", count, mean, mean)
    covariance = tree.scale(scatter, 1 / jnp.maximum(count - 1, 1))
    return Gaussians(mean, covariance, count)


def draw(key: Key, gaussians: Gaussians, num: int) -> tuple[Array, Array]:
    """`num` virtual features of each class, (C num, F), and whether their class has examples, (C num,) bool."""
    num_classes, num_features = gaussians.mean.shape
    noise = jax.random.normal(key, (num_classes, num, num_features))
    features = gaussians.mean[:, None] + noise @ square_root(gaussians.covariance)
    real = jnp.repeat(gaussians.count > 0, num)
    return features.reshape(-1, num_features), real


def square_root(covariance: Array) -> Array:
    """The symmetric square roots of covariances (C, F, F), by the Newton-Schulz iteration.

    Decompositions by LAPACK hang in a round's program for several CPU devices. Eigenvalues below about 1e-5 of the
    trace come out too small. A matrix with negative ones, which robust rules may make, counts as its diagonal.
    """
    smallest = jnp.finfo(jnp.float32).tiny
    trace = jnp.maximum(jnp.trace(covariance, axis1=1, axis2=2), smallest)
    scaled = tree.scale(covariance, 1 / trace)
    eye = jnp.eye(covariance.shape[-1])

    def step(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        root, inverse = carry
        change = (3 * eye - inverse @ root) / 2
        return root @ change, change @ inverse

    start = (scaled, jnp.broadcast_to(eye, scaled.shape))
    root, _ = jax.lax.fori_loop(0, ROOT_STEPS, step, start)

    # For a root of the whole matrix, the sum of squares is the trace, 1.
    converged = jnp.square(root).sum(axis=(1, 2)) < 1.1
    diagonal = jnp.sqrt(jnp.maximum(scaled * eye, 0))
    root = tree.where(converged, root, diagonal)
    return tree.scale(root, jnp.sqrt(trace))
