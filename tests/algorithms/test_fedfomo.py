"""FedFomo by hand: Eq. 3, 5, 13 and 14, the affinity matrix, who downloads whom, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, descend, loss_of, vectors
from sklearn.cluster import SpectralClustering
from sklearn.metrics import adjusted_rand_score

from pfljax.algorithms.common import clusters, first_order, neighbors, uploads
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Cohort, State
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_plan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import cohort_of, make_round
from pfljax.local.privacy import Privacy

SIZES = (2, 5, 3)


def play(name="fedfomo", rounds=3, sizes=SIZES, epochs=2, knobs=None, **options):
    federation = toys.make_federation(sizes, "regression")
    knobs = {"epsilon": 0.0, "neighbors": len(sizes) - 1} | (knobs or {})
    return toys.play(name, federation, rounds, optax.sgd(RATE), knobs, epochs=epochs, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("fedfomo", {}),
        ("fedfomo", {"norm": "l1", "scaled": True, "clusters": 1}),
        ("fedfomo_average", {}),
        ("fedfomo_average", {"scaled": True}),
    ],
)
def test_rounds_by_hand(name, knobs):
    federation, problem, algorithm, states, records = play(name, knobs=knobs)
    num, means = len(SIZES), knobs.get("clusters", 0)
    start = vectors(states[0].clients.start)
    theta, affinity = start.copy(), np.eye(num)
    np.testing.assert_allclose(vectors(states[0].models)[:num], theta, rtol=1e-6)
    kept = []
    for number in range(4):
        before = start.copy()
        everyone = np.average(theta, axis=0, weights=SIZES)
        candidates = np.concatenate([theta, everyone[None].repeat(means, axis=0)])
        weights = np.zeros((num, num + means))
        for i in range(num):
            score = lambda model, i=i: loss_of(federation, i, model, "validation")
            for n, model in enumerate(candidates):
                if name == "fedfomo":
                    gap = model - before[i]
                    far = np.abs(gap).sum() if knobs.get("norm") == "l1" else np.sqrt((gap**2).sum())
                    weights[i, n] = (score(before[i]) - score(model)) / far if far else 0  # Eq. 3
                else:
                    without = np.delete(theta, n, axis=0).mean(axis=0)
                    weights[i, n] = score(without) - score(theta.mean(axis=0))  # Eq. 14
        positive = np.maximum(weights, 0)
        total = positive.sum(axis=1, keepdims=True)
        final = np.divide(positive, total, out=np.zeros_like(positive), where=total > 0)  # Eq. 13
        for i in range(num):
            start[i] = before[i] + final[i] @ (candidates - before[i])  # Eq. 5
        if number == 3:
            break  # what is scored is what the fourth round would start from
        scale = np.abs(weights.sum(axis=1, keepdims=True)) if "scaled" in knobs else 1
        affinity += (weights / scale)[:, :num]
        kept.append((total == 0).mean())
        theta = np.stack([descend(federation, i, start[i], 2) for i in range(num)])
        state = states[number + 1]
        np.testing.assert_allclose(vectors(state.clients.start), start, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(state.models)[:num], theta, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state.clients.affinity, affinity, rtol=1e-3, atol=1e-4)
        dense = np.zeros((num, num))
        np.put_along_axis(dense, np.asarray(state.clients.index), np.asarray(state.clients.weights), axis=1)
        np.testing.assert_allclose(dense, final[:, :num], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(records[number].metrics["kept_previous_model"], kept[-1])
        if name == "fedfomo_average":
            np.testing.assert_allclose(vectors(state.models)[num], theta.mean(axis=0), rtol=1e-4, atol=1e-5)
        if means:
            mean = np.average(theta, axis=0, weights=SIZES)
            np.testing.assert_allclose(vectors(state.models)[num], mean, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(state.server.affinity, affinity, rtol=1e-3, atol=1e-4)
    assert (affinity < -0.01).any()  # uncut weights went into it
    scored = toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data)
    np.testing.assert_allclose(vectors(scored.models)[:, 0], start, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("num", "kinds", "noise"), [(6, 2, 0.0), (15, 5, 1.0), (15, 4, 1.5), (40, 3, 2.0)])
def test_spectral_clusters_are_those_of_scikit_learn(num, kinds, noise):
    rng = np.random.default_rng(num)
    kind = rng.permutation(np.arange(num) % kinds)
    affinity = 2.0 * (kind[:, None] == kind) + noise * rng.random((num, num))
    affinity = affinity + affinity.T + 0.1
    found = np.asarray(clusters.spectral_clusters(jnp.float32(affinity), kinds))
    expected = SpectralClustering(kinds, affinity="precomputed", assign_labels="discretize", random_state=0)
    assert adjusted_rand_score(expected.fit_predict(affinity), found) == adjusted_rand_score(kind, found) == 1


def test_means_of_clusters_are_over_those_who_uploaded_last():
    kind = np.array([0, 0, 1, 1, 1])
    last, size = np.array([3, 2, 1, 1, 0]), np.array([4, 9, 1, 3, 9])
    kept = uploads.Uploads(jnp.asarray(last), jnp.asarray(size), jnp.asarray(5.0 * (kind[:, None] == kind)))
    np.testing.assert_array_equal(kept.newest, [True, False, False, False, False])
    theta = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    stack = np.asarray(uploads.with_cluster_means({"w": jnp.asarray(theta)}, kept, 2)["w"])
    means = {tuple(theta[0].ravel()), tuple(np.float32((theta[2] + 3 * theta[3]) / 4).ravel())}
    np.testing.assert_array_equal(stack[:5], theta)
    np.testing.assert_allclose(sorted(stack[5:7].reshape(2, -1).tolist()), sorted(means), rtol=1e-6)
    np.testing.assert_allclose(stack[7], stack[5:7].mean(axis=0), rtol=1e-6)


@pytest.mark.slow
def test_under_sampling_those_who_uploaded_last_can_be_downloaded():
    sizes, knobs = (2, 5, 3, 4), {"available": "uploaded", "neighbors": 1}
    federation, _, _, states, records = play(sizes=sizes, rounds=4, cohort=2, knobs=knobs)
    start = vectors(states[0].clients.start)
    theta = np.stack([descend(federation, i, start[i], 1) for i in range(4)])  # everyone, one epoch
    np.testing.assert_allclose(vectors(states[0].models), theta, rtol=1e-5)
    available = set(np.flatnonzero(states[0].server.last == 0))
    assert len(available) == 2
    for number in range(4):
        cohort = np.asarray(cohort_of(jax.random.key(0), number, 4, 2).ids)
        index, uploaded = np.asarray(states[number + 1].clients.index), theta.copy()
        for i in cohort:
            assert index[i, 0] == i and index[i, 1] in available - {i}
            gaps = uploaded[index[i]] - start[i]
            gains = loss_of(federation, i, start[i], "validation") - np.array(
                [loss_of(federation, i, uploaded[n], "validation") for n in index[i]]
            )
            weights = np.maximum(gains / np.linalg.norm(gaps, axis=1), 0)
            start[i] = start[i] + weights @ gaps / max(weights.sum(), 1e-30)
            theta[i] = descend(federation, i, start[i], 2)
        np.testing.assert_allclose(vectors(states[number + 1].models), theta, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(states[number + 1].clients.start), start, rtol=1e-4, atol=1e-5)
        available = set(cohort)
        assert records[number].down == 2 * 4 * 4  # one model of four floats for each of two clients


@pytest.mark.slow
def test_plans_agree_on_what_the_server_makes():
    knobs = {"available": "uploaded", "clusters": 2, "neighbors": 1, "epsilon": 0.5}
    runs = [
        play(sizes=(2, 5, 3, 4), cohort=2, knobs=knobs, plan=make_plan(kind, devices=number))[3]
        for kind, number in (("map", 1), ("vmap", 4))
    ]
    for expected, found in zip(*runs, strict=True):
        toys.assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fallback", ["start", "mean"])
def test_where_no_average_gains_clients_fall_back(fallback):
    """Two opposite models and a loss that is highest at their mean."""
    federation = toys.make_federation((2, 2), "regression")

    def highest_at_zero(params, x, y, key=None):
        return -sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params)) * jnp.ones_like(y)

    problem = toys.make_problem(federation, loss=highest_at_zero)
    algorithm = toys.make_algorithm("fedfomo_average", problem, fallback=fallback)
    state = toys.init(algorithm, problem, jax.random.key(0), federation.client_data)
    one = jax.tree.map(lambda leaf: leaf[:1] + 1, state.models)
    opposite = jax.tree.map(lambda leaf: jnp.concatenate([leaf, -leaf, 0 * leaf]), one)
    state = state._replace(models=opposite)
    scored = toys.predict(algorithm, problem, jax.random.key(0), state, federation.client_data)
    expected = np.zeros((2, 4)) if fallback == "mean" else vectors(state.clients.start)
    np.testing.assert_allclose(vectors(scored.models)[:, 0], expected, atol=1e-6)


def test_weights_are_cut_and_normalized():
    weights = first_order.first_order_weights(jnp.array([1.0, 3.0, 0.5, 2.0]), 2.0, jnp.array([2.0, 1.0, 0.5, 0.0]))
    np.testing.assert_allclose(weights, [0.5, -1.0, 3.0, 0.0])  # (2 - 1) / 2, (2 - 3) / 1, (2 - 0.5) / 0.5
    np.testing.assert_allclose(first_order.normalize(weights), [0.5 / 3.5, 0, 3 / 3.5, 0], rtol=1e-6)


def test_where_nothing_helps_the_client_keeps_the_model_of_the_round_before():
    weights = first_order.first_order_weights(jnp.array([3.0, 2.5]), 2.0, jnp.array([1.0, 1.0]))
    np.testing.assert_array_equal(first_order.normalize(weights), [0, 0])
    start, models = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([[5.0, 5.0], [7.0, 7.0]])}
    np.testing.assert_array_equal(first_order.moved(start, models, first_order.normalize(weights))["w"], [1, 2])
    # In a run: a validation loss that local training can only raise, since it is 0 at the start.
    federation = toys.make_federation(SIZES, "regression")
    federation.validation.x[...], federation.validation.y[...] = 0, 0
    *_, states, records = toys.play("fedfomo", federation, 3, optax.sgd(RATE), epochs=3)
    toys.assert_trees_close(states[-1].clients.start, states[0].clients.start)
    assert not toys.same_trees(states[-1].models, states[0].models)
    assert records[-1].metrics["kept_previous_model"] == 1


def test_a_client_without_validation_examples_goes_on_from_its_own_model():
    federation = toys.make_federation(SIZES, "regression")
    federation.validation.size[1] = 0
    found, local = (
        vectors(toys.play(name, federation, 3, optax.sgd(RATE)).states[-1].models) for name in ("fedfomo", "local")
    )
    np.testing.assert_allclose(found[1], local[1], rtol=1e-5)


def test_without_neighbors_only_its_own_training_counts():
    federation, _, _, states, records = play(knobs={"neighbors": 0}, rounds=4)
    assert records[-1].down == 0 and records[-1].up == 3 * 4 * 4  # three models of four floats go up all the same
    start = vectors(states[0].clients.start)
    theta = start.copy()
    for _ in range(4):  # own model if it is better on validation data, else back ("early stopping")
        for i in range(3):
            better = loss_of(federation, i, theta[i], "validation") < loss_of(federation, i, start[i], "validation")
            start[i] = theta[i] if better else start[i]
            theta[i] = descend(federation, i, start[i], 2)
    np.testing.assert_allclose(vectors(states[-1].clients.start), start, rtol=1e-4)


def choices(affinity, *, cohort, epsilon, decay=0.05, rounds=(0,), neighbors=2, draws=200):
    """The clients that client 0 downloads from in many draws, one row per draw."""
    num = len(affinity)
    federation = toys.make_federation((2,) * num, "regression")
    problem = toys.make_problem(federation, cohort=len(cohort))
    algorithm = toys.make_algorithm("fedfomo", problem, neighbors=neighbors, epsilon=epsilon, decay=decay)
    rows = first_order.Row((), jnp.asarray(affinity, jnp.float32)[np.array(cohort)], (), (), ())  # all that it reads

    @jax.jit
    def download(key, number):
        state = State((), (), (), rows, number)
        return lifting.download(algorithm, problem.plan, key, state, Cohort(jnp.array(cohort)))

    keys = jax.random.split(jax.random.key(1), draws)
    return np.stack([np.asarray(download(key, number))[0] for number in rounds for key in keys])


@pytest.mark.slow
def test_the_best_of_the_affinity_row_are_sent():
    affinity = np.eye(6)
    affinity[0] = [1, 0.3, -0.2, 0.0, 0.5, 0.0]
    found = choices(affinity, cohort=[0, 1, 2, 3, 4, 5], epsilon=0.0, draws=5)
    assert (found == [0, 4, 1]).all()
    found = choices(affinity, cohort=[0, 1, 2, 3, 5], epsilon=0.0, draws=60)  # client 4 is not active
    assert (found[:, :2] == [0, 1]).all()
    assert set(found[:, 2].tolist()) == {3, 5}  # a tie, at random; not the negative one
    found = choices(np.eye(6), cohort=[0, 1, 2, 3, 4, 5], epsilon=0.0)
    assert (np.bincount(found[:, 1:].ravel(), minlength=6)[1:] > 50).all()  # at first all others alike, 80 expected


@pytest.mark.slow
def test_each_slot_explores_on_its_own_and_less_every_round():
    affinity = np.eye(6)
    affinity[0] = [1, 9, 8, 0, 0, 0]
    everyone = [0, 1, 2, 3, 4, 5]
    found = choices(affinity, cohort=everyone, epsilon=0.3, draws=2000)
    assert all(len(set(row.tolist())) == 3 for row in found)
    # The first slot holds client 1 without exploring, or by chance: 0.7 + 0.3 / 5.
    assert abs((found[:, 1] == 1).mean() - 0.76) < 0.04
    assert (found[:, 2] == 2).mean() < 0.9
    late = choices(affinity, cohort=everyone, epsilon=0.3, rounds=(6, 9), draws=20)
    assert (late == [0, 1, 2]).all()
    always = choices(affinity, cohort=everyone, epsilon=1.0, decay=0.0, rounds=(50,), draws=2000)
    assert abs((always[:, 1:] == 1).any(axis=1).mean() - 2 / 5) < 0.05


def test_exploring_is_uniform_where_scores_tie():
    """Two tied at the top, three below: once one of the tied is taken, exploring picks the others equally often."""
    scores = jnp.array([0.0, 0, -1, -1, -1])
    pick = lambda key: neighbors.best_candidates(key, scores, 2, jnp.array([0.0, 1.0]))[0]
    slots = np.asarray(jax.vmap(pick)(jax.random.split(jax.random.key(0), 4000)))
    assert set(slots[:, 0].tolist()) == {0, 1} and abs((slots[:, 0] == 0).mean() - 0.5) < 0.04
    for slot in range(2, 5):
        assert abs((slots[:, 1] == slot).mean() - 0.25) < 0.03


@pytest.mark.slow
def test_what_travels_is_m_models_down_and_one_up():
    """And with clusters the means of each and of all; up, who was weighed and how much each has gained."""
    for name, knobs, down, numbers in (
        ("fedfomo", {}, 2, 0),
        ("fedfomo_average", {}, 2 + 2, 0),
        ("fedfomo", {"clusters": 2}, 2 + 3, 2 * (1 + 2 + 3)),
    ):
        *_, records = play(name, sizes=(2, 3, 4, 5), knobs={"neighbors": 2} | knobs)
        assert records[0].down == 4 * down * 4 * 4 and records[0].up == 4 * (4 + numbers) * 4, name


def test_newcomers_step_from_the_mean_of_all_models():
    _, problem, algorithm, states, _ = play()
    newcomers = toys.make_federation((3, 4), "regression", seed=5)
    found = toys.adapt(algorithm, problem, jax.random.key(0), states[-1], newcomers.client_data)
    theta = vectors(states[-1].models)
    mean = theta.mean(axis=0)
    for k in range(2):
        gains = [
            loss_of(newcomers, k, mean, "validation") - loss_of(newcomers, k, model, "validation") for model in theta
        ]
        weights = np.maximum(np.array(gains) / np.sqrt(((theta - mean) ** 2).sum(axis=1)), 0)
        expected = mean + (weights / max(weights.sum(), 1e-30)) @ (theta - mean)
        np.testing.assert_allclose(vectors(found.models)[k], [expected], rtol=1e-4)


def test_what_does_not_fit_and_missing_validation_are_refused():
    with pytest.raises(ArgumentError, match=r"^fedfomo\.available=uploaded: .*accepted with privacy: cohort"):
        play(knobs={"available": "uploaded"}, cohort=2, privacy=Privacy(clip_norm=1.0))
    federation = toys.make_federation(SIZES, "regression", validation_size=0)
    problem = toys.make_problem(federation)
    with pytest.raises(ArgumentError, match=r"^validation_fraction=0: "):
        toys.make_algorithm("fedfomo", problem).start(jax.random.key(0), federation.client_data)


@pytest.mark.slow
def test_a_round_needs_no_more_memory_than_federico_s():
    """Besides the state: one stack with the next models, and the few models that a client holds."""
    federation = toys.make_federation((2,) * 64, features=1000, classes=4)
    problem = toys.make_problem(federation, optax.sgd(0.1), plan=make_plan("map", devices=4))
    temporaries = {}
    for name in ("federico", "fedfomo"):
        algorithm = toys.make_algorithm(name, problem, neighbors=3)
        clients = place(problem.plan, federation.client_data, problem.num_clients)
        state = toys.start(algorithm, problem, clients)
        kept = toys.shardings(algorithm, problem, clients)
        one_round = make_round(algorithm, problem.plan, 64)
        one_round = jax.jit(one_round, donate_argnums=2, out_shardings=(kept, None))
        compiled = one_round.lower(jax.random.key(0), np.int32(0), state, clients).compile()
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
    model = 4004 * 4
    assert 64 // 4 * model < temporaries["fedfomo"] < temporaries["federico"] + 16 * model
