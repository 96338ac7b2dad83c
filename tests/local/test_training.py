"""Local training as users specify it: arguments, parts of a model, phases, different numbers of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from networks import softmax

from pfljax import models
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import ClientContext, Prediction, Split
from pfljax.evaluation import metrics
from pfljax.local.privacy import Privacy
from pfljax.local.training import LocalTraining

FEDERATION = toys.make_federation((7, 4, 0))


def problem_of(**options):
    return toys.make_problem(
        FEDERATION, options.pop("optimizer", optax.adam(0.1)), hidden=(4,), **options
    )


def start(problem):
    return jax.jit(problem.model.init)(jax.random.key(0))


def client(k):
    return Split(*(jnp.asarray(leaf[k]) for leaf in FEDERATION.train))


def fit(solver, params, key=0):
    """Client 0's local training."""
    key = jax.random.key(key)
    return solver.fit(key, solver.begin(params), client(0), round_number=0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": 0.1}, "optimizer=0.1: accepted: a function of the learning rate"),
        ({"schedule": 0.5}, "schedule=0.5: accepted: a function"),
        ({"privacy": 1.0}, "privacy=1.0: accepted"),
    ],
)
def test_arguments_are_checked_when_it_is_made(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        LocalTraining(**{"optimizer": optax.sgd(0.1)} | arguments)


def test_classes_are_weighed_in_training():
    """A step of SGD on mean_i w[y_i] l_i, by hand; equal weights scale the learning rate."""
    weights = np.array([0.5, 2.0, 3.0])
    model = toys.make_problem(FEDERATION).model
    params = jax.jit(model.init)(jax.random.key(0))
    kernel = np.float64(params["Dense_0"]["kernel"])
    bias = np.float64(params["Dense_0"]["bias"])
    x = np.float64(FEDERATION.train.x[0, :7])
    y = FEDERATION.train.y[0, :7]
    assert set(y) == {0, 1, 2}
    logits = x @ kernel + bias
    error = (
        (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) - np.eye(3)[y])
        * weights[y][:, None]
        / 7
    )

    @jax.jit
    def train(params):
        settings = [(0.1, tuple(weights)), (0.1, (2.0, 2.0, 2.0)), (0.2, ())]
        solvers = [
            LocalTraining(optax.sgd(rate), class_weights=each or None).bind(model)
            for rate, each in settings
        ]
        return [fit(solver, params) for solver in solvers]

    (state, loss), (same, _), (faster, _) = train(params)
    trained = state.whole
    np.testing.assert_allclose(
        trained["Dense_0"]["kernel"], kernel - 0.1 * x.T @ error, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        trained["Dense_0"]["bias"], bias - 0.1 * error.sum(axis=0), rtol=1e-4, atol=1e-6
    )
    nll = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(7), y]
    np.testing.assert_allclose(loss, (weights[y] * nll).mean(), rtol=1e-5)
    toys.assert_trees_close(same.whole, faster.whole, rtol=1e-5, atol=1e-6)


def test_classes_are_not_weighed_in_evaluation():
    """The mean of -log p_i, by hand."""
    problem = toys.make_problem(FEDERATION, class_weights=(0.5, 2.0, 3.0))
    algorithm = toys.make_algorithm("fedavg", problem)
    params = start(problem)
    prediction = Prediction(tree.stack_one(params), jnp.ones(1))
    found = jax.jit(lambda split: metrics.evaluate(problem, algorithm, prediction, split))(
        client(0)
    )
    x = np.float64(FEDERATION.train.x[0, :7])
    y = FEDERATION.train.y[0, :7]
    shares = softmax(
        x @ np.float64(params["Dense_0"]["kernel"]) + np.float64(params["Dense_0"]["bias"])
    )
    np.testing.assert_allclose(found["loss"], -np.log(shares[np.arange(7), y]).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    "weights", [(1.0, 2.0), (1.0, 2.0, 0.0), (1.0, 2.0, float("inf")), ((1.0, 2.0, 3.0),)]
)
def test_class_weights_are_positive_numbers_one_for_each_class(weights):
    model = toys.make_problem(FEDERATION).model
    with pytest.raises(
        ArgumentError, match=r"^class_weights=.*: accepted: (3 )?positive numbers, one per class"
    ):
        LocalTraining(class_weights=weights).bind(model)


def test_class_weights_are_for_classification():
    regression = toys.make_problem(toys.make_federation((4, 4), "regression")).model
    with pytest.raises(ArgumentError, match=r"^class_weights=.*: accepted only for classification"):
        LocalTraining(class_weights=(1.0,)).bind(regression)


def test_what_is_written_is_what_the_solver_does():
    model = problem_of().model
    schedule = optax.piecewise_constant_schedule(1.0, {1: 0.5})
    optimizer = optax.sgd(0.1)
    solver = LocalTraining(optimizer, batch_size=3, epochs=2, schedule=schedule).bind(model)
    assert (solver.batch_size, solver.epochs, solver.steps, solver.keyed) == (3, 2, 0, False)
    params = jax.jit(model.init)(jax.random.key(0))
    bound = LocalTraining(optax.adam(0.1)).bind(model).optimizer.init(params)
    assert jax.tree.structure(bound) == jax.tree.structure(optax.adam(0.1).init(params))

    @jax.jit
    def update(params, number):
        grads = jax.tree.map(jnp.ones_like, params)
        return solver.optimizer.update(
            grads, solver.optimizer.init(params), params, round_number=number
        )[0]

    for number, rate in ((0, 0.1), (1, 0.05)):
        updates = update(params, number)
        np.testing.assert_allclose(jax.tree.leaves(updates)[0], -rate, rtol=1e-6)


@pytest.mark.parametrize("batch_size", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_part_is_trained_and_the_rest_stays_bit_for_bit(batch_size):
    optimizer = optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1))
    problem = problem_of(optimizer=optimizer, batch_size=batch_size)
    params = start(problem)

    def loss(head, x, y, key=None):
        return problem.solver.loss(params | {"Dense_1": head}, x, y)

    @jax.jit
    def train(params):
        part, every = (problem.solver.part(problem.model.mask(params, num)) for num in (1, 2))
        # As if the head were the whole model.
        alone = fit(problem.solver.with_loss(loss), params["Dense_1"])
        return fit(part, params), alone, fit(every, params), fit(problem.solver, params)

    (part, _), (alone, _), (every, _), (whole, _) = train(params)
    trained = part.whole
    toys.assert_trees_close(trained["Dense_0"], params["Dense_0"])
    assert np.abs(trained["Dense_1"]["kernel"] - params["Dense_1"]["kernel"]).min() > 0

    def sizes(tree):
        return sorted(leaf.size for leaf in jax.tree.leaves(tree))

    assert sizes(part.opt_state) == sizes(optimizer.init(params["Dense_1"]))
    toys.assert_trees_close(trained["Dense_1"], alone.whole, rtol=1e-5, atol=1e-7)
    toys.assert_trees_close(every.whole, whole.whole, rtol=1e-6)


def test_passes_are_a_multiple_of_the_rounds_mini_batches():
    """An epoch has ceil(7 / 3) mini-batches, out of five epochs a round, or of two steps."""
    assert problem_of(batch_size=3, epochs=5).passes(2) == 2 / 5
    assert problem_of(batch_size=3, steps=2).passes(2) == 2 * 3 / 2


def test_a_problem_with_another_loss_number_of_epochs_or_part():
    problem = problem_of(batch_size=3, steps=2)

    def loss(params, x, y, key=None):
        return x

    assert problem.with_loss(loss).solver == problem.solver._replace(loss=loss)
    assert problem.with_epochs(4).solver == problem.solver._replace(epochs=4, steps=0)
    assert problem.with_epochs(None) == problem
    params = start(problem)
    mask = problem.model.mask(params, 1)
    part = problem._replace(keep_optimizer=True).part(mask)
    context = ClientContext(jax.random.key(0), jnp.int32(0), jnp.int32(0), jnp.arange(1))

    def fit_part(models):
        return part.fit(context, models, client(0))

    kept = jax.eval_shape(fit_part, tree.stack_one(params)).opt_state

    def sizes(of):
        return sum(leaf.size for leaf in jax.tree.leaves(of))

    assert sizes(kept) == sizes(problem.solver.optimizer.init(params["Dense_1"]))


def test_a_number_of_steps_at_run_time_is_that_number():
    """Three and two mini-batches an epoch; the client without examples takes no step."""
    problem = problem_of(batch_size=3)
    solver = problem.solver
    params = start(problem)

    def run(split, **steps):
        return solver.fit(jax.random.key(0), solver.begin(params), split, round_number=0, **steps)

    count = jax.jit(run)
    for k, epoch in enumerate((3, 2, 5)):
        toys.assert_trees_close(count(client(k), num_steps=epoch), count(client(k)))
        for steps in (0, 1, 6):
            state, _ = count(client(k), num_steps=steps)
            taken = state.opt_state[0].count
            assert taken == (steps if k < 2 else 0)
            assert toys.same_trees(state.whole, params) == (taken == 0)


def test_dropout_differs_between_steps_rounds_and_clients():
    problem = toys.make_problem(FEDERATION, optax.sgd(0.1), model=toys.Dropped)
    params = start(problem)
    assert problem.solver.keyed
    train = jax.jit(lambda params, key: fit(problem.solver, params, key)[0].whole)
    one, again, other = (train(params, number) for number in (0, 0, 1))
    toys.assert_trees_close(one, again)
    # the batch is all of the examples, so that only dropout can differ
    assert not toys.same_trees(one, other)
    split = client(0)

    @jax.jit
    def measure(params):
        batches = [
            problem.solver.take_batch(jax.random.key(0), None, split, step) for step in range(2)
        ]
        losses = [
            problem.solver.mean_loss(params, batch) for batch in (*batches, batches[0].for_model(1))
        ]
        return (
            losses,
            problem.solver.total_loss(params, split) / 7,
            problem.model.loss(params, split.x, split.y),
        )

    losses, evaluated, without = measure(params)
    assert len(set(map(float, losses))) == 3
    np.testing.assert_allclose(evaluated, without.mean(), rtol=1e-5)


def test_with_private_gradients_every_example_has_its_own_dropout():
    problem = toys.make_problem(FEDERATION, model=toys.Dropped, privacy=Privacy(0.0, 1e6))

    def draw(key):
        return jax.random.uniform(key)

    solver = problem.solver._replace(
        loss=lambda params, x, y, key=None: params["w"] * draw(key) * jnp.ones(x.shape[0])
    )
    batch = solver.take_batch(jax.random.key(0), None, client(1), 0)
    gradient = jax.jit(jax.grad(lambda params, weights: solver.mean_loss(params, batch, weights)))
    drawn = [
        float(gradient({"w": jnp.float32(1.0)}, 4 * jnp.eye(7)[keep])["w"]) for keep in range(4)
    ]
    assert len(set(drawn)) == 4 and 0 < min(drawn) < max(drawn) < 1


def test_one_nnx_module_is_no_several_initial_models():
    from flax import nnx

    module = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    problem = toys.make_problem(FEDERATION, model=module)
    with pytest.raises(ArgumentError, match=r"model: is one NNX module.*a function of rngs"):
        problem.init_models(jax.random.key(0), 2)
    stack = problem._replace(common_init=True).init_models(jax.random.key(0), 2)
    np.testing.assert_array_equal(stack["kernel"], np.stack([module.kernel[...]] * 2))
    assert models.build(module, (3,), "classification", 3).network.fixed


def test_models_that_a_client_received_are_trained_on_an_objective_with_and_without_inputs_of_their_own():
    """One step of gradient descent on strength / 2 |w - anchor|^2 moves w by -rate strength (w - anchor)."""
    problem = problem_of(optimizer=optax.sgd(0.5))
    received = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), start(problem))
    anchor = jax.tree.map(lambda leaf: leaf + 3, start(problem))

    def pull(params, anchor):
        return 0.2 * tree.squared_distance(params, anchor) / 2

    context = ClientContext(jax.random.key(0), jnp.int32(0), jnp.int32(0), jnp.arange(2))

    def same(models, split):
        return problem.fit(
            context, models, split, lambda params, batch: pull(params, anchor)
        ).models

    def each(models, split):
        return problem.fit(
            context,
            models,
            split,
            lambda params, batch, other: pull(params, other),
            per_model=received,
        ).models

    expected = jax.tree.map(lambda leaf, other: leaf - 0.1 * (leaf - other), received, anchor)
    alike, apart = jax.jit(lambda models, split: (same(models, split), each(models, split)))(
        received, client(0)
    )
    toys.assert_trees_close(alike, expected, rtol=1e-5, atol=1e-6)
    toys.assert_trees_close(apart, received)
