"""APPLE: each client learns to mix all clients' core models.

Luo, Wu, "Adapt to adaptation: learning personalization for cross-silo federated learning" (IJCAI
2022). Client k owns a core model w_k and a vector p_k (K,), its relation to every client; its
personal model is sum_j p_kj w_j.

    A round: client k receives M others' core models, which replace its copies of these;
    on each mini-batch, with g the gradient of its loss at its personal model, built from w_k and its
        copies w_j,
        w_k  <- w_k - eta p_kk g
        p_kj <- p_kj - rate (<w_j, g> + lambda(r) mu (p_kj - p0_j)),    p0_j = n_j / n,
        lambda(r) = (1 + cos(pi r / L)) / 2 in rounds r < L, then 0;
    and sends w_k.  Client k predicts with its personal model.

With M < K - 1, a client keeps copies of all other cores, as in the authors' code, and uses stale
ones of those that it did not download. It starts with everyone's initial core. So the rows of all
clients hold K (K - 1) models: 100 clients with 1 MB models take 10 GB, for which there are the host
and disk stores. With M = K - 1, nothing is kept.

Departures from the paper: Steps on w_k are those of the solver's optimizer, which persists across
rounds. The server holds everyone's newest core, and clients download cores from there no matter who
takes part. The M cores are drawn uniformly, which is also what the authors' code does: it means to
prefer cores that were not downloaded yet, but counts none as downloaded. Its SGD has momentum 0.9,
which starts anew in every round: `weights_momentum` for p, the solver's for w_k. Batch statistics are a
client's own. The traffic of what is sent once (p0 and initial cores) is spread over the rounds in
which a client takes part. Newcomers train alone from the mean of the cores weighted by p0, for as
many rounds as the run has. We score the model from which a client would start its next round, with M
newly drawn cores. With plain SGD, cores move by about 1 / K of the learning rate, since p_kk is about
1 / K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import parameters
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Cohort,
    First,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Traffic,
    Upload,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem
from pfljax.local.solver import Slope, TrainState, joined, slope
from pfljax.settings.method import hyperparameter, method


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        opt_state: The optimizer's state for its core model.
        moved: (K,) p_k - p0.
        copies: (K - 1, ...) copies of the cores after its own; () if it downloads all of them.
    """

    opt_state: PyTree
    moved: Array
    copies: Params


class Relation(NamedTuple):
    """p_k in training, in the order of `ordered`.

    Attributes:
        p: (K,) p_k.
        velocity: (K,) momentum of its steps.
    """

    p: Array
    velocity: Array


@method(
    keeps="its core model, its relation to all others",
    travels="other clients' core models down, its own up",
)
@dataclasses.dataclass(frozen=True)
class APPLE:
    """APPLE (Luo and Wu, 2022): each client learns to mix all clients' core models.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.APPLE(neighbors=5, mu=0.01)
        APPLE(neighbors=5, weights_learning_rate=0.001, weights_momentum=0.0, mu=0.01,
              pull_share=0.2)
    """

    neighbors: int = hyperparameter(
        0,
        at_least=0,
        help="M, number of other clients' core models downloaded per round; 0: all",
    )
    weights_learning_rate: float = hyperparameter(
        0.001,
        at_least=0,
        grid=(0.0001, 0.001, 0.01),
        help="learning rate of p; 0 keeps p at p0",
        former="rate",
    )
    weights_momentum: float = hyperparameter(
        0.0,
        at_least=0,
        below=1,
        grid=(0.0, 0.9),
        help="momentum of p's steps within a round; authors: 0.9",
        former="momentum",
    )
    mu: float = hyperparameter(
        0.1,
        at_least=0,
        grid=(0.001, 0.01, 0.1, 1.0),
        help="strength of the pull of p toward p0",
    )
    pull_share: float = hyperparameter(
        0.2,
        at_least=0,
        at_most=1,
        grid=(0.1, 0.2, 0.5),
        help="L / R, share of rounds in which p is pulled toward p0",
        former="pulled",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_clients = problem.num_clients
        num_others = min(self.neighbors or num_clients - 1, num_clients - 1)
        num_stale = num_clients - 1 - num_others
        solver = problem.solver

        # The server's models are the cores, (K, ...); its state is p0 (K,).

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            opt_state = problem.init_personal(key, client).opt_state
            copies = ()
            if num_stale:
                copies = tree.take(start.models, ordered(client, num_clients)[1:])
            return First(Row(opt_state, moved=jnp.zeros((num_clients,)), copies=copies))

        def draw_cores(key: Key, client: Array) -> Array:
            """(1 + M,): the clients whose newest cores a client gets, its own first."""
            if num_stale:
                steps = jax.random.permutation(key, num_clients - 1)[:num_others]
            else:
                steps = jnp.arange(num_clients - 1)
            others = (client + 1 + steps) % num_clients
            return jnp.concatenate([client[None], others]).astype(jnp.int32)

        def download(context: ClientContext, row: Row, cohort: Cohort) -> Array:
            return draw_cores(context.key, context.client)

        def client_update(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> ClientOutput:
            # The M cores replace its copies of these
            copies = other_cores(context, models, row)
            other_params, _ = solver.without_statistics(copies)

            # lambda(r) mu, p0_j
            pull = self.mu * schedule(context.round, self.pull_share * problem.rounds)
            order = ordered(context.client, num_clients)
            p0 = context.server[order]

            def step(
                core: Params,
                statistics: Params,
                relation: Relation,
                batch_at: Callable[[int], Batch],
            ) -> tuple[Slope, Relation]:
                # g, the gradient of the loss at the personal model
                def personal_params(core: Params, p: Array) -> Params:
                    return mixture(p, core, other_params)

                params, pull_back = jax.vjp(personal_params, core, relation.p)
                core_slope = slope(solver.mean_loss, params, statistics, batch_at(0))

                # p_kk g, for the step w_k <- w_k - eta p_kk g, and <w_j, g>
                core_gradient, p_gradient = pull_back(core_slope.gradient)

                # p_kj <- p_kj - rate (<w_j, g> + lambda(r) mu (p_kj - p0_j))
                velocity = self.weights_momentum * relation.velocity + p_gradient
                velocity = velocity + pull * (relation.p - p0)
                relation = Relation(relation.p - self.weights_learning_rate * velocity, velocity)
                return core_slope._replace(gradient=core_gradient), relation

            core, statistics = solver.without_statistics(tree.first(models))
            trained, loss, relation = solver.train(
                context.key,
                TrainState(core, statistics, row.opt_state),
                data.train,
                step,
                Relation(p0 + row.moved[order], velocity=jnp.zeros_like(p0)),
                round_number=context.round,
            )
            moved = jnp.zeros((num_clients,)).at[order].set(relation.p - p0)
            new_row = Row(
                opt_state=trained.opt_state,
                moved=moved,
                copies=copies if num_stale else (),
            )
            upload = Upload(tree.stack_one(trained.whole))
            return ClientOutput(row=new_row, upload=upload, report=ClientReport(loss))

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            sizes = clients.train.size
            p0 = sizes / jnp.maximum(sizes.sum(), 1)
            return Start(p0, problem.init_models(key, num_clients))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            cores = tree.where(aggregate.num_sent > 0, aggregate.upload.update, state.models)
            return state.with_models(cores), {}

        # ---- What a client predicts with.

        def relation_of(context: ClientContext, row: Row) -> Array:
            """p_k (K,), by the clients' numbers."""
            return context.server + row.moved

        def select_models(context: ClientContext, row: Row, size: Array) -> Mixture:
            index = draw_cores(jax.random.fold_in(context.key, context.round), context.client)
            return parameters.by_size(index, relation_of(context, row)[index])

        def predict(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> Prediction:
            """With its personal model."""
            p = relation_of(context, row)[ordered(context.client, num_clients)]
            core, statistics = solver.without_statistics(tree.first(models))
            others, _ = solver.without_statistics(other_cores(context, models, row))
            return Prediction.single(joined(mixture(p, core, others), statistics))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            mean = tree.mix(context.server, models)
            return Prediction.single(problem.train_newcomer(context, data, start=mean))

        # ---- Accounting.

        def heaviest(context: ClientContext, row: Row) -> Mapping[str, Array]:
            return parameters.heaviest(relation_of(context, row))

        def traffic(counted: Traffic) -> Traffic:
            """A client does not download its own core, and downloads p0 and the first copies only once."""
            num_downloaded = num_others + num_stale / problem.rounds_of_a_client
            return counted._replace(
                model=counted.model * num_downloaded / (1 + num_others),
                server=counted.server / problem.rounds_of_a_client,
            )

        return Algorithm(
            start=start,
            first_row=first_row,
            download=download,
            client_update=client_update,
            server_update=server_update,
            select_models=select_models,
            predict=predict,
            adapt=adapt,
            topology=Topology.SHARED,
            sends="models",
            ledger=Ledger(gradients=1),
            report=MethodReport(
                scored="each client's mixture of core models",
                collaboration=heaviest,
                topology=Topology.PEERS,
            ),
            traffic=traffic,
        )


def ordered(client: Array, num_clients: int) -> Array:
    """(K,) all clients: one itself, then those after it."""
    return (client + jnp.arange(num_clients)) % num_clients


def mixture(p: Array, core: Params, others: Params) -> Params:
    """sum_j p_kj w_j, from p_k (K,) in the order of `ordered`, w_k (...) and the other w_j (K - 1, ...)."""
    others_part = tree.mix(p[1:], others)
    return tree.add(tree.scale(core, p[0]), others_part)


def other_cores(context: ClientContext, models: Params, row: Row) -> Params:
    """The cores (K - 1, ...) of the clients after a client: its copies, of which it just received some."""
    received = jax.tree.map(lambda leaf: leaf[1:], models)
    if not jax.tree.leaves(row.copies):
        return received
    num_clients = len(row.moved)
    positions = (context.index[1:] - context.client) % num_clients - 1
    return jax.tree.map(lambda copies, new: copies.at[positions].set(new), row.copies, received)


def schedule(number: Array, length: Array | float) -> Array:
    """() lambda(r): cosine decay from 1 to 0 over `length` rounds."""
    decay = (1 + jnp.cos(jnp.pi * number / jnp.maximum(length, 1))) / 2
    return jnp.where(number < length, decay, 0.0)
