"""The problem that a method is built for: model, local training, execution plan and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Array,
    ClientContext,
    ClientData,
    Key,
    KeptOptimizer,
    Params,
    Prediction,
    PyTree,
    Split,
    Trained,
)
from pfljax.exchange.plan import ExecutionPlan
from pfljax.local.batches import Batch
from pfljax.local.clock import Clock
from pfljax.local.solver import Slope, Solver, TrainState, descent, joined, scalar, value_and_gradients
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


class Personal(NamedTuple):
    """A client's own model, or its own part of one, and its optimizer's state; both persist over the rounds."""

    params: Params
    opt_state: PyTree


# (params, mini-batch) -> the value to minimize, (). The parameters of one model, without batch statistics.
Objective = Callable[..., Array]
# (params, the other model, mini-batch) -> the value to minimize, ().
PairObjective = Callable[[Params, Params, Batch], Array]
# (params, ahead=0, number=0) -> the slope there, see `Problem.descend`.
SlopeFunction = Callable[..., Slope]
# (slope_at, params, memory) -> (the slope to follow, memory); see `Problem.descend`.
Direction = Callable[[SlopeFunction, Params, PyTree], tuple[Slope, PyTree]]


def kept_or_new(kept: KeptOptimizer, state: PyTree, new: PyTree) -> PyTree:
    """A kept optimizer state, or before the client's first round, a new one."""
    return jax.tree.map(lambda old, fresh: jnp.where(kept.started, old, fresh), state, new)


def side_by_side(*optimizers: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """One optimizer for a tuple of models, made of one for each."""

    def init(params: Any) -> Any:
        return tuple(optimizer.init(model) for optimizer, model in zip(optimizers, params, strict=True))

    def update(grads: Any, states: Any, params: Any = None, **extra: Any) -> Any:
        results = []
        for optimizer, *of_one in zip(optimizers, grads, states, params, strict=True):
            results.append(optimizer.update(*of_one, **extra))
        updates, states = zip(*results, strict=True)
        return updates, states

    return optax.GradientTransformationExtraArgs(init, update)


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

    def fit_with(
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

    def descend_with(
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

    def fit(
        self,
        context: ClientContext,
        models: Params,
        split: Split,
        objective: Objective | None = None,
        *,
        per_model: PyTree = None,
    ) -> Trained:
        """Trains each of the J models that a client received, all on the same mini-batches.

        The optimizer begins anew, unless the engine keeps its state. Batch statistics follow the forward passes.

        Args:
            context: The client's context; its key determines the mini-batches.
            models: Leaves (J, ...): whole models, or as a method gets them, without batch statistics.
            split: The client's training data.
            objective: (params, mini-batch) -> the value to minimize; with `per_model`, (params, mini-batch, row of
                it). `params` is one model without batch statistics. None: the mean loss.
            per_model: What differs between the J models' objectives, leaves (J, ...); None: nothing.

        Returns:
            The trained models, as whole as they came, with their mean losses and optimizer states.
        """
        objective = scalar(objective or self.solver.mean_loss)
        weights, statistics = self._apart(context, models)
        opt_states = self._optimizers(context, self.solver, weights)

        def train_one(number, params, statistics, opt_state, *row):
            step = descent(lambda params, batch: objective(params, batch, *row), number)
            start = TrainState(params, statistics, opt_state)
            state, loss, _ = self.solver.train(context.key, start, split, step, round_number=context.round)
            return state, loss

        rows = () if per_model is None else (per_model,)
        numbers = jnp.arange(tree.num_rows(weights))
        state, losses = self.plan.over_models(train_one, numbers, weights, statistics, opt_states, *rows)
        return self._trained(context, state, losses)

    def descend(
        self,
        context: ClientContext,
        models: Params,
        split: Split,
        direction: Direction,
        memory: PyTree = (),
        objective: Objective | None = None,
        *,
        num_steps: Array | None = None,
    ) -> tuple[Trained, PyTree]:
        """Trains the only model that a client received along directions that the method makes of its gradients.

        Args:
            context: The client's context; its key determines the mini-batches.
            models: Leaves (1, ...), as in `fit`.
            split: The client's training data.
            direction: (slope_at, params, memory) -> (Slope, memory), called in every step: the slope whose
                `gradient` the optimizer gets. `slope_at(params, ahead=0, number=0)` is the slope at any parameters, on
                the step's mini-batch, or on the one `ahead` of it, with dropout and noise of model `number`. The
                batch statistics of the slope that is returned become the model's.
            memory: Carry of `direction` from step to step.
            objective: As in `fit`.
            num_steps: () int32, number of steps; None: the solver's own.

        Returns:
            As `fit`, and the memory after the last step.
        """
        objective = scalar(objective or self.solver.mean_loss)
        weights, statistics = self._apart(context, models)
        opt_states = self._optimizers(context, self.solver, weights)

        def step(params, statistics, memory, batches):
            def slope_at(params: Params, ahead: int = 0, number: int = 0) -> Slope:
                batch = batches(ahead).of_model(number)
                loss, (gradient, change) = value_and_gradients(objective, params, statistics, batch)
                return Slope(loss, gradient, change)

            slope, memory = direction(slope_at, params, memory)
            return slope.loss, slope.gradient, slope.statistics, memory

        start = TrainState(*map(tree.first, (weights, statistics, opt_states)))
        state, loss, memory = self.solver.train(
            context.key, start, split, step, memory, round_number=context.round, num_steps=num_steps, ahead=True
        )
        return self._trained(context, tree.stack_one(state), loss[None]), memory

    def init_personal(
        self, key: Key, client: Array, part: Callable[[Params], Params] | None = None, *, common: bool = True
    ) -> Personal:
        """A client's own initial model, or the `part` of it that it keeps, with its optimizer's state.

        Args:
            key: Random key, the same for all clients.
            client: () int32, the client's number.
            part: A model's parameters -> the client's own part of them, with None in place of the rest; None: all.
            common: As in `init_model`.
        """
        params = self.init_model(key, client, common=common)
        if part is not None:
            params = part(params)
        return Personal(params, self.solver.begin(params).opt_state)

    def fit_personal(
        self, context: ClientContext, personal: Personal, split: Split, objective: Objective | None = None
    ) -> tuple[Personal, Array]:
        """Trains a client's own model for a round; returns it with its optimizer, and the mean loss ().

        Args:
            context: The client's context; its key determines the mini-batches, the same ones as in `fit`.
            personal: The client's own model.
            split: The client's training data.
            objective: (params, mini-batch) -> the value to minimize; None: the mean loss. It draws other dropout and
                noise than the received models do.
        """
        step = descent(scalar(objective or self.solver.mean_loss), number=1)
        start = TrainState(*self.solver.apart(personal.params), personal.opt_state)
        state, loss, _ = self.solver.train(context.key, start, split, step, round_number=context.round)
        return Personal(state.whole, state.opt_state), loss

    def fit_side_by_side(
        self,
        context: ClientContext,
        models: Params,
        personal: Personal,
        split: Split,
        global_objective: PairObjective,
        personal_objective: PairObjective,
    ) -> Trained:
        """Trains the received model and a client's own model or part, on the same mini-batches, step by step.

        In a step, each takes a gradient of its own objective, in which the other one is fixed as it was before the
        step. A fixed model is whole: it has its batch statistics, for predictions.

        Args:
            context: The client's context; its key determines the mini-batches.
            models: The received model, leaves (1, ...), as in `fit`.
            personal: The client's own model, or its own part.
            split: The client's training data.
            global_objective: (params of the received model, the client's own model, mini-batch) -> its value.
            personal_objective: (the client's own params, the received model, mini-batch) -> its value.

        Returns:
            As `fit`, with the client's next `Personal` as the row, and the mean of the personal objective as loss.
        """
        shared_problem = self.of_server
        weights, statistics = shared_problem._apart(context, models)
        opt_states = shared_problem._optimizers(context, shared_problem.solver, weights)
        global_start = TrainState(*map(tree.first, (weights, statistics, opt_states)))
        personal_start = TrainState(*self.solver.apart(personal.params), personal.opt_state)
        optimizer = side_by_side(shared_problem.solver.optimizer, self.solver.optimizer)

        def step(params, statistics, memory, batch):
            global_whole, personal_whole = (joined(*of_one) for of_one in zip(params, statistics, strict=True))
            of_global = lambda params, batch: global_objective(params, personal_whole, batch)
            of_personal = lambda params, batch: personal_objective(params, global_whole, batch)
            _, global_grads = value_and_gradients(of_global, params[0], statistics[0], batch.of_model(0))
            loss, personal_grads = value_and_gradients(of_personal, params[1], statistics[1], batch.of_model(1))
            grads, changes = zip(global_grads, personal_grads, strict=True)
            return loss, grads, changes, memory

        start = TrainState(*zip(global_start, personal_start, strict=True))
        solver = self.solver._replace(optimizer=optimizer)
        pair, loss, _ = solver.train(context.key, start, split, step, round_number=context.round)
        global_state, personal_state = (TrainState(*of_one) for of_one in zip(*pair, strict=True))
        trained = shared_problem._trained(context, tree.stack_one(global_state), loss[None])
        return trained._replace(row=Personal(personal_state.whole, personal_state.opt_state))

    def train_newcomer(
        self,
        context: ClientContext,
        data: ClientData,
        objective: Objective | None = None,
        *,
        start: Params | None = None,
        part: Callable[[Params], Params] | None = None,
        rounds: int | None = None,
    ) -> Params:
        """What a client unseen in training makes of its own data, alone: a trained model, or a part of one.

        Args:
            context: The client's context.
            data: The client's data.
            objective: (params, mini-batch) -> the value to minimize; None: the mean loss.
            start: What it begins with; None: an initial model, of which it trains the `part`.
            part: A model's parameters -> what is trained of them, as in `init_personal`; None: all.
            rounds: Number of rounds' worth of local epochs or steps; None: as many as the run has.
        """
        if start is None:
            init_key, train_key = jax.random.split(context.key)
            context = context._replace(key=train_key)
            start = self.model.init(init_key)
            if part is not None:
                start = part(start)
        step = descent(scalar(objective or self.solver.mean_loss))

        def one_round(number, state):
            key = jax.random.fold_in(context.key, number)
            return self.solver.train(key, state, data.train, step, round_number=number)[0]

        num_rounds = self.rounds if rounds is None else rounds
        return jax.lax.fori_loop(0, num_rounds, one_round, self.solver.begin(start)).whole

    def zero_params(self) -> Params:
        """Zeros in the shapes of a model's parameters, without batch statistics."""
        params, _ = self.solver.apart(self.model.network.shapes)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)

    def full_gradient(self, context: ClientContext, models: Params, split: Split) -> Params:
        """The gradient of the mean loss over all of a client's examples, at the only model that it received."""
        weights, statistics = self._apart(context, models)
        _, gradient = self.solver.loss_and_gradient(tree.first(joined(weights, statistics)), split)
        return self.solver.apart(gradient)[0]

    def _apart(self, context: ClientContext, models: Params) -> tuple[Params, Params]:
        """Parameters and batch statistics of models (J, ...), wherever the statistics are."""
        if context.statistics is not None:
            return models, context.statistics
        return self.solver.apart(models)

    def _optimizers(self, context: ClientContext, solver: Solver, weights: Params) -> PyTree:
        """Optimizer states of J models: those that the engine kept, or new ones."""
        new = self.plan.over_models(solver.optimizer.init, weights)
        if context.optimizer is None:
            return new
        return kept_or_new(context.optimizer, context.optimizer.state, new)

    def _trained(self, context: ClientContext, state: TrainState, losses: Array) -> Trained:
        """Trained models (J, ...) as whole as they came."""
        if context.statistics is not None:
            return Trained(state.params, losses, state.opt_state, state.statistics)
        return Trained(state.whole, losses, state.opt_state)

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
