"""One global model that clients train and a server averages, as in FedAvg and its variants.

    A round: every client of the cohort receives theta and trains it to theta_k (`train`);
    theta <- sum_k n_k theta_k / sum_k n_k, or a server optimizer's step with theta minus that mean as the gradient.

A method defines how a client trains, what it keeps (its row) and what it predicts with. `sharing_layers` is for methods
that average only a part of the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import aggregation
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    Key,
    Ledger,
    Params,
    Predictor,
    PyTree,
    Report,
    Split,
    State,
)
from pfljax.local.problem import Problem
from pfljax.local.training import beside_statistics

Train = Callable[[ClientContext, Params, PyTree, ClientData], tuple[Params, PyTree, Array]]
Predict = Callable[[Key, State, ClientData], Predictor]


def averaging(
    problem: Problem,
    *,
    train: Train | None = None,
    rows: Callable[[Key, Params, ClientData], PyTree] | None = None,
    server: optax.GradientTransformation | None = None,
    predictor: Predict | None = None,
    adapt: Predict | None = None,
    ledger: Ledger | None = None,
    report: Report | None = None,
) -> Algorithm:
    """An algorithm with one averaged model.

    Args:
        problem: The problem to build the algorithm for.
        train: (context, models (1, ...), row, data) -> (models, row, losses (1,)); None: the solver's epochs or steps.
        rows: (key, models (1, ...), clients) -> what clients keep, leaves (K, ...); None: optimizers, if they are kept.
        server: The server's optimizer; None: the mean replaces the model.
        predictor, adapt, report: As in `Algorithm`; the global model is scored by default.
        ledger: As in `Algorithm`; required with a custom `train`. Plain training takes one gradient.
    """
    if ledger is None and train is not None:
        raise ValueError("ledger: required with train; it says how many gradients are computed per mini-batch")
    if server is not None and problem.solver.statistics is not None:
        server = beside_statistics(server, problem.solver.statistics)

    def init(key, clients):
        models = problem.init_models(key, 1)
        kept = rows(key, models, clients) if rows else problem.optimizer_rows(models, tree.num_rows(clients))
        return State((), models, server.init(models) if server else (), kept)

    def client_update(context, models, row, data):
        models, row, losses = (train or plain)(context, models, row, data)
        upload, sent = aggregation.weighted(models, data.train.size)
        return ClientOutput(row, upload, {"loss": losses[0]}, sent)

    def plain(context, models, kept, data):
        return problem.fit_models(context, models, kept, data.train)

    def server_update(key, state, aggregate):
        mean = aggregation.average(state.models, aggregate)
        if server is None:
            return state._replace(models=mean), {}
        updates, optimizer = server.update(tree.subtract(state.models, mean), state.optimizer, state.models)
        moved = state._replace(models=optax.apply_updates(state.models, updates), optimizer=optimizer)
        came = aggregate.upload["weight"].sum() > 0  # otherwise take no step, not even with a zero gradient
        return jax.tree.map(lambda new, old: jnp.where(came, new, old), moved, state), {}

    return Algorithm(
        init=init,
        download=the_one_model,
        client_update=client_update,
        server_update=server_update,
        predictor=predictor or (lambda key, state, clients: Predictor.one(state.models, tree.num_rows(clients))),
        adapt=adapt,  # pyright: ignore[reportArgumentType]  # None: the predictor
        topology="shared",
        averages=lambda models: models,
        ledger=ledger or Ledger(gradients=1),
        report=report or Report(),
    )


def the_one_model(key: Key, state: State, cohort: Cohort) -> Array:
    """(S, 1) index of the only model; if no part of a model is shared, no leaf shows the number of models."""
    return jnp.zeros((cohort.ids.shape[0], 1), jnp.int32)


def loss_at_start(problem: Problem, models: Params, data: ClientData) -> Array:
    """() mean loss of the received model (1, ...) on a client's training data."""
    return problem.solver.total_loss(tree.first(models), data.train) / jnp.maximum(data.train.size, 1)


class Phase(NamedTuple):
    """A phase of local training.

    Attributes:
        part: Parameters of a model or of a stack of models -> a tree of bools: which leaves are trained.
        epochs: Passes over the client's data, with the phase's own mini-batches; None: the solver's epochs or steps.
    """

    part: Callable[[Params], PyTree]
    epochs: int | None = None


def sharing_layers(
    problem: Problem, shared: Callable[[Params], PyTree], *, phases: Sequence[Phase] = (), report: Report
) -> Algorithm:
    """An algorithm that averages a part theta of the model; each client keeps the rest, phi_k, and trains both parts.

        A round: client k receives theta, trains (theta, phi_k) on D_k; phi_k stays;
        theta <- sum_k n_k theta_k / sum_k n_k.

    Newcomers train their own phi with theta fixed, for as many rounds as the run has; with phases, for the epochs of
    the phases that do not train theta.

    Args:
        problem: The problem to build the algorithm for.
        shared: A model's parameters -> a tree of bools: which leaves are averaged.
        phases: Parts that are trained in turn, each with its own optimizer; (): all at once, for the solver's epochs or
            steps.
        report: As in `Algorithm`.
    """

    def split(models):
        return tree.partition(models, shared(models))

    def init(key, clients):
        num, start = tree.num_rows(clients), problem.init_models(key, 1)
        parts = [problem._replace(solver=problem.solver.part(phase.part(start))) for phase in phases]
        optimizer = [part.optimizer_rows(start, num) for part in parts] or problem.optimizer_rows(start, num)
        own = split(problem.init_models(key, problem.ids(clients)))[1]
        return State((), split(start)[0], (), {"own": own, "optimizer": optimizer})

    def train(context, models, row, data):
        models = tree.combine(models, tree.stack_one(row["own"]))
        fit = problem.fit_models if not phases else functools.partial(fit_phases, problem, phases)
        models, optimizer, losses = fit(context, models, row["optimizer"], data.train)
        theta, phi = split(models)
        return theta, {"own": tree.first(phi), "optimizer": optimizer}, losses

    def predictor(key, state, clients):
        return Predictor.own(tree.combine(tree.repeat(state.models, tree.num_rows(clients)), state.clients["own"]))

    def adapt(key, state, clients):
        num = tree.num_rows(clients)
        init_key, train_key = jax.random.split(key)
        start = tree.combine(tree.repeat(state.models, num), split(problem.init_models(init_key, num))[1])
        solver = problem.solver.part(tree.complement(shared(start)))
        own = [phase.epochs for phase in phases if not tree.overlap(phase.part(start), shared(start))]
        known = [epochs for epochs in own if epochs is not None]
        alone = problem._replace(solver=solver.for_epochs(sum(known) if known else None))
        return Predictor.own(alone.train_alone(train_key, start, clients, own=True, rounds=problem.rounds))

    ledger = Ledger(gradients=1, passes=sum(problem.passes(phase.epochs) for phase in phases or (Phase(shared),)))
    if phases:
        epochs = ", then ".join("as given" if phase.epochs is None else str(phase.epochs) for phase in phases)
        report = dataclasses.replace(report, facts=(*report.facts, ("local epochs, phase by phase", epochs)))
    algorithm = averaging(problem, train=train, predictor=predictor, adapt=adapt, ledger=ledger, report=report)
    return dataclasses.replace(algorithm, init=init)


def base_layers(problem: Problem, personal_layers: int) -> Callable[[Params], PyTree]:
    """The `shared` argument of `sharing_layers` for a number `personal_layers` of personal last layers.

    Raises:
        ArgumentError: if the model has fewer layers.
    """
    num_layers = len(problem.model.layers)
    if personal_layers > num_layers:
        accepted = f"accepted: 0 to {num_layers}, the number of layers"
        raise ArgumentError("personal_layers", accepted, personal_layers)
    return lambda params: tree.complement(problem.model.mask(params, personal_layers))


def fit_phases(
    problem: Problem, phases: Sequence[Phase], context: ClientContext, models: Params, kept: list, split: Split
) -> tuple[Params, list, Array]:
    """Like `Problem.fit_models` for a stack of one model (1, ...), training its parts in turn."""
    params, optimizers, losses = tree.first(models), [], []
    for number, phase in enumerate(phases):
        start = tree.first(kept[number]) if problem.keep_optimizer else None
        mask = phase.part(params)
        params, optimizer, loss = problem.fit_part(
            context, params, start, split, mask, phase=number, epochs=phase.epochs
        )
        optimizers.append(tree.stack_one(optimizer) if problem.keep_optimizer else ())
        losses.append(loss)
    return tree.stack_one(params), optimizers, jnp.stack(losses).mean()[None]
