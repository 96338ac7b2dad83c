"""HiLoRA: adapters of three tiers, trained one after the other: of all clients, of a cluster, of a client.

Peng, Zou, Zeng, Li, Chen, Li, Wang, "HiLoRA: hierarchical low-rank adaptation for personalized federated learning"
(CVPR 2026).

    Client k's model is frozen + A_r B_r + A_j B_j + A_k B_k: root, its cluster j, leaf. The rounds have three stages.
    Root: clients train (A_r, B_r); W_r <- sum_k n_k A_k B_k / sum_k n_k, decomposed again at rank r, B orthonormal.
    Then: the basis of k is C_k <- decay C_k + (1 - decay) B_k / |B_k|, and U_k spans the rows of C_k, orthonormal;
    d_ij = 1 - |U_i U_j^T|^2 / r, averaged over weights; clusters are spectral, of exp(-d_ij^2 / (2 sigma^2)), sigma the
    median distance, as many as have the largest eigengap.
    Cluster: the root fixed, the clients of cluster j train and average (A_j, B_j), their loss plus
    orthogonality |B_r B_j^T|^2.
    Leaf: root and cluster fixed, client k trains (A_k, B_k), its loss plus
    orthogonality (|B_r B_k^T|^2 + |B_j B_k^T|^2).

B is the paper's transposed. Departures from the paper: Stages end after given numbers of rounds (the paper's
also end when W moves little). Clusters are found from the clients of the last round of the first stage; every
client, absent ones and newcomers included, joins the cluster whose U, the leading directions of its members' U_k, is
most similar to its own, as newcomers do in the paper. Both penalties have one strength. Other parameters, such as a
head, are trained in each tier, beginning with those of the tier above, and replace them. Newcomers find their basis in
one round of training on the root, then train a leaf for as many rounds as the third stage has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import low_rank, subspaces
from pfljax.algorithms.common.aggregation import weighted
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    First,
    Ledger,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Report,
    Start,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem

ROOT, CLUSTER, LEAF = range(3)


class Row(NamedTuple):
    """A client's leaf, whether it was trained (), its basis C_k by weight, and its optimizer, if it is kept."""

    leaf: Params
    trained: Array
    basis: PyTree
    optimizer: PyTree


@method(name="hilora", keeps="its leaf", travels="the root's adapter, then its cluster's, both ways")
@dataclasses.dataclass(frozen=True)
class HiLoRA:
    """HiLoRA (Peng et al., 2026): adapters of all clients, of a cluster, and of a client."""

    clusters: int = knob(4, at_least=2, grid=(2, 3, 4, 6), groups=True, help="largest number of clusters")
    root_rounds: int = knob(20, at_least=1, grid=(10, 20, 40), help="number of rounds that train the root's adapter")
    cluster_rounds: int = knob(20, at_least=0, grid=(10, 20, 40), help="number of rounds that train clusters' adapters")
    orthogonality: float = knob(0.1, at_least=0, grid=(0.01, 0.1, 1.0), help="strength of the penalty between tiers")
    decay: float = knob(0.5, at_least=0, below=1, help="lambda, decay of a client's basis from round to round")

    def build(self, problem: Problem) -> Algorithm:
        low_rank.required(problem, "hilora")
        num, first, second = self.clusters, self.root_rounds, self.root_rounds + self.cluster_rounds
        zeros = functools.partial(subspaces.zeros, problem)
        tiers = Tiers(problem, self.orthogonality)
        stage_of = lambda number: jnp.where(number < first, ROOT, jnp.where(number < second, CLUSTER, LEAF))

        def first_row(key, client, start):
            leaf = problem.init_model(key, client)
            return First(Row(leaf, jnp.zeros((), bool), zeros(), problem.kept_optimizers(tree.stack_one(leaf))))

        def used(context, row):
            return jnp.stack([0, 1 + subspaces.closest(subspaces.spanned(row.basis), context.server)]).astype(jnp.int32)

        def client_update(context, models, row, data):
            stage = stage_of(context.round)
            begin = jax.tree.map(lambda *each: jnp.stack(each)[stage][None], *unstack(models), tiers.leaf(models, row))
            value = tiers.objective(stage, models)
            trained, kept, losses = problem.fit(context, begin, row.optimizer, data.train, value)
            params, own = tree.first(trained), stage == LEAF
            basis = tree.where(stage == ROOT, subspaces.moved(problem, row.basis, params, self.decay), row.basis)
            row = Row(tree.where(own, params, row.leaf), row.trained | own, basis, kept)
            size = jnp.where(jnp.arange(2) == stage, data.train.size, 0)
            upload, sent = weighted(tree.repeat(low_rank.sent(problem, trained), 2), size, 2)
            return ClientOutput(row, upload, {"loss": losses[0], "basis": subspaces.spanned(basis)}, sent)

        def server_update(key, state, aggregate):
            models = tiers.averaged(state.models, aggregate, stage_of(state.round) == ROOT)
            find = lambda: subspaces.leading(aggregate.report["basis"], num)
            found = jax.lax.cond(state.round == first - 1, find, lambda: state.server)
            return state._replace(models=models, server=found), {}

        def adapt(context, models, data):
            basis_key, leaf_key = jax.random.split(context.key)
            row = tiers.probed(context._replace(key=basis_key), models, data)
            models = tree.take(models, index := used(context, row))
            context, rounds = context._replace(key=leaf_key), max(problem.rounds - second, 0)
            value = tiers.objective(jnp.asarray(LEAF), models)
            leaf = problem.alone(context, tiers.leaf(models, row), data, rounds=rounds, objective=value)
            return Prediction(index=index, inputs=leaf)

        return Algorithm(
            topology="shared",
            sends="products",
            start=lambda key, clients: Start(zeros(num), tree.repeat(problem.init_models(key, 1), 1 + num)),
            first_row=first_row,
            download=lambda context, row, cohort: used(context, row),
            client_update=client_update,
            server_update=server_update,
            whom=lambda context, row, size: Mixture(used(context, row), jnp.full((2,), 0.5)),
            predict=lambda context, models, row, data: Prediction(inputs=tiers.leaf(models, row)),
            apply=lambda models, leaf, x: problem.model.apply(tiers.whole(models, leaf), x),
            adapt=adapt,
            ledger=Ledger(gradients=1),
            traffic=low_rank.as_factors(problem, of_models=0.5),  # the root or the cluster's; the other stays
            report=Report("each client's leaf on the adapters of its cluster and of the root"),
        )


class Tiers(NamedTuple):
    """Root and cluster, as a client has them (2, ...), and its leaf."""

    problem: Problem
    strength: Array | float  # of the penalty between tiers

    def leaf(self, models: Params, row: Row) -> Params:
        """A client's leaf; before it is trained, with the other parameters of its cluster."""
        return tree.where(row.trained, row.leaf, low_rank.with_others(self.problem, row.leaf, unstack(models)[1]))

    def probed(self, context: ClientContext, models: Params, data: ClientData) -> Row:
        """A newcomer's row, with the basis that one round of training on the root finds."""
        init_key, probe_key = jax.random.split(context.key)
        probe = self.problem.alone(context._replace(key=probe_key), tree.first(models), data)
        basis = subspaces.moved(self.problem, subspaces.zeros(self.problem), probe, 0.0)
        return Row(self.problem.model.init(init_key), jnp.zeros((), bool), basis, ())

    def averaged(self, models: Params, aggregate: Aggregate, root: Array) -> Params:
        """The server's next models; in the root's stage, the clusters' other parameters are the root's."""
        new = low_rank.averaged(self.problem, models, aggregate)
        return tree.where(root, low_rank.with_others(self.problem, new, tree.repeat(new, tree.num_rows(new))), new)

    def whole(self, models: Params, leaf: Params, weights: tuple = (1.0, 1.0)) -> Params:
        """The leaf's model on root and cluster."""
        return low_rank.side_by_side(self.problem, (*unstack(models), leaf), (*weights, 1.0))

    def objective(self, stage: Array, models: Params) -> Callable[[Params, Batch], Array]:
        """The loss of a stage's tier beside those above it, and the penalty between them."""
        weights = (jnp.float32(stage > ROOT), jnp.float32(stage > CLUSTER))
        above = [subspaces.bases(self.problem, params) for params in unstack(models)]

        def value(params, batch):
            own, loss = subspaces.bases(self.problem, params), self.problem.solver.mean_loss
            overlaps = [w * subspaces.overlap(basis, own) for w, basis in zip(weights, above, strict=True)]
            return loss(self.whole(models, params, weights), batch) + self.strength * sum(overlaps)

        return value


def unstack(models: Params) -> tuple[Params, Params]:
    """Root and cluster."""
    return tree.first(models), jax.tree.map(lambda leaf: leaf[1], models)
