"""SCAFFOLD: local steps corrected by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for federated learning" (ICML
2020, Algorithm 1 with its option II).

    A round: client k of S receives x and c; local steps y <- y - eta (g(y) - c_k + c) from y = x;
    c_k+ <- c_k - c + (x - y) / (steps eta), which is the mean of the g(y) on the way;
    x <- x + rate (sum_k n_k y_k / sum_k n_k - x);  c <- c + sum_k n_k (c_k+ - c_k) / sum_{all} n_k.

Departures from the paper: both means are weighted by n_k, as everywhere here, so that the weighted objective is what is
minimized. c_k+ is computed as that mean of gradients, which is option II for plain SGD and has a meaning for any
optimizer.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation
from pfljax.core import tree
from pfljax.core.types import Algorithm, ClientOutput, Predictor, State, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class ScaffoldConfig:
    """SCAFFOLD's knobs.

    Attributes:
        correction: share of the correction c - c_k that a step takes; 0 is FedAvg
        rate: eta_g, the server's
    """

    correction: float = 1.0
    rate: float = 1.0

    def __post_init__(self):
        if self.correction < 0:
            raise UsageError(f"--scaffold.correction={self.correction}: accepted: 0 or more")
        if not self.rate > 0:
            raise UsageError(f"--scaffold.rate={self.rate}: accepted: above 0")


def scaffold(problem: Problem, config: ScaffoldConfig) -> Algorithm:
    """SCAFFOLD."""
    num = problem.num_clients
    of_batch = jax.value_and_grad(lambda params, batch: problem.solver.mean_loss(params, batch))

    def init(key, clients):
        x = problem.init_models(key, 1)
        zeros = jax.tree.map(jnp.zeros_like, x)
        rows = {"control": tree.repeat(zeros, num), "optimizer": problem.optimizer_rows(x, num)}
        total = jnp.maximum(clients.train.size.sum(), 1).astype(jnp.float32)
        return State(total, {"model": x, "control": zeros}, (), rows)

    def download(key, state, cohort):
        return aggregation.all_models(cohort.ids.shape[0])

    def work(turn, models, row, shard):
        c = jax.tree.map(lambda leaf: leaf[0], models["control"])
        correction = tree.scale(tree.subtract(c, row["control"]), config.correction)

        def corrected(y, memory, batch):
            total, steps = memory
            loss, slope = of_batch(y, batch(0).of_model(0))
            return loss, tree.add(slope, correction), (tree.add(total, slope), steps + 1)

        memory = jax.tree.map(jnp.zeros_like, c), jnp.zeros(())
        y, optimizer, losses, (total, steps) = problem.descend_model(
            turn, models["model"], row["optimizer"], shard.train, corrected, memory
        )
        control = jax.tree.map(
            lambda mean, old: jnp.where(steps > 0, mean, old),
            tree.scale(total, 1 / jnp.maximum(steps, 1)),
            row["control"],
        )
        upload, sent = aggregation.weighted(y, shard.train.size)
        upload["control"] = tree.scale(tree.stack_one(tree.subtract(control, row["control"])), upload["weight"])
        return ClientOutput({"control": control, "optimizer": optimizer}, upload, {"loss": losses[0]}, sent)

    def update(key, state, returned):
        x, c = state.models["model"], state.models["control"]
        step = tree.subtract(aggregation.average(x, returned), x)
        c = tree.add(c, tree.scale(returned.upload["control"], 1 / state.server))
        return state._replace(models={"model": tree.add(x, tree.scale(step, config.rate)), "control": c}), {}

    def predictor(key, state, clients):
        return Predictor.one(state.models["model"], tree.num_rows(clients))

    return Algorithm(init, download, work, update, predictor, predictor, "shared", "the global model")
