"""Centralized FedeRiCo by hand on quadratics."""

import numpy as np
from quadratics import RATE, SIZES, gradient, loss_of, play, vectors


def test_rounds_by_hand():
    federation, _, states, records, _ = play("federico_centralized")
    theta, prior, share = vectors(states[0].models), np.full((4, 4), 1 / 4), np.array(SIZES) / sum(SIZES)
    for number in range(2):
        losses = np.array([[n * loss_of(federation, i, model) for model in theta] for i, n in enumerate(SIZES)])
        slopes = np.array([[gradient(federation, i, model) for model in theta] for i in range(4)])  # of means
        joint = prior * np.exp(-losses)
        negative_log_likelihood = -np.log(joint.sum(axis=1)).sum() / sum(SIZES)  # -f of Eq. 1
        prior = joint / joint.sum(axis=1, keepdims=True)  # Eq. 3 and 4
        theta = theta - RATE * np.einsum("i,ij,ijd->jd", share, prior, slopes)  # Eq. 6, with the 1 / n_i of Eq. 5
        np.testing.assert_allclose(vectors(states[number + 1].models), theta, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.exp(states[number + 1].clients), prior, atol=1e-5)
        logged = records[number].metrics["negative_log_likelihood"]
        np.testing.assert_allclose(logged, negative_log_likelihood, rtol=1e-4)
