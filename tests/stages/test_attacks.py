"""What attackers send: of one client by NumPy, and in rounds of methods that average models or send gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from networks import OPTIMIZER
from staged import server_state, staged

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Split,
    Upload,
)
from pfljax.stages.attacks import Attack, Flipped
from pfljax.stages.pipeline import WithNotes

SIZES = (2, 5, 1, 3)
ATTACKER = np.array([False, True, False, False])
FLIP = Attack("sign_flip", strength=3.0)
NOBODY = np.zeros(4, bool)
ALL = np.ones(4, bool)
FEDERATION = toys.make_federation(SIZES)
PROBLEM = toys.make_problem(FEDERATION, OPTIMIZER)


def sent(attack, upload, report, *, attacks=True):
    """What a client sends instead of an upload, or of a function of its data, and what it tells."""

    def client_update(context, models, row, data):
        return ClientOutput((), upload(data) if callable(upload) else upload, report)

    plain = toys.make_algorithm("fedavg", PROBLEM)
    algorithm = dataclasses.replace(plain, client_update=client_update)
    zero = jnp.zeros((), jnp.int32)
    nothing = WithNotes((), {"attack": ()})
    context = ClientContext(
        jax.random.key(7), zero, zero, jnp.zeros((1,), jnp.int32), nothing, zero
    )
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), FEDERATION.train)
    data = ClientData(one, one, jnp.asarray(attacks))
    attacked = staged(PROBLEM, algorithm, FEDERATION, attack=attack)
    out = jax.jit(attacked.client_update)(context, (), nothing, data)
    return out.upload, out.report


# A weighted update, with an entry that is averaged by the counts.
UPDATE = {"a": np.float32([[1, -2, 2]]), "weight": np.float32([[-2, 1]])}
WEIGHT = np.float32([5])
COUNT = np.float32([[3, 2]])
MEANS = np.float32([[[1, 2], [3, -4]]])
STEPS = np.int32([4, 4])
UPLOAD = Upload(UPDATE, WEIGHT, {"means": MEANS, "step": np.float32([7])}, COUNT)
TOLD = ClientReport(
    np.float32(2.5),
    np.float32(1.5),
    {"head": np.float32([1, -2]), "steps": STEPS, "rate": np.float32(3)},
)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("sign_flip", -3.0), ("scale", 3.0), ("replacement", 3.0), ("free_ride", 0.0)],
)
def test_updates_and_arrays_are_multiplied_but_no_weights_and_numbers(kind, factor):
    """A parameter that is called a weight is no weight of an upload."""
    strength = {} if kind == "free_ride" else {"strength": 3.0}
    upload, report = sent(Attack(kind, **strength), UPLOAD, TOLD)
    toys.assert_trees_close(
        upload.update, jax.tree.map(lambda leaf: factor * leaf, UPDATE), rtol=1e-6
    )
    np.testing.assert_allclose(upload.sums["means"], factor * MEANS, rtol=1e-6)
    np.testing.assert_allclose(report.entries["head"], factor * TOLD.entries["head"], rtol=1e-6)
    assert report.square == pytest.approx(factor**2 * 1.5)
    for found, expected in [
        (upload.weight, WEIGHT),
        (upload.count, COUNT),
        (report.entries["steps"], STEPS),
    ]:
        np.testing.assert_array_equal(found, expected)
    assert report.loss == 2.5 and upload.sums["step"] == 7 and report.entries["rate"] == 3


def test_gradients_are_multiplied_as_they_are():
    gradients = Upload({"moved": np.ones((1, 3))})
    upload, _ = sent(Attack("sign_flip", strength=2.0), gradients, TOLD)
    np.testing.assert_array_equal(upload.update["moved"], -2 * np.ones((1, 3)))


def test_noise_is_as_long_as_strength_times_the_update():
    upload, report = sent(Attack("noise", strength=3.0), UPLOAD, TOLD)

    def flat(tree):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    # Sums beside the model are a part of the update, in units of the weighted one.
    update = np.append(5 * flat(UPDATE), MEANS)
    noise = np.append(5 * flat(upload.update), upload.sums["means"])
    np.testing.assert_allclose(np.linalg.norm(noise), 3 * np.linalg.norm(update), rtol=1e-5)
    assert abs(noise @ update) < 0.9 * np.linalg.norm(noise) * np.linalg.norm(update)
    np.testing.assert_array_equal(upload.weight, WEIGHT)
    # What the server reads as whole numbers stays honest.
    np.testing.assert_array_equal(report.entries["steps"], STEPS)


@pytest.mark.parametrize("kind", ["sign_flip", "noise", "scale", "replacement", "label_flip"])
def test_honest_clients_send_what_they_have_learned(kind):
    upload, report = sent(Attack(kind), UPLOAD, TOLD, attacks=False)
    toys.assert_trees_close(upload, UPLOAD)
    toys.assert_trees_close(report, TOLD)


@pytest.mark.parametrize(("kind", "factor"), [("label_flip", 1.0), ("scale", 4.0)])
def test_poisoned_labels_are_trained_on(kind, factor):
    def labels(data):
        return Upload(
            {
                "train": jnp.float32(data.train.y[...])[None],
                "validation": jnp.float32(data.validation.y[...])[None],
            }
        )

    y = FEDERATION.train.y[1]
    for attacks, expected in [(True, factor * (2 - y)), (False, y)]:
        upload, _ = sent(Attack(kind), labels, TOLD, attacks=attacks)
        np.testing.assert_array_equal(upload.update["train"][0], expected)
        np.testing.assert_array_equal(upload.update["validation"][0], expected)


def classes(federation):
    """Labels that a linear model learns, none of which is its own mirror image."""
    y = np.where(federation.train.x[..., 0] > 0, 2, 0).astype(np.int32)
    return federation.train._replace(y=y)


@functools.cache
def attacked(name, attack=FLIP, **hyperparameters):
    """(problem, algorithm) with attackers, which the data tell."""
    problem = toys.make_problem(
        FEDERATION, OPTIMIZER, hidden=(3,) if name in ("fedpac", "fedproto") else ()
    )
    method = toys.make_algorithm(name, problem, **hyperparameters)
    return problem, staged(problem, method, FEDERATION, attack=attack)


def played(name, attacker, train=None, attack=FLIP, **hyperparameters):
    """(states, records) of a round with these attackers."""
    problem, algorithm = attacked(name, attack, **hyperparameters)
    clients = ClientData(train or classes(FEDERATION), FEDERATION.validation, attacker)
    return toys.train(algorithm, problem, clients, 1)


def alone(k, train):
    """(theta_k, theta) of the first round in which only client k has examples."""
    only = train._replace(size=np.where(np.arange(4) == k, train.size, 0))
    before, after = played("fedavg", NOBODY, only)[0]
    return jax.device_get(after.models), jax.device_get(before.models)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "factor"), [("sign_flip", -3.0), ("scale", 3.0)])
def test_a_round_is_the_mean_of_what_attackers_and_others_send(kind, factor):
    train = classes(FEDERATION)
    flipped = train._replace(y=np.where(np.arange(4)[:, None] == 1, 2 - train.y, train.y))
    each = [alone(k, flipped if kind == "scale" else train) for k in range(4)]
    models = []
    for k, (trained, start) in enumerate(each):
        own = factor if k == 1 else 1.0
        models.append(
            jax.tree.map(lambda new, old, own=own: old + own * (new - old), trained, start)
        )
    expected = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=SIZES), *models)
    found = played("fedavg", ATTACKER, train, Attack(kind, strength=3.0))[0][1].models
    toys.assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_attacked_as_they_are():
    """FedeRiCo's attacker sends -s times its gradients; with M = 0 its own model climbs where it would descend."""
    moved = []
    for attacker in (NOBODY, ATTACKER):
        before, after = played("federico", attacker, neighbors=0)[0]
        moved.append(
            jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after.models, before.models)
        )
    factor = np.where(ATTACKER, -3.0, 1.0)
    expected = jax.tree.map(
        lambda leaf: factor.reshape(-1, *[1] * (leaf.ndim - 1)) * leaf, moved[0]
    )
    toys.assert_trees_close(moved[1], expected, rtol=1e-4, atol=1e-7)
    assert any(np.abs(leaf[1]).max() > 1e-4 for leaf in jax.tree.leaves(moved[0]))


@pytest.mark.long
@pytest.mark.parametrize("name", ["scaffold", "fedpac", "fedproto"])
def test_updates_and_sums_are_turned_around_but_no_counts(name):
    """If all attack, what the server adds up is -3 times what it would be."""
    (start, honest), (_, lies) = (played(name, attacker)[0] for attacker in (NOBODY, ALL))
    turned = {
        "scaffold": ("model", "control"),
        "fedpac": ("body", "centroids"),
        "fedproto": ("mean",),
    }[name]

    def summed(state):
        if name == "scaffold":
            parts = {"model": state.models, "control": server_state(state).control_variate}
        elif name == "fedpac":
            centroids = server_state(state)
            parts = {"body": state.models, "centroids": centroids.mean, "count": centroids.count}
        else:
            parts = state.models._asdict()
        return jax.device_get(parts)

    for part in summed(honest):
        was, would, found = (summed(state)[part] for state in (start, honest, lies))

        def move(new, old, factor):
            return jax.tree.map(lambda a, b: b + factor * (a - b), new, old)

        expected = move(would, was, -3.0 if part in turned else 1.0)
        toys.assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)
        assert not toys.same_trees(was, would)


def test_flipped_classes_leave_what_is_no_class():
    y = jnp.array([0, 2, 1, 255], jnp.uint8)
    np.testing.assert_array_equal(Flipped(y, 3, jnp.bool_(True))[...], [2, 0, 1, 255])
    np.testing.assert_array_equal(Flipped(y, 3, jnp.bool_(False))[...], y)
    assert Flipped(y, 3, jnp.bool_(True))[jnp.array([1])].tolist() == [0] and Flipped(
        y, 3, jnp.bool_(True)
    ).shape == (4,)


def test_bad_attacks_are_refused():
    for wrong in (
        {"kind": "bribe"},
        {"attackers": 1.0},
        {"attackers": -0.1},
        {"strength": 0.0},
        {"attackers": 0.3},
    ):
        with pytest.raises(ArgumentError, match=r"accepted: |applies only with kind="):
            Attack(**wrong)
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation)
    with pytest.raises(ArgumentError, match="no classes to flip in data for regression"):
        staged(
            problem, toys.make_algorithm("fedavg", problem), federation, attack=Attack("label_flip")
        )


def test_a_share_of_the_clients_attacks_and_is_not_scored():
    federation = toys.make_federation((3,) * 10)
    attacked = federation.with_attackers(0.3, seed=1)
    assert attacked.attacker is not None and attacked.attacker.sum() == 3
    for part in ("validation", "test"):
        before, after = (getattr(each, part).size for each in (federation, attacked))
        np.testing.assert_array_equal(after, np.where(attacked.attacker, 0, before))
    assert isinstance(attacked.train, Split) and attacked.train is federation.train
    assert (federation.with_attackers(0.3, seed=2).attacker != attacked.attacker).any()
