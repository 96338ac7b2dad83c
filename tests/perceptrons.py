"""Classifiers of one hidden layer, whose features and gradients NumPy can work out."""

import numpy as np
import optax
import toys

RATE = 0.2


def weights_of(models, row=0):
    """[W1, b1, W2, b2] of a stacked model, float64."""
    layers = [models[name] for name in ("Dense_0", "Dense_1")]
    return [np.float64(layer[part])[row] for layer in layers for part in ("kernel", "bias")]


def features(weights, x):
    """What the last layer receives, (n, F)."""
    return np.maximum(x @ weights[0] + weights[1], 0)


def probabilities(weights, x):
    logits = features(weights, x) @ weights[2] + weights[3]
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def slopes(weights, x, y, of_features=0.0):
    """The gradient of the mean cross entropy, and of a further term with the gradient (n, F) in the features."""
    z, errors = features(weights, x), probabilities(weights, x)
    errors[np.arange(len(y)), y] -= 1
    errors /= len(y)
    back = (errors @ weights[2].T + of_features) * (z > 0)
    return [x.T @ back, back.sum(axis=0), z.T @ errors, errors.sum(axis=0)]


def stepped(weights, grads):
    return [w - RATE * g for w, g in zip(weights, grads, strict=True)]


def examples(federation, k):
    split = federation.train
    return np.float64(split.x[k, : split.size[k]]), split.y[k, : split.size[k]]


def assert_weights_close(models, expected, row=0, atol=2e-5):
    for found, wanted in zip(weights_of(models, row), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=atol)


def play(name, rounds, sizes, knobs=None, hidden=(6,), **options):
    """(federation, problem, algorithm, states, records)."""
    federation = toys.make_federation(sizes)
    problem = toys.make_problem(federation, optax.sgd(RATE), hidden=hidden, **options)
    algorithm = toys.make_algorithm(name, problem, **knobs or {})
    return federation, problem, algorithm, *toys.train(algorithm, problem, federation.client_data, rounds)
