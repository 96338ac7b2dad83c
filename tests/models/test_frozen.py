"""Frozen networks and adapters: what is trained, products without merging, and what bad input gets."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util

import pfljax as pfl
from pfljax.models.building import build

WIDTH = 6


class Mixed(nn.Module):
    """Every kind of product: convolution, attention, a checkpointed dense layer, stacked layers, a dense head."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(WIDTH, (2, 2), (2, 2), name="conv")(x))
        x = x.reshape(x.shape[0], -1, WIDTH)
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(x)
        x = nn.remat(nn.Dense)(WIDTH, name="remat")(x)

        def layer(module, carry, _):
            return (nn.tanh(module(carry)), None)

        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x = scanned(nn.Dense(WIDTH, name="scanned"), x, None)[0]
        return nn.Dense(4, name="head")(x.mean(1))


@functools.cache
def linen():
    """The network and its variables, which no test changes."""
    module = Mixed()
    return module, jax.jit(module.init)(jax.random.key(1), jnp.zeros((1, 4, 4, 2)))


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(5, 7, rngs=rngs)
        self.head = nnx.Linear(7, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


def drawn(params, key, scale=1.0):
    """Parameters of the same shapes, none of them zero."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        structure,
        [scale * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)],
    )


def of_mixed(trainable, **options):
    module, variables = linen()
    model = pfl.Model(
        module, frozen=variables, trainable=trainable, frozen_dtype="float32", **options
    )
    return build(model, (4, 4, 2), "classification", 4), module, variables


def paths(tree):
    return {"/".join(path) for path in traverse_util.flatten_dict(tree)}


WEIGHTS = ["conv/kernel", "head/kernel", "remat/kernel", "scanned/kernel"]
WEIGHTS += [f"attention/{name}/kernel" for name in ("query", "key", "value", "out")]


@pytest.mark.slow
def test_lora_beside_every_product():
    """W + A B, added up by NumPy for each kernel, in the module itself: the same outputs and gradients."""
    model, module, variables = of_mixed(pfl.adapters.lora(rank=2, alpha=3.0))
    # so that no tanh is saturated
    params = drawn(model.init(jax.random.key(0)), jax.random.key(2), scale=0.3)
    assert paths(params) == {f"{name}_lora_{x}" for name in WEIGHTS for x in "ab"}
    x = jax.random.normal(jax.random.key(3), (5, 4, 4, 2))

    def whole(params):
        trained = traverse_util.flatten_dict(params)
        found = traverse_util.flatten_dict(variables["params"])
        for path in list(found):
            if path[-1] == "kernel":
                a, b = (trained[*path[:-1], f"kernel_lora_{name}"] for name in "ab")
                spec = "lir,lro->lio" if path[0] == "scanned" else None
                product = jnp.einsum(spec, a, b) if spec else jnp.tensordot(a, b, 1)
                found[path] = found[path] + 1.5 * product
        return {"params": traverse_util.unflatten_dict(found)}

    expected = module.apply(whole(params), x)
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-4, atol=1e-5)

    def loss(params):
        return jnp.sum(jnp.sin(model.apply(params, x)))

    def by_hand(params):
        return jnp.sum(jnp.sin(module.apply(whole(params), x)))

    found = jax.grad(loss)(params)
    wanted = jax.grad(by_hand)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, wanted)
    merged = model.adapted.merged(params)
    np.testing.assert_allclose(module.apply({"params": merged}, x), expected, rtol=1e-4, atol=1e-5)


def of_nnx(trainable, **options):
    module = MLP(nnx.Rngs(0))
    model = pfl.Model(module, frozen=module, trainable=trainable, frozen_dtype="float32", **options)
    return build(model, (5,), "classification", 3), module


def test_nnx_lora_and_a_trained_head():
    """The outputs by NumPy, from the module's own arrays."""
    model, module = of_nnx([pfl.adapters.lora(rank=2, where="hidden"), "^head/"])
    start = jax.jit(model.init)(jax.random.key(0))
    params = drawn(start, jax.random.key(2))
    assert paths(params) == {
        "hidden/kernel_lora_a",
        "hidden/kernel_lora_b",
        "head/kernel",
        "head/bias",
    }
    x = np.asarray(jax.random.normal(jax.random.key(3), (4, 5)))
    hidden, head = jax.tree.map(np.asarray, (params["hidden"], params["head"]))
    kernel = (
        np.asarray(module.hidden.kernel[...]) + hidden["kernel_lora_a"] @ hidden["kernel_lora_b"]
    )
    expected = (
        np.maximum(x @ kernel + np.asarray(module.hidden.bias[...]), 0) @ head["kernel"]
        + head["bias"]
    )
    run = jax.jit(
        lambda params: (model.apply(params, x), model.head(params, model.features(params, x)))
    )
    for found in run(params):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # its frozen value
    np.testing.assert_array_equal(start["head"]["kernel"], module.head.kernel[...])
    np.testing.assert_allclose(run(start)[0], module(x), rtol=1e-5, atol=1e-5)  # B begins at 0


def test_ia3_scales_outputs_and_bitfit_trains_biases():
    """y s for s of ones is y; by NumPy for others."""
    model, module = of_nnx([pfl.adapters.ia3("hidden"), pfl.adapters.bias()])
    start = jax.jit(model.init)(jax.random.key(0))
    apply = jax.jit(model.apply)
    assert paths(start) == {"hidden/kernel_ia3", "hidden/bias", "head/bias"}
    x = np.asarray(jax.random.normal(jax.random.key(3), (4, 5)))
    np.testing.assert_allclose(apply(start, x), module(x), rtol=1e-5, atol=1e-6)
    params = drawn(start, jax.random.key(4))
    hidden = (
        x @ np.asarray(module.hidden.kernel[...]) * params["hidden"]["kernel_ia3"]
        + params["hidden"]["bias"]
    )
    expected = np.maximum(hidden, 0) @ np.asarray(module.head.kernel[...]) + params["head"]["bias"]
    np.testing.assert_allclose(apply(params, x), expected, rtol=1e-4, atol=1e-5)


def test_prompts_are_seen_by_their_block_only():
    """A block that averages its input sees the tokens; its outputs have none of them."""

    class Averaging(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + x.mean(1, keepdims=True)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3, name="embed")(x)
            for number in range(2):
                x = Averaging(name=f"block_{number}")(x)
            return nn.Dense(2, name="head")(x.sum(1))

    module = Network()
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 4, 2)))
    frozen = {"frozen": variables, "trainable": pfl.adapters.prompt(5), "frozen_dtype": "float32"}
    model = build(pfl.Model(module, **frozen), (4, 2), "classification", 2)
    params = drawn(jax.eval_shape(model.init, jax.random.key(0)), jax.random.key(1))
    assert jax.tree.map(jnp.shape, params) == {
        "block_0": {"prompt": (5, 3)},
        "block_1": {"prompt": (5, 3)},
    }
    x = np.asarray(jax.random.normal(jax.random.key(2), (3, 4, 2)))
    weights = jax.tree.map(np.asarray, variables["params"])
    y = x @ weights["embed"]["kernel"] + weights["embed"]["bias"]
    for number in range(2):
        tokens = np.broadcast_to(params[f"block_{number}"]["prompt"], (3, 5, 3))
        y = y + np.concatenate([tokens, y], 1).mean(1, keepdims=True)
    expected = y.sum(1) @ weights["head"]["kernel"] + weights["head"]["bias"]
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), expected, rtol=1e-4, atol=1e-5)


def test_full_rank_with_a_fixed_at_the_identity_is_full_training():
    """W + I B has the gradient of W in B, so steps of SGD compute the same function."""
    model, module = of_nnx(pfl.adapters.lora(rank=3, where="head"))
    whole = build(pfl.Model(module), (5,), "classification", 3)
    x = jax.random.normal(jax.random.key(3), (8, 5))
    y = jnp.arange(8) % 3
    with pytest.raises(pfl.ArgumentError, match="head/kernel is 7 x 3; accepted: ranks up to 3"):
        of_nnx(pfl.adapters.lora(rank=4, where="head"))

    @jax.jit
    def train(key):
        params = model.init(key)
        full = whole.init(key)
        params["head"]["kernel_lora_b"] = jnp.eye(3)  # here B is the identity, and A begins at 0
        params["head"]["kernel_lora_a"] = jnp.zeros((7, 3))
        for _ in range(3):
            grads = jax.grad(lambda params: model.loss(params, x, y).mean())(params)
            params["head"]["kernel_lora_a"] -= 0.5 * grads["head"]["kernel_lora_a"]
            grads = jax.grad(lambda params: whole.loss(params, x, y).mean())(full)
            full["head"]["kernel"] -= 0.5 * grads["head"]["kernel"]
        return model.apply(params, x), whole.apply(full, x)

    np.testing.assert_allclose(*train(jax.random.key(0)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        ("nothing", "matches no parameter; accepted: .*conv/kernel"),
        (pfl.adapters.lora(where="bias"), "matches no parameter; accepted: "),
        (pfl.adapters.prompt(2, "tail"), "no module's path matches; modules: .*attention"),
        (pfl.adapters.head(9), "accepted: 1 to 5 layers"),
        ("(", "is no regular expression"),
        (3, "accepted: regular expressions, adapters"),
        ([pfl.adapters.lora(2), pfl.adapters.lora(2, "head")], "head/kernel is adapted twice"),
        ((), "needs trainable"),
    ],
)
def test_what_cannot_be_trained(trainable, text):
    with pytest.raises(pfl.ArgumentError, match=text):
        of_mixed(trainable)


def test_what_cannot_be_frozen():
    module, variables = linen()
    short = {"params": {name: part for name, part in variables["params"].items() if name != "conv"}}
    wrong = {
        "params": {
            **variables["params"],
            "conv": {"kernel": jnp.zeros((3, 3, 2, 6)), "bias": jnp.zeros(6)},
        }
    }
    more = {"params": {**variables["params"], "tail": {"bias": jnp.zeros(3)}}}
    cases = {
        r"lacks conv/bias \(6,\), conv/kernel \(2, 2, 2, 6\), which are not trained": short,
        r"conv/kernel has shape \(3, 3, 2, 6\); accepted: \(2, 2, 2, 6\)": wrong,
        "has tail/bias, which the network lacks; it has ": more,
        "accepted: a tree of arrays": 3,
    }
    for text, frozen in cases.items():
        with pytest.raises(pfl.ArgumentError, match=text):
            build(
                pfl.Model(module, frozen=frozen, trainable="head"), (4, 4, 2), "classification", 4
            )
    with pytest.raises(pfl.ArgumentError, match="trainable: needs frozen"):
        pfl.Model(module, trainable="head")


def test_a_head_of_another_size_begins_anew():
    """A backbone that was trained on other classes: what is frozen is its own, the trained head is new."""
    module, variables = linen()
    head = {"kernel": jnp.zeros((6, 9)), "bias": jnp.zeros(9)}
    frozen = {"params": {**variables["params"], "head": head}}
    model = build(
        pfl.Model(module, frozen=frozen, trainable="head"), (4, 4, 2), "classification", 4
    )
    start = jax.jit(model.init)(jax.random.key(5))
    assert jax.tree.map(jnp.shape, start) == {"head": {"bias": (4,), "kernel": (6, 4)}}
    assert float(jnp.abs(start["head"]["kernel"]).sum()) > 0


def test_frozen_parameters_are_in_bfloat16():
    """The outputs are those of weights that were rounded to bfloat16, computed in float32."""
    module, variables = linen()
    model = build(
        pfl.Model(module, frozen=variables, trainable="head"), (4, 4, 2), "classification", 4
    )
    params = jax.jit(model.init)(jax.random.key(0))
    np.testing.assert_array_equal(params["head"]["kernel"], variables["params"]["head"]["kernel"])
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), variables)
    narrow = {"params": {**narrow["params"], "head": variables["params"]["head"]}}
    x = jax.random.normal(jax.random.key(3), (5, 4, 4, 2))
    found, expected = jax.jit(lambda params: (model.apply(params, x), module.apply(narrow, x)))(
        params
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_batch_statistics_belong_to_the_clients():
    """They are trained whatever is frozen: a step at rate 1 sets them to what the forward pass wrote."""

    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")(
                nn.Dense(4, name="first")(x)
            )
            return nn.Dense(2, name="head")(x)

    module = Normalized()
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 3)))
    model = build(pfl.Model(module, frozen=variables, trainable="head"), (3,), "classification", 2)
    params = jax.jit(model.init)(jax.random.key(0))
    assert paths(params) == {
        "head/kernel",
        "head/bias",
        "batch_stats/norm/mean",
        "batch_stats/norm/var",
    }
    x = jax.random.normal(jax.random.key(1), (6, 3))

    def loss(params):
        return model.loss(params, x, jnp.arange(6) % 2, jax.random.key(2)).mean()

    grads = jax.jit(jax.grad(loss))(params)
    first = jax.tree.map(
        lambda leaf: np.asarray(leaf.astype(jnp.bfloat16), np.float32), variables["params"]["first"]
    )
    mean = (np.asarray(x) @ first["kernel"] + first["bias"]).mean(0)
    moved = params["batch_stats"]["norm"]["mean"] - grads["batch_stats"]["norm"]["mean"]
    np.testing.assert_allclose(moved, 0.5 * mean, rtol=1e-4, atol=1e-5)
