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

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import beside, classes, heads
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, Key, Ledger, Params, Prediction, PyTree, Report, Start
from pfljax.local.problem import OwnModel, Problem

POLICY = "policy"  # the branch beside the model's own
NOISE = 0xCB  # folded into the key of a mini-batch
EPSILON = 1e-5  # of the layer normalization, as in PyTorch
BANDWIDTHS = (10, 15, 20, 50)


@method(keeps="its head", travels="the global model and the policy, both ways")
@dataclasses.dataclass(frozen=True)
class FedCP:
    """FedCP (Zhang et al., 2023): a policy for each example splits its features between a global and an own head."""

    strength: float = knob(1.0, at_least=0, grid=(0.1, 1.0, 5.0), help="lambda, pull of features to the received ones")
    noise: float = knob(1.0, at_least=0, help="factor of the Gumbel noise in the policy; 0: none")

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "fedcp", places=False)
        model, solver, width = problem.model, problem.solver, classes.num_features(problem)

        def objective(pair, batch, received, v):
            noise = self.noise, jax.random.fold_in(batch.key, NOISE)
            loss = lambda pair, *example: classified(problem, pair.shared, pair.own, v, *example, noise=noise)
            mode = solver.mode(batch)
            z, before = (model.features(params, batch.x, mode) for params in (network(pair.shared), received))
            pull = discrepancy(z, jax.lax.stop_gradient(before), batch.mask)
            return solver.with_loss(loss).mean_loss(pair, batch) + self.strength * pull

        def train(context, models, row, data):
            received, v = network(tree.first(models)), direction(problem, tree.first(models), row.own.model)

            def gradient(pair, memory, batch):
                return *jax.value_and_grad(objective)(pair, batch(0).of_model(0), received, v), memory

            models, row, value, _ = beside.descend(problem, context, models, row, data.train, gradient)
            head = jax.tree.map(lambda own, psi: (own + psi) / 2, row.own.model, heads.head_of(problem, received))
            shared = tree.first(models)
            whole = tree.combine(head, network(shared)) | {POLICY: shared[POLICY]}
            return tree.stack_one(whole), row, value[None]

        def start(key, clients):
            return Start(models=problem.init_models(key, 1) | {POLICY: tree.stack_one(initial(key, width))})

        def row(key, client, models):
            head = heads.head_of(problem, problem.init_model(key, client))
            return beside.Row(OwnModel(head, solver.optimizer.init(head)), problem.kept_optimizers(models))

        def apply(models, own, x):
            shared = tree.first(models)
            return outputs(problem, shared, own, direction(problem, shared, own), x)

        def adapt(context, models, data):
            init_key, train_key = jax.random.split(context.key)
            shared, head = tree.first(models), heads.head_of(problem, model.init(init_key))
            v = lambda head: jax.lax.stop_gradient(direction(problem, shared, head))
            loss = lambda head, *example: classified(problem, shared, head, v(head), *example)
            context, mean = context._replace(key=train_key), solver.with_loss(loss).mean_loss
            return Prediction(inputs=problem.alone(context, head, data, rounds=problem.rounds, objective=mean))

        return averaging(
            problem,
            start=start,
            row=row,
            train=train,
            predict=lambda context, models, row, data: Prediction(inputs=row.own.model),
            apply=apply,
            adapt=adapt,
            ledger=Ledger(gradients=1, unaccounted="the discrepancy of a mini-batch's features, in the loss"),
            report=Report("the global model and each client's own head, by the policy"),
        )


def network(shared: Params) -> Params:
    """The global model, theta and psi."""
    return {name: part for name, part in shared.items() if name != POLICY}


def direction(problem: Problem, shared: Params, own: Params) -> Array:
    """v (F,) of a client's head."""
    total = heads.matrix(problem, tree.combine(own, network(shared))).sum(axis=0)
    return total / jnp.maximum(jnp.linalg.norm(total), 1e-12)


def outputs(
    problem: Problem, shared: Params, own: Params, v: Array, x: PyTree, *key: Key, noise: tuple = (0, None)
) -> Array:
    """The logits of examples; `noise` is its factor and its key."""
    params, model = network(shared), problem.model
    z = model.features(params, x, *key)
    r, s = policy(shared[POLICY], z * v, *noise)
    psi = jax.lax.stop_gradient(heads.head_of(problem, params))
    return model.head(tree.combine(own, params), r * z) + model.head(tree.combine(psi, params), s * z)


def classified(
    problem: Problem, shared: Params, own: Params, v: Array, x: PyTree, y: Array, *key: Key, noise: tuple = (0, None)
) -> Array:
    """Their losses, by a shift of the global model's own logits."""
    params = network(shared)
    logits = outputs(problem, shared, own, v, x, *key, noise=noise)
    return problem.solver.loss(params, x, y, *key, shift=logits - problem.model.apply(params, x, *key))


def initial(key: Key, width: int) -> Params:
    """A and a, drawn as PyTorch does, with the gain and the offset of their normalization."""
    keys, bound, size = jax.random.split(jax.random.fold_in(key, NOISE)), width**-0.5, 2 * width
    weight = jax.random.uniform(keys[0], (width, size), minval=-bound, maxval=bound)
    bias = jax.random.uniform(keys[1], (size,), minval=-bound, maxval=bound)
    return {"weight": weight, "bias": bias, "gain": jnp.ones(size), "offset": jnp.zeros(size)}


def policy(layer: Params, inputs: Array, factor: Array | float, key: Key | None) -> tuple[Array, Array]:
    """r and s, (B, F) each, for inputs (B, F)."""
    h = inputs @ layer["weight"] + layer["bias"]
    h = (h - h.mean(axis=1, keepdims=True)) / jnp.sqrt(h.var(axis=1, keepdims=True) + EPSILON)
    u = jax.nn.relu(h * layer["gain"] + layer["offset"]).reshape(len(h), 2, -1)
    u = u if key is None else u + factor * jax.random.gumbel(key, u.shape)
    r, s = jnp.moveaxis(jax.nn.softmax(u, axis=1), 1, 0)
    return r, s


def discrepancy(a: Array, b: Array, mask: Array) -> Array:
    """() MMD^2 of the features a and b (B, F) of the examples in `mask` (B,)."""
    pairs = mask[:, None] * mask / jnp.maximum(mask.sum(), 1) ** 2

    def kernel(a, b):
        squares = jnp.square(a).sum(axis=1)[:, None] + jnp.square(b).sum(axis=1) - 2 * a @ b.T
        return sum(jnp.exp(-squares / (2 * width)) for width in BANDWIDTHS)

    return (pairs * (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b))).sum()
