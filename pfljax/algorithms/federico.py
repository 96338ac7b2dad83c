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
  `Friends` tells who is a friend; l_ib is the loss there. Its own model's gradient counts in full.
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
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import by_loss, classes, gradients, neighbors
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
    Split,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local import lasting
from pfljax.local.batches import Batch, masked, sum_over_examples
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the outputs of models that a client evaluates
SHARE = 1 / 5  # of the bar; a model explains the client's examples if its loss is this much lower

Evaluate = Callable[[Params, Split], Array]  # a model's loss on a client's examples, summed


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        table: The tracked losses L_i of its candidates.
        weights: (M + 1,) weights w_i of the gradients for the models received in the last round.
        rounds: () int32, number of its rounds so far.
        bar: () mean loss of a model that knows nothing of the client's examples; inf before the
            first round.
    """

    table: neighbors.Candidates
    weights: Array
    rounds: Array
    bar: Array


@method(
    keeps="its model, tracked losses of others' models",
    travels="M neighbors' models down, M gradients up",
)
@dataclasses.dataclass(frozen=True)
class FedeRiCo:
    """FedeRiCo, decentralized (Algorithm 1): each client weighs a few neighbors' models and sends gradients back.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedeRiCo(neighbors=5, rule="posterior")
        FedeRiCo(neighbors=5, epsilon=0.3, beta=0.6, rule='posterior', effective_examples=inf,
                 faithful=False, tracking='ema', update='gradient', candidates=32,
                 collaborators=16)
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
    rule: Literal["friends", "posterior"] = hyperparameter(
        "friends",
        help="friends: equal weights for models that explain unseen examples; posterior: Algorithm 1, l. 15",
    )
    effective_examples: float = hyperparameter(
        math.inf,
        above=0,
        infinite=True,
        read_with=("rule", "posterior"),
        help="number of examples (at most n_k) that the likelihood counts as after the first ceil((C-1)/M) rounds",
    )
    faithful: bool = hyperparameter(
        False, help="follow Algorithm 1: posterior; losses start at zero and all n_k examples count"
    )
    tracking: Literal["ema", "accumulated"] = hyperparameter(
        "ema",
        read_with={"rule": ("posterior",), "faithful": (True,)},
        help="track losses' moving average or their sum",
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
        self._check(problem)
        solver = problem.solver
        num_clients = problem.num_clients
        num_candidates = min(self.candidates or num_clients, num_clients)
        num_mixed = min(self.collaborators, num_candidates)
        sends_gradients = self.update == "gradient"
        rule = self._rule(problem, num_candidates)

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            # l. 1
            personal = problem.init_personal(key, client, common=False)

            # l. 3: losses of zero, or no losses.
            table_key = jax.random.fold_in(jax.random.fold_in(key, num_clients), client)
            first_loss = 0.0 if self.faithful else jnp.inf
            table = neighbors.candidates(table_key, client, num_candidates, num_clients, first_loss)
            row = Row(
                table=table,
                weights=jnp.zeros((self.neighbors + 1,)),
                rounds=jnp.zeros((), jnp.int32),
                bar=jnp.array(jnp.inf),
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

        def after_losses(context: ClientContext, row: Row, losses: Array, split: Split) -> Row:
            """A client's next row, from the losses (J,) of the received models, summed over its examples."""
            # In its first round: the loss of its untrained model, or that of guessing its labels.
            untrained = losses[0] / jnp.maximum(split.size, 1)
            first_bar = jnp.minimum(untrained, classes.label_code(problem, split))
            bar = jnp.where(row.rounds == 0, first_bar, row.bar)

            # l_ib for b in B; other losses stay (l. 10-13).
            table, slots = neighbors.remember(row.table, context.index, losses)

            # L_ij <- (1 - beta) L_ij + beta l_ij (l. 14).
            beta = self.beta if self.tracking == "ema" else None
            table = neighbors.track(table, slots, row.rounds, beta)

            # w_i <- softmax(-L_i), or equal for friends (l. 15).
            scores = rule.scores(table, bar, row.rounds, split.size)
            weights = jax.nn.softmax(scores)[slots]
            return Row(table, rule.gradient_weights(weights), row.rounds + 1, bar)

        def client_update(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> ClientOutput:
            split = data.train
            evaluate = rule.evaluation(row.bar)

            def e_step(losses: Array) -> Row:
                return after_losses(context, row, losses, split)

            if sends_gradients:
                # g_bi = w_ib grad_phi_b sum_s l(phi_b; x_s, y_s) (l. 16-17).
                weighed = gradients.after_e_step(
                    problem,
                    context,
                    models,
                    split,
                    row,
                    e_step=e_step,
                    weights=lambda row: row.weights,
                    evaluate=evaluate,
                )
                next_row = weighed.row
                losses = weighed.losses
                update = weighed.gradients
            else:
                # w_ib n_i times the change of phi_b in local training.
                total_loss = evaluate or solver.total_loss
                totals = problem.plan.over_models(lambda model: total_loss(model, split), models)
                next_row = e_step(totals)
                weights = next_row.weights
                losses, changes = local_changes(problem, context, models, weights, split)
                update = tree.scale(changes, weights * split.size)

            # The mean of the models' losses, by their weights.
            weights = next_row.weights
            total_weight = jnp.maximum(weights.sum(), jnp.finfo(jnp.float32).tiny)
            loss = jnp.vdot(weights, losses) / total_weight
            return ClientOutput(
                row=next_row,
                upload=Upload(update),
                report=ClientReport(loss, entries={"size": split.size}),
                sent=gradients.takes_step(problem, context, split),
            )

        # ---- The models' owners.

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # n_i, or for owners without examples the mean.
            sizes = aggregate.report.entries["size"]
            mean_size = jnp.maximum(sizes.mean(), 1)
            sizes = jnp.where(sizes > 0, sizes, mean_size)

            # phi_i <- optimizer step with sum_j g_ij / n_i (l. 19-22).
            if sends_gradients:
                return gradients.apply(problem, state, aggregate, sizes, Topology.PEERS), {}
            change = tree.scale(aggregate.upload.update, 1 / sizes)
            return state.with_models(tree.add(state.models, change)), {}

        # ---- What a client predicts with.

        def select_models(context: ClientContext, row: Row, size: Array) -> Mixture:
            scores = rule.scores(row.table, row.bar, row.rounds - 1, size)
            return neighbors.heaviest(row.table, num_mixed, scores)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            return rule.adapt(models, data, self.collaborators)

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

    def _rule(self, problem: Problem, num_candidates: int) -> Rule:
        """How clients weigh models."""
        if self.rule == "friends" and not self.faithful:
            return Friends(problem, num_candidates)
        first_pass = -(-(num_candidates - 1) // max(self.neighbors, 1))
        return Posterior(problem, self.effective_examples, first_pass)

    def _check(self, problem: Problem) -> None:
        """Raises `ArgumentError` for hyperparameters that do not fit the problem or each other."""
        cohort_size = problem.cohort_size
        if self.update == "delta":
            marks = lasting.marks(problem.solver.optimizer, problem.model.network.shapes)
            if any(marks):
                text = (
                    "keeps no optimizer over rounds, so an optimizer's own schedule would start anew "
                    "in each; accepted: gradient, or LocalTraining's schedule of rounds"
                )
                raise ArgumentError("update", text, self.update)
        if not self.neighbors < cohort_size:
            text = (
                f"accepted: 0 to {cohort_size - 1}, fewer than the {cohort_size} clients of a round"
            )
            raise ArgumentError("neighbors", text, self.neighbors)
        if self.candidates and not self.neighbors < self.candidates:
            text = f"accepted: 0 (all clients), or more than the {self.neighbors} neighbors"
            raise ArgumentError("candidates", text, self.candidates)
        is_number = isinstance(self.effective_examples, int | float)
        if self.faithful and is_number and self.effective_examples < math.inf:
            text = "accepted without faithful: a number"
            raise ArgumentError("effective_examples", text, self.effective_examples)


def local_changes(
    problem: Problem, context: ClientContext, models: Params, weights: Array, split: Split
) -> tuple[Array, Params]:
    """Mean losses (J,) and changes (J, ...) of local training; 0 for models of negligible weight."""
    solver = problem.solver

    def train(model: Params, number: Array) -> tuple[Array, Params]:
        def objective(params: Params, batch: Batch) -> Array:
            return solver.mean_loss(params, batch.for_model(number))

        trained, loss = solver.fit(
            context.key, solver.begin(model), split, objective, round_number=context.round
        )
        return loss, tree.subtract(trained.whole, model)

    def train_if_weighed(model: Params, number: Array, weight: Array) -> tuple[Array, Params]:
        return gradients.if_weighed(weight, train, model, number)

    numbers = jnp.arange(weights.shape[0])
    return problem.plan.over_models(train_if_weighed, models, numbers, weights)


# ---- How a client weighs models: by the posterior of its training losses, or as friends.


class Posterior(NamedTuple):
    """Line 15: the softmax of minus the tracked losses.

    Attributes:
        problem: The problem of the method.
        examples: Number of examples, at most n_k, that the likelihood counts as after the first pass.
        first_pass: Number of rounds in which a client can receive all candidates once.
    """

    problem: Problem
    examples: Array | float
    first_pass: int

    def scores(self, table: neighbors.Candidates, bar: Array, rounds: Array, size: Array) -> Array:
        """(C,) logarithms of the candidates' weights, up to a constant."""
        tempered = jnp.minimum(self.examples, size) / jnp.maximum(size, 1)
        share = jnp.where(rounds < self.first_pass, 1.0, tempered)
        return neighbors.logits(table, share)

    def evaluation(self, bar: Array) -> Evaluate | None:
        """What evaluates a model; None: the training loss."""

    def gradient_weights(self, weights: Array) -> Array:
        """(J,) weights of the gradients for the received models, the client's own first."""
        return weights

    def adapt(self, models: Params, data: ClientData, num_mixed: int) -> Prediction:
        """What a client unseen in training makes of N models: one E-step."""
        return by_loss.posterior(self.problem, models, data, num_mixed, self.examples)


class Friends(NamedTuple):
    """The client's own model and its friends weigh alike; in regression, by their losses.

    Training losses are near zero for every model that a client trains, its own or not, so they cannot tell whom to
    train. A stranger's model has never trained on the client's examples: all n_k of them are held out for it. A
    friend's model explains these examples better than no model does: it classifies most of them correctly, or its loss
    is far below the bar, the lower one of an untrained model's loss and of the code length of the client's labels.
    Since models are overconfident on examples that did not train them, their outputs are also divided by a few
    temperatures; the least loss counts, without label smoothing and class weights. See docs/results/federico.md.

    Its methods are those of `Posterior`.

    Attributes:
        problem: The problem of the method.
        num_candidates: C, number of models whose losses a client tracks.
    """

    problem: Problem
    num_candidates: int

    @property
    def is_regression(self) -> bool:
        """Whether the scale of losses is unknown."""
        return self.problem.model.task == "regression"

    def scores(self, table: neighbors.Candidates, bar: Array, rounds: Array, size: Array) -> Array:
        """(C,) logarithms of the candidates' weights, up to a constant."""
        self_index = -table.tracked[:1] if self.is_regression else jnp.zeros((1,))
        others = log_weights(self.problem, table.tracked[1:], bar, size)
        return jnp.concatenate([self_index, others])

    def evaluation(self, bar: Array) -> Evaluate | None:
        """What evaluates a model: its evidence against the bar; in regression, None: the training loss."""
        if self.is_regression:
            return None

        def evaluate(model: Params, split: Split) -> Array:
            return self.evidence(bar, model, split)

        return evaluate

    def evidence(self, bar: Array, params: Params, split: Split) -> Array:
        """A model's loss at the temperature of least loss, summed; the bar's, if it is less but explains too little.

        A model explains enough if its loss is `SHARE` of the bar below the bar, or if it classifies most of the n
        examples correctly: more than n/2 + sqrt(n log(N) / 2), which one that is right on half of all examples reaches
        with a probability of at most 1/N (Hoeffding's inequality).
        """
        model = self.problem.model
        size = split.size

        def block_losses(x: Array, y: Array, mask: Array) -> tuple[Array, Array]:
            inputs, _ = masked(x, y, mask)
            outputs = model.apply(params, inputs)
            losses = jnp.stack(
                [model.loss_from_outputs(outputs / heat, y) for heat in TEMPERATURES]
            )
            is_right = 0
            if model.task == "classification":
                is_right = model.mean_over_positions(outputs.argmax(axis=-1) == y, y)
            return jnp.where(mask, losses, 0).sum(axis=1), jnp.where(mask, is_right, 0).sum()

        totals, num_right = sum_over_examples(block_losses, split)
        total = totals.min()
        num_others = max(self.num_candidates - 1, 1)
        is_right_on_most = num_right > size / 2 + jnp.sqrt(size / 2 * math.log(num_others))
        is_far_below = total <= (1 - SHARE) * bar * size
        is_enough = is_right_on_most | is_far_below | ~jnp.isfinite(bar)
        return jnp.where(is_enough, total, jnp.maximum(total, bar * size))

    def gradient_weights(self, weights: Array) -> Array:
        """(J,): the gradient of the client's own model always counts in full."""
        is_own = jnp.arange(len(weights)) == 0
        return jnp.where(is_own, 1.0, weights)

    def adapt(self, models: Params, data: ClientData, num_mixed: int) -> Prediction:
        """Its friends among N models; without any, and in regression, the posterior of all its examples."""
        size = data.train.size
        bar = classes.label_code(self.problem, data.train)
        losses = by_loss.losses_of(self.problem, models, data.train, self.evaluation(bar))
        totals = losses * size
        scores = log_weights(self.problem, totals, bar, size)
        has_none = jnp.isneginf(scores).all()
        scores = jnp.where(has_none, -totals, scores)
        order = jnp.lexsort((totals, -scores))
        index = order[:num_mixed]
        return Prediction(index=index.astype(jnp.int32), weights=jax.nn.softmax(scores[index]))


Rule = Posterior | Friends


def log_weights(problem: Problem, totals: Array, bar: Array, size: Array) -> Array:
    """Logarithms of the weights of others' models, up to a constant; -inf for strangers.

    A friend has 2 log(N) nats of evidence. With one friend expected among N models, its odds are then N to 1, and less
    than one of N strangers is taken for a friend. In classification, the evidence is the gain in log likelihood, and
    friends weigh alike. In regression, where the scale of the loss is unknown, it is n_k / 2 times the log of the ratio
    of the losses, a friend's loss is also `SHARE` of the bar below the bar, and friends weigh by their losses.

    Args:
        problem: The problem of the method.
        totals: (N,) summed losses, by `Friends.evaluation`; inf: not evaluated.
        bar: () mean loss to beat, that of a model that knows nothing of the client; inf: unknown, nobody is a friend.
        size: () n_k.
    """
    needed = 2 * math.log(max(len(totals), 1))
    is_known = jnp.isfinite(totals) & jnp.isfinite(bar)
    if problem.model.task == "regression":
        nats = size / 2 * jnp.log(bar * size / totals)
        explains = totals <= (1 - SHARE) * bar * size
        is_friend = is_known & explains & (nats > needed)
        return jnp.where(is_friend, -totals, -jnp.inf)
    nats = bar * size - totals
    is_friend = is_known & (nats > needed)
    return jnp.where(is_friend, 0.0, -jnp.inf)
