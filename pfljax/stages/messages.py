"""What clients send, and which parts of it attackers, compression and robust rules change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import PyTree


def payload(update: PyTree, axes: int = 1, *, report: bool = False) -> PyTree:
    """A tree of bools: which leaves of an upload or report are payload.

    Weights, counts and numbers that are no floats are none, nor are single numbers next to other entries. A parameter
    of a model may have such a name, or be a single number.

    Args:
        update: The upload, a report, or their shapes.
        axes: Number of leading axes, 0 or 1.
        report: Whether it is a report, of whose single numbers none is payload, wherever they are.
    """
    found, form = jax.tree.flatten_with_path(update)
    alone = axes > 0 and len(found) == 1

    def one(path, leaf):
        entry = len(path) == 1
        name: Any = getattr(path[0], "key", None) if entry else None
        number = leaf.ndim <= axes and (entry or report)
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        return alone or (floats and not number and name not in ("weight", "count"))

    return jax.tree.unflatten(form, [one(path, leaf) for path, leaf in found])


def with_square(report: Mapping[str, Any], update: PyTree, sent: PyTree) -> Mapping[str, Any]:
    """A report with the squared norm ("square"), if it has one, of what is sent in place of an update."""
    if "square" not in report:
        return report
    square = lambda part: sum(jnp.square(x).sum() for x in jax.tree.leaves(tree.partition(part, payload(part))[0]))
    before = jnp.maximum(jnp.asarray(square(update)), jnp.finfo(jnp.float32).tiny)
    return {**report, "square": report["square"] * square(sent) / before}


def reported(report: Mapping[str, Any]) -> list[str]:
    """Names of what the method itself reports besides a client's loss, whatever stages have added."""
    return [name for name in of_method(report) if name not in ("loss", "absent")]


def of_method(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The method's own report, whatever stages have added."""
    return of_method(report["method"]) if "method" in report else report


def with_entry(report: Mapping[str, Any], name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """A report with a changed entry of the method's own, if it has one, whatever stages have added."""
    inner, apply = ("method", lambda report: with_entry(report, name, change)) if "method" in report else (name, change)
    return {key: apply(part) if key == inner else part for key, part in report.items()}


def beside(report: Mapping[str, Any], **noted: Any) -> dict[str, Any]:
    """A client's report with what a stage tells the server; the method's own is "method"."""
    names = ("loss", "absent", "away", "dropped", "broken", "seconds")
    known = {name: report[name] for name in names if name in report}
    return {"method": report, **known, **noted}
