"""FedNova: normalized averaging, which corrects for clients that take different numbers of local steps.

Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in heterogeneous federated optimization"
(NeurIPS 2020).

    A round: client k of S receives theta and takes tau_k local steps to theta_k;
    d_k <- (theta - theta_k) / a_k, where a_k normalizes its path: tau_k for plain SGD, the sum over its steps s of
        (1 - rho^s) / (1 - rho) with momentum rho, the sum of (1 - eta mu)^(tau_k - s) with a proximal term;
    theta <- theta - (sum_k p_k a_k) (sum_k p_k d_k),  p_k = n_k / sum_k n_k.

With the solver's epochs, clients with more examples take more steps. With `max_epochs`, clients also draw their number
of epochs anew in every round (the paper: 2 to 5). The solver's optimizer may have momentum.

Departures from the paper: a_k is measured: it is the distance that the client's freshly started optimizer moves one
parameter under a constant gradient of 1. This is the paper's a_k times eta, which cancels, and it is defined for any
optimizer. With a proximal term, the server's step is sum_k p_k a_k, while the authors use sum_k p_k tau_k. The term's
gradient is part of what the optimizer sees, so it enters the momentum, and a_k is measured with it. The authors' code
adds it to the step after the momentum. Without momentum, both are the same. Batch statistics are averaged. The server
has no momentum.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Ledger,
    Params,
    PyTree,
    Trained,
)
from pfljax.local import lasting
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem, SlopeFunction
from pfljax.local.solver import Slope
from pfljax.settings.method import hyperparameter, method

EPOCHS = 0xE90C  # folded into a client's key for a round to draw its number of epochs


@method(keeps="nothing", travels="the global model down, its mean local step up")
@dataclasses.dataclass(frozen=True)
class FedNova:
    """FedNova (Wang et al., 2020): normalized averaging, whatever number of local steps each client takes.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedNova(max_epochs=5)
        FedNova(mu=0.0, max_epochs=5, min_epochs=2)
    """

    mu: float = hyperparameter(
        0.0,
        at_least=0,
        grid=(0.0, 0.001, 0.005, 0.01),
        help="weight of the proximal term; 0: none",
    )
    max_epochs: int | None = hyperparameter(
        None,
        at_least=1,
        at_most=1_000_000,
        help="each client draws its number of epochs, at most this. Default: the solver's epochs",
        former="most_epochs",
    )
    min_epochs: int = hyperparameter(
        2,
        at_least=1,
        help="smallest number of epochs drawn if max_epochs is given",
        former="least_epochs",
    )

    def build(self, problem: Problem) -> Algorithm:
        passes = problem.passes(self.max_epochs) if self.max_epochs else 1
        if self.max_epochs is not None:
            if self.max_epochs < self.min_epochs:
                text = f"accepted: 1 to {self.max_epochs} (max_epochs)"
                raise ArgumentError("min_epochs", text, self.min_epochs)
            problem = problem.with_epochs(self.max_epochs)
        check_optimizer(problem)
        solver = problem.solver

        def draw_num_steps(context: ClientContext, size: Array) -> Array:
            """tau_k."""
            if self.max_epochs is None:
                return solver.num_steps(size, problem.n_max)
            key = jax.random.fold_in(context.key, EPOCHS)
            epochs = jax.random.randint(key, (), self.min_epochs, self.max_epochs + 1)
            return solver.with_epochs(1).num_steps(size, problem.n_max) * epochs

        def path_length(context: ClientContext, models: Params, num_steps: Array) -> Array:
            """a_k: how far a parameter moves from 0 under a gradient of -1 and the proximal term toward 0."""
            # The optimizer begins with what goes on of the client's, such as a schedule's count.
            model_opt_state = tree.first(problem.round_optimizers(context, models))
            lasting_state = solver.lasting(model_opt_state, tree.first(models))
            position = jnp.zeros(())
            opt_state = solver.resumed(position, lasting_state)

            def step(number: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                position, opt_state = carry
                gradient = self.mu * position - 1
                update, opt_state = solver.optimizer.update(
                    gradient, opt_state, position, round_number=context.round
                )
                return optax.apply_updates(position, update), opt_state

            position, _ = jax.lax.fori_loop(0, num_steps, step, (position, opt_state))
            return position

        def direction(
            slope_at: SlopeFunction, params: Params, memory: PyTree
        ) -> tuple[Slope, PyTree]:
            return slope_at(params), memory

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            global_params = tree.first(models)

            def objective(params: Params, batch: Batch) -> Array:
                """l_k(theta_k) + mu / 2 |theta_k - theta|^2."""
                distance = solver.squared_distance(params, global_params)
                return solver.mean_loss(params, batch) + self.mu / 2 * distance

            # tau_k local steps
            num_steps = draw_num_steps(context, data.train.size)
            trained, _ = problem.descend(
                context, models, data.train, direction, objective=objective, num_steps=num_steps
            )

            # -d_k = (theta_k - theta) / a_k
            length = path_length(context, models, num_steps)
            update = tree.subtract(trained.models, models)
            update = tree.scale(update, 1 / jnp.where(length > 0, length, 1))
            return trained._replace(models=update, sums={"length": data.train.size * length})

        def server_step(received: Received, server: PyTree) -> ServerStep:
            # theta <- theta - (sum_k p_k a_k) (sum_k p_k d_k)
            total = jnp.where(received.weight > 0, received.weight, 1)
            length = received.sums["length"] / total
            return ServerStep(tree.scale(received.update, length))

        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1, passes=passes),
            server_step=server_step,
            uploads="updates",
        )


def check_optimizer(problem: Problem) -> None:
    """Raises `ArgumentError` if the optimizer keeps more of a model over rounds than of a scalar."""
    optimizer = problem.solver.optimizer
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    model_marks = sum(lasting.marks(optimizer, problem.model.network.shapes))
    scalar_marks = sum(lasting.marks(optimizer, scalar))
    if model_marks != scalar_marks:
        text = "accumulates gradients over rounds, for which a_k is not defined"
        raise ArgumentError("optimizer", f"{text}; accepted: one without MultiSteps")
