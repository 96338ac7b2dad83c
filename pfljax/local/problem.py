"""The problem that a method is built for: model, local training, execution plan and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

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
    Params,
    PyTree,
    Split,
    Trained,
)
from pfljax.exchange.plan import ExecutionPlan
from pfljax.local.batches import Batch
from pfljax.local.solver import Slope, Solver, TrainState, joined, scalar, slope
from pfljax.models import Model
from pfljax.models.groups import Groups


class Personal(NamedTuple):
    """What a client keeps for itself and trains, and its optimizer's state; both persist over the rounds.

    Attributes:
        params: A model, a part of one, or any tree of parameters.
        opt_state: The optimizer's state for them.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from pfljax.author import Personal
        >>> params = {"w": jnp.zeros(3)}
        >>> personal = Personal(params, optax.adam(0.01).init(params))
        >>> personal.params["w"].shape
        (3,)
    """

    params: Params
    opt_state: PyTree


class Pair(NamedTuple):
    """Something of the received model, and the same of a client's own model or part.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import Pair
        >>> pair = Pair(shared={"w": jnp.zeros(3)}, personal={"w": jnp.ones(3)})
        >>> pair.personal["w"].tolist()
        [1.0, 1.0, 1.0]
    """

    shared: Any
    personal: Any


# (params, mini-batch) -> the value to minimize, (). The parameters have no batch statistics.
Objective = Callable[..., Array]
# (params, the other model, mini-batch) -> the value to minimize, ().
PairObjective = Callable[[Params, Params, Batch], Array]


class SlopeFunction(Protocol):
    """What `Problem.descend` gives to a direction: the slope of the objective anywhere."""

    def __call__(self, params: Params, ahead: int = 0, number: Array | int = 0) -> Slope:
        """The slope at `params`.

        Args:
            params: Parameters (...), without batch statistics.
            ahead: 0: on the step's mini-batch; n: on the n-th one after it.
            number: Dropout and privacy noise are drawn for the model of this number.
        """
        ...


# (slope_at, params, memory) -> (the slope to follow, memory); see `Problem.descend`.
Direction = Callable[[SlopeFunction, Params, Any], tuple[Slope, Any]]
# (params, statistics, memory, mini-batch) -> (slopes, memory); see `Problem.descend_pair`.
PairDirection = Callable[[Pair, Pair, Any, Batch], tuple[Pair, Any]]


def numbered(objective: Objective, number: int | None) -> Objective:
    """The objective with dropout and noise of model `number`; None: with those of the mini-batch itself."""
    objective = scalar(objective)
    if number is None:
        return objective

    def numbered_objective(params: Params, batch: Batch) -> Array:
        return objective(params, batch.for_model(number))

    return numbered_objective


def pair_opt_state(
    shared: optax.GradientTransformationExtraArgs, personal: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """One optimizer for a `Pair` of models, made of one for each."""

    def init(params: Pair) -> Pair:
        return Pair(shared.init(params.shared), personal.init(params.personal))

    def update(gradients: Pair, states: Pair, params: Pair, **extra: Any) -> tuple[Pair, Pair]:
        shared_update, shared_state = shared.update(
            gradients.shared, states.shared, params.shared, **extra
        )
        personal_update, personal_state = personal.update(
            gradients.personal, states.personal, params.personal, **extra
        )
        return Pair(shared_update, personal_update), Pair(shared_state, personal_state)

    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


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
        clock: How long clients take, a `stages.devices.Clock`; None: no time is simulated.
        chance: Probability with which each client takes part in a round, independently of others; a cohort then has
            `cohort_size` places, of which others stay empty. None: a cohort always has S clients.
        groups: The networks, if they differ between groups of clients; `model` is the first. None: all have `model`.
        common: What a method is built for beside a client's own network, if they differ; see `server_problem`.

    Examples:
        Half of ten clients take part in each of eight rounds:

        >>> import optax
        >>> import pfljax as pfl
        >>> model = pfl.Model(pfl.models.MLP((16,), outputs=3), (4,))
        >>> optimizer = optax.with_extra_args_support(optax.sgd(0.1))
        >>> problem = pfl.author.Problem(
        ...     model=model,
        ...     solver=pfl.author.Solver(model.loss, optimizer),
        ...     plan=pfl.Execution(plan="map", devices=1).make_plan(),
        ...     num_clients=10,
        ...     cohort_size=5,
        ...     n_max=20,
        ...     rounds=8,
        ... )
        >>> problem.rounds_of_a_client
        4.0
        >>> algorithm = pfl.Ditto(mu=1.0).build(problem)
        >>> algorithm.ledger.gradients
        2
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
    clock: Any = None
    chance: float | None = None
    groups: Groups | None = None
    common: Problem | None = None

    @property
    def models(self) -> tuple[Model, ...]:
        """All networks."""
        return self.groups.models if self.groups else (self.model,)

    @property
    def server_problem(self) -> Problem:
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
            ArgumentError: if models must differ but the model is a module of NNX or PyTorch, itself the initial model.
        """
        common = common if self.common_init is None else self.common_init
        if self.model.network.fixed and not common and self.num_clients > 1:
            accepted = "a function of rngs that creates it"
            if self.model.channels_first:
                accepted = "its class, or a function that creates it"
            kind = "PyTorch" if self.model.channels_first else "NNX"
            text = f"is one {kind} module, but initial models must differ; accepted: {accepted}"
            raise ArgumentError("model", text)
        return self.model.init(
            jax.random.fold_in(key, jnp.zeros_like(number) if common else number)
        )

    def init_global(self, key: Key) -> Params:
        """The initial model of a server that has one."""
        return self.model.init(jax.random.fold_in(key, 0))

    def init_models(self, key: Key, num: int, *, common: bool = True) -> Params:
        """`num` initial models, stacked: `init_model` with the numbers 0 to `num` - 1."""
        if num == 1:
            return tree.stack_one(self.init_global(key))
        return self.plan.over_rows(
            lambda n: self.init_model(key, n, common=common), jnp.arange(num)
        )

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
        return self.with_epochs(epochs).solver.max_steps(self.n_max) / self.solver.max_steps(
            self.n_max
        )

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

        The optimizer begins anew, but for what the engine keeps of its state from round to round.
        Batch statistics follow the forward passes.

        Args:
            context: The client's context; its key determines the mini-batches.
            models: Leaves (J, ...): whole models, or as a method gets them, without batch statistics.
            split: The client's training data.
            objective: (params, mini-batch) -> the value to minimize; with `per_model`, (params,
                mini-batch, row of it). `params` is one model without batch statistics. None: the
                mean loss.
            per_model: The third argument of each of the J objectives, leaves (J, ...), such as the
                received models for a proximal term; None: there is none.

        Returns:
            The trained models, as whole as they came, with their mean losses and optimizer states.
        """
        objective = scalar(objective or self.solver.mean_loss)
        params, statistics = self.split_statistics(context, models)
        opt_states = self.round_optimizers(context, params)

        def train_one(
            number: Array, params: Params, statistics: Params, opt_state: PyTree, *third: PyTree
        ) -> tuple[TrainState, Array]:
            def model_objective(params: Params, batch: Batch) -> Array:
                return objective(params, batch.for_model(number), *third)

            start = TrainState(params, statistics, opt_state)
            return self.solver.fit(
                context.key, start, split, model_objective, round_number=context.round
            )

        rows = () if per_model is None else (per_model,)
        numbers = jnp.arange(tree.num_rows(params))
        stacks = (numbers, params, statistics, opt_states, *rows)
        state, losses = self.plan.over_models(train_one, *stacks)
        return self.trained(context, state, losses)

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
            direction: (slope_at, params, memory) -> (Slope, memory), called in every step: the slope
                whose `gradient` the optimizer gets. `slope_at(params, ahead=0, number=0)` is the
                slope at any parameters, on the step's mini-batch, or on the one `ahead` of it, with
                dropout and noise of model `number`. The batch statistics of the slope that is
                returned become the model's.
            memory: Carry of `direction` from step to step.
            objective: As in `fit`.
            num_steps: () int32, number of steps; None: the solver's own.

        Returns:
            As `fit`, and the memory after the last step.
        """
        objective = scalar(objective or self.solver.mean_loss)
        params, statistics = self.split_statistics(context, models)
        opt_states = self.round_optimizers(context, params)

        def step(
            params: Params, statistics: Params, memory: PyTree, batch_at: Callable[[int], Batch]
        ) -> tuple[Slope, PyTree]:
            def slope_at(params: Params, ahead: int = 0, number: Array | int = 0) -> Slope:
                return slope(objective, params, statistics, batch_at(ahead).for_model(number))

            return direction(slope_at, params, memory)

        start = TrainState(tree.first(params), tree.first(statistics), tree.first(opt_states))
        state, loss, memory = self.solver.train(
            context.key,
            start,
            split,
            step,
            memory,
            round_number=context.round,
            num_steps=num_steps,
        )
        return self.trained(context, tree.stack_one(state), loss[None]), memory

    # ---- Models of a client's own.

    def init_personal(
        self,
        key: Key,
        client: Array,
        part: Callable[[Params], Params] | None = None,
        *,
        common: bool = True,
    ) -> Personal:
        """A client's own initial model, or the `part` of it that it keeps, with its optimizer's state.

        Args:
            key: Random key, the same for all clients.
            client: () int32, the client's number.
            part: A model's parameters -> the client's own part of them, with None in place of the
                rest; None: all.
            common: As in `init_model`.
        """
        params = self.init_model(key, client, common=common)
        if part is not None:
            params = part(params)
        return self.personal(params)

    def personal(self, params: Params) -> Personal:
        """Parameters that a client keeps for itself, any tree, with a new optimizer's state."""
        return Personal(params, self.solver.begin(params).opt_state)

    def fit_personal(
        self,
        context: ClientContext,
        personal: Personal,
        split: Split,
        objective: Objective | None = None,
        *,
        number: int | None = None,
    ) -> tuple[Personal, Array]:
        """Trains a client's own model for a round; returns it with its optimizer, and the mean loss ().

        Args:
            context: The client's context; its key determines the mini-batches, the same ones as in
                `fit`.
            personal: The client's own model.
            split: The client's training data.
            objective: (params, mini-batch) -> the value to minimize; None: the mean loss.
            number: Beside received models: a number that none of them has, so that dropout and noise
                are drawn for this model alone.
        """
        objective = numbered(objective or self.solver.mean_loss, number)
        params, statistics = self.solver.without_statistics(personal.params)
        start = TrainState(params, statistics, personal.opt_state)
        state, loss = self.solver.fit(
            context.key, start, split, objective, round_number=context.round
        )
        return Personal(state.whole, state.opt_state), loss

    # ---- The received model and one of the client's own, on the same mini-batches.

    def descend_pair(
        self,
        context: ClientContext,
        models: Params,
        personal: Personal,
        split: Split,
        direction: PairDirection,
        memory: PyTree = (),
    ) -> tuple[Trained, PyTree]:
        """Trains the received model and a client's own model or part, along directions that the method defines.

        Both take a step at a time, on the same mini-batch.

        Args:
            context: The client's context; its key determines the mini-batches.
            models: The received model, leaves (1, ...), as in `fit`; its network and optimizer are
                those of `server_problem`.
            personal: The client's own model, its own part of one, or any tree that it trains.
            split: The client's training data.
            direction: (params, statistics, memory, mini-batch) -> (slopes, memory), called in every
                step. The first two and the slopes are `Pair`s; `slope` computes one of them, and
                `batch.for_model(0)` and `batch.for_model(1)` have dropout and noise of the shared and
                of the personal model.
            memory: Carry of `direction` from step to step.

        Returns:
            As `fit`, with the client's next `Personal` as the row and the mean loss of the personal
            slopes; and the memory after the last step.
        """
        server = self.server_problem
        params, statistics = server.split_statistics(context, models)
        own_params, own_statistics = self.solver.without_statistics(personal.params)
        opt_states = server.round_optimizers(context, params)
        start = TrainState(
            params=Pair(tree.first(params), own_params),
            statistics=Pair(tree.first(statistics), own_statistics),
            opt_state=Pair(tree.first(opt_states), personal.opt_state),
        )

        def step(
            params: Pair, statistics: Pair, memory: PyTree, batch_at: Callable[[int], Batch]
        ) -> tuple[Slope, PyTree]:
            slopes, memory = direction(params, statistics, memory, batch_at(0))
            pair_slope = Slope(
                loss=slopes.personal.loss,
                gradient=Pair(slopes.shared.gradient, slopes.personal.gradient),
                statistics=Pair(slopes.shared.statistics, slopes.personal.statistics),
            )
            return pair_slope, memory

        optimizer = pair_opt_state(server.solver.optimizer, self.solver.optimizer)
        solver = self.solver._replace(optimizer=optimizer)
        state, loss, memory = solver.train(
            context.key, start, split, step, memory, round_number=context.round
        )
        shared = TrainState(state.params.shared, state.statistics.shared, state.opt_state.shared)
        whole = joined(state.params.personal, state.statistics.personal)
        trained = server.trained(context, tree.stack_one(shared), loss[None])
        return trained._replace(row=Personal(whole, state.opt_state.personal)), memory

    def fit_side_by_side(
        self,
        context: ClientContext,
        models: Params,
        personal: Personal,
        split: Split,
        global_objective: PairObjective,
        personal_objective: PairObjective,
    ) -> Trained:
        """Trains the received model and a client's own model or part, each on an objective of its own.

        In a step, each takes a gradient of its own objective, in which the other one is fixed as it
        was before the step. A fixed model is whole: it has its batch statistics. With the `mode` of a
        loss, it normalizes by the mini-batch; with None, by its running statistics.

        Args:
            context: The client's context; its key determines the mini-batches.
            models: The received model, leaves (1, ...), as in `fit`.
            personal: The client's own model, or its own part.
            split: The client's training data.
            global_objective: (params of the received model, the client's own model, mini-batch) ->
                its value.
            personal_objective: (the client's own params, the received model, mini-batch) -> its value.

        Returns:
            As `fit`, with the client's next `Personal` as the row, and the mean of the personal
            objective as loss.
        """

        def direction(
            params: Pair, statistics: Pair, memory: PyTree, batch: Batch
        ) -> tuple[Pair, PyTree]:
            global_model = joined(params.shared, statistics.shared)
            own_model = joined(params.personal, statistics.personal)

            def shared_value(params: Params, batch: Batch) -> Array:
                return global_objective(params, own_model, batch)

            def personal_value(params: Params, batch: Batch) -> Array:
                return personal_objective(params, global_model, batch)

            shared = slope(shared_value, params.shared, statistics.shared, batch.for_model(0))
            personal_slope = slope(
                personal_value, params.personal, statistics.personal, batch.for_model(1)
            )
            return Pair(shared, personal_slope), memory

        trained, _ = self.descend_pair(context, models, personal, split, direction)
        return trained

    # ---- Clients unseen in training.

    def train_newcomer(
        self,
        context: ClientContext,
        data: ClientData,
        objective: Objective | None = None,
        *,
        start: Params | None = None,
        part: Callable[[Params], Params] | None = None,
        rounds: int | None = None,
        number: int | None = None,
    ) -> Params:
        """What a client unseen in training makes of its own data, alone: a trained model, or a part of one.

        Args:
            context: The client's context.
            data: The client's data.
            objective: (params, mini-batch) -> the value to minimize; None: the mean loss.
            start: What it begins with; None: an initial model, of which it trains the `part`.
            part: A model's parameters -> what is trained of them, as in `init_personal`; None: all.
            rounds: Number of rounds' worth of local epochs or steps; None: as many as the run has.
            number: As in `fit_personal`.
        """
        objective = numbered(objective or self.solver.mean_loss, number)
        if start is None:
            init_key, train_key = jax.random.split(context.key)
            context = context._replace(key=train_key)
            start = self.model.init(init_key)
            if part is not None:
                start = part(start)

        def one_round(number: Array, state: TrainState) -> TrainState:
            key = jax.random.fold_in(context.key, number)
            return self.solver.fit(key, state, data.train, objective, round_number=number)[0]

        num_rounds = self.rounds if rounds is None else rounds
        return jax.lax.fori_loop(0, num_rounds, one_round, self.solver.begin(start)).whole

    # ---- Parts that these functions share.

    def zero_params(self) -> Params:
        """Zeros in the shapes of a model's parameters, without batch statistics."""
        params, _ = self.solver.without_statistics(self.model.network.shapes)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)

    def full_gradient(self, context: ClientContext, models: Params, split: Split) -> Params:
        """The gradient of the mean loss over all of a client's examples, at the only model that it received."""
        params, statistics = self.split_statistics(context, models)
        whole = tree.first(joined(params, statistics))
        _, gradient = self.solver.loss_and_gradient(whole, split)
        return self.solver.without_statistics(gradient)[0]

    def split_statistics(self, context: ClientContext, models: Params) -> tuple[Params, Params]:
        """Parameters and batch statistics of received models (J, ...), wherever the statistics are."""
        if context.statistics is not None:
            return models, context.statistics
        return self.solver.without_statistics(models)

    def whole(self, context: ClientContext, models: Params) -> tuple[ClientContext, Params]:
        """Received models with their batch statistics, and the context for training them so.

        Call it before `fit` if you put the received layers together with layers of the client's own.
        """
        return context._replace(statistics=None), joined(models, context.statistics)

    def round_optimizers(self, context: ClientContext, params: Params) -> PyTree:
        """Optimizer states of J received models at the beginning of a round, leaves (J, ...).

        They are new, but for what the engine kept: see `kept_of_optimizer`.
        """
        lasting_state = context.optimizer
        if lasting_state is None:
            return self.plan.over_models(self.solver.optimizer.init, params)

        def begin(params: Params, state: PyTree) -> PyTree:
            new = self.solver.optimizer.init(params)
            earlier = state if self.keep_optimizer else self.solver.resumed(params, state)
            return jax.tree.map(lambda a, b: jnp.where(lasting_state.started, a, b), earlier, new)

        return self.plan.over_models(begin, params, lasting_state.state)

    def kept_of_optimizer(self, opt_state: PyTree, params: Params) -> PyTree:
        """What the engine keeps over rounds of a shared model's optimizer state; () if nothing.

        All of it if the run says so; otherwise what `pfljax.local.lasting` says.
        """
        return opt_state if self.keep_optimizer else self.solver.lasting(opt_state, params)

    def trained(self, context: ClientContext, state: TrainState, losses: Array) -> Trained:
        """Trained models (J, ...), as whole as they came."""
        lasting_state = self.plan.over_rows(self.kept_of_optimizer, state.opt_state, state.params)
        if context.statistics is not None:
            return Trained(state.params, losses, lasting_state, state.statistics)
        return Trained(state.whole, losses, lasting_state)


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
