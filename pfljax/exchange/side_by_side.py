"""How much of a client's work is done at once where clients are processed side by side, by the bytes that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from pfljax.contract.types import PyTree

CLIENTS = "side_by_side"  # the axis of clients that a device processes at once
# bytes that occupy a device longer than a loop's step; models that take less are processed at once
TOGETHER = 16 << 20
BLOCK = 128 << 20  # bytes that a block of their examples may take in the largest array
# bytes of a CPU core's cache that the largest array of clients side by side may take
CACHE = 3 << 18


def width() -> int:
    """Number of clients that are processed side by side where this is called, in a client's update."""
    try:
        return jax.lax.axis_size(CLIENTS)
    except NameError:
        return 1


def bytes_of(fn: Callable[..., PyTree], *args: PyTree, multiple_of: int = 1) -> int:
    """Bytes of the largest array that fn(*args) computes, for all clients side by side; at least 1.

    Args:
        fn: A client's function; it is traced, not run.
        *args: Its arguments, or their shapes.
        of: Arrays whose size this does not divide do not count: with a rare number of examples, all but theirs.
    """
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return max(width() * largest_array(jaxpr, multiple_of), 1)


def fitting(fn: Callable[..., PyTree], num: int, *args: PyTree) -> int:
    """How many of `num` clients, which it divides, a CPU's core processes side by side: those that fit in its cache.

    Args:
        fn: A client's function; it is traced, not run.
        num: Number of clients.
        *args: Arguments of `fn`, or their shapes.
    """
    trace = jax.make_jaxpr(fn, axis_env=[(CLIENTS, num)])
    largest = largest_array(trace(*args).jaxpr)
    divisors = [n for n in range(1, num + 1) if num % n == 0]
    return max(n for n in divisors if n == 1 or n * largest <= CACHE)


def largest_array(jaxpr: Any, multiple_of: int = 1) -> int:
    """Bytes of the largest array that a traced function computes, if `of` divides its size.

    Of the forms that platforms have, the last counts, which is that of accelerators.
    """
    largest = 0
    for equation in jaxpr.eqns:
        inner = list(core.jaxprs_in_params(equation.params))
        if equation.params.get("branches_platforms"):
            inner = inner[-1:]
        for part in inner:
            largest = max(largest, largest_array(part, multiple_of))

        for variable in equation.outvars:
            shape = variable.aval
            if hasattr(shape, "shape") and shape.size % multiple_of == 0:
                largest = max(largest, shape.size * shape.dtype.itemsize)
    return largest
