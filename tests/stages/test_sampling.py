"""Who is drawn: in proportion to examples, and by loss."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.contract.errors import ArgumentError
from pfljax.exchange import rounds
from pfljax.exchange.rounds import cohort_of
from pfljax.stages import notes, sampling
from pfljax.stages.server import Server

SIZES = (1, 2, 4, 1, 0, 8)


def test_clients_are_drawn_one_after_the_other_in_proportion_to_their_examples():
    sizes = np.array(SIZES)
    draw = jax.jit(jax.vmap(lambda key: sampling.by_size(key, sizes, 2)))
    ids = np.asarray(draw(jax.random.split(jax.random.key(0), 20000)))
    assert (np.diff(ids, axis=1) > 0).all() and not (ids == 4).any()
    p = sizes / sizes.sum()
    # First j and then k, or first k and then j.
    expected = {(j, k): p[j] * p[k] / (1 - p[j]) + p[k] * p[j] / (1 - p[k]) for j in range(6) for k in range(j + 1, 6)}
    for pair, probability in expected.items():
        found = (ids == pair).all(axis=1).mean()
        assert abs(found - probability) < 4 * np.sqrt(probability / 20000) + 1e-9, pair


@pytest.mark.parametrize("draw", [sampling.by_size, sampling.systematic])
def test_clients_without_examples_come_last(draw):
    ids = draw(jax.random.key(0), np.array([0, 3, 0, 2]), 3)
    assert {1, 3} < set(np.asarray(ids).tolist())


# Of 17 examples and 2 clients, the one with 8 is drawn with probability 16 / 16; of 3, it is certain.
@pytest.mark.parametrize(("num", "expected"), [(1, np.array(SIZES) / 16), (2, np.array(SIZES) / 8)])
def test_probabilities_are_proportional_to_examples(num, expected):
    check_probabilities(SIZES, num, expected)


def test_those_who_would_be_drawn_twice_are_certain():
    check_probabilities((1, 2, 12, 1, 0, 4), 3, np.array([1 / 4, 1 / 2, 1, 1 / 4, 0, 1]))


def check_probabilities(sizes, num, expected):
    draw = jax.jit(jax.vmap(lambda key: sampling.systematic(key, np.array(sizes), num)))
    ids = np.asarray(draw(jax.random.split(jax.random.key(1), 20000)))
    assert ids.shape == (20000, num) and (np.diff(ids, axis=1) > 0).all()
    found = (ids[:, :, None] == np.arange(len(sizes))).any(axis=1).mean(axis=0)
    np.testing.assert_allclose(found, expected, atol=0.015)
    c = sampling.per_example(np.array(sizes), num)
    np.testing.assert_allclose(np.minimum(np.multiply(c, sizes), 1), expected, rtol=1e-6)


def test_a_weighted_cohort_gives_the_mean_of_all_clients_on_average():
    """E[sum over the cohort of n_k theta_k / p_k] = sum of all n_k theta_k; p_k is the probability of being drawn."""
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(0.1), cohort=2)
    plain = toys.make_algorithm("fedavg", problem)
    clients, key = federation.client_data, jax.random.key(5)
    everyone = toys.make_algorithm("fedavg", whole := problem._replace(cohort_size=len(SIZES)))
    expected = toys.train(everyone, whole, clients, 1)[0][1].models
    algorithm = Server("weighted").of(problem, plain)
    state = toys.start(algorithm, problem, clients)
    play = jax.jit(rounds.make_round(algorithm, problem.plan, 2))
    found = [play(jax.random.fold_in(key, n), 0, state, clients)[0].models for n in range(400)]
    drawn = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
    for leaf, mean in zip(jax.tree.leaves(drawn), jax.tree.leaves(expected), strict=True):
        error = 4 * leaf.std(axis=0) / 20 + 1e-6  # the cohort's weights add up to 17, whoever is drawn
        assert (np.abs(leaf.mean(axis=0) - mean) <= error).all()


@pytest.mark.parametrize("sampler", ["weighted", "power_of_choice"])
def test_sizes_count_once(sampler):
    """Chosen clients, of whom none is certain, have equal weights, as in both papers."""
    federation = toys.make_federation((3, 2, 4, 1, 3, 5))
    problem = toys.make_problem(federation, optax.sgd(0.1), cohort=2)
    clients, key = jax.tree.map(jnp.asarray, federation.client_data), jax.random.key(2)
    algorithm = Server(sampler).of(problem, toys.make_algorithm("fedavg", problem))
    local = toys.make_algorithm("fedavg", problem._replace(cohort_size=6))
    state = toys.start(algorithm, problem, clients)
    after = jax.jit(rounds.make_round(algorithm, problem.plan, 2))(key, 0, state, clients)[0]
    cohort = rounds.sample_cohort(algorithm, key, 0, state, clients, 2)
    alone, play = [], jax.jit(rounds.make_round(local, problem.plan, 6))
    for k in cohort.ids.tolist():
        only = clients._replace(train=clients.train._replace(size=np.where(np.arange(6) == k, clients.train.size, 0)))
        alone.append(play(key, 0, notes.inner(state), only)[0].models)
    toys.assert_trees_close(after.models, jax.tree.map(lambda *leaves: sum(leaves) / 2, *alone), rtol=1e-5, atol=1e-6)


def losses_by_hand(federation, models):
    layer = jax.tree.map(lambda leaf: np.float64(leaf), jax.device_get(models))["Dense_0"]
    split, out = federation.train, []
    for k, size in enumerate(split.size):
        kernel, bias = (layer[name][min(k, len(layer[name]) - 1)] for name in ("kernel", "bias"))
        out.append(
            np.square(split.x[k, :size] @ kernel[:, 0] + bias[0] - split.y[k, :size]).mean() if size else -np.inf
        )
    return np.array(out)


@pytest.mark.parametrize("name", ["fedavg", "local", "federico"])
def test_power_of_choice_takes_the_clients_of_largest_loss(name):
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(0.1), cohort=2)
    knobs = {"neighbors": 1, "collaborators": 1} if name == "federico" else {}
    algorithm = Server("power_of_choice", candidates=6).of(problem, toys.make_algorithm(name, problem, **knobs))
    state = toys.start(algorithm, problem, federation.client_data)
    ids = jax.jit(algorithm.sample)(jax.random.key(3), state, federation.client_data)
    worst = np.sort(np.argsort(losses_by_hand(federation, state.models))[-2:])
    np.testing.assert_array_equal(ids, worst)


def test_candidates_are_what_power_of_choice_chooses_among():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(0.1), cohort=2)
    method = toys.make_algorithm("fedavg", problem)
    as_weighted = Server("power_of_choice", candidates=2).of(problem, method)  # all candidates are taken
    state, clients = toys.start(as_weighted, problem, federation.client_data), federation.client_data
    draw, keys = jax.jit(as_weighted.sample), jax.random.split(jax.random.key(0), 8)
    found = [np.asarray(draw(key, state, clients)) for key in keys]
    expected = [sampling.by_size(jax.random.split(key)[0], clients.train.size, 2) for key in keys]
    np.testing.assert_array_equal(found, expected)
    assert len({tuple(ids) for ids in found}) > 1
    for wrong in (1, 7):
        with pytest.raises(ArgumentError, match=r"^candidates=.*accepted: 0, or 2 .* to 6"):
            Server("power_of_choice", candidates=wrong).of(problem, method)


def test_epsilon_does_not_cover_the_losses_of_power_of_choice():
    problem = toys.make_problem(toys.make_federation(SIZES), optax.sgd(0.1), cohort=2)
    of = lambda name, sampler: Server(sampler).of(problem, toys.make_algorithm(name, problem)).ledger
    assert "training losses" in of("fedavg", "power_of_choice").unaccounted
    assert of("fedavg", "weighted") == of("fedavg", "uniform") and not of("fedavg", "uniform").unaccounted
    assert of("fedem", "power_of_choice") == of("fedem", "uniform")  # which names them already


def test_samplers_need_something_to_draw():
    problem = toys.make_problem(toys.make_federation(SIZES), optax.sgd(0.1))
    method = toys.make_algorithm("local", problem)
    for sampler in ("weighted", "power_of_choice"):
        with pytest.raises(ArgumentError, match=f"sampler={sampler}: every client is in every round"):
            Server(sampler).of(problem, method)


def test_rounds_are_played_by_the_cohort_that_was_drawn():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(0.1), cohort=2)
    method = toys.make_algorithm("local", problem)
    for sampler in ("weighted", "power_of_choice"):
        states, _ = toys.train(Server(sampler).of(problem, method), problem, federation.client_data, 6)
        for before, after in itertools.pairwise(states):
            kernels = [np.asarray(state.models["Dense_0"]["kernel"]) for state in (before, after)]
            moved = np.any(kernels[0] != kernels[1], axis=(1, 2))
            assert moved.sum() == 2 and not moved[4]
    uniform = Server().of(problem, method)
    assert uniform.sample is None and cohort_of(jax.random.key(0), 0, 6, 2).ids.shape == (2,)
