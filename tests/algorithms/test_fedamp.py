"""FedAMP: its attention, and rounds by hand on quadratics."""

import jax.numpy as jnp
import numpy as np
from quadratics import descend, play, vectors

from pfljax.algorithms import fedamp
from pfljax.contract import tree


def attention(points, config):
    models = fedamp.centered({"w": jnp.asarray(points)})
    return fedamp.attention(tree.inner_products(models, models), config)


def test_equal_models_attend_to_each_other_alike():
    found = attention(np.ones((3, 2), np.float32), fedamp.FedAMP(attention=0.8, sigma=0.5))
    np.testing.assert_allclose(found, np.full((3, 3), 0.4) - 0.2 * np.eye(3), rtol=1e-5)


def test_near_models_are_told_apart():
    """Large equal parts must not drown small distances in float32."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=50) * 100 + rng.normal(size=(4, 50)) * 1e-2
    config = fedamp.FedAMP(attention=0.9, sigma=1.0)
    points = np.float32(points)
    distance = np.square(np.float64(points)[:, None] - np.float64(points)[None, :]).sum(axis=-1)
    near = 0.3 * np.exp(-distance / (distance.sum() / 12)) * (1 - np.eye(4))
    found = np.asarray(attention(points, config))
    np.testing.assert_allclose(found * (1 - np.eye(4)), near, rtol=1e-3)


def test_fedamp_by_hand():
    knobs = {"attention": 0.6, "sigma": 0.7, "strength": 1.5}
    federation, _, states, records, predictions = play("fedamp", epochs=2, knobs=knobs)
    own = vectors(states[0].server.models)
    cloud = own.copy()
    for number in range(2):
        for k in range(4):
            own[k] = descend(federation, k, cloud[k], 2, lambda v, u=cloud[k]: 1.5 * (v - u))
        distance = np.square(own[:, None] - own[None, :]).sum(axis=-1)
        xi = 0.2 * np.exp(-distance / (0.7 * distance.sum() / 12)) * (1 - np.eye(4))
        xi += np.diag(1 - xi.sum(axis=1))
        cloud = xi @ own
        np.testing.assert_allclose(vectors(states[number + 1].models), cloud, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], own, rtol=1e-3, atol=1e-4)
    assert records[0].down == records[0].up == 4 * 4 * 4
