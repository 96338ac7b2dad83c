"""FedLC by hand on networks with one hidden layer, and what becomes of a class without examples."""

import networks
import numpy as np
import pytest
import toys
from by_hand import by_hand, entry, play, stack
from networks import RATE, logits, row, softmax, step

SIZES = (2, 5, 0, 3, 4)
OPTIONS = {"rounds": 2, "sizes": SIZES, "hidden": (6,), "epochs": 3}


def fedlc(tau):
    """Each client's logits are shifted by -tau n_c^(-1/4), where n_c is its number of examples of class c."""

    def reference(rounds):
        theta = row(rounds.start("models"), 0)
        for number in rounds:
            trained = []
            losses = []
            active = rounds.active(number)
            for k in active:
                x, y = rounds.examples(k)
                count = np.bincount(y, minlength=3)
                shift = -tau * np.where(count, count, 1e-8) ** -0.25
                own = theta
                of_steps = []
                for _ in range(rounds.epochs):
                    probabilities = softmax(logits(own, x) + shift)
                    of_steps.append(-np.log(probabilities[range(len(y)), y]).mean())
                    own = step(own, networks.gradient(own, x, y, shift), RATE)
                trained.append(own)
                losses.append(np.mean(of_steps))

            weights = rounds.sizes[active]
            theta = rounds.mean(trained, weights)
            yield {
                "models": stack([theta]),
                "record.train_loss": np.average(losses, weights=weights),
            }

    return reference


@pytest.mark.parametrize("tau", [1.0, 0.1, 0.0])
def test_fedlc_by_hand(tau):
    """With tau 0 it is FedAvg."""
    rounds = by_hand("fedlc", fedlc(tau), hyperparameters={"tau": tau}, rtol=1e-5, **OPTIONS)
    counts = [np.bincount(rounds.examples(k)[1], minlength=3) for k in rounds.clients]
    assert np.min(counts) == 0
    assert np.max(counts) > 1


def test_a_class_without_examples_keeps_its_weights():
    """It is out of the softmax, so that no client lowers it."""
    federation = toys.make_federation(SIZES)
    federation.train.y[...] = np.minimum(federation.train.y, 1)
    assert (federation.train.y == 1).any()
    rounds = play("fedlc", federation=federation, hyperparameters={"tau": 1.0}, **OPTIONS)
    first = entry(rounds.states[0], "models.Dense_1.kernel")[0]
    last = entry(rounds.states[-1], "models.Dense_1.kernel")[0]
    np.testing.assert_allclose(first[:, 2], last[:, 2], atol=1e-6)
    assert np.abs(first - last)[:, :2].max() > 1e-3
