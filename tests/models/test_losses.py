"""Losses per example: the known ones in NumPy, and one's own in every method, with privacy and batch statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from scipy.special import log_softmax

import pfljax as pfl
from pfljax.models import losses

RNG = np.random.default_rng(0)


def test_cross_entropy_smooths_labels_and_ignores_places_without_a_class():
    outputs = RNG.normal(size=(3, 4, 5))
    y = np.array([[0, 4, -1, 2], [255, 1, 5, -100], [3, 3, 3, 3]])
    target = 0.8 * np.eye(5)[np.clip(y, 0, 4)] + 0.2 / 5
    each = -(target * log_softmax(outputs, axis=-1)).sum(axis=-1)
    expected = [each[0, [0, 1, 3]].mean(), each[1, 1], each[2].mean()]
    np.testing.assert_allclose(
        losses.cross_entropy(outputs, y, label_smoothing=0.2), expected, rtol=1e-5
    )


def test_losses_of_values_and_labels_are_means_over_them():
    outputs, y = RNG.normal(size=(2, 3, 4)).astype(np.float32) * 2
    error = np.abs(outputs - y)
    np.testing.assert_allclose(losses.mse(outputs, y), (error**2).mean(axis=1), rtol=1e-5)
    expected = np.where(error < 1, error**2 / 2, error - 0.5).mean(axis=1)
    np.testing.assert_allclose(losses.huber(outputs, y), expected, rtol=1e-5)
    labels = (y > 0).astype(int)
    p = 1 / (1 + np.exp(-outputs))
    expected = -np.where(labels, np.log(p), np.log(1 - p)).mean(axis=1)
    np.testing.assert_allclose(losses.bce(outputs, labels), expected, rtol=1e-5)


@pytest.fixture(scope="module")
def clients():
    return pfl.data.digits(num_clients=4, train_examples=8)


def own(outputs, y):
    """The cross entropy in other words."""
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[..., None], axis=-1)[..., 0]


LINEAR = pfl.models.MLP(hidden=())
SLOW = pytest.mark.slow
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("method", "model", "options"),
    [
        pytest.param(pfl.FedAvg(), LINEAR, {"batch_size": 4}, id="fedavg", marks=LONG),
        pytest.param(
            pfl.FedAvg(), LINEAR, {"privacy": pfl.Privacy(0, 0.5)}, id="private", marks=SLOW
        ),
        pytest.param(pfl.FedAvg(), toys.Normalized, {}, id="batch statistics", marks=LONG),
        pytest.param(pfl.methods.FedEM(components=2), LINEAR, {}, id="fedem", marks=SLOW),
        pytest.param(
            pfl.methods.FedRoD(), pfl.models.MLP(hidden=(4,)), {}, id="fedrod", marks=LONG
        ),
    ],
)
def test_the_cross_entropy_as_one_s_own_loss_gives_the_same_figures(
    method, model, options, clients
):
    def run(loss):
        return pfl.Run(
            method, clients, model, pfl.LocalTraining(optax.sgd(0.1), loss=loss, **options)
        )

    known, found = (run(loss).train(2, progress=False).results for loss in ("auto", own))
    for name in ("loss_train", "loss_test"):
        np.testing.assert_allclose(found[name], known[name], rtol=1e-4)
    doubled = run(lambda outputs, y: 2 * own(outputs, y)).train(2, progress=False)
    np.testing.assert_allclose(
        doubled.results["loss_test"][0], 2 * known["loss_test"][0], rtol=1e-4
    )
    equal = np.allclose(doubled.results["loss_test"][-1], 2 * known["loss_test"][-1], rtol=1e-4)
    assert equal == ("privacy" in options)  # gradients are clipped


def test_a_constant_loss_trains_nothing(clients):
    local = pfl.LocalTraining(optax.sgd(1.0), loss=lambda outputs, y: 0 * outputs.sum(axis=-1) + 3)
    result = pfl.Run(pfl.Local(), clients, pfl.models.MLP(hidden=()), local).train(
        2, eval_every=1, progress=False
    )
    assert (result.results["loss_test"] == 3).all()
    assert (result.results["accuracy_train"] == result.results["accuracy_train"][0]).all()


def test_smoothed_labels_are_of_training_only():
    federation = toys.make_federation((4, 3))
    problem = toys.make_problem(federation, label_smoothing=0.5)
    algorithm = toys.make_algorithm("fedavg", problem)
    clients = federation.client_data
    state = toys.start(algorithm, problem, clients)
    scores = toys.evaluate(algorithm, problem, jax.random.key(0), state, clients, federation.train)

    layer = jax.tree.map(lambda leaf: np.float64(leaf[0]), state.models)["Dense_0"]
    split = jax.tree.map(lambda leaf: leaf[0], federation.train)
    log_p = log_softmax(np.float64(split.x) @ layer["kernel"] + layer["bias"], axis=-1)
    right = np.eye(3)[split.y]
    np.testing.assert_allclose(scores["loss"][0], -(right * log_p).sum(axis=1).mean(), rtol=1e-5)
    params = jax.tree.map(lambda leaf: leaf[0], state.models)
    batch = problem.solver.take_batch(jax.random.key(0), None, split, 0)
    smooth = 0.5 * right + 0.5 / 3
    loss = jax.jit(problem.solver.mean_loss)(params, batch)
    np.testing.assert_allclose(loss, -(smooth * log_p).sum(axis=1).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "cross_entrpy"},
            "loss=cross_entrpy: is no function, and unknown; did you mean cross_entropy",
        ),
        (
            {"loss": "mse"},
            "loss=mse: accepted for classification: auto, cross_entropy, or a function",
        ),
        ({"loss": 3}, "loss=3: accepted: auto, cross_entropy, mse, huber, bce, or a function"),
        (
            {"loss": lambda outputs, y: outputs},
            r"returns shape \(2, 10\) of float32 .*accepted: one float per example",
        ),
        ({"loss": lambda outputs, y: y}, r"returns shape \(2,\) of int32"),
        (
            {"loss": lambda outputs, y: outputs + y},
            r"outputs \(2, 10\) and y \(2,\), raised ValueError",
        ),
        ({"loss": lambda outputs, y: (outputs, y)}, "returns tuple"),
        (
            {"loss": own, "label_smoothing": 0.1},
            "label_smoothing=0.1: applies only with loss=auto or cross_entropy",
        ),
        (
            {"loss": own, "class_weights": (1.0,) * 10},
            "class_weights=.* accepted only .* with loss=cross_entropy",
        ),
    ],
)
def test_losses_that_are_refused(options, message, clients):
    with pytest.raises(pfl.ArgumentError, match=message) as error:
        pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP(hidden=()), pfl.LocalTraining(**options))
    assert "\n" not in str(error.value)
