"""FlexLoRA: clients with adapters of different ranks; the server decomposes averaged products.

Bai, Chen, Qian, Yao, Li, "Federated fine-tuning of large language models under heterogeneous tasks
and client resources" (NeurIPS 2024, Algorithm 1).

    A round: client k receives A and B cut to its rank r_k and trains them to A_k, B_k;
    W <- sum_k n_k A_k B_k / sum_k n_k; A, B <- the truncated singular value decomposition of W, so
    that the first r columns of A and rows of B are its best approximation of rank r.

Departures from the paper: The singular values are in A. Clients get the ranks in `ranks` in turn,
by number (the paper draws them from distributions over resources). Until W has as many singular
values above 0 as a client's rank, its other directions are the decomposition's arbitrary ones.
Whatever else is trained, such as a head, is averaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from pfljax.algorithms.common import low_rank
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Factors,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(name="flexlora", keeps="nothing", travels="A and B cut to a client's rank, both ways")
@dataclasses.dataclass(frozen=True)
class FlexLoRA:
    """FlexLoRA (Bai et al., 2024): clients with adapters of different ranks.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FlexLoRA(ranks=(2, 4, 8))
        FlexLoRA(ranks=(2, 4, 8))
    """

    ranks: Sequence[int] = hyperparameter(
        (),
        empty=True,
        help="ranks that clients have in turn; none: the adapters' rank, and half of it",
    )

    def build(self, problem: Problem) -> Algorithm:
        largest = low_rank.required(problem, "flexlora")
        ranks = np.array(self.ranks or (largest, max(1, largest // 2)), np.int32)
        if ranks.min() < 1 or ranks.max() > largest:
            accepted = f"accepted: ranks from 1 to {largest}, that of the adapters"
            raise ArgumentError("ranks", accepted, self.ranks)

        # ---- The client.

        def cut_to_rank(context: ClientContext, models: Params) -> Params:
            """The model (...) with A and B cut to the client's rank r_k."""
            rank = jnp.asarray(ranks)[context.client % len(ranks)]
            return cut(problem, tree.first(models), rank)

        def client_update(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> ClientOutput:
            # A_k and B_k
            start = tree.stack_one(cut_to_rank(context, models))
            trained = problem.fit(context, start, data.train)

            # n_k A_k B_k
            return ClientOutput(
                row=row,
                upload=Upload(
                    update=low_rank.sent(problem, trained.models),
                    weight=jnp.float32(data.train.size)[None],
                ),
                report=ClientReport(trained.losses[0]),
                opt_state=trained.opt_state,
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            return Start(models=problem.init_models(key, 1))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # W <- sum_k n_k A_k B_k / sum_k n_k; A, B <- its truncated decomposition
            models = low_rank.averaged(problem, state.models, aggregate)
            return state.with_models(models), {}

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            return Prediction.single(cut_to_rank(context, models))

        return Algorithm(
            topology=Topology.SHARED,
            start=start,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            ledger=Ledger(gradients=1),
            report=MethodReport(
                scored="the global model, cut to each client's rank",
                facts=(("ranks", ", ".join(map(str, ranks))),),
            ),
            sends="products",
            traffic=low_rank.as_factors(problem, rank_share=float(ranks.mean()) / largest),
        )


def cut(problem: Problem, params: Params, rank: Array) -> Params:
    """The model with zeros after the first `rank` columns of A and rows of B."""
    network = problem.model.network

    def cut_pair(pair: Factors) -> Factors:
        is_kept = jnp.arange(pair.a.shape[-1]) < rank
        return Factors(pair.a * is_kept, pair.b * is_kept[:, None])

    factors = {path: cut_pair(pair) for path, pair in network.factors(params).items()}
    return network.with_factors(params, factors)
