"""FedeRiCo with friends: a client shares classes with the models that know them better than it does by itself.

Ours, unpublished. The rounds, the choice of neighbors and the moving average are those of FedeRiCo (see `federico`).
Three things take the place of lines 10-17 of its Algorithm 1:

1. Held-out evidence, class by class. Client i splits its examples into two halves and keeps two references: models that
   train on one half each, and on nothing else. L_jc is the summed loss of model j on i's examples of class c, R_c that
   of the references, each on the half that did not train it, and G_c that of guessing labels by their frequencies:

       B_c  <- 4/5 min(R_c, G_c) + 1/5 G_c
       E_jc <- (1 - beta) E_jc + beta (B_c - L_jc)                                          (as in l. 14)

   So a friend explains at least four fifths of what the references explain: they trained on half of the examples.

2. The posterior that j's model and client i share class c. A pair shares nothing (prior probability 0.9),
   everything (0.09), or each class with a probability that is uniform on [0, 1] (0.01); the evidence is a likelihood
   ratio:

       z_jc = p(c is shared | E_j1, ..., E_jC)                                              (in place of l. 15)
       w_jc = z_jc / (1 + sum of z_kc over the neighbors k of the round);  w_ic = 1

3. Examples that contradict a neighbor's model do not pull it. Client i sends to j, other than itself, the gradient of

       sum_s w_{j, y_s} p(y_s | x_s; phi_j) l(phi_j; x_s, y_s)                              (in place of l. 16-17)

   with weights as they are in the E-step, and that of the sum of l to itself.

It predicts p(c | x) in proportion to p(c | x; phi_i) + sum_j z_jc p(c | x; phi_j).

Why: a model may be a friend for some classes only, and no training loss can tell so, because it is near zero for every
model that a client trains. References have never seen the half that they are scored on, and a neighbor's model has not
trained on the client's examples before it was found to share them.

Details:
- Models are overconfident on examples that did not train them. For L and R, outputs are divided by the temperature, of
  five, at which the client's examples are most likely or, for the references, the loss is least. Elsewhere they are as
  they are.
- Regression, sequences and multi-label examples are one class. In regression, where the scale of losses is unknown,
  the evidence is n_i / 2 log(B / L_j) with B = R^(4/5) G^(1/5), labels are guessed by the mean of the others, and
  exp(-2 n_i l / B) takes the place of p. Losses that are not positive share nothing.
- With `update="delta"`, the weighted loss is that of local training, and the change is weighted by the largest of the
  examples' weights, to which the others are relative. Batch statistics are means by the weights.
- A newcomer has no references and no model of its own: it guesses labels by their frequencies, and the mixture of all
  models by their likelihoods takes the place of its model.
- FedeRiCo's departures in the handling of cohorts and mini-batches hold here, too.

docs/results/federico-rule.md compares the rule with others where clients share nothing, a part or everything, and
docs/results/federico-constants.md varies its constants. A client stores three models, or one without references.
"""

from __future__ import annotations

import dataclasses
import math
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
    PyTree,
    Split,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.exchange.views import Chosen, map_examples
from pfljax.local.batches import Batch, over_examples
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Personal, Problem
from pfljax.local.solver import TrainState
from pfljax.settings.method import hyperparameter, method

TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0)  # of outputs on examples that did not train a model
SLACK = 1 / 5  # of what the references explain, which a friend's model need not explain
EVERYTHING = 0.09  # prior probability that a client shares all classes with a model
SOME = 0.01  # that it shares each class with a probability of its own
GRID = 32  # points at which the probability that a class is shared is integrated over [0, 1]
MOST_NATS = 1e6  # evidence is finite, so that a diverged model that recovers is forgiven
LEAST_SCALE = 1e-20  # of losses in regression
HALVES = 0x4A1F  # folded into a client's number: which examples are in which half


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        table: Its candidates. What is tracked is one minus the mean over classes of z_j.
        evidence: (C, S) E_j of its candidates for each of S classes.
        weights: (M + 1, n_max) weights of its examples for the models received in the last round.
        references: Two models that are trained on one half of its examples each, leaves (2, ...); None: there are none.
    """

    table: neighbors.Candidates
    evidence: Array
    weights: Array
    references: Personal | None


@method(
    name="federico_friends",
    keeps="its model, two references, evidence of others' models",
    travels="M neighbors' models down, M gradients up",
)
@dataclasses.dataclass(frozen=True)
class FedeRiCoFriends:
    """FedeRiCo with friends (ours, unpublished): clients share classes with models that know them better.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedeRiCoFriends(neighbors=5)
        FedeRiCoFriends(neighbors=5, epsilon=0.3, beta=0.6, update='gradient', candidates=32,
                        collaborators=16, references=True, by_class=True, by_example=True,
                        temperatures=True)
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
        help="weight of the newest evidence in its moving average",
    )
    update: Literal["gradient", "delta"] = hyperparameter(
        "gradient",
        help="what clients send back: a gradient per step, or the change after local epochs (delta)",
    )
    candidates: int = hyperparameter(
        32, at_least=0, help="C, number of models whose evidence a client tracks; 0: all K"
    )
    collaborators: int = hyperparameter(
        16, at_least=1, help="number of models that share most, with which a client predicts"
    )
    references: bool = hyperparameter(
        True, help="train two more models for held-out losses; otherwise only guessing is the bar"
    )
    by_class: bool = hyperparameter(True, help="share classes; otherwise all or nothing")
    by_example: bool = hyperparameter(
        True, help="weigh examples by the probability of their labels under a neighbor's model"
    )
    temperatures: bool = hyperparameter(
        True, help="evaluate models at their most likely temperature of five; otherwise as they are"
    )

    def build(self, problem: Problem) -> Algorithm:
        neighbors.check(problem, self.neighbors, self.candidates, self.update)
        solver = problem.solver
        num_clients = problem.num_clients
        num_candidates = min(self.candidates or num_clients, num_clients)
        num_mixed = min(self.collaborators, num_candidates)
        num_received = self.neighbors + 1
        sends_gradients = self.update == "gradient"
        has_references = self.references and self.neighbors > 0
        evidence = Evidence(problem, by_class=self.by_class, has_temperatures=self.temperatures)
        num_classes = evidence.num_classes
        if not self.references and not evidence.can_guess:
            text = "needs a loss of pfljax, by which labels are guessed; accepted: True"
            raise ArgumentError("references", text, self.references)

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            personal = problem.init_personal(key, client, common=False)

            table_key = jax.random.fold_in(jax.random.fold_in(key, num_clients), client)
            table = neighbors.candidates(table_key, client, num_candidates, num_clients, jnp.inf)

            # The references begin as the client's own model.
            references = None
            if has_references:
                references = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), personal)
            row = Row(
                table=table,
                evidence=jnp.zeros((num_candidates, num_classes)),
                weights=jnp.zeros((num_received, problem.n_max)),
                references=references,
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

        def e_step(context: ClientContext, models: Params, row: Row, split: Split) -> Row:
            """A client's next row, but for the references, from the models (J, ...) that it received."""
            # B_c: the references, or guessing.
            bar = evidence.guessing_losses(split)
            if row.references is not None:
                both_halves = halves(context.client, split)
                held_out = evidence.held_out_losses(row.references.params, both_halves)
                bar = evidence.bar(held_out, bar)

            # E_jc <- (1 - beta) E_jc + beta (B_c - L_jc); other models keep theirs.
            losses = evidence.losses_of_models(models, split)
            newest = evidence.against(bar, evidence.sum_by_class(losses, split), split.size)
            no_losses = jnp.zeros(num_received)
            table, slots = neighbors.remember(row.table, context.index, no_losses)
            is_new = jnp.isinf(table.tracked[slots])[:, None]
            average = (1 - self.beta) * row.evidence[slots] + self.beta * newest
            updated = jnp.where(is_new, newest, average)
            all_evidence = jnp.asarray(row.evidence).at[slots].set(updated)

            # z_jc; its own model comes first.
            is_own = jnp.arange(num_received)[:, None] == 0
            shares = jnp.where(is_own, 1.0, shared_classes(updated))
            tracked = jnp.asarray(table.tracked).at[slots].set(1 - shares.mean(axis=1))
            table = table._replace(tracked=tracked.at[0].set(-1.0))

            # w_{j, y_s} p(y_s | x_s; phi_j), and 1 for its own model.
            weights = evidence.example_weights(shares / shares.sum(axis=0), split)
            if self.by_example:
                weights = weights * evidence.explained(losses, bar, split.size)
            weights = jnp.where(is_own, 1.0, weights)
            is_real = jnp.arange(problem.n_max) < split.size
            return Row(table, all_evidence, jnp.where(is_real, weights, 0.0), row.references)

        def train_references(
            context: ClientContext, references: Personal, split: Split
        ) -> Personal:
            """A round of local training of each reference, on its half, with as many steps as other models take."""
            first_half, second_half = halves(context.client, split)
            num_steps = solver.num_steps(split.size, problem.n_max)
            is_first = jnp.array([True, False])

            def train(reference: Personal, is_first: Array, number: Array) -> Personal:

                def mean_loss(params: Params, batch: Batch) -> Array:
                    return solver.mean_loss(params, batch.for_model(number))

                params, statistics = solver.without_statistics(reference.params)
                start = TrainState(params, statistics, reference.opt_state)
                state, _ = solver.fit(
                    context.key,
                    start,
                    chosen_half(is_first, first_half, second_half),
                    mean_loss,
                    round_number=context.round,
                    num_steps=num_steps,
                )
                return Personal(state.whole, state.opt_state)

            numbers = num_received + jnp.arange(2)
            return problem.plan.over_models(train, references, is_first, numbers)

        def client_update(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> ClientOutput:
            split = data.train
            if not context.later:
                row = e_step(context, models, row, split)
                if row.references is not None:
                    references = train_references(context, row.references, split)
                    row = row._replace(references=references)

            # Relative to the largest one of each model.
            peaks = row.weights.max(axis=1)
            tiny = jnp.finfo(jnp.float32).tiny
            relative = row.weights / jnp.maximum(peaks, tiny)[:, None]
            orders = solver.draw_orders(context.key, split.size, problem.n_max)

            batch = solver.take_batch(context.key, orders, split, context.step)

            def gradient(model: Params, number: Array, weights: Array) -> tuple[Array, Params]:
                """Loss of a model on this exchange's mini-batch, with weighted examples, and its gradient."""

                def mean_loss(model: Params) -> Array:
                    return solver.mean_loss(model, batch.for_model(number), weights)

                return jax.value_and_grad(mean_loss)(model)

            def change(model: Params, number: Array, weights: Array) -> tuple[Array, Params]:
                """Loss of a model in local training, with weighted examples, and its change."""

                def mean_loss(params: Params, batch: Batch) -> Array:
                    return solver.mean_loss(params, batch.for_model(number), weights)

                start = solver.begin(model)
                trained, loss = solver.fit(
                    context.key, start, split, mean_loss, round_number=context.round
                )
                return loss, tree.subtract(trained.whole, model)

            compute = gradient if sends_gradients else change

            def weighted(
                model: Params, number: Array, weights: Array, peak: Array
            ) -> tuple[Array, Params]:
                loss, update = gradients.if_weighed(peak, compute, model, number, weights)
                return loss, jax.tree.map(lambda leaf: peak * split.size * leaf, update)

            numbers = jnp.arange(num_received)
            losses, update = problem.plan.over_models(weighted, models, numbers, relative, peaks)

            # Batch statistics are means by the weights with which they moved, or by more.
            statistics_weights = peaks
            if sends_gradients:
                batch_weights = (row.weights[:, batch.index] * batch.mask).sum(axis=1)
                statistics_weights = batch_weights / jnp.maximum(batch.mask.sum(), 1)
            sums = gradients.weights_of_statistics(problem, models, statistics_weights, split)
            return ClientOutput(
                row=row,
                upload=Upload(update, sums=sums),
                report=ClientReport(losses[0], entries={"size": split.size}),
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
            is_own = jnp.arange(num_candidates) == 0
            shares = jnp.where(is_own, 1.0, jnp.clip(1 - row.table.tracked, 0, 1))
            return neighbors.heaviest(row.table, num_mixed, jnp.log(shares))

        def predict(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> Prediction:
            """p(c | x) in proportion to p(c | x; phi_i) + sum_j z_jc p(c | x; phi_j)."""
            is_slot = row.table.ids[None, :] == context.index[:, None]
            slots = is_slot.argmax(axis=1)
            shares = shared_classes(row.evidence[slots])

            # 1 for its own model, 0 for models that it has not evaluated.
            is_known = jnp.isfinite(row.table.tracked[slots])[:, None]
            is_own = slots[:, None] == 0
            shares = jnp.where(is_own, 1.0, jnp.where(is_known, shares, 0.0))
            return Prediction(weights=evidence.normalized(shares))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            return evidence.newcomer(models, data.train, self.collaborators)

        return Algorithm(
            topology=Topology.PEERS,
            first_row=first_row,
            download=download,
            client_update=client_update,
            server_update=server_update,
            select_models=select_models,
            predict=predict,
            adapt=adapt,
            exchanges=solver.max_steps(problem.n_max) if sends_gradients else 1,
            # A reference trains on half of the examples, each of them twice as often.
            ledger=Ledger(gradients=num_received + 2 * has_references, unaccounted=BY_LOSS),
            report=MethodReport(scored="each client's mixture of its own model and its friends'"),
        )


# ---- Halves of a client's examples.


def halves(client: Array, split: Split) -> tuple[Split, Split]:
    """Two halves of a client's examples, the same in every round.

    Each class, or range of values, is in both, if an example has one label.
    """
    n_max = split.y.shape[0]
    key = jax.random.fold_in(jax.random.key(HALVES), client)
    lots = jax.random.uniform(key, (n_max,))
    is_padding = jnp.arange(n_max) >= split.size
    y = split.y[...]
    label = y if y.ndim == 1 else jnp.zeros(n_max)

    # By label, in random order; then every second one.
    order = jnp.lexsort((lots, label, is_padding))
    evens = order[0::2]
    odds = order[1::2]

    def half(first: Array, second: Array, size: Array) -> Split:
        chosen_order = jnp.concatenate([first, second])[: len(evens)]
        x, y = map_examples(lambda leaf: Chosen(leaf, chosen_order), split[:2])
        return Split(x, y, size)

    num_odd = split.size // 2
    return half(evens, odds, split.size - num_odd), half(odds, evens, num_odd)


def chosen_half(is_first: Array, first: Split, second: Split) -> Split:
    """One of two halves."""

    def choose(a: Chosen, b: Chosen) -> Chosen:
        return Chosen(a.base, jnp.where(is_first, a.order, b.order))

    x, y = map_examples(choose, first[:2], second[:2])
    return Split(x, y, jnp.where(is_first, first.size, second.size))


# ---- Evidence.


class Evidence(NamedTuple):
    """What a client's examples say about models.

    Losses are without label smoothing and class weights.

    Attributes:
        problem: The problem of the method.
        by_class: Whether classes are shared, and not all or nothing.
        has_temperatures: Whether models are evaluated at several temperatures.
    """

    problem: Problem
    by_class: bool
    has_temperatures: bool

    @property
    def is_regression(self) -> bool:
        """Whether the scale of losses is unknown."""
        return self.problem.model.task == "regression"

    @property
    def num_classes(self) -> int:
        """S: the number of classes that are shared or not; 1 unless each example has one of several classes."""
        model = self.problem.model
        has_classes = model.task == "classification" and len(model.output_shape) == 2
        return model.output_shape[-1] if has_classes and self.by_class else 1

    @property
    def can_guess(self) -> bool:
        """Whether the losses of guessing labels are known."""
        model = self.problem.model
        if model.task == "classification":
            return model.criterion is None
        return model.target_shape in (None, model.output_shape[1:])

    def example_weights(self, class_weights: Array, split: Split) -> Array:
        """(..., n_max) weights of examples, from those (..., S) of their classes; 0 for labels of no class."""
        if self.num_classes == 1:
            return jnp.broadcast_to(class_weights, (*class_weights.shape[:-1], split.y.shape[0]))
        y = split.y[...]
        is_class = (y >= 0) & (y < self.num_classes)
        return jnp.where(is_class, class_weights[..., jnp.where(is_class, y, 0)], 0.0)

    def losses(self, params: Params, split: Split) -> Array:
        """(n_max, T) losses of a model on a client's examples, at each temperature; 0 for padding."""
        model = self.problem.model
        temperatures = TEMPERATURES
        if self.is_regression or not self.has_temperatures:
            temperatures = (1.0,)

        def losses_of_block(x: PyTree, y: Array) -> Array:
            outputs = model.apply(params, x)
            losses = [
                model.loss_from_outputs(outputs / temperature, y) for temperature in temperatures
            ]
            return jnp.stack(losses, axis=1)

        return over_examples(losses_of_block, split)

    def losses_of_models(self, models: Params, split: Split) -> Array:
        """(J, n_max, T) `losses` of J models."""

        def evaluate(model: Params) -> Array:
            return self.losses(model, split)

        return self.problem.plan.over_models(evaluate, models)

    def sum_by_class(self, losses: Array, split: Split) -> Array:
        """(..., T, S) sums of losses (..., n_max, T) over the examples of each class."""
        if self.num_classes == 1:
            return losses.sum(axis=-2)[..., None]
        by_example = jnp.moveaxis(losses, -2, 0)
        sums = jax.ops.segment_sum(by_example, split.y[...], self.num_classes)
        return jnp.moveaxis(sums, 0, -1)

    def held_out_losses(self, references: Params, both_halves: tuple[Split, Split]) -> Array:
        """(S,) summed losses of two references (2, ...), each on the half that did not train it."""
        first_half, second_half = both_halves

        def evaluate(reference: Params, is_first: Array) -> Array:
            other_half = chosen_half(~is_first, first_half, second_half)
            return self.sum_by_class(self.losses(reference, other_half), other_half)

        is_first = jnp.array([True, False])
        losses = self.problem.plan.over_models(evaluate, references, is_first).sum(axis=0)
        losses = jnp.nan_to_num(losses, nan=jnp.inf, posinf=jnp.inf)
        best = jnp.argmin(losses.sum(axis=1))
        return losses[best]

    def bar(self, held_out: Array, guessing: Array) -> Array:
        """(S,) B_c from R_c and G_c; inf in G_c: unknown, and B_c is R_c."""
        references = jnp.minimum(held_out, guessing)
        if self.is_regression:
            # Nats are half the logarithms of losses.
            bar = references ** (1 - SLACK) * guessing**SLACK
        else:
            bar = (1 - SLACK) * references + SLACK * guessing
        return jnp.where(jnp.isfinite(guessing), bar, references)

    def explained(self, losses: Array, bar: Array, size: Array) -> Array:
        """(J, n_max) in [0, 1]: p(y | x) of each example under J models, by their losses (J, n_max, T); 0 for NaN."""
        scale = 1.0
        if self.is_regression:
            scale = jnp.maximum(bar.sum() / jnp.maximum(2 * size, 1), LEAST_SCALE)
        losses = jnp.nan_to_num(losses[..., 0], nan=jnp.inf, posinf=jnp.inf)
        return jnp.exp(-jnp.maximum(losses, 0) / scale)

    def guessing_losses(self, split: Split) -> Array:
        """(S,) summed losses of guessing each label by the frequencies, or mean, of the others; inf: unknown."""
        model = self.problem.model
        if model.task == "classification":
            if self.num_classes > 1:
                return classes.label_codes(self.problem, split)
            return classes.label_codes(self.problem, split).sum(keepdims=True)
        y = split.y[...]
        is_real = jnp.arange(len(y)) < split.size
        real_y = jnp.where(tree.per_row(is_real, y), y, 0)
        sums_of_others = real_y.sum(axis=0) - real_y
        if model.task == "multilabel":
            frequencies = (sums_of_others + 0.5) / jnp.maximum(split.size, 1)
            outputs = jnp.log(frequencies) - jnp.log1p(-frequencies)
        elif model.target_shape in (None, model.output_shape[1:]):
            outputs = sums_of_others / jnp.maximum(split.size - 1, 1)
        else:
            return jnp.full((1,), jnp.inf)
        losses = model.loss_from_outputs(outputs, y)
        total = jnp.where(is_real, losses, 0).sum(keepdims=True)

        # Nothing tells the mean of a single value.
        is_known = split.size > (1 if self.is_regression else 0)
        return jnp.where(is_known, total, jnp.inf)

    def against(self, bar: Array, losses: Array, size: Array) -> Array:
        """(..., S) evidence of models, at their most likely temperatures.

        Args:
            bar: (S,) B_c; inf: unknown, and models share nothing.
            losses: (..., T, S) of the models, as from `sum_by_class`.
            size: () n_i.
        """
        if self.is_regression:
            is_known = jnp.isfinite(bar) & (bar > 0) & (losses > 0)
            ratio = jnp.where(is_known, bar, 1.0) / jnp.where(is_known, losses, 1.0)
            nats = size / 2 * jnp.log(ratio)
        else:
            is_known = jnp.isfinite(bar)
            nats = bar - losses
        nats = jnp.where(is_known, nats, -MOST_NATS)
        nats = jnp.nan_to_num(nats, nan=-MOST_NATS, posinf=MOST_NATS, neginf=-MOST_NATS)
        nats = jnp.where(size > 0, jnp.clip(nats, -MOST_NATS, MOST_NATS), 0.0)
        likelihood = jax.nn.logsumexp(log_hypotheses(nats), axis=-1)
        best = likelihood.argmax(axis=-1)
        return jnp.take_along_axis(nats, best[..., None, None], axis=-2)[..., 0, :]

    def normalized(self, shares: Array) -> Array:
        """(J, S) or, of one class, (J,) weights in predictions: shares (J, S) divided by their sums."""
        weights = shares / shares.sum(axis=0)
        return weights[:, 0] if self.num_classes == 1 else weights

    def newcomer(self, models: Params, split: Split, num_mixed: int) -> Prediction:
        """What a client unseen in training predicts with, of N models."""

        bar = self.guessing_losses(split)

        def evaluate(model: Params, split: Split) -> Array:
            """(S + 1,) z_c, and the loss at the best temperature."""
            losses = self.sum_by_class(self.losses(model, split), split)
            shares = shared_classes(self.against(bar, losses, split.size))
            return jnp.append(shares, losses.sum(axis=1).min())

        shares_and_totals = by_loss.evaluate_all(self.problem, models, split, evaluate)
        shares = shares_and_totals[:, :-1]
        totals = jnp.nan_to_num(shares_and_totals[:, -1], nan=jnp.inf, posinf=jnp.inf)

        # All models by their likelihoods are one more, in place of its own.
        least = jnp.where(jnp.isfinite(totals).any(), totals.min(), 0.0)
        likelihoods = jax.nn.softmax(jnp.maximum(least - totals, -MOST_NATS))
        shares = shares + likelihoods[:, None]
        _, index = jax.lax.top_k(shares.mean(axis=1), min(num_mixed, len(shares)))
        return Prediction(index=index.astype(jnp.int32), weights=self.normalized(shares[index]))


# ---- The posterior of shared classes.


def log_hypotheses(evidence: Array) -> Array:
    """(..., GRID + 2) logarithms of prior times likelihood of what a client shares with a model.

    The hypotheses: each class independently, with a probability pi from a grid on [0, 1]; everything; nothing.

    Args:
        evidence: (..., S) logarithms of the likelihood ratios of each class's examples, shared or not.
    """
    pi = (jnp.arange(GRID) + 0.5) / GRID
    log_pi = jnp.log(pi)[:, None]
    log_rest = jnp.log1p(-pi)[:, None]

    by_class = jnp.logaddexp(log_pi + evidence[..., None, :], log_rest).sum(axis=-1)
    some = by_class + math.log(SOME / GRID)
    everything = evidence.sum(axis=-1, keepdims=True) + math.log(EVERYTHING)
    nothing = jnp.full_like(everything, math.log(1 - EVERYTHING - SOME))
    return jnp.concatenate([some, everything, nothing], axis=-1)


def shared_classes(evidence: Array) -> Array:
    """(..., S) z_c: the posterior probability that each class is shared; see `log_hypotheses`."""
    posterior = jax.nn.softmax(log_hypotheses(evidence), axis=-1)
    some = posterior[..., :GRID]
    everything = posterior[..., GRID, None]

    # Given pi, a class is shared with odds pi / (1 - pi) e^E.
    pi = (jnp.arange(GRID) + 0.5) / GRID
    log_odds = jnp.log(pi) - jnp.log1p(-pi)
    given_pi = jax.nn.sigmoid(evidence[..., None, :] + log_odds[:, None])
    shares = (some[..., None] * given_pi).sum(axis=-2) + everything
    return jnp.minimum(shares, 1.0)
