"""FedNTD by hand on networks with one hidden layer."""

import networks
import numpy as np
import pytest
import toys
from by_hand import by_hand
from networks import RATE, examples, gradient, logits, softmax, step
from quadratics import OPTIMIZER

SIZES = (2, 5, 0, 3, 4)
CLASSES = 3


def not_true(outputs, y):
    """The softmax of every row without its true class, which has probability 0."""
    found = np.zeros_like(outputs)
    for place, label in enumerate(y):
        others = [c for c in range(CLASSES) if c != label]
        found[place, others] = softmax(outputs[place : place + 1, others])[0]
    return found


def fedntd(beta, tau):
    """Clients distill the received model's q without the true class: CE + beta tau^2 KL(q || q_k).

    The gradient of tau^2 KL(q || q_k) in a logit is tau (q_k - q).
    """

    def train(rounds, k, theta):
        """The client's model, and its mean loss."""
        x, y = rounds.examples(k)
        received = not_true(logits(theta, x) / tau, y)
        own = theta
        losses = []
        for _ in range(rounds.epochs):
            now = not_true(logits(own, x) / tau, y)
            others = now > 0
            divergence = (received[others] * np.log(received[others] / now[others])).sum() / len(y)
            entropy = -np.log(softmax(logits(own, x))[range(len(y)), y]).mean()
            losses.append(entropy + beta * tau**2 * divergence)
            own = step(own, gradient(own, x, y, push=beta * tau * (now - received) / len(y)), RATE)
        return own, np.mean(losses)

    def reference(rounds):
        theta = networks.row(rounds.start("models"), 0)
        for number in rounds:
            active = rounds.active(number)
            trained, losses = zip(*(train(rounds, k, theta) for k in active), strict=True)
            theta = rounds.mean(trained, rounds.sizes[active])
            loss = np.average(losses, weights=rounds.sizes[active])
            yield {"models": [theta], "record.train_loss": loss}

    return reference


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (3.0, 0.5), (0.0, 1.0)])
def test_rounds_by_hand(beta, tau):
    """Without beta, these are FedAvg's rounds."""
    options = {"rounds": 2, "sizes": SIZES, "epochs": 3, "hidden": (6,)}
    by_hand(
        "fedntd",
        fedntd(beta, tau),
        hyperparameters={"distillation": beta, "temperature": tau},
        **options,
    )


@pytest.mark.slow
def test_a_strong_distillation_keeps_the_other_classes_in_proportion():
    """After one client's round, the odds of the classes that it does not have are nearly those before."""
    federation = toys.make_federation((4,))
    federation.train.y[...] = 0
    moved = []
    for beta in (0.0, 10.0):
        played = toys.play(
            "fedntd", federation, 1, OPTIMIZER, {"distillation": beta}, hidden=(6,), epochs=20
        )
        x, _ = examples(federation, 0)
        before, after = (logits(networks.row(state.models, 0), x) for state in played.states)
        moved.append(np.abs((after - before)[:, 1] - (after - before)[:, 2]).max())
    assert moved[1] < 0.2 * moved[0]
