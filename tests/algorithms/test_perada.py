"""PerAda by hand on networks with one hidden layer."""

import jax
import numpy as np
import pytest
from by_hand import by_hand, stack
from networks import RATE, examples, gradient, logits, row, softmax, step

STRENGTH = 0.7
STEPS = 5
OPTIONS = {"sizes": (2, 5, 0, 3, 4), "hidden": (6,), "rounds": 2, "epochs": 3}


def train(params, x, y, steps, anchor=None):
    """Steps on the mean loss, plus lambda / 2 |params - anchor|^2 if there is an anchor."""
    for _ in range(steps):
        slopes = gradient(params, x, y)
        if anchor is not None:

            def pulled(slope, a, b):
                return slope + STRENGTH * (a - b)

            slopes = jax.tree.map(pulled, slopes, params, anchor)
        params = step(params, slopes, RATE)
    return params


def distill(params, teacher, x, rate):
    """Adam on the mean KL(teacher || student), with PyTorch's cosine schedule."""
    first = jax.tree.map(np.zeros_like, params)
    second = first
    for t in range(STEPS):
        slopes = gradient(params, x, softmax(teacher))
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, slopes)
        now = rate * (1 + np.cos(np.pi * t / STEPS)) / 2

        def moved(p, m, v, t=t, now=now):
            m_hat = m / (1 - 0.9 ** (t + 1))
            v_hat = v / (1 - 0.999 ** (t + 1))
            return p - now * m_hat / (np.sqrt(v_hat) + 1e-8)

        params = jax.tree.map(moved, params, first, second)
    return params


def distance(a, b):
    """The largest difference between two models' parameters."""
    return max(np.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def perada(share, rate):
    """Personal models are pulled to the global one, which the server distills from the clients' logits."""

    def reference(rounds):
        w = row(rounds.start("models"), 0)
        own = [row(rounds.start("clients.row.params"), k) for k in rounds.clients]
        size = int(rounds.start("server.state.size"))
        x = rounds.start("server.state.x")[:size]

        for number in rounds:
            trained = []
            active = rounds.active(number)
            for k in active:
                own[k] = train(own[k], *rounds.examples(k), rounds.epochs, w)
                trained.append(train(w, *rounds.examples(k), rounds.epochs))
            weights = rounds.sizes[active]
            w = rounds.mean(trained, weights)
            if share:
                teacher = np.average([logits(each, x) for each in trained], axis=0, weights=weights)
                plain = w
                w = distill(plain, teacher, x, rate)
                assert (distance(w, plain) > 5e-3) == (rate > 0)
            yield {
                "models": stack([w]),
                "clients.row.params": own,
                "predictions": [[model] for model in own],
            }

    return reference


@pytest.mark.parametrize(
    ("share", "rate"),
    [(0.3, 0.02), (0.3, 0.0), (0.0, 0.02), pytest.param(1.0, 0.02, marks=pytest.mark.slow)],
)
def test_perada_by_hand(share, rate):
    """Without examples at the server, or with rate 0, it is Ditto."""
    hyperparameters = {
        "mu": STRENGTH,
        "share": share,
        "server_steps": STEPS,
        "server_learning_rate": rate,
    }
    rounds = by_hand(
        "perada", perada(share, rate), hyperparameters=hyperparameters, rtol=1e-5, **OPTIONS
    )
    # Epsilon covers no examples at the server.
    assert rounds.algorithm.ledger.gradients == (0 if share else 2)

    size = int(rounds.start("server.state.size"))
    assert size == round(share * 14)
    everything = np.concatenate([examples(rounds.federation, k)[0] for k in rounds.clients])
    for example in rounds.start("server.state.x")[:size]:
        assert (everything == example).all(axis=1).any()
