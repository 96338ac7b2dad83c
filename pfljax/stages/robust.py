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

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Aggregate, Algorithm, Array, Params
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
    if aggregator == "median":
        return median(models, counts)
    if aggregator == "trimmed_mean":
        return mean_of_places(models, counts, trimmed, num - trimmed)
    # No distance to a model with NaNs or infinities is defined, so it does not count.
    usable = counts & all_finite(models)
    models = tree.where(usable, models, jax.tree.map(jnp.zeros_like, models))
    if aggregator == "krum":
        return krum(models, usable, num - trimmed - 2)
    return geometric_median(models, jnp.where(usable, weight, 0))


def all_finite(models: Params) -> Array:
    """(n,) whether all values of a model are finite, for n stacked models."""
    finite = [jnp.isfinite(leaf).reshape(len(leaf), -1).all(axis=1) for leaf in jax.tree.leaves(models)]
    return jnp.stack(finite).all(axis=0)


def mean_of_places(models: Params, counts: Array, low: Array, high: Array) -> Params:
    """The mean of each coordinate's values at places low to high - 1 in ascending order."""

    def coordinate(leaf):
        # Absent models sort last, as do the NaNs that an attacker may send.
        last = jnp.where(tree.per_row(counts, leaf), jnp.nan_to_num(leaf, nan=jnp.inf), jnp.inf)
        place = tree.per_row(jnp.arange(leaf.shape[0]), leaf)
        kept = (low <= place) & (place < jnp.minimum(high, counts.sum()))
        return jnp.where(kept, jnp.sort(last, axis=0), 0).sum(axis=0) / jnp.maximum(high - low, 1)

    return jax.tree.map(coordinate, models)


def median(models: Params, counts: Array) -> Params:
    """The median of each coordinate; of an even number of values, the mean of the two in the middle."""
    num = counts.sum()
    return mean_of_places(models, counts, (num - 1) // 2, num // 2 + 1)


def krum(models: Params, counts: Array, neighbors: Array) -> Params:
    """The model with the least sum of squared distances to its `neighbors` nearest ones: n - f - 2, at least 1."""
    # Attackers can move the mean but not the median so far that products of honest models round to the same values.
    centered = jax.tree.map(jnp.subtract, models, median(models, counts))
    products = tree.inner_products(centered, centered)
    norms = jnp.diagonal(products)
    # Distances that overflow are the largest.
    distances = jnp.nan_to_num(norms[:, None] + norms[None, :] - 2 * products, nan=jnp.finfo(products.dtype).max)
    others = counts[:, None] & counts[None, :] & ~jnp.eye(len(counts), dtype=bool)
    nearest = jnp.sort(jnp.where(others, jnp.maximum(distances, 0), jnp.inf), axis=1)
    summed = (jnp.arange(len(counts)) < jnp.maximum(neighbors, 1)) & jnp.isfinite(nearest)
    scores = jnp.nan_to_num(jnp.where(summed, nearest, 0).sum(axis=1))
    best = jnp.argmin(jnp.where(counts, scores, jnp.inf))
    return jax.tree.map(lambda leaf: leaf[best], models)


def geometric_median(models: Params, weight: Array) -> Params:
    """The point with the least weighted sum of distances, by Weiszfeld steps from the weighted mean."""
    part = lambda weight: weight / jnp.maximum(weight.sum(), jnp.finfo(jnp.float32).tiny)

    def step(_, center):
        squares = jax.tree.map(lambda leaf, c: jnp.square(leaf - c).reshape(len(leaf), -1).sum(axis=1), models, center)
        distance = jnp.sqrt(jnp.asarray(sum(jax.tree.leaves(squares))))
        return tree.mix(part(weight / jnp.maximum(distance, NEAREST)), models)

    return jax.lax.fori_loop(0, WEISZFELD_STEPS, step, tree.mix(part(weight), models))
