"""The plan for debugging, from Python."""

import numpy as np
import optax
import pytest

import pfljax as pfl


@pytest.mark.slow
def test_only_trained_models_are_evaluated_unless_asked_for():
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 2)
    clients = pfl.Federation.from_arrays(x, np.arange(12) % 2, client=np.arange(12) // 6)
    local = pfl.LocalTraining(optax.sgd(0.1))
    arguments = (pfl.FedAvg(), clients, pfl.models.MLP((2,)), local)

    in_python = pfl.Run(*arguments, execution=pfl.Execution(plan="python"))
    soon = in_python.train(2, progress=False)
    assert [row["round"] for row in soon.history] == [2]
    later = in_python.train(1, eval_every=1, progress=False)
    assert [row["round"] for row in later.history] == [2, 3]

    compiled = pfl.Run(*arguments).train(3, eval_every=3, progress=False)
    assert [row["round"] for row in compiled.history] == [0, 3]
    np.testing.assert_allclose(later.history[-1]["loss"], compiled.history[-1]["loss"], rtol=1e-5)
