"""PerAda: personal adapters near a global one, which a server distills from the adapters of all clients.

Xie, Huang, Chu, Xu, Xiao, Li, Anandkumar, "PerAda: parameter-efficient federated learning personalization with
generalization guarantees" (CVPR 2024, Algorithm 1).

    Adapters are what is trained beside a frozen network; without one, they are the whole network.
    A round: client k receives w and takes steps in its own v_k on l_k(v_k) + lambda / 2 |v_k - w|^2, w as received,
    and in w on l_k(w), to w_k;  w <- sum_k n_k w_k / sum_k n_k;
    then w takes steps on the mean of KL(softmax(sum_k n_k f(x; w_k) / sum_k n_k) || softmax(f(x; w))) over the
    server's unlabeled examples x.  Client k predicts with v_k.

Departures from the paper: The server's examples are a share of all clients' inputs, where the paper takes another data
set; they do not travel. Means are weighted by n_k. Each of the server's steps, of Adam with a cosine schedule, takes
all of these examples, in every round; the authors' code takes 500 steps in early rounds only, keeps the best by
validation, or the plain mean, and has lambda for lambda / 2. Compression and attacks change logits as other uploads.
Newcomers train a model from w, regularized toward it, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import classes, distillation
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Metrics,
    Params,
    Prediction,
    PyTree,
    State,
    Traffic,
    Trained,
)
from pfljax.local.batches import Batch, sampled
from pfljax.local.problem import Objective, Personal, Problem
from pfljax.local.solver import joined
from pfljax.settings.method import hyperparameter, method


class Unlabeled(NamedTuple):
    """The server's examples.

    Attributes:
        x: Inputs (n, *features), padded.
        size: () int32, number of real examples.
    """

    x: PyTree
    size: Array


@method(
    keeps="its model",
    travels="the global model, both ways",
    knows="unlabeled examples at the server",
)
@dataclasses.dataclass(frozen=True)
class PerAda:
    """PerAda (Xie et al., 2024): personal adapters near a global one, which a server distills from all clients'.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.PerAda(mu=0.1)
        PerAda(mu=0.1, share=0.05, server_steps=20, server_learning_rate=0.001)
    """

    mu: float = hyperparameter(
        1.0,
        at_least=0,
        grid=(0.01, 0.1, 1.0),
        help="lambda, pull to the global adapters; 0: Local",
        former="strength",
    )
    share: float = hyperparameter(
        0.05,
        at_least=0,
        at_most=1,
        static=True,
        grid=(0.025, 0.05, 0.1),
        help="share of all inputs that the server has; 0: Ditto",
    )
    server_steps: int = hyperparameter(
        20,
        at_least=1,
        grid=(20, 100),
        help="number of the server's steps per round",
        former="steps",
    )
    server_learning_rate: float = hyperparameter(
        0.001, at_least=0, grid=(0.001, 0.01), help="the server's learning rate", former="rate"
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver
        num_classes = classes.required(problem, "perada", per_position=False)
        num_examples = math.ceil(self.share * problem.num_clients * problem.n_max)
        capacity = max(num_examples, 1)

        def near(global_model: Params) -> Objective:
            """l_k(v_k) + lambda / 2 |v_k - w|^2, with dropout and noise of v_k's own."""

            def objective(params: Params, batch: Batch) -> Array:
                distance = solver.squared_distance(params, global_model)
                mean_loss = solver.mean_loss(params, batch.for_model(1))
                return mean_loss + self.mu / 2 * distance

            return objective

        # ---- The client.

        def first_row(key: Key, client: Array) -> Personal:
            """v_k. A client's row is its model."""
            return problem.init_personal(key, client)

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            # w, on l_k(w), to w_k.
            trained = problem.fit(context, models, data.train)
            # v_k, toward w as received.
            objective = near(tree.first(models))
            personal, loss = problem.fit_personal(context, personal, data.train, objective)
            trained = trained._replace(row=personal, losses=loss[None])

            # n_k f(x; w_k) for the server's x.
            if not self.share:
                return trained
            whole = tree.first(joined(trained.models, trained.statistics))
            logits = data.train.size * model.apply(whole, context.server.x)
            return trained._replace(sums={"logits": logits})

        # ---- What a client predicts with: v_k.

        def own_model(personal: Personal) -> Params:
            return personal.params

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train a model from w, regularized toward it."""
            global_model = tree.first(models)
            params = problem.train_newcomer(context, data, near(global_model), start=global_model)
            return Prediction.single(params)

        # ---- The server.

        def first_server(key: Key, params: Params, clients: ClientData) -> Unlabeled:
            """A share of all clients' inputs."""
            draw_key = jax.random.fold_in(key, problem.num_clients)
            size = jnp.rint(self.share * clients.train.size.sum())
            examples = sampled(draw_key, clients.train, capacity, size)
            return Unlabeled(examples.x, examples.size)

        def traffic(counted: Traffic) -> Traffic:
            """The server has its examples, and computes the logits of what it receives."""
            logits_bytes = 4 * capacity * num_classes if self.share else 0
            return counted._replace(server=0, upload=counted.upload - logits_bytes)

        if self.share:
            ledger = Ledger(gradients=0, unaccounted="the server's examples")
        else:
            ledger = Ledger(gradients=2)
        algorithm = averaging(
            problem,
            train=train,
            ledger=ledger,
            first_row=first_row,
            first_server=first_server,
            own_model=own_model,
            adapt=adapt,
            traffic=traffic,
        )
        if not self.share:
            return algorithm

        schedule = optax.cosine_decay_schedule(self.server_learning_rate, self.server_steps)
        optimizer = optax.adam(schedule)

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # w <- sum_k n_k w_k / sum_k n_k
            state, metrics = algorithm.server_update(key, state, aggregate)

            # The teacher's logits, sum_k n_k f(x; w_k) / sum_k n_k.
            upload = aggregate.upload
            assert upload.weight is not None
            weight = upload.weight[0]
            teacher = upload.sums["logits"][0] / jnp.maximum(weight, 1)

            # Then w takes steps on the KL; none if nobody sent logits.
            unlabeled: Unlabeled = state.server.state
            is_real = (jnp.arange(capacity) < unlabeled.size) & (weight > 0)
            global_model = tree.first(state.models)
            distilled = distill(
                problem, global_model, optimizer, unlabeled.x, teacher, is_real, self.server_steps
            )
            return state.with_models(tree.stack_one(distilled)), metrics

        return dataclasses.replace(algorithm, server_update=server_update)


def distill(
    problem: Problem,
    model: Params,
    optimizer: optax.GradientTransformation,
    x: PyTree,
    teacher: Array,
    is_real: Array,
    num_steps: int,
) -> Params:
    """The model after steps on the mean KL(teacher's || its own prediction), each on all examples.

    Batch statistics stay.

    Args:
        problem: The problem of the method.
        model: The model.
        optimizer: Its optimizer, which begins anew.
        x: Inputs (n, *features).
        teacher: The teacher's logits (n, C).
        is_real: (n,) bool, which examples are real.
        num_steps: Number of steps.
    """
    start, statistics = problem.solver.without_statistics(model)
    no_classes = jnp.zeros(len(is_real), int)  # an example has one prediction, so none is read

    def loss(params: Params) -> Array:
        logits = problem.model.apply(joined(params, statistics), x)
        divergences = distillation.divergence(problem, teacher, logits, no_classes)
        return jnp.where(is_real, divergences, 0).sum() / jnp.maximum(is_real.sum(), 1)

    def step(_: Array, carry: tuple[Params, PyTree]) -> tuple[Params, PyTree]:
        params, opt_state = carry
        gradient = jax.grad(loss)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    carry = (start, optimizer.init(start))
    params, _ = jax.lax.fori_loop(0, num_steps, step, carry)
    return joined(params, statistics)
