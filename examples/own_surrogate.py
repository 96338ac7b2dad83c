"""A method of one's own from a surrogate: pFedMe (Dinh, Tran, Nguyen, NeurIPS 2020) in thirty lines.

    python examples/own_surrogate.py

f_k(w) = min_theta l_k(theta) + strength / 2 |theta - w|^2. Its partial first-order surrogate near w has v = theta: v
is minimized by local training with a proximal term, and in u = w local steps descend strength / 2 |theta - w|^2. The
client predicts with theta. `surrogates.client_server` makes an Algorithm of that; `surrogates.decentralized` would too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from pfljax import data, models
from pfljax.algorithms.common import surrogates
from pfljax.core import tree
from pfljax.core.types import Predictor
from pfljax.engine.plan import make_plan
from pfljax.engine.rounds import make_round
from pfljax.evaluation import metrics
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver


def moreau_envelope(problem: Problem, strength: float) -> surrogates.Surrogate:
    """pFedMe's surrogate."""

    def distance(a, b):
        return sum(jnp.square(x - y).sum() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    def init(u):
        return jax.tree.map(lambda leaf: leaf[0], u)

    def minimize(turn, u, v, split):
        w = init(u)
        near = lambda theta, batch: problem.solver.mean_loss(theta, batch) + strength / 2 * distance(theta, w)
        start = problem.solver.optimizer.init(w)
        theta, _, _ = problem.solver.fit(turn.key, w, start, split, round_number=turn.round, objective=near)
        return theta, tree.stack_one(theta), {}

    def loss(w, batch, theta):
        return strength / 2 * distance(w, theta)

    def predictor(even, v):
        num = tree.num_rows(v)
        return Predictor(v, jnp.arange(num, dtype=jnp.int32)[:, None], jnp.ones((num, 1)), "own")

    return surrogates.Surrogate(1, init, minimize, loss, predictor, "each client's theta")


def train(rounds: int = 40, strength: float = 2.0) -> float:
    """Trains on digits; returns the mean test accuracy over clients."""
    federation = data.digits(train_examples=15)
    model = models.make("mlp", federation.train.x.shape[2:], federation.task, federation.num_classes)
    solver = Solver(model.loss, optax.with_extra_args_support(optax.sgd(0.2)), epochs=10)
    num, n_max = federation.train.y.shape
    problem = Problem(model, solver, make_plan(devices=1), num, num, n_max, rounds)
    algorithm = surrogates.client_server(problem, moreau_envelope(problem, strength))
    one_round = jax.jit(make_round(algorithm, problem.plan, num, num))
    state = jax.jit(algorithm.init)(jax.random.key(0), federation.client_data)
    for number in range(rounds):
        state, _ = one_round(jax.random.key(1), number, state, federation.client_data)
    predictor = algorithm.predictor(jax.random.key(2), state, federation.client_data)
    return float(metrics.evaluate(problem.plan, model, predictor, federation.test)["accuracy"].mean())


if __name__ == "__main__":
    print(f"pFedMe on digits, 16 clients of 15 examples: {train():.1%} mean test accuracy")
