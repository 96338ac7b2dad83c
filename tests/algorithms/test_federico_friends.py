"""FedeRiCo with friends by hand: evidence, rounds, newcomers, limits, and learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from by_hand import by_hand
from collaborators import (
    linear_models,
    loss_and_slope,
    shared_weights,
    train_and_note,
    train_on_opposites,
)
from quadratics import descend, loss_of, vectors
from scipy.special import softmax

from pfljax import ArgumentError, data
from pfljax.algorithms import FedeRiCoFriends, Local
from pfljax.algorithms.common import classes
from pfljax.algorithms.federico_friends import Friends, log_weights
from pfljax.contract.types import Split
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import make_round

SIZES = np.array([2, 4, 3, 1])
BETA = 0.6


def loss_on_unseen(theta, x, y):
    """The summed loss at the best of the temperatures 1, 2, 4, 8 and 16, which divide a linear model's parameters."""
    return min(loss_and_slope(theta / heat, x, y)[0] for heat in (1, 2, 4, 8, 16))


def is_right_on_most(theta, x, y, num):
    """Whether a linear model is right on n/2 + sqrt(n log(num) / 2) of n examples, the sign test of Hoeffding."""
    right = (np.append(np.float64(x), np.ones((len(x), 1)), axis=1) @ theta).argmax(axis=1) == y
    return right.sum() > len(y) / 2 + np.sqrt(len(y) * np.log(num) / 2)


def evidence(theta, x, y, bar, num):
    """The summed loss; that of the bar, if it is less, but neither by a fifth nor right on most examples."""
    loss = loss_on_unseen(theta, x, y)
    code = bar * len(y)
    return loss if loss < 0.8 * code or is_right_on_most(theta, x, y, num) else max(loss, code)


def code_of_labels(y, num_classes):
    """Mean code length of labels by the frequencies of the others, half a label added to each class; at most log C."""
    counts = np.bincount(y, minlength=num_classes)
    code = -np.mean([np.log((counts[label] - 0.5) / (len(y) - 1 + num_classes / 2)) for label in y])
    return min(code, np.log(num_classes))


def labels_of_two_groups(sizes):
    """Clients 0 and 1 share a rule, and 2 to 4 its opposite."""
    federation = toys.make_federation(sizes, features=2, classes=2, seed=3)
    for k, size in enumerate(sizes):
        federation.train.y[k, :size] = (federation.train.x[k, :size, 0] > 0) ^ (k >= 2)
    return federation


@pytest.mark.slow
def test_rounds_of_friends_with_the_draws_given():
    """Eight rounds in NumPy for five uneven clients, M = 2, with the neighbors that were drawn."""
    num = 5
    rate = 0.5
    sizes = np.array([12, 20, 9, 15, 1])
    federation = labels_of_two_groups(sizes)
    states, drawn = train_and_note(FedeRiCoFriends(neighbors=2, beta=BETA), federation, rate, 8)
    data_of = [(federation.train.x[k, :n], federation.train.y[k, :n]) for k, n in enumerate(sizes)]
    theta = linear_models(states[0])
    bars = np.zeros(num)
    last = np.zeros((num, num))
    tracked = np.full((num, num), np.inf)
    friends = 0
    strangers = 0
    for number, held in enumerate(drawn):
        gradient = np.zeros_like(theta)
        for i, n in enumerate(sizes):
            evaluated = {b: loss_and_slope(theta[b], *data_of[i]) for b in held[i]}
            beaten = bars[i] if number else np.inf
            last[i, held[i]] = [evidence(theta[b], *data_of[i], beaten, num - 1) for b in held[i]]
            if number == 0:
                bars[i] = min(last[i, i] / n, code_of_labels(data_of[i][1], 2))
            known = np.isfinite(tracked[i])
            tracked[i, known] = (1 - BETA) * tracked[i, known] + BETA * last[i, known]
            fresh = ~known & np.isin(np.arange(num), held[i])
            tracked[i, fresh] = last[i, fresh]
            is_friend = bars[i] * n - tracked[i] > 2 * np.log(num - 1)
            is_friend[i] = True
            for b, (_, slope) in evaluated.items():
                weight = 1 if b == i else is_friend[b] / is_friend.sum()
                gradient[b] += weight * slope / sizes[b]
                friends = friends + (b != i and is_friend[b])
                strangers = strangers + (not is_friend[b])
        theta = theta - rate * gradient
        np.testing.assert_allclose(linear_models(states[number + 1]), theta, rtol=2e-3, atol=2e-5)
    assert friends > 0 and strangers > 0


def friends_in_regression(totals, bar, n, num_others):
    """Who (N,) has 2 log(N) nats of evidence, n / 2 log of the ratio of losses, and a loss far below the bar."""
    nats = n / 2 * (np.log(bar * n) - np.log(totals))
    return (nats > 2 * np.log(num_others)) & (totals <= 0.8 * bar * n)


@pytest.mark.slow
def test_rounds_of_friends_in_regression_with_the_draws_given():
    """Friends weigh by their losses, next to the client's own model; the bar is the loss of its untrained model."""
    num = 5
    rate = 0.1
    sizes = np.array([12, 20, 9, 15, 6])
    federation = toys.make_federation(sizes, "regression", features=2, seed=3)
    federation.train.y[2:4] *= -1  # two clients of the opposite rule
    states, drawn = train_and_note(FedeRiCoFriends(neighbors=2, beta=BETA), federation, rate, 10)
    theta = vectors(states[0].models)
    bars = np.array([loss_of(federation, k, theta[k]) for k in range(num)])
    tracked = np.full((num, num), np.inf)
    last = np.zeros((num, num))
    friends = 0
    strangers = 0
    for number, held in enumerate(drawn):
        gradient = np.zeros_like(theta)
        for i, n in enumerate(sizes):
            last[i, held[i]] = [n * loss_of(federation, i, theta[b]) for b in held[i]]
            known = np.isfinite(tracked[i])
            tracked[i, known] = (1 - BETA) * tracked[i, known] + BETA * last[i, known]
            fresh = ~known & np.isin(np.arange(num), held[i])
            tracked[i, fresh] = last[i, fresh]
            is_friend = friends_in_regression(tracked[i], bars[i], n, num - 1)
            is_friend[i] = True
            weights = softmax(np.where(is_friend, -tracked[i], -np.inf))
            weights[i] = 1
            x = np.append(np.float64(federation.train.x[i, :n]), np.ones((n, 1)), axis=1)
            for b in held[i]:
                slope = 2 * x.T @ (x @ theta[b] - federation.train.y[i, :n])
                gradient[b] += weights[b] * slope / sizes[b]
                friends = friends + (b != i and is_friend[b])
                strangers = strangers + (not is_friend[b])
        theta = theta - rate * gradient
        np.testing.assert_allclose(vectors(states[number + 1].models), theta, rtol=2e-3, atol=2e-5)
        np.testing.assert_allclose(states[number + 1].rows.bar, bars, rtol=1e-4)
    assert friends > 0 and strangers > 0


def test_newcomers_mix_their_friends_or_else_weigh_by_loss():
    sizes = (12, 20, 9, 15, 10)
    federation = labels_of_two_groups(sizes)
    problem = toys.make_problem(federation)
    algorithm = FedeRiCoFriends(neighbors=2, collaborators=5).build(problem)
    state = toys.zeros(algorithm, problem, federation.client_data)  # all biases are 0
    state.models["Dense_0"]["kernel"][...] = (
        [[[-3, 3], [0, 0]]] * 2 + [[[3, -3], [0, 0]]] * 2 + [[[0, 0], [9, -9]]]
    )
    newcomers = labels_of_two_groups((12, 1, 14))
    found = toys.adapt(algorithm, problem, jax.random.key(0), state, newcomers.client_data)
    alone = 0
    for k, size in enumerate((12, 1, 14)):
        x = newcomers.train.x[k, :size]
        y = newcomers.train.y[k, :size]
        losses = np.array(
            [evidence(model, x, y, code_of_labels(y, 2), 4) for model in linear_models(state)]
        )
        is_friend = code_of_labels(y, 2) * size - losses > 2 * np.log(5)
        alone += not is_friend.any()
        weights = is_friend / is_friend.sum() if is_friend.any() else softmax(-losses)
        np.testing.assert_allclose(found.weights[k], np.sort(weights)[::-1], rtol=1e-4, atol=1e-6)
    assert 0 < alone < 3


@pytest.mark.slow
def test_newcomers_in_regression_weigh_all_models_by_loss():
    """Nothing tells them what a model that knows nothing of them would lose."""
    federation = toys.make_federation(SIZES, "regression")
    *_, problem, algorithm, states, _ = toys.play(
        "federico_friends", federation, 2, optax.sgd(0.1), {"neighbors": 2}
    )
    found = toys.adapt(algorithm, problem, jax.random.key(0), states[-1], federation.client_data)
    theta = vectors(states[-1].models)
    losses = np.array(
        [[n * loss_of(federation, k, model) for model in theta] for k, n in enumerate(SIZES)]
    )
    order = np.argsort(losses, axis=1)  # the heaviest first
    weights = softmax(-np.take_along_axis(losses, order, axis=1), axis=1)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4, atol=1e-5)
    toys.assert_trees_close(found.models, jax.tree.map(lambda leaf: leaf[order], states[-1].models))


@functools.cache
def evaluator():
    """(bar, model, examples) -> what a friend's model is worth, for 8 candidates; compiled."""
    problem = toys.make_problem(labels_of_two_groups((24, 4)))
    friends = Friends(problem, num_candidates=8)
    return jax.jit(lambda bar, model, split: friends.evaluation(bar)(model, split))


@pytest.mark.parametrize(
    ("scale", "flipped"), [(0.0, 0), (0.05, 0), (0.05, 6), (0.05, 12), (2.0, 6), (2.0, 12)]
)
def test_a_model_explains_by_its_loss_or_by_being_right_on_most_examples(scale, flipped):
    train = labels_of_two_groups((24, 4)).train
    x = train.x[0]
    y = train.y[0]
    y[:flipped] = 1 - y[:flipped]
    theta = scale * np.array([[-1, 1], [0, 0], [0, 0]], np.float32)
    model = {"Dense_0": {"kernel": theta[:2], "bias": theta[2]}}
    for bar in (code_of_labels(y, 2), np.inf):
        found = evaluator()(np.float32(bar), model, Split(x, y, np.int32(24)))
        np.testing.assert_allclose(found, evidence(theta, x, y, bar, 7), rtol=1e-5)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_friends_need_evidence(task):
    problem = toys.make_problem(toys.make_federation(SIZES, task))
    totals = np.array([4.0, 1.0, 9.0, np.inf, 5.9])
    bar = 1.0
    size = 9
    nats = (
        bar * size - totals
        if task == "classification"
        else size / 2 * (np.log(bar * size) - np.log(totals))
    )
    is_friend = (nats > 2 * np.log(5)) & ((totals < 0.8 * bar * size) | (task == "classification"))
    assert 0 < is_friend.sum() < 5
    expected = np.where(is_friend, 0.0 if task == "classification" else -totals, -np.inf)
    np.testing.assert_allclose(log_weights(problem, jnp.asarray(totals), bar, size), expected)
    for bar, size in ((np.inf, 9), (0.0, 0)):  # nothing to beat, no examples
        assert np.isneginf(log_weights(problem, jnp.zeros(5), jnp.array(bar), size)).all()


def test_label_code_is_the_code_length_of_the_labels():
    federation = toys.make_federation((0, 1, 7))
    problem = toys.make_problem(federation)
    found = jax.jit(jax.vmap(functools.partial(classes.label_code, problem)))(federation.train)
    expected = [
        0,
        *(code_of_labels(federation.train.y[k, :size], 3) for k, size in ((1, 1), (2, 7))),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("hyperparameters", [{"neighbors": 4}, {"candidates": 2, "neighbors": 2}])
def test_hyperparameters_that_do_not_fit_are_refused(hyperparameters):
    method = FedeRiCoFriends(**{"neighbors": 2} | hyperparameters)
    name = next(iter(hyperparameters))
    with pytest.raises(ArgumentError, match=rf"^federico_friends\.{name}="):
        method.build(toys.make_problem(toys.make_federation(SIZES)))


# Models held by each client, its own first.
SCRIPT = np.array([[[0, 1], [1, 2], [2, 0], [3, 1]]])


@pytest.mark.slow
def test_delta_returns_the_weighted_change_of_local_epochs():
    """Model 1 is trained, and thereby a friend of clients 0 and 3."""
    sizes = np.array([12, 20, 9, 15])
    federation = toys.make_federation(sizes, "regression")
    hyperparameters = {"neighbors": 1, "update": "delta"}
    options = {"script": SCRIPT, "epochs": 3}
    start = toys.play(
        "federico_friends", federation, 1, optax.sgd(0.1), hyperparameters, **options
    ).states[0]
    theta = vectors(start.models)
    x = np.append(np.float64(federation.train.x[1]), np.ones((20, 1)), axis=1)
    theta[1] = np.linalg.lstsq(x, np.float64(federation.train.y[1]), rcond=None)[0]
    layer = {"kernel": np.float32(theta[:, :-1, None]), "bias": np.float32(theta[:, -1:])}
    played = toys.play(
        "federico_friends",
        federation,
        1,
        optax.sgd(0.1),
        hyperparameters,
        state=start.with_models({"Dense_0": layer}),
        **options,
    )

    expected = theta.copy()
    friends = []
    for i, (own, other) in enumerate(SCRIPT[0]):
        n = sizes[i]
        totals = n * np.array([loss_of(federation, i, theta[b]) for b in (own, other)])
        is_friend = friends_in_regression(totals[1:], totals[0] / n, n, 3)[0]
        friends.append(is_friend)
        weights = {own: 1.0, other: softmax(-totals)[1] if is_friend else 0.0}
        for b, weight in weights.items():
            change = descend(federation, i, theta[b], 3) - theta[b]
            expected[b] += weight * n / sizes[b] * change
    assert friends[0] and friends[3] and not all(friends)
    np.testing.assert_allclose(vectors(played.states[1].models), expected, rtol=2e-4, atol=1e-5)


def alone(rounds):
    """Local training."""
    theta = list(rounds.start("models"))
    for _ in rounds:
        theta = [rounds.descend(k, theta[k]) for k in rounds.clients]
        yield {"models": theta}


def test_without_neighbors_a_client_trains_alone():
    sizes = (5, 1, 3, 4, 2)
    hyperparameters = {"neighbors": 0}
    rounds = by_hand(
        "federico_friends", alone, hyperparameters=hyperparameters, sizes=sizes, epochs=1
    )
    assert all(record.down == 0 and record.up == 0 for record in rounds.records)
    weights = np.asarray(rounds.predict().weights)
    np.testing.assert_allclose(weights.max(axis=1), 1)


@pytest.mark.slow
def test_without_neighbors_it_is_local_training():
    options = {"optimizer": optax.adam(0.05), "plan": make_plan("map", devices=2)}
    played = functools.partial(
        toys.play, federation=toys.make_federation((5, 1, 3, 4)), rounds=3, **options
    )
    *_, states, _ = played("federico_friends", hyperparameters={"neighbors": 0})
    local = played("local").states
    toys.assert_trees_close(states[-1].models, local[-1].models, rtol=1e-5, atol=1e-6)


def accuracies(method, seeds, rounds=120):
    """Mean test accuracies on digits: 16 clients of 15 training examples each, from two groups of labels."""
    federations = [data.digits(train_examples=15, seed=seed) for seed in seeds]
    problem = toys.make_problem(
        federations[0],
        optax.adam(0.01),
        plan=make_plan("map", devices=2),
        hidden=(64,),
        rounds=rounds,
    )._replace(common_init=None)
    algorithm = method.build(problem)
    num = problem.num_clients
    one_round = make_round(algorithm, problem.plan, num)

    @jax.jit
    def run(key, clients, test):
        def step(state, number):
            return (one_round(key, number, state, clients)[0], None)

        state, _ = jax.lax.scan(
            step, toys.init(algorithm, problem, key, clients), jnp.arange(rounds)
        )
        return toys.evaluate(algorithm, problem, key, state, clients, test)["accuracy"].mean()

    return np.array(
        [
            run(jax.random.key(seed), f.client_data, f.test)
            for seed, f in zip(seeds, federations, strict=True)
        ]
    )


@pytest.mark.long
def test_collaboration_beats_training_alone_on_digits():
    gains = accuracies(FedeRiCoFriends(), (0, 1)) - accuracies(Local(), (0, 1))
    assert gains.mean() > 0.05 and gains.min() > 0


@pytest.mark.long
@pytest.mark.parametrize("common_init", [True, None])
def test_friends_are_the_clients_of_a_group(common_init):
    """Even if all models are equal at first: the gradient of a client's own model counts in full."""
    method = FedeRiCoFriends(neighbors=5)
    _, accuracy, weights = train_on_opposites(method, common_init=common_init)
    within, across = shared_weights(weights)
    assert accuracy > 0.9 and across == 0
    np.testing.assert_allclose(within, 1, rtol=1e-5)
