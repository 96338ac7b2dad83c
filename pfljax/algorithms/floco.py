"""Floco: a simplex of last layers, in which each client has a region of its own.

Grinwald, Wiesner, Nakajima, "Federated learning over connected modes" (NeurIPS 2024).

    The last layer's weights are sum_m alpha_m W_m, alpha on the simplex of M endpoints; the rest is
    as in FedAvg.
    A round: client k receives all of them and takes each step at an alpha drawn anew, first from
    the whole simplex; the server averages them, weighted by n_k. Client k predicts at the simplex's
    center.
    After a share tau of the rounds: kappa_k are the first M principal components of the clients'
    changes of all W_m; beta_k(z) is kappa_k, projected onto the simplex of sum z, over z;
    beta_k = beta_k(z) for the z that minimizes the Riesz energy
        sum_{k < j} 1 / |beta_k(z) - beta_j(z)|^2.
    From then on, client k draws alpha from beta_k + r u, r uniform in [0, rho], |u|_1 = 1, and
    predicts at beta_k.

Departures from the paper: tau is a share of the rounds, not a number of them. In the authors' code,
all clients train once more for their changes; here these are from the last round that they took
part in, and a client that has not taken part yet has the simplex's center. As in that code, z is
one of 1000 values up to 1, and the last layer's bias is shared. Draws outside of the simplex, which
that code uses as they are, are clipped and normalized. The server reads clients' changes as they
were, and at no cost, also where uploads are compressed. Floco+, with a personal model beside the
simplex, is not here. Newcomers predict at the simplex's center.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from optax.projections import projection_simplex

from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Mode,
    Params,
    Prediction,
    PyTree,
    Traffic,
    Trained,
)
from pfljax.exchange.plan import ExecutionPlan
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

ALPHA = 0xF10  # folded into a mini-batch's key: a point of the simplex
SCALES = 1000  # number of values of z
CLOSEST = 1e-4  # least value of z, and least distance in the energy
NEGLIGIBLE = 1e-6  # a component's variance, relative to the first one's, that is rounding


class Server(NamedTuple):
    """What the server keeps beside the model.

    Attributes:
        changes: Clients' last changes of the endpoints, leaves (K, M, ...).
        known: (K,) bool: whose changes are known.
        points: (K, M) clients' points beta_k.
    """

    changes: PyTree
    known: jax.Array
    points: Array


@method(
    keeps="nothing",
    travels="the body and M endpoints of the last layer, both ways; its point down",
)
@dataclasses.dataclass(frozen=True)
class Floco:
    """Floco (Grinwald et al., 2024): a simplex of last layers; each client has a region of its own.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.Floco(endpoints=5)
        Floco(endpoints=5, tau=0.5, rho=0.1)
    """

    endpoints: int = hyperparameter(
        10, at_least=1, at_most=1000, grid=(3, 5, 10), help="M, number of endpoints; 1 is FedAvg"
    )
    tau: float = hyperparameter(
        0.5,
        above=0,
        at_most=1,
        grid=(0.25, 0.5, 0.75),
        help="share of the rounds before clients have regions; 1: none",
    )
    rho: float = hyperparameter(
        0.1, at_least=0, at_most=1, grid=(0.05, 0.1, 0.3), help="radius of a client's region"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver
        num_clients = problem.num_clients
        center = jnp.full((self.endpoints,), 1 / self.endpoints)
        first_with_regions = jnp.maximum(jnp.rint(self.tau * problem.rounds), 1)
        is_endpoint = last_matrix(problem)

        # ---- The model: M endpoints W_m of the last layer's weights, and the rest.

        def endpoints_of(params: Params) -> Params:
            endpoints, _ = tree.partition(params, is_endpoint)
            return endpoints

        def at(alpha: Array, params: Params) -> Params:
            """The network with the last layer's weights sum_m alpha_m W_m."""
            endpoints, rest = tree.partition(params, is_endpoint)
            return tree.combine(tree.mix(alpha, endpoints), rest)

        def first_model(key: Key) -> Params:
            """Endpoints that differ, and the rest of the initial model."""
            independent_problem = problem._replace(common_init=False)
            endpoints = endpoints_of(independent_problem.init_models(key, self.endpoints))
            _, rest = tree.partition(problem.init_global(key), is_endpoint)
            return tree.combine(endpoints, rest)

        # ---- The client.

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            point = context.server.points[context.client]
            has_region = context.round >= first_with_regions
            radius = jnp.where(has_region, self.rho, jnp.inf)

            def objective(params: Params, batch: Batch) -> Array:
                """The loss at an alpha drawn anew."""
                alpha = draw(jax.random.fold_in(batch.key, ALPHA), point, radius)

                def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                    return solver.loss(at(alpha, params), x, y, mode)

                return solver.with_loss(loss).mean_loss(params, batch)

            trained = problem.fit(context, models, data.train, objective)
            change = tree.subtract(endpoints_of(trained.models), endpoints_of(models))
            return trained._replace(report={"change": tree.first(change), "client": context.client})

        # ---- The server.

        def first_server(key: Key, params: Params, clients: ClientData) -> Server:
            def zeros(leaf: Array) -> Array:
                return jnp.zeros((num_clients, *leaf.shape), leaf.dtype)

            return Server(
                changes=jax.tree.map(zeros, endpoints_of(params)),
                known=jnp.zeros(num_clients, bool),
                points=jnp.tile(center, (num_clients, 1)),
            )

        def server_step(received: Received, server: Server) -> ServerStep:
            # Write down the changes of the clients that sent something; others are dropped.
            clients = jnp.where(received.sent, received.report["client"], num_clients)

            def write(changes: jax.Array, change: Array) -> Array:
                return changes.at[clients].set(change, mode="drop")

            changes = jax.tree.map(write, server.changes, received.report["change"])
            known = server.known.at[clients].set(True, mode="drop")

            # After a share tau of the rounds, beta_k are the projected principal components.
            def new_points() -> Array:
                return points_of(problem.plan, changes, known, self.endpoints)

            def old_points() -> Array:
                return server.points

            next_round = received.round + 1
            is_time = (next_round == first_with_regions) & (first_with_regions < problem.rounds)
            points = jax.lax.cond(is_time, new_points, old_points)
            return ServerStep(server=Server(changes, known, points))

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            point = context.server.points[context.client]
            return Prediction.single(at(point, tree.first(models)))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            return Prediction.single(at(center, tree.first(models)))

        # ---- Accounting.

        def traffic(counted: Traffic) -> Traffic:
            """A client receives its own point alone; the server sees its change in its upload."""
            return counted._replace(server=4 * self.endpoints, report=0)

        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1),
            first_model=first_model,
            first_server=first_server,
            server_step=server_step,
            predict=predict,
            adapt=adapt,
            report=MethodReport("each client's point of the simplex"),
            traffic=traffic,
        )


def last_matrix(problem: Problem) -> PyTree:
    """A tree of bools like a model's parameters: whether a leaf is a matrix of the last layer.

    Raises:
        ArgumentError: if none is.
    """
    shapes = problem.model.network.shapes
    in_last_layer = problem.model.mask(shapes, 1)
    mask = jax.tree.map(lambda is_last, leaf: is_last and leaf.ndim > 1, in_last_layer, shapes)
    if not any(jax.tree.leaves(mask)):
        text = "floco needs a last layer with a matrix; accepted: networks that have one"
        raise ArgumentError("model", text)
    return mask


# ---- Points of the simplex.


def draw(key: Key, point: Array, radius: Array | float) -> Array:
    """A point (M,) of the whole simplex if the radius is inf; otherwise of a region around `point`."""
    direction_key, radius_key = jax.random.split(key)
    anywhere = jax.random.exponential(direction_key, point.shape)

    # beta_k + r u, r uniform in [0, rho], |u|_1 = 1
    direction = jax.random.uniform(direction_key, point.shape, minval=-1)
    norm = jnp.abs(direction).sum()
    direction = direction / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
    finite = jnp.where(jnp.isinf(radius), 0, radius)
    near = point + jax.random.uniform(radius_key) * finite * direction

    alpha = jnp.where(jnp.isinf(radius), anywhere, jnp.maximum(near, 0))
    return alpha / alpha.sum()


def points_of(plan: ExecutionPlan, changes: PyTree, known: Array, num: int) -> Array:
    """(K, M) the points beta_k of clients whose changes are known; the center for the others.

    Args:
        plan: Maps over rows.
        changes: Leaves (K, M, ...).
        known: (K,) bool.
        num: M.
    """
    kappa = components(plan, changes, known, num)
    kappa = kappa - kappa.max(axis=1, keepdims=True)  # the same projection, with less rounding
    is_pair = known[:, None] & known & ~jnp.eye(len(known), dtype=bool)

    def step(best: tuple[Array, Array], z: Array) -> tuple[tuple[Array, Array], None]:
        least, best_points = best

        # beta_k(z): kappa_k, projected onto the simplex of sum z, over z
        points = plan.over_rows(lambda row: projection_simplex(row, z), kappa)
        points = points / points.sum(axis=1, keepdims=True)

        # sum_{k < j} 1 / |beta_k(z) - beta_j(z)|^2, twice
        squares = jnp.square(points[:, None] - points).sum(axis=-1)
        energies = 1 / jnp.maximum(squares, CLOSEST**2)
        energy = jnp.where(is_pair, energies, 0).sum()

        is_better = energy < least
        best_points = jnp.where(is_better, points, best_points)
        return (jnp.where(is_better, energy, least), best_points), None

    start = (jnp.float32(jnp.inf), jnp.full_like(kappa, 1 / num))
    (_, points), _ = jax.lax.scan(step, start, jnp.linspace(CLOSEST, 1, SCALES))
    return jnp.where(known[:, None], points, 1 / num)


def components(plan: ExecutionPlan, changes: PyTree, known: Array, num: int) -> Array:
    """(K, num) principal components of the known changes; 0 for the others, and without variance.

    In each direction, the change with the largest absolute value is positive, as in scikit-learn.
    """
    mean = tree.mix(known / jnp.maximum(known.sum(), 1), changes)

    def center(leaf: Array, mean: Array) -> Array:
        return jnp.where(tree.per_row(known, leaf), leaf - mean, 0)

    centered = jax.tree.map(center, changes, mean)
    variances, vectors = jnp.linalg.eigh(plan.gram(centered))
    variances = variances[::-1][:num]
    vectors = vectors[:, ::-1][:, :num]
    deviations = jnp.sqrt(jnp.maximum(variances, 0))
    deviations = jnp.where(variances > NEGLIGIBLE * variances[0], deviations, 0)

    # The entry of each direction that is largest in absolute value, for its sign.
    directions = jax.tree.leaves(tree.mix(vectors.T, centered))
    flat = [leaf.reshape(len(variances), -1) for leaf in directions]
    flat = jnp.concatenate(flat, axis=1)
    position = jnp.abs(flat).argmax(axis=1)
    largest = jnp.take_along_axis(flat, position[:, None], axis=1)[:, 0]
    signs = jnp.where(largest < 0, -1, 1)

    scaled_vectors = vectors * deviations * signs
    return jnp.pad(scaled_vectors, ((0, 0), (0, num - scaled_vectors.shape[1])))
