"""Networks: sizes, losses, and convolutions against JAX's own."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import networks as networks_by_hand
import numpy as np
import pytest
import toys

from pfljax import models
from pfljax.contract.errors import ArgumentError
from pfljax.models import networks, recurrent

start = jax.jit(lambda model: model.init(jax.random.key(0)), static_argnums=0)


def reference_convolution(x, kernel, size, margin=None, stride=1):
    margin = (size - 1) // 2 if margin is None else margin
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(margin, margin)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def reference_pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def lstm_by_hand(x, wx, wh, b):
    """The equations of an LSTM, one step after another, in NumPy."""

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    h = np.zeros((x.shape[1], wh.shape[0]))
    c = np.zeros((x.shape[1], wh.shape[0]))
    out = []
    for step in x:
        i, f, g, o = np.split(step @ wx + h @ wh + b, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(h)
    return np.stack(out)


def lstm_arrays(steps=5, batch=3, features=2, hidden=4):
    rng = np.random.default_rng(0)
    shapes = ((steps, batch, features), (features, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,))
    return [rng.normal(size=shape) for shape in shapes]


def test_the_lstm_is_its_equations_and_its_gradients_are_their_differences():
    arrays = lstm_arrays()
    weights = np.random.default_rng(1).normal(size=(5, 3, 4))

    @jax.jit
    def run(*arrays):
        y, pull = jax.vjp(recurrent.lstm, *arrays)
        return y, pull(jnp.float32(weights))

    found, grads = run(*map(jnp.float32, arrays))
    np.testing.assert_allclose(found, lstm_by_hand(*arrays), rtol=1e-4, atol=1e-5)
    for number, grad in enumerate(grads):
        for place in [tuple(0 for _ in grad.shape), tuple(n - 1 for n in grad.shape)]:
            values = []
            for step in (1e-5, -1e-5):
                moved = [array.copy() for array in arrays]
                moved[number][place] += step
                values.append((lstm_by_hand(*moved) * weights).sum())
            np.testing.assert_allclose(
                grad[place], (values[0] - values[1]) / 2e-5, rtol=2e-3, atol=1e-4
            )


@pytest.mark.slow
def test_characters_are_predicted_from_those_before():
    model = models.make("lstm", (6,), "classification", 5)
    params = start(model)
    tokens = np.array([[0, 1, 2, 3, 4, 0], [4, 4, 1, 0, 2, 3]], np.uint8)
    logits = model.apply(params, tokens)
    assert logits.shape == (2, 6, 5)
    later = tokens.copy()
    later[:, 4] = 2
    changed = np.abs(model.apply(params, later) - logits).max(axis=(0, 2))
    assert (changed[:4] == 0).all() and (changed[4:] > 0).all()

    # Table 1: an embedding of 8 and two layers of 256; weights into and within the gates, biases, dense outputs.
    def layer(inputs):
        return (inputs + 256 + 1) * 4 * 256

    assert count("lstm", (80,), 65) == 65 * 8 + layer(8) + layer(256) + 256 * 65 + 65


@pytest.mark.slow
def test_a_sequence_s_loss_is_the_mean_over_its_places_that_are_characters():
    model = models.make("lstm", (3,), "classification", 4)
    params = model.init(jax.random.key(1))
    x = np.array([[0, 1, 2], [3, 2, 0]], np.uint8)
    y = np.array([[1, 2, 3], [2, 255, 255]], np.uint8)
    log_p = np.log(np.float64(model.predict(params, x)))
    expected = [-(log_p[0, 0, 1] + log_p[0, 1, 2] + log_p[0, 2, 3]) / 3, -log_p[1, 0, 2]]
    np.testing.assert_allclose(model.loss(params, x, y), expected, rtol=1e-5)
    weighed = [
        -(2 * log_p[0, 0, 1] + 3 * log_p[0, 1, 2] + 4 * log_p[0, 2, 3]) / 3,
        -3 * log_p[1, 0, 2],
    ]
    found = model.loss(params, x, y, class_weights=np.array([1, 2, 3, 4], np.float32))
    np.testing.assert_allclose(found, weighed, rtol=1e-5)


class Varied(nn.Module):
    """Batch statistics and dropout."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


@pytest.mark.parametrize("key", [None, 7])
def test_a_shift_is_added_to_the_logits_of_the_loss(key):
    """Also in training mode, where outputs and features match the loss, and statistics are updated as usual."""
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    y = np.array([0, 2, 1, 2])
    model = models.Model(Varied(), x)
    params = start(model)
    key = None if key is None else jax.random.key(key)
    shift = np.array([0.5, -1.0, 2.0], np.float32)
    weights = np.array([1, 2, 3], np.float32)
    shifts = [shift, np.outer([0, 1, 2, 3], shift).astype(np.float32)]

    @jax.jit
    def run(params):
        loss = functools.partial(model.loss, x=x, y=y, key=key)
        losses = [loss(params, shift=added) for added in shifts]
        weighed = [loss(params, class_weights=weights, shift=added) for added in shifts]
        slopes = [
            jax.grad(lambda p, added=added: loss(p, shift=added).mean())(params)
            for added in (shift, None)
        ]
        slopes.append(jax.grad(lambda p: model.features(p, x, key).sum())(params))
        of_statistics = [slope["batch_stats"] for slope in slopes]
        return (
            model.apply(params, x, key),
            model.features(params, x, key),
            losses,
            weighed,
            of_statistics,
        )

    outputs, features, losses, weighed, (shifted, plain, of_features) = run(params)
    for added, loss, times in zip(shifts, losses, weighed, strict=True):
        expected = -np.log(networks_by_hand.softmax(np.float64(outputs) + added)[np.arange(4), y])
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
        np.testing.assert_allclose(times, weights[y] * expected, rtol=1e-4)
    last = params["Dense_1"]
    np.testing.assert_allclose(
        outputs, features @ last["kernel"] + last["bias"], rtol=1e-4, atol=1e-6
    )
    dropped = np.abs(features) == 0
    assert dropped.any() == (key is not None)
    toys.assert_trees_close(shifted, plain)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(of_features))


def count(name, shape, classes=10, **options):
    model = models.make(name, shape, "classification", classes, **options)
    params = jax.eval_shape(model.init, jax.random.key(0))
    return sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.slow
def test_networks_have_the_papers_sizes():
    convolutions = (27 * 128 + 128) + 2 * (9 * 128 * 128 + 128)
    assert count("cnn", (32, 32, 3)) == convolutions + 4 * 4 * 128 * 10 + 10 == 319_242
    assert count("mlp", (8, 8, 1), hidden=(64,)) == 64 * 64 + 64 + 64 * 10 + 10
    assert count("mlp", (8, 8, 1), hidden=(30, 20)) == 64 * 30 + 30 + 30 * 20 + 20 + 20 * 10 + 10
    assert count("linear", (8, 8, 1)) == 64 * 10 + 10
    assert count("linear", (5,), classes=3, hidden=(99,)) == 5 * 3 + 3
    assert count("femnist_cnn", (28, 28, 1), 62) == 2_278_334  # as the paper's authors' network has
    # torchvision's network for ten classes has the same number: each norm has a scale and a shift in both.
    assert count("mobilenet_v2", (32, 32, 3), 10) == 2_236_682
    # 75*6+6 + 150*16+16 + 400*120+120 + 120*84+84 + 84*10+10
    assert count("lenet", (32, 32, 3)) == 62_006
    assert count("mcmahan_cnn", (28, 28, 1)) == 1_663_370  # as its paper says
    # PFLlib's FedAvgCNN flattens to 1,024 numbers for MNIST, to 1,600 for CIFAR-10 and to 10,816 for Tiny-ImageNet.
    for shape, flat, classes in [
        ((28, 28, 1), 1024, 10),
        ((32, 32, 3), 1600, 10),
        ((64, 64, 3), 10_816, 200),
    ]:
        convolutions = (25 * shape[-1] * 32 + 32) + (25 * 32 * 64 + 64)
        dense = (flat * 512 + 512) + (512 * classes + classes)
        assert count("pfllib_cnn", shape, classes) == convolutions + dense
    # 32 - 2 - 2 = 28 pixels per side, halved to 14.
    assert (27 * 32 + 32) + (9 * 32 * 64 + 64) + (14 * 14 * 64 * 128 + 128) + (
        128 * 10 + 10
    ) == 1_626_442
    assert count("pfl_research_cnn", (32, 32, 3)) == 1_626_442  # as its benchmark says

    def block(a, b):
        return 9 * a * b + 9 * b * b + 4 * b  # two convolutions without bias, two norms

    def shortcut(a, b):
        return a * b + 2 * b

    stages = 2 * block(64, 64) + sum(
        block(a, b) + shortcut(a, b) + block(b, b)
        for a, b in itertools.pairwise([64, 128, 256, 512])
    )
    assert (
        count("resnet18", (32, 32, 3))
        == (27 * 64 + 2 * 64) + stages + (512 * 10 + 10)
        == 11_173_962
    )
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    # and a norm's scale and shift
    convolutions = sum(9 * a * b + b + 2 * b for a, b in itertools.pairwise(widths))
    dense = (512 * 4096 + 4096) + (4096 * 4096 + 4096) + (4096 * 10 + 10)
    assert count("vgg11", (32, 32, 3)) == convolutions + dense


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        # Parameters of each layer, from the input on.
        ("mlp", (4,), [4 * 6 + 6, 6 * 3 + 3]),
        ("linear", (4,), [4 * 3 + 3]),
        (
            "mcmahan_cnn",
            (8, 8, 1),
            [25 * 32 + 32, 25 * 32 * 64 + 64, 2 * 2 * 64 * 512 + 512, 512 * 3 + 3],
        ),
        ("cnn", (8, 8, 2), [18 * 5 + 5, 45 * 7 + 7, 2 * 2 * 7 * 3 + 3]),
        pytest.param(
            "vgg11",
            (32, 32, 3),
            [
                *(
                    9 * a * b + 3 * b
                    for a, b in itertools.pairwise([3, 64, 128, 256, 256, 512, 512, 512, 512])
                ),
                *(512 * 4096 + 4096, 4096 * 4096 + 4096, 4096 * 3 + 3),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_masks_cover_the_last_layers(name, shape, sizes):
    model = models.make(name, shape, "classification", 3, hidden=(6,), channels=(5, 7))
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert len(model.layers) == len(sizes)
    for num in range(len(sizes) + 1):
        mask = model.mask(params, num)
        assert jax.tree.structure(mask) == jax.tree.structure(params)
        covered = sum(
            p.size
            for p, on in zip(jax.tree.leaves(params), jax.tree.leaves(mask), strict=True)
            if on
        )
        assert covered == sum(sizes[len(sizes) - num :])


@pytest.mark.parametrize(("name", "shape"), [("mlp", (4,)), ("linear", (4,)), ("cnn", (8, 8, 2))])
def test_the_last_layer_makes_the_outputs_of_the_features(name, shape):
    model = models.make(name, shape, "classification", 9, hidden=(6,), channels=(5, 7))
    params = start(model)
    (last,) = model.layers[-1]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *shape)).astype(np.float32)

    @jax.jit
    def run(params):
        features = model.features(params, x)
        return features, model.head(params, features), model.apply(params, x)

    features, from_features, outputs = run(params)
    expected = features @ params[last]["kernel"] + params[last]["bias"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(from_features, expected, rtol=1e-5, atol=1e-5)


def test_an_embedding_is_the_last_hidden_layer_before_its_relu():
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    model = models.make("mlp", (4,), "classification", 9, hidden=(6,))
    params = start(model)
    expected = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    embedding, features = jax.jit(
        lambda params: (model.embedding(params, x), model.features(params, x))
    )(params)
    np.testing.assert_allclose(embedding, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(features, np.maximum(expected, 0), rtol=1e-5, atol=1e-6)
    linear = models.make("linear", (4,), "classification", 9)
    np.testing.assert_array_equal(linear.embedding(start(linear), x), x)


@pytest.mark.slow
def test_vgg_has_two_hidden_layers_of_4096():
    model = models.make("vgg11", (32, 32, 3), "classification", 10)
    params = jax.eval_shape(model.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((2, 32, 32, 3), np.float32)
    assert jax.eval_shape(model.apply, params, x).shape == (2, 10)
    assert jax.eval_shape(model.features, params, x).shape == (2, 4096)


@pytest.mark.parametrize("platform", ["default", "tpu"])
def test_the_cnn_is_convolution_pooling_relu_and_a_dense_layer(platform, monkeypatch):
    """In outputs and gradients, although a TPU pools before it adds the bias."""
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *args, **forms: forms[platform](*args)
    )
    cnn = networks.CNN((4, 5), 3)
    x = np.random.default_rng(2).normal(size=(3, 9, 8, 2)).astype(np.float32)
    params = jax.jit(cnn.init)(jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # biases that matter

    def expected(params):
        h = x
        for number in range(2):
            layer = params[f"Conv_{number}"]
            h = jax.nn.relu(
                reference_pool(reference_convolution(h, layer["kernel"], 3) + layer["bias"])
            )
        return h.reshape(3, -1) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]

    @jax.jit
    def run(params):
        forms = (lambda params: cnn.apply({"params": params}, x)), expected
        slopes = [
            jax.grad(lambda params, fn=fn: jnp.square(fn(params)).sum())(params) for fn in forms
        ]
        return [fn(params) for fn in forms], slopes

    outputs, slopes = run(params)
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)
    toys.assert_trees_close(*slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "padding"),
    [pytest.param(3, "SAME", marks=pytest.mark.slow), (4, "SAME"), (5, "VALID")],
)
def test_the_largest_of_four_convolutions_is_the_pooled_one(size, padding):
    """Also where pooling drops a last row or column; derivatives are those of pooling."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 9, 10, 3))
    kernel = rng.normal(size=(size, size, 3, 4))

    @jax.jit
    def run(x, kernel):
        y = networks.convolved(x, kernel, 1, padding)

        def from_four(y):
            return networks.pooled(y, x, kernel, padding)

        def slope(pool):
            return jax.grad(lambda y: jnp.square(pool(y)).sum())(y)

        return (from_four(y), reference_pool(y)), (slope(from_four), slope(networks.pool))

    outputs, slopes = run(x, kernel)
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(*slopes)


@pytest.mark.slow
def test_the_pfl_research_network_is_its_layers():
    model = models.make("pfl_research_cnn", (9, 8, 2), "classification", 3)
    params = jax.tree.map(lambda leaf: leaf + 0.1, start(model))
    h = x = np.random.default_rng(2).normal(size=(3, 9, 8, 2)).astype(np.float32)
    for number in range(2):
        layer = params[f"Conv_{number}"]
        h = jax.nn.relu(reference_convolution(h, layer["kernel"], 3, margin=0) + layer["bias"])
    h = reference_pool(h).reshape(3, -1)
    assert h.shape == (3, 2 * 2 * 64)
    h = jax.nn.relu(h @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"])
    expected = h @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_families_have_torchvision_s_sizes_and_one_width_of_features():
    """Numbers of parameters are those of torchvision's networks, but for the stem and the last layer."""
    found = {}
    for name, module in models.FAMILIES["htfe8"].items():
        built = models.build(module, (32, 32, 3), "classification", 10)
        example = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
        assert jax.eval_shape(built.features, built.network.shapes, example).shape == (2, 512)
        found[name] = built.num_parameters
    head = 512 * 10 + 10
    stem = 27 * 64 + 2 * 64
    assert found["cnn"] == (75 * 32 + 32) + (25 * 32 * 64 + 64) + (5 * 5 * 64 * 512 + 512) + head
    of_stem = 49 * 3 * 64 + 64 * 64 + 9 * 64 * 192 + 2 * (64 + 64 + 192)
    assert (
        found["googlenet"]
        == 6_624_904 - (1024 * 1000 + 1000) - of_stem + (27 * 192 + 2 * 192) + head
    )
    assert found["mobilenet_v2"] == 2_236_682 - 1280 * 10 + 512 * 10
    totals = {
        "resnet34": (21_797_672, 512),
        "resnet50": (25_557_032, 2048),
        "resnet101": (44_549_160, 2048),
    }
    for name, (total, width) in totals.items():
        assert found[name] == total - (width * 1000 + 1000) - (49 * 3 * 64 + 2 * 64) + stem + head
    assert {
        family: tuple(modules) for family, modules in models.FAMILIES.items() if family != "htfe8"
    } == {
        "htfe2": ("cnn", "resnet18"),
        "htfe3": ("resnet10", "resnet18", "resnet34"),
        "htfe4": ("cnn", "googlenet", "mobilenet_v2", "resnet18"),
    }


def test_features_are_narrowed_to_means_of_neighboring_ranges():
    x = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    expected = np.stack([x[:, 0:3].mean(1), x[:, 2:5].mean(1), x[:, 4:7].mean(1)], axis=1)
    np.testing.assert_allclose(networks.narrowed(x, 3), expected, rtol=1e-6)
    assert networks.narrowed(x, None) is x and networks.narrowed(x, 7) is x


@pytest.mark.slow
def test_resnet_is_its_layers():
    network = networks.ResNet18((8, 16, 24, 32), outputs=3)
    x = np.random.default_rng(0).normal(size=(2, 9, 8, 3)).astype(np.float32)
    params = jax.jit(network.init)(jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # shifts that matter
    shapes = []

    def reference(params, x):
        layers_of = {kind: itertools.count() for kind in ("Conv", "Dense", "GroupNorm")}

        def following(kind):
            return params[f"{kind}_{next(layers_of[kind])}"]

        def norm(x):
            layer = following("GroupNorm")
            groups = x.reshape(len(x), *x.shape[1:3], 8, -1)
            mean = groups.mean((1, 2, 4), keepdims=True)
            var = groups.var((1, 2, 4), keepdims=True)
            return ((groups - mean) / jnp.sqrt(var + 1e-6)).reshape(x.shape) * layer[
                "scale"
            ] + layer["bias"]

        def convolution(x, size=3, stride=1):
            kernel = following("Conv")["kernel"]
            return reference_convolution(x, kernel, size, stride=stride)

        h = jax.nn.relu(norm(convolution(x)))
        for stage in range(4):
            for stride in (2 if stage else 1, 1):
                y = norm(convolution(jax.nn.relu(norm(convolution(h, 3, stride)))))
                if stride == 2:
                    h = norm(convolution(h, 1, 2))
                h = jax.nn.relu(h + y)
            shapes.append(h.shape[1:])
        last = following("Dense")
        return h.mean(axis=(1, 2)) @ last["kernel"] + last["bias"]

    expected = jax.jit(reference)(params, x)
    assert shapes == [(9, 8, 8), (5, 4, 16), (3, 2, 24), (2, 1, 32)]
    found = jax.jit(lambda params: network.apply({"params": params}, x))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_one_logit_makes_two_classes():
    model = models.make("logistic", (150,), "classification", 2)
    params = start(model)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 151  # as FedEM's authors have it
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 150)).astype(np.float32)
    y = np.array([0, 1, 1, 0, 1, 0], np.int32)
    z = np.float64(x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"])[:, 0]
    ones = 1 / (1 + np.exp(-z))

    @jax.jit
    def run(params):
        losses, pull = jax.vjp(lambda params: model.loss(params, x, y), params)
        return model.predict(params, x), losses, pull(jnp.ones(6))[0]["Dense_0"]["kernel"][:, 0]

    shares, losses, gradient = run(params)
    np.testing.assert_allclose(shares, np.stack([1 - ones, ones], axis=1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(losses, np.logaddexp(0, z) - y * z, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient, x.T @ (ones - y), rtol=1e-3, atol=1e-4)
    for task, classes in (("classification", 3), ("regression", 1)):
        with pytest.raises(
            ArgumentError, match=r"model=logistic: accepted only for data with two classes"
        ):
            models.make("logistic", (150,), task, classes)


def test_misfits_are_named():
    with pytest.raises(ArgumentError, match=r"model=rnn: unknown model; did you mean cnn"):
        models.make("rnn", (4,), "classification", 3)
    with pytest.raises(ArgumentError, match=r"model=cnn.*8 x 8"):
        models.make("cnn", (7, 8, 1), "classification", 3)
    with pytest.raises(ArgumentError, match=r"model=cnn.*\(64,\)"):
        models.make("cnn", (64,), "classification", 3)
    with pytest.raises(ArgumentError, match=r"model=femnist_cnn.*16 x 16"):
        models.make("femnist_cnn", (8, 8, 1), "classification", 3)
    with pytest.raises(ArgumentError, match=r"model=vgg11: needs images .* at least 32 x 32"):
        models.make("vgg11", (28, 28, 1), "classification", 10)
    with pytest.raises(ArgumentError, match=r"model=lstm.*tokens"):
        models.make("lstm", (8, 8, 1), "classification", 3)
