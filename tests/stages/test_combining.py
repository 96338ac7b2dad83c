"""What clients send beside their models goes through the server's rule, too: against NumPy, part by part."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.stages import robust
from pfljax.stages.attacks import Attack
from pfljax.stages.client_privacy import ClientPrivacy
from pfljax.stages.combining import combined
from pfljax.stages.compression import Compression
from pfljax.stages.faults import Faults
from pfljax.stages.notes import inner
from pfljax.stages.server import Server

SIZES = (3, 5, 2, 4, 6)
BESIDE = ("scaffold", "mofedsam", "feddbe", "fednova", "fedexp", "fedpac", "ccvr")  # send more than a model


def problem_of(name, sizes=SIZES):
    federation = toys.make_federation(sizes)
    return federation, toys.make_problem(federation, optax.sgd(0.1), **toys.network(name))


def alone(clients, k):
    """The clients' data, with examples for client k only."""
    parts = {part: getattr(clients, part) for part in ("train", "validation")}
    only = lambda split: split._replace(size=np.where(np.arange(len(split.size)) == k, split.size, 0))
    return clients._replace(**{part: only(split) for part, split in parts.items()})


def rounds_alone(name, play):
    """The state, and the states after a round in which only client k has examples, for each k."""
    federation, problem = problem_of(name)
    method, clients = toys.make_algorithm(name, problem), federation.client_data
    begin = toys.start(method, problem, clients)
    copied = lambda: jax.tree.map(jnp.array, begin)
    each = [jax.device_get(play(method, problem, alone(clients, k), copied())) for k in range(len(SIZES))]
    served = Server(aggregator="median").of(problem, method)
    found = jax.device_get(play(served, problem, clients, None))
    return federation, jax.device_get(begin), each, found


def one_round(method, problem, clients, state):
    return toys.train(method, problem, clients, 1, state=state)[0][1]


@toys.each_method(among=BESIDE, fast=BESIDE)
def test_a_mean_of_the_parts_is_the_plain_round(name):
    federation, problem = problem_of(name)
    method = toys.make_algorithm(name, problem)
    mean = lambda part, weight, attackers, root: robust.combine("mean", part, weight, 0)
    play = lambda method: toys.train(method, problem, federation.client_data, 2)[0]
    for plain, found in zip(play(method), play(combined(problem, method, mean)), strict=True):
        toys.assert_trees_close(plain, inner(found) if method.changes else found, rtol=1e-4, atol=1e-5)


def test_scaffold_moves_its_control_variate_by_the_median_of_the_clients_changes():
    """c + (sum of n_k in the round / sum of all n_k) median_k (c_k+ - c_k)."""
    _, begin, each, found = rounds_alone("scaffold", one_round)
    change = lambda leaf, k: leaf * sum(SIZES) / SIZES[k]  # alone, client k moves c by n_k / sum n of its change
    changes = [jax.tree.map(lambda leaf, k=k: change(leaf, k), state.server.control) for k, state in enumerate(each)]
    expected = jax.tree.map(lambda *leaves: np.median(leaves, axis=0), *changes)
    toys.assert_trees_close(found.server.inner.control, expected, rtol=1e-4, atol=1e-6)
    mean = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=SIZES), *changes)
    assert np.abs(mean["Dense_0"]["kernel"] - expected["Dense_0"]["kernel"]).max() > 1e-3
    models = jax.tree.map(lambda *leaves: np.median(leaves, axis=0), *(state.models for state in each))
    toys.assert_trees_close(found.models, models, rtol=1e-4, atol=1e-6)
    assert np.abs(begin.server.control["Dense_0"]["kernel"]).max() == 0


def test_a_class_has_the_median_of_the_clients_that_have_it():
    """FedPAC's centroids; other clients' zeros do not count."""
    federation, _, each, found = rounds_alone("fedpac", one_round)
    of_client = np.stack([state.models.centroids[0] for state in each])
    has = np.stack([np.bincount(y[:n], minlength=3) for y, n in zip(federation.train.y, SIZES, strict=True)])
    assert (has == 0).any() and (has > 0).any(axis=0).all()
    for c in range(3):
        expected = np.median(of_client[has[:, c] > 0, c], axis=0)
        np.testing.assert_allclose(found.models.centroids[0, c], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found.models.count[0], has.sum(axis=0))


@pytest.mark.parametrize("around", [lambda problem, method: method, lambda *both: Faults(dropout=1e-9).on(*both)])
def test_fedexp_takes_its_rate_from_the_median_of_squared_norms(around):
    """max(1, median |u_k|^2 / (2 (|median u_k|^2 + eps))), whatever attackers report; other stages may be between."""
    federation, problem = problem_of("fedexp")
    method = toys.make_algorithm("fedexp", problem, predict="last", eps=1e-3)
    clients, begin = federation.client_data, None
    begin = toys.start(method, problem, clients)
    flat = lambda state: np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(state.models)])
    start = flat(begin)
    each = []
    for k in range(len(SIZES)):
        states, records = toys.train(method, problem, alone(clients, k), 1, state=jax.tree.map(jnp.array, begin))
        each.append((flat(states[1]) - start) / float(records[0].metrics["server_rate"]))
    factor = np.array([1, -300.0, 1, 1, 1])
    sent = factor[:, None] * np.stack(each)
    median = np.median(sent, axis=0)
    expected = max(1, np.median((sent**2).sum(axis=1)) / (2 * ((median**2).sum() + 1e-3)))
    attacked = Attack("sign_flip", strength=300.0).on(problem, method)
    served = Server(aggregator="median").of(problem, around(problem, attacked))
    clients = clients._replace(attacker=factor < 0)
    states, records = toys.train(served, problem, clients, 1, state=begin)
    np.testing.assert_allclose(records[0].metrics["server_rate"], expected, rtol=1e-4)
    np.testing.assert_allclose(flat(states[1]) - start, expected * median, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("rule", ["median", "multi_krum", "geometric_median"])
def test_no_attacker_moves_scaffolds_control_variate_far(rule):
    federation, problem = problem_of("scaffold", (4,) * 7)
    method, attacker = toys.make_algorithm("scaffold", problem), np.arange(7) == 2
    attacked = Attack("sign_flip", strength=1e4).on(problem, method)
    clients = federation.client_data._replace(attacker=attacker)
    server = lambda served: toys.train(served.of(problem, attacked), problem, clients, 2)[0][-1].server
    largest = lambda control: max(np.abs(leaf).max() for leaf in jax.tree.leaves(control))
    assert largest(server(Server()).control) > 100 and largest(server(Server(aggregator=rule)).inner.control) < 2


def test_colluders_change_what_is_sent_beside_the_model():
    """With inner-product manipulation of strength s by one of five, the mean change is (1 - p) m - p s m."""
    federation, problem = problem_of("scaffold", (3,) * 5)
    method, clients = toys.make_algorithm("scaffold", problem), federation.client_data
    attacker = np.arange(5) == 0
    attack = Attack("ipm", attackers=0.2, strength=2.0)
    begin = toys.start(method, problem, clients)
    others = clients.train._replace(size=np.where(attacker, 0, clients.train.size))
    copied = jax.tree.map(jnp.array, begin)
    honest = one_round(method, problem, clients._replace(train=others), copied).server.control
    served = Server().of(problem, attack.on(problem, method), attack)
    found = one_round(served, problem, clients._replace(attacker=attacker), None).server.inner.control
    expected = jax.tree.map(lambda leaf: leaf / 0.8 * (0.8 - 0.2 * 2.0), honest)
    toys.assert_trees_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_servers_own_part_is_what_a_client_would_send():
    """FLTrust scales control variates to the server's own change, as it scales updates."""
    federation, problem = problem_of("scaffold")
    server, method = Server(aggregator="fltrust", root_examples=1000), toys.make_algorithm("scaffold", problem)
    rooted = server.with_root(problem, method)
    clients = federation.client_data._replace(attacker=np.arange(5) == 1)
    attacked = Attack("sign_flip", strength=1e4).on(problem, rooted)
    states, _ = toys.train(server.of(problem, attacked), problem, clients, 1)
    length = lambda tree: np.sqrt(sum((np.float64(leaf) ** 2).sum() for leaf in jax.tree.leaves(tree)))
    root = rooted.root(jax.random.key(0), toys.start(rooted, problem, clients))
    assert 0 < length(states[1].server.inner.control) <= length(root["control"]) * (1 + 1e-5)


@pytest.mark.parametrize(
    "around",
    [
        lambda problem, method: Compression("quantize:8").on(problem, method),
        lambda problem, method: Faults(dropout=0.3).on(problem, method),
        lambda problem, method: ClientPrivacy(clip_norm=1.0).on(problem, method),
    ],
)
def test_rules_and_other_stages_together(around):
    federation, problem = problem_of("mofedsam")
    try:
        served = Server(aggregator="median").of(problem, around(problem, toys.make_algorithm("mofedsam", problem)))
    except ValueError as error:
        assert "accepted" in str(error)
        return
    states, records = toys.train(served, problem, federation.client_data, 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[-1].models)) and records[0].up > 0


@pytest.mark.parametrize("rule", ["median", "krum"])
def test_a_rules_errors_do_not_add_up_in_scaffolds_control_variate(rule):
    """After any number of rounds it is the rule of what clients keep, of equal weight and all in every round."""
    federation, problem = problem_of("scaffold", (4,) * 5)
    served = Server(aggregator=rule).of(problem, toys.make_algorithm("scaffold", problem))
    state = jax.device_get(toys.train(served, problem, federation.client_data, 6)[0][-1])
    kept = state.clients.inner.control
    toys.assert_trees_close(jax.tree.map(lambda leaf: leaf[:, 0], state.clients.note["control"]), kept, atol=1e-5)
    expected = robust.combine(rule, kept, jnp.ones(5), 0.2)
    toys.assert_trees_close(state.server.inner.control, expected, rtol=1e-4, atol=1e-5)
