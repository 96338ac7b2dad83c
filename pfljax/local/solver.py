"""Local training: a loop over mini-batches with any optax optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Key, Params, PyTree, Split, Training
from pfljax.exchange.views import read
from pfljax.local import lasting
from pfljax.local.batches import AUGMENTATION, DROPOUT, NOISE, Batch, masked, of_examples, shuffle, sum_over_examples
from pfljax.local.privacy import Privacy, private_mean


def scalar(objective: Callable[..., Array]) -> Callable[..., Array]:
    """The objective; when it is traced, raises `ArgumentError` if its value has another shape than ()."""

    @functools.wraps(objective)
    def checked(*args):
        value = objective(*args)
        if shape := getattr(value, "shape", ()):
            name = getattr(objective, "__qualname__", type(objective).__name__)
            text = f"returns shape {shape}; accepted: a scalar, such as losses.mean(), since it is minimized"
            raise ArgumentError("objective", text, name)
        return value

    return checked


class TrainState(NamedTuple):
    """A model in training.

    Attributes:
        params: What the optimizer changes; None in place of batch statistics.
        statistics: The batch statistics, with None in place of the rest; None if there are none.
        opt_state: The optimizer's state for `params`.
    """

    params: Params
    statistics: Params
    opt_state: PyTree

    @property
    def whole(self) -> Params:
        """The model, with its batch statistics."""
        return joined(self.params, self.statistics)


def joined(params: Params, statistics: Params) -> Params:
    """A whole model, from what `Solver.apart` returned."""
    return params if statistics is None else tree.combine(params, statistics)


def value_and_gradients(
    objective: Callable[..., Array], params: Params, statistics: Params, batch: Batch, *rest: PyTree
) -> tuple[Array, tuple[Params, Params]]:
    """objective(params, mini-batch, *rest), and its gradients in the parameters and in the batch statistics."""

    def value(params, statistics):
        return objective(params, batch._replace(statistics=statistics), *rest)

    return jax.value_and_grad(value, argnums=(0, 1))(params, statistics)


def descent(objective: Callable[..., Array], number: Array | None = None) -> StepFunction:
    """The step that follows an objective's gradients; `number`: the model's, for dropout and noise of its own."""

    def step(params, statistics, memory, batch):
        batch = batch if number is None else batch.of_model(number)
        loss, (grads, changes) = value_and_gradients(objective, params, statistics, batch)
        return loss, grads, changes, memory

    return step


# (params, statistics, memory, batch) -> (loss, gradient of params, gradient of statistics, memory)
StepFunction = Callable[[Params, Params, PyTree, Batch], tuple[Array, Params, Params, PyTree]]


class Slope(NamedTuple):
    """The loss of a mini-batch and what it says about a model.

    Attributes:
        loss: () the objective's value.
        gradient: Its gradient in the parameters.
        statistics: Old minus new batch statistics, as the forward pass wrote them; methods pass this on.
    """

    loss: Array
    gradient: Params
    statistics: Params = None


class Solver(NamedTuple):
    """Trains a model on a client's own data.

    Attributes:
        loss: (params, x (B, ...), y (B,), mode=None) -> per-example losses (B,); see `Solver.mode`, which methods hand
            on to the model. A model's loss also takes a `shift` of its logits (see `Model.loss`).
        optimizer: Any optax transformation; its update receives `round_number`, and the loss as `value`.
        batch_size: B; 0: all of the client's examples in one step.
        epochs: Passes over the client's data in a round.
        steps: If positive, number of steps per round, instead of `epochs`.
        privacy: Clipping and noise for the gradients of mean losses.
        keyed: Whether mini-batch losses are in training mode, for dropout or to write batch statistics.
        statistics: Parameters -> a tree of bools, which leaves are batch statistics; None: there are none.
        augment: (key, x (B, ...)) -> augmented x for mini-batches; None: no augmentation.
    """

    loss: Callable[..., Array]
    optimizer: optax.GradientTransformationExtraArgs
    batch_size: int = 0
    epochs: int = 1
    steps: int = 0
    privacy: Privacy = Privacy()
    keyed: bool = False
    statistics: Callable[[Params], PyTree | None] | None = None
    augment: Callable[[Key, Array], Array] | None = None

    def with_loss(self, loss: Callable[..., Array]) -> Solver:
        """The solver that minimizes another loss; its arguments are those of `loss` in `Solver`."""
        return self._replace(loss=loss)

    def part(self, mask: PyTree) -> Solver:
        """The solver that trains only the leaves where `mask`, a tree of bools like the parameters, is True.

        The other leaves do not change, do not count in gradient clipping, and have no optimizer state.
        """

        def loss(params: Params, *args: Any, **options: Any) -> Array:
            hold = lambda chosen, leaf: leaf if chosen else jax.lax.stop_gradient(leaf)
            return self.loss(jax.tree.map(hold, mask, params), *args, **options)

        optimizers: dict[Hashable, optax.GradientTransformation] = {"part": self.optimizer, "rest": optax.set_to_zero()}

        def labels(params: Params) -> PyTree:
            """For parameters with or without batch statistics, which are None in the latter."""
            label = lambda leaf, chosen: None if leaf is None else "part" if chosen else "rest"
            return jax.tree.map(label, params, mask, is_leaf=lambda leaf: leaf is None)

        return self.with_loss(loss)._replace(optimizer=optax.partition(optimizers, labels))

    def lasting(self, opt_state: PyTree, params: Params) -> tuple:
        """What goes on over rounds of an optimizer's state for a shared model; see `pfljax.local.lasting`."""
        return lasting.kept(lasting.marks(self.optimizer, params), opt_state)

    def resumed(self, params: Params, earlier: tuple) -> PyTree:
        """A new optimizer state for a shared model, with what goes on of an `earlier` one; (): of none."""
        fresh = self.optimizer.init(params)
        return lasting.resumed(lasting.marks(self.optimizer, params), fresh, earlier) if earlier else fresh

    def with_epochs(self, epochs: int | None) -> Solver:
        """The solver with `epochs` epochs per round; None: with its own epochs or steps."""
        return self if epochs is None else self._replace(epochs=epochs, steps=0)

    def batch(self, n_max: int) -> int:
        """B for clients padded to n_max examples."""
        return min(self.batch_size or n_max, n_max)

    def num_steps(self, size: Array, n_max: int) -> Array:
        """Number of steps per round of a client with `size` examples; 0 if it has no examples."""
        per_epoch = -(-size // self.batch(n_max))
        return jnp.where(size > 0, self.steps or self.epochs * per_epoch, 0)

    def max_steps(self, n_max: int) -> int:
        """Number of steps per round of the largest client."""
        return self.steps or self.epochs * -(-n_max // self.batch(n_max))

    def draw_orders(self, key: Key, size: Array, n_max: int) -> Array | None:
        """The order of a client's examples in every epoch of a round: (epochs, n_max) int32, real examples first.

        None if every batch holds all examples. Sorting is expensive, so a client with a single batch skips it.
        """
        batch = self.batch(n_max)
        if batch == n_max:
            return None
        # With a given number of steps, only clients with more than one batch need an order, so with at least two steps
        # per epoch. With zero epochs nobody reads an order, but a step that is never taken is still traced.
        epochs = -(-self.steps // 2) if self.steps else max(self.epochs, 1)
        return jax.lax.cond(
            size > batch,
            lambda: shuffle(key, size, n_max, epochs),
            lambda: jnp.broadcast_to(jnp.arange(n_max, dtype=jnp.int32), (epochs, n_max)),
        )

    def fit(
        self,
        key: Key,
        params: Params,
        opt_state: PyTree,
        split: Split,
        *,
        round_number: Array,
        objective: Callable[[Params, Batch], Array] | None = None,
        steps: Array | None = None,
    ) -> tuple[Params, PyTree, Array]:
        """A round of local training with gradients of an objective.

        Args:
            key: Key for the order of the examples, drawn anew in every epoch.
            params: One model.
            opt_state: Its optimizer state.
            split: One client's training data.
            round_number: Number of the round, for learning rate schedules.
            objective: (params, mini-batch) -> the value to minimize, instead of the mean loss.
            steps: As in `descend`.

        Returns:
            The trained parameters, the optimizer state, and the mean over steps of the loss before each update.
        """
        objective = scalar(objective or self.mean_loss)

        def gradient(params, memory, batch):
            return *jax.value_and_grad(objective)(params, batch(0)), memory

        found = self.descend(key, params, opt_state, split, gradient, (), round_number=round_number, steps=steps)
        return found[:3]

    def descend(
        self,
        key: Key,
        params: Params,
        opt_state: PyTree,
        split: Split,
        gradient: Callable[[Params, PyTree, Callable[[int], Batch]], tuple[Array, Params, PyTree]],
        memory: PyTree,
        *,
        round_number: Array,
        steps: Array | None = None,
    ) -> tuple[Params, PyTree, Array, PyTree]:
        """A round of local training along a direction that the method defines.

        Args:
            key: Key for the order of the examples, drawn anew in every epoch.
            params: One model.
            opt_state: Its optimizer state.
            split: One client's training data.
            gradient: (params, memory, batch) -> (loss, gradient for the optimizer, memory), called at each step;
                batch(0) is the step's mini-batch, batch(1) the next one (after the round's last comes its first).
            memory: Carry of `gradient` from step to step.
            round_number: Number of the round, for learning rate schedules.
            steps: () int32, the number of steps, which may differ between clients and rounds; None: the solver's own.
                A client without examples takes no steps. Beyond the solver's own epochs, their orders of the examples
                repeat.

        Returns:
            The trained parameters, the optimizer state, the mean loss over the steps, and the memory.
        """
        n_max = split.y.shape[0]
        total = self.num_steps(split.size, n_max) if steps is None else jnp.where(split.size > 0, steps, 0)
        orders = self.draw_orders(key, split.size, n_max)

        def step(number, carry):
            params, opt_state, loss_sum, memory = carry
            place = lambda ahead: (number + ahead) % jnp.maximum(total, 1) if ahead else number
            batch = lambda ahead: self.take_batch(key, orders, split, place(ahead))
            loss, grads, memory = gradient(params, memory, batch)
            extra = {"round_number": round_number, "value": loss}
            updates, opt_state = self.optimizer.update(grads, opt_state, params, **extra)
            return optax.apply_updates(params, updates), opt_state, loss_sum + loss, memory

        carry = (params, opt_state, jnp.zeros(()), memory)
        with jax.named_scope("steps"):  # by this name, compiled programs are weighed with the number of steps
            params, opt_state, loss_sum, memory = jax.lax.fori_loop(0, total, step, carry)
        return params, opt_state, loss_sum / jnp.maximum(total, 1), memory

    def mode(self, batch: Batch) -> Training | None:
        """The mode in which a network computes on a mini-batch: training mode, or None if it is inference mode, too."""
        if not self.keyed:
            return None
        real = batch.mask > 0
        mask = real | ~real.any()  # a client without examples has statistics as well, which nobody reads
        return Training(jax.random.fold_in(batch.key, DROPOUT), mask)

    def train(
        self,
        key: Key,
        start: TrainState,
        split: Split,
        step: StepFunction,
        memory: PyTree = (),
        *,
        round_number: Array,
        num_steps: Array | None = None,
        ahead: bool = False,
    ) -> tuple[TrainState, Array, PyTree]:
        """A round of local training, in which methods see parameters and batch statistics follow by themselves.

        Args:
            key: Key for the order of the examples, drawn anew in every epoch.
            start: Parameters, batch statistics and optimizer state.
            split: One client's training data.
            step: (params, statistics, memory, batch) -> (loss, gradient of the parameters, gradient of the
                statistics, memory).
            memory: Carry of `step`.
            round_number: Number of the round, for learning rate schedules.
            num_steps: () int32, number of steps; None: the solver's own.
            ahead: Whether `step` gets a function of n in place of the mini-batch: batch(0) is the step's, batch(n) the
                n-th after it (after the round's last comes its first).

        Returns:
            The state after training, the mean loss over the steps, and the memory.
        """
        n_max = split.y.shape[0]
        if num_steps is None:
            total = self.num_steps(split.size, n_max)
        else:
            total = jnp.where(split.size > 0, num_steps, 0)
        orders = self.draw_orders(key, split.size, n_max)

        def one_step(number, carry):
            state, loss_sum, memory = carry

            def take(after: int) -> Batch:
                place = (number + after) % jnp.maximum(total, 1) if after else number
                return self.take_batch(key, orders, split, place)

            batch = take if ahead else take(0)
            loss, grads, changes, memory = step(state.params, state.statistics, memory, batch)
            updates, opt_state = self.optimizer.update(
                grads, state.opt_state, state.params, round_number=round_number
            )
            params = optax.apply_updates(state.params, updates)
            # The gradient of a statistic is the old value minus the new one, so this sets it to the new one.
            statistics = jax.tree.map(lambda old, change: old + -1.0 * change, state.statistics, changes)
            return TrainState(params, statistics, opt_state), loss_sum + loss, memory

        with jax.named_scope("steps"):  # by this name, compiled programs are weighed with the number of steps
            carry = (start, jnp.zeros(()), memory)
            state, loss_sum, memory = jax.lax.fori_loop(0, total, one_step, carry)
        return state, loss_sum / jnp.maximum(total, 1), memory

    def begin(self, params: Params) -> TrainState:
        """A whole model's state before training with a new optimizer."""
        weights, statistics = self.apart(params)
        return TrainState(weights, statistics, self.optimizer.init(weights))

    def apart(self, params: Params) -> tuple[Params, Params]:
        """A model's parameters without batch statistics, and its batch statistics; None where leaves are left out.

        The second is None if the model has no batch statistics.
        """
        if self.statistics is None:
            return params, None
        statistics, weights = tree.partition(params, self.statistics(params))
        return weights, statistics

    def mean_loss(self, params: Params, batch: Batch, weights: Array | None = None) -> Array:
        """Mean loss over the batch; with weights (n_max,), the weighted sum divided by the number of examples.

        Its gradient is private if the solver's gradients are.
        """
        mode = self.mode(batch)
        params = joined(params, batch.statistics)
        if self.privacy.active:
            weighed = jnp.ones_like(batch.mask) if weights is None else weights[batch.index]
            examples, loss = (batch.x, batch.y, weighed), self.loss
            if mode is not None:  # one key per example, for per-example gradients
                examples = (*examples, jax.random.split(mode.key, batch.mask.shape[0]))
                loss = lambda params, x, y, keys: self.loss(params, x, y, keys[0])
            return private_mean(self.privacy, batch.key, loss, params, examples, batch.mask > 0)
        losses = self.loss(params, batch.x, batch.y, mode)
        mask = batch.mask if weights is None else batch.mask * weights[batch.index]
        return (losses * mask).sum() / jnp.maximum(batch.mask.sum(), 1)

    def proximal(self, anchor: Params, strength: float) -> Callable[[Params, Batch], Array]:
        """The objective mean loss + strength / 2 |params - anchor|^2, for `fit`; batch statistics are excepted."""
        return lambda params, batch: (
            self.mean_loss(params, batch) + strength / 2 * self.squared_distance(params, anchor)
        )

    def squared_distance(self, a: Params, b: Params) -> Array:
        """() squared L2 distance over all parameters, except batch statistics."""
        return tree.squared_distance(*self.trained(a, b))

    def trained(self, *models: Params) -> tuple[Params, ...]:
        """The models without batch statistics, which become None."""
        if self.statistics is None:
            return models
        return tuple(tree.partition(params, self.statistics(params))[1] for params in models)

    def total_loss(self, params: Params, split: Split) -> Array:
        """Sum of the loss over all of a client's examples."""
        return sum_over_examples(lambda x, y, mask: jnp.where(mask, self.loss(params, x, y), 0).sum(), split)

    def loss_and_gradient(self, params: Params, split: Split) -> tuple[Array, Params]:
        """Mean loss over all of a client's examples, and its gradient; processes examples in blocks."""

        def sums(x, y, mask):
            total = lambda params: jnp.where(mask, self.loss(params, *masked(x, y, mask)), 0).sum()
            return jax.value_and_grad(total)(params)

        return tree.scale(sum_over_examples(sums, split), 1 / jnp.maximum(split.size, 1))

    def losses_of_examples(self, params: Params, split: Split) -> Array:
        """Loss of each of a client's examples: (n_max,), 0 for padding."""
        return of_examples(lambda x, y: self.loss(params, x, y), split)

    def take_batch(self, key: Key, orders: Array | None, split: Split, step: Array) -> Batch:
        """The mini-batch of step `step` of a round; an epoch's last batch may be smaller.

        Args:
            key: The client's key for the round, as in `Solver.draw_orders`.
            orders: The result of `Solver.draw_orders`.
            split: The client's training data.
            step: () int32.
        """
        n_max = split.y.shape[0]
        batch = self.batch(n_max)
        key = jax.random.fold_in(jax.random.fold_in(key, NOISE), step)
        per_epoch = jnp.maximum(-(-split.size // batch), 1)
        first = 0 if orders is None else step % per_epoch * batch
        places = first + jnp.arange(batch)
        mask = (places < split.size).astype(jnp.float32)
        if self.statistics is not None:
            # Layers that cannot leave padding out of their statistics see the batch's own examples again.
            num_real = jnp.clip(split.size - first, 1, batch)
            places = first + jnp.arange(batch) % num_real
        inside = places < split.size
        if orders is None:
            index = places
        else:
            epoch = step // per_epoch % orders.shape[0]
            index = jnp.asarray(orders).at[epoch, jnp.minimum(places, n_max - 1)].get(mode="promise_in_bounds")
        taken = ... if orders is None and self.statistics is None else index
        x, y = read(split[:2], taken)
        x, y = masked(x, y, inside)
        if self.augment is not None:
            x = self.augment(jax.random.fold_in(key, AUGMENTATION), x)
        return Batch(x, y, mask, index, key)
