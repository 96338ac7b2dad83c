"""FedFomo by hand: Eq. 3, 5, 13 and 14, the affinity matrix, who downloads whom, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from by_hand import by_hand, play
from quadratics import OPTIMIZER, loss_of, vectors
from sklearn.cluster import SpectralClustering
from sklearn.metrics import adjusted_rand_score

from pfljax.algorithms.common import clusters, first_order, neighbors
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Cohort, First, State
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_plan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import make_round
from pfljax.local.privacy import Privacy

SIZES = (2, 5, 3)


HYPERPARAMETERS = {"epsilon": 0.0, "neighbors": 2}


def run(rounds=3, sizes=SIZES, epochs=2, hyperparameters=None, **options):
    """Rounds of FedFomo without exploring."""
    hyperparameters = {"epsilon": 0.0, "neighbors": len(sizes) - 1} | (hyperparameters or {})
    return play(
        "fedfomo",
        rounds=rounds,
        sizes=sizes,
        epochs=epochs,
        hyperparameters=hyperparameters,
        **options,
    )


def weights_of(rounds, i, start, candidates, norm):
    """Eq. 3: what each candidate gains on client i's validation examples, by its distance."""
    weights = np.zeros(len(candidates))
    for n, model in enumerate(candidates):
        gap = model - start
        far = np.abs(gap).sum() if norm == "l1" else np.sqrt((gap**2).sum())
        if far:
            weights[n] = (score(rounds, i, start) - score(rounds, i, model)) / far
    return weights


def weights_of_average(rounds, i, theta):
    """Eq. 14: what the mean of all models loses without each of them."""
    gains = []
    for n in range(len(theta)):
        without = np.delete(theta, n, axis=0).mean(axis=0)
        gains.append(score(rounds, i, without) - score(rounds, i, theta.mean(axis=0)))
    return np.array(gains)


def score(rounds, i, model):
    return loss_of(rounds.federation, i, model, "validation")


def fedfomo(name, norm="l2", scaled=False, clusters=0):
    """Clients download everyone's models and, with one cluster, their mean."""

    def reference(rounds):
        start = rounds.start("rows.start")
        theta = rounds.start("models")[:3]
        affinity = np.eye(3)
        np.testing.assert_allclose(theta, start, rtol=1e-6)

        def personalized():
            """The models to train from, the weights before Eq. 13, and after."""
            candidates = np.concatenate([theta, rounds.mean(theta)[None].repeat(clusters, axis=0)])
            moved = []
            raw = []
            final = []
            for i in rounds.clients:
                if name == "fedfomo":
                    weights = weights_of(rounds, i, start[i], candidates, norm)
                else:
                    weights = weights_of_average(rounds, i, theta)
                positive = np.maximum(weights, 0)
                positive = positive / positive.sum() if positive.any() else positive  # Eq. 13
                moved.append(start[i] + positive @ (candidates - start[i]))  # Eq. 5
                raw.append(weights)
                final.append(positive)
            return np.array(moved), np.array(raw), np.array(final)

        for number in rounds:
            start, raw, final = personalized()
            scale = np.abs(raw.sum(axis=1, keepdims=True)) if scaled else 1
            affinity = affinity + (raw / scale)[:, :3]
            theta = np.array([rounds.descend(i, start[i]) for i in rounds.clients])

            metrics = rounds.records[number].metrics
            np.testing.assert_allclose(metrics["kept_previous_model"], np.mean(~final.any(axis=1)))
            np.testing.assert_allclose(
                mixed_by(rounds.states[number + 1]), final[:, :3], rtol=1e-3, atol=1e-4
            )
            # What is scored is what the next round would start from.
            expected = {"rows.start": start, "rows.affinity": affinity}
            expected |= {"predictions": personalized()[0][:, None]}
            if clusters:
                expected |= {
                    "models": [*theta, rounds.mean(theta)],
                    "server.state.affinity": affinity,
                }
            elif name == "fedfomo_average":
                expected |= {"models": [*theta, theta.mean(axis=0)]}
            else:
                expected |= {"models": theta}
            yield expected
        assert (affinity < -0.01).any()  # uncut weights went into it

    return reference


def mixed_by(state):
    """The weights (K, K) by which clients mixed others' models."""
    index = np.asarray(state.rows.index)
    weights = np.asarray(state.rows.weights)
    dense = np.zeros((len(index), len(index)))
    np.put_along_axis(dense, index, weights, axis=1)
    return dense


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedfomo", {}),
        pytest.param(
            "fedfomo", {"norm": "l1", "scaled": True, "clusters": 1}, marks=pytest.mark.slow
        ),
        pytest.param("fedfomo_average", {}, marks=pytest.mark.long),
        pytest.param("fedfomo_average", {"scaled": True}, marks=pytest.mark.slow),
    ],
)
def test_rounds_by_hand(name, options):
    hyperparameters = HYPERPARAMETERS | options
    by_hand(name, fedfomo(name, **options), sizes=SIZES, hyperparameters=hyperparameters, atol=1e-4)


@pytest.mark.parametrize(
    ("num", "kinds", "noise"),
    [
        pytest.param(6, 2, 0.0, marks=pytest.mark.slow),
        (15, 5, 1.0),
        pytest.param(15, 4, 1.5, marks=pytest.mark.slow),
        pytest.param(40, 3, 2.0, marks=pytest.mark.slow),
    ],
)
def test_spectral_clusters_are_those_of_scikit_learn(num, kinds, noise):
    rng = np.random.default_rng(num)
    kind = rng.permutation(np.arange(num) % kinds)
    affinity = 2.0 * (kind[:, None] == kind) + noise * rng.random((num, num))
    affinity = affinity + affinity.T + 0.1
    find = jax.jit(clusters.spectral_clusters, static_argnums=1)
    found = np.asarray(find(jnp.float32(affinity), kinds))
    expected = SpectralClustering(
        kinds, affinity="precomputed", assign_labels="discretize", random_state=0
    )
    assert (
        adjusted_rand_score(expected.fit_predict(affinity), found)
        == adjusted_rand_score(kind, found)
        == 1
    )


def test_means_of_clusters_are_over_those_who_uploaded_last():
    kind = np.array([0, 0, 1, 1, 1])
    last = np.array([3, 2, 1, 1, 0])
    size = np.array([4, 9, 1, 3, 9])
    kept = first_order.Uploads(
        jnp.asarray(last), jnp.asarray(size), jnp.asarray(5.0 * (kind[:, None] == kind))
    )
    np.testing.assert_array_equal(kept.newest, [True, False, False, False, False])
    theta = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    with_means = jax.jit(first_order.with_cluster_means, static_argnums=2)
    stack = np.asarray(with_means({"w": theta}, kept, 2)["w"])
    means = {tuple(theta[0].ravel()), tuple(np.float32((theta[2] + 3 * theta[3]) / 4).ravel())}
    np.testing.assert_array_equal(stack[:5], theta)
    np.testing.assert_allclose(sorted(stack[5:7].reshape(2, -1).tolist()), sorted(means), rtol=1e-6)
    np.testing.assert_allclose(stack[7], stack[5:7].mean(axis=0), rtol=1e-6)


@pytest.mark.slow
def test_under_sampling_those_who_uploaded_last_can_be_downloaded():
    hyperparameters = {"available": "uploaded", "neighbors": 1}
    rounds = run(sizes=(2, 5, 3, 4), rounds=4, cohort=2, hyperparameters=hyperparameters)
    start = rounds.start("rows.start")
    theta = np.stack(
        [rounds.descend(i, start[i], steps=1) for i in range(4)]
    )  # everyone, one epoch
    np.testing.assert_allclose(rounds.start("models"), theta, rtol=1e-5)
    available = set(np.flatnonzero(rounds.states[0].server.state.last == 0))
    assert len(available) == 2

    for number in rounds:
        cohort = rounds.cohort(number)
        index = np.asarray(rounds.states[number + 1].rows.index)
        uploaded = theta.copy()
        for i in cohort:
            assert index[i, 0] == i and index[i, 1] in available - {i}
            weights = np.maximum(weights_of(rounds, i, start[i], uploaded[index[i]], "l2"), 0)
            start[i] = start[i] + weights @ (uploaded[index[i]] - start[i]) / max(
                weights.sum(), 1e-30
            )
            theta[i] = rounds.descend(i, start[i])
        state = rounds.states[number + 1]
        np.testing.assert_allclose(vectors(state.models), theta, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(state.rows.start), start, rtol=1e-4, atol=1e-5)
        available = set(cohort)
        assert (
            rounds.records[number].down == 2 * 4 * 4
        )  # one model of four floats for each of two clients


@pytest.mark.long
def test_plans_agree_on_what_the_server_makes():
    hyperparameters = {"available": "uploaded", "clusters": 2, "neighbors": 1, "epsilon": 0.5}
    runs = [
        run(
            sizes=(2, 5, 3, 4),
            cohort=2,
            hyperparameters=hyperparameters,
            plan=make_plan(kind, devices=number),
        ).states
        for kind, number in (("map", 1), ("vmap", 4))
    ]
    for expected, found in zip(*runs, strict=True):
        toys.assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fallback", [pytest.param("start", marks=pytest.mark.slow), "mean"])
def test_where_no_average_gains_clients_fall_back(fallback):
    """Two opposite models and a loss that is highest at their mean."""
    federation = toys.make_federation((2, 2), "regression")

    def highest_at_zero(params, x, y, key=None):
        return -sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params)) * jnp.ones_like(y)

    problem = toys.make_problem(federation, loss=highest_at_zero)
    algorithm = toys.make_algorithm("fedfomo_average", problem, fallback=fallback)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(
        lambda: toys.init(algorithm, problem, jax.random.key(0), federation.client_data)
    )
    random = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    opposite = jax.tree.map(lambda leaf: np.stack([leaf[0], -leaf[0], 0 * leaf[0]]), random.models)
    state = random.with_models(opposite)
    scored = toys.predict(algorithm, problem, jax.random.key(0), state, federation.client_data)
    expected = np.zeros((2, 4)) if fallback == "mean" else vectors(state.rows.start)
    np.testing.assert_allclose(vectors(scored.models)[:, 0], expected, atol=1e-6)


def test_weights_are_cut_and_normalized():
    weights = first_order.first_order_weights(
        jnp.array([1.0, 3.0, 0.5, 2.0]), 2.0, jnp.array([2.0, 1.0, 0.5, 0.0])
    )
    np.testing.assert_allclose(
        weights, [0.5, -1.0, 3.0, 0.0]
    )  # (2 - 1) / 2, (2 - 3) / 1, (2 - 0.5) / 0.5
    np.testing.assert_allclose(
        first_order.normalize(weights), [0.5 / 3.5, 0, 3 / 3.5, 0], rtol=1e-6
    )


def test_where_nothing_helps_the_client_keeps_the_model_of_the_round_before():
    weights = first_order.first_order_weights(jnp.array([3.0, 2.5]), 2.0, jnp.array([1.0, 1.0]))
    np.testing.assert_array_equal(first_order.normalize(weights), [0, 0])
    start = {"w": jnp.array([1.0, 2.0])}
    models = {"w": jnp.array([[5.0, 5.0], [7.0, 7.0]])}
    np.testing.assert_array_equal(
        first_order.moved(start, models, first_order.normalize(weights))["w"], [1, 2]
    )


def test_with_a_validation_loss_that_training_can_only_raise_it_stays():
    """The loss is 0 at the start."""
    federation = toys.make_federation(SIZES, "regression")
    federation.validation.x[...] = 0
    federation.validation.y[...] = 0
    rounds = run(federation=federation)
    toys.assert_trees_close(rounds.states[-1].rows.start, rounds.states[0].rows.start)
    assert not toys.same_trees(rounds.states[-1].models, rounds.states[0].models)
    assert rounds.records[-1].metrics["kept_previous_model"] == 1


def test_a_client_without_validation_examples_goes_on_from_its_own_model():
    federation = toys.make_federation(SIZES, "regression")
    federation.validation.size[1] = 0
    rounds = run(federation=federation)
    alone = rounds.descend(1, rounds.start("rows.start")[1], steps=3 * rounds.epochs)
    np.testing.assert_allclose(vectors(rounds.states[-1].models)[1], alone, rtol=1e-4)


@pytest.mark.slow
def test_without_neighbors_only_its_own_training_counts():
    """Clients take their own model if it is better on validation data, else go back ("early stopping")."""
    rounds = run(hyperparameters={"neighbors": 0}, rounds=4)
    start = rounds.start("rows.start")
    theta = start.copy()
    for _ in rounds:
        for i in rounds.clients:
            start[i] = (
                theta[i] if score(rounds, i, theta[i]) < score(rounds, i, start[i]) else start[i]
            )
            theta[i] = rounds.descend(i, start[i])
    np.testing.assert_allclose(vectors(rounds.states[-1].rows.start), start, rtol=1e-4)
    # Three models of four floats go up all the same.
    assert (rounds.records[-1].down, rounds.records[-1].up) == (0, 3 * 4 * 4)


def choices(affinity, *, cohort, epsilon, decay=0.05, rounds=(0,), neighbors=2, draws=200):
    """The clients that client 0 downloads from in many draws, one row per draw."""
    num = len(affinity)
    federation = toys.make_federation((2,) * num, "regression")
    problem = toys.make_problem(federation, cohort=len(cohort))
    algorithm = toys.make_algorithm(
        "fedfomo", problem, neighbors=neighbors, epsilon=epsilon, epsilon_decay=decay
    )
    rows = first_order.Row(
        (), jnp.asarray(affinity, jnp.float32)[np.array(cohort)], (), ()
    )  # all that it reads

    @jax.jit
    def download(key, number):
        state = State(clients=First(rows), round=number)
        return lifting.download(algorithm, problem.plan, key, state, Cohort(jnp.array(cohort)))

    keys = jax.random.split(jax.random.key(1), draws)
    return np.stack([np.asarray(download(key, number))[0] for number in rounds for key in keys])


@pytest.mark.slow
def test_the_best_of_the_affinity_row_are_sent():
    affinity = np.eye(6)
    affinity[0] = [1, 0.3, -0.2, 0.0, 0.5, 0.0]
    found = choices(affinity, cohort=[0, 1, 2, 3, 4, 5], epsilon=0.0, draws=5)
    assert (found == [0, 4, 1]).all()
    found = choices(
        affinity, cohort=[0, 1, 2, 3, 5], epsilon=0.0, draws=60
    )  # client 4 is not active
    assert (found[:, :2] == [0, 1]).all()
    assert set(found[:, 2].tolist()) == {3, 5}  # a tie, at random; not the negative one
    found = choices(np.eye(6), cohort=[0, 1, 2, 3, 4, 5], epsilon=0.0)
    assert (
        np.bincount(found[:, 1:].ravel(), minlength=6)[1:] > 50
    ).all()  # at first all others alike, 80 expected


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

    def pick(key):
        return neighbors.best_candidates(key, scores, 2, jnp.array([0.0, 1.0]))[0]

    slots = np.asarray(jax.jit(jax.vmap(pick))(jax.random.split(jax.random.key(0), 4000)))
    assert set(slots[:, 0].tolist()) == {0, 1} and abs((slots[:, 0] == 0).mean() - 0.5) < 0.04
    for slot in range(2, 5):
        assert abs((slots[:, 1] == slot).mean() - 0.25) < 0.03


def test_clients_without_validation_examples_at_all_are_refused():
    federation = toys.make_federation(SIZES, "regression", validation_size=0)
    problem = toys.make_problem(federation)
    with pytest.raises(ArgumentError, match=r"^validation_fraction=0: "):
        toys.make_algorithm("fedfomo", problem).start(jax.random.key(0), federation.client_data)


def test_uploads_before_the_first_round_are_refused_with_privacy():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, cohort=2, privacy=Privacy(clip_norm=1.0))
    with pytest.raises(
        ArgumentError, match=r"^fedfomo\.available=uploaded: .*accepted with privacy: cohort"
    ):
        toys.make_algorithm("fedfomo", problem, available="uploaded")


@pytest.mark.slow
def test_a_round_needs_no_more_memory_than_federico_s():
    """Besides the state: one stack with the next models, and the few models that a client holds."""
    federation = toys.make_federation((2,) * 64, features=1000, classes=4)
    problem = toys.make_problem(federation, OPTIMIZER, plan=make_plan("map", devices=4))
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
