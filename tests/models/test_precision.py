"""Networks that compute in bfloat16: what is rounded, what stays float32, and what reaches every program of a run."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import toys
from flax import nnx

import pfljax as pfl
from pfljax import models
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Split
from pfljax.exchange import lifting
from pfljax.exchange.rounds import make_round
from pfljax.folder import files
from pfljax.local.training import LocalTraining
from pfljax.models import recurrent
from pfljax.models.rewriting import convolutions, equations
from pfljax.stores import serving

RNG = np.random.default_rng(0)
# Bfloat16 has 256, 258 and 260, and nothing between them: these numbers are rounded down, by up to 0.9.
X = (256 + 2 * RNG.integers(2, size=(6, 4)) + RNG.uniform(0, 0.9, size=(6, 4))).astype(np.float32)
Y = RNG.integers(3, size=6).astype(np.int32)
KEY = jax.random.key(0)
PRODUCTS = ("dot_general", "conv_general_dilated")


def rounded(values):
    """Float64 values that bfloat16 has."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def build(module, like=X, computes_in="bfloat16", **options):
    return models.build(
        module,
        like.shape[1:],
        "classification",
        3,
        dtype=like.dtype,
        computes_in=computes_in,
        **options,
    )


def products(fn, *args):
    """The types of the operands of every product of a traced function."""
    found = equations(jax.make_jaxpr(fn)(*args).jaxpr)
    return [
        {str(v.aval.dtype) for v in eqn.invars} for eqn in found if eqn.primitive.name in PRODUCTS
    ]


def training(model, x, y):
    """(params, key) -> the gradient of the mean loss."""
    return jax.grad(lambda params, key: model.loss(params, x, y, key).mean())


def dtypes(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


def test_a_linear_model_s_loss_and_gradient_are_those_of_rounded_operands():
    """NumPy rounds inputs, weights and the slopes of the logits; sums, the softmax and the loss are not rounded."""
    exact, model = (
        build(models.MLP(hidden=()), computes_in=dtype) for dtype in ("float32", "bfloat16")
    )
    params = jax.jit(model.init)(KEY)
    # The columns' sums are 0, so that the logits are differences of inputs; the kernel is rounded to fourths.
    signs = np.array([[1, 1, 1], [-1, -1, 1], [1, -1, -1], [-1, 1, -1]])
    layer = {
        "kernel": np.float32(signs * (1 + 2.0**-10) / 4),
        "bias": np.array([0.3, -0.1, 0], np.float32),
    }
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, {"Dense_0": layer})
    params = {"Dense_0": layer}
    x = rounded(X)
    kernel = rounded(layer["kernel"])
    bias = rounded(layer["bias"])
    logits = x @ kernel + bias
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.log(shares[np.arange(6), Y])
    losses = jax.jit(model.loss)(params, X, Y)
    step = 2.0**-8 * np.abs(logits).max()  # outputs are rounded once, or twice around the bias
    np.testing.assert_allclose(losses, expected, atol=2 * step)
    unlike = np.abs(np.asarray(jax.jit(exact.loss)(params, X, Y)) - expected).max()
    assert unlike > 8 * step and losses.dtype == jnp.float32

    slopes = (shares - np.eye(3)[Y]) / 6
    grads = jax.jit(training(model, X, Y))(params, None)["Dense_0"]
    size = np.abs(x).T @ np.abs(slopes)
    assert np.all(np.abs(grads["kernel"] - x.T @ slopes) <= 2.0**-6 * size)
    np.testing.assert_allclose(
        grads["bias"], slopes.sum(axis=0), atol=2.0**-6 * np.abs(slopes).sum(axis=0).max()
    )
    assert dtypes((params, grads)) == {"float32"}


class Bag(nn.Module):
    """Tokens, a convolution and a dense layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(300, 4, name="table")(x)
        return nn.Dense(3)(nn.Conv(4, (3,))(x).mean(axis=1))


class OfNNX(nnx.Module):
    """A convolution and a dense layer in NNX."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.conv(x)).mean(axis=(1, 2)))


IMAGES = RNG.normal(size=(5, 8, 8, 2)).astype(np.float32)
TOKENS = RNG.integers(300, size=(5, 7)).astype(np.int32)
NETWORKS = {
    "mlp": (models.MLP(hidden=(5,)), X),
    "cnn": (models.CNN(channels=(4, 4)), IMAGES),
    "pixels": (models.CNN(channels=(4,)), RNG.integers(256, size=(5, 8, 8, 2)).astype(np.uint8)),
    "tokens": (Bag(), TOKENS),
    "nnx": (lambda rngs: OfNNX(rngs), IMAGES),
}


@pytest.mark.parametrize(
    "name",
    [
        "pixels",
        "tokens",
        "nnx",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlp", "cnn")),
    ],
)
def test_every_product_of_the_traced_program_has_bfloat16_operands(name):
    module, x = NETWORKS[name]
    y = np.zeros(len(x), np.int32)
    for computes_in in ("float32", "bfloat16"):
        model = build(module, x, computes_in)
        params = jax.eval_shape(model.init, KEY)
        grads = training(model, x, y)
        used = [*products(grads, params, KEY), *products(model.predict, params, x)]
        assert len(used) > 3 and all(found == {computes_in} for found in used)
        assert dtypes((params, jax.eval_shape(grads, params, KEY))) == {"float32"}
        of_inputs = model.apply, model.predict, model.features, model.embedding
        assert dtypes([jax.eval_shape(fn, params, x) for fn in of_inputs]) == {"float32"}
        assert jax.eval_shape(model.loss, params, x, y).dtype == jnp.float32


def test_the_lstm_s_products_are_bfloat16_behind_the_one_hot_rows():
    model = models.build(
        recurrent.CharacterLSTM(hidden=(6, 6)),
        (7,),
        "classification",
        9,
        computes_in="bfloat16",
        target_shape=(7,),
    )
    x = jnp.zeros((2, 7), jnp.int32)
    params = jax.eval_shape(model.init, KEY)
    grads = jax.jit(jax.grad(lambda params: model.loss(params, x, x).mean()))
    lines = grads.trace(params).lower(lowering_platforms=("tpu",)).as_text().splitlines()
    used = [line for line in lines if "stablehlo.dot_general" in line]
    exact = [line for line in used if "bf16" not in line]
    assert len(used) - len(exact) > 10 and len(exact) == 2  # the embedding's, and its slope


def test_integers_stay_integers():
    """Token 257, which bfloat16 does not have, is looked up as it is."""
    module = nn.Sequential([nn.Embed(300, 3), lambda x: x[:, 0]])
    model = models.build(
        module, (1,), "classification", 3, dtype=np.dtype("int32"), computes_in="bfloat16"
    )
    table = np.arange(900, dtype=np.float32).reshape(300, 3) / 1024
    params = jax.tree.map(lambda _: table, jax.eval_shape(model.init, KEY))
    found = model.apply(params, np.array([[256], [257], [299]], np.int32))
    np.testing.assert_array_equal(found, rounded(table[[256, 257, 299]]))


class Own(nn.Module):
    """Layers with types of their own: parameters in bfloat16, and a head in float32."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(5, param_dtype=jnp.bfloat16)(x))
        return nn.Dense(3, dtype=jnp.float32)(x)


def test_layers_keep_types_of_their_own_and_parameters_are_float32():
    model = build(Own())
    params = jax.eval_shape(model.init, KEY)
    grads = training(model, X, Y)
    assert dtypes((params, jax.eval_shape(grads, params, None))) == {"float32"}
    assert products(model.apply, params, X) == [{"bfloat16"}, {"float32"}]
    halves = build(nn.Dense(3, dtype=jnp.bfloat16), computes_in="float32")
    assert products(halves.apply, jax.eval_shape(halves.init, KEY), X) == [{"bfloat16"}]
    assert jax.eval_shape(halves.loss, jax.eval_shape(halves.init, KEY), X, Y).dtype == jnp.float32


class HalvesInNNX(nnx.Module):
    """Layers whose parameters are bfloat16 and float16."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, param_dtype=jnp.float16, rngs=rngs)
        self.dense = nnx.Linear(4, 5, param_dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(5, 3, param_dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dense(self.norm(x)))


class Halves(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train, param_dtype=jnp.float16)(x)
        x = nn.Dense(5, param_dtype=jnp.bfloat16)(x)
        return nn.Dense(3, param_dtype=jnp.float16)(x)


@pytest.mark.parametrize(
    ("module", "computes_in"),
    [(Halves(), "float32"), (Halves(), "bfloat16"), (HalvesInNNX(nnx.Rngs(0)), "float32")],
)
def test_parameters_of_16_bits_are_trained_in_float32(module, computes_in):
    """Steps that are too short for bfloat16 move all six parameters; the statistics may stay."""
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    clients = pfl.Federation.from_arrays(x, np.arange(12) % 3, client=np.arange(12) // 4)
    training = pfl.LocalTraining(optax.sgd(1e-4), batch_size=0, dtype=computes_in)
    run = pfl.Run(pfl.FedAvg(), clients, module, training)
    leaves = []
    for rounds in (1, 3):
        _, variables = run.train(rounds=rounds, progress=False).export(client=0)
        leaves.append([np.asarray(leaf) for leaf in jax.tree.leaves(variables)])
    assert dtypes(leaves) == {"float32"}
    num_moved = sum(np.any(before != after) for before, after in zip(*leaves, strict=True))
    assert num_moved >= 6 and all(np.all(np.isfinite(leaf)) for leaf in leaves[1])


class Normalized(nn.Module):
    """Batch statistics of the inputs."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


class NormalizedInNNX(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    "module", [Normalized(), lambda rngs: NormalizedInNNX(rngs)], ids=["linen", "nnx"]
)
def test_batch_statistics_are_float32_means_of_rounded_inputs(module):
    """Their slope is the old value less the new one: half the batch's own, minus half of the initial 0 and 1."""
    x = RNG.uniform(1, 2, size=(50, 4)).astype(np.float32)
    model = build(module, x)
    grads = jax.jit(training(model, x, np.zeros(50, np.int32)))(jax.jit(model.init)(KEY), KEY)
    norm = grads["batch_stats"]["BatchNorm_0"] if "batch_stats" in grads else grads["norm"]
    np.testing.assert_allclose(norm["mean"], -0.5 * rounded(x).mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(norm["var"], 0.5 - 0.5 * rounded(x).var(axis=0), rtol=1e-4)
    assert dtypes(grads) == {"float32"}


def test_updates_too_small_for_a_bfloat16_parameter_add_up():
    """Twenty steps of 1e-4 from 1: in bfloat16 the next number below 1 is 4e-3 away, so nothing would move."""
    model = models.build(
        models.MLP(hidden=()),
        (1,),
        "regression",
        1,
        loss=lambda outputs, y: outputs,
        computes_in="bfloat16",
    )
    solver = LocalTraining(optax.sgd(1e-4), steps=20, dtype="bfloat16").bind(model)
    split = Split(jnp.ones((1, 1)), jnp.zeros((1,)), jnp.int32(1))
    params = jax.tree.map(jnp.ones_like, jax.jit(model.init)(KEY))
    fit = jax.jit(
        lambda params: solver.fit(KEY, solver.begin(params), split, round_number=jnp.int32(0))
    )
    trained, loss = fit(params)
    np.testing.assert_allclose(jax.tree.leaves(trained.whole)[0], 1 - 20e-4, rtol=1e-6)
    assert rounded(1 - 1e-4) == 1
    assert loss.dtype == jnp.float32


def test_gradients_of_convolutions_are_float32_sums_over_images():
    """In bfloat16, adding the 4 of each image would end at 1024, whose next number is 1032."""
    x = jnp.ones((512, 2, 2, 1), jnp.bfloat16)
    kernel = jnp.ones((3, 3, 1, 1), jnp.bfloat16)
    one_image_at_a_time = convolutions.Windows(
        (3, 3), (1, 1), (1, 1), padding=((1, 1), (1, 1)), spread=(1, 1), cache=1
    )

    @jax.jit
    def slopes(dy, x, kernel):
        return convolutions.slopes(dy, x, kernel, one_image_at_a_time)

    _, slope = slopes(jnp.ones_like(x), x, kernel)
    assert slope.dtype == jnp.bfloat16 and slope[1, 1, 0, 0] == 4 * 512


def make_run(name="fedavg", **training):
    clients = toys.make_federation(
        (4, 3, 5, 2), validation_size=3 * toys.METHODS[name].info.validates
    )
    model = toys.network(name).get("model", models.MLP(hidden=(4, 4)))
    local = pfl.LocalTraining(optax.sgd, 0.1, **training)
    return pfl.Run(
        toys.METHODS[name](), clients, model, local, execution=pfl.Execution(plan="vmap", devices=1)
    )


def programs(run):
    """A round of the run and its evaluation, with the shapes that they are traced for."""
    experiment = run.experiment
    problem = experiment.problem
    plan = experiment.problem.plan
    algorithm = experiment.algorithm(plan)
    clients = experiment.federation.client_data
    state = jax.eval_shape(functools.partial(lifting.init, algorithm, plan), KEY, clients)
    one_round = make_round(algorithm, plan, problem.cohort_size)
    served = functools.partial(lifting.serve, algorithm, plan, serving.scores(problem, algorithm))
    ids = jnp.arange(problem.num_clients)
    splits = {"test": experiment.federation.test}
    return (one_round, KEY, jnp.int32(0), state, clients), (
        served,
        KEY,
        state,
        ids,
        clients,
        splits,
    )


HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


@toys.each_method(fast=("fedavg", "dfedem"), slow=("fedem", "federico", "fedpac"))
def test_methods_train_and_predict_in_bfloat16_and_keep_float32_and_the_precision_reaches_every_product(
    name,
):
    training, predicting = programs(make_run(name, dtype=jnp.bfloat16, matmul_precision="highest"))
    traced = [jax.make_jaxpr(fn, return_shape=True)(*args) for fn, *args in (training, predicting)]
    for jaxpr, _ in traced:
        found = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name in PRODUCTS]
        assert {"bfloat16"} in [{str(v.aval.dtype) for v in eqn.invars} for eqn in found]
        assert all(eqn.params["precision"] == HIGHEST for eqn in found)
    state = training[3]
    (after, record) = traced[0][1]
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(
        lambda leaf: leaf.dtype, state
    )
    assert "bfloat16" not in dtypes((after, record, traced[1][1]))


@toys.each_method(["fedavg", "dfedem", "federico"], fast=["fedavg", "dfedem"], slow=["federico"])
def test_without_a_precision_products_have_that_of_jax_or_of_the_method(name):
    for fn, *args in programs(make_run(name)):
        found = [
            eqn
            for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr)
            if eqn.primitive.name in PRODUCTS
        ]
        assert found and not all(eqn.params["precision"] == HIGHEST for eqn in found)


@pytest.mark.slow
def test_another_dtype_or_precision_is_another_run(tmp_path):
    """A folder is not resumed with it, and config.json has both, whatever form the dtype was given in."""
    run = make_run(dtype=jnp.bfloat16)
    run.train(1, out=tmp_path / "run", progress=False)
    settings = files.read_json(tmp_path / "run" / "config.json")["settings"]
    assert settings["local.dtype"] == "bfloat16" and settings["local.matmul_precision"] is None
    for other, text in (
        ({}, "local.dtype was 'bfloat16' and is 'float32'"),
        (
            {"dtype": "bfloat16", "matmul_precision": "high"},
            "local.matmul_precision was None and is 'high'",
        ),
    ):
        with pytest.raises(ArgumentError, match=text):
            make_run(**other).train(1, out=tmp_path / "run", resume=True, progress=False)
    others = ({}, {"dtype": "bfloat16"}, {"matmul_precision": "high"})
    parts = [make_run(**each).experiment.program()["parts"] for each in others]
    assert (
        len({each["client_update"] for each in parts})
        == len({each["predict"] for each in parts})
        == 3
    )


@pytest.mark.parametrize("given", ["float16", jnp.float16, "half", np.dtype("float64"), 16, None])
def test_other_types_are_refused_in_a_line_that_says_what_is_accepted(given):
    with pytest.raises(ArgumentError, match=r"^dtype.*accepted: float32, bfloat16[^\n]*$"):
        pfl.LocalTraining(dtype=given)
    with pytest.raises(
        ArgumentError,
        match=r"^matmul_precision=fast: accepted: default, high, highest, bfloat16, ten",
    ):
        pfl.LocalTraining(matmul_precision="fast")  # pyright: ignore[reportArgumentType]


def test_types_are_named_in_any_of_jax_s_ways():
    for given in ("bfloat16", jnp.bfloat16, jnp.dtype(jnp.bfloat16), ml_dtypes.bfloat16):
        assert pfl.LocalTraining(dtype=given) == dataclasses.replace(
            pfl.LocalTraining(), dtype="bfloat16"
        )
    assert pfl.LocalTraining(dtype=np.float32).dtype == "float32"


class Mixed(nn.Module):
    """A loop whose carry is float32 before the first step and in the inputs' type after it."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(
            jax.lax.scan(
                lambda carry, row: (row, None), jnp.zeros((x.shape[0], 4)), x.swapaxes(0, 1)
            )[0]
        )


def test_a_network_that_cannot_is_refused_with_the_type():
    with pytest.raises(
        ArgumentError, match=r"^model=Mixed: fails on inputs of shape \(2, 5, 4\) in bfloat16: "
    ):
        models.build(Mixed(), (5, 4), "classification", 3, computes_in="bfloat16")
