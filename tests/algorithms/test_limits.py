"""Limits: with its knob off, a method is a simpler one."""

import numpy as np
import pytest
from quadratics import MINI, play, vectors


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("fedprox", {"mu": 0.0}, {"mu": 3.0}),
        ("fedavg_data", {"share": 0.0}, {"share": 0.5}),
        ("lg_fedavg", {"shared_layers": 1}, None),
        ("per_fedavg", {"alpha": 0.0}, {"alpha": 0.2}),
        ("per_fedavg", {"alpha": 0.0, "form": "hessian_free"}, {"alpha": 0.2, "form": "hessian_free"}),
        ("clustered", {"eps1": 0.0}, {"eps1": 1e9, "eps2": 0.0, "gamma": 0.0}),
    ],
)
def test_with_its_knob_off_it_is_fedavg(name, off, on):
    mean = vectors(play("fedavg", **MINI)[2][-1].models)
    found = vectors(play(name, knobs=off, **MINI)[2][-1].models)
    np.testing.assert_allclose(found, np.broadcast_to(mean, found.shape), rtol=1e-5, atol=1e-6)
    if on:
        assert np.abs(vectors(play(name, knobs=on, **MINI)[2][-1].models) - mean).max() > 0.01
