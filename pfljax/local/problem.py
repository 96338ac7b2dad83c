"""The problem that a method is built for: model, local training, execution plan and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, ClientContext, ClientData, ClientOutput, Key, Params, Predictor, PyTree, Split
from pfljax.exchange.plan import ExecutionPlan
from pfljax.local.batches import Batch
from pfljax.local.solver import Solver
from pfljax.models import Model

PHASE = 0xFA5E  # folded into a client's key for a round: the phases of its training


class Problem(NamedTuple):
    """The problem that a method is built for.

    Attributes:
        model: The clients' network.
        solver: Local training.
        plan: Mapping of clients over devices.
        num_clients: K.
        cohort_size: S.
        n_max: The largest n_k; all clients' training data is padded to it.
        rounds: R, also the number of rounds for which newcomers train in methods that have them train alone.
        common_init: Whether clients' own models all start from the same parameters; None: the method decides.
        keep_optimizer: Whether a client's optimizer for shared models keeps its state across rounds.
        n_min: The smallest n_k, if known.
        num_distributions: Number of true distributions in the clients' data, if known; a default for the number of
            clusters or components.
        learning_rate: Initial learning rate of the clients' optimizer, if known; may be traced.
        part: (n,) int32, the clients whose first rows or predictors are computed, if not for all at once; None: all K.
    """

    model: Model
    solver: Solver
    plan: ExecutionPlan
    num_clients: int
    cohort_size: int
    n_max: int
    rounds: int
    common_init: bool | None = None
    keep_optimizer: bool = False
    n_min: int | None = None
    num_distributions: int | None = None
    learning_rate: float | None = None
    part: Array | None = None

    @property
    def rounds_of_a_client(self) -> float:
        """Average number of rounds in which a client takes part in a run, at least 1."""
        return max(self.rounds * self.cohort_size / self.num_clients, 1)

    def ids(self, clients: PyTree) -> Array:
        """(n,) int32 numbers of the stacked clients: all K, or those in `part`.

        A client's row from `Algorithm.init` may depend only on the client's data, its number and the key, so that rows
        can be created when a client first takes part.
        """
        num = tree.num_rows(clients)
        return jnp.arange(num, dtype=jnp.int32) if self.part is None else jnp.asarray(self.part)

    def rows_of(self, stack: PyTree) -> PyTree:
        """The rows of the clients in `part`, from a server's stack of all K."""
        return stack if self.part is None else tree.take(stack, jnp.asarray(self.part))

    def draw(self, key: Key, numbers: Array, fn: Callable[[Key], PyTree]) -> PyTree:
        """Applies fn to a separate key for each of N numbers (N,), such as client numbers; results are stacked."""
        return self.plan.over_rows(lambda n: fn(jax.random.fold_in(key, n)), numbers)

    def init_models(self, key: Key, numbers: int | Array, *, common: bool = True) -> Params:
        """N initial models, stacked.

        Args:
            key: Random key; if models differ, model n depends only on `key` and n.
            numbers: Numbers of the models, (N,) int32, such as `ids` for clients' own models; an integer N: 0 to N - 1.
            common: Whether all models are equal, if `common_init` leaves it to the method.

        Raises:
            ArgumentError: if models must differ but the model is an NNX module, which is itself the initial model.
        """
        common = common if self.common_init is None else self.common_init
        numbers = jnp.arange(numbers) if isinstance(numbers, int) else numbers
        if self.model.fixed and not common and numbers.size > 1:
            text = "is one NNX module, but initial models must differ; accepted: a function of rngs that creates it"
            raise ArgumentError("model", text)
        numbers = jnp.zeros_like(numbers) if common else numbers
        return self.plan.over_rows(lambda n: self.model.init(jax.random.fold_in(key, n)), numbers)

    def init_optimizers(self, models: Params) -> PyTree:
        """Optimizer state for each of N stacked models."""
        return self.plan.over_rows(self.solver.optimizer.init, models)

    def own_rows(self, key: Key, ids: Array, *, common: bool = True) -> PyTree:
        """Own models of n clients and their optimizer states, which persist: leaves (n, ...)."""
        models = self.init_models(key, ids, common=common)
        return {"model": models, "optimizer": self.init_optimizers(models)}

    def fit_own(
        self,
        context: ClientContext,
        row: PyTree,
        split: Split,
        objective: Callable[[Params, Batch], Array] | None = None,
    ) -> tuple[PyTree, Array]:
        """Trains a client's own model from `own_rows`; returns its next row and the mean loss."""
        params, optimizer, loss = self.solver.fit(
            context.key,
            row["model"],
            row["optimizer"],
            split,
            round_number=context.round,
            objective=objective,
        )
        return {"model": params, "optimizer": optimizer}, loss

    def fit_part(
        self,
        context: ClientContext,
        params: Params,
        opt_state: PyTree | None,
        split: Split,
        mask: PyTree,
        *,
        phase: int,
        epochs: int | None,
    ) -> tuple[Params, PyTree, Array]:
        """A phase of a client's local training: several epochs that train a part of a model.

        A method with several phases computes one gradient per mini-batch in each: its ledger has gradients=1 and, as
        passes, the sum of `self.passes(epochs)` over phases.

        Args:
            context: The client's context; its key and the phase's number determine the mini-batches.
            params: One model.
            opt_state: The phase's optimizer state, from `solver.part(mask)`; None: a fresh one.
            split: The client's training data.
            mask: A tree of bools like `params`: which leaves are trained; the others do not change.
            phase: Number of the phase within the round.
            epochs: Passes over the client's data; None: the solver's epochs or steps.

        Returns:
            The trained parameters, the optimizer state, and the mean loss over the steps.
        """
        solver = self.solver.part(mask).for_epochs(epochs)
        opt_state = solver.optimizer.init(params) if opt_state is None else opt_state
        key = jax.random.fold_in(jax.random.fold_in(context.key, PHASE), phase)
        return solver.fit(key, params, opt_state, split, round_number=context.round)

    def passes(self, epochs: int | None) -> float:
        """Mini-batches in `epochs` epochs as a multiple of the solver's steps, for the largest client."""
        return self.solver.for_epochs(epochs).max_steps(self.n_max) / self.solver.max_steps(self.n_max)

    def optimizer_rows(self, models: Params, num_clients: int) -> PyTree:
        """The clients' optimizer states for J shared models: leaves (K, J, ...), or () if they are not kept."""
        if not self.keep_optimizer:
            return ()
        start = self.init_optimizers(models)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), start)

    def fit_models(
        self,
        context: ClientContext,
        models: Params,
        kept: PyTree,
        split: Split,
        objective: Callable[[Params, Batch, PyTree], Array] | None = None,
        aux: PyTree = (),
    ) -> tuple[Params, PyTree, Array]:
        """Trains each of the J models that a client received, all on the same mini-batches.

        Args:
            context: The client's context; its key determines the mini-batches.
            models: Leaves (J, ...).
            kept: The client's row of `optimizer_rows`.
            split: The client's training data.
            objective: (params, mini-batch, row of aux) -> the value to minimize; None: the mean loss.
            aux: Further inputs of the objective, leaves (J, ...).

        Returns:
            The trained models, the optimizer states to keep, and the mean losses (J,).
        """
        opt_states = kept if self.keep_optimizer else self.plan.over_models(self.solver.optimizer.init, models)

        def one(number, params, opt_state, aux):
            def descended(params, batch):
                batch = batch.of_model(number)
                return self.solver.mean_loss(params, batch) if objective is None else objective(params, batch, aux)

            return self.solver.fit(
                context.key, params, opt_state, split, round_number=context.round, objective=descended
            )

        numbers = jnp.arange(tree.num_rows(models))
        models, opt_states, losses = self.plan.over_models(one, numbers, models, opt_states, aux)
        return models, opt_states if self.keep_optimizer else (), losses

    def descend_model(
        self,
        context: ClientContext,
        models: Params,
        kept: PyTree,
        split: Split,
        gradient: Callable,
        memory: PyTree = (),
        steps: Array | None = None,
    ) -> tuple[Params, PyTree, Array, PyTree]:
        """Like `fit_models` for a stack of one model (1, ...), but with the gradient, memory and steps of `descend`."""
        params = jax.tree.map(lambda leaf: leaf[0], models)
        opt_state = (
            jax.tree.map(lambda leaf: leaf[0], kept) if self.keep_optimizer else self.solver.optimizer.init(params)
        )
        params, opt_state, loss, memory = self.solver.descend(
            context.key, params, opt_state, split, gradient, memory, round_number=context.round, steps=steps
        )
        kept = tree.stack_one(opt_state) if self.keep_optimizer else ()
        return tree.stack_one(params), kept, loss[None], memory

    def losses_of_all(self, models: Params, splits: Split) -> Array:
        """(K, N) mean loss of each of N models on every client's examples, 0 for a client without any.

        Processes models in blocks: a client never holds all of them at once.
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
        """Clients unseen in training train alone, from initial models, for as many rounds as the run has."""
        init_key, train_key = jax.random.split(key)
        start = self.init_models(init_key, tree.num_rows(clients))
        return Predictor.own(self.train_alone(train_key, start, clients, own=True, rounds=self.rounds))

    def personalize(self, key: Key, start: Params, clients: PyTree, fn: Callable[[Key, Params, Any], PyTree]) -> PyTree:
        """Every client computes fn(its key, model, data) from the only model of a stack (1, ...).

        Args:
            key: Client k uses fold_in(key, k).
            start: The model.
            clients: Stacked ClientData, or a tree with further rows of the clients; `data` is one row of it.
            fn: The function, which may return a model.

        Returns:
            The clients' results, stacked (K, ...).
        """
        index = jnp.zeros((tree.num_rows(clients), 1), jnp.int32)

        def client(models, _, data):
            number, shard = data
            return ClientOutput(
                (), (), fn(jax.random.fold_in(key, number), jax.tree.map(lambda leaf: leaf[0], models), shard)
            )

        data = (self.ids(clients), clients)
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
            key: Client k uses fold_in(key, k).
            start: Initial models: one per client with `own`, otherwise a stack of one model for all clients.
            clients: Data of K clients, stacked.
            own: See `start`.
            rounds: Number of rounds' worth of local epochs or steps.
            objective: (params, mini-batch, the client's initial model) -> the value to minimize; None: the mean loss.
        """
        num = tree.num_rows(clients)

        def client(models, _, data):
            number, shard = data
            client_key = jax.random.fold_in(key, number)
            params = first = jax.tree.map(lambda leaf: leaf[0], models)
            goal = objective
            descended = goal and (lambda params, batch: goal(params, batch, first))

            def one_round(number, carry):
                round_key = jax.random.fold_in(client_key, number)
                params, state = carry
                trained = self.solver.fit(
                    round_key, params, state, shard.train, round_number=number, objective=descended
                )
                return trained[:2]

            carry = (params, self.solver.optimizer.init(params))
            params, _ = jax.lax.fori_loop(0, rounds, one_round, carry)
            return ClientOutput((), tree.stack_one(params), {}) if own else ClientOutput((), (), params)

        index = (jnp.arange(num) if own else jnp.zeros((num,), jnp.int32))[:, None]
        data = (self.ids(clients), clients)
        topology = "own" if own else "shared"
        _, returned = self.plan.exchange(client, start, index, (), data, topology=topology)
        return returned.upload if own else returned.report
