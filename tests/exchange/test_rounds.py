"""A round: sampling, exchange and traffic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_methods import PARAMETERS, data_of, make, neighbors, step_to_mean

from pfljax.contract.types import ClientOutput, ClientReport, Upload
from pfljax.exchange.lifting import init
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import cohort_of, draw_cohort, make_round, participations, sample_cohort

SIZES = (2, 1, 3, 1, 2)
# bytes of a model
K = len(SIZES)
MODEL = 4 * PARAMETERS
KEY = jax.random.key(3)


def play(algorithm, cohort=3, *, number=0, devices=1):
    """(state before a round, state after it, its record)."""
    clients = data_of(SIZES)
    plan = make_plan("map", devices=devices)
    state = init(algorithm, plan, KEY, clients)
    one_round = jax.jit(make_round(algorithm, plan, cohort))
    return state, *one_round(KEY, np.int32(number), state, clients)


def traffic(algorithm, **options):
    record = play(algorithm, **options)[2]
    return float(record.down), float(record.up)


@pytest.mark.parametrize(("num", "size"), [(40, 20), (40, 30)])
def test_both_ways_to_draw_a_cohort_are_uniform(num, size):
    assert (size**2 > 16 * num) == (size == 30)  # by Floyd's algorithm, and by a permutation
    draw = jax.jit(jax.vmap(lambda key: draw_cohort(key, num, size).ids))
    ids = np.asarray(draw(jax.random.split(jax.random.key(1), 3000)))
    assert ids.min() == 0 and ids.max() == num - 1 and (np.diff(ids, axis=1) > 0).all()
    counts = np.bincount(ids.ravel(), minlength=num)
    expected = 3000 * size / num
    variance = expected * (1 - size / num)
    # chi-square, 39 degrees: beyond the 99.9 % point
    assert ((counts - expected) ** 2 / variance).sum() < 75
    both = ((ids == 0).any(axis=1) & (ids == 39).any(axis=1)).mean()
    assert abs(both - size * (size - 1) / (num * (num - 1))) < 0.04  # pairs, too: 4 standard errors


def test_cohorts_are_uniform_without_replacement():

    @jax.jit
    @jax.vmap
    def draw(key):
        cohort = draw_cohort(key, 7, 3)
        return cohort.ids, cohort.position(jnp.arange(7))

    ids, place = map(np.asarray, draw(jax.random.split(jax.random.key(0), 3000)))
    assert (np.diff(ids, axis=1) > 0).all()
    counts = np.bincount(ids.ravel(), minlength=7)
    expected = 3000 * 3 / 7
    # chi-square, 6 degrees: far beyond the 99.9 % point
    assert ((counts - expected) ** 2 / expected).sum() < 30
    assert ((place >= 0).sum(axis=1) == 3).all()
    np.testing.assert_array_equal(
        np.take_along_axis(place, ids, axis=1), np.broadcast_to(np.arange(3), ids.shape)
    )
    assert draw_cohort(jax.random.key(0), 7, 7).position(jnp.array(5)) == 5


def test_participations_count_the_uniform_cohorts():
    draw = jax.jit(lambda number: cohort_of(KEY, number, 6, 2).ids)
    cohorts = np.concatenate([draw(number) for number in range(5)])
    found = jax.jit(lambda: participations(KEY, 6, 2, 5))()
    np.testing.assert_array_equal(found, np.bincount(cohorts, minlength=6))


def test_without_sampling_of_its_own_a_method_gets_the_uniform_cohort():
    before, after, _ = play(make(step_to_mean), number=4)
    taken = np.flatnonzero(np.asarray(after.rows != before.rows))
    np.testing.assert_array_equal(taken, cohort_of(KEY, 4, K, 3).ids)


@pytest.mark.parametrize("topology", ["shared", "own"])
def test_a_method_chooses_the_cohort_by_its_state_and_data(topology):
    """The clients with the most examples among those that have taken part least often."""

    def sample(key, state, clients):
        seen.append(state.round)
        return jnp.argsort(10 * state.rows - clients.train.size)[:2]  # in no order

    seen = []
    clients = data_of(SIZES)
    plan = make_plan("map", devices=1)
    algorithm = make(step_to_mean, topology=topology, sample=sample)
    one_round = jax.jit(make_round(algorithm, plan, 2))
    first = state = init(algorithm, plan, KEY, clients)
    counts = []
    models = []
    for number in range(2):
        state, _ = one_round(KEY, np.int32(number), state, clients)
        counts.append(state.rows.tolist())
        models.append(np.asarray(state.models["w"]))
    assert counts == [[1, 0, 1, 0, 0], [1, 1, 1, 0, 1]]
    assert len(seen) == 1
    first = np.asarray(first.models["w"])
    means = clients.train.x.sum(axis=1) / np.array(SIZES)[:, None]

    def half(k, start):
        return (start + means[k]) / 2

    expected = first.copy()
    if topology == "own":
        expected[[0, 2]] = [half(k, first[k]) for k in (0, 2)]
    else:
        expected[0] = (half(0, first[0]) + half(2, first[0])) / 2
    np.testing.assert_allclose(models[0], expected, rtol=1e-5)


def test_a_chosen_cohort_may_be_all_clients():
    everyone = make(
        step_to_mean, topology="own", sample=lambda key, state, clients: jnp.arange(K)[::-1]
    )
    chosen = play(everyone, cohort=K)
    uniform = play(make(step_to_mean, topology="own"), cohort=K)
    jax.tree.map(np.testing.assert_array_equal, chosen[1], uniform[1])


def test_a_chosen_cohort_has_the_size_and_a_key_of_its_own():
    keys = []
    clients = data_of(SIZES)

    def sample(key, state, clients):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return jnp.arange(3)

    algorithm = make(sample=sample)
    state = init(algorithm, make_plan("map", devices=1), KEY, clients)
    cohorts = [sample_cohort(algorithm, KEY, number, state, clients, 3) for number in (0, 1)]
    assert cohorts[0].ids.tolist() == [0, 1, 2] and cohorts[0].ids.dtype == jnp.int32

    def fold(purpose):
        return jax.random.fold_in(jax.random.fold_in(KEY, purpose), 0)

    assert (
        len({*keys, *(tuple(jax.random.key_data(fold(purpose)).tolist()) for purpose in range(4))})
        == 6
    )
    with pytest.raises(ValueError, match=r"sample: returned ids of shape \(3,\); accepted: \(2,\)"):
        sample_cohort(algorithm, KEY, 0, state, clients, 2)


def test_peers_models_travel_except_to_their_owners():
    peers = make(step_to_mean, topology="peers", download=neighbors(2))
    assert traffic(peers, cohort=4, devices=2) == (4 * 2 * MODEL, 4 * 2 * MODEL)

    def train_own(context, models, row, data):
        output = step_to_mean(context, models, row, data)
        return output._replace(sent=jnp.arange(3) == 0)

    assert traffic(dataclasses.replace(peers, client_update=train_own)) == (3 * 2 * MODEL, 0)
    lifted = dataclasses.replace(peers, client_update=train_own, via_server=True)
    assert traffic(lifted) == (3 * 2 * MODEL, 3 * MODEL)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_push_sends_one_upload_to_all_receivers(devices):
    """Client k keeps half of its model and gives the other half to the next client."""

    def push(context, models, row, data):
        upload = jax.tree.map(lambda leaf: leaf[0], models)
        return ClientOutput(
            row, Upload(upload), ClientReport(jnp.zeros(())), mixing_weights=jnp.full((2,), 0.5)
        )

    before, after, record = play(
        make(push, topology="push", download=neighbors(1)), cohort=K, devices=devices
    )
    models = np.asarray(before.models["w"])
    np.testing.assert_allclose(
        after.models["w"], (models + np.roll(models, 1, axis=0)) / 2, rtol=1e-6
    )
    assert (float(record.down), float(record.up)) == (K * MODEL, K * MODEL)


def ships_model(context, models, row, data):
    output = step_to_mean(context, models, row, data)
    entries = {"model": output.upload.update, "examples": data.train.size}
    return ClientOutput(row, Upload(), output.report._replace(entries=entries))


def reads_weights(context, models, row, data):
    loss = context.server["weights"].sum() + context.server["rate"]
    return ClientOutput(row, Upload(), ClientReport(loss))


SERVER = {"weights": jnp.ones((K,)), "rate": jnp.ones(()), "gram": jnp.ones((K, 50))}


TRAFFIC = {  # a method, and its bytes down and up in a round of three clients
    "shared models, each way": (make(step_to_mean, num_models=2), 3 * 2 * MODEL, 3 * 2 * MODEL),
    "own models stay": (make(step_to_mean, topology="own", via_server=True), 0, 0),
    "a model in a report": (make(ships_model, topology="own"), 0, 3 * MODEL),
    "what clients read of the server, but for scalars": (
        make(reads_weights, server=SERVER),
        3 * (MODEL + 4 * K),
        0,
    ),
    "what no client reads of the server": (make(server=SERVER), 3 * MODEL, 0),
}


@pytest.mark.parametrize("what", TRAFFIC)
def test_traffic_is_what_is_exchanged(what):
    method, down, up = TRAFFIC[what]
    assert traffic(method) == (down, up)


def test_what_clients_pass_on_of_the_server_is_charged():
    def passed_on(context, models, row, data):
        report = ClientReport(jnp.zeros(()), entries={"weights": context.server["weights"]})
        return ClientOutput(row, Upload(), report)

    assert traffic(make(passed_on, topology="own", server=SERVER)) == (3 * 4 * K, 3 * 4 * K)


def test_a_method_may_send_fewer_bytes_than_the_engine_counts():
    def both(context, models, row, data):
        output = ships_model(context, models, row, data)
        report = output.report._replace(loss=context.server["weights"].sum())
        return output._replace(upload=Upload(models), report=report)

    def halve(counted):
        parts = {
            part: getattr(counted, part) / 2 for part in ("model", "upload", "report", "server")
        }
        return counted._replace(**parts)

    halved = make(both, server=SERVER, traffic=halve)
    assert traffic(halved) == (3 * (MODEL + 4 * K) / 2, 3 * (MODEL + MODEL) / 2)
    one_bit = make(
        both, server=SERVER, traffic=lambda counted: counted._replace(upload=counted.upload / 32)
    )
    assert traffic(one_bit) == (3 * (MODEL + 4 * K), 3 * (MODEL + MODEL / 32))


def test_in_later_exchanges_only_those_that_send_are_charged():
    """Each client sends in as many exchanges as it has examples, so 5, then 3, then 1 clients send."""

    def work(context, models, row, data):
        sent = jnp.broadcast_to(context.step < data.train.size, (1,))
        report = ships_model(context, models, row, data).report
        report = report._replace(entries=report.entries | {"rate": context.server["weights"].sum()})
        return ClientOutput(row, Upload(models), report, sent=sent)

    down, up = traffic(make(work, server=SERVER, exchanges=3), cohort=K)
    assert (down, up) == ((5 + 3 + 1) * (MODEL + 4 * K), (5 + 3 + 1) * (MODEL + MODEL))


def test_a_method_knows_a_later_exchange_when_it_is_traced():
    """So a program of later exchanges needs nothing that only the first one does."""

    def work(context, models, row, data):
        right = context.step > 0 if context.later else context.step == 0
        report = ships_model(context, models, row, data).report
        return ClientOutput(row, Upload(models), report, sent=jnp.broadcast_to(right, (1,)))

    assert traffic(make(work, exchanges=3), cohort=K)[1] == 3 * K * (MODEL + MODEL)


def test_an_update_is_added_up_with_its_weight_and_sent_where_that_is_positive():
    """What is added up beside it, and its count, are as the client made them."""
    sizes = np.array([3, 0, 5], np.int32)

    def work(context, models, row, data):
        weight = jnp.float32(data.train.size)[None]
        update = jax.tree.map(lambda leaf: jnp.ones_like(leaf) * (context.client + 1), models)
        sums = {"clients": jnp.float32(context.client)[None]}
        return ClientOutput(
            row, Upload(update, weight, sums, count=2 * weight), ClientReport(jnp.zeros(()))
        )

    def server_update(key, state, aggregate):
        return state.with_server(aggregate), {}

    server = jax.tree.map(jnp.zeros_like, received(work, server_update, sizes, server=()))
    aggregate = received(work, server_update, sizes, server=server)
    np.testing.assert_allclose(
        aggregate.upload.update["w"], np.full((1, PARAMETERS), 3 * 1 + 5 * 3)
    )
    assert aggregate.upload.weight.tolist() == [8] and aggregate.upload.count.tolist() == [16]
    assert aggregate.upload.sums["clients"].tolist() == [2]
    assert aggregate.num_sent.tolist() == [2] and aggregate.sent[:, 0].tolist() == [
        True,
        False,
        True,
    ]


def received(work, server_update, sizes, server):
    """What the server gets in a round."""
    clients = data_of(sizes)
    plan = make_plan("map", devices=1)
    algorithm = make(work, server=server, server_update=server_update)
    state = init(algorithm, plan, KEY, clients)
    return make_round(algorithm, plan, len(sizes))(KEY, np.int32(0), state, clients)[0].server.state
