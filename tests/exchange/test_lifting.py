"""A method's functions of one client, mapped over clients: what each begins with, receives and predicts with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_methods import PARAMETERS, data_of, make, neighbors, step_to_mean

from pfljax.contract.types import (
    Cohort,
    EngineFields,
    First,
    MethodReport,
    Mixture,
    Prediction,
    Start,
    State,
)
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_plan

SIZES = (2, 1, 3, 1, 2, 4, 5, 1)
K = len(SIZES)
KEY = jax.random.key(7)
ROUND = 6
SLOW = pytest.mark.slow
LONG = pytest.mark.long
PLANS = pytest.mark.parametrize(
    "plan",
    [
        ("chunk", 3, 4),
        pytest.param(("vmap", 0, 2), marks=SLOW),
        pytest.param(("map", 0, 1), marks=LONG),
    ],
)
KEYS = np.array([jax.random.key_data(jax.random.fold_in(KEY, k)) for k in range(K)])


def state_of(topology, num_models=3):
    """A state whose models and rows are numbered: entry 0 of model n is n, and row k is 10 k."""
    num = num_models if topology == "shared" else K
    models = {"w": jnp.arange(num)[:, None] + jnp.zeros((num, PARAMETERS))}
    rows = 10 * jnp.arange(K, dtype=jnp.int32)
    if topology == "shared":
        return State(Start(jnp.float32(0.5), models), First(rows), np.int32(ROUND))
    return State(Start(jnp.float32(0.5)), First(rows, models), np.int32(ROUND))


def seen(prediction, inputs):
    return prediction, inputs


def pairs(context, row, size):
    """Each client's own model, if it has one, and the next, with weights by its row and n_k."""
    number = context.client
    return Mixture(
        jnp.stack([number, number + 1]) % K, jnp.stack([row / 100, 1 - row / 100]) + 0 * size
    )


def in_threes(context, row, size):
    return pairs(context, row, size)._replace(
        index=jnp.stack([context.client, context.client + 1]) % 3
    )


def noting(context, models, row, data):
    """Models as they came, and all else that a client sees."""
    server = context.server + jnp.zeros(())
    found = {
        "key": jax.random.key_data(context.key),
        "round": context.round,
        "index": context.index,
    }
    found |= {
        "client": context.client,
        "server": server,
        "row": row,
        "x": data.train.x[...],
        "models": models["w"],
    }
    return Prediction(inputs=found)


def serve(algorithm, plan, ids=None, topology=None):
    """Of clients `ids`, or all."""
    plan = make_plan(*plan)
    clients = data_of(SIZES)
    state = state_of(topology or algorithm.topology)
    inputs = np.arange(K) ** 2
    if ids is None:
        run = functools.partial(lifting.serve, algorithm, plan, seen)
        return jax.jit(run)(KEY, state, np.arange(K, dtype=np.int32), clients, inputs)
    run = functools.partial(lifting.serve_some, algorithm, plan, seen)
    return jax.jit(run)(KEY, state, ids, clients, inputs)


@PLANS
def test_first_rows_are_made_client_by_client(plan):
    algorithm = make(topology="own")
    clients = data_of(SIZES)
    plan = make_plan(*plan)
    ids = jnp.array([5, 1], jnp.int32)

    @jax.jit
    def run(clients):
        start = algorithm.start(KEY, clients)
        own = [algorithm.first_row(KEY, jnp.int32(k), start).model["w"] for k in range(K)]
        state = lifting.init(algorithm, plan, KEY, clients)
        return state, lifting.first_rows(algorithm, plan, KEY, start, ids), jnp.stack(own)

    state, rows, expected = run(clients)
    np.testing.assert_array_equal(state.models["w"], expected)
    np.testing.assert_array_equal(rows.model["w"], state.models["w"][ids])
    assert int(state.round) == 0 and state.server.models == ()


def test_the_server_s_models_are_no_rows():
    algorithm = make(num_models=2, server=jnp.ones(4))
    state = lifting.init(algorithm, make_plan("map", devices=1), KEY, data_of(SIZES))
    assert state.models["w"].shape == (2, PARAMETERS) and state.rows.shape == (K,)
    assert state.clients.model == () and state.server.state.shape == (4,)


RECEIVES = [
    ("shared", [[0, 1, 2]] * 3),
    ("own", [[1], [4], [6]]),
    ("peers", [[1, 4], [4, 6], [6, 1]]),
]


@pytest.mark.parametrize(("topology", "expected"), RECEIVES)
def test_what_clients_of_a_cohort_receive(topology, expected):
    algorithm = make(topology=topology, download=neighbors(1) if topology == "peers" else None)
    plan = make_plan("map")
    cohort = Cohort(jnp.array([1, 4, 6], jnp.int32))
    part = state_of(topology).with_rows(jnp.zeros(3, jnp.int32))
    download = jax.jit(functools.partial(lifting.download, algorithm, plan))
    np.testing.assert_array_equal(download(KEY, part, cohort), expected)


def test_a_download_is_by_the_client_s_own_context_and_row():
    def download(context, row, cohort):
        return jnp.stack(
            [
                context.client,
                row + context.round,
                *jax.random.key_data(context.key).astype(jnp.int32),
            ]
        )

    algorithm = make(topology="peers", download=download)
    cohort = Cohort(jnp.array([1, 4, 6], jnp.int32))
    part = state_of("peers").with_rows(jnp.array([7, 8, 9], jnp.int32))
    found = jax.jit(functools.partial(lifting.download, algorithm, make_plan("map")))(
        KEY, part, cohort
    )
    np.testing.assert_array_equal(found[:, :2], [[1, 7 + ROUND], [4, 8 + ROUND], [6, 9 + ROUND]])
    np.testing.assert_array_equal(np.uint32(found[:, 2:]), KEYS[[1, 4, 6]])


WHOM = {"shared": in_threes, "peers": pairs, "own": None, "push": None}
TOPOLOGIES = pytest.mark.parametrize(  # on other plans, that with models of others
    ("topology", "plan"),
    [
        *((topology, ("map", 0, 1)) for topology in WHOM),
        ("peers", ("chunk", 3, 4)),
        pytest.param("peers", ("vmap", 0, 2), marks=SLOW),
    ],
)


@TOPOLOGIES
def test_a_client_predicts_with_the_models_row_and_data_that_are_its_own_also_if_some_are_served(
    topology, plan
):
    download = neighbors(0) if topology in ("peers", "push") else None
    algorithm = make(
        topology=topology, select_models=WHOM[topology], predict=noting, download=download
    )
    served = serve(algorithm, plan)
    (prediction, inputs), used = served
    own = np.arange(K)
    following = np.arange(1, K + 1)
    index = np.stack([own, following], axis=1) % (3 if topology == "shared" else K)
    weights = np.stack([own / 10, 1 - own / 10], axis=1)
    if WHOM[topology] is None:
        index = own[:, None]
        weights = np.ones((K, 1))
    found = prediction.inputs
    np.testing.assert_array_equal(found["client"], own)
    np.testing.assert_array_equal(found["index"], index)
    np.testing.assert_array_equal(found["models"][..., 0], index)
    np.testing.assert_array_equal(prediction.models["w"], found["models"])
    np.testing.assert_array_equal(found["row"], 10 * own)
    np.testing.assert_array_equal(found["x"], data_of(SIZES).train.x)
    np.testing.assert_array_equal(found["key"], KEYS)
    assert (found["round"] == ROUND).all() and (found["server"] == 0.5).all()
    np.testing.assert_array_equal(inputs, own**2)
    for weight in (prediction.weights, used["weights"]):
        np.testing.assert_allclose(weight, weights, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(used["index"], index)

    ids = np.array([1, 4, 6, 7], np.int32)
    expected = jax.tree.map(lambda leaf: leaf[ids], served)
    jax.tree.map(np.testing.assert_array_equal, serve(algorithm, plan, ids), expected)


def test_by_default_all_of_the_server_s_models_are_mixed_equally():
    (prediction, _), used = serve(make(num_models=3), ("map", 0, 1), topology="shared")
    np.testing.assert_array_equal(prediction.models["w"][:, :, 0], [[0, 1, 2]] * K)
    np.testing.assert_allclose(prediction.weights, np.full((K, 3), 1 / 3), rtol=1e-6)
    np.testing.assert_array_equal(used["index"], [[0, 1, 2]] * K)


RECEIVED = {"w": jnp.arange(4.0)[:, None]}
OWN = {"w": jnp.array([[8.0], [9.0]])}
# what a client makes of four models with weights 1/8, 3/8, 4/8 and 0 -> the models, the weights
MADE = {
    "nothing": (Prediction(), [0, 1, 2, 3], [0.125, 0.375, 0.5, 0]),
    "other weights": (Prediction(weights=jnp.array([0.25] * 4)), [0, 1, 2, 3], [0.25] * 4),
    "a choice": (Prediction(index=jnp.array([2, 1])), [2, 1], [0.5, 0.375]),
    "a choice with weights": (
        Prediction((), jnp.array([0.8, 0.2]), jnp.array([2, 0])),
        [2, 0],
        [0.8, 0.2],
    ),
    "models of its own": (Prediction(OWN), [8, 9], [0.5, 0.5]),
    "models of its own with weights": (Prediction(OWN, jnp.array([0.9, 0.1])), [8, 9], [0.9, 0.1]),
}


@pytest.mark.parametrize("how", MADE)
def test_a_prediction_is_completed_by_what_was_received(how):
    made, models, weights = MADE[how]
    found = lifting.resolved(
        made._replace(inputs="kept"), RECEIVED, jnp.array([0.125, 0.375, 0.5, 0])
    )
    np.testing.assert_array_equal(found.models["w"][:, 0], models)
    np.testing.assert_allclose(found.weights, weights)
    assert found.inputs == "kept" and found.index is None


USED = {  # what `predict` returns -> topology, index and weights that are recorded, of client 2
    "nothing": (Prediction(), "peers", [2, 3], [0.2, 0.8]),
    "a choice": (Prediction(index=jnp.array([1]), weights=jnp.ones(1)), "peers", [3], [1]),
    "other weights": (Prediction(weights=jnp.array([0.5, 0.5])), "peers", [2, 3], [0.5, 0.5]),
    "a model made of them": (Prediction({"w": jnp.ones((1, 3))}), "peers", [2, 3], [0.2, 0.8]),
    "a mixture of its own": (Prediction({"w": jnp.ones((3, 3))}), "shared", [0, 1, 2], [1 / 3] * 3),
}


@pytest.mark.parametrize("how", USED)
def test_whose_models_are_used_is_recorded(how):
    made, topology, index, weights = USED[how]

    def predict(context, models, row, data):
        return made

    algorithm = make(topology="peers", select_models=pairs, predict=predict, download=neighbors(0))
    clients = data_of(SIZES)
    used = serve(algorithm, ("map", 0, 1)).used
    np.testing.assert_array_equal(used["index"][2], index)
    np.testing.assert_allclose(used["weights"][2], weights, rtol=1e-6)
    mixture, shape = lifting.shapes(
        algorithm, make_plan("map", devices=1), KEY, state_of("peers"), clients
    )
    assert lifting.recorded_topology("peers", shape, len(mixture.index)) == topology


def test_a_model_made_of_one_s_own_is_recorded_as_one_s_own():
    def predict(context, models, row, data):
        return Prediction(jax.tree.map(jnp.ones_like, models))

    for topology, num_models in (("own", 0), ("shared", 1)):
        algorithm = make(topology=topology, num_models=num_models, predict=predict)
        state = state_of(topology, num_models)
        run = functools.partial(lifting.serve, algorithm, make_plan("map", devices=1), seen)
        used = jax.jit(run)(
            KEY, state, np.arange(K, dtype=np.int32), data_of(SIZES), np.zeros(K)
        ).used
        np.testing.assert_array_equal(used["index"], np.arange(K)[:, None])
        np.testing.assert_array_equal(used["weights"], np.ones((K, 1)))


def test_a_report_of_collaboration_replaces_what_is_recorded():
    report = MethodReport(
        collaboration=lambda context, row: {"affinity": row + jnp.arange(K), "round": context.round}
    )
    used = serve(make(topology="own", report=report), ("map", 0, 1)).used
    assert used.keys() == {"affinity", "round"}
    np.testing.assert_array_equal(used["affinity"], 10 * np.arange(K)[:, None] + np.arange(K))


def test_tuning_comes_last_with_a_key_of_its_own():
    def tune(context, prediction, data):
        return prediction._replace(
            inputs=(jax.random.key_data(context.key), prediction.weights, data.train.size)
        )

    (prediction, _), _ = serve(
        make(
            topology="peers",
            select_models=pairs,
            download=neighbors(0),
            engine=EngineFields(tune=tune),
        ),
        ("map", 0, 1),
    )
    keys, weights, sizes = prediction.inputs
    np.testing.assert_allclose(weights[3], [0.3, 0.7], rtol=1e-6)
    np.testing.assert_array_equal(sizes, SIZES)
    assert len({tuple(key) for key in np.concatenate([keys, KEYS]).tolist()}) == 2 * K


@PLANS
def test_newcomers_predict_as_adapt_says(plan):
    """With all models, or as others do, but with an empty row."""

    def adapt(context, models, data):
        noted = noting(context._replace(index=jnp.zeros(1)), models, jnp.int32(0), data)
        return noted._replace(index=jnp.stack([context.client, context.client + 1]))

    newcomers = data_of((3, 1, 2), seed=5)

    def run(algorithm):
        return jax.jit(
            functools.partial(lifting.serve_newcomers, algorithm, make_plan(*plan), seen)
        )

    algorithm = make(topology="peers", adapt=adapt, download=neighbors(0))
    found, inputs = run(algorithm)(KEY, state_of("peers").with_rows(()), newcomers, np.arange(3))
    np.testing.assert_array_equal(found.models["w"][..., 0], [[0, 1], [1, 2], [2, 3]])
    np.testing.assert_array_equal(found.weights, np.full((3, 2), 0.5))
    np.testing.assert_array_equal(found.inputs["models"][..., 0], [np.arange(K)] * 3)
    np.testing.assert_array_equal(found.inputs["x"], newcomers.train.x)
    np.testing.assert_array_equal(found.inputs["key"], KEYS[:3])
    np.testing.assert_array_equal(inputs, np.arange(3))

    def predict(context, models, row, data):
        assert row == ()
        return noting(context, models, jnp.int32(0), data)

    default = make(
        num_models=3,
        predict=predict,
        select_models=lambda context, row, size: Mixture(size[None] - 1, jnp.ones(1)),
    )
    found, _ = run(default)(KEY, state_of("shared").with_rows(()), newcomers, np.arange(3))
    np.testing.assert_array_equal(found.models["w"][..., 0], [[2], [0], [1]])
    np.testing.assert_array_equal(found.inputs["index"], [[2], [0], [1]])


def test_what_is_fetched_for_some_is_what_the_index_says():
    """As the host store serves a block: each client's collaborators become adjacent models of its own."""
    algorithm = make(topology="peers", select_models=pairs, download=neighbors(0))
    plan = make_plan("map", devices=1)
    ids = np.array([2, 7], np.int32)
    state = state_of("peers")
    clients = data_of(SIZES)
    part = state.with_rows(state.rows[ids])
    some = jax.tree.map(lambda leaf: leaf[ids], clients)

    @jax.jit
    def run(part, some):
        mixture = lifting.select_models(algorithm, plan, KEY, part, ids, some.train.size)
        fetched = part.with_models({"w": state.models["w"][mixture.index.reshape(-1)]})
        return lifting.serve(algorithm, plan, seen, KEY, fetched, ids, some, np.zeros(2), mixture)

    found = run(part, some)
    np.testing.assert_array_equal(found.outputs[0].models["w"][..., 0], [[2, 3], [7, 0]])
    np.testing.assert_array_equal(found.used["index"], [[2, 3], [7, 0]])


# models and index
RECEIVED_SHAPES = {"shared": (2, [2]), "own": (1, [1]), "peers": (3, [3]), "push": (1, [3])}


@pytest.mark.parametrize("topology", RECEIVED_SHAPES)
def test_the_shapes_of_a_client_are_those_of_what_it_receives_and_returns(topology):
    num_models, index = RECEIVED_SHAPES[topology]
    download = neighbors(2) if topology in ("peers", "push") else None
    algorithm = make(
        step_to_mean, topology=topology, num_models=2, server=jnp.ones(4), download=download
    )
    found = lifting.shapes_of_client(algorithm, data_of(SIZES), cohort_size=4)
    assert found.models["w"].shape == (num_models, PARAMETERS) and list(found.index.shape) == index
    assert found.output.row.shape == () and found.output.upload.update["w"].shape == (
        num_models,
        PARAMETERS,
    )
    assert found.start.state.shape == (4,) and found.output.report.loss.shape == ()
