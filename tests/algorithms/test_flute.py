"""FLUTE by hand on networks with one hidden layer, with the slopes of the distance by finite differences."""

import numpy as np
import pytest
from by_hand import by_hand, stack
from networks import BODY, HEAD, RATE, features, gradient, row, step

SIZES = (2, 5, 0, 3, 4)
CLASSES = 3
HEAD_EPOCHS = 2
WIDTH = 1e-6


def distance(kernel, present):
    """The distance of a head's products, of unit norm, from those of the simplex's corners that a client has."""
    total = kernel.T @ kernel
    total = total / np.linalg.norm(total)
    corners = (np.eye(CLASSES) - np.full((CLASSES, CLASSES), 1 / CLASSES)) / np.sqrt(CLASSES - 1)
    return np.linalg.norm(total - corners * np.outer(present, present))


def slope_of(kernel, present):
    """By central differences."""
    slope = np.zeros_like(kernel)
    for position in np.ndindex(kernel.shape):
        change = np.zeros_like(kernel)
        change[position] = WIDTH
        ahead = distance(kernel + change, present)
        behind = distance(kernel - change, present)
        slope[position] = (ahead - behind) / (2 * WIDTH)
    return slope


def train(model, x, y, hyperparameters, layers):
    """A step on the loss with its three further terms."""
    z = features(model, x)
    kernel = model[HEAD]["kernel"]
    slopes = gradient(model, x, y, pull=2 * hyperparameters["features"] * z / len(y))
    further = (
        hyperparameters["collapse"] * slope_of(kernel, classes_of(y))
        + 2 * hyperparameters["weight_decay"] * kernel
    )
    slopes[HEAD]["kernel"] = slopes[HEAD]["kernel"] + further
    return step(model, slopes, RATE, layers)


def classes_of(y):
    """m_k, 1 for each class that a client has."""
    return np.isin(range(CLASSES), y).astype(float)


def flute(hyperparameters):
    """Clients train the head, then both layers; bodies are averaged, and heads take the server's step."""

    def reference(rounds):
        body = row(rounds.start(f"models.{BODY}"), 0)
        heads = [row(rounds.start(f"rows.{HEAD}"), k) for k in rounds.clients]

        for number in rounds:
            bodies = []
            active = rounds.active(number)
            for k in active:
                x, y = rounds.examples(k)
                model = {BODY: body, HEAD: heads[k]}
                for _ in range(HEAD_EPOCHS):
                    model = train(model, x, y, hyperparameters, (HEAD,))
                for _ in range(rounds.epochs):
                    model = train(model, x, y, hyperparameters, (BODY, HEAD))
                bodies.append(model[BODY])
                kernel = model[HEAD]["kernel"]
                rate = hyperparameters["server_learning_rate"] / rounds.problem.cohort_size
                heads[k] = model[HEAD] | {"kernel": kernel - rate * slope_of(kernel, classes_of(y))}

            body = rounds.mean(bodies, rounds.sizes[active])
            yield {
                f"models.{BODY}": stack([body]),
                f"rows.{HEAD}": heads,
                "predictions": [[{BODY: body, HEAD: head}] for head in heads],
            }

    return reference


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"collapse": 0.5, "weight_decay": 0.1, "features": 0.2, "server_learning_rate": 1.5},
        {"collapse": 0.0, "weight_decay": 0.0, "features": 0.05, "server_learning_rate": 0.5},
        {"collapse": 0.0, "weight_decay": 0.0, "features": 0.0, "server_learning_rate": 0.0},
    ],
)
def test_flute_by_hand(hyperparameters):
    """Without its terms, it trains a head and then both layers."""
    options = {"sizes": SIZES, "hidden": (6,), "rounds": 3, "epochs": 3, "cohort": 3}
    by_hand(
        "flute",
        flute(hyperparameters),
        hyperparameters=hyperparameters | {"head_epochs": HEAD_EPOCHS},
        rtol=1e-5,
        **options,
    )
