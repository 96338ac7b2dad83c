"""What every method passes; a new method is tested by being registered."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.algorithms import METHODS
from pfljax.core import tree
from pfljax.core.types import Aggregate, Algorithm, ClientData, ClientOutput, Cohort, Split, State
from pfljax.engine.plan import make_plan
from pfljax.engine.rounds import make_round
from pfljax.evaluation import metrics as evaluation
from pfljax.local.problem import Problem
from pfljax.training import loop

SIZES = (5, 1, 3, 4, 2, 4, 0, 3)  # uneven, and a client without examples
ROUNDS = 3
# One worker plays all tests of a method, so that its rounds are compiled once.
every_method = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in METHODS]
)


class Run(NamedTuple):
    """A method's rounds in mini-batches on one device, one client at a time."""

    problem: Problem
    algorithm: Algorithm
    shards: ClientData
    states: list
    records: list
    again: Callable  # shards -> states, records of the same rounds on other data
    losses: Callable  # state, shards, test -> every client's test loss (K,)


HIDDEN = {"fedper": (3,)}  # of a single layer all would be personal


def build(name, num_clients=7, *, problem_type=Problem, federation=None, **options):
    federation = federation or toys.make_federation(SIZES[:num_clients])
    usual = {"optimizer": optax.adam(0.05), "batch_size": 2, "hidden": HIDDEN.get(name, ())}
    problem = toys.make_problem(federation, **usual | options)
    return problem_type(*problem), federation


@functools.cache
def reference(name, num_clients=7, cohort=0) -> Run:
    problem, federation = build(name, num_clients, cohort=cohort)
    return play(toys.make_algorithm(name, problem), problem, federation.client_data)


def play(algorithm, problem, shards) -> Run:
    again = toys.trainer(algorithm, problem, shards, ROUNDS)
    return Run(problem, algorithm, shards, *again(shards), again, losses(algorithm, problem))


def losses(algorithm, problem):
    """(state, shards, test) -> every client's test loss (K,)."""

    @jax.jit
    def score(state, shards, test):
        predictor = algorithm.predictor(jax.random.key(5), state, shards)
        return evaluation.evaluate(problem.plan, problem.model, predictor, test)["loss"]

    return lambda *args: np.asarray(score(*args))


def check_predictor(predictor, num_clients):
    num_models = tree.num_rows(predictor.models)
    index, weights = np.asarray(predictor.index), np.asarray(predictor.weights)
    assert index.shape == weights.shape and index.shape[0] == num_clients and index.dtype == np.int32
    assert (index >= 0).all() and (index < num_models).all()
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    for leaf in jax.tree.leaves(predictor.models):
        assert np.isfinite(leaf).all()


@every_method
def test_the_initial_state_is_made_of_arrays_known_by_shape(name):
    run = reference(name)
    shape = jax.eval_shape(run.algorithm.init, jax.random.key(0), run.client_data)
    assert isinstance(shape, State)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), run.states[0])
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shape) == described
    num = run.problem.num_clients
    assert all(leaf.shape[0] == num for leaf in jax.tree.leaves(shape.clients))
    if run.algorithm.topology != "shared":
        assert all(leaf.shape[0] == num for leaf in jax.tree.leaves((shape.models, shape.optimizer)))


@every_method
def test_rounds_keep_the_state_s_form_and_change_models(name):
    run = reference(name)
    form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), run.states[0])
    for before, after in zip(run.states, run.states[1:], strict=False):
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == form
        assert not toys.same_trees(before.models, after.models)
    for leaf in jax.tree.leaves(run.states[-1].models):
        assert np.isfinite(leaf).all()
    for record in run.records:
        assert np.isfinite(record.train_loss) and record.diverged == -1
        assert np.isfinite(record.down) and np.isfinite(record.up) and record.down >= 0 and record.up >= 0


# A server that moves each coordinate by at most its rate a round, or slowly gathers speed, needs more than 20 rounds.
FASTER = {"fedadam": {"rate": 0.1}, "fedavgm": {"rate": 0.5}}


@every_method
def test_training_lowers_the_training_loss(name):
    federation = toys.make_federation((6, 4, 5, 6), task="regression", seed=2)
    problem = toys.make_problem(federation, optax.sgd(0.05), hidden=HIDDEN.get(name, ()))
    algorithm = toys.make_algorithm(name, problem, **FASTER.get(name, {}))
    _, records = toys.train(algorithm, problem, federation.client_data, 20)
    assert records[-1].train_loss < 0.5 * records[0].train_loss


@every_method
@pytest.mark.parametrize("rounds", [0, ROUNDS])
def test_predictors_mix_models_on_the_simplex(name, rounds):
    run = reference(name)
    before = jax.device_get(run.states[rounds])
    predict = jax.jit(run.algorithm.predictor)
    check_predictor(predict(jax.random.key(1), run.states[rounds], run.client_data), run.problem.num_clients)
    toys.assert_trees_close(run.states[rounds], before)
    assert np.isfinite(run.losses(run.states[rounds], run.client_data, toys.make_federation(SIZES[:7]).test)).all()


@every_method
def test_newcomers_get_a_predictor(name):
    run = reference(name)
    newcomers = toys.make_federation((3, 5, 1), seed=9)
    predictor = jax.jit(run.algorithm.adapt)(jax.random.key(1), run.states[-1], newcomers.client_data)
    check_predictor(predictor, 3)
    scores = evaluation.evaluate(run.problem.plan, run.problem.model, predictor, newcomers.test)
    assert np.isfinite(scores["loss"]).all()


@every_method
@pytest.mark.parametrize(
    ("num_clients", "cohort", "plan"),
    [
        (7, 0, ("vmap", 0, 1)),
        (8, 4, ("map", 0, 4, "gather")),
        (8, 0, ("chunk", 2, 4, "ring")),
        pytest.param(8, 4, ("map", 0, 4, "ring"), marks=pytest.mark.slow),
    ],
)
def test_every_plan_gives_the_same_numbers(name, num_clients, cohort, plan):
    run = reference(name, num_clients, cohort)
    if cohort and "ring" in plan and run.algorithm.topology != "peers":
        pytest.skip("its models do not travel between clients")
    problem = run.problem._replace(plan=make_plan(*plan))
    other = play(toys.make_algorithm(name, problem), problem, run.client_data)
    toys.assert_trees_close(other.states[0], run.states[0], rtol=1e-6, atol=1e-7)
    toys.assert_trees_close(other.states[-1], run.states[-1], rtol=2e-4, atol=2e-5)
    toys.assert_trees_close(other.records, run.records, rtol=1e-4, atol=1e-5)
    test = toys.make_federation(SIZES[:num_clients]).test
    found = other.losses(
        other.states[-1], *(loop.place(problem.plan, data, num_clients) for data in (run.client_data, test))
    )
    np.testing.assert_allclose(found, run.losses(run.states[-1], run.client_data, test), rtol=2e-4)


@every_method
def test_rounds_are_traced_once_and_may_donate_their_state(name):
    problem, federation = build(name)
    traces = 0

    def counted(params, x, y):
        nonlocal traces
        traces += 1
        return problem.model.loss(params, x, y)

    problem = problem._replace(solver=problem.solver._replace(loss=counted))
    algorithm = toys.make_algorithm(name, problem)
    step = make_round(algorithm, problem.plan, 7, 7)
    shards = loop.place(problem.plan, federation.client_data, 7)
    state = toys.start(algorithm, problem, shards)
    one_round = jax.jit(step, donate_argnums=2, out_shardings=(toys.shardings(algorithm, problem, shards), None))
    after_first = None
    for number in range(ROUNDS):
        state, _ = one_round(jax.random.key(0), np.int32(number), state, shards)
        after_first = after_first or traces
    assert traces == after_first > 0
    toys.assert_trees_close(state, reference(name).states[-1], rtol=1e-5, atol=1e-6)


# Knobs under which chance plays no part when all clients hold all models.
WITHOUT_CHANCE = {
    "federico": {"neighbors": 6},
    "dfedem": {"graph": "complete"},
    "fedavg_data": {"share": 1.0},
    "fedfomo": {"neighbors": 6},
    "fedfomo_average": {"neighbors": 6},
}


def renumbered(order):
    """A Problem in which client n starts from the model of client order[n]."""

    class Renumbered(Problem):
        def init_models(self, key, num):
            models = Problem.init_models(self, key, num)
            return tree.take(models, order) if num == len(order) else models

    return Renumbered


def reorder(split, order):
    return Split(*(leaf[order] for leaf in split))


@every_method
def test_renumbering_the_clients_renumbers_the_results(name):
    order = np.array([3, 0, 6, 1, 5, 2, 4])
    found = []
    for numbers in (np.arange(7), order):
        problem, federation = build(
            name, problem_type=renumbered(numbers), optimizer=optax.sgd(0.2), batch_size=0, epochs=1
        )
        parts = {part: reorder(getattr(federation, part), numbers) for part in ("train", "validation", "test")}
        federation = dataclasses.replace(federation, **parts)
        algorithm = toys.make_algorithm(name, problem, **WITHOUT_CHANCE.get(name, {}))
        run = play(algorithm, problem, federation.client_data)
        found.append(run.losses(run.states[-1], run.client_data, federation.test))
    assert np.ptp(found[0]) > 0.01
    np.testing.assert_allclose(found[1], found[0][order], rtol=1e-4)


@every_method
def test_a_client_s_data_reach_others_only_where_there_is_a_path(name):
    run = reference(name)
    shards = jax.tree.map(np.copy, run.client_data)
    shards.train.x[0] = -2 * shards.train.x[0]
    states, _ = run.again(shards)
    test = toys.make_federation(SIZES[:7]).test
    changed = run.losses(states[-1], shards, test) != run.losses(run.states[-1], run.client_data, test)
    assert changed[0]
    # A method may look at others' models and decide against them: then what it remembers of them differs.
    others = [jax.tree.map(lambda leaf: leaf[1:], state.clients) for state in (states[-1], run.states[-1])]
    assert (changed[1:].any() or not toys.same_trees(*others)) == (run.algorithm.topology != "own")


@every_method
def test_padding_reaches_no_result(name):
    run = reference(name)
    shards = jax.tree.map(np.copy, run.client_data)
    padding = np.arange(shards.train.y.shape[1]) >= shards.train.size[:, None]
    assert padding.any()
    shards.train.x[padding] = 1e3
    shards.train.y[padding] = 1
    states, records = run.again(shards)
    toys.assert_trees_close(states[-1], run.states[-1])
    toys.assert_trees_close(records, run.records)
    test = toys.make_federation(SIZES[:7]).test
    np.testing.assert_array_equal(
        run.losses(states[-1], shards, test), run.losses(run.states[-1], run.client_data, test)
    )


def watched(algorithm, seen):
    """The algorithm, noting the clients of every round."""

    def download(key, state, cohort: Cohort):
        jax.debug.callback(lambda ids: seen.append(tuple(np.asarray(ids).tolist())), cohort.ids)
        return algorithm.download(key, state, cohort)

    return algorithm._replace(download=download)


def idle() -> Algorithm:
    """A method that does nothing."""
    init = lambda key, clients: State((), {"w": jnp.zeros((1, 1))}, (), ())
    download = lambda key, state, cohort: jnp.zeros((cohort.ids.shape[0], 1), jnp.int32)
    work = lambda turn, models, row, shard: ClientOutput((), models, {"loss": jnp.zeros(())})

    def update(key, state, returned: Aggregate):
        return state, {}

    return Algorithm(init, download, work, update, None, None, "shared", "nothing")


@every_method
def test_clients_out_of_the_cohort_stay_as_they_are(name):
    problem, federation = build(name, cohort=4)
    seen, expected = [], []
    algorithm = watched(toys.make_algorithm(name, problem), seen)
    states, _ = toys.train(algorithm, problem, federation.client_data, 4)
    toys.train(watched(idle(), expected), problem, federation.client_data, 4)
    jax.effects_barrier()
    assert seen == expected  # one stream of cohorts for every method
    assert len(set(seen)) > 1  # and a new one every round
    for number, cohort in enumerate(seen):
        assert len(set(cohort)) == 4 and min(cohort) >= 0 and max(cohort) < 7
        before, after = (jax.device_get(state) for state in states[number : number + 2])
        by_client = algorithm.topology != "shared"
        for k in range(7):
            rows = [
                jax.tree.map(lambda leaf, k=k: leaf[k], (s.models, s.optimizer, s.clients) if by_client else s.clients)
                for s in (before, after)
            ]
            if k not in cohort:
                toys.assert_trees_close(*rows)
            elif by_client and SIZES[k]:
                assert not toys.same_trees(*rows)


@every_method
def test_every_knob_is_documented_and_has_a_default(name):
    config = METHODS[name].config
    fields = dataclasses.fields(config)
    assert config.__dataclass_params__.frozen
    for field in fields:
        assert field.default is not dataclasses.MISSING
        assert f"\n        {field.name}: " in config.__doc__
    assert config() == config()
