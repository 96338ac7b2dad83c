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
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    First,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Params,
    Prediction,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.problem import Personal, Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="its model", travels="the head down, mean features per class up")
@dataclasses.dataclass(frozen=True)
class FedGH:
    """FedGH (Yi et al., 2023): clients keep their bodies, and a server trains a head on their mean features.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedGH(server_steps=50, predict="own")
        FedGH(server_steps=50, predict='own')
    """

    server_steps: int = hyperparameter(
        10, at_least=0, help="number of the server's steps per round"
    )
    predict: Literal["global", "own"] = hyperparameter(
        "global", help="predict with the global head, or with the head as the client has trained it"
    )

    def build(self, problem: Problem) -> Algorithm:
        num_classes = classes.required(problem, "fedgh", per_position=False)

        def with_head(head: Params, model: Params) -> Params:
            """The model's body under another head, of leaves (...)."""
            return tree.combine(head, model)

        # ---- The client.

        def first_row(key: Key, client: Array, start: Start) -> First:
            return First(row=problem.init_personal(key, client))

        def client_update(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> ClientOutput:
            # theta_k and phi, trained together.
            model = with_head(tree.first(models), personal.params)
            personal = personal._replace(params=model)
            personal, loss = problem.fit_personal(context, personal, data.train)
            # z_kc, under the new theta_k.
            totals = classes.feature_sums(problem, personal.params, data.train, num_classes)
            means = classes.means(totals.sums, totals.counts)
            return ClientOutput(
                row=personal,
                upload=Upload(),
                report=ClientReport(loss, entries={"means": means, "known": totals.counts > 0}),
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            """The global head phi and its optimizer, leaves (1, ...)."""
            head = heads.head_of(problem, problem.init_global(key))
            opt_state = problem.solver.begin(head).opt_state
            return Start(models=tree.stack_one(head), opt_state=tree.stack_one(opt_state))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # phi <- steps from phi on the mean of CE(h(z_kc; phi), c) over all pairs (k, c) that were sent
            means = aggregate.report.entries["means"]
            known = aggregate.report.entries["known"]
            num_clients, _, num_features = means.shape
            pairs = heads.LabeledFeatures(
                features=means.reshape(-1, num_features),
                labels=jnp.tile(jnp.arange(num_classes), num_clients),
                real=known.reshape(-1),
            )
            head, opt_state = heads.fit(
                problem,
                tree.first(state.models),
                tree.first(state.opt_state),
                pairs,
                self.server_steps,
                state.round,
            )
            return state.with_models(tree.stack_one(head), tree.stack_one(opt_state)), {}

        # ---- What a client predicts with: theta_k and phi, or its own head.

        def scored(models: Params, personal_model: Params) -> Params:
            return (
                personal_model
                if self.predict == "own"
                else with_head(tree.first(models), personal_model)
            )

        def predict(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Prediction:
            return Prediction.single(scored(models, personal.params))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train alone, from an initial body and phi."""
            init_key, train_key = jax.random.split(context.key)
            model = with_head(tree.first(models), problem.model.init(init_key))
            context = context._replace(key=train_key)
            personal_model = problem.train_newcomer(context, data, start=model)
            return Prediction.single(scored(models, personal_model))

        head_of_whom = "its own" if self.predict == "own" else "the global"
        return Algorithm(
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            adapt=adapt,
            topology=Topology.SHARED,
            sends="sums",
            ledger=Ledger(
                gradients=1, unaccounted="the per-class mean features, sent without noise"
            ),
            report=MethodReport(scored=f"each client's own body with {head_of_whom} head"),
        )
