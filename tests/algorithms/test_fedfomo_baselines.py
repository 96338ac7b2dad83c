"""FedFomo's baselines by hand: FedProx, data sharing, LG-FedAvg, Per-FedAvg, pFedMe, MOCHA, Clustered FL."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
import toys
from quadratics import MINI, RATE, SIZES, gradient, play, quadratic, vectors

from pfljax.algorithms import clustered, mocha
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Aggregate


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("fedprox", {"mu": 0.0}, {"mu": 3.0}),
        ("fedavg_data", {"share": 0.0}, {"share": 0.5}),
        ("lg_fedavg", {"shared_layers": 1}, None),
        ("per_fedavg", {"alpha": 0.0}, {"alpha": 0.2}),
        ("per_fedavg", {"alpha": 0.0, "form": "hessian_free"}, {"alpha": 0.2, "form": "hessian_free"}),
        ("clustered", {"eps1": 0.0}, {"eps1": 1e9, "eps2": 0.0, "gamma": 0.0}),
    ],
)
def test_with_its_knob_off_it_is_fedavg(name, off, on):
    mean = vectors(play("fedavg", **MINI)[2][-1].models)
    found = vectors(play(name, knobs=off, **MINI)[2][-1].models)
    np.testing.assert_allclose(found, np.broadcast_to(mean, found.shape), rtol=1e-5, atol=1e-6)
    if on:
        assert np.abs(vectors(play(name, knobs=on, **MINI)[2][-1].models) - mean).max() > 0.01


def test_fedprox_by_hand():
    federation, _, states, _, _ = play("fedprox", epochs=3, knobs={"mu": 2.0})
    theta = vectors(states[0].models)[0]
    for number in range(2):
        trained = []
        for k in range(4):
            own = theta.copy()
            for _ in range(3):
                own = own - RATE * (gradient(federation, k, own) + 2.0 * (own - theta))
            trained.append(own)
        theta = np.average(trained, axis=0, weights=SIZES)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], theta, rtol=1e-4, atol=1e-6)


def test_a_stronger_proximal_term_keeps_clients_nearer():
    moved = []
    for mu in (0.0, 1.0, 5.0):
        states = play("fedprox", rounds=1, epochs=5, knobs={"mu": mu})[2]
        moved.append(np.linalg.norm(vectors(states[1].models) - vectors(states[0].models)))
    assert moved[0] > moved[1] > moved[2] > 0


def test_shared_data_are_a_uniform_part_of_all_and_everyone_trains_on_them():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    algorithm = toys.make_algorithm("fedavg_data", problem, share=0.4)
    everything = np.concatenate([federation.train.x[k, :size] for k, size in enumerate(SIZES)])
    targets = np.concatenate([federation.train.y[k, :size] for k, size in enumerate(SIZES)])
    drawn = np.zeros(len(everything))
    init = jax.jit(algorithm.init)
    for key in jax.random.split(jax.random.key(0), 200):
        pool = init(key, federation.client_data).server
        size = int(pool.size)
        assert size == 4  # 0.4 of 11 examples
        place = [int(np.flatnonzero((everything == x).all(axis=1))[0]) for x in np.asarray(pool.x[:size])]
        assert len(set(place)) == size
        np.testing.assert_array_equal(np.asarray(pool.y[:size]), targets[place])
        drawn[place] += 1
    assert (np.abs(drawn - 200 * 4 / 11) < 30).all()  # standard deviation 6.8

    states, _ = toys.train(algorithm, problem, federation.client_data, 1)
    pool = states[0].server
    size, theta = int(pool.size), vectors(states[0].models)[0]
    trained = []
    for k in range(4):
        x = np.concatenate([federation.train.x[k, : SIZES[k]], np.asarray(pool.x[:size])])
        x = np.append(np.float64(x), np.ones((len(x), 1)), axis=1)
        y = np.concatenate([federation.train.y[k, : SIZES[k]], np.asarray(pool.y[:size])])
        trained.append(theta - RATE * 2 * x.T @ (x @ theta - y) / len(y))
    expected = np.average(trained, axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(states[1].models)[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_of_lg_fedavg_only_upper_layers_travel():
    federation, _, states, records, predictor = play("lg_fedavg", hidden=(6,), **MINI)
    assert set(states[-1].models) == {"Dense_0", "Dense_1"} and states[-1].models["Dense_0"] == {
        "bias": None,
        "kernel": None,
    }
    upper = 6 + 1
    assert records[0].down == 4 * 4 * upper and records[0].up == 4 * 4 * (upper + 1)  # n_k beside each
    lower = np.asarray(predictor.models["Dense_0"]["kernel"])
    assert (np.abs(lower - lower[:1]).reshape(4, -1).max(axis=1)[1:] > 1e-3).all()
    last = np.asarray(predictor.models["Dense_1"]["kernel"])
    np.testing.assert_array_equal(last, np.broadcast_to(last[:1], last.shape))
    # One client is one network, trained as in Local.
    one = {"sizes": (5,), "hidden": (6,), **MINI}
    toys.assert_trees_close(play("lg_fedavg", **one)[4].models, play("local", **one)[4].models, rtol=1e-5, atol=1e-6)
    # Newcomers get their own lower layers; the shared layers stay.
    newcomers = toys.make_federation((3, 4), "regression", seed=5)
    problem = toys.make_problem(federation, optax.sgd(RATE), hidden=(6,))
    adapted = toys.make_algorithm("lg_fedavg", problem).adapt(jax.random.key(0), states[-1], newcomers.client_data)
    np.testing.assert_array_equal(adapted.models["Dense_1"]["kernel"], last[:2])
    assert np.abs(np.diff(adapted.models["Dense_0"]["kernel"], axis=0)).max() > 1e-3


@pytest.mark.parametrize("form", ["first_order", "hessian_free"])
def test_per_fedavg_by_hand_on_quadratics(form):
    """f = theta' A theta - 2 b' theta has the meta-gradient (I - 2 alpha A) grad f(theta - alpha grad f(theta))."""
    alpha = 0.05
    knobs = {"alpha": alpha, "form": form, "adapt_steps": 2, "delta": 0.01}
    federation, algorithm, states, _, predictor = play("per_fedavg", epochs=2, knobs=knobs)
    theta = vectors(states[0].models)[0]
    for number in range(2):
        trained = []
        for k in range(4):
            own = theta.copy()
            for _ in range(2):
                outer = gradient(federation, k, own - alpha * gradient(federation, k, own))
                if form == "hessian_free":
                    outer = outer - alpha * 2 * quadratic(federation, k)[0] @ outer
                own = own - RATE * outer
            trained.append(own)
        theta = np.average(trained, axis=0, weights=SIZES)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], theta, rtol=2e-3, atol=1e-4)
    theta = vectors(states[-1].models)[0]
    for found in (predictor, algorithm.adapt(jax.random.key(1), states[-1], federation.client_data)):
        for k in range(4):
            own = theta.copy()
            for _ in range(2):
                own = own - alpha * gradient(federation, k, own)
            np.testing.assert_allclose(vectors(found.models)[k], own, rtol=1e-4, atol=1e-5)


def test_per_fedavg_takes_its_inner_step_on_another_mini_batch():
    """A client with two batches and an alpha so large that the first step's inner batch, the second one, decides."""
    federation = toys.make_federation((2,), "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE), batch_size=1, steps=1)
    states, _ = toys.train(toys.make_algorithm("per_fedavg", problem, alpha=0.3), problem, federation.client_data, 1)
    x = np.append(np.float64(federation.train.x[0]), np.ones((2, 1)), axis=1)
    y, theta = federation.train.y[0], vectors(states[0].models)[0]
    slope = lambda theta, i: 2 * x[i] * (x[i] @ theta - y[i])
    outcomes = {}
    for first in (0, 1):
        for second in (0, 1):
            outcomes[first, second] = theta - RATE * slope(theta - 0.3 * slope(theta, second), first)
    found = vectors(states[1].models)[0]
    nearest = min(outcomes, key=lambda pair: np.abs(outcomes[pair] - found).max())
    np.testing.assert_allclose(found, outcomes[nearest], rtol=1e-4)
    # A round of one step uses one batch; the batch after it is the same batch.
    assert nearest in ((0, 0), (1, 1))
    problem = toys.make_problem(federation, optax.sgd(RATE), batch_size=1, epochs=1)
    states, _ = toys.train(toys.make_algorithm("per_fedavg", problem, alpha=0.3), problem, federation.client_data, 1)
    found = vectors(states[1].models)[0]
    both = []
    for first, second in ((0, 1), (1, 0)):
        own = theta
        for now, other in ((first, second), (second, first)):
            own = own - RATE * slope(own - 0.3 * slope(own, other), now)
        both.append(np.abs(own - found).max())
    assert min(both) < 1e-4


def test_pfedme_s_personal_model_is_the_moreau_minimizer():
    """On a quadratic theta = (2 A + lambda)^-1 (2 b + lambda w), and w steps by eta lambda (w - theta)."""
    strength = 2.0
    knobs = {"strength": strength, "steps": 400, "rate": 0.05, "beta": 0.5}
    federation, algorithm, states, _, predictor = play("pfedme", rounds=1, epochs=2, knobs=knobs)
    start = vectors(states[0].models)[0]
    minimizer = lambda k, w: np.linalg.solve(
        2 * quadratic(federation, k)[0] + strength * np.eye(4), 2 * quadratic(federation, k)[1] + strength * w
    )
    trained = []
    for k in range(4):
        w = start.copy()
        for _ in range(2):
            theta = minimizer(k, w)
            w = w - RATE * strength * (w - theta)  # Eq. 8
        trained.append(w)
        np.testing.assert_allclose(vectors(predictor.models)[k], theta, rtol=1e-3, atol=1e-4)
    mean = np.average(trained, axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(states[1].models)[0], 0.5 * start + 0.5 * mean, rtol=1e-3, atol=1e-4)
    adapted = algorithm.adapt(jax.random.key(0), states[-1], federation.client_data)
    w = vectors(states[-1].models)[0]
    np.testing.assert_allclose(vectors(adapted.models)[1], minimizer(1, w), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_with_a_large_lambda_pfedme_approaches_fedavg():
    mean = vectors(play("fedavg", **MINI)[2][-1].models)
    gaps = []
    for strength in (3.0, 30.0, 300.0, 3000.0):
        knobs = {"strength": strength, "steps": 50, "rate": 0.1}
        gaps.append(np.abs(vectors(play("pfedme", knobs=knobs, **MINI)[2][-1].models) - mean).max())
    assert gaps[0] > gaps[1] > gaps[2] > gaps[3] and gaps[3] < 0.02 * gaps[0]


def test_mocha_s_relationship_of_two_tasks():
    products = jnp.diag(jnp.array([25.0, 25.0]))
    np.testing.assert_allclose(mocha.relationship(products), [[0.5, 0], [0, 0.5]], atol=1e-6)  # orthogonal, both 5 long
    rows = np.array([[1.0, 2.0, -1.0], [2.0, 1.0, 0.5]])
    root = scipy.linalg.sqrtm(rows @ rows.T)
    weights = {"kernel": jnp.asarray(rows[:, :2]), "bias": jnp.asarray(rows[:, 2])}
    omega = mocha.relationship(tree.inner_products(weights, weights))
    np.testing.assert_allclose(omega, root / np.trace(root), rtol=1e-5)
    # It minimizes tr(W' Omega^-1 W) among positive matrices of trace 1.
    objective = lambda omega: np.trace(rows.T @ np.linalg.solve(omega, rows))
    least, rng = objective(np.float64(omega)), np.random.default_rng(0)
    for _ in range(50):
        other = rng.normal(size=(2, 2))
        other = other @ other.T
        assert objective(other / np.trace(other)) >= least - 1e-6


def test_mocha_by_hand():
    strength, ridge = 0.05, 0.2
    federation, _, states, records, predictor = play(
        "mocha", rounds=3, epochs=2, knobs={"strength": strength, "ridge": ridge}
    )
    weights = vectors(states[0].clients["model"])
    omega = np.eye(4) / 4
    for number in range(3):
        precision = np.linalg.inv(omega + ridge / 4 * np.eye(4))
        trained = weights.copy()
        for k in range(4):
            for _ in range(2):
                others = precision[k] @ weights - precision[k, k] * weights[k]
                pull = strength * (precision[k, k] * trained[k] + others)
                trained[k] = trained[k] - RATE * (gradient(federation, k, trained[k]) + pull)
        weights = trained
        root = np.real(scipy.linalg.sqrtm(weights @ weights.T))
        omega = root / np.trace(root)
        state = states[number + 1]
        np.testing.assert_allclose(vectors(state.clients["model"]), weights, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(state.server["omega"], omega, rtol=1e-2, atol=1e-3)
        assert records[number].up == 4 * 4 * 4 and records[number].down == 4 * (4 + 1) * 4
    np.testing.assert_allclose(vectors(predictor.models), weights, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_mocha_s_strength_is_what_makes_it_other_than_local():
    local = play("local", **MINI)[4].models
    toys.assert_trees_close(play("mocha", knobs={"strength": 0.0}, **MINI)[4].models, local, rtol=1e-5, atol=1e-6)
    spread = []
    for strength in (0.0, 0.02, 0.1):
        theta = vectors(play("mocha", rounds=10, epochs=3, knobs={"strength": strength})[4].models)
        unit = theta / np.linalg.norm(theta, axis=1, keepdims=True)
        spread.append((unit @ unit.T).sum())
    assert spread[0] < spread[1] < spread[2]  # tasks become more alike


def test_of_a_network_mocha_relates_the_last_layer():
    states = play("mocha", hidden=(5,), rounds=1)[2]
    assert states[-1].server["weights"]["Dense_0"] == {"bias": None, "kernel": None}
    assert states[-1].server["weights"]["Dense_1"]["kernel"].shape == (4, 5, 1)


def parts(similarity, linkage="single", member=None):
    similarity = jnp.asarray(similarity, jnp.float32)
    member = np.ones(len(similarity), bool) if member is None else np.asarray(member)
    return np.asarray(jax.jit(clustered.bipartition, static_argnums=2)(similarity, jnp.asarray(member), linkage))


def test_a_bipartition_of_three_updates():
    updates = np.array([[1.0, 0.1], [-1.0, 0.2], [2.0, 0.1]])
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    np.testing.assert_array_equal(parts(unit @ unit.T), [False, True, False])
    np.testing.assert_array_equal(parts(unit @ unit.T, member=[True, True, False]), [False, True, False])


def test_linkages_differ_on_a_chain():
    """0-1-2 are a chain of neighbors and 3 is apart, but 2 is nearer to 3 than to 0."""
    alike = np.eye(4)
    for i, j, value in ((0, 1, 0.9), (1, 2, 0.8), (0, 2, 0.1), (2, 3, 0.7), (1, 3, 0.2), (0, 3, 0.0)):
        alike[i, j] = alike[j, i] = value
    np.testing.assert_array_equal(parts(alike, "single"), [False, False, False, True])  # 0.7 across is the least
    np.testing.assert_array_equal(parts(alike, "complete"), [False, False, True, True])


def test_the_bipartition_has_the_least_similarity_across():
    """Against all bipartitions of six, by brute force (Sattler et al., Eq. 18)."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        updates = rng.normal(size=(6, 3))
        unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
        alike = unit @ unit.T
        across = lambda leaves, alike=alike: alike[np.ix_(leaves, ~leaves)].max()
        every = [np.array([False, *(bits >> i & 1 for i in range(5))], bool) for bits in range(1, 32)]
        assert across(parts(alike)) <= min(map(across, every)) + 1e-6


def split_of(updates, size=None, label=None, **knobs):
    updates = jnp.asarray(updates, jnp.float32)
    num = len(updates)
    label = jnp.zeros(num, jnp.int32) if label is None else jnp.asarray(label, jnp.int32)
    size = jnp.ones(num) if size is None else jnp.asarray(size, jnp.float32)
    config = clustered.ClusteredFL(**knobs)
    return np.asarray(clustered.split_clusters(label, updates @ updates.T, size, config)).tolist()


def test_a_cluster_is_split_only_where_it_is_stationary_and_its_clients_are_not():
    opposite = [[2.0, 0.0], [-2.0, 0.1], [2.0, 0.1], [-2.0, 0.0]]  # mean 0.05 long, the longest 2.0
    assert split_of(opposite) == [0, 1, 0, 1]
    assert split_of(opposite, eps1=0.01) == [0, 0, 0, 0]
    assert split_of(opposite, eps2=2.5) == [0, 0, 0, 0]
    assert split_of(np.add(opposite, [1.0, 0.0])) == [0, 0, 0, 0]  # the mean is 1 long
    assert split_of(opposite, size=[1, 1, 1, 5]) == [0, 0, 0, 0]  # n_k counts: the mean is 1 long
    assert split_of(opposite[:2]) == [0, 0]  # two are not split
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
    config = clustered.ClusteredFL(eps1=1e9, eps2=0.0, gamma=0.0)
    split = lambda label: np.asarray(
        clustered.split_clusters(label, jnp.asarray(updates @ updates.T, jnp.float32), jnp.ones(12), config)
    )
    once = split(jnp.zeros(12, jnp.int32))
    assert len(set(once.tolist())) == 2
    twice = split(jnp.asarray(once))
    assert len(set(twice.tolist())) == 4


def test_a_cluster_is_split_only_where_its_parts_are_further_apart_than_its_clients_are_noisy():
    """Two pairs, of cosine c within, 0 across: gamma = sqrt(1 / c - 1) is below sqrt(1 / 2) where c is above 2 / 3."""
    pair = lambda c: np.array([[1, 0], [c, np.sqrt(1 - c**2)]])
    pairs = lambda c: np.block([[pair(c), np.zeros((2, 2))], [np.zeros((2, 2)), pair(c)]])
    wide = {"eps1": 2.0, "eps2": 0.0}
    assert split_of(pairs(0.68), **wide) == [0, 0, 2, 2]
    assert split_of(pairs(0.65), **wide) == [0, 0, 0, 0]
    assert split_of(pairs(0.65), gamma=0.7, **wide) == [0, 0, 2, 2]  # below 1 / sqrt(2)
    assert split_of(pairs(0.68), gamma=0.71, **wide) == [0, 0, 0, 0]
    cosine = lambda angles: jnp.cos(jnp.deg2rad(jnp.subtract.outer(*[jnp.asarray(angles, jnp.float32)] * 2)))
    # Nearest neighbors at 60, 60 and 30 degrees: the median cosine is 1 / 2.
    found = clustered.noise(cosine([0, 60, 200, 230, -60]), jnp.array([True, True, False, False, True]))
    np.testing.assert_allclose(found, 1, rtol=1e-4)
    np.testing.assert_allclose(clustered.noise(cosine([0, 1, 2]), jnp.ones(3, bool)), 0.5)  # at the least
    assert clustered.noise(cosine([0, 120, 240]), jnp.ones(3, bool)) == np.inf
    nearly = [[1, 0], [np.cos(1), np.sin(1)], [np.cos(1), -np.sin(1)], [1, 0]]  # 57 degrees from the next
    assert split_of(nearly, **wide) == [0, 0, 0, 0] != split_of(nearly, gamma=0.0, **wide)


@pytest.mark.parametrize(("relative", "labels"), [(True, [0, 1, 0, 1]), (False, [0, 0, 0, 0])])
def test_thresholds_are_in_units_of_the_first_round_s_largest_update(relative, labels):
    """The second round's largest update is half the first round's, whose size does not matter."""
    federation = toys.make_federation((3, 3, 3, 3), "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    algorithm = toys.make_algorithm("clustered", problem, relative=relative, warmup=1)
    state = algorithm.init(jax.random.key(0), federation.client_data)
    for number, size in enumerate((2e-3, 1e-3)):
        signs = size * np.array([1.0, -1.0, 1.0, -1.0], np.float32)
        update = jax.tree.map(lambda leaf, signs=signs: tree.per_row(signs, leaf) * np.ones_like(leaf), state.models)
        upload = {"update": update, "size": np.ones(4, np.float32)}
        aggregate = Aggregate(upload, np.ones(4, np.int32), np.ones((4, 1), bool), {})
        state, _ = algorithm.server_update(jax.random.key(0), state._replace(round=np.int32(number)), aggregate)
    np.testing.assert_array_equal(state.server["label"], labels)
    np.testing.assert_allclose(state.server["unit"], 2 * size * 2, rtol=1e-5)  # 4 parameters


@pytest.mark.parametrize("kinds", [1, 2])
def test_by_default_clusters_are_the_distributions(kinds):
    """Noisy linear targets, with opposite signs in two distributions; equal clients do not split."""
    federation = toys.make_federation((20,) * 6, "regression", features=4, seed=3)
    rng = np.random.default_rng(0)
    sign = np.where(np.arange(6) % kinds, -1, 1)[:, None]
    federation.train.y[...] = sign * federation.train.x.sum(axis=2) + 0.5 * rng.normal(size=(6, 20))
    _, _, states, _, _ = play("clustered", rounds=40, epochs=2, federation=federation)
    np.testing.assert_array_equal(states[-1].server["label"], np.arange(6) % kinds)
    never = play("clustered", rounds=40, epochs=2, federation=federation, knobs={"gamma": 0.0})[2][-1]
    assert kinds == 2 or len(set(never.server["label"].tolist())) > 1  # which the estimate of the noise prevents


@pytest.mark.slow
def test_clusters_are_found_and_averaged_apart():
    federation = toys.make_federation((20,) * 6, "regression", features=4, seed=3)
    sign = np.where(np.arange(6) % 2, -1, 1)[:, None]
    federation.train.y[...] = sign * federation.train.x.sum(axis=2)
    knobs = {"eps1": 0.4, "eps2": 0.6, "relative": False}
    _, _, states, records, predictor = play("clustered", rounds=6, epochs=2, knobs=knobs, federation=federation)
    np.testing.assert_array_equal(states[-1].server["label"], [0, 1, 0, 1, 0, 1])
    assert records[-1].metrics["clusters"] == 2
    theta = vectors(predictor.models)
    np.testing.assert_allclose(theta[0], theta[4], rtol=1e-6)
    # The last round by hand: FedAvg within each cluster.
    before = vectors(states[-2].models)
    for kind in (0, 1):
        trained = []
        for k in range(kind, 6, 2):
            own = before[k].copy()
            for _ in range(2):
                own = own - RATE * gradient(federation, k, own)
            trained.append(own)
        np.testing.assert_allclose(theta[kind], np.mean(trained, axis=0), rtol=1e-4, atol=1e-5)
    late = play("clustered", rounds=2, epochs=2, knobs=knobs | {"warmup": 9}, federation=federation)[2]
    assert (np.asarray(late[-1].server["label"]) == 0).all()


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("fedprox", {"mu": -1.0}),
        ("fedavg_data", {"share": 1.5}),
        ("lg_fedavg", {"shared_layers": 9}),
        ("per_fedavg", {"alpha": -0.1}),
        ("per_fedavg", {"delta": 0.0}),
        ("per_fedavg", {"adapt_steps": -1}),
        ("pfedme", {"strength": 0.0}),
        ("pfedme", {"steps": 0}),
        ("mocha", {"strength": -1.0}),
        ("mocha", {"ridge": 0.0}),
        ("clustered", {"warmup": -1}),
        ("clustered", {"eps1": -1.0}),
        ("clustered", {"gamma": 1.5}),
    ],
)
def test_bad_knobs_are_refused(name, knobs):
    with pytest.raises(ArgumentError, match=rf"^{name}\.{next(iter(knobs))}="):
        play(name, knobs=knobs)


def test_partition_and_combine_undo_each_other():
    params = {"a": {"w": np.ones(2)}, "b": {"w": np.zeros(3)}}
    mask = {"a": {"w": True}, "b": {"w": False}}
    chosen, rest = tree.partition(params, mask)
    assert chosen["b"]["w"] is None and rest["a"]["w"] is None
    toys.assert_trees_close(tree.combine(chosen, rest), params)
    toys.assert_trees_close(tree.combine(rest, chosen), params)
