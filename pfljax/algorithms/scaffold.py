"""SCAFFOLD: local steps corrected by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for federated learning" (ICML
2020, Algorithm 1).

    A round: client k of S receives x and c; local steps y <- y - eta (g(y) - c_k + c) from y = x;
    c_k+ <- grad f_k(x)  (option I),  or c_k - c + (x - y) / (steps eta), the mean of the g(y) on the way  (option II);
    x <- x + rate (sum_k n_k y_k / sum_k n_k - x);  c <- c + sum_k n_k (c_k+ - c_k) / sum_{all} n_k.

Departures from the paper: Both means are weighted by n_k, as everywhere here, so that SCAFFOLD minimizes the weighted
objective (`mean=uniform` is the paper's). Option II's c_k+ is computed as that mean of gradients, which is the same for
plain SGD and is defined for any optimizer. Batch statistics have no control variate and are averaged, whatever eta_g.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, updates
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Ledger, Params, PyTree
from pfljax.local.problem import Problem


class Server(NamedTuple):
    """c, and the weight () of all clients together."""

    control: Params
    total: Array


class Row(NamedTuple):
    """The client's c_k, and its optimizer, if it is kept."""

    control: Params
    optimizer: PyTree


@method(keeps="its control variate", travels="the global model and control variate, both ways")
@dataclasses.dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD (Karimireddy et al., 2020): local steps corrected by control variates."""

    correction: float = knob(1.0, at_least=0, help="factor of the correction c - c_k in each step; 0 is FedAvg")
    rate: float = knob(1.0, above=0, help="eta_g, learning rate of the server")
    option: Literal["I", "II"] = knob(
        "II", help="c_k+: the gradient at x over all of a client's examples (I), or its steps' mean gradient (II)"
    )
    mean: Literal["weighted", "uniform"] = knob("weighted", help="weight clients by n_k or equally")

    def build(self, problem: Problem) -> Algorithm:
        first = self.option == "I"
        weigh = lambda size: updates.weight_of(size, self.mean)
        of_batch = jax.value_and_grad(lambda params, batch: problem.solver.mean_loss(params, batch))

        zeros = lambda models: jax.tree.map(jnp.zeros_like, tree.first(models))
        # Batch statistics have no gradient: no control variate moves them, and the server averages them.
        slopes = lambda found: tree.combine(problem.solver.trained(found)[0], jax.tree.map(jnp.zeros_like, found))
        ledger = Ledger(
            gradients=1,
            passes=1 + problem.passes(1) if first else 1,
            unaccounted="the full-data gradients, which are sent without noise" if first else "",
        )
        row = lambda key, client, models: Row(zeros(models), problem.kept_optimizers(models))

        def beside(models, clients):
            total = jnp.maximum(weigh(clients.train.size).sum(), 1)
            return Server(zeros(models), total)

        def client_update(context, models, row, data):
            c = context.server.control
            correction = tree.scale(tree.subtract(c, row.control), self.correction)

            def corrected(y, memory, batch):
                total, steps = memory
                loss, slope = of_batch(y, batch(0).of_model(0))
                return loss, tree.add(slope, correction), (tree.add(total, slope), steps + 1)

            memory = jax.tree.map(jnp.zeros_like, c), jnp.zeros(())
            y, optimizer, losses, (total, steps) = problem.descend(
                context, models, row.optimizer, data.train, corrected, memory
            )
            new = tree.scale(total, 1 / jnp.maximum(steps, 1))
            if first:
                _, new = problem.solver.loss_and_gradient(tree.first(models), data.train)
            control = jax.tree.map(lambda new, old: jnp.where(steps > 0, new, old), slopes(new), row.control)
            upload, sent = aggregation.weighted(tree.subtract(y, models), weigh(data.train.size))
            upload["control"] = tree.scale(tree.stack_one(tree.subtract(control, row.control)), upload["weight"])
            return ClientOutput(Row(control, optimizer), upload, {"loss": losses[0]}, sent)

        def server_update(key, state, aggregate):
            x, (c, total), solver = state.models, state.server, problem.solver
            step = updates.scaled(solver, aggregation.mean(aggregate), self.rate)
            c = tree.add(c, tree.scale(tree.first(aggregate.upload["control"]), 1 / total))
            return state._replace(models=tree.add(x, step), server=Server(c, total)), {}

        functions = {"client_update": client_update, "server_update": server_update}
        return averaging(problem, row=row, beside=beside, **functions, ledger=ledger, changes=("control",))
