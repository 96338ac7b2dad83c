"""Targets of other shapes than (n,): a round of FedAvg and its scores, computed in NumPy."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import pfljax as pfl

RNG = np.random.default_rng(0)
NUM = 31
RATE = 0.3
EPOCHS = 2
OWNER = np.repeat([0, 1, 2], [15, 6, 10])
IGNORED = 255


class Linear(nn.Module):
    """The same linear map at every place."""

    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(x)


def sigmoid(outputs):
    return 1 / (1 + np.exp(-outputs))


def softmax(outputs):
    exp = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def labels(outputs, y):
    """Losses (n,) of several labels, the mean binary cross entropy, and their slopes by the outputs (n, C)."""
    p = sigmoid(outputs)
    return -np.where(y, np.log(p), np.log(1 - p)).mean(axis=1), (p - y) / y.shape[1]


def numbers(outputs, y):
    """Losses (n,) of several numbers, the mean squared error, and their slopes (n, d)."""
    return ((outputs - y) ** 2).mean(axis=1), 2 * (outputs - y) / y.shape[1]


def places(outputs, y):
    """Losses (n,) of images, the mean cross entropy of the pixels with a class, and their slopes (n, H, W, C)."""
    p = softmax(outputs)
    losses = np.zeros(len(y))
    slopes = np.zeros(outputs.shape)
    for n, row, column in np.ndindex(y.shape):
        if (label := y[n, row, column]) in range(outputs.shape[-1]):
            real = np.isin(y[n], range(outputs.shape[-1])).sum()
            losses[n] -= np.log(p[n, row, column, label]) / real
            slopes[n, row, column] = (p[n, row, column] - np.eye(outputs.shape[-1])[label]) / real
    return losses, slopes


def masks():
    """Classes (n, 4, 3) of pixels, of which some have none: -100, IGNORED, and all of one image."""
    y = RNG.integers(3, size=(NUM, 4, 3))
    y[RNG.random(y.shape) < 0.2], y[RNG.random(y.shape) < 0.2] = -100, IGNORED
    return y


FLAT = RNG.normal(size=(NUM, 4))
IMAGES = RNG.normal(size=(NUM, 4, 3, 2))
CASES = {  # x, y, how they are read, outputs, the loss
    "booleans": (FLAT, RNG.random((NUM, 5)) < 0.4, {}, 5, labels),
    "labels as integers": (FLAT, RNG.integers(2, size=(NUM, 5)), {"task": "multilabel"}, 5, labels),
    "numbers": (FLAT, RNG.normal(size=(NUM, 2)), {}, 2, numbers),
    "integers as numbers": (
        FLAT,
        RNG.integers(-4, 5, size=(NUM, 2)),
        {"task": "regression"},
        2,
        numbers,
    ),
    "masks": (IMAGES, masks(), {"ignored_index": IGNORED}, 3, places),
}


def own(split, k):
    """Client k's examples in float64, and their targets."""
    return np.float64(split.x[k, : split.size[k]]), np.asarray(split.y[k, : split.size[k]])


def outputs_of(theta, x):
    kernel, bias = theta
    return x @ kernel + bias


def trained(theta, x, y, loss):
    """Gradient descent on all examples of a client."""
    for _ in range(EPOCHS):
        slopes = loss(outputs_of(theta, x), y)[1] / len(y)
        rows = x.reshape(-1, x.shape[-1])
        slopes = slopes.reshape(-1, slopes.shape[-1])
        theta = theta[0] - RATE * rows.T @ slopes, theta[1] - RATE * slopes.sum(axis=0)
    return theta


def stacked(case):
    """The clients of a case."""
    x, y, read, _, _ = CASES[case]
    return pfl.Federation.from_arrays(x, y, client=OWNER, standardize=False, **read)


@pytest.mark.parametrize("case", CASES)
def test_targets_are_stacked_as_they_are(case):
    """Of client 0's examples, in some order; pixels without a class become -1."""
    y = CASES[case][1]
    loss = CASES[case][4]
    clients = stacked(case)
    assert clients.train.y.shape[2:] == y.shape[1:]
    assert clients.train.y.dtype == {labels: np.uint8, numbers: np.float32, places: np.int32}[loss]
    assert (
        clients.task
        == {labels: "multilabel", numbers: "regression", places: "classification"}[loss]
    )

    expected = np.where((y < 0) | (y == IGNORED), -1, y) if loss is places else y
    nothing = (
        (expected == -1).reshape(NUM, -1).all(axis=1) if loss is places else np.zeros(NUM, bool)
    )
    found = np.concatenate([own(split, 0)[1] for split in (clients.train, clients.test)])

    def ordered(rows):
        return sorted(np.float32(rows).reshape(len(rows), -1).tolist())

    assert ordered(found) == ordered(expected[(OWNER == 0) & ~nothing])


# Integers are then what booleans and numbers are.
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.long if "integers" in case else ()) for case in CASES],
)
def test_a_round_and_its_scores_are_those_of_numpy(case):
    _, _, _, outputs, loss = CASES[case]
    clients = stacked(case)
    local = pfl.LocalTraining(optax.sgd(RATE), epochs=EPOCHS)
    execution = pfl.Execution("map", devices=1)
    simulation = pfl.Simulation(pfl.FedAvg(), clients, Linear(outputs), local, execution=execution)
    states = [simulation.init(jax.random.key(0))]
    states.append(simulation.step(jax.random.key(1), states[0])[0])
    before, after = (
        [np.float64(state.models["Dense_0"][name][0]) for name in ("kernel", "bias")]
        for state in states
    )

    weights = clients.train.size / clients.train.size.sum()
    found = [trained(before, *own(clients.train, k), loss) for k in range(3)]
    for part in range(2):
        expected = sum(weight * theta[part] for weight, theta in zip(weights, found, strict=True))
        np.testing.assert_allclose(after[part], expected, rtol=1e-4, atol=1e-6)
        assert np.abs(after[part] - before[part]).max() > 0.002

    scores = simulation.evaluate(states[1])["test"]
    tests = [own(clients.test, k) for k in range(3)]
    expected = [loss(outputs_of(after, x), y)[0].mean() for x, y in tests]
    np.testing.assert_allclose(scores["loss"], expected, rtol=1e-4)
    assert ("accuracy" in scores) == (loss is places)
    if loss is places:
        for k, (x, y) in enumerate(tests):
            right = outputs_of(after, x).argmax(axis=-1) == y
            real = np.isin(y, range(3))
            shares = [
                (hits & there).sum() / max(there.sum(), 1)
                for hits, there in zip(right, real, strict=True)
            ]
            np.testing.assert_allclose(scores["accuracy"][k], np.mean(shares), rtol=1e-5)


@pytest.mark.slow
def test_pixels_without_a_class_change_nothing():
    """Whatever their input is, and whichever number says that they have none."""
    x = IMAGES
    y = masks()
    ignored = (y < 0) | (y == IGNORED)
    found = []
    for filled, other in ((x, IGNORED), (np.where(ignored[..., None], 99.0, x), -100)):
        targets = np.where(ignored, other, y)
        clients = pfl.Federation.from_arrays(
            filled, targets, client=OWNER, standardize=False, ignored_index=IGNORED
        )
        assert clients.num_classes == 3 and clients.train.y[...].min() == -1
        local = pfl.LocalTraining(optax.sgd(RATE))
        result = pfl.Run(pfl.FedAvg(), clients, Linear(3), local, metrics=["f1"]).train(rounds=2)
        found.append(
            (
                result.loss,
                result.accuracy,
                result.history[-1]["f1"],
                result.state.models["Dense_0"]["kernel"],
            )
        )
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_examples_with_nothing_to_predict_are_left_out():
    """They would count as examples in every mean; labels (n,) have no places to ignore."""
    x = RNG.normal(size=(12, 4, 2)).astype(np.float32)
    y = RNG.integers(3, size=(12, 4))
    y[::3] = -100
    with pytest.warns(
        UserWarning, match="y: has nothing to predict in 4 of 12 examples, which are left out"
    ):
        clients = pfl.Federation.from_arrays(x, y, client=np.arange(12) % 2)
    assert clients.train.size.sum() + clients.test.size.sum() == 8
    with pytest.raises(
        pfl.ArgumentError, match=r"^ignored_index=0: accepted only for sequences and images"
    ):
        pfl.Federation.from_arrays(
            x[:, 0], np.maximum(y[:, 0], 0), client=np.arange(12) % 2, ignored_index=0
        )
