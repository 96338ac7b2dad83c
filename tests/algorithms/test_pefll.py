"""PeFLL: rounds with gradients by hand, newcomers, who counts, and what travels."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import RATE, backward, descend, examples, forward, mean, row

SIZES, KNOBS = (2, 5, 0, 3, 4), {"rate": 0.01, "hidden": 5, "layers": 1, "embedding": 4, "spread": 0.5}
MODEL, DESCRIPTOR = 4 * (3 * 6 + 6 + 6 * 3 + 3), 4 * 4
PHI = 4 * ((3 + 3) * 5 + 5 + 5 * 5 + 5 + 5 * 4 + 4)


class Learner:
    """phi, h, m and s in float64, and the steps of Adam."""

    def __init__(self, state):
        numbers = lambda each: jax.tree.map(np.float64, each)
        network = numbers(state.server.network)
        self.learned = {"phi": row(state.models, 0), "trunk": network.trunk, "kernel": network.kernel}
        self.learned |= {"bias": network.bias}
        self.center, self.scale = float(state.server.center), float(state.server.scale)
        self.first = self.second = jax.tree.map(np.zeros_like, self.learned)
        self.steps = 0

    def inputs(self, x, y):
        return np.concatenate([x, np.eye(3)[y]], axis=1)

    def descriptor(self, x, y):
        return forward(self.learned["phi"], self.inputs(x, y))[0].mean(axis=0)

    def model(self, x, y):
        v = (self.descriptor(x, y) - self.center) / self.scale
        features = forward(self.learned["trunk"], v[None])[0][0]
        return jax.tree.map(
            lambda k, b: np.tensordot(features, k, axes=1) + b, self.learned["kernel"], self.learned["bias"]
        )

    def slopes(self, x, y, change):
        """Vector-Jacobian products of a client's model with `change`."""
        v = (self.descriptor(x, y) - self.center) / self.scale
        features, received = forward(self.learned["trunk"], v[None])
        products = jax.tree.map(lambda k, c: np.tensordot(k, c, axes=c.ndim), self.learned["kernel"], change)
        trunk, of_v = backward(self.learned["trunk"], received, sum(jax.tree.leaves(products))[None])
        _, inside = forward(self.learned["phi"], self.inputs(x, y))
        each = np.tile(of_v / self.scale / len(y), (len(y), 1))
        phi, _ = backward(self.learned["phi"], inside, each)
        kernel = jax.tree.map(lambda c: np.multiply.outer(features[0], c), change)
        return {"phi": phi, "trunk": trunk, "kernel": kernel, "bias": change}

    def step(self, slopes, rate, clip):
        """A step of Adam; returns whether the gradient was clipped."""
        norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(slopes)))
        slopes = jax.tree.map(lambda leaf: leaf * min(1, clip / norm), slopes)
        self.steps += 1
        self.first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, self.first, slopes)
        self.second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, self.second, slopes)
        of = lambda m, v: m / (1 - 0.9**self.steps) / (np.sqrt(v / (1 - 0.999**self.steps)) + 1e-8)
        move = jax.tree.map(of, self.first, self.second)
        self.learned = jax.tree.map(lambda p, m: p - rate * m, self.learned, move)
        return clip < norm

    def check(self, state):
        network = state.server.network
        found = {"phi": row(state.models, 0), "trunk": network.trunk, "kernel": network.kernel, "bias": network.bias}
        toys.assert_trees_close(found, self.learned, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clip", [np.inf, 0.05])
def test_rounds_by_hand(clip):
    federation, problem, algorithm, states, records = networks.play(
        "pefll", 3, SIZES, knobs=KNOBS | {"clip": clip}, epochs=3
    )
    hand, active = Learner(states[0]), [k for k in range(5) if SIZES[k]]
    hand.check(states[0])
    assert hand.scale > 0.05
    for state in states[1:]:
        found = []
        for k in active:
            theta = hand.model(*examples(federation, k))
            trained = descend(theta, *examples(federation, k), RATE, 3)
            found.append(hand.slopes(*examples(federation, k), jax.tree.map(np.subtract, theta, trained)))
        clipped = hand.step(mean(found, np.ones(len(active))), 0.01, clip)
        assert clipped == (clip < 1)
        hand.check(state)
    models = toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data).models
    for k in active:
        toys.assert_trees_close(row(row(models, k), 0), hand.model(*examples(federation, k)), rtol=1e-5, atol=1e-5)
    newcomers = toys.make_federation((3, 4), seed=5)
    models = toys.adapt(algorithm, problem, jax.random.key(4), states[-1], newcomers.client_data).models
    toys.assert_trees_close(row(row(models, 1), 0), hand.model(*examples(newcomers, 1)), rtol=1e-5, atol=1e-5)
    each = PHI + MODEL + DESCRIPTOR  # both ways
    assert records[0].down == 5 * each
    assert records[0].up == 4 * each + DESCRIPTOR + MODEL  # without examples, there is no gradient of phi


@pytest.mark.slow
def test_a_client_s_model_depends_on_its_examples():
    """After training, models of clients whose labels differ are apart, and fit their own client."""
    federation, problem, algorithm, states, _ = networks.play("pefll", 60, (5, 5, 5, 5), knobs={"rate": 0.01}, epochs=5)
    split = federation.train
    own = toys.evaluate(algorithm, problem, jax.random.key(0), states[-1], federation.client_data, split)["loss"]
    rolled = jax.tree.map(lambda leaf: np.roll(leaf, 1, axis=0), split)
    others = toys.evaluate(algorithm, problem, jax.random.key(0), states[-1], federation.client_data, rolled)["loss"]
    before = toys.evaluate(algorithm, problem, jax.random.key(0), states[0], federation.client_data, split)["loss"]
    assert own.mean() < 0.7 * before.mean() and own.mean() < 0.8 * others.mean()


def test_at_rate_0_nothing_moves():
    states = networks.play("pefll", 2, SIZES, knobs=KNOBS | {"rate": 0.0}).states
    toys.assert_trees_close(states[-1].models, states[0].models)
    toys.assert_trees_close(states[-1].server, states[0].server)


def test_a_descriptor_of_one_entry_is_not_scaled():
    states = networks.play("pefll", 2, SIZES, knobs=KNOBS | {"embedding": 1}).states
    assert states[0].server.scale == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[-1].models))
