"""Clients that weigh each other's models: whom they draw and use, linear models in NumPy, and opposite groups."""

import functools

import jax
import numpy as np
import optax
import toys

from pfljax import data
from pfljax.exchange import lifting

GROUP = np.array([0, 1, 0, 1, 1, 0])  # of the clients of `opposite_groups`


def train_and_note(method, federation, rate, rounds):
    """All states, and the models (rounds, K, J) that clients drew."""
    problem = toys.make_problem(federation, optax.sgd(rate))
    drawn = {}

    def note(number, client, ids):
        drawn[int(number), int(client)] = ids

    noting = toys.watched(method.build(problem), note)
    states, _ = toys.train(noting, problem, federation.client_data, rounds)
    jax.effects_barrier()
    clients = range(problem.num_clients)
    return states, [[drawn[number, k] for k in clients] for number in range(rounds)]


def loss_and_slope(theta, x, y):
    """Cross-entropy of one linear model (F + 1, C), the intercept last, summed over examples, and its gradient."""
    x = np.append(np.float64(x), np.ones((len(x), 1)), axis=1)
    logits = x @ theta
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -logs[np.arange(len(y)), y].sum(), x.T @ (np.exp(logs) - np.eye(theta.shape[1])[y])


def linear_models(state):
    """A state's linear classifiers (K, F + 1, C), the intercept last."""
    layer = state.models["Dense_0"]
    return np.append(np.float64(layer["kernel"]), np.float64(layer["bias"])[:, None], axis=1)


def collaboration(algorithm, problem, federation):
    """(state) -> the weights (K, K) that clients give all models; compiled."""
    select_models = jax.jit(functools.partial(lifting.select_models, algorithm, problem.plan))
    num = problem.num_clients

    def dense(state):
        mixture = select_models(
            jax.random.key(0), state, np.arange(num, dtype=np.int32), federation.train.size
        )
        weights = np.zeros((num, num))
        np.add.at(
            weights,
            (np.arange(num)[:, None], np.asarray(mixture.index)),
            np.asarray(mixture.weights),
        )
        return weights

    return dense


def opposite_groups(size=40):
    """Six clients with labels from two inputs; the labels of the two groups are opposite."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((len(GROUP) * size, 4)).astype(np.float32)
    client = np.repeat(np.arange(len(GROUP)), size)
    y = ((x[:, 0] + x[:, 1] > 0) ^ (GROUP[client] == 1)).astype(np.int64)
    return data.Federation.from_arrays(x, y, client=client, test_fraction=0.5)


def shared_weights(dense):
    """The mean cosine of the clients' rows of weights within a group, and across."""
    rows = dense / np.linalg.norm(dense, axis=1, keepdims=True)
    cosines = rows @ rows.T
    is_same = GROUP[:, None] == GROUP
    is_pair = ~np.eye(len(GROUP), dtype=bool)
    return cosines[is_same & is_pair].mean(), cosines[~is_same].mean()


def train_on_opposites(method, change=lambda state: state, rounds=60, **problem_fields):
    """A method's last state on the opposite groups, its mean test accuracy, and whom its clients use."""
    federation = opposite_groups()
    problem = toys.make_problem(federation, optax.adam(0.05), batch_size=10)._replace(
        **problem_fields
    )
    algorithm = method.build(problem)
    state = change(toys.start(algorithm, problem, federation.client_data))
    states, _ = toys.train(algorithm, problem, federation.client_data, rounds, state=state)
    key = jax.random.key(0)
    clients = federation.client_data
    scores = toys.evaluate(algorithm, problem, key, states[-1], clients, federation.test)
    weights = collaboration(algorithm, problem, federation)(states[-1])
    return states[-1], float(np.mean(scores["accuracy"])), weights
