"""A server that combines what it averages in its own way: clients' updates, and whatever they send to be averaged.

A part is what a client adds to one average: its update, each further entry of its upload (SCAFFOLD's changes of control
variates, FedPAC's features by class) and the squared norm of its update that it may report, all divided by their
weights. Each part is combined on its own, features by class for each class, and counts again as much as the weights'
sum. In one stack of all parts, the largest would decide which client stands out, and hide what attackers do to others.
Weights, counts and numbers next to them stay sums.

A rule of changes that a server adds up (`Algorithm.changes`) would add up its errors, too. The server has the sum of
each client's changes so far, and moves by the rule of the new sums minus that of the old ones; for the mean, this is
the mean change. FLTrust combines the changes: its server keeps no sum of its own ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    PyTree,
)
from pfljax.exchange.views import view
from pfljax.local.problem import Problem
from pfljax.stages import messages
from pfljax.stages.notes import Noted, with_notes

Combine = Callable[[PyTree, Array, Array, PyTree], PyTree]
Parts = dict[str, PyTree]


def parts_of(out: ClientOutput) -> tuple[Parts, dict[str, Array], PyTree]:
    """What a client adds to the server's averages, by name.

    Args:
        out: A client's results under an algorithm that `averages`.

    Returns:
        - The parts, leaves (J, ...): "model", other entries of the upload, "square".
        - "weight" (J,), and "count" (J, ...) if the upload has one; 0 for what is not sent.
        - The rest of the upload, with None in place of the parts.
    """
    mask = messages.payload(out.upload)
    beside, rest = {}, {}
    for name, entry in out.upload.items():
        if name not in ("model", "weight", "count"):
            beside[name], rest[name] = tree.partition(entry, mask[name])
    weights = {name: out.upload[name] for name in ("weight", "count") if name in out.upload}
    if out.sent is not None:
        weights = tree.where(out.sent, weights, jax.tree.map(jnp.zeros_like, weights))
    sums = {"model": out.upload["model"]} | {name: part for name, part in beside.items() if jax.tree.leaves(part)}
    if (square := messages.of_method(out.report).get("square")) is not None:
        sums["square"] = jnp.broadcast_to(square, weights["weight"].shape)
    parts = {name: tree.scale(part, 1 / positive(weight_of(name, weights))) for name, part in sums.items()}
    return parts, weights, rest


def positive(weight: Array) -> Array:
    """The weights, with 1 in place of 0."""
    return jnp.where(weight > 0, weight, 1)


def weight_of(name: str, weights: dict[str, Array]) -> Array:
    """A part's weights: of entries beside the model, the counts, if there are any."""
    return weights["count" if "count" in weights and name not in ("model", "square") else "weight"]


def one_by_one(
    problem: Problem, combine: Combine, values: PyTree, weight: Array, attackers: Array, root: PyTree
) -> PyTree:
    """What `combine` makes of stacked values with weights (n,), or with weights (n, ...), of each entry on its own."""
    if weight.ndim == 1:
        return combine(values, weight, attackers, root)
    apiece = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), (values, weight))
    of_entry = lambda values, weight, root: one_by_one(problem, combine, values, weight, attackers, root)
    return problem.plan.over_rows(of_entry, *apiece, root)


def apart(client_update: Callable[..., ClientOutput], summed: Sequence[str]) -> Callable:
    """A client's update whose parts are in its report instead of its upload.

    Args:
        client_update: The algorithm's, with the sums of parts beside its row, if any are `summed`.
        summed: Names of parts.
    """

    def separate(context, models, row, data):
        out = client_update(context, models, row, data)
        parts, weights, rest = parts_of(out)
        if summed:
            sums = {name: tree.add(row.note[name], parts[name]) for name in summed}
            out = out._replace(client=Noted(out.client.inner, sums))
        attacker = jnp.zeros((), bool) if data.attacker is None else data.attacker
        single = {"parts": parts, "weights": weights, "first": context.index[0], "attacker": attacker}
        return out._replace(upload=rest, report=messages.beside(out.report, apart=single))

    return separate


def no_changes(algorithm: Algorithm, clients: ClientData) -> Parts:
    """A client's sums of changes before its first round: zeros."""

    def one(key, clients):
        begun, client = algorithm.start(key, clients), jnp.zeros((), jnp.int32)
        row, index = algorithm.first_row(key, client, begun).row, jnp.arange(tree.num_rows(begun.models))
        context = ClientContext(key, client, client, index, begun.server, client)
        out = algorithm.client_update(context, begun.models, row, view(clients, client))
        return {name: parts_of(out)[0][name] for name in algorithm.changes}

    shapes = jax.eval_shape(one, jax.random.key(0), clients)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def combined(problem: Problem, algorithm: Algorithm, combine: Combine) -> Algorithm:
    """The algorithm whose server combines the parts of what clients send in its own way.

    Parts then reach the server individually, in the clients' reports; they still count as uploaded. Those that belong
    to a server's older models (`Algorithm.stale`) are combined together.

    Args:
        problem: The problem of the algorithm.
        algorithm: An algorithm that `averages`.
        combine: (part, weights (n,), attackers (n,), root) -> part, for n stacked ones; those that were not sent have
            weight 0. The root is the server's own part, or ().
    """
    bare = algorithm
    summed = () if algorithm.root else algorithm.changes
    if summed:
        algorithm = with_notes(bare, lambda clients: no_changes(bare, clients), lambda nothing, client: nothing)

    def server_update(key, state, aggregate):
        report: Any = aggregate.report
        single, sent = report["apart"], report["apart"]["weights"]["weight"]
        models = jax.tree.map(lambda leaf: leaf[:1], state.models) if algorithm.stale else state.models
        cohort, received = sent.shape
        num = tree.num_rows(models)
        assert received in (1, num)  # each client trains one averaged model, or all of them in order
        number = (single["first"][:, None] * (not algorithm.stale) + jnp.arange(received)).reshape(-1)
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        parts, weights = jax.tree.map(flat, (single["parts"], single["weights"]))
        attackers = jnp.repeat(single["attacker"], received)
        new = {name: jax.tree.map(flat, state.clients.note[name]) for name in summed}
        old = {name: tree.subtract(new[name], parts[name]) for name in summed}
        parts |= new
        roots = algorithm.root(key, state) if algorithm.root else {name: () for name in parts}

        def of_model(n):
            own = tree.where(number == n, weights, jax.tree.map(jnp.zeros_like, weights))
            root = jax.tree.map(lambda leaf: leaf[n], roots)
            rule = lambda name, part: one_by_one(problem, combine, part, weight_of(name, own), attackers, root[name])
            found = {name: rule(name, part) for name, part in parts.items()}
            found |= {name: tree.subtract(found[name], rule(name, old[name])) for name in summed}
            return found, jax.tree.map(lambda weight: weight.sum(axis=0), own), (own["weight"] > 0).sum()

        found, totals, count = problem.plan.over_rows(of_model, jnp.arange(num))
        inner = report["method"]
        if "square" in found:
            each = (weights["weight"] * found.pop("square")[number]).reshape(cohort, received)
            inner = messages.with_entry(inner, "square", lambda square: each.sum(axis=1))
        sums = {name: tree.scale(part, weight_of(name, totals)) for name, part in found.items()}
        rest = {name: tree.combine(sums.pop(name, entry), entry) for name, entry in aggregate.upload.items()}
        came = Aggregate(rest | sums | totals, count, sent > 0, inner)
        return algorithm.server_update(key, state, came)

    client_update = apart(algorithm.client_update, summed)
    return dataclasses.replace(algorithm, client_update=client_update, server_update=server_update, averages=False)
