"""FFA-LoRA: A keeps its random initial values; clients train and average B.

Sun, Li, Li, Ding, "Improving LoRA in privacy-preserving federated learning" (ICLR 2024).

    A round: client k receives B and trains it to B_k, A fixed; B <- sum_k n_k B_k / sum_k n_k.
    Since A is the same everywhere, A times the mean of B is the mean of the products.

Departures from the paper: Whatever else is trained, such as a head, is trained and averaged with B (the paper freezes
the classifier). A is not counted as traffic, since clients draw it from the seed.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common import low_rank
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import method
from pfljax.contract.types import Algorithm, First, Ledger, Prediction, Start
from pfljax.local.problem import Problem


@method(name="ffa_lora", keeps="nothing", travels="B, both ways")
@dataclasses.dataclass(frozen=True)
class FFALoRA:
    """FFA-LoRA (Sun et al., 2024): A keeps its random initial values; clients train and average B."""

    def build(self, problem: Problem) -> Algorithm:
        low_rank.required(problem, "ffa_lora")
        trained = lambda params: tree.complement(problem.model.named(params, low_rank.A))
        split = lambda models: tree.partition(models, trained(models))
        of_b = problem.part(trained(problem.model.network.shapes))

        def start(key, clients):
            b, a = split(problem.init_models(key, 1))
            return Start(a, b)

        def first_row(key, client, start):
            return First(of_b.kept_optimizers(tree.combine(start.models, start.server)))

        def train(context, models, kept, data):
            models = tree.combine(models, context.server)
            models, kept, losses = of_b.fit(context, models, kept, data.train)
            return split(models)[0], kept, losses

        def predict(context, models, row, data):
            return Prediction(tree.combine(models, context.server))

        functions = {"start": start, "first_row": first_row, "train": train, "predict": predict}
        known = lambda counted: counted._replace(server=0)
        return averaging(problem, **functions, traffic=known, ledger=Ledger(gradients=1))
