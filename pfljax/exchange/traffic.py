"""Bytes that a client receives and sends in an exchange, derived from shapes and tracing, never declared."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pfljax.contract import tree
from pfljax.contract.types import Aggregate, Params, PyTree, Traffic


def of_exchange(models: Params, aggregate: Aggregate, server: float) -> Traffic:
    """Bytes of one exchange.

    Args:
        models: The stack of models that clients receive.
        aggregate: What came back.
        server: Bytes that one client reads from the server's state; see `bytes_read`.
    """
    beyond_scalars = [leaf for leaf in jax.tree.leaves(aggregate.report) if leaf.ndim > 1]
    model, upload, report = map(tree.row_bytes, (models, aggregate.upload, beyond_scalars))
    return Traffic(model, upload, report, server, tree.shapes_of_rows((models, aggregate.upload)))


def bytes_read(fn: Callable[..., PyTree], server: PyTree, *args: PyTree) -> int:
    """Bytes of the server's arrays, except scalars, that fn(server, *args) reads; takes arrays or their shapes.

    An array counts in full if anything is computed from it, or if it is passed to a jitted function.
    """
    leaves = jax.tree.leaves(server)
    if not any(leaf.ndim for leaf in leaves):
        return 0
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (server, *args))
    jaxpr = jax.make_jaxpr(fn)(*shapes).jaxpr
    used = {id(var) for equation in jaxpr.eqns for var in equation.invars} | {id(var) for var in jaxpr.outvars}
    read = [leaf for leaf, var in zip(leaves, jaxpr.invars[: len(leaves)], strict=True) if id(var) in used]
    return tree.num_bytes([leaf for leaf in read if leaf.ndim])
