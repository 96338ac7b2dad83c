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

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import aggregation, beside, classes, distillation
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, ClientOutput, Ledger, Prediction, Start
from pfljax.local.batches import sampled
from pfljax.local.problem import Problem


@method(keeps="its model", travels="the global model, both ways", knows="unlabeled examples at the server")
@dataclasses.dataclass(frozen=True)
class PerAda:
    """PerAda (Xie et al., 2024): personal adapters near a global one, which a server distills from all clients'."""

    strength: float = knob(1.0, at_least=0, grid=(0.01, 0.1, 1.0), help="lambda, pull to the global adapters; 0: Local")
    share: float = knob(
        0.05, at_least=0, at_most=1, static=True, grid=(0.025, 0.05, 0.1), help="the server's of all inputs; 0: Ditto"
    )
    steps: int = knob(20, at_least=1, grid=(20, 100), help="number of the server's steps per round")
    rate: float = knob(0.001, at_least=0, grid=(0.001, 0.01), help="the server's learning rate")

    def build(self, problem: Problem) -> Algorithm:
        outputs = classes.required(problem, "perada", places=False)
        capacity = max(math.ceil(self.share * problem.num_clients * problem.n_max), 1)
        num_logits = 4 * capacity * outputs if self.share else 0  # bytes
        near = lambda w: lambda v, batch: problem.solver.proximal(tree.first(w), self.strength)(v, batch.of_model(1))
        descent = optax.adam(optax.cosine_decay_schedule(self.rate, self.steps))

        def start(key, clients):
            draw_key = jax.random.fold_in(key, problem.num_clients)
            found = sampled(draw_key, clients.train, capacity, jnp.rint(self.share * clients.train.size.sum()))
            return Start((found.x, found.size), problem.init_models(key, 1))

        def client_update(context, models, row, data):
            trained, optimizer, _ = problem.fit(context, models, row.optimizer, data.train)
            own, loss = row.own.fit(problem, context, data.train, near(models))
            upload, sent = aggregation.weighted(tree.subtract(trained, models), data.train.size)
            if self.share:
                logits = data.train.size * problem.model.apply(tree.first(trained), context.server[0])
                upload |= {"logits": logits[None]}
            return ClientOutput(beside.Row(own, optimizer), upload, {"loss": loss}, sent)

        def server_update(key, state, aggregate):
            models = aggregation.average(state.models, aggregate)
            if not self.share:
                return state._replace(models=models), {}
            weight, (x, size) = aggregate.upload["weight"][0], state.server
            teacher = aggregate.upload["logits"][0] / jnp.maximum(weight, 1)
            real = (jnp.arange(capacity) < size) & (weight > 0)
            distilled = distillation.fit(problem, tree.first(models), descent, (x, teacher, real), self.steps)
            return state._replace(models=tree.stack_one(distilled)), {}

        def adapt(context, models, data):
            own = problem.alone(context, tree.first(models), data, rounds=problem.rounds, objective=near(models))
            return Prediction.one(own)

        functions = {"start": start, "client_update": client_update, "server_update": server_update, "adapt": adapt}
        return averaging(
            problem,
            **functions,
            row=beside.first_row(problem),
            own=lambda row: row.own.model,
            # The server has its examples, and computes the logits of what it receives.
            traffic=lambda counted: counted._replace(server=0, upload=counted.upload - num_logits),
            ledger=Ledger(gradients=0, unaccounted="the server's examples") if self.share else Ledger(gradients=2),
        )
