"""APPLE: each client learns to mix all clients' core models.

Luo, Wu, "Adapt to adaptation: learning personalization for cross-silo federated learning" (IJCAI 2022). Client k owns a
core model w_k and a vector p_k (K,), its relation to every client; its personal model is sum_j p_kj w_j.

    A round: client k receives M others' core models, which replace its copies of these; on each mini-batch, with g the
    gradient of its loss at its personal model, built from w_k and its copies w_j,
        w_k  <- w_k - eta p_kk g
        p_kj <- p_kj - rate (<w_j, g> + lambda(r) mu (p_kj - p0_j)),    p0_j = n_j / n,
        lambda(r) = (1 + cos(pi r / L)) / 2 in rounds r < L, then 0;
    and sends w_k.  Client k predicts with its personal model.

With M < K - 1, a client keeps copies of all other cores, as in the authors' code, and uses stale ones of those that it
did not download. It starts with everyone's initial core. So the rows of all clients hold K (K - 1) models: 100 clients
with 1 MB models take 10 GB, for which there are the host and disk stores. With M = K - 1, nothing is kept.

Departures from the paper: Steps on w_k are those of the solver's optimizer, which persists across rounds. The server
holds everyone's newest core, and clients download cores from there no matter who takes part. The M cores are drawn
uniformly, which is also what the authors' code does: it means to prefer cores that were not downloaded yet, but counts
none as downloaded. Its SGD has momentum 0.9, which starts anew in every round: `momentum` for p, the solver's for w_k.
Batch statistics are a client's own. The traffic of what is sent once (p0 and initial cores) is spread over the rounds
in which a client takes part. Newcomers train alone from the mean of the cores weighted by p0, for as many rounds as the
run has. We score the model from which a client would start its next round, with M newly drawn cores. With plain SGD,
cores move by about 1 / K of the learning rate, since p_kk is about 1 / K.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import parameters
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientOutput,
    First,
    Ledger,
    Params,
    Prediction,
    PyTree,
    Report,
    Start,
)
from pfljax.local.problem import Problem


class Row(NamedTuple):
    """The optimizer of the client's core model, p_k - p0 (K,), and copies (K - 1, ...) of the cores after its own."""

    optimizer: PyTree
    moved: Array
    copies: Params


@method(keeps="its core model, its relation to all others", travels="other clients' core models down, its own up")
@dataclasses.dataclass(frozen=True)
class APPLE:
    """APPLE (Luo and Wu, 2022): each client learns to mix all clients' core models."""

    neighbors: int = knob(0, at_least=0, help="M, number of other clients' core models downloaded per round; 0: all")
    rate: float = knob(0.001, at_least=0, grid=(0.0001, 0.001, 0.01), help="learning rate of p; 0 keeps p at p0")
    momentum: float = knob(0.0, at_least=0, below=1, grid=(0.0, 0.9), help="of p's steps within a round; authors: 0.9")
    mu: float = knob(0.1, at_least=0, grid=(0.001, 0.01, 0.1, 1.0), help="strength of the pull of p toward p0")
    pulled: float = knob(
        0.2, at_least=0, at_most=1, grid=(0.1, 0.2, 0.5), help="L / R, share of rounds in which p is pulled toward p0"
    )

    def build(self, problem: Problem) -> Algorithm:
        num = problem.num_clients
        num_others = min(self.neighbors or num - 1, num - 1)
        num_stale = num - 1 - num_others
        relation = lambda context, row: context.server + row.moved  # (K,) p_k

        def start(key, clients):
            shares = clients.train.size / jnp.maximum(clients.train.size.sum(), 1)
            return Start(shares, problem.init_models(key, num))

        def first_row(key, client, start):
            copies = tree.take(start.models, ordered(client, num)[1:]) if num_stale else ()
            return First(Row(problem.own_model(key, client).optimizer, jnp.zeros((num,)), copies))

        def held(key, own):
            """(1 + M,): the clients whose newest cores a client has, its own first."""
            steps = jax.random.permutation(key, num - 1)[:num_others] if num_stale else jnp.arange(num - 1)
            return jnp.concatenate([own[None], (own + 1 + steps) % num]).astype(jnp.int32)

        def server_update(key, state, aggregate):
            return state._replace(models=tree.where(aggregate.count > 0, aggregate.upload, state.models)), {}

        def whom(context, row, size):
            index = held(jax.random.fold_in(context.key, context.round), context.client)
            return parameters.by_size(index, relation(context, row)[index])

        def predict(context, models, row, data):
            weights = relation(context, row)[ordered(context.client, num)]
            cores = others(context, models, row)
            return Prediction.one(parameters.mixture(problem, weights, tree.first(models), cores))

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
                # A client does not download its own core, and the first copies only once.
                model=counted.model * (num_others + num_stale / problem.rounds_of_a_client) / (1 + num_others),
                server=counted.server / problem.rounds_of_a_client,
            ),
        )

    def _client_update(self, problem: Problem):
        """Returns the client's update."""
        solver = problem.solver
        of_batch = jax.value_and_grad(lambda params, batch: solver.mean_loss(params, batch))

        def client_update(context, models, row, data):
            order, cores = ordered(context.client, problem.num_clients), others(context, models, row)
            shares = context.server[order]
            pull = self.mu * schedule(context.round, self.pulled * problem.rounds)

            def step(core, memory, batch):
                p, velocity = memory
                params, back = jax.vjp(lambda *own: parameters.mixture(problem, own[1], own[0], cores), core, p)
                loss, slope = of_batch(params, batch(0))
                slope, relation = back(slope)
                velocity = self.momentum * velocity + relation + pull * (p - shares)
                return loss, slope, (p - self.rate * velocity, velocity)

            memory = shares + row.moved[order], jnp.zeros_like(shares)
            core, optimizer, loss, (p, _) = solver.descend(
                context.key, tree.first(models), row.optimizer, data.train, step, memory, round_number=context.round
            )
            moved, copies = row.moved.at[order].set(p - shares), cores if jax.tree.leaves(row.copies) else ()
            return ClientOutput(Row(optimizer, moved, copies), tree.stack_one(core), {"loss": loss})

        return client_update


def ordered(client: Array, num: int) -> Array:
    """(K,) all clients: one itself, then those after it."""
    return (client + jnp.arange(num)) % num


def others(context: ClientContext, models: Params, row: Row) -> Params:
    """The cores (K - 1, ...) of the clients after a client: its copies, of which it just received some."""
    received = jax.tree.map(lambda leaf: leaf[1:], models)
    if not jax.tree.leaves(row.copies):
        return received
    places = (context.index[1:] - context.client) % len(row.moved) - 1
    return jax.tree.map(lambda copies, new: copies.at[places].set(new), row.copies, received)


def schedule(number: Array, length: Array | float) -> Array:
    """() lambda(r): cosine decay from 1 to 0 over `length` rounds."""
    falling = (1 + jnp.cos(jnp.pi * number / jnp.maximum(length, 1))) / 2
    return jnp.where(number < length, falling, 0.0)
