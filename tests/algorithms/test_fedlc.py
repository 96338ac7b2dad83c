"""FedLC by hand on networks with one hidden layer, and FedAvg as its limit."""

import networks
import numpy as np
import pytest
import toys
from networks import RATE, examples, gradient, logits, mean, row, softmax, step

SIZES = (2, 5, 0, 3, 4)


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_rounds_by_hand(tau):
    federation, _, _, states, records = networks.play("fedlc", 2, SIZES, knobs={"tau": tau}, epochs=3)
    theta, seen = row(states[0].models, 0), []
    for state, record in zip(states[1:], records, strict=True):
        trained, losses = [], []
        for k in (0, 1, 3, 4):
            x, y = examples(federation, k)
            count = np.bincount(y, minlength=3)
            shift, own, of_steps = -tau * np.where(count, count, 1e-8) ** -0.25, theta, []
            seen.extend(count)
            for _ in range(3):
                of_steps.append(-np.log(softmax(logits(own, x) + shift)[range(len(y)), y]).mean())
                own = step(own, gradient(own, x, y, shift), RATE)
            trained.append(own)
            losses.append(np.mean(of_steps))
        sizes = [size for size in SIZES if size]
        theta = mean(trained, sizes)
        toys.assert_trees_close(row(state.models, 0), theta, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(record.train_loss, np.average(losses, weights=sizes), rtol=1e-5)
    assert 0 in seen and max(seen) > 1


def test_without_calibration_it_is_fedavg():
    last = lambda name, **knobs: networks.play(name, 3, SIZES, knobs=knobs, batch_size=2, epochs=2).states[-1].models
    toys.assert_trees_close(last("fedlc", tau=0.0), last("fedavg"), rtol=1e-5, atol=1e-6)


def test_a_class_without_examples_keeps_its_weights():
    """It is out of the softmax, so that no client lowers it."""
    federation = toys.make_federation((4, 3))
    federation.train.y[...] = np.minimum(federation.train.y, 1)
    assert (federation.train.y == 1).any()
    _, _, _, states, _ = toys.play("fedlc", federation, 2, epochs=2)
    first, last = (state.models["Dense_0"]["kernel"][0] for state in (states[0], states[-1]))
    np.testing.assert_allclose(first[:, 2], last[:, 2], atol=1e-6)
    assert np.abs(first - last)[:, :2].max() > 1e-3
