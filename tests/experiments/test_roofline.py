"""The least work of a round, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.interpreters import partial_eval as pe

from experiments import roofline
from pfljax import models
from pfljax.exchange.plan import make_plan


def test_products_inside_of_loops_and_calls_are_counted():
    def layers(x, w):
        return jax.lax.scan(lambda x, _: (jax.jit(jnp.matmul)(x, w), None), x, None, length=7)[0]

    jaxpr = jax.make_jaxpr(layers)(jnp.ones((3, 5)), jnp.ones((5, 5))).jaxpr
    (found,) = roofline.products(jaxpr)
    assert (found.times, found.flop) == (7, 2 * 3 * 5 * 5)


def test_operations_of_a_convolution():
    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    jaxpr = jax.make_jaxpr(conv)(jnp.ones((2, 8, 6, 3)), jnp.ones((3, 3, 3, 4))).jaxpr
    (found,) = roofline.products(jaxpr)
    assert found.flop == 2 * (2 * 8 * 6 * 4) * (3 * 3 * 3)


def test_operations_of_a_network_with_convolutions():
    """Each layer's product, and those of the gradients of its kernel and, except in the first, of its input."""
    model = models.build(models.CNN(channels=(4, 8)), (8, 8, 3), "classification", 3)
    params = jax.eval_shape(model.init, jax.random.key(0))
    x = jnp.zeros((5, 8, 8, 3))
    y = jnp.zeros(5, int)
    gradient = jax.make_jaxpr(jax.grad(lambda params: model.loss(params, x, y).mean()))(
        params
    ).jaxpr
    needed = pe.dce_jaxpr(gradient, [True] * len(gradient.outvars))[0]
    # On CPUs, 2 x 2 windows of so few channels share a patch of 4 x 4 positions.
    first = 5 * (64 // 4) * (16 * 3) * (4 * 4)
    second = 5 * (16 // 4) * (16 * 4) * (4 * 8)
    dense = 5 * 32 * 3
    assert sum(product.flop for product in roofline.products(needed)) == 2 * (
        2 * first + 3 * second + 3 * dense
    )


def test_the_least_work_of_an_mlp(monkeypatch):
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)
    monkeypatch.setattr(roofline, "LARGE", 1 << 12)
    monkeypatch.setattr(roofline, "time_update", lambda plan, size: 1e-6 * size)
    monkeypatch.setattr(roofline, "time_product", lambda plan, product: 1e-9 * product.flop)
    model = models.make("mlp", (8, 8, 1), "classification", 10, hidden=(16,))
    batch = np.zeros((5, 8, 8, 1), np.float32), np.zeros(5, np.int32)
    found = roofline.measure(make_plan("map", devices=2), model, batch, num_clients=6, steps=3)
    # Forward 64-16-10; backward the weights of both layers, and the second layer's input: not the first one's.
    flop = 2 * 5 * (64 * 16 + 16 * 10) + 2 * 5 * (64 * 16 + 16 * 10) + 2 * 5 * 16 * 10
    size = 64 * 16 + 16 + 16 * 10 + 10
    assert found.gflop == pytest.approx(6 * 3 * flop / 1e9)
    assert found.gflops == pytest.approx(2)  # on two devices, each at one
    assert found.products_ms == pytest.approx(1e3 * 1e-9 * flop * 6 * 3 / 2)
    assert found.update_ms == pytest.approx(1e3 * 1e-6 * size * 6 * 3 / 2)
    # 12 bytes move per parameter of an update; a model is read and written, 8 bytes per parameter.
    assert found.memory_ms == pytest.approx(1e3 * 1e-6 * size * 8 / 12 * 6 / 2)
    assert found.least_ms == pytest.approx(found.products_ms + found.update_ms + found.memory_ms)


def test_a_step_is_timed_without_what_a_call_costs(monkeypatch):
    clock = {"now": 0.0}

    def tick(carry):
        clock["now"] += 2  # a step takes 2 s
        return carry

    def wait(result, ready=jax.block_until_ready):
        clock["now"] += 5  # and a call 5 s more
        return ready(result)

    monkeypatch.setattr(roofline.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(roofline.jax, "block_until_ready", wait)
    monkeypatch.setattr(roofline, "SECONDS", 20)
    start = jnp.ones(4)
    assert (
        roofline.seconds(make_plan("map", devices=1), lambda x: io_callback(tick, start, x), start)
        == 2
    )
