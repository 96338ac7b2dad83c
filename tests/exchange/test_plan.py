"""Every plan against a plain loop over clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfljax.contract.types import ClientOutput, ClientReport, Upload
from pfljax.exchange.layout import lay_out
from pfljax.exchange.plan import make_plan


def label(plan):
    return "-".join(str(part) for part in plan)


ONE_DEVICE = [("vmap", 0, 1), ("map", 0, 1), ("chunk", 3, 1)]
PLANS = [*ONE_DEVICE, ("vmap", 0, 4), ("map", 0, 2), ("chunk", 3, 2)]
RINGS = [("vmap", 0, 2, "ring"), ("map", 0, 4, "ring"), ("chunk", 3, 2, "ring")]
GATHERS = [("vmap", 0, 2, "gather"), ("map", 0, 4, "gather"), ("chunk", 3, 2, "gather")]


def cases(default, slow, others=()):
    """Arguments of a test, those of the slow and of the long suite marked. A plan is the last argument of a case."""
    marked = [(case, ()) for case in default]
    marked += [(case, pytest.mark.slow) for case in slow]
    marked += [(case, pytest.mark.long) for case in others]
    names = ["-".join(str(value) for value in (*case[:-1], label(case[-1]))) for case, _ in marked]
    return [
        pytest.param(*case, marks=marks, id=name)
        for (case, marks), name in zip(marked, names, strict=True)
    ]


def problem(num_clients, num_models, held, seed=0):
    """Models, index, rows and data with leaves of several shapes and types."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    models = {"w": normal(num_models, 4), "b": {"c": normal(num_models, 2, 3)}}
    index = np.stack([rng.permutation(num_models)[:held] for _ in range(num_clients)]).astype(
        np.int32
    )
    rows = {"r": normal(num_clients, 2), "n": rng.integers(9, size=num_clients).astype(np.int32)}
    data = {
        "x": normal(num_clients, 5, 4),
        "pick": rng.integers(5, size=num_clients).astype(np.int32),
    }
    return models, index, rows, data


def client(models, row, data):
    """ClientOutput that depends on all of a client's inputs; some contributions are not sent."""
    scores = models["w"] @ data["x"][...].sum(axis=0) + models["b"]["c"].sum(axis=(1, 2))
    upload = Upload(models["w"] * scores[:, None] + row["r"][0], sums={"s": scores})
    report = ClientReport(scores.mean(), entries={"picked": data["x"][data["pick"]]})
    return ClientOutput(
        {"r": row["r"] * 2 + scores.sum(), "n": row["n"] + 1}, upload, report, sent=scores > 0
    )


def by_hand(models, index, rows, data):
    """The same with a loop over clients in NumPy."""
    num_models = len(models["w"])
    out = {
        "r": np.zeros_like(rows["r"]),
        "n": rows["n"] + 1,
        "w": np.zeros((num_models, 4)),
        "s": np.zeros(num_models),
        "count": np.zeros(num_models, int),
        "sent": np.zeros(index.shape, bool),
        "loss": np.zeros(len(index)),
        "picked": np.zeros((len(index), 4)),
    }
    for k, held in enumerate(index):
        scores = []
        for j, model in enumerate(held):
            w = models["w"][model]
            c = models["b"]["c"][model]
            score = w @ data["x"][k].sum(axis=0) + c.sum()
            scores.append(score)
            if score > 0:
                out["w"][model] += w * score + rows["r"][k, 0]
                out["s"][model] += score
                out["count"][model] += 1
                out["sent"][k, j] = True
        out["r"][k] = rows["r"][k] * 2 + sum(scores)
        out["loss"][k] = np.mean(scores)
        out["picked"][k] = data["x"][k, data["pick"][k]]
    return out


def compare(result, expected):
    rows, returned = result

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)

    close(rows["r"], expected["r"])
    np.testing.assert_array_equal(rows["n"], expected["n"])
    close(returned.upload.update, expected["w"])
    close(returned.upload.sums["s"], expected["s"])
    np.testing.assert_array_equal(returned.num_sent, expected["count"])
    np.testing.assert_array_equal(returned.sent, expected["sent"])
    close(returned.report.loss, expected["loss"])
    close(returned.report.entries["picked"], expected["picked"])
    assert returned.num_sent.dtype == jnp.int32 and returned.sent.dtype == bool


@pytest.mark.parametrize(
    ("num_clients", "plan"),
    cases(  # seven clients do not divide by the devices, nor by chunks
        [(7, ONE_DEVICE[2]), (7, GATHERS[2]), (8, GATHERS[0]), (8, RINGS[1])],
        [(8, RINGS[2])],
        [(8, plan) for plan in (*ONE_DEVICE, *GATHERS[1:], RINGS[0])],
    ),
)
def test_peers_exchange_as_a_loop_over_clients_does(num_clients, plan):
    plan = make_plan(*plan)
    args = problem(num_clients, num_clients, 3)
    expected = by_hand(*args)
    assert expected["sent"].any() and not expected["sent"].all() and expected["count"].max() > 1
    run = jax.jit(lambda *args: plan.exchange(client, *args, topology="peers"))
    compare(run(*args), expected)


@pytest.mark.parametrize(
    "plan", cases([(ONE_DEVICE[1],), (RINGS[2],)], [(GATHERS[1],)], [(ONE_DEVICE[2],), (RINGS[1],)])
)
def test_peers_with_their_own_model_first_exchange_as_a_loop_over_clients_does(plan):
    plan = make_plan(*plan)
    num_clients = 8
    models, index, rows, data = problem(num_clients, num_clients, 3)
    own = np.arange(num_clients)[:, None]
    others = np.stack([np.setdiff1d(row, [k])[:2] for k, row in enumerate(index)])
    args = models, np.concatenate([own, others], axis=1).astype(np.int32), rows, data
    expected = by_hand(*args)
    assert expected["sent"][:, 0].any() and not expected["sent"].all()
    run = jax.jit(lambda *args: plan.exchange(client, *args, topology="peers", own_first=True))
    compare(run(*args), expected)


@pytest.mark.parametrize(
    "plan", cases([(PLANS[3],), (PLANS[5],)], [(PLANS[2],)], [(PLANS[n],) for n in (0, 1, 4)])
)
def test_a_server_exchanges_as_a_loop_over_clients_does(plan):
    plan = make_plan(*plan)
    args = problem(7, 3, 2)
    expected = by_hand(*args)
    assert expected["count"].max() > 1
    compare(jax.jit(lambda *args: plan.exchange(client, *args, topology="shared"))(*args), expected)


def next_own(models, row, data):
    """A client that replaces its own models with the uploads of `client`."""
    work = client(models, row, data)
    scores = work.upload.sums["s"]
    update = {"w": work.upload.update, "b": {"c": models["b"]["c"] + scores[:, None, None]}}
    return work._replace(upload=Upload(update))


def compare_own(result, args):
    models, *_ = args
    expected = by_hand(*args)
    sent = expected["sent"].reshape(-1)
    assert sent.any() and not sent.all()
    rows, returned = result
    next_w = np.where(sent[:, None], expected["w"], models["w"])
    # the sum is zero where nothing is sent
    next_c = models["b"]["c"] + expected["s"][:, None, None]
    np.testing.assert_allclose(returned.upload.update["w"], next_w, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(returned.upload.update["b"]["c"], next_c, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(returned.num_sent, sent)
    np.testing.assert_array_equal(returned.sent, expected["sent"])
    np.testing.assert_allclose(rows["r"], expected["r"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("num_clients", "held", "plan"),
    cases(
        [(7, 1, PLANS[1]), (8, 2, PLANS[0]), (7, 2, PLANS[5])],
        [(7, 1, PLANS[4])],
        [(8, 1, PLANS[4]), *((7, 1, PLANS[n]) for n in (0, 2, 3, 5))],
    ),
)
def test_own_models_are_replaced_where_sent(num_clients, held, plan):
    plan = make_plan(*plan)
    models, _, rows, data = problem(num_clients, num_clients * held, 1)
    args = (
        models,
        np.arange(num_clients * held, dtype=np.int32).reshape(num_clients, held),
        rows,
        data,
    )
    compare_own(jax.jit(lambda *args: plan.exchange(next_own, *args, topology="own"))(*args), args)


@pytest.mark.parametrize("plan", PLANS, ids=label)
def test_helpers_map_over_models_and_rows(plan):
    plan = make_plan(*plan)
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    np.testing.assert_allclose(
        plan.over_models(lambda a, b: a @ b, x, 2 * x), 2 * (x * x).sum(axis=1), rtol=1e-5
    )
    np.testing.assert_allclose(plan.over_rows(lambda a: a.sum(), x), x.sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("num_rows", "devices"),
    [
        (7, 1),
        (8, 2),
        (8, 4),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((8, 1), (7, 2), (7, 4))),
    ],
)
def test_rows_are_taken_and_put_back_wherever_they_live(devices, num_rows):
    plan = make_plan("map", devices=devices)
    rng = np.random.default_rng(1)
    stack = {
        "a": rng.normal(size=(num_rows, 3)).astype(np.float32),
        "b": rng.integers(99, size=num_rows).astype(np.int32),
        "c": rng.normal(size=(num_rows, 0)).astype(np.float32),
    }
    placed = jax.tree.map(
        lambda leaf: jax.device_put(leaf, plan.sharding(leaf, by_rows=True)), stack
    )
    ids = np.array([0, 2, 3, 5, 6], np.int32)
    rows = jax.jit(plan.take_rows)(placed, ids)
    for name, leaf in stack.items():
        np.testing.assert_array_equal(rows[name], leaf[ids])
    after = jax.jit(plan.put_rows)(placed, ids, jax.tree.map(lambda leaf: leaf + 1, rows))
    for name, leaf in stack.items():
        expected = leaf.copy()
        expected[ids] = leaf[ids] + 1
        np.testing.assert_array_equal(after[name], expected)
        assert after[name].dtype == leaf.dtype


def test_plans_say_what_they_are():
    assert make_plan("auto", devices=2).num_devices == 2
    assert make_plan("map").num_devices == 4
    assert [make_plan(kind, 5, 1).chunk for kind in ("auto", "map", "vmap", "chunk")] == [
        1,
        1,
        0,
        5,
    ]


@pytest.mark.parametrize(
    ("num", "held", "by_size", "layout"),
    cases(
        [
            (8, 4, False, ("map", 0, 1)),
            (8, 4, False, ("map", 0, 4, "ring")),
            (9, 3, False, ("map", 0, 4, "gather")),
            (40, 2, False, ("vmap", 0, 1)),
            (40, 2, True, ("chunk", 3, 2, "gather")),
        ],
        [(40, 2, True, ("chunk", 3, 2, "ring"))],
        [
            (8, 4, False, ("vmap", 0, 4, "gather")),
            (40, 2, False, ("chunk", 3, 2, "gather")),
            (40, 2, False, ("chunk", 3, 2, "ring")),
            (9, 3, False, ("chunk", 3, 1)),
            (40, 2, True, ("vmap", 0, 1)),
        ],
    ),
)
def test_a_push_counts_one_upload_with_each_receiver_s_weight(num, held, by_size, layout):
    """By a matrix product if most clients receive most models, otherwise by scattering; also with uneven division."""
    rng = np.random.default_rng(0)
    index = np.stack(
        [
            [k, *rng.choice([n for n in range(num) if n != k], held, replace=False)]
            for k in range(num)
        ]
    )
    index = index.astype(np.int32)
    weights = rng.random(index.shape).astype(np.float32)
    sent = rng.random(index.shape) < 0.7
    models = {"w": rng.normal(size=(num, 3)).astype(np.float32)}

    def client(models, row, data):
        weights, sent = data
        upload = Upload(jax.tree.map(lambda leaf: 2 * leaf[0], models))
        report = ClientReport(jnp.zeros(()), entries={"held": jnp.asarray(models["w"].shape[0])})
        return ClientOutput(row, upload, report, sent=sent[...], mixing_weights=weights[...])

    sizes = rng.permutation(num).astype(np.int32) ** 3
    plan = make_plan(*layout)
    plan = plan.for_steps(sizes, num) if by_size else plan
    rows = np.zeros((num, 1), np.float32)
    run = jax.jit(
        lambda m: plan.exchange(
            client, m, index, rows, (weights, sent), topology="push", sizes=sizes
        )
    )
    _, returned = run(models)
    expected = np.zeros((num, 3))
    for k in range(num):
        np.add.at(
            expected, index[k], (weights[k] * sent[k])[:, None] * 2 * np.float64(models["w"][k])
        )
    np.testing.assert_allclose(returned.upload.update["w"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(returned.num_sent, np.bincount(index[sent], minlength=num))
    assert (np.asarray(returned.report.entries["held"]) == 1).all()


def log_normal_steps(num_clients, seed=0, batch=10):
    sizes = np.maximum(np.random.default_rng(seed).lognormal(4, 2, num_clients).astype(int), 1)
    return -(-sizes // batch)


def waiting(steps, buckets):
    """The share of idle steps, counted client by client."""
    queue = sorted(steps.tolist(), reverse=True)
    useful = int(steps.sum())
    done = 0
    for width, count in buckets:
        for _ in range(count):
            together = queue[:width]
            queue = queue[width:]
            done += width * max(together, default=0)
    assert not queue
    return 1 - useful / done


@pytest.mark.parametrize("num_clients", [50, 1000, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [("vmap", 0), ("chunk", 8), ("chunk", 100)])
def test_clients_of_log_normal_sizes_hardly_wait(num_clients, kind):
    for seed in range(3):
        steps = log_normal_steps(num_clients, seed)
        plan = make_plan(*kind, devices=1)
        sorted_plan = plan.for_steps(steps, num_clients)
        assert waiting(steps, sorted_plan.buckets) < 0.2
        assert sorted_plan.waiting(steps, num_clients) == pytest.approx(
            waiting(steps, sorted_plan.buckets)
        )
        assert plan.waiting(steps, num_clients) > 0.5  # as they come
        # none are made up
        assert sum(width * count for width, count in sorted_plan.buckets) == num_clients
        assert len(sorted_plan.buckets) <= 5 and max(width for width, _ in sorted_plan.buckets) > 1
    even = np.full(num_clients, 7)
    assert plan.for_steps(even, num_clients) == plan
    assert make_plan("map").for_steps(steps, num_clients).buckets == ()
    assert make_plan("map", devices=1).waiting(steps, num_clients) == 0


@pytest.mark.parametrize(
    ("clients", "devices", "chunk", "together", "buckets"),
    [
        (14, 2, 3, 0, ((3, 2), (1, 1))),  # seven on a device
        (7, 1, 1, 3, ((3, 2), (1, 1))),
        (12, 1, 2, 3, ((2, 6),)),  # three clients are no two chunks
        (12, 1, 2, 10, ((6, 2),)),  # three of six chunks: four or five would leave some over
        (12, 1, 2, 99, ((12, 1),)),
        (12, 4, 0, 99, ((3, 1),)),
    ],
)
def test_chunks_that_travel_together_are_whole_and_leave_none_over(
    clients, devices, chunk, together, buckets
):
    layout = lay_out(clients, devices, chunk, together=together)
    assert tuple(layout.buckets) == buckets
    assert layout.at_once == (chunk or clients // devices)


def test_repetitions_are_means_over_chunks_on_the_device_that_needs_the_most():
    counts = np.array([5, 1, 4, 3, 2, 2])
    assert make_plan("map", devices=2).repetitions(counts, 6) == (5 + 1 + 4) / 3
    assert make_plan("chunk", 2, devices=2).repetitions(counts, 6) == (5 + 4) / 2


@pytest.mark.parametrize(("num_clients", "size"), [(100, 10), (1000, 100), (1000, 1000)])
@pytest.mark.parametrize("kind", [("vmap", 0), ("chunk", 64)])
def test_clients_of_random_cohorts_hardly_wait(num_clients, size, kind):
    """Averaged over cohorts other than those that the plan was made for, on two devices."""
    steps = log_normal_steps(num_clients)
    rng = np.random.default_rng(5)
    plan = make_plan(*kind, devices=2).for_steps(steps, size)
    assert plan.waiting(steps, size) < 0.2
    useful = done = 0
    for _ in range(200):
        cohort = steps[np.sort(rng.choice(num_clients, size, replace=False))]
        for part in np.split(cohort, 2):
            useful += part.sum()
            done += part.sum() / (1 - waiting(part, plan.buckets))
    assert 1 - useful / done < 0.25


@pytest.mark.parametrize(
    ("topology", "layout"),
    cases(
        [
            ("peers", ("chunk", 3, 4, "gather")),
            ("shared", ("vmap", 0, 4)),
            ("own", ("chunk", 3, 1)),
        ],
        [("peers", ("chunk", 4, 4, "ring"))],
        [("peers", ("vmap", 0, 1)), ("shared", ("chunk", 4, 1)), ("own", ("chunk", 4, 4))],
    ),
)
def test_sorted_clients_exchange_as_a_loop_over_clients_does(topology, layout):
    num_clients = 16
    sizes = np.random.default_rng(3).permutation([40, 9, 8, 7, *[2] * 6, *[1] * 6]).astype(np.int32)
    plan = make_plan(*layout).for_steps(sizes, num_clients)
    assert plan.buckets
    if topology == "own":
        models, _, rows, data = problem(num_clients, 2 * num_clients, 2)
        args = (
            models,
            np.arange(2 * num_clients, dtype=np.int32).reshape(num_clients, 2),
            rows,
            data,
        )
        compare_own(
            jax.jit(lambda *a: plan.exchange(next_own, *a, topology="own", sizes=sizes))(*args),
            args,
        )
        return
    args = problem(num_clients, 3 if topology == "shared" else num_clients, 3)
    run = jax.jit(lambda *a: plan.exchange(client, *a, topology=topology, sizes=sizes))
    compare(run(*args), by_hand(*args))


@pytest.mark.parametrize("devices", [1, 2])
def test_own_models_and_rows_are_replaced_in_place(devices):
    """No second stack of models or rows exists besides the donated ones."""
    plan = make_plan("map", devices=devices)
    num = 96
    stack = jax.ShapeDtypeStruct((num, 100, 50), jnp.float32)
    stack = jax.ShapeDtypeStruct(
        stack.shape, stack.dtype, sharding=plan.sharding(stack, by_rows=True)
    )

    # products, since XLA would fuse elementwise work with the replacement
    def client(models, row, data):
        own = models[0]
        data = data[...]
        new = own + data @ (data.T @ own)
        row = row + own @ (own.T @ row)
        return ClientOutput(
            row, Upload(new[None]), ClientReport(new.sum()), sent=new.sum()[None] > 0
        )

    def one_round(models, rows, data):
        index = np.arange(num, dtype=np.int32)[:, None]
        rows, returned = plan.exchange(client, models, index, rows, data, topology="own")
        return returned.upload.update, rows

    stats = (
        jax.jit(one_round, donate_argnums=(0, 1))
        .lower(stack, stack, stack)
        .compile()
        .memory_analysis()
    )
    model = 4 * 100 * 50
    assert stats.argument_size_in_bytes >= 3 * model * num / devices
    assert stats.temp_size_in_bytes < 12 * model
    assert stats.output_size_in_bytes - stats.alias_size_in_bytes < model
