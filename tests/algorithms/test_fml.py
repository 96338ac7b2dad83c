"""FML: rounds by hand, its limits, and newcomers."""

import jax
import numpy as np
import pytest
import toys
from networks import RATE, assert_row_close, descend, examples, gradient, logits, mean, play, row, softmax, step

SIZES, KNOBS = (2, 5, 1, 3), {"alpha": 0.3, "beta": 0.8}


def train(own, meme, x, y, alpha, beta):
    """A step of both models: mutual learning is cross entropy with targets that mix labels and predictions."""
    labels = np.eye(3)[y]
    of_own, of_meme = (softmax(logits(params, x)) for params in (own, meme))
    slope = gradient(own, x, alpha * labels + (1 - alpha) * of_meme)
    return step(own, slope, RATE), step(meme, gradient(meme, x, beta * labels + (1 - beta) * of_own), RATE)


def test_rounds_by_hand():
    federation, _, _, states, records = play("fml", 2, SIZES, KNOBS, epochs=2)
    meme = row(states[0].models, 0)
    own = [row(states[0].clients.own.model, k) for k in range(4)]
    for state in states[1:]:
        trained = []
        for k in range(4):
            shared, (x, y) = meme, examples(federation, k)
            for _ in range(2):
                own[k], shared = train(own[k], shared, x, y, **KNOBS)
            trained.append(shared)
            assert_row_close(state.clients.own.model, own[k], k)
        meme = mean(trained, SIZES)
        assert_row_close(state.models, meme)
    assert records[0].down == records[0].up - 4 * 4  # the meme, and n_k up


def test_loss_of_a_client_by_hand():
    """One client and one step: alpha CE + (1 - alpha) KL(meme || own)."""
    federation, _, _, states, records = play("fml", 1, (4,), KNOBS)
    (x, y), own, meme = examples(federation, 0), row(states[0].clients.own.model, 0), row(states[0].models, 0)
    p, q = softmax(logits(own, x)), softmax(logits(meme, x))
    wanted = -0.3 * np.log(p[range(4), y]).mean() + 0.7 * (q * np.log(q / p)).sum(axis=1).mean()
    np.testing.assert_allclose(records[0].train_loss, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [toys.Dropped, toys.Normalized])
def test_with_labels_only_it_is_local_training_beside_fedavg(model):
    federation, options = toys.make_federation(SIZES), {"model": model, "batch_size": 2, "epochs": 2}
    found = toys.play("fml", federation, 2, None, {"alpha": 1.0, "beta": 1.0}, **options).states[-1]
    fedavg = toys.play("fedavg", federation, 2, None, **options).states[-1]
    toys.assert_trees_close(found.models, fedavg.models, rtol=1e-5, atol=1e-6)
    if model is toys.Normalized:  # whose training draws nothing at random
        local = toys.play("local", federation, 2, None, **options).states[-1]
        toys.assert_trees_close(found.clients.own.model, local.models, rtol=1e-5, atol=1e-6)


def test_newcomers_learn_from_the_meme():
    """Without labels, a newcomer's model imitates the meme; with labels only, it trains alone."""
    newcomers, key = toys.make_federation((4, 3), seed=5), jax.random.key(0)
    _, problem, _, states, _ = play("fml", 1, SIZES, KNOBS)
    meme = row(states[-1].models, 0)
    for alpha in (0.0, 1.0):
        algorithm = toys.make_algorithm("fml", problem, alpha=alpha)
        found = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data)
        for k in range(2):
            x, y = examples(newcomers, k)
            start = problem.model.init(jax.random.split(jax.random.fold_in(key, k))[0])
            start = jax.tree.map(np.float64, start)
            targets = np.eye(3)[y] if alpha else softmax(logits(meme, x))
            assert_row_close(
                jax.tree.map(lambda leaf: leaf[:, 0], found.models), descend(start, x, targets, RATE, 2), k
            )
