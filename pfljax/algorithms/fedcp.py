"""FedCP: a policy of each example's own splits its features between a global head and the client's.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedCP: separating feature information for personalized federated learning via
conditional policy" (KDD 2023).

    z = f(x; theta) are features, psi the global head and H_k (C, F) the matrix of the client's own head phi_k.
    v_k = sum_c H_kc / |sum_c H_kc|, and the policy of an example is
        (r, s) = softmax(u + g) over pairs, u = relu(LayerNorm(A (z * v_k) + a)) as 2 x F numbers, g Gumbel noise.
    A round: client k receives theta, psi, A and a, and takes steps in theta, phi_k, A and a on
        CE(h(r z; phi_k) + h(s z; psi), y) + lambda MMD^2(z, f(x; theta as received));
        MMD^2(z, z') is the mean over pairs of a mini-batch of kappa(z_i, z_j) + kappa(z'_i, z'_j) - 2 kappa(z_i, z'_j),
        kappa(z, z') = sum over b in 10, 15, 20, 50 of exp(-|z - z'|^2 / (2 b));
    theta, A, a <- their means, and psi <- the mean of (phi_k + psi) / 2, weighted by n_k; phi_k and v_k stay.
    Client k predicts with theta, phi_k, psi and the policy, without noise.

Departures from the paper: v_k is that of phi_k before a round, as in PFLlib's code, but also in the first round,
where theirs is random, and for clients that were absent. Their predictions draw Gumbel noise, too. The policy's gain
and offset are trained, as A and a are. Newcomers train a head of their own with the rest fixed and v following it,
without noise, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes, heads, networks, pairs
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
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
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Pair, Personal, Problem
from pfljax.local.solver import joined
from pfljax.settings.method import hyperparameter, method

POLICY = "policy"  # the branch beside the model's own
NOISE = 0xCB  # folded into the key of a mini-batch
BANDWIDTHS = (10, 15, 20, 50)


class Gumbel(NamedTuple):
    """Gumbel noise in the policy.

    Attributes:
        factor: () factor of the noise.
        key: Random key of a mini-batch.
    """

    factor: Array | float
    key: Key


@method(keeps="its head", travels="the global model and the policy, both ways")
@dataclasses.dataclass(frozen=True)
class FedCP:
    """FedCP (Zhang et al., 2023): a policy for each example splits its features between a global and an own head.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedCP(alignment=5.0)
        FedCP(alignment=5.0, noise=1.0)
    """

    alignment: float = hyperparameter(
        1.0,
        at_least=0,
        grid=(0.1, 1.0, 5.0),
        help="lambda, pull of features to the received ones",
        former="strength",
    )
    noise: float = hyperparameter(
        1.0, at_least=0, help="factor of the Gumbel noise in the policy; 0: none"
    )

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "fedcp", per_position=False)
        model = problem.model
        solver = problem.solver
        num_features = classes.num_features(problem)

        def init_head(params: Params) -> Params:
            return heads.head_of(problem, params)

        # ---- The client.

        def first_model(key: Key) -> Params:
            """theta and psi, A and a."""
            return problem.init_global(key) | {POLICY: init_policy(key, num_features)}

        def first_row(key: Key, client: Array) -> Personal:
            """phi_k. A client's row is its head."""
            return problem.init_personal(key, client, init_head)

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            # theta as received, and v_k of phi_k before the round.
            received = tree.first(joined(models, context.statistics))
            v = head_direction(problem, received, personal.params)

            def objective(pair: Pair, memory: PyTree, batch: Batch) -> tuple[Array, PyTree]:
                # CE(h(r z; phi_k) + h(s z; psi), y)
                noise = Gumbel(self.noise, jax.random.fold_in(batch.key, NOISE))

                def loss(pair: Pair, x: PyTree, y: Array, mode: Mode = None) -> Array:
                    return entropy(problem, pair.shared, pair.personal, v, x, y, mode, noise=noise)

                mean_loss = solver.with_loss(loss).mean_loss(pair, batch)
                # lambda MMD^2(z, f(x; theta as received))
                mode = solver.mode(batch)
                z = model.features(network(pair.shared), batch.x, mode)
                before = model.features(network(received), batch.x, mode)
                pull = discrepancy(z, jax.lax.stop_gradient(before), batch.mask)
                return mean_loss + self.alignment * pull, memory

            direction = pairs.joint(objective)
            trained, _ = problem.descend_pair(context, models, personal, data.train, direction)

            # psi is sent as (phi_k + psi) / 2.
            psi = init_head(network(tree.first(models)))
            new_head, _ = solver.without_statistics(trained.row.params)
            half = jax.tree.map(
                lambda personal_leaf, shared: (personal_leaf + shared) / 2, new_head, psi
            )
            shared = tree.first(trained.models)
            shared = tree.combine(half, network(shared)) | {POLICY: shared[POLICY]}
            return trained._replace(models=tree.stack_one(shared))

        # ---- What a client predicts with: theta, phi_k, psi and the policy, without noise.

        def predict(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Prediction:
            return Prediction(inputs=personal.params)

        def apply(models: Params, head: Params, x: PyTree) -> Array:
            shared = tree.first(models)
            v = head_direction(problem, shared, head)
            return outputs(problem, shared, head, v, x)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train a head of their own with the rest fixed and v following it."""
            shared = tree.first(models)

            def loss(head: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                v = jax.lax.stop_gradient(head_direction(problem, shared, head))
                return entropy(problem, shared, head, v, x, y, mode)

            objective = solver.with_loss(loss).mean_loss
            head = problem.train_newcomer(context, data, objective, part=init_head)
            return Prediction(inputs=head)

        return averaging(
            problem,
            train=train,
            ledger=Ledger(
                gradients=1,
                unaccounted="the discrepancy of a mini-batch's features, in the loss",
            ),
            first_row=first_row,
            first_model=first_model,
            predict=predict,
            apply=apply,
            adapt=adapt,
            report=MethodReport("the global model and each client's own head, by the policy"),
        )


def network(shared: Params) -> Params:
    """The global model, theta and psi."""
    return {name: part for name, part in shared.items() if name != POLICY}


def head_direction(problem: Problem, shared: Params, head: Params) -> Array:
    """v = sum_c H_c / |sum_c H_c| (F,) of a client's head."""
    matrix = heads.matrix(problem, tree.combine(head, network(shared)))
    total = matrix.sum(axis=0)
    return total / jnp.maximum(jnp.linalg.norm(total), 1e-12)


def outputs(
    problem: Problem,
    shared: Params,
    head: Params,
    v: Array,
    x: PyTree,
    mode: Mode = None,
    noise: Gumbel | None = None,
) -> Array:
    """The logits h(r z; phi_k) + h(s z; psi) of examples, with psi fixed."""
    params = network(shared)
    z = problem.model.features(params, x, mode)
    r, s = policy(shared[POLICY], z * v, noise)
    with_own_head = tree.combine(head, params)
    psi = jax.lax.stop_gradient(heads.head_of(problem, params))
    with_psi = tree.combine(psi, params)
    return problem.model.head(with_own_head, r * z) + problem.model.head(with_psi, s * z)


def entropy(
    problem: Problem,
    shared: Params,
    head: Params,
    v: Array,
    x: PyTree,
    y: Array,
    mode: Mode = None,
    noise: Gumbel | None = None,
) -> Array:
    """CE(h(r z; phi_k) + h(s z; psi), y) of each example, by a shift of the global model's own logits."""
    params = network(shared)
    logits = outputs(problem, shared, head, v, x, mode, noise)
    shift = logits - problem.model.apply(params, x, mode)
    return problem.solver.loss(params, x, y, mode, shift=shift)


def init_policy(key: Key, num_features: int) -> Params:
    """A and a at first, drawn as in PyTorch."""
    weight_key, bias_key = jax.random.split(jax.random.fold_in(key, NOISE))
    return networks.init_normalized_layer(weight_key, bias_key, num_features, 2 * num_features)


def policy(layer: Params, inputs: Array, noise: Gumbel | None) -> tuple[Array, Array]:
    """r and s, (B, F) each, for inputs z * v_k (B, F)."""
    # u = relu(LayerNorm(A (z * v_k) + a)) as 2 x F numbers
    hidden = networks.normalized(layer, networks.affine(layer, inputs))
    u = jax.nn.relu(hidden).reshape(len(inputs), 2, -1)
    # (r, s) = softmax(u + g) over pairs
    if noise is not None:
        u = u + noise.factor * jax.random.gumbel(noise.key, u.shape)
    shares = jax.nn.softmax(u, axis=1)
    return shares[:, 0], shares[:, 1]


def discrepancy(a: Array, b: Array, mask: Array) -> Array:
    """() MMD^2 of the features a and b (B, F) of the examples in `mask` (B,)."""

    def kernel(a: Array, b: Array) -> Array:
        """kappa (B, B) of all pairs."""
        a_squares = jnp.square(a).sum(axis=1)[:, None]
        b_squares = jnp.square(b).sum(axis=1)
        squares = a_squares + b_squares - 2 * a @ b.T
        terms = [jnp.exp(-squares / (2 * width)) for width in BANDWIDTHS]
        return jnp.stack(terms).sum(axis=0)

    pair_weights = mask[:, None] * mask / jnp.maximum(mask.sum(), 1) ** 2
    return (pair_weights * (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b))).sum()
