"""FedKD: rounds by hand, its compression, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from networks import RATE, assert_row_close, examples, features, gradient, logits, mean, play, row, softmax, step

from pfljax.algorithms import fedkd

SIZES, WIDTH = (2, 5, 1, 3), 4
KNOBS = {"strength": 0.7, "energy": 0.6, "last_energy": 0.9}


def truncated(matrix, energy):
    """The fewest leading singular values whose squares are more than a share of all, and their number."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    rank = next((r for r in range(len(s)) if (s[:r] ** 2).sum() > energy * (s**2).sum()), len(s))
    return u[:, :rank] * s[:rank] @ v[:rank], rank


def compressed(update, energy):
    """An update with truncated kernels, and the share of its numbers that travel."""
    found, sent = {}, 0
    for layer, leaves in update.items():
        kernel, rank = truncated(leaves["kernel"], energy)
        found[layer] = {"kernel": kernel, "bias": leaves["bias"]}
        sent += rank * (sum(kernel.shape) + 1) + leaves["bias"].size
    return found, sent / sum(leaf.size for leaf in jax.tree.leaves(update))


def train(own, mentee, projection, x, y, strength):
    """A step of the mentor, the mentee and the matrix."""
    n, labels = len(y), np.eye(3)[y]
    p, q = (softmax(logits(params, x)) for params in (own, mentee))
    known = np.maximum(-np.log(p[range(n), y]) - np.log(q[range(n), y]), fedkd.LEAST)[:, None]
    far = features(own, x) - features(mentee, x) @ projection
    pull = strength * 2 * far / known / far.size

    def moved(params, mine, other, pull):
        """p - (labels + strength (other - p) / known) is the slope of both terms in the logits."""
        targets = labels + strength / known * (other - mine)
        return step(params, gradient(params, x, targets, pull=pull), RATE)

    turned = projection + RATE * features(mentee, x).T @ pull
    return moved(own, p, q, pull), moved(mentee, q, p, -pull @ projection.T), turned


def test_rounds_by_hand():
    federation, _, _, states, records = play("fedkd", 2, SIZES, KNOBS, hidden=(WIDTH,), epochs=2)
    mentee = row(states[0].models, 0)
    own = [row(states[0].clients.models.own.model, k) for k in range(4)]
    projections = [np.eye(WIDTH) for _ in range(4)]
    for state, record, energy in zip(states[1:], records, (0.75, 0.9), strict=True):
        updates, shares = [], []
        for k in range(4):
            shared, (x, y) = mentee, examples(federation, k)
            for _ in range(2):
                own[k], shared, projections[k] = train(own[k], shared, projections[k], x, y, 0.7)
            update, share = compressed(jax.tree.map(np.subtract, shared, mentee), energy)
            updates.append(update)
            shares.append(share)
            assert_row_close(state.clients.models.own.model, own[k], k)
        np.testing.assert_allclose(state.clients.projection, projections, rtol=1e-5, atol=1e-5)
        mentee = jax.tree.map(np.add, mentee, compressed(mean(updates, SIZES), energy)[0])
        assert_row_close(state.models, mentee)
        np.testing.assert_allclose(record.metrics["upload_share"], np.mean(shares), rtol=1e-5)


@pytest.mark.parametrize("energy", [0.1, 0.6, 0.97, 1.0])
def test_matrices_keep_the_fewest_singular_values(energy):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (2, 6, 4), "filters": (2, 3, 2, 4), "wide": (2, 3, 4)}
    update = {name: rng.normal(size=shape) for name, shape in shapes.items()} | {"bias": np.ones((2, 4))}
    found, share = fedkd.leading(jax.tree.map(jnp.float32, update), jnp.float32(energy))
    sent = 8
    for name in shapes:
        for k in range(2):
            kernel, rank = truncated(update[name][k].reshape(-1, 4), energy)
            np.testing.assert_allclose(found[name][k].reshape(-1, 4), kernel, rtol=1e-5, atol=1e-5)
            sent += rank * (len(kernel) + 5)
    np.testing.assert_array_equal(found["bias"], 1)
    np.testing.assert_allclose(share, sent / (48 + 48 + 24 + 8), rtol=1e-6)


@pytest.mark.parametrize("model", [pytest.param(toys.Dropped, marks=pytest.mark.slow), toys.Normalized])
def test_alone_and_uncompressed_it_is_local_training_beside_fedavg(model):
    federation, options = toys.make_federation(SIZES), {"model": model, "batch_size": 2, "epochs": 2}
    knobs = {"strength": 0.0, "energy": 1.0, "last_energy": 1.0}
    found = toys.play("fedkd", federation, 2, None, knobs, **options).states[-1]
    fedavg = toys.play("fedavg", federation, 2, None, **options).states[-1]
    toys.assert_trees_close(found.models, fedavg.models, rtol=1e-5, atol=1e-5)
    if model is toys.Normalized:  # whose training draws nothing at random
        local = toys.play("local", federation, 2, None, **options).states[-1]
        toys.assert_trees_close(found.clients.models.own.model, local.models, rtol=1e-5, atol=1e-6)


def test_fitted_examples_do_not_divide_by_zero():
    """Both models' losses of the only example underflow to 0, and their features differ."""
    federation = toys.make_federation((1,))
    problem = toys.make_problem(federation, hidden=(WIDTH,))
    algorithm = toys.make_algorithm("fedkd", problem)
    state = toys.start(algorithm, problem, federation.client_data)
    sure = 100 * jax.nn.one_hot(federation.train.y[0, 0], 3)
    certain = lambda models: models | {"Dense_1": models["Dense_1"] | {"bias": sure[None]}}
    own = state.clients.models.own
    pair = state.clients.models._replace(own=own._replace(model=certain(own.model)))
    state = state._replace(models=certain(state.models), clients=state.clients._replace(models=pair))
    after = toys.train(algorithm, problem, federation.client_data, 1, state=state)[0][1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
