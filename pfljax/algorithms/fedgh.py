"""FedGH: clients keep their bodies, and a server trains a head for all on their class means of features.

Yi, Wang, Liu, Shi, Yu, "FedGH: heterogeneous federated learning with generalized global header" (ACM MM 2023).

    A round: client k replaces its head by the global head phi and takes local steps in both, from its own body theta_k;
    it sends, for each class c that it has, the mean z_kc of its examples' features under the new theta_k;
    phi <- steps from phi on the mean of CE(h(z_kc; phi), c) over all pairs (k, c) that were sent.
    Client k predicts with theta_k and phi.

Departures from the paper: The authors' code scores each client's own head after its local training, before the server's
steps (`predict=own`). Each step of the server takes all pairs, not a mini-batch of them, and uses the clients'
optimizer. All clients' models have the same architecture, and start from the same parameters unless told otherwise.
Features are inference features. Newcomers train alone, from an initial body and phi, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes, heads
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, ClientOutput, First, Ledger, Prediction, Report, Start
from pfljax.local.problem import Problem


@method(keeps="its model", travels="the head down, mean features per class up")
@dataclasses.dataclass(frozen=True)
class FedGH:
    """FedGH (Yi et al., 2023): clients keep their bodies, and a server trains a head on their mean features."""

    server_steps: int = knob(10, at_least=0, help="number of the server's steps per round")
    predict: Literal["global", "own"] = knob(
        "global", help="predict with the global head, or with the head as the client has trained it"
    )

    def build(self, problem: Problem) -> Algorithm:
        num_classes = classes.required(problem, "fedgh", places=False)
        with_head = lambda models, own: tree.combine(tree.first(models), own)
        scored = (lambda models, own: own) if self.predict == "own" else with_head

        def start(key, clients):
            head = heads.head_of(problem, problem.init_models(key, 1))
            return Start(models=head, optimizer=problem.init_optimizers(head))

        def client_update(context, models, row, data):
            row, loss = row._replace(model=with_head(models, row.model)).fit(problem, context, data.train)
            found = classes.feature_sums(problem, row.model, data.train, num_classes)
            means = classes.means(found["sums"], found["counts"])
            return ClientOutput(row, (), {"loss": loss, "means": means, "known": found["counts"] > 0})

        def server_update(key, state, aggregate):
            means, known = aggregate.report["means"], aggregate.report["known"].reshape(-1)
            labels = jnp.tile(jnp.arange(num_classes), means.shape[0])
            examples = means.reshape(len(labels), -1), labels, known
            head, optimizer = tree.first((state.models, state.optimizer))
            head, optimizer = heads.fit(problem, head, optimizer, examples, self.server_steps, state.round)
            models, optimizer = tree.stack_one((head, optimizer))
            return state._replace(models=models, optimizer=optimizer), {}

        def adapt(context, models, data):
            init_key, train_key = jax.random.split(context.key)
            begun, context = with_head(models, problem.model.init(init_key)), context._replace(key=train_key)
            return Prediction.one(scored(models, problem.alone(context, begun, data, rounds=problem.rounds)))

        return Algorithm(
            start=start,
            first_row=lambda key, client, start: First(problem.own_model(key, client)),
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: Prediction.one(scored(models, row.model)),
            adapt=adapt,
            topology="shared",
            sends="sums",
            ledger=Ledger(gradients=1, unaccounted="the per-class mean features, sent without noise"),
            report=Report(f"each client's own body with {'its own' if self.predict == 'own' else 'the global'} head"),
        )
