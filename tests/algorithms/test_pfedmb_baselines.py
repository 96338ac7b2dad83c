"""pFedMB's baselines and other methods: limit cases, and rounds by hand on quadratics."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import MINI, RATE, SIZES, gradient, play, quadratic, vectors

from pfljax.algorithms import fedamp
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError

EQUAL = (3, 3, 3, 3)


def loss_of(federation, k, theta):
    """Client k's mean squared error."""
    a, b = quadratic(federation, k)
    return (
        theta @ a @ theta - 2 * b @ theta + np.mean(np.float64(federation.train.y[k, : federation.train.size[k]]) ** 2)
    )


def predictions(name, **options):
    """The models that the clients predict with, (K, d)."""
    return vectors(play(name, **MINI, **options)[4].models)[:, 0]


@functools.cache
def plain_predictions(name, sizes):
    """The same for a method without knobs, for comparison."""
    return predictions(name, sizes=sizes)


@pytest.mark.parametrize(
    ("name", "off", "on", "sizes"),
    [
        ("fedavgm", {"momentum": 0.0, "rate": 1.0}, {"momentum": 0.9, "rate": 1.0}, SIZES),
        ("scaffold", {"correction": 0.0}, {"correction": 1.0}, SIZES),
        pytest.param("q_ffl", {"q": 0.0, "lipschitz": 3.0}, {"q": 2.0}, EQUAL, marks=pytest.mark.slow),
        pytest.param("afl", {"rate": 0.0}, {"rate": 0.5}, SIZES, marks=pytest.mark.slow),
        ("ifca", {"clusters": 1}, {"clusters": 3}, (2, 5, 1, 3, 4, 2)),
        pytest.param("hypcluster", {"clusters": 1}, {"clusters": 3}, (2, 5, 1, 3, 4, 2), marks=pytest.mark.slow),
        ("fedper", {"personal_layers": 0}, {"personal_layers": 1}, SIZES),
        ("apfl", {"alpha": 0.0, "rate": 0.0}, {"alpha": 0.5}, SIZES),
        ("pfedmb", {"branches": 1}, {"branches": 2}, SIZES),
        pytest.param(
            "pfedmb",
            {"branches": 1, "simplex": "projection", "averaging": "plain"},
            {"branches": 3},
            SIZES,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_with_its_knob_off_it_is_fedavg(name, off, on, sizes):
    wanted = plain_predictions("fedavg", sizes)
    np.testing.assert_allclose(predictions(name, knobs=off, sizes=sizes), wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(predictions(name, knobs=on, sizes=sizes) - wanted).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("fedper", {"personal_layers": 1}, {"personal_layers": 0}),
        ("apfl", {"alpha": 1.0, "rate": 0.0}, {"alpha": 0.5}),
        ("ditto", {"strength": 0.0}, {"strength": 1.0}),
        ("l2sgd", {"pull": 0.0}, {"pull": 0.5}),
        ("fedamp", {"attention": 0.0, "strength": 0.0}, {"attention": 0.5, "strength": 0.0}),
        pytest.param(
            "fedamp",
            {"attention": 0.0, "strength": 0.0},
            {"attention": 0.0, "strength": 1.0},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_with_its_knob_off_it_is_local(name, off, on):
    wanted = plain_predictions("local", SIZES)
    np.testing.assert_allclose(predictions(name, knobs=off), wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(predictions(name, knobs=on) - wanted).max() > 1e-3


def test_without_attention_the_first_step_of_fedamp_knows_no_pull():
    """The pull's gradient is zero where the client starts, at its own last model."""
    alone = {"epochs": 1, "rounds": 3}
    found = play("fedamp", knobs={"attention": 0.0, "strength": 5.0}, **alone)[4]
    np.testing.assert_allclose(vectors(found.models), vectors(play("local", **alone)[4].models), rtol=1e-5, atol=1e-6)


def test_l2sgd_pulled_all_the_way_trains_as_fedavg_does():
    found = play("l2sgd", knobs={"pull": 1.0}, **MINI)[2][-1].models
    np.testing.assert_allclose(vectors(found), vectors(play("fedavg", **MINI)[2][-1].models), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_fedper_by_hand_shares_the_base_only():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(RATE), epochs=2, hidden=(3,))
    algorithm = toys.make_algorithm("fedper", problem)
    states, records = toys.train(algorithm, problem, federation.client_data, 1)
    assert set(jax.tree.leaves(states[1].models["Dense_1"])) == set()
    trained = []
    for k in range(4):
        start = tree.combine(
            jax.tree.map(lambda leaf: leaf[0], states[0].models),
            jax.tree.map(lambda leaf, k=k: leaf[k], states[0].clients.own),
        )
        split = jax.tree.map(
            lambda leaf, k=k: jnp.asarray(leaf)[k, : SIZES[k]],
            federation.train._replace(size=federation.train.size[:, None]),
        )
        mean = lambda p, s=split: problem.model.loss(p, s.x, s.y).mean()
        for _ in range(2):
            start = jax.tree.map(lambda p, g: p - RATE * g, start, jax.grad(mean)(start))
        trained.append(start)
        own = jax.tree.map(lambda leaf, k=k: leaf[k], states[1].clients.own)["Dense_1"]
        toys.assert_trees_close(own, start["Dense_1"], rtol=1e-4, atol=1e-6)
    average = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=SIZES), *[t["Dense_0"] for t in trained])
    toys.assert_trees_close(
        jax.tree.map(lambda leaf: leaf[0], states[1].models["Dense_0"]), average, rtol=1e-4, atol=1e-6
    )
    base = 4 * (3 * 3 + 3)
    assert records[0].down == 4 * base and records[0].up == 4 * (base + 4)  # and n_k


def trained_by_hand(federation, k, theta, epochs, correction=0.0):
    """(theta after full-batch steps, the mean of its gradients)."""
    total = 0.0
    for _ in range(epochs):
        slope = gradient(federation, k, theta)
        total = total + slope / epochs
        theta = theta - RATE * (slope + correction)
    return theta, total


@pytest.mark.parametrize(("option", "mean"), [("II", "weighted"), ("I", "weighted"), ("I", "uniform")])
def test_scaffold_by_hand(option, mean):
    knobs = {"rate": 0.5, "option": option, "mean": mean}
    federation, _, states, records, _ = play("scaffold", rounds=3, epochs=2, knobs=knobs)
    shares = SIZES if mean == "weighted" else np.ones(4)
    x, c, own = vectors(states[0].models)[0], np.zeros(4), np.zeros((4, 4))
    for number in range(3):
        pairs = [trained_by_hand(federation, k, x, 2, c - own[k]) for k in range(4)]
        if option == "I":
            new = np.array([gradient(federation, k, x) for k in range(4)])
        else:  # as it is written: c_k - c + (x - y_k) / (steps rate)
            new = np.array([own[k] - c + (x - pairs[k][0]) / (2 * RATE) for k in range(4)])
        x = x + 0.5 * (np.average([y for y, _ in pairs], axis=0, weights=shares) - x)
        c, own = c + np.average(new - own, axis=0, weights=shares), new
        after = states[number + 1]
        np.testing.assert_allclose(vectors(after.models)[0], x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(after.server.control), c, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(after.clients.control), own, rtol=1e-4, atol=1e-5)
    assert records[0].down == 4 * 2 * 4 * 4 and records[0].up == 4 * (2 * 4 + 1) * 4


def test_scaffold_s_variates_sum_to_the_server_s_under_sampling():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE), cohort=2, epochs=2)
    states, _ = toys.train(toys.make_algorithm("scaffold", problem), problem, federation.client_data, 4)
    np.testing.assert_allclose(
        np.average(vectors(states[-1].clients.control), axis=0, weights=SIZES),
        vectors(states[-1].server.control),
        atol=1e-5,
    )


def test_scaffold_ends_where_the_weighted_objective_is_least():
    """However many local steps there are, unlike FedAvg."""
    sizes = (6, 3, 5, 4)
    knobs = {"sizes": sizes, "rounds": 300, "epochs": 5}
    federation, _, states, _, _ = play("scaffold", **knobs)
    parts = [quadratic(federation, k) for k in range(4)]
    best = np.linalg.solve(*(np.average([part[i] for part in parts], axis=0, weights=sizes) for i in range(2)))
    np.testing.assert_allclose(vectors(states[-1].models)[0], best, atol=1e-4)
    assert np.abs(vectors(play("fedavg", **knobs)[2][-1].models)[0] - best).max() > 0.01


def test_fedavgm_and_fedadam_by_hand():
    federation, _, states, _, _ = play("fedavgm", rounds=3, knobs={"momentum": 0.5, "rate": 0.7})
    mean_of = lambda w: np.average([trained_by_hand(federation, k, w, 1)[0] for k in range(4)], axis=0, weights=SIZES)
    w, velocity = vectors(states[0].models)[0], 0.0
    for number in range(3):
        velocity = 0.5 * velocity + w - mean_of(w)
        w = w - 0.7 * velocity
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], w, rtol=1e-4, atol=1e-5)


def test_by_default_fedavgm_without_momentum_is_fedavg():
    without, fedavg = play("fedavgm", rounds=3, knobs={"momentum": 0.0}), play("fedavg", rounds=3)
    np.testing.assert_allclose(vectors(without[2][-1].models), vectors(fedavg[2][-1].models), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "given", "betas"),
    [
        ("adam", {}, (0.9, 0.99)),
        ("adam", {"beta1": 0.5, "beta2": 0.7}, (0.5, 0.7)),
        ("yogi", {}, (0.9, 0.99)),
        ("yogi", {"beta2": 0.7}, (0.9, 0.7)),
        ("adagrad", {}, (0.0, None)),
        ("adagrad", {"beta1": 0.5}, (0.5, None)),
    ],
)
def test_adaptive_servers_by_hand(optimizer, given, betas):
    """Algorithm 2 of Reddi et al.: no bias correction, v starts at tau^2."""
    rate, tau = 0.2, 0.3
    knobs = {"rate": rate, "tau": tau, "optimizer": optimizer, **given}
    federation, _, states, _, _ = play("fedadam", rounds=3, knobs=knobs)
    (beta1, beta2), w, m, v = betas, vectors(states[0].models)[0], 0.0, tau**2
    for number in range(3):
        trained = [trained_by_hand(federation, k, w, 1)[0] for k in range(4)]
        slope = w - np.average(trained, axis=0, weights=SIZES)
        m = beta1 * m + (1 - beta1) * slope
        if optimizer == "adagrad":
            v = v + slope**2
        elif optimizer == "yogi":
            v = v - (1 - beta2) * slope**2 * np.sign(v - slope**2)
        else:
            v = beta2 * v + (1 - beta2) * slope**2
        w = w - rate * m / (np.sqrt(v) + tau)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], w, rtol=1e-4, atol=1e-5)


def test_adagrad_has_no_decay_of_its_second_moment():
    with pytest.raises(ArgumentError, match=r"^fedadam\.beta2: accepted only with adam and yogi"):
        play("fedadam", knobs={"optimizer": "adagrad", "beta2": 0.9})


@pytest.mark.parametrize("name", ["fedavgm", "fedadam"])
def test_a_server_takes_no_step_where_nothing_came_back(name):
    federation = toys.make_federation((3, 0, 0, 0), "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE), cohort=1)
    algorithm = toys.make_algorithm(name, problem)
    states, records = toys.train(algorithm, problem, federation.client_data, 12)
    came = [float(record.up) > 0 for record in records]
    assert any(came[:-1]) and not all(came[came.index(True) :])
    for before, after, moved in zip(states, states[1:], came, strict=False):
        assert toys.same_trees((before.models, before.optimizer), (after.models, after.optimizer)) == (not moved)


def test_q_ffl_by_hand():
    q, lipschitz = 2.0, 4.0
    federation, _, states, _, _ = play("q_ffl", epochs=2, knobs={"q": q, "lipschitz": lipschitz})
    w = vectors(states[0].models)[0]
    for number in range(2):
        moved, steps = 0.0, 0.0
        for k in range(4):
            loss = loss_of(federation, k, w)
            delta = lipschitz * (w - trained_by_hand(federation, k, w, 2)[0])
            moved = moved + loss**q * delta
            steps += q * loss ** (q - 1) * delta @ delta + lipschitz * loss**q
        w = w - moved / steps
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], w, rtol=1e-4, atol=1e-5)


def test_q_ffl_s_lipschitz_constant_is_one_over_the_learning_rate():
    federation = toys.make_federation(SIZES, "regression")
    problem, clients = toys.make_problem(federation, optax.sgd(RATE)), federation.client_data

    def moved(problem, **knobs):
        states, _ = toys.train(toys.make_algorithm("q_ffl", problem, **knobs), problem, clients, 2)
        return vectors(states[-1].models)

    by_default = moved(problem._replace(learning_rate=0.25))
    np.testing.assert_allclose(by_default, moved(problem, lipschitz=4.0), rtol=1e-5)
    assert np.abs(by_default - moved(problem, lipschitz=1.0)).max() > 1e-3
    unknown = problem._replace(learning_rate=None)
    with pytest.raises(ArgumentError, match=r"^q_ffl\.lipschitz: accepted: .*learning rate is unknown$"):
        toys.make_algorithm("q_ffl", unknown)
    np.testing.assert_allclose(moved(unknown, lipschitz=4.0), by_default, rtol=1e-5)


def test_with_q_of_zero_and_that_constant_q_ffl_is_fedavg():
    """L d_k is then the client's gradient, and the step is 1 / L along the mean."""
    found, mean = play("q_ffl", rounds=3, knobs={"q": 0.0}, sizes=EQUAL), play("fedavg", rounds=3, sizes=EQUAL)
    np.testing.assert_allclose(vectors(found[2][-1].models), vectors(mean[2][-1].models), rtol=1e-4, atol=1e-5)


def test_q_ffl_evens_losses_out():
    spread = []
    for q in (0.0, 5.0):
        federation, _, states, _, _ = play("q_ffl", rounds=60, epochs=1, sizes=EQUAL, knobs={"q": q, "lipschitz": 1.0})
        spread.append(np.std([loss_of(federation, k, vectors(states[-1].models)[0]) for k in range(4)]))
    assert spread[1] < spread[0]


def test_afl_by_hand():
    rate = 0.3
    federation, _, states, _, _ = play("afl", rounds=3, knobs={"rate": rate})
    w, share = vectors(states[0].models)[0], np.array(SIZES) / sum(SIZES)
    np.testing.assert_allclose(states[0].server, share, rtol=1e-6)
    for number in range(3):
        losses = np.array([loss_of(federation, k, w) for k in range(4)])
        trained = [trained_by_hand(federation, k, w, 1)[0] for k in range(4)]
        w = np.average(trained, axis=0, weights=share)
        # The nearest point of the simplex: subtract an offset so that the positive parts sum to 1.
        raised = share + rate * losses
        low, high = raised.min() - 1, raised.max()
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if np.maximum(raised - middle, 0).sum() > 1 else (low, middle)
        share = np.maximum(raised - low, 0)
        np.testing.assert_allclose(states[number + 1].server, share, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], w, rtol=1e-3, atol=1e-4)
    assert (share == 0).any() and share.sum() == pytest.approx(1)


def test_ditto_by_hand():
    federation, _, states, _, predictions = play("ditto", epochs=3, knobs={"strength": 2.0})
    w, own = vectors(states[0].models)[0], vectors(states[0].clients.own.model)
    for _ in range(2):
        for k in range(4):
            for _ in range(3):
                own[k] = own[k] - RATE * (gradient(federation, k, own[k]) + 2.0 * (own[k] - w))
        w = np.average([trained_by_hand(federation, k, w, 3)[0] for k in range(4)], axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], own, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(vectors(states[-1].models)[0], w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.05, 10.0])
def test_apfl_by_hand(rate):
    knobs = {"alpha": 0.3, "rate": rate}
    federation, _, states, _, predictions = play("apfl", epochs=2, knobs=knobs)
    w, v, alpha = vectors(states[0].models)[0], vectors(states[0].clients.models.own.model), np.full(4, 0.3)
    for number in range(2):
        trained = []
        for k in range(4):
            own = w.copy()
            for step in range(2):
                slope = gradient(federation, k, alpha[k] * v[k] + (1 - alpha[k]) * own)
                moved = alpha[k] - rate * (v[k] - own) @ slope  # Eq. 10
                own, v[k] = own - RATE * gradient(federation, k, own), v[k] - RATE * alpha[k] * slope
                alpha[k] = np.clip(moved, 0, 1) if step == 0 else alpha[k]
            trained.append(own)
        w = np.average(trained, axis=0, weights=SIZES)
        np.testing.assert_allclose(states[number + 1].clients.alpha, alpha, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        vectors(predictions.models)[:, 0], alpha[:, None] * v + (1 - alpha)[:, None] * w, rtol=1e-3, atol=1e-4
    )
    assert rate < 10 or set(np.round(alpha, 3)) & {0.0, 1.0}  # cut to [0, 1]


def test_l2sgd_by_hand():
    federation, _, states, _, predictions = play("l2sgd", epochs=2, knobs={"pull": 0.3})
    mean, own = vectors(states[0].models)[0], vectors(states[0].clients.model)
    for _ in range(2):
        own = np.array([trained_by_hand(federation, k, 0.7 * own[k] + 0.3 * mean, 2)[0] for k in range(4)])
        mean = np.average(own, axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], own, rtol=1e-4, atol=1e-5)


def attention(points, config):
    models = fedamp.centered({"w": jnp.asarray(points)})
    return fedamp.attention(tree.inner_products(models, models), config)


def test_fedamp_s_attention_by_hand():
    points = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]], np.float32)
    config = fedamp.FedAMP(attention=0.8, sigma=0.5)
    distance = np.array([[0, 25, 1], [25, 0, 18], [1, 18, 0.0]])
    near = np.exp(-distance / (0.5 * (25 + 1 + 18) / 3))
    expected = 0.4 * near * (1 - np.eye(3))
    expected += np.diag(1 - expected.sum(axis=1))
    found = attention(points, config)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(
        attention(np.ones((3, 2), np.float32), config), np.full((3, 3), 0.4) - 0.2 * np.eye(3), rtol=1e-5
    )


def test_near_models_are_told_apart():
    """Large equal parts must not drown small distances in float32."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=50) * 100 + rng.normal(size=(4, 50)) * 1e-2
    config = fedamp.FedAMP(attention=0.9, sigma=1.0)
    points = np.float32(points)
    distance = np.square(np.float64(points)[:, None] - np.float64(points)[None, :]).sum(axis=-1)
    near = 0.3 * np.exp(-distance / (distance.sum() / 12)) * (1 - np.eye(4))
    found = np.asarray(attention(points, config))
    np.testing.assert_allclose(found * (1 - np.eye(4)), near, rtol=1e-3)


def test_fedamp_by_hand():
    knobs = {"attention": 0.6, "sigma": 0.7, "strength": 1.5}
    federation, _, states, records, predictions = play("fedamp", epochs=2, knobs=knobs)
    own = vectors(states[0].server.models)
    cloud = own.copy()
    for number in range(2):
        for k in range(4):
            own[k] = cloud[k]
            for _ in range(2):
                own[k] = own[k] - RATE * (gradient(federation, k, own[k]) + 1.5 * (own[k] - cloud[k]))
        distance = np.square(own[:, None] - own[None, :]).sum(axis=-1)
        xi = 0.2 * np.exp(-distance / (0.7 * distance.sum() / 12)) * (1 - np.eye(4))
        xi += np.diag(1 - xi.sum(axis=1))
        cloud = xi @ own
        np.testing.assert_allclose(vectors(states[number + 1].models), cloud, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], own, rtol=1e-3, atol=1e-4)
    assert records[0].down == records[0].up == 4 * 4 * 4


@pytest.mark.parametrize("name", ["ifca", "hypcluster"])
def test_clients_choose_and_train_the_model_of_least_loss(name):
    sizes = (2, 5, 1, 3, 4, 2)
    federation, algorithm, states, records, _ = play(name, epochs=2, knobs={"clusters": 3}, sizes=sizes)
    models = vectors(states[0].models)
    for number in range(2):
        losses = np.array([[loss_of(federation, k, theta) for theta in models] for k in range(6)])
        chosen = losses.argmin(axis=1)
        assert len(set(chosen)) > 1
        for j in range(3):
            members = np.flatnonzero(chosen == j)
            if len(members):
                trained = [trained_by_hand(federation, k, models[j], 2)[0] for k in members]
                models[j] = np.average(trained, axis=0, weights=[sizes[k] for k in members])
        np.testing.assert_allclose(vectors(states[number + 1].models), models, rtol=1e-4, atol=1e-5)
        assert records[number].metrics["clusters_chosen"] == len(set(chosen))
    assert records[0].down == 6 * 3 * 4 * 4 and records[0].up == 6 * (4 + 1) * 4
    best = np.array([[loss_of(federation, k, theta) for theta in models] for k in range(6)]).argmin(axis=1)
    problem = toys.make_problem(federation)
    used = toys.used(algorithm, problem, jax.random.key(0), states[-1], federation.client_data)
    np.testing.assert_array_equal(used["index"][:, 0], best)


@pytest.mark.parametrize("name", ["ifca", "hypcluster"])
@pytest.mark.parametrize(("known", "clusters"), [(None, 2), (1, 1), (3, 3), (4, 2), (6, 2)])
def test_by_default_there_are_as_many_clusters_as_distributions_that_clients_share(name, known, clusters):
    problem = toys.make_problem(toys.make_federation((3,) * 6))._replace(num_distributions=known)
    clients = toys.make_federation((3,) * 6).client_data
    shape = jax.eval_shape(toys.make_algorithm(name, problem).start, jax.random.key(0), clients)
    assert tree.num_rows(shape.models) == clusters


def test_of_several_starts_ifca_keeps_the_one_that_spreads_clients_most_evenly():
    """The best of several single-draw starts, by the entropy of n_k summed over each model's clients."""
    sizes = (2, 5, 1, 3, 4, 2)
    federation = toys.make_federation(sizes, "regression")
    problem, key = toys.make_problem(federation, optax.sgd(RATE)), jax.random.key(3)
    algorithm = lambda draws: toys.make_algorithm("ifca", problem, clusters=3, draws=draws)

    def entropy(models):
        losses = np.array([[loss_of(federation, k, theta) for theta in vectors(models)] for k in range(6)])
        share = np.bincount(losses.argmin(axis=1), sizes, minlength=3) / sum(sizes)
        return -sum(p * np.log(p) for p in share if p)

    # The same starts one by one: a further draw is kept only if it is better.
    kept = [algorithm(draws).start(key, federation.client_data).models for draws in range(1, 7)]
    scores = [entropy(models) for models in kept]
    assert np.all(np.diff(scores) >= 0) and scores[-1] > scores[0]
    for before, after in itertools.pairwise(kept):
        assert toys.same_trees(before, after) == (entropy(before) == entropy(after))


def test_ifca_averages_gradients_by_hand():
    """Option I: a step along the sum of its clients' gradients, over all clients' examples."""
    sizes = np.array((2, 5, 1, 3, 4, 2))
    knobs = {"clusters": 3, "averaging": "gradients"}
    federation, _, states, records, _ = play("ifca", knobs=knobs, sizes=tuple(sizes), epochs=2)
    models, spread = vectors(states[0].models), []
    for number in range(2):
        losses = np.array([[loss_of(federation, k, theta) for theta in models] for k in range(6)])
        chosen = losses.argmin(axis=1)
        for _ in range(2):  # epochs, each a step of all examples; the choice is the round's
            slopes = np.array([sizes[k] * gradient(federation, k, models[chosen[k]]) for k in range(6)])
            models = np.array([models[j] - RATE * slopes[chosen == j].sum(axis=0) / sizes.sum() for j in range(3)])
        np.testing.assert_allclose(vectors(states[number + 1].models), models, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(states[number + 1].clients, chosen)
        spread.append(len(set(chosen)))
        assert records[number].metrics["clusters_chosen"] == spread[-1]
    assert spread[0] > 1
    # All models in the round's first exchange, then only the chosen one; its gradient goes back in both.
    assert records[0].down == 6 * (3 + 1) * 4 * 4 and records[0].up == 6 * 2 * 4 * 4


def test_with_one_cluster_and_full_batches_averaging_gradients_is_averaging_models():
    knobs = {"clusters": 1, "averaging": "gradients"}
    by_gradients, fedavg = play("ifca", rounds=3, knobs=knobs), play("fedavg", rounds=3)
    np.testing.assert_allclose(vectors(by_gradients[2][-1].models), vectors(fedavg[2][-1].models), rtol=1e-4, atol=1e-5)


def test_ifca_shares_layers_only_where_it_averages_models():
    with pytest.raises(ArgumentError, match=r"^ifca\.shared_layers=1: must be 0 with averaging=gradients$"):
        play("ifca", knobs={"averaging": "gradients", "shared_layers": 1})


def test_ifca_s_first_layers_may_be_shared():
    federation = toys.make_federation((4, 3, 5, 2, 4, 4))
    problem = toys.make_problem(federation, optax.sgd(RATE), hidden=(3,), batch_size=2)
    states, _ = toys.train(
        toys.make_algorithm("ifca", problem, clusters=3, shared_layers=1), problem, federation.client_data, 3
    )
    for state in states:
        for leaf in jax.tree.leaves(state.models["Dense_0"]):
            np.testing.assert_allclose(leaf[1:], np.broadcast_to(leaf[:1], leaf[1:].shape), rtol=1e-6)
        assert np.abs(np.diff(state.models["Dense_1"]["kernel"], axis=0)).max() > 0.01
    assert not toys.same_trees(states[0].models["Dense_0"], states[-1].models["Dense_0"])


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("fedavgm", {"momentum": 1.0}),
        ("fedavgm", {"rate": 0.0}),
        ("fedadam", {"tau": 0.0}),
        ("fedadam", {"beta1": 1.0}),
        ("scaffold", {"correction": -1.0}),
        ("q_ffl", {"q": -1.0}),
        ("q_ffl", {"lipschitz": 0.0}),
        ("afl", {"rate": -0.1}),
        ("fedper", {"personal_layers": 2}),
        ("ditto", {"strength": -1.0}),
        ("apfl", {"alpha": 1.5}),
        ("l2sgd", {"pull": 1.5}),
        ("fedamp", {"sigma": 0.0}),
        ("fedamp", {"attention": 1.2}),
        ("ifca", {"clusters": -1}),
        ("ifca", {"draws": 0}),
        ("ifca", {"shared_layers": 2}),
        ("hypcluster", {"clusters": -1}),
        ("pfedmb", {"branches": 0}),
        ("pfedmb", {"alpha_rate": 0.0}),
    ],
)
def test_bad_knobs_are_refused(name, knobs):
    (knob,) = knobs
    with pytest.raises(ArgumentError, match=rf"^{name}\.{knob}=.*: accepted: "):
        play(name, knobs=knobs)
