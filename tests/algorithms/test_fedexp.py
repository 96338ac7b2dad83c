"""FedExP by hand on quadratics, and cases in which its server's rate is 1."""

import jax
import numpy as np
import optax
import pytest
import toys
from quadratics import MINI, RATE, SIZES, gradient, play, vectors

EMPTY = (2, 0, 5, 1, 3)


@pytest.mark.parametrize("mean", ["weighted", "uniform"])
def test_by_hand(mean):
    eps = 0.01
    federation, algorithm, states, records, predictions = play(
        "fedexp", rounds=4, epochs=8, sizes=EMPTY, knobs={"eps": eps, "mean": mean}
    )
    share = np.float64(EMPTY) if mean == "weighted" else np.float64(np.array(EMPTY) > 0)
    share /= share.sum()
    models, rates = [vectors(states[0].models)[0]], []
    for number in range(4):
        theta, moved = models[-1], np.zeros((5, 4))
        for k in np.flatnonzero(EMPTY):
            own = theta
            for _ in range(8):
                own = own - RATE * gradient(federation, k, own)
            moved[k] = own - theta
        step = share @ moved
        rates.append(max(1, share @ np.square(moved).sum(axis=1) / (2 * (step @ step + eps))))
        models.append(theta + rates[-1] * step)
        np.testing.assert_allclose(records[number].metrics["server_rate"], rates[-1], rtol=1e-4)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], models[-1], rtol=1e-4, atol=2e-5)
    assert rates[0] == 1 < 1.5 < max(rates)
    expected = (models[-1] + models[-2]) / 2
    expected = np.tile(expected, (5, 1, 1))
    np.testing.assert_allclose(vectors(predictions.models), expected, rtol=1e-4, atol=2e-5)
    problem, key, clients = toys.make_problem(federation), jax.random.key(0), federation.client_data
    last = toys.predict(toys.make_algorithm("fedexp", problem, predict="last"), problem, key, states[-1], clients)
    np.testing.assert_array_equal(vectors(last.models)[:, 0], np.tile(vectors(states[-1].models), (5, 1)))
    newcomers = toys.adapt(algorithm, problem, key, states[-1], clients)
    toys.assert_trees_close(newcomers.models, predictions.models, rtol=1e-6)
    # The norm of an update is a scalar, and the second-to-last model stays at the server.
    assert records[0].down == 5 * 4 * 4 and records[0].up == 4 * (4 + 1) * 4


def test_of_clients_that_are_alike_it_is_fedavg():
    federation = toys.make_federation((4, 4, 4), "regression")
    for leaf in (federation.train.x, federation.train.y):
        leaf[...] = leaf[:1]
    options = {"rounds": 4, "epochs": 5, "federation": federation}
    found, fedavg = play("fedexp", knobs={"eps": 1e-9}, **options), play("fedavg", **options)
    assert all(record.metrics["server_rate"] == 1 for record in found[3])
    np.testing.assert_allclose(vectors(found[2][-1].models), vectors(fedavg[2][-1].models), rtol=1e-6, atol=1e-6)


def test_of_clients_that_differ_it_is_not_fedavg():
    longer = MINI | {"epochs": 12, "rounds": 6}
    gap = vectors(play("fedexp", **longer)[2][-1].models) - vectors(play("fedavg", **longer)[2][-1].models)
    assert np.abs(gap).max() > 1e-2


def test_batch_statistics_are_averaged_and_have_no_part_in_lengths():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE), model=toys.Normalized, epochs=10)
    states, records = toys.train(toys.make_algorithm("fedexp", problem, eps=1e-6), problem, federation.client_data, 4)
    assert records[-1].metrics["server_rate"] > 1.1
    before, after = (jax.device_get(state) for state in states[-2:])
    fedavg, start = toys.make_algorithm("fedavg", problem), before._replace(server=(), round=np.int32(0))
    alone, _ = toys.train(fedavg, problem, federation.client_data, 1, state=start)
    toys.assert_trees_close(after.models["batch_stats"], alone[1].models["batch_stats"], rtol=1e-5, atol=1e-6)
    moved = [
        jax.tree.map(lambda a, b: a - b, models["Dense_0"], before.models["Dense_0"])
        for models in (after.models, alone[1].models)
    ]
    rate = float(records[-1].metrics["server_rate"])
    toys.assert_trees_close(moved[0], jax.tree.map(lambda leaf: rate * leaf, moved[1]), rtol=1e-3, atol=1e-5)
