"""Mixtures and summaries worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from scipy import special
from toy_methods import make, neighbors

from pfljax.contract.types import First, Mixture, Split, Start, State
from pfljax.evaluation import metrics as evaluation
from pfljax.exchange.plan import make_plan
from pfljax.models import Model

# of two models that look at nothing but their bias
LOGITS = np.array([[3.0, 0.0, -1.0], [-2.0, 1.0, 0.0]])


def bias_models(biases, features=3):
    """Linear models that return their biases."""
    biases = jnp.asarray(biases, jnp.float32)
    num, outputs = biases.shape
    return {"Dense_0": {"bias": biases, "kernel": jnp.zeros((num, features, outputs))}}


def mixing(biases, index, weights, topology="shared"):
    """(a method whose clients mix these models, its state)."""
    index = jnp.asarray(index, jnp.int32)
    weights = jnp.asarray(weights, jnp.float32)

    def select_models(context, row, size):
        return Mixture(index[context.client], weights[context.client])

    algorithm = make(topology=topology, select_models=select_models, download=neighbors(0))
    rows = jnp.zeros(len(index), jnp.int32)
    if algorithm.topology.on_server:
        return algorithm, State(Start(models=bias_models(biases)), First(rows))
    return algorithm, State(clients=First(rows, bias_models(biases)))


@pytest.mark.parametrize(
    "plan",
    [
        ("chunk", 2, 2),
        pytest.param(("vmap", 0, 1), marks=pytest.mark.slow),
        pytest.param(("map", 0, 1), marks=pytest.mark.long),
    ],
)
def test_probabilities_are_mixed_and_not_logits(plan):
    federation = toys.make_federation((2, 2, 2))
    key = jax.random.key(0)
    problem = toys.make_problem(federation, plan=make_plan(*plan))
    y = np.array([[0, 1, 2, 0], [1, 1, 0, 0], [0, 0, 0, 0]], np.int32)
    split = Split(federation.test.x, y, np.array([3, 4, 0], np.int32))
    weights = np.array([[0.75, 0.25], [0.4, 0.6], [1.0, 0.0]], np.float32)
    index = np.array([[0, 1], [1, 0], [0, 1]], np.int32)
    algorithm, state = mixing(LOGITS, index, weights)
    scores = toys.evaluate(algorithm, problem, key, state, federation.client_data, split)

    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    mixed = np.einsum("kj,kjc->kc", weights, probabilities[index])
    for k, size in enumerate((3, 4)):
        np.testing.assert_allclose(
            scores["loss"][k], -np.log(mixed[k][y[k, :size]]).mean(), rtol=1e-5
        )
        np.testing.assert_allclose(
            scores["accuracy"][k], (mixed[k].argmax() == y[k, :size]).mean(), rtol=1e-6
        )
    assert np.isnan(scores["loss"][2]) and np.isnan(scores["accuracy"][2])
    # The logits' mixture would put client 1's classes in another order of likelihood.
    mixed_logits = np.einsum("kj,kjc->kc", weights, LOGITS[index])
    assert not np.allclose(
        mixed, np.exp(mixed_logits) / np.exp(mixed_logits).sum(axis=1, keepdims=True), atol=0.02
    )

    x = federation.test.x[0]

    def use(prediction, _):
        return evaluation.predict(problem, algorithm, prediction, x)

    found = toys.serve(algorithm, problem, use, key, state, federation.client_data).outputs
    np.testing.assert_allclose(found, np.broadcast_to(mixed[:, None], found.shape), rtol=1e-5)


def test_outputs_are_mixed_in_a_regression():
    federation = toys.make_federation((2, 2), "regression")
    algorithm, state = mixing([[1.0], [3.0]], [[0, 1], [1, 0]], [[0.5, 0.5], [1, 0]], "peers")
    problem = toys.make_problem(federation)
    scores = toys.evaluate(
        algorithm, problem, jax.random.key(0), state, federation.client_data, federation.test
    )
    expected = [np.mean((federation.test.y[0] - 2) ** 2), np.mean((federation.test.y[1] - 3) ** 2)]
    np.testing.assert_allclose(scores["loss"], expected, rtol=1e-5)
    assert set(scores) == {"loss"}


def test_a_hopeless_prediction_has_its_loss_and_long_tests_are_summed_in_blocks():
    federation = toys.make_federation((2,), test_size=1100)
    algorithm = make(topology="own")
    state = State(clients=First(jnp.zeros(1, jnp.int32), bias_models([[200.0, 0, 0]])))
    split = federation.test._replace(size=np.array([1030], np.int32))
    problem = toys.make_problem(federation)
    scores = toys.evaluate(
        algorithm, problem, jax.random.key(0), state, federation.client_data, split
    )
    right = (split.y[0, :1030] == 0).mean()
    np.testing.assert_allclose(scores["accuracy"], [right], rtol=1e-5)
    np.testing.assert_allclose(scores["loss"], [(1 - right) * 200], rtol=1e-4)


def test_the_summary_is_over_clients_and_over_examples():
    accuracy = np.array([0.5, 0.9, 0.1, 0.7, np.nan])
    sizes = np.array([10, 20, 5, 5, 0])
    loss = np.array([1.0, 2.0, 3.0, 4.0, np.nan])
    found = evaluation.summarize({"loss": loss, "accuracy": accuracy}, sizes)
    assert found["loss"] == pytest.approx((10 + 40 + 15 + 20) / 40)
    assert found["accuracy"] == pytest.approx((5 + 18 + 0.5 + 3.5) / 40)
    assert found["accuracy_mean"] == pytest.approx(2.2 / 4)
    assert found["accuracy_std"] == pytest.approx(
        np.sqrt(((np.array([0.5, 0.9, 0.1, 0.7]) - 0.55) ** 2).mean())
    )
    # sorted .1 .5 .7 .9, position 0.3
    assert found["accuracy_bottom_decile"] == pytest.approx(0.1 + 0.3 * 0.4)
    assert found["accuracy_min"] == pytest.approx(0.1)
    assert set(evaluation.summarize({"loss": loss}, sizes)) == {"loss"}
    # NaN where it is not known; the last client has no examples
    f1 = np.array([0.2, np.nan, 0.4, 0.9, 0.3])
    assert evaluation.summarize({"loss": loss, "f1": f1}, sizes)["f1"] == pytest.approx(
        (0.2 + 0.4 + 0.9) / 3
    )


def test_the_bottom_decile_is_that_of_the_worst_clients():
    """perplexity_bottom_decile and calibration_error_bottom_decile were the best clients'."""
    values = {"loss": np.ones(11), "perplexity": np.arange(11.0), "f1": np.arange(11.0)}
    found = evaluation.summarize(values, np.ones(11), lower_is_better=["perplexity"])
    assert (found["perplexity_bottom_decile"], found["f1_bottom_decile"]) == (9, 1)
    assert evaluation.sign_of("loss") == evaluation.sign_of("perplexity", ["perplexity"]) == -1
    assert evaluation.sign_of("accuracy") == evaluation.sign_of("f1", ["perplexity"]) == 1


def test_the_mixture_of_confident_models_is_that_of_their_probabilities():
    """Mixtures by log-sum-exp: against SciPy, where float32 probabilities are 0 or 1."""
    outputs = np.array([[[120.0, 0, -3]], [[0, 95.0, 2]], [[1, 2, 3]]])
    weights = np.array([0.5, 0.25, 0.25])
    logits = special.log_softmax(outputs, axis=-1)
    for task, expected in (
        ("classification", special.logsumexp(logits, axis=0, b=weights[:, None, None])),
        ("multilabel", log_odds(outputs, weights[:, None, None])),
        ("regression", np.tensordot(weights, outputs, axes=1)),
    ):
        model = Model(None, task=task)
        found = model.mixed(jnp.float32(weights), jnp.float32(outputs))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(Model(None).mixed(jnp.ones(1), outputs[:1]), outputs[0])


def log_odds(outputs, weights):
    """log p - log (1 - p) of a mixture of independent labels, in float64."""
    log_p, log_q = (
        special.logsumexp(special.log_expit(sign * outputs), axis=0, b=weights) for sign in (1, -1)
    )
    return log_p - log_q
