"""FedJAX (Google), github.com/google/fedjax: its algorithms, on its own client data sets.

Its `skip_shuffle` gives mini-batches in order. The network is written here in JAX, since FedJAX takes any function.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pfljax as pfl
from experiments.parity.shared import (
    BATCH,
    EPOCHS,
    RATE,
    TEST,
    Apart,
    Cell,
    OnRound,
    Snapshot,
    Task,
)
from pfljax.contract import tree
from pfljax.contract.types import Params

CLUSTERS = 3


def scores(params: Params, x: Any) -> jax.Array:
    """The MLP's scores (B, C)."""
    first = params["Dense_0"]
    last = params["Dense_1"]
    return jax.nn.relu(x @ first["kernel"] + first["bias"]) @ last["kernel"] + last["bias"]


def losses(params: Params, batch: dict, key: Any = None) -> jax.Array:
    """The cross entropy of each example."""
    log_p = jax.nn.log_softmax(scores(params, batch["x"]))
    return -jnp.take_along_axis(log_p, batch["y"][:, None], axis=1)[:, 0]


class Player:
    """Plays an algorithm of FedJAX.

    Args:
        folder: The checkout.
        make: (fedjax, hyperparameters of mini-batches) -> its algorithm.
        start: What `init` is given.
        models: The algorithm's state -> what is compared.
        choose: (fedjax, state, clients) -> the model with which each client predicts.
    """

    def __init__(
        self,
        folder: Path,
        make: Callable[[Any, Any], Any],
        start: Callable[[Task], Any] = lambda task: task.start,
        models: Callable[[Any], dict] = lambda state: {"global": state.params},
        choose: Callable[[Any, Any, list], list[Params]] = lambda fedjax, state, clients: (
            [state.params] * len(clients)
        ),
    ):
        self.folder = folder
        self.make = make
        self.start = start
        self.models = models
        self.choose = choose

    def __call__(self, task: Task, on_round: OnRound) -> None:
        """As `Cell.play`."""
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        fedjax = importlib.import_module("fedjax")
        parts = [task.arrays(client) for client in range(task.clients.num_clients)]
        data = [fedjax.ClientDataset(dict(zip("xy", part["train"], strict=True))) for part in parts]
        clients = [(number, each, jax.random.PRNGKey(number)) for number, each in enumerate(data)]
        hparams = fedjax.ShuffleRepeatBatchHParams(
            batch_size=BATCH, num_epochs=EPOCHS, skip_shuffle=True
        )
        algorithm = self.make(fedjax, hparams)
        state = algorithm.init(self.start(task))

        def snapshot():
            chosen = self.choose(fedjax, state, clients)
            tests = [part["test"] for part in parts]
            right = [
                scores(p, x).argmax(axis=1) == y for p, (x, y) in zip(chosen, tests, strict=True)
            ]
            return Snapshot(
                jax.tree.map(np.asarray, self.models(state)), float(np.concatenate(right).mean())
            )

        while True:
            on_round(snapshot)
            state = jax.block_until_ready(algorithm.apply(state, clients)[0])


def average(fedjax: Any, hparams: Any, momentum: float | None = None) -> Any:
    """Federated averaging."""
    gradient = fedjax.grad(losses)
    optimizers = fedjax.optimizers
    return fedjax.algorithms.fed_avg.federated_averaging(
        gradient, optimizers.sgd(RATE), optimizers.sgd(1.0, momentum), hparams
    )


def proximal(fedjax: Any, hparams: Any) -> Any:
    """FedProx."""
    optimizers = fedjax.optimizers
    return fedjax.algorithms.fed_prox.fed_prox(
        losses, optimizers.sgd(RATE), optimizers.sgd(1.0), hparams, 0.1
    )


def of_losses(fedjax: Any) -> Any:
    """How FedJAX batches for losses."""
    return fedjax.PaddedBatchHParams(batch_size=TEST)


def clustered(fedjax: Any, hparams: Any) -> Any:
    """HypCluster."""
    optimizers = fedjax.optimizers
    return fedjax.algorithms.hyp_cluster.hyp_cluster(
        losses, optimizers.sgd(RATE), optimizers.sgd(1.0), of_losses(fedjax), hparams
    )


def first_clusters(task: Task) -> list[Params]:
    """Our first models."""
    return [jax.tree.map(lambda leaf, n=number: leaf[n], task.models) for number in range(CLUSTERS)]


def of_cluster(fedjax: Any, state: Any, clients: list) -> list[Params]:
    """The model of each client's cluster, by FedJAX's own choice."""
    chosen = fedjax.algorithms.hyp_cluster.maximization_step(
        evaluator=fedjax.AverageLossEvaluator(losses),
        cluster_params=state.cluster_params,
        clients=clients,
        batch_hparams=of_losses(fedjax),
    )
    return [state.cluster_params[int(chosen[client])] for client, _, _ in clients]


def cells(folder: Path) -> dict[str, Cell | Apart]:
    """The comparisons by name."""

    def ours(state):
        return {"global": tree.first(state.models)}

    def stacked(state):
        return {"clusters": jax.tree.map(lambda *leaves: np.stack(leaves), *state.cluster_params)}

    def with_momentum(fedjax, hparams):
        return average(fedjax, hparams, 0.9)

    return {
        "FedAvg": Cell(pfl.FedAvg(), ours, Player(folder, average)),
        "FedAvgM": Cell(
            pfl.methods.FedAvgM(server_momentum=0.9),
            ours,
            Player(folder, with_momentum),
            local={"learning_rate": RATE},
        ),
        "FedProx": Cell(pfl.FedProx(mu=0.1), ours, Player(folder, proximal)),
        "HypCluster": Cell(
            pfl.methods.HypCluster(clusters=CLUSTERS),
            lambda state: {"clusters": state.models},
            Player(folder, clustered, first_clusters, stacked, of_cluster),
            local={"common_init": None},
        ),
        "APFL": Apart(
            "its `jnp.clip(a_min=, a_max=)` stops under the jax that we need; it also has one alpha for each array, "
            "moves them at every step, and does not scale the gradient of v by alpha"
        ),
        "FedAdam": Apart(
            "its optimizer is optax's, with bias correction; ours is the paper's Algorithm 2, without"
        ),
    }
