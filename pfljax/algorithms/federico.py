"""FedeRiCo: decentralized federated learning with the right collaborators.

"Find your friends: personalized federated learning with the right collaborators" (TMLR submission; arXiv 2210.06597).
Equations, algorithm lines and sections refer to the TMLR submission.

Algorithm 1, a round of client i:
    B <- {i} and M neighbors, epsilon-greedy in w_i                                           (l. 7)
    l_ib <- sum_s l(phi_b; x_s, y_s) for b in B; other losses stay                             (l. 10-13)
    L_ij <- (1 - beta) L_ij + beta l_ij;  w_i <- softmax(-L_i)                                 (l. 14-15)
    sends g_bi = w_ib * grad_phi_b sum_s l(phi_b; x_s, y_s) to each b                          (l. 16-17)
    phi_i <- optimizer step with sum_j g_ij / n_i                                              (l. 19-22)

Departures from the paper, where the listing leaves something open:
- A client always holds its own model, at no cost, in addition to the M neighbors: M = 0 is exactly Local training.
- The sum of gradients is divided by the owner's n_i, so that a learning rate means the same as in Local. With
  mini-batches, a step sums over the clients that still have a batch; in `delta` rounds, changes are weighted like
  gradients, and each held model is trained with privacy noise and dropout of its own.
- The listing starts from losses of zero (l. 3), so that clients try every model before they choose by weight, but
  unseen models look perfect. Here the posterior runs over the models that a client has evaluated, the tracked loss of a
  model starts at its first loss, and the greedy choice takes unevaluated models first.
- Accumulated tracking (Eq. 23-25) includes the current loss, as l. 12-15 do; a model first seen in round t counts as if
  it had that loss in all t rounds.
- A client's table has C candidates, and predictions mix the `collaborators` of highest weight. With cohorts, a client
  that was in none predicts as a newcomer: it does one E-step over models of clients that were.
- A gradient whose weight is below 1e-12 is not computed; zeros are sent in its place.

`literal` follows the listing to the letter: losses of zero at first, so that models have weight before anyone has
evaluated them and M = 0 is not Local; sums of gradients that are not divided; and a table of all K models. A client's
own model is still held in addition, since Figure 6 shows that M = 0 is training alone.

docs/results/federico.md has the effects of these departures. `FedeRiCoFriends` weighs models by another rule, which is
ours.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import by_loss, gradients, neighbors
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
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
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        table: The tracked losses L_i of its candidates.
        weights: (M + 1,) weights w_i of the gradients for the models received in the last round.
        rounds: () int32, number of its rounds so far.
    """

    table: neighbors.Candidates
    weights: Array
    rounds: Array


@method(
    keeps="its model, tracked losses of others' models",
    travels="M neighbors' models down, M gradients up",
)
@dataclasses.dataclass(frozen=True)
class FedeRiCo:
    """FedeRiCo, decentralized (Algorithm 1): each client weighs a few neighbors' models and sends gradients back.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedeRiCo(neighbors=5, literal=True)
        FedeRiCo(neighbors=5, epsilon=0.3, beta=0.6, literal=True, tracking='ema', update='gradient',
                 candidates=32, collaborators=16)
    """

    neighbors: int = hyperparameter(
        3, at_least=0, help="M, number of other clients' models downloaded per round"
    )
    epsilon: float = hyperparameter(
        0.3,
        at_least=0,
        at_most=1,
        grid=(0.0, 0.1, 0.3, 0.5),
        help="probability of random neighbors",
    )
    beta: float = hyperparameter(
        0.6,
        above=0,
        at_most=1,
        grid=(0.2, 0.4, 0.6, 0.8, 1.0),
        help="weight of the newest loss in ema",
    )
    literal: bool = hyperparameter(
        False,
        former="faithful",
        help="follow the listing to the letter: losses start at zero, and sums of gradients are not divided",
    )
    tracking: Literal["ema", "accumulated"] = hyperparameter(
        "ema", help="track losses' moving average or their sum"
    )
    update: Literal["gradient", "delta"] = hyperparameter(
        "gradient",
        help="what clients send back: a gradient per step, or the change after local epochs (delta)",
    )
    candidates: int = hyperparameter(
        32, at_least=0, help="C, number of models whose losses a client tracks; 0: all K"
    )
    collaborators: int = hyperparameter(
        16, at_least=1, help="number of highest-weighted models that a client predicts with"
    )

    def build(self, problem: Problem) -> Algorithm:
        neighbors.check(problem, self.neighbors, self.candidates, self.update)
        if self.literal and self.update == "delta":
            raise ArgumentError("update", "accepted with literal: gradient", self.update)
        solver = problem.solver
        num_clients = problem.num_clients
        num_candidates = min(self.candidates or num_clients, num_clients)
        if self.literal:
            num_candidates = num_clients
        num_mixed = min(self.collaborators, num_candidates)
        sends_gradients = self.update == "gradient"

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            # l. 1
            personal = problem.init_personal(key, client, common=False)

            # l. 3: losses of zero, or no losses.
            table_key = jax.random.fold_in(jax.random.fold_in(key, num_clients), client)
            first_loss = 0.0 if self.literal else jnp.inf
            table = neighbors.candidates(table_key, client, num_candidates, num_clients, first_loss)
            row = Row(
                table=table,
                weights=jnp.zeros((self.neighbors + 1,)),
                rounds=jnp.zeros((), jnp.int32),
            )
            opt_state = personal.opt_state if sends_gradients else ()
            return First(row, personal.params, opt_state)

        def download(context: ClientContext, row: Row, cohort: Cohort) -> Array:
            """B <- {i} and M neighbors, epsilon-greedy in w_i (l. 7)."""
            self_index = context.client
            others = neighbors.epsilon_greedy(
                context.key, row.table, self_index, cohort, self.neighbors, self.epsilon
            )
            return jnp.concatenate([self_index[None], others])

        def e_step(context: ClientContext, row: Row, losses: Array) -> Row:
            """A client's next row, from the losses (J,) of the received models, summed over its examples."""
            # l_ib for b in B; other losses stay (l. 10-13).
            table, slots = neighbors.remember(row.table, context.index, losses)

            # L_ij <- (1 - beta) L_ij + beta l_ij (l. 14).
            beta = self.beta if self.tracking == "ema" else None
            table = neighbors.track(table, slots, row.rounds, beta)

            # w_i <- softmax(-L_i) (l. 15).
            weights = jax.nn.softmax(neighbors.logits(table))
            return Row(table, weights[slots], row.rounds + 1)

        def client_update(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> ClientOutput:
            split = data.train

            def next_row(losses: Array) -> Row:
                return e_step(context, row, losses)

            if sends_gradients:
                # g_bi = w_ib grad_phi_b sum_s l(phi_b; x_s, y_s) (l. 16-17).
                weighed = gradients.after_e_step(
                    problem,
                    context,
                    models,
                    split,
                    row,
                    e_step=next_row,
                    weights=lambda row: row.weights,
                )
                row = weighed.row
                losses = weighed.losses
                update = weighed.gradients
            else:
                # w_ib n_i times the change of phi_b in local training.
                row = next_row(gradients.total_losses(problem, models, split))
                losses, changes = gradients.local_changes(
                    problem, context, models, row.weights, split
                )
                update = tree.scale(changes, row.weights * split.size)

            sums = gradients.weights_of_statistics(problem, models, row.weights, split)

            # The mean of the models' losses, by their weights.
            total_weight = jnp.maximum(row.weights.sum(), jnp.finfo(jnp.float32).tiny)
            loss = jnp.vdot(row.weights, losses) / total_weight
            return ClientOutput(
                row=row,
                upload=Upload(update, sums=sums),
                report=ClientReport(loss, entries={"size": split.size}),
                sent=gradients.takes_step(problem, context, split),
            )

        # ---- The models' owners.

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # The divisor: n_i, or for owners without examples the mean; literally, 1.
            sizes = aggregate.report.entries["size"]
            mean_size = jnp.maximum(sizes.mean(), 1)
            sizes = jnp.where(sizes > 0, sizes, mean_size)
            if self.literal:
                sizes = jnp.ones_like(sizes)

            # phi_i <- optimizer step with sum_j g_ij / n_i (l. 19-22).
            if sends_gradients:
                return gradients.apply(problem, state, aggregate, sizes, Topology.PEERS), {}
            change = gradients.mean_changes(problem, aggregate, sizes)
            return state.with_models(tree.add(state.models, change)), {}

        # ---- What a client predicts with.

        def select_models(context: ClientContext, row: Row, size: Array) -> Mixture:
            return neighbors.heaviest(row.table, num_mixed, neighbors.logits(row.table))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """A newcomer does one E-step over all models."""
            return by_loss.posterior(problem, models, data, self.collaborators)

        return Algorithm(
            topology=Topology.PEERS,
            first_row=first_row,
            download=download,
            client_update=client_update,
            server_update=server_update,
            select_models=select_models,
            adapt=adapt,
            exchanges=solver.max_steps(problem.n_max) if sends_gradients else 1,
            ledger=Ledger(gradients=self.neighbors + 1, unaccounted=BY_LOSS),
            report=MethodReport(scored="each client's mixture of the models it has evaluated"),
        )
