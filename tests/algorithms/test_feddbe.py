"""FedDBE by hand on networks with one hidden layer; its first round, newcomers, and what travels."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import HEAD, RATE, examples, features, gradient, logits, mean, row, softmax, step

from pfljax.evaluation import metrics

SIZES, WIDTH = (2, 5, 0, 3, 4), 6
ACTIVE = [k for k, size in enumerate(SIZES) if size]


def of_bias(params, own):
    return own @ params[HEAD]["kernel"]


def step_by_hand(params, own, running, consensus, x, y, kappa, mu):
    """(params, b_k, m, objective) after one full-batch step."""
    z, n = features(params, x), len(y)
    running = (1 - mu) * running + mu * z.mean(axis=0)
    value = -np.log(softmax(logits(params, x) + of_bias(params, own))[range(n), y]).mean()
    value += kappa / 2 * np.square(running - consensus).mean()
    pull = kappa * (running - consensus) / WIDTH * mu / n
    slopes = gradient(params, x, y, of_bias(params, own), pull[None])
    # The vector reaches the logits through the kernel, whose gradient it adds to.
    of_logits = slopes[HEAD]["bias"]
    slopes[HEAD]["kernel"] = slopes[HEAD]["kernel"] + np.outer(own, of_logits)
    moved = own - RATE * params[HEAD]["kernel"] @ of_logits
    return step(params, slopes, RATE), moved, running, value


@pytest.mark.parametrize(("kappa", "mu"), [(3.0, 0.6), (0.0, 1.0)])
def test_rounds_by_hand(kappa, mu):
    federation, problem, algorithm, states, records = networks.play(
        "feddbe", 3, SIZES, knobs={"kappa": kappa, "mu": mu}, epochs=3
    )
    theta, own, consensus = row(states[0].models, 0), np.zeros((5, WIDTH)), None
    sizes = [SIZES[k] for k in ACTIVE]
    for state, record in zip(states[1:], records, strict=True):
        trained, values = [], []
        for k in ACTIVE:
            (x, y), params, running, of_steps = examples(federation, k), theta, np.zeros(WIDTH), []
            for _ in range(3):
                if consensus is None:
                    of_steps.append(-np.log(softmax(logits(params, x))[range(len(y)), y]).mean())
                    params = step(params, gradient(params, x, y), RATE)
                else:
                    params, own[k], running, value = step_by_hand(params, own[k], running, consensus, x, y, kappa, mu)
                    of_steps.append(value)
            trained.append(params)
            values.append(np.mean(of_steps))
        if consensus is None:
            means = [
                features(params, examples(federation, k)[0]).mean(axis=0)
                for k, params in zip(ACTIVE, trained, strict=True)
            ]
            consensus = np.average(means, axis=0, weights=sizes)
        theta = mean(trained, sizes)
        toys.assert_trees_close(row(state.models, 0), theta, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.clients.own.model, own, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.server.mean, consensus, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(record.train_loss, np.average(values, weights=sizes), rtol=1e-5)
    x = federation.test.x[0]
    use = lambda prediction, _: metrics.predict(problem, algorithm, prediction, x)
    found = toys.serve(algorithm, problem, use, jax.random.key(0), states[-1], federation.client_data).found
    for k in range(5):
        expected = softmax(logits(theta, np.float64(x)) + of_bias(theta, own[k]))
        np.testing.assert_allclose(found[k], expected, rtol=1e-5, atol=1e-5)
    assert np.ptp(found, axis=0).max() > 1e-2


def test_the_first_round_is_fedavg_s():
    options = {"rounds": 1, "sizes": SIZES, "batch_size": 2, "epochs": 2}
    found, wanted = (networks.play(name, **options).states[-1] for name in ("feddbe", "fedavg"))
    toys.assert_trees_close(found.models, wanted.models, rtol=1e-5, atol=1e-6)
    assert not np.any(found.clients.own.model)


def test_newcomers_train_their_vector_alone():
    _, problem, algorithm, states, _ = networks.play("feddbe", 3, SIZES, epochs=2)
    newcomers = toys.make_federation((3, 4), seed=5)
    found = toys.adapt(algorithm, problem, jax.random.key(4), states[-1], newcomers.client_data)
    theta = row(states[-1].models, 0)
    for k in range(2):
        (x, y), own = examples(newcomers, k), np.zeros(WIDTH)
        for _ in range(2 * problem.rounds):
            of_logits = gradient(theta, x, y, of_bias(theta, own))[HEAD]["bias"]
            own = own - RATE * theta[HEAD]["kernel"] @ of_logits
        np.testing.assert_allclose(found.inputs[k], own, rtol=1e-4, atol=1e-5)
        assert np.abs(own).max() > 1e-3


def test_vectors_stay_and_the_mean_travels():
    *_, records = networks.play("feddbe", 2, SIZES)
    model = 4 * (3 * WIDTH + WIDTH + WIDTH * 3 + 3)
    for record in records:
        assert record.down == 5 * (model + 4 * WIDTH) and record.up == 4 * (model + 4 + 4 * WIDTH)  # and n_k
