"""Choice of neighbors: tables of candidate models and epsilon-greedy sampling."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Cohort, Key, Mixture
from pfljax.exchange.rounds import draw_distinct
from pfljax.local import lasting
from pfljax.local.problem import Problem


class Candidates(NamedTuple):
    """The C candidate models that one client tracks, its own first.

    Stacked over clients, the tables are K x C instead of K x K.

    Attributes:
        ids: (C,) int32, owners of the models; slot 0 is the client itself.
        last: (C,) loss of the model when the client last received it.
        tracked: (C,) tracked loss; inf: not evaluated yet.
    """

    ids: Array
    last: Array
    tracked: Array


def check(problem: Problem, num: int, num_candidates: int, update: str) -> None:
    """Raises `ArgumentError` for hyperparameters of FedeRiCo that do not fit the problem or each other.

    Args:
        problem: The problem of the method.
        num: M, `neighbors`.
        num_candidates: C, `candidates`; 0: all clients.
        update: "gradient" or "delta".
    """
    if update == "delta":
        marks = lasting.marks(problem.solver.optimizer, problem.model.network.shapes)
        if any(marks):
            text = (
                "keeps no optimizer over rounds, so an optimizer's own schedule would start anew "
                "in each; accepted: gradient, or LocalTraining's schedule of rounds"
            )
            raise ArgumentError("update", text, update)
    if not num < problem.cohort_size:
        most = problem.cohort_size - 1
        text = f"accepted: 0 to {most}, fewer than the {problem.cohort_size} clients of a round"
        raise ArgumentError("neighbors", text, num)
    if num_candidates and not num < num_candidates:
        text = f"accepted: 0 (all clients), or more than the {num} neighbors"
        raise ArgumentError("candidates", text, num_candidates)


def candidates(key: Key, client: Array, num: int, num_clients: int, tracked: float) -> Candidates:
    """A client's initial table: its own model and `num` - 1 others, drawn uniformly if C < K.

    Args:
        key: The client's key.
        client: Its id.
        num: C, at most K.
        num_clients: K.
        tracked: inf: models count as not evaluated yet; 0: as evaluated with a loss of zero
            (Alg. 1, l. 3).
    """
    if num == num_clients:
        ids = (jnp.arange(num, dtype=jnp.int32) + client) % num_clients
    else:
        others = sample_others(key, client, num_clients, num - 1)
        ids = jnp.concatenate([client[None], others]).astype(jnp.int32)
    return Candidates(ids, jnp.zeros((num,)), jnp.full((num,), tracked, jnp.float32))


def remember(table: Candidates, received: Array, losses: Array) -> tuple[Candidates, Array]:
    """Records the losses of the models just received; a model new to the table replaces the worst candidate.

    Args:
        table: One client's candidates, C >= J.
        received: (J,) ids, distinct.
        losses: (J,) their losses on the client's data.

    Returns:
        The table with `last` and `ids` up to date (`tracked` is inf for new models), and the slots
        (J,) of the received models.
    """
    # Slots of models received in this round, which stay.
    stays = (table.ids[:, None] == received[None, :]).any(axis=1)

    def insert(
        carry: tuple[Candidates, Array], new: tuple[Array, Array]
    ) -> tuple[tuple[Candidates, Array], Array]:
        table, stays = carry
        model, loss = new
        matches = table.ids == model
        is_known = matches.any()

        # Models never evaluated (inf) leave first, then the worst.
        worst = jnp.argmax(jnp.where(stays, -jnp.inf, table.tracked))
        slot = jnp.where(is_known, jnp.argmax(matches), worst)
        is_slot = jnp.arange(len(table.ids)) == slot
        table = Candidates(
            ids=jnp.where(is_slot, model, table.ids),
            last=jnp.where(is_slot, loss, table.last),
            tracked=jnp.where(is_slot & ~is_known, jnp.inf, table.tracked),
        )
        return (table, stays | is_slot), slot

    (table, _), slots = jax.lax.scan(insert, (table, stays), (received, losses))
    return table, slots


def track(table: Candidates, slots: Array, rounds: Array, beta: float | None) -> Candidates:
    """The table after a round that received the models in `slots`, whose newest losses it already has in `last`.

    Args:
        table: The client's table.
        slots: (J,) positions of the received models.
        rounds: () int32, number of rounds before this one.
        beta: Weight of the newest loss in the moving average; None: losses are summed, as if a model
            that is seen for the first time had had its loss in all rounds.
    """
    is_new = jnp.isinf(table.tracked)
    is_received = jnp.zeros_like(table.ids, bool).at[slots].set(True)
    if beta is None:  # Eq. 24
        first = table.last * (rounds + 1)
        tracked = table.tracked + table.last
    else:
        first = table.last
        old = jnp.where(is_new, table.last, table.tracked)
        tracked = (1 - beta) * old + beta * table.last
    first = jnp.where(is_received, first, jnp.inf)
    return table._replace(tracked=jnp.where(is_new, first, tracked))


def logits(table: Candidates, share: Array | float = 1.0) -> Array:
    """(C,) minus `share` x the tracked losses; -inf for models not evaluated yet."""
    return jnp.where(jnp.isinf(table.tracked), -jnp.inf, -share * table.tracked)


def heaviest(table: Candidates, num: int, scores: Array) -> Mixture:
    """A client's `num` candidates of highest score, of equal ones those of least loss, with the softmax of the scores.

    Before its first round, a client has evaluated nothing, and its own model has all the weight.

    Args:
        table: The client's candidates.
        num: Most models to mix, at most C.
        scores: (C,) logarithms of the weights, up to a constant; -inf: no weight.
    """
    is_own = jnp.arange(len(table.ids)) == 0
    is_first_round = jnp.isinf(table.tracked).all()
    scores = jnp.where(is_first_round & is_own, 0.0, scores)
    order = jnp.lexsort((table.tracked, -scores))
    slots = order[:num]
    return Mixture(table.ids[slots], jax.nn.softmax(scores[slots]))


def sample_others(key: Key, client: Array, num: int, count: int) -> Array:
    """Draws `count` distinct positions from range(num) without `client`, uniformly, in random order; O(count^2)."""
    if count == 0:
        return jnp.zeros((0,), jnp.int32)
    draw_key, order_key = jax.random.split(key)
    chosen = draw_distinct(draw_key, num - 1, count)
    chosen = jax.random.permutation(order_key, chosen)
    return chosen + (chosen >= client)


def best_candidates(
    key: Key, scores: Array, count: int, epsilon: Array | float = 0.0
) -> tuple[Array, Array]:
    """The slots with the highest scores, each replaced by a uniformly drawn slot with probability epsilon.

    Args:
        key: Breaks ties and explores.
        scores: (C,); -inf for slots that are not eligible.
        count: M, number of distinct slots to choose.
        epsilon: Probability of exploring, independently for each choice.

    Returns:
        The slots (M,) int32, and (M,) bool whether they are eligible.
    """
    lots_key, coin_key = jax.random.split(key)
    # Separate lots: winning a tie must not lower the other slots' chances of being explored.
    tie_lots, chance_lots = jax.random.uniform(lots_key, (2, *scores.shape))
    explores = jax.random.bernoulli(coin_key, epsilon, (count,))

    def pick(scores: jax.Array, explores: Array) -> tuple[jax.Array, tuple[Array, Array]]:
        least = jnp.where(explores, -jnp.inf, scores.max())
        lots = jnp.where(explores, chance_lots, tie_lots)
        may_win = (scores >= least) & (scores > -jnp.inf)
        slot = jnp.argmax(jnp.where(may_win, lots, -1.0))
        is_eligible = scores[slot] > -jnp.inf
        return scores.at[slot].set(-jnp.inf), (slot, is_eligible)

    _, picked = jax.lax.scan(pick, jnp.asarray(scores), explores)
    return picked


def epsilon_greedy(
    key: Key, table: Candidates, client: Array, cohort: Cohort, count: int, epsilon: float
) -> Array:
    """The neighbors of one client in a round (FedeRiCo, Section 3.3).

    With probability epsilon, distinct other clients, drawn uniformly. Otherwise candidates that were
    never evaluated, then those with the lowest tracked loss, which have the highest weight; ties are
    broken at random. If too few candidates are in the cohort, random other clients fill up.

    Args:
        key: Key for this client and round.
        table: Its candidates.
        client: Its id.
        cohort: Only clients of the cohort can be neighbors.
        count: M.
        epsilon: Probability of exploring.

    Returns:
        (M,) int32 client ids, distinct and without `client`.
    """
    if count == 0:
        return jnp.zeros((0,), jnp.int32)
    coin_key, others_key, ties_key = jax.random.split(key, 3)

    # Random others: enough of them, even if all the best are among them.
    num = cohort.ids.shape[0]
    num_others = min(2 * count, num - 1)
    others = cohort.ids[sample_others(others_key, cohort.position(client), num, num_others)]

    # The best candidates of the cohort: every model is tried once, then those of least loss.
    is_eligible = (table.ids != client) & (cohort.position(table.ids) >= 0)
    scores = jnp.where(jnp.isinf(table.tracked), jnp.inf, -table.tracked)
    scores = jnp.where(is_eligible, scores, -jnp.inf)
    slots, is_good = best_candidates(ties_key, scores, min(count, len(table.ids)))
    best = table.ids[slots]

    # The best unless it explores, then random others that are not among the best.
    explores = jax.random.bernoulli(coin_key, epsilon)
    is_good = is_good & ~explores
    is_repeated = ((others[:, None] == best[None, :]) & is_good[None, :]).any(axis=1)
    comes_later = jnp.concatenate([~is_good, is_repeated])
    order = jnp.argsort(comes_later, stable=True)
    return jnp.concatenate([best, others])[order[:count]].astype(jnp.int32)
