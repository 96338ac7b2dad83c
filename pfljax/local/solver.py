"""Local training: one loop over mini-batches, with any optax optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.core import tree
from pfljax.core.types import Array, ClientContext, ClientData, ClientOutput, Key, Params, Predictor, PyTree, Split
from pfljax.engine.plan import ExecutionPlan
from pfljax.local.privacy import Privacy, private_mean
from pfljax.models import Model


class Solver(NamedTuple):
    """How a client trains a model on its own data.

    Attributes:
        loss: (params, x (B, ...), y (B,)) -> per-example losses (B,).
        optimizer: Any optax transformation; its update is told the `round_number`.
        batch_size: B; 0: all of the client's examples in one step.
        epochs: Passes over the client's data in a round.
        steps: If positive, so many steps a round instead of `epochs`.
        privacy: How the gradients of mean losses are made private.
    """

    loss: Callable[[Params, Array, Array], Array]
    optimizer: optax.GradientTransformationExtraArgs
    batch_size: int = 0
    epochs: int = 1
    steps: int = 0
    privacy: Privacy = Privacy()

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
            # Drawn example by example, so that more padding leaves the order of the real ones as it is.
            draws = jax.random.uniform(key, (n_max, epochs)).T
            return jnp.argsort(jnp.where(places < size, draws, jnp.inf), axis=-1)

        return jax.lax.cond(size > batch, shuffle, lambda: jnp.broadcast_to(places, (epochs, n_max)))

    def fit(
        self,
        key: Key,
        params: Params,
        opt_state: PyTree,
        split: Split,
        *,
        round_number: Array,
        objective: Callable[[Params, Batch], Array] | None = None,
    ) -> tuple[Params, PyTree, Array]:
        """A round of local training by gradients of an objective.

        Args:
            key: Draws the order of the examples, anew in every epoch.
            params: One model.
            opt_state: The optimizer's state for it.
            split: One client's training data.
            round_number: Decides the rate, where it has a schedule.
            objective: (params, mini-batch) -> what a step descends, in place of the mean loss.

        Returns:
            The trained parameters, the optimizer's state, and the mean loss over the steps, each before its update.
        """
        objective = objective or self.mean_loss

        def gradient(params, memory, batch):
            return *jax.value_and_grad(objective)(params, batch(0)), memory

        return self.descend(key, params, opt_state, split, gradient, (), round_number=round_number)[:3]

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
    ) -> tuple[Params, PyTree, Array, PyTree]:
        """A round of local training in a direction of the method's own.

        Args:
            key: Draws the order of the examples, anew in every epoch.
            params: One model.
            opt_state: The optimizer's state for it.
            split: One client's training data.
            gradient: (params, memory, batch) -> (loss, what the optimizer takes for the gradient, memory) at a step;
                batch(0) is the step's mini-batch, batch(1) the one after it (after the round's last comes its first).
            memory: What `gradient` hands from step to step.
            round_number: Decides the rate, where it has a schedule.

        Returns:
            The trained parameters, the optimizer's state, the mean loss over the steps, and the memory.
        """
        n_max = split.y.shape[0]
        total = self.num_steps(split.size, n_max)
        orders = self.draw_orders(key, split.size, n_max)

        def step(number, carry):
            params, opt_state, loss_sum, memory = carry
            place = lambda ahead: (number + ahead) % jnp.maximum(total, 1) if ahead else number
            batch = lambda ahead: self.take_batch(key, orders, split, place(ahead))
            loss, grads, memory = gradient(params, memory, batch)
            updates, opt_state = self.optimizer.update(grads, opt_state, params, round_number=round_number)
            return optax.apply_updates(params, updates), opt_state, loss_sum + loss, memory

        carry = (params, opt_state, jnp.zeros(()), memory)
        params, opt_state, loss_sum, memory = jax.lax.fori_loop(0, total, step, carry)
        return params, opt_state, loss_sum / jnp.maximum(total, 1), memory

    def mean_loss(self, params: Params, batch: Batch, weights: Array | None = None) -> Array:
        """Mean loss over the batch's examples; with weights (n_max,), their weighted sum over the number of examples.

        Its gradient is private where the solver's are.
        """
        if self.privacy.active:
            weighed = jnp.ones_like(batch.mask) if weights is None else weights[batch.index]
            examples = (batch.x, batch.y, weighed)
            return private_mean(self.privacy, batch.key, self.loss, params, examples, batch.mask > 0)
        losses = self.loss(params, batch.x, batch.y)
        mask = batch.mask if weights is None else batch.mask * weights[batch.index]
        return (losses * mask).sum() / jnp.maximum(batch.mask.sum(), 1)

    def proximal(self, anchor: Params, strength: float) -> Callable[[Params, Batch], Array]:
        """The objective mean loss + strength / 2 |params - anchor|^2, for `fit`."""
        return lambda params, batch: (
            self.mean_loss(params, batch) + strength / 2 * tree.squared_distance(params, anchor)
        )

    def total_loss(self, params: Params, split: Split) -> Array:
        """The loss summed over all of a client's examples."""
        return sum_over_examples(lambda x, y, mask: jnp.where(mask, self.loss(params, x, y), 0).sum(), split)

    def loss_and_gradient(self, params: Params, split: Split) -> tuple[Array, Params]:
        """The mean loss over all of a client's examples, and its gradient; a block of examples at a time."""

        def sums(x, y, mask):
            total = lambda params: jnp.where(mask, self.loss(params, *_masked(x, y, mask)), 0).sum()
            return jax.value_and_grad(total)(params)

        return tree.scale(sum_over_examples(sums, split), 1 / jnp.maximum(split.size, 1))

    def losses_of_examples(self, params: Params, split: Split) -> Array:
        """The loss of each of a client's examples: (n_max,), 0 for padding."""
        n_max = split.y.shape[0]

        def note(positions, found):
            index, inside = jnp.minimum(positions, n_max - 1), positions < split.size
            losses = self.loss(params, *_masked(split.x[index], split.y[index], inside))
            return jax.lax.dynamic_update_slice(found, jnp.where(inside, losses, 0), (positions[0],))

        found = jnp.zeros((n_max + BLOCKS[-1],))  # room for the last block
        return over_blocks(split.size, n_max, note, found)[:n_max]

    def take_batch(self, key: Key, orders: Array | None, split: Split, step: Array) -> Batch:
        """The mini-batch of step `step` of a round; an epoch's last one may be smaller.

        Args:
            key: The client's for the round, as for `Solver.draw_orders`.
            orders: What that returned.
            split: The client's training data.
            step: () int32.
        """
        n_max = split.y.shape[0]
        batch = self.batch(n_max)
        key = jax.random.fold_in(jax.random.fold_in(key, NOISE), step)
        if orders is None:
            inside, index = jnp.arange(batch) < split.size, jnp.arange(batch)
            return Batch(*_masked(split.x[...], split.y[...], inside), inside.astype(jnp.float32), index, key)
        per_epoch = jnp.maximum(-(-split.size // batch), 1)
        epoch = jnp.minimum(step // per_epoch, orders.shape[0] - 1)
        positions = step % per_epoch * batch + jnp.arange(batch)
        index = orders.at[epoch, jnp.minimum(positions, n_max - 1)].get(mode="promise_in_bounds")
        inside = positions < split.size
        return Batch(*_masked(split.x[index], split.y[index], inside), inside.astype(jnp.float32), index, key)


class Batch(NamedTuple):
    """B examples; `mask` (B,) is 0.0 where the batch has run past the client's data; `key` draws privacy's noise."""

    x: Array
    y: Array
    mask: Array
    index: Array
    key: Key

    def of_model(self, number: Array) -> Batch:
        """The same examples with noise of its own for each of several models."""
        return self._replace(key=jax.random.fold_in(self.key, number))


NOISE = 0x0D9  # of a client's key for a round: the stream of privacy's noise


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
    plan: ExecutionPlan
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

    def personal_rows(self, key: Key, num_clients: int) -> PyTree:
        """A model of its own for each client, and its optimizer's state, which both stay: leaves (K, ...)."""
        models = self.init_models(key, num_clients)
        return {"model": models, "optimizer": self.init_optimizers(models)}

    def fit_personal(
        self, turn: ClientContext, row: PyTree, split: Split, objective: Callable[[Params, Batch], Array] | None = None
    ) -> tuple[PyTree, Array]:
        """A client trains its own model of `personal_rows`: its next row, and the mean loss."""
        params, optimizer, loss = self.solver.fit(
            turn.key,
            row["model"],
            row["optimizer"],
            split,
            round_number=turn.round,
            objective=objective,
        )
        return {"model": params, "optimizer": optimizer}, loss

    def optimizer_rows(self, models: Params, num_clients: int) -> PyTree:
        """What clients keep of their optimizers for J shared models: leaves (K, J, ...), or () if nothing."""
        if not self.keep_optimizer:
            return ()
        start = self.init_optimizers(models)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), start)

    def fit_models(
        self,
        turn: ClientContext,
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

        def one(number, params, opt_state, aux):
            def descended(params, batch):
                batch = batch.of_model(number)
                return self.solver.mean_loss(params, batch) if objective is None else objective(params, batch, aux)

            return self.solver.fit(turn.key, params, opt_state, split, round_number=turn.round, objective=descended)

        numbers = jnp.arange(tree.num_rows(models))
        models, opt_states, losses = self.plan.over_models(one, numbers, models, opt_states, aux)
        return models, opt_states if self.keep_optimizer else (), losses

    def descend_model(
        self, turn: ClientContext, models: Params, kept: PyTree, split: Split, gradient: Callable, memory: PyTree = ()
    ) -> tuple[Params, PyTree, Array, PyTree]:
        """As `fit_models` for the one model of a stack (1, ...), by `descend` with its gradient and memory."""
        params = jax.tree.map(lambda leaf: leaf[0], models)
        opt_state = (
            jax.tree.map(lambda leaf: leaf[0], kept) if self.keep_optimizer else self.solver.optimizer.init(params)
        )
        params, opt_state, loss, memory = self.solver.descend(
            turn.key, params, opt_state, split, gradient, memory, round_number=turn.round
        )
        kept = tree.stack_one(opt_state) if self.keep_optimizer else ()
        return tree.stack_one(params), kept, loss[None], memory

    def losses_of_all(self, models: Params, splits: Split) -> Array:
        """(K, N) the mean loss of each of N models on every client's examples, 0 for a client without any.

        In blocks of models: a client never holds all of them at once.
        """
        num, num_models = splits.size.shape[0], tree.num_rows(models)

        def client(models, _, split):
            losses = self.plan.over_models(lambda params: self.solver.total_loss(params, split), models)
            return ClientOutput((), (), {"losses": losses / jnp.maximum(split.size, 1)})

        def block(ids):
            index = jnp.broadcast_to(ids, (num, ids.shape[0]))
            return self.plan.exchange(client, models, index, (), splits, topology="peers")[1].report["losses"]

        size = 16
        blocks = [block(jnp.arange(start, min(start + size, num_models))) for start in range(0, num_models, size)]
        return jnp.concatenate(blocks, axis=1)

    def newcomers_alone(self, key: Key, clients: ClientData) -> Predictor:
        """Clients that were not there in training train alone, from initial models, for as many rounds as a run has."""
        init_key, train_key = jax.random.split(key)
        start = self.init_models(init_key, tree.num_rows(clients))
        return Predictor.own(self.train_alone(train_key, start, clients, own=True, rounds=self.rounds))

    def personalize(
        self, key: Key, start: Params, clients: ClientData, fn: Callable[[Key, Params, ClientData], Params]
    ) -> Params:
        """Every client makes a model of its own, fn(its key, model, shard), of the one model of a stack (1, ...).

        Returns:
            The models, stacked (K, ...).
        """
        index = jnp.zeros((tree.num_rows(clients), 1), jnp.int32)

        def client(models, _, data):
            number, shard = data
            return ClientOutput(
                (), (), fn(jax.random.fold_in(key, number), jax.tree.map(lambda leaf: leaf[0], models), shard)
            )

        data = (jnp.arange(index.shape[0]), clients)
        return self.plan.exchange(client, start, index, (), data, topology="shared")[1].report

    def train_alone(
        self,
        key: Key,
        start: Params,
        clients: ClientData,
        *,
        own: bool,
        rounds: int = 1,
        objective: Callable[[Params, Batch, Params], Array] | None = None,
    ) -> Params:
        """Every client trains a model for `rounds` rounds on its own data, with a fresh optimizer; stacked (K, ...).

        Args:
            key: Client k draws from fold_in(key, k).
            start: The models to start from: with `own` one for each client, else a stack of one for all.
            clients: Stacked, K clients.
            own: See `start`.
            rounds: How many rounds' worth of local epochs or steps.
            objective: (params, mini-batch, the model that the client started from) -> what a step descends; None: the
                mean loss.
        """
        num = tree.num_rows(clients)

        def client(models, _, data):
            number, shard = data
            client_key = jax.random.fold_in(key, number)
            params = first = jax.tree.map(lambda leaf: leaf[0], models)
            descended = objective and (lambda params, batch: objective(params, batch, first))

            def one_round(number, carry):
                round_key = jax.random.fold_in(client_key, number)
                return self.solver.fit(round_key, *carry, shard.train, round_number=number, objective=descended)[:2]

            carry = (params, self.solver.optimizer.init(params))
            params, _ = jax.lax.fori_loop(0, rounds, one_round, carry)
            return ClientOutput((), tree.stack_one(params), {}) if own else ClientOutput((), (), params)

        index = (jnp.arange(num) if own else jnp.zeros((num,), jnp.int32))[:, None]
        data = (jnp.arange(num), clients)
        topology = "own" if own else "shared"
        _, returned = self.plan.exchange(client, start, index, (), data, topology=topology)
        return returned.upload if own else returned.report
