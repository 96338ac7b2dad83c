"""Things that the contract can express, each shown by a small method."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys
from quadratics import RATE, SIZES, gradient, vectors

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.types import Algorithm, ClientOutput, Ledger, Prediction, Start
from pfljax.evaluation.fine_tuning import fine_tuned

MODEL = 4 * 4  # bytes of a linear model


def test_a_method_s_own_fine_tuning_wins_and_is_told_the_epochs():
    """This fine-tuning adds the number of epochs to the global model."""
    federation = toys.make_federation((2, 3))
    problem, clients = toys.make_problem(federation), federation.client_data

    def own(epochs):
        moved = lambda models: jax.tree.map(lambda leaf: leaf + epochs, models)
        return dataclasses.replace(base, predict=lambda context, models, row, data: Prediction(moved(models)))

    base = averaging(problem)
    algorithm = dataclasses.replace(base, fine_tuned=own)
    state = toys.init(algorithm, problem, jax.random.key(0), clients)
    after = fine_tuned(problem, algorithm, 3)
    assert after.tune is None and "tuned by each client" in after.report.scored
    assert "fine-tuning" in after.ledger.unaccounted
    found = toys.predict(after, problem, jax.random.key(0), state, clients).models
    toys.assert_trees_close(found, jax.tree.map(lambda leaf: jnp.stack([leaf + 3] * 2), state.models))
    assert fine_tuned(problem, algorithm, 0) is algorithm


def median(problem, traffic=None):
    """The median of whole reported models, and a vector that clients read from the server's state."""

    def start(key, clients):
        return Start({"shift": jnp.zeros(5), "rate": jnp.ones(())}, problem.init_models(key, 1))

    def client_update(context, models, row, data):
        trained, _, losses = problem.fit(context, models, (), data.train)
        loss = losses[0] * context.server["rate"] + context.server["shift"].sum()
        return ClientOutput((), (), {"loss": loss, "model": tree.first(trained)})

    def server_update(key, state, aggregate):
        return state._replace(
            models=jax.tree.map(lambda leaf: jnp.median(leaf, 0)[None], aggregate.report["model"])
        ), {}

    return Algorithm(
        start=start,
        client_update=client_update,
        server_update=server_update,
        topology="shared",
        ledger=Ledger(gradients=1),
        traffic=traffic,
    )


def test_reports_and_server_state_beyond_scalars_are_traffic():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    states, (record,) = toys.train(median(problem), problem, federation.client_data, 1)
    theta = vectors(states[0].models)[0]
    trained = [theta - RATE * gradient(federation, k, theta) for k in range(4)]
    np.testing.assert_allclose(vectors(states[1].models)[0], np.median(trained, axis=0), rtol=1e-4, atol=1e-6)
    assert record.up == 4 * MODEL and record.down == 4 * (MODEL + 5 * 4)
    halved = median(problem, lambda counted: counted._replace(report=counted.report / 2, server=0))
    record = toys.train(halved, problem, federation.client_data, 1)[1][0]
    assert record.up == 4 * MODEL / 2 and record.down == 4 * MODEL
