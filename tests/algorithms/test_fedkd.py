"""FedKD: rounds by hand, its compression, and its limits."""

import functools

import jax
import jax.numpy as jnp
import networks
import numpy as np
import optax
import pytest
import toys
from by_hand import by_hand, play
from networks import RATE, features, gradient, logits, softmax, step
from quadratics import OPTIMIZER, SIZES

from pfljax.algorithms import fedkd

WIDTH = 4
OPTIONS = {
    "hidden": (WIDTH,),
    "rounds": 2,
    "hyperparameters": {"distillation": 0.7, "energy": 0.6, "last_energy": 0.9},
}


def truncated(matrix, energy):
    """The fewest leading singular values whose squares are more than a share of all, and their number."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    rank = next((r for r in range(len(s)) if (s[:r] ** 2).sum() > energy * (s**2).sum()), len(s))
    return u[:, :rank] * s[:rank] @ v[:rank], rank


def compressed(update, energy):
    """An update with truncated kernels, and the share of its numbers that travel."""
    found = {}
    sent = 0
    for layer, leaves in update.items():
        kernel, rank = truncated(leaves["kernel"], energy)
        found[layer] = {"kernel": kernel, "bias": leaves["bias"]}
        sent += rank * (sum(kernel.shape) + 1) + leaves["bias"].size
    return found, sent / sum(leaf.size for leaf in jax.tree.leaves(update))


def train(own, mentee, projection, x, y, strength, decay=0.0):
    """A step of the mentor, the mentee and the matrix, each with weight decay."""
    n = len(y)
    labels = np.eye(3)[y]
    p, q = (softmax(logits(params, x)) for params in (own, mentee))
    known = np.maximum(-np.log(p[range(n), y]) - np.log(q[range(n), y]), fedkd.LEAST)[:, None]
    far = features(own, x) - features(mentee, x) @ projection
    pull = strength * 2 * far / known / far.size

    def moved(params, mine, other, pull):
        """p - (labels + strength (other - p) / known) is the slope of both terms in the logits."""
        targets = labels + strength / known * (other - mine)
        slopes = gradient(params, x, targets, pull=pull)
        return step(
            params, jax.tree.map(lambda slope, leaf: slope + decay * leaf, slopes, params), RATE
        )

    turned = projection + RATE * (features(mentee, x).T @ pull - decay * projection)
    return moved(own, p, q, pull), moved(mentee, q, p, -pull @ projection.T), turned


def reference(rounds, decay=0.0):
    """Algorithm 1; the energy rises to the last one."""
    mentee = networks.row(rounds.start("models"), 0)
    own = [networks.row(rounds.start("clients.row.mentor.params"), k) for k in rounds.clients]
    projections = [np.eye(WIDTH) for _ in rounds.clients]
    for number in rounds:
        energy = (0.75, 0.9)[number]
        updates = []
        shares = []
        for k in rounds.clients:
            shared = mentee
            for _ in range(rounds.epochs):
                own[k], shared, projections[k] = train(
                    own[k], shared, projections[k], *rounds.examples(k), 0.7, decay
                )
            update, share = compressed(jax.tree.map(np.subtract, shared, mentee), energy)
            updates.append(update)
            shares.append(share)

        mean, _ = compressed(rounds.mean(updates), energy)
        mentee = jax.tree.map(np.add, mentee, mean)
        yield {
            "models": [mentee],
            "clients.row.mentor.params": own,
            "clients.row.projection.params": projections,
            "record.metrics.upload_share": np.mean(shares),
        }


def test_rounds_by_hand():
    by_hand("fedkd", reference, **OPTIONS)


def test_an_optimizer_s_weight_decay_is_that_of_what_it_moves():
    optimizer = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(RATE))
    by_hand("fedkd", functools.partial(reference, decay=0.5), optimizer=optimizer, **OPTIONS)


def test_matrices_keep_the_fewest_singular_values():
    rng = np.random.default_rng(0)
    shapes = {"kernel": (2, 6, 4), "filters": (2, 3, 2, 4), "wide": (2, 3, 4)}
    update = {name: rng.normal(size=shape) for name, shape in shapes.items()} | {
        "bias": np.ones((2, 4))
    }
    leading = jax.jit(fedkd.leading)
    for energy in (0.1, 0.6, 0.97, 1.0):
        found, share = leading(jax.tree.map(jnp.float32, update), jnp.float32(energy))
        sent = 8
        for name in shapes:
            for k in range(2):
                kernel, rank = truncated(update[name][k].reshape(-1, 4), energy)
                np.testing.assert_allclose(
                    found[name][k].reshape(-1, 4), kernel, rtol=1e-5, atol=1e-5
                )
                sent += rank * (len(kernel) + 5)
        np.testing.assert_array_equal(found["bias"], 1)
        np.testing.assert_allclose(share, sent / (48 + 48 + 24 + 8), rtol=1e-6)


def test_batch_statistics_are_the_clients_and_their_mean():
    """Those of the inputs, which do not depend on the models."""
    federation = toys.make_federation(SIZES)
    hyperparameters = {"energy": 1.0, "last_energy": 1.0}
    states = toys.play(
        "fedkd", federation, 1, OPTIMIZER, hyperparameters, model=toys.Normalized, epochs=2
    ).states
    expected = []
    for k, size in enumerate(SIZES):
        x = np.float64(federation.train.x[k, :size])
        mean = np.zeros(3)
        var = np.ones(3)
        for _ in range(2):
            mean = 0.7 * mean + 0.3 * x.mean(axis=0)
            var = 0.7 * var + 0.3 * x.var(axis=0)
        expected.append((mean, var))

    own = states[1].rows.mentor.params["batch_stats"]["BatchNorm_0"]
    found = np.stack([own["mean"], own["var"]], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    shared = states[1].models["batch_stats"]["BatchNorm_0"]
    mean = np.average(expected, axis=0, weights=SIZES)
    np.testing.assert_allclose([shared["mean"][0], shared["var"][0]], mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param("fedavg", toys.Dropped, marks=pytest.mark.slow),
        pytest.param("fedavg", toys.Normalized, marks=pytest.mark.long),
        pytest.param("local", toys.Normalized, marks=pytest.mark.long),
    ],
)
def test_alone_and_uncompressed_it_is_local_training_beside_fedavg(name, model):
    """Local training draws other numbers at random, so that it has no dropout here."""
    federation = toys.make_federation(SIZES)
    options = {"model": model, "batch_size": 2, "epochs": 2}
    hyperparameters = {"distillation": 0.0, "energy": 1.0, "last_energy": 1.0}
    found = toys.play("fedkd", federation, 2, OPTIMIZER, hyperparameters, **options).states[-1]
    wanted = toys.play(name, federation, 2, OPTIMIZER, **options).states[-1].models
    models = found.models if name == "fedavg" else found.rows.mentor.params
    toys.assert_trees_close(models, wanted, rtol=1e-5, atol=1e-5)


def test_fitted_examples_do_not_divide_by_zero():
    """Both models' losses of all examples underflow to 0, and their features differ."""
    federation = toys.make_federation(SIZES)
    federation.train.y[...] = 1
    state = play("fedkd", federation=federation, **OPTIONS | {"rounds": 0}).states[0]

    def certain(models):
        sure = np.zeros_like(models["Dense_1"]["bias"]) + 100 * np.eye(3, dtype=np.float32)[1]
        return models | {"Dense_1": models["Dense_1"] | {"bias": sure}}

    mentor = state.rows.mentor
    rows = state.rows._replace(mentor=mentor._replace(params=certain(mentor.params)))
    state = state.with_models(certain(state.models)).with_rows(rows)
    after = play("fedkd", federation=federation, state=state, **OPTIONS | {"rounds": 1}).states[1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
