"""One model of which a server averages a part; each client keeps the rest, and may train parts in phases."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Params,
    Prediction,
    PyTree,
    Split,
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver, TrainState, joined

PHASE = 0xFA5E  # folded into a client's key for a round: the phases of its training


class Phase(NamedTuple):
    """A phase of local training, with mini-batches and an optimizer of its own.

    Even a single phase draws other mini-batches than training without phases does.

    Attributes:
        part: Parameters of a model -> a tree of bools: which leaves are trained.
        epochs: Passes over the client's data; None: the solver's epochs or steps.
        objective: (solver, params, start, mini-batch) -> the value to minimize; None: the mean loss.
            `solver` trains the part, and `start` is the client's model before the round's first
            phase, to which a phase may stay near.
    """

    part: Callable[[Params], PyTree]
    epochs: int | None = None
    objective: Callable[[Solver, Params, Params, Batch], Array] | None = None


def sharing_layers(
    problem: Problem,
    shared: Callable[[Params], PyTree],
    *,
    phases: Sequence[Phase] = (),
    server_optimizer: optax.GradientTransformation | None = None,
    report: MethodReport,
) -> Algorithm:
    """An algorithm that averages a part theta of the model; each client keeps the rest, phi_k, and trains both parts.

        A round: client k receives theta, trains (theta, phi_k) on D_k; phi_k stays;
        theta <- sum_k n_k theta_k / sum_k n_k.

    A client's row is phi_k. Newcomers minimize the mean loss over their own phi, with theta fixed,
    for as many rounds as the run has. If some phases name their epochs and do not train theta,
    newcomers train for the epochs of these.

    Args:
        problem: The problem to build the algorithm for.
        shared: A model's parameters -> a tree of bools: which leaves are averaged.
        phases: Parts that are trained in turn; (): all at once, for the solver's epochs or steps.
        server_optimizer: As in `averaging`: the server's optimizer for theta.
        report: As in `Algorithm`.
    """

    def first_row(key: Key, client: Array) -> Params:
        model = problem.init_model(key, client)
        _, phi = tree.partition(model, shared(model))
        return phi

    def train(context: ClientContext, theta: Params, phi: Params, data: ClientData) -> Trained:
        context, theta = problem.whole(context, theta)
        models = tree.combine(theta, tree.stack_one(phi))
        if phases:
            trained = train_phases(problem, phases, context, models, data.train)
        else:
            trained = problem.fit(context, models, data.train)
        theta, phi = tree.partition(trained.models, shared(models))
        return trained._replace(models=theta, row=tree.first(phi))

    def predict(context: ClientContext, theta: Params, phi: Params, data: ClientData) -> Prediction:
        return Prediction(tree.combine(theta, tree.stack_one(phi)))

    def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
        init_key, train_key = jax.random.split(context.key)
        initial = problem.model.init(init_key)
        _, phi = tree.partition(initial, shared(initial))
        start = tree.combine(tree.first(models), phi)
        epochs = [
            phase.epochs
            for phase in phases
            if phase.epochs and not tree.overlap(phase.part(start), shared(start))
        ]
        personal_part = problem.part(tree.complement(shared(start)))
        personal_part = personal_part.with_epochs(sum(epochs) if epochs else None)
        context = context._replace(key=train_key)
        return Prediction.single(personal_part.train_newcomer(context, data, start=start))

    passes = (
        sum(problem.passes(phase.epochs) for phase in phases) if phases else problem.passes(None)
    )
    if phases:
        epochs = ["as given" if phase.epochs is None else str(phase.epochs) for phase in phases]
        facts = (*report.facts, ("local epochs, phase by phase", ", then ".join(epochs)))
        report = dataclasses.replace(report, facts=facts)
    return averaging(
        problem,
        train=train,
        ledger=Ledger(gradients=1, passes=passes),
        first_row=first_row,
        server_optimizer=server_optimizer,
        shared=shared,
        predict=predict,
        adapt=adapt,
        report=report,
    )


def train_phases(
    problem: Problem,
    phases: Sequence[Phase],
    context: ClientContext,
    models: Params,
    split: Split,
) -> Trained:
    """As `Problem.fit` for a stack of one model (1, ...), training its parts in turn.

    Args:
        problem: The problem of the method.
        phases: The parts, in order.
        context: The client's context; its key and the phase's number determine the mini-batches.
        models: The model, leaves (1, ...), as in `Problem.fit`.
        split: The client's training data.
    """
    params, statistics = problem.split_statistics(context, models)
    start = tree.first(params)
    state = TrainState(start, tree.first(statistics), ())
    lasting_state = context.optimizer
    opt_states = []
    losses = []
    for number, phase in enumerate(phases):
        whole = joined(state.params, state.statistics)
        part = problem.part(phase.part(whole)).with_epochs(phase.epochs)
        phase_opt_state = (
            None
            if lasting_state is None
            else lasting_state._replace(state=lasting_state.state[number])
        )
        own_context = context._replace(optimizer=phase_opt_state)
        opt_state = part.round_optimizers(own_context, tree.stack_one(state.params))
        state = state._replace(opt_state=tree.first(opt_state))

        def objective(
            params: Params, batch: Batch, phase: Phase = phase, solver: Solver = part.solver
        ) -> Array:
            if phase.objective is None:
                return solver.mean_loss(params, batch)
            return phase.objective(solver, params, start, batch)

        key = jax.random.fold_in(jax.random.fold_in(context.key, PHASE), number)
        state, loss = part.solver.fit(key, state, split, objective, round_number=context.round)
        trained = part.trained(context, tree.stack_one(state), loss[None])
        opt_states.append(trained.opt_state)
        losses.append(loss)
    return trained._replace(losses=jnp.stack(losses).mean()[None], opt_state=opt_states)


def base_layers(problem: Problem, personal_layers: int) -> Callable[[Params], PyTree]:
    """The `shared` argument of `sharing_layers` for a number `personal_layers` of personal last layers.

    Raises:
        ArgumentError: if the model has fewer layers.
    """
    num_layers = len(problem.model.layers)
    if personal_layers > num_layers:
        accepted = f"accepted: 0 to {num_layers}, the number of layers"
        raise ArgumentError("personal_layers", accepted, personal_layers)

    def base(params: Params) -> PyTree:
        return tree.complement(problem.model.mask(params, personal_layers))

    return base


def named(
    problem: Problem, personal: str, method: str = "", needs: str = ""
) -> Callable[[Params], PyTree]:
    """A model's parameters -> a tree of bools: which leaves' paths contain a match of a regular expression.

    Raises:
        ArgumentError: if it is no regular expression, or matches no path. This names the hyperparameter `personal`,
            or if given, the `method`, which `needs` layers that the model does not have.
    """
    model = problem.model
    try:
        has_personal = any(jax.tree.leaves(model.named(model.network.shapes, personal)))
    except re.error as error:
        raise ArgumentError("personal", f"is no regular expression: {error}", personal) from None
    if not has_personal:
        paths = ", ".join("/".join(path) for path in model.network.above)
        if method:
            text = (
                f"needs {needs}, whose parameters' paths contain {personal}; this model has {paths}"
            )
            raise ArgumentError("method", text, method)
        raise ArgumentError(
            "personal", f"matches no parameter; accepted: parts of {paths}", personal
        )

    def mask(params: Params) -> PyTree:
        return model.named(params, personal)

    return mask
