"""What attackers send, in rounds of methods that average models and of those that send gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import ClientData, Split
from pfljax.stages.attacks import Attack, Flipped

SIZES = (2, 5, 1, 3)
ATTACKER = np.array([False, True, False, False])


def classes(federation):
    """Labels that a linear model learns, none of which is its own mirror image."""
    y = np.where(federation.train.x[..., 0] > 0, 2, 0).astype(np.int32)
    return federation.train._replace(y=y)


def play(name, attack, attacker=ATTACKER, rounds=1, knobs=None, **options):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(0.1), **options)
    algorithm = attack.on(problem, toys.make_algorithm(name, problem, **knobs or {}))
    clients = ClientData(classes(federation), federation.validation, attacker)
    return problem, clients, *toys.train(algorithm, problem, clients, rounds)


def alone(k, train=None):
    """What client k trains the initial global model to."""
    _, clients, states, _ = play("fedavg", Attack(), rounds=0)
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(0.1))
    train = train or clients.train
    only = ClientData(train._replace(size=np.where(np.arange(4) == k, train.size, 0)), clients.validation)
    return toys.train(toys.make_algorithm("fedavg", problem), problem, only, 1)[0][1].models, states[0].models


def weighted(models):
    return jax.tree.map(
        lambda *leaves: sum(n * np.asarray(leaf) for n, leaf in zip(SIZES, leaves, strict=True)) / sum(SIZES), *models
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "factor"), [("sign_flip", -3.0), ("none", 1.0)])
def test_a_sign_flip_turns_the_attackers_updates_around(kind, factor):
    trained, start = zip(*(alone(k) for k in range(4)), strict=True)
    sent = list(trained)
    sent[1] = jax.tree.map(lambda new, old: old + factor * (new - old), trained[1], start[1])
    _, _, states, _ = play("fedavg", Attack() if kind == "none" else Attack(kind, strength=3.0))
    toys.assert_trees_close(states[1].models, weighted(sent), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "factor"), [("label_flip", 1.0), ("scale", 3.0)])
def test_poisoned_labels_are_trained_on(kind, factor):
    train = classes(toys.make_federation(SIZES))
    flipped = train._replace(y=np.where(np.arange(4)[:, None] == 1, 2 - train.y, train.y))
    trained, start = zip(*(alone(k, flipped) for k in range(4)), strict=True)
    sent = list(trained)
    sent[1] = jax.tree.map(lambda new, old: old + factor * (new - old), trained[1], start[1])
    _, _, states, _ = play("fedavg", Attack(kind, strength=3.0) if kind == "scale" else Attack(kind))
    toys.assert_trees_close(states[1].models, weighted(sent), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_noise_is_as_long_as_strength_times_the_update():
    trained, start = zip(*(alone(k) for k in range(4)), strict=True)
    _, _, states, _ = play("fedavg", Attack("noise", strength=3.0))
    honest = weighted([*trained[:1], start[1], *trained[2:]])  # the attacker's update left out
    sent = jax.tree.map(lambda all, rest: (np.asarray(all) - rest) * sum(SIZES) / SIZES[1], states[1].models, honest)
    norm = lambda a: np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(a)))
    update = jax.tree.map(np.subtract, jax.device_get(trained[1]), jax.device_get(start[1]))
    np.testing.assert_allclose(norm(sent), 3 * norm(update), rtol=1e-4)
    cosine = sum(np.vdot(a, b) for a, b in zip(jax.tree.leaves(sent), jax.tree.leaves(update), strict=True))
    assert abs(cosine) < 0.9 * norm(sent) * norm(update)


def test_gradients_are_attacked_as_they_are():
    """FedeRiCo's attacker sends -s times its gradients; with M = 0 its own model climbs where it would descend."""
    knobs = {"neighbors": 0}
    _, _, honest, _ = play("federico", Attack(), knobs=knobs)
    _, _, states, _ = play("federico", Attack("sign_flip", strength=3.0), knobs=knobs)
    moved = [
        jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), s[1].models, s[0].models) for s in (honest, states)
    ]
    factor = np.where(ATTACKER, -3.0, 1.0)
    expected = jax.tree.map(lambda leaf: factor.reshape(-1, *[1] * (leaf.ndim - 1)) * leaf, moved[0])
    toys.assert_trees_close(moved[1], expected, rtol=1e-4, atol=1e-7)
    assert any(np.abs(leaf[1]).max() > 1e-4 for leaf in jax.tree.leaves(moved[0]))


def test_weights_that_come_with_an_upload_are_not_attacked():
    found = Attack("sign_flip", strength=2.0)._of_update(
        jax.random.key(0), {"moved": jnp.ones((1, 3)), "step": jnp.full((1,), 7.0)}
    )
    np.testing.assert_array_equal(found["moved"], -2 * np.ones((1, 3)))
    np.testing.assert_array_equal(found["step"], [7.0])


def test_parameters_named_weight_are_attacked():
    upload = {"model": {"Layer_0": {"weight": jnp.ones((1, 3))}}, "weight": jnp.full((1,), 7.0)}
    found = Attack("sign_flip", strength=2.0)._of_update(jax.random.key(0), upload)
    np.testing.assert_array_equal(found["model"]["Layer_0"]["weight"], -2 * np.ones((1, 3)))
    np.testing.assert_array_equal(found["weight"], [7.0])


@pytest.mark.parametrize("name", ["scaffold", "fedpac", "fedproto"])
def test_updates_and_sums_are_turned_around_but_no_counts(name):
    """If all attack, what the server adds up is -3 times what it would be."""
    play_all = lambda attack: play(name, attack, attacker=np.ones(4, bool), hidden=(3,))[2]
    (start, honest), (_, attacked) = play_all(Attack()), play_all(Attack("sign_flip", strength=3.0))
    turned = {"scaffold": ("model", "control"), "fedpac": ("body", "centroids"), "fedproto": ("mean",)}[name]

    def summed(state):
        of_scaffold = lambda: {"model": state.models, "control": state.server.control}
        return jax.device_get(of_scaffold() if name == "scaffold" else state.models._asdict())

    for part in summed(honest):
        was, would, found = (summed(state)[part] for state in (start, honest, attacked))
        move = lambda new, old, factor: jax.tree.map(lambda a, b: b + factor * (a - b), new, old)
        expected = move(would, was, -3.0 if part in turned else 1.0)
        toys.assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)
        assert not toys.same_trees(was, would)


def test_fedexp_is_told_the_norm_of_what_attackers_send():
    """If all attack with strength 3, norms and mean are 3 times as long, so that the server's rate stays the same."""
    knobs = {"eps": 1e-12, "predict": "last"}
    play_all = lambda attack: play("fedexp", attack, attacker=np.ones(4, bool), knobs=knobs)[2:]
    (states, honest), (lies, lied) = play_all(Attack()), play_all(Attack("sign_flip", strength=3.0))
    rates = [float(records[0].metrics["server_rate"]) for records in (honest, lied)]
    assert rates[0] > 1
    np.testing.assert_allclose(rates[1], rates[0], rtol=1e-4)
    turned = jax.tree.map(lambda a, b: b - 3 * (np.asarray(a) - b), states[1].models, jax.device_get(states[0].models))
    toys.assert_trees_close(lies[1].models, turned, rtol=1e-4, atol=1e-5)


def test_heads_and_statistics_in_a_report_are_turned_around_but_no_scalars():
    """FedPAC's heads and means; the server sees what each client sends."""
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(0.1), hidden=(3,))
    honest = toys.make_algorithm("fedpac", problem)

    def reports(algorithm):
        def server_update(key, state, aggregate):
            return state, {"report": aggregate.report}

        spied = dataclasses.replace(algorithm, server_update=server_update)
        clients = ClientData(classes(federation), federation.validation, ATTACKER)
        return jax.device_get(toys.train(spied, problem, clients, 1)[1][0].metrics["report"])

    before, after = reports(honest), reports(Attack("sign_flip", strength=3.0).on(problem, honest))
    turned = lambda leaf: np.where(ATTACKER, -3.0, 1.0).reshape(-1, *[1] * (leaf.ndim - 1)) * leaf
    for name in ("head", "means"):
        expected = jax.tree.map(turned, before[name])
        toys.assert_trees_close(after[name], expected, rtol=1e-4, atol=1e-6)
        assert any(np.abs(leaf[1]).max() > 1e-3 for leaf in jax.tree.leaves(before[name]))
    for name in ("loss", "variance", "several"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-5)


def test_flipped_classes_leave_what_is_no_class():
    y = jnp.array([0, 2, 1, 255], jnp.uint8)
    np.testing.assert_array_equal(Flipped(y, 3, jnp.bool_(True))[...], [2, 0, 1, 255])
    np.testing.assert_array_equal(Flipped(y, 3, jnp.bool_(False))[...], y)
    assert Flipped(y, 3, jnp.bool_(True))[jnp.array([1])].tolist() == [0] and Flipped(y, 3, jnp.bool_(True)).shape == (
        4,
    )


def test_bad_attacks_are_refused():
    for wrong in ({"kind": "bribe"}, {"attackers": 1.0}, {"attackers": -0.1}, {"strength": 0.0}, {"attackers": 0.3}):
        with pytest.raises(ArgumentError, match=r"accepted: |applies only with kind="):
            Attack(**wrong)
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation)
    with pytest.raises(ArgumentError, match="no classes to flip in data for regression"):
        Attack("label_flip").on(problem, toys.make_algorithm("fedavg", problem))


def test_a_share_of_the_clients_attacks_and_is_not_scored():
    federation = toys.make_federation((3,) * 10)
    attacked = federation.with_attackers(0.3, seed=1)
    assert attacked.attacker is not None and attacked.attacker.sum() == 3
    for part in ("validation", "test"):
        before, after = (getattr(each, part).size for each in (federation, attacked))
        np.testing.assert_array_equal(after, np.where(attacked.attacker, 0, before))
    assert isinstance(attacked.train, Split) and attacked.train is federation.train
    assert (federation.with_attackers(0.3, seed=2).attacker != attacked.attacker).any()
