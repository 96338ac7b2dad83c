"""What methods do at the edges: rounds to which nobody contributes, absent clients, and degenerate numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from by_hand import play

from pfljax.algorithms import ccvr, clustered, fedcp, gpfl
from pfljax.algorithms.flexlora import FlexLoRA
from pfljax.contract.errors import ArgumentError

NOBODY = [
    ("fedavg", {}, {}),
    # Batch statistics are no update.
    pytest.param(
        "fedbuff", {"max_staleness": 0}, {"model": toys.Normalized}, marks=pytest.mark.slow
    ),
    ("scaffold", {"server_learning_rate": 0.5}, {}),
    ("ifca", {"clusters": 2, "shared_layers": 1}, {"hidden": (3,)}),
]


@pytest.mark.parametrize(
    ("name", "hyperparameters", "options"), NOBODY, ids=["fedavg", "fedbuff", "scaffold", "ifca"]
)
def test_a_round_to_which_nobody_contributes_changes_no_model(name, hyperparameters, options):
    """The cohort is one client, in some rounds the one without examples."""
    rounds = play(
        name, hyperparameters=hyperparameters, rounds=6, sizes=(4, 0), cohort=1, **options
    )
    alone = [int(rounds.cohort(number)[0]) for number in rounds]
    assert set(alone) == {0, 1}
    for number, client in enumerate(alone):
        before = rounds.states[number].models
        after = rounds.states[number + 1].models
        assert toys.same_trees(before, after) == (client == 1)


def test_fedamp_s_server_keeps_the_models_of_absent_clients():
    rounds = play("fedamp", rounds=3, cohort=2)
    for number in rounds:
        before = rounds.states[number].server.state.models["Dense_0"]["kernel"]
        after = rounds.states[number + 1].server.state.models["Dense_0"]["kernel"]
        changed = (np.asarray(before) != np.asarray(after)).any(axis=(1, 2))
        np.testing.assert_array_equal(np.flatnonzero(changed), rounds.cohort(number))


def test_federico_s_clients_count_the_rounds_that_they_took_part_in():
    rounds = play("federico", rounds=4, cohort=3, hyperparameters={"neighbors": 1})
    counts = np.zeros(4, int)
    for number in rounds:
        counts[rounds.cohort(number)] += 1
        np.testing.assert_array_equal(rounds.states[number + 1].rows.rounds, counts)
    assert len(set(counts)) > 1


def test_square_roots_of_nearly_singular_covariances_are_as_large_as_the_covariances():
    """Rounding makes the smallest eigenvalue negative; what is drawn then has the variance of the diagonal."""
    negative = np.logspace(-7, -3, 400)
    covariance = np.zeros((400, 2, 2), np.float32)
    covariance[:, 0, 0] = 1 + negative
    covariance[:, 1, 1] = -negative
    roots = np.asarray(ccvr.square_root(jnp.asarray(covariance)))
    assert np.isfinite(roots).all()
    np.testing.assert_allclose(np.square(roots).sum(axis=(1, 2)), 1, atol=0.1)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_clusters_split_in_whatever_unit_updates_are(scale):
    """The same thresholds, relative to the unit, split updates that are all longer or shorter by a factor."""
    updates = np.float32([[2.0, 0.0], [-2.0, 0.1], [2.0, 0.1], [-2.0, 0.0]])
    split = jax.jit(clustered.split_clusters, static_argnums=3)
    label = jnp.zeros(4, jnp.int32)
    size = jnp.ones(4)
    for eps1, expected in ((0.5, [0, 1, 0, 1]), (0.001, [0, 0, 0, 0])):
        hyperparameters = clustered.ClusteredFL(eps1=eps1, eps2=0.4)
        found = split(
            label, scale**2 * updates @ updates.T, size, hyperparameters, jnp.float32(scale)
        )
        assert found.tolist() == expected


def test_gpfl_s_lengths_are_those_of_short_vectors_too():
    rows = np.float32([[3.0, 4.0], [0.003, 0.004], [0.0, 0.0]])
    np.testing.assert_allclose(gpfl.norm(rows)[:, 0], [5.0, 0.005, 0.0], atol=1e-5)
    assert np.isfinite(jax.grad(lambda rows: gpfl.norm(rows).sum())(rows)).all()


def test_fedcp_draws_weights_and_biases_of_its_policy_apart():
    layer = fedcp.init_policy(jax.random.key(0), 5)
    assert np.intersect1d(layer["weight"], layer["bias"]).size == 0
    assert np.abs(layer["weight"]).max() <= 5**-0.5
    assert np.abs(layer["bias"]).max() <= 5**-0.5


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
@pytest.mark.parametrize("personal_layers", [0, 1])
def test_a_report_says_how_many_layers_are_shared(name, personal_layers):
    problem = toys.make_problem(toys.make_federation((2, 3)), hidden=(3, 4))
    algorithm = toys.make_algorithm(name, problem, personal_layers=personal_layers)
    assert dict(algorithm.report.facts)["shared layers"] == 3 - personal_layers


@pytest.mark.parametrize("ranks", [(0,), (1, 3)])
def test_flexlora_refuses_ranks_that_adapters_do_not_have(ranks):
    problem = toys.make_problem(toys.make_federation((2, 3)), model=toys.adapted())
    with pytest.raises(ArgumentError, match=r"accepted: ranks from 1 to 2, that of the adapters"):
        FlexLoRA(ranks=ranks).build(problem)


@pytest.mark.parametrize("name", ["fedsim", "fedalt"])
@pytest.mark.parametrize(
    ("personal", "shared"), [("", "Dense_0"), ("Dense_0", "Dense_1"), ("bias", "kernel")]
)
def test_personal_parameters_are_the_named_ones_or_those_of_the_last_layer(name, personal, shared):
    federation = toys.make_federation((2, 3))
    problem = toys.make_problem(federation, hidden=(3,))
    algorithm = toys.make_algorithm(name, problem, personal=personal)
    state = jax.eval_shape(
        lambda key: algorithm.start(key, federation.client_data), jax.random.key(0)
    )
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.models)
    ]
    assert len(paths) == 2
    assert all(shared in path for path in paths)
