"""A lower bound for the time of a local SGD round, at the rates that this machine reaches in the same run.

The matrix products and convolutions of one mini-batch's gradient come from its jaxpr. Each is timed alone, with its own
shapes, on all devices at once, as in a round. In addition, a step reads the parameters and their gradient and writes
the parameters (timed on a vector of their size, which may fit in a cache), and a round reads and writes every client's
model once from memory (timed on a vector too large for any cache). The rest of a round's time goes to activations,
their derivatives, the loss, mini-batches, and XLA's overhead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval as pe

from pfljax.contract import tree
from pfljax.exchange.plan import ExecutionPlan
from pfljax.models import Model

SECONDS = 0.03  # shortest measurement
REPEATS = 7  # the fastest counts
LARGE = 256 << 20  # bytes, more than any cache holds


class Roofline(NamedTuple):
    """A round's minimum work and its time; milliseconds are for the round on all devices.

    Attributes:
        gflop: GFLOP of all clients' products.
        products_ms: Time of the products alone, each at the rate it reaches with its shapes.
        update_ms: Time of the parameter updates alone.
        memory_ms: Time to read and write every client's model once.
        gflops: Rate of the products, in GFLOP per second.
        peak_gflops: Rate of a product of 1024 x 1024 matrices on each device.
        update_gb: GB per second of the updates.
        memory_gb: GB per second from and to memory.
    """

    gflop: float
    products_ms: float
    update_ms: float
    memory_ms: float
    gflops: float
    peak_gflops: float
    update_gb: float
    memory_gb: float

    @property
    def least_ms(self) -> float:
        """Time of the round if it did nothing else."""
        return self.products_ms + self.update_ms + self.memory_ms


class Product(NamedTuple):
    """A matrix product or convolution: the jaxpr equation, and the number of times it runs."""

    equation: Any
    times: int

    @property
    def flop(self) -> int:
        """Floating-point operations, additions and multiplications."""
        (left, right) = (var.aval for var in self.equation.invars)
        out = self.equation.outvars[0].aval
        if self.equation.primitive.name == "dot_general":
            contracted, _ = self.equation.params["dimension_numbers"]
            return 2 * math.prod(out.shape) * math.prod(left.shape[axis] for axis in contracted[0])
        features = right.shape[self.equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(out.shape) * math.prod(right.shape) // features


def products(jaxpr: Any, times: int = 1) -> Iterator[Product]:
    """The products in a jaxpr, including those inside loops and calls, in the form that a CPU has.

    Where windows of convolutions share patches, the products of the zeros in their kernels count, too.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            yield Product(equation, times)
        repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        inner = list(core.jaxprs_in_params(equation.params))
        # a CPU's form is the first
        for part in inner[:1] if equation.params.get("branches_platforms") else inner:
            yield from products(part, times * repeats)


def seconds(plan: ExecutionPlan, step: Callable[[Any], Any], start: Any) -> float:
    """Seconds per step while all devices take steps, each from its own `start`."""
    run = jax.jit(
        lambda carry, number: jax.lax.fori_loop(0, number, lambda _, carry: step(carry), carry)
    )
    carries = [jax.device_put(start, device) for device in plan.mesh.devices.flat]

    # dispatch is synchronous: a single thread would take turns
    with ThreadPoolExecutor(len(carries)) as devices:

        def timed(number: int) -> float:
            begin = time.perf_counter()
            list(devices.map(lambda carry: jax.block_until_ready(run(carry, number)), carries))
            return time.perf_counter() - begin

        timed(1)
        number = 1
        while timed(number) < SECONDS:
            number *= 2
        while True:
            few = min(timed(number) for _ in range(REPEATS))
            several = min(timed(3 * number) for _ in range(REPEATS))
            if several > few:
                break
            number *= 2  # the machine was busy with something else
    return (several - few) / (2 * number)  # without the cost of a call, such as copies of `start`


def time_product(plan: ExecutionPlan, product: Product) -> float:
    """Seconds of a product."""
    equation = product.equation
    key = jax.random.key(0)
    left, right = (
        jax.random.normal(key, var.aval.shape, var.aval.dtype) for var in equation.invars
    )

    def step(carry):
        left, out = carry
        # One number of each result enters the next product, so that no part of a product can be skipped.
        left = left.at[(0,) * left.ndim].set(1e-9 * out[(0,) * out.ndim])
        return left, equation.primitive.bind(left, right, **equation.params)

    out = equation.outvars[0].aval
    return seconds(plan, step, (left, jnp.zeros(out.shape, out.dtype)))


def time_update(plan: ExecutionPlan, size: int) -> float:
    """Seconds of one SGD step on `size` parameters with a given gradient."""

    def step(carry):
        params, gradient = carry
        return params - 0.1 * gradient, gradient

    return seconds(plan, step, (jnp.ones(size), jnp.ones(size)))


def measure(
    plan: ExecutionPlan, model: Model, batch: Sequence[jax.Array], num_clients: int, steps: int
) -> Roofline:
    """The roofline of a round.

    Args:
        plan: The plan with the devices.
        model: The clients' network.
        batch: x and y of a mini-batch.
        num_clients: K.
        steps: Number of mini-batches per client.
    """
    params = jax.eval_shape(model.init, jax.random.key(0))
    gradient = jax.make_jaxpr(jax.grad(lambda params, x, y: model.loss(params, x, y).mean()))(
        params, *batch
    )
    # without the inputs' gradient
    needed = pe.dce_jaxpr(gradient.jaxpr, [True] * len(gradient.jaxpr.outvars))[0]
    found = list(products(needed))
    rounds = num_clients * steps / plan.num_devices  # sequential steps per device
    times: dict[str, float] = {}
    for product in found:
        name = str(product.equation).split("= ", 1)[-1] + str(
            [var.aval for var in product.equation.invars]
        )
        if name not in times:
            times[name] = time_product(plan, product)
        times["all"] = times.get("all", 0.0) + product.times * times[name]
    flop = sum(product.times * product.flop for product in found)
    size = tree.num_bytes(params) // 4
    update = time_update(plan, size)
    large = time_update(plan, LARGE // 4)
    square = jax.make_jaxpr(jnp.matmul)(*[jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 2)
    peak = next(products(square.jaxpr))
    memory = large * 2 / 3 * size * 4 / LARGE  # two of an update's three vectors
    return Roofline(
        gflop=flop * num_clients * steps / 1e9,
        products_ms=1e3 * times["all"] * rounds,
        update_ms=1e3 * update * rounds,
        memory_ms=1e3 * memory * num_clients / plan.num_devices,
        gflops=flop * plan.num_devices / times["all"] / 1e9,
        peak_gflops=peak.flop * plan.num_devices / time_product(plan, peak) / 1e9,
        update_gb=12 * size * plan.num_devices / update / 1e9,
        memory_gb=3 * LARGE * plan.num_devices / large / 1e9,
    )
