"""The problem that a method is built for: model, local training, execution plan and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Array,
    ClientContext,
    ClientData,
    Key,
    Params,
    Prediction,
    PyTree,
    Split,
)
from pfljax.exchange.plan import ExecutionPlan
from pfljax.local.batches import Batch
from pfljax.local.clock import Clock
from pfljax.local.solver import Solver, scalar
from pfljax.models import Model
from pfljax.models.groups import Groups


class OwnModel(NamedTuple):
    """A client's own model and its optimizer, which persist over the rounds."""

    model: Params
    optimizer: PyTree

    def fit(
        self,
        problem: Problem,
        context: ClientContext,
        split: Split,
        objective: Callable[[Params, Batch], Array] | None = None,
    ) -> tuple[OwnModel, Array]:
        """Trains the model for a round, as `Solver.fit`; returns it with its optimizer, and the mean loss."""
        *own, loss = problem.solver.fit(
            context.key, self.model, self.optimizer, split, round_number=context.round, objective=objective
        )
        return OwnModel(*own), loss


class Problem(NamedTuple):
    """The problem that a method is built for.

    Attributes:
        model: The clients' network.
        solver: Local training.
        plan: Mapping of clients over devices.
        num_clients: K.
        cohort_size: S.
        n_max: The largest n_k; all clients' training data is padded to it.
        rounds: R, the planned number of rounds, which a method's schedules may read. `Algorithm.adapt` reads the number
            of rounds so far, for which newcomers train in methods that have them train alone.
        common_init: Whether clients' own models all start from the same parameters; None: the method decides.
        keep_optimizer: Whether a client's optimizer for shared models keeps all of its state over rounds, and not only
            what `pfljax.local.lasting` says.
        learning_rate: Initial learning rate of the clients' optimizer, if known; may be traced.
        clock: How long clients take; None: no time is simulated.
        chance: Probability with which each client takes part in a round, independently of others; a cohort then has
            `cohort_size` places, of which others stay empty. None: a cohort always has S clients.
        groups: The networks, if they differ between groups of clients; `model` is the first. None: all have `model`.
        common: What a method is built for beside a client's own network, if they differ; see `of_server`.
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
    learning_rate: float | None = None
    clock: Clock | None = None
    chance: float | None = None
    groups: Groups | None = None
    common: Problem | None = None

    @property
    def models(self) -> tuple[Model, ...]:
        """All networks."""
        return self.groups.models if self.groups else (self.model,)

    @property
    def of_server(self) -> Problem:
        """The problem of the network that a server's own model has: all clients' network, unless these differ."""
        return self.common or self

    @property
    def expected_clients(self) -> float:
        """Mean number of clients that take part in a round."""
        return self.cohort_size if self.chance is None else self.chance * self.num_clients

    @property
    def rounds_of_a_client(self) -> float:
        """Average number of rounds in which a client takes part in a run, at least 1."""
        return max(self.rounds * self.expected_clients / self.num_clients, 1)

    def init_model(self, key: Key, number: Array, *, common: bool = True) -> Params:
        """Initial model `number`, such as a client's own; depends only on the key and the number.

        Args:
            key: Random key, the same for all models.
            number: () int32.
            common: Whether all models are equal, if `common_init` leaves it to the method.

        Raises:
            ArgumentError: if models must differ but the model is an NNX module, which is itself the initial model.
        """
        common = common if self.common_init is None else self.common_init
        if self.model.network.fixed and not common and self.num_clients > 1:
            text = "is one NNX module, but initial models must differ; accepted: a function of rngs that creates it"
            raise ArgumentError("model", text)
        return self.model.init(jax.random.fold_in(key, jnp.zeros_like(number) if common else number))

    def init_models(self, key: Key, num: int, *, common: bool = True) -> Params:
        """`num` initial models, stacked, with the numbers 0 to `num` - 1; see `init_model`."""
        if num == 1:
            return tree.stack_one(self.model.init(jax.random.fold_in(key, 0)))
        return self.plan.over_rows(lambda n: self.init_model(key, n, common=common), jnp.arange(num))

    def init_optimizers(self, models: Params) -> PyTree:
        """Optimizer state for each of N stacked models."""
        return self.plan.over_rows(self.solver.optimizer.init, models)

    def own_model(self, key: Key, client: Array, *, common: bool = True) -> OwnModel:
        """A client's own initial model and its optimizer state."""
        model = self.init_model(key, client, common=common)
        return OwnModel(model, self.solver.optimizer.init(model))

    def with_loss(self, loss: Callable[..., Array]) -> Problem:
        """The problem whose local training minimizes another loss; see `Solver.with_loss`."""
        return self._replace(solver=self.solver.with_loss(loss))

    def with_epochs(self, epochs: int | None) -> Problem:
        """The problem with `epochs` local epochs per round; None: with the solver's own epochs or steps."""
        return self._replace(solver=self.solver.with_epochs(epochs))

    def part(self, mask: PyTree) -> Problem:
        """The problem whose local training changes only a part of the model; see `Solver.part`."""
        return self._replace(solver=self.solver.part(mask))

    def passes(self, epochs: int | None) -> float:
        """Mini-batches in `epochs` epochs as a multiple of the solver's steps, for the largest client."""
        return self.with_epochs(epochs).solver.max_steps(self.n_max) / self.solver.max_steps(self.n_max)

    def kept_optimizers(self, models: Params) -> PyTree:
        """What is kept of a client's optimizer states for J shared models (J, ...), before its first round."""

        def one(params):
            return self.kept_optimizer(self.solver.optimizer.init(params), params)

        return self.plan.over_rows(one, models)

    def kept_optimizer(self, opt_state: PyTree, params: Params) -> PyTree:
        """What a client keeps over rounds of its optimizer's state for a shared model; () if nothing."""
        return opt_state if self.keep_optimizer else self.solver.lasting(opt_state, params)

    def round_optimizer(self, kept: PyTree, params: Params) -> PyTree:
        """A client's optimizer state for a shared model at the beginning of a round.

        Args:
            kept: What `kept_optimizer` returned in the client's previous round; (): the state is new.
            params: The model.
        """
        return kept if self.keep_optimizer and kept != () else self.solver.resumed(params, kept)

    def fit(
        self,
        context: ClientContext,
        models: Params,
        kept: PyTree,
        split: Split,
        objective: Callable[..., Array] | None = None,
        aux: PyTree = None,
    ) -> tuple[Params, PyTree, Array]:
        """Trains each of the J models that a client received, all on the same mini-batches.

        Args:
            context: The client's context; its key determines the mini-batches.
            models: Leaves (J, ...).
            kept: The client's `kept_optimizers`.
            split: The client's training data.
            objective: (params, mini-batch) -> the value to minimize; with `aux`, (params, mini-batch, row of aux).
                None: the mean loss.
            aux: What differs between the J models' objectives, leaves (J, ...); None: nothing.

        Returns:
            The trained models, the optimizer states to keep, and the mean losses (J,).
        """
        value = scalar(objective or self.solver.mean_loss)  # here, since an error of `fit` would name `descended`

        def one(number, params, opt_state, *aux):
            descended = lambda params, batch: value(params, batch.of_model(number), *aux)

            return self.solver.fit(
                context.key, params, opt_state, split, round_number=context.round, objective=descended
            )

        opt_states = kept
        if not self.keep_optimizer or kept == ():
            opt_states = self.plan.over_models(self.round_optimizer, kept, models)
        stacks = jnp.arange(tree.num_rows(models)), models, opt_states, *(() if aux is None else (aux,))
        models, opt_states, losses = self.plan.over_models(one, *stacks)
        return models, self.plan.over_rows(self.kept_optimizer, opt_states, models), losses

    def descend(
        self,
        context: ClientContext,
        models: Params,
        kept: PyTree,
        split: Split,
        gradient: Callable,
        memory: PyTree = (),
        steps: Array | None = None,
    ) -> tuple[Params, PyTree, Array, PyTree]:
        """Trains the only model that a client received along a direction that the method defines.

        Args:
            context: The client's context; its key determines the mini-batches.
            models: Leaves (1, ...).
            kept: The client's `kept_optimizers`.
            split: The client's training data.
            gradient, memory, steps: As in `Solver.descend`.

        Returns:
            The trained model (1, ...), the optimizer state to keep, the mean loss (1,), and the memory.
        """
        params = tree.first(models)
        opt_state = self.round_optimizer(tree.first(kept), params)
        params, opt_state, loss, memory = self.solver.descend(
            context.key, params, opt_state, split, gradient, memory, round_number=context.round, steps=steps
        )
        kept = tree.stack_one(self.kept_optimizer(opt_state, params))
        return tree.stack_one(params), kept, loss[None], memory

    def alone(
        self,
        context: ClientContext,
        start: Params,
        data: ClientData,
        *,
        rounds: int = 1,
        objective: Callable[[Params, Batch], Array] | None = None,
    ) -> Params:
        """A client trains a model for `rounds` rounds on its own data, with a fresh optimizer.

        Args:
            context: The client's context; its key determines the mini-batches.
            start: The initial model.
            data: The client's data.
            rounds: Number of rounds' worth of local epochs or steps.
            objective: (params, mini-batch) -> the value to minimize; None: the mean loss.
        """

        def one_round(number, carry):
            key = jax.random.fold_in(context.key, number)
            params, state = carry
            return self.solver.fit(key, params, state, data.train, round_number=number, objective=objective)[:2]

        return jax.lax.fori_loop(0, rounds, one_round, (start, self.solver.optimizer.init(start)))[0]

    def newcomer(
        self,
        context: ClientContext,
        models: Params,
        data: ClientData,
        objective: Callable[[Params, Batch], Array] | None = None,
    ) -> Prediction:
        """As `Algorithm.adapt`: a client trains alone, from an initial model, for as many rounds as the run has.

        `objective` is as in `alone`.
        """
        init_key, train_key = jax.random.split(context.key)
        start = self.model.init(init_key)
        trained = self.alone(context._replace(key=train_key), start, data, rounds=self.rounds, objective=objective)
        return Prediction.one(trained)


def watched(problem: Problem, noted: Callable[[], None]) -> Problem:
    """The same problem, which calls `noted` whenever its number of rounds is read; so do problems made from it."""

    class Watched(Problem):
        """A problem that knows who reads its number of rounds."""

        __slots__ = ()

        @property
        def rounds(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
            noted()
            return super().rounds

    return Watched(*problem)
