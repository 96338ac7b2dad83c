"""Centralized FedeRiCo by hand on quadratics, and on groups with opposite labels."""

import numpy as np
import pytest
from by_hand import by_hand
from collaborators import shared_weights, train_on_opposites
from quadratics import RATE, loss_of

from pfljax.algorithms import FedeRiCoCentralized


def federico_centralized(rounds):
    """Eq. 3 to 6, where every client's data serve all models."""
    theta = rounds.start("models")
    prior = np.full((4, 4), 1 / 4)
    sizes = rounds.sizes
    share = sizes / sizes.sum()

    for _ in rounds:
        likelihood = np.zeros((4, 4))
        gradients = np.zeros((4, *theta.shape))
        for i in rounds.clients:
            for j, model in enumerate(theta):
                likelihood[i, j] = np.exp(-sizes[i] * loss_of(rounds.federation, i, model))
                gradients[i, j] = rounds.gradient(i, model)

        # Eq. 3 and 4
        joint = prior * likelihood
        evidence = joint.sum(axis=1, keepdims=True)
        prior = joint / evidence
        # Eq. 6, with the 1 / n_i of Eq. 5
        theta = theta - RATE * np.einsum("i,ij,ijd->jd", share, prior, gradients)
        # -f of Eq. 1
        negative = -np.log(evidence).sum() / sizes.sum()
        yield {
            "models": theta,
            "rows": np.log(prior),
            "record.metrics.negative_log_likelihood": negative,
        }


def test_federico_centralized_by_hand():
    by_hand("federico_centralized", federico_centralized, rounds=2, epochs=1, atol=1e-4)


@pytest.mark.slow
def test_models_that_start_apart_do_not_become_one_global_model():
    def spread(state):
        return np.ptp(np.asarray(state.models["Dense_0"]["kernel"]), axis=0).max()

    # The trap: models that are equal stay equal.
    state, accuracy, _ = train_on_opposites(FedeRiCoCentralized(), common_init=True)
    assert spread(state) < 1e-5 and accuracy < 0.7
    state, accuracy, weights = train_on_opposites(FedeRiCoCentralized(), common_init=None)
    _, across = shared_weights(weights)
    assert spread(state) > 1 and accuracy > 0.9 and across < 0.2
