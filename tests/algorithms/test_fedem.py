"""FedEM and D-FedEM against Eq. 6-10 written out in NumPy, and against their limit cases."""

import jax
import numpy as np
import optax
import pytest
import toys

import pfljax as pfl
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.evaluation import metrics

RATE = 0.1


def regression(sizes):
    return toys.make_federation(sizes, "regression", features=2)


def arrays(params):
    """A linear model's weights (J, F) and biases (J,), in double precision."""
    return np.float64(params["Dense_0"]["kernel"][..., 0]), np.float64(params["Dense_0"]["bias"][..., 0])


def losses_by_hand(w, b, x, y):
    """(M, n) squared errors."""
    return (x @ w.T + b - y[:, None]).T ** 2


def e_step(pi, losses):
    """Eq. 8 and 9: responsibilities (M, n) and mixture weights (M,)."""
    q = pi[:, None] * np.exp(-losses)
    q /= q.sum(axis=0)
    return q, q.mean(axis=1)


def m_step(w, b, q, x, y, batches):
    """Steps of SGD from (w, b) on sum(q l) / batch, for one component."""
    for batch in batches:
        error = 2 * (x[batch] @ w + b - y[batch]) * q[batch] / len(batch)
        w, b = w - RATE * x[batch].T @ error, b - RATE * error.sum()
    return w, b


def f_by_hand(w, b, pi, clients):
    """Eq. 6 over clients [(x, y)], with pi (K, M)."""
    total = sum(
        -np.log((p[:, None] * np.exp(-losses_by_hand(w, b, x, y))).sum(axis=0)).sum()
        for p, (x, y) in zip(pi, clients, strict=True)
    )
    return total / sum(len(y) for _, y in clients)


def data_of(federation):
    train = federation.train
    return [(np.float64(train.x[k, :n]), np.float64(train.y[k, :n])) for k, n in enumerate(train.size)]


@pytest.mark.parametrize(("num", "smaller", "batch_size", "epochs"), [(2, 4, 0, 3), (4, 1, 2, 2)])
def test_two_rounds_of_two_clients_by_hand(num, smaller, batch_size, epochs):
    """Also with more components than a client has examples."""
    options = {"knobs": {"components": num}, "batch_size": batch_size, "epochs": epochs}
    federation, problem, _, states, records = toys.play(
        "fedem", regression((smaller, 5)), 2, optax.sgd(RATE), **options
    )
    clients = data_of(federation)
    w, b = arrays(states[0].models)
    assert not np.allclose(w[0], w[1])
    pi = np.full((2, num), 1 / num)
    for number in range(2):
        work_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), number)
        before = f_by_hand(w, b, pi, clients)
        sums_w, sums_b = 0, 0
        for k, (x, y) in enumerate(clients):
            q, pi[k] = e_step(pi[k], losses_by_hand(w, b, x, y))
            orders = problem.solver.draw_orders(jax.random.fold_in(work_key, k), len(y), 5)
            orders = np.arange(len(y))[None].repeat(epochs, 0) if orders is None else np.asarray(orders)[:, : len(y)]
            size = batch_size or 5
            batches = [order[at : at + size] for order in orders for at in range(0, len(y), size)]
            trained = [m_step(w[m], b[m], q[m], x, y, batches) for m in range(num)]
            sums_w = sums_w + len(y) * np.stack([t[0] for t in trained])
            sums_b = sums_b + len(y) * np.array([t[1] for t in trained])
        found, gain = records[number].metrics, before - f_by_hand(w, b, pi, clients)
        np.testing.assert_allclose(found["negative_log_likelihood"], before, rtol=1e-5)
        np.testing.assert_allclose(found["delta_pi"], gain, rtol=1e-3, atol=1e-6)
        w, b = sums_w / (smaller + 5), sums_b / (smaller + 5)
        np.testing.assert_allclose(states[number + 1].clients.v, pi, rtol=1e-4)
        found = arrays(states[number + 1].models)
        np.testing.assert_allclose(found[0], w, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found[1], b, rtol=1e-4, atol=1e-6)
    assert records[0].metrics["delta_pi"] > 1e-4  # Theorem 3.2: pi's step improves f


@pytest.mark.slow
def test_one_component_is_fedavg():
    federation = toys.make_federation((5, 1, 3, 0))
    problem = toys.make_problem(federation, optax.adam(RATE), batch_size=2, epochs=2, cohort=3)
    problem = problem._replace(keep_optimizer=True)
    fedem, fedavg = toys.make_algorithm("fedem", problem, components=1), toys.make_algorithm("fedavg", problem)
    states, expected = (toys.train(each, problem, federation.client_data, 4)[0] for each in (fedem, fedavg))
    toys.assert_trees_close(states[-1].models, expected[-1].models, rtol=1e-6, atol=1e-7)
    toys.assert_trees_close(states[-1].clients.optimizer, expected[-1].clients, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_decentralized_on_the_complete_graph_is_fedem():
    federation = toys.make_federation((4, 4, 4, 4, 4))
    problem = toys.make_problem(federation, optax.sgd(RATE, momentum=0.9), batch_size=3)._replace(keep_optimizer=True)
    fedem, _ = toys.train(toys.make_algorithm("fedem", problem), problem, federation.client_data, 4)
    algorithm = toys.make_algorithm("dfedem", problem, graph="complete")
    dfedem, records = toys.train(algorithm, problem, federation.client_data, 4)
    for k in range(5):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], dfedem[-1].models)
        toys.assert_trees_close(own, fedem[-1].models, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dfedem[-1].clients.v, fedem[-1].clients.v, rtol=1e-5)
    one_way = 4 * 5 * 3 * tree.row_bytes(fedem[-1].models)  # to 4 neighbors each, M = 3 components
    assert records[0].down == records[0].up == one_way


def mixing(sizes, rounds, knobs=None, **options):
    """D-FedEM's states where clients mix models that are apart, and do not train them."""
    federation = toys.make_federation(sizes)
    problem = toys.make_problem(federation, optax.sgd(0.0), **options)
    algorithm = toys.make_algorithm("dfedem", problem, components=2, **knobs or {})
    start, own = toys.start(algorithm, problem, federation.client_data), np.arange(len(sizes), dtype=np.float32)
    models = jax.tree.map(lambda leaf: leaf + own.reshape(-1, *[1] * (leaf.ndim - 1)), start.models)
    return toys.train(algorithm, problem, federation.client_data, rounds, state=start._replace(models=models))[0]


@pytest.mark.parametrize(
    "knobs", [{"graph": "ring"}, pytest.param({"edge_probability": 0.3, "graphs": 4}, marks=pytest.mark.slow)]
)
def test_decentralized_mixing_is_the_matrix(knobs):
    states = mixing((4, 3, 5, 2, 4, 4), 5, knobs)
    start = states[0]
    neighbors, weights = np.asarray(start.clients.neighbors), np.asarray(start.clients.weights)  # (K, T, J)
    expected = np.float64(start.models["Dense_0"]["bias"])
    for number, state in enumerate(states[1:]):
        matrix = np.zeros((6, 6))
        t = number % neighbors.shape[1]
        for k in range(6):
            np.add.at(matrix[:, k], neighbors[k, t], weights[k, t])
        np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=1e-6)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-6)
        expected = np.tensordot(matrix, expected, axes=1)
        np.testing.assert_allclose(state.models["Dense_0"]["bias"], expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(expected, axis=0).max() < 4  # they have come nearer: they were 5 apart


def test_absent_clients_take_no_weight_with_them():
    states = mixing((4,) * 7, 6, cohort=4)
    spread = [np.ptp(np.asarray(state.models["Dense_0"]["bias"]), axis=0).max() for state in states]
    for state in states[1:]:
        toys.assert_trees_close(tree_mean(state.models), tree_mean(states[0].models), rtol=1e-5, atol=1e-5)
    assert spread[-1] < 0.8 * spread[0]


def tree_mean(models):
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), models)


def test_predictions_mix_probabilities():
    federation = toys.make_federation((4, 3))
    _, problem, algorithm, states, _ = toys.play("fedem", federation, 3, knobs={"components": 2})
    x = federation.test.x[0]
    use = lambda prediction, _: metrics.predict(problem, algorithm, prediction, x)
    found = toys.serve(algorithm, problem, use, jax.random.key(0), states[-1], federation.client_data).found
    params = jax.tree.map(np.float64, states[-1].models)["Dense_0"]
    logits = np.einsum("bf,mfc->mbc", x, params["kernel"]) + params["bias"][:, None]
    each = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = np.einsum("km,mbc->kbc", np.float64(states[-1].clients.v), each)  # Eq. 5
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("name", "steps"), [("fedem", 1), ("fedem", 4), ("dfedem", 3)])
def test_newcomers_take_e_steps_from_equal_weights(name, steps):
    knobs = {"components": 2} | ({} if steps == 1 else {"newcomer_steps": steps})
    _, problem, algorithm, states, _ = toys.play(name, regression((5, 5, 5)), 3, optax.sgd(RATE), knobs)
    newcomers = toys.make_federation((3, 6), "regression", features=2, seed=7)
    found = toys.adapt(algorithm, problem, jax.random.key(0), states[-1], newcomers.client_data)
    models = states[-1].models if name == "fedem" else tree_mean(states[-1].models)
    w, b = arrays(models)
    expected = []
    for x, y in data_of(newcomers):
        pi = np.full(2, 0.5)
        for _ in range(steps):
            pi = e_step(pi, losses_by_hand(w, b, x, y))[1]
        expected.append(pi)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-4)
    for k in range(2):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], found.models)
        toys.assert_trees_close(own, models, rtol=1e-6, atol=1e-7)


def test_a_federation_with_a_tiny_client_is_trained():
    """A client of one example, and four components; its mixture weights are on the simplex."""
    federation = toys.make_federation((5, 1, 4))
    result = pfl.Run(pfl.FedEM(components=4), federation, pfl.models.MLP(hidden=())).train(2, progress=False)
    assert np.isfinite(result.loss) and np.isfinite(result.accuracy)
    np.testing.assert_allclose(result.state.clients.v.sum(axis=1), 1, rtol=1e-5)
    assert np.abs(np.diff(result.state.clients.v[1])).max() > 1e-3  # no longer equal


def test_sampling_needs_a_symmetric_matrix(tmp_path):
    matrix = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    np.save(tmp_path / "w.npy", matrix)
    problem = toys.make_problem(regression((5, 3, 4)))
    knobs = {"mixing": "file", "mixing_file": str(tmp_path / "w.npy")}
    toys.make_algorithm("dfedem", problem, **knobs)
    with pytest.raises(ArgumentError, match=r"^participation: accepted below 1 only with a symmetric mixing matrix"):
        toys.make_algorithm("dfedem", problem._replace(cohort_size=2), **knobs)
