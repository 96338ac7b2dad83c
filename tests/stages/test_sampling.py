"""Who is drawn: in proportion to examples, and by loss; and what a round makes of those who are drawn."""

import functools
import itertools

import jax
import numpy as np
import pytest
import toys
from quadratics import OPTIMIZER, descend, loss_of, vectors
from staged import staged

from pfljax.contract.errors import ArgumentError
from pfljax.exchange import rounds
from pfljax.stages import sampling
from pfljax.stages.server import Server

SIZES = (1, 2, 4, 1, 0, 12)
PROBABILITY = (
    np.array([1, 2, 4, 1, 0, 8]) / 8
)  # of a place in a weighted cohort of two; the largest is certain
DRAWS = 20000
FEDERATION = toys.make_federation(SIZES, "regression")
CLIENTS = FEDERATION.client_data
PROBLEM = toys.make_problem(FEDERATION, OPTIMIZER, cohort=2)
HYPERPARAMETERS = {"federico": {"neighbors": 1, "collaborators": 1}}

by_size = jax.jit(sampling.by_size, static_argnums=2)
systematic = jax.jit(sampling.systematic, static_argnums=2)
per_example = jax.jit(sampling.per_example, static_argnums=1)


@functools.cache
def sampled(name, sampler, candidates=0):
    """A method whose clients are drawn by a sampler."""
    options = {"candidates": candidates} if candidates else {}
    method = toys.make_algorithm(name, PROBLEM, **HYPERPARAMETERS.get(name, {}))
    return staged(PROBLEM, method, FEDERATION, server=Server(sampler, **options))


def test_clients_are_drawn_one_after_the_other_in_proportion_to_their_examples():
    sizes = np.array(SIZES)
    draw = jax.jit(jax.vmap(lambda key: sampling.by_size(key, sizes, 2)))
    ids = np.asarray(draw(jax.random.split(jax.random.key(0), DRAWS)))
    assert (np.diff(ids, axis=1) > 0).all() and not (ids == 4).any()
    p = sizes / sizes.sum()
    # First j and then k, or first k and then j.
    expected = {
        (j, k): p[j] * p[k] / (1 - p[j]) + p[k] * p[j] / (1 - p[k])
        for j in range(6)
        for k in range(j + 1, 6)
    }
    for pair, probability in expected.items():
        found = (ids == pair).all(axis=1).mean()
        assert abs(found - probability) < 4 * np.sqrt(probability / DRAWS) + 1e-9, pair


@pytest.mark.parametrize("draw", [by_size, systematic], ids=["by_size", "systematic"])
def test_clients_without_examples_come_last(draw):
    ids = draw(jax.random.key(0), np.array([0, 3, 0, 2]), 3)
    assert {1, 3} < set(np.asarray(ids).tolist())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [(SIZES, PROBABILITY), ((1, 2, 1, 2, 2, 4), np.array([1, 2, 1, 2, 2, 4]) / 6)],
)
def test_probabilities_are_proportional_to_examples_unless_they_are_certain(sizes, expected):
    ids = np.asarray(draws_of_two(jax.random.split(jax.random.key(1), DRAWS), np.array(sizes)))
    assert ids.shape == (DRAWS, 2) and (np.diff(ids, axis=1) > 0).all()
    found = (ids[:, :, None] == np.arange(6)).any(axis=1).mean(axis=0)
    np.testing.assert_allclose(found, expected, atol=0.015)


@jax.jit
def draws_of_two(keys, sizes):
    """Two clients for each key."""
    return jax.vmap(lambda key: sampling.systematic(key, sizes, 2))(keys)


@pytest.mark.parametrize(
    ("sizes", "num", "expected"),
    [
        (SIZES, 1, np.array(SIZES) / 20),
        (SIZES, 2, PROBABILITY),
        ((1, 2, 4, 1, 0, 8), 2, PROBABILITY),  # just certain
        ((1, 2, 12, 1, 0, 4), 3, [1 / 4, 1 / 2, 1, 1 / 4, 0, 1]),  # two are certain
    ],
)
def test_places_for_each_example(sizes, num, expected):
    c = float(per_example(np.array(sizes), num))
    np.testing.assert_allclose(np.minimum(np.multiply(c, sizes), 1), expected, rtol=1e-6)


def trained(theta):
    """(K, d) what each client makes of a model; clients without examples leave it as it is."""
    return np.array(
        [descend(FEDERATION, k, theta, 1) if size else theta for k, size in enumerate(SIZES)]
    )


def test_a_weighted_cohort_weighs_its_clients_by_the_inverse_of_their_probabilities():
    """theta = sum of n_k theta_k / p_k by the sum of n_k / p_k, so that on average it is the mean of all clients."""
    algorithm = sampled("fedavg", "weighted")
    states, _ = toys.train(algorithm, PROBLEM, CLIENTS, 6)
    draw = jax.jit(functools.partial(rounds.sample_cohort, algorithm), static_argnums=4)
    cohorts = set()
    for number in range(6):
        cohort = draw(jax.random.key(0), np.int32(number), states[number], CLIENTS, 2)
        ids = np.asarray(cohort.ids)
        cohorts.add(tuple(ids))
        weights = np.array(SIZES)[ids] / PROBABILITY[ids]
        theta = vectors(states[number].models)[0]
        expected = np.average(trained(theta)[ids], axis=0, weights=weights)
        np.testing.assert_allclose(
            vectors(states[number + 1].models)[0], expected, rtol=1e-4, atol=1e-6
        )
    assert len(cohorts) > 1


def test_of_a_weighted_cohort_those_without_examples_do_not_count():
    algorithm = sampled("fedavg", "weighted")
    few = CLIENTS._replace(
        train=CLIENTS.train._replace(size=np.where(np.arange(6) == 2, SIZES, 0).astype(np.int32))
    )
    before, after = toys.train(algorithm, PROBLEM, few, 1)[0]
    expected = trained(vectors(before.models)[0])[2]
    np.testing.assert_allclose(vectors(after.models)[0], expected, rtol=1e-4, atol=1e-6)


def worst(models):
    """The two clients whose losses are largest, with the global model or each with its own."""
    models = vectors(models)
    losses = [
        loss_of(FEDERATION, k, models[k % len(models)]) if size else -np.inf
        for k, size in enumerate(SIZES)
    ]
    return np.sort(np.argsort(losses)[-2:])


def test_power_of_choice_takes_the_mean_of_the_clients_of_largest_loss():
    """Whatever their sizes, as clients are drawn in proportion to these."""
    states, _ = toys.train(sampled("fedavg", "power_of_choice", 6), PROBLEM, CLIENTS, 3)
    for before, after in itertools.pairwise(states):
        expected = trained(vectors(before.models)[0])[worst(before.models)].mean(axis=0)
        np.testing.assert_allclose(vectors(after.models)[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["local", pytest.param("federico", marks=pytest.mark.slow)])
def test_rounds_are_played_by_the_clients_of_largest_loss(name):
    states, _ = toys.train(sampled(name, "power_of_choice", 6), PROBLEM, CLIENTS, 3)
    for before, after in itertools.pairwise(states):
        moved = np.any(vectors(before.models) != vectors(after.models), axis=1)
        np.testing.assert_array_equal(np.flatnonzero(moved), worst(before.models))


def test_candidates_are_what_power_of_choice_chooses_among():
    method = toys.make_algorithm("fedavg", PROBLEM)
    algorithm = sampled("fedavg", "power_of_choice", 2)  # all candidates are taken
    state = toys.start(algorithm, PROBLEM, CLIENTS)
    draw = jax.jit(algorithm.sample)
    keys = jax.random.split(jax.random.key(0), 8)
    found = [np.asarray(draw(key, state, CLIENTS)) for key in keys]
    expected = [by_size(jax.random.split(key)[0], CLIENTS.train.size, 2) for key in keys]
    np.testing.assert_array_equal(found, expected)
    assert len({tuple(ids) for ids in found}) > 1
    for wrong in (1, 7):
        with pytest.raises(ArgumentError, match=r"^candidates=.*accepted: 0, or 2 .* to 6"):
            server = Server("power_of_choice", candidates=wrong)
            staged(PROBLEM, method, FEDERATION, server=server)


def test_epsilon_does_not_cover_the_losses_of_power_of_choice():
    assert "training losses" in sampled("fedavg", "power_of_choice").ledger.unaccounted
    plain = sampled("fedavg", "uniform").ledger
    assert sampled("fedavg", "weighted").ledger == plain and not plain.unaccounted
    # FedEM's ledger names them already.
    assert sampled("fedem", "power_of_choice").ledger == sampled("fedem", "uniform").ledger


def test_samplers_need_something_to_draw():
    problem = toys.make_problem(FEDERATION, OPTIMIZER)
    method = toys.make_algorithm("local", problem)
    for sampler in ("weighted", "power_of_choice"):
        with pytest.raises(
            ArgumentError, match=f"sampler={sampler}: every client is in every round"
        ):
            staged(problem, method, FEDERATION, server=Server(sampler))


def test_clients_without_a_server_s_model_are_drawn_in_proportion_to_their_examples():
    states, _ = toys.train(sampled("local", "weighted"), PROBLEM, CLIENTS, 6)
    for before, after in itertools.pairwise(states):
        moved = np.any(vectors(before.models) != vectors(after.models), axis=1)
        assert moved.sum() == 2 and moved[5] and not moved[4]
