"""PeFLL: rounds with gradients by hand, who counts, and that it learns."""

import jax
import networks
import numpy as np
import pytest
import toys
from by_hand import by_hand, play
from networks import backward, forward, mean, row

SIZES = (2, 5, 0, 3, 4)
HYPERPARAMETERS = {
    "server_learning_rate": 0.01,
    "clip": 50.0,
    "hidden": 5,
    "layers": 1,
    "embedding": 4,
    "spread": 0.5,
}
OPTIONS = {"sizes": SIZES, "hidden": (6,), "epochs": 3}


class Learner:
    """phi, h, m and s in float64, and the steps of Adam."""

    def __init__(self, state):
        def numbers(each):
            return jax.tree.map(np.float64, each)

        network = numbers(state.server.state.network)
        self.learned = {
            "phi": row(state.models, 0),
            "trunk": network.trunk,
            "kernel": network.kernel,
        }
        self.learned |= {"bias": network.bias}
        self.center = float(state.server.state.center)
        self.scale = float(state.server.state.scale)
        self.first = self.second = jax.tree.map(np.zeros_like, self.learned)
        self.steps = 0

    def inputs(self, x, y):
        return np.concatenate([x, np.eye(3)[y]], axis=1)

    def descriptor(self, x, y):
        return forward(self.learned["phi"], self.inputs(x, y))[0].sum(axis=0) / max(len(y), 1)

    def model(self, x, y):
        v = (self.descriptor(x, y) - self.center) / self.scale
        features = forward(self.learned["trunk"], v[None])[0][0]
        return jax.tree.map(
            lambda k, b: np.tensordot(features, k, axes=1) + b,
            self.learned["kernel"],
            self.learned["bias"],
        )

    def slopes(self, x, y, change):
        """Vector-Jacobian products of a client's model with `change`."""
        v = (self.descriptor(x, y) - self.center) / self.scale
        features, received = forward(self.learned["trunk"], v[None])
        products = jax.tree.map(
            lambda k, c: np.tensordot(k, c, axes=c.ndim), self.learned["kernel"], change
        )
        trunk, of_v = backward(
            self.learned["trunk"], received, sum(jax.tree.leaves(products))[None]
        )
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

        def of(m, v):
            return m / (1 - 0.9**self.steps) / (np.sqrt(v / (1 - 0.999**self.steps)) + 1e-8)

        move = jax.tree.map(of, self.first, self.second)
        self.learned = jax.tree.map(lambda p, m: p - rate * m, self.learned, move)
        return clip < norm

    def entries(self):
        """What the state holds, by name."""
        learned = self.learned
        trunk = {
            f"server.state.network.trunk.{number}": layer
            for number, layer in enumerate(learned["trunk"])
        }
        heads = {f"server.state.network.{name}": learned[name] for name in ("kernel", "bias")}
        phi = {
            f"models.{number}": jax.tree.map(lambda leaf: leaf[None], layer)
            for number, layer in enumerate(learned["phi"])
        }
        return trunk | heads | phi


def pefll(clip):
    """Algorithm 1; a client without examples does not count."""

    def reference(rounds):
        hand = Learner(rounds.states[0])
        assert hand.scale > 0.05

        def model_of(k):
            return hand.model(*rounds.examples(k))

        for number in rounds:
            products = []
            for k in rounds.active(number):
                theta = model_of(k)
                change = jax.tree.map(np.subtract, theta, rounds.descend(k, theta))
                products.append(hand.slopes(*rounds.examples(k), change))
            is_clipped = hand.step(
                mean(products, None), HYPERPARAMETERS["server_learning_rate"], clip
            )
            assert is_clipped == (clip < 1)
            yield hand.entries() | {"predictions": [[model_of(k)] for k in rounds.clients]}

    return reference


@pytest.mark.parametrize("clip", [np.inf, 0.05])
def test_rounds_by_hand(clip):
    by_hand(
        "pefll", pefll(clip), rtol=1e-5, hyperparameters=HYPERPARAMETERS | {"clip": clip}, **OPTIONS
    )


@pytest.mark.long
def test_a_client_s_model_depends_on_its_examples():
    """After training, models of clients whose labels differ are apart, and fit their own client."""
    federation, problem, algorithm, states, _ = networks.play(
        "pefll", 60, (5, 5, 5, 5), hyperparameters={"server_learning_rate": 0.01}, epochs=5
    )
    split = federation.train
    own = toys.evaluate(
        algorithm, problem, jax.random.key(0), states[-1], federation.client_data, split
    )["loss"]
    rolled = jax.tree.map(lambda leaf: np.roll(leaf, 1, axis=0), split)
    others = toys.evaluate(
        algorithm, problem, jax.random.key(0), states[-1], federation.client_data, rolled
    )["loss"]
    before = toys.evaluate(
        algorithm, problem, jax.random.key(0), states[0], federation.client_data, split
    )["loss"]
    assert own.mean() < 0.7 * before.mean() and own.mean() < 0.8 * others.mean()


def test_at_rate_0_nothing_moves():
    states = play(
        "pefll", hyperparameters=HYPERPARAMETERS | {"server_learning_rate": 0.0}, **OPTIONS
    ).states
    toys.assert_trees_close(states[-1].models, states[0].models)
    toys.assert_trees_close(states[-1].server.state, states[0].server.state)


def test_a_descriptor_of_one_entry_is_not_scaled():
    federation = toys.make_federation(SIZES)
    algorithm = toys.make_algorithm(
        "pefll", toys.make_problem(federation), **HYPERPARAMETERS | {"embedding": 1}
    )
    scale = jax.jit(lambda key: algorithm.start(key, federation.client_data).state.scale)
    assert scale(jax.random.key(0)) == 1
