"""What stages see of a client's part in a round, and which parts of its message they change."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import (
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Params,
    PyTree,
    Upload,
)


class LocalWork(NamedTuple):
    """A client's part in an exchange, before it trains.

    Attributes:
        context: The client's context, as the method knows it.
        models: The models that it trains from, leaves (J, ...).
        row: Its row, as the method knows it.
        data: Its data.
        absent: () bool: whether it does nothing: it trains on no examples, sends nothing and keeps
            its row. None: known to be False.
        away: () bool: whether it is absent and has not even received models.
    """

    context: ClientContext
    models: Params
    row: PyTree
    data: ClientData
    absent: Array | None = None
    away: Array | None = None


class Values(NamedTuple):
    """The floats of an upload that attackers, compression and rules change, in units of u_k.

    Attributes:
        sums: `Upload.sums`, divided by the weight; numbers and integers are None.
        update: `Upload.update`.
    """

    sums: dict[str, PyTree]
    update: Params


def either(a: Array | None, b: Array | None) -> Array | None:
    """a or b, where None is known to be False."""
    if a is None:
        return b
    if b is None:
        return a
    return a | b


def choose(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """One of two trees, by a () bool."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def lost(output: ClientOutput, condition: Array) -> ClientOutput:
    """An output of which nothing arrives if the condition () holds; the client keeps its new row."""
    absent = either(output.participation.absent, condition)
    return output._replace(participation=output.participation._replace(absent=absent))


def dropped(output: ClientOutput, condition: Array) -> ClientOutput:
    """An output that is left out if the condition () holds; the client keeps its old row."""
    output = lost(output, condition)
    refused = either(output.participation.dropped, condition)
    return output._replace(participation=output.participation._replace(dropped=refused))


def with_note(output: ClientOutput, name: str, note: PyTree) -> ClientOutput:
    """An output with what stage `name` tells the server of this client."""
    return output._replace(notes={**output.notes, name: note})


def positive(weight: Array) -> Array:
    """The weights, with 1 in place of 0."""
    return jnp.where(weight > 0, weight, 1)


def is_float(leaf: Any) -> bool:
    """Whether an array holds floats."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.floating))


def floats(values: PyTree) -> PyTree:
    """A tree of bools: which leaves are floats."""
    return jax.tree.map(is_float, values)


def payload(upload: Upload, axes: int = 1) -> Upload:
    """A tree of bools: which leaves of an upload are `Values`.

    Weights, counts, integers and single numbers among the sums are not.

    Args:
        upload: The upload, or its shapes.
        axes: Number of leading axes, 0 or 1.
    """
    sums = {}
    for name, entry in upload.sums.items():
        single_number = hasattr(entry, "ndim") and entry.ndim <= axes
        sums[name] = False if single_number else floats(entry)
    no_weight = jax.tree.map(lambda leaf: False, (upload.weight, upload.count))
    return Upload(floats(upload.update), no_weight[0], sums, no_weight[1])


def values_of(upload: Upload, axes: int = 1) -> Values:
    """What stages change of an upload; `axes` as of `payload`."""
    values, _ = tree.partition(upload, payload(upload, axes))
    sums = {name: entry for name, entry in values.sums.items() if jax.tree.leaves(entry)}
    if upload.weight is not None:
        sums = tree.scale(sums, 1 / positive(upload.weight))
    return Values(sums, values.update)


def with_values(upload: Upload, values: Values, axes: int = 1) -> Upload:
    """The upload with other values."""
    _, rest = tree.partition(upload, payload(upload, axes))
    new_sums = values.sums
    if upload.weight is not None:
        new_sums = tree.scale(new_sums, positive(upload.weight))
    sums = dict(rest.sums)
    for name, entry in new_sums.items():
        sums[name] = tree.combine(entry, rest.sums[name])
    return upload._replace(update=tree.combine(values.update, rest.update), sums=sums)


def with_square(report: ClientReport, before: Values, after: Values) -> ClientReport:
    """What is told, with the squared norm, if there is one, of what is sent instead."""
    if report.square is None:
        return report
    norm = jnp.maximum(tree.inner(before, before), jnp.finfo(jnp.float32).tiny)
    return report._replace(square=report.square * tree.inner(after, after) / norm)


def with_new_values(output: ClientOutput, values: Values, axes: int = 1) -> ClientOutput:
    """The output of a client that sends other values; `axes` as of `payload`."""
    before = values_of(output.upload, axes)
    upload = with_values(output.upload, values, axes)
    return output._replace(upload=upload, report=with_square(output.report, before, values))
