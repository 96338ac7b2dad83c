"""Per-FedAvg by hand on quadratics."""

import jax
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, check_averages, gradient, play, quadratic, vectors


@pytest.mark.parametrize("form", ["first_order", "hessian_free"])
def test_per_fedavg_by_hand_on_quadratics(form):
    """f = theta' A theta - 2 b' theta has the meta-gradient (I - 2 alpha A) grad f(theta - alpha grad f(theta))."""
    alpha = 0.05
    knobs = {"alpha": alpha, "form": form, "adapt_steps": 2, "delta": 0.01}
    federation, algorithm, states, _, predictions = play("per_fedavg", epochs=2, knobs=knobs)

    def client(k, own):
        for _ in range(2):
            outer = gradient(federation, k, own - alpha * gradient(federation, k, own))
            if form == "hessian_free":
                outer = outer - alpha * 2 * quadratic(federation, k)[0] @ outer
            own = own - RATE * outer
        return own

    theta = check_averages(states, client, atol=1e-5)
    problem = toys.make_problem(federation)
    adapted = toys.adapt(algorithm, problem, jax.random.key(1), states[-1], federation.client_data)
    for found in (predictions, adapted):
        for k in range(4):
            own = theta.copy()
            for _ in range(2):
                own = own - alpha * gradient(federation, k, own)
            np.testing.assert_allclose(vectors(found.models)[k], [own], rtol=1e-4, atol=1e-5)


def test_per_fedavg_takes_its_inner_step_on_another_mini_batch():
    """A client with two batches and an alpha so large that the first step's inner batch, the second one, decides."""
    federation = toys.make_federation((2,), "regression")
    knobs = {"alpha": 0.3}
    states = toys.play("per_fedavg", federation, 1, optax.sgd(RATE), knobs, batch_size=1, steps=1).states
    x = np.append(np.float64(federation.train.x[0]), np.ones((2, 1)), axis=1)
    y, theta = federation.train.y[0], vectors(states[0].models)[0]
    slope = lambda theta, i: 2 * x[i] * (x[i] @ theta - y[i])
    outcomes = {}
    for first in (0, 1):
        for second in (0, 1):
            outcomes[first, second] = theta - RATE * slope(theta - 0.3 * slope(theta, second), first)
    found = vectors(states[1].models)[0]
    nearest = min(outcomes, key=lambda pair: np.abs(outcomes[pair] - found).max())
    np.testing.assert_allclose(found, outcomes[nearest], rtol=1e-4)
    # A round of one step uses one batch; the batch after it is the same batch.
    assert nearest in ((0, 0), (1, 1))
    states = toys.play("per_fedavg", federation, 1, optax.sgd(RATE), knobs, batch_size=1, epochs=1).states
    found = vectors(states[1].models)[0]
    both = []
    for first, second in ((0, 1), (1, 0)):
        own = theta
        for now, other in ((first, second), (second, first)):
            own = own - RATE * slope(own - 0.3 * slope(own, other), now)
        both.append(np.abs(own - found).max())
    assert min(both) < 1e-4
