"""FedAMP: its attention, and rounds by hand on quadratics."""

import jax
import numpy as np
import pytest
from by_hand import by_hand

from pfljax.algorithms import fedamp
from pfljax.contract import tree


@jax.jit
def attention(points, share, sigma):
    """xi of models (K, d)."""
    models = fedamp.centered({"w": points})
    config = fedamp.FedAMP(attention=share, sigma=sigma)
    return fedamp.attention(tree.inner_products(models, models), config)


def test_equal_models_attend_to_each_other_alike():
    found = attention(np.ones((4, 50), np.float32), 0.9, 0.5)
    np.testing.assert_allclose(found, np.full((4, 4), 0.3) - 0.2 * np.eye(4), rtol=1e-5)


def test_near_models_are_told_apart():
    """Large equal parts must not drown small distances in float32."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=50) * 100 + rng.normal(size=(4, 50)) * 1e-2
    points = np.float32(points)
    distance = np.square(np.float64(points)[:, None] - np.float64(points)[None, :]).sum(axis=-1)
    near = 0.3 * np.exp(-distance / (distance.sum() / 12)) * (1 - np.eye(4))
    found = np.asarray(attention(points, 0.9, 1.0))
    np.testing.assert_allclose(found * (1 - np.eye(4)), near, rtol=1e-3)


def cloud_of(own, share, sigma):
    """Eq. 6: each client's mixture of all models, by their squared distances over the mean one."""
    distance = np.square(own[:, None] - own[None, :]).sum(axis=-1)
    near = np.exp(-distance / (sigma * distance.sum() / 12))
    xi = share / 3 * near * (1 - np.eye(4))
    xi += np.diag(1 - xi.sum(axis=1))
    return xi @ own


def fedamp_of(share, strength):
    """Clients train toward their cloud models, and the server mixes what they trained."""

    def reference(rounds):
        cloud = rounds.start("server.state.models")
        for _ in rounds:
            own = []
            for k, u in enumerate(cloud):
                own.append(rounds.descend(k, u, lambda v, u=u: strength * (v - u)))
            cloud = cloud_of(np.array(own), share, sigma=0.7)
            yield {"models": cloud, "predictions": [[v] for v in own]}

    return reference


@pytest.mark.parametrize(("share", "strength"), [(0.6, 1.5), (0.0, 0.0)])
def test_fedamp_by_hand(share, strength):
    """Without attention and pull, clients train alone."""
    hyperparameters = {"attention": share, "sigma": 0.7, "mu": strength}
    by_hand(
        "fedamp",
        fedamp_of(share, strength),
        rounds=2,
        hyperparameters=hyperparameters,
        rtol=1e-3,
        atol=1e-4,
    )
