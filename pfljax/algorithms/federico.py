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
  mixes its own model and its friends in equal parts (in regression, by line 15), and sends gradients to friends only.
  `common/collaborators.py` tells who is a friend; l_ib is the loss there. Its own model's gradient counts in full.
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

from pfljax.algorithms.common import classes, collaborators, gradients, neighbors
from pfljax.algorithms.common.collaborators import Rule
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
from pfljax.local import lasting
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


class Row(NamedTuple):
    """What a client keeps."""

    table: neighbors.Candidates  # the tracked losses of its candidates
    held: Array  # (M + 1,) weights of the gradients for the models held in the last round
    rounds: Array  # () int32, number of its rounds so far
    bar: Array  # () mean loss of a model that knows nothing of the examples; inf before the first round


@method(keeps="its model, tracked losses of others' models", travels="M neighbors' models down, M gradients up")
@dataclasses.dataclass(frozen=True)
class FedeRiCo:
    """FedeRiCo, decentralized (Algorithm 1): each client weighs a few neighbors' models and sends gradients back."""

    neighbors: int = knob(3, at_least=0, help="M, number of other clients' models downloaded per round")
    epsilon: float = knob(0.3, at_least=0, at_most=1, grid=(0.0, 0.1, 0.3, 0.5), help="probability of random neighbors")
    beta: float = knob(0.6, above=0, at_most=1, grid=(0.2, 0.4, 0.6, 0.8, 1.0), help="weight of the newest loss in ema")
    rule: Literal["friends", "posterior"] = knob(
        "friends", help="friends: equal weights for models that explain unseen examples; posterior: Algorithm 1, l. 15"
    )
    effective_examples: float = knob(
        math.inf,
        above=0,
        infinite=True,
        read_with=("rule", "posterior"),
        help="number of examples (at most n_k) that the likelihood counts as after the first ceil((C-1)/M) rounds",
    )
    faithful: bool = knob(False, help="follow Algorithm 1: posterior; losses start at zero and all n_k examples count")
    tracking: Literal["ema", "accumulated"] = knob(
        "ema", read_with={"rule": ("posterior",), "faithful": (True,)}, help="track losses' moving average or their sum"
    )
    update: Literal["gradient", "delta"] = knob(
        "gradient", help="what clients send back: a gradient per step, or the change after local epochs (delta)"
    )
    candidates: int = knob(32, at_least=0, help="C, number of models whose losses a client tracks; 0: all K")
    collaborators: int = knob(16, at_least=1, help="number of highest-weighted models that a client predicts with")

    def build(self, problem: Problem) -> Algorithm:
        self._check(problem)
        num, gradient = problem.num_clients, self.update == "gradient"
        num_candidates = min(self.candidates or num, num)
        examples = self.effective_examples if self.faithful or self.rule == "posterior" else None
        rule = collaborators.rule(problem, num_candidates, self.neighbors, examples)

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

        return Algorithm(
            first_row=first_row,
            download=download,
            client_update=functools.partial(self._update, rule),
            server_update=server_update,
            whom=whom,
            adapt=lambda context, models, data: rule.of_newcomer(models, data, self.collaborators),
            topology="peers",
            exchanges=problem.solver.max_steps(problem.n_max) if gradient else 1,
            ledger=Ledger(gradients=self.neighbors + 1, unaccounted=BY_LOSS),
            report=Report(scored="each client's mixture of the models it has evaluated"),
        )

    def _check(self, problem: Problem) -> None:
        cohort_size = problem.cohort_size
        solver = problem.solver
        if self.update == "delta" and any(lasting.marks(solver.optimizer, problem.model.network.shapes)):
            text = "keeps no optimizer over rounds, so an optimizer's own schedule would start anew in each; accepted: "
            raise ArgumentError("update", f"{text}gradient, or LocalTraining's schedule of rounds", self.update)
        if not self.neighbors < cohort_size:
            text = f"accepted: 0 to {cohort_size - 1}, fewer than the {cohort_size} clients of a round"
            raise ArgumentError("neighbors", text, self.neighbors)
        if self.candidates and not self.neighbors < self.candidates:
            text = f"accepted: 0 (all clients), or more than the {self.neighbors} neighbors"
            raise ArgumentError("candidates", text, self.candidates)
        if self.faithful and isinstance(self.effective_examples, int | float) and self.effective_examples < math.inf:
            raise ArgumentError("effective_examples", "accepted without faithful: a number", self.effective_examples)

    def _e_step(self, rule: Rule, context: ClientContext, row: Row, losses: Array, split: Split) -> Row:
        """Lines 10 to 15: a client's next row, given the losses (J,) of the held models, summed over its examples."""
        untrained = losses[0] / jnp.maximum(split.size, 1)
        bar = jnp.where(row.rounds == 0, jnp.minimum(untrained, classes.label_code(rule.problem, split)), row.bar)
        table, slots = neighbors.remember(row.table, context.index, losses)  # l. 10-13
        beta = self.beta if self.tracking == "ema" else None
        table = neighbors.track(table, slots, row.rounds, beta)  # l. 14
        weights = jax.nn.softmax(rule.scores(table, bar, row.rounds, split.size))[slots]  # l. 15
        return Row(table, rule.of_gradients(weights), row.rounds + 1, bar)

    def _update(self, rule: Rule, context: ClientContext, models: Params, row: Row, data: ClientData) -> ClientOutput:
        """Sends back a gradient for each mini-batch, or the change from local training, by the posterior at first."""
        problem, split, evaluate = rule.problem, data.train, rule.evaluate(row.bar)
        e_step = lambda totals: self._e_step(rule, context, row, totals, split)
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
