"""Asynchronous rounds: the events of a clock against a list of them in NumPy, and what methods make of them."""

import dataclasses
import heapq
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from quadratics import OPTIMIZER, RATE, descend, gradient, vectors
from staged import client_notes, rows, server_note, staged

from pfljax.contract.errors import ArgumentError
from pfljax.exchange.plan import make_plan
from pfljax.stages.asynchrony import AtWork, next_buffer
from pfljax.stages.devices import Clock

SIZES = (3, 5, 2, 4, 6, 3, 4)


def drawn(key, number, num, busy):
    """The client that begins next: the largest of uniform numbers among those that are free."""
    scores = np.asarray(jax.random.uniform(jax.random.fold_in(key, number), (num,)))
    return max((k for k in range(num) if k not in busy), key=lambda k: scores[k])


def events(keys, seconds, first, size, most):
    """Plays whole buffers with a queue of events: (ids, steps late, time) of each, and how many were discarded."""
    queue = [(seconds[k], place, k, 0) for place, k in enumerate(first)]
    now = 0.0
    buffers = []
    heapq.heapify(queue)
    for version, key in enumerate(keys):
        buffer = []
        draws = 0
        lost = 0
        while len(buffer) < size:
            now, place, client, began = heapq.heappop(queue)
            kept = version - began <= most
            if kept:
                buffer.append((client, version - began))
            lost += not kept
            busy = {client, *(each[2] for each in queue), *(k for k, _ in buffer)}
            new = drawn(key, draws, len(seconds), busy)
            draws += 1
            # The server takes its step before the next client begins.
            heapq.heappush(
                queue, (now + seconds[new], place, new, version + (len(buffer) == size and kept))
            )
        buffers.append((sorted(buffer), now, lost))
    return buffers


@pytest.mark.parametrize(("size", "at_once", "most"), [(3, 6, 50), (4, 8, 1), (2, 2, 0)])
def test_buffers_are_those_of_a_queue_of_events(size, at_once, most):
    rng = np.random.default_rng(size)
    num = 14
    seconds = np.exp(1.5 * rng.normal(size=num)).astype(np.float32)
    first = rng.permutation(num)[:at_once].astype(np.int32)
    keys = [jax.random.key(number) for number in range(12)]
    at_work = AtWork(
        jnp.array(first), jnp.array(seconds[first]), *[jnp.zeros(at_once, jnp.int32)] * 2
    )
    play = jax.jit(next_buffer, static_argnums=(3, 4))
    now = 0.0
    for key, (expected, time, lost) in zip(
        keys, events(keys, seconds, first, size, most), strict=True
    ):
        at_work, buffer = play(key, jnp.array(seconds), at_work, size, most)
        now += float(buffer.seconds)
        assert list(zip(buffer.ids.tolist(), buffer.late.tolist(), strict=True)) == expected
        assert now == pytest.approx(time, rel=1e-4) and int(buffer.discarded) == lost
        assert len({*at_work.client.tolist(), *buffer.ids.tolist()}) == at_once + size


@pytest.mark.long
def test_discarded_updates_are_counted():
    """Clients that take forever are late once a buffer without them was full."""
    seconds = jnp.array([1.0, 1.0, 1.0, 50.0])
    first = jnp.array([0, 3], jnp.int32)
    at_work = AtWork(first, seconds[first], *[jnp.zeros(2, jnp.int32)] * 2)
    discarded = 0
    for number in range(60):
        at_work, buffer = next_buffer(jax.random.key(number), seconds, at_work, 1, 2)
        assert buffer.ids[0] != 3 and buffer.late.max() <= 2
        discarded += int(buffer.discarded)
    assert discarded >= 1


def played(name, clock, rounds, cohort, task="regression", **hyperparameters):
    federation = toys.make_federation(SIZES, task)
    problem = toys.make_problem(federation, OPTIMIZER, cohort=cohort)._replace(clock=clock)
    algorithm = staged(problem, toys.make_algorithm(name, problem, **hyperparameters), federation)
    return federation, *toys.train(algorithm, problem, federation.client_data, rounds)


@pytest.mark.parametrize("name", ["fedbuff", pytest.param("fedasync", marks=pytest.mark.slow)])
def test_servers_apply_what_arrives_by_hand(name):
    """Each client trains the model of as many steps ago as it is late."""
    clock = Clock(compute="lognormal:1:1", concurrency=4)
    size = {"fedbuff": 2, "fedasync": 1}[name]
    hyperparameters = {
        "fedbuff": {"server_learning_rate": 0.7},
        "fedasync": {"alpha": 0.8, "mu": 0.0},
    }[name]
    federation, states, records = played(name, clock, 8, size, max_staleness=6, **hyperparameters)
    models = [vectors(states[0].models)[0]]
    latest = 0
    for state, after, record in zip(states, states[1:], records, strict=False):
        buffer = server_note(state, "clock").buffer
        pairs = list(zip(buffer.ids.tolist(), buffer.late.tolist(), strict=True))
        assert record.seconds == buffer.seconds and record.metrics["staleness"] == np.mean(
            buffer.late
        )
        latest = max(latest, *(late for _, late in pairs))
        total = sum(SIZES[k] for k, _ in pairs)
        step = np.zeros(4)
        for k, late in pairs:
            start = models[-1 - late]
            own = start - RATE * gradient(federation, k, start)
            toward = own - (start if name == "fedbuff" else models[-1])
            step += SIZES[k] / total * toward * (1 + late) ** -0.5
        models.append(models[-1] + {"fedbuff": 0.7, "fedasync": 0.8}[name] * step)
        np.testing.assert_allclose(vectors(after.models)[0], models[-1], rtol=1e-4, atol=1e-5)
    assert latest >= 2


def slow_devices(folder, slow, num=7):
    """A file of devices of which those numbered `slow` need 12 times as long as the others."""
    path = folder / "devices.json"
    entries = [
        {"computation": 12.0 if k in slow else 1.0, "communication": 1e12} for k in range(num)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


@pytest.mark.slow
def test_fedbuff_on_a_clock_hears_every_client_however_late(tmp_path):
    """FedBuff on a clock never hears 6 to 11 % of clients (max_staleness 5; the paper drops nobody).

    Each update is of the model that its client began with, in NumPy.
    """
    clock = Clock(devices=slow_devices(tmp_path, slow=(2, 5)), concurrency=5)
    federation, states, records = played("fedbuff", clock, 30, 2, server_learning_rate=0.7)
    models = [vectors(states[0].models)[0]]
    heard = set()
    latest = 0
    for state, after, record in zip(states, states[1:], records, strict=False):
        buffer = server_note(state, "clock").buffer
        pairs = list(zip(buffer.ids.tolist(), buffer.late.tolist(), strict=True))
        total = sum(SIZES[k] for k, _ in pairs)
        step = np.zeros(4)
        for k, late in pairs:
            start = models[-1 - late]
            step -= SIZES[k] / total * RATE * gradient(federation, k, start) * (1 + late) ** -0.5
        models.append(models[-1] + 0.7 * step)
        np.testing.assert_allclose(vectors(after.models)[0], models[-1], rtol=2e-4, atol=2e-5)
        assert record.metrics["discarded_updates"] == 0
        heard |= {k for k, _ in pairs}
        latest = max(latest, *(late for _, late in pairs))
    assert heard == {*range(7)} and latest > 5


@pytest.mark.slow
def test_with_max_staleness_5_the_slowest_are_never_heard(tmp_path):
    clock = Clock(devices=slow_devices(tmp_path, slow=(2, 5)), concurrency=5)
    _, states, records = played("fedbuff", clock, 30, 2, max_staleness=5)
    heard = {k for state in states for k in server_note(state, "clock").buffer.ids.tolist()}
    assert (
        not heard & {2, 5}
        and sum(int(record.metrics["discarded_updates"]) for record in records) > 0
    )


@pytest.mark.slow
def test_slow_clients_are_late_more_often_and_send_less_often(tmp_path):
    path = tmp_path / "devices.json"
    entries = [{"computation": 1.0 if k < 4 else 8.0, "communication": 1e12} for k in range(7)]
    path.write_text(json.dumps(entries))
    _, states, _ = played(
        "fedbuff", Clock(devices=str(path), concurrency=5), 60, 2, max_staleness=40
    )
    buffers = [server_note(state, "clock").buffer for state in states]
    ids, late = (
        np.concatenate([getattr(each, part) for each in buffers]) for part in ("ids", "late")
    )
    assert late[ids >= 4].mean() > 2 * late[ids < 4].mean()
    assert (ids < 4).mean() > 0.7


def test_turns_end_in_the_order_of_the_clock_but_no_client_ends_two_in_a_round(tmp_path):
    """Turns of 1, 4.5, 5 and 7.3 seconds, up to two a round: the fast client's, until another can end one.

    A turn has two exchanges, with two steps in each.
    """
    path = tmp_path / "devices.json"
    times = (1, 4.5, 5, 7.3)
    path.write_text(
        json.dumps([{"computation": 1000 * s / 3 / 4 / 2, "communication": 1e12} for s in times])
    )
    federation = toys.make_federation((4, 4, 4, 4), "regression")
    problem = toys.make_problem(federation, OPTIMIZER, epochs=2)._replace(
        clock=Clock(devices=str(path), turns=2)
    )
    local = dataclasses.replace(toys.make_algorithm("local", problem), exchanges=2)
    states, records = toys.train(
        staged(problem, local, federation), problem, federation.client_data, 7
    )

    # Client 0 ends turns at 1, 2, 3 and so on. By 4.5, 5 and 7.3 a second client ends one.
    expected = [[0], [0], [0], [0, 1], [0, 2], [0], [0, 3]]
    ends = [
        np.flatnonzero(np.asarray(client_notes(state, "clock"))).tolist() for state in states[:-1]
    ]
    assert ends == expected
    models = [vectors(state.models) for state in states]
    assert [
        np.flatnonzero((a != b).any(axis=1)).tolist() for a, b in itertools.pairwise(models)
    ] == expected
    seconds = np.cumsum([float(record.seconds) for record in records])
    np.testing.assert_allclose(seconds, [1, 2, 3, 4.5, 5, 6, 7.3], rtol=1e-5)
    # Each takes its steps from its own model, in all exchanges of the round in which its turn ends.
    np.testing.assert_allclose(
        models[4][1], descend(federation, 1, models[0][1], 4), rtol=1e-5, atol=1e-6
    )


@pytest.mark.long
@pytest.mark.parametrize("update", ["delta", "gradient"])
def test_federico_at_its_own_pace_reads_models_as_they_are(update):
    """Those whose turn does not end keep their rows; where all turns end at once, it is the synchronous method."""
    federation = toys.make_federation(SIZES)

    def play(clock):
        timed = staged(problem._replace(clock=clock), algorithm, federation)
        return toys.train(timed, problem, federation.client_data, 3)

    problem = toys.make_problem(federation, batch_size=3)
    algorithm = toys.make_algorithm("federico", problem, neighbors=2, update=update)
    equal = Clock(compute="constant:1", bandwidth="constant:1e9", turns=len(SIZES))
    whole = play(equal)
    plain = play(None)
    toys.assert_trees_close(whole[0][1].models, plain[0][1].models, rtol=1e-5, atol=1e-6)
    states, records = play(Clock(turns=2))
    for before, after in itertools.pairwise(states):
        rounds = np.asarray(rows(after).rounds) - np.asarray(rows(before).rounds)
        assert rounds.tolist() == np.asarray(client_notes(before, "clock")).astype(
            int
        ).tolist() and rounds.sum() in (1, 2)
    assert all(record.seconds > 0 for record in records)
    # Only clients whose turn ends receive anything.
    if update == "delta":
        awake = [float(np.asarray(client_notes(state, "clock")).sum()) for state in states[:-1]]
        assert [float(record.down) for record in records] == [
            n / 7 * float(plain[1][0].down) for n in awake
        ]


def test_what_means_nothing_is_refused():
    with pytest.raises(
        ArgumentError,
        match=r"^concurrency=6: accepted for this method: 1 to 5, the 7 clients without",
    ):
        played("fedbuff", Clock(concurrency=6), 1, 2)
    with pytest.raises(
        ArgumentError, match=r"^participation=1: accepted for this method with a clock: below 1"
    ):
        played("fedbuff", Clock(), 1, 7)
    with pytest.raises(
        ArgumentError, match=r"^deadline=3: accepted with this method, whose server waits"
    ):
        played("fedasync", Clock(deadline=3), 1, 1)
    with pytest.raises(
        ArgumentError, match=r"^turns=2: accepted for this method: 0; a server has its models"
    ):
        played("fedavg", Clock(turns=2), 1, 7)
    with pytest.raises(ArgumentError, match=r"^turns=2: accepted with participation below 1: 0"):
        played("local", Clock(turns=2), 1, 3)
    with pytest.raises(ArgumentError, match=r"^turns=9: accepted: 0 to 7"):
        played("local", Clock(turns=9), 1, 7)
    with pytest.raises(ArgumentError, match=r"^over_selection=0.5: accepted with turns: 0"):
        played("local", dataclasses.replace(Clock(turns=2), over_selection=0.5), 1, 7)


@pytest.mark.parametrize(
    ("name", "clock"),
    [
        pytest.param("fedbuff", Clock(concurrency=3), marks=pytest.mark.slow),
        pytest.param("federico", Clock(turns=2), marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(name, clock, tmp_path):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, cohort=2 if name == "fedbuff" else 7)._replace(
        clock=clock
    )
    hyperparameters = {"neighbors": 2} if name == "federico" else {}

    def experiment():
        return toys.make_experiment(name, problem, federation, hyperparameters=hyperparameters)

    whole = toys.run(experiment(), 6)
    toys.run(experiment(), 3, out=tmp_path / "run")
    resumed = toys.run(experiment(), 6, out=tmp_path / "run", resume=True)
    assert toys.same_trees(resumed.whole_state(), whole.whole_state())
    assert (
        resumed.history.rows[-1]["simulated_seconds"]
        == whole.history.rows[-1]["simulated_seconds"]
        > 0
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedbuff", "federico"])
def test_asynchronous_runs_are_the_same_under_every_plan(name):
    federation = toys.make_federation(SIZES)
    clock = {"fedbuff": Clock(concurrency=3), "federico": Clock(turns=2)}[name]
    problem = toys.make_problem(federation, cohort=2 if name == "fedbuff" else 7)._replace(
        clock=clock
    )
    hyperparameters = {"neighbors": 2} if name == "federico" else {}
    plans = [
        make_plan("map", devices=1),
        make_plan("vmap", devices=2),
        make_plan("chunk", 3, devices=1),
    ]
    runs = [
        toys.run(
            toys.make_experiment(
                name, problem, federation, hyperparameters=hyperparameters, plan=plan
            ),
            5,
        )
        for plan in plans
    ]
    for other in runs[1:]:
        toys.assert_trees_close(
            other.whole_state().models, runs[0].whole_state().models, rtol=1e-4, atol=1e-5
        )
        assert other.history.simulated == pytest.approx(runs[0].history.simulated, rel=1e-5)
