"""Per-FedAvg by hand on quadratics."""

import numpy as np
import pytest
import toys
from by_hand import by_hand
from quadratics import OPTIMIZER, RATE, quadratic, vectors


def per_fedavg(alpha, form):
    """The mean of models that took steps of RATE along (I - 2 alpha A) grad f(theta - alpha grad f(theta)).

    f = theta' A theta - 2 b' theta; the first-order form has no such matrix. A client predicts after two steps of
    alpha.
    """

    def client(rounds, k, own):
        for _ in range(rounds.epochs):
            outer = rounds.gradient(k, own - alpha * rounds.gradient(k, own))
            if form == "hessian_free":
                outer = outer - alpha * 2 * quadratic(rounds.federation, k)[0] @ outer
            own = own - RATE * outer
        return own

    def adapted(rounds, k, theta):
        for _ in range(2):
            theta = theta - alpha * rounds.gradient(k, theta)
        return theta

    def reference(rounds):
        theta = rounds.start("models")[0]
        for _ in rounds:
            theta = rounds.mean([client(rounds, k, theta) for k in rounds.clients])
            yield {
                "models": [theta],
                "predictions": [[adapted(rounds, k, theta)] for k in rounds.clients],
            }

    return reference


@pytest.mark.parametrize("form", ["first_order", "hessian_free"])
@pytest.mark.parametrize("alpha", [0.05, 0.0])
def test_per_fedavg_by_hand(alpha, form):
    """With alpha 0 it is FedAvg."""
    hyperparameters = {
        "personal_learning_rate": alpha,
        "form": form,
        "adapt_steps": 2,
        "delta": 0.01,
    }
    by_hand("per_fedavg", per_fedavg(alpha, form), rounds=2, hyperparameters=hyperparameters)


def test_per_fedavg_takes_its_inner_step_on_another_mini_batch():
    """A client with two batches and an alpha so large that the first step's inner batch, the second one, decides."""
    alpha = 0.3
    federation = toys.make_federation((2,), "regression")
    x = np.append(np.float64(federation.train.x[0]), np.ones((2, 1)), axis=1)
    y = federation.train.y[0]

    def slope(theta, i):
        return 2 * x[i] * (x[i] @ theta - y[i])

    def step(theta, now, other):
        return theta - RATE * slope(theta - alpha * slope(theta, other), now)

    def trained(**length):
        options = {"hyperparameters": {"personal_learning_rate": alpha}, "batch_size": 1} | length
        states = toys.play("per_fedavg", federation, 1, OPTIMIZER, **options).states
        return vectors(states[0].models)[0], vectors(states[1].models)[0]

    # A round of one step uses one batch; the batch after it is the same batch.
    theta, found = trained(steps=1)
    outcomes = {(i, j): step(theta, i, j) for i in (0, 1) for j in (0, 1)}
    nearest = min(outcomes, key=lambda pair: np.abs(outcomes[pair] - found).max())
    np.testing.assert_allclose(found, outcomes[nearest], rtol=1e-4)
    assert nearest in ((0, 0), (1, 1))

    # An epoch of two: each step's inner batch is the other one.
    theta, found = trained(epochs=1)
    orders = [step(step(theta, i, j), j, i) for i, j in ((0, 1), (1, 0))]
    assert min(np.abs(own - found).max() for own in orders) < 1e-4
