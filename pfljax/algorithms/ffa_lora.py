"""FFA-LoRA: A keeps its random initial values; clients train and average B.

Sun, Li, Li, Ding, "Improving LoRA in privacy-preserving federated learning" (ICLR 2024).

    A round: client k receives B and trains it to B_k, A fixed; B <- sum_k n_k B_k / sum_k n_k.
    Since A is the same everywhere, A times the mean of B is the mean of the products.

Departures from the paper: Whatever else is trained, such as a head, is trained and averaged with B
(the paper freezes the classifier). A is not counted as traffic, since clients draw it from the
seed.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common import low_rank
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Params,
    Prediction,
    PyTree,
    Traffic,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import method


@method(name="ffa_lora", keeps="nothing", travels="B, both ways")
@dataclasses.dataclass(frozen=True)
class FFALoRA:
    """FFA-LoRA (Sun et al., 2024): A keeps its random initial values; clients train and average B.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FFALoRA()
        FFALoRA()
    """

    def build(self, problem: Problem) -> Algorithm:
        low_rank.required(problem, "ffa_lora")

        def is_trained(params: Params) -> PyTree:
            """Whether a leaf is part of B, or of whatever else is trained."""
            return tree.complement(problem.model.named(params, low_rank.A))

        b_problem = problem.part(is_trained(problem.model.network.shapes))

        def first_server(key: Key, params: Params, clients: ClientData) -> Params:
            """A (1, ...). The server's state is A."""
            model = problem.init_global(key)
            _, a = tree.partition(model, is_trained(model))
            return tree.stack_one(a)

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            # B_k, A fixed
            models = tree.combine(models, context.server)
            trained = b_problem.fit(context, models, data.train)
            b, _ = tree.partition(trained.models, is_trained(trained.models))
            return trained._replace(models=b)

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            return Prediction(tree.combine(models, context.server))

        def traffic(counted: Traffic) -> Traffic:
            """Clients draw A from the seed."""
            return counted._replace(server=0)

        return averaging(
            problem,
            shared=is_trained,
            train=train,
            ledger=Ledger(gradients=1),
            first_server=first_server,
            predict=predict,
            traffic=traffic,
        )
