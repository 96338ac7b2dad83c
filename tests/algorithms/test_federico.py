"""FedeRiCo when clients hold only some models: partial downloads, mini-batches, limits, tables, and learning."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from by_hand import by_hand, entry
from by_hand import play as play_rounds
from quadratics import play, vectors
from scipy.special import softmax

from pfljax import ArgumentError, data
from pfljax.algorithms import FedeRiCo, FedeRiCoCentralized, Local
from pfljax.algorithms.common import by_loss, classes
from pfljax.algorithms.federico import Friends, local_changes, log_weights
from pfljax.contract import tree
from pfljax.contract.types import ClientContext, Cohort, Split
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import make_round
from pfljax.local.privacy import Privacy

SIZES = np.array([2, 4, 3, 1])
K = 4
RATE = 0.05
BETA = 0.6


def loss_and_gradient(theta, split, k):
    """Squared error of one model on client k's data, summed, and its gradient."""
    x = np.append(np.float64(split.x[k, : split.size[k]]), np.ones((split.size[k], 1)), axis=1)
    error = x @ theta - split.y[k, : split.size[k]]
    return (error**2).sum(), 2 * x.T @ error


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


def by_id(table, name):
    """A table's values (K, C) by model id; NaN for models not in the table."""
    out = np.full((K, K), np.nan)
    for k, ids in enumerate(np.asarray(table.ids)):
        out[k, ids[ids >= 0]] = np.asarray(getattr(table, name))[k, ids >= 0]
    return out


# Models held by each client, its own first. Only client 3 holds its model until the third round.
SCRIPT = np.array(
    [
        [[0, 1], [1, 2], [2, 0], [3, 0]],
        [[0, 2], [1, 2], [2, 1], [3, 1]],
        [[0, 1], [1, 3], [2, 3], [3, 0]],
    ]
)
EMA = {"neighbors": 1, "beta": BETA, "tracking": "ema", "faithful": False, "rule": "posterior"}
SCRIPTED = {"sizes": SIZES, "script": SCRIPT, "epochs": 1}
IN_TABLE = (
    np.arange(K)[:, None] + np.arange(K)
) % K  # the model in each slot of a table that has them all


def posterior(tracking, faithful):
    """Algorithm 1 with the downloads of SCRIPT."""

    def reference(rounds):
        theta = rounds.start("models")
        evaluated = np.full((K, K), faithful)
        last = np.zeros((K, K))
        tracked = np.zeros((K, K))  # line 3
        for number in rounds:
            gradient = np.zeros_like(theta)
            for i in rounds.clients:
                held = SCRIPT[number, i]
                fresh = {b: loss_and_gradient(theta[b], rounds.federation.train, i) for b in held}
                # Lines 10 to 13: the others keep the loss of an earlier round
                for b, (loss, _) in fresh.items():
                    last[i, b] = loss
                before = evaluated[i].copy()
                evaluated[i, held] = True
                for j in np.flatnonzero(evaluated[i]):
                    if tracking == "ema":
                        mean = (1 - BETA) * tracked[i, j] + BETA * last[i, j]
                        tracked[i, j] = mean if before[j] else last[i, j]
                    else:
                        tracked[i, j] = (
                            tracked[i, j] + last[i, j] if before[j] else last[i, j] * (number + 1)
                        )
                # Line 17
                weights = softmax(np.where(evaluated[i], -tracked[i], -np.inf))
                for b, (_, slope) in fresh.items():
                    gradient[b] += weights[b] * slope
            theta = theta - rounds.rate * gradient / rounds.sizes[:, None]

            known = np.where(evaluated, tracked, np.inf)
            order = np.argsort(known, axis=1)  # the heaviest first
            yield {
                "models": theta,
                "rows.table.last": np.take_along_axis(last, IN_TABLE, axis=1),
                "rows.table.tracked": np.take_along_axis(known, IN_TABLE, axis=1),
                "predictions": theta[order],
                "predictions.weights": softmax(-np.take_along_axis(known, order, axis=1), axis=1),
            }

    return reference


@pytest.mark.parametrize(
    ("tracking", "faithful"),
    [
        ("ema", False),
        pytest.param("accumulated", True, marks=pytest.mark.slow),
        pytest.param("ema", True, marks=pytest.mark.long),
        pytest.param("accumulated", False, marks=pytest.mark.long),
    ],
)
def test_the_losses_of_models_not_held_are_kept(tracking, faithful):
    hyperparameters = EMA | {"tracking": tracking, "faithful": faithful}
    rounds = by_hand(
        "federico", posterior(tracking, faithful), hyperparameters=hyperparameters, **SCRIPTED
    )
    own = np.asarray(rounds.states[-1].rows.weights)[:, 0]
    assert ((own > 0.05) & (own < 0.95)).any()  # some weights are neither 0 nor 1


def test_a_round_carries_data_only_to_the_models_held():
    before = play_rounds("federico", hyperparameters=EMA, rounds=1, **SCRIPTED)
    federation = toys.make_federation(SIZES, "regression")
    federation.train.y[3] += 1  # client 3 holds models 3 and 0
    after = play_rounds(
        "federico", hyperparameters=EMA, rounds=1, federation=federation, **SCRIPTED
    )
    changed = (entry(before.states[1], "models") != entry(after.states[1], "models")).any(axis=1)
    np.testing.assert_array_equal(changed, [True, False, False, True])


@pytest.mark.slow
def test_mini_batches_are_exchanges_with_one_e_step_a_round():
    federation = toys.make_federation((1, 5, 3, 4), "regression")
    split = federation.train
    for k, size in enumerate(
        split.size
    ):  # equal examples within a client: their order plays no part
        split.x[k, :size], split.y[k, :size] = split.x[k, 0], split.y[k, 0]
    hyperparameters = {"neighbors": 1, "rule": "posterior"}
    *_, algorithm, states, records = toys.play(
        "federico", federation, 1, optax.sgd(RATE), hyperparameters, SCRIPT, batch_size=2
    )
    assert algorithm.exchanges == 3

    theta = vectors(states[0].models)
    totals = np.array(
        [[loss_and_gradient(theta[b], split, i)[0] for b in SCRIPT[0, i]] for i in range(K)]
    )
    weights = np.stack([softmax(-row) for row in totals])  # held fixed over the round
    sent = 0
    for step in range(3):
        gradient = np.zeros_like(theta)
        for i, size in enumerate(split.size):
            if step < -(-size // 2):
                sent += 1
                for b, weight in zip(SCRIPT[0, i], weights[i], strict=True):
                    gradient[b] += weight * loss_and_gradient(theta[b], split, i)[1]
        theta = theta - RATE * gradient / split.size[:, None]
    np.testing.assert_allclose(vectors(states[1].models), theta, rtol=2e-4, atol=2e-6)
    last = by_id(states[1].rows.table, "last")
    np.testing.assert_allclose(np.take_along_axis(last, SCRIPT[0], axis=1), totals, rtol=2e-4)
    model_bytes = 4 * 4  # three weights and an intercept
    assert (
        records[0].up == sent * model_bytes
    )  # a neighbor's gradient from every client with a batch left
    assert records[0].down == sent * model_bytes  # who has no batch left downloads no more


def train_and_note(method, federation, rate, rounds):
    """All states, and the models (rounds, K, J) that clients drew."""
    problem = toys.make_problem(federation, optax.sgd(rate))
    held = {}
    noting = toys.watched(
        method.build(problem),
        lambda *found: held.update({(int(found[0]), int(found[1])): found[2]}),
    )
    states, _ = toys.train(noting, problem, federation.client_data, rounds)
    jax.effects_barrier()
    return states, [
        [held[number, k] for k in range(problem.num_clients)] for number in range(rounds)
    ]


@pytest.mark.parametrize(
    ("epsilon", "examples"),
    [
        pytest.param(0.0, 1.5, marks=pytest.mark.long),
        pytest.param(0.3, np.inf, marks=pytest.mark.slow),
    ],
)
def test_rounds_with_the_draws_given(epsilon, examples):
    """Six rounds of Algorithm 1 in NumPy for five uneven clients, M = 2, with the neighbors that were drawn."""
    num = 5
    sizes = np.array([2, 4, 3, 6, 1])
    federation = toys.make_federation(sizes, "regression", features=2, seed=3)
    method = FedeRiCo(
        neighbors=2, epsilon=epsilon, beta=BETA, rule="posterior", effective_examples=examples
    )
    states, drawn = train_and_note(method, federation, RATE, 6)
    theta = vectors(states[0].models)
    explored = 0
    last = np.zeros((num, num))
    tracked = np.zeros((num, num))
    known = np.zeros((num, num), bool)
    for number, held in enumerate(drawn):
        gradient = np.zeros_like(theta)
        for i, n in enumerate(sizes):
            others = np.setdiff1d(np.arange(num), [i])
            rank = np.where(
                known[i, others], tracked[i, others], -np.inf
            )  # models never evaluated come first
            greedy = (
                np.sort(rank)[:2].tolist()
                == np.sort([rank[others == b][0] for b in held[i][1:]]).tolist()
            )
            explored += not greedy
            evaluated = {b: loss_and_gradient(theta[b], federation.train, i) for b in held[i]}
            for b, (loss, _) in evaluated.items():
                last[i, b] = loss
            fresh = ~known[i] & np.isin(np.arange(num), held[i])
            known[i] |= fresh
            tracked[i] = (
                np.where(fresh, last[i], (1 - BETA) * tracked[i] + BETA * last[i]) * known[i]
            )
            # The first ceil(4 / 2) rounds count all examples.
            share = 1 if number < 2 else min(examples, n) / n
            weights = softmax(-share * np.where(known[i], tracked[i], np.inf))
            for b, (_, slope) in evaluated.items():
                gradient[b] += (
                    weights[b] * slope / sizes[b]
                )  # summed over n_i examples; the owner divides by n_b
        theta = theta - RATE * gradient
        np.testing.assert_allclose(vectors(states[number + 1].models), theta, rtol=1e-3, atol=1e-5)
    assert known.all() and (explored > 0) == (epsilon > 0)


def loss_and_slope(theta, x, y):
    """Cross-entropy of one linear model (F + 1, C), the intercept last, summed over examples, and its gradient."""
    x = np.append(np.float64(x), np.ones((len(x), 1)), axis=1)
    logits = x @ theta
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -logs[np.arange(len(y)), y].sum(), x.T @ (np.exp(logs) - np.eye(theta.shape[1])[y])


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


def linear_models(state):
    layer = state.models["Dense_0"]
    return np.append(np.float64(layer["kernel"]), np.float64(layer["bias"])[:, None], axis=1)


@pytest.mark.slow
def test_rounds_of_friends_with_the_draws_given():
    """Eight rounds in NumPy for five uneven clients, M = 2, with the neighbors that were drawn."""
    num = 5
    rate = 0.5
    sizes = np.array([12, 20, 9, 15, 1])
    federation = labels_of_two_groups(sizes)
    states, drawn = train_and_note(FedeRiCo(neighbors=2, beta=BETA), federation, rate, 8)
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


def test_newcomers_mix_their_friends_or_else_weigh_by_loss():
    sizes = (12, 20, 9, 15, 10)
    federation = labels_of_two_groups(sizes)
    problem = toys.make_problem(federation)
    algorithm = FedeRiCo(neighbors=2, collaborators=5).build(problem)
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


@pytest.mark.long
def test_newcomers_weigh_by_one_e_step():
    federation, algorithm, states, _, _ = play("federico", hyperparameters={"neighbors": 2})
    problem = toys.make_problem(federation)
    found = toys.adapt(algorithm, problem, jax.random.key(0), states[2], federation.client_data)
    theta = vectors(states[2].models)
    losses = np.array(
        [[loss_and_gradient(model, federation.train, k)[0] for model in theta] for k in range(4)]
    )
    order = np.argsort(losses, axis=1)  # the heaviest first
    weights = [softmax(-row[first]) for row, first in zip(losses, order, strict=True)]
    np.testing.assert_allclose(found.weights, weights, atol=1e-5)
    toys.assert_trees_close(found.models, jax.tree.map(lambda leaf: leaf[order], states[2].models))


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"neighbors": 4},
        {"candidates": 2, "neighbors": 2},
        {"effective_examples": 3.0, "faithful": True},
        {"effective_examples": 3.0},
        {"tracking": "accumulated"},
    ],
)
def test_hyperparameters_that_do_not_fit_are_refused(hyperparameters):
    with pytest.raises(ArgumentError, match=rf"^federico\.{next(iter(hyperparameters))}="):
        FedeRiCo(**{"neighbors": 2} | hyperparameters).build(
            toys.make_problem(toys.make_federation(SIZES))
        )


def deltas(rounds):
    """Clients send the change of a model after E local epochs, weighted as a gradient is."""
    theta = rounds.start("models")
    expected = theta.copy()
    for i in rounds.clients:
        held = SCRIPT[0, i]
        losses = np.array(
            [loss_and_gradient(theta[b], rounds.federation.train, i)[0] for b in held]
        )
        for b, weight in zip(held, softmax(-losses), strict=True):
            share = weight * rounds.sizes[i] / rounds.sizes[b]
            expected[b] += share * (rounds.descend(i, theta[b]) - theta[b])
    yield {"models": expected}


def test_delta_returns_the_weighted_change_of_local_epochs():
    hyperparameters = {"neighbors": 1, "update": "delta", "rule": "posterior"}
    by_hand(
        "federico", deltas, hyperparameters=hyperparameters, rounds=1, **SCRIPTED | {"epochs": 3}
    )


@pytest.mark.slow
def test_delta_trains_each_held_model_with_noise_of_its_own():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE), privacy=Privacy(1.0, 1.0))
    solver = problem.solver
    params = problem.init_model(jax.random.key(1), jnp.int32(0))
    split = jax.tree.map(lambda leaf: leaf[1], federation.train)
    context = ClientContext(jax.random.key(2), jnp.int32(0), jnp.int32(0), jnp.arange(2))
    _, changes = local_changes(
        problem, context, tree.repeat(tree.stack_one(params), 2), jnp.ones(2), split
    )
    batch = solver.take_batch(context.key, None, split, jnp.int32(0))
    for number in range(2):
        grads = jax.grad(solver.mean_loss)(params, batch.for_model(number))
        own = jax.tree.map(lambda leaf, n=number: leaf[n], changes)
        toys.assert_trees_close(own, tree.scale(grads, -RATE), rtol=1e-4, atol=1e-6)
    kernel = changes["Dense_0"]["kernel"]
    assert np.abs(kernel[0] - kernel[1]).max() > 1e-3  # equal models on equal examples


@pytest.mark.parametrize(
    ("batch_size", "devices"),
    [pytest.param(0, 2, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.long)],
)
def test_without_neighbors_it_is_local_training(batch_size, devices):
    options = {
        "optimizer": optax.adam(0.05),
        "batch_size": batch_size,
        "plan": make_plan("map", devices=devices),
    }
    played = functools.partial(
        toys.play, federation=toys.make_federation((5, 1, 3, 4)), rounds=3, **options
    )
    *_, alone, records = played("federico", hyperparameters={"neighbors": 0})
    local = played("local").states
    toys.assert_trees_close(alone[-1].models, local[-1].models, rtol=1e-5, atol=1e-6)
    assert all(record.down == 0 and record.up == 0 for record in records)
    *_, joint, records = played("federico", hyperparameters={"neighbors": 1, "rule": "posterior"})
    assert all(record.down > 0 for record in records)
    difference = np.abs(
        joint[-1].models["Dense_0"]["kernel"] - local[-1].models["Dense_0"]["kernel"]
    )
    assert difference.max() > 0.01


def alone(rounds):
    """Local training."""
    theta = list(rounds.start("models"))
    for _ in rounds:
        theta = [rounds.descend(k, theta[k]) for k in rounds.clients]
        yield {"models": theta}


def test_without_neighbors_a_client_trains_alone_and_its_data_stay_with_it():
    options = {"hyperparameters": {"neighbors": 0}, "sizes": (5, 1, 3, 4, 2), "epochs": 1}
    before = by_hand("federico", alone, **options).states[-1]
    federation = toys.make_federation(options["sizes"], "regression")
    federation.train.x[2] *= -3
    after = play_rounds("federico", federation=federation, **options).states[-1]

    def row(state, k):
        return jax.tree.map(lambda leaf: leaf[k], jax.device_get(state.clients))

    for k in range(5):
        assert toys.same_trees(row(before, k), row(after, k)) == (k != 2)


def test_epsilon_decides_who_is_downloaded():
    federation = toys.make_federation((2,) * 7)
    problem = toys.make_problem(federation)
    tracked = (
        np.random.default_rng(4).permutation(49).reshape(7, 7).astype(np.float32)
    )  # by client and model
    ids = (np.arange(7, dtype=np.int32) + np.arange(7, dtype=np.int32)[:, None]) % 7
    state = toys.zeros(
        toys.make_algorithm("federico", problem, neighbors=2), problem, federation.client_data
    )
    table = state.rows.table._replace(ids=ids, tracked=np.take_along_axis(tracked, ids, axis=1))
    state = state.with_rows(state.rows._replace(table=table))

    @jax.jit
    def draw(epsilon):
        algorithm = toys.make_algorithm("federico", problem, neighbors=2, epsilon=epsilon)
        cohort = Cohort(jnp.arange(7), everyone=True)

        def download(key):
            return lifting.download(algorithm, problem.plan, key, state, cohort)

        return jax.vmap(download)(jax.random.split(jax.random.key(1), 200))

    greedy = np.asarray(draw(0.0))
    random = np.asarray(draw(1.0))
    for k in range(7):
        assert (greedy[:, k, 0] == k).all()
        assert (random[:, k, 0] == k).all()
        others = np.setdiff1d(np.arange(7), [k])
        best = others[np.argsort(tracked[k, others])[:2]]
        np.testing.assert_array_equal(greedy[:, k, 1:], np.broadcast_to(best, (200, 2)))
        assert set(random[:, k, 1:].ravel().tolist()) == set(others.tolist())


@pytest.mark.slow
def test_a_small_table_keeps_the_own_model_and_the_newest():
    federation = toys.make_federation((2,) * 7)
    method = FedeRiCo(neighbors=2, epsilon=1.0, candidates=4, collaborators=3)
    states, held = train_and_note(method, federation, 0.1, 6)
    for number, (before, state) in enumerate(itertools.pairwise(states)):
        ids = np.asarray(state.rows.table.ids)
        old = before.rows.table
        assert ids.shape == (7, 4)
        for k in range(7):
            known = ids[k].tolist()
            assert ids[k, 0] == k and len(set(known)) == 4
            assert set(held[number][k]) <= set(known)
            left = [
                (t, i) for i, t in zip(old.ids[k].tolist(), old.tracked[k].tolist(), strict=True)
            ]
            gone = [pair for pair in left if pair[1] not in known]
            stayed = [pair for pair in left if pair[1] in known and pair[1] not in held[number][k]]
            assert all(worse[0] >= better[0] for worse in gone for better in stayed)
    problem = toys.make_problem(federation)
    weights = collaboration(method.build(problem), problem, federation)(states[-1])
    for k in range(7):
        used = np.flatnonzero(weights[k])
        assert 0 < len(used) <= 3 and np.isin(used, states[-1].rows.table.ids[k]).all()


def test_newcomers_weigh_all_models_in_blocks():
    federation = toys.make_federation((2,) * 19)  # more models than one block of 16
    problem = toys.make_problem(federation)
    algorithm = toys.make_algorithm(
        "federico", problem, collaborators=19, rule="posterior", effective_examples=2.0
    )
    rng = np.random.default_rng(0)
    models = {"Dense_0": {"kernel": rng.normal(size=(19, 3, 3)), "bias": rng.normal(size=(19, 3))}}
    state = toys.zeros(algorithm, problem, federation.client_data).with_models(
        jax.tree.map(np.float32, models)
    )
    newcomers = toys.make_federation((3, 2), seed=5)
    prediction = toys.adapt(algorithm, problem, jax.random.key(0), state, newcomers.client_data)
    for k, size in enumerate(newcomers.train.size):
        x = newcomers.train.x[k, :size]
        y = newcomers.train.y[k, :size]
        losses = np.array([loss_and_slope(model, x, y)[0] for model in linear_models(state)])
        order = np.argsort(losses)  # the heaviest first
        weights = softmax(-losses * 2 / size)[order]  # a likelihood of two examples
        np.testing.assert_allclose(prediction.weights[k], weights, rtol=1e-3, atol=1e-6)
        mixed = jax.tree.map(lambda leaf, k=k: leaf[k], prediction.models)
        toys.assert_trees_close(
            mixed, jax.tree.map(lambda leaf, order=order: leaf[order], state.models)
        )


def test_models_are_weighed_as_they_predict_not_as_they_train():
    federation = toys.make_federation(SIZES)
    hyperparameters = {"neighbors": 0, "rule": "posterior"}
    *_, states, records = toys.play(
        "federico", federation, 1, hyperparameters=hyperparameters, model=toys.Dropped
    )
    layer = states[0].models["Dense_0"]
    last = by_id(states[1].rows.table, "last")
    split = federation.train
    for k, size in enumerate(SIZES):
        logits = np.float64(split.x[k, :size]) @ np.float64(layer["kernel"][k]) + np.float64(
            layer["bias"][k]
        )
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(size), split.y[k, :size]]
        assert last[k, k] == pytest.approx(losses.sum(), rel=1e-5)
    trained_on = float(records[0].train_loss) * SIZES.sum()
    assert abs(trained_on - np.diag(last).sum()) > 0.01


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
    gains = accuracies(FedeRiCo(), (0, 1)) - accuracies(Local(), (0, 1))
    assert gains.mean() > 0.05 and gains.min() > 0


GROUP = np.array([0, 1, 0, 1, 1, 0])  # of the clients below


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
    same = GROUP[:, None] == GROUP
    return (rows @ rows.T)[same & ~np.eye(len(GROUP), dtype=bool)].mean(), (rows @ rows.T)[
        ~same
    ].mean()


def train_on_opposites(method, change=lambda state: state, rounds=60, **problem_fields):
    """A method's last state on the opposite groups, its accuracy, and whom its clients use."""
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


TEMPERED = FedeRiCo(neighbors=5, rule="posterior", effective_examples=2.0)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(TEMPERED, id="federico", marks=pytest.mark.long),
        pytest.param(FedeRiCoCentralized(), id="centralized", marks=pytest.mark.slow),
    ],
)
def test_with_all_others_as_neighbors_there_is_not_one_global_model(method):
    def kernel(state):
        return np.asarray(state.models["Dense_0"]["kernel"])

    state, accuracy, _ = train_on_opposites(method, common_init=True)
    assert (
        np.ptp(kernel(state), axis=0).max() < 1e-5 and accuracy < 0.7
    )  # the trap: all models stay equal
    state, accuracy, weights = train_on_opposites(method, common_init=None)
    within, across = shared_weights(weights)
    assert accuracy > 0.9 and across < 0.2
    if isinstance(method, FedeRiCo):
        assert within > 0.8


@pytest.mark.long
def test_groups_that_start_on_the_same_best_model_come_apart():
    def one_is_best(
        state,
    ):  # for everybody: the others are confident by features that decide nothing
        layer = state.models["Dense_0"]
        kernel = 6 * jax.random.normal(jax.random.key(5), layer["kernel"].shape).at[:, :2].set(
            0.0
        ).at[2].set(0.0)
        return state.with_models({"Dense_0": {"kernel": kernel, "bias": 0 * layer["bias"]}})

    method = dataclasses.replace(TEMPERED, neighbors=3)
    federation = opposite_groups()
    problem = toys.make_problem(federation, optax.adam(0.05), batch_size=10)
    state = one_is_best(toys.start(method.build(problem), problem, federation.client_data))
    losses = by_loss.losses_of_all(problem, state.models, federation.train)
    assert (np.asarray(losses).argmin(axis=1) == 2).all()
    _, accuracy, weights = train_on_opposites(method, one_is_best)
    within, across = shared_weights(weights)
    assert within > 0.8 and across < 0.2 and accuracy > 0.9
