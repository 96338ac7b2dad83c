"""The stage of the docs: updates longer than nine tenths of the last round's do not count."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import toys
from quadratics import OPTIMIZER, descend, vectors
from staged import server_note

import pfljax as pfl
from pfljax.stages.pipeline import pipelined

SIZES = (3, 5, 2, 4, 6, 3, 4, 5, 1, 2)
FEDERATION = toys.make_federation(SIZES, "regression")
PROBLEM = toys.make_problem(FEDERATION, OPTIMIZER)


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def own_stage(monkeypatch):
    """The module of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("own_stage")


def test_the_largest_updates_are_left_out(own_stage):
    method = toys.make_algorithm("fedavg", PROBLEM)
    algorithm = pipelined(PROBLEM, method, [own_stage.without_largest])
    states, records = toys.train(algorithm, PROBLEM, FEDERATION.client_data, 4)
    too_long = np.inf
    left_out = 0
    for before, after, record in zip(states, states[1:], records, strict=False):
        theta = vectors(before.models)[0]
        updates = np.array([descend(FEDERATION, k, theta, 1) - theta for k in range(len(SIZES))])
        lengths = np.linalg.norm(updates, axis=1)
        kept = lengths <= too_long
        mean = np.average(updates[kept], axis=0, weights=np.array(SIZES)[kept])
        np.testing.assert_allclose(vectors(after.models)[0], theta + mean, rtol=1e-4, atol=1e-6)
        assert record.metrics["left_out"] == (~kept).sum()
        # Whoever is left out uploads nothing.
        assert record.up == kept.sum() * (4 * 4 + 4)
        too_long = np.quantile(lengths, 0.9)
        noted = server_note(after, "without_largest")
        np.testing.assert_allclose(noted, too_long, rtol=1e-4)
        left_out += (~kept).sum()
    assert left_out > 0


def test_methods_without_a_mean_are_refused(own_stage):
    with pytest.raises(pfl.ArgumentError, match="whose server averages updates"):
        pipelined(PROBLEM, toys.make_algorithm("local", PROBLEM), [own_stage.without_largest])


@pytest.mark.slow
def test_a_run_takes_stages_of_its_user(own_stage, tmp_path):
    clients = pfl.data.digits(num_clients=6, train_examples=5)

    def run(**options):
        return pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP(hidden=(4,)), **options)

    result = run(stages=[own_stage.without_largest]).train(3, eval_every=1, progress=False)
    assert result.history[1]["left_out"] == 0 < result.history[2]["left_out"]
    out = tmp_path / "run"
    run(stages=[own_stage.without_largest]).train(1, out=out, progress=False)
    with pytest.raises(pfl.ArgumentError, match="own_stages"):
        run().train(2, out=out, resume=True, progress=False)
    with pytest.raises(pfl.ArgumentError, match=r"^stages=3: accepted: functions"):
        run(stages=3)
