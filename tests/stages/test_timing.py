"""Simulated seconds of synchronous rounds: by hand, with deadlines, over-selection and clients that are not there."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.contract.errors import ArgumentError
from pfljax.local.clock import Clock
from pfljax.stages.asynchrony import on_clock
from pfljax.stages.faults import Faults
from pfljax.stages.server import Server

SIZES = (3, 5, 2, 4, 6)
STEPS = np.array([2, 3, 1, 2, 3])  # of two examples each
BYTES = 4 * (3 * 3 + 3)  # of a model
KNOBS = {"federico": {"neighbors": 2}}
COMPUTING = Clock(compute="constant:2", bandwidth="constant:1e9")
SENDING = Clock(compute="constant:1e-9", bandwidth="constant:8e-6")  # a byte a second


def played(name="fedavg", clock=COMPUTING, rounds=1, clients=None, state=None, stage=lambda p, a: a, **options):
    federation = toys.make_federation(SIZES)
    options = {"batch_size": 2, **options}
    problem = toys.make_problem(federation, optax.sgd(0.1), **options)._replace(clock=clock)
    algorithm = stage(problem, on_clock(problem, toys.make_algorithm(name, problem, **KNOBS.get(name, {}))))
    return toys.train(algorithm, problem, clients or federation.client_data, rounds, state=state)


def devices(tmp_path, seconds):
    """A file of devices that take these seconds for a mini-batch of two examples."""
    path = tmp_path / "devices.json"
    entries = [{"computation": 1000 * each / 3 / 2, "communication": 1e12} for each in seconds]
    path.write_text(json.dumps(entries))
    return str(path)


@pytest.mark.parametrize(("name", "gradients"), [("fedavg", 1), ("fedem", 3), ("ditto", 2), ("local", 1)])
def test_a_round_takes_as_long_as_its_slowest_client_computes(name, gradients):
    assert played(name)[1][0].seconds == pytest.approx(2 * gradients * STEPS.max(), rel=1e-5)


def test_a_round_takes_as_long_as_its_messages():
    """FedAvg moves a model down, and up with its weight; SCAFFOLD a second vector of the model's size both ways."""
    assert played("fedavg", SENDING)[1][0].seconds == pytest.approx(2 * BYTES + 4, rel=1e-5)
    record = played("scaffold", SENDING)[1][0]
    assert record.seconds == pytest.approx(float(record.down + record.up) / len(SIZES), rel=1e-5)
    assert record.down == 2 * BYTES * len(SIZES)
    assert played("local", SENDING)[1][0].seconds < 1e-6


def test_exchanges_of_a_round_are_waited_for_one_by_one(tmp_path):
    """FedeRiCo sends after each mini-batch: three gradients by each client that still has one, on unequal devices."""
    seconds = np.array([1.0, 2.0, 9.0, 3.0, 1.5])
    clock = Clock(devices=devices(tmp_path, seconds))
    expected = sum(3 * seconds[step < STEPS].max() for step in range(3))
    assert played("federico", clock)[1][0].seconds == pytest.approx(expected, rel=1e-4)


def test_compressed_messages_take_less_time():
    from pfljax.stages.compression import Compression

    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(0.1))._replace(clock=SENDING)
    algorithm = Compression("quantize:4").on(problem, toys.make_algorithm("fedavg", problem))
    record = toys.train(on_clock(problem, algorithm), problem, federation.client_data, 1)[1][0]
    # Twelve entries of four bits, a scale and a weight.
    assert record.seconds == pytest.approx(BYTES + 6 + 4 + 4, rel=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_after_the_deadline_nothing_arrives(name):
    """Clients with three steps are late: the server has what it has without them, and they keep what they learned."""
    clock = dataclasses.replace(COMPUTING, deadline={"fedavg": 5.0, "ditto": 9.0}[name])
    states, records = played(name, clock)
    assert records[0].seconds == clock.deadline
    federation = toys.make_federation(SIZES)
    train = federation.client_data.train
    rest = federation.client_data._replace(train=train._replace(size=np.where(STEPS == 3, 0, train.size)))
    expected = played(name, None, clients=rest, state=bare(states[0]))[0][-1]
    toys.assert_trees_close(states[1].models, expected.models, rtol=1e-5, atol=1e-6)
    whole = played(name, None, state=bare(states[0]))[0][-1]
    toys.assert_trees_close(states[1].clients.inner, whole.clients, rtol=1e-5, atol=1e-6)
    assert np.isfinite(records[0].train_loss) and records[0].train_loss > 0


def bare(state):
    """The state without the clock's notes."""
    return state._replace(server=state.server.inner, clients=state.clients.inner)


def test_the_first_of_those_asked_make_the_round(tmp_path):
    seconds = np.array([4.0, 1.0, 9.0, 3.0, 2.0])
    clock = Clock(devices=devices(tmp_path, seconds), over_selection=1.5)
    records = played("fedavg", clock, rounds=2, cohort=2)[1]  # five of five are asked
    fastest = np.sort(seconds * STEPS)[:2]
    assert [float(record.seconds) for record in records] == pytest.approx([fastest[1]] * 2, rel=1e-5)
    # With fewer asked, the round takes as long as some client that is not the slowest of three.
    some = dataclasses.replace(clock, over_selection=0.5)
    found = [float(record.seconds) for record in played("fedavg", some, rounds=12, cohort=2)[1]]
    assert all(np.isclose(each, np.sort(seconds * STEPS)[1:4], rtol=1e-5).any() for each in found)


def test_clients_that_are_not_there_are_left_alone(tmp_path):
    """Two of five are available, so of a cohort of three one does nothing."""
    path = tmp_path / "times.json"
    there = [0, 1, 0, 0, 1]
    entry = lambda on: {"active": [0.0], "inactive": [1e9 if on else -1.0], "finish_time": 1e9}
    path.write_text(json.dumps([entry(on) for on in there]))
    clock = dataclasses.replace(COMPUTING, availability=str(path))
    states, records = played("ditto", clock, rounds=4, cohort=3)
    moved = lambda a, b: np.array([not np.array_equal(x, y) for x, y in zip(a, b, strict=True)])
    kernels = [np.asarray(jax.tree.leaves(state.clients.inner)[0]) for state in states]
    assert moved(kernels[0], kernels[-1]).tolist() == [bool(on) for on in there]
    assert all(record.seconds == pytest.approx(2 * 2 * 3) for record in records)


def test_a_server_waits_until_somebody_is_there(tmp_path):
    """Everyone is available from second 130 on, so after three rounds of a minute in which nothing happens."""
    path = tmp_path / "times.json"
    path.write_text(json.dumps([{"active": [130.0], "inactive": [1e6], "finish_time": 1e6}]))
    states, records = played("fedavg", dataclasses.replace(COMPUTING, availability=str(path)), rounds=4)
    assert [float(record.seconds) for record in records] == pytest.approx([60, 60, 60, 6])
    same = [toys.same_trees(a.models, b.models) for a, b in itertools.pairwise(states)]
    assert same == [True, True, True, False]
    assert [bool(np.isnan(record.train_loss)) for record in records] == same
    assert [float(record.down + record.up) > 0 for record in records] == [False, False, False, True]


@pytest.mark.slow
def test_a_deadline_holds_for_all_exchanges_together(tmp_path):
    """FedeRiCo's clients wait for each other after each mini-batch: for 27 seconds, 9, and 4 of the last 6."""
    clock = Clock(devices=devices(tmp_path, [1.0, 2.0, 9.0, 3.0, 1.5]), deadline=40.0)
    assert played("federico", clock)[1][0].seconds == pytest.approx(40, rel=1e-4)
    whole = dataclasses.replace(clock, deadline=1000.0)
    assert played("federico", whole)[1][0].seconds == pytest.approx(27 + 9 + 6, rel=1e-4)


def test_what_is_lost_has_taken_its_time():
    """All uploads are lost, or all are not finite and dropped: the losses do not count, the time does."""
    for faults in (Faults(lost=0.999), Faults(broken=0.999)):
        record = played("fedavg", SENDING, stage=faults.on)[1][0]
        assert record.seconds == pytest.approx(2 * BYTES + 4, rel=1e-3) and np.isnan(record.train_loss)


def test_by_default_nothing_is_timed_and_nothing_changes():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation)
    method = toys.make_algorithm("fedavg", problem)
    assert on_clock(problem, method) is method
    assert played("fedavg", None)[1][0].seconds is None
    timed, plain = (played("fedavg", clock, rounds=2)[0][-1].models for clock in (Clock(), None))
    assert toys.same_trees(timed, plain)


def test_what_fails_takes_its_time():
    """Whoever fails before it trains has received its model, and sends nothing."""
    stage = lambda problem, algorithm: Faults(dropout=0.99).on(problem, algorithm)
    assert played("fedavg", SENDING, stage=stage)[1][0].seconds == pytest.approx(BYTES, rel=1e-3)


def test_what_means_nothing_is_refused():
    with pytest.raises(ArgumentError, match=r"^deadline=3: accepted for this method: inf; no client sends anything"):
        played("local", Clock(deadline=3))
    with pytest.raises(ArgumentError, match=r"^deadline=3: accepted for this method: inf; clients mix"):
        played("dfedem", Clock(deadline=3))
    with pytest.raises(ArgumentError, match=r"^availability=daily:0.5: accepted for this method: always"):
        played("dfedem", Clock(availability="daily:0.5"))
    with pytest.raises(ArgumentError, match=r"^sampler=weighted: accepted with a clock that chooses the clients"):
        played("fedavg", Clock(over_selection=0.5), cohort=2, stage=Server("weighted").of)
    with pytest.raises(ArgumentError, match=r"^over_selection=0.5: accepted with all clients in every round: 0"):
        played("fedavg", Clock(over_selection=0.5))
    with pytest.raises(ArgumentError, match=r"^concurrency=2: accepted for this method: 0; its server waits"):
        played("fedavg", Clock(concurrency=2))
