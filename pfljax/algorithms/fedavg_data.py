"""FedAvg with data sharing: every client also trains on a few examples shared by all clients.

Zhao, Li, Lai, Suda, Civin, Chandra, "Federated learning with non-IID data" (2018), as used for comparison by FedFomo:
every client receives a uniformly drawn share of all training examples.

    G <- round(share sum_k n_k) examples of all clients, drawn once without replacement;
    a round of FedAvg in which client k trains on D_k and G together.

Departures from the paper: The paper takes G from data that no client has, warms up the global model on it, and gives
every client a random part of it. Here, as FedFomo describes it, G is 5 % of the clients' data and every client receives
all of it. The mean is still weighted by n_k. A client downloads G once; its traffic is spread over the rounds in which
the client takes part.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Split, Start
from pfljax.exchange.views import Joined, each
from pfljax.local.batches import sampled
from pfljax.local.problem import Problem


@method(
    name="fedavg_data",
    keeps="5 % of everyone's examples",
    travels="the global model, both ways",
    knows="examples of other clients",
)
@dataclasses.dataclass(frozen=True)
class FedAvgData:
    """FedAvg with data sharing (Zhao et al., 2018): all clients also train on a few shared examples."""

    share: float = knob(
        0.05,
        at_least=0,
        at_most=1,
        static=True,
        grid=(0.025, 0.05, 0.1, 0.25),
        help="share of all training examples that every client receives; 0 is FedAvg",
    )

    def build(self, problem: Problem) -> Algorithm:
        if not self.share:
            return averaging(problem)
        capacity = math.ceil(self.share * problem.num_clients * problem.n_max)

        def train(context, models, kept, data):
            own, shared = data.train, context.server
            x, y = each(lambda mine, theirs: Joined(mine, own.size, theirs), own[:2], shared[:2])
            return problem.fit(context, models, kept, Split(x, y, own.size + shared.size))

        def start(key, clients):
            key, draw_key = jax.random.split(key)
            models = problem.init_models(key, 1)
            size = jnp.rint(self.share * clients.train.size.sum())
            return Start(sampled(draw_key, clients.train, capacity, size), models)

        traffic = lambda counted: counted._replace(server=counted.server / problem.rounds_of_a_client)
        passes = problem.solver.max_steps(problem.n_max + capacity) / problem.solver.max_steps(problem.n_max)
        ledger = Ledger(gradients=0, passes=passes, unaccounted="the examples shared with every client")
        return averaging(problem, train=train, start=start, traffic=traffic, ledger=ledger)
