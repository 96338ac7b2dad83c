"""What clients send beside their models goes through the server's rule, too: against NumPy, part by part."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from networks import OPTIMIZER
from staged import bare, client_notes, rows, server_state, staged

from pfljax.stages import robust
from pfljax.stages.attacks import Attack
from pfljax.stages.combining import Combining
from pfljax.stages.compression import Compression
from pfljax.stages.faults import Faults
from pfljax.stages.pipeline import pipelined
from pfljax.stages.server import Server

SIZES = (3, 5, 2, 4, 6)
BESIDE = (
    "scaffold",
    "mofedsam",
    "feddbe",
    "fednova",
    "fedexp",
    "fedpac",
    "ccvr",
)  # send more than a model
HYPERPARAMETERS = {"fedexp": {"predict": "last", "eps": 1e-3}}
FLIP = Attack("sign_flip", strength=300.0)
NOBODY = np.zeros(5, bool)


class Method(NamedTuple):
    """A method that clients of different sizes train.

    Attributes:
        clients: Their data.
        problem: The problem of the method.
        plain: The method whose server takes the mean.
        federation: The clients.
    """

    clients: Any
    problem: Any
    plain: Any
    federation: Any

    def staged(self, **settings):
        """The method with stages."""
        return staged(self.problem, self.plain, self.federation, **settings)

    def alone(self, k, state):
        """The state after a round in which only client k has examples, and the round's record."""
        numbers = np.arange(len(SIZES))

        def only(split):
            return split._replace(size=np.where(numbers == k, split.size, 0))

        clients = self.clients._replace(
            train=only(self.clients.train), validation=only(self.clients.validation)
        )
        return played(self.plain, self.problem, clients, state)


@functools.cache
def method(name):
    """A method of `BESIDE`; one object for all tests, so that a round is compiled once."""
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, OPTIMIZER, **toys.network(name))
    plain = toys.make_algorithm(name, problem, **HYPERPARAMETERS.get(name, {}))
    return Method(federation.client_data, problem, plain, federation)


def played(algorithm, problem, clients, state=None):
    """The state after a round, and its record."""
    state = None if state is None else jax.tree.map(jnp.array, state)
    states, records = toys.train(algorithm, problem, clients, 1, state=state)
    return jax.device_get(states[-1]), records[0]


def begun(name):
    """The state before the first round."""
    made = method(name)
    return jax.device_get(toys.start(made.plain, made.problem, made.clients))


def of_equal_size(clients):
    """The clients with two examples each."""
    return clients._replace(train=clients.train._replace(size=np.full(len(SIZES), 2, np.int32)))


def medians(trees):
    """The median of each entry."""
    return jax.tree.map(lambda *leaves: np.median(leaves, axis=0), *trees)


@toys.each_method(among=BESIDE, fast=(), slow=("scaffold", "fedexp", "fedpac"))
def test_a_mean_of_the_parts_is_the_plain_round(name):
    clients, problem, plain, _ = method(name)

    def mean_stage(problem, pipeline):
        return Combining("mean", 0.2, Attack(), problem, pipeline.method)

    expected = toys.train(plain, problem, clients, 2)[0]
    found = toys.train(pipelined(problem, plain, [mean_stage]), problem, clients, 2)[0]
    for one, other in zip(expected, found, strict=True):
        toys.assert_trees_close(one, bare(other), rtol=1e-4, atol=1e-5)


@functools.cache
def scaffold_by_rule(rule):
    """SCAFFOLD whose attackers turn what they send around, and whose server has a rule."""
    return method("scaffold").staged(server=Server(aggregator=rule), attack=FLIP)


@pytest.mark.parametrize("attacker", [None, 3])
def test_scaffold_moves_its_control_variate_by_the_median_of_the_clients_changes(attacker):
    """c + (sum of n_k in the round / sum of all n_k) median_k (c_k+ - c_k), whatever an attacker sends."""
    clients, problem, _, _ = method("scaffold")
    start = begun("scaffold")
    each = [method("scaffold").alone(k, start)[0] for k in range(len(SIZES))]
    factor = np.where(np.arange(len(SIZES)) == attacker, -FLIP.strength, 1.0)

    # Alone, client k moves c by n_k / sum n of its change.
    changes = []
    updates = []
    for k, state in enumerate(each):
        scale = factor[k] * sum(SIZES) / SIZES[k]
        changes.append(
            jax.tree.map(lambda leaf, scale=scale: scale * leaf, state.server.state.control_variate)
        )
        updates.append(
            jax.tree.map(lambda new, old, k=k: factor[k] * (new - old), state.models, start.models)
        )

    found, _ = played(scaffold_by_rule("median"), problem, clients._replace(attacker=factor < 0))
    toys.assert_trees_close(
        server_state(found).control_variate, medians(changes), rtol=1e-4, atol=1e-6
    )
    models = jax.tree.map(np.add, start.models, medians(updates))
    toys.assert_trees_close(found.models, models, rtol=1e-4, atol=1e-6)
    mean = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=SIZES), *changes)
    assert np.abs(mean["Dense_0"]["kernel"] - medians(changes)["Dense_0"]["kernel"]).max() > 1e-3
    assert np.abs(start.server.state.control_variate["Dense_0"]["kernel"]).max() == 0


@pytest.mark.parametrize("rule", ["median", pytest.param("krum", marks=pytest.mark.long)])
def test_a_rules_errors_do_not_add_up_in_scaffolds_control_variate(rule):
    """After any number of rounds it is the rule of what clients keep, of equal weight and all in every round."""
    clients, problem, _, _ = method("scaffold")
    clients = of_equal_size(clients)._replace(attacker=NOBODY)
    state = jax.device_get(toys.train(scaffold_by_rule(rule), problem, clients, 6)[0][-1])
    control = rows(state)
    sums = jax.tree.map(lambda leaf: leaf[:, 0], client_notes(state, "combining")["control"])
    toys.assert_trees_close(sums, control, atol=1e-5)
    combine = jax.jit(robust.combine, static_argnums=0)
    expected = combine(rule, control, np.ones(5, np.float32), 0.2)
    toys.assert_trees_close(server_state(state).control_variate, expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_arrive_moves_no_sum_of_changes():
    """A client whose upload is lost keeps its c_k, but the server's sum of its changes stays."""
    made = method("scaffold")
    served = made.staged(
        server=Server(aggregator="median"),
        compression=Compression("topk:0.5"),
        faults=Faults(lost=0.5),
    )
    states, records = toys.train(served, made.problem, made.clients, 4)
    moved = 0
    for before, after, record in zip(states, states[1:], records, strict=False):
        each = []
        for state in (before, after):
            sums = client_notes(state, "combining")["control"]
            leaves = [np.reshape(leaf, (len(SIZES), -1)) for leaf in jax.tree.leaves(sums)]
            each.append(np.concatenate(leaves, axis=1))
        changed = (each[0] != each[1]).any(axis=1)
        assert changed.sum() <= len(SIZES) - int(record.metrics["failed_clients"])
        moved += changed.sum()
    assert 0 < moved < 4 * len(SIZES)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["multi_krum", "geometric_median"])
def test_no_attacker_moves_scaffolds_control_variate_far(rule):
    clients, problem, _, _ = method("scaffold")
    clients = of_equal_size(clients)._replace(attacker=np.arange(5) == 2)

    def largest(control):
        return max(np.abs(leaf).max() for leaf in jax.tree.leaves(control))

    def moved(rule):
        state, _ = played(scaffold_by_rule(rule), problem, clients)
        return largest(server_state(state).control_variate)

    assert moved("mean") > 10
    assert moved(rule) < 2


def test_colluders_change_what_is_sent_beside_the_model():
    """With inner-product manipulation of strength s by one of five, the mean change is (1 - p) m - p s m."""
    clients, problem, plain, _ = method("scaffold")
    clients = of_equal_size(clients)
    attacker = np.arange(5) == 0
    attack = Attack("ipm", attackers=0.2, strength=2.0)
    others = clients.train._replace(size=np.where(attacker, 0, clients.train.size))
    start = toys.start(plain, problem, clients)  # which has the sum of all n_k
    honest, _ = played(plain, problem, clients._replace(train=others), start)
    served = method("scaffold").staged(attack=attack)
    found, _ = played(served, problem, clients._replace(attacker=attacker))
    expected = jax.tree.map(
        lambda leaf: leaf / 0.8 * (0.8 - 0.2 * 2.0), honest.server.state.control_variate
    )
    toys.assert_trees_close(server_state(found).control_variate, expected, rtol=1e-4, atol=1e-6)


def with_class_means(algorithm):
    """The algorithm whose clients also send sums of their examples by class, and the classes' counts."""

    def client_update(context, models, row, data):
        out = algorithm.client_update(context, models, row, data)
        x = data.train.x[...]
        y = data.train.y[...]
        real = jnp.arange(len(y)) < data.train.size
        one_hot = jax.nn.one_hot(y, 3) * real[:, None]
        sums = {"means": (one_hot.T @ x)[None]}
        count = one_hot.sum(axis=0)[None]
        return out._replace(upload=out.upload._replace(sums=sums, count=count))

    def server_update(key, state, aggregate):
        upload = aggregate.upload
        sums = {"means": upload.sums["means"], "count": upload.count}
        alone = aggregate._replace(upload=upload._replace(sums={}, count=None))
        state, metrics = algorithm.server_update(key, state, alone)
        return state, metrics | sums

    return dataclasses.replace(algorithm, client_update=client_update, server_update=server_update)


def test_a_class_has_the_median_of_the_clients_that_have_it():
    """Times the number of its examples, as it is a sum; other clients' zeros do not count."""
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, OPTIMIZER)
    averaging = with_class_means(toys.make_algorithm("fedavg", problem))
    served = staged(problem, averaging, federation, server=Server(aggregator="median"))
    _, record = played(served, problem, federation.client_data)

    own = [
        (x[:n], y[:n])
        for x, y, n in zip(federation.train.x, federation.train.y, SIZES, strict=True)
    ]
    has = np.stack([np.bincount(y, minlength=3) for _, y in own])
    assert (has == 0).any() and (has > 0).any(axis=0).all()
    np.testing.assert_array_equal(record.metrics["count"][0], has.sum(axis=0))
    for c in range(3):
        means = [x[y == c].mean(axis=0) for x, y in own if c in y]
        expected = has[:, c].sum() * np.median(means, axis=0)
        np.testing.assert_allclose(record.metrics["means"][0, c], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_fedpacs_centroids_are_medians_of_the_clients_that_have_the_class():
    clients, problem, _, _ = method("fedpac")
    start = begun("fedpac")
    each = [method("fedpac").alone(k, start)[0] for k in range(len(SIZES))]
    served = method("fedpac").staged(server=Server(aggregator="median"))
    found, _ = played(served, problem, clients)
    of_client = np.stack([state.server.state.mean for state in each])
    has = np.stack(
        [np.bincount(y[:n], minlength=3) for y, n in zip(clients.train.y, SIZES, strict=True)]
    )
    centroids = server_state(found)
    for c in range(3):
        expected = np.median(of_client[has[:, c] > 0, c], axis=0)
        np.testing.assert_allclose(centroids.mean[c], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(centroids.count, has.sum(axis=0))
    bodies = medians([state.models for state in each])
    toys.assert_trees_close(found.models, bodies, rtol=1e-4, atol=1e-6)


def test_fedexp_takes_its_rate_from_the_median_of_squared_norms():
    """max(1, median |u_k|^2 / (2 (|median u_k|^2 + eps))), whatever attackers tell; other stages may be between."""
    clients, problem, _, _ = method("fedexp")
    start = begun("fedexp")

    def flat(state):
        return np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(state.models)])

    each = []
    for k in range(len(SIZES)):
        state, record = method("fedexp").alone(k, start)
        each.append((flat(state) - flat(start)) / float(record.metrics["server_rate"]))
    factor = np.array([1, -FLIP.strength, 1, 1, 1])
    sent = factor[:, None] * np.stack(each)
    median = np.median(sent, axis=0)
    squares = (sent**2).sum(axis=1)
    expected = max(1, np.median(squares) / (2 * ((median**2).sum() + 1e-3)))

    served = method("fedexp").staged(
        server=Server(aggregator="median"), attack=FLIP, faults=Faults(dropout=1e-9)
    )
    found, record = played(served, problem, clients._replace(attacker=factor < 0))
    np.testing.assert_allclose(record.metrics["server_rate"], expected, rtol=1e-4)
    np.testing.assert_allclose(flat(found) - flat(start), expected * median, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"compression": Compression("quantize:8")}, {"faults": Faults(dropout=0.3)}],
    ids=["compression", "faults"],
)
def test_rules_and_other_stages_together(settings):
    clients, problem, _, _ = method("mofedsam")
    served = method("mofedsam").staged(server=Server(aggregator="median"), **settings)
    states, records = toys.train(served, problem, clients, 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[-1].models))
    assert records[0].up > 0
