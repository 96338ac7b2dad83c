"""Local training against loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import ClientContext, Split
from pfljax.local import batches as blocks_of
from pfljax.local.batches import shuffle, sum_over_examples
from pfljax.local.training import scheduled

RATE = 0.1


def client(size, n_max=7, seed=0, task="regression"):
    """One client's examples, padded to n_max."""
    split = toys.make_split(np.random.default_rng(seed), [size], task, n_max=n_max)
    return Split(*(leaf[0] for leaf in split))


def solver(optimizer=None, task="regression", n_max=7, hidden=(), **options):
    federation = toys.make_federation((n_max,), task)
    problem = toys.make_problem(federation, optimizer or optax.sgd(RATE), hidden=hidden, **options)
    return problem.solver, initial(task, hidden)


@functools.cache
def initial(task, hidden):
    """Initial parameters."""
    model = toys.make_problem(toys.make_federation((1,), task), hidden=hidden).model
    return jax.jit(model.init)(jax.random.key(3))


def test_an_objective_that_is_no_scalar_is_named():
    made, params = solver()
    problem = toys.make_problem(toys.make_federation((7,), "regression"), optax.sgd(RATE))

    def per_example(params, batch):
        return made.loss(params, batch.x, batch.y)

    number = jnp.int32(0)
    key = jax.random.key(0)
    context = ClientContext(key, number, number, number[None])
    stacked = jax.tree.map(lambda leaf: leaf[None], params)
    for train in (
        lambda: made.fit(
            key, made.begin(params), client(5), objective=per_example, round_number=number
        ),
        lambda: problem.fit(context, stacked, client(5), objective=per_example),
    ):
        with pytest.raises(
            ArgumentError,
            match=r"objective=\S*per_example: returns shape \(7,\); accepted: a scalar",
        ):
            train()


def sgd_by_hand(params, split, batches, rate=RATE):
    """Steps of gradient descent on the mean squared error of each batch of example numbers; also the losses."""
    w = np.float64(params["Dense_0"]["kernel"][:, 0])
    b = np.float64(params["Dense_0"]["bias"][0])
    losses = []
    for batch in batches:
        x = np.float64(split.x[batch])
        y = np.float64(split.y[batch])
        error = x @ w + b - y
        losses.append(np.mean(error**2))
        w = w - rate * 2 * x.T @ error / len(batch)
        b = b - rate * 2 * error.mean()
    return w, b, np.mean(losses)


def check(found, expected):
    state, loss = found
    params = state.whole
    w, b, expected_loss = expected
    np.testing.assert_allclose(params["Dense_0"]["kernel"][:, 0], w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(params["Dense_0"]["bias"][0], b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)


def fit(how, key):
    """(parameters, client) -> its local training, compiled once for clients of all sizes."""
    return jax.jit(lambda p, s: how.fit(key, how.begin(p), s, round_number=0))


def test_epochs_of_mini_batches_are_a_plain_loop():
    (how, params) = solver(batch_size=3, epochs=2)
    key = jax.random.key(8)
    train = fit(how, key)
    for size in (1, 2, 5, 7):
        orders = np.asarray(how.draw_orders(key, size, 7))[:, :size]
        for order in orders:
            np.testing.assert_array_equal(np.sort(order), np.arange(size))
        assert size < 7 or (orders[0] != orders[1]).any()
        batches = [order[at : at + 3] for order in orders for at in range(0, size, 3)]
        assert len(batches) == int(how.num_steps(size, 7)) == 2 * -(-size // 3)
        assert how.max_steps(7) == 2 * 3
        check(train(params, client(size)), sgd_by_hand(params, client(size), batches))


def test_a_number_of_steps_takes_as_many_batches():
    (how, params) = solver(batch_size=3, steps=4)
    key = jax.random.key(8)
    assert how.num_steps(2, 7) == how.num_steps(7, 7) == how.max_steps(7) == 4
    train = fit(how, key)
    orders = np.asarray(how.draw_orders(key, 7, 7))
    # Seven examples are three batches an epoch, so the fourth step begins the second epoch; two are always one batch.
    batches = {
        2: [np.arange(2)] * 4,
        7: [orders[0][0:3], orders[0][3:6], orders[0][6:7], orders[1][0:3]],
    }
    for size, taken in batches.items():
        check(train(params, client(size)), sgd_by_hand(params, client(size), taken))


def test_a_batch_of_everything_is_gradient_descent():
    how, params = solver(epochs=3)
    train = fit(how, jax.random.key(0))
    for size in (1, 4, 7):
        assert how.num_steps(size, 7) == how.max_steps(7) == 3
        check(train(params, client(size)), sgd_by_hand(params, client(size), [np.arange(size)] * 3))


def test_padding_and_the_way_of_sorting_leave_the_order_as_it_is():
    key = jax.random.key(4)
    size = jnp.asarray(900)
    draw = jax.jit(
        lambda size: {n_max: shuffle(key, size, n_max, 2) for n_max in (900, 4096, 4097)}
    )
    orders = jax.tree.map(np.asarray, draw(size))  # the last sorts pairs
    for n_max, order in orders.items():
        np.testing.assert_array_equal(np.sort(order), [np.arange(n_max)] * 2)
        np.testing.assert_array_equal(order[:, 900:], [np.arange(900, n_max)] * 2)
    np.testing.assert_array_equal(orders[4096][:, :900], orders[900])
    np.testing.assert_array_equal(orders[4097][:, :900], orders[900])


def test_all_orders_are_alike_probable():
    draw = jax.jit(jax.vmap(lambda key: shuffle(key, jnp.asarray(3), 4, 1)[0]))
    orders = np.asarray(draw(jax.random.split(jax.random.key(1), 6000)))
    assert (orders[:, 3] == 3).all()
    _, counts = np.unique(orders, axis=0, return_counts=True)
    # chi squared, 5 degrees: p = 1e-4
    assert len(counts) == 6 and ((counts - 1000) ** 2 / 1000).sum() < 25.7


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"batch_size": 3, "steps": 4}])
def test_a_client_without_examples_stays_as_it_is(options):
    how, params = solver(optax.adam(RATE), **options)
    before = how.begin(params)

    def run(state, s):
        return how.fit(jax.random.key(0), state, s, round_number=0)

    after, loss = jax.jit(run)(before, client(0))
    toys.assert_trees_close((after.whole, after.opt_state), (params, before.opt_state))
    assert loss == 0


@pytest.mark.parametrize(
    ("task", "batch_size", "padding"),
    [
        ("classification", 3, np.nan),
        ("regression", 0, 1e3),
        pytest.param("regression", 0, np.nan, marks=pytest.mark.long),
        pytest.param("regression", 3, 1e3, marks=pytest.mark.slow),
        pytest.param("classification", 0, 1e3, marks=pytest.mark.long),
    ],
)
def test_padding_changes_nothing(task, batch_size, padding):
    how, params = solver(optax.adam(RATE), task, batch_size=batch_size, epochs=2, hidden=(4,))
    split = client(4, task=task)
    padded = Split(split.x.copy(), split.y.copy(), split.size)
    padded.x[4:] = padding
    padded.y[4:] = padding if task == "regression" else 1

    def train(p, s):
        return how.fit(jax.random.key(0), how.begin(p), s, round_number=0)

    run = jax.jit(lambda p, s: (train(p, s), how.total_loss(p, s)))
    toys.assert_trees_close(run(params, padded), run(params, split))

    # other sums, the same order of examples
    def pad(leaf):
        return np.pad(leaf, [(0, 5), *[(0, 0)] * (leaf.ndim - 1)])

    wider = Split(pad(split.x), pad(split.y), split.size)
    toys.assert_trees_close(run(params, wider), run(params, split), rtol=1e-4, atol=1e-5)


def test_weights_stay_with_their_examples_in_shuffled_batches():
    how, params = solver(batch_size=3)
    split = client(7)
    key = jax.random.key(8)
    weights = jnp.linspace(0, 2, 7)

    def weighted(params, batch):
        return how.mean_loss(params, batch, weights)

    def run(p, s):
        return how.fit(key, how.begin(p), s, weighted, round_number=0)[0].whole

    found = jax.jit(run)(params, split)
    w = np.float64(params["Dense_0"]["kernel"][:, 0])
    b = np.float64(params["Dense_0"]["bias"][0])
    order = np.asarray(how.draw_orders(key, 7, 7))[0]
    for batch in (order[:3], order[3:6], order[6:]):
        x = np.float64(split.x[batch])
        y = np.float64(split.y[batch])
        error = (x @ w + b - y) * np.float64(weights[batch]) / len(batch)
        w = w - RATE * 2 * x.T @ error
        b = b - RATE * 2 * error.sum()
    np.testing.assert_allclose(found["Dense_0"]["kernel"][:, 0], w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["Dense_0"]["bias"][0], b, rtol=1e-4, atol=1e-6)


def test_rates_follow_the_schedule_over_rounds():
    how, params = solver()
    schedule = optax.piecewise_constant_schedule(1.0, {2: 0.1})
    later = how._replace(optimizer=scheduled(how.optimizer, schedule))
    split = client(5)

    @jax.jit
    def train(number):
        state = later.begin(params)
        return later.fit(jax.random.key(0), state, split, round_number=number)[0].whole

    steps = []
    for number in (0, 1, 2, 7):
        trained = train(number)
        steps.append(np.asarray(trained["Dense_0"]["bias"] - params["Dense_0"]["bias"])[0])
    whole = sgd_by_hand(params, split, [np.arange(5)])[1] - float(params["Dense_0"]["bias"][0])
    np.testing.assert_allclose(steps, [whole, whole, whole / 10, whole / 10], rtol=1e-4)


@pytest.mark.parametrize(
    "blocks",
    [
        (4, 2),
        (8, 3),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ((512, 32), (64, 5))),
    ],
)
def test_sums_and_losses_in_blocks_are_sums_and_losses(monkeypatch, blocks):
    monkeypatch.setattr(blocks_of, "BLOCKS", blocks)
    how, params = solver()

    @jax.jit
    def run(params, split):
        summed = sum_over_examples(lambda x, y, m: jnp.where(m, x[:, 0] * y, 0).sum(), split)
        losses = how.losses_of_examples(params, split)
        return (
            summed,
            losses,
            how.loss(params, split.x, split.y),
            how.loss_and_gradient(params, split),
        )

    for size in (0, 1, 5, 8, 11):
        split = client(size, n_max=11)
        summed, losses, every, (mean, gradient) = run(params, split)
        expected = np.float64(split.x[:size, 0] * split.y[:size]).sum()
        np.testing.assert_allclose(summed, expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(losses, np.where(np.arange(11) < size, every, 0), rtol=1e-6)

        # The gradient of the mean squared error; 0 without examples.
        np.testing.assert_allclose(mean, np.sum(every[:size]) / max(size, 1), rtol=1e-5)
        layer = jax.tree.map(np.float64, params["Dense_0"])
        x = np.float64(split.x[:size])
        error = x @ layer["kernel"][:, 0] + layer["bias"] - split.y[:size]
        slope = 2 * x.T @ error / max(size, 1)
        np.testing.assert_allclose(gradient["Dense_0"]["kernel"][:, 0], slope, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            gradient["Dense_0"]["bias"][0], 2 * error.sum() / max(size, 1), rtol=1e-4, atol=1e-5
        )


def test_models_depend_on_their_number_and_newcomers_train_alone():
    federation = toys.make_federation((4, 3, 5), "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    models = problem.init_models(jax.random.key(0), 3)
    toys.assert_trees_close(
        jax.tree.map(lambda leaf: leaf[:2], models), problem.init_models(jax.random.key(0), 2)
    )
    kernels = np.asarray(models["Dense_0"]["kernel"])
    assert not np.allclose(kernels[0], kernels[1])
    common = problem._replace(common_init=True).init_models(jax.random.key(0), 3)
    toys.assert_trees_close(common, jax.tree.map(lambda leaf: jnp.stack([leaf[0]] * 3), models))

    zero = jnp.zeros((), jnp.int32)

    @jax.jit
    def train_alone(context, params, data):
        return problem.train_newcomer(context, data, start=params, rounds=2)

    init = jax.jit(problem.model.init)
    join = jax.jit(problem.train_newcomer)
    for k in range(3):
        params, data = jax.tree.map(lambda leaf, k=k: leaf[k], (models, federation.client_data))
        context = ClientContext(jax.random.key(k), zero, zero, zero[None])
        steps = [np.arange(data.train.size)] * 2
        alone = train_alone(context, params, data)
        newcomer = join(context, data)
        assert problem.rounds == 2
        first = init(jax.random.split(context.key)[0])
        for start, found in ((params, alone), (first, newcomer)):
            w, b, _ = sgd_by_hand(start, data.train, steps)
            np.testing.assert_allclose(found["Dense_0"]["kernel"][:, 0], w, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(found["Dense_0"]["bias"], [b], rtol=1e-4, atol=1e-6)
