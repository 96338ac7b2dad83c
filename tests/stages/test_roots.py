"""FLTrust: its rule against NumPy, the server's examples, and what becomes of attackers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from quadratics import OPTIMIZER, RATE, descend, gradient, vectors
from staged import server_state, staged

from pfljax.contract.errors import ArgumentError
from pfljax.local.batches import sampled
from pfljax.stages import robust
from pfljax.stages.attacks import Attack
from pfljax.stages.server import Server

SIZES = (4, 3, 5, 2, 4, 6)


@jax.jit
def fltrust(updates, weight, root):
    """The rule, which reads no share of attackers."""
    return robust.combine("fltrust", updates, weight, 0.2, root)


def by_numpy(rows, root):
    """Equations 1 to 3 of the paper."""
    norms = np.linalg.norm(rows, axis=1)
    trust = np.maximum(rows @ root / norms / np.linalg.norm(root), 0)
    return (trust[:, None] * rows * (np.linalg.norm(root) / norms)[:, None]).sum(
        axis=0
    ) / trust.sum()


def flat(tree, num):
    """The entries (num, n) of updates."""
    return np.concatenate(
        [np.float64(leaf).reshape(num, -1) for leaf in jax.tree.leaves(tree)], axis=1
    )


@pytest.mark.parametrize("absent", [(), (2, 5)])
def test_the_rule_agrees_with_numpy(absent):
    rng = np.random.default_rng(len(absent))
    updates = {
        "a": np.float32(rng.normal(size=(7, 3))),
        "b": np.float32(rng.normal(size=(7, 2, 2))),
    }
    root = {"a": np.float32(rng.normal(size=3)), "b": np.float32(rng.normal(size=(2, 2)))}
    weight = np.arange(1.0, 8, dtype=np.float32)
    weight[list(absent)] = 0
    usable = weight > 0
    if absent:  # nor does what is not finite count
        updates["a"][6] = np.nan
        usable[6] = False
    expected = by_numpy(flat(updates, 7)[usable], flat(root, 1)[0])
    found = fltrust(updates, weight, root)
    np.testing.assert_allclose(flat(found, 1)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e20, 1e37, np.inf, -np.inf])
def test_what_one_sends_counts_no_more_than_its_direction(value):
    rows = np.array([[3.0, 4], [1, 0], [value, value]])
    root = np.array([2.0, 0])
    directions = np.array([[0.6, 0.8], [1, 0], [0.5**0.5, 0.5**0.5]])
    among = directions if 0 < value < np.inf else directions[:2]
    expected = (among[:, :1] * among * 2).sum(axis=0) / among[:, 0].sum()
    found = fltrust(np.float32(rows), np.ones(3, np.float32), np.float32(root))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_nobody_is_trusted_who_goes_the_other_way():
    rows = np.array([[-1.0, 0.0], [0.0, 2.0], [-3.0, 4.0]], np.float32)
    found = fltrust(rows, np.ones(3, np.float32), np.array([3.0, 0.0], np.float32))
    np.testing.assert_array_equal(found, [0, 0])


def test_the_server_draws_distinct_real_examples():
    train = toys.make_federation(SIZES).train
    real = np.concatenate([x[:n] for x, n in zip(train.x, SIZES, strict=True)])
    draw = jax.jit(sampled, static_argnums=2)
    for capacity, size in ((10, 10), (30, sum(SIZES))):
        found = draw(
            jax.random.key(0), jax.tree.map(jnp.asarray, train), capacity, jnp.int32(sum(SIZES))
        )
        drawn = np.asarray(found.x)[: int(found.size)]
        assert found.size == size and len(np.unique(drawn, axis=0)) == size
        assert all((row == real).all(axis=1).any() for row in drawn)


@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "scaffold",
        pytest.param("feddyn", marks=pytest.mark.slow),
        pytest.param("ditto", marks=pytest.mark.long),
    ],
)
def test_a_round_is_fltrust_of_what_clients_and_server_send(name):
    """The server's examples are all examples, so that it sends what a client would that has them all."""
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, OPTIMIZER)
    server = Server(aggregator="fltrust", root_examples=1000)
    served = staged(problem, toys.make_algorithm(name, problem), federation, server=server)
    states, records = toys.train(served, problem, federation.client_data, 1)

    theta = vectors(states[0].models)[0]
    updates = np.stack([descend(federation, k, theta, 1) - theta for k in range(len(SIZES))])
    root = -RATE * np.average(
        [gradient(federation, k, theta) for k in range(len(SIZES))], axis=0, weights=SIZES
    )
    expected = by_numpy(updates, root)
    moved = vectors(states[1].models)[0] - theta
    if (
        name == "feddyn"
    ):  # its server adds a sum of updates; in the first round, all go the same way
        expected *= np.linalg.norm(moved) / np.linalg.norm(expected)
    np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-5)
    if (
        name == "scaffold"
    ):  # c moves by the rule of the changes of c_k, which are updates divided by -E eta
        np.testing.assert_allclose(
            vectors(server_state(states[1]).control_variate), -expected / RATE, rtol=1e-3, atol=1e-5
        )
    # Nobody reads the server's examples.
    vectors_down = 2 if name == "scaffold" else 1
    assert records[0].down == len(SIZES) * vectors_down * 4 * 4


@pytest.mark.slow
def test_fltrust_holds_where_the_mean_does_not():
    federation = toys.make_federation((6,) * 9, "regression")
    attacker = np.arange(9) < 4
    problem = toys.make_problem(federation, OPTIMIZER)
    clients = federation.client_data._replace(attacker=attacker)
    plain = toys.make_algorithm("fedavg", problem)
    attack = Attack("ipm", attackers=0.45, strength=50.0)

    def loss(server):
        method = staged(problem, plain, federation, attack=attack, server=server)
        states, _ = toys.train(method, problem, clients, 8)
        found = toys.evaluate(
            method, problem, jax.random.key(0), states[-1], clients, federation.test
        )["loss"]
        return np.asarray(found).mean()

    assert loss(Server(aggregator="fltrust", root_examples=10)) < 0.5 < 1e3 < loss(Server())


@pytest.mark.parametrize(
    ("name", "text"),
    [("local", "mean; no server averages"), ("fedem", "whose server has several models")],
)
def test_methods_that_have_no_single_mean_refuse_it(name, text):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation)
    server = Server(aggregator="fltrust")
    with pytest.raises(
        ArgumentError, match=f"^aggregator=fltrust: accepted for this method.*{text}"
    ):
        served = staged(problem, toys.make_algorithm(name, problem), federation, server=server)
        toys.start(served, problem, federation.client_data)


def test_root_examples_are_refused_without_fltrust():
    with pytest.raises(ArgumentError, match=r"^root_examples=5: "):
        Server(aggregator="median", root_examples=5)
