"""What clients send, seen as updates: what attackers and compression may change, and a cohort's as one stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Aggregate, Algorithm, Array, Key, Params, PyTree
from pfljax.local.problem import Problem

Combine = Callable[[Key, PyTree, Array, Array, PyTree], PyTree]


def payload(update: PyTree, axes: int = 1) -> PyTree:
    """A tree of bools: which leaves of an upload or report are payload.

    Weights, counts, numbers that are no floats, and leaves with only the leading `axes` next to other leaves are none.
    """
    found, form = jax.tree.flatten_with_path(update)
    alone = axes > 0 and len(found) == 1

    def one(path, leaf):
        # Only entries of the update itself: a model's parameters may have these names, too.
        name: Any = getattr(path[0], "key", None) if len(path) == 1 else None
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        return alone or (name not in ("weight", "count") and floats and leaf.ndim > axes)

    return jax.tree.unflatten(form, [one(path, leaf) for path, leaf in found])


def relative(algorithm: Algorithm, models: Params, upload: PyTree) -> PyTree:
    """The upload with weighted updates in place of weighted models that were trained from received `models`."""
    if algorithm.averages is None:
        return upload
    start = tree.scale(algorithm.averages(models), upload["weight"])
    return upload | {"model": tree.subtract(upload["model"], start)}


def absolute(algorithm: Algorithm, models: Params, update: PyTree) -> PyTree:
    """Undoes `relative`; the server has the `models` that clients train from."""
    if algorithm.averages is None:
        return update
    start = tree.scale(algorithm.averages(models), update["weight"])
    return update | {"model": tree.add(start, update["model"])}


def with_square(report: Mapping[str, Any], update: PyTree, sent: PyTree) -> Mapping[str, Any]:
    """A report with the squared norm ("square"), if it has one, of what is sent in place of an update."""
    if "square" not in report:
        return report
    square = lambda part: sum(jnp.square(x).sum() for x in jax.tree.leaves(tree.partition(part, payload(part))[0]))
    before = jnp.maximum(jnp.asarray(square(update)), jnp.finfo(jnp.float32).tiny)
    return {**report, "square": report["square"] * square(sent) / before}


def reported(report: Mapping[str, Any]) -> list[str]:
    """Names of what the method itself reports besides a client's loss, whatever stages have added."""
    while "method" in report:
        report = report["method"]
    return [name for name in report if name not in ("loss", "absent")]


def beside(report: Mapping[str, Any], **noted: Any) -> dict[str, Any]:
    """A client's report with what a stage tells the server; the method's own is "method"."""
    known = {name: report[name] for name in ("loss", "absent", "away", "seconds") if name in report}
    return {"method": report, **known, **noted}


def combined(problem: Problem, algorithm: Algorithm, combine: Combine) -> Algorithm:
    """The algorithm whose server combines its clients' updates in its own way.

    Updates then reach the server individually, as part of the clients' reports; they still count as uploaded.

    Args:
        problem: The problem of the algorithm.
        algorithm: An algorithm that has `averages`.
        combine: (key, updates, weights (n,), attackers (n,), root) -> update, for the n stacked updates of a model;
            those that were not sent have weight 0. The root is the server's own update, or ().
    """
    averages = algorithm.averages
    assert averages is not None

    def client_update(context, models, row, data):
        out = algorithm.client_update(context, models, row, data)
        sent = jnp.ones(context.index.shape, bool) if out.sent is None else out.sent
        weight = jnp.where(sent, out.upload["weight"], 0)
        model = tree.scale(out.upload["model"], 1 / jnp.where(weight > 0, weight, 1))
        attacker = jnp.zeros((), bool) if data.attacker is None else data.attacker
        apart = {"update": tree.subtract(model, averages(models)), "weight": weight}
        apart |= {"first": context.index[0], "attacker": attacker}
        rest = {name: part for name, part in out.upload.items() if name not in ("model", "weight")}
        return out._replace(upload=rest, report=beside(out.report, apart=apart))

    def server_update(key, state, aggregate):
        report: Any = aggregate.report
        apart, num = report["apart"], tree.num_rows(state.models)
        received = apart["weight"].shape[1]
        assert received in (1, num)  # each client trains one averaged model, or all of them in order
        number = (apart["first"][:, None] + jnp.arange(received)).reshape(-1)
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        each, weights = jax.tree.map(flat, (apart["update"], apart["weight"]))
        attackers = jnp.repeat(apart["attacker"], received)
        roots = algorithm.root(key, state) if algorithm.root else ()

        def of_model(n):
            weight = jnp.where(number == n, weights, 0)
            root = jax.tree.map(lambda leaf: leaf[n], roots)
            update = combine(jax.random.fold_in(key, n), each, weight, attackers, root)
            return update, weight.sum(), (weight > 0).sum()

        update, weight, count = problem.plan.over_rows(of_model, jnp.arange(num))
        model = tree.scale(tree.add(update, averages(state.models)), weight)
        upload = aggregate.upload | {"model": model, "weight": weight}
        came = Aggregate(upload, count, apart["weight"] > 0, report["method"])
        return algorithm.server_update(key, state, came)

    return dataclasses.replace(algorithm, client_update=client_update, server_update=server_update, averages=None)
