"""Client sampling for any method: by numbers of examples or by losses."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, Array, ClientData, Key, State
from pfljax.evaluation import metrics
from pfljax.exchange.lifting import serve_some
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem

Sampler = Literal["uniform", "weighted", "power_of_choice"]


def with_sampler(problem: Problem, algorithm: Algorithm, sampler: Sampler, candidates: int = 0) -> Algorithm:
    """The algorithm with another way to draw a round's cohort.

    "weighted" draws S clients without replacement in proportion to n_k. "power_of_choice" draws d candidates this way
    and takes the S of them with the largest training losses: Cho, Wang, Joshi, "Towards understanding biased client
    selection in federated learning" (AISTATS 2022), pi_pow-d.

    Departures from the paper: The server still weights by n_k, where the paper weights the chosen clients equally. A
    candidate's loss is the loss of what it predicts with, which for FedAvg is the global model. The downloads of
    candidates that are not chosen do not count as traffic.

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
    if size == num:
        raise ArgumentError("sampler", "every client is in every round; accepted with participation below 1", sampler)
    drawn = candidates or min(2 * size, num)
    if not size <= drawn <= num:
        text = f"accepted: 0, or {size} (clients per round) to {num} (all clients)"
        raise ArgumentError("candidates", text, candidates)

    def sample(key, state, clients):
        draw_key, predict_key = jax.random.split(key)
        if sampler == "weighted":
            return by_size(draw_key, clients.train.size, size)
        ids = by_size(draw_key, clients.train.size, drawn)
        losses = losses_of(problem, algorithm, predict_key, state, clients, ids)
        worst = jax.lax.top_k(jnp.nan_to_num(losses, nan=-jnp.inf, posinf=jnp.inf), size)[1]
        return jnp.sort(ids[worst])

    ledger = algorithm.ledger.beside(BY_LOSS) if sampler == "power_of_choice" else algorithm.ledger
    return dataclasses.replace(algorithm, sample=sample, ledger=ledger)


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
