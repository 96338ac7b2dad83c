"""Backdoors against NumPy: what attackers train on, what they send, and the attack's success."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from networks import OPTIMIZER
from staged import staged

import pfljax as pfl
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import ClientData, Split
from pfljax.stages.attacks import Attack
from pfljax.stages.backdoor import Trigger

SIZES = (2, 5, 1, 3)
ATTACKER = np.arange(4) == 1


def test_the_trigger_of_images_vectors_and_pixels():
    images = np.zeros((2, 12, 9, 3), np.float32)
    expected = images.copy()
    expected[:, 9:, 7:] = 2.5  # 3 of 12 rows, 9 // 4 of 9 columns
    trigger = Trigger(2.5, target=1, share=0.5)
    np.testing.assert_array_equal(trigger.stamped(images, 3), expected)
    np.testing.assert_array_equal(trigger.stamped(images[0], 3), expected[0])
    np.testing.assert_array_equal(
        trigger.stamped(np.zeros((1, 8), np.float32), 1), [[0] * 6 + [2.5] * 2]
    )
    np.testing.assert_array_equal(trigger.stamped(np.zeros((1, 4), np.uint8), 1), [[0, 0, 0, 255]])


@pytest.mark.parametrize(
    ("share", "places"), [(1.0, range(6)), (0.5, [1, 3, 5]), (1 / 3, [2, 5]), (0.1, [])]
)
def test_an_attacker_poisons_a_share_of_its_examples_and_nobody_else_does(share, places):
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    y = np.array([1, 2, 0, 2, 1, 0], np.int32)
    split = Split(jnp.array(x), jnp.array(y), np.int32(6))
    trigger = Trigger(-9.0, target=2, share=share)
    honest = trigger.poisoned(split, jnp.array(False))
    np.testing.assert_array_equal(honest.x[...], x)
    x[list(places), 1] = -9.0
    y[list(places)] = 2
    found = trigger.poisoned(split, jnp.array(True))
    order = np.array([5, 0, 3])
    np.testing.assert_array_equal(found.x[...], x)
    np.testing.assert_array_equal(found.x[order], x[order])
    np.testing.assert_array_equal(found.y[order], y[order])


@pytest.mark.parametrize("kind", ["replacement", pytest.param("backdoor", marks=pytest.mark.long)])
def test_a_round_with_an_attacker_is_one_with_poisoned_data_whose_update_is_scaled(kind):
    """With s = n / n_k, the global model becomes the attacker's but for the others' updates."""
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, OPTIMIZER)
    train = federation.train
    x = train.x.copy()
    y = train.y.copy()
    # places 1 and 3 of 5
    x[1, [1, 3], 2] = 1.5
    y[1, [1, 3]] = 2
    poisoned = train._replace(x=x, y=y)
    strength = sum(SIZES) / SIZES[1]
    options = {"strength": strength} if kind == "replacement" else {}
    attack = Attack(kind, 0.25, target=2, poisoned=0.5, trigger=1.5, **options)
    method = staged(problem, toys.make_algorithm("fedavg", problem), federation, attack=attack)

    def play(train, attacker):
        clients = ClientData(train, federation.validation, attacker)
        return jax.device_get(
            [state.models for state in toys.train(method, problem, clients, 1)[0]]
        )

    # Where nobody attacks, clients train on poisoned data one by one.
    mean = None
    for k, size in enumerate(SIZES):
        only = poisoned._replace(size=np.where(np.arange(4) == k, train.size, 0))
        start, trained = play(only, np.zeros(4, bool))
        factor = (strength if kind == "replacement" and k == 1 else 1.0) * size / sum(SIZES)
        mean = start if mean is None else mean
        mean = jax.tree.map(lambda m, new, old, f=factor: m + f * (new - old), mean, trained, start)
    toys.assert_trees_close(play(train, ATTACKER)[1], mean, rtol=1e-5, atol=1e-6)


def test_success_is_the_share_of_other_classes_that_the_trigger_turns_into_the_target():
    federation = toys.make_federation((40,) * 3, test_size=25).with_attackers(0.34)
    problem = toys.make_problem(federation, optax.sgd(0.5))
    attack = Attack("replacement", 0.34, strength=3.0, target=1, poisoned=1.0, trigger=2.0)
    method = staged(problem, toys.make_algorithm("fedavg", problem), federation, attack=attack)
    state = toys.train(method, problem, federation.client_data, 1)[0][1]
    found = toys.evaluate(
        method, problem, jax.random.key(0), state, federation.client_data, federation.test
    )
    weights = jax.tree.map(lambda leaf: np.float64(leaf[0]), state.models["Dense_0"])
    for k in range(3):
        x = federation.test.x[k].copy()
        y = federation.test.y[k]
        x[:, 2] = 2.0
        fooled = (x @ weights["kernel"] + weights["bias"]).argmax(axis=1) == 1
        expected = np.nan if federation.attacker[k] else fooled[y != 1].mean()
        np.testing.assert_allclose(found["attack_success"][k], expected, rtol=1e-6)
    only = federation.test._replace(y=np.ones_like(federation.test.y))
    scores = toys.evaluate(method, problem, jax.random.key(0), state, federation.client_data, only)
    assert np.isnan(scores["attack_success"]).all()


@pytest.mark.slow
def test_a_run_reports_the_attack_success_as_a_metric_of_each_client():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 8)).astype(np.float32)
    clients = pfl.Federation.from_arrays(
        x, (x[:, 0] > 0).astype(int), np.arange(120) % 4, standardize=False
    )
    attack = pfl.Attack("backdoor", attackers=0.25)
    run = pfl.Run(
        pfl.FedAvg(),
        clients,
        pfl.models.MLP(hidden=()),
        pfl.LocalTraining(optax.sgd(1.0)),
        attack=attack,
    )
    result = run.train(rounds=2, eval_every=2, progress=False)
    rates = [row["attack_success"] for row in result.summary["per_client"] if row["n_test"]]
    assert len(rates) == 3 and result.summary["metrics"] == ["attack_success"]
    np.testing.assert_allclose(result.history[-1]["attack_success"], np.mean(rates), rtol=1e-6)
    assert result.history[-1]["attack_success_bottom_decile"] >= np.mean(rates)


def test_attacks_with_a_trigger_have_a_metric():
    assert Attack("backdoor").measures == Attack("replacement").measures == ("attack_success",)
    assert not Attack("label_flip").measures and not Attack("backdoor", attackers=0.0).measures


def test_no_other_metric_has_its_name():
    clients = pfl.data.digits(num_clients=4)
    attack = pfl.Attack("backdoor")
    metrics = {"attack_success": lambda outputs, y: 0.0}
    with pytest.raises(ArgumentError, match=r"^metrics=attack_success: is the attack's own"):
        run = pfl.Run(
            pfl.FedAvg(), clients, pfl.models.MLP(hidden=()), attack=attack, metrics=metrics
        )
        run.train(1, progress=False)


@pytest.mark.parametrize(
    ("task", "options", "text"),
    [
        (
            "regression",
            {},
            "^attack=backdoor: accepted for data without a class per example: no backdoors",
        ),
        ("classification", {"target": 3}, "^attack.target=3: accepted: a class, 0 to 2"),
    ],
)
def test_what_backdoors_are_refused_for(task, options, text):
    federation = toys.make_federation(SIZES, task)
    problem = toys.make_problem(federation, optax.sgd(0.1))
    with pytest.raises(ArgumentError, match=text):
        staged(
            problem,
            toys.make_algorithm("fedavg", problem),
            federation,
            attack=Attack("backdoor", **options),
        )


def test_tokens_have_no_place_for_a_trigger():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(0.1))
    method = toys.make_algorithm("fedavg", problem)
    model = pfl.Model(problem.model.module, jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(ArgumentError, match="tokens, or several arrays: no backdoors"):
        staged(problem._replace(model=model), method, federation, attack=Attack("backdoor"))


@pytest.mark.parametrize(("name", "value"), [("target", 2), ("poisoned", 0.7), ("trigger", 2.5)])
def test_other_attacks_refuse_the_settings_of_a_trigger(name, value):
    with pytest.raises(ArgumentError, match=f"^{name}={value}: "):
        Attack("sign_flip", **{name: value})
