"""Client-level privacy: sums and norms by hand, who takes part, epsilons from dp-accounting, and what is refused."""

import itertools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
import pytest
import quadratics
import toys
from staged import staged

from pfljax.api import table
from pfljax.contract.errors import ArgumentError
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import cohort_of, known_cohort
from pfljax.folder import fingerprint
from pfljax.local.privacy import BY_SEED, Privacy, secret_key
from pfljax.stages import client_privacy
from pfljax.stages.attacks import Attack
from pfljax.stages.client_privacy import ClientPrivacy, epsilons, noise_tree, num_slots, overflow
from pfljax.stages.compression import Compression
from pfljax.stages.faults import Faults
from pfljax.stages.pipeline import Pipeline
from pfljax.stages.server import Server
from pfljax.training.loop import check

SIZES = (3, 5, 2, 4, 6)
FEDERATION = toys.make_federation(SIZES)
NOISY = ClientPrivacy(1.0, 0.3, noise_seed=1)


def vector(models):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(models)]).astype(np.float64)


def played(privacy, name="fedavg", rounds=1, chance=1.0, **options):
    problem = privacy.seated(toys.make_problem(FEDERATION, optax.sgd(0.5), **options), chance)
    method = toys.make_algorithm(name, problem)
    algorithm = staged(problem, method, FEDERATION, client_privacy=privacy)
    states, records = toys.train(algorithm, problem, FEDERATION.client_data, rounds)
    return problem, states, [record.metrics for record in records]


@pytest.fixture(scope="module")
def updates():
    """(K, n) theta_k - theta of each client in FedAvg's first round: of rounds in which only it has examples."""
    problem = toys.make_problem(FEDERATION, optax.sgd(0.5), hidden=(8,))
    play = toys.trainer(toys.make_algorithm("fedavg", problem), problem, FEDERATION.client_data, 1)
    found = []
    for k in range(len(SIZES)):
        train = FEDERATION.train._replace(
            size=np.where(np.arange(len(SIZES)) == k, SIZES, 0).astype(np.int32)
        )
        states, _ = play(FEDERATION.client_data._replace(train=train))
        found.append(vector(states[1].models) - vector(states[0].models))
    return np.array(found)


def clipped(updates, norm):
    return updates * np.minimum(1, norm / np.linalg.norm(updates, axis=1))[:, None]


@pytest.mark.parametrize("chance", [0.6, pytest.param(1.0, marks=pytest.mark.long)])
def test_a_round_is_the_clipped_sum_with_noise(updates, chance):
    """Some set of clients, of as many as told, adds up to the sum; where nobody has examples, only noise is left.

    Others keep their rows: of Ditto, which trains the global model as FedAvg does.
    """
    norm = float(np.median(np.linalg.norm(updates, axis=1)))
    privacy = ClientPrivacy(0.5, norm)
    problem = privacy.seated(toys.make_problem(FEDERATION, optax.sgd(0.5), hidden=(8,)), chance)
    method = toys.make_algorithm("ditto", problem)
    algorithm = staged(problem, method, FEDERATION, client_privacy=privacy)
    clients = FEDERATION.client_data
    nobody = clients._replace(train=clients.train._replace(size=np.zeros(len(SIZES), np.int32)))
    states, records = toys.train(algorithm, problem, clients, 3)
    noisy = toys.train(algorithm, problem, nobody, 1)[0]
    moved = vector(states[1].models) - vector(states[0].models)
    only_noise = vector(noisy[1].models) - vector(noisy[0].models)

    expected = chance * len(SIZES)
    assert problem.expected_clients == pytest.approx(expected)
    found = (moved - only_noise) * expected
    sets = itertools.combinations(range(len(SIZES)), int(records[0].metrics["clients_in_round"]))
    close = [
        np.allclose(clipped(updates[list(some)], norm).sum(axis=0), found, atol=1e-5)
        for some in sets
    ]
    assert sum(close) == 1
    noise = only_noise * expected / (0.5 * norm)
    assert abs(noise.std() - 1) < 4 / math.sqrt(2 * len(noise)) and abs(
        noise.mean()
    ) < 4 / math.sqrt(len(noise))

    came = [int(record.metrics["clients_in_round"]) for record in records]
    for (before, after), number in zip(itertools.pairwise(states), came, strict=True):
        rows = [jax.tree.leaves(state.rows)[0].reshape(len(SIZES), -1) for state in (before, after)]
        assert (rows[0] != rows[1]).any(axis=1).sum() == number
    assert chance == 1 or 0 < sum(came) < 15


def test_the_norm_follows_the_quantile(updates):
    """S <- S exp(-eta (b - gamma)), b the share of updates that are no longer than S, here without noise.

    The model moves by the mean of the clipped updates.
    """
    lengths = np.linalg.norm(updates, axis=1)
    norm = float(np.sort(lengths)[1:3].mean())  # two of five are shorter
    privacy = ClientPrivacy(0.0, norm, adaptive_quantile=0.7, clip_rate=0.5)
    _, states, metrics = played(privacy, rounds=2, hidden=(8,))
    moved = vector(states[1].models) - vector(states[0].models)
    np.testing.assert_allclose(moved, clipped(updates, norm).mean(axis=0), atol=1e-6)
    assert float(metrics[0]["clip_norm"]) == pytest.approx(norm)
    assert float(metrics[1]["clip_norm"]) == pytest.approx(
        norm * math.exp(-0.5 * (2 / 5 - 0.7)), rel=1e-5
    )


def test_updates_and_their_number_cost_one_noise_multiplier():
    """Two Gaussian mechanisms whose sensitivities are 1 and 1 / 2 are one of z."""
    z, of_count = ClientPrivacy(0.8, 1.0, adaptive_quantile=0.5, count_noise=2.0).noise_of_updates(
        40
    )
    assert of_count == 2.0 and z > 0.8
    assert (1 / z) ** 2 + (0.5 / of_count) ** 2 == pytest.approx(0.8**-2)
    assert ClientPrivacy(0.8, 1.0, adaptive_quantile=0.5).noise_of_updates(40)[1] == 2.0
    assert ClientPrivacy(0.8, 1.0).noise_of_updates(40) == (0.8, 0.0)


def test_cohorts_are_poisson():
    """Each client at its own chance: rates, and counts whose variance is that of independent coins."""
    num = 60
    chance = 0.2
    rounds = 600
    federation = toys.make_federation((2,) * num)
    problem = NOISY.seated(toys.make_problem(federation), chance)
    method = toys.make_algorithm("fedavg", problem)
    algorithm = staged(problem, method, federation, client_privacy=NOISY)
    key = jax.random.split(jax.random.key(0))
    size = problem.cohort_size
    assert size < num

    def one(number):
        ids = known_cohort(algorithm, key, number, num, size).ids
        keys = jax.random.fold_in(jax.random.fold_in(key[1], 2), number)
        own = jax.vmap(lambda client: jax.random.fold_in(keys, client))(jnp.arange(num))
        return ids, jax.lax.map(algorithm.engine.takes_part, own), jax.vmap(jax.random.uniform)(own)

    ids, comes, drawn = map(
        np.asarray, jax.jit(lambda numbers: jax.lax.map(one, numbers))(jnp.arange(rounds))
    )
    counts = comes.sum(axis=1)
    assert (np.diff(ids, axis=1) > 0).all() and counts.max() <= size
    assert all(
        np.isin(np.flatnonzero(come), one).all() for one, come in zip(ids, comes, strict=True)
    )
    # Nor does it depend on what clients draw from their keys for other purposes.
    assert abs(np.corrcoef(comes.ravel(), drawn.ravel() < chance)[0, 1]) < 0.05
    deviation = math.sqrt(chance * (1 - chance))
    assert abs(counts.mean() - chance * num) < 4 * deviation * math.sqrt(num / rounds)
    assert abs(counts.var() / (num * deviation**2) - 1) < 4 * math.sqrt(2 / rounds)
    assert (np.abs(comes.mean(axis=0) - chance) < 5 * deviation / math.sqrt(rounds)).all()
    apart = np.corrcoef(comes.T.astype(float))[~np.eye(num, dtype=bool)]
    assert abs(apart.mean()) < 0.01 and np.abs(apart).max() < 6 / math.sqrt(rounds)


def test_places_are_as_few_as_the_bound_allows():
    for num, chance in ((100, 0.1), (1000, 0.02), (7, 0.5), (1, 0.5)):
        size = num_slots(num, chance)
        assert overflow(num, chance, size) < client_privacy.OVERFLOW
        assert size == 1 or overflow(num, chance, size - 1) >= client_privacy.OVERFLOW
    by_hand = sum(math.comb(99, n) * 0.1**n * 0.9 ** (99 - n) for n in range(25, 100))
    assert float(overflow(100, 0.1, 25)) == pytest.approx(by_hand, rel=1e-9)


def by_hand(noise, chance, rounds, delta):
    event = dp_accounting.PoissonSampledDpEvent(chance, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.pld.PLDAccountant().compose(event, rounds).get_epsilon(delta)


def test_epsilon_is_dp_accounting_s():
    key = jax.random.key(0)
    problem = toys.make_problem(FEDERATION)._replace(num_clients=1000)
    privacy = ClientPrivacy(1.1, 1.0, delta=1e-6)
    found = epsilons(privacy, privacy.seated(problem, 0.02), key, 20)
    np.testing.assert_allclose(found, np.full(1000, by_hand(1.1, 0.02, 20, 1e-6)), rtol=0.01)
    everyone = epsilons(privacy, problem._replace(cohort_size=1000), key, 4)
    # Four rounds of everyone are one with half the noise, for which there is a closed form.
    assert everyone[0] == pytest.approx(dp_accounting.get_epsilon_gaussian(0.55, 1e-6), rel=0.01)
    assert math.isinf(epsilons(ClientPrivacy(0.0, 1.0), problem, key, 1)[0])
    assert not epsilons(privacy, problem, key, 0).any()
    few = problem._replace(
        cohort_size=25, chance=0.02
    )  # too few places: their overflow is more than delta
    assert math.isinf(epsilons(privacy, few, key, 20)[0])


def nodes(rounds):
    """C: row t adds up the rounds of the node that ends with t."""
    width = [t & -t for t in range(1, rounds + 1)]
    return np.array(
        [[t - width[t - 1] < s <= t for s in range(1, rounds + 1)] for t in range(1, rounds + 1)],
        float,
    )


def test_the_tree_s_noise_and_sensitivity():
    rounds = 13
    noise = noise_tree(jax_privacy.matrix_factorization.streaming_matrix)
    matrix = np.asarray(jax.jit(lambda: noise.materialize(rounds))())
    np.testing.assert_allclose(matrix @ nodes(rounds), np.eye(rounds), atol=1e-6)
    sums = (
        np.tril(np.ones((rounds, rounds))) @ matrix
    )  # the sum of t rounds has one node for each bit of t
    np.testing.assert_allclose(
        np.square(sums).sum(axis=1), [t.bit_count() for t in range(1, rounds + 1)], atol=1e-5
    )

    problem = toys.make_problem(FEDERATION, cohort=2)
    key = jax.random.key(3)
    privacy = ClientPrivacy(2.0, 1.0, "tree")
    took = np.zeros((rounds, len(SIZES)))
    draw = jax.jit(lambda number: cohort_of(key, number, len(SIZES), 2).ids)
    for number in range(rounds):
        took[number, np.asarray(draw(number))] = 1
    lengths = np.linalg.norm(nodes(rounds) @ took, axis=0)
    np.testing.assert_allclose(client_privacy.tree_sensitivity(problem, key, rounds), lengths)

    few = np.linalg.norm(nodes(3) @ took[:3], axis=0)
    expected = [
        dp_accounting.get_epsilon_gaussian(2.0 / length, 1e-5) if length else 0 for length in few
    ]
    np.testing.assert_allclose(epsilons(privacy, problem, key, 3), expected, rtol=0.01)


def test_off_is_nothing():
    problem = toys.make_problem(FEDERATION)
    assert ClientPrivacy().seated(problem, 0.5) is problem
    method = toys.make_algorithm("fedavg", problem)
    assert ClientPrivacy().stage(problem, Pipeline(method)) is None


def experiment(privacy=NOISY, name="fedavg", chance=0.5, federation=FEDERATION, **fields):
    problem = toys.make_problem(federation, optax.sgd(0.1), **toys.network(name))
    problem = privacy.seated(problem, chance)
    plan = make_plan("map", devices=1)
    return toys.make_experiment(
        name, problem, federation, plan=plan, client_privacy=privacy, **fields
    )


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        (
            "scaffold",
            {},
            "client_privacy: accepted for this method: none; its server begins with what clients' data",
        ),
        ("fedexp", {}, "client_privacy: accepted for this method: none; it also sends square"),
        (
            "ifca",
            {},
            "client_privacy: accepted for this method: none; its server reads clients' losses",
        ),
        ("fednova", {}, "client_privacy: accepted for this method: none; it also sends length"),
        (
            "local",
            {},
            "client_privacy: accepted for this method: none; no server adds updates of one model",
        ),
        (
            "fedbuff",
            {},
            "client_privacy: accepted for this method: none; its server adds updates of several models",
        ),
        (
            "fedavg_data",
            {},
            "client_privacy: accepted for this method: none; its clients share examples",
        ),
        (
            "fedbn",
            {},
            "client_privacy: accepted for this method: none; a model with batch statistics",
        ),
        (
            "fedavg",
            {"server": Server(aggregator="median")},
            "aggregator=median: accepted with client_privacy: mean",
        ),
        (
            "fedavg",
            {"server": Server("weighted")},
            "sampler=weighted: accepted with client_privacy: uniform",
        ),
        (
            "fedavg",
            {"attack": Attack("alie", attackers=0.2)},
            "attack=alie: accepted with client_privacy: one without",
        ),
    ],
)
def test_what_noise_does_not_cover_is_refused(name, fields, why):
    with pytest.raises(ArgumentError) as error:
        check(experiment(name=name, **fields))
    assert str(error.value).startswith(why) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        (
            "fedpac",
            {},
            "secure_aggregation=True: accepted for this method: False; its server reads each client's",
        ),
        (
            "local",
            {},
            "secure_aggregation=True: accepted for this method: False; no server adds what clients send",
        ),
        (
            "pfedhn",
            {},
            "secure_aggregation=True: accepted for this method: False; its server has a model for each",
        ),
        (
            "fedavg",
            {"aggregator": "krum", "trim": 0.0},
            "aggregator=krum: accepted with secure_aggregation: mean",
        ),
        (
            "fedavg",
            {"sampler": "power_of_choice"},
            "sampler=power_of_choice: accepted with secure_aggregation: uniform",
        ),
    ],
)
def test_what_needs_single_messages_is_refused_under_secure_aggregation(name, fields, why):
    with pytest.raises(ArgumentError) as error:
        check(experiment(ClientPrivacy(), name, server=Server(secure_aggregation=True, **fields)))
    assert str(error.value).startswith(why) and "\n" not in str(error.value)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match=r"^noise_multiplier=1.0: needs a finite clip_norm"):
        ClientPrivacy(1.0)
    with pytest.raises(
        ArgumentError, match=r"^adaptive_quantile=0.5: accepted with mechanism=tree: 0"
    ):
        ClientPrivacy(1.0, 1.0, "tree", adaptive_quantile=0.5)
    with pytest.raises(
        ArgumentError, match=r"^count_noise=0.25: accepted: above 0.5, half the noise"
    ):
        ClientPrivacy(1.0, 1.0, adaptive_quantile=0.5).noise_of_updates(5)
    with pytest.raises(ArgumentError, match=r"^clip_rate=0.1: applies only with adaptive_quantile"):
        ClientPrivacy(1.0, 1.0, clip_rate=0.1)


def test_sums_are_all_that_secure_aggregation_needs():
    """FedExP adds squared norms: max(1, mean of |u_k|^2 by 2 (|mean u_k|^2 + eps)) times the mean, by hand."""
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, quadratics.OPTIMIZER)
    method = toys.make_algorithm("fedexp", problem, eps=1e-8, predict="last")
    secure = staged(problem, method, federation, server=Server(secure_aggregation=True))
    states, _ = toys.train(secure, problem, federation.client_data, 1)
    theta, found = (quadratics.vectors(state.models)[0] for state in states)
    step = np.array(
        [quadratics.descend(federation, k, theta, 1) - theta for k in range(len(SIZES))]
    )
    mean = np.average(step, axis=0, weights=SIZES)
    rate = np.average((step**2).sum(axis=1), weights=SIZES) / (2 * (mean**2).sum())
    np.testing.assert_allclose(found, theta + max(1, rate) * mean, rtol=1e-4, atol=1e-6)


def test_the_secret_is_the_noise_s():
    key = jax.random.key(0)

    def same(a, b):
        return (jax.random.key_data(a) == jax.random.key_data(b)).all()

    assert same(secret_key([], key), key) and not same(
        secret_key([None], key), secret_key([None], key)
    )
    assert same(secret_key([3], key), secret_key([3], key)) and not same(secret_key([3], key), key)
    assert not same(secret_key([3, None], key), secret_key([3, None], key))  # both must be known
    made = experiment(ClientPrivacy(1.0, 1.0))
    assert made.noise_seeds == [None] and made.keys(key, key).shape == (2,)


@pytest.mark.slow
def test_both_ledgers_are_in_the_summary():
    federation = toys.make_federation((6, 6, 6))
    problem = NOISY.seated(toys.make_problem(federation, privacy=Privacy(2.0, 1.0)), 0.5)
    plan = make_plan("map", devices=1)
    made = toys.make_experiment("fedavg", problem, federation, plan=plan, client_privacy=NOISY)
    found = toys.run(made, 2).summary["privacy"]
    clients = found["of_clients"]
    assert clients["epsilon"] == pytest.approx(by_hand(1.0, 0.5, 2, 1e-5), rel=0.01)
    assert clients["participation"] == 0.5 and clients["mechanism"] == "gaussian"
    assert BY_SEED in clients["unaccounted"] and client_privacy.LOGGED in clients["unaccounted"]
    # Any client may have been in both rounds, with one full batch each.
    assert found["epsilon"] == pytest.approx(by_hand(2.0, 1.0, 2, 1e-5), rel=0.02)


ADAPTIVE = ClientPrivacy(1.0, 0.3, adaptive_quantile=0.5, count_noise=2.0, noise_seed=1)
TREE = ClientPrivacy(1.0, 0.3, "tree", noise_seed=1)
RESUMED = [
    pytest.param(ADAPTIVE, 0.5, marks=pytest.mark.long, id="adaptive"),
    pytest.param(TREE, 1.0, marks=pytest.mark.slow, id="tree"),
]


@pytest.mark.parametrize(("privacy", "chance"), RESUMED)
def test_a_resumed_run_goes_on_with_the_noise(privacy, chance, tmp_path):
    whole = toys.run(experiment(privacy, chance=chance), 5).whole_state()
    toys.run(experiment(privacy, chance=chance), 3, out=tmp_path / "run")
    resumed = toys.run(
        experiment(privacy, chance=chance), 5, out=tmp_path / "run", resume=True
    ).whole_state()
    assert toys.same_trees(resumed, whole)


@pytest.mark.long
@pytest.mark.parametrize("store", ["host", "disk"])
def test_the_stage_is_the_same_under_every_store(store):
    federation = toys.make_federation((2,) * 30)
    options = {"name": "ditto", "chance": 0.1, "federation": federation}

    def run(store):
        return toys.run(experiment(client_store=store, **options), 3).whole_state()

    found = run(store)
    expected = run("device")
    toys.assert_trees_close(found.models, expected.models, rtol=1e-5, atol=1e-6)
    toys.assert_trees_close(found.clients, expected.clients, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_all_stages_together():
    stages = {"compression": Compression("topk:0.5"), "faults": Faults(0.1, 0.1, 0.2, "drop")}
    stages["attack"] = Attack("scale", attackers=0.4)
    federation = FEDERATION.with_attackers(0.4)
    made = experiment(
        chance=0.6, federation=federation, server=Server(secure_aggregation=True), **stages
    )
    models = toys.run(made, 4).whole_state().models
    assert np.isfinite(vector(models)).all()


def test_tables_have_both_epsilons():
    ledgers = [{"of_clients": {"epsilon": value, "unaccounted": "logs"}} for value in (2.0, None)]
    found = table.epsilons(ledgers)
    assert found == {
        "epsilon": None,
        "unaccounted": None,
        "client_epsilon": [2.0, None],
        "client_unaccounted": "logs",
    }
    assert set(table.epsilons([{}, {}]).values()) == {None}


def test_a_tree_covers_fewer_rounds_than_it_has_room_for_and_may_go_on_up_to_them():
    problem = toys.make_problem(FEDERATION, optax.sgd(0.5))
    experiment = toys.make_experiment("fedavg", problem, FEDERATION, client_privacy=TREE)
    assert not fingerprint.identified(experiment).depends_on_rounds
    assert experiment.with_rounds(2**16 - 1).problem.rounds == 2**16 - 1
    with pytest.raises(
        ArgumentError, match=r"^mechanism=tree: accepted for 65536 rounds or more: gaussian$"
    ):
        experiment.with_rounds(2**16)
