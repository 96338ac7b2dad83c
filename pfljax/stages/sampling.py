"""Client sampling for any method: by numbers of examples or by losses.

Contributions to models on a server are reweighted, so that sizes count once. With "weighted", client k is in the
cohort with probability p_k = min(1, c n_k), where the p_k add up to S (systematic sampling: Madow, 1949), and its
contribution is divided by p_k. So sums are unbiased (Horvitz, Thompson, 1952), and FedAvg weights all clients equally
but those with p_k = 1.

"power_of_choice" draws d candidates one by one in proportion to n_k and takes the S of them with the largest training
losses: Cho, Wang, Joshi, "Towards understanding biased client selection in federated learning" (AISTATS 2022),
pi_pow-d. It weights the chosen clients equally, as the paper does.

Departures from the paper: A candidate's loss is the loss of what it predicts with, which for FedAvg is the global
model. The downloads of candidates that are not chosen do not count as traffic.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientData,
    ClientOutput,
    Key,
    Prediction,
    PyTree,
    Split,
    Start,
    State,
)
from pfljax.evaluation import metrics
from pfljax.exchange.lifting import serve_some
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem
from pfljax.stages.messages import LocalWork, is_float
from pfljax.stages.stage import Stage, StageState

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline

Sampler = Literal["uniform", "weighted", "power_of_choice"]


def sampling_stage(
    sampler: Sampler, candidates: int, problem: Problem, pipeline: Pipeline
) -> Weighted | None:
    """The stage of a sampler other than the uniform one.

    Args:
        sampler: The way to draw.
        candidates: d, from S to K; 0: twice S, at most K.
        problem: The problem of the method.
        pipeline: The method with the stages before this one.

    Raises:
        ArgumentError: if d is out of range, or if there is nothing to draw, since every client is
            in every round.
    """
    num = problem.num_clients
    size = problem.cohort_size
    if sampler == "uniform":
        return None
    if pipeline.chooses:
        text = "accepted with a clock that chooses the clients of a round: uniform"
        raise ArgumentError("sampler", text, sampler)
    if size == num:
        text = "every client is in every round; accepted with participation below 1"
        raise ArgumentError("sampler", text, sampler)
    drawn = candidates or min(2 * size, num)
    if not size <= drawn <= num:
        text = f"accepted: 0, or {size} (clients per round) to {num} (all clients)"
        raise ArgumentError("candidates", text, candidates)
    if sampler == "weighted":
        return Weighted(problem, pipeline.method)
    return Choosing(problem, pipeline.method, drawn)


@dataclasses.dataclass(frozen=True)
class Weighted(Stage):
    """Client k is drawn with probability p_k, and its contribution is divided by that."""

    name = "sampler"
    problem: Problem
    method: Algorithm

    @property
    def chooses(self) -> bool:
        return True

    @property
    def reweighs(self) -> bool:
        """Whether contributions are divided; models that replace others are not."""
        return self.method.topology.on_server and self.method.sends != "models"

    def sample(self, key: Key, state: State, clients: ClientData, note: PyTree) -> Array:
        return systematic(key, clients.train.size, self.problem.cohort_size)

    def server_note(self, key: Key, start: Start, clients: ClientData) -> PyTree:
        """c."""
        if not self.reweighs:
            return ()
        return per_example(clients.train.size, self.problem.cohort_size)

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        if not self.reweighs:
            return output, note.client
        share = self._share(note.server, work.data.train.size)
        positive_share = jnp.where(share > 0, share, 1)
        factor = jnp.where(share > 0, 1 / positive_share, 0)

        def scaled(leaf: Array) -> Array:
            return factor * leaf if is_float(leaf) else leaf

        # w_k is divided, or u_k if it has no weight.
        upload = jax.tree.map(scaled, output.upload)
        if upload.weight is not None:
            upload = upload._replace(update=output.upload.update)
        square = jax.tree.map(scaled, output.report.square)
        report = output.report._replace(square=square)
        return output._replace(upload=upload, report=report), note.client

    def _share(self, threshold: Array, size: Array) -> Array:
        """p_k K / S."""
        num = self.problem.num_clients / self.problem.cohort_size
        return num * jnp.minimum(threshold * size, 1)


@dataclasses.dataclass(frozen=True)
class Choosing(Weighted):
    """Of candidates drawn in proportion to n_k, those with the largest losses take part.

    Attributes:
        num_candidates: d.
    """

    num_candidates: int

    def declare(self, method: Algorithm) -> Algorithm:
        return dataclasses.replace(method, ledger=method.ledger.with_unaccounted(BY_LOSS))

    def sample(self, key: Key, state: State, clients: ClientData, note: PyTree) -> Array:
        draw_key, predict_key = jax.random.split(key)
        ids = by_size(draw_key, clients.train.size, self.num_candidates)
        losses = losses_of(self.problem, self.method, predict_key, state, clients, ids)
        known = jnp.nan_to_num(losses, nan=-jnp.inf, posinf=jnp.inf)
        _, worst = jax.lax.top_k(known, self.problem.cohort_size)
        return jnp.sort(ids[worst])

    def server_note(self, key: Key, start: Start, clients: ClientData) -> PyTree:
        """The mean of n_k."""
        if not self.reweighs:
            return ()
        return jnp.asarray(clients.train.size, jnp.float32).mean()

    def _share(self, mean: Array, size: Array) -> Array:
        """n_k, divided by its mean."""
        return size / mean


def per_example(sizes: Array, num: int) -> Array:
    """() c with sum_k min(1, c n_k) = num; infinity if at most `num` clients have examples."""
    largest = jnp.sort(jnp.asarray(sizes, jnp.float32), descending=True)
    # If the m largest clients are certain, the others share num - m places; the fewest that leave nobody above 1.
    rest = largest.sum() - jnp.cumsum(largest)[:num] + largest[:num]
    factors = (num - jnp.arange(num)) / jnp.where(rest > 0, rest, 1)
    fits = (rest > 0) & (factors * largest[:num] <= 1)
    return jnp.where(fits.any(), factors[jnp.argmax(fits)], jnp.inf)


def systematic(key: Key, sizes: Array, num: int) -> Array:
    """(num,) int32, ascending: different clients, of which k is drawn with probability min(1, c n_k).

    Clients stand in random order on a line, each as long as its probability; every point of a unit grid with a random
    origin draws one. Clients without examples are drawn only if too few have some.
    """
    order_key, origin_key = jax.random.split(key)
    order = jax.random.permutation(order_key, len(sizes))

    # p_k = min(1, c n_k), in this order.
    sizes = jnp.asarray(sizes, jnp.float32)
    has_examples = sizes > 0
    probability = jnp.minimum(per_example(sizes, num) * sizes, 1)
    length = jnp.where(has_examples, probability, 0)[order]

    # A client is drawn if a point of the grid is on its part of the line.
    ends = jnp.floor(jnp.cumsum(length) + jax.random.uniform(origin_key))
    is_hit = jnp.diff(ends, prepend=0.0) > 0

    # Exactly `num`, should rounding move an end beyond a point, or should there be too few clients with examples.
    _, drawn = jax.lax.top_k(is_hit + 0.5 * (length > 0), num)
    ids = jnp.sort(order[drawn])
    return ids.astype(jnp.int32)


def by_size(key: Key, sizes: Array, num: int) -> Array:
    """(num,) int32, ascending: clients drawn one by one without replacement, each in proportion to n_k.

    Uses the Gumbel top-k trick. Clients without examples come last.
    """
    scores = jnp.log(jnp.asarray(sizes, jnp.float32)) + jax.random.gumbel(key, sizes.shape)
    _, ids = jax.lax.top_k(scores, num)
    return jnp.sort(ids).astype(jnp.int32)


def losses_of(
    problem: Problem, algorithm: Algorithm, key: Key, state: State, clients: ClientData, ids: Array
) -> Array:
    """(n,) mean training losses of what clients `ids` predict with; NaN without examples."""

    def loss(prediction: Prediction, train: Split) -> Array:
        return metrics.evaluate(problem, algorithm, prediction, train)["loss"]

    served = serve_some(algorithm, problem.plan, loss, key, state, ids, clients, clients.train)
    return served.outputs
