"""Linear regressions, whose losses are quadratics that NumPy can work out."""

import functools

import numpy as np
import optax
import toys

SIZES = (2, 5, 1, 3)
RATE = 0.1


def vectors(models):
    """(..., d) float64; the intercept is the last parameter."""
    layer = models["Dense_0"]
    return np.append(np.float64(layer["kernel"])[..., 0], np.float64(layer["bias"]), axis=-1)


def quadratic(federation, k, part="train"):
    """Client k's mean squared error is theta' A theta - 2 b' theta + const: (A, b); 0 without examples."""
    split = getattr(federation, part)
    size = split.size[k]
    x = np.append(np.float64(split.x[k, :size]), np.ones((size, 1)), axis=1)
    divisor = max(size, 1)
    return x.T @ x / divisor, x.T @ np.float64(split.y[k, :size]) / divisor


def gradient(federation, k, theta):
    a, b = quadratic(federation, k)
    return 2 * (a @ theta - b)


def loss_of(federation, k, theta, part="train"):
    """Client k's mean squared error on a part of its examples."""
    (a, b) = quadratic(federation, k, part)
    split = getattr(federation, part)
    return theta @ a @ theta - 2 * b @ theta + np.mean(np.float64(split.y[k, : split.size[k]]) ** 2)


def descend(federation, k, theta, steps, correction=0.0):
    """Theta after full-batch steps along client k's gradient and a further term, or a function of theta."""
    for _ in range(steps):
        further = correction(theta) if callable(correction) else correction
        theta = theta - RATE * (gradient(federation, k, theta) + further)
    return theta


def check_averages(states, client, sizes=SIZES, atol=1e-6):
    """Each round's model is the mean by size of what client(k, theta) makes of the one before; returns the last."""
    theta = vectors(states[0].models)[0]
    for state in states[1:]:
        theta = np.average([client(k, theta) for k in range(len(sizes))], axis=0, weights=sizes)
        np.testing.assert_allclose(vectors(state.models)[0], theta, rtol=2e-4, atol=atol)
    return theta


def nearest_on_simplex(point):
    """Projects by bisecting the offset that makes the positive parts sum to 1."""
    low = point.min() - 1
    high = point.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(point - low, 0)


OPTIMIZER = optax.sgd(RATE)  # one for all, so that plays share what they compile


def play(name, rounds=2, sizes=SIZES, hyperparameters=None, federation=None, **options):
    """(federation, algorithm, states, records, predictions)."""
    federation = federation or toys.make_federation(sizes, "regression")
    played, predict = toys.play_and_predict(
        name, federation, rounds, OPTIMIZER, hyperparameters, **options
    )
    return federation, played.algorithm, played.states, played.records, Lazily(predict)


class Lazily:
    """What a function returns, asked for its attributes; it is called, and compiled, with the first of them."""

    def __init__(self, make):
        self._make = functools.cache(make)

    def __getattr__(self, name):
        return getattr(self._make(), name)


MINI = {"batch_size": 2, "epochs": 2, "rounds": 3}
