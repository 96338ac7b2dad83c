"""Robust aggregation: alternatives to the mean of weighted models.

- "median", the median of each coordinate, and "trimmed_mean", the mean of each coordinate without its largest and
  smallest values: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical
  rates" (ICML 2018).
- "krum", the single model nearest to its neighbors: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with
  adversaries: Byzantine tolerant gradient descent" (NeurIPS 2017).
- "geometric_median", the point with the least weighted sum of distances to the models, by smoothed Weiszfeld steps:
  Pillutla, Kakade, Harchaoui, "Robust aggregation for federated learning" (IEEE TSP 2022).

Departures from the papers: "median", "trimmed_mean" and "krum" weight clients equally, whatever their n_k, as in the
papers; "geometric_median" weights them by n_k, as RFA does. For an empty cohort, every rule returns zeros, which
`average` does not read.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.errors import ArgumentError
from pfljax.core.types import Aggregate, Algorithm, Array, Params
from pfljax.local.problem import Problem

Aggregator = Literal["mean", "median", "trimmed_mean", "krum", "geometric_median"]
WEISZFELD_STEPS = 32
NEAREST = 1e-6  # smallest distance that a Weiszfeld step divides by


def with_aggregator(problem: Problem, algorithm: Algorithm, aggregator: Aggregator, share: float) -> Algorithm:
    """The algorithm with another aggregator instead of the mean of its clients' models.

    Uploads then reach the server individually, as part of the clients' reports; they still count as uploaded.

    Args:
        problem: The problem of the algorithm.
        algorithm: An algorithm whose uploads are weighted models.
        aggregator: The rule.
        share: Share of clients that the rule assumes to be attackers ("trimmed_mean" and "krum").

    Raises:
        ArgumentError: if the algorithm's server does not average models.
    """
    if aggregator == "mean":
        return algorithm
    if algorithm.averages is None:
        raise ArgumentError("aggregator", "accepted for this method: mean; no server averages models", aggregator)

    def client_update(context, models, row, data):
        out = algorithm.client_update(context, models, row, data)
        sent = jnp.ones(context.index.shape, bool) if out.sent is None else out.sent
        weight = jnp.where(sent, out.upload["weight"], 0)
        model = tree.scale(out.upload["model"], 1 / jnp.where(weight > 0, weight, 1))
        apart = {"model": model, "weight": weight, "first": context.index[0]}
        rest = {name: part for name, part in out.upload.items() if name not in apart}
        return out._replace(upload=rest, report={"method": out.report, "loss": out.report["loss"], "apart": apart})

    def server_update(key, state, aggregate):
        report: Any = aggregate.report
        num, received = tree.num_rows(state.models), report["apart"]["weight"].shape[1]
        assert received in (1, num)  # each client trains one averaged model, or all of them in order
        number = report["apart"]["first"][:, None] + jnp.arange(received)
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        models, weights = jax.tree.map(flat, (report["apart"]["model"], report["apart"]["weight"]))

        def of_model(n):
            weight = jnp.where(flat(number) == n, weights, 0)
            return combine(aggregator, models, weight, share), weight.sum(), (weight > 0).sum()

        model, weight, count = problem.plan.over_rows(of_model, jnp.arange(num))
        upload = aggregate.upload | {"model": tree.scale(model, weight), "weight": weight}
        came = Aggregate(upload, count, report["apart"]["weight"] > 0, report["method"])
        return algorithm.server_update(key, state, came)

    return dataclasses.replace(algorithm, client_update=client_update, server_update=server_update, averages=None)


def combine(aggregator: Aggregator, models: Params, weight: Array, share: float) -> Params:
    """Combines n stacked models into one; models of weight 0 do not count.

    Args:
        aggregator: The rule.
        models: Leaves (n, ...).
        weight: (n,).
        share: As for `with_aggregator`, below 1 / 2.
    """
    counts = weight > 0
    num = counts.sum()
    trimmed = jnp.floor(share * num + 1e-6).astype(jnp.int32)
    if aggregator == "krum":
        return krum(models, counts, trimmed)
    if aggregator == "geometric_median":
        return geometric_median(models, weight)

    def coordinate(leaf):
        # Absent models sort last, as do the NaNs that an attacker may send.
        last = jnp.where(tree.per_row(counts, leaf), jnp.nan_to_num(leaf, nan=jnp.inf), jnp.inf)
        place = tree.per_row(jnp.arange(leaf.shape[0]), leaf)
        low, high = (trimmed, num - trimmed) if aggregator == "trimmed_mean" else ((num - 1) // 2, num // 2 + 1)
        kept = (low <= place) & (place < jnp.minimum(high, num))
        return jnp.where(kept, jnp.sort(last, axis=0), 0).sum(axis=0) / jnp.maximum(high - low, 1)

    return jax.tree.map(coordinate, models)


def krum(models: Params, counts: Array, attackers: Array) -> Params:
    """The model with the least sum of squared distances to its n - f - 2 nearest ones, for f attackers of n clients."""
    finite = jax.tree.map(lambda leaf: jnp.nan_to_num(leaf), models)
    size = jnp.maximum(counts.sum(), 1)
    mean = jax.tree.map(lambda leaf: jnp.where(tree.per_row(counts, leaf), leaf, 0).sum(axis=0) / size, finite)
    centered = jax.tree.map(lambda leaf, mean: leaf - mean, finite, mean)  # so that large products do not cancel
    products = tree.inner_products(centered, centered)
    norms = jnp.diagonal(products)
    others = counts[:, None] & counts[None, :] & ~jnp.eye(len(counts), dtype=bool)
    distances = jnp.maximum(norms[:, None] + norms[None, :] - 2 * products, 0)
    nearest = jnp.sort(jnp.where(others, distances, jnp.inf), axis=1)
    counted = jnp.arange(len(counts)) < jnp.maximum(size - attackers - 2, 1)
    scores = jnp.where(counted & jnp.isfinite(nearest), nearest, 0).sum(axis=1)
    best = jnp.argmin(jnp.where(counts, scores, jnp.inf))
    return jax.tree.map(lambda leaf: leaf[best], finite)


def geometric_median(models: Params, weight: Array) -> Params:
    """The point with the least weighted sum of distances, by Weiszfeld steps from the weighted mean."""
    finite = jax.tree.map(lambda leaf: jnp.nan_to_num(leaf), models)
    part = lambda weight: weight / jnp.maximum(weight.sum(), jnp.finfo(jnp.float32).tiny)

    def step(_, center):
        squares = jax.tree.map(lambda leaf, c: jnp.square(leaf - c).reshape(len(leaf), -1).sum(axis=1), finite, center)
        distance = jnp.sqrt(jnp.asarray(sum(jax.tree.leaves(squares))))
        return tree.mix(part(weight / jnp.maximum(distance, NEAREST)), finite)

    return jax.lax.fori_loop(0, WEISZFELD_STEPS, step, tree.mix(part(weight), finite))
