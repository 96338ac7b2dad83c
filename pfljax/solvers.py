"""Local training: one loop over mini-batches, with any optax optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax import tree
from pfljax.mapping import Plan
from pfljax.models import Model
from pfljax.types import Array, Key, Params, PyTree, Shard, Split, Turn, Work


class Solver(NamedTuple):
    """How a client trains a model on its own data.

    Attributes:
        loss: (params, x (B, ...), y (B,)) -> per-example losses (B,).
        optimizer: Any optax transformation; its update is told the `round_number`.
        batch_size: B; 0: all of the client's examples in one step.
        epochs: Passes over the client's data in a round.
        steps: If positive, so many steps a round instead of `epochs`.
    """

    loss: Callable[[Params, Array, Array], Array]
    optimizer: optax.GradientTransformationExtraArgs
    batch_size: int = 0
    epochs: int = 1
    steps: int = 0

    def batch(self, n_max: int) -> int:
        """B for clients padded to n_max examples."""
        return min(self.batch_size or n_max, n_max)

    def num_steps(self, size: Array, n_max: int) -> Array:
        """How many steps a client of `size` examples takes in a round; none if it has no examples."""
        per_epoch = -(-size // self.batch(n_max))
        return jnp.where(size > 0, self.steps or self.epochs * per_epoch, 0)

    def max_steps(self, n_max: int) -> int:
        """The steps of the largest client in a round."""
        return self.steps or self.epochs * -(-n_max // self.batch(n_max))

    def draw_orders(self, key: Key, size: Array, n_max: int) -> Array | None:
        """The order of a client's examples in every epoch of a round: (epochs, n_max) int32, the real ones first.

        None where every batch holds all of them. The sort is dear, so a client of a single batch does without.
        """
        batch = self.batch(n_max)
        if batch == n_max:
            return None
        # With a given number of steps, only a client of more than one batch needs its order, so of two steps an epoch.
        epochs = -(-self.steps // 2) if self.steps else self.epochs
        places = jnp.arange(n_max)

        def shuffle():
            draws = jax.random.uniform(key, (epochs, n_max))
            return jnp.argsort(jnp.where(places < size, draws, jnp.inf), axis=-1)

        return jax.lax.cond(size > batch, shuffle, lambda: jnp.broadcast_to(places, (epochs, n_max)))


class Batch(NamedTuple):
    """B examples; `mask` (B,) is 0.0 where the batch has run past the client's data."""

    x: Array
    y: Array
    mask: Array
    index: Array


def take_batch(solver: Solver, orders: Array | None, split: Split, step: Array) -> Batch:
    """The mini-batch of step `step` of a round; an epoch's last one may be smaller."""
    n_max = split.y.shape[0]
    batch = solver.batch(n_max)
    if orders is None:
        inside, index = jnp.arange(batch) < split.size, jnp.arange(batch)
        return Batch(*_masked(split.x[...], split.y[...], inside), inside.astype(jnp.float32), index)
    per_epoch = jnp.maximum(-(-split.size // batch), 1)
    epoch = jnp.minimum(step // per_epoch, orders.shape[0] - 1)
    positions = step % per_epoch * batch + jnp.arange(batch)
    index = orders.at[epoch, jnp.minimum(positions, n_max - 1)].get(mode="promise_in_bounds")
    inside = positions < split.size
    return Batch(*_masked(split.x[index], split.y[index], inside), inside.astype(jnp.float32), index)


def _masked(x: Array, y: Array, inside: Array) -> tuple[Array, Array]:
    """Zeros what is no example: where padding held NaN, even a loss of weight 0 would have a gradient of NaN."""
    return tree.where(inside, (x, y), (jnp.zeros_like(x), jnp.zeros_like(y)))


BLOCKS = (512, 32)  # examples at a time: many, and for what is left over few, so that padding costs little


def over_blocks(size: Array, n_max: int, body: Callable[[Array, PyTree], PyTree], carry: PyTree) -> PyTree:
    """carry = body(positions, carry) for blocks of positions that cover 0..size-1, the last running past it."""
    if n_max <= BLOCKS[-1]:
        return body(jnp.arange(n_max), carry)
    start = 0
    for block in BLOCKS:
        last = block == BLOCKS[-1]
        count = -(-(size - start) // block) if last else size // block
        step = lambda number, carry, s=start, b=block: body(s + number * b + jnp.arange(b), carry)
        if block <= n_max:
            carry = jax.lax.fori_loop(0, count, step, carry)
            start = start + count * block
    return carry


def sum_over_examples(fn: Callable[[Array, Array, Array], PyTree], split: Split) -> PyTree:
    """Sums fn(x (B, ...), y (B,), mask (B,) bool) over a client's examples, a block at a time.

    `fn` returns sums over the examples that `mask` admits.
    """
    n_max = split.y.shape[0]

    def add(positions, total):
        index = jnp.minimum(positions, n_max - 1)
        return jax.tree.map(jnp.add, total, fn(split.x[index], split.y[index], positions < split.size))

    first = jnp.arange(min(n_max, BLOCKS[-1]))
    shape = jax.eval_shape(lambda: fn(split.x[first], split.y[first], first < 1))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    return over_blocks(split.size, n_max, add, zeros)


def losses_of_examples(solver: Solver, params: Params, split: Split) -> Array:
    """The loss of each of a client's examples: (n_max,), 0 for padding."""
    n_max = split.y.shape[0]

    def note(positions, found):
        index, inside = jnp.minimum(positions, n_max - 1), positions < split.size
        losses = solver.loss(params, *_masked(split.x[index], split.y[index], inside))
        return jax.lax.dynamic_update_slice(found, jnp.where(inside, losses, 0), (positions[0],))

    found = jnp.zeros((n_max + BLOCKS[-1],))  # room for the last block
    return over_blocks(split.size, n_max, note, found)[:n_max]


def total_loss(solver: Solver, params: Params, split: Split) -> Array:
    """The loss summed over all of a client's examples."""
    return sum_over_examples(lambda x, y, mask: jnp.where(mask, solver.loss(params, x, y), 0).sum(), split)


def mean_loss(solver: Solver, params: Params, batch: Batch, weights: Array | None = None) -> Array:
    """Mean loss over the batch's examples; with weights (n_max,), their weighted sum over the number of examples."""
    losses = solver.loss(params, batch.x, batch.y)
    mask = batch.mask if weights is None else batch.mask * weights[batch.index]
    return (losses * mask).sum() / jnp.maximum(batch.mask.sum(), 1)


def fit(
    solver: Solver,
    key: Key,
    params: Params,
    opt_state: PyTree,
    split: Split,
    *,
    round_number: Array,
    objective: Callable[[Params, Batch], Array] | None = None,
) -> tuple[Params, PyTree, Array]:
    """A round of local training.

    Args:
        solver: Loss, optimizer, epochs or steps.
        key: Draws the order of the examples, anew in every epoch.
        params: One model.
        opt_state: The optimizer's state for it.
        split: One client's training data.
        round_number: Decides the rate, where it has a schedule.
        objective: (params, mini-batch) -> what a step descends, in place of the mean loss.

    Returns:
        The trained parameters, the optimizer's state, and the mean loss over the steps, each before its update.
    """
    n_max = split.y.shape[0]
    total = solver.num_steps(split.size, n_max)
    orders = solver.draw_orders(key, split.size, n_max)
    objective = objective or functools.partial(mean_loss, solver)

    def step(number, carry):
        params, opt_state, loss_sum = carry
        batch = take_batch(solver, orders, split, number)
        loss, grads = jax.value_and_grad(objective)(params, batch)
        updates, opt_state = solver.optimizer.update(grads, opt_state, params, round_number=round_number)
        return optax.apply_updates(params, updates), opt_state, loss_sum + loss

    carry = (params, opt_state, jnp.zeros(()))
    params, opt_state, loss_sum = jax.lax.fori_loop(0, total, step, carry)
    return params, opt_state, loss_sum / jnp.maximum(total, 1)


def scheduled(
    optimizer: optax.GradientTransformation, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with its updates scaled by schedule(round number): rates that fall over rounds, not over steps."""

    def update(updates, state, params=None, *, round_number, **extra):
        del params, extra
        return jax.tree.map(lambda leaf: leaf * schedule(round_number), updates), state

    scale = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    return optax.chain(optimizer, scale)


class Problem(NamedTuple):
    """What a method is built for.

    Attributes:
        model: The clients' network.
        solver: How they train it.
        plan: How they are mapped.
        num_clients: K.
        cohort_size: S.
        n_max: The largest n_k, to which all clients' training data is padded.
        rounds: R: how long a newcomer trains where a method has it train alone.
        common_init: Whether clients' own models all start from the same parameters.
        keep_optimizer: Whether a client's optimizer for shared models keeps its state over the rounds.
        n_min: The smallest n_k, where it is known.
    """

    model: Model
    solver: Solver
    plan: Plan
    num_clients: int
    cohort_size: int
    n_max: int
    rounds: int
    common_init: bool = True
    keep_optimizer: bool = False
    n_min: int | None = None

    def init_models(self, key: Key, num: int) -> Params:
        """N initial models, stacked: all the same under `common_init`, else model n depends on `key` and n alone."""
        numbers = jnp.zeros((num,), jnp.int32) if self.common_init else jnp.arange(num)
        return self.plan.over_rows(lambda n: self.model.init(jax.random.fold_in(key, n)), numbers)

    def init_optimizers(self, models: Params) -> PyTree:
        """The optimizer's state for each of N stacked models."""
        return self.plan.over_rows(self.solver.optimizer.init, models)

    def optimizer_rows(self, models: Params, num_clients: int) -> PyTree:
        """What clients keep of their optimizers for J shared models: leaves (K, J, ...), or () if nothing."""
        if not self.keep_optimizer:
            return ()
        start = self.init_optimizers(models)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), start)

    def fit_models(
        self,
        turn: Turn,
        models: Params,
        kept: PyTree,
        split: Split,
        objective: Callable[[Params, Batch, PyTree], Array] | None = None,
        aux: PyTree = (),
    ) -> tuple[Params, PyTree, Array]:
        """A client trains each of the J models that it has received, all on the same mini-batches.

        Args:
            turn: Its key decides the mini-batches.
            models: Leaves (J, ...).
            kept: Its row of `optimizer_rows`.
            split: Its training data.
            objective: (params, mini-batch, row of aux) -> what a step descends; None: the mean loss.
            aux: What the objective reads, leaves (J, ...).

        Returns:
            The trained models, what to keep of the optimizers, and the mean losses (J,).
        """
        opt_states = kept if self.keep_optimizer else self.plan.over_models(self.solver.optimizer.init, models)

        def one(params, opt_state, aux):
            descend = None if objective is None else lambda params, batch: objective(params, batch, aux)
            return fit(self.solver, turn.key, params, opt_state, split, round_number=turn.round, objective=descend)

        models, opt_states, losses = self.plan.over_models(one, models, opt_states, aux)
        return models, opt_states if self.keep_optimizer else (), losses

    def train_alone(self, key: Key, start: Params, clients: Shard, *, own: bool, rounds: int = 1) -> Params:
        """Every client trains a model for `rounds` rounds on its own data, with a fresh optimizer; stacked (K, ...).

        Args:
            key: Client k draws from fold_in(key, k).
            start: The models to start from: with `own` one for each client, else a stack of one for all.
            clients: Stacked, K clients.
            own: See `start`.
            rounds: How many rounds' worth of local epochs or steps.
        """
        num = tree.num_rows(clients)

        def client(models, _, data):
            number, shard = data
            client_key = jax.random.fold_in(key, number)
            params = jax.tree.map(lambda leaf: leaf[0], models)

            def one_round(number, carry):
                round_key = jax.random.fold_in(client_key, number)
                return fit(self.solver, round_key, *carry, shard.train, round_number=number)[:2]

            carry = (params, self.solver.optimizer.init(params))
            params, _ = jax.lax.fori_loop(0, rounds, one_round, carry)
            return Work((), tree.stack_one(params), {}) if own else Work((), (), params)

        index = (jnp.arange(num) if own else jnp.zeros((num,), jnp.int32))[:, None]
        data = (jnp.arange(num), clients)
        topology = "own" if own else "shared"
        _, returned = self.plan.exchange(client, start, index, (), data, topology=topology)
        return returned.upload if own else returned.report
