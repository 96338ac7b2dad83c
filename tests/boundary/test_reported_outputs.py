"""What users bring and take out that ended in raw errors, or in wrong numbers without a word."""

import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.contract.cores import check_settings

ROOT = pathlib.Path(__file__).parents[2]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 3)).astype(np.float32)
Y = np.arange(80) % 2
OWNER = np.arange(80) // 20
CLIENTS = pfl.Federation.from_arrays(X, Y, client=OWNER)
TOKENS = pfl.Federation.from_arrays(RNG.integers(0, 20, (80, 6)), Y, client=OWNER)
LOCAL = pfl.LocalTraining(optax.sgd(0.1))
MODEL = pfl.models.MLP(hidden=())


def run(model=MODEL, clients=CLIENTS, local=LOCAL, method=None, **options):
    return pfl.Run(method or pfl.FedAvg(), clients, model, local, **options)


ENDINGS = {
    "lambda z: (z, z)": "returns tuple; accepted: one array of logits or values",
    "lambda z: {'logits': z}": "returns dict; accepted: one array of logits or values",
    "lambda z: None": "returns NoneType; accepted: one array of logits or values",
    "lambda z: z > 0": "returns outputs of bool; accepted: floats",
    "lambda z: z.astype(int)": "returns outputs of int32; accepted: floats",
    "lambda z: z * 1j": "returns outputs of complex64; accepted: floats",
    "lambda z: z.T": "returns outputs of shape (batch, 3); accepted: (batch, 2) logits",
}
PROGRAM = """
import flax.linen as nn
import numpy as np
import pfljax as pfl

class Ending(nn.Module):
    end: object

    @nn.compact
    def __call__(self, x):
        return self.end(nn.Dense(2)(x))

clients = pfl.Federation.from_arrays(np.ones((8, 3)), np.arange(8) % 2, client=np.arange(8) // 4)
for end in ENDS:
    try:
        pfl.Run(pfl.FedAvg(), clients, Ending(end))
    except pfl.ArgumentError as error:
        print(error)
"""


@pytest.mark.slow
def test_networks_return_logits_of_each_example():
    """In a process of its own, where no signatures are checked."""
    program = PROGRAM.replace("ENDS", f"({', '.join(ENDINGS)})")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [f"model=Ending: {text}" for text in ENDINGS.values()], (
        done.stderr
    )


class OfPlaces(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x[..., None])


@pytest.mark.parametrize(
    ("model", "clients", "text"),
    [
        (
            OfPlaces(),
            CLIENTS,
            r"^model=OfPlaces: returns outputs of shape \(batch, 3, 2\); accepted: \(batch, 2\)",
        ),
        (
            pfl.models.Transformer(tokens=20, width=8, depth=1, heads=2),
            TOKENS,
            r"returns .* \(batch, 6, 2\); accepted",
        ),
        (
            pfl.models.Transformer(kind="coder", tokens=20),
            TOKENS,
            "^kind=coder: accepted: decoder or encoder",
        ),
        (
            pfl.models.Transformer(kind="encoder", tokens=9),
            CLIENTS,
            "takes tokens, but x is float32; accepted: int",
        ),
    ],
    ids=["of every place", "a decoder", "an unknown kind", "tokens of floats"],
)
def test_one_class_per_example_needs_one_row_of_logits(model, clients, text):
    with pytest.raises(pfl.ArgumentError, match=text):
        run(model, clients)


@pytest.mark.parametrize(
    "loss",
    [optax.softmax_cross_entropy, lambda outputs, y: ((outputs - y) ** 2).mean(axis=-1)],
    ids=["one-hot", "own"],
)
def test_a_loss_of_other_targets_is_refused_also_for_two_classes(loss):
    with pytest.raises(
        pfl.ArgumentError, match=r"^loss=.*: for outputs \(3, 2\) and y \(3,\), raised ValueError"
    ):
        run(local=pfl.LocalTraining(optax.sgd(0.1), loss=loss))


class Embedded(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Embed(20, 4)(x).mean(axis=1))


@pytest.mark.slow
def test_predictions_that_are_not_finite_are_told():
    result = run(Embedded(), TOKENS).train(rounds=1, progress=False)
    with pytest.warns(
        UserWarning, match="^x: predictions are not finite, first of client 0 for row 1; tokens"
    ):
        found = result.predict(np.array([[1] * 6, [20] * 6]), client=0)
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()
    with pytest.raises(
        pfl.ArgumentError, match=r"^x: is NaN or infinite in 2 rows; the first is row 0"
    ):
        run().train(rounds=1, progress=False).predict(np.full((2, 3), 1e39), client=0)


@pytest.mark.slow
def test_columns_of_a_table_are_known_by_their_names():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    clients = pfl.Federation.from_arrays(frame, Y, client=OWNER)
    result = run(clients=clients).train(rounds=1, progress=False)
    expected = result.predict(X[:5], client=0)
    np.testing.assert_array_equal(result.predict(frame[:5], client=0), expected)
    np.testing.assert_array_equal(result.predict(frame[["c", "a", "b"]][:5], client=0), expected)
    with pytest.raises(
        pfl.ArgumentError, match=r"^x: lacks a and has age; accepted: the columns a, b, c"
    ):
        result.predict(frame.rename(columns={"a": "age"}), client=0)


@pytest.mark.slow
def test_an_exported_module_that_float32_makes_inexact_is_told():
    x = 1e6 + RNG.normal(size=(80, 2))
    clients = pfl.Federation.from_arrays(x, Y, client=OWNER)
    result = run(clients=clients).train(rounds=1, progress=False)
    with pytest.warns(
        UserWarning, match=r"^x: has a mean of 1e\+06 deviations, so the exported module"
    ):
        result.export(0)


class WithoutMatrix(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (1,))
        return jnp.concatenate([x[:, :1] * scale, 0 * x[:, :1]], axis=1)


class Unhashable:
    """A metric without a hash, as objects with __eq__ are."""

    __hash__ = None

    def __call__(self, outputs, y):
        return 1.0


def test_what_ended_in_raw_errors_is_one_line():
    assert run(metrics={"own": Unhashable()}).experiment.metrics["own"].function(None, None) == 1.0
    nested: dict = {}
    nested["a"] = nested
    calls = {
        "floco needs a last layer with a matrix": lambda: run(
            WithoutMatrix(), method=pfl.methods.Floco()
        ).experiment.program(),
        "metrics=own: accepted: functions": lambda: run(metrics={"own": ["f1"]}),
        "seed=PRNGKeyArray: accepted: whole numbers": lambda: run(seed=jax.random.key(0)),
        "participation=PRNGKeyArray: accepted: numbers": lambda: run(
            participation=jax.random.key(0)
        ),
        "config: is no JSON .*object": lambda: run(config={"a": object()}),
        "config: is no JSON .*set": lambda: run(config={"a": {1, 2}}),
        "config: is no JSON .*tuple": lambda: run(config={(1, 2): 1}),
        "config: is no JSON .*recursion": lambda: run(config=nested),
        "frozen: is int; accepted: the path": lambda: pfl.models.weights.Saved(3),
        "method: stands above int; accepted: a class": lambda: pfl.author.method(3),
        "optimizer: its update refuses the keywords": lambda: run(
            local=pfl.LocalTraining(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)))
        ),
    }
    for text, call in calls.items():
        with pytest.raises(pfl.ArgumentError, match=text) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_large_integers_are_told_as_measurements():
    with pytest.warns(
        UserWarning, match=r"^x: holds integers from 1000000000 to .*, which are not scaled"
    ):
        pfl.Federation.from_arrays(np.arange(240).reshape(80, 3) + 10**9, Y, client=OWNER)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_enable_x64", True),
        ("jax_numpy_rank_promotion", "raise"),
        ("jax_check_tracer_leaks", True),
    ],
)
def test_settings_of_jax_with_which_methods_fail_are_named(setting, value):
    before = getattr(jax.config, setting)
    try:
        jax.config.update(setting, value)
        with pytest.raises(pfl.ArgumentError, match=f"^{setting.upper()}={value}: .*; accepted: "):
            check_settings()
    finally:
        jax.config.update(setting, before)


def test_nan_may_not_be_debugged_with_attackers():
    before = jax.config.jax_debug_nans
    try:
        jax.config.update("jax_debug_nans", True)
        with pytest.raises(
            pfl.ArgumentError, match=r"^JAX_DEBUG_NANS=True: attackers have no scores"
        ):
            run(attack=pfl.Attack("sign_flip", attackers=0.25)).train(rounds=1)
    finally:
        jax.config.update("jax_debug_nans", before)
