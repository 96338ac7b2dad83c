"""FedAH by hand on networks with one hidden layer: aggregated heads and phases; newcomers, and what travels."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import BODY, HEAD, RATE, descend, examples, gradient, mean, row

from pfljax.exchange.rounds import cohort_of

SIZES, EPOCHS = (2, 5, 0, 3, 4), 3


def aggregated(shared, head, weights, data, rate, steps):
    """The model with the mixed head, and the weights of the mixture after steps."""
    mixed = lambda weights: jax.tree.map(lambda w, own, other: own + (other - own) * w, weights, head, shared[HEAD])
    moved = lambda w, slope, own, other: np.clip(w - rate * slope * (other - own), 0, 1)
    for _ in range(steps if len(data[1]) else 0):
        slopes = gradient(shared | {HEAD: mixed(weights)}, *data)[HEAD]
        weights = jax.tree.map(moved, weights, slopes, head, shared[HEAD])
    return shared | {HEAD: mixed(weights)}, weights


@pytest.mark.parametrize(("cohort", "rate", "predict"), [(2, 1.0, "aggregated"), (5, 40.0, "own"), (5, 0.0, "own")])
def test_rounds_by_hand(cohort, rate, predict):
    knobs = {"rate": rate, "head_epochs": 2, "body_epochs": EPOCHS, "predict": predict}
    federation, problem, algorithm, states, records = networks.play("fedah", 3, SIZES, knobs=knobs, cohort=cohort)
    shared = row(states[0].models, 0)
    heads, weights = [shared[HEAD]] * 5, [jax.tree.map(np.ones_like, shared[HEAD])] * 5
    for number, state in enumerate(states[1:]):
        trained, sizes = [], []
        for k in np.asarray(cohort_of(jax.random.key(0), number, 5, cohort).ids):
            data = examples(federation, k)
            model, weights[k] = aggregated(shared, heads[k], weights[k], data, rate, 2)
            if SIZES[k]:
                model = descend(model, *data, RATE, 2, layers=(HEAD,))
                model = descend(model, *data, RATE, EPOCHS, layers=(BODY,))
                trained.append(model)
                sizes.append(SIZES[k])
            heads[k] = model[HEAD]
        shared = mean(trained, sizes)
        toys.assert_trees_close(row(state.models, 0), shared, rtol=1e-5, atol=1e-5)
        for k in range(5):
            toys.assert_trees_close(row(state.clients.head[HEAD], k), heads[k], rtol=1e-5, atol=1e-5)
            toys.assert_trees_close(row(state.clients.weights[HEAD], k), weights[k], rtol=1e-5, atol=1e-5)
    values = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(weights)])
    assert (values.min() < 0.9999) == (rate > 0) and (values.min() == 0) == (rate > 1)
    found = toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data).models
    for k in range(5):
        expected = aggregated(shared, heads[k], weights[k], examples(federation, k), rate, 2)[0]
        expected = expected if predict == "aggregated" else shared | {HEAD: heads[k]}
        toys.assert_trees_close(row(row(found, k), 0), expected, rtol=1e-5, atol=1e-5)
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(shared))
    assert records[0].down == cohort * size and records[-1].up <= cohort * (size + 4)  # and n_k


def test_newcomers_train_a_head_from_the_global_one():
    _, problem, algorithm, states, _ = networks.play("fedah", 2, SIZES, knobs={"head_epochs": 2})
    newcomers, key = toys.make_federation((3, 4), seed=5), jax.random.key(4)
    found = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data).models
    for k in range(2):
        start = row(states[-1].models, 0)
        expected = descend(start, *examples(newcomers, k), RATE, 2 * problem.rounds, layers=(HEAD,))
        toys.assert_trees_close(row(row(found, k), 0), expected, rtol=1e-4, atol=1e-5)
