"""Compares every method on Flower with its simulation: the largest difference after three rounds.

    python -m experiments.flower
    python -m experiments.flower fedavg,ditto,federico

Both apps are real and exchange Flower's messages, in one process. What is compared: the server's state and models, the
models that it relays, every client's own row, and its scores. Four clients with 7, 9, 12 and 14 training examples,
full participation, SGD, mini-batches of 4. Prints a table in Markdown.
"""

from __future__ import annotations

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pfljax as pfl
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Topology
from pfljax.flower.apps import ARRAYS, numpy_arrays
from pfljax.flower.deployment import Deployment, Rows
from pfljax.flower.node import kept_by_client
from pfljax.flower.wire import as_numpy, unpack
from pfljax.settings.method import METHODS

SIZES = (
    11,
    15,
    20,
    23,
)  # examples of each client, of which a fifth are for tests, and a quarter of the rest validate
ROUNDS = 3


class Attentive(nn.Module):
    """A small network with attention."""

    num_classes: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(4)(x.reshape(x.shape[0], -1, 1))
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False)(x)
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


def adapted() -> pfl.Model:
    """A network with a frozen layer, of which adapters and a head are trained."""
    variables = pfl.models.MLP(hidden=(6,), outputs=3).init(jax.random.key(3), jnp.zeros((1, 4)))
    frozen = {"Dense_0": variables["params"]["Dense_0"]}
    lora = pfl.adapters.lora(rank=2, where="Dense_0")
    return pfl.Model(pfl.models.MLP(hidden=(6,)), frozen=frozen, trainable=[lora, "Dense_1"])


def make_clients() -> pfl.Federation:
    """Four clients with a few random examples of three classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), 4)).astype(np.float32) + 0.5
    y = np.where(x[:, 0] > x[:, 1], 0, np.where(x[:, 2] > 0.5, 1, 2))
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    return pfl.Federation.from_arrays(x, y, client=client, validation_fraction=0.25)


def make_simulation(name: str, clients: pfl.Federation) -> pfl.Simulation:
    """The simulation of a method, with the first network that it accepts."""
    local = pfl.LocalTraining(batch_size=4, optimizer=optax.sgd, learning_rate=0.05)
    execution = pfl.Execution(devices=1, cache_features=False)
    errors = []
    for model in (pfl.models.MLP(hidden=(6,)), adapted(), Attentive):
        try:
            return pfl.Simulation(
                METHODS[name](), clients, model, local, rounds=ROUNDS, execution=execution
            )
        except ArgumentError as error:
            errors.append(error)
    raise errors[0]


def differences(name: str) -> tuple[Topology, float, float]:
    """Plays a method both ways.

    Returns:
        Its topology, the largest difference of arrays, and that of scores.
    """
    clients = make_clients()
    simulation = make_simulation(name, clients)
    experiment = simulation.experiment
    seed = jax.random.key(experiment.seed)
    state = simulation.init(jax.random.fold_in(seed, 0))
    for _ in range(ROUNDS):
        state, _ = simulation.step(jax.random.fold_in(seed, 1), state)
    scores = simulation.evaluate(state, jax.random.fold_in(seed, 2))

    # The same on Flower.
    outcomes: list[pfl.flower.Outcome] = []
    client_app = pfl.flower.client_app(simulation)
    server_app = pfl.flower.server_app(
        simulation, ROUNDS, eval_every=ROUNDS, finished=outcomes.append
    )
    nodes = [{"partition-id": number, "send-examples": True} for number in range(len(SIZES))]
    grid = pfl.flower.rehearse(client_app, server_app, nodes)
    outcome = outcomes[0]

    # The server's part, and what it relays.
    pairs = [(state.server, outcome.state.server)]
    train_rows = max(int(size) for size in clients.train.size)
    validation_rows = max(int(size) for size in clients.validation.size)
    deployment = Deployment(experiment, Rows(train_rows, validation_rows))
    topology = deployment.topology
    if topology.between_clients:
        pairs.append((state.clients.model, outcome.state.clients.model))

    # What clients keep. Rows that the server's last update changed are still on their way.
    if not any(jax.tree.leaves(deployment.travels.changed_row)):
        like = kept_by_client(deployment, deployment.shapes.first)
        rows = []
        for context in grid.contexts.values():
            arrays = numpy_arrays(context.state.array_records[ARRAYS])
            rows.append(unpack("now", like, arrays))
        stacked = jax.tree.map(lambda *leaves: np.stack([as_numpy(x) for x in leaves]), *rows)
        pairs.append((kept_by_client(deployment, state.clients), stacked))
    largest = max(largest_difference(a, b) for a, b in pairs)

    of_scores = 0.0
    evaluated = outcome.evaluations[-1].scores
    for split, metrics in scores.items():
        for metric, values in metrics.items():
            gap = np.abs(np.asarray(values) - evaluated[split][metric])
            of_scores = max(of_scores, float(gap.max()))
    return topology, largest, of_scores


def largest_difference(a: Any, b: Any) -> float:
    """The largest difference between two trees of arrays."""
    largest = 0.0
    for leaf, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        gap = np.abs(as_numpy(leaf).astype(np.float64) - as_numpy(other).astype(np.float64))
        largest = max(largest, float(gap.max(initial=0.0)))
    return largest


def main() -> None:
    names = sys.argv[1].split(",") if len(sys.argv) > 1 else list(METHODS)
    lines = ["| method | topology | arrays | scores |", "|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for name in names:
        topology, arrays, scores = differences(name)
        print(f"| {name} | {topology} | {arrays:.1e} | {scores:.1e} |", flush=True)


if __name__ == "__main__":
    main()
