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

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, classes, heads
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Key, Ledger, Prediction, PyTree, Report
from pfljax.local.problem import Problem


@method(keeps="nothing", travels="the global model, both ways; sums of features and their products up")
@dataclasses.dataclass(frozen=True)
class CCVR:
    """CCVR (Luo et al., 2021): FedAvg whose head is calibrated on features drawn from a Gaussian for each class."""

    virtual: int = knob(100, at_least=1, grid=(50, 100, 500, 1000), help="M, number of virtual features per class")
    steps: int = knob(100, at_least=0, help="number of the server's steps on virtual features; 0 is FedAvg")

    def build(self, problem: Problem) -> Algorithm:
        num_classes = classes.required(problem, "ccvr", places=False)

        def client_update(context, models, kept, data):
            found = classes.feature_sums(problem, tree.first(models), data.train, num_classes, products=True)
            trained, kept, losses = problem.fit(context, models, kept, data.train)
            upload, sent = aggregation.weighted(tree.subtract(trained, models), data.train.size)
            upload |= {"count": found["counts"][None], "sums": found["sums"][None], "products": found["products"][None]}
            return ClientOutput(kept, upload, {"loss": losses[0]}, sent)

        def server_update(key, state, aggregate):
            z, real = drawn(key, gaussians(tree.first(aggregate.upload)), self.virtual)
            labels = jnp.repeat(jnp.arange(num_classes), self.virtual)
            head = tree.first(heads.head_of(problem, state.models))
            examples, optimizer = (z, labels, real), problem.solver.optimizer.init(head)
            head, _ = heads.fit(problem, head, optimizer, examples, self.steps, state.round)
            calibrated = tree.combine(tree.stack_one(head), state.models)
            return state._replace(server=calibrated, models=aggregation.average(state.models, aggregate)), {}

        return averaging(
            problem,
            beside=lambda models, clients: models,
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: Prediction(context.server),
            ledger=Ledger(gradients=1, unaccounted="the per-class sums of features and their products, without noise"),
            sends="sums",  # of features, next to the models
            report=Report("the global model of the round's start with a calibrated head"),
        )


def gaussians(sums: PyTree) -> tuple[Array, Array, Array]:
    """The mean (C, F), covariance (C, F, F) and number (C,) of the features of each class, from their sums."""
    count = sums["count"]
    mean = classes.means(sums["sums"], count)  # Eq. 3
    scatter = sums["products"] - jnp.einsum("c,cf,cg->cfg", count, mean, mean)
    return mean, tree.scale(scatter, 1 / jnp.maximum(count - 1, 1)), count  # Eq. 4


def drawn(key: Key, gaussians: tuple[Array, Array, Array], num: int) -> tuple[Array, Array]:
    """`num` virtual features of each class, (C num, F), and whether their class has examples, (C num,) bool."""
    mean, covariance, count = gaussians
    noise = jax.random.normal(key, (len(mean), num, mean.shape[-1]))
    z = mean[:, None] + noise @ square_root(covariance)
    return z.reshape(-1, mean.shape[-1]), jnp.repeat(count > 0, num)


def square_root(covariance: Array) -> Array:
    """The symmetric square roots of covariances (C, F, F), by the Newton-Schulz iteration.

    Decompositions by LAPACK hang in a round's program for several CPU devices. Eigenvalues below about 1e-5 of the
    trace come out too small. A matrix with negative ones, which robust rules may make, counts as its diagonal.
    """
    trace = jnp.maximum(jnp.trace(covariance, axis1=1, axis2=2), jnp.finfo(jnp.float32).tiny)
    eye = jnp.eye(covariance.shape[-1])

    def step(_, carry):
        root, inverse = carry
        change = (3 * eye - inverse @ root) / 2
        return root @ change, change @ inverse

    scaled = tree.scale(covariance, 1 / trace)
    root, _ = jax.lax.fori_loop(0, 15, step, (scaled, jnp.broadcast_to(eye, scaled.shape)))
    converged = jnp.square(root).sum(axis=(1, 2)) < 1.1  # the sum is the trace, 1, for a root of the whole matrix
    diagonal = jnp.sqrt(jnp.maximum(scaled * eye, 0))
    return tree.scale(tree.where(converged, root, diagonal), jnp.sqrt(trace))
