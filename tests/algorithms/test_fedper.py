"""FedPer: a round by hand that shares the base only, and what travels."""

import jax
import optax
import toys
from networks import BODY, HEAD, descend, examples, mean, row
from quadratics import RATE, SIZES


def test_a_round_by_hand_shares_the_base_only():
    federation = toys.make_federation(SIZES)
    *_, states, records = toys.play("fedper", federation, 1, optax.sgd(RATE), epochs=2, hidden=(3,))
    assert jax.tree.leaves(states[1].models[HEAD]) == []
    bodies = []
    for k in range(4):
        start = {BODY: row(states[0].models[BODY], 0), HEAD: row(states[0].clients.own[HEAD], k)}
        trained = descend(start, *examples(federation, k), RATE, 2)
        bodies.append(trained[BODY])
        toys.assert_trees_close(row(states[1].clients.own[HEAD], k), trained[HEAD], rtol=1e-4, atol=1e-6)
    toys.assert_trees_close(row(states[1].models[BODY], 0), mean(bodies, SIZES), rtol=1e-4, atol=1e-6)
    base = 4 * (3 * 3 + 3)
    assert records[0].down == 4 * base and records[0].up == 4 * (base + 4)  # and n_k
