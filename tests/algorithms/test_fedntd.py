"""FedNTD by hand on networks with one hidden layer, and FedAvg as its limit."""

import networks
import numpy as np
import pytest
import toys
from networks import RATE, examples, gradient, logits, mean, row, softmax, step

SIZES, CLASSES = (2, 5, 0, 3, 4), 3
MINI = {"rounds": 3, "sizes": SIZES, "batch_size": 2, "epochs": 2}


def not_true(outputs, y):
    """The softmax of every row without its true class, which has probability 0."""
    found = np.zeros_like(outputs)
    for place, label in enumerate(y):
        others = [c for c in range(CLASSES) if c != label]
        found[place, others] = softmax(outputs[place : place + 1, others])[0]
    return found


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (3.0, 0.5)])
def test_rounds_by_hand(beta, tau):
    """The gradient of tau^2 KL(q || q_k) in a logit is tau (q_k - q)."""
    federation, _, _, states, records = networks.play("fedntd", 2, SIZES, knobs={"beta": beta, "tau": tau}, epochs=3)
    theta = row(states[0].models, 0)
    for state, record in zip(states[1:], records, strict=True):
        trained, losses = [], []
        for k in (0, 1, 3, 4):
            x, y = examples(federation, k)
            own, kept, of_steps = theta, not_true(logits(theta, x) / tau, y), []
            for _ in range(3):
                now = not_true(logits(own, x) / tau, y)
                others = now > 0
                divergence = (kept[others] * np.log(kept[others] / now[others])).sum() / len(y)
                entropy = -np.log(softmax(logits(own, x))[range(len(y)), y]).mean()
                of_steps.append(entropy + beta * tau**2 * divergence)
                own = step(own, gradient(own, x, y, push=beta * tau * (now - kept) / len(y)), RATE)
            trained.append(own)
            losses.append(np.mean(of_steps))
        sizes = [size for size in SIZES if size]
        theta = mean(trained, sizes)
        toys.assert_trees_close(row(state.models, 0), theta, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(record.train_loss, np.average(losses, weights=sizes), rtol=1e-5)


def last(name, **knobs):
    return networks.play(name, **MINI, knobs=knobs).states[-1].models


def test_without_distillation_it_is_fedavg():
    toys.assert_trees_close(last("fedntd", beta=0.0), last("fedavg"), rtol=1e-5, atol=1e-6)


def test_a_strong_distillation_keeps_the_other_classes_in_proportion():
    """After one client's round, the odds of the classes that it does not have are nearly those before."""
    federation = toys.make_federation((4,))
    federation.train.y[...] = 0
    moved = []
    for beta in (0.0, 10.0):
        played = toys.play("fedntd", federation, 1, None, {"beta": beta}, hidden=(6,), epochs=20)
        x, _ = examples(federation, 0)
        before, after = (logits(row(state.models, 0), x) for state in played.states)
        moved.append(np.abs((after - before)[:, 1] - (after - before)[:, 2]).max())
    assert moved[1] < 0.2 * moved[0]
