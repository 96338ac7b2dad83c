"""Client sampling for any method: by numbers of examples or by losses.

Contributions to models on a server are reweighted, so that sizes count once. With "weighted", client k is in the
cohort with probability p_k = min(1, c n_k), where the p_k add up to S (systematic sampling: Madow, 1949), and its
contribution is divided by p_k. So sums are unbiased (Horvitz, Thompson, 1952), and FedAvg weights all clients equally
but those with p_k = 1. "power_of_choice" weights the chosen clients equally, as its paper does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, Array, ClientData, Key, State
from pfljax.evaluation import metrics
from pfljax.exchange.lifting import serve_some
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem
from pfljax.stages import messages
from pfljax.stages.notes import with_notes

Sampler = Literal["uniform", "weighted", "power_of_choice"]


def with_sampler(problem: Problem, algorithm: Algorithm, sampler: Sampler, candidates: int = 0) -> Algorithm:
    """The algorithm with another way to draw a round's cohort.

    "weighted" draws S different clients in proportion to n_k. "power_of_choice" draws d candidates one by one in this
    proportion and takes the S of them with the largest training losses: Cho, Wang, Joshi, "Towards understanding biased
    client selection in federated learning" (AISTATS 2022), pi_pow-d.

    Departures from the paper: A candidate's loss is the loss of what it predicts with, which for FedAvg is the global
    model. The downloads of candidates that are not chosen do not count as traffic.

    Args:
        problem: The problem of the algorithm.
        algorithm: Any algorithm.
        sampler: The way to draw.
        candidates: d, from S to K; 0: twice S, at most K.

    Raises:
        ArgumentError: if d is out of range, or if there is nothing to draw, since every client is in every round.
    """
    num, size = problem.num_clients, problem.cohort_size
    if sampler == "uniform":
        return algorithm
    if algorithm.sample is not None:
        raise ArgumentError("sampler", "accepted with a clock that chooses the clients of a round: uniform", sampler)
    if size == num:
        raise ArgumentError("sampler", "every client is in every round; accepted with participation below 1", sampler)
    drawn = candidates or min(2 * size, num)
    if not size <= drawn <= num:
        text = f"accepted: 0, or {size} (clients per round) to {num} (all clients)"
        raise ArgumentError("candidates", text, candidates)
    if sampler == "weighted":
        threshold = lambda clients: per_example(clients.train.size, size)
        share = lambda c, n: num / size * jnp.minimum(c * n, 1)
        draw = lambda key, state, clients: systematic(key, clients.train.size, size)
        return dataclasses.replace(reweighted(algorithm, threshold, share), sample=draw)

    def sample(key, state, clients):
        draw_key, predict_key = jax.random.split(key)
        ids = by_size(draw_key, clients.train.size, drawn)
        losses = losses_of(problem, found, predict_key, state, clients, ids)
        worst = jax.lax.top_k(jnp.nan_to_num(losses, nan=-jnp.inf, posinf=jnp.inf), size)[1]
        return jnp.sort(ids[worst])

    mean = lambda clients: jnp.asarray(clients.train.size, jnp.float32).mean()
    found = reweighted(algorithm, mean, lambda mean, n: n / mean)
    return dataclasses.replace(found, sample=sample, ledger=algorithm.ledger.beside(BY_LOSS))


def reweighted(
    algorithm: Algorithm, note: Callable[[ClientData], Array], share: Callable[[Array, Array], Array]
) -> Algorithm:
    """The algorithm whose clients' contributions to a server's models are divided by share(note, n_k).

    A squared norm that is reported next to them ("square") is one of the sums. Models that replace others stay.
    """
    if algorithm.topology != "shared" or algorithm.sends == "models":
        return algorithm
    noted = with_notes(algorithm, note)

    def client_update(context, models, row, data):
        out = noted.client_update(context, models, row, data)
        found = share(context.server.note, data.train.size)
        factor = jnp.where(found > 0, 1 / jnp.where(found > 0, found, 1), 0)
        scaled = lambda leaf: factor * leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
        report = messages.with_entry(out.report, "square", scaled)
        return out._replace(upload=jax.tree.map(scaled, out.upload), report=report)

    return dataclasses.replace(noted, client_update=client_update)


def per_example(sizes: Array, num: int) -> Array:
    """() c with sum_k min(1, c n_k) = num; infinity if at most `num` clients have examples."""
    largest = jnp.sort(jnp.asarray(sizes, jnp.float32), descending=True)
    # If the m largest clients are certain, the others share num - m places; the fewest that leave nobody above 1.
    left = largest.sum() - jnp.cumsum(largest)[:num] + largest[:num]
    each = (num - jnp.arange(num)) / jnp.where(left > 0, left, 1)
    fits = (left > 0) & (each * largest[:num] <= 1)
    return jnp.where(fits.any(), each[jnp.argmax(fits)], jnp.inf)


def systematic(key: Key, sizes: Array, num: int) -> Array:
    """(num,) int32, ascending: different clients, of which k is drawn with probability min(1, c n_k).

    Clients stand in random order on a line, each as long as its probability; every point of a unit grid with a random
    origin draws one. Clients without examples are drawn only if too few have some.
    """
    order_key, origin_key = jax.random.split(key)
    order = jax.random.permutation(order_key, len(sizes))
    sizes = jnp.asarray(sizes, jnp.float32)
    length = jnp.where(sizes > 0, jnp.minimum(per_example(sizes, num) * sizes, 1), 0)[order]
    ends = jnp.floor(jnp.cumsum(length) + jax.random.uniform(origin_key))
    hit = jnp.diff(ends, prepend=0.0) > 0
    # Exactly `num`, should rounding move an end beyond a point, or should there be too few clients with examples.
    drawn = jax.lax.top_k(hit + 0.5 * (length > 0), num)[1]
    return jnp.sort(order[drawn]).astype(jnp.int32)


def by_size(key: Key, sizes: Array, num: int) -> Array:
    """(num,) int32, ascending: clients drawn one by one without replacement, each in proportion to n_k.

    Uses the Gumbel top-k trick. Clients without examples come last.
    """
    scores = jnp.log(jnp.asarray(sizes, jnp.float32)) + jax.random.gumbel(key, sizes.shape)
    return jnp.sort(jax.lax.top_k(scores, num)[1]).astype(jnp.int32)


def losses_of(problem: Problem, algorithm: Algorithm, key: Key, state: State, clients: ClientData, ids: Array) -> Array:
    """(n,) mean training losses of what clients `ids` predict with; NaN without examples."""
    use = lambda prediction, train: metrics.evaluate(problem, algorithm, prediction, train)["loss"]
    return serve_some(algorithm, problem.plan, use, key, state, ids, clients, clients.train).found
