"""FedeRiCo: decentralized federated learning with the right collaborators.

"Find your friends: personalized federated learning with the right collaborators" (TMLR submission; arXiv 2210.06597).
Equations, algorithm lines and sections refer to the TMLR submission.

Algorithm 1, a round of client i:
    B <- {i} and M neighbors, epsilon-greedy in w_i                                           (l. 7)
    l_ib <- sum_s l(phi_b; x_s, y_s) for b in B; other losses stay                             (l. 10-13)
    L_ij <- (1 - beta) L_ij + beta l_ij;  w_i <- softmax(-L_i)                                 (l. 14-15)
    sends g_bi = w_ib * grad_phi_b sum_s l(phi_b; x_s, y_s) to each b                          (l. 16-17)
    phi_i <- optimizer step with sum_j g_ij / n_i                                              (l. 19-22)

Departures from the paper:
- A client always holds its own model, at no cost, in addition to the M neighbors: M = 0 is exactly Local training.
- The sum of gradients is divided by the owner's n_i, so that a learning rate means the same as in Local. With
  mini-batches, a step sums over the clients that still have a batch; in `delta` rounds, changes are weighted like
  gradients, and each held model is trained with privacy noise and dropout of its own.
- The listing starts from losses of zero (l. 3), so that clients try every model before they choose by weight, but
  unseen models look perfect. Here the posterior runs over the models that a client has evaluated, the tracked loss of a
  model starts at its first loss, and the greedy choice takes unevaluated models first.
- Line 15 weighs by training losses, which are near zero for every model that a client trains. By default, a client
  mixes its own model and its friends in equal parts (in regression, by line 15), and sends gradients to friends only
  (`common/collaborators.py`, docs/results/federico.md). A friend classifies most of the client's examples correctly, or
  its loss is far below the bar, the lower one of an untrained model's loss and of the code length of the client's
  labels. In classification, l_ib is the least loss over a few temperatures, without label smoothing and class weights.
  The gradient of its own model counts in full.
- `rule="posterior"` is line 15. Its likelihood counts as that of `effective_examples` examples after a client's first
  ceil((C - 1) / M) rounds. `faithful` is line 15 with losses that start at zero and all n_i examples: models at zero
  loss then have weight before anyone has evaluated them, so M = 0 is not Local.
- Accumulated tracking (Eq. 23-25) includes the current loss, as l. 12-15 do; a model first seen in round t counts as if
  it had that loss in all t rounds.
- A client's table has C candidates, and predictions mix the `collaborators` of highest weight. With cohorts, a client
  that was in none predicts as a newcomer: it does one E-step over models of clients that were.
- A gradient whose weight is below 1e-12 is not computed; zeros are sent in its place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes, gradients, neighbors
from pfljax.algorithms.common.collaborators import Friends, Posterior
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob, method
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    First,
    Ledger,
    Params,
    Report,
    Split,
)
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        table: The tracked losses of its candidates.
        held: (M + 1,) weights of the gradients for the models held in the last round.
        rounds: () int32, number of its rounds so far.
        bar: () mean loss of a model that knows nothing of the examples; inf before the first round.
    """

    table: neighbors.Candidates
    held: Array
    rounds: Array
    bar: Array


@method(keeps="its model, tracked losses of others' models", travels="M neighbors' models down, M gradients up")
@dataclasses.dataclass(frozen=True)
class FedeRiCo:
    """FedeRiCo, decentralized (Algorithm 1): each client weighs a few neighbors' models and sends gradients back."""

    neighbors: int = knob(3, at_least=0, help="M, number of other clients' models downloaded per round")
    epsilon: float = knob(
        0.3, at_least=0, at_most=1, grid=(0.0, 0.1, 0.3, 0.5), help="probability of choosing neighbors at random"
    )
    beta: float = knob(
        0.6, above=0, at_most=1, grid=(0.2, 0.4, 0.6, 0.8, 1.0), help="weight of the newest loss in the moving average"
    )
    rule: Literal["friends", "posterior"] = knob(
        "friends", help="friends: equal weights for models that explain unseen examples; posterior: Algorithm 1, l. 15"
    )
    effective_examples: float = knob(
        math.inf,
        above=0,
        infinite=True,
        help="number of examples (at most n_k) that the likelihood of rule=posterior counts as after a "
        "client's first ceil((C-1)/M) rounds",
    )
    faithful: bool = knob(False, help="follow Algorithm 1: posterior; losses start at zero and all n_k examples count")
    tracking: Literal["ema", "accumulated"] = knob("ema", help="track the losses' moving average (ema) or their sum")
    update: Literal["gradient", "delta"] = knob(
        "gradient", help="what clients send back: a gradient per step, or the change after local epochs (delta)"
    )
    candidates: int = knob(32, at_least=0, help="C, number of models whose losses a client tracks; 0: all K")
    collaborators: int = knob(16, at_least=1, help="number of highest-weighted models that a client predicts with")

    def build(self, problem: Problem) -> Algorithm:
        self._check(problem.cohort_size)
        num, gradient = problem.num_clients, self.update == "gradient"
        num_candidates, rule = self._candidates(problem), self._rule(problem)

        def first_row(key, client, start):
            own = problem.own_model(key, client, common=False)  # l. 1
            table_key = jax.random.fold_in(jax.random.fold_in(key, num), client)
            unseen = 0.0 if self.faithful else jnp.inf  # l. 3
            table = neighbors.candidates(table_key, client, num_candidates, num, unseen)
            row = Row(table, jnp.zeros((self.neighbors + 1,)), jnp.zeros((), jnp.int32), jnp.array(jnp.inf))
            return First(row, own.model, own.optimizer if gradient else ())

        def download(context, row, cohort):  # l. 7
            own, table = context.client, row.table
            others = neighbors.epsilon_greedy(context.key, table, own, cohort, self.neighbors, self.epsilon)
            return jnp.concatenate([own[None], others])

        def server_update(key, state, aggregate):
            sizes = aggregate.report["size"]
            owed = jnp.where(sizes > 0, sizes, jnp.maximum(sizes.mean(), 1))  # for owners without examples, the mean
            if gradient:  # l. 19-22
                return gradients.apply(problem, state, aggregate, owed, "peers"), {}
            return state._replace(models=tree.add(state.models, tree.scale(aggregate.upload, 1 / owed))), {}

        def whom(context, row, size):
            scores = rule.scores(row.table, row.bar, row.rounds - 1, size)
            return neighbors.heaviest(row.table, min(self.collaborators, num_candidates), scores)

        def adapt(context, models, data):  # one E-step over trained models
            return rule.of_newcomer(models, data, min(self.collaborators, tree.num_rows(models)))

        return Algorithm(
            first_row=first_row,
            download=download,
            client_update=functools.partial(self._client_update, problem),
            server_update=server_update,
            whom=whom,
            adapt=adapt,
            topology="peers",
            exchanges=problem.solver.max_steps(problem.n_max) if gradient else 1,
            ledger=Ledger(gradients=self.neighbors + 1, unaccounted=BY_LOSS),
            report=Report(scored="each client's mixture of the models it has evaluated"),
        )

    def _check(self, cohort_size: int) -> None:
        if not self.neighbors < cohort_size:
            text = f"accepted: 0 to {cohort_size - 1}, fewer than the {cohort_size} clients of a round"
            raise ArgumentError("neighbors", text, self.neighbors)
        if self.candidates and not self.neighbors < self.candidates:
            text = f"accepted: 0 (all clients), or more than the {self.neighbors} neighbors"
            raise ArgumentError("candidates", text, self.candidates)
        if self.tracking == "accumulated" and not self._by_posterior:
            raise ArgumentError("tracking", "accepted with rule=posterior: ema, accumulated", self.tracking)
        known = isinstance(self.effective_examples, int | float) and not math.isinf(self.effective_examples)
        if known and (self.faithful or not self._by_posterior):
            text = "accepted with rule=posterior, and not with faithful"
            raise ArgumentError("effective_examples", text, self.effective_examples)

    @property
    def _by_posterior(self) -> bool:
        return self.faithful or self.rule == "posterior"

    def _candidates(self, problem: Problem) -> int:
        """C, the number of models whose losses a client tracks."""
        return min(self.candidates or problem.num_clients, problem.num_clients)

    def _rule(self, problem: Problem) -> Posterior | Friends:
        first_pass = -(-(self._candidates(problem) - 1) // max(self.neighbors, 1))
        if self._by_posterior:
            return Posterior(problem, self.effective_examples, first_pass)
        return Friends(problem, self._candidates(problem))

    def _e_step(self, problem: Problem, context: ClientContext, row: Row, losses: Array, split: Split) -> Row:
        """Lines 10 to 15: a client's next row, given the losses (J,) of the held models, summed over its examples."""
        rule, untrained = self._rule(problem), losses[0] / jnp.maximum(split.size, 1)
        found = jnp.minimum(untrained, classes.label_code(problem, split))
        bar = jnp.where(row.rounds == 0, found, row.bar)
        table, slots = neighbors.remember(row.table, context.index, losses)  # l. 10-13
        beta = self.beta if self.tracking == "ema" else None
        table = neighbors.track(table, slots, row.rounds, beta)  # l. 14
        weights = jax.nn.softmax(rule.scores(table, bar, row.rounds, split.size))[slots]  # l. 15
        return Row(table, rule.of_gradients(weights), row.rounds + 1, bar)

    def _client_update(
        self, problem: Problem, context: ClientContext, models: Params, row: Row, data: ClientData
    ) -> ClientOutput:
        """Sends back a gradient for each mini-batch, or the change from local training.

        The posterior is the one at the round's start.
        """
        split, evaluate = data.train, self._rule(problem).evaluate(row.bar)
        e_step = lambda totals: self._e_step(problem, context, row, totals, split)
        if self.update == "gradient":  # l. 17
            out = gradients.after_e_step(problem, context, models, split, row, e_step, lambda row: row.held, evaluate)
            after, losses, upload = out.row, out.losses, out.upload
        else:
            total = evaluate or problem.solver.total_loss
            after = e_step(problem.plan.over_models(lambda params: total(params, split), models))
            losses, changes = gradients.local_changes(problem, context, models, after.held, split)
            upload = tree.scale(changes, after.held * split.size)
        loss = jnp.vdot(after.held, losses) / jnp.maximum(after.held.sum(), jnp.finfo(jnp.float32).tiny)
        report = {"loss": loss, "size": split.size}
        return ClientOutput(after, upload, report, gradients.takes_step(problem, context, split))
