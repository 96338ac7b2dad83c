"""Averaging a part of the model: phases of local training with their own optimizers, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, SIZES

from pfljax.algorithms.common.averaging import Phase, fit_phases, sharing_layers
from pfljax.contract import tree
from pfljax.contract.types import ClientContext, Ledger, Report, Split


@pytest.mark.parametrize("keep", [pytest.param(False, marks=pytest.mark.slow), True])
def test_phases_train_a_part_after_the_other(keep):
    """FedRep (Collins et al., 2021): the head's epochs first, then the body's; the body is averaged."""
    federation = toys.make_federation(SIZES)
    momentum = 0.5
    problem = toys.make_problem(federation, optax.sgd(RATE, momentum), hidden=(3,))._replace(keep_optimizer=keep)
    head = lambda params: problem.model.mask(params, 1)
    body = lambda params: tree.complement(head(params))
    algorithm = sharing_layers(problem, body, phases=(Phase(head, 2), Phase(body, 1)), report=Report())
    assert algorithm.ledger == Ledger(gradients=1, passes=3)
    states, _ = toys.train(algorithm, problem, federation.client_data, 2)
    assert jax.tree.leaves(states[-1].models["Dense_1"]) == []
    theta = jax.tree.map(lambda leaf: leaf[0], states[0].models["Dense_0"])
    heads = [jax.tree.map(lambda leaf, k=k: leaf[k], states[0].clients.own["Dense_1"]) for k in range(4)]
    velocity = [{} for _ in range(4)]
    for state in states[1:]:
        bodies = []
        for k in range(4):
            params = {"Dense_0": theta, "Dense_1": heads[k]}
            x, y = federation.train.x[k, : SIZES[k]], federation.train.y[k, : SIZES[k]]
            slope = jax.jit(jax.grad(lambda params, x=x, y=y: problem.model.loss(params, x, y).mean()))
            speeds = velocity[k] if keep else {}
            for layer in ("Dense_1", "Dense_1", "Dense_0"):
                speeds.setdefault(layer, jax.tree.map(jnp.zeros_like, params[layer]))
                speeds[layer] = jax.tree.map(lambda v, g: momentum * v + g, speeds[layer], slope(params)[layer])
                params[layer] = jax.tree.map(lambda p, v: p - RATE * v, params[layer], speeds[layer])
            heads[k] = params["Dense_1"]
            bodies.append(params["Dense_0"])
            own = jax.tree.map(lambda leaf, k=k: leaf[k], state.clients.own["Dense_1"])
            toys.assert_trees_close(own, heads[k], rtol=1e-4, atol=1e-6)
        theta = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=SIZES), *bodies)
        toys.assert_trees_close(tree.first(state.models["Dense_0"]), theta, rtol=1e-4, atol=1e-6)


def test_phases_have_mini_batches_and_epochs_of_their_own():
    federation = toys.make_federation((7, 4, 0))
    problem = toys.make_problem(federation, optax.sgd(0.1), hidden=(4,), batch_size=3, epochs=5)
    models = problem.init_models(jax.random.key(0), 1)
    split = Split(*(jnp.asarray(leaf[0]) for leaf in federation.train))
    context = ClientContext(jax.random.key(4), jnp.int32(0), jnp.int32(0), jnp.zeros(1, jnp.int32))

    def run(*epochs):
        phases = [Phase(lambda params: problem.model.mask(params, 2), each) for each in epochs]
        return jax.jit(lambda models: fit_phases(problem, phases, context, models, [], split)[0])(models)

    none, first, longer = run(0, 0), run(1, 0), run(2, 0)
    second = run(0, 1)
    toys.assert_trees_close(none, models)
    assert not toys.same_trees(first, second) and not toys.same_trees(first, longer)
    toys.assert_trees_close(first, run(1, 0))
