"""Batch statistics in local training: worked out in NumPy by the layer's momentum formula."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Split
from pfljax.local.privacy import Privacy
from pfljax.local.training import LocalTraining

MOMENTUM = 0.7
FEDERATION = toys.make_federation((5, 3), "regression")


class Normalized(nn.Module):
    """A linear model of normalized inputs."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(x)
        return nn.Dense(1)(x)


def problem_of(optimizer=None, **options):
    return toys.make_problem(FEDERATION, optimizer or optax.sgd(0.1), model=Normalized(), **options)


def start(problem):
    return jax.jit(problem.model.init)(jax.random.key(0))


def client(k):
    return Split(*(jnp.asarray(leaf[k]) for leaf in FEDERATION.train))


def moved(statistics, x):
    """Running mean and variance (2, features) after a batch x."""
    return MOMENTUM * statistics + (1 - MOMENTUM) * np.stack([x.mean(axis=0), x.var(axis=0)])


def statistics_of(params):
    found = params["batch_stats"]["BatchNorm_0"]
    return np.stack([found["mean"], found["var"]])


START = np.stack([np.zeros(3), np.ones(3)])


@pytest.mark.parametrize(
    ("optimizer", "batch_size"),
    [
        (optax.sgd(0.1), 0),
        (optax.adamw(0.3, weight_decay=0.5), 2),
        pytest.param(optax.sgd(0.1), 4, marks=pytest.mark.slow),
        pytest.param(optax.sgd(0.1), 2, marks=pytest.mark.long),
    ],
)
def test_local_steps_move_them_by_the_layer_s_formula(optimizer, batch_size):
    """Whatever the optimizer, of the examples in the batch; the last batch of an epoch may have only one."""
    problem = problem_of(optimizer, batch_size=batch_size, epochs=2)
    solver = problem.solver
    params = start(problem)
    key = jax.random.key(5)
    fit = jax.jit(lambda p, s: solver.fit(key, solver.begin(p), s, round_number=0))
    for split in map(client, range(2)):
        state, loss = fit(params, split)
        trained = state.whole
        orders = solver.draw_orders(key, split.size, 5)
        orders = np.stack([np.arange(5)] * 2) if orders is None else np.asarray(orders)
        expected = START
        batch = batch_size or 5
        size = int(split.size)
        for order in orders:
            for first in range(0, size, batch):
                places = np.arange(first, min(first + batch, size))
                expected = moved(expected, np.float64(split.x)[order[places]])
        np.testing.assert_allclose(statistics_of(trained), expected, rtol=1e-4, atol=1e-6)
        assert (
            np.isfinite(loss)
            and np.abs(trained["Dense_0"]["kernel"] - params["Dense_0"]["kernel"]).min() > 0
        )


def test_the_mean_loss_and_the_statistics_of_a_filled_batch_are_of_the_real_examples():
    problem = problem_of(batch_size=4)
    split = client(1)
    batch = problem.solver.take_batch(jax.random.key(0), None, split, 0)
    np.testing.assert_array_equal(batch.mask, [1, 1, 1, 0])
    np.testing.assert_array_equal(batch.x[3], split.x[0])
    params = start(problem)
    x = np.float64(batch.x)[:3]
    outputs = ((x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5)) @ np.float64(
        params["Dense_0"]["kernel"]
    )[:, 0]
    expected = np.mean((outputs - np.float64(batch.y)[:3]) ** 2)

    @jax.jit
    def measure(params):
        losses = problem.model.loss(params, split.x[:3], split.y[:3])
        return (
            problem.solver.mean_loss(params, batch),
            problem.solver.total_loss(params, split),
            losses,
        )

    mean, total, losses = measure(params)
    np.testing.assert_allclose(mean, expected, rtol=1e-4)
    np.testing.assert_allclose(total, losses.sum(), rtol=1e-5)


def test_predictions_use_the_running_statistics():
    problem = problem_of()
    params = start(problem)
    params["batch_stats"]["BatchNorm_0"] = {"mean": jnp.full(3, 0.5), "var": jnp.full(3, 4.0)}
    x = FEDERATION.test.x[0]
    expected = (
        (np.float64(x) - 0.5) / np.sqrt(4.0 + 1e-5) @ np.float64(params["Dense_0"]["kernel"])[:, 0]
    )
    np.testing.assert_allclose(problem.model.predict(params, x), expected, rtol=1e-4, atol=1e-6)


def test_weighted_gradients_move_them_by_the_weighted_sum():
    """As when owners take a step with the statistics that others computed for their model."""
    problem = problem_of(optax.adam(0.1))
    solver = problem.solver
    params = start(problem)
    weights = (0.3, 0.5)

    @jax.jit
    def update(params):
        batches = [solver.take_batch(jax.random.key(k), None, client(k), 0) for k in range(2)]
        grads = [jax.grad(solver.mean_loss)(params, batch) for batch in batches]
        total = jax.tree.map(lambda one, other: weights[0] * one + weights[1] * other, *grads)
        return solver.optimizer.update(
            total, solver.optimizer.init(params), params, round_number=0
        )[0]

    updates = update(params)
    x = [np.float64(client(0).x), np.float64(client(1).x)[:3]]
    expected = START + sum(w * (moved(START, x[k]) - START) for k, w in enumerate(weights))
    np.testing.assert_allclose(
        statistics_of(optax.apply_updates(params, updates)), expected, rtol=1e-4, atol=1e-6
    )


@toys.each_method(["fedavg", "fedadam"], fast=["fedadam"])
def test_a_server_averages_them_by_the_clients_sizes(name):
    """Whatever its optimizer of parameters is."""
    problem = problem_of()
    algorithm = toys.make_algorithm(name, problem)
    states, _ = toys.train(algorithm, problem, FEDERATION.client_data, 1)
    found = statistics_of(jax.tree.map(lambda leaf: leaf[0], states[-1].models))
    x = [np.float64(client(0).x), np.float64(client(1).x)[:3]]
    expected = (5 * moved(START, x[0]) + 3 * moved(START, x[1])) / 8
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_proximal_term_does_not_hold_them():
    problem = problem_of()
    params = start(problem)
    anchor = jax.tree.map(lambda leaf: leaf - 3.0, params)
    batch = problem.solver.take_batch(jax.random.key(0), None, client(0), 0)
    plain = jax.grad(problem.solver.mean_loss)(params, batch)

    def near_anchor(params, batch):
        distance = problem.solver.squared_distance(params, anchor)
        return problem.solver.mean_loss(params, batch) + 2.0 / 2 * distance

    held = jax.grad(near_anchor)(params, batch)
    toys.assert_trees_close(held["batch_stats"], plain["batch_stats"])
    pull = held["Dense_0"]["kernel"] - plain["Dense_0"]["kernel"]
    np.testing.assert_allclose(pull, np.full((3, 1), 6.0), rtol=1e-4)


@pytest.mark.parametrize("num", [pytest.param(0, marks=pytest.mark.long), 1, 2])
def test_statistics_outside_a_part_stay(num):
    problem = problem_of(optax.adam(0.1))
    params = start(problem)
    mask = problem.model.mask(params, num)  # the normalization is the first of two layers
    solver = problem.solver.part(mask)

    def run(p, s):
        return solver.fit(jax.random.key(0), solver.begin(p), s, round_number=0)[0].whole

    trained = jax.jit(run)(params, client(0))
    same = jax.tree.map(np.array_equal, trained, params)
    assert same == jax.tree.map(lambda chosen: not chosen, mask)


def test_private_gradients_are_refused():
    with pytest.raises(ArgumentError, match="privacy: batch statistics"):
        LocalTraining(privacy=Privacy(1.0, 1.0)).bind(problem_of().model)
