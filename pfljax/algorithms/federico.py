"""FedeRiCo: federating with the right collaborators, decentralized and centralized.

"Find your friends: personalized federated learning with the right collaborators" (TMLR submission; arXiv 2210.06597).
Equations, algorithm lines and sections are those of the TMLR submission.

Decentralized (Algorithm 1), a round of client i:
    B <- {i} and M neighbors, epsilon-greedy in w_i                                           (l. 7)
    l_ib <- sum_s l(phi_b; x_s, y_s) for b in B, the others keep theirs                        (l. 10-13)
    L_ij <- (1 - beta) L_ij + beta l_ij;  w_i <- softmax(-L_i)                                 (l. 14-15)
    sends g_bi = w_ib / n_i * grad_phi_b sum_s l(phi_b; x_s, y_s) to each b                    (l. 16-17)
    phi_i <- optimizer step with sum_j g_ij                                                    (l. 19-22)
Centralized (Eq. 3-6): all models to all, w_ij ~ Pi_ij exp(-l_ij), Pi <- w, gradients weighted n_i / n.

Departures from the paper:
- A client always holds its own model, for free, beside the M neighbors: M = 0 is Local training exactly.
- The posterior runs over models that the client has evaluated at least once, and the tracked loss of a model starts
  at its first loss: with the listing's zeros (l. 3; `unseen=zero`) models never seen look perfect.
- The gradients are divided by n_i as in Eq. 5 (l. 17 has the sum), so that a rate means what it means in Local.
- Accumulated tracking (Eq. 23-25) includes the current loss, as l. 12-15 do; a model first seen in round t counts as
  if it had had that loss in all t rounds.
- All clients' models start from the same parameters unless `--common_init=false` (l. 1 leaves it open).
- `warmup` (0 by default, as in the paper) lets clients train only their own models at first.
- The table of a client has C candidates (K unless `candidates` is set), and predictions mix the `collaborators`
  of highest weight.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import neighbors
from pfljax.core import tree
from pfljax.core.types import Algorithm, ClientOutput, Predictor, State, UsageError
from pfljax.engine.views import read
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class FedericoConfig:
    """FedeRiCo's knobs.

    Attributes:
        neighbors: M, models that a client downloads in a round beside its own
        epsilon: probability of choosing neighbors uniformly
        beta: weight of the newest loss in the moving average
        tracking: moving average of the losses (ema) or their sum (accumulated)
        loss: losses in the posterior summed over a client's examples, as in the paper, or averaged
        unseen: models never evaluated stay out of the posterior, or count as losses of zero (Alg. 1, l. 3)
        update: what goes back: a gradient for each step, or the change that local epochs make (delta)
        candidates: C, models that a client keeps losses of; 0: all K
        collaborators: models of highest weight that a client predicts with
        warmup: rounds at the start in which a client weighs others' models but trains its own only
    """

    neighbors: int = 3
    epsilon: float = 0.3
    beta: float = 0.6
    tracking: Literal["ema", "accumulated"] = "ema"
    loss: Literal["sum", "mean"] = "sum"
    unseen: Literal["exclude", "zero"] = "exclude"
    update: Literal["gradient", "delta"] = "gradient"
    candidates: int = 0
    collaborators: int = 16
    warmup: int = 0

    def check(self, cohort_size: int) -> None:
        """Raises UsageError for what does not fit S clients a round."""
        if not 0 <= self.neighbors < cohort_size:
            raise UsageError(
                f"--federico.neighbors={self.neighbors}: accepted: 0 to {cohort_size - 1} (fewer than the "
                f"{cohort_size} clients of a round)"
            )
        if not 0 <= self.epsilon <= 1:
            raise UsageError(f"--federico.epsilon={self.epsilon}: accepted: a probability in [0, 1]")
        if not 0 < self.beta <= 1:
            raise UsageError(f"--federico.beta={self.beta}: accepted: above 0, at most 1")
        if self.candidates and not self.neighbors < self.candidates:
            raise UsageError(
                f"--federico.candidates={self.candidates}: accepted: 0 for all clients, or more than the "
                f"{self.neighbors} of --federico.neighbors"
            )
        if self.candidates and self.unseen == "zero":
            raise UsageError("--federico.unseen=zero: it keeps losses of all clients; leave --federico.candidates=0")
        if self.collaborators < 1:
            raise UsageError(f"--federico.collaborators={self.collaborators}: accepted: 1 or more")


def federico(problem: Problem, config: FedericoConfig) -> Algorithm:
    """FedeRiCo, decentralized (Algorithm 1)."""
    config.check(problem.cohort_size)
    solver, plan = problem.solver, problem.plan
    num_candidates = min(config.candidates or problem.num_clients, problem.num_clients)
    gradient = config.update == "gradient"
    steps = solver.max_steps(problem.n_max) if gradient else 1

    def init(key, clients):
        num = tree.num_rows(clients)
        models = problem.init_models(key, num)
        empty = neighbors.zero_candidates if config.unseen == "zero" else neighbors.empty_candidates
        rows = {
            "table": plan.over_rows(lambda k: empty(k, num_candidates), jnp.arange(num, dtype=jnp.int32)),
            "held": jnp.zeros((num, config.neighbors + 1)),  # w_ib of the models held in this round
            "rounds": jnp.zeros((num,), jnp.int32),  # that the client has taken part in
        }
        return State((), models, problem.init_optimizers(models) if gradient else (), rows)

    def download(key, state, cohort):
        def choose(own, table):
            own_key = jax.random.fold_in(key, own)
            return neighbors.epsilon_greedy(own_key, table, own, cohort, config.neighbors, config.epsilon)

        others = plan.over_rows(choose, cohort.ids, state.clients["table"])  # l. 7
        return jnp.concatenate([cohort.ids[:, None], others], axis=1)

    def e_step(row, index, losses):
        """Lines 10 to 15: the table with the new losses, and the weights of the models held."""
        table, slots = neighbors.remember(row["table"], index, losses)
        if config.tracking == "ema":
            old = jnp.where(jnp.isinf(table.tracked), table.last, table.tracked)
            tracked = (1 - config.beta) * old + config.beta * table.last  # l. 14
            tracked = jnp.where(jnp.isinf(table.tracked), jnp.inf, tracked)
            first = table.last
        else:
            tracked = table.tracked + table.last  # Eq. 24
            first = table.last * (row["rounds"] + 1)
        newcomer = jnp.isinf(table.tracked) & jnp.zeros_like(table.ids, bool).at[slots].set(True)
        table = table._replace(tracked=jnp.where(newcomer, first, tracked))
        weights = jax.nn.softmax(-table.tracked)[slots]  # l. 15
        alone = jnp.zeros_like(weights).at[0].set(1.0)
        return table, jnp.where(row["rounds"] < config.warmup, alone, weights)

    def mixed(weights, losses):
        """The held models' losses, weighted as the client uses them."""
        return jnp.vdot(weights, losses) / jnp.maximum(weights.sum(), jnp.finfo(jnp.float32).tiny)

    def summed(losses, split):
        return losses if config.loss == "sum" else losses / jnp.maximum(split.size, 1)

    def work_gradient(turn, models, row, shard):
        split, first = shard.train, turn.step == 0
        losses, grads = batch_gradients(problem, turn, models, split)
        totals = losses_at_start(problem, turn, models, split, losses)
        table, weights = e_step(row, turn.index, summed(totals, split))
        new = {"table": table, "held": weights, "rounds": row["rounds"] + 1}
        row = jax.tree.map(lambda new, old: jnp.where(first, new, old), new, row)
        sent = takes_step(problem, turn, split)
        upload = tree.scale(grads, row["held"])  # l. 17 with Eq. 5's 1 / n_i
        return ClientOutput(row, upload, {"loss": mixed(row["held"], losses)}, sent)

    def work_delta(turn, models, row, shard):
        split = shard.train
        totals = plan.over_models(lambda params: solver.total_loss(params, split), models)
        table, weights = e_step(row, turn.index, summed(totals, split))

        def train(params):
            trained, _, loss = solver.fit(
                turn.key, params, solver.optimizer.init(params), split, round_number=turn.round
            )
            return tree.subtract(trained, params), loss

        deltas, losses = plan.over_models(train, models)
        row = {"table": table, "held": weights, "rounds": row["rounds"] + 1}
        report = {"loss": mixed(weights, losses)}
        return ClientOutput(row, tree.scale(deltas, weights), report, takes_step(problem, turn, split))

    def update_gradient(key, state, returned):
        return apply_gradients(problem, state, returned.upload, returned.count > 0, "peers"), {}

    def update_delta(key, state, returned):
        return state._replace(models=tree.add(state.models, returned.upload)), {}

    def predictor(key, state, clients):
        table = state.clients["table"]

        def mix(table):
            # Before its first round a client has evaluated nothing; then it predicts with its own model (slot 0).
            nothing = jnp.isinf(table.tracked).all()
            logits = jnp.where(nothing & (jnp.arange(num_candidates) == 0), 0.0, -table.tracked)
            logits, slots = jax.lax.top_k(logits, min(config.collaborators, num_candidates))
            return jnp.maximum(table.ids[slots], 0), jax.nn.softmax(logits)

        index, weights = plan.over_rows(mix, table)
        return Predictor(state.models, index, weights, "peers")

    def adapt(key, state, clients):
        # One E-step over all trained models.
        num_mixed = min(config.collaborators, tree.num_rows(state.models))
        return weigh_all(problem, state.models, clients, num_mixed, config.loss == "sum")

    work, update = (work_gradient, update_gradient) if gradient else (work_delta, update_delta)
    scored = "each client's mixture of the models that it has weighed"
    held = config.neighbors + 1
    return Algorithm(
        init, download, work, update, predictor, adapt, "peers", scored, steps, gradients=held, unaccounted=BY_LOSS
    )


@dataclasses.dataclass(frozen=True)
class FedericoCentralizedConfig:
    """The centralized form has no knobs of its own."""


def federico_centralized(problem: Problem, config: FedericoCentralizedConfig) -> Algorithm:
    """FedeRiCo with a server (Eq. 3-6): every client weighs all K models in every round."""
    del config

    def init(key, clients):
        num = tree.num_rows(clients)
        models = problem.init_models(key, num)
        rows = {"log_prior": jnp.full((num, num), -jnp.log(num), jnp.float32)}
        return State((), models, problem.init_optimizers(models), rows)

    def download(key, state, cohort):
        num = tree.num_rows(state.models)
        return jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (cohort.ids.shape[0], num))

    def work(turn, models, row, shard):
        split, first = shard.train, turn.step == 0
        losses, grads = batch_gradients(problem, turn, models, split)
        joint = row["log_prior"] - losses_at_start(problem, turn, models, split, losses)
        log_likelihood = jax.nn.logsumexp(joint)  # log p(D_i; Theta) of Eq. 1
        posterior = jnp.where(first, joint - log_likelihood, row["log_prior"])  # Eq. 3
        weights = jnp.exp(posterior) * split.size  # n_i / n of Eq. 6; the server divides by n
        report = {
            "loss": jnp.exp(posterior) @ losses,
            "log_likelihood": jnp.where(first, log_likelihood, 0.0),
            "size": split.size,
        }
        return ClientOutput(
            {"log_prior": posterior}, tree.scale(grads, weights), report, takes_step(problem, turn, split)
        )

    def update(key, state, returned):
        total = jnp.maximum(returned.report["size"].sum(), 1)
        mean = tree.scale(returned.upload, 1 / total)
        metrics = {"negative_log_likelihood": -returned.report["log_likelihood"].sum() / total}  # -f of Eq. 1
        return apply_gradients(problem, state, mean, returned.count > 0, "shared"), metrics  # Eq. 6

    def predictor(key, state, clients):
        num = tree.num_rows(state.models)
        weights = jnp.exp(state.clients["log_prior"])
        index = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), weights.shape)
        return Predictor(state.models, index, weights, "shared")

    def adapt(key, state, clients):
        return weigh_all(problem, state.models, clients, tree.num_rows(state.models))

    scored, steps = "each client's mixture of all models", problem.solver.max_steps(problem.n_max)
    held = problem.num_clients
    return Algorithm(
        init, download, work, update, predictor, adapt, "shared", scored, steps, gradients=held, unaccounted=BY_LOSS
    )


def batch_gradients(problem: Problem, turn, models, split):
    """Mean loss (J,) and gradient (J, ...) of every received model on the turn's mini-batch."""
    solver = problem.solver
    orders = solver.draw_orders(turn.key, split.size, problem.n_max)
    batch = solver.take_batch(turn.key, orders, split, turn.step)

    def one(params, number):
        return jax.value_and_grad(lambda params: solver.mean_loss(params, batch.of_model(number)))(params)

    return problem.plan.over_models(one, models, jnp.arange(tree.num_rows(models)))


def losses_at_start(problem: Problem, turn, models, split, losses):
    """The received models' losses (J,) summed over the client's data; read in the first exchange of a round only."""
    if problem.solver.batch(problem.n_max) == problem.n_max:
        return losses * split.size  # one batch holds all: they came with the gradients
    evaluate = lambda: problem.plan.over_models(lambda p: problem.solver.total_loss(p, split), models)
    return jax.lax.cond(turn.step == 0, evaluate, lambda: jnp.zeros_like(losses))


def takes_step(problem: Problem, turn, split):
    """(J,) bool: whether a client of this size has a mini-batch for this exchange."""
    return jnp.broadcast_to(turn.step < problem.solver.num_steps(split.size, problem.n_max), turn.index.shape)


def apply_gradients(problem: Problem, state: State, grads, arrived, topology) -> State:
    """Every owner to which something came back takes a step of its optimizer; the others stay as they are."""

    def step(grads, opt_state, params):
        updates, new_state = problem.solver.optimizer.update(grads, opt_state, params, round_number=state.round)
        return optax.apply_updates(params, updates), new_state

    if topology == "shared":
        models, optimizer = problem.plan.over_rows(step, grads, state.optimizer, state.models)
        models, optimizer = tree.where(arrived, (models, optimizer), (state.models, state.optimizer))
        return state._replace(models=models, optimizer=optimizer)

    # Owner by owner: the sums of gradients, which came first, become the next models in place. The branch is also what
    # keeps XLA from fusing reads of the stacks into their replacement, which would copy them whole for every owner.
    def owner(grads, opt_state, data):
        params, arrived = data
        grads = jax.tree.map(lambda leaf: leaf[0], grads)
        params, opt_state = jax.lax.cond(
            arrived, step, lambda grads, opt_state, params: (params, opt_state), grads, opt_state, read(params)
        )
        return ClientOutput(opt_state, tree.stack_one(params), {})

    index = jnp.arange(arrived.shape[0])[:, None]
    optimizer, returned = problem.plan.exchange(
        owner, grads, index, state.optimizer, (state.models, arrived), topology="own"
    )
    return state._replace(models=returned.upload, optimizer=optimizer)


def weigh_all(problem: Problem, models, clients, num_mixed: int, summed: bool = True) -> Predictor:
    """One E-step of newcomers over all N models, from a uniform prior (Eq. 3); the best `num_mixed` are mixed."""
    losses = problem.losses_of_all(models, clients.train)
    losses = losses * clients.train.size[:, None] if summed else losses
    logits, index = jax.lax.top_k(-losses, num_mixed)
    return Predictor(models, index.astype(jnp.int32), jax.nn.softmax(logits), "peers")
