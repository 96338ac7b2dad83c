"""Methods that compute with parameters leave batch statistics to forward passes: rounds by hand, in float64.

The network normalizes its inputs, so that statistics are those of a client's inputs, whatever the parameters.
"""

import jax
import numpy as np
import toys
from by_hand import by_hand
from networks import row, step_by_differences
from quadratics import RATE

PARAMS = ("BatchNorm_0", "Dense_0")
STATISTICS = "batch_stats"
OPTIONS = {"model": toys.Normalized, "rounds": 2, "rtol": 1e-4, "atol": 1e-5}


def squared_error(model, x, y, statistics):
    """The mean squared error of a regression of inputs that are normalized by these statistics."""
    z = (x - statistics["mean"]) / np.sqrt(statistics["var"] + 0.1)
    z = z * model["BatchNorm_0"]["scale"]
    outputs = z @ model["Dense_0"]["kernel"] + model["Dense_0"]["bias"]
    return np.square(outputs[:, 0] - y).mean()


def of_batch(x):
    """The statistics of a mini-batch."""
    return {"mean": x.mean(axis=0), "var": x.var(axis=0)}


def moved(model, x, y, rate):
    """The model after a gradient step in training mode; its statistics stay."""
    return step_by_differences(
        lambda model: squared_error(model, x, y, of_batch(x)), model, PARAMS, rate
    )


def written(model, x):
    """The model's batch statistics after a forward pass in training mode."""
    old = model[STATISTICS]["BatchNorm_0"]
    new = jax.tree.map(lambda old, new: 0.7 * old + 0.3 * new, old, of_batch(x))
    return {"BatchNorm_0": new}


def combined(fn, *models):
    """fn of models' parameters, with the batch statistics of the first."""
    params = [{name: model[name] for name in PARAMS} for model in models]
    return models[0] | jax.tree.map(fn, *params)


def test_per_fedavg_writes_them_where_it_takes_the_outer_gradient():
    alpha = 0.05

    def client(rounds, k, theta):
        x, y = rounds.examples(k)
        for _ in range(rounds.epochs):
            adapted = moved(theta, x, y, alpha)
            outer = moved(adapted, x, y, rounds.rate)
            statistics = written(theta, x)
            theta = combined(lambda theta, a, b: theta + b - a, theta, adapted, outer)
            theta = theta | {STATISTICS: statistics}
        return theta

    def adapted(rounds, k, theta):
        x, y = rounds.examples(k)

        def value(model):
            return squared_error(model, x, y, model[STATISTICS]["BatchNorm_0"])

        return step_by_differences(value, theta, PARAMS, alpha)

    def reference(rounds):
        theta = row(rounds.start("models"), 0)
        for _ in rounds:
            theta = rounds.mean([client(rounds, k, theta) for k in rounds.clients])
            predictions = [[adapted(rounds, k, theta)] for k in rounds.clients]
            yield {"models": [theta], "predictions": predictions}

    by_hand("per_fedavg", reference, hyperparameters={"personal_learning_rate": alpha}, **OPTIONS)


def test_pfedme_writes_them_at_w():
    strength = 2.0
    rate = 0.05
    steps = 3
    beta = 0.5

    def near(theta, w):
        return (theta + rate * strength * w) / (1 + rate * strength)

    def toward(w, theta):
        return w - RATE * strength * (w - theta)

    def reference(rounds):
        w = row(rounds.start("models"), 0)
        for _ in rounds:
            trained = []
            personal = []
            for k in rounds.clients:
                x, y = rounds.examples(k)
                own = w
                for _ in range(rounds.epochs):
                    theta = own
                    for _ in range(steps):
                        theta = combined(near, moved(theta, x, y, rate), own)
                    statistics = {STATISTICS: written(own, x)}
                    own = combined(toward, own, theta) | statistics
                    theta = theta | statistics
                trained.append(own)
                personal.append(theta)
            mean = rounds.mean(trained)
            w = (
                mean
                | combined(lambda a, b: (1 - beta) * a + beta * b, w, mean)
                | {STATISTICS: mean[STATISTICS]}
            )
            yield {
                "models": [w],
                "clients.row": personal,
                "predictions": [[theta] for theta in personal],
            }

    hyperparameters = {
        "mu": strength,
        "personal_learning_rate": rate,
        "personal_steps": steps,
        "beta": beta,
    }
    by_hand("pfedme", reference, hyperparameters=hyperparameters, **OPTIONS)


def test_apfl_writes_those_of_the_mixture_beside_the_client_s_own_model():
    alpha = 0.3

    def mixed(v, w):
        return combined(lambda v, w: alpha * v + (1 - alpha) * w, v, w)

    def reference(rounds):
        w = row(rounds.start("models"), 0)
        v = [row(rounds.start("clients.row.personal.params"), k) for k in rounds.clients]
        for _ in rounds:
            trained = []
            for k in rounds.clients:
                x, y = rounds.examples(k)
                own = w
                for _ in range(rounds.epochs):
                    mixture = mixed(v[k], own)
                    step = moved(mixture, x, y, rounds.rate)
                    statistics = {STATISTICS: written(v[k], x)}
                    v[k] = (
                        combined(lambda v, m, n: v + alpha * (n - m), v[k], mixture, step)
                        | statistics
                    )
                    own = moved(own, x, y, rounds.rate) | {STATISTICS: written(own, x)}
                trained.append(own)
            w = rounds.mean(trained)
            predictions = [[mixed(own, w)] for own in v]
            yield {"models": [w], "clients.row.personal.params": v, "predictions": predictions}

    by_hand(
        "apfl", reference, hyperparameters={"alpha": alpha, "alpha_learning_rate": 0.0}, **OPTIONS
    )
