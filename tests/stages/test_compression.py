"""Compressed messages against NumPy: what arrives, what is left out, what it weighs, and every method with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from networks import softmax
from quadratics import OPTIMIZER, RATE, gradient, loss_of
from quadratics import vectors as of_models
from staged import client_notes, staged

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Traffic, Upload
from pfljax.exchange.rounds import cohort_of
from pfljax.stages.compression import BLOCK, Compression, Compressor, Uploads, parsed

SIZES = (4, 3, 5, 2)
DRAWS = 4000


def stacked(seed=0):
    """Updates (2, ...) with a matrix, a vector, and whole numbers that are sent as they are."""
    rng = np.random.default_rng(seed)
    model = {
        "a": jnp.float32(rng.normal(size=(2, 5, 4))),
        "b": jnp.float32(rng.normal(size=(2, 3))),
    }
    return {"model": model, "steps": jnp.int32([3, 4])}


def vectors(update):
    """(2, 23) float64."""
    leaves = [np.float64(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(update["model"])]
    return np.concatenate(leaves, axis=1)


def compiled(compressor):
    """(key, update) -> what arrives."""
    return jax.jit(lambda key, update: compressor(key, update))


def mean_arrived(compressor, update):
    """(2, 23) mean over many draws of what arrives, and its standard error."""
    send = jax.jit(jax.vmap(lambda key: compressor(key, update)["model"]))
    found = send(jax.random.split(jax.random.key(1), DRAWS))
    found = np.concatenate(
        [np.float64(leaf).reshape(DRAWS, 2, -1) for leaf in jax.tree.leaves(found)], axis=2
    )
    return found.mean(axis=0), found.std(axis=0) / np.sqrt(DRAWS)


@pytest.mark.parametrize(("text", "bytes_sent"), [("topk:0.2", 5 * 8), ("sign", 3 + 4)])
def test_the_largest_entries_and_signs(text, bytes_sent):
    update = stacked()
    found = compiled(parsed("upload", text))(jax.random.key(0), update)
    rows = vectors(update)
    if text == "sign":
        expected = np.abs(rows).mean(axis=1, keepdims=True) * np.sign(rows)
    else:
        smallest = np.sort(np.abs(rows), axis=1)[:, [-5]]  # 0.2 of 23 entries
        expected = np.where(np.abs(rows) >= smallest, rows, 0)
    np.testing.assert_allclose(vectors(found), expected, rtol=1e-6)
    np.testing.assert_array_equal(found["steps"], update["steps"])
    check_bytes(text, bytes_sent)


def check_bytes(text, expected):
    """An update of 23 entries and a number of 4 bytes."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked())
    assert parsed("upload", text).num_bytes(shapes) == expected + 4


@pytest.mark.parametrize(
    ("text", "bytes_sent"),
    [
        ("quantize:1", 3 + 4),
        ("quantize:2", 6 + 4),
        pytest.param("quantize:8", 23 + 4, marks=pytest.mark.slow),
        ("randomk:0.5", 12 * 4),
    ],
)
def test_what_is_drawn_at_random_is_right_on_average(text, bytes_sent):
    update = stacked()
    compressor = parsed("upload", text)
    mean, error = mean_arrived(compressor, update)
    np.testing.assert_array_less(np.abs(mean - vectors(update)), 5 * error + 1e-6)
    check_bytes(text, bytes_sent)


@pytest.mark.parametrize(
    "bits", [1, 3, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (2, 8))]
)
def test_quantized_values_lie_on_a_grid_of_each_block(bits):
    rows = np.random.default_rng(2).normal(size=(2, BLOCK + 40))
    rows[:, BLOCK:] *= 100
    quantize = compiled(Compressor("quantize", bits))
    found = np.float64(quantize(jax.random.key(3), {"a": np.float32(rows)})["a"])
    for block in (slice(0, BLOCK), slice(BLOCK, None)):
        largest = np.abs(np.float32(rows[:, block])).max(axis=1, keepdims=True)
        places = found[:, block] / largest * (1 if bits == 1 else 2 ** (bits - 1) - 1)
        np.testing.assert_allclose(places, np.round(places), atol=1e-3)
        assert (
            len(np.unique(np.round(places))) == 2
            if bits == 1
            else 3 <= len(np.unique(np.round(places))) < 2**bits
        )
        unit = largest * (2 if bits == 1 else 1 / (2 ** (bits - 1) - 1))
        assert (np.abs(found[:, block] - rows[:, block]) <= unit * 1.001).all()
    zeros = quantize(jax.random.key(3), {"a": np.zeros_like(rows, np.float32)})["a"]
    np.testing.assert_array_equal(zeros, 0)


def test_low_rank():
    """A matrix of rank 2 arrives whole with rank 2; with rank 1, as a projection of rank 1."""
    rng = np.random.default_rng(4)
    matrix = rng.normal(size=(1, 5, 2)) @ rng.normal(size=(1, 2, 4))
    update = {"a": jnp.float32(matrix), "b": jnp.float32(rng.normal(size=(1, 3)))}
    whole = compiled(Compressor("lowrank", 2))(jax.random.key(0), update)
    np.testing.assert_allclose(whole["a"], matrix, atol=1e-5)
    np.testing.assert_array_equal(whole["b"], update["b"])
    one = np.float64(compiled(Compressor("lowrank", 1))(jax.random.key(0), update)["a"][0])
    u, s, _ = np.linalg.svd(one)
    assert s[1] < 1e-5 * s[0]
    np.testing.assert_allclose(one, np.outer(u[:, 0], u[:, 0]) @ matrix[0], atol=1e-5)
    check_bytes("lowrank:2", 4 * (2 * (5 + 4) + 3))
    check_bytes("lowrank:9", 4 * (4 * (5 + 4) + 3))


def iterated(matrices, q):
    """What arrives of matrices that come one after the other, by PowerSGD's power iterations in float64."""
    sent = []
    for matrix in np.float64(matrices):
        p = np.linalg.qr(matrix @ q)[0]
        q = matrix.T @ p
        sent.append(p @ q.T)
    return np.array(sent)


def test_low_rank_goes_on_from_the_last_factors():
    """Of changing matrices by NumPy; of one and the same, in the end the best approximation of that rank."""
    rng = np.random.default_rng(5)
    send = jax.jit(Compressor("lowrank", 2).low_rank)
    keys = jax.random.split(jax.random.key(0), 40)
    matrices = rng.normal(size=(4, 6, 5))

    def update(matrix):
        return {"a": np.float32(matrix[None]), "b": np.ones((1, 3), np.float32)}

    last = ()
    found = []
    for key, matrix in zip(keys, matrices, strict=False):
        sent, last = send(key, update(matrix), last)
        found.append(sent["a"][0])
        assert last[0].shape == (1, 5, 2) and (sent["b"] == 1).all()
    first = np.asarray(jax.random.normal(jax.random.split(keys[0], 2)[0], (5, 2)))
    np.testing.assert_allclose(found, iterated(matrices, first), atol=1e-4)

    alone, last = send(keys[0], update(matrices[0]), ())
    for key in keys:
        sent, last = send(key, update(matrices[0]), last)
    u, s, v = np.linalg.svd(matrices[0])
    np.testing.assert_allclose(sent["a"][0], u[:, :2] * s[:2] @ v[:2], atol=1e-3)
    assert np.linalg.norm(alone["a"][0] - matrices[0]) > 1.05 * np.sqrt((s[2:] ** 2).sum())


def test_directions_without_a_factor_are_drawn_anew():
    """A matrix of zeros leaves no Q; the next one arrives as if it were the first."""
    send = jax.jit(Compressor("lowrank", 1).low_rank)
    first, second = jax.random.split(jax.random.key(1))
    matrix = {"a": np.float32(np.random.default_rng(6).normal(size=(2, 4, 3)))}
    _, last = send(first, jax.tree.map(np.zeros_like, matrix), ())
    assert (last[0] == 0).all()
    toys.assert_trees_close(send(second, matrix, last), send(second, matrix, ()), rtol=1e-6)


def test_clients_keep_their_factors():
    """Each sends the projection of its update, and what was left out, on M Q; those without a turn keep their Q."""
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, OPTIMIZER, cohort=3)
    method = toys.make_algorithm("fedavg", problem)
    algorithm = staged(problem, method, federation, compression=Compression("lowrank:1"))
    states, _ = toys.train(algorithm, problem, federation.client_data, 4)

    def kernel(models):
        return np.float64(models["Dense_0"]["kernel"])

    def update(k, layer):
        """The change of the kernel that client k sends."""
        x = federation.train.x[k, : SIZES[k]]
        y = federation.train.y[k, : SIZES[k]]
        errors = (
            softmax(x @ np.float64(layer["kernel"][0]) + np.float64(layer["bias"][0]))
            - np.eye(3)[y]
        )
        return -RATE * x.T @ errors / SIZES[k]

    for number in range(1, 4):
        before, after = (client_notes(states[at], "upload") for at in (number, number + 1))
        updates = np.stack([update(k, states[number].models["Dense_0"]) for k in range(4)])
        matrices = updates + kernel(before.left.update)[:, 0]
        cohort = np.asarray(cohort_of(jax.random.key(0), number, 4, 3).ids)
        for k in range(4):
            q, new = (np.float64(note.factors[0])[k, 0] for note in (before, after))
            if k not in cohort or not (q != 0).any():
                assert k in cohort or (q == new).all()
                continue
            p = np.linalg.qr(matrices[k] @ q)[0]
            sent = p @ p.T @ matrices[k]
            np.testing.assert_allclose(
                kernel(after.left.update)[k, 0], matrices[k] - sent, rtol=1e-3, atol=1e-5
            )
            np.testing.assert_allclose(np.outer(new, new), sent.T @ sent, rtol=1e-3, atol=1e-5)


def updates_by_hand(federation, theta):
    """(K, d) every client's one full-batch step on a linear model of one output."""
    return np.array(
        [-RATE * gradient(federation, k, theta) for k in range(len(federation.train.size))]
    )


def largest(rows, num):
    """The rows with zeros for all but the `num` largest entries."""
    return np.where(np.abs(rows) >= np.sort(np.abs(rows), axis=1)[:, [-num]], rows, 0)


@pytest.mark.parametrize("corrects", [True, pytest.param(False, marks=pytest.mark.long)])
def test_error_feedback_sends_later_what_was_left_out(corrects):
    """FedAvg with the two largest of four entries, five rounds in NumPy; cohorts of three of four clients."""
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, OPTIMIZER, cohort=3)
    compression = Compression("topk:0.5", error_feedback=corrects)
    method = toys.make_algorithm("fedavg", problem)
    algorithm = staged(problem, method, federation, compression=compression)
    states, records = toys.train(algorithm, problem, federation.client_data, 5)
    cohorts = [np.asarray(cohort_of(jax.random.key(0), n, 4, 3).ids) for n in range(5)]
    theta = of_models(states[0].models)[0]
    left = np.zeros((4, 4))
    for number, cohort in enumerate(cohorts):
        whole = updates_by_hand(federation, theta) + left
        sent = largest(whole, 2)
        left[cohort] = (whole - sent)[cohort] * corrects
        theta = theta + np.average(sent[cohort], axis=0, weights=federation.train.size[cohort])
        np.testing.assert_allclose(
            of_models(states[number + 1].models)[0], theta, rtol=1e-4, atol=1e-5
        )
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert [record.up for record in records] == [3 * (2 * 8 + 4)] * 5
    assert [record.down for record in records] == [3 * 4 * 4] * 5


def test_a_server_keeps_what_it_sends_compressed():
    """Clients that do not train change nothing, however coarse what they receive is."""
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(0.0))
    method = toys.make_algorithm("fedavg", problem)
    compression = Compression("none", "quantize:2")
    algorithm = staged(problem, method, federation, compression=compression)
    states, records = toys.train(algorithm, problem, federation.client_data, 2)
    toys.assert_trees_close(states[2].models, states[0].models, rtol=1e-5, atol=1e-6)
    assert [float(record.down) for record in records] == [
        4 * (1 + 4)
    ] * 2  # 4 entries of 2 bits, and their scale
    # They do receive coarse models, another one in each round.
    theta = of_models(states[0].models)[0]
    exact = np.average([loss_of(federation, k, theta) for k in range(4)], weights=SIZES)
    losses = [float(record.train_loss) for record in records]
    assert min(abs(loss - exact) for loss in losses) > 1e-4 and abs(losses[0] - losses[1]) > 1e-4


def test_fedexp_is_told_the_norms_of_what_arrives():
    """Its server's step is the mean of |u_k|^2 by 2 |mean u|^2, at least 1; eps is negligible here.

    Without error feedback, nothing that is left out is sent in the second round.
    """
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, OPTIMIZER)
    plain = toys.make_algorithm("fedexp", problem, eps=1e-8)
    compression = Compression("topk:0.25", error_feedback=False)
    algorithm = staged(problem, plain, federation, compression=compression)
    states, records = toys.train(algorithm, problem, federation.client_data, 2)

    def step(updates):
        mean = np.average(updates, axis=0, weights=SIZES)
        rate = np.average((updates**2).sum(axis=1), weights=SIZES) / (2 * (mean**2).sum())
        return max(rate, 1), mean

    theta = of_models(states[0].models)[0]
    whole = updates_by_hand(federation, theta)
    assert (
        step(largest(whole, 1))[0] > 1 and abs(step(whole)[0] - step(largest(whole, 1))[0]) > 0.01
    )
    for state, record in zip(states[1:], records, strict=True):
        rate, mean = step(
            largest(updates_by_hand(federation, theta), 1)
        )  # one of four entries is sent
        np.testing.assert_allclose(record.metrics["server_rate"], rate, rtol=1e-4)
        theta = theta + rate * mean
        np.testing.assert_allclose(of_models(state.models)[0], theta, rtol=1e-4, atol=1e-5)


def test_a_method_that_sends_a_share_still_does():
    half = toys.make_algorithm("fedavg", toys.make_problem(toys.make_federation(SIZES)))
    half = dataclasses.replace(half, traffic=lambda whole: whole._replace(upload=whole.upload / 2))
    shapes = Upload(jax.ShapeDtypeStruct((10,), np.float32), jax.ShapeDtypeStruct((), np.float32))
    compressed = Uploads(Compressor("topk", 0.2), half).declare(half)
    found = compressed.traffic(Traffic(40, 44, 0, 0, ({}, shapes)))
    assert found.upload == (2 * 8 + 4) / 2 and found.model == 40


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fedavg", {"upload": "topk"}, r"^upload=topk: accepted: none, topk:SHARE"),
        ("fedavg", {"upload": "topk:0"}, r"^upload=topk:0: accepted"),
        ("fedavg", {"upload": "topk:1.5"}, r"^upload=topk:1.5: accepted"),
        ("fedavg", {"upload": "quantize:9"}, r"^upload=quantize:9: accepted"),
        ("fedavg", {"upload": "lowrank:1.5"}, r"^upload=lowrank:1.5: accepted"),
        ("fedavg", {"upload": "sign:2"}, r"^upload=sign:2: accepted"),
        ("fedavg", {"upload": "zip"}, r"^upload=zip: accepted"),
        ("fedavg", {"download": "topk:0.1"}, r"^download=topk:0.1: accepted: none, quantize:BITS"),
        (
            "fedavg",
            {"error_feedback": False},
            r"^error_feedback=False: applies only with upload=topk",
        ),
        (
            "local",
            {"upload": "sign"},
            r"^upload=sign: accepted for this method: none; no client sends anything",
        ),
        (
            "local",
            {"download": "quantize:8"},
            r"^download=quantize:8: accepted for this method: none",
        ),
        (
            "fedamp",
            {"upload": "sign"},
            r"^upload=sign: accepted for this method: none, quantize:BITS; it sends models",
        ),
    ],
)
def test_bad_compression_is_refused(method, options, message):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation)
    with pytest.raises(ArgumentError, match=message):
        compression = Compression(**options)
        staged(problem, toys.make_algorithm(method, problem), federation, compression=compression)


def test_error_feedback_corrects_updates_of_stale_models():
    """FedBuff's clients contribute to one model, however old the one that they received is; here all are new."""
    federation = toys.make_federation((4, 3, 5), "regression")
    problem = toys.make_problem(federation, OPTIMIZER)
    method = toys.make_algorithm("fedbuff", problem, staleness=0.0)
    algorithm = staged(problem, method, federation, compression=Compression("topk:0.25"))
    states, _ = toys.train(algorithm, problem, federation.client_data, 3)
    theta = of_models(states[0].models)[0]
    left = np.zeros((3, 4))
    for state in states[1:]:
        whole = updates_by_hand(federation, theta) + left
        sent = largest(whole, 1)
        left = whole - sent
        theta = theta + np.average(sent, axis=0, weights=(4, 3, 5))
        np.testing.assert_allclose(of_models(state.models)[0], theta, rtol=1e-4, atol=1e-5)
