"""Simulated seconds of synchronous rounds: by hand, with deadlines, over-selection and clients that are not there."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest
import quadratics
import toys
from networks import OPTIMIZER
from staged import rows, server_note, staged

from pfljax.contract.errors import ArgumentError
from pfljax.stages.compression import Compression
from pfljax.stages.devices import Clock
from pfljax.stages.faults import Faults
from pfljax.stages.server import Server

SIZES = (3, 5, 2, 4, 6)
STEPS = np.array([2, 3, 1, 2, 3])  # of two examples each
BYTES = 4 * (3 * 3 + 3)  # of a model
HYPERPARAMETERS = {"federico": {"neighbors": 2}}
FEDERATION = toys.make_federation(SIZES)
CLIENTS = FEDERATION.client_data
COMPUTING = Clock(compute="constant:2", bandwidth="constant:1e9")
SENDING = Clock(compute="constant:1e-9", bandwidth="constant:8e-6")  # a byte a second
BOTH = Clock(compute="constant:2", bandwidth="constant:8e-6")


@functools.cache
def timed(name, clock, cohort=0, **settings):
    """(problem, algorithm) on a clock, with further stages."""
    problem = toys.make_problem(FEDERATION, OPTIMIZER, batch_size=2, cohort=cohort)
    problem = problem._replace(clock=clock)
    method = toys.make_algorithm(name, problem, **HYPERPARAMETERS.get(name, {}))
    return problem, staged(problem, method, FEDERATION, **settings)


def played(name, clock, rounds=1, clients=CLIENTS, **settings):
    """All states, and the records of rounds on a clock."""
    problem, algorithm = timed(name, clock, **settings)
    return toys.train(algorithm, problem, clients, rounds)


def with_sizes(sizes):
    """The clients with other numbers of examples."""
    return CLIENTS._replace(train=CLIENTS.train._replace(size=np.asarray(sizes, np.int32)))


def devices(tmp_path, seconds):
    """A file of devices that take these seconds for a mini-batch of two examples."""
    path = tmp_path / "devices.json"
    entries = [{"computation": 1000 * each / 3 / 2, "communication": 1e12} for each in seconds]
    path.write_text(json.dumps(entries))
    return str(path)


@pytest.mark.parametrize(
    ("name", "gradients", "down", "up"),
    [
        ("fedavg", 1, BYTES, BYTES + 4),
        ("scaffold", 1, 2 * BYTES, 2 * BYTES + 4),  # a control variate, too
        ("fedem", 3, 3 * BYTES, 3 * (BYTES + 4)),  # a gradient in each of its models
        ("local", 1, 0, 0),
    ],
)
def test_a_round_takes_as_long_as_its_slowest_client(name, gradients, down, up):
    """Steps of two seconds, and messages of a byte a second."""
    record = played(name, BOTH)[1][0]
    assert record.seconds == pytest.approx(2 * gradients * STEPS.max() + down + up, rel=1e-5)
    assert (record.down, record.up) == (len(SIZES) * down, len(SIZES) * up)


def test_without_a_clock_nothing_is_timed():
    states, records = played("fedavg", None)
    assert records[0].seconds is None and not states[-1].server.state.notes


def test_a_clock_goes_on_from_round_to_round():
    states, records = played("fedavg", BOTH, rounds=2)
    assert [float(record.seconds) for record in records] == pytest.approx([6 + 2 * BYTES + 4] * 2)
    assert server_note(states[-1], "clock").total == pytest.approx(2 * (6 + 2 * BYTES + 4))


@pytest.mark.slow
def test_exchanges_of_a_round_are_waited_for_one_by_one(tmp_path):
    """FedeRiCo sends after each mini-batch: three gradients by each client that still has one, on unequal devices."""
    seconds = np.array([1.0, 2.0, 9.0, 3.0, 1.5])
    clock = Clock(devices=devices(tmp_path, seconds))
    expected = sum(3 * seconds[step < STEPS].max() for step in range(3))
    assert played("federico", clock)[1][0].seconds == pytest.approx(expected, rel=1e-4)


def test_after_the_deadline_nothing_arrives(tmp_path):
    """Two of Ditto's clients are late: the server has what it has without them, and they keep what they learned."""
    federation = toys.make_federation(SIZES, "regression")
    per_example = 1000 / 3  # milliseconds of inference of an example whose gradient takes a second
    path = tmp_path / "devices.json"
    path.write_text(json.dumps([{"computation": per_example, "communication": 1e12}]))
    clock = Clock(devices=str(path), deadline=9.0)
    problem = toys.make_problem(federation, quadratics.OPTIMIZER)._replace(clock=clock)
    algorithm = staged(problem, toys.make_algorithm("ditto", problem, mu=0.5), federation)
    clients = federation.client_data
    states, records = toys.train(algorithm, problem, clients, 1)
    assert records[0].seconds == clock.deadline  # clients 1 and 4 need 10 and 12 seconds

    theta = quadratics.vectors(states[0].models)[0]
    before, after = (quadratics.vectors(rows(state).params) for state in states)
    in_time = [0, 2, 3]
    trained = [quadratics.descend(federation, k, theta, 1) for k in in_time]
    expected = np.average(trained, axis=0, weights=np.array(SIZES)[in_time])
    np.testing.assert_allclose(
        quadratics.vectors(states[1].models)[0], expected, rtol=1e-5, atol=1e-6
    )
    own = [quadratics.descend(federation, k, v, 1, 0.5 * (v - theta)) for k, v in enumerate(before)]
    np.testing.assert_allclose(after, own, rtol=1e-5, atol=1e-6)
    assert np.isfinite(records[0].train_loss) and records[0].train_loss > 0
    # Without an upload there is no traffic.
    assert (records[0].down, records[0].up) == (5 * 16, 3 * (16 + 4))

    # With fewer examples nobody is late, and the round ends before the deadline.
    few = clients._replace(train=clients.train._replace(size=np.full(5, 2, np.int32)))
    assert toys.train(algorithm, problem, few, 1)[1][0].seconds == pytest.approx(2 * 2, rel=1e-5)


def test_the_first_of_those_asked_make_the_round(tmp_path):
    """Three of five are asked, and the two fastest of them are the cohort."""
    seconds = np.array([4.0, 1.0, 9.0, 3.0, 2.0]) * STEPS
    clock = Clock(devices=devices(tmp_path, seconds / STEPS), over_selection=0.5)
    problem, algorithm = timed("fedavg", clock, cohort=2)
    state = toys.start(algorithm, problem, CLIENTS)
    draw = jax.jit(algorithm.sample)
    cohorts = set()
    for number in range(8):
        key = jax.random.key(number)
        asked = np.argsort(np.asarray(jax.random.uniform(key, (5,))))[-3:]
        expected = np.sort(asked[np.argsort(seconds[asked])][:2])
        found = np.asarray(draw(key, state, CLIENTS))
        np.testing.assert_array_equal(found, expected)
        cohorts.add(tuple(found))
    assert len(cohorts) > 1


def test_a_server_waits_until_somebody_is_there_and_leaves_the_others_alone(tmp_path):
    """Two of five are available from second 130 on, so after three rounds of a minute in which nothing happens."""
    path = tmp_path / "times.json"
    there = [0, 1, 0, 0, 1]
    times = {True: ([130.0], [1e6]), False: ([0.0], [-1.0])}
    entries = []
    for on in there:
        active, inactive = times[bool(on)]
        entries.append({"active": active, "inactive": inactive, "finish_time": 1e6})
    path.write_text(json.dumps(entries))
    clock = dataclasses.replace(COMPUTING, availability=str(path))
    states, records = played("ditto", clock, rounds=6, cohort=3)

    assert [float(record.seconds) for record in records] == pytest.approx(
        3 * [60] + 3 * [2 * 2 * 3]
    )
    same = [toys.same_trees(a.models, b.models) for a, b in itertools.pairwise(states)]
    assert same == 3 * [True] + 3 * [False]
    assert [bool(np.isnan(record.train_loss)) for record in records] == same
    # Of a cohort of three, two receive and send.
    moved = [float(record.down + record.up) for record in records]
    assert moved == 3 * [0] + 3 * [2 * (2 * BYTES + 4)]
    kept = [np.asarray(jax.tree.leaves(rows(state))[0]) for state in states]
    changed = [not np.array_equal(a, b) for a, b in zip(kept[3], kept[4], strict=True)]
    assert changed == [bool(on) for on in there]


@pytest.mark.slow
def test_a_deadline_holds_for_all_exchanges_together(tmp_path):
    """FedeRiCo's clients wait for each other after each mini-batch: for 27 seconds, 9, and 4 of the last 6."""
    clock = Clock(devices=devices(tmp_path, [1.0, 2.0, 9.0, 3.0, 1.5]), deadline=40.0)
    assert played("federico", clock)[1][0].seconds == pytest.approx(40, rel=1e-4)


def test_what_is_lost_has_taken_its_time():
    """All uploads are lost, or not finite and dropped: no loss counts, the time of each client does.

    They are compressed: twelve entries of four bits, a scale and a weight.
    """
    settings = {"compression": Compression("quantize:4"), "faults": Faults(lost=0.5, broken=0.9999)}
    for k in range(len(SIZES)):
        only = with_sizes(np.where(np.arange(5) == k, SIZES, 0))
        record = played("fedavg", SENDING, clients=only, **settings)[1][0]
        assert record.seconds == pytest.approx(BYTES + 6 + 4 + 4, rel=1e-3) and np.isnan(
            record.train_loss
        )
        assert 0 < record.metrics["failed_clients"] < 5 and record.metrics["dropped_clients"] > 0


@pytest.mark.parametrize("faults", [Faults(lost=0.5), Faults(broken=0.5)], ids=["lost", "broken"])
def test_the_clock_s_total_is_the_sum_of_the_rounds(faults):
    """Also of rounds whose slowest upload is lost, or dropped."""
    clock = dataclasses.replace(SENDING, bandwidth="lognormal:8e-6:1", deadline=1e6)
    states, records = played("fedavg", clock, rounds=4, faults=faults)
    total = sum(float(record.seconds) for record in records)
    assert float(server_note(states[-1], "clock").total) == pytest.approx(total, rel=1e-5)
    assert sum(int(record.metrics["failed_clients"]) for record in records) > 0 or faults.broken


def test_what_fails_takes_its_time():
    """Whoever fails before it trains has received its model, and sends nothing."""
    record = played("fedavg", SENDING, faults=Faults(dropout=0.9999))[1][0]
    assert record.seconds == pytest.approx(BYTES, rel=1e-3)


def test_what_means_nothing_is_refused():
    with pytest.raises(
        ArgumentError, match=r"^deadline=3: accepted for this method: inf; no client sends anything"
    ):
        timed("local", Clock(deadline=3))
    with pytest.raises(
        ArgumentError, match=r"^deadline=3: accepted for this method: inf; clients mix"
    ):
        timed("dfedem", Clock(deadline=3))
    with pytest.raises(
        ArgumentError, match=r"^availability=daily:0.5: accepted for this method: always"
    ):
        timed("dfedem", Clock(availability="daily:0.5"))
    with pytest.raises(
        ArgumentError, match=r"^sampler=weighted: accepted with a clock that chooses the clients"
    ):
        timed("fedavg", Clock(over_selection=0.5), cohort=2, server=Server("weighted"))
    with pytest.raises(
        ArgumentError, match=r"^over_selection=0.5: accepted with all clients in every round: 0"
    ):
        timed("fedavg", Clock(over_selection=0.5))
    with pytest.raises(
        ArgumentError, match=r"^concurrency=2: accepted for this method: 0; its server waits"
    ):
        timed("fedavg", Clock(concurrency=2))
