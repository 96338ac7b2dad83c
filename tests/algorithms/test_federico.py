"""FedeRiCo (Algorithm 1) by hand: partial downloads, mini-batches, limits, tables, newcomers, and learning."""

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
from collaborators import (
    collaboration,
    linear_models,
    loss_and_slope,
    opposite_groups,
    shared_weights,
    train_and_note,
    train_on_opposites,
)
from quadratics import play, vectors
from scipy.special import softmax

from pfljax import ArgumentError
from pfljax.algorithms import FedeRiCo
from pfljax.algorithms.common import by_loss
from pfljax.contract.types import Cohort
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_plan

SIZES = np.array([2, 4, 3, 1])
K = 4
RATE = 0.05
BETA = 0.6


def loss_and_gradient(theta, split, k):
    """Squared error of one model on client k's data, summed, and its gradient."""
    x = np.append(np.float64(split.x[k, : split.size[k]]), np.ones((split.size[k], 1)), axis=1)
    error = x @ theta - split.y[k, : split.size[k]]
    return (error**2).sum(), 2 * x.T @ error


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
EMA = {"neighbors": 1, "beta": BETA, "tracking": "ema"}
SCRIPTED = {"sizes": SIZES, "script": SCRIPT, "epochs": 1}
# The model in each slot of a table that has them all.
IN_TABLE = (np.arange(K)[:, None] + np.arange(K)) % K


def algorithm_1(tracking, literal):
    """Algorithm 1 with the downloads of SCRIPT."""

    def reference(rounds):
        theta = rounds.start("models")
        # Line 3; literally, models have a loss of zero, otherwise none.
        evaluated = np.full((K, K), literal)
        last = np.zeros((K, K))
        tracked = np.zeros((K, K))
        # n_i, or for owners without examples the mean; literally, sums stay sums.
        divisor = np.where(rounds.sizes > 0, rounds.sizes, rounds.sizes.mean())
        if literal:
            divisor = np.ones(K)
        for number in rounds:
            gradient = np.zeros_like(theta)
            for i in rounds.clients:
                held = SCRIPT[number, i]
                fresh = {b: loss_and_gradient(theta[b], rounds.federation.train, i) for b in held}
                # Lines 10 to 13: the others keep the loss of an earlier round.
                for b, (loss, _) in fresh.items():
                    last[i, b] = loss
                before = evaluated[i].copy()
                evaluated[i, held] = True
                # Line 14, or Eq. 24.
                for j in np.flatnonzero(evaluated[i]):
                    if tracking == "ema":
                        mean = (1 - BETA) * tracked[i, j] + BETA * last[i, j]
                        tracked[i, j] = mean if before[j] else last[i, j]
                    else:
                        total = tracked[i, j] + last[i, j]
                        tracked[i, j] = total if before[j] else last[i, j] * (number + 1)
                # Lines 15 and 17.
                weights = softmax(np.where(evaluated[i], -tracked[i], -np.inf))
                for b, (_, slope) in fresh.items():
                    gradient[b] += weights[b] * slope
            # Line 22.
            theta = theta - rounds.rate * gradient / divisor[:, None]

            known = np.where(evaluated, tracked, np.inf)
            # The heaviest first, of equal ones in the order of the table.
            slots = np.argsort(np.take_along_axis(known, IN_TABLE, axis=1), axis=1, kind="stable")
            order = np.take_along_axis(IN_TABLE, slots, axis=1)
            yield {
                "models": theta,
                "rows.table.last": np.take_along_axis(last, IN_TABLE, axis=1),
                "rows.table.tracked": np.take_along_axis(known, IN_TABLE, axis=1),
                "predictions": theta[order],
                "predictions.weights": softmax(-np.take_along_axis(known, order, axis=1), axis=1),
            }

    return reference


@pytest.mark.parametrize(
    ("tracking", "literal"),
    [
        ("ema", False),
        ("ema", True),
        pytest.param("accumulated", False, marks=pytest.mark.slow),
        pytest.param("accumulated", True, marks=pytest.mark.slow),
    ],
)
def test_the_losses_of_models_not_held_are_kept(tracking, literal):
    hyperparameters = EMA | {"tracking": tracking, "literal": literal}
    rounds = by_hand(
        "federico", algorithm_1(tracking, literal), hyperparameters=hyperparameters, **SCRIPTED
    )
    own = np.asarray(rounds.states[-1].rows.weights)[:, 0]
    assert ((own > 0.05) & (own < 0.95)).any()  # some weights are neither 0 nor 1


@pytest.mark.slow
@pytest.mark.parametrize("literal", [False, True])
def test_a_model_whose_owner_has_no_examples_learns_from_others(literal):
    """The sum of its gradients is divided by the clients' mean number of examples, literally by nothing."""
    hyperparameters = EMA | {"literal": literal}
    rounds = by_hand(
        "federico",
        algorithm_1("ema", literal),
        hyperparameters=hyperparameters,
        **SCRIPTED | {"sizes": (0, 4, 3, 1)},
    )
    first, last = (entry(rounds.states[number], "models")[0] for number in (0, -1))
    assert np.abs(last - first).max() > 1e-3


def to_the_letter_alone(rounds):
    """Algorithm 1 without neighbors: the K - 1 other models have losses of zero, and thereby weight."""
    theta = rounds.start("models")
    tracked = np.zeros(K)
    for _ in rounds:
        for i in rounds.clients:
            loss, slope = loss_and_gradient(theta[i], rounds.federation.train, i)
            tracked[i] = (1 - BETA) * tracked[i] + BETA * loss
            weight = np.exp(-tracked[i]) / (np.exp(-tracked[i]) + K - 1)
            theta[i] -= rounds.rate * weight * slope
        yield {"models": theta.copy()}


def test_a_literal_step_follows_the_sum_of_gradients():
    hyperparameters = {"neighbors": 0, "beta": BETA, "literal": True}
    rounds = by_hand(
        "federico", to_the_letter_alone, hyperparameters=hyperparameters, sizes=SIZES, epochs=1
    )
    # All have weight, those that nobody has evaluated above all.
    weights = entry(rounds.predict(), "weights")
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    assert (weights[:, : K - 1].min(axis=1) > 1 / K).all()


@pytest.mark.slow
def test_a_literal_table_has_all_models():
    """`candidates` is not read."""
    hyperparameters = EMA | {"literal": True, "candidates": 2}
    rounds = by_hand(
        "federico", algorithm_1("ema", True), hyperparameters=hyperparameters, **SCRIPTED
    )
    ids = np.sort(np.asarray(rounds.states[0].rows.table.ids), axis=1)
    np.testing.assert_array_equal(ids, np.broadcast_to(np.arange(K), (K, K)))


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
@pytest.mark.parametrize("literal", [False, pytest.param(True, marks=pytest.mark.long)])
def test_mini_batches_are_exchanges_with_one_e_step_a_round(literal):
    federation = toys.make_federation((1, 5, 3, 4), "regression")
    split = federation.train
    # Equal examples within a client: their order plays no part.
    for k, size in enumerate(split.size):
        split.x[k, :size] = split.x[k, 0]
        split.y[k, :size] = split.y[k, 0]
    hyperparameters = {"neighbors": 1, "beta": BETA, "literal": literal}
    *_, algorithm, states, records = toys.play(
        "federico", federation, 1, optax.sgd(RATE), hyperparameters, SCRIPT, batch_size=2
    )
    assert algorithm.exchanges == 3

    theta = vectors(states[0].models)
    totals = np.array(
        [[loss_and_gradient(theta[b], split, i)[0] for b in SCRIPT[0, i]] for i in range(K)]
    )
    # Weights stay the same in the round; literally, the two models not held have losses of 0.
    tracked = np.append(BETA * totals, np.zeros((K, 2)), axis=1) if literal else totals
    weights = softmax(-tracked, axis=1)[:, :2]
    divisor = np.ones(K) if literal else split.size
    sent = 0
    for step in range(3):
        gradient = np.zeros_like(theta)
        for i, size in enumerate(split.size):
            if step < -(-size // 2):
                sent += 1
                for b, weight in zip(SCRIPT[0, i], weights[i], strict=True):
                    gradient[b] += weight * loss_and_gradient(theta[b], split, i)[1]
        theta = theta - RATE * gradient / divisor[:, None]
    np.testing.assert_allclose(vectors(states[1].models), theta, rtol=2e-4, atol=2e-6)
    last = by_id(states[1].rows.table, "last")
    np.testing.assert_allclose(np.take_along_axis(last, SCRIPT[0], axis=1), totals, rtol=2e-4)

    # A neighbor's gradient from every client with a batch left; who has none downloads no more.
    model_bytes = 4 * 4  # three weights and an intercept
    assert records[0].up == sent * model_bytes
    assert records[0].down == sent * model_bytes


@pytest.mark.parametrize(
    ("epsilon", "literal"),
    [
        pytest.param(0.0, False, marks=pytest.mark.long),
        pytest.param(0.3, False, marks=pytest.mark.slow),
        pytest.param(0.3, True, marks=pytest.mark.long),
    ],
)
def test_rounds_with_the_draws_given(epsilon, literal):
    """Six rounds of Algorithm 1 in NumPy for five uneven clients, M = 2, with the neighbors that were drawn."""
    num = 5
    sizes = np.array([2, 4, 3, 6, 1])
    rate = 0.01 if literal else RATE
    federation = toys.make_federation(sizes, "regression", features=2, seed=3)
    method = FedeRiCo(neighbors=2, epsilon=epsilon, beta=BETA, literal=literal)
    states, drawn = train_and_note(method, federation, rate, 6)
    theta = vectors(states[0].models)
    explored = 0
    last = np.zeros((num, num))
    tracked = np.zeros((num, num))
    known = np.full((num, num), literal)
    divisor = np.ones(num) if literal else sizes
    for number, held in enumerate(drawn):
        gradient = np.zeros_like(theta)
        for i in range(num):
            # Greedy neighbors are those of least loss; models never evaluated come first.
            others = np.setdiff1d(np.arange(num), [i])
            rank = np.where(known[i], tracked[i], -np.inf)
            is_greedy = np.array_equal(np.sort(rank[others])[:2], np.sort(rank[held[i][1:]]))
            explored += not is_greedy

            evaluated = {b: loss_and_gradient(theta[b], federation.train, i) for b in held[i]}
            for b, (loss, _) in evaluated.items():
                last[i, b] = loss
            fresh = ~known[i] & np.isin(np.arange(num), held[i])
            known[i] |= fresh
            mean = (1 - BETA) * tracked[i] + BETA * last[i]
            tracked[i] = np.where(fresh, last[i], mean) * known[i]
            weights = softmax(np.where(known[i], -tracked[i], -np.inf))
            for b, (_, slope) in evaluated.items():
                gradient[b] += weights[b] * slope
        theta = theta - rate * gradient / divisor[:, None]
        np.testing.assert_allclose(vectors(states[number + 1].models), theta, rtol=1e-3, atol=1e-5)
    assert known.all() and (explored > 0) == (epsilon > 0)


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
    weights = softmax(-np.take_along_axis(losses, order, axis=1), axis=1)
    np.testing.assert_allclose(found.weights, weights, atol=1e-5)
    toys.assert_trees_close(found.models, jax.tree.map(lambda leaf: leaf[order], states[2].models))


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"neighbors": 4},
        {"candidates": 2, "neighbors": 2},
        {"update": "delta", "literal": True},
    ],
)
def test_hyperparameters_that_do_not_fit_are_refused(hyperparameters):
    method = FedeRiCo(**{"neighbors": 2} | hyperparameters)
    with pytest.raises(ArgumentError, match=rf"^federico\.{next(iter(hyperparameters))}="):
        method.build(toys.make_problem(toys.make_federation(SIZES)))


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
    hyperparameters = {"neighbors": 1, "update": "delta"}
    by_hand(
        "federico", deltas, hyperparameters=hyperparameters, rounds=1, **SCRIPTED | {"epochs": 3}
    )


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
    *_, joint, records = played("federico", hyperparameters={"neighbors": 1})
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
    algorithm = toys.make_algorithm("federico", problem, collaborators=19)
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
        weights = softmax(-losses)[order]
        np.testing.assert_allclose(prediction.weights[k], weights, rtol=1e-3, atol=1e-6)
        mixed = jax.tree.map(lambda leaf, k=k: leaf[k], prediction.models)
        toys.assert_trees_close(
            mixed, jax.tree.map(lambda leaf, order=order: leaf[order], state.models)
        )


def test_models_are_weighed_as_they_predict_not_as_they_train():
    federation = toys.make_federation(SIZES)
    hyperparameters = {"neighbors": 0}
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


@pytest.mark.long
def test_with_all_others_as_neighbors_there_is_not_one_global_model():
    _, accuracy, weights = train_on_opposites(FedeRiCo(neighbors=5), common_init=None)
    within, across = shared_weights(weights)
    assert accuracy > 0.9 and within > 0.8 and across < 0.2


@pytest.mark.long
def test_groups_that_start_on_the_same_best_model_come_apart():
    def one_is_best(state):
        """Model 2 is, for everybody: the others are confident by features that decide nothing."""
        layer = state.models["Dense_0"]
        kernel = 6 * jax.random.normal(jax.random.key(5), layer["kernel"].shape)
        kernel = kernel.at[:, :2].set(0.0).at[2].set(0.0)
        return state.with_models({"Dense_0": {"kernel": kernel, "bias": 0 * layer["bias"]}})

    method = FedeRiCo(neighbors=3)
    federation = opposite_groups()
    problem = toys.make_problem(federation, optax.adam(0.05), batch_size=10)
    state = one_is_best(toys.start(method.build(problem), problem, federation.client_data))
    losses = by_loss.losses_of_all(problem, state.models, federation.train)
    assert (np.asarray(losses).argmin(axis=1) == 2).all()
    _, accuracy, weights = train_on_opposites(method, one_is_best)
    within, across = shared_weights(weights)
    assert accuracy > 0.9 and within > 0.8 and across < 0.2
