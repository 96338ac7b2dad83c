"""FML: rounds by hand, and its limits."""

import networks
import numpy as np
import pytest
import toys
from by_hand import by_hand
from networks import RATE, gradient, logits, softmax, step
from quadratics import OPTIMIZER, SIZES

ALPHA = 0.3
BETA = 0.8


def mutual(params, other, x, y, weight):
    """A loss, weight CE + (1 - weight) KL(other || params), and the step on it.

    The gradient is that of the cross entropy with targets that mix labels and the other's predictions.
    """
    p = softmax(logits(params, x))
    q = softmax(logits(other, x))
    labels = np.eye(3)[y]
    loss = (
        -weight * np.log(p[range(len(y)), y]).mean()
        + (1 - weight) * (q * np.log(q / p)).sum(axis=1).mean()
    )
    return loss, step(params, gradient(params, x, weight * labels + (1 - weight) * q), RATE)


def fml(rounds):
    """Algorithm 1: both models take a step at once."""
    meme = networks.row(rounds.start("models"), 0)
    own = [networks.row(rounds.start("clients.row.params"), k) for k in rounds.clients]
    for _ in rounds:
        trained = []
        losses = []
        for k in rounds.clients:
            x, y = rounds.examples(k)
            shared = meme
            for _ in range(rounds.epochs):
                _, new = mutual(shared, own[k], x, y, BETA)
                loss, own[k] = mutual(own[k], shared, x, y, ALPHA)
                shared = new
                losses.append(loss)
            trained.append(shared)
        meme = rounds.mean(trained)
        loss = rounds.mean(np.reshape(losses, (4, -1)).mean(axis=1))
        yield {"models": [meme], "clients.row.params": own, "record.train_loss": loss}


def test_rounds_by_hand():
    by_hand("fml", fml, rounds=2, hidden=(6,), hyperparameters={"alpha": ALPHA, "beta": BETA})


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param("fedavg", toys.Dropped, marks=pytest.mark.slow),
        pytest.param("fedavg", toys.Normalized, marks=pytest.mark.slow),
        pytest.param("local", toys.Normalized, marks=pytest.mark.long),
    ],
)
def test_with_labels_only_it_is_local_training_beside_fedavg(name, model):
    """Local training draws other numbers at random, so that it has no dropout here."""
    federation = toys.make_federation(SIZES)
    options = {"model": model, "batch_size": 2, "epochs": 2}
    found = toys.play(
        "fml", federation, 2, OPTIMIZER, {"alpha": 1.0, "beta": 1.0}, **options
    ).states[-1]
    wanted = toys.play(name, federation, 2, OPTIMIZER, **options).states[-1].models
    models = found.models if name == "fedavg" else found.rows.params
    toys.assert_trees_close(models, wanted, rtol=1e-5, atol=1e-6)
