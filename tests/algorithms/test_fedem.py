"""FedEM and D-FedEM against Eq. 6-10 written out in NumPy, and against their limit cases."""

import jax
import numpy as np
import optax
import pytest
import toys
from by_hand import by_hand
from quadratics import RATE

from pfljax.contract.errors import ArgumentError
from pfljax.evaluation import metrics

EMPTY = (4, 0, 5, 1, 3)


def losses_of(theta, x, y):
    """(M, n) squared errors of the components (M, d)."""
    return ((x @ theta.T - y[:, None]) ** 2).T


def e_step(pi, losses):
    """Eq. 8 and 9: responsibilities (M, n) and mixture weights (M,)."""
    q = pi[:, None] * np.exp(-losses)
    q = q / q.sum(axis=0)
    return q, q.mean(axis=1)


def m_step(theta, q, x, y, batches):
    """Steps of SGD on the mean of q l over a batch, for one component."""
    for batch in batches:
        slope = 2 * (x[batch] @ theta - y[batch]) * q[batch] / len(batch)
        theta = theta - RATE * x[batch].T @ slope
    return theta


def log_likelihood(theta, pi, x, y):
    """Of all examples, as in Eq. 6."""
    return np.log((pi[:, None] * np.exp(-losses_of(theta, x, y))).sum(axis=0)).sum()


def examples(rounds, k):
    """Client k's inputs with a one for the intercept, and its targets."""
    x, y = rounds.examples(k)
    return np.append(x, np.ones((len(x), 1)), axis=1), np.float64(y)


def batches_of(rounds, number, k):
    """The examples of each of client k's steps."""
    size = rounds.sizes[k]
    work_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), number)
    n_max = rounds.federation.train.y.shape[1]
    orders = rounds.problem.solver.draw_orders(jax.random.fold_in(work_key, k), size, n_max)
    if orders is None:
        return [np.arange(size)] * rounds.epochs
    return [
        order[at : at + 2] for order in np.asarray(orders)[:, :size] for at in range(0, size, 2)
    ]


def local_step(rounds, number, k, theta, pi):
    """Client k's components and mixture weights after a round, and its log-likelihoods before and after the E-step."""
    x, y = examples(rounds, k)
    before = log_likelihood(theta, pi, x, y)
    q, pi = e_step(pi, losses_of(theta, x, y)) if len(y) else (None, pi)
    after = log_likelihood(theta, pi, x, y)
    batches = batches_of(rounds, number, k)
    trained = (
        [m_step(theta[m], q[m], x, y, batches) for m in range(len(theta))] if len(y) else theta
    )
    return np.array(trained), pi, before, after


def fedem(rounds):
    """Algorithm 1."""
    theta = rounds.start("models")
    assert np.abs(theta[0] - theta[1]).max() > 0.1
    pi = np.full((len(rounds.sizes), len(theta)), 1 / len(theta))
    for number in rounds:
        trained, new, before, after = zip(
            *(local_step(rounds, number, k, theta, pi[k]) for k in rounds.clients), strict=True
        )
        pi = np.array(new)
        theta = rounds.mean(trained)

        total = rounds.sizes.sum()
        gain = (sum(after) - sum(before)) / total
        assert number or gain > 1e-4  # Theorem 3.2: pi's step improves f
        metrics = {"negative_log_likelihood": -sum(before) / total, "delta_pi": gain}
        yield {"models": theta, "rows": pi, "record.metrics": metrics, "predictions.weights": pi}


@pytest.mark.parametrize(
    ("num", "batch_size"),
    [(4, 2), pytest.param(2, 0, marks=pytest.mark.slow)],
    ids=["batches", "full"],
)
def test_rounds_by_hand(num, batch_size):
    """Also with more components than a client has examples, and with a client that has none."""
    options = {"hyperparameters": {"components": num}, "batch_size": batch_size, "sizes": EMPTY}
    by_hand("fedem", fedem, rounds=2, **options)


def matrix(rounds, number):
    """W of a round (K, K): the weights of absent clients go to those who would receive from them."""
    neighbors = np.asarray(rounds.states[0].rows.neighbors)  # (K, T, J)
    weights = np.float64(rounds.states[0].rows.weights)
    cohort = rounds.cohort(number)
    t = number % neighbors.shape[1]
    w = np.eye(len(neighbors))
    for k in cohort:
        w[:, k] = 0
        for n, weight in zip(neighbors[k, t], weights[k, t], strict=True):
            w[n if n in cohort else k, k] += weight
    np.testing.assert_allclose(w.sum(axis=0), 1, rtol=1e-6)
    np.testing.assert_allclose(w.sum(axis=1), 1, rtol=1e-6)
    return w


def dfedem(rounds):
    """FedEM's local step, and then the mean over neighbors: client k's components are sum_n W_kn theta_n (Eq. 10)."""
    theta = rounds.start("models")
    pi = np.full(theta.shape[:2], 1 / theta.shape[1])
    mixed = 0
    for number in rounds:
        for k in rounds.cohort(number):
            theta[k], pi[k], _, _ = local_step(rounds, number, k, theta[k], pi[k])
        w = matrix(rounds, number)
        mixed += np.abs(w - np.eye(len(w))).max()
        theta = np.tensordot(w, theta, axes=1)
        yield {"models": theta, "rows.v": pi, "predictions": theta, "predictions.weights": pi}
    assert mixed > 0


@pytest.mark.parametrize(
    ("hyperparameters", "cohort"),
    [
        ({"edge_probability": 0.3, "graphs": 3}, 4),
        pytest.param({"graph": "ring"}, 6, marks=pytest.mark.slow),
    ],
)
def test_decentralized_rounds_by_hand(hyperparameters, cohort):
    """Also with several graphs in turn, and absent clients, which take no weight with them."""
    options = {
        "sizes": (4, 3, 5, 2, 4, 4),
        "cohort": cohort,
        "hyperparameters": {"components": 2} | hyperparameters,
    }
    by_hand("dfedem", dfedem, rounds=5, epochs=1, **options)


def with_optimizers(name, problem, federation, **hyperparameters):
    """A run's algorithm, with the engine's memory of optimizers; its state after four rounds, and its predictions."""
    clients = federation.client_data
    experiment = toys.make_experiment(
        name, problem, federation, hyperparameters=hyperparameters, plan=problem.plan
    )
    algorithm = experiment.algorithm(problem.plan)
    states, _ = toys.train(algorithm, problem, clients, 4)
    return states[-1], toys.predict(algorithm, problem, jax.random.key(0), states[-1], clients)


@pytest.mark.slow
def test_one_component_is_fedavg():
    federation = toys.make_federation((5, 1, 3, 0))
    problem = toys.make_problem(federation, optax.adam(RATE), batch_size=2, epochs=2, cohort=3)
    problem = problem._replace(keep_optimizer=True)
    fedem, _ = with_optimizers("fedem", problem, federation, components=1)
    fedavg, _ = with_optimizers("fedavg", problem, federation)
    toys.assert_trees_close(fedem.models, fedavg.models, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_decentralized_on_the_complete_graph_is_fedem():
    federation = toys.make_federation((4, 4, 4, 4, 4))
    problem = toys.make_problem(federation, optax.sgd(RATE, momentum=0.9), batch_size=3)
    problem = problem._replace(keep_optimizer=True)
    fedem, mixed = with_optimizers("fedem", problem, federation)
    dfedem, mixed_alone = with_optimizers("dfedem", problem, federation, graph="complete")
    for k in range(5):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], dfedem.models)
        toys.assert_trees_close(own, fedem.models, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mixed_alone.weights, mixed.weights, rtol=1e-5)


def test_predictions_mix_probabilities():
    federation = toys.make_federation((4, 3))
    problem = toys.make_problem(federation)
    algorithm = toys.make_algorithm("fedem", problem, components=2)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(
        lambda: toys.init(algorithm, problem, jax.random.key(0), federation.client_data)
    )
    models = jax.tree.map(lambda leaf: np.float32(rng.normal(size=leaf.shape)), shapes.models)
    weights = np.float32(rng.dirichlet([1, 1], size=2))
    state = shapes.with_models(models).with_rows(weights)._replace(round=np.int32(0))
    x = federation.test.x[0]

    def use(prediction, _):
        return metrics.predict(problem, algorithm, prediction, x)

    found = toys.serve(
        algorithm, problem, use, jax.random.key(0), state, federation.client_data
    ).outputs

    params = models["Dense_0"]
    logits = np.einsum("bf,mfc->mbc", x, params["kernel"]) + params["bias"][:, None]
    each = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("km,mbc->kbc", weights, each), rtol=1e-5)  # Eq. 5


def test_sampling_needs_a_symmetric_matrix(tmp_path):
    matrix = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    np.save(tmp_path / "w.npy", matrix)
    problem = toys.make_problem(toys.make_federation((5, 3, 4), "regression"))
    hyperparameters = {"mixing": "file", "mixing_file": str(tmp_path / "w.npy")}
    toys.make_algorithm("dfedem", problem, **hyperparameters)
    with pytest.raises(
        ArgumentError, match=r"^participation: accepted below 1 only with a symmetric mixing matrix"
    ):
        toys.make_algorithm("dfedem", problem._replace(cohort_size=2), **hyperparameters)
