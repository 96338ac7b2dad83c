"""Clustered FL: bipartitions, when clusters split, and rounds by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from quadratics import descend, play, vectors

from pfljax.algorithms import clustered
from pfljax.contract import tree
from pfljax.contract.types import Aggregate, ClientReport, Upload

divide = jax.jit(clustered.bipartition, static_argnums=2)


def parts(similarity, linkage="single", member=None):
    similarity = jnp.asarray(similarity, jnp.float32)
    member = np.ones(len(similarity), bool) if member is None else np.asarray(member)
    return np.asarray(divide(similarity, jnp.asarray(member), linkage))


def test_a_bipartition_of_three_updates():
    updates = np.array([[1.0, 0.1], [-1.0, 0.2], [2.0, 0.1]])
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    np.testing.assert_array_equal(parts(unit @ unit.T), [False, True, False])
    np.testing.assert_array_equal(
        parts(unit @ unit.T, member=[True, True, False]), [False, True, False]
    )


def test_linkages_differ_on_a_chain():
    """0-1-2 are a chain of neighbors and 3 is apart, but 2 is nearer to 3 than to 0."""
    alike = np.eye(4)
    for i, j, value in (
        (0, 1, 0.9),
        (1, 2, 0.8),
        (0, 2, 0.1),
        (2, 3, 0.7),
        (1, 3, 0.2),
        (0, 3, 0.0),
    ):
        alike[i, j] = alike[j, i] = value
    np.testing.assert_array_equal(
        parts(alike, "single"), [False, False, False, True]
    )  # 0.7 across is the least
    np.testing.assert_array_equal(parts(alike, "complete"), [False, False, True, True])


def test_the_bipartition_has_the_least_similarity_across():
    """Against all bipartitions of six, by brute force (Sattler et al., Eq. 18)."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        updates = rng.normal(size=(6, 3))
        unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
        alike = unit @ unit.T

        def across(leaves, alike=alike):
            return alike[np.ix_(leaves, ~leaves)].max()

        every = [
            np.array([False, *(bits >> i & 1 for i in range(5))], bool) for bits in range(1, 32)
        ]
        assert across(parts(alike)) <= min(map(across, every)) + 1e-6


@jax.jit
def split(label, products, size, hyperparameters):
    """Labels after a round; the hyperparameters are traced, so that calls share a program."""
    return clustered.split_clusters(label, products, size, clustered.ClusteredFL(**hyperparameters))


def split_of(updates, size=None, label=None, **hyperparameters):
    updates = np.float32(updates)
    label = np.zeros(len(updates), np.int32) if label is None else np.int32(label)
    size = np.ones(len(updates), np.float32) if size is None else np.float32(size)
    hyperparameters = {"eps1": 0.5, "eps2": 0.4} | hyperparameters
    return np.asarray(split(label, updates @ updates.T, size, hyperparameters)).tolist()


def test_a_cluster_is_split_only_where_it_is_stationary_and_its_clients_are_not():
    opposite = [[2.0, 0.0], [-2.0, 0.1], [2.0, 0.1], [-2.0, 0.0]]  # mean 0.05 long, the longest 2.0
    assert split_of(opposite) == [0, 1, 0, 1]
    assert split_of(opposite, eps1=0.01) == [0, 0, 0, 0]
    assert split_of(opposite, eps2=2.5) == [0, 0, 0, 0]
    assert split_of(np.add(opposite, [1.0, 0.0])) == [0, 0, 0, 0]  # the mean is 1 long
    assert split_of(opposite, size=[1, 1, 1, 5]) == [0, 0, 0, 0]  # n_k counts: the mean is 1 long
    assert split_of(opposite[:2], gamma=0.0) == [0, 0]  # two are not split
    # Clients that sent nothing stay with the part that has more examples: clients 1 and 3, then client 0 alone.
    assert split_of(opposite, size=[1, 1, 0, 1], eps1=1.0) == [0, 1, 1, 1]
    assert split_of(opposite, size=[3, 1, 0, 1], eps1=1.0) == [0, 1, 0, 1]
    six = [*opposite, [0.0, 2.0], [0.1, -2.0], [0.0, 2.0]]
    assert split_of(six, label=[0, 0, 0, 0, 4, 4, 4], eps1=0.8) == [0, 1, 0, 1, 4, 5, 4]


def test_a_new_cluster_waits_for_the_next_round():
    """Two groups that would each split again: a round splits only the clusters that existed at its start."""
    angles = np.deg2rad([0, 60, 120, 180, 240, 300])
    hexagon = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    zeros = np.zeros_like(hexagon)
    updates = np.block([[hexagon, zeros], [zeros, hexagon]])
    always = {"eps1": 1e9, "eps2": 0.0, "gamma": 0.0}
    once = split_of(updates, **always)
    assert len(set(once)) == 2
    twice = split_of(updates, label=once, **always)
    assert len(set(twice)) == 4


def test_a_cluster_is_split_only_where_its_parts_are_further_apart_than_its_clients_are_noisy():
    """Two pairs, of cosine c within, 0 across: gamma = sqrt(1 / c - 1) is below sqrt(1 / 2) where c is above 2 / 3."""

    def pair(c):
        return np.array([[1, 0], [c, np.sqrt(1 - c**2)]])

    def pairs(c):
        return np.block([[pair(c), np.zeros((2, 2))], [np.zeros((2, 2)), pair(c)]])

    wide = {"eps1": 2.0, "eps2": 0.0}
    assert split_of(pairs(0.68), **wide) == [0, 0, 2, 2]
    assert split_of(pairs(0.65), **wide) == [0, 0, 0, 0]
    assert split_of(pairs(0.65), gamma=0.7, **wide) == [0, 0, 2, 2]  # below 1 / sqrt(2)
    assert split_of(pairs(0.68), gamma=0.71, **wide) == [0, 0, 0, 0]

    def cosine(angles):
        return np.cos(np.deg2rad(np.subtract.outer(angles, angles)))

    # Nearest neighbors at 60, 60 and 30 degrees: the median cosine is 1 / 2.
    noise = jax.jit(clustered.noise)
    first = np.array([True, True, True, False, False])
    found = noise(cosine([0, 60, 200, 230, -60]), first[[0, 1, 3, 4, 2]])
    np.testing.assert_allclose(found, 1, rtol=1e-4)
    np.testing.assert_allclose(noise(cosine([0, 1, 2, 3, 4]), first), 0.5)  # at the least
    assert noise(cosine([0, 120, 240, 1, 2]), first) == np.inf
    nearly = [
        [1, 0],
        [np.cos(1), np.sin(1)],
        [np.cos(1), -np.sin(1)],
        [1, 0],
    ]  # 57 degrees from the next
    assert split_of(nearly, **wide) == [0, 0, 0, 0] != split_of(nearly, gamma=0.0, **wide)


@pytest.mark.parametrize(("relative", "labels"), [(True, [0, 1, 0, 1]), (False, [0, 0, 0, 0])])
def test_thresholds_are_in_units_of_the_first_round_s_largest_update(relative, labels):
    """The second round's largest update is half the first round's, whose size does not matter."""
    federation = toys.make_federation((3, 3, 3, 3), "regression")
    problem = toys.make_problem(federation)
    algorithm = toys.make_algorithm("clustered", problem, relative=relative, warmup=1)
    state = toys.zeros(algorithm, problem, federation.client_data)

    @jax.jit
    def server_update(number, size, state):
        signs = size * jnp.array([1.0, -1.0, 1.0, -1.0])
        update = jax.tree.map(
            lambda leaf: tree.per_row(signs, leaf) * jnp.ones_like(leaf), state.models
        )
        upload = Upload(update, sums={"num_examples": jnp.ones(4)})
        everyone = jnp.ones((4, 1), bool)
        aggregate = Aggregate(upload, jnp.ones(4, jnp.int32), everyone, ClientReport(jnp.zeros(4)))
        return algorithm.server_update(jax.random.key(0), state._replace(round=number), aggregate)[
            0
        ]

    for number, size in enumerate((2e-3, 1e-3)):
        state = server_update(np.int32(number), size, state)
    np.testing.assert_array_equal(state.server.state.label, labels)
    np.testing.assert_allclose(state.server.state.unit, 2 * size * 2, rtol=1e-5)  # 4 parameters


def noisy_targets(kinds):
    """Noisy linear targets, with opposite signs in two distributions."""
    federation = toys.make_federation((20,) * 6, "regression", features=4, seed=3)
    rng = np.random.default_rng(0)
    sign = np.where(np.arange(6) % kinds, -1, 1)[:, None]
    federation.train.y[...] = sign * federation.train.x.sum(axis=2) + 0.5 * rng.normal(size=(6, 20))
    return federation


@pytest.mark.parametrize("kinds", [1, 2])
def test_by_default_clusters_are_the_distributions(kinds):
    """Equal clients do not split."""
    states = play("clustered", rounds=40, epochs=2, federation=noisy_targets(kinds))[2]
    np.testing.assert_array_equal(states[-1].server.state.label, np.arange(6) % kinds)


@pytest.mark.long
def test_without_an_estimate_of_the_noise_equal_clients_split():
    federation = noisy_targets(1)
    states = play(
        "clustered", rounds=40, epochs=2, federation=federation, hyperparameters={"gamma": 0.0}
    )[2]
    assert len(set(states[-1].server.state.label.tolist())) > 1


@pytest.mark.slow
def test_clusters_are_found_and_averaged_apart():
    federation = toys.make_federation((20,) * 6, "regression", features=4, seed=3)
    sign = np.where(np.arange(6) % 2, -1, 1)[:, None]
    federation.train.y[...] = sign * federation.train.x.sum(axis=2)
    hyperparameters = {"eps1": 0.4, "eps2": 0.6, "relative": False}
    _, _, states, records, predictions = play(
        "clustered", rounds=6, epochs=2, hyperparameters=hyperparameters, federation=federation
    )
    np.testing.assert_array_equal(states[-1].server.state.label, [0, 1, 0, 1, 0, 1])
    assert records[-1].metrics["clusters"] == 2
    theta = vectors(predictions.models)[:, 0]
    np.testing.assert_allclose(theta[0], theta[4], rtol=1e-6)
    # The last round by hand: FedAvg within each cluster.
    before = vectors(states[-2].models)
    for kind in (0, 1):
        trained = [descend(federation, k, before[k], 2) for k in range(kind, 6, 2)]
        np.testing.assert_allclose(theta[kind], np.mean(trained, axis=0), rtol=1e-4, atol=1e-5)
    late = play(
        "clustered",
        rounds=2,
        epochs=2,
        hyperparameters=hyperparameters | {"warmup": 9},
        federation=federation,
    )[2]
    assert (np.asarray(late[-1].server.state.label) == 0).all()
