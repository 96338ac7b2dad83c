"""Things that the contract can express, each shown by a small method."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, SIZES, gradient, quadratic, vectors

from pfljax.algorithms.common import aggregation
from pfljax.algorithms.common.averaging import Phase, averaging, sharing_layers
from pfljax.contract import tree
from pfljax.contract.types import Algorithm, ClientOutput, Ledger, Predictor, Report, State
from pfljax.evaluation import metrics as evaluation
from pfljax.evaluation.fine_tuning import fine_tuned
from pfljax.exchange.plan import make_plan

MODEL = 4 * 4  # bytes of a linear model


def knn_per(problem, share):
    """kNN-Per (Marfoq et al., 2022): the global model, mixed with the class of the client's nearest example."""
    model = problem.model

    def apply(models, row, x):
        params = tree.first(models)
        stored, asked = (model.features(params, inputs) for inputs in (row.x, x))
        distance = jnp.square(asked[:, None] - stored[None]).sum(axis=2)
        nearest = jnp.where(jnp.arange(stored.shape[0]) < row.size, distance, jnp.inf).argmin(axis=1)
        predicted = model.predict(params, x)
        return share * jax.nn.one_hot(row.y[nearest], predicted.shape[1]) + (1 - share) * predicted

    def predictor(key, state, clients):
        one = Predictor.one(state.models, tree.num_rows(clients))
        return dataclasses.replace(one, rows=clients.train, apply=apply)

    return averaging(problem, predictor=predictor)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [("map", 0, 1), ("chunk", 2, 2)])
def test_a_prediction_of_the_method_s_own(plan):
    federation = toys.make_federation((2, 5, 1))
    problem = toys.make_problem(federation, plan=make_plan(*plan))
    algorithm, clients = knn_per(problem, 0.7), federation.client_data
    state = algorithm.init(jax.random.key(0), clients)
    predictor = algorithm.predictor(jax.random.key(0), state, clients)
    scores = toys.evaluate(problem.plan, problem.model, predictor, federation.test)
    layer = jax.tree.map(lambda leaf: np.float64(leaf[0]), state.models["Dense_0"])
    found = evaluation.predictions(problem.plan, problem.model, predictor, federation.test.x[1])
    for k, size in enumerate((2, 5, 1)):
        x, y = federation.test.x[k], federation.test.y[k]
        logits = np.exp(x @ layer["kernel"] + layer["bias"])
        near = np.linalg.norm(x[:, None] - federation.train.x[k, None, :size], axis=2).argmin(axis=1)
        expected = 0.7 * np.eye(3)[federation.train.y[k, near]] + 0.3 * logits / logits.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(scores["loss"][k], -np.log(expected[range(4), y]).mean(), rtol=1e-4)
        np.testing.assert_allclose(scores["accuracy"][k], (expected.argmax(axis=1) == y).mean())
        if k == 1:
            np.testing.assert_allclose(found[k], expected, rtol=1e-4)
    # Fine-tuning minimizes the loss of these predictions and keeps the method's `apply`.
    after = jax.jit(fine_tuned(problem, algorithm, 3).fine_tune)(jax.random.key(1), predictor, clients)
    assert after.apply is predictor.apply and after.topology == "own"
    train = [toys.evaluate(problem.plan, problem.model, each, clients.train) for each in (predictor, after)]
    assert (train[1]["loss"] < train[0]["loss"]).all()


def test_a_method_s_own_fine_tuning_wins_and_is_told_the_epochs():
    """This fine-tuning adds the number of epochs to the global model."""
    federation = toys.make_federation((2, 3))
    problem, clients = toys.make_problem(federation), federation.client_data

    def own(epochs):
        moved = lambda state: jax.tree.map(lambda leaf: leaf + epochs, state.models)
        return dataclasses.replace(base, predictor=lambda key, state, clients: Predictor.one(moved(state), 2))

    base = averaging(problem)
    algorithm = dataclasses.replace(base, fine_tuned=own)
    state = algorithm.init(jax.random.key(0), clients)
    after = fine_tuned(problem, algorithm, 3)
    assert after.fine_tune is None and "tuned by each client" in after.report.scored
    assert "fine-tuning" in after.ledger.unaccounted
    found = after.predictor(jax.random.key(0), state, clients).models
    toys.assert_trees_close(found, jax.tree.map(lambda leaf: leaf + 3, state.models))
    assert fine_tuned(problem, algorithm, 0) is algorithm


class Normalized(nn.Module):
    """A network with batch statistics."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(self.num_classes)(nn.relu(x))


def test_normalization_stays_at_home():
    """FedBN (Li et al., 2021): averages everything except normalization layers and their statistics."""
    federation = toys.make_federation((4, 6, 5))
    problem = toys.make_problem(federation, optax.sgd(RATE), model=Normalized, batch_size=2)
    shared = lambda params: tree.complement(problem.model.normalization(params))
    algorithm = sharing_layers(problem, shared, report=Report(scored="the model with the client's own normalization"))
    states, records = toys.train(algorithm, problem, federation.client_data, 2)
    predictor = algorithm.predictor(jax.random.key(0), states[-1], federation.client_data)
    paths = jax.tree_util.tree_leaves_with_path(predictor.models)
    normal = {jax.tree_util.keystr(path): leaf for path, leaf in paths if "BatchNorm" in jax.tree_util.keystr(path)}
    assert len(normal) == 4 and len(paths) == 8  # scale, bias, mean, variance; two dense layers
    for path, leaf in paths:
        alike = np.allclose(leaf, leaf[:1])
        assert alike == (jax.tree_util.keystr(path) not in normal)
    travels = 4 * (3 * 4 + 4 + 4 * 3 + 3)
    assert records[0].down == 3 * travels and records[0].up == 3 * (travels + 4)  # and n_k


def power_of_choice(problem):
    """Power-of-Choice (Cho et al., 2020): the clients with the largest loss of the global model take part."""

    def sample(key, state, clients):
        losses = problem.losses_of_all(state.models, clients.train)[:, 0]
        return jnp.sort(jax.lax.top_k(losses, problem.cohort_size)[1])

    return dataclasses.replace(averaging(problem), sample=sample)


def test_a_cohort_chosen_by_loss():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE), cohort=2)
    states, _ = toys.train(power_of_choice(problem), problem, federation.client_data, 3)
    theta = vectors(states[0].models)[0]
    for state in states[1:]:
        losses = []
        for k in range(4):
            a, b = quadratic(federation, k)
            losses.append(theta @ a @ theta - 2 * b @ theta + np.mean(federation.train.y[k, : SIZES[k]] ** 2))
        worst = np.argsort(losses)[2:]
        trained = [theta - RATE * gradient(federation, k, theta) for k in worst]
        theta = np.average(trained, axis=0, weights=np.array(SIZES)[worst])
        np.testing.assert_allclose(vectors(state.models)[0], theta, rtol=1e-4, atol=1e-5)


def fednova(problem):
    """FedNova (Wang et al., 2020), where client k takes 1 + (k + round) mod 3 steps."""

    def rows(key, models, clients):
        return jnp.arange(tree.num_rows(clients))

    def client_update(context, models, number, data):
        start, steps = tree.first(models), 1 + (number + context.round) % 3
        optimizer = problem.solver.optimizer.init(start)
        trained, _, loss = problem.solver.fit(
            context.key, start, optimizer, data.train, round_number=context.round, steps=steps
        )
        moved = tree.stack_one(tree.scale(tree.subtract(start, trained), 1 / steps))
        upload, sent = aggregation.weighted(moved, data.train.size)
        return ClientOutput(number, upload | {"steps": upload["weight"] * steps}, {"loss": loss}, sent)

    def server_update(key, state, aggregate):
        weight = aggregate.upload["weight"]
        mean = aggregation.average(state.models, aggregate)
        moved = tree.scale(mean, aggregate.upload["steps"] / weight)
        return state._replace(models=tree.subtract(state.models, moved)), {}

    base = averaging(problem, rows=rows, ledger=Ledger(gradients=1, passes=3))
    return dataclasses.replace(base, client_update=client_update, server_update=server_update)


def test_numbers_of_steps_that_differ_between_clients_and_rounds():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    states, _ = toys.train(fednova(problem), problem, federation.client_data, 2)
    theta, weights = vectors(states[0].models)[0], np.array(SIZES) / sum(SIZES)
    for number, state in enumerate(states[1:]):
        steps, moved = [1 + (k + number) % 3 for k in range(4)], 0.0
        for k in range(4):
            own = theta
            for _ in range(steps[k]):
                own = own - RATE * gradient(federation, k, own)
            moved = moved + weights[k] * (theta - own) / steps[k]
        theta = theta - weights @ steps * moved
        np.testing.assert_allclose(vectors(state.models)[0], theta, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [pytest.param(False, marks=pytest.mark.slow), True])
def test_phases_train_a_part_after_the_other(keep):
    """FedRep (Collins et al., 2021): the head's epochs first, then the body's; the body is averaged."""
    federation = toys.make_federation(SIZES)
    momentum = 0.5
    problem = toys.make_problem(federation, optax.sgd(RATE, momentum), hidden=(3,))._replace(keep_optimizer=keep)
    head = lambda params: problem.model.mask(params, 1)
    body = lambda params: tree.complement(head(params))
    algorithm = sharing_layers(problem, body, phases=(Phase(head, 2), Phase(body, 1)), report=Report())
    assert algorithm.ledger == Ledger(gradients=1, passes=3)
    states, _ = toys.train(algorithm, problem, federation.client_data, 2)
    assert jax.tree.leaves(states[-1].models["Dense_1"]) == []
    theta = jax.tree.map(lambda leaf: leaf[0], states[0].models["Dense_0"])
    heads = [jax.tree.map(lambda leaf, k=k: leaf[k], states[0].clients["own"]["Dense_1"]) for k in range(4)]
    velocity = [{} for _ in range(4)]
    for state in states[1:]:
        bodies = []
        for k in range(4):
            params = {"Dense_0": theta, "Dense_1": heads[k]}
            x, y = federation.train.x[k, : SIZES[k]], federation.train.y[k, : SIZES[k]]
            slope = jax.jit(jax.grad(lambda params, x=x, y=y: problem.model.loss(params, x, y).mean()))
            speeds = velocity[k] if keep else {}
            for layer in ("Dense_1", "Dense_1", "Dense_0"):
                speeds.setdefault(layer, jax.tree.map(jnp.zeros_like, params[layer]))
                speeds[layer] = jax.tree.map(lambda v, g: momentum * v + g, speeds[layer], slope(params)[layer])
                params[layer] = jax.tree.map(lambda p, v: p - RATE * v, params[layer], speeds[layer])
            heads[k] = params["Dense_1"]
            bodies.append(params["Dense_0"])
            own = jax.tree.map(lambda leaf, k=k: leaf[k], state.clients["own"]["Dense_1"])
            toys.assert_trees_close(own, heads[k], rtol=1e-4, atol=1e-6)
        theta = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=SIZES), *bodies)
        toys.assert_trees_close(tree.first(state.models["Dense_0"]), theta, rtol=1e-4, atol=1e-6)


def median(problem, traffic=None):
    """The median of whole reported models, and a vector that clients read from the server's state."""

    def init(key, clients):
        return State({"shift": jnp.zeros(5), "rate": jnp.ones(())}, problem.init_models(key, 1), (), ())

    def client_update(context, models, row, data):
        trained, _, losses = problem.fit_models(context, models, (), data.train)
        loss = losses[0] * context.server["rate"] + context.server["shift"].sum()
        return ClientOutput((), (), {"loss": loss, "model": tree.first(trained)})

    def server_update(key, state, aggregate):
        return state._replace(
            models=jax.tree.map(lambda leaf: jnp.median(leaf, 0)[None], aggregate.report["model"])
        ), {}

    return Algorithm(
        init=init,
        client_update=client_update,
        server_update=server_update,
        predictor=lambda key, state, clients: Predictor.one(state.models, tree.num_rows(clients)),
        topology="shared",
        ledger=Ledger(gradients=1),
        traffic=traffic,
    )


def test_reports_and_server_state_beyond_scalars_are_traffic():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    states, (record,) = toys.train(median(problem), problem, federation.client_data, 1)
    theta = vectors(states[0].models)[0]
    trained = [theta - RATE * gradient(federation, k, theta) for k in range(4)]
    np.testing.assert_allclose(vectors(states[1].models)[0], np.median(trained, axis=0), rtol=1e-4, atol=1e-6)
    assert record.up == 4 * MODEL and record.down == 4 * (MODEL + 5 * 4)
    halved = median(problem, lambda counted: counted._replace(report=counted.report / 2, server=0))
    record = toys.train(halved, problem, federation.client_data, 1)[1][0]
    assert record.up == 4 * MODEL / 2 and record.down == 4 * MODEL


def test_shared_examples_are_sent_once():
    """FedAvg with data sharing: the examples' bytes are spread over the rounds in which a client takes part."""
    federation = toys.make_federation((5, 5, 5, 5), "regression")
    problem = toys.make_problem(federation, cohort=2, rounds=10)  # 5 rounds each, in the mean
    algorithm = toys.make_algorithm("fedavg_data", problem, share=0.5)
    (record,) = toys.train(algorithm, problem, federation.client_data, 1)[1]
    examples = 10 * (3 + 1) * 4
    assert record.down == 2 * (MODEL + examples / 5)


def test_a_client_reads_one_weight_of_afl_s():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation)
    (record,) = toys.train(toys.make_algorithm("afl", problem), problem, federation.client_data, 1)[1]
    assert record.down == 4 * MODEL and record.up == 4 * (MODEL + 4)
