"""Averaging a part of the model: phases of local training with their own optimizers, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from networks import BODY, HEAD, examples, gradient, mean, row, step
from quadratics import RATE, SIZES
from staged import rows, staged

from pfljax.algorithms.common.layers import Phase, sharing_layers, train_phases
from pfljax.contract import tree
from pfljax.contract.types import ClientContext, Ledger, MethodReport, Split


@pytest.mark.parametrize("keep", [pytest.param(False, marks=pytest.mark.slow), True])
def test_phases_train_a_part_after_the_other(keep):
    """FedRep (Collins et al., 2021): the head's epochs first, then the body's; the body is averaged."""
    federation = toys.make_federation(SIZES)
    momentum = 0.5
    problem = toys.make_problem(federation, optax.sgd(RATE, momentum), hidden=(3,))._replace(
        keep_optimizer=keep
    )

    def head(params):
        return problem.model.mask(params, 1)

    def body(params):
        return tree.complement(head(params))

    algorithm = sharing_layers(
        problem, body, phases=(Phase(head, 2), Phase(body, 1)), report=MethodReport()
    )
    assert algorithm.ledger == Ledger(gradients=1, passes=3)
    algorithm = staged(problem, algorithm, federation)
    states, _ = toys.train(algorithm, problem, federation.client_data, 2)
    assert jax.tree.leaves(states[-1].models[HEAD]) == []
    theta = row(states[0].models[BODY], 0)
    heads = [row(rows(states[0])[HEAD], k) for k in range(4)]
    velocity = [{} for _ in range(4)]
    for state in states[1:]:
        bodies = []
        for k in range(4):
            params = {BODY: theta, HEAD: heads[k]}
            (x, y) = examples(federation, k)
            speeds = velocity[k] if keep else {}
            for layer in (HEAD, HEAD, BODY):
                speeds.setdefault(layer, jax.tree.map(np.zeros_like, params[layer]))
                slope = gradient(params, x, y)[layer]
                speeds[layer] = jax.tree.map(lambda v, g: momentum * v + g, speeds[layer], slope)
                params = step(params, speeds, RATE, [layer])
            heads[k] = params[HEAD]
            bodies.append(params[BODY])
            toys.assert_trees_close(row(rows(state)[HEAD], k), heads[k], rtol=1e-4, atol=1e-6)
        theta = mean(bodies, SIZES)
        toys.assert_trees_close(row(state.models[BODY], 0), theta, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_phases_have_mini_batches_and_epochs_of_their_own():
    federation = toys.make_federation((7, 4, 0))
    problem = toys.make_problem(federation, optax.sgd(0.1), hidden=(4,), batch_size=3, epochs=5)
    models = problem.init_models(jax.random.key(0), 1)
    split = Split(*(jnp.asarray(leaf[0]) for leaf in federation.train))
    context = ClientContext(jax.random.key(4), jnp.int32(0), jnp.int32(0), jnp.zeros(1, jnp.int32))

    def run(*epochs):
        phases = [Phase(lambda params: problem.model.mask(params, 2), each) for each in epochs]
        return jax.jit(lambda models: train_phases(problem, phases, context, models, split).models)(
            models
        )

    none = run(0, 0)
    first = run(1, 0)
    longer = run(2, 0)
    second = run(0, 1)
    toys.assert_trees_close(none, models)
    assert not toys.same_trees(first, second) and not toys.same_trees(first, longer)
    toys.assert_trees_close(first, run(1, 0))
