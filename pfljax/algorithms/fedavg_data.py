"""FedAvg with data sharing: everyone also trains on a few examples of all clients.

Zhao, Li, Lai, Suda, Civin, Chandra, "Federated learning with non-IID data" (2018), as FedFomo compares with it: a share
of all training examples, drawn uniformly, is given to every client.

    G <- round(share sum_k n_k) examples drawn without replacement from those of all clients, once;
    a round of FedAvg in which client k trains on D_k and G together.

Departures from the paper: the paper takes G from data that no client has, warms the global model up on it, and gives
every client a random part of it; here, as FedFomo describes it, G is 5 % of the clients' data and everyone has all of
it. The mean stays weighted by n_k. Sending G once is not counted as traffic.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.averaging import averaging
from pfljax.core import tree
from pfljax.core.types import Algorithm, Split, UsageError
from pfljax.engine.views import Joined
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class FedAvgDataConfig:
    """The knob of data sharing.

    Attributes:
        share: part of all training examples that every client gets
    """

    share: float = 0.05

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise UsageError(f"--fedavg_data.share={self.share}: accepted: a share in [0, 1]")


def fedavg_data(problem: Problem, config: FedAvgDataConfig) -> Algorithm:
    """FedAvg with data sharing."""
    if not config.share:
        return averaging(problem)
    capacity = math.ceil(config.share * problem.num_clients * problem.n_max)

    def train(turn, models, kept, shard):
        own, pool = shard.train, turn.server
        x, y = (Joined(mine, own.size, theirs) for mine, theirs in ((own.x, pool.x), (own.y, pool.y)))
        return problem.fit_models(turn, models, kept, Split(x, y, own.size + pool.size))

    algorithm = averaging(problem, train=train)

    def init(key, clients):
        key, draw_key = jax.random.split(key)
        return algorithm.init(key, clients)._replace(server=draw(draw_key, clients.train))

    def draw(key, train: Split) -> Split:
        """G, padded to its capacity."""
        n_max = train.y.shape[1]
        real = (jnp.arange(n_max) < train.size[:, None]).reshape(-1)
        lots = jnp.where(real, jax.random.uniform(key, real.shape), -1.0)
        places = jax.lax.top_k(lots, capacity)[1]
        x, y = (tree.take(leaf, (places // n_max, places % n_max)) for leaf in (train.x, train.y))
        return Split(x, y, jnp.rint(config.share * train.size.sum()).astype(jnp.int32))

    return algorithm._replace(init=init, gradients=0, unaccounted="the examples that every client is given")
