"""FLTrust: its rule against NumPy, the server's examples, and what becomes of attackers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import ClientData, Split
from pfljax.local.batches import sampled
from pfljax.stages import robust
from pfljax.stages.attacks import Attack
from pfljax.stages.server import Server

SIZES = (4, 3, 5, 2, 4, 6)


def by_numpy(rows, root):
    """Equations 1 to 3 of the paper."""
    norms = np.linalg.norm(rows, axis=1)
    trust = np.maximum(rows @ root / norms / np.linalg.norm(root), 0)
    return (trust[:, None] * rows * (np.linalg.norm(root) / norms)[:, None]).sum(axis=0) / trust.sum()


@pytest.mark.parametrize("absent", [(), (2, 5)])
def test_the_rule_agrees_with_numpy(absent):
    rng = np.random.default_rng(len(absent))
    updates = {"a": rng.normal(size=(7, 3)), "b": rng.normal(size=(7, 2, 2))}
    root, weight = {"a": rng.normal(size=3), "b": rng.normal(size=(2, 2))}, np.arange(1.0, 8)
    weight[list(absent)] = 0
    flat = lambda tree, num: np.concatenate([np.reshape(leaf, (num, -1)) for leaf in jax.tree.leaves(tree)], axis=1)
    expected = by_numpy(flat(updates, 7)[weight > 0], flat(root, 1)[0])
    updates = jax.tree.map(lambda leaf: jnp.float32(leaf).at[6].set(np.nan if absent else leaf[6]), updates)
    if absent:  # nor does what is not finite count
        left = np.setdiff1d(np.arange(6), absent)
        expected = by_numpy(flat(updates, 7)[left].astype(np.float64), flat(root, 1)[0])
    found = robust.combine("fltrust", updates, jnp.float32(weight), 0.2, jax.tree.map(jnp.float32, root))
    np.testing.assert_allclose(flat(found, 1)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e20, 1e37, np.inf, -np.inf])
def test_what_one_sends_counts_no_more_than_its_direction(value):
    rows = np.array([[3.0, 4], [1, 0], [value, value]])
    root, signs = np.array([2.0, 0]), np.array([[0.6, 0.8], [1, 0], [0.5**0.5, 0.5**0.5]])
    among = signs if 0 < value < np.inf else signs[:2]
    expected = (among[:, :1] * among * 2).sum(axis=0) / among[:, 0].sum()
    found = robust.combine("fltrust", jnp.float32(rows), jnp.ones(3), 0.2, jnp.float32(root))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("rule", ["flame", "sign_majority"])
@pytest.mark.parametrize("value", [0.0, 1e20, 1e38, np.inf, np.nan])
def test_neither_do_the_other_rules_fail_for_sizes(rule, value):
    rows = np.random.default_rng(0).normal(1.0, 0.3, size=(5, 4))
    rows[4] = value
    found = robust.combine(rule, jnp.float32(rows), jnp.ones(5), 0.2)
    assert (np.abs(found) < 2).all() and (np.asarray(found) > 0).all()


def test_nobody_is_trusted_who_goes_the_other_way():
    rows = jnp.array([[-1.0, 0.0], [0.0, 2.0]])
    np.testing.assert_array_equal(robust.combine("fltrust", rows, jnp.ones(2), 0.2, jnp.array([3.0, 0.0])), [0, 0])


def test_the_server_draws_distinct_real_examples():
    federation = toys.make_federation(SIZES)
    train = federation.train
    real = np.concatenate([x[:n] for x, n in zip(train.x, SIZES, strict=True)])
    for capacity, size in ((10, 10), (30, sum(SIZES))):
        found = sampled(jax.random.key(0), jax.tree.map(jnp.asarray, train), capacity, jnp.int32(sum(SIZES)))
        drawn = np.asarray(found.x)[: int(found.size)]
        assert found.size == size and len(np.unique(drawn, axis=0)) == size
        assert all((row == real).all(axis=1).any() for row in drawn)


@pytest.mark.parametrize("name", ["fedavg", "feddyn", "ditto"])
def test_a_round_is_fltrust_of_what_clients_and_server_send(name):
    """The server's examples are all examples, so that its update is a client's that has them all."""
    federation = toys.make_federation(SIZES, "regression")
    problem, clients = toys.make_problem(federation, optax.sgd(0.1)), federation.client_data
    plain, server = toys.make_algorithm(name, problem), Server(aggregator="fltrust", root_examples=1000)
    served = server.of(problem, server.with_root(problem, plain))
    states, records = toys.train(served, problem, clients, 1)
    fedavg = toys.make_algorithm("fedavg", problem)
    parameters = lambda models: np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(models)])
    start = parameters(states[0].models)
    begin = toys.start(fedavg, problem, clients)._replace(models=states[0].models)

    def trained(train):
        one = ClientData(train, clients.validation)
        return parameters(toys.train(fedavg, problem, one, 1, state=begin)[0][1].models) - start

    alone = lambda k: clients.train._replace(size=np.where(np.arange(len(SIZES)) == k, SIZES, 0))
    pooled = [np.concatenate([leaf[k, :n] for k, n in enumerate(SIZES)]) for leaf in clients.train[:2]]
    wide = [np.broadcast_to(leaf, (len(SIZES), *leaf.shape)) for leaf in pooled]
    root = trained(Split(*wide, np.where(np.arange(len(SIZES)) == 0, sum(SIZES), 0)))
    expected = by_numpy(np.stack([trained(alone(k)) for k in range(len(SIZES))]), root)
    moved = parameters(states[1].models) - start
    if name == "feddyn":  # its server adds a sum of updates; in the first round, all go the same way
        expected *= np.linalg.norm(moved) / np.linalg.norm(expected)
    np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-5)
    plain_record = toys.train(plain, problem, clients, 1)[1][0]
    assert records[0].down == plain_record.down  # no client reads the server's examples


def test_fltrust_holds_where_the_mean_does_not():
    federation = toys.make_federation((6,) * 9, "regression")
    attacker = np.arange(9) < 4
    problem = toys.make_problem(federation, optax.sgd(0.1))
    clients, plain = federation.client_data._replace(attacker=attacker), toys.make_algorithm("fedavg", problem)
    attack = Attack("ipm", attackers=0.45, strength=50.0)

    def loss(server):
        method = server.of(problem, attack.on(problem, server.with_root(problem, plain)), attack)
        states, _ = toys.train(method, problem, clients, 8)
        found = toys.evaluate(method, problem, jax.random.key(0), states[-1], clients, federation.test)["loss"]
        return np.asarray(found).mean()

    assert loss(Server(aggregator="fltrust", root_examples=10)) < 0.5 < 1e3 < loss(Server())


@pytest.mark.parametrize(
    ("name", "text"), [("local", "mean; no server averages"), ("fedem", "whose server has several models")]
)
def test_methods_that_have_no_single_mean_refuse_it(name, text):
    federation = toys.make_federation(SIZES)
    problem, server = toys.make_problem(federation, optax.sgd(0.1)), Server(aggregator="fltrust")
    with pytest.raises(ArgumentError, match=f"^aggregator=fltrust: accepted for this method.*{text}"):
        toys.start(server.with_root(problem, toys.make_algorithm(name, problem)), problem, federation.client_data)


def test_root_examples_are_refused_without_fltrust():
    with pytest.raises(ArgumentError, match=r"^root_examples=5: "):
        Server(aggregator="median", root_examples=5)
