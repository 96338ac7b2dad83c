"""HiLoRA: adapters of three tiers, trained in turn: of all clients, of a cluster, of a client.

Peng, Zou, Zeng, Li, Chen, Li, Wang, "HiLoRA: hierarchical low-rank adaptation for personalized
federated learning" (CVPR 2026).

    Client k's model is frozen + A_r B_r + A_j B_j + A_k B_k: root, its cluster j, leaf. The rounds
    have three stages.
    Root: clients train (A_r, B_r);
        W_r <- sum_k n_k A_k B_k / sum_k n_k, decomposed again at rank r, B orthonormal.
    Then: the basis of k is C_k <- decay C_k + (1 - decay) B_k / |B_k|, and U_k spans the rows of
        C_k, orthonormal; d_ij = 1 - |U_i U_j^T|^2 / r, averaged over weights; clusters are
        spectral, of exp(-d_ij^2 / (2 sigma^2)), sigma the median distance, as many as have the
        largest eigengap.
    Cluster: the root fixed, the clients of cluster j train and average (A_j, B_j), their loss plus
        orthogonality |B_r B_j^T|^2.
    Leaf: root and cluster fixed, client k trains (A_k, B_k), its loss plus
        orthogonality (|B_r B_k^T|^2 + |B_j B_k^T|^2).

B is the paper's transposed. Departures from the paper: Stages end after given numbers of rounds
(the paper's also end when W moves little). Clusters are found from the clients of the last round of
the first stage; every client, absent ones and newcomers included, joins the cluster whose U, the
leading directions of its members' U_k, is most similar to its own, as newcomers do in the paper.
Both penalties have one strength. Other parameters, such as a head, are trained in each tier,
beginning with those of the tier above, and replace them. Newcomers find their basis in one round of
training on the root, then train a leaf for as many rounds as the third stage has.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import low_rank
from pfljax.algorithms.common.clusters import by_eigengap
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Cohort,
    First,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.contract.vectors import orthonormal
from pfljax.local.batches import Batch
from pfljax.local.problem import Objective, Problem
from pfljax.settings.method import hyperparameter, method

ROOT, CLUSTER, LEAF = range(3)  # the stages of a run, and the tier that each trains


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        leaf: (A_k, B_k) and its other parameters.
        trained: () bool: whether the leaf was trained; its other parameters count only then.
        basis: C_k, a tree of arrays (L, r, outputs), one for each adapted weight.
    """

    leaf: Params
    trained: Array
    basis: PyTree


@method(
    name="hilora", keeps="its leaf", travels="the root's adapter, then its cluster's, both ways"
)
@dataclasses.dataclass(frozen=True)
class HiLoRA:
    """HiLoRA (Peng et al., 2026): adapters of all clients, of a cluster, and of a client.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.HiLoRA(clusters=3, root_rounds=10)
        HiLoRA(clusters=3, root_rounds=10, cluster_rounds=20, orthogonality=0.1,
               basis_decay=0.5)
    """

    clusters: int = hyperparameter(
        4, at_least=2, grid=(2, 3, 4, 6), groups=True, help="largest number of clusters"
    )
    root_rounds: int = hyperparameter(
        20, at_least=1, grid=(10, 20, 40), help="number of rounds that train the root's adapter"
    )
    cluster_rounds: int = hyperparameter(
        20, at_least=0, grid=(10, 20, 40), help="number of rounds that train clusters' adapters"
    )
    orthogonality: float = hyperparameter(
        0.1, at_least=0, grid=(0.01, 0.1, 1.0), help="strength of the penalty between tiers"
    )
    basis_decay: float = hyperparameter(
        0.5,
        at_least=0,
        below=1,
        help="lambda, decay of a client's basis from round to round",
        former="decay",
    )

    def build(self, problem: Problem) -> Algorithm:
        low_rank.required(problem, "hilora")
        model = problem.model
        solver = problem.solver
        leaf_start = self.root_rounds + self.cluster_rounds  # the first round of the leaves

        # The server's models are the root and the clusters, (1 + clusters, ...). The server's state
        # is the leading directions of the clusters, (clusters, L, r, outputs). A client receives
        # the root and its cluster, (2, ...).

        def stage_of(round_number: Array) -> Array:
            """() ROOT, CLUSTER or LEAF."""
            after_root = jnp.where(round_number < leaf_start, CLUSTER, LEAF)
            return jnp.where(round_number < self.root_rounds, ROOT, after_root)

        # ---- The three tiers of a client's model.

        def leaf_of(models: Params, row: Row) -> Params:
            """A client's leaf; before it is trained, with the other parameters of its cluster."""
            _, cluster = root_and_cluster(models)
            untrained = low_rank.with_others(problem, row.leaf, cluster)
            return tree.where(row.trained, row.leaf, untrained)

        def on_tiers(
            models: Params,
            params: Params,
            root_weight: Array | float,
            cluster_weight: Array | float,
        ) -> Params:
            """frozen + root_weight A_r B_r + cluster_weight A_j B_j + A B of `params`."""
            root, cluster = root_and_cluster(models)
            weights = (root_weight, cluster_weight, 1.0)
            return low_rank.side_by_side(problem, (root, cluster, params), weights)

        def objective_of(stage: Array, models: Params) -> Objective:
            """The loss of a stage's tier on those above it, and the penalty between them.

            Cluster: orthogonality |B_r B_j^T|^2; leaf: orthogonality (|B_r B_k^T|^2 + |B_j B_k^T|^2).
            """
            root, cluster = root_and_cluster(models)
            root_basis = basis_of(problem, root)
            cluster_basis = basis_of(problem, cluster)
            root_weight = jnp.float32(stage > ROOT)
            cluster_weight = jnp.float32(stage > CLUSTER)

            def objective(params: Params, batch: Batch) -> Array:
                whole = on_tiers(models, params, root_weight, cluster_weight)
                basis = basis_of(problem, params)
                root_overlap = root_weight * overlap(root_basis, basis)
                cluster_overlap = cluster_weight * overlap(cluster_basis, basis)
                penalty = self.orthogonality * (root_overlap + cluster_overlap)
                return solver.mean_loss(whole, batch) + penalty

            return objective

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            """C_k begins with zeros."""
            leaf = problem.init_model(key, client)
            return First(Row(leaf, trained=jnp.zeros((), bool), basis=zero_bases(problem)))

        def root_and_cluster_index(context: ClientContext, row: Row) -> Array:
            """(2,) The root, and the cluster whose leading directions are most like a client's.

            Before clusters are found, their directions are 0 and it is the first one.
            """
            directions = tree.stack_one(spanned(row.basis))
            alike = similarity(directions, context.server)
            cluster = jnp.argmax(alike[0])
            return jnp.stack([0, 1 + cluster]).astype(jnp.int32)

        def download(context: ClientContext, row: Row, cohort: Cohort) -> Array:
            return root_and_cluster_index(context, row)

        def client_update(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> ClientOutput:
            # Train the tier of this stage, with those above it fixed.
            stage = stage_of(context.round)
            root, cluster = root_and_cluster(models)
            leaf = leaf_of(models, row)
            tiers = jax.tree.map(lambda *params: jnp.stack(params), root, cluster, leaf)
            tier = jax.tree.map(lambda stack: stack[stage][None], tiers)
            objective = objective_of(stage, models)
            trained = problem.fit(context, tier, data.train, objective)
            params = tree.first(trained.models)

            # C_k <- decay C_k + (1 - decay) B_k / |B_k|, in the root's stage.
            moved = moved_basis(problem, row.basis, params, self.basis_decay)
            basis = tree.where(stage == ROOT, moved, row.basis)

            # The leaf stays with the client.
            is_leaf = stage == LEAF
            new_leaf = tree.where(is_leaf, params, row.leaf)

            # n_k A_k B_k goes to the root or the cluster; in the leaves' stage, nothing is sent.
            products = low_rank.sent(problem, trained.models)
            weight = jnp.where(jnp.arange(2) == stage, data.train.size, 0)
            return ClientOutput(
                row=Row(new_leaf, trained=row.trained | is_leaf, basis=basis),
                upload=Upload(update=tree.repeat(products, 2), weight=jnp.float32(weight)),
                report=ClientReport(trained.losses[0], entries={"basis": spanned(basis)}),  # U_k
                opt_state=trained.opt_state,
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            """All tiers begin with the same parameters."""
            root = problem.init_models(key, 1)
            models = tree.repeat(root, 1 + self.clusters)
            return Start(state=zero_bases(problem, self.clusters), models=models)

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # W <- sum_k n_k A_k B_k / sum_k n_k for root or clusters, decomposed again at rank r.
            models = low_rank.averaged(problem, state.models, aggregate)

            # In the root's stage, the clusters' other parameters, such as a head, are the root's.
            root_copies = tree.repeat(models, tree.num_rows(models))
            in_root_stage = low_rank.with_others(problem, models, root_copies)
            models = tree.where(stage_of(state.round) == ROOT, in_root_stage, models)

            # After the root's last round, find the clusters by the clients' U_k.
            def find_clusters() -> PyTree:
                return leading_directions(aggregate.report.entries["basis"], self.clusters)

            def keep_clusters() -> PyTree:
                return state.server.state

            is_last_of_root = state.round == self.root_rounds - 1
            directions = jax.lax.cond(is_last_of_root, find_clusters, keep_clusters)
            return state.with_models(models).with_server(directions), {}

        # ---- What a client predicts with.

        def select_models(context: ClientContext, row: Row, size: Array) -> Mixture:
            """The root and a cluster; `apply` adds them and reads no weights."""
            index = root_and_cluster_index(context, row)
            return Mixture(index, weights=jnp.full((2,), 0.5))

        def predict(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> Prediction:
            return Prediction(inputs=leaf_of(models, row))

        def apply(models: Params, leaf: Params, x: PyTree) -> Array:
            """frozen + A_r B_r + A_j B_j + A_k B_k."""
            whole = on_tiers(models, leaf, root_weight=1.0, cluster_weight=1.0)
            return model.apply(whole, x)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers find their cluster in a round on the root, then train a leaf."""
            basis_key, leaf_key = jax.random.split(context.key)
            init_key, probe_key = jax.random.split(basis_key)

            # C = B / |B| after a round on the root
            probe_context = context._replace(key=probe_key)
            root = tree.first(models)
            probe = problem.train_newcomer(probe_context, data, start=root, rounds=1)
            basis = moved_basis(problem, zero_bases(problem), probe, decay=0.0)

            # The root and the cluster by this basis, and a leaf on them
            row = Row(leaf=model.init(init_key), trained=jnp.zeros((), bool), basis=basis)
            index = root_and_cluster_index(context, row)
            received = tree.take(models, index)
            leaf = problem.train_newcomer(
                context._replace(key=leaf_key),
                data,
                objective=objective_of(jnp.asarray(LEAF), received),
                start=leaf_of(received, row),
                rounds=max(problem.rounds - leaf_start, 0),
            )
            return Prediction(index=index, inputs=leaf)

        # ---- Accounting.

        # Of the two received models, one is unchanged. The server can compute U_k from what is sent.
        traffic = low_rank.as_factors(problem, model_share=0.5)

        return Algorithm(
            topology=Topology.SHARED,
            start=start,
            first_row=first_row,
            download=download,
            client_update=client_update,
            server_update=server_update,
            select_models=select_models,
            predict=predict,
            apply=apply,
            adapt=adapt,
            ledger=Ledger(gradients=1),
            report=MethodReport(
                "each client's leaf on the adapters of its cluster and of the root"
            ),
            sends="products",
            traffic=traffic,
        )


def root_and_cluster(models: Params) -> tuple[Params, Params]:
    """The two models (...) that a client received (2, ...)."""
    return tree.first(models), jax.tree.map(lambda leaf: leaf[1], models)


# ---- Bases: for each adapted weight, rows (L, r, outputs) of L stacked layers.


def basis_of(problem: Problem, params: Params) -> PyTree:
    """B of each weight."""
    factors = problem.model.network.factors(params)
    return {path: b for path, (_, b) in factors.items()}


def zero_bases(problem: Problem, *num: int) -> PyTree:
    """Zeros in the shapes of `num` bases, or of one."""

    def basis_of_params(params: Params) -> PyTree:
        return basis_of(problem, params)

    shapes = jax.eval_shape(basis_of_params, problem.model.network.shapes)
    return jax.tree.map(lambda b: jnp.zeros((*num, *b.shape)), shapes)


def moved_basis(problem: Problem, basis: PyTree, params: Params, decay: Array | float) -> PyTree:
    """decay C + (1 - decay) B / |B| for each weight, B that of `params`."""

    def move(c: Array, b: Array) -> Array:
        norm = jnp.maximum(jnp.linalg.norm(b), jnp.finfo(jnp.float32).tiny)
        return decay * c + (1 - decay) * b / norm

    return jax.tree.map(move, basis, basis_of(problem, params))


def spanned(basis: PyTree) -> PyTree:
    """U for each weight: orthonormal rows that span those of C; zeros for rows that add nothing."""
    return jax.tree.map(orthonormal, basis)


def overlap(a: PyTree, b: PyTree) -> Array:
    """() |A B^T|^2, summed over layers and weights."""
    squares = jax.tree.map(lambda x, y: jnp.square(x @ y.mT).sum(), a, b)
    total = sum(jax.tree.leaves(squares))
    return jnp.asarray(total)


def similarity(a: PyTree, b: PyTree) -> Array:
    """(N, M) mean over layers and weights of |U_n U_m^T|^2 / r, for the U of N and of M clients or clusters."""

    def weight_similarity(x: Array, y: Array) -> Array:
        products = jnp.einsum("nlro,mlqo->nmlrq", x, y)
        squares = jnp.square(products).sum(axis=(-1, -2))
        return squares.mean(axis=-1) / x.shape[-2]

    per_weight = jax.tree.leaves(jax.tree.map(weight_similarity, a, b))
    return jnp.stack(per_weight).mean(axis=0)


# ---- Clusters of clients.


def leading_directions(bases: PyTree, num: int) -> PyTree:
    """(num, L, r, outputs) leading directions of clusters of S clients, from their U (S, ...)."""
    # d_ij = 1 - |U_i U_j^T|^2 / r, averaged over weights; sigma is the median between two clients.
    distance = 1 - similarity(bases, bases)
    is_self = jnp.eye(len(distance), dtype=bool)
    between_clients = jnp.where(is_self, jnp.nan, distance)
    sigma = jnp.nanmedian(between_clients)

    # Spectral clusters of exp(-d_ij^2 / (2 sigma^2)), as many as have the largest eigengap
    relative = distance / jnp.maximum(sigma, 1e-6)
    affinity = jnp.exp(-jnp.square(relative) / 2)
    labels = by_eigengap(affinity, num)

    # The leading directions of each cluster's U_k
    is_member = jax.nn.one_hot(labels, num)

    def leading_vectors(u: Array) -> Array:
        """The r leading right singular vectors of the members' rows, stacked; others' rows are 0."""
        rows = jnp.einsum("sc,slro->clsro", is_member, u)
        rows = rows.reshape(num, u.shape[1], -1, u.shape[-1])
        _, _, v = low_rank.svd(rows)
        return v[..., : u.shape[-2], :]

    return jax.tree.map(leading_vectors, bases)
