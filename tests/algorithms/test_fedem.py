"""FedEM and D-FedEM against Eq. 6-10 written out in NumPy, and against their limit cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Split
from pfljax.evaluation import metrics

RATE = 0.1


def regression(sizes, **options):
    federation = toys.make_federation(sizes, "regression", features=2)
    return federation, toys.make_problem(federation, optax.sgd(RATE), **options)


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


@pytest.mark.parametrize(("batch_size", "epochs"), [pytest.param(0, 1, marks=pytest.mark.slow), (0, 3), (2, 2)])
def test_two_rounds_of_two_clients_and_two_components_by_hand(batch_size, epochs):
    federation, problem = regression((4, 5), batch_size=batch_size, epochs=epochs)
    algorithm = toys.make_algorithm("fedem", problem, components=2)
    states, records = toys.train(algorithm, problem, federation.client_data, 2)
    clients = data_of(federation)
    w, b = arrays(states[0].models)
    assert not np.allclose(w[0], w[1])
    pi = np.full((2, 2), 0.5)
    for number in range(2):
        work_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), number)
        before = f_by_hand(w, b, pi, clients)
        sums_w, sums_b, total = 0, 0, 0
        for k, (x, y) in enumerate(clients):
            q, pi[k] = e_step(pi[k], losses_by_hand(w, b, x, y))
            orders = problem.solver.draw_orders(jax.random.fold_in(work_key, k), len(y), 5)
            orders = np.arange(len(y))[None].repeat(epochs, 0) if orders is None else np.asarray(orders)[:, : len(y)]
            size = batch_size or 5
            batches = [order[at : at + size] for order in orders for at in range(0, len(y), size)]
            trained = [m_step(w[m], b[m], q[m], x, y, batches) for m in range(2)]
            sums_w, sums_b = (
                sums_w + len(y) * np.stack([t[0] for t in trained]),
                sums_b + len(y) * np.array([t[1] for t in trained]),
            )
            total += len(y)
        np.testing.assert_allclose(records[number].metrics["negative_log_likelihood"], before, rtol=1e-5)
        np.testing.assert_allclose(
            records[number].metrics["delta_pi"], before - f_by_hand(w, b, pi, clients), rtol=1e-3, atol=1e-6
        )
        w, b = sums_w / total, sums_b / total
        np.testing.assert_allclose(states[number + 1].clients.v, pi, rtol=1e-4)
        found = arrays(states[number + 1].models)
        np.testing.assert_allclose(found[0], w, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found[1], b, rtol=1e-4, atol=1e-6)
    assert records[0].metrics["delta_pi"] > 1e-4  # Theorem 3.2: pi's step improves f


@pytest.mark.parametrize(
    ("keep", "optimizer"),
    [
        (True, optax.adam(RATE)),
        pytest.param(False, optax.sgd(RATE, momentum=0.9), marks=pytest.mark.slow),
        pytest.param(True, optax.sgd(RATE, momentum=0.9), marks=pytest.mark.slow),
        pytest.param(False, optax.adam(RATE), marks=pytest.mark.slow),
    ],
)
def test_one_component_is_fedavg(keep, optimizer):
    federation = toys.make_federation((5, 1, 3, 0))
    problem = toys.make_problem(federation, optimizer, batch_size=2, epochs=2, cohort=3)._replace(keep_optimizer=keep)
    fedem = toys.make_algorithm("fedem", problem, components=1)
    states, _ = toys.train(fedem, problem, federation.client_data, 4)
    expected, _ = toys.train(toys.make_algorithm("fedavg", problem), problem, federation.client_data, 4)
    toys.assert_trees_close(states[-1].models, expected[-1].models, rtol=1e-6, atol=1e-7)
    toys.assert_trees_close(states[-1].clients.optimizer, expected[-1].clients, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_kept_optimizer_has_an_effect():
    federation, problem = regression((5, 4))
    problem = problem._replace(solver=problem.solver._replace(optimizer=optax.sgd(RATE, momentum=0.9)))
    for name in ("fedavg", "fedem"):
        runs = [
            toys.train(toys.make_algorithm(name, p), p, federation.client_data, 3)[0][-1].models
            for p in (problem, problem._replace(keep_optimizer=True))
        ]
        assert not np.allclose(arrays(runs[0])[0], arrays(runs[1])[0], atol=1e-3)


def test_one_client_is_centralized_em():
    federation, problem = regression((9,), epochs=60)
    problem = problem._replace(cohort_size=1)
    algorithm = toys.make_algorithm("fedem", problem, components=2)
    states, _ = toys.train(algorithm, problem, federation.client_data, 5)
    ((x, y),) = data_of(federation)
    (w, b), pi = arrays(states[0].models), np.full(2, 0.5)
    for _ in range(5):
        q, pi = e_step(pi, losses_by_hand(w, b, x, y))
        w, b = map(np.stack, zip(*(m_step(w[m], b[m], q[m], x, y, [np.arange(9)] * 60) for m in range(2)), strict=True))
    np.testing.assert_allclose(arrays(states[-1].models)[0], w, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(states[-1].clients.v[0], pi, rtol=1e-3)


@pytest.mark.parametrize(("sizes", "epochs"), [((12,), 200), ((5, 4, 6), 1)])
def test_f_never_increases(sizes, epochs):
    """With exact M-steps (one client, least squares), or small gradient steps on the surrogate (several clients)."""
    federation, problem = regression(sizes, epochs=epochs)
    algorithm = toys.make_algorithm("fedem", problem, components=3)
    states, _ = toys.train(algorithm, problem, federation.client_data, 12)
    clients = data_of(federation)
    values = [f_by_hand(*arrays(state.models), np.float64(state.clients.v), clients) for state in states]
    assert (np.diff(values) < 1e-6).all() and values[-1] < values[0] - 0.01


@pytest.mark.parametrize("keep", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decentralized_on_the_complete_graph_is_fedem(keep):
    federation = toys.make_federation((4, 4, 4, 4, 4))
    problem = toys.make_problem(federation, optax.sgd(RATE, momentum=0.9), batch_size=3)._replace(keep_optimizer=keep)
    fedem, _ = toys.train(toys.make_algorithm("fedem", problem), problem, federation.client_data, 4)
    algorithm = toys.make_algorithm("dfedem", problem, graph="complete")
    dfedem, records = toys.train(algorithm, problem, federation.client_data, 4)
    for k in range(5):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], dfedem[-1].models)
        toys.assert_trees_close(own, fedem[-1].models, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dfedem[-1].clients.v, fedem[-1].clients.v, rtol=1e-5)
    one_way = 4 * 5 * 3 * tree.row_bytes(fedem[-1].models)  # to 4 neighbors each, M = 3 components
    assert records[0].down == records[0].up == one_way


@pytest.mark.parametrize(
    "knobs", [{"graph": "ring"}, pytest.param({"edge_probability": 0.3, "graphs": 4}, marks=pytest.mark.slow)]
)
def test_decentralized_mixing_is_the_matrix(knobs):
    federation = toys.make_federation((4, 3, 5, 2, 4, 4))
    problem = toys.make_problem(federation, optax.sgd(0.0))
    algorithm = toys.make_algorithm("dfedem", problem, components=2, **knobs)
    start = toys.start(algorithm, problem, federation.client_data)
    models = jax.tree.map(lambda leaf: leaf + jnp.arange(6.0).reshape(6, *[1] * (leaf.ndim - 1)), start.models)
    states, _ = toys.train(algorithm, problem, federation.client_data, 5, state=start._replace(models=models))
    neighbors, weights = np.asarray(start.clients.neighbors), np.asarray(start.clients.weights)  # (K, T, J)
    expected = np.float64(models["Dense_0"]["bias"])
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
    federation = toys.make_federation((4,) * 7)
    problem = toys.make_problem(federation, optax.sgd(0.0), cohort=4)
    algorithm = toys.make_algorithm("dfedem", problem, components=2)
    start = toys.start(algorithm, problem, federation.client_data)
    models = jax.tree.map(lambda leaf: leaf + jnp.arange(7.0).reshape(7, *[1] * (leaf.ndim - 1)), start.models)
    states, _ = toys.train(algorithm, problem, federation.client_data, 6, state=start._replace(models=models))
    spread = [np.ptp(np.asarray(state.models["Dense_0"]["bias"]), axis=0).max() for state in states]
    for state in states[1:]:
        toys.assert_trees_close(tree_mean(state.models), tree_mean(models), rtol=1e-5, atol=1e-5)
    assert spread[-1] < 0.8 * spread[0]


def tree_mean(models):
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), models)


def test_predictions_mix_probabilities():
    federation = toys.make_federation((4, 3))
    problem = toys.make_problem(federation)
    algorithm = toys.make_algorithm("fedem", problem, components=2)
    states, _ = toys.train(algorithm, problem, federation.client_data, 3)
    x = federation.test.x[0]
    use = lambda prediction, _: metrics.predict(problem.plan, problem.model, algorithm, prediction, x)
    found = toys.serve(algorithm, problem, use, jax.random.key(0), states[-1], federation.client_data).found
    params = jax.tree.map(np.float64, states[-1].models)["Dense_0"]
    logits = np.einsum("bf,mfc->mbc", x, params["kernel"]) + params["bias"][:, None]
    each = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = np.einsum("km,mbc->kbc", np.float64(states[-1].clients.v), each)  # Eq. 5
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("name", "steps"), [("fedem", 1), ("fedem", 4), ("dfedem", 3)])
def test_newcomers_take_e_steps_from_equal_weights(name, steps):
    federation, problem = regression((5, 5, 5))
    default = {} if steps == 1 else {"newcomer_steps": steps}
    algorithm = toys.make_algorithm(name, problem, components=2, **default)
    states, _ = toys.train(algorithm, problem, federation.client_data, 3)
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


@pytest.mark.slow
def test_many_steps_are_a_newcomer_s_best_weights():
    """No other weights make its training data more likely, and a single step does not find them."""
    federation, problem = regression((5, 5, 5))
    clients = toys.make_federation((8, 6), "regression", features=2, seed=7)
    values = {}
    for steps in (1, 300):
        algorithm = toys.make_algorithm("fedem", problem, components=2, newcomer_steps=steps)
        states, _ = toys.train(algorithm, problem, federation.client_data, 3)
        found = toys.adapt(algorithm, problem, jax.random.key(0), states[-1], clients.client_data)
        f = lambda pi, states=states: f_by_hand(*arrays(states[-1].models), pi, data_of(clients))
        values[steps] = f(np.float64(found.weights))
    grid = np.linspace(0, 1, 201)
    best = min(f(np.stack([[p, 1 - p], [q, 1 - q]])) for p in grid for q in grid)
    assert values[300] < best + 1e-4 < values[1]


@toys.each_method(["fedem", "dfedem"], fast=["fedem"])
def test_it_finds_the_mixture_that_one_model_cannot(name):
    """Clients that mix two opposite labelings: no single linear model is right, two are."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet([0.4, 0.4], 12)
    x = rng.normal(size=(12, 60, 3)).astype(np.float32)
    which = rng.random((12, 60)) < shares[:, :1]
    y = ((x[..., 0] > 0) == which).astype(np.int32)
    train = Split(x[:, :40], y[:, :40], np.full(12, 40, np.int32))
    test = Split(x[:, 40:], y[:, 40:], np.full(12, 20, np.int32))
    federation = dataclasses.replace(toys.make_federation((40,) * 12, classes=2), train=train, test=test)
    problem = toys.make_problem(federation, optax.sgd(0.5), batch_size=20)
    accuracy = {}
    for method, knobs in ((name, {"components": 2}), ("fedavg", {})):
        algorithm = toys.make_algorithm(method, problem, **knobs)
        states, _ = toys.train(algorithm, problem, federation.client_data, 80)
        key, clients = jax.random.key(0), federation.client_data
        accuracy[method] = toys.evaluate(algorithm, problem, key, states[-1], clients, test)["accuracy"].mean()
    assert accuracy[name] > accuracy["fedavg"] + 0.15


@pytest.mark.parametrize("name", ["fedem", "dfedem"])
def test_there_are_no_more_components_than_the_smallest_client_has_examples(name):
    _, problem = regression((5, 3))
    with pytest.raises(ArgumentError, match=rf"^{name}\.components=4: accepted: 1 to 3, the number of examples of"):
        toys.make_algorithm(name, problem._replace(n_min=3), components=4)


def test_sampling_needs_a_symmetric_matrix(tmp_path):
    matrix = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    np.save(tmp_path / "w.npy", matrix)
    _, problem = regression((5, 3, 4))
    knobs = {"mixing": "file", "mixing_file": str(tmp_path / "w.npy")}
    toys.make_algorithm("dfedem", problem, **knobs)
    with pytest.raises(ArgumentError, match=r"^participation: accepted below 1 only with a symmetric mixing matrix"):
        toys.make_algorithm("dfedem", problem._replace(cohort_size=2), **knobs)
