"""AFL by hand on quadratics, and its traffic."""

import numpy as np
import pytest
from quadratics import SIZES, descend, loss_of, nearest_on_simplex, play, vectors


def test_afl_by_hand():
    rate = 0.3
    federation, _, states, _, _ = play("afl", rounds=3, knobs={"rate": rate})
    w, share = vectors(states[0].models)[0], np.array(SIZES) / sum(SIZES)
    np.testing.assert_allclose(states[0].server, share, rtol=1e-6)
    for number in range(3):
        losses = np.array([loss_of(federation, k, w) for k in range(4)])
        trained = [descend(federation, k, w, 1) for k in range(4)]
        w = np.average(trained, axis=0, weights=share)
        share = nearest_on_simplex(share + rate * losses)
        np.testing.assert_allclose(states[number + 1].server, share, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], w, rtol=1e-3, atol=1e-4)
    assert (share == 0).any() and share.sum() == pytest.approx(1)


def test_a_client_reads_one_weight():
    (record, *_), model = play("afl")[3], 4 * 4
    assert record.down == 4 * model and record.up == 4 * (model + 4)
