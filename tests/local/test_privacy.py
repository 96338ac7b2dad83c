"""Private local training: clipping and noise by hand, the ledger against the accountant, no noise in common."""

import dataclasses
import functools
import math
import shutil

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Ledger
from pfljax.data.sources.source import Scaling
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import cohort_of, make_round
from pfljax.local import solver as solvers
from pfljax.local.batches import Batch
from pfljax.local.privacy import BY_SCALING, Privacy, epsilons, private_mean
from pfljax.training import scoring
from pfljax.training.loop import Schedule, Trainer
from pfljax.training.outcome import make_key

FEDERATION = toys.make_federation((5, 3, 4, 6), "regression")


def batch_of(k, size=4):
    """Client k's first examples; masked beyond its size."""
    split = FEDERATION.train
    inside = np.arange(size) < split.size[k]
    x = np.where(inside[:, None], split.x[k, :size], 0)
    y = np.where(inside, split.y[k, :size], 0)
    return Batch(x, y, inside.astype(np.float32), np.arange(size), jax.random.key(k))


def gradients_by_hand(theta, batch, weights=None):
    """Each example's gradient of its squared error, the intercept last."""
    x = np.append(np.float64(batch.x), np.ones((len(batch.y), 1)), axis=1)
    rows = 2 * (x @ theta - batch.y)[:, None] * x
    return rows * (batch.mask if weights is None else batch.mask * weights)[:, None]


def clipped(rows, norm):
    return rows * np.minimum(1, norm / np.maximum(np.linalg.norm(rows, axis=1), 1e-30))[:, None]


def solver_of(privacy):
    problem = toys.make_problem(FEDERATION, optax.sgd(0.1), batch_size=2)
    return problem, problem.solver._replace(privacy=privacy)


def params_of(theta):
    return {
        "Dense_0": {
            "kernel": jnp.asarray(theta[:-1, None], jnp.float32),
            "bias": jnp.asarray(theta[-1:], jnp.float32),
        }
    }


def vector(params):
    layer = params["Dense_0"]
    return np.append(np.float64(layer["kernel"])[..., 0], np.float64(layer["bias"]), axis=-1)


THETA = np.array([0.5, -1.0, 2.0, 0.3])


@jax.jit
def clipped_mean_loss(params, batch, weights):
    """The mean loss and its gradient, clipped to a norm of 1.5."""
    _, solver = solver_of(Privacy(clip_norm=1.5))
    return jax.value_and_grad(solver.mean_loss)(params, batch, weights)


@pytest.mark.parametrize("weights", [None, np.array([2.0, 0.5, 1.0, 3.0])])
@pytest.mark.parametrize("k", [0, 1])  # client 1 has three examples for a batch of four
def test_gradients_are_clipped_example_by_example(k, weights):
    batch = batch_of(k)
    loss, grads = clipped_mean_loss(params_of(THETA), batch, weights)
    rows = gradients_by_hand(THETA, batch, weights)
    assert (np.linalg.norm(rows, axis=1) > 1.5).any()
    expected = clipped(rows, 1.5).sum(axis=0) / batch.mask.sum()
    np.testing.assert_allclose(vector(grads), expected, rtol=1e-5)
    x = np.append(batch.x, np.ones((4, 1)), axis=1)
    losses = (x @ THETA - batch.y) ** 2 * batch.mask * (1 if weights is None else weights)
    np.testing.assert_allclose(loss, losses.sum() / batch.mask.sum(), rtol=1e-5)


def test_what_reads_no_data_is_not_clipped():
    _, solver = solver_of(Privacy(clip_norm=0.1))
    batch = batch_of(0)
    anchor = params_of(np.zeros(4))

    def near_anchor(params, batch):
        distance = solver.squared_distance(params, anchor)
        return solver.mean_loss(params, batch) + 3.0 / 2 * distance

    grads = jax.jit(jax.grad(near_anchor))(params_of(THETA), batch)
    expected = clipped(gradients_by_hand(THETA, batch), 0.1).sum(axis=0) / 4 + 3.0 * THETA
    np.testing.assert_allclose(vector(grads), expected, rtol=1e-5)


def test_clipping_a_stack_is_clipping_client_by_client():
    _, solver = solver_of(Privacy(clip_norm=1.0))
    batches = [batch_of(k) for k in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    thetas = [THETA * (k + 1) / 2 for k in range(4)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(params_of, thetas))
    gradient = jax.jit(jax.grad(lambda p, b: solver.mean_loss(p, b)))
    plan = make_plan("vmap", devices=1)
    found = vector(jax.jit(functools.partial(plan.over_rows, gradient))(params, stacked))
    for k, batch in enumerate(batches):
        expected = clipped(gradients_by_hand(thetas[k], batch), 1.0).sum(axis=0) / batch.mask.sum()
        np.testing.assert_allclose(found[k], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            found[k], vector(gradient(params_of(thetas[k]), batch)), rtol=1e-5, atol=1e-6
        )


def test_noise_has_the_stated_size_on_the_sum_of_gradients():
    privacy = Privacy(noise_multiplier=2.0, clip_norm=0.5)
    batch = batch_of(1)  # three examples

    def loss(params, x, y):
        return jnp.square(x @ params["w"] - y)

    examples = (batch.x, batch.y, np.ones(4, np.float32))
    inside = batch.mask > 0

    def gradient(key):
        return jax.grad(lambda p: private_mean(privacy, key, loss, p, examples, inside))(
            {"w": jnp.zeros(3)}
        )["w"]

    draws = np.asarray(jax.lax.map(gradient, jax.random.split(jax.random.key(0), 1500)))
    rows = -2 * (batch.y * batch.mask)[:, None] * batch.x
    np.testing.assert_allclose(draws.mean(axis=0), clipped(rows, 0.5).sum(axis=0) / 3, atol=0.05)
    np.testing.assert_allclose(draws.std(axis=0), 2.0 * 0.5 / 3, rtol=0.08)


@toys.each_method(["fedavg", "fedem", "federico", "per_fedavg"], fast=["fedavg"], slow=["fedem"])
def test_without_noise_and_clipping_training_is_as_ever(name):
    """Up to rounding if the norm is so large that it clips nothing."""
    assert not Privacy(0.0, math.inf).active and Privacy(0.0, 1e6).active
    problem, _ = solver_of(Privacy())
    found = []
    for privacy in (Privacy(), Privacy(0.0, 1e6)):
        private = problem._replace(solver=problem.solver._replace(privacy=privacy))
        found.append(
            toys.train(toys.make_algorithm(name, private), private, FEDERATION.client_data, 2)[0][
                -1
            ]
        )
    toys.assert_trees_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_client_s_noise_is_its_own():
    """Two clients with the same data and model, and several models of one client, get different noise."""
    federation = toys.make_federation((4, 4), "regression")
    for leaf in (*federation.train[:2], *federation.validation[:2]):
        leaf[1] = leaf[0]
    problem = toys.make_problem(federation, optax.sgd(0.1))._replace(common_init=True)
    private = problem._replace(solver=problem.solver._replace(privacy=Privacy(1.0, 1.0)))
    plain, _ = toys.train(toys.make_algorithm("local", problem), problem, federation.client_data, 1)
    noisy, _ = toys.train(toys.make_algorithm("local", private), private, federation.client_data, 1)
    theta = vector(plain[-1].models)
    np.testing.assert_array_equal(theta[0], theta[1])
    theta = vector(noisy[-1].models)
    assert (np.abs(theta[0] - theta[1]) > 1e-4).all()
    again, _ = toys.train(toys.make_algorithm("local", private), private, federation.client_data, 1)
    toys.assert_trees_close(noisy[-1], again[-1])

    start = {"w": jnp.zeros((3, 2))}
    batch = Batch(jnp.zeros((1, 2)), jnp.zeros(1), jnp.ones(1), jnp.arange(1), jax.random.key(0))
    solver = private.solver.with_loss(lambda params, x, y: x @ params["w"] - y)

    def gradient(p, n):
        return jax.grad(lambda p: solver.mean_loss(p, batch.for_model(n)))(p)

    noise = private.plan.over_rows(gradient, start, jnp.arange(3))["w"]
    assert len({float(value) for value in noise[:, 0]}) == 3
    assert tree.num_rows(start) == 3


def test_the_noise_of_later_steps_is_new():
    _, solver = solver_of(Privacy(1.0, 1.0))
    split = jax.tree.map(lambda leaf: leaf[3], FEDERATION.train)

    @jax.jit
    def draw(key, split):
        orders = solver.draw_orders(key, split.size, 6)
        return jnp.stack(
            [
                jax.random.key_data(solver.take_batch(key, orders, split, step).key)
                for step in range(3)
            ]
        )

    assert len(np.unique(draw(jax.random.key(0), split), axis=0)) == 3


def accountant(sigma, q, steps, delta):
    """dp-accounting itself."""
    ledger = dp_accounting.pld.PLDAccountant()
    ledger.compose(
        dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps
    )
    return ledger.get_epsilon(delta)


@pytest.mark.parametrize(
    ("noise", "gradients", "size", "count"),
    [  # the accountant is slow where the noise is little
        (4.8, 4, 40, 3),
        pytest.param(1.2, 1, 100, 50, marks=pytest.mark.slow),
        pytest.param(1.2, 4, 100, 50, marks=pytest.mark.long),
    ],
)
def test_the_ledger_is_the_accountant_s(noise, gradients, size, count):
    sizes = np.array([5, size, 5, 0, size])
    steps = np.array([5, count, 5, 0, 0])
    found = epsilons(Privacy(noise, 1.0, 1e-5), sizes, 10, steps, gradients)
    sigma = noise / math.sqrt(gradients)
    all_it_has = accountant(sigma, 1.0, 5, 1e-5)
    expected = [all_it_has, accountant(sigma, 10 / size, count, 1e-5), all_it_has]
    np.testing.assert_allclose(found[:3], expected, rtol=0.02)  # its grid is finer
    np.testing.assert_array_equal(found[3:], 0)


def test_without_noise_there_is_no_bound():
    np.testing.assert_array_equal(
        epsilons(Privacy(0.0, 1.0), np.array([5, 0]), 5, np.array([3, 0])), [math.inf, 0]
    )


@toys.each_method(fast=("fedem", "per_fedavg"), slow=("local", "fedpac", "apple", "fedavg_data"))
def test_the_ledger_counts_every_gradient_of_a_mini_batch(name, monkeypatch):
    """Counts the private gradients in a client's round with a single full batch."""
    calls = []

    def counted(privacy, key, *args):
        jax.debug.callback(lambda: calls.append(1))
        return private_mean(privacy, key, *args)

    monkeypatch.setattr(solvers, "private_mean", counted)
    federation = toys.make_federation((6, 6, 6, 6))
    problem = toys.make_problem(federation, **toys.network(name))
    problem = problem._replace(solver=problem.solver._replace(privacy=Privacy(0.5, 1.0)))
    algorithm = toys.make_algorithm(name, problem)
    _, records = toys.train(algorithm, problem, federation.client_data, 1)
    jax.effects_barrier()
    per_client = len(calls) / 4
    assert per_client >= 1 and np.isfinite(records[0].train_loss)
    ledger = algorithm.ledger
    # which send examples themselves
    assert (ledger.gradients == 0) == (name in ("fedavg_data", "perada"))
    if ledger.gradients:
        # FedEM's components, pFedMe's steps, ...: no more than the ledger states.
        assert per_client <= ledger.gradients * ledger.passes


@pytest.mark.slow
def test_a_run_s_ledger_is_of_its_own_cohorts_steps_and_sizes(tmp_path):
    """Uneven clients, half of them per round: each takes epochs x ceil(n_k / B) steps in each of its rounds."""
    sizes = (7, 2, 5, 4, 0, 3)
    rounds = 5
    size = 3
    epochs = 2
    federation = toys.make_federation(sizes)
    privacy = Privacy(1.1, 1.0, 1e-4)
    key = jax.random.key(3)
    problem = toys.make_problem(federation, batch_size=3, epochs=epochs, cohort=size)
    problem = problem._replace(solver=problem.solver._replace(privacy=privacy))
    algorithm = toys.make_algorithm("fedavg", problem)
    seen = []

    watched = toys.watched(algorithm, lambda number, client, ids: seen.append(int(client)))
    one_round = jax.jit(make_round(watched, problem.plan, size))
    state = toys.start(algorithm, problem, federation.client_data)
    for number in range(rounds):
        state, _ = one_round(key, np.int32(number), state, federation.client_data)
    jax.effects_barrier()
    counts = np.bincount(seen, minlength=6)
    assert counts.sum() == rounds * size and len(set(counts.tolist())) > 1
    steps = counts * np.array([epochs * math.ceil(n / 3) for n in sizes])
    experiment = toys.make_experiment("fedavg", problem, federation)

    def spent(**ledger):
        return scoring.spent(
            experiment,
            dataclasses.replace(algorithm, ledger=Ledger(**{"gradients": 1} | ledger)),
            key,
            rounds,
        )

    found = spent()
    expected = epsilons(privacy, np.array(sizes), 3, steps)
    np.testing.assert_allclose(found["epsilon_per_client"], expected)
    assert found["epsilon"] == max(found["epsilon_per_client"]) and found["unaccounted"] is None
    twice = spent(passes=2)
    np.testing.assert_allclose(
        twice["epsilon_per_client"], epsilons(privacy, np.array(sizes), 3, 2 * steps)
    )
    shared = spent(gradients=0, unaccounted="all")
    assert shared["epsilon"] is None and shared["unaccounted"] == "all"
    scaled = dataclasses.replace(federation, scaling=Scaling(np.zeros(3), np.ones(3)))
    experiment = toys.make_experiment("fedavg", problem, scaled)
    assert spent(unaccounted="all")["unaccounted"] == f"all; {BY_SCALING}" and "mean" in BY_SCALING


def test_a_missing_library_is_one_line(monkeypatch):
    import importlib

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ArgumentError, match=r"pip install 'pfljax\[privacy\]'"):
        Privacy(1.0, 1.0)


def test_clipping_counts_only_what_is_trained():
    """One example, a small norm, no noise, rate 1: each part moves by the norm, not by its share of it."""
    federation = toys.make_federation((1,))
    problem = toys.make_problem(federation, optax.sgd(1.0), hidden=(4,))
    params = problem.model.init(jax.random.key(0))
    solver = problem.solver._replace(privacy=Privacy(clip_norm=0.01))
    split = jax.tree.map(lambda leaf: leaf[0], federation.train)
    head = problem.model.mask(params, 1)
    masks = (head, tree.complement(head))

    @jax.jit
    def train(params):
        parts = [solver.part(mask) for mask in masks]
        key = jax.random.key(1)
        return [part.fit(key, part.begin(params), split, round_number=0) for part in parts]

    for mask, (state, _) in zip(masks, train(params), strict=True):
        moved = tree.subtract(state.whole, params)
        assert np.sqrt(tree.inner(moved, moved)) == pytest.approx(0.01, rel=1e-4)
        held = jax.tree.map(
            lambda chosen, leaf: not chosen and bool(jnp.any(leaf != 0)), mask, moved
        )
        assert not any(jax.tree.leaves(held))


CLIENTS = toys.make_federation((4, 4, 4, 4))
NOISY = Privacy(1.0, 1.0)


def models_of(rounds=1, privacy=NOISY, seed=0, trainer=None):
    """A global model's parameters after some rounds, flat."""
    trainer = trainer or Trainer([experiment_of(privacy, seed)])
    trainer.play(rounds)
    return flat(trainer.state.models)


def experiment_of(privacy=NOISY, seed=0):
    return toys.make_experiment(
        "fedavg", toys.make_problem(CLIENTS, cohort=2, privacy=privacy), CLIENTS, seed=seed
    )


def rounds_key(trainer):
    """The key of a trainer's rounds."""
    return make_key(trainer.experiments[0], trainer.keys[0], trainer.secrets[0], 1, 0)


def flat(models):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(models)])


@pytest.mark.slow
def test_the_noise_does_not_follow_from_the_seed():
    """Otherwise 2 model(sigma) - model(2 sigma) is the model without noise: each holds the same draws."""

    def trained(*noise):
        return models_of(privacy=Privacy(*noise))

    plain = trained(1e-9, 1.0, 1e-5, 3)
    once = trained(1.0, 1.0)
    twice = trained(2.0, 1.0)
    assert np.abs(2 * once - twice - plain).max() > 1e-3
    assert np.abs(once - trained(1.0, 1.0)).max() > 1e-3
    known = [trained(sigma, 1.0, 1e-5, 3) for sigma in (1.0, 2.0)]
    # which the noise seed allows
    np.testing.assert_allclose(2 * known[0] - known[1], plain, atol=1e-6)


@pytest.mark.slow
def test_cohorts_and_first_models_follow_from_the_seed():
    """So that a ledger can count them, and comparisons start alike."""
    trainers = [Trainer([experiment_of()]) for _ in range(2)]
    for trainer in trainers:
        trainer.play(3)
    ids = [
        [cohort_of(rounds_key(each), n, 4, 2).ids.tolist() for n in range(3)] for each in trainers
    ]
    plain = [
        cohort_of(jax.random.fold_in(jax.random.key(0), 1), n, 4, 2).ids.tolist() for n in range(3)
    ]
    assert ids == [plain, plain]
    assert trainers[0].histories[0].rows[0]["loss"] == trainers[1].histories[0].rows[0]["loss"]
    spent = [
        scoring.spent(each.experiments[0], each.compiled.algorithm, rounds_key(each), 3)
        for each in trainers
    ]
    assert spent[0] == spent[1]


@pytest.mark.slow
def test_a_resumed_run_draws_other_noise(tmp_path):
    """From one checkpoint, two resumed runs differ, and neither writes its secret."""
    Trainer([experiment_of()], outs=[tmp_path / "run"]).play(2, Schedule(1, 1))
    ends = []
    secrets = []
    for name in ("a", "b"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        trainer = Trainer([experiment_of()], outs=[tmp_path / name], resume=True)
        ends.append(models_of(3, trainer=trainer))
        secrets.append(np.asarray(jax.random.key_data(trainer.secrets[0])))
        written = b"".join(
            path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()
        )
        assert secrets[-1].tobytes() not in written
        assert not any(str(number).encode() in written for number in secrets[-1].tolist())
    assert np.abs(ends[0] - ends[1]).max() > 1e-3 and (secrets[0] != secrets[1]).any()


@pytest.mark.slow
def test_replicates_draw_their_own_noise():
    """Of equal runs in one kernel; with a seed for the noise, each is as if alone."""
    together = Trainer([experiment_of(), experiment_of()])
    together.play(2)
    first, second = (flat(part.models) for part in together.replicates.split(together.state))
    assert np.abs(first - second).max() > 1e-3
    seeded = Privacy(1.0, 1.0, 1e-5, 5)
    together = Trainer([experiment_of(seeded, seed=seed) for seed in (0, 1)])
    together.play(2)
    for seed, part in enumerate(together.replicates.split(together.state)):
        np.testing.assert_allclose(flat(part.models), models_of(2, seeded, seed=seed), atol=1e-6)


def test_the_secret_is_an_argument_of_the_program():
    """Runs with different secrets compile to the same text."""
    texts = set()
    plan = make_plan("map", devices=1)
    for _ in range(2):
        trainer = Trainer([experiment_of()])
        algorithm = trainer.experiments[0].algorithm(plan)
        init = functools.partial(lifting.init, algorithm, plan)
        state = jax.eval_shape(init, trainer.keys[0], CLIENTS.client_data)
        rounds = jax.jit(make_round(algorithm, plan, 2))
        texts.add(
            rounds.lower(rounds_key(trainer), np.int32(0), state, CLIENTS.client_data).as_text()
        )
    assert len(texts) == 1 and trainer.secrets[0] != trainer.keys[0]


def test_the_ledger_counts_the_cohorts_and_names_a_seed_for_the_noise():
    """Each client takes a step in each of its rounds."""
    key = jax.random.key(3)
    rounds = 5
    counts = sum(
        np.isin(np.arange(4), cohort_of(key, number, 4, 2).ids) for number in range(rounds)
    )
    assert len(set(counts.tolist())) > 1
    for privacy, named in ((Privacy(6.0, 1.0), False), (Privacy(6.0, 1.0, 1e-5, 5), True)):
        experiment = experiment_of(privacy)
        found = scoring.spent(
            experiment, experiment.algorithm(make_plan("map", devices=1)), key, rounds
        )
        np.testing.assert_allclose(
            found["epsilon_per_client"], epsilons(privacy, np.full(4, 4), 4, counts)
        )
        assert found["epsilon"] == max(found["epsilon_per_client"])
        assert (
            "the noise, which whoever knows its seed can subtract" in (found["unaccounted"] or "")
        ) == named
