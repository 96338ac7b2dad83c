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

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Params,
    PyTree,
    Split,
    Traffic,
    Trained,
)
from pfljax.exchange.views import Joined, map_examples
from pfljax.local.batches import sampled
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(
    name="fedavg_data",
    keeps="5 % of everyone's examples",
    travels="the global model, both ways",
    knows="examples of other clients",
)
@dataclasses.dataclass(frozen=True)
class FedAvgData:
    """FedAvg with data sharing (Zhao et al., 2018): all clients also train on a few shared examples.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedAvgData(share=0.1)
        FedAvgData(share=0.1)
    """

    share: float = hyperparameter(
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

        # The server's key gives one key for theta, and one for G.

        def first_model(key: Key) -> Params:
            model_key, _ = jax.random.split(key)
            return problem.init_global(model_key)

        def first_server(key: Key, params: Params, clients: ClientData) -> Split:
            """G: round(share sum_k n_k) examples of all clients. The server's state is G."""
            _, draw_key = jax.random.split(key)
            size = jnp.rint(self.share * clients.train.size.sum())
            return sampled(draw_key, clients.train, capacity, size)

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            local_data = data.train
            shared = context.server

            def join(own_examples: Array, shared_examples: jax.Array) -> Joined:
                return Joined(own_examples, local_data.size, shared_examples)

            # D_k and G together
            x, y = map_examples(join, (local_data.x, local_data.y), (shared.x, shared.y))
            return problem.fit(context, models, Split(x, y, local_data.size + shared.size))

        def traffic(counted: Traffic) -> Traffic:
            """A client downloads G once."""
            return counted._replace(server=counted.server / problem.rounds_of_a_client)

        own_steps = problem.solver.max_steps(problem.n_max)
        steps = problem.solver.max_steps(problem.n_max + capacity)
        return averaging(
            problem,
            train=train,
            ledger=Ledger(
                gradients=0,
                passes=steps / own_steps,
                unaccounted="the examples shared with every client",
            ),
            first_model=first_model,
            first_server=first_server,
            traffic=traffic,
        )
