"""FedRep: rounds by hand, its limits, and what travels."""

import jax
import numpy as np
import optax
import pytest
import toys
from networks import BODY, HEAD, descend, examples, mean, row

from pfljax.contract.types import Ledger

SIZES, RATE = (2, 5, 1, 3), 0.3
FEDERATION = toys.make_federation(SIZES)


def play(name, rounds=2, knobs=None, **options):
    """(problem, algorithm, states, records, the models that clients predict with)."""
    played = toys.play(name, FEDERATION, rounds, optax.sgd(RATE), knobs, hidden=(3,), **options)
    _, problem, algorithm, states, records = played
    found = toys.predict(algorithm, problem, jax.random.key(0), states[-1], FEDERATION.client_data)
    return problem, algorithm, states, records, jax.tree.map(lambda leaf: leaf[:, 0], found.models)


@pytest.mark.parametrize(("head_epochs", "body_epochs"), [(3, 2), (1, 4)])
def test_rounds_by_hand(head_epochs, body_epochs):
    _, algorithm, states, _, predicting = play("fedrep", 3, {"head_epochs": head_epochs, "body_epochs": body_epochs})
    assert algorithm.ledger == Ledger(gradients=1, passes=head_epochs + body_epochs)
    theta = row(states[0].models[BODY], 0)
    heads = [row(states[0].clients.own[HEAD], k) for k in range(4)]
    assert np.abs(heads[0]["kernel"] - heads[1]["kernel"]).max() > 0.1
    for state in states[1:]:
        bodies = []
        for k in range(4):
            x, y = examples(FEDERATION, k)
            params = descend({BODY: theta, HEAD: heads[k]}, x, y, RATE, head_epochs, [HEAD])
            params = descend(params, x, y, RATE, body_epochs, [BODY])
            heads[k] = params[HEAD]
            bodies.append(params[BODY])
            toys.assert_trees_close(row(state.clients.own[HEAD], k), heads[k], rtol=1e-4, atol=1e-5)
        theta = mean(bodies, SIZES)
        toys.assert_trees_close(row(state.models[BODY], 0), theta, rtol=1e-4, atol=1e-5)
    for k in range(4):
        toys.assert_trees_close(row(predicting, k), {BODY: theta, HEAD: heads[k]}, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_by_default_the_body_is_trained_as_long_as_other_methods_train():
    _, algorithm, states, _, _ = play("fedrep", 2, epochs=3)
    assert algorithm.ledger == Ledger(gradients=1, passes=10 / 3 + 1)
    toys.assert_trees_close(states[-1].models, play("fedrep", 2, {"body_epochs": 3})[2][-1].models, rtol=1e-6)
    steps = play("fedrep", 2, epochs=1, steps=3)[2][-1].models  # full batches: an epoch is a step
    toys.assert_trees_close(steps, states[-1].models, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("personal_layers", "other", "knobs"),
    [(0, "fedavg", {"head_epochs": 4, "body_epochs": 2}), (2, "local", {"head_epochs": 2, "body_epochs": 3})],
)
def test_of_one_part_only_it_is_another_method(personal_layers, other, knobs):
    wanted = play(other, epochs=2)[4]
    found = play("fedrep", knobs=knobs | {"personal_layers": personal_layers})[4]
    toys.assert_trees_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_the_body_travels_alone():
    _, _, states, records, _ = play("fedrep", 1)
    assert jax.tree.leaves(states[1].models[HEAD]) == []
    body = 4 * (3 * 3 + 3)
    assert records[0].down == 4 * body and records[0].up == 4 * (body + 4)  # and n_k


@pytest.mark.slow
def test_newcomers_train_a_head_on_the_body_as_it_is():
    """For R = 2 rounds of `head_epochs` epochs."""
    newcomers, key = toys.make_federation((3, 4), seed=5), jax.random.key(0)
    problem, algorithm, states, _, _ = play("fedrep", 2, {"head_epochs": 5})
    found = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data).models
    for k in range(2):
        start = problem.model.init(jax.random.split(jax.random.fold_in(key, k))[0])
        params = {BODY: row(states[-1].models[BODY], 0), HEAD: start[HEAD]}
        expected = descend(params, *examples(newcomers, k), RATE, 2 * 5, [HEAD])
        toys.assert_trees_close(row(row(found, k), 0), expected, rtol=1e-4, atol=1e-5)
