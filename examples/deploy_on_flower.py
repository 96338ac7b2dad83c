"""Play a run on Flower in one process, and compare it with the simulation.

python examples/deploy_on_flower.py
"""

from __future__ import annotations

import jax
import numpy as np
import optax

import pfljax as pfl


def main(rounds: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Returns each client's accuracy in the simulation, and on Flower."""
    clients = pfl.data.digits(num_clients=3, train_examples=20)
    local = pfl.LocalTraining(optimizer=optax.sgd, learning_rate=0.3)

    # The simulation: all clients in one compiled round.
    method = pfl.Ditto()
    model = pfl.models.MLP(hidden=(16,))
    simulation = pfl.Simulation(method, clients, model, local, rounds=rounds)
    seed = jax.random.key(0)
    state = simulation.init(jax.random.fold_in(seed, 0))
    for _ in range(rounds):
        state, _ = simulation.step(jax.random.fold_in(seed, 1), state)
    simulated = simulation.evaluate(state)["test"]["accuracy"]

    # The same run as Flower's two apps. A node knows its client's number; each has its own context.
    run = pfl.Run(method, clients, model, local, seed=0)
    outcomes: list[pfl.flower.Outcome] = []
    client_app = pfl.flower.client_app(run)
    server_app = pfl.flower.server_app(run, rounds, finished=outcomes.append)
    nodes = [{"partition-id": number} for number in range(clients.num_clients)]
    pfl.flower.rehearse(client_app, server_app, nodes)
    deployed = outcomes[0].evaluations[-1].scores["test"]["accuracy"]

    print("simulated:", np.round(np.asarray(simulated), 3))
    print("on Flower:", np.round(deployed, 3))
    return np.asarray(simulated), deployed


if __name__ == "__main__":
    main()
