"""Clients that were never in a cohort predict as newcomers do, with models of clients that were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from staged import bare, client_notes, server_note

from pfljax.contract import tree
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import participations
from pfljax.stages.latecomers import MET, Known, latecomers_stage
from pfljax.stages.pipeline import Pipeline
from pfljax.stores.registry import STORES

SIZES = (4, 3, 5, 2, 4, 3, 2)
ROUNDS = 2
K = len(SIZES)


def AS_IT_IS(algorithm):
    return lambda prediction, _: prediction


def experiment_of(name="federico", hyperparameters=None, *, cohort=3, **fields):
    """Seven clients with linear models, of whom `cohort` take part in a round."""
    federation = toys.make_federation(SIZES, validation_size=3)
    problem = toys.make_problem(federation, cohort=cohort, rounds=ROUNDS)
    hyperparameters = (
        {"neighbors": 2} | (hyperparameters or {})
        if name in ("federico", "fedfomo")
        else hyperparameters
    )
    return toys.make_experiment(
        name,
        problem,
        federation,
        hyperparameters=hyperparameters,
        plan=make_plan("map", devices=1),
        **fields,
    )


def played(experiment):
    """A run's outcome, its state, the numbers (K,) of its clients' cohorts, and the clients that were in none."""
    outcome = toys.run(experiment, ROUNDS)
    rounds_key = jax.random.fold_in(jax.random.key(experiment.seed), 1)
    counts = np.array(participations(rounds_key, K, experiment.problem.cohort_size, ROUNDS))
    assert 0 < (counts == 0).sum() < K
    return outcome, jax.device_get(outcome.whole_state()), counts, np.flatnonzero(counts == 0)


def probabilities(models, x):
    """(N, n, C) of linear models (N, ...) for examples (n, D)."""
    logits = (
        np.einsum("nd,mdc->mnc", x, models["Dense_0"]["kernel"])
        + models["Dense_0"]["bias"][:, None]
    )
    scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_they_mix_trained_models_by_the_posterior_of_their_examples(store):
    """w = softmax(-sum of losses) over the models of clients that were in cohorts, in NumPy."""
    experiment = experiment_of(client_store=store)
    outcome, state, counts, late = played(experiment)
    np.testing.assert_array_equal(client_notes(state, "latecomers"), counts)
    known = server_note(state, "latecomers")
    np.testing.assert_array_equal(known.rounds, np.sort(counts)[::-1])
    assert set(known.ids[known.rounds > 0]) == set(np.flatnonzero(counts))
    met = np.asarray(known.ids)[np.arange(K) % (counts > 0).sum()]
    found = outcome.serve(AS_IT_IS, range(K))
    split = experiment.federation.train
    for k in late:
        x, y = (np.asarray(part[k][: SIZES[k]]) for part in (split.x, split.y))
        each = probabilities(jax.tree.map(lambda leaf: leaf[met], state.models), x)
        weights = each[:, np.arange(len(y)), y].prod(axis=1)
        expected = np.tensordot(weights / weights.sum(), each, axes=1)
        own = jax.tree.map(lambda leaf, k=k: leaf[k], found.models)
        np.testing.assert_allclose(found.weights[k].sum(), 1, rtol=1e-5)
        np.testing.assert_allclose(
            np.tensordot(found.weights[k], probabilities(own, x), axes=1), expected, rtol=1e-4
        )


@pytest.mark.slow
def test_clients_of_cohorts_and_all_clients_before_the_first_round_predict_as_the_method_says():
    experiment = experiment_of()
    plan = experiment.problem.plan
    clients = experiment.federation.client_data
    algorithm = experiment.algorithm(plan)
    plain = experiment.method.build(experiment.problem)
    ids = np.arange(K, dtype=np.int32)
    key = jax.random.key(3)

    def use(prediction, _):
        return prediction

    def predicted(algorithm, state):
        return lifting.serve(algorithm, plan, use, key, state, ids, clients).outputs

    def mixed(prediction):
        return jax.vmap(tree.mix)(prediction.weights, prediction.models)

    first = toys.init(algorithm, experiment.problem, key, clients)
    toys.assert_trees_close(mixed(predicted(algorithm, first)), first.models, rtol=1e-6)
    state = jax.tree.map(jnp.asarray, played(experiment)[1])
    seen = np.asarray(client_notes(state, "latecomers")) > 0
    both = [mixed(predicted(*each)) for each in ((algorithm, state), (plain, bare(state)))]
    toys.assert_trees_close(
        *(jax.tree.map(lambda leaf: leaf[seen], one) for one in both), rtol=1e-6
    )
    different = jax.tree.map(lambda a, b: np.abs(a - b)[~seen].max(), *both)
    assert max(jax.tree.leaves(different)) > 1e-3


@pytest.mark.slow
def test_a_method_that_makes_models_of_its_own_adapts_to_the_same_clients():
    experiment = experiment_of("fedfomo")
    outcome, state, _, late = played(experiment)
    plain = experiment.method.build(experiment.problem)
    data = experiment.federation.client_data
    models = jax.tree.map(
        lambda leaf: leaf[np.asarray(server_note(state, "latecomers").met())], state.models
    )
    newcomers = jax.tree.map(lambda leaf: leaf[late], data)
    expected = toys.adapt(
        plain, experiment.problem, outcome.key, bare(state).with_models(models), newcomers
    )
    found = outcome.serve(AS_IT_IS, late.tolist())
    toys.assert_trees_close(found.models, expected.models, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.weights, 1, rtol=1e-6)


def test_those_in_most_cohorts_are_known():
    known = Known(jnp.array([5, 3, 0, 0]), jnp.array([3, 2, 0, 0]))
    np.testing.assert_array_equal(known.met(), [5, 3, 5, 3])
    after = known.with_cohort(jax.random.key(0), jnp.array([1, 3, 7]), jnp.array([1, 3, 2]))
    np.testing.assert_array_equal(after.rounds, [3, 3, 2, 1])
    assert set(after.ids[:2].tolist()) == {3, 5} and after.ids[2:].tolist() == [7, 1]
    np.testing.assert_array_equal(after.met(), after.ids)
    drawn = {
        int(known.with_cohort(jax.random.key(n), jnp.arange(6, 9), jnp.full(3, 2)).ids[1])
        for n in range(30)
    }
    assert drawn == {3, 6, 7, 8}  # ties are broken at random


@pytest.mark.parametrize("name", ["federico", "fedavg", "fedem", "local", "dfedem"])
def test_other_methods_and_full_participation_do_not_change(name):
    experiment = experiment_of(name, cohort=K if name == "federico" else 3)
    algorithm = experiment.method.build(experiment.problem)
    assert latecomers_stage(experiment.problem, Pipeline(algorithm)) is None


def test_the_number_of_models_is_bounded():
    federation = toys.make_federation((2,) * (MET + 4))
    problem = toys.make_problem(federation, cohort=3)
    hyperparameters = {"neighbors": 2, "collaborators": MET + 4}
    algorithm = toys.make_experiment(
        "federico", problem, federation, hyperparameters=hyperparameters
    ).algorithm(problem.plan)
    state = jax.eval_shape(
        lambda key: toys.init(algorithm, problem, key, federation.client_data), jax.random.key(0)
    )
    assert server_note(state, "latecomers").ids.shape == (MET,)
    mixture, made = lifting.shapes(
        algorithm, problem.plan, jax.random.key(0), state, federation.client_data
    )
    assert mixture.index.shape == made.weights.shape == (MET + 4,)
