"""PerAda by hand on networks with one hidden layer; its limits, and what travels."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import RATE, examples, gradient, logits, mean, row, softmax, step

SIZES = (2, 5, 0, 3, 4)
MODEL = 4 * (3 * 6 + 6 + 6 * 3 + 3)


def train(params, x, y, steps, anchor=None, strength=0.0):
    """Steps on the mean loss + strength / 2 |params - anchor|^2."""
    for _ in range(steps):
        slopes = gradient(params, x, y)
        if anchor is not None:
            slopes = jax.tree.map(lambda slope, a, b: slope + strength * (a - b), slopes, params, anchor)
        params = step(params, slopes, RATE)
    return params


def distill(params, teacher, x, steps, rate):
    """Adam on the mean KL(teacher || student), with PyTorch's cosine schedule."""
    first = second = jax.tree.map(np.zeros_like, params)
    for t in range(steps):
        slopes = gradient(params, x, softmax(teacher))
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, slopes)
        now = rate * (1 + np.cos(np.pi * t / steps)) / 2
        move = lambda p, m, v, t=t, now=now: (
            p - now * (m / (1 - 0.9 ** (t + 1))) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
        )
        params = jax.tree.map(move, params, first, second)
    return params


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_rounds_by_hand(share):
    knobs = {"strength": 0.7, "share": share, "steps": 5, "rate": 0.02}
    federation, problem, algorithm, states, records = networks.play("perada", 2, SIZES, knobs=knobs, epochs=3)
    x, size = states[0].server
    x, size = np.float64(x), int(size)
    everything = np.concatenate([examples(federation, k)[0] for k in range(5)])
    assert size == round(share * 14) and all((everything == one).all(axis=1).any() for one in x[:size])
    w, own = row(states[0].models, 0), [row(states[0].clients.own.model, k) for k in range(5)]
    for state in states[1:]:
        active, trained = [k for k in range(5) if SIZES[k]], []
        for k in active:
            own[k] = train(own[k], *examples(federation, k), 3, w, 0.7)
            trained.append(train(w, *examples(federation, k), 3))
        sizes = [SIZES[k] for k in active]
        teacher = np.average([logits(each, x[:size]) for each in trained], axis=0, weights=sizes)
        plain = mean(trained, sizes)
        w = distill(plain, teacher, x[:size], 5, 0.02)
        assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (w, plain)), strict=True)) > 5e-3
        toys.assert_trees_close(row(state.models, 0), w, rtol=1e-5, atol=1e-5)
    found = toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data).models
    for k in range(5):
        toys.assert_trees_close(row(row(found, k), 0), own[k], rtol=1e-5, atol=1e-5)
    assert [(record.down, record.up) for record in records] == [(5 * MODEL, 4 * (MODEL + 4))] * 2  # and n_k
    assert algorithm.ledger.gradients == 0  # epsilon covers no examples at the server
    newcomers = toys.make_federation((3, 4), seed=5)
    new = toys.adapt(algorithm, problem, jax.random.key(4), states[-1], newcomers.client_data).models
    expected = train(w, *examples(newcomers, 1), 3 * problem.rounds, w, 0.7)
    toys.assert_trees_close(row(row(new, 1), 0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("knobs", [{"share": 0.0}, {"rate": 0.0}])
def test_without_distillation_it_is_ditto(knobs):
    options = {"rounds": 3, "sizes": SIZES, "batch_size": 2, "epochs": 2}
    found = networks.play("perada", knobs={"strength": 0.3} | knobs, **options)
    wanted = networks.play("ditto", knobs={"strength": 0.3}, **options)
    toys.assert_trees_close(found.states[-1].models, wanted.states[-1].models, rtol=1e-5, atol=1e-6)
    toys.assert_trees_close(found.states[-1].clients.own, wanted.states[-1].clients.own, rtol=1e-5, atol=1e-6)
    assert found.algorithm.ledger.gradients == (0 if "rate" in knobs else 2)
    assert [record.up for record in found.records] == [record.up for record in wanted.records]


def test_distillation_pulls_the_mean_to_the_teachers():
    """The global model's predictions for the server's examples come nearer to the mean of the clients' logits."""
    knobs = {"share": 1.0, "steps": 100, "rate": 0.01}
    distances = []
    for steps in (1, 100):
        federation, *_, states, _ = networks.play("perada", 1, SIZES, knobs=knobs | {"steps": steps}, epochs=20)
        x, start = np.float64(states[0].server[0]), row(states[0].models, 0)
        active = [k for k in range(5) if SIZES[k]]
        trained = [train(start, *examples(federation, k), 20) for k in active]
        teacher = softmax(np.average([logits(m, x) for m in trained], axis=0, weights=[SIZES[k] for k in active]))
        student = softmax(logits(row(states[1].models, 0), x))
        distances.append((teacher * np.log(teacher / student)).sum(axis=1)[:14].mean())
    assert distances[1] < 0.3 * distances[0]
