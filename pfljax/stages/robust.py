"""Robust aggregation: alternatives to the mean of weighted updates, and thus of models; see `combining`.

- "median", the median of each coordinate, and "trimmed_mean", the mean of each coordinate without its largest and
  smallest values: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical
  rates" (ICML 2018).
- "krum", the single update nearest to its neighbors, and "multi_krum", the mean of the n - f nearest: Blanchard, El
  Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries: Byzantine tolerant gradient descent" (NeurIPS 2017).
- "bulyan", n - 2 f updates that Krum chooses one by one, and for each coordinate the mean of the n - 4 f values nearest
  to their median: El Mhamdi, Guerraoui, Rouault, "The hidden vulnerability of distributed learning in Byzantium" (ICML
  2018).
- "geometric_median", the point with the least weighted sum of distances to the updates, by smoothed Weiszfeld steps:
  Pillutla, Kakade, Harchaoui, "Robust aggregation for federated learning" (IEEE TSP 2022).
- "norm_clipping", the weighted mean of updates that are no longer than the median one: Sun, Kairouz, Suresh, McMahan,
  "Can you really backdoor federated learning?" (2019), whose bound is a constant.
- "centered_clipping", v <- v + mean of clip(u_k - v): Karimireddy, He, Jaggi, "Learning from history for Byzantine
  robust optimization" (ICML 2021).
- "dnc", the mean without the updates that stand out along the direction of largest variance: Shejwalkar, Houmansadr,
  "Manipulating the Byzantine" (NDSS 2021), Algorithm 2.
- "fltrust", the mean of updates as long as the server's own update, each weighted by the positive part of its cosine
  with that: Cao, Fang, Liu, Gong, "FLTrust" (NDSS 2021), Section IV-C; see `roots`.
- "flame", the mean of the majority of updates that point the same way, none longer than the median one: Nguyen et al.,
  "FLAME: taming backdoors in federated learning" (USENIX Security 2022), Algorithm 1.
- "sign_majority", in every coordinate the sign that most updates have, times their median mean absolute value:
  Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with majority vote is communication efficient and fault
  tolerant" (ICLR 2019).

f is the assumed share of attackers times n, rounded down. Departures from the papers: All rules but "geometric_median"
and "norm_clipping" weight clients equally, whatever their n_k. Centered clipping begins at the coordinates' median and
clips at the median distance, where the paper begins at the last round's result and has a constant. DnC looks at all
coordinates, not at samples of them, and removes f updates. FLAME compares updates, not models, and adds no noise. A
majority vote has a learning rate where there is the median here. For an empty cohort, every rule returns zeros, which
`average` does not read.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Params

Aggregator = Literal[
    "mean",
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "bulyan",
    "geometric_median",
    "norm_clipping",
    "centered_clipping",
    "dnc",
    "fltrust",
    "flame",
    "sign_majority",
]
# rules that read the share of attackers
TRIMMING = ("trimmed_mean", "krum", "multi_krum", "bulyan", "dnc")
WEISZFELD_STEPS = 1000  # at most
TOLERANCE = 1e-5  # length of the last Weiszfeld step, relative to the smallest distance
NEAREST = 1e-6  # smallest distance that a Weiszfeld step divides by
CLIPPING_STEPS = 5
POWER_STEPS = 50
TINY = np.finfo(np.float32).tiny


def check_number(aggregator: Aggregator, share: float, num: int) -> int:
    """Returns f for n clients. Raises `ArgumentError` if a rule needs more clients."""
    assumed = int(share * num + 1e-6)
    least = 1
    if aggregator in ("krum", "multi_krum"):
        least = 2 * assumed + 3
    elif aggregator == "bulyan":
        least = 4 * assumed + 3
    if num < least:
        text = f"needs at least {least} clients a round, of whom {assumed} may attack; accepted: fewer attackers"
        raise ArgumentError("trim", f"{text}, or more clients than {num}", share)
    return assumed


def combine(
    aggregator: Aggregator, updates: Params, weight: Array, share: float, root: Params = ()
) -> Params:
    """Combines n stacked updates into one; those of weight 0 do not count.

    Args:
        aggregator: The rule.
        updates: Leaves (n, ...).
        weight: (n,).
        share: Assumed share of attackers, below 1 / 2.
        root: The server's own update, leaves (...), which "fltrust" reads.
    """
    counts = weight > 0
    if aggregator == "mean":
        updates = zero_unless(counts, updates)
        return tree.mix(shares_of(weight), updates)
    num = counts.sum()
    assumed = jnp.floor(share * num + 1e-6).astype(jnp.int32)
    if aggregator == "median":
        return median(updates, counts)
    if aggregator == "trimmed_mean":
        return mean_of_places(updates, counts, assumed, num - assumed)
    # No distance to an update with NaNs or infinities is defined, so it does not count.
    usable = counts & all_finite(updates)
    updates = zero_unless(usable, updates)
    if aggregator in ("krum", "multi_krum"):
        between = distances(updates, usable)
        scores = krum_scores(between, usable, num - assumed - 2)
        chosen = nearest(scores, usable, 1 if aggregator == "krum" else num - assumed)
        return tree.mix(shares_of(chosen), updates)
    if aggregator == "bulyan":
        return bulyan(updates, usable, assumed)
    if aggregator == "centered_clipping":
        return centered_clipping(updates, usable)
    if aggregator == "dnc":
        return without_outliers(updates, usable, assumed)
    if aggregator == "fltrust":
        return trusted(updates, usable, root)
    if aggregator == "flame":
        admitted = majority(updates, usable)
        return tree.mix(shares_of(admitted), clipped(updates, usable))
    if aggregator == "sign_majority":
        return majority_vote(updates, usable)
    weight = jnp.where(usable, weight, 0)
    if aggregator == "norm_clipping":
        return norm_clipping(updates, weight)
    return geometric_median(updates, weight)


def zero_unless(counts: Array, updates: Params) -> Params:
    """Stacked updates with zeros in place of those that do not count."""
    return tree.where(counts, updates, jax.tree.map(jnp.zeros_like, updates))


def shares_of(weight: Array) -> Array:
    """Weights (n,) divided by their sum."""
    weight = jnp.asarray(weight, jnp.float32)
    return weight / jnp.maximum(weight.sum(), TINY)


def flat(leaf: Array) -> Array:
    """A stacked leaf (n, ...) as (n, size)."""
    return leaf.reshape(len(leaf), -1)


def all_finite(models: Params) -> Array:
    """(n,) whether all values of a model are finite, for n stacked models."""
    finite = [flat(jnp.isfinite(leaf)).all(axis=1) for leaf in jax.tree.leaves(models)]
    return jnp.stack(finite).all(axis=0)


def mean_of_places(models: Params, counts: Array, low: Array, high: Array) -> Params:
    """The mean of each coordinate's values at places low to high - 1 in ascending order."""

    def mean_of_coordinate(leaf: Array) -> Array:
        # Absent models sort last, as do the NaNs that an attacker may send.
        is_present = tree.per_row(counts, leaf)
        values = jnp.nan_to_num(leaf, nan=jnp.inf)
        values = jnp.where(is_present, values, jnp.inf)
        position = tree.per_row(jnp.arange(leaf.shape[0]), leaf)
        is_inside = (low <= position) & (position < jnp.minimum(high, counts.sum()))
        ordered = jnp.sort(values, axis=0)
        return jnp.where(is_inside, ordered, 0).sum(axis=0) / jnp.maximum(high - low, 1)

    return jax.tree.map(mean_of_coordinate, models)


def median(models: Params, counts: Array) -> Params:
    """The median of each coordinate; of an even number of values, the mean of the two in the middle."""
    num = counts.sum()
    return mean_of_places(models, counts, (num - 1) // 2, num // 2 + 1)


def distances(updates: Params, counts: Array) -> Array:
    """(n, n) squared distances of updates; infinity to oneself and to those that do not count."""
    # Attackers can move the mean but not the median so far that products of honest updates round to the same values.
    centered = jax.tree.map(jnp.subtract, updates, median(updates, counts))
    products = tree.inner_products(centered, centered)
    norms = jnp.diagonal(products)
    # |u_j - u_k|^2 = |u_j|^2 + |u_k|^2 - 2 <u_j, u_k>; distances that overflow are the largest.
    squares = norms[:, None] + norms[None, :] - 2 * products
    squares = jnp.nan_to_num(squares, nan=jnp.finfo(products.dtype).max)
    others = counts[:, None] & counts[None, :] & ~jnp.eye(len(counts), dtype=bool)
    return jnp.where(others, jnp.maximum(squares, 0), jnp.inf)


def krum_scores(distances: Array, counts: Array, neighbors: Array) -> Array:
    """(n,) sums of squared distances to the `neighbors` nearest ones: n - f - 2, at least 1."""
    both = counts[:, None] & counts[None, :]
    ordered = jnp.sort(jnp.where(both, distances, jnp.inf), axis=1)
    is_neighbor = jnp.arange(len(counts)) < jnp.maximum(neighbors, 1)
    scores = jnp.where(is_neighbor & jnp.isfinite(ordered), ordered, 0).sum(axis=1)
    return jnp.where(counts, jnp.nan_to_num(scores), jnp.inf)


def nearest(scores: Array, counts: Array, num: Array | int) -> Array:
    """(n,) bool: the `num` smallest scores of those that count; the first ones of equal scores."""
    scores = jnp.where(counts, scores, jnp.inf)
    return counts & (ranks(scores) < num)


def ranks(values: Array) -> Array:
    """Positions of values (n, ...) in ascending order along the first axis; of equal ones, the first comes first."""
    return jnp.argsort(jnp.argsort(values, axis=0), axis=0)


def bulyan(updates: Params, counts: Array, assumed: Array) -> Params:
    """Coordinates' means of the n - 4 f values nearest to the median of n - 2 f updates that Krum chooses."""
    between = distances(updates, counts)
    num = counts.sum()

    # Krum chooses n - 2 f updates, each among those that are left.
    def choose(step: Array, chosen: Array) -> Array:
        left = counts & ~chosen
        scores = krum_scores(between, left, num - step - assumed - 2)
        best = nearest(scores, left, 1)
        return jnp.where(step < num - 2 * assumed, chosen | best, chosen)

    chosen = jax.lax.fori_loop(0, len(counts), choose, jnp.zeros_like(counts))

    # In each coordinate, the mean of the n - 4 f values nearest to the median of these.
    center = median(updates, chosen)
    num_near = jnp.maximum(num - 4 * assumed, 1)

    def mean_of_coordinate(leaf: Array, middle: Array) -> Array:
        is_chosen = tree.per_row(chosen, leaf)
        distance = jnp.where(is_chosen, jnp.abs(leaf - middle), jnp.inf)
        is_near = ranks(distance) < num_near
        is_counted = is_near & tree.per_row(chosen, leaf)
        return jnp.where(is_counted, leaf, 0).sum(axis=0) / num_near

    return jax.tree.map(mean_of_coordinate, updates, center)


def lengths(updates: Params) -> Array:
    """(n,) Euclidean norms."""
    squares = [flat(jnp.square(leaf)).sum(axis=1) for leaf in jax.tree.leaves(updates)]
    return jnp.sqrt(jnp.asarray(sum(squares)))


class Weiszfeld(NamedTuple):
    """A step of Weiszfeld's algorithm.

    Attributes:
        number: () int32, number of steps taken.
        center: Leaves (...).
        goes_on: () bool, whether the step was longer than the tolerance.
    """

    number: Array | int
    center: Params
    goes_on: Array


def geometric_median(updates: Params, weight: Array) -> Params:
    """The point with the least weighted sum of distances, by Weiszfeld steps from the coordinates' median."""

    def goes_on(last: Weiszfeld) -> Array:
        return last.goes_on & (last.number < WEISZFELD_STEPS)

    def step(last: Weiszfeld) -> Weiszfeld:
        # v <- sum_k (w_k / |u_k - v|) u_k / sum_k (w_k / |u_k - v|)
        distance = lengths(tree.subtract(updates, last.center))
        shares = shares_of(weight / jnp.maximum(distance, NEAREST))
        center = tree.mix(shares, updates)
        moved = jnp.sqrt(tree.squared_distance(center, last.center))
        number = last.number + 1
        smallest = jnp.min(jnp.where(weight > 0, distance, jnp.inf))
        return Weiszfeld(number, center, moved > TOLERANCE * smallest + NEAREST)

    start = Weiszfeld(0, median(updates, weight > 0), jnp.asarray(True))
    return jax.lax.while_loop(goes_on, step, start).center


def middle(values: Array, counts: Array) -> Array:
    """() the median of the values that count."""
    return median({"": values}, counts)[""]


def clipped(updates: Params, counts: Array) -> Params:
    """Updates of which none is longer than the median one."""
    norm = lengths(updates)
    factor = middle(norm, counts) / jnp.maximum(norm, NEAREST)
    return tree.scale(updates, jnp.minimum(1, factor))


def norm_clipping(updates: Params, weight: Array) -> Params:
    """The weighted mean of clipped updates."""
    return tree.mix(shares_of(weight), clipped(updates, weight > 0))


def centered_clipping(updates: Params, counts: Array) -> Params:
    """The center v that clipped differences leave where it is, nearly, from the coordinates' median."""

    def step(number: Array, v: Params) -> Params:
        # v <- v + mean of clip(u_k - v)
        differences = jax.tree.map(jnp.subtract, updates, v)
        differences = clipped(differences, counts)
        return tree.add(v, tree.mix(shares_of(counts), differences))

    return jax.lax.fori_loop(0, CLIPPING_STEPS, step, median(updates, counts))


def without_outliers(updates: Params, counts: Array, assumed: Array) -> Params:
    """The mean without the f updates of largest squared projection on the centered updates' first singular vector."""
    center = tree.mix(shares_of(counts), updates)
    centered = zero_unless(counts, jax.tree.map(jnp.subtract, updates, center))

    # The projections are the Gram matrix's first eigenvector, up to a factor.
    products = tree.inner_products(centered, centered)
    products = products / jnp.maximum(jnp.abs(products).max(), TINY)

    def power(number: Array, vector: Array) -> Array:
        product = products @ vector
        return product / jnp.maximum(jnp.linalg.norm(product), TINY)

    longest = jnp.argmax(jnp.diagonal(products))
    projections = jax.lax.fori_loop(0, POWER_STEPS, power, products[longest])

    remaining = nearest(jnp.square(projections), counts, counts.sum() - assumed)
    return tree.mix(shares_of(remaining), updates)


def trusted(updates: Params, counts: Array, root: Params) -> Params:
    """The mean of updates that are scaled to the root's length, by the positive part of their cosines with it."""
    # Divide each update by its largest value, so that squares are finite.
    largest = [flat(jnp.abs(leaf)).max(axis=1) for leaf in jax.tree.leaves(updates)]
    largest = jnp.stack(largest).max(axis=0)
    updates = tree.scale(updates, 1 / jnp.maximum(largest, TINY))

    # sum_k t_k |r| / |u_k| u_k / sum_k t_k, with t_k = max(<u_k, r> / |u_k|, 0)
    length = jnp.sqrt(tree.inner(root, root))
    norms = jnp.maximum(lengths(updates), TINY)
    products = tree.inner_products(updates, tree.stack_one(root))[:, 0]
    trust = jnp.where(counts, jnp.maximum(products, 0) / norms, 0)
    return tree.mix(shares_of(trust) * length / norms, updates)


def majority(updates: Params, counts: Array) -> Array:
    """(n,) bool: the first cluster of more than half of the updates that single linkage of cosine distances makes.

    It is the only cluster of HDBSCAN with a least size of floor(n / 2) + 1 and one neighbor (`min_samples`).
    """
    # cosine distances
    norms = jnp.maximum(lengths(updates), TINY)
    units = tree.scale(updates, 1 / norms)
    both = counts[:, None] & counts[None, :]
    cosines = tree.inner_products(units, units)
    distances = jnp.where(both, jnp.maximum(1 - cosines, 0), jnp.inf)
    is_self = jnp.eye(len(counts), dtype=bool) & both
    distances = jnp.where(is_self, 0, distances)

    # The least threshold at which single linkage joins two updates: the longest step of the best way between them.
    def through(k: Array, joined: Array) -> Array:
        step = jnp.maximum(joined[:, k, None], joined[None, k])
        return jnp.minimum(joined, step)

    joined = jax.lax.fori_loop(0, len(counts), through, distances)

    # The threshold at which an update is in a cluster of floor(n / 2) + 1, itself included.
    least = jnp.sort(joined, axis=1)[:, counts.sum() // 2]
    first = jnp.argmin(least)
    return counts & (joined[first] <= least[first])


def majority_vote(updates: Params, counts: Array) -> Params:
    """The sign of the sum of signs, times the median over updates of their mean absolute value."""
    size = sum(leaf[0].size for leaf in jax.tree.leaves(updates))
    total = sum(flat(jnp.abs(leaf)).sum(axis=1) for leaf in jax.tree.leaves(updates))
    has_votes = counts.any()
    scale = middle(jnp.asarray(total) / size, counts)
    scale = jnp.where(has_votes, scale, 0)
    votes = counts.astype(jnp.float32)
    votes = tree.mix(votes, jax.tree.map(jnp.sign, updates))
    return jax.tree.map(lambda leaf: scale * jnp.sign(leaf), votes)
