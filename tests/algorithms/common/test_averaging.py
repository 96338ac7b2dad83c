"""Averaging a part of the model: phases of local training with their own optimizers, by hand."""

import jax
import numpy as np
import optax
import pytest
import toys
from networks import BODY, HEAD, examples, gradient, mean, row, step
from quadratics import RATE, SIZES

from pfljax.algorithms.common.averaging import Phase, sharing_layers
from pfljax.contract import tree
from pfljax.contract.types import Ledger, Report


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
    assert jax.tree.leaves(states[-1].models[HEAD]) == []
    theta = row(states[0].models[BODY], 0)
    heads = [row(states[0].clients.own[HEAD], k) for k in range(4)]
    velocity = [{} for _ in range(4)]
    for state in states[1:]:
        bodies = []
        for k in range(4):
            params, (x, y) = {BODY: theta, HEAD: heads[k]}, examples(federation, k)
            speeds = velocity[k] if keep else {}
            for layer in (HEAD, HEAD, BODY):
                speeds.setdefault(layer, jax.tree.map(np.zeros_like, params[layer]))
                slope = gradient(params, x, y)[layer]
                speeds[layer] = jax.tree.map(lambda v, g: momentum * v + g, speeds[layer], slope)
                params = step(params, speeds, RATE, [layer])
            heads[k] = params[HEAD]
            bodies.append(params[BODY])
            toys.assert_trees_close(row(state.clients.own[HEAD], k), heads[k], rtol=1e-4, atol=1e-6)
        theta = mean(bodies, SIZES)
        toys.assert_trees_close(row(state.models[BODY], 0), theta, rtol=1e-4, atol=1e-6)
