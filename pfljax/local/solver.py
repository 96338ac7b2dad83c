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
from pfljax.local.batches import (
    AUGMENTATION,
    DROPOUT,
    NOISE,
    Batch,
    masked,
    over_examples,
    shuffle,
    sum_over_examples,
)
from pfljax.local.privacy import Privacy, private_mean


def scalar(objective: Callable[..., Array]) -> Callable[..., Array]:
    """The objective; when it is traced, raises `ArgumentError` if its value has another shape than ()."""

    @functools.wraps(objective)
    def checked(*args: Any) -> Array:
        value = objective(*args)
        shape = getattr(value, "shape", ())
        if shape:
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
    """A whole model, from what `Solver.without_statistics` returned."""
    return params if statistics is None else tree.combine(params, statistics)


class Slope(NamedTuple):
    """The loss of a mini-batch and what it says about a model.

    Attributes:
        loss: () the objective's value.
        gradient: Its gradient in the parameters.
        statistics: Old minus new batch statistics, as the forward pass wrote them; methods pass this
            on. None if there are none.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from pfljax.author import Slope
        >>> def objective(params):
        ...     return (params**2).sum()
        >>> slope = Slope(*jax.value_and_grad(objective)(jnp.array([1.0, 2.0])))
        >>> slope.gradient.tolist()
        [2.0, 4.0]
    """

    loss: Array
    gradient: Params
    statistics: Params = None


# (params, statistics, memory, n -> the n-th mini-batch after the step's) -> (slope, memory)
StepFunction = Callable[[Any, Any, Any, Callable[[int], Batch]], tuple[Slope, Any]]


def slope(
    objective: Callable[..., Array], params: Params, statistics: Params, batch: Batch
) -> Slope:
    """The slope of objective(params, mini-batch) at a model's parameters and batch statistics."""

    def value(params: Params, statistics: Params) -> Array:
        return objective(params, batch._replace(statistics=statistics))

    loss, gradients = jax.value_and_grad(value, argnums=(0, 1))(params, statistics)
    return Slope(loss, gradients[0], gradients[1])


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

    Examples:
        A client with 25 examples takes three steps per epoch:

        >>> import jax.numpy as jnp
        >>> import optax
        >>> from pfljax.author import Solver
        >>> def loss(params, x, y, mode=None):
        ...     return (x @ params - y) ** 2
        >>> optimizer = optax.with_extra_args_support(optax.sgd(0.1))
        >>> solver = Solver(loss, optimizer, batch_size=10, epochs=2)
        >>> solver.max_steps(25)
        6
        >>> solver.with_epochs(1).max_steps(25)
        3
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

        def stop_unless(chosen: bool, leaf: Array) -> Array:
            return leaf if chosen else jax.lax.stop_gradient(leaf)

        def loss(params: Params, *args: Any, **options: Any) -> Array:
            trained = jax.tree.map(stop_unless, mask, params)
            return self.loss(trained, *args, **options)

        optimizers: dict[Hashable, optax.GradientTransformation] = {
            "part": self.optimizer,
            "rest": optax.set_to_zero(),
        }

        def labels(params: Params) -> PyTree:
            """For parameters with or without batch statistics, which are None in the latter."""

            def label(leaf: Any, chosen: bool) -> str | None:
                if leaf is None:
                    return None
                return "part" if chosen else "rest"

            return jax.tree.map(label, params, mask, is_leaf=lambda leaf: leaf is None)

        return self.with_loss(loss)._replace(optimizer=optax.partition(optimizers, labels))

    def lasting(self, opt_state: PyTree, params: Params) -> tuple:
        """What goes on over rounds of an optimizer's state for a shared model; see `pfljax.local.lasting`."""
        return lasting.select_lasting(lasting.marks(self.optimizer, params), opt_state)

    def resumed(self, params: Params, earlier: tuple) -> PyTree:
        """A new optimizer state for a shared model, with what goes on of an `earlier` one; (): of none."""
        fresh = self.optimizer.init(params)
        if not earlier:
            return fresh
        marks = lasting.marks(self.optimizer, params)
        return lasting.resumed(marks, fresh, earlier)

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

        def random_orders() -> Array:
            return shuffle(key, size, n_max, epochs)

        def given_order() -> Array:
            return jnp.broadcast_to(jnp.arange(n_max, dtype=jnp.int32), (epochs, n_max))

        return jax.lax.cond(size > batch, random_orders, given_order)

    def begin(self, params: Params) -> TrainState:
        """A model's state before training with a new optimizer."""
        params, statistics = self.without_statistics(params)
        return TrainState(params, statistics, self.optimizer.init(params))

    def without_statistics(self, params: Params) -> tuple[Params, Params]:
        """A model's parameters, and its batch statistics; None where leaves are left out.

        The second is None if the model has no batch statistics.
        """
        if self.statistics is None:
            return params, None
        statistics, rest = tree.partition(params, self.statistics(params))
        return rest, statistics

    def fit(
        self,
        key: Key,
        start: TrainState,
        split: Split,
        objective: Callable[[Params, Batch], Array] | None = None,
        *,
        round_number: Array,
        num_steps: Array | None = None,
    ) -> tuple[TrainState, Array]:
        """A round of local training with gradients of an objective.

        Args:
            key: Key for the order of the examples, drawn anew in every epoch.
            start: One model in training; `begin` makes this of a model.
            split: One client's training data.
            objective: (params, mini-batch) -> the value to minimize; None: the mean loss.
            round_number: Number of the round, for learning rate schedules.
            num_steps: As in `train`.

        Returns:
            The state after training, and the mean over steps of the loss before each update.
        """
        objective = scalar(objective or self.mean_loss)

        def step(
            params: Params, statistics: Params, memory: PyTree, batch_at: Callable[[int], Batch]
        ) -> tuple[Slope, PyTree]:
            return slope(objective, params, statistics, batch_at(0)), memory

        state, loss, _ = self.train(
            key, start, split, step, round_number=round_number, num_steps=num_steps
        )
        return state, loss

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
    ) -> tuple[TrainState, Array, PyTree]:
        """A round of local training along slopes that the caller defines; batch statistics follow by themselves.

        Args:
            key: Key for the order of the examples, drawn anew in every epoch.
            start: Parameters, batch statistics and optimizer state.
            split: One client's training data.
            step: (params, statistics, memory, batch_at) -> (slope, memory); batch_at(0) is the step's
                mini-batch, batch_at(n) the n-th after it (after the round's last comes its first).
            memory: Carry of `step`.
            round_number: Number of the round, for learning rate schedules.
            num_steps: () int32, number of steps, which may differ between clients and rounds; None:
                the solver's own. A client without examples takes no steps. Beyond the solver's own
                epochs, their orders of the examples repeat.

        Returns:
            The state after training, the mean loss over the steps, and the memory.
        """
        n_max = split.y.shape[0]
        if num_steps is None:
            total = self.num_steps(split.size, n_max)
        else:
            total = jnp.where(split.size > 0, num_steps, 0)
        orders = self.draw_orders(key, split.size, n_max)

        def one_step(
            number: Array, carry: tuple[TrainState, Array, PyTree]
        ) -> tuple[TrainState, Array, PyTree]:
            state, loss_sum, memory = carry

            def batch_at(ahead: int) -> Batch:
                step_number = (number + ahead) % jnp.maximum(total, 1) if ahead else number
                return self.take_batch(key, orders, split, step_number)

            slope, memory = step(state.params, state.statistics, memory, batch_at)
            updates, opt_state = self.optimizer.update(
                slope.gradient,
                state.opt_state,
                state.params,
                round_number=round_number,
                value=slope.loss,
            )
            params = optax.apply_updates(state.params, updates)

            # The gradient of a statistic is the old value minus the new one: this sets the new one.
            def subtract(old: Array, change: Array) -> Array:
                return old + -1.0 * change

            statistics = jax.tree.map(subtract, state.statistics, slope.statistics)
            return TrainState(params, statistics, opt_state), loss_sum + slope.loss, memory

        # By this name, compiled programs are weighed with the number of steps.
        with jax.named_scope("steps"):
            carry = (start, jnp.zeros(()), memory)
            state, loss_sum, memory = jax.lax.fori_loop(0, total, one_step, carry)
        return state, loss_sum / jnp.maximum(total, 1), memory

    def mode(self, batch: Batch) -> Training | None:
        """The mode in which a network computes on a mini-batch: training mode, or None if it is inference mode, too."""
        if not self.keyed:
            return None
        is_real = batch.mask > 0
        # A client without examples has statistics as well, which nobody reads.
        mask = is_real | ~is_real.any()
        return Training(jax.random.fold_in(batch.key, DROPOUT), mask)

    def mean_loss(self, params: Params, batch: Batch, weights: Array | None = None) -> Array:
        """Mean loss over the batch; with weights (n_max,), the weighted sum divided by the number of examples.

        Its gradient is private if the solver's gradients are.
        """
        mode = self.mode(batch)
        params = joined(params, batch.statistics)
        if self.privacy.active:
            return self.private_loss(params, batch, weights, mode)
        losses = self.loss(params, batch.x, batch.y, mode)
        mask = batch.mask if weights is None else batch.mask * weights[batch.index]
        return (losses * mask).sum() / jnp.maximum(batch.mask.sum(), 1)

    def private_loss(
        self, params: Params, batch: Batch, weights: Array | None, mode: Training | None
    ) -> Array:
        """The same with gradients that are clipped for each example, with noise."""
        example_weights = jnp.ones_like(batch.mask) if weights is None else weights[batch.index]
        examples = (batch.x, batch.y, example_weights)
        if mode is None:
            loss = self.loss
        else:
            # One key per example, for per-example gradients.
            keys = jax.random.split(mode.key, batch.mask.shape[0])
            examples = (*examples, keys)

            def loss(params: Params, x: PyTree, y: Array, keys: Key) -> Array:
                return self.loss(params, x, y, keys[0])

        return private_mean(self.privacy, batch.key, loss, params, examples, batch.mask > 0)

    def squared_distance(self, a: Params, b: Params) -> Array:
        """() squared L2 distance over all parameters, except batch statistics."""
        params_of_a, _ = self.without_statistics(a)
        params_of_b, _ = self.without_statistics(b)
        return tree.squared_distance(params_of_a, params_of_b)

    def total_loss(self, params: Params, split: Split) -> Array:
        """Sum of the loss over all of a client's examples."""

        def total(x: PyTree, y: Array, mask: Array) -> Array:
            losses = self.loss(params, x, y)
            return jnp.where(mask, losses, 0).sum()

        return sum_over_examples(total, split)

    def loss_and_gradient(self, params: Params, split: Split) -> tuple[Array, Params]:
        """Mean loss over all of a client's examples, and its gradient; processes examples in blocks."""

        def loss_and_gradient_sums(x: PyTree, y: Array, mask: Array) -> tuple[Array, Params]:
            def total(params: Params) -> Array:
                real_x, real_y = masked(x, y, mask)
                losses = self.loss(params, real_x, real_y)
                return jnp.where(mask, losses, 0).sum()

            return jax.value_and_grad(total)(params)

        sums = sum_over_examples(loss_and_gradient_sums, split)
        return tree.scale(sums, 1 / jnp.maximum(split.size, 1))

    def losses_of_examples(self, params: Params, split: Split) -> Array:
        """Loss of each of a client's examples: (n_max,), 0 for padding."""
        return over_examples(lambda x, y: self.loss(params, x, y), split)

    def take_batch(self, key: Key, orders: Array | None, split: Split, step: Array) -> Batch:
        """The mini-batch of step `step` of a round; an epoch's last batch may be smaller.

        Args:
            key: The client's key for the round, as in `Solver.draw_orders`.
            orders: The result of `Solver.draw_orders`.
            split: The client's training data.
            step: () int32.
        """
        n_max = split.y.shape[0]
        batch_size = self.batch(n_max)
        noise_key = jax.random.fold_in(key, NOISE)
        batch_key = jax.random.fold_in(noise_key, step)

        # Positions in the epoch's order.
        per_epoch = jnp.maximum(-(-split.size // batch_size), 1)
        first = 0 if orders is None else step % per_epoch * batch_size
        positions = first + jnp.arange(batch_size)
        mask = (positions < split.size).astype(jnp.float32)
        if self.statistics is not None:
            # Layers that cannot leave padding out of their statistics see the batch's own examples again.
            num_real = jnp.clip(split.size - first, 1, batch_size)
            positions = first + jnp.arange(batch_size) % num_real
        is_real = positions < split.size

        # The examples there.
        if orders is None:
            index = positions
        else:
            epoch = step // per_epoch % orders.shape[0]
            orders = jnp.asarray(orders)
            positions = jnp.minimum(positions, n_max - 1)
            index = orders.at[epoch, positions].get(mode="promise_in_bounds")
        reads_all = orders is None and self.statistics is None
        x, y = read(split[:2], ... if reads_all else index)
        x, y = masked(x, y, is_real)

        if self.augment is not None:
            x = self.augment(jax.random.fold_in(batch_key, AUGMENTATION), x)
        return Batch(x, y, mask, index, batch_key)
