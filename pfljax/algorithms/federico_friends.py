"""FedeRiCo with friends: each client mixes its own model with the models that explain its examples.

Ours, unpublished. The rounds, the choice of neighbors and the moving average of losses are those of FedeRiCo (see
`federico`). Another rule weighs models, in place of the softmax of line 15 of its Algorithm 1:

    B <- {i} and M neighbors, epsilon-greedy                                                  (as in l. 7)
    l_ib <- the summed loss of b in B at the best temperature, or the bar if b explains too little
    L_ij <- (1 - beta) L_ij + beta l_ij                                                       (as in l. 14)
    j is a friend if n_i bar_i - L_ij > 2 log N;  w_ii = 1, and w_ij = 1 / (1 + number of friends)
    sends w_ib * grad_phi_b sum_s l(phi_b; x_s, y_s) to each b                                (as in l. 16-17)
    phi_i <- optimizer step with the sum of gradients, divided by n_i                         (as in l. 19-22)

A client predicts with the mean of its own model's and its friends' predictions.

Why: line 15 weighs by training losses, which are near zero for every model that a client trains, its own or not, so
they cannot tell whom to train. A stranger's model has never trained on the client's examples: all n_i of them are held
out for it. The bar is the mean loss of a model that knows nothing of the client.

In regression, where the scale of losses is unknown, friends are weighed by their losses; see `log_weights`.
FedeRiCo's departures in the handling of cohorts, mini-batches and `delta` rounds hold here, too.
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
from pfljax.local.batches import masked, sum_over_examples
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
    name="federico_friends",
    keeps="its model, tracked losses of others' models",
    travels="M neighbors' models down, M gradients up",
)
@dataclasses.dataclass(frozen=True)
class FedeRiCoFriends:
    """FedeRiCo with friends (ours, unpublished): clients mix their own model with those that explain their examples.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedeRiCoFriends(neighbors=5)
        FedeRiCoFriends(neighbors=5, epsilon=0.3, beta=0.6, update='gradient', candidates=32,
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
        solver = problem.solver
        num_clients = problem.num_clients
        num_candidates = min(self.candidates or num_clients, num_clients)
        num_mixed = min(self.collaborators, num_candidates)
        sends_gradients = self.update == "gradient"
        friends = Friends(problem, num_candidates)

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            personal = problem.init_personal(key, client, common=False)

            table_key = jax.random.fold_in(jax.random.fold_in(key, num_clients), client)
            table = neighbors.candidates(table_key, client, num_candidates, num_clients, jnp.inf)
            row = Row(
                table=table,
                weights=jnp.zeros((self.neighbors + 1,)),
                rounds=jnp.zeros((), jnp.int32),
                bar=jnp.array(jnp.inf),
            )
            opt_state = personal.opt_state if sends_gradients else ()
            return First(row, personal.params, opt_state)

        def download(context: ClientContext, row: Row, cohort: Cohort) -> Array:
            """B <- {i} and M neighbors, epsilon-greedy."""
            self_index = context.client
            others = neighbors.epsilon_greedy(
                context.key, row.table, self_index, cohort, self.neighbors, self.epsilon
            )
            return jnp.concatenate([self_index[None], others])

        def e_step(context: ClientContext, row: Row, losses: Array, split: Split) -> Row:
            """A client's next row, from the losses (J,) of the received models, summed over its examples."""
            # In its first round: the loss of its untrained model, or that of guessing its labels.
            untrained = losses[0] / jnp.maximum(split.size, 1)
            first_bar = jnp.minimum(untrained, classes.label_code(problem, split))
            bar = jnp.where(row.rounds == 0, first_bar, row.bar)

            # L_ij <- (1 - beta) L_ij + beta l_ij; other losses stay.
            table, slots = neighbors.remember(row.table, context.index, losses)
            table = neighbors.track(table, slots, row.rounds, self.beta)

            # Equal weights for friends, and 1 for the client's own model.
            weights = jax.nn.softmax(friends.scores(table, bar, split.size))[slots]
            is_own = jnp.arange(len(slots)) == 0
            return Row(table, jnp.where(is_own, 1.0, weights), row.rounds + 1, bar)

        def client_update(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> ClientOutput:
            split = data.train
            evaluate = friends.evaluation(row.bar)

            def next_row(losses: Array) -> Row:
                return e_step(context, row, losses, split)

            if sends_gradients:
                # w_ib grad_phi_b sum_s l(phi_b; x_s, y_s)
                weighed = gradients.after_e_step(
                    problem,
                    context,
                    models,
                    split,
                    row,
                    e_step=next_row,
                    weights=lambda row: row.weights,
                    evaluate=evaluate,
                )
                row = weighed.row
                losses = weighed.losses
                update = weighed.gradients
            else:
                # w_ib n_i times the change of phi_b in local training.
                row = next_row(gradients.total_losses(problem, models, split, evaluate))
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
            # n_i, or for owners without examples the mean.
            sizes = aggregate.report.entries["size"]
            mean_size = jnp.maximum(sizes.mean(), 1)
            sizes = jnp.where(sizes > 0, sizes, mean_size)

            # phi_i <- optimizer step with the sum of gradients, divided by n_i
            if sends_gradients:
                return gradients.apply(problem, state, aggregate, sizes, Topology.PEERS), {}
            change = gradients.mean_changes(problem, aggregate, sizes)
            return state.with_models(tree.add(state.models, change)), {}

        # ---- What a client predicts with.

        def select_models(context: ClientContext, row: Row, size: Array) -> Mixture:
            scores = friends.scores(row.table, row.bar, size)
            return neighbors.heaviest(row.table, num_mixed, scores)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            return friends.adapt(models, data, self.collaborators)

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
            report=MethodReport(scored="each client's mixture of its own model and its friends'"),
        )


class Friends(NamedTuple):
    """Who is a friend.

    A friend's model explains a client's examples better than no model does: it classifies most of them correctly, or
    its loss is far below the bar, the lower one of an untrained model's loss and of the code length of the client's
    labels. Since models are overconfident on examples that did not train them, their outputs are also divided by a few
    temperatures; the least loss counts, without label smoothing and class weights. See docs/results/federico.md.

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

    def scores(self, table: neighbors.Candidates, bar: Array, size: Array) -> Array:
        """(C,) logarithms of the candidates' weights, up to a constant."""
        own_score = -table.tracked[:1] if self.is_regression else jnp.zeros((1,))
        others = log_weights(self.problem, table.tracked[1:], bar, size)
        return jnp.concatenate([own_score, others])

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
