"""Users' Flax modules: Linen and NNX, batch statistics, dropout, and structure found by tracing."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pfljax import models
from pfljax.contract.errors import ArgumentError

MOMENTUM = 0.8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
Y = RNG.integers(3, size=6).astype(np.int32)
EXAMPLE = jnp.zeros((1, 4))


class Linen(nn.Module):
    """Normalizes its inputs, so that batch statistics can be worked out by hand."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(x)
        x = nn.relu(nn.Dense(5)(x))
        return nn.Dense(3)(nn.Dropout(self.rate, deterministic=not train)(x))


class NNX(nnx.Module):
    """The same in NNX; its attributes are not in the order of computation."""

    def __init__(self, num_classes, rate=0.0, *, rngs):
        self.head = nnx.Linear(5, num_classes, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=MOMENTUM, rngs=rngs)
        self.body = nnx.List([nnx.Linear(4, 5, rngs=rngs)])
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(nnx.relu(self.body[0](self.norm(x)))))


@functools.cache
def linen(rate=0.0):
    return models.Model(Linen(rate), EXAMPLE)


@functools.cache
def of_nnx(rate=0.0):
    return models.Model(lambda rngs: NNX(3, rate, rngs=rngs), EXAMPLE)


class Given(nnx.Module):
    """Takes its random streams with each call, and has none of its own."""

    def __init__(self, rate, *, rngs):
        self.body = nnx.Linear(4, 5, rngs=rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)
        self.drop = nnx.Dropout(rate)

    def __call__(self, x, *, rngs: nnx.Rngs | None):
        return self.head(self.drop(nnx.relu(self.body(x)), rngs=rngs))


@functools.cache
def given(rate=0.0):
    return models.Model(lambda rngs: Given(rate, rngs=rngs), EXAMPLE)


# Compiled once for each model.
start = jax.jit(lambda model, key: model.init(key), static_argnums=0)
apply = jax.jit(lambda model, params, x: model.apply(params, x), static_argnums=0)
losses = jax.jit(lambda model, params, key: model.loss(params, X, Y, key), static_argnums=0)
gradient = jax.jit(
    lambda model, params, key: jax.grad(lambda p: model.loss(p, X, Y, key).mean())(params),
    static_argnums=0,
)


def as_nnx(params):
    """Parameters of `Linen` as those of `NNX`."""
    return {
        "norm": params["BatchNorm_0"] | params["batch_stats"]["BatchNorm_0"],
        "body": {"0": params["Dense_0"]},
        "head": params["Dense_1"],
    }


def test_a_module_of_parameters_alone_keeps_its_tree():
    module = nn.Sequential([nn.Dense(5), nn.relu, nn.Dense(3)])
    model = models.Model(module, EXAMPLE)
    params = start(model, jax.random.key(3))
    expected = jax.jit(module.init)(jax.random.key(3), EXAMPLE)["params"]
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    np.testing.assert_array_equal(
        apply(model, params, X), jax.jit(module.apply)({"params": params}, X)
    )
    assert (
        model.statistics(params) is None
        and not model.network.stochastic
        and not model.network.fixed
    )
    np.testing.assert_array_equal(
        losses(model, params, jax.random.key(0)), losses(model, params, None)
    )


def statistics_by_hand(mean, var):
    """The running statistics after a forward pass on X, by the layer's momentum."""

    def kept(old, new):
        return MOMENTUM * old + (1 - MOMENTUM) * new

    return kept(mean, X.mean(axis=0)), kept(var, X.var(axis=0))


@pytest.mark.parametrize("make", [linen, of_nnx])
def test_a_statistic_s_gradient_is_its_old_value_less_the_written_one(make):
    model = make()
    params = start(model, jax.random.key(0))
    marks = model.statistics(params)
    params = jax.tree.map(lambda s, leaf: leaf + 0.5 if s else leaf, marks, params)

    @jax.jit
    def run(params):
        losses, pull = jax.vjp(lambda params: model.loss(params, X, Y, jax.random.key(1)), params)
        in_predictions = jax.grad(lambda params: model.loss(params, X, Y, None).mean())(params)
        return losses, pull(jnp.full(6, 1 / 6))[0], in_predictions

    losses, grads, in_predictions = run(params)

    def pick(tree):
        return tree["batch_stats"]["BatchNorm_0"] if "batch_stats" in tree else tree["norm"]

    mean, var = statistics_by_hand(np.full(4, 0.5), np.full(4, 1.5))
    np.testing.assert_allclose(pick(grads)["mean"], 0.5 - mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(pick(grads)["var"], 1.5 - var, rtol=1e-4, atol=1e-6)
    assert sum(jax.tree.leaves(marks)) == 2 and model.network.momenta == [MOMENTUM]

    # The term has no value, and in predictions the running statistics are constants.
    def logits(h):
        return jax.nn.log_softmax(h)[np.arange(6), Y]

    normalized = (X - X.mean(axis=0)) / np.sqrt(X.var(axis=0) + 1e-5)
    weights = params if "head" in params else as_nnx(params)
    body = weights["body"]["0"]
    head = weights["head"]
    hidden = np.maximum(normalized @ body["kernel"] + body["bias"], 0)
    expected = -logits(hidden @ head["kernel"] + head["bias"])
    np.testing.assert_allclose(losses, expected, rtol=1e-3, atol=1e-5)
    assert not np.any(pick(in_predictions)["mean"]) and not np.any(pick(in_predictions)["var"])
    assert np.any(in_predictions["Dense_1" if make is linen else "head"]["kernel"])


def test_nnx_is_linen_for_the_same_weights():
    one = linen()
    other = of_nnx()
    params = start(one, jax.random.key(0))
    shifted = jax.tree.map(lambda leaf: leaf + 0.2, params)
    same = as_nnx(shifted)
    assert jax.tree.structure(same) == jax.tree.structure(start(other, jax.random.key(0)))

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, params):
        outputs = [
            fn(params, X) for fn in (model.apply, model.predict, model.features, model.embedding)
        ]
        return outputs, jax.grad(lambda params: model.loss(params, X, Y, jax.random.key(0)).mean())(
            params
        )

    (expected, expected_grads) = run(one, shifted)
    (found, grads) = run(other, same)
    for outputs, others in zip(found, expected, strict=True):
        np.testing.assert_allclose(outputs, others, rtol=1e-5)

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

    jax.tree.map(close, grads, as_nnx(expected_grads))


@pytest.mark.parametrize("make", [linen, of_nnx, given])
def test_dropout_is_in_training_alone_and_has_its_own_key(make):
    model = make(0.5)
    without = make()
    params = start(model, jax.random.key(0))
    assert model.network.stochastic

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, params, key):
        return model.predict(params, X), model.loss(params, X, Y), model.loss(params, X, Y, key)

    found, expected = (run(each, params, jax.random.key(0)) for each in (model, without))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    drawn = [run(model, params, jax.random.key(number))[2] for number in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.abs(drawn[0] - drawn[2]).max() > 1e-4
    assert np.abs(drawn[0] - expected[2]).max() > 1e-4


class Twice(nnx.Module):
    """Two layers of dropout side by side."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(4))
        self.one = nnx.Dropout(0.5, rngs=rngs)
        self.other = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = x * self.scale
        return jnp.concatenate([self.one(x), self.other(x)], axis=1)


def test_two_layers_of_dropout_draw_apart():
    model = models.Model(lambda rngs: Twice(rngs), EXAMPLE)
    drawn = model.apply({"scale": jnp.ones(4)}, jnp.ones((20, 4)), jax.random.key(0))
    assert set(np.unique(drawn)) == {0, 2}
    assert (drawn[:, :4] != drawn[:, 4:]).any()


@pytest.mark.parametrize(
    "name", ["train", "training", "is_training", "deterministic", "use_running_average"]
)
def test_the_argument_that_tells_the_mode_may_have_any_usual_name(name):
    told = []
    space = {}
    exec(
        f"def call(self, x, {name}):\n    self.note({name})\n    return nn.Dense(3)(x)",
        {"nn": nn},
        space,
    )
    members = {
        "__call__": nn.compact(space["call"]),
        "note": lambda self, value: told.append(value),
    }
    model = models.Model(type("Told", (nn.Module,), members)(), EXAMPLE)
    params = jax.eval_shape(model.init, jax.random.key(0))
    told.clear()
    jax.eval_shape(model.apply, params, X)
    jax.eval_shape(model.loss, params, X, Y, jax.random.key(0))
    assert told == ([False, True] if "train" in name else [True, False])


@pytest.mark.parametrize(
    ("make", "layers", "norm"),
    [
        (linen, (("BatchNorm_0",), ("Dense_0",), ("Dense_1",)), "BatchNorm_0"),
        (of_nnx, (("norm",), ("body/0",), ("head",)), "norm"),
    ],
)
def test_layers_are_in_the_order_of_computation_and_statistics_belong_to_theirs(make, layers, norm):
    model = make()
    params = start(model, jax.random.key(0))
    assert model.layers == layers
    numbers = model.layer_numbers(params)
    normalizes = model.normalization(params)
    if make is linen:
        assert numbers["batch_stats"]["BatchNorm_0"] == {"mean": 0, "var": 0}
        assert normalizes["batch_stats"]["BatchNorm_0"] == {"mean": True, "var": True}
        assert numbers["Dense_0"] == {"bias": 1, "kernel": 1} and numbers["Dense_1"] == {
            "bias": 2,
            "kernel": 2,
        }
    else:
        assert numbers["norm"] == dict.fromkeys(("bias", "mean", "scale", "var"), 0)
        assert numbers["body"]["0"] == {"bias": 1, "kernel": 1} and numbers["head"] == {
            "bias": 2,
            "kernel": 2,
        }
    assert all(jax.tree.leaves(normalizes[norm])) and sum(jax.tree.leaves(normalizes)) == 4
    mask = model.mask(params, 2)
    assert jax.tree.map(lambda number: number >= 1, numbers) == mask


def test_a_normalization_belongs_to_the_layer_before_it_and_a_lone_module_is_looked_into():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.Dense(5)(x))
            return nn.Dense(3)(nn.Dense(4)(x))

    class Lone(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Body(name="body")(x)

    model = models.Model(Lone(), EXAMPLE)
    # Dense_1 is made before Dense_2, and called after it.
    assert model.layers == (
        ("body/Dense_0", "body/LayerNorm_0"),
        ("body/Dense_2",),
        ("body/Dense_1",),
    )
    params = start(model, jax.random.key(0))
    assert model.layer_numbers(params)["body"]["LayerNorm_0"] == {"bias": 0, "scale": 0}
    assert model.normalization(params)["body"]["LayerNorm_0"] == {"bias": True, "scale": True}
    assert not model.normalization(params)["body"]["Dense_2"]["kernel"]


def test_parameters_of_the_module_itself_are_a_layer():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x * self.param("scale", nn.initializers.ones, (4,)))

    model = models.Model(Plain(), EXAMPLE)
    assert model.layer_numbers(start(model, jax.random.key(0))) == {
        "scale": 0,
        "Dense_0": {"bias": 1, "kernel": 1},
    }


def test_an_nnx_module_is_the_initial_model_and_stays_as_it_is():
    module = NNX(3, 0.5, rngs=nnx.Rngs(0))
    model = models.Model(module, EXAMPLE)
    params = start(model, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, start(model, jax.random.key(1)))
    np.testing.assert_array_equal(params["head"]["kernel"], module.head.kernel[...])
    assert model.network.fixed and not of_nnx().network.fixed
    gradient(model, params, jax.random.key(0))
    np.testing.assert_array_equal(module.norm.mean[...], np.zeros(4))
    assert not module.drop.deterministic
    other = start(of_nnx(), jax.random.key(1))["head"]["kernel"]
    assert np.abs(other - start(of_nnx(), jax.random.key(0))["head"]["kernel"]).max() > 1e-3


class Sized(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x)


@pytest.mark.parametrize(
    "given",
    [
        Sized(3),
        Sized,
        lambda num_classes: Sized(num_classes),
        lambda n: Sized(n),
        lambda: Sized(3),
        NNX,
        lambda num_classes, rngs: NNX(num_classes, rngs=rngs),
        lambda rngs: NNX(3, rngs=rngs),
        NNX(3, rngs=nnx.Rngs(0)),
        models.MLP(hidden=(2,)),
        models.MLP,
        models.Model(Sized(3), EXAMPLE),
        models.Model(models.MLP(), EXAMPLE),
    ],
)
def test_modules_and_functions_become_models_of_the_data_s_classes(given):
    model = models.build(given, (4,), "classification", 3)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.eval_shape(model.apply, params, X).shape == (6, 3) and model.task == "classification"


def test_values_of_a_regression_may_have_an_axis_of_one():
    for given in (Sized(1), models.MLP(), lambda rngs: nnx.Linear(4, 1, rngs=rngs)):
        model = models.build(given, (4,), "regression", 1)
        params = jax.eval_shape(model.init, jax.random.key(0))
        for fn in (model.apply, model.predict):
            assert jax.eval_shape(fn, params, X).shape == (6,)
        assert jax.eval_shape(model.apply, params, X[:1]).shape == (1,)

    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)[:, 0]

    model = models.build(Flat(), (4,), "regression", 1)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.eval_shape(model.apply, params, X[:1]).shape == (1,)


@pytest.mark.parametrize(
    ("given", "task", "text"),
    [
        (
            Sized(4),
            "classification",
            r"outputs of shape \(batch, 4\); accepted: \(batch, 3\) logits",
        ),
        (
            Sized(2),
            "regression",
            r"outputs of shape \(batch, 2\); accepted: \(batch,\) or \(batch, 1\) values",
        ),
        (models.LeNet(), "classification", r"LeNet: needs images .* at least 16 x 16"),
        (models.CharacterLSTM(), "regression", r"outputs of shape"),
        (nn.Embed(3, 3), "classification", r"model=Embed: fails on inputs of shape \(2, 4\)"),
        ("mlp", "classification", r"model=str: accepted: a Flax module"),
        (lambda rngs: 3, "classification", r"returns an nnx.Module, not int"),
    ],
)
def test_what_does_not_fit_the_data_is_named_in_one_line(given, task, text):
    with pytest.raises(ArgumentError, match=text) as found:
        models.build(given, (4,), task, 1 if task == "regression" else 3)
    assert "\n" not in str(found.value) and str(found.value).startswith("model")


@pytest.mark.parametrize(
    ("end", "refused"),
    [
        (nn.softmax, True),
        (lambda logits: jax.nn.softmax(logits)[:, None, :].reshape(logits.shape), True),
        (lambda logits: jnp.exp(logits) / jnp.exp(logits).sum(axis=-1, keepdims=True), True),
        (nn.log_softmax, False),
        (lambda logits: logits / 2.0, False),
        (lambda logits: logits / jnp.linalg.norm(logits, axis=-1, keepdims=True), False),
    ],
)
def test_probabilities_in_place_of_logits_are_refused(end, refused):
    class Ended(nn.Module):
        @nn.compact
        def __call__(self, x):
            return end(nn.Dense(3)(x))

    text = "^model=Ended: returns probabilities, which sum to 1; accepted: logits, so leave out the softmax at its end$"
    with pytest.raises(ArgumentError, match=text) if refused else contextlib.nullcontext():
        models.build(Ended(), (4,), "classification", 3)


@pytest.mark.slow
def test_a_recurrent_network_has_features():
    """The dense layers inside its cell, which a scan traces, are not theirs."""
    model = models.Model(
        nn.Sequential([nn.RNN(nn.LSTMCell(5)), lambda h: h[:, -1], nn.Dense(3)]),
        jnp.zeros((1, 4, 3)),
    )
    params = start(model, jax.random.key(0))
    x = RNG.normal(size=(2, 4, 3)).astype(np.float32)
    last = params["layers_2"]
    features, outputs = jax.jit(lambda params: (model.features(params, x), model.apply(params, x)))(
        params
    )
    np.testing.assert_allclose(
        outputs, features @ last["kernel"] + last["bias"], rtol=1e-4, atol=1e-6
    )
