"""A network of one hidden layer of ReLU and its gradients in NumPy, for rounds worked out by hand."""

import jax
import numpy as np
import optax
import toys

BODY = "Dense_0"
HEAD = "Dense_1"
RATE = 0.2


OPTIMIZER = optax.sgd(RATE)  # one for all, so that plays share what they compile


def row(params, k):
    """Row k of stacked parameters, as float64; what is None stays out."""
    return jax.tree.map(lambda leaf: np.float64(leaf[k]), params)


def features(params, x):
    """What the head receives (n, F)."""
    return np.maximum(x @ params[BODY]["kernel"] + params[BODY]["bias"], 0)


def logits(params, x):
    return features(params, x) @ params[HEAD]["kernel"] + params[HEAD]["bias"]


def softmax(outputs):
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def gradient(params, x, y, shift=0.0, pull=0.0, push=0.0):
    """The gradient of the mean cross entropy of logits + shift.

    `y` (n,) are classes, or (n, C) their probabilities. `pull` (n, F) is added to the gradient in the features, and
    `push` (n, C) to that in the logits.
    """
    n = len(y)
    hidden = features(params, x)
    targets = y if y.ndim == 2 else np.eye(params[HEAD]["bias"].size)[y]
    slope = (softmax(logits(params, x) + shift) - targets) / n + push
    below = (slope @ params[HEAD]["kernel"].T + pull) * (hidden > 0)

    def dense(inputs, slope):
        return {"kernel": inputs.T @ slope, "bias": slope.sum(axis=0)}

    return {BODY: dense(x, below), HEAD: dense(hidden, slope)}


def step(params, slopes, rate, layers=(BODY, HEAD)):
    """The parameters after a step of SGD on some layers."""

    def moved(layer):
        return {name: params[layer][name] - rate * slopes[layer][name] for name in params[layer]}

    return {layer: moved(layer) if layer in layers else params[layer] for layer in params}


def descend(params, x, y, rate, steps, layers=(BODY, HEAD)):
    """Steps of full-batch SGD on some layers."""
    for _ in range(steps):
        params = step(params, gradient(params, x, y), rate, layers)
    return params


def step_by_differences(value, params, parts, rate, width=1e-6):
    """The parameters after a step in some parts along the slopes of value(params), by central differences."""
    leaves, structure = jax.tree.flatten({part: params[part] for part in parts})
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    flat = np.concatenate([leaf.ravel() for leaf in leaves])

    def at(flat):
        split = [
            part.reshape(leaf.shape)
            for part, leaf in zip(np.split(flat, ends), leaves, strict=True)
        ]
        return params | jax.tree.unflatten(structure, split)

    slopes = [
        (value(at(flat + d)) - value(at(flat - d))) / (2 * width) for d in width * np.eye(flat.size)
    ]
    return at(flat - rate * np.array(slopes))


def forward(layers, inputs):
    """The outputs of an MLP, and what each layer receives."""
    received = []
    for number, layer in enumerate(layers):
        inputs = np.maximum(inputs, 0) if number else inputs
        received.append(inputs)
        inputs = inputs @ layer["kernel"] + layer["bias"]
    return inputs, received


def backward(layers, received, slope):
    """Gradients of the layers, and of the inputs, for a gradient of the outputs."""
    found = []
    for number in reversed(range(len(layers))):
        found.insert(0, {"kernel": received[number].T @ slope, "bias": slope.sum(axis=0)})
        slope = slope @ layers[number]["kernel"].T
        slope = slope * (received[number] > 0) if number else slope
    return found, slope


def mean(trees, weights):
    """The weighted mean of trees."""
    return jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=weights), *trees)


def examples(federation, k):
    """Client k's training examples."""
    size = federation.train.size[k]
    return np.float64(federation.train.x[k, :size]), federation.train.y[k, :size]


def play(name, rounds, sizes, hyperparameters=None, hidden=(6,), **options):
    """(federation, problem, algorithm, states, records)."""
    return toys.play(
        name,
        toys.make_federation(sizes),
        rounds,
        OPTIMIZER,
        hyperparameters,
        hidden=hidden,
        **options,
    )


def assert_row_close(models, expected, k=0):
    toys.assert_trees_close(row(models, k), expected, rtol=2e-4, atol=2e-5)
