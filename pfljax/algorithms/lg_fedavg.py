"""LG-FedAvg: local lower layers that see the client's own data, shared upper ones.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally: federated learning with
local and global representations" (2020).

    A round: client k receives the upper layers theta, trains them together with its own lower layers phi_k on D_k;
    phi_k stays; theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: the authors' runs start from a trained FedAvg model, these from scratch. Newcomers train
lower layers of their own under the shared upper ones, for as many rounds as a run has, and leave those as they are.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax import tree
from pfljax.global_model import averaging
from pfljax.solvers import Problem
from pfljax.types import Algorithm, Predictor, UsageError


@dataclasses.dataclass(frozen=True)
class LGFedAvgConfig:
    """LG-FedAvg's knob.

    Attributes:
        shared_layers: how many of the model's last layers are shared; 0: half of them, one at least
    """

    shared_layers: int = 0


def lg_fedavg(problem: Problem, config: LGFedAvgConfig) -> Algorithm:
    """LG-FedAvg."""
    num_layers = len(problem.model.layers)
    if not 0 <= config.shared_layers <= num_layers:
        raise UsageError(
            f"--lg_fedavg.shared_layers={config.shared_layers}: accepted: 1 to {num_layers}, the layers of the model, "
            "and 0 for half of them"
        )
    num_shared = config.shared_layers or max(1, num_layers // 2)

    def split(models):
        """(shared, local) layers."""
        return tree.partition(models, problem.model.mask(models, num_shared))

    def rows(key, models, clients):
        num = tree.num_rows(clients)
        local = split(problem.init_models(key, num))[1]
        return {"lower": local, "optimizer": problem.optimizer_rows(models, num)}

    def train(turn, models, row, shard):
        whole = tree.combine(models, tree.stack_one(row["lower"]))
        whole, optimizer, losses = problem.fit_models(turn, whole, row["optimizer"], shard.train)
        shared, local = split(whole)
        return shared, {"lower": jax.tree.map(lambda leaf: leaf[0], local), "optimizer": optimizer}, losses

    def spread(models, num):
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[0], (num, *leaf.shape[1:])), models)

    def predictor(key, state, clients):
        return Predictor.own(tree.combine(spread(state.models, tree.num_rows(clients)), state.clients["lower"]))

    def adapt(key, state, clients):
        num = tree.num_rows(clients)
        init_key, train_key = jax.random.split(key)
        start = tree.combine(spread(state.models, num), split(problem.init_models(init_key, num))[1])
        frozen = problem._replace(solver=problem.solver._replace(optimizer=only_local(problem.solver.optimizer)))
        return Predictor.own(frozen.train_alone(train_key, start, clients, own=True, rounds=problem.rounds))

    def only_local(optimizer):
        """The optimizer, with updates of zero for the shared layers."""

        def update(updates, state, params, **extra):
            updates, state = optimizer.update(updates, state, params, **extra)
            mask = problem.model.mask(updates, num_shared)
            return jax.tree.map(lambda m, leaf: jnp.zeros_like(leaf) if m else leaf, mask, updates), state

        return optimizer._replace(update=update)

    return averaging(
        problem,
        train=train,
        rows=rows,
        shared=lambda models: split(models)[0],
        predictor=predictor,
        adapt=adapt,
        scored="the shared upper layers on each client's own lower ones",
    )
