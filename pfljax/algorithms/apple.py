"""APPLE: each client learns to mix all clients' core models.

Luo, Wu, "Adapt to adaptation: learning personalization for cross-silo federated learning" (IJCAI 2022). Client k owns a
core model w_k and a vector p_k (K,), its relation to every client; its personal model is sum_j p_kj w_j.

    A round: client k receives up to M others' core models; on each mini-batch, with g the gradient of its loss at its
    personal model,
        w_k  <- w_k - eta p_kk g
        p_kj <- p_kj - rate (<w_j, g> + lambda(r) mu (p_kj - p0_j)),    p0_j = n_j / n,
        lambda(r) = (1 + cos(pi r / L)) / 2 in rounds r < L, then 0;
    and sends w_k.  Client k predicts with its personal model, built from the newest cores.

Departures from the paper: Steps on w_k are those of the solver's optimizer, which persists across rounds. The server
holds everyone's newest core, and clients download cores from there no matter who takes part. The paper does not say
which M a client downloads; we draw M at random. A client does not store other clients' models, which would be K per
client. A core that it has not downloaded is replaced by its own, with the weight p_kj, which stays fixed: the weights
keep their sum, and w_k steps along g times the total weight it carries. Batch statistics are a client's own. p0 is sent
once; its traffic is spread over the rounds in which a client takes part. Newcomers train alone from the mean of the
cores weighted by p0, for as many rounds as the run has. We score the model from which a client would start its next
round. With plain SGD, cores move by about 1 / K of the learning rate, since p_kk is about 1 / K.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import parameters
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, First, Ledger, Prediction, PyTree, Report, Start
from pfljax.local.problem import Problem


class Row(NamedTuple):
    """The optimizer of the client's core model, and p_k - p0 (K,)."""

    optimizer: PyTree
    moved: Array


@method(keeps="its core model, its relation to all others", travels="other clients' core models down, its own up")
@dataclasses.dataclass(frozen=True)
class APPLE:
    """APPLE (Luo and Wu, 2022): each client learns to mix all clients' core models."""

    neighbors: int = knob(0, at_least=0, help="M, number of other clients' core models downloaded per round; 0: all")
    rate: float = knob(0.001, at_least=0, grid=(0.0001, 0.001, 0.01), help="learning rate of p; 0 keeps p at p0")
    mu: float = knob(0.1, at_least=0, grid=(0.001, 0.01, 0.1, 1.0), help="strength of the pull of p toward p0")
    pulled: float = knob(
        0.2, at_least=0, at_most=1, grid=(0.1, 0.2, 0.5), help="L / R, share of rounds in which p is pulled toward p0"
    )

    def build(self, problem: Problem) -> Algorithm:
        num = problem.num_clients
        num_others = min(self.neighbors or num - 1, num - 1)

        def start(key, clients):
            shares = clients.train.size / jnp.maximum(clients.train.size.sum(), 1)
            return Start(shares, problem.init_models(key, num))

        def first_row(key, client, start):
            return First(Row(problem.own_model(key, client).optimizer, jnp.zeros((num,))))

        def held(key, own):
            """(1 + M,): the clients whose cores a client uses, its own first."""
            steps = jax.random.permutation(key, num - 1)[:num_others] if num_others < num - 1 else jnp.arange(num - 1)
            return jnp.concatenate([own[None], (own + 1 + steps) % num]).astype(jnp.int32)

        def server_update(key, state, aggregate):
            return state._replace(models=tree.where(aggregate.count > 0, aggregate.upload, state.models)), {}

        def relation(context, row):
            return context.server + row.moved  # (K,) p_k

        def whom(context, row, size):
            index = held(jax.random.fold_in(context.key, context.round), context.client)
            return parameters.by_size(index, parameters.of_some(relation(context, row), index))

        def predict(context, models, row, data):
            weights = parameters.of_some(relation(context, row), context.index)
            others = jax.tree.map(lambda leaf: leaf[1:], models)
            return Prediction.one(parameters.mixture(problem, weights, tree.first(models), others))

        def adapt(context, models, data):
            mean = tree.mix(context.server, models)
            return Prediction.one(problem.alone(context, mean, data, rounds=problem.rounds))

        return Algorithm(
            start=start,
            first_row=first_row,
            download=lambda context, row, cohort: held(context.key, context.client),
            client_update=self._client_update(problem),
            server_update=server_update,
            whom=whom,
            predict=predict,
            adapt=adapt,
            topology="shared",
            sends="models",
            ledger=Ledger(gradients=1),
            report=Report(
                scored="each client's mixture of core models",
                collaboration=lambda context, row: parameters.heaviest(relation(context, row)),
                topology="peers",
            ),
            traffic=lambda counted: counted._replace(
                model=counted.model * num_others / (1 + num_others),  # a client does not download its own core
                server=counted.server / problem.rounds_of_a_client,
            ),
        )

    def _client_update(self, problem: Problem):
        """Returns the client's update."""
        solver = problem.solver
        of_batch = jax.value_and_grad(lambda params, batch: solver.mean_loss(params, batch))

        def client_update(context, models, row, data):
            shares, index = context.server, context.index
            away = (shares + row.moved).at[index].set(0).sum()
            pull = self.mu * schedule(context.round, self.pulled * problem.rounds)
            others = jax.tree.map(lambda leaf: leaf[1:], models)
            mixed = lambda core, p: parameters.mixture(problem, p.at[0].add(away), core, others)

            def step(core, p, batch):
                params, back = jax.vjp(mixed, core, p)
                loss, slope = of_batch(params, batch(0))
                slope, relation = back(slope)
                return loss, slope, p - self.rate * (relation + pull * (p - shares[index]))

            p = shares[index] + row.moved[index]
            core, optimizer, loss, p = solver.descend(
                context.key, tree.first(models), row.optimizer, data.train, step, p, round_number=context.round
            )
            row = Row(optimizer, row.moved.at[index].set(p - shares[index]))
            return ClientOutput(row, tree.stack_one(core), {"loss": loss})

        return client_update


def schedule(number: Array, length: Array | float) -> Array:
    """() lambda(r): cosine decay from 1 to 0 over `length` rounds."""
    falling = (1 + jnp.cos(jnp.pi * number / jnp.maximum(length, 1))) / 2
    return jnp.where(number < length, falling, 0.0)
