"""Rewritten networks: the same values and gradients as XLA's own forms, inside everything that JAX nests."""

import functools
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pfljax import models
from pfljax.models.rewriting import convolutions, rewritten, use_forms

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 7, 3)).astype(np.float32)
KERNEL = 0.3 * RNG.normal(size=(3, 3, 3, 3)).astype(np.float32)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def convolve(x, kernel, strides=1, padding="SAME"):
    return jax.lax.conv_general_dilated(
        x, kernel, (strides,) * 2, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def text_of(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


def with_gradients(fn, *args):
    """(The values of `fn`, its gradients); both in one program, the slopes of the values are random."""

    def run(dy, *args):
        y, pull = jax.vjp(fn, *args)
        return y, pull(dy)

    shapes = jax.eval_shape(fn, *args)
    dy = jax.tree.map(
        lambda leaf: np.random.default_rng(1).normal(size=leaf.shape).astype(leaf.dtype), shapes
    )
    return jax.jit(run)(dy, *args)


def check(fn, *args, gradients=True):
    """Values and gradients of `fn` agree with those of its rewritten form, within 1e-5 of their size."""
    run = with_gradients if gradients else lambda fn, *args: jax.jit(fn)(*args)
    assert_close(run(rewritten(fn), *args), run(fn, *args))


def assert_close(found, expected):
    """Trees agree within 1e-5 of the size of each leaf."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max(initial=1))


def axes_of(draw, number, values):
    return tuple(draw(st.sampled_from(values)) for _ in range(number))


@st.composite
def convolution_cases(draw):
    """Shapes and parameters of a convolution in one to three dimensions."""
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inputs = draw(st.sampled_from([1, 2, 3, 5]))  # 5: more than very few channels
    outputs = draw(st.integers(1, 3))
    x = (draw(st.sampled_from([1, 4])), *axes_of(draw, axes, range(2, 8)), groups * inputs)
    kernel = (*axes_of(draw, axes, range(1, 5)), inputs, groups * outputs)
    padding = tuple((draw(st.integers(-1, 3)), draw(st.integers(-1, 3))) for _ in range(axes))
    options = {
        "lhs_dilation": axes_of(draw, axes, (1, 1, 2, 3)),
        "rhs_dilation": axes_of(draw, axes, (1, 1, 2)),
    }
    return (
        x,
        kernel,
        axes_of(draw, axes, (1, 1, 2, 3)),
        padding,
        options | {"feature_group_count": groups},
        draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(convolution_cases())
def test_convolutions_are_jax_s_in_value_and_gradients(case):
    check_convolution(case)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(convolution_cases())
def test_more_convolutions_are_jax_s_in_value_and_gradients(case):
    check_convolution(case)


def check_convolution(case):
    """A case of `convolution_cases` has the values and gradients of XLA's own form."""
    x, kernel, strides, padding, options, channels_first = case
    # XLA's own gradients read beyond the image where it is padded by more than a window reaches (jax 0.10, CPU).
    for n, dilation, pads in zip(kernel[:-2], options["rhs_dilation"], padding, strict=True):
        assume(max(pads) <= dilation * (n - 1))
    letters = "HWD"[: len(strides)]
    layout = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    if channels_first:  # as in PyTorch
        layout = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
        x = (x[0], x[-1], *x[1:-1])
        kernel = (kernel[-1], kernel[-2], *kernel[:-2])

    def fn(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=layout, **options
        )

    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (x, kernel)]
    assume(jax.eval_shape(fn, *shapes).size)
    arrays = [
        np.random.default_rng(2).normal(size=shape).astype(np.float32) for shape in (x, kernel)
    ]
    assert "stablehlo.convolution" not in text_of(rewritten(fn), *arrays)
    check(fn, *arrays)


@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (1, 1, 0), (1, 2, 0), (2, 2, 0)]
)
def test_convolutions_of_pytorch_s_layout_are_jax_s(size, stride, padding):
    """Channels before the image, and a kernel's outputs first; too many channels for windows to share patches."""
    x = np.random.default_rng(2).normal(size=(2, 9, 6, 4)).astype(np.float32)
    kernel = np.random.default_rng(3).normal(size=(5, 9, size, size)).astype(np.float32)

    def fn(x, kernel):
        pads = ((padding, padding),) * 2
        layout = ("NCHW", "OIHW", "NCHW")
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), pads, dimension_numbers=layout
        )

    assert "stablehlo.convolution" not in text_of(rewritten(fn), x, kernel)
    check(fn, x, kernel)
    stacked = jax.vmap(fn, (None, 0))
    check(stacked, x, np.stack([kernel, -kernel]))


def test_neighboring_windows_share_patches_where_channels_are_few():
    """Products have fewer rows than outputs: 2 x 2 windows of an image's channels, pairs of up to 8 channels."""

    def rows_of_product(channels, outputs, width=8):
        x = jnp.zeros((1, 8, width, channels))
        text = text_of(rewritten(convolve), x, jnp.zeros((3, 3, channels, outputs)))
        (found,) = re.findall(r"dot_general.*-> tensor<([0-9x]+)x\d+xf32>", text)
        return np.prod([int(number) for number in found.split("x")])

    assert rows_of_product(3, 6) == 8 * 8 / 4
    assert rows_of_product(8, 32) == 8 * 8 / 2
    assert rows_of_product(3, 6, width=7) == 8 * 7 / 2  # an odd number has no pairs
    assert rows_of_product(3, 128) == rows_of_product(16, 3) == 8 * 8


# Overlapping windows, a border of padding, windows that tile the image, and ones that leave places out.
@pytest.mark.parametrize(
    ("pool", "window", "strides", "padding"),
    [
        (nn.max_pool, (3, 2), (2, 1), "SAME"),
        (nn.max_pool, (2, 2), (1, 3), ((1, 1), (0, 1))),
        (nn.avg_pool, (3, 2), (2, 1), ((1, 1), (0, 1))),
        (nn.avg_pool, (2, 3), (2, 3), "VALID"),
    ],
)
def test_pooling_has_jax_s_values_and_gradients(pool, window, strides, padding):
    x = np.random.default_rng(3).normal(size=(2, 4, 6, 2)).astype(np.float32)
    fn = functools.partial(pool, window_shape=window, strides=strides, padding=padding)
    assert "reduce_window" not in text_of(rewritten(fn), x)
    check(fn, x)


@pytest.mark.parametrize("window", [(3, 2), (2, 3)])
@pytest.mark.parametrize(
    ("init", "combine"), [(-np.inf, jax.lax.max), (np.float32(0), jax.lax.add)]
)
def test_pooling_with_channels_before_the_images_is_rewritten(init, combine, window):
    """As PyTorch's: (B, C, H, W)."""
    x = np.random.default_rng(3).normal(size=(2, 3, 6, 6)).astype(np.float32)

    def fn(x):
        padding = ((0, 0), (0, 0), (1, 1), (0, 1))
        return jax.lax.reduce_window(x, init, combine, (1, 1, *window), (1, 1, 2, 3), padding)

    assert "reduce_window" not in text_of(rewritten(fn), x)
    check(fn, x)


@pytest.mark.parametrize("window", [(2, 1, 2), (2, 2, 1), (1, 2, 2)])
def test_pooling_over_examples_or_channels_stays(window):
    x = np.random.default_rng(3).normal(size=(4, 4, 4)).astype(np.float32)

    def fn(x):
        return jax.lax.reduce_window(x, -np.inf, jax.lax.max, window, window, "VALID")

    assert "reduce_window" in text_of(rewritten(fn), x)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data())
def test_pooling_is_jax_s_in_value_and_gradients(data):
    axes = data.draw(st.sampled_from([1, 2, 2, 3]))
    x = (
        np.random.default_rng(3)
        .normal(size=(2, *axes_of(data.draw, axes, range(3, 7)), 2))
        .astype(np.float32)
    )
    window = axes_of(data.draw, axes, range(1, 4))
    strides = axes_of(data.draw, axes, range(1, 4))
    padding = data.draw(st.sampled_from(["SAME", "VALID", ((1, 1),) * axes]))
    pool = data.draw(st.sampled_from([nn.max_pool, nn.avg_pool]))

    def fn(x):
        return pool(x, window, strides, padding)

    assume(jax.eval_shape(fn, x).size and min(window) > 1 and max(strides) > 1)
    assert "reduce_window" not in text_of(
        rewritten(lambda x: nn.max_pool(x, window, strides, padding)), x
    )
    check(fn, x)


def test_a_tie_s_gradient_goes_to_the_first():
    x = np.array([[1.0, 2.0], [2.0, 2.0]], np.float32).reshape(1, 2, 2, 1)
    gradient = jax.grad(lambda x: 5 * rewritten(lambda x: nn.max_pool(x, (2, 2), (2, 2)))(x).sum())(
        x
    )
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[0, 5], [0, 0]])


@pytest.mark.parametrize("groups", [1, 3])
def test_convolutions_in_blocks_of_images_are_the_same(groups):
    kernel = KERNEL[:, :, : 3 // groups]
    plain = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )

    @jax.jit
    def run(x, kernel):
        y, pull = jax.vjp(plain, x, kernel)
        dy = jnp.cos(y)
        found = []
        # each of the four images alone, and all at once
        for cache, loops in ((1, 4), (1 << 30, 1)):
            windows = convolutions.Windows(
                (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)), (1, 1), groups, cache
            )
            assert convolutions.num_blocks(x.shape, kernel, windows) == loops
            slopes = convolutions.slopes(dy, x, kernel, windows)
            found.append((convolutions.convolve(x, kernel, windows), *slopes))
        return found, (y, *pull(dy))

    (in_turn, at_once), expected = run(X, kernel)
    assert_close(in_turn, expected)
    assert_close(at_once, expected)


def scanned(x, kernel):
    return jax.lax.scan(
        lambda x, t: (jnp.tanh(convolve(x, kernel)) * t, x.sum()), x, jnp.arange(3.0)
    )


def chosen(x, kernel):
    branches = (lambda x: convolve(x, kernel), lambda x: -convolve(x, kernel))
    return jax.lax.cond(x.sum() > 0, *branches, x)


def repeated(x, kernel):
    return jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, convolve(c[1], kernel)), (0, x)
    )[1]


NESTED = {
    "jit": lambda x, kernel: jax.jit(convolve)(x, kernel),
    "remat": jax.checkpoint(lambda x, kernel: jnp.sin(convolve(x, kernel))),
    "scan": scanned,
    "cond": chosen,
    "stacked": lambda x, kernel: jax.vmap(convolve, (None, 0))(x, jnp.stack([kernel, -kernel])),
}


@pytest.mark.parametrize("name", NESTED)
def test_what_is_nested_is_rewritten(name):
    assert "stablehlo.convolution" not in text_of(rewritten(NESTED[name]), X, KERNEL)
    check(NESTED[name], X, KERNEL)


def test_loops_are_rewritten():
    assert "stablehlo.convolution" not in text_of(rewritten(repeated), X, KERNEL)
    check(repeated, X, KERNEL, gradients=False)


@pytest.mark.parametrize("kind", [jax.custom_vjp, jax.custom_jvp])
def test_derivatives_that_a_function_defines_are_kept(kind):
    fn = kind(lambda x: convolve(x, KERNEL))
    if kind is jax.custom_vjp:
        fn.defvjp(lambda x: (fn(x), None), lambda _, dy: (7 * dy,))
    else:
        fn.defjvp(lambda x, dx: (fn(*x), 7 * dx[0]))
    assert "stablehlo.convolution" not in text_of(rewritten(fn), X)
    np.testing.assert_array_equal(
        jax.grad(lambda x: rewritten(fn)(x).sum())(X), np.full(X.shape, 7.0)
    )
    np.testing.assert_allclose(rewritten(fn)(X), convolve(X, KERNEL), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, k: convolve(x.astype(np.int32), k.astype(np.int32)), (X, 9 * KERNEL)),
        (
            lambda x: jax.lax.reduce_window(
                x, np.inf, jax.lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
            ),
            (X,),
        ),
        (
            lambda x: jax.lax.reduce_window(
                x, -np.inf, jax.lax.max, (2, 1, 1, 1), (1, 1, 1, 1), "VALID"
            ),
            (X,),
        ),
        (
            lambda x, k: convolve(x, k),
            (np.ones((1, 20, 20, 1), np.float32), np.ones((12, 12, 1, 1), np.float32)),
        ),
    ],
)
def test_the_rest_stays_as_it_is(fn, args):
    args = tuple(map(jnp.asarray, args))
    own = text_of(fn, *args)
    found = text_of(rewritten(fn), *args)
    for name in ("stablehlo.convolution", "stablehlo.reduce_window"):
        assert own.count(name) == found.count(name)
    np.testing.assert_array_equal(rewritten(fn)(*args), jax.jit(fn)(*args))


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.data())
def test_sums_over_both_sides_of_an_axis_add_whole_rows_first(data):
    shape = axes_of(data.draw, data.draw(st.integers(3, 5)), (2, 3, 5))
    middle = data.draw(st.integers(1, len(shape) - 2))
    others = [axis for axis in range(middle) if axis and data.draw(st.booleans())]
    axes = tuple(axis for axis in range(len(shape)) if axis not in (middle, *others))
    x = np.random.default_rng(4).normal(size=shape).astype(np.float32)

    def fn(x):
        return jnp.sin(jnp.square(x).sum(axes))

    check(fn, x)
    assert jax.grad(lambda x: rewritten(fn)(x).sum())(x[:0]).shape == x[:0].shape  # no examples
    assert (
        text_of(fn, x).count("stablehlo.reduce("),
        text_of(rewritten(fn), x).count("stablehlo.reduce("),
    ) == (1, 2)


PRODUCTS = {
    "dense": ((2, 3, 4), (4, 5), (2,), (0,)),
    "heads": ((2, 3, 4), (4, 2, 3), (2,), (0,)),
    "from heads": ((2, 3, 2, 4), (2, 4, 5), (2, 3), (0, 1)),
    "everything": ((2, 3), (2, 3), (0, 1), (0, 1)),
    "nothing left over": ((2, 0, 4), (4, 3), (2,), (0,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_arrays_are_products_of_matrices(name):
    *shapes, left, right = PRODUCTS[name]
    a, b = (np.random.default_rng(5).normal(size=shape).astype(np.float32) for shape in shapes)

    def fn(a, b):
        return jax.lax.dot_general(a, b, ((left, right), ((), ())))

    np.testing.assert_allclose(
        rewritten(fn)(a, b), np.tensordot(a, b, (left, right)), rtol=1e-5, atol=1e-5
    )
    check(fn, a, b)
    grads = jax.jit(jax.grad(lambda *args: jnp.sin(rewritten(fn)(*args)).sum(), (0, 1)))
    operands = re.findall(
        r"dot_general.*: \(tensor<(.*)xf32>, tensor<(.*)xf32>\)", grads.lower(a, b).as_text()
    )
    assert len(operands) >= 1 and all(shape.count("x") == 1 for shape in itertools.chain(*operands))


@pytest.mark.parametrize(
    ("left", "right", "dims"),
    [
        ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
        ((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
        ((4, 2, 3), (4, 5), (((0,), (0,)), ((), ()))),
    ],
)
def test_matrices_batches_and_other_orders_of_axes_stay(left, right, dims):
    a = np.ones(left, np.float32)
    b = np.ones(right, np.float32)

    def fn(a, b):
        return jax.lax.dot_general(a, b, dims)

    assert "reshape" not in text_of(rewritten(fn), a, b)


def test_other_platforms_keep_their_own_forms():
    """Lowered for a TPU, the program has XLA's convolutions and pooling; lowered for a CPU, it has neither."""
    fn = rewritten(lambda x, kernel: nn.max_pool(convolve(x, kernel), (2, 2), (2, 2)).sum())
    slopes = jax.jit(jax.grad(fn, (0, 1)))
    for platform, found in (("tpu", True), ("cuda", True), ("cpu", False)):
        text = slopes.trace(X, KERNEL).lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.convolution" in text, "select_and_scatter" in text) == (found, found)


def stacks(*arrays):
    return [np.stack([array, 2 * array]) for array in arrays]


@pytest.mark.parametrize(
    ("axes", "patches", "patches_in_gradients"),
    [
        slow((0, 0), True, True),
        ((None, 0), True, True),
        ((0, None), False, True),
        (None, False, False),
    ],
)
def test_stacked_clients_on_a_gpu_convolve_patches(axes, patches, patches_in_gradients):
    """Of stacked kernels, XLA would make groups of channels; one client's convolution stays XLA's own."""
    of_all = (lambda fn: fn) if axes is None else (lambda fn: jax.vmap(fn, axes))
    args = [
        stacks(a)[0] if axes and axis == 0 else a
        for a, axis in zip((X, KERNEL), axes or (0, 0), strict=True)
    ]
    plain = functools.partial(convolve, strides=2)

    def both(fn):
        return of_all(fn), of_all(jax.grad(lambda *args: jnp.sin(fn(*args)).sum(), (0, 1)))

    def convolutions_of(fn):
        return (
            jax.jit(fn)
            .trace(*args)
            .lower(lowering_platforms=("cuda",))
            .as_text()
            .count("stablehlo.convolution")
        )

    forward, backward = both(rewritten(plain))
    assert (convolutions_of(forward) == 0) == patches
    # A kernel that all share convolves once more for the gradients: their slope depends on the result.
    assert (convolutions_of(backward) <= (axes == (0, None))) == patches_in_gradients

    @functools.partial(jax.jit, static_argnums=0)
    def alone_and_stacked(fn, args, args_of_two):
        return [(each(*args), jax.vmap(each)(*args_of_two)) for each in both(fn)]

    with use_forms("cpu", "cuda"):
        found = alone_and_stacked(rewritten(plain), args, stacks(*args))
    assert_close(found, alone_and_stacked(plain, args, stacks(*args)))


class Everything(nn.Module):
    """Batch statistics, dropout, remat, pooling, strides, groups and a transposed convolution."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3), 2)(x))
        x = nn.max_pool(nn.remat(nn.Conv)(8, (3, 3), feature_group_count=8)(x), (2, 2), (1, 1))
        x = nn.ConvTranspose(4, (3, 3), (2, 2))(nn.Dropout(0.3, deterministic=not train)(x))
        return nn.Dense(3)(nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1))


class EverythingInNNX(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.first = nnx.Conv(3, 8, (3, 3), 2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (3, 3), (2, 2), rngs=rngs)
        self.head = nnx.Linear(24, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(
            nnx.remat(lambda m, x: m(x))(self.depthwise, self.norm(self.first(x))), (2, 2), (1, 1)
        )
        x = nnx.avg_pool(self.up(self.drop(x)), (2, 2), (2, 2))
        return self.head(x.reshape(x.shape[0], -1))


MODELS = {"linen": Everything(), "nnx": lambda rngs: EverythingInNNX(rngs)}


@pytest.mark.parametrize("kind", ["linen", slow("nnx")])
def test_models_compute_what_their_modules_do(kind):
    """Predictions, losses in training, and gradients, which have the new batch statistics."""
    model = models.Model(MODELS[kind], jnp.zeros((1, 6, 7, 3)))
    params = model.init(jax.random.key(1))

    def run(model, params):
        def loss(params):
            return model.loss(params, X, np.arange(4) % 3, jax.random.key(2))

        value, pull = jax.vjp(loss, params)
        return model.apply(params, X), value, pull(jnp.ones(4))

    lowered = jax.jit(functools.partial(run, model)).lower(params)
    assert "stablehlo.convolution" not in lowered.as_text()
    *found, slopes = lowered.compile()(params)

    native = models.Model(MODELS[kind], jnp.zeros((1, 6, 7, 3)))
    with use_forms("cpu", None):  # a model that keeps XLA's own forms
        lowered = jax.jit(functools.partial(run, native)).lower(params)
    assert "stablehlo.convolution" in lowered.as_text()
    *expected, expected_slopes = lowered.compile()(params)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    for one, other in zip(jax.tree.leaves(slopes), jax.tree.leaves(expected_slopes), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * max(1, np.abs(other).max()))


def test_a_network_is_traced_once_for_all_calls_of_a_shape():
    traced = []

    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x):
            traced.append(x.shape)
            return nn.Dense(2)(x)

    model = models.Model(Counting(), jnp.zeros((1, 3)))
    params = model.init(jax.random.key(0))
    traced.clear()
    x = jnp.ones((5, 3))
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params)
    jax.make_jaxpr(lambda params: [model.loss(params, x, jnp.zeros(5, int)) for _ in range(3)])(
        params
    )
    jax.make_jaxpr(jax.vmap(jax.grad(lambda params: model.apply(params, x).sum())))(stack)
    jax.make_jaxpr(lambda stack: jax.lax.map(lambda params: model.apply(params, x), stack))(stack)
    assert traced == [(5, 3)]


def test_initial_values_need_no_forward_pass():
    model = models.Model(Everything(), jnp.zeros((1, 6, 7, 3)))
    text = jax.jit(model.init).trace(jax.random.key(0)).lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.convolution" not in text and "reduce_window" not in text


@pytest.mark.parametrize(
    ("draw", "impl"),
    [
        (jax.random.normal, "threefry2x32"),
        (jax.random.bernoulli, "rbg"),
        slow(nn.initializers.lecun_normal(), "threefry2x32"),
    ],
)
def test_random_numbers_are_jax_s(draw, impl):
    def shaped(key):
        return draw(key, shape=(3, 3, 4, 5))

    key = jax.random.key(3, impl=impl)
    np.testing.assert_array_equal(rewritten(shaped)(key), jax.jit(shaped)(key))
    assert "<180xui32>" in text_of(rewritten(shaped), key) and "<180xui32>" not in text_of(
        shaped, key
    )


@pytest.mark.slow
def test_orthogonal_initial_values_are_drawn_one_by_one():
    """LAPACK's factorizations of stacked clients wait for each other forever where there are few cores."""
    model = models.Model(nn.RNN(nn.LSTMCell(5)), jnp.zeros((1, 4, 3)))
    keys = jax.random.split(jax.random.key(0), 3)
    start = jax.jit(jax.vmap(model.init))
    batched = [
        line
        for line in start.lower(keys).as_text().splitlines()
        if "lapack" in line and "3x5x5" in line
    ]
    assert not batched
    for number, key in enumerate(keys):
        for found, expected in zip(
            *map(jax.tree.leaves, (start(keys), model.init(key))), strict=True
        ):
            np.testing.assert_allclose(found[number], expected, rtol=1e-4, atol=1e-6)


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(2, (15, 15))(nn.Conv(2, (3, 3))(x))
        return nn.Dense(3)(nn.pooling.min_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1))


class WideInNNX(nnx.Module):
    def __init__(self, rngs):
        self.near = nnx.Conv(3, 2, (3, 3), rngs=rngs)
        self.far = nnx.Conv(2, 2, (15, 15), rngs=rngs)
        self.head = nnx.Linear(2 * 42, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.far(self.near(x)).reshape(x.shape[0], -1))


def test_slow_layers_are_named_by_their_parameters():
    linen = models.Model(Wide(), jnp.zeros((1, 6, 7, 3)))
    own = models.Model(lambda rngs: WideInNNX(rngs), jnp.zeros((1, 6, 7, 3)))
    (convolution, pooling) = linen.slow_layers("cpu")
    assert convolution.startswith("Conv_0: 15 x 15 x 2 x 2, native: about ")
    assert pooling.startswith("Wide: 1 x 2 x 2 x 1, native: about ")
    assert [line.split(":")[0] for line in own.slow_layers("cpu")] == ["far"]
    assert linen.slow_layers("tpu") == own.slow_layers("tpu") == []
    assert models.make("cnn", (32, 32, 3), "classification", 10).slow_layers("cpu") == []


# ---- Images with their channels first.

FIRST = np.moveaxis(X, -1, 1)  # (4, 3, 6, 7)


def convolve_first(x, kernel=KERNEL, **options):
    """A convolution as PyTorch's."""
    options = {"dimension_numbers": ("NCHW", "HWIO", "NCHW")} | options
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **options)


def normalized(x):
    """Batch normalization, whose means are over all axes but the second."""
    mean = x.mean((0, 2, 3), keepdims=True)
    return (x - mean) / jnp.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-3)


def group_normalized(x):
    groups = x.reshape(4, 3, 1, 42)
    return ((groups - groups.mean(-1, keepdims=True)) * groups.std(-1, keepdims=True)).reshape(
        x.shape
    )


BETWEEN = {
    "nothing": lambda x: x,
    "bias": lambda x: x + jnp.arange(3.0)[:, None, None],
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "clip": lambda x: jnp.clip(x, -0.2, 0.3),
    "leaky": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "function": lambda x: jax.jit(lambda a: a * jnp.tanh(a).mean((2, 3), keepdims=True))(x),
    "mask": lambda x: jnp.where(jnp.arange(7) > 2, x, 0.0),
    "residual": lambda x: x + jax.nn.relu(convolve_first(x)),
    "other order": lambda x: x + np.moveaxis(X, -1, 1) * jnp.swapaxes(jnp.swapaxes(x, 1, 3), 1, 3),
    "batch norm": normalized,
    "group norm": group_normalized,
    "maximum of windows": lambda x: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 1, 2, 3), (1, 1, 2, 1), "VALID"
    ),
    "sum of windows": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, 1, 2, 2), (1, 1, 1, 1), ((0, 0), (0, 0), (1, 0), (0, 1))
    ),
    "maximum": lambda x: x * x.max((0, 3), keepdims=True),
    "concatenation": lambda x: jnp.concatenate([x, FIRST, 2 * x], axis=2),
    "padding": lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 2), (0, 1))),
    "slice": lambda x: x[:, :, 1::2, :-1],
    "channels": lambda x: jnp.concatenate([x[:, 1:2], x[:, :2]], axis=1),
    "squeeze": lambda x: (x[:, 1:2] + x[:, :1]).squeeze(1)[:, None] * jnp.ones((3, 1, 1)),
    "transposition": lambda x: jnp.swapaxes(x, 2, 3),
    "merged": lambda x: x.reshape(4, 3, 42).reshape(4, 3, 7, 6),
    "mixed": lambda x: x.reshape(4, 126).reshape(4, 3, 6, 7),
    "split": lambda x: x.reshape(4, 3, 2, 3, 7)[:, :, 0],
    "loop": lambda x: jax.lax.scan(lambda c, _: (jax.nn.relu(c) + 0.1, None), x, length=2)[0],
    "checkpoint": jax.checkpoint(lambda x: convolve_first(jax.nn.relu(x))),
    "reversal": lambda x: x[:, :, ::-1],
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=list(BETWEEN))
def test_images_with_channels_first_are_jax_s_in_value_and_gradients(between):
    def network(x, kernel):
        return convolve_first(between(convolve_first(x, kernel)), kernel)

    check(network, FIRST, KERNEL)


@pytest.mark.parametrize("name", ["relu", "group norm", "merged", "mixed"])
def test_what_follows_convolutions_has_channels_first(name):
    def network(x, kernel):
        y = BETWEEN[name](convolve_first(x, kernel))
        return y, y.sum((1, 2)), y.reshape(4, -1) @ jnp.ones((126, 2))

    check(network, FIRST, KERNEL)


@pytest.mark.parametrize(
    "layout", [("NCH", "OIH", "NCH"), ("NCHWD", "OIHWD", "NCHWD"), ("CNH", "HIO", "NHC")]
)
def test_convolutions_of_any_layout_follow_each_other(layout):
    num_axes = len(layout[0])
    x = RNG.normal(size=(3, 3, 5, 6, 4)[:num_axes]).astype(np.float32)
    kernel = RNG.normal(size=(3, 3, 3, 3, 3)[:num_axes]).astype(np.float32)

    def network(x, kernel):
        strides = (1,) * (num_axes - 2)
        y = jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=layout)
        return jax.lax.conv_general_dilated(
            jax.nn.relu(y), kernel, strides, "SAME", dimension_numbers=layout
        )

    check(network, x, kernel)


def test_clients_side_by_side_have_their_channels_first():
    def network(x, kernel):
        return convolve_first(group_normalized(jax.nn.relu(convolve_first(x, kernel))), kernel)

    check(jax.vmap(network), np.stack([FIRST, 2 * FIRST]), np.stack([KERNEL, -KERNEL]))


def test_images_are_transposed_once_however_many_layers_there_are():
    def transposed(num_layers):
        def network(x):
            for _ in range(num_layers):
                x = jnp.clip(normalized(jax.nn.relu(convolve_first(x))), -1, 1)
            return x

        text = text_of(rewritten(network), FIRST)
        return len(re.findall(r"transpose.*tensor<4x(6x7x3|3x6x7)xf32>", text))

    assert transposed(5) == transposed(1) == 2


def test_what_has_its_channels_last_is_computed_as_it_was():
    def network(x, kernel):
        return jnp.swapaxes(jax.nn.relu(convolve(x, kernel)), 1, 3)

    text = text_of(rewritten(network), X, KERNEL)
    assert len(re.findall(r"transpose.*\(tensor<4x6x7x3xf32>\)", text)) == 1


def test_derivatives_that_a_function_defines_have_the_program_s_order_of_axes():
    @jax.custom_jvp
    def same(x):
        return 1.0 * x

    same.defjvps(lambda t, ans, x: t * jnp.arange(1.0, 4.0)[:, None, None])
    check(lambda x, kernel: same(convolve_first(x, kernel)), FIRST, KERNEL)


def test_functions_with_scalar_results_or_none_follow_convolutions():
    scaled = jax.jit(lambda y, s: (y * s, s + 1))

    def network(x, s):
        y, s = scaled(convolve_first(x), s)
        jax.debug.callback(lambda y: None, y)
        return y * s

    check(network, FIRST, np.float32(2), gradients=False)
