"""FedeRiCo with friends by hand: the posterior, rounds, newcomers, limits, and learning."""

import dataclasses
import functools
import itertools

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

from pfljax import ArgumentError, data
from pfljax.algorithms import FedeRiCoFriends, Local
from pfljax.algorithms.common import classes
from pfljax.algorithms.federico_friends import Evidence, halves, shared_classes
from pfljax.contract.types import Split
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import make_round

SIZES = np.array([2, 4, 3, 1])
BETA = 0.6
POINTS = (np.arange(32) + 0.5) / 32  # of the probability that a class is shared


def hypotheses(evidence):
    """Each hypothesis' classes (H, S) and weight (H,), by listing all: a probability and a subset, all, or none."""
    num_classes = len(evidence)
    subsets = np.array(list(itertools.product([0, 1], repeat=num_classes)))
    shared = [np.zeros(num_classes), np.ones(num_classes)]
    logs = [np.log(0.9), np.log(0.09) + np.sum(evidence)]
    for pi in POINTS:
        for subset in subsets:
            log_pi = np.where(subset, np.log(pi), np.log1p(-pi)).sum()
            shared.append(subset)
            logs.append(np.log(0.01 / len(POINTS)) + log_pi + subset @ evidence)
    return np.array(shared), np.array(logs)


def log_likelihood(evidence):
    _, logs = hypotheses(evidence)
    return np.logaddexp.reduce(logs)


def posterior(evidence):
    """(S,) the probability that each class is shared."""
    shared, logs = hypotheses(evidence)
    return np.exp(logs - np.logaddexp.reduce(logs)) @ shared


def test_posterior_of_shared_classes_is_that_of_all_hypotheses():
    rng = np.random.default_rng(0)
    evidence = np.concatenate(
        [rng.normal(0, 8, (6, 3)), [[0, 0, 0], [30, 30, -30], [-500, 400, 0]]]
    )
    expected = [posterior(row) for row in evidence]
    found = np.asarray(shared_classes(jnp.asarray(evidence, jnp.float32)))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)
    # classes without examples follow the pair
    assert found[7, 2] < 0.01 < 0.5 < found[7, 0] and found[8, 2] < 0.9


def losses_by_class(theta, x, y, num_classes):
    """(T, C) summed losses of a linear model on each class, at the temperatures 1, 2, 4, 8 and 16."""
    losses = np.zeros((5, num_classes))
    for row, heat in enumerate((1, 2, 4, 8, 16)):
        for label in np.unique(y):
            losses[row, label] = loss_and_slope(theta / heat, x[y == label], y[y == label])[0]
    return losses


def codes_of_labels(y, num_classes):
    """(C,) code lengths of labels by the frequencies of the others, half a label added to each; at most log C each."""
    counts = np.bincount(y, minlength=num_classes)
    codes = -np.log(np.maximum(counts - 0.5, 0.5) / (max(len(y) - 1, 0) + num_classes / 2))
    return counts * np.minimum(codes, np.log(num_classes))


def best_evidence(bar, losses):
    """(C,) evidence at the temperature at which the pair is most likely."""
    return max(bar - losses, key=lambda evidence: log_likelihood(evidence))


def halves_of(federation, k):
    """(x, y) of both halves of a client's examples."""
    size = federation.train.size[k]
    split = Split(
        jnp.asarray(federation.train.x[k]), jnp.asarray(federation.train.y[k]), jnp.int32(size)
    )
    parts = halves(jnp.int32(k), split)
    return [
        (np.asarray(half.x[...])[: int(half.size)], np.asarray(half.y[...])[: int(half.size)])
        for half in parts
    ]


def labels_of_two_groups(sizes):
    """Clients 0 and 1 share a rule, and 2 to 4 its opposite."""
    federation = toys.make_federation(sizes, features=2, classes=2, seed=3)
    for k, size in enumerate(sizes):
        federation.train.y[k, :size] = (federation.train.x[k, :size, 0] > 0) ^ (k >= 2)
    return federation


def test_halves_have_every_example_once_and_every_class_in_both():
    federation = toys.make_federation((11, 1, 0), features=2, classes=3, seed=1)
    federation.train.y[0, :11] = np.repeat([0, 1, 2], [4, 4, 3])
    (x, y), (other_x, other_y) = halves_of(federation, 0)
    both = np.concatenate([x, other_x])
    assert sorted(map(tuple, both)) == sorted(map(tuple, federation.train.x[0, :11]))
    assert len(y) == 6 and np.abs(np.bincount(y) - np.bincount(other_y)).max() <= 1
    assert [len(half[1]) for half in halves_of(federation, 1)] == [1, 0]
    assert [len(half[1]) for half in halves_of(federation, 2)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("off", ["", "references", "by_class", "by_example", "temperatures"])
def test_rounds_of_friends_with_the_draws_given(off):
    """Eight rounds in NumPy for five uneven clients, M = 2, with the neighbors that were drawn; without a part, too."""
    num = 5
    rate = 0.5
    sizes = np.array([12, 20, 9, 15, 1])
    federation = labels_of_two_groups(sizes)
    method = FedeRiCoFriends(neighbors=2, beta=BETA, **({off: False} if off else {}))
    states, drawn = train_and_note(method, federation, rate, 8)
    heats = 1 if off == "temperatures" else 5
    num_classes = 1 if off == "by_class" else 2

    def losses_of(theta, x, y):
        losses = losses_by_class(theta, x, y, 2)[:heats]
        return losses if num_classes == 2 else losses.sum(axis=1, keepdims=True)

    data_of = [(federation.train.x[k, :n], federation.train.y[k, :n]) for k, n in enumerate(sizes)]
    halves_by_client = [halves_of(federation, k) for k in range(num)]
    theta = linear_models(states[0])
    references = [[model, model] for model in theta]
    evidence = np.zeros((num, num, num_classes))
    is_known = np.zeros((num, num), bool)
    weighed = []
    for number, held in enumerate(drawn):
        gradient = np.zeros_like(theta)
        for i, n in enumerate(sizes):
            x, y = data_of[i]
            first, second = halves_by_client[i]

            # The bar: each reference on the other half, or guessing.
            held_out = losses_of(references[i][0], *second) + losses_of(references[i][1], *first)
            held_out = min(held_out, key=np.sum)
            codes = codes_of_labels(y, 2)
            codes = codes if num_classes == 2 else codes.sum(keepdims=True)
            bar = 0.8 * np.minimum(held_out, codes) + 0.2 * codes
            bar = codes if off == "references" else bar

            # Evidence and posterior.
            for b in held[i]:
                newest = best_evidence(bar, losses_of(theta[b], x, y))
                average = (1 - BETA) * evidence[i, b] + BETA * newest
                evidence[i, b] = average if is_known[i, b] else newest
                is_known[i, b] = True
            shares = {b: posterior(evidence[i, b]) for b in held[i] if b != i}
            total = 1 + sum(shares.values())

            # Gradients.
            for b in held[i]:
                weights = np.ones(2) if b == i else np.broadcast_to(shares[b] / total, 2)
                for s in range(n):
                    loss, slope = loss_and_slope(theta[b], x[s : s + 1], y[s : s + 1])
                    pull = 1 if b == i or off == "by_example" else np.exp(-loss)
                    gradient[b] += weights[y[s]] * pull * slope / sizes[b]
                if b != i:
                    weighed.append(weights)
            for half, (x_half, y_half) in enumerate((first, second)):
                if len(y_half):
                    slope = loss_and_slope(references[i][half], x_half, y_half)[1]
                    references[i][half] = references[i][half] - rate * slope / len(y_half)
        theta = theta - rate * gradient
        state = states[number + 1]
        np.testing.assert_allclose(linear_models(state), theta, rtol=2e-3, atol=2e-5)
        if off == "references":
            assert state.rows.references is None
            continue
        layer = state.rows.references.params["Dense_0"]
        kernels = np.append(layer["kernel"], np.asarray(layer["bias"])[:, :, None], axis=2)
        np.testing.assert_allclose(kernels, references, rtol=1e-3, atol=1e-5)
    assert np.max(weighed) > 0.2 and np.min(weighed) < 0.02


@pytest.mark.slow
def test_rounds_of_friends_in_regression_with_the_draws_given():
    """Evidence is n / 2 times the log of a ratio of losses; examples weigh by their losses beside the held-out loss."""
    num = 5
    rate = 0.1
    sizes = np.array([12, 20, 9, 15, 6])
    federation = toys.make_federation(sizes, "regression", features=2, seed=3)
    federation.train.y[2:4] *= -1  # two clients of the opposite rule
    states, drawn = train_and_note(FedeRiCoFriends(neighbors=2, beta=BETA), federation, rate, 10)
    halves_by_client = [halves_of(federation, k) for k in range(num)]
    theta = vectors(states[0].models)
    references = [[model, model] for model in theta]
    evidence = np.zeros((num, num))
    is_known = np.zeros((num, num), bool)
    weighed = []

    def residuals(model, x, y):
        x = np.append(np.float64(x), np.ones((len(x), 1)), axis=1)
        return x @ model - y, x

    for number, held in enumerate(drawn):
        gradient = np.zeros_like(theta)
        for i, n in enumerate(sizes):
            x = federation.train.x[i, :n]
            y = np.float64(federation.train.y[i, :n])
            first, second = halves_by_client[i]
            held_out = np.square(residuals(references[i][0], *second)[0]).sum()
            held_out += np.square(residuals(references[i][1], *first)[0]).sum()
            guessing = np.square((y - y.mean()) * n / (n - 1)).sum()
            bar = min(held_out, guessing) ** 0.8 * guessing**0.2
            scale = bar / (2 * n)
            for b in held[i]:
                newest = n / 2 * np.log(bar / np.square(residuals(theta[b], x, y)[0]).sum())
                average = (1 - BETA) * evidence[i, b] + BETA * newest
                evidence[i, b] = average if is_known[i, b] else newest
                is_known[i, b] = True
            shares = {b: posterior(evidence[i, b, None])[0] for b in held[i] if b != i}
            for b in held[i]:
                weight = 1 if b == i else shares[b] / (1 + sum(shares.values()))
                difference, inputs = residuals(theta[b], x, y)
                pull = 1 if b == i else np.exp(-np.square(difference) / scale)
                gradient[b] += weight * 2 * inputs.T @ (pull * difference) / sizes[b]
                if b != i:
                    weighed.append(weight)
            for half, (x_half, y_half) in enumerate((first, second)):
                difference, inputs = residuals(references[i][half], x_half, y_half)
                step = 2 * inputs.T @ difference / len(y_half)
                references[i][half] = references[i][half] - rate * step
        theta = theta - rate * gradient
        state = states[number + 1]
        np.testing.assert_allclose(vectors(state.models), theta, rtol=2e-3, atol=2e-5)
    assert np.max(weighed) > 0.2 and np.min(weighed) < 1e-3


def test_newcomers_mix_the_models_that_share_and_all_by_likelihood():
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
    for k, size in enumerate((12, 1, 14)):
        x = newcomers.train.x[k, :size]
        y = newcomers.train.y[k, :size]
        losses = [losses_by_class(model, x, y, 2) for model in linear_models(state)]
        codes = codes_of_labels(y, 2)
        shares = np.array([posterior(best_evidence(codes, loss)) for loss in losses])
        totals = np.array([loss.sum(axis=1).min() for loss in losses])
        likelihoods = np.exp(totals.min() - totals)
        shares = shares + (likelihoods / likelihoods.sum())[:, None]
        order = np.argsort(-shares.mean(axis=1), kind="stable")
        expected = (shares / shares.sum(axis=0))[order]
        np.testing.assert_allclose(found.weights[k], expected, rtol=1e-3, atol=1e-6)
    assert found.weights.shape == (3, 5, 2)


def test_label_codes_are_code_lengths_of_the_labels():
    federation = toys.make_federation((0, 1, 7))
    problem = toys.make_problem(federation)
    found = jax.jit(jax.vmap(functools.partial(classes.label_codes, problem)))(federation.train)
    expected = [
        codes_of_labels(federation.train.y[k, :size], 3) for k, size in enumerate((0, 1, 7))
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
    """Model 1 is trained, and thereby a friend of clients 0 and 3; examples weigh by the E-step."""
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
    shared = []
    for i, (own, other) in enumerate(SCRIPT[0]):
        n = sizes[i]
        y = np.float64(federation.train.y[i, :n])
        inputs = np.append(np.float64(federation.train.x[i, :n]), np.ones((n, 1)), axis=1)

        # References begin as the client's model in the state that the run began with.
        reference = vectors(start.models)[i]
        held_out = np.square(inputs @ reference - y).sum()
        guessing = np.square((y - y.mean()) * n / (n - 1)).sum()
        bar = min(held_out, guessing) ** 0.8 * guessing**0.2
        nats = n / 2 * np.log(bar / (n * loss_of(federation, i, theta[other])))
        share = posterior(np.array([nats]))[0]
        shared.append(share)
        expected[own] += n / sizes[own] * (descend(federation, i, theta[own], 3) - theta[own])
        model = theta[other]
        pull = np.exp(-2 * n * np.square(inputs @ model - y) / bar)
        peak = share / (1 + share) * pull.max()  # weights are relative to the largest one
        pull = pull / pull.max()
        for _ in range(3):
            difference = inputs @ model - y
            model = model - 0.1 * 2 * inputs.T @ (pull * difference) / n
        expected[other] += peak * n / sizes[other] * (model - theta[other])
    assert max(shared) > 0.9 and min(shared) < 0.1
    np.testing.assert_allclose(vectors(played.states[1].models), expected, rtol=5e-4, atol=1e-5)


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


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_diverged_model_stays_its_owner_s(task):
    """Neither gradients nor predictions of clients that meet it become NaN; client 2 has no examples."""
    sizes = (9, 12, 0, 7)
    federation = toys.make_federation(sizes, task, features=2, seed=3)
    start = toys.play("federico_friends", federation, 1, optax.sgd(0.1), {"neighbors": 3}).states[0]
    models = jax.tree.map(np.array, start.models)
    for leaf in jax.tree.leaves(models):
        leaf[3] = np.nan
    *_, problem, algorithm, states, _ = toys.play(
        "federico_friends",
        federation,
        3,
        optax.sgd(0.1),
        {"neighbors": 3},
        state=start.with_models(models),
    )
    for state in states:
        for leaf in jax.tree.leaves(state.models):
            assert np.isfinite(np.asarray(leaf)[:3]).all()
    newcomers = toys.adapt(
        algorithm, problem, jax.random.key(0), states[-1], federation.client_data
    )
    assert np.isfinite(newcomers.weights).all()
    evidence = np.asarray(states[-1].rows.evidence)
    assert np.isfinite(evidence).all() and evidence[0].min() < -1e5  # of the diverged model


def test_without_references_labels_must_be_guessed():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation)
    own_loss = dataclasses.replace(problem.model, criterion=lambda outputs, y: outputs[:, 0] ** 2)
    with pytest.raises(
        ArgumentError, match=r"^federico_friends\.references=False: needs a loss of"
    ):
        FedeRiCoFriends(neighbors=2, references=False).build(problem._replace(model=own_loss))


def test_labels_of_no_class_have_no_weight_and_no_evidence():
    problem = toys.make_problem(toys.make_federation(SIZES))
    evidence = Evidence(problem, by_class=True, has_temperatures=True)
    split = Split(jnp.zeros((4, 4)), jnp.array([0, 255, 2, 1]), jnp.int32(4))
    class_weights = jnp.array([[0.1, 0.2, 0.3]])
    found = evidence.example_weights(class_weights, split)
    np.testing.assert_allclose(found, [[0.1, 0.0, 0.3, 0.2]])
    losses = jnp.array([1.0, 5.0, jnp.inf, 3.0])[:, None]
    np.testing.assert_array_equal(evidence.sum_by_class(losses, split), [[1.0, 3.0, np.inf]])
