"""FedBABU: rounds and tuning by hand, its limit, and what travels."""

import jax
import numpy as np
import optax
import pytest
import toys
from networks import BODY, HEAD, descend, examples, mean, row

SIZES, RATE = (2, 5, 1, 3), 0.3
FEDERATION = toys.make_federation(SIZES)
KEY = jax.random.key(4)


def play(knobs, common_init=False, **options):
    """(states, records, the clients' models, newcomers' models) after two rounds."""
    problem = toys.make_problem(FEDERATION, optax.sgd(RATE), hidden=(3,), **options)._replace(common_init=common_init)
    algorithm = toys.make_algorithm("fedbabu", problem, **knobs)
    states, records = toys.train(algorithm, problem, FEDERATION.client_data, 2)
    newcomers = toys.make_federation((3, 4), seed=5)
    found = [
        jax.tree.map(lambda leaf: leaf[:, 0], made(algorithm, problem, KEY, states[-1], clients.client_data).models)
        for made, clients in ((toys.predict, FEDERATION), (toys.adapt, newcomers))
    ]
    return states, records, *found


@pytest.mark.parametrize(("tuned", "layers"), [("all", [BODY, HEAD]), ("head", [HEAD]), ("body", [BODY])])
def test_rounds_by_hand(tuned, layers):
    states, _, predicting, adapted = play({"tuned": tuned, "tune_epochs": 4}, epochs=3)
    theta, phi = row(states[0].models[BODY], 0), row(states[0].server[HEAD], 0)
    for state in states[1:]:
        start = {BODY: theta, HEAD: phi}
        bodies = [descend(start, *examples(FEDERATION, k), RATE, 3, [BODY])[BODY] for k in range(4)]
        theta = mean(bodies, SIZES)
        toys.assert_trees_close(row(state.models[BODY], 0), theta, rtol=1e-4, atol=1e-5)
    start, newcomers = {BODY: theta, HEAD: phi}, toys.make_federation((3, 4), seed=5)
    for federation, found in ((FEDERATION, predicting), (newcomers, adapted)):
        for k in range(len(federation.train.size)):
            expected = descend(start, *examples(federation, k), RATE, 4, layers)
            toys.assert_trees_close(row(found, k), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("common_init", [False, True])
def test_the_head_is_everyone_s_and_stays_where_only_the_body_travels(common_init):
    states, records, predicting, _ = play({"tune_epochs": 0}, common_init=common_init, batch_size=2)
    head = states[0].server[HEAD]
    toys.assert_trees_close(states[-1].server[HEAD], head)
    toys.assert_trees_close(predicting[HEAD], jax.tree.map(lambda leaf: np.repeat(leaf, 4, axis=0), head))
    assert jax.tree.leaves(states[-1].models[HEAD]) == []
    body = 4 * (3 * 3 + 3)
    for record in records:
        assert record.down == 4 * body and record.up == 4 * (body + 4)  # and n_k
