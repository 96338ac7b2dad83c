"""APPLE: rounds by hand on quadratics, stale copies of what is not downloaded, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from by_hand import by_hand, entry, play
from quadratics import RATE, SIZES

from pfljax.algorithms.apple import Row, schedule
from pfljax.contract import tree
from pfljax.contract.types import ClientContext, Cohort, State
from pfljax.exchange import lifting

SHARES = np.array(SIZES) / sum(SIZES)
HYPERPARAMETERS = {
    "weights_learning_rate": 0.05,
    "weights_momentum": 0.0,
    "mu": 2.0,
    "pull_share": 0.75,
}


def train(rounds, cores, p, copies, strength, rate, momentum):
    """A client's next core and p, given its copies (K, d) of all cores; all clients' are returned."""
    new = cores.copy()
    moved = p.copy()
    for k in rounds.clients:
        velocity = np.zeros(len(cores))
        for _ in range(rounds.epochs):
            models = np.where(np.arange(len(cores))[:, None] == k, new[k], copies[k])
            slope = rounds.gradient(k, moved[k] @ models)
            velocity = momentum * velocity + models @ slope + strength * (moved[k] - SHARES)
            new[k] = new[k] - RATE * moved[k, k] * slope
            moved[k] = moved[k] - rate * velocity
    return new, moved


def apple(*, weights_learning_rate=0.05, weights_momentum=0.0, mu=1.0, pull_share=1.0, script=None):
    """Algorithm 1: clients train their core and the weights p of their mixture of all cores, of which copies are stale.

    The p of a client are pulled toward n_k / n in the first `pull_share` of the R rounds.
    """

    def reference(rounds):
        cores = rounds.start("models")
        p = np.tile(SHARES, (len(cores), 1))
        copies = np.tile(cores, (len(cores), 1, 1))
        length = pull_share * rounds.problem.rounds
        for number in rounds:
            if script is None:
                copies = np.tile(cores, (len(cores), 1, 1))
            else:
                for own, other in script[number]:
                    copies[own, other] = cores[other]
            strength = mu * (1 + np.cos(np.pi * number / length)) / 2 if number < length else 0
            present = np.isin(rounds.clients, rounds.cohort(number))[:, None]
            steps = (strength, weights_learning_rate, weights_momentum)
            trained, moved = train(rounds, cores, p, copies, *steps)
            cores = np.where(present, trained, cores)
            p = np.where(present, moved, p)
            yield {"models": cores, "clients.row.moved": p - SHARES}

    return reference


def shares_of(rounds):
    """p (K, K) after the last round."""
    return SHARES + entry(rounds.states[-1], "clients.row.moved")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_by_hand(momentum):
    hyperparameters = HYPERPARAMETERS | {"weights_momentum": momentum}
    rounds = by_hand("apple", apple(**hyperparameters), rounds=4, hyperparameters=hyperparameters)
    p = shares_of(rounds)
    cores = entry(rounds.states[-1], "models")
    assert np.abs(p - SHARES).max() > 0.1 and (p < 0).any()
    np.testing.assert_allclose(
        entry(rounds.predict(), "models")[:, 0], p @ cores, rtol=1e-4, atol=1e-5
    )


def test_the_shares_that_a_run_records_have_signs():
    rounds = play("apple", rounds=4, hyperparameters=HYPERPARAMETERS)
    p = shares_of(rounds)
    clients = rounds.federation.client_data
    shown = toys.used(
        rounds.algorithm, rounds.problem, jax.random.key(0), rounds.states[-1], clients
    )
    for k in range(4):
        np.testing.assert_allclose(
            shown["signed"][k], p[k, shown["index"][k]], rtol=1e-4, atol=1e-5
        )
    np.testing.assert_allclose(
        shown["weights"], np.abs(shown["signed"]) / np.abs(p).sum(axis=1)[:, None], rtol=1e-4
    )


def test_cores_that_are_not_downloaded_are_stale_copies_by_hand():
    hyperparameters = {"neighbors": 1, "weights_learning_rate": 0.05, "mu": 1.0, "pull_share": 1.0}
    script = [[[k, (k + 1 + (number + k) % 3) % 4] for k in range(4)] for number in range(4)]
    rounds = by_hand(
        "apple", apple(script=script), rounds=4, hyperparameters=hyperparameters, script=script
    )
    p = shares_of(rounds)
    each = entry(rounds, "states.4.models")
    copies = np.tile(entry(rounds, "states.0.models"), (4, 1, 1))
    for number in range(4):
        for own, other in script[number]:
            copies[own, other] = entry(rounds, f"states.{number}.models")[other]
    assert np.abs(copies - each).max() > 0.1  # they are stale

    found = entry(rounds.predict(), "models")[:, 0]
    for k in range(4):  # with one more core, which was just drawn
        possible = []
        for fresh in set(range(4)) - {k}:
            newest = np.isin(np.arange(4), [k, fresh])[:, None]
            possible.append(p[k] @ np.where(newest, each, copies[k]))
        assert min(np.abs(found[k] - mixed).max() for mixed in possible) < 1e-4


def test_absent_clients_cores_are_mixed_as_they_are_by_hand():
    hyperparameters = {"weights_learning_rate": 0.05, "mu": 1.0, "pull_share": 1.0}
    rounds = by_hand("apple", apple(), hyperparameters=hyperparameters, cohort=2)
    assert len({*np.concatenate([rounds.cohort(number) for number in rounds])}) > 2


def test_others_are_drawn_uniformly():
    problem = toys.make_problem(toys.make_federation([3] * 5), cohort=3)
    algorithm = toys.make_algorithm("apple", problem, neighbors=2)
    cohort = Cohort(jnp.array([0, 2, 3], jnp.int32))
    state = State()  # which it does not read
    draw = jax.jit(lambda key: lifting.download(algorithm, problem.plan, key, state, cohort))
    drawn = np.stack([np.asarray(draw(jax.random.key(seed))) for seed in range(300)])
    np.testing.assert_array_equal(drawn[:, :, 0], np.broadcast_to(cohort.ids, (300, 3)))
    assert (drawn[:, :, 1:] != drawn[:, :, :1]).all() and (drawn[:, :, 1] != drawn[:, :, 2]).all()
    for place, own in enumerate(cohort.ids.tolist()):
        counts = [(drawn[:, place, 1:] == other).sum() for other in range(5) if other != own]
        assert (
            sum(counts) == 600 and np.abs(np.array(counts) - 150).max() < 45
        )  # over 5 standard deviations


def alone(rounds):
    """Local training."""
    theta = rounds.start("models")[0]
    for _ in rounds:
        theta = rounds.descend(0, theta)
        yield {"models": [theta]}


def test_a_client_without_others_trains_as_local_does():
    by_hand("apple", alone, sizes=(5,), hyperparameters={"weights_learning_rate": 0.0})


@pytest.mark.parametrize(
    ("number", "length", "wanted"), [(0, 10, 1), (5, 10, 0.5), (10, 10, 0), (12, 10, 0), (0, 0, 0)]
)
def test_the_pull_falls_by_a_cosine(number, length, wanted):
    np.testing.assert_allclose(schedule(np.int32(number), float(length)), wanted, atol=1e-6)


def test_batch_statistics_are_not_mixed():
    problem = toys.make_problem(toys.make_federation((3, 3, 3)), model=toys.Normalized)
    models = jax.device_get(jax.jit(lambda key: problem.init_models(key, 3))(jax.random.key(0)))
    statistics = models["batch_stats"]["BatchNorm_0"]
    models["batch_stats"]["BatchNorm_0"] = statistics | {
        "var": statistics["var"] + np.float32([[5], [0], [0]])
    }
    own, one, two = (jax.tree.map(lambda leaf, n=n: np.array(leaf[n]), models) for n in range(3))

    context = ClientContext(
        key=jax.random.key(0),
        round=jnp.zeros((), jnp.int32),
        step=jnp.zeros((), jnp.int32),
        index=jnp.arange(3, dtype=jnp.int32),
        server=jnp.zeros(3),  # p0
    )
    row = Row(opt_state=(), moved=jnp.array([0.5, 2.0, -1.0]), copies=())
    algorithm = toys.make_algorithm("apple", problem)
    found = tree.first(algorithm.predict(context, models, row, None).models)
    toys.assert_trees_close(found["batch_stats"], own["batch_stats"])
    kernels = [np.float64(model["Dense_0"]["kernel"]) for model in (own, one, two)]
    wanted = 0.5 * kernels[0] + 2 * kernels[1] - kernels[2]
    np.testing.assert_allclose(found["Dense_0"]["kernel"], wanted, rtol=1e-5, atol=1e-6)
