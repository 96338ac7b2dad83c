"""FedDBE by hand on networks with one hidden layer, and its first round."""

import networks
import numpy as np
import pytest
import toys
from by_hand import by_hand
from networks import HEAD, RATE, features, gradient, logits, row, softmax, step

SIZES = (2, 5, 0, 3, 4)
WIDTH = 6


def of_bias(params, own):
    return own @ params[HEAD]["kernel"]


def step_by_hand(params, own, running, consensus, x, y, kappa, mu):
    """(params, b_k, m, objective) after one full-batch step."""
    z = features(params, x)
    n = len(y)
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


def cross_entropy(params, x, y):
    return -np.log(softmax(logits(params, x))[range(len(y)), y]).mean()


def feddbe(kappa, mu):
    """The first round is FedAvg's, and gives the consensus; then clients train their vectors beside the model."""

    def reference(rounds):
        theta = row(rounds.states[0].models, 0)
        own = np.zeros((5, WIDTH))
        consensus = None
        for number in rounds:
            active = rounds.active(number)
            sizes = rounds.sizes[active]
            trained = []
            objectives = []
            for k in active:
                x, y = rounds.examples(k)
                params = theta
                running = np.zeros(WIDTH)
                values = []
                for _ in range(rounds.epochs):
                    if consensus is None:
                        value = cross_entropy(params, x, y)
                        params = step(params, gradient(params, x, y), RATE)
                    else:
                        found = step_by_hand(params, own[k], running, consensus, x, y, kappa, mu)
                        params, own[k], running, value = found
                    values.append(value)
                trained.append(params)
                objectives.append(np.mean(values))

            if consensus is None:
                means = [
                    features(trained[i], rounds.examples(k)[0]).mean(axis=0)
                    for i, k in enumerate(active)
                ]
                consensus = np.average(means, axis=0, weights=sizes)
            theta = rounds.mean(trained, sizes)
            x = np.float64(rounds.federation.test.x[0])
            yield {
                "models": [theta],
                "clients.row.params": own,
                "server.state.mean": consensus,
                "record.train_loss": np.average(objectives, weights=sizes),
                "probabilities": [softmax(logits(theta, x) + of_bias(theta, each)) for each in own],
            }

    return reference


@pytest.mark.parametrize(("kappa", "mu"), [(3.0, 0.6), (0.0, 1.0)])
def test_rounds_by_hand(kappa, mu):
    hyperparameters = {"alignment": kappa, "beta": mu}
    rounds = by_hand(
        "feddbe",
        feddbe(kappa, mu),
        rtol=1e-5,
        sizes=SIZES,
        hidden=(WIDTH,),
        epochs=3,
        hyperparameters=hyperparameters,
    )
    assert np.ptp(rounds.states[-1].rows.params, axis=0).max() > 1e-2


@pytest.mark.long
def test_the_first_round_is_fedavg_s():
    options = {"rounds": 1, "sizes": SIZES, "batch_size": 2, "epochs": 2}
    found, wanted = (networks.play(name, **options).states[-1] for name in ("feddbe", "fedavg"))
    toys.assert_trees_close(found.models, wanted.models, rtol=1e-5, atol=1e-6)
    assert not np.any(found.rows.params)
