"""FedNova: normalized averaging, which corrects for clients that take different numbers of local steps.

Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in heterogeneous federated optimization"
(NeurIPS 2020).

    A round: client k of S receives theta and takes tau_k local steps to theta_k;
    d_k <- (theta - theta_k) / a_k, where a_k normalizes its path: tau_k for plain SGD, the sum over its steps s of
        (1 - rho^s) / (1 - rho) with momentum rho, the sum of (1 - eta mu)^(tau_k - s) with a proximal term;
    theta <- theta - (sum_k p_k a_k) (sum_k p_k d_k),  p_k = n_k / sum_k n_k.

With the solver's epochs, clients with more examples take more steps. With `most_epochs`, clients also draw their number
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

from pfljax.algorithms.common import aggregation, updates
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientContext, ClientOutput, Ledger
from pfljax.local import lasting
from pfljax.local.problem import Problem

EPOCHS = 0xE90C  # folded into a client's key for a round to draw its number of epochs


@method(keeps="nothing", travels="the global model down, its mean local step up")
@dataclasses.dataclass(frozen=True)
class FedNova:
    """FedNova (Wang et al., 2020): normalized averaging, whatever number of local steps each client takes."""

    mu: float = knob(0.0, at_least=0, grid=(0.0, 0.001, 0.005, 0.01), help="strength of the proximal term; 0: none")
    most_epochs: int | None = knob(
        None, at_least=1, help="each client draws its number of epochs, at most this; not given: the solver's epochs"
    )
    least_epochs: int = knob(2, at_least=1, help="smallest number of epochs drawn if most_epochs is given")

    def build(self, problem: Problem) -> Algorithm:
        ledger = Ledger(gradients=1, passes=problem.passes(self.most_epochs) if self.most_epochs else 1)
        if self.most_epochs is not None:
            if self.most_epochs < self.least_epochs:
                text = f"accepted: 1 to {self.most_epochs} (most_epochs)"
                raise ArgumentError("least_epochs", text, self.least_epochs)
            problem = problem.with_epochs(self.most_epochs)
        solver, n_max = problem.solver, problem.n_max
        shapes = problem.model.network.shapes
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        if sum(lasting.marks(solver.optimizer, shapes)) != sum(lasting.marks(solver.optimizer, scalar)):
            text = "accumulates gradients over rounds, for which a_k is not defined; accepted: one without MultiSteps"
            raise ArgumentError("optimizer", text)

        def steps_of(context: ClientContext, size: Array) -> Array:
            """tau_k."""
            if self.most_epochs is None:
                return solver.num_steps(size, n_max)
            key = jax.random.fold_in(context.key, EPOCHS)
            epochs = jax.random.randint(key, (), self.least_epochs, self.most_epochs + 1)
            return solver.with_epochs(1).num_steps(size, n_max) * epochs

        def way(context: ClientContext, counts: tuple, steps: Array) -> Array:
            """a_k: how far a parameter moves from 0 under a gradient of -1 and the proximal term toward 0.

            `counts` is what goes on of the client's optimizer, such as the count of steps of its schedule.
            """

            def step(_, carry):
                place, state = carry
                moved, state = solver.optimizer.update(self.mu * place - 1, state, place, round_number=context.round)
                return optax.apply_updates(place, moved), state

            start = jnp.zeros(())
            return jax.lax.fori_loop(0, steps, step, (start, solver.resumed(start, counts)))[0]

        def client_update(context, models, kept, data):
            steps, theta = steps_of(context, data.train.size), tree.first(models)
            of_batch = jax.value_and_grad(solver.proximal(theta, self.mu))
            gradient = lambda params, memory, batch: (*of_batch(params, batch(0).of_model(0)), memory)
            earlier = tree.first(kept)
            counts = solver.lasting(earlier, theta) if problem.keep_optimizer else earlier
            trained, kept, losses, _ = problem.descend(context, models, kept, data.train, gradient, steps=steps)
            length = way(context, counts, steps)
            update = updates.added(solver, models, trained)
            update = updates.scaled(solver, update, 1 / jnp.where(length > 0, length, 1))  # -d_k
            upload, sent = aggregation.weighted(update, data.train.size)
            upload["way"] = upload["weight"] * length
            return ClientOutput(kept, upload, {"loss": losses[0]}, sent)

        def server_update(key, state, aggregate):
            weight = aggregate.upload["weight"]
            length = aggregate.upload["way"] / jnp.where(weight > 0, weight, 1)  # sum_k p_k a_k
            update = updates.scaled(solver, aggregation.mean(aggregate), length)
            return state._replace(models=updates.moved(solver, state.models, update, weight > 0)), {}

        functions = {"client_update": client_update, "server_update": server_update, "averages": True}
        return averaging(problem, **functions, ledger=ledger)
