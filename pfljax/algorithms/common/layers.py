"""One model of which a server averages a part; each client keeps the rest, and may train parts in phases."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    Ledger,
    Params,
    Prediction,
    PyTree,
    Report,
    Split,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver

PHASE = 0xFA5E  # folded into a client's key for a round: the phases of its training


class Phase(NamedTuple):
    """A phase of local training, with mini-batches and an optimizer of its own.

    Even a single phase draws other mini-batches than training without phases does.

    Attributes:
        part: Parameters of a model or of a stack of models -> a tree of bools: which leaves are trained.
        epochs: Passes over the client's data; None: the solver's epochs or steps.
        objective: (solver, start) -> the value to minimize, a function of (params, mini-batch); None: the mean loss.
            `solver` trains the part, and `start` is the client's model before the round's first phase. For example,
            `lambda solver, start: solver.proximal(start, 0.1)` keeps the part near its start.
    """

    part: Callable[[Params], PyTree]
    epochs: int | None = None
    objective: Callable[[Solver, Params], Callable[[Params, Batch], Array]] | None = None


class PersonalPart(NamedTuple):
    """A client's row: its own part of the model (...), and its optimizer states, if they are kept."""

    own: Params
    optimizer: PyTree


def sharing_layers(
    problem: Problem,
    shared: Callable[[Params], PyTree],
    *,
    phases: Sequence[Phase] = (),
    server: optax.GradientTransformation | None = None,
    report: Report,
) -> Algorithm:
    """An algorithm that averages a part theta of the model; each client keeps the rest, phi_k, and trains both parts.

        A round: client k receives theta, trains (theta, phi_k) on D_k; phi_k stays;
        theta <- sum_k n_k theta_k / sum_k n_k.

    Newcomers minimize the mean loss over their own phi, with theta fixed, for as many rounds as the run has. If some
    phases name their epochs and do not train theta, newcomers train for the epochs of these.

    Args:
        problem: The problem to build the algorithm for.
        shared: A model's parameters -> a tree of bools: which leaves are averaged.
        phases: Parts that are trained in turn; (): all at once, for the solver's epochs or steps.
        server: As in `averaging`: the server's optimizer for theta.
        report: As in `Algorithm`.
    """

    def split(models):
        return tree.partition(models, shared(models))

    def row(key, client, theta):
        models = problem.init_models(key, 1)
        optimizers = [problem.part(phase.part(models)).kept_optimizers(models) for phase in phases]
        optimizer = optimizers or problem.kept_optimizers(models)
        return PersonalPart(split(problem.init_model(key, client))[1], optimizer)

    def train(context, models, row, data):
        models = tree.combine(models, tree.stack_one(row.own))
        models, optimizer, losses = fit_phases(problem, phases, context, models, row.optimizer, data.train)
        theta, phi = split(models)
        return theta, PersonalPart(tree.first(phi), optimizer), losses

    def predict(context, models, row, data):
        return Prediction(tree.combine(models, tree.stack_one(row.own)))

    def adapt(context, models, data):
        init_key, train_key = jax.random.split(context.key)
        start = tree.combine(tree.first(models), split(problem.model.init(init_key))[1])
        own = [each.epochs for each in phases if each.epochs and not tree.overlap(each.part(start), shared(start))]
        own_part = problem.part(tree.complement(shared(start))).with_epochs(sum(own) if own else None)
        trained = own_part.alone(context._replace(key=train_key), start, data, rounds=problem.rounds)
        return Prediction.one(trained)

    ledger = Ledger(gradients=1, passes=sum(problem.passes(phase.epochs) for phase in phases or (Phase(shared),)))
    if phases:
        epochs = ", then ".join("as given" if phase.epochs is None else str(phase.epochs) for phase in phases)
        report = dataclasses.replace(report, facts=(*report.facts, ("local epochs, phase by phase", epochs)))
    functions = {"row": row, "train": train, "predict": predict, "adapt": adapt}
    return averaging(problem, shared=shared, server=server, **functions, ledger=ledger, report=report)


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


def named(problem: Problem, personal: str, method: str = "", needs: str = "") -> Callable[[Params], PyTree]:
    """A model's parameters -> a tree of bools: which leaves' paths contain a match of a regular expression.

    Raises:
        ArgumentError: if it is no regular expression, or matches no path. This names the knob `personal`, or if given,
            the `method`, which `needs` layers that the model does not have.
    """
    model = problem.model
    try:
        found = any(jax.tree.leaves(model.named(model.network.shapes, personal)))
    except re.error as error:
        raise ArgumentError("personal", f"is no regular expression: {error}", personal) from None
    if not found:
        paths = ", ".join("/".join(path) for path in model.network.above)
        if method:
            text = f"needs {needs}, whose parameters' paths contain {personal}; this model has {paths}"
            raise ArgumentError("method", text, method)
        raise ArgumentError("personal", f"matches no parameter; accepted: parts of {paths}", personal)
    return lambda params: model.named(params, personal)


def fit_phases(
    problem: Problem, phases: Sequence[Phase], context: ClientContext, models: Params, kept: list, split: Split
) -> tuple[Params, list, Array]:
    """Like `Problem.fit` for a stack of one model (1, ...), training its parts in turn; without phases, all at once."""
    if not phases:
        return problem.fit(context, models, kept, split)
    start = params = tree.first(models)
    optimizers, losses = [], []
    for number, phase in enumerate(phases):
        part = problem.part(phase.part(params)).with_epochs(phase.epochs)
        solver = part.solver
        optimizer = part.round_optimizer(tree.first(kept[number]) if kept else (), params)
        key = jax.random.fold_in(jax.random.fold_in(context.key, PHASE), number)
        objective = phase.objective(solver, start) if phase.objective else None
        params, optimizer, loss = solver.fit(
            key, params, optimizer, split, round_number=context.round, objective=objective
        )
        optimizers.append(tree.stack_one(part.kept_optimizer(optimizer, params)))
        losses.append(loss)
    return tree.stack_one(params), optimizers, jnp.stack(losses).mean()[None]
