"""FlexLoRA: clients with adapters of different ranks; the server averages products and decomposes the mean.

Bai, Chen, Qian, Yao, Li, "Federated fine-tuning of large language models under heterogeneous tasks and client
resources" (NeurIPS 2024, Algorithm 1).

    A round: client k receives A and B cut to its rank r_k and trains them to A_k, B_k;
    W <- sum_k n_k A_k B_k / sum_k n_k; A, B <- the truncated singular value decomposition of W, so that the first r
    columns of A and rows of B are its best approximation of rank r.

Departures from the paper: The singular values are in A. Clients get the ranks in `ranks` in turn, by number (the paper
draws them from distributions over resources). Until W has as many singular values above 0 as a client's rank, its
other directions are the decomposition's arbitrary ones. Whatever else is trained, such as a head, is averaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from pfljax.algorithms.common import low_rank
from pfljax.algorithms.common.aggregation import weighted
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, ClientOutput, Ledger, Prediction, Report
from pfljax.local.problem import Problem


@method(name="flexlora", keeps="nothing", travels="A and B cut to a client's rank, both ways")
@dataclasses.dataclass(frozen=True)
class FlexLoRA:
    """FlexLoRA (Bai et al., 2024): clients with adapters of different ranks."""

    ranks: Sequence[int] = knob(
        (), empty=True, help="ranks that clients have in turn; none: the adapters' rank, and half of it"
    )

    def build(self, problem: Problem) -> Algorithm:
        largest = low_rank.required(problem, "flexlora")
        ranks = np.array(self.ranks or (largest, max(1, largest // 2)), np.int32)
        if ranks.min() < 1 or ranks.max() > largest:
            raise ArgumentError("ranks", f"accepted: ranks from 1 to {largest}, that of the adapters", self.ranks)
        of_client = lambda context: jnp.asarray(ranks)[context.client % len(ranks)]
        network = problem.model.network

        def cut(params, rank):
            keep = lambda a: jnp.arange(a.shape[-1]) < rank
            found = {
                path: pair._replace(a=pair.a * keep(pair.a), b=pair.b * keep(pair.a)[:, None])
                for path, pair in network.factors(params).items()
            }
            return network.with_factors(params, found)

        def client_update(context, models, kept, data):
            start = tree.stack_one(cut(tree.first(models), of_client(context)))
            trained, kept, losses = problem.fit(context, start, kept, data.train)
            upload, sent = weighted(low_rank.sent(problem, trained), data.train.size)
            return ClientOutput(kept, upload, {"loss": losses[0]}, sent)

        def server_update(key, state, aggregate):
            return state._replace(models=low_rank.averaged(problem, state.models, aggregate)), {}

        def predict(context, models, row, data):
            return Prediction.one(cut(tree.first(models), of_client(context)))

        functions = {"client_update": client_update, "server_update": server_update, "predict": predict}
        functions |= {"averages": False, "sends": "products"}
        report = Report("the global model, cut to each client's rank", (("ranks", ", ".join(map(str, ranks))),))
        traffic = low_rank.as_factors(problem, float(ranks.mean()) / largest)
        return averaging(problem, **functions, traffic=traffic, ledger=Ledger(gradients=1), report=report)
