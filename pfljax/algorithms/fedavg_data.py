"""FedAvg with data sharing: everyone also trains on a few examples of all clients.

Zhao, Li, Lai, Suda, Civin, Chandra, "Federated learning with non-IID data" (2018), as FedFomo compares with it: a share
of all training examples, drawn uniformly, is given to every client.

    G <- round(share sum_k n_k) examples drawn without replacement from those of all clients, once;
    a round of FedAvg in which client k trains on D_k and G together.

Departures from the paper: the paper takes G from data that no client has, warms the global model up on it, and gives
every client a random part of it; here, as FedFomo describes it, G is 5 % of the clients' data and everyone has all of
it. The mean stays weighted by n_k. A client downloads G once; as traffic it is spread over the rounds in which a client
takes part.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.averaging import averaging
from pfljax.core.method import knob, method
from pfljax.core.types import Algorithm, Ledger, Split
from pfljax.engine.views import Joined
from pfljax.local.problem import Problem


@method(name="fedavg_data", keeps="5 % of everyone's examples", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAvgData:
    """FedAvg with data sharing (Zhao et al., 2018): everyone also trains on a few examples of all clients."""

    share: float = knob(
        0.05,
        at_least=0,
        at_most=1,
        static=True,
        grid=(0.025, 0.05, 0.1, 0.25),
        help="part of all training examples that every client gets; 0 is FedAvg",
    )

    def build(self, problem: Problem) -> Algorithm:
        if not self.share:
            return averaging(problem)
        capacity = math.ceil(self.share * problem.num_clients * problem.n_max)

        def train(context, models, kept, data):
            own, shared = data.train, context.server
            x, y = (Joined(mine, own.size, theirs) for mine, theirs in ((own.x, shared.x), (own.y, shared.y)))
            return problem.fit_models(context, models, kept, Split(x, y, own.size + shared.size))

        ledger = Ledger(gradients=0, unaccounted="the examples that every client is given")
        algorithm = averaging(problem, train=train, ledger=ledger)

        def init(key, clients):
            key, draw_key = jax.random.split(key)
            return algorithm.init(key, clients)._replace(server=draw(draw_key, clients.train))

        def draw(key, train: Split) -> Split:
            """G, padded to its capacity."""
            n_max = train.y.shape[1]
            real = (jnp.arange(n_max) < train.size[:, None]).reshape(-1)
            lots = jnp.where(real, jax.random.uniform(key, real.shape), -1.0)
            places = jax.lax.top_k(lots, capacity)[1]
            x, y = (leaf[places // n_max, places % n_max] for leaf in (train.x, train.y))
            return Split(x, y, jnp.rint(self.share * train.size.sum()).astype(jnp.int32))

        traffic = lambda counted: counted._replace(server=counted.server / problem.rounds_of_a_client)
        return dataclasses.replace(algorithm, init=init, traffic=traffic)
