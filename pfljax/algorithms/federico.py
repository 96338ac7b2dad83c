"""FedeRiCo: federating with the right collaborators, decentralized.

"Find your friends: personalized federated learning with the right collaborators" (TMLR submission; arXiv 2210.06597).
Equations, algorithm lines and sections are those of the TMLR submission.

Algorithm 1, a round of client i:
    B <- {i} and M neighbors, epsilon-greedy in w_i                                           (l. 7)
    l_ib <- sum_s l(phi_b; x_s, y_s) for b in B, the others keep theirs                        (l. 10-13)
    L_ij <- (1 - beta) L_ij + beta l_ij;  w_i <- softmax(-L_i)                                 (l. 14-15)
    sends g_bi = w_ib / n_i * grad_phi_b sum_s l(phi_b; x_s, y_s) to each b                    (l. 16-17)
    phi_i <- optimizer step with sum_j g_ij                                                    (l. 19-22)

Departures from the paper:
- A client always holds its own model, for free, beside the M neighbors: M = 0 is Local training exactly.
- The posterior runs over models that the client has evaluated at least once, and the tracked loss of a model starts
  at its first loss: with the listing's zeros (l. 3; `unseen=zero`) models never seen look perfect.
- The gradients are divided by n_i as in Eq. 5 (l. 17 has the sum), so that a rate means what it means in Local.
- Accumulated tracking (Eq. 23-25) includes the current loss, as l. 12-15 do; a model first seen in round t counts as
  if it had had that loss in all t rounds.
- All clients' models start from the same parameters unless `common_init` is off (l. 1 leaves it open).
- `warmup` (0 by default, as in the paper) lets clients train only their own models at first.
- A client's table has C candidates (K unless `candidates` is set), and predictions mix the `collaborators` of highest
  weight.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import by_loss, gradients, neighbors
from pfljax.core import tree
from pfljax.core.errors import ArgumentError
from pfljax.core.method import knob, method
from pfljax.core.types import Algorithm, Array, ClientOutput, Ledger, Predictor, PyTree, Report, State
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


@method(keeps="its model and tracked losses of others", travels="M neighbors' models down, as many gradients up")
@dataclasses.dataclass(frozen=True)
class FedeRiCo:
    """FedeRiCo, decentralized (Algorithm 1): each client weighs some neighbors' models and sends them gradients."""

    neighbors: int = knob(3, at_least=0, help="M, models that a client downloads in a round beside its own")
    epsilon: float = knob(0.3, at_least=0, at_most=1, help="probability of choosing neighbors uniformly")
    beta: float = knob(0.6, above=0, at_most=1, help="weight of the newest loss in the moving average")
    tracking: Literal["ema", "accumulated"] = knob("ema", help="moving average of the losses (ema), or their sum")
    loss: Literal["sum", "mean"] = knob(
        "sum", help="losses in the posterior summed over a client's examples, or averaged"
    )
    unseen: Literal["exclude", "zero"] = knob(
        "exclude", help="models never evaluated stay out of the posterior, or count as losses of zero (Alg. 1, l. 3)"
    )
    update: Literal["gradient", "delta"] = knob(
        "gradient", help="what goes back: a gradient for each step, or the change that local epochs make (delta)"
    )
    candidates: int = knob(0, at_least=0, help="C, models that a client keeps losses of; 0: all K")
    collaborators: int = knob(16, at_least=1, help="models of highest weight that a client predicts with")
    warmup: int = knob(
        0, at_least=0, help="rounds at the start in which a client weighs others' models but trains its own only"
    )

    def build(self, problem: Problem) -> Algorithm:
        self._check(problem.cohort_size)
        plan, num_candidates = problem.plan, min(self.candidates or problem.num_clients, problem.num_clients)
        gradient = self.update == "gradient"

        def init(key, clients):
            num = tree.num_rows(clients)
            models = problem.init_models(key, num)
            empty = neighbors.zero_candidates if self.unseen == "zero" else neighbors.empty_candidates
            rows = {
                "table": plan.over_rows(lambda k: empty(k, num_candidates), jnp.arange(num, dtype=jnp.int32)),
                "held": jnp.zeros((num, self.neighbors + 1)),  # w_ib of the models held in this round
                "rounds": jnp.zeros((num,), jnp.int32),  # that the client has taken part in
            }
            return State((), models, problem.init_optimizers(models) if gradient else (), rows)

        def download(key, state, cohort):
            def choose(own, table):
                own_key = jax.random.fold_in(key, own)
                return neighbors.epsilon_greedy(own_key, table, own, cohort, self.neighbors, self.epsilon)

            others = plan.over_rows(choose, cohort.ids, state.clients["table"])  # l. 7
            return jnp.concatenate([cohort.ids[:, None], others], axis=1)

        def predictor(key, state, clients):
            best = lambda table: neighbors.heaviest(table, min(self.collaborators, num_candidates))
            return Predictor(state.models, *plan.over_rows(best, state.clients["table"]), topology="peers")

        def adapt(key, state, clients):  # One E-step over all trained models.
            num_mixed = min(self.collaborators, tree.num_rows(state.models))
            return by_loss.posterior(problem, state.models, clients, num_mixed, summed=self.loss == "sum")

        client_update, server_update = (self._gradient_round if gradient else self._delta_round)(problem)
        return Algorithm(
            init=init,
            download=download,
            client_update=client_update,
            server_update=server_update,
            predictor=predictor,
            adapt=adapt,
            topology="peers",
            exchanges=problem.solver.max_steps(problem.n_max) if gradient else 1,
            ledger=Ledger(gradients=self.neighbors + 1, unaccounted=BY_LOSS),
            report=Report(scored="each client's mixture of the models that it has weighed"),
        )

    def _check(self, cohort_size: int) -> None:
        if not self.neighbors < cohort_size:
            text = f"accepted: 0 to {cohort_size - 1} (fewer than the {cohort_size} clients of a round)"
            raise ArgumentError("neighbors", text, self.neighbors)
        if self.candidates and not self.neighbors < self.candidates:
            text = f"accepted: 0 for all clients, or more than the {self.neighbors} neighbors"
            raise ArgumentError("candidates", text, self.candidates)
        if self.candidates and self.unseen == "zero":
            text = "it keeps losses of all clients; accepted with candidates=0 only"
            raise ArgumentError("unseen", text, self.unseen)

    def _e_step(self, row: PyTree, index: Array, totals: Array, size: Array) -> PyTree:
        """Lines 10 to 15: a client's next row, from the losses (J,) of the models held, summed over its examples."""
        losses = totals if self.loss == "sum" else totals / jnp.maximum(size, 1)
        table, slots = neighbors.remember(row["table"], index, losses)  # l. 10-13
        unknown, held = jnp.isinf(table.tracked), jnp.zeros_like(table.ids, bool).at[slots].set(True)
        if self.tracking == "ema":
            old = jnp.where(unknown, table.last, table.tracked)
            first, tracked = table.last, (1 - self.beta) * old + self.beta * table.last  # l. 14
        else:
            first, tracked = table.last * (row["rounds"] + 1), table.tracked + table.last  # Eq. 24
        tracked = jnp.where(unknown, jnp.where(held, first, jnp.inf), tracked)
        weights = jax.nn.softmax(-tracked)[slots]  # l. 15
        alone = jnp.zeros_like(weights).at[0].set(1.0)
        weights = jnp.where(row["rounds"] < self.warmup, alone, weights)
        return {"table": table._replace(tracked=tracked), "held": weights, "rounds": row["rounds"] + 1}

    def _gradient_round(self, problem: Problem):
        """A gradient for each mini-batch; the posterior is that of the round's start."""

        def client_update(context, models, row, data):
            split = data.train
            losses, grads = gradients.of_batch(problem, context, models, split)
            totals = gradients.losses_at_start(problem, context, models, split, losses)
            new = self._e_step(row, context.index, totals, split.size)
            row = jax.tree.map(lambda new, old: jnp.where(context.step == 0, new, old), new, row)
            upload = tree.scale(grads, row["held"])  # l. 17 with Eq. 5's 1 / n_i
            report = {"loss": mixed(row["held"], losses)}
            return ClientOutput(row, upload, report, gradients.takes_step(problem, context, split))

        def server_update(key, state, aggregate):  # l. 19-22
            return gradients.apply(problem, state, aggregate.upload, aggregate.count > 0, "peers"), {}

        return client_update, server_update

    def _delta_round(self, problem: Problem):
        """What a round of local training changes, in place of a gradient."""
        solver = problem.solver

        def client_update(context, models, row, data):
            split = data.train
            totals = problem.plan.over_models(lambda params: solver.total_loss(params, split), models)
            row = self._e_step(row, context.index, totals, split.size)

            def train(params):
                start = solver.optimizer.init(params)
                trained, _, loss = solver.fit(context.key, params, start, split, round_number=context.round)
                return tree.subtract(trained, params), loss

            deltas, losses = problem.plan.over_models(train, models)
            upload, report = tree.scale(deltas, row["held"]), {"loss": mixed(row["held"], losses)}
            return ClientOutput(row, upload, report, gradients.takes_step(problem, context, split))

        def server_update(key, state, aggregate):
            return state._replace(models=tree.add(state.models, aggregate.upload)), {}

        return client_update, server_update


def mixed(weights: Array, losses: Array) -> Array:
    """The held models' losses, weighted as the client uses them."""
    return jnp.vdot(weights, losses) / jnp.maximum(weights.sum(), jnp.finfo(jnp.float32).tiny)
